"""Small jobs for the aligner's tests: what one process logs, what it launches, and which belongs to which."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.process_aligner import ProcessAligner
from ncclscope_service.align.records import blank_kernels, blank_operations
from ncclscope_service.intake.call_groups import ALONE
from ncclscope_service.nccl.launch_rules import KernelClass
from ncclscope_service.store.rows import Match
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

FLOAT32, BFLOAT16 = 7, 9
_CLASS = {"Send": KernelClass.SEND_RECV, "Recv": KernelClass.SEND_RECV, "AlltoAll": KernelClass.SEND_RECV}
_TYPED = {"AllReduce", "Reduce", "ReduceScatter"}


@dataclass(slots=True)
class Sample:
    """Rows as the aligner takes them, and the truth: kernel id of each operation id, NO_NUMBER where none."""

    operations: Columns
    kernels: Columns
    truth: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Call:
    """One operation as a program issues it."""

    op: str
    member: int
    stream: int
    peer: int = 0
    count: int = 1024
    data_type: int = FLOAT32
    one_rank: bool = False


@dataclass(slots=True)
class Recorder:
    """Turns calls into log rows and kernels by NCCL's rules: one launch per group and communicator."""

    counts: bool
    """Whether opCount moves with every launch."""
    empty_launches: bool = False
    stream_ids: dict[int, int] = field(default_factory=dict[int, int])
    calls: list[tuple[int, Call, int, int, int]] = field(default_factory=list[tuple[int, Call, int, int, int]])
    kernels: list[tuple[int, int, Call, int]] = field(default_factory=list[tuple[int, int, Call, int]])
    truth: list[int] = field(default_factory=list[int])
    _op_counts: dict[int, int] = field(default_factory=dict[int, int])
    _groups: int = 0
    now_ns: int = 1_700_000_000_000_000_123

    def issue(self, tid: int, *calls: Call, grouped: bool | None = None, plans: int = 1) -> None:
        """One group (or one lone call): logs all, then launches once per communicator, in so many kernels each."""
        group = self._groups if (len(calls) > 1 if grouped is None else grouped) else NO_NUMBER
        self._groups += 1
        first = len(self.truth)
        for call in calls:
            self.calls.append((tid, call, self._op_counts.get(call.member, 0), group, self.now_ns))
            self.truth.append(NO_NUMBER)
            self.now_ns += 3_001
        self.now_ns += 9_001
        launched: dict[int, int] = {}
        for offset, call in enumerate(calls):
            if call.one_rank or (call.count == 0 and call.op not in _CLASS and not self.empty_launches):
                continue
            if call.member not in launched:
                launched[call.member] = len(self.kernels)
                for _ in range(plans):
                    self.kernels.append((tid, self.now_ns, call, self._stream_id(call.stream)))
                    self.now_ns += 7_003
                if self.counts:
                    self._op_counts[call.member] = self._op_counts.get(call.member, 0) + plans
            self.truth[first + offset] = launched[call.member]

    def wait(self, duration_ns: int) -> None:
        """The thread does something else."""
        self.now_ns += duration_ns

    def _stream_id(self, stream: int) -> int:
        return self.stream_ids.setdefault(stream, 13 + 4 * len(self.stream_ids))

    def sample(self, *, stamps: bool, groups: bool, launch_times: bool = True) -> Sample:
        """The rows, with what the log and the export are made to tell."""
        operations = blank_operations(len(self.calls))
        for index, (tid, call, op_count, group, at_ns) in enumerate(self.calls):
            row = operations[index]
            row["id"], row["tid"], row["stream"], row["member"] = index, tid, call.stream, call.member
            row["nranks"], row["op"], row["data_type"] = (
                1 if call.one_rank else 4,
                OPERATION_CODES[call.op],
                call.data_type,
            )
            row["count"], row["root"], row["op_count"] = call.count, call.peer, op_count
            row["one_rank"] = call.one_rank
            row["logged_at_ns"] = at_ns // 1000 * 1000 if stamps else NO_TIME_NS
            row["group"] = NO_NUMBER if not groups else ALONE if group == NO_NUMBER else group
        kernels = blank_kernels(len(self.kernels))
        ends: dict[int, int] = {}
        for index, (tid, at_ns, call, stream_id) in enumerate(self.kernels):
            row = kernels[index]
            start = max(at_ns + 4_000, ends.get(stream_id, 0) + 1_000)
            ends[stream_id] = start + 20_000
            row["id"], row["correlation_id"], row["stream_id"] = index, 1000 + 3 * index, stream_id
            row["launch_start_ns"] = at_ns if launch_times else NO_TIME_NS
            row["start_ns"], row["end_ns"], row["launch_tid"] = start, start + 20_000, tid
            row["kernel_class"] = _CLASS.get(
                call.op, KernelClass(OPERATION_CODES[call.op]) if call.op not in _CLASS else 0
            )
            row["data_type"] = call.data_type if call.op in _TYPED else NO_NUMBER
        return Sample(operations, kernels, np.array(self.truth, dtype=np.int64))


