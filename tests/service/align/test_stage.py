"""Matches of every process's aligner are written to the operations and kernels of the store."""

from __future__ import annotations

from collections import Counter

import numpy as np
from service.log_batches import BASE_NS, PERIOD_NS, Kernel, Line, Reading, export_batch, init, log_batch, rank_batches

from ncclscope_service.align.stage import Alignment
from ncclscope_service.columns.table import Ids
from ncclscope_service.store.rows import Match
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS


class _Service:
    def __init__(self) -> None:
        self.reading = Reading()
        self.store = self.reading.store
        self.asked: Counter[int] = Counter()
        self.alignment = Alignment(self.store, self._version_of)

    def _version_of(self, process: int) -> str:
        self.asked[process] += 1
        return "2.21.5"

    def feed(self, *batches: Batch) -> None:
        for batch in batches:
            operations = self.reading.feed(batch)
            self.alignment.ingest_operations(operations)
            if len(batch.kernels):
                amount = len(batch.kernels)
                self.alignment.ingest_kernels(
                    np.arange(self.store.kernels.next_id - amount, self.store.kernels.next_id)
                )
            for capture in batch.captures:
                pids = {pid: self.reading.intake.process("j", capture.host, pid, 0) for pid in capture.pids}
                self.alignment.ingest_capture(capture, pids)

    def operations(self, ids: Ids | None = None) -> Columns:
        return self.store.operations.rows.copy() if ids is None else self.store.operations.take(ids)


def test_operations_get_the_times_of_their_kernels_and_kernels_their_launch() -> None:
    service = _Service()
    service.feed(*rank_batches(0, range(40)))
    decided = service.alignment.align_ready(final=True)
    assert sorted(decided.tolist()) == list(range(40))
    found, kernels = service.operations(), service.store.kernels.rows
    assert (found["match"] == Match.MATCHED).all()
    assert found["kernel"].tolist() == list(range(40))
    assert found["start_ns"].tolist() == kernels["start_ns"].tolist()
    assert found["end_ns"].tolist() == kernels["end_ns"].tolist()
    assert found["launch"].tolist() == kernels["launch"].tolist()
    assert len(set(found["launch"].tolist())) == 40
    assert (kernels["replay"] == 0).all()
    assert (found["confidence"] > 0.5).all()


def test_operations_of_one_group_share_a_kernel_and_a_launch() -> None:
    service = _Service()
    lines = [Line(line=2 + index, op_count=index // 2, logged_at_ns=BASE_NS + 5_000 * index) for index in range(80)]
    kernels = [
        Kernel(launch_ns=BASE_NS + 10_000 * k + 7_000, start_ns=BASE_NS + 10_000 * k + 8_000,
               end_ns=BASE_NS + 10_000 * k + 9_000, correlation_id=k + 1)
        for k in range(40)
    ]  # fmt: skip
    captured = (BASE_NS - PERIOD_NS, BASE_NS + PERIOD_NS)
    service.feed(log_batch(lines, events=[init(line=1, comm_id=1)]), export_batch(kernels, captured_ns=captured))
    service.alignment.align_ready(final=True)
    found = service.operations()
    assert found["kernel"].tolist() == [index // 2 for index in range(80)]
    assert found["launch"][0::2].tolist() == found["launch"][1::2].tolist()


def test_processes_are_aligned_each_by_itself_and_launches_are_never_shared() -> None:
    service = _Service()
    for rank in (0, 1):
        service.feed(*rank_batches(rank, range(40), pid=10 + rank, host="node1"))
    service.alignment.align_ready(final=True)
    found = service.operations()
    assert (found["match"] == Match.MATCHED).all()
    assert len(set(found["launch"].tolist())) == 80
    kernels = service.store.kernels.take(found["kernel"])
    assert kernels["process"].tolist() == service.store.templates_of(found)["process"].tolist()


def test_a_process_is_asked_for_its_version_once_and_only_when_it_is_captured() -> None:
    service = _Service()
    log, export = rank_batches(0, range(10))
    service.feed(log)
    assert service.asked == {}
    service.feed(export, *rank_batches(0, range(10, 20)))
    service.alignment.align_ready()
    assert service.asked == {0: 1}


def test_what_was_logged_before_the_first_capture_waits_for_it() -> None:
    service = _Service()
    log, export = rank_batches(0, range(40))
    service.feed(log)
    assert service.alignment.align_ready().tolist() == []
    service.feed(export)
    service.alignment.align_ready(final=True)
    assert (service.operations()["match"] == Match.MATCHED).all()


def test_operations_of_a_process_that_is_never_captured_are_not_covered() -> None:
    service = _Service()
    log, _ = rank_batches(0, range(5))
    alone = log_batch([Line(line=1, nranks=1)], pid=11)
    service.feed(log, alone)
    assert sorted(service.alignment.align_ready(final=True).tolist()) == list(range(6))
    found = service.operations()
    assert found["match"].tolist() == [*[Match.NOT_COVERED] * 5, Match.NO_KERNEL]
    assert (found["kernel"] == NO_NUMBER).all()
    assert (found["start_ns"] == NO_TIME_NS).all()


def test_only_operations_that_are_old_enough_are_given_up() -> None:
    service = _Service()
    service.feed(rank_batches(0, range(5))[0], rank_batches(0, range(5, 9))[0])
    assert service.alignment.give_up(0, 3).tolist() == [0, 1, 2]
    assert service.alignment.give_up(0, 3).tolist() == []
    service.feed(rank_batches(0, range(9))[1])
    assert sorted(service.alignment.align_ready(final=True).tolist()) == list(range(3, 9))
    assert service.operations()["match"][:3].tolist() == [Match.NOT_COVERED] * 3


def test_within_a_capture_a_missing_kernel_is_unmatched_and_outside_not_covered() -> None:
    service = _Service()
    log, export = rank_batches(0, range(60))
    kept = np.flatnonzero(~np.isin(np.arange(60), [20, 41]))
    lines = log.operations.copy()
    service.feed(log, _without_kernels(export, kept[kept < 50], until_ns=int(lines["logged_at_ns"][50])))
    service.alignment.align_ready(final=True)
    found = service.operations()["match"]
    assert np.flatnonzero(found == Match.UNMATCHED).tolist() == [20, 41]
    assert np.flatnonzero(found == Match.NOT_COVERED).tolist() == list(range(50, 60))


def _without_kernels(export: Batch, kept: Ids, *, until_ns: int) -> Batch:
    rows = export.kernels[kept]
    kernels = [
        Kernel(launch_ns=launch, start_ns=start, end_ns=end, correlation_id=correlation)
        for launch, start, end, correlation in rows[
            ["launch_start_ns", "start_ns", "end_ns", "correlation_id"]
        ].tolist()
    ]
    (capture,) = export.captures
    return export_batch(kernels, captured_ns=(capture.start_ns, until_ns - 1))


def test_a_kernel_that_no_line_explains_keeps_no_launch() -> None:
    service = _Service()
    log, export = rank_batches(0, range(40))
    service.feed(log_batch([], events=log.communicators), export)
    assert service.alignment.align_ready(final=True).tolist() == []
    assert (service.store.kernels.rows["launch"] == NO_NUMBER).all()


def test_nothing_new_decides_nothing() -> None:
    service = _Service()
    service.feed(*rank_batches(0, range(40)))
    service.alignment.align_ready(final=True)
    before = service.operations()
    assert service.alignment.align_ready().tolist() == []
    assert service.alignment.align_ready(final=True).tolist() == []
    assert service.operations().tobytes() == before.tobytes()
