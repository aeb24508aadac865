"""Whose version a line prints is not always said: then only what is certain counts."""

from __future__ import annotations

from ncclscope_service.store.records import Process
from ncclscope_service.store.tables import Store, version_of


def _store() -> Store:
    """Two processes of one job, in logs 0 and 1."""
    store = Store()
    for pid in (10, 11):
        store.process_source[len(store.processes)] = len(store.processes)
        store.processes.append(Process(host="node1", pid=pid))
        store.process_job.append("j")
    return store


def _saw(store: Store, source: int, *versions: str) -> None:
    store.source_versions[source].update(versions)
    store.job_versions["j"].update(versions)


def test_what_a_process_printed_itself_counts_before_all() -> None:
    store = _store()
    _saw(store, 0, "2.18.3", "2.21.5")
    store.process_version[0] = "2.28.3"
    assert version_of(store, 0) == "2.28.3"


def test_the_only_version_in_its_log_is_that_of_a_process() -> None:
    store = _store()
    _saw(store, 0, "2.18.3")
    _saw(store, 1, "2.21.5")
    assert (version_of(store, 0), version_of(store, 1)) == ("2.18.3", "2.21.5")


def test_a_process_whose_log_is_silent_has_the_only_version_of_its_job() -> None:
    store = _store()
    _saw(store, 0, "2.18.3")
    assert version_of(store, 1) == "2.18.3"


def test_two_versions_in_one_place_say_nothing() -> None:
    store = _store()
    _saw(store, 0, "2.18.3", "2.21.5")
    assert version_of(store, 0) is None
    assert version_of(store, 1) is None


def test_a_version_of_another_job_says_nothing() -> None:
    store = _store()
    store.job_versions["other"].add("2.18.3")
    assert version_of(store, 0) is None


def test_a_process_that_only_a_capture_showed_has_the_version_of_its_job() -> None:
    store = _store()
    del store.process_source[1]
    _saw(store, 0, "2.18.3")
    assert version_of(store, 1) == "2.18.3"


def test_asking_leaves_the_store_as_it_was() -> None:
    store = _store()
    assert version_of(store, 0) is None
    assert not store.job_versions
    assert not store.source_versions
