"""Small jobs for the tests of exact joins: what one process logs and launches, and NCCL's NVTX ranges around it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from align_samples import Call, Recorder, Sample

from ncclscope_service.store.rows import API_CALL, GROUP_END, GROUP_START
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import DATA_TYPES, NO_NUMBER, NO_TIME_NS, OPERATION_CODES

MAIN, BACKWARD = 101, 202
HASHES = {0: 0xA0A0_0000_0000_0001, 1: 0xB0B0_0000_0000_0002, 2: 0xC0C0_0000_0000_0003}


@dataclass(frozen=True, slots=True)
class Capture:
    """What one capture holds."""

    ranges: Columns
    kernels: Columns
    end_ns: int


@dataclass(slots=True)
class Program:
    """A process that is recorded with its ranges."""

    payloads: bool = True
    recorder: Recorder = field(default_factory=lambda: Recorder(counts=False))
    ranges: list[tuple[int, int, int, int, int, int, int]] = field(
        default_factory=list[tuple[int, int, int, int, int, int, int]]
    )

    def issue(self, tid: int, *calls: Call, grouped: bool | None = None) -> None:
        """One group (or one lone call)."""
        self.recorder.wait(1_000)
        first, launched = self.recorder.now_ns, len(self.recorder.kernels)
        self.recorder.issue(tid, *calls, grouped=grouped)
        end = max((at for _, at, _, _ in self.recorder.kernels[launched:]), default=self.recorder.now_ns - 9_001) + 500
        is_group = len(calls) > 1 if grouped is None else grouped
        if is_group:
            self._range(tid, GROUP_START, first - 600, first - 500)
        for at, call in enumerate(calls):
            start = first + 3_001 * at - 200
            self._range(tid, OPERATION_CODES[call.op], start, start + 1_000 if is_group else end, call)
        if is_group:
            self._range(tid, GROUP_END, first + 3_001 * len(calls), end)

    def _range(self, tid: int, kind: int, start: int, end: int, call: Call | None = None) -> None:
        told = call if self.payloads else None
        size = 0 if told is None else told.count * DATA_TYPES[told.data_type].size_bytes
        communicator = 0 if told is None else HASHES[told.member]
        self.ranges.append((0, tid, kind, communicator, NO_NUMBER if told is None else size, start, end))

    def rows(self, *, stamps: bool = False) -> Sample:
        """Lines without groups, kernels, truth."""
        return self.recorder.sample(stamps=stamps, groups=False)

    def captured(self, sample: Sample, *spans: tuple[int, int]) -> list[Capture]:
        """What captures of these spans hold, as an export has it: launch calls and ranges only if they began inside."""
        ranges = np.array(self.ranges, API_CALL)
        captures: list[Capture] = []
        for begin, end in spans:
            kernels = sample.kernels[(sample.kernels["start_ns"] >= begin) & (sample.kernels["end_ns"] <= end)]
            is_orphan = kernels["launch_start_ns"] < begin
            kernels["launch_start_ns"][is_orphan], kernels["launch_tid"][is_orphan] = NO_TIME_NS, NO_NUMBER
            own = ranges[(ranges["start_ns"] >= begin) & (ranges["start_ns"] <= end)]
            own["end_ns"][own["end_ns"] > end] = NO_TIME_NS
            captures.append(Capture(own, kernels, end))
        return captures

    @property
    def span(self) -> tuple[int, int]:
        """From before the first call until all kernels ended."""
        return self.ranges[0][5] - 1_000, 2**62


def training(iterations: int, *, payloads: bool = True, seed: int = 3) -> Program:
    """Groups, a group over two communicators, lone calls, and a second thread."""
    rng = np.random.default_rng(seed)
    program = Program(payloads=payloads)
    reduce, gather = Call("AllReduce", 0, 0xA0), Call("AllGather", 2, 0xC0, count=77)
    for _ in range(iterations):
        program.issue(MAIN, Call("Send", 1, 0xB0, peer=1), Call("Recv", 1, 0xB0, peer=1))
        for layer in range(4):
            program.recorder.wait(int(rng.integers(40_000, 90_000)))
            program.issue(MAIN, Call("AllReduce", 0, 0xA0, count=1024 + layer))
            program.issue(BACKWARD, reduce)
        program.issue(MAIN, gather)
        program.issue(MAIN, Call("AllReduce", 0, 0xA0, count=5), gather, Call("AllReduce", 0, 0xA0, count=6))
        program.issue(MAIN, Call("Broadcast", 2, 0xC0))
    return program
