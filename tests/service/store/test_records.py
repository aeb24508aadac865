"""Records of the store: newest gaps and captures one by one and all counted, kernels that are still named, versions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from service.log_batches import export_batch

from ncclscope_service.store.records import GAPS_KEPT, Captures, KernelReferences, Process, SourceGaps
from ncclscope_service.store.tables import Store, version_of
from ncclscope_wire.records import CaptureSeen, SourceGap


def _gap(reason: str, amount: int) -> SourceGap:
    return SourceGap(reason=reason, amount=amount, unit="bytes")


def test_beyond_the_limit_the_oldest_stay_as_a_number() -> None:
    gaps = SourceGaps()
    gaps.extend(_gap("truncated", amount) for amount in range(GAPS_KEPT))
    assert not gaps.forgotten()
    gaps.extend(_gap("gone", amount) for amount in range(3))
    assert len(gaps) == GAPS_KEPT + 3
    assert [gap.amount for gap in gaps] == [*range(3, GAPS_KEPT), 0, 1, 2]
    assert gaps.by_reason == {"truncated": GAPS_KEPT, "gone": 3}
    assert gaps.forgotten() == {"truncated": 3}


def _capture(end_ns: int) -> CaptureSeen:
    return export_batch([], captured_ns=(end_ns - 5, end_ns)).captures[0]


def test_what_was_dropped_is_counted_and_what_came_since_is_told_by_its_id() -> None:
    captures = Captures()
    for number in range(6):
        captures.append((number, _capture(10 * number)))
    before = captures.copy()
    captures.drop_before(4)
    assert [source for source, _ in captures] == [4, 5]
    assert (captures.first, captures.next_id, len(captures), captures.newest_ns) == (4, 6, 2, 50)
    assert [source for source, _ in captures.since(5)] == [5]
    assert [source for source, _ in captures.since(0)] == [4, 5]
    assert captures.since(6) == []
    assert len(before) == 6
    captures.drop_before(9)
    assert (captures.first, captures.next_id, captures.newest_ns) == (6, 6, 50)


_END = 20_000
_NAMED = st.dictionaries(st.integers(0, _END - 1), st.integers(0, 1000), min_size=1, max_size=30)


@given(st.lists(_NAMED, max_size=5), st.lists(st.integers(0, _END), max_size=4).map(sorted))
def test_the_first_kernel_is_the_first_that_a_kept_operation_names(
    noted: list[dict[int, int]], firsts: list[int]
) -> None:
    named, kernels = KernelReferences(), np.full(_END, -1, np.int64)
    for each in noted:
        new = {operation: kernel for operation, kernel in each.items() if kernels[operation] < 0}
        for operation, kernel in new.items():
            kernels[operation] = kernel
        named.record(np.array(list(new), np.int64), np.array(list(new.values()), np.int64))
    for first in firsts:
        kept = kernels[first:]
        kept = kept[kept >= 0]
        assert named.first_from(first, kernels[first:]) == (kept.min() if len(kept) else None)


def test_nothing_is_named_without_kernels() -> None:
    assert KernelReferences().first_from(0, np.empty(0, np.int64)) is None


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
