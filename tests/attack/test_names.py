"""A user who may write a log names things without end: communicators, processes, hosts, shapes of calls, texts."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from service.log_batches import BASE_NS, Line, init, log_batch

from ncclscope_service.intake import limits
from ncclscope_service.intake.limits import TOO_MANY_NAMES, Named
from ncclscope_service.pipeline import Pipeline
from ncclscope_wire.batch import Batch

_IDLE_BYTES = 2 * 1024
_SECOND_NS = 1_000_000_000


def _service() -> Pipeline:
    pipeline = Pipeline()
    pipeline.limit_names()
    return pipeline


def _named(begin: int, amount: int, *, calls: int = 0, nranks: int = 2, pid: int = 10) -> Batch:
    """A batch that names so many new communicators, and calls each a few times."""
    events, lines = [], []
    at = begin * (1 + calls)
    for number in range(begin, begin + amount):
        pointer = 0x1000 + 16 * number
        events.append(init(pointer=pointer, line=at, comm_id=0x7000 + number, nranks=nranks, pid=pid))
        own = range(at + 1, at + 1 + calls)
        lines += [Line(communicator=pointer, line=line, nranks=nranks, logged_at_ns=BASE_NS + line) for line in own]
        at += 1 + calls
    return log_batch(lines, events=events, begin=100 * begin, pid=pid)


def _feed(pipeline: Pipeline, *batches: Batch, agent: str = "evil", job: str = "job") -> None:
    for batch in batches:
        assert pipeline.ingest_batch(batch, agent=agent, session="s", job=job)
    pipeline.process_backlog(BASE_NS + _SECOND_NS)
    assert not pipeline.errors.counts


def _told(pipeline: Pipeline) -> dict[str, int]:
    """Names over the limits, by what the gaps say."""
    gaps = [gap for of in pipeline.store.gaps.values() for gap in of if gap.reason == TOO_MANY_NAMES]
    assert sum(gap.amount for gap in gaps) == pipeline.store.skipped[TOO_MANY_NAMES]
    found = dict[str, int]()
    for gap in gaps:
        kind = gap.detail.removeprefix("more ").partition(" than ")[0]
        found[kind] = found.get(kind, 0) + gap.amount
    return found


def test_a_communicator_that_never_did_anything_takes_two_kilobytes() -> None:
    pipeline = _service()
    _feed(pipeline, _named(0, 1000))
    gc.collect()
    tracemalloc.start()
    try:
        _feed(pipeline, *(_named(begin, 500) for begin in range(1000, 5000, 500)))
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(pipeline.store.communicators) == 5000
    assert taken / 4000 <= _IDLE_BYTES


def test_communicators_over_the_limit_of_an_agent_are_one_whose_operations_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(limits.MOST_OF_AGENT, Named.COMMUNICATORS, 100)
    pipeline = _service()
    _feed(pipeline, *(_named(begin, 50, calls=3) for begin in range(0, 300, 50)))
    known = pipeline.store
    assert [each.comm_id for each in known.communicators].count("other") == 1
    assert len(known.communicators) == 101
    assert len(known.operations) == 900
    assert known.series.rows["operations"].sum() == 900
    assert _told(pipeline) == {Named.COMMUNICATORS: 200}


@pytest.mark.parametrize("calls", [0, 2])
def test_members_over_the_limit_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    monkeypatch.setitem(limits.MOST_OF_AGENT, Named.MEMBERS, 100)
    pipeline = _service()
    _feed(pipeline, *(_named(begin, 50, calls=calls) for begin in range(0, 300, 50)))
    assert len(pipeline.store.members) == 101
    assert len(pipeline.store.operations) == 300 * calls
    assert set(_told(pipeline)) == {Named.MEMBERS}
    assert _told(pipeline)[Named.MEMBERS] >= 200


def test_the_size_that_a_communicator_says_it_has_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.MOST_OF_AGENT, Named.RANKS, 1_000_000)
    pipeline = _service()
    _feed(pipeline, _named(0, 30, nranks=100_000))
    assert len(pipeline.store.communicators) == 11
    assert _told(pipeline) == {Named.RANKS: 20}


def test_processes_and_hosts_over_the_limit_are_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.MOST_OF_AGENT, Named.PROCESSES, 20)
    monkeypatch.setitem(limits.MOST_OF_AGENT, Named.HOSTS, 10)
    pipeline = _service()
    batches = [log_batch([Line(line=1)], host=f"h{number % 15}", pid=number) for number in range(60)]
    _feed(pipeline, *batches)
    processes = pipeline.store.processes
    assert len(processes) == 21
    assert len({process.host for process in processes}) == 11
    assert len(pipeline.store.operations) == 60
    assert set(_told(pipeline)) == {Named.PROCESSES, Named.HOSTS}


def test_shapes_over_the_limit_are_one_shape_of_a_call_without_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.MOST_OF_AGENT, Named.TEMPLATES, 10)
    pipeline = _service()
    _feed(pipeline, log_batch([Line(line=number, count=number) for number in range(1, 51)]))
    assert len(pipeline.store.operation_templates) == 11
    assert len(pipeline.store.operations) == 50
    assert np.count_nonzero(pipeline.store.operations.rows["message_bytes"] > 0) == 10
    assert _told(pipeline) == {Named.TEMPLATES: 40}


def test_texts_over_the_limit_are_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.MOST_OF_AGENT, Named.TEXTS, 10_000)
    pipeline = _service()
    texts = tuple(f"{number:>900}" for number in range(40))
    batch = log_batch([Line(line=1)])
    _feed(pipeline, replace(batch, strings=(*batch.strings, *texts)))
    assert sum(map(len, pipeline.store.strings.values)) < 10_000
    assert set(_told(pipeline)) == {Named.TEXTS}


def test_an_agent_over_its_limits_takes_nothing_from_another_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for what in (Named.COMMUNICATORS, Named.MEMBERS):
        monkeypatch.setitem(limits.MOST_OF_AGENT, what, 50)
    pipeline = _service()
    _feed(pipeline, *(_named(begin, 50, calls=1) for begin in range(0, 300, 50)))
    _feed(pipeline, _named(1000, 40, calls=1, pid=20), agent="honest")
    known = pipeline.store
    honest = [member for member in known.members if known.processes[member.process].pid == 20]
    assert len(honest) == 40
    assert all(known.communicators[member.communicator].comm_id != "other" for member in honest)


def test_the_limit_of_a_job_holds_for_all_its_agents_and_not_for_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.MOST_OF_JOB, Named.COMMUNICATORS, 60)
    pipeline = _service()
    _feed(pipeline, _named(0, 50))
    _feed(pipeline, _named(100, 50, pid=20), agent="second")
    _feed(pipeline, _named(200, 50, pid=30), agent="third", job="another")
    jobs = [each.job for each in pipeline.store.communicators if each.comm_id != "other"]
    assert (jobs.count("job"), jobs.count("another")) == (60, 50)


def test_a_restart_gives_no_new_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.MOST_OF_AGENT, Named.COMMUNICATORS, 100)
    pipeline = _service()
    _feed(pipeline, _named(0, 90))
    pipeline = Pipeline.restore(pipeline.snapshot())
    _feed(pipeline, _named(90, 90))
    assert len(pipeline.store.communicators) == 101


def test_offline_all_names_are_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.MOST_OF_AGENT, Named.COMMUNICATORS, 100)
    pipeline = Pipeline()
    _feed(pipeline, _named(0, 200))
    assert len(pipeline.store.communicators) == 200
