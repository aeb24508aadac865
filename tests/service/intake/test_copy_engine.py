"""Collectives that copy engines carry out have no kernel, on any rank: rank 0's TUNING line says so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from service.log_batches import BASE_NS, PERIOD_NS, Kernel, Line, Reading, Tuning, export_batch, init, log_batch

from ncclscope_service.align.stage import Alignment
from ncclscope_service.intake.tuning import TuningJoin, speaks_of_copies
from ncclscope_service.store import rows
from ncclscope_service.store.rows import Match
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

COPIED = (5, 17, 18)
AMOUNT = 40
_NAME = "ncclDevKernel_AllGather_RING_LL"


class _Job:
    """Two ranks of one communicator that gather, sometimes by copy engine."""

    def __init__(self, *, stamps: bool = True, copied: Sequence[int] = COPIED, captured: bool = True) -> None:
        self.reading = Reading()
        self.alignment = Alignment(self.reading.store, lambda _: "2.29.2")
        self.tuning = TuningJoin(self.reading.store)
        self.stamps, self.copied, self.captured = stamps, copied, captured

    def feed(self, rank: int, *, count_of_fifth: int = 1024) -> None:
        begins = [BASE_NS + k * PERIOD_NS for k in range(AMOUNT)]
        lines = [
            Line(op="AllGather", line=2 + 2 * k, logged_at_ns=at if self.stamps else NO_TIME_NS,
                 count=count_of_fifth if k == 5 else 1024)
            for k, at in enumerate(begins)
        ]  # fmt: skip
        pid = 10 + rank
        operations = self.reading.feed(log_batch(lines, pid=pid, events=[init(line=1, rank=rank, pid=pid, comm_id=7)]))
        told = [Tuning(op="AllGather", line=3 + 2 * k, bytes=4096, algorithm=NO_NUMBER, protocol=NO_NUMBER,
                       channels=NO_NUMBER) for k in self.copied] if rank == 0 else []  # fmt: skip
        self.tuning.ingest_lines(operations, self._columns(pid, told))
        self.alignment.ingest_copied(self.tuning.drain_copied())
        self.alignment.ingest_operations(operations)
        kernels = [
            Kernel(launch_ns=at + 5_000, start_ns=at + 20_000, end_ns=at + 90_000, correlation_id=k + 1, name=_NAME)
            for k, at in enumerate(begins)
            if k not in COPIED
        ]
        if not self.captured:
            return
        batch = export_batch(kernels, pid=pid, captured_ns=(BASE_NS - PERIOD_NS, BASE_NS + (AMOUNT + 1) * PERIOD_NS))
        self.reading.feed(batch)
        ids = self.reading.store.kernels.next_id
        self.alignment.ingest_kernels(np.arange(ids - len(kernels), ids))
        self.alignment.ingest_capture(batch.captures[0], {pid: self.reading.intake.process("j", "node1", pid, 0)})

    def _columns(self, pid: int, tunings: Sequence[Tuning]) -> Columns:
        process = self.reading.intake.process("j", "node1", pid, 0)
        columns = np.zeros(len(tunings), rows.TUNING)
        for index, each in enumerate(tunings):
            columns[index] = (
                process, each.tid, each.line, OPERATION_CODES["AllGather"], each.algorithm, each.protocol,
                each.channels, each.bytes, np.nan,
            )  # fmt: skip
        return columns

    def outcome(self) -> tuple[list[int], list[int], Columns]:
        """Numbers of rank 0's and of rank 1's operations without a kernel of their own, and all rows."""
        self.alignment.align_ready(final=True)
        found = self.reading.store.operations.rows.copy()
        idle = np.flatnonzero(found["match"] == Match.NO_KERNEL)
        return idle[idle < AMOUNT].tolist(), (idle[idle >= AMOUNT] - AMOUNT).tolist(), found


def test_a_copied_collective_has_no_kernel_on_any_rank() -> None:
    job = _Job()
    job.feed(0)
    job.feed(1)
    first, second, found = job.outcome()
    assert first == second == list(COPIED)
    others = [k for k in range(AMOUNT) if k not in COPIED]
    kernels = found["kernel"]
    assert kernels[others].tolist() == list(range(len(others)))
    assert kernels[[AMOUNT + k for k in others]].tolist() == list(range(len(others), 2 * len(others)))
    assert found["channels"][list(COPIED)].tolist() == [0, 0, 0]


def test_the_rank_that_prints_nothing_may_come_first() -> None:
    job = _Job()
    job.feed(1)
    job.feed(0)
    first, second, _ = job.outcome()
    assert first == second == list(COPIED)


def test_without_a_line_nothing_is_said_of_copies() -> None:
    job = _Job(copied=())
    job.feed(0)
    job.feed(1)
    first, second, found = job.outcome()
    assert first == second == []
    assert np.count_nonzero(found["match"] == Match.UNMATCHED) == 2 * len(COPIED)


def test_a_collective_of_another_size_is_not_taken_for_the_same() -> None:
    job = _Job()
    job.feed(0)
    job.feed(1, count_of_fifth=77)
    first, second, _ = job.outcome()
    assert first == list(COPIED)
    assert second == [17, 18]


def test_copies_need_no_capture() -> None:
    job = _Job(captured=False)
    job.feed(0)
    job.feed(1)
    first, second, found = job.outcome()
    assert first == second == list(COPIED)
    assert np.count_nonzero(found["match"] == Match.NOT_COVERED) == 2 * (AMOUNT - len(COPIED))


def test_only_lines_without_algorithm_channels_and_estimate_speak_of_copies() -> None:
    lines = np.zeros(4, rows.TUNING)
    lines["algorithm"] = lines["protocol"] = lines["channels"] = NO_NUMBER
    lines["expected_us"] = np.nan
    lines["algorithm"][1], lines["channels"][2], lines["expected_us"][3] = 1, 16, 12.5
    assert speaks_of_copies(lines).tolist() == [True, False, False, False]