def training(
    rng: np.random.Generator,
    iterations: int,
    *,
    counts: bool,
    threads: bool = True,
    point_to_point: bool = True,
    empty_launches: bool = False,
) -> Recorder:
    """TP, PP and DP of one rank: forward on one thread, backward on another, three streams, odd operations between."""
    recorder = Recorder(counts=counts, empty_launches=empty_launches)
    forward, backward = 101, 202 if threads else 101
    tensor = Call("AllReduce", 0, 0xA0, data_type=BFLOAT16)
    send, receive = Call("Send", 1, 0xB0, peer=1), Call("Recv", 1, 0xB0, peer=1)
    recorder.issue(forward, Call("AllReduce", 4, 0xA0))
    for _ in range(iterations):
        recorder.issue(forward, Call("AllReduce", 3, 0xA0, one_rank=True))
        for micro_batch in range(4):
            if point_to_point:
                recorder.issue(forward, send) if micro_batch == 0 else recorder.issue(forward, send, receive)
            for _layer in range(3):
                recorder.wait(int(rng.integers(40_000, 400_000)))
                recorder.issue(forward, tensor)
            for _layer in range(3):
                recorder.wait(int(rng.integers(40_000, 400_000)))
                recorder.issue(backward, tensor)
                if rng.random() < 0.3:
                    recorder.issue(backward, Call("ReduceScatter", 2, 0xC0))
        if point_to_point:
            recorder.issue(forward, receive)
        recorder.issue(forward, Call("AllGather", 2, 0xC0), Call("AllGather", 2, 0xC0, count=77))
        recorder.issue(forward, Call("Broadcast", 2, 0xC0))
        recorder.issue(forward, Call("AllReduce", 2, 0xC0, count=0))
        recorder.wait(int(rng.integers(200_000, 900_000)))
    return recorder


def lose(sample: Sample, rng: np.random.Generator, *, lines: float = 0.0, kernels: float = 0.0) -> Sample:
    """Drops that share of rows at random; the truth keeps pairs of which both sides are left."""
    keep_line = rng.random(len(sample.operations)) >= lines
    keep_kernel = rng.random(len(sample.kernels)) >= kernels
    truth = sample.truth.copy()
    truth[(truth >= 0) & ~keep_kernel[np.maximum(truth, 0)]] = NO_NUMBER
    return Sample(sample.operations[keep_line], sample.kernels[keep_kernel], truth)


def align_whole(version: str | None, sample: Sample) -> Columns:
    """All at once, sorted by operation."""
    aligner = ProcessAligner(version)
    aligner.ingest_operations(sample.operations)
    aligner.ingest_kernels(sample.kernels)
    return np.sort(aligner.align_ready(final=True), order="operation")


def feed_portions(aligner: ProcessAligner, sample: Sample, rng: np.random.Generator, most_rows: int) -> Generator[None]:
    """Feeds rows in the order of the sample, operations or kernels by chance; yields after each portion."""
    operations, kernels = sample.operations, sample.kernels
    while len(operations) or len(kernels):
        amount = int(rng.integers(1, most_rows))
        if rng.random() < 0.5:
            aligner.ingest_operations(operations[:amount])
            operations = operations[amount:]
        else:
            aligner.ingest_kernels(kernels[:amount])
            kernels = kernels[amount:]
        yield


def f1(sample: Sample, matches: Columns) -> float:
    """Of exact pairs (operation, kernel)."""
    found = matches["kernel"] != NO_NUMBER
    right = np.count_nonzero(matches["kernel"][found] == sample.truth[matches["operation"][found]])
    wanted = np.count_nonzero(sample.truth[sample.operations["id"]] != NO_NUMBER)
    return 2 * right / (np.count_nonzero(found) + wanted) if wanted else 1.0


def no_kernel_ids(matches: Columns) -> set[int]:
    """Operations that launch none."""
    return set(matches["operation"][matches["match"] == Match.NO_KERNEL].tolist())
