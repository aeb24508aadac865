"""python -m benchmarks.grouping [--ranks 64,512,4096]: what learning who belongs together costs as ranks grow.

A job of so many ranks (TP 8, PP 4, DP the rest) starts: its communicators come one after the other within ten seconds.
Then it trains, at 1,000 operations/s a host, or as many as make 30,000/s in all. There are no captures: this is about
what is told anew now and then: periods, ranks, limits, what communicators are for. The service ticks twice a second.
The first table says how much CPU time that took in each phase, and the longest stretch of it in one tick; the second
what each part took of it.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import Final, TypeVar

import numpy as np

from ncclscope_service import parallelism, ranks
from ncclscope_service.contents import Contents
from ncclscope_service.detection import Detection
from ncclscope_service.limits import Limits
from ncclscope_service.patterns import Patterns
from ncclscope_service.periods import Periods
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.rows import IterationBy
from ncclscope_service.series import SeriesBook
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch, Columns, no_rows
from ncclscope_wire.records import CommunicatorEvent, CommunicatorEventKind, Source, SourceKind
from ncclscope_wire.terms import OPERATION_CODES

_Result = TypeVar("_Result")

ORIGIN_NS: Final = 1_750_000_000_000_000_123
_TICK_NS: Final = 500_000_000
_START_TICKS: Final = 20
_PER_HOST: Final = 8
_STAGES: Final = 4
_HOST_RATE: Final = 1_000
_MOST: Final = 64_000
_MOST_OF_MANY: Final = 30_000
_MANY: Final = 1_024
_SECONDS: Final = 20
_TIMED: Final[dict[str, tuple[tuple[type | ModuleType, str], ...]]] = {
    "periods": ((Periods, "learn"), (Periods, "go_on")),
    "ranks": ((ranks, "assign_ranks"),),
    "parallelism": ((Contents, "table"), (Patterns, "of"), (parallelism, "assign_parallelism")),
    "limits": ((Limits, "refresh"), (SeriesBook, "set_limits")),
    "detection": ((Detection, "regroup"),),
}
"""What is told anew, by what each part calls."""
_KINDS: Final = ("WORLD", "TP", "PP", "DP")


@dataclass(slots=True)
class _Clock:
    """CPU seconds by part, in each tick."""

    ticks: list[defaultdict[str, float]] = field(default_factory=list[defaultdict[str, float]])

    def watch(self) -> None:
        for part, places in _TIMED.items():
            for owner, name in places:
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, call: Callable[..., _Result]) -> Callable[..., _Result]:
        def timed(*given: object, **named: object) -> _Result:
            began = time.process_time()
            try:
                return call(*given, **named)
            finally:
                if self.ticks:
                    self.ticks[-1][part] += time.process_time() - began

        return timed

    def tick(self) -> None:
        self.ticks.append(defaultdict(float))

    def seconds(self, part: str = "") -> float:
        return sum(each[part] if part else sum(each.values()) for each in self.ticks)

    def longest(self) -> float:
        return max(sum(each.values()) for each in self.ticks)


class _Rank:
    """One process: its dictionaries, and its log as it goes on."""

    def __init__(self, number: int, job_ranks: int, *, layers: int, microbatches: int) -> None:
        self.number = number
        self.host, self.pid = f"node{number // _PER_HOST:04d}", 1000 + number % _PER_HOST
        self.source = Source(kind=SourceKind.NCCL_LOG, name=f"{number}.log", key=f"{number}")
        per_stage = job_ranks // _STAGES
        stage, within = divmod(number, per_stage)
        self.groups = {
            "WORLD": (0, job_ranks, number),
            "TP": (number // _PER_HOST, _PER_HOST, number % _PER_HOST),
            "PP": (within, _STAGES, stage),
            "DP": (stage * _PER_HOST + within % _PER_HOST, per_stage // _PER_HOST, within // _PER_HOST),
        }
        self.templates, self.step = _program(number, self.groups, layers, microbatches)
        self._line = 0
        self._bytes = 0
        self._at = 0

    def init(self, kind: str) -> Batch:
        group, size, rank = self.groups[kind]
        self._line += 1
        event = CommunicatorEvent(
            kind=CommunicatorEventKind.INIT_COMPLETE, host=self.host, pid=self.pid, tid=self.pid, line=self._line,
            pointer=0xA0 + _KINDS.index(kind), rank=rank, nranks=size, cuda_device=self.number % _PER_HOST,
            comm_id=(_KINDS.index(kind) + 1) << 32 | group, parent=None, split_count=None, color=None,
            bus_id=0x1000 * (1 + self.number % _PER_HOST),
        )  # fmt: skip
        if self._line > 1:
            return self._batch(communicators=(event,))
        return self._batch(
            communicators=(event,), strings=(self.host, "op"),
            threads=np.array([(0, self.pid, self.pid)], tables.THREAD), operation_templates=self.templates,
        )  # fmt: skip

    def calls(self, amount: int, begin_ns: int, end_ns: int) -> Batch:
        rows = np.zeros(amount, tables.OPERATION_ROW)
        numbers = self._at + np.arange(amount)
        rows["template"] = self.step[numbers % len(self.step)]
        rows["line"] = self._line + 1 + np.arange(amount)
        rows["logged_at_ns"] = np.linspace(begin_ns, end_ns, amount, endpoint=False).astype(np.int64)
        self._line, self._at = self._line + amount, self._at + amount
        return self._batch(operations=rows)

    def _batch(
        self, *, operations: Columns | None = None, communicators: tuple[CommunicatorEvent, ...] = (),
        strings: tuple[str, ...] = (), threads: Columns | None = None, operation_templates: Columns | None = None,
    ) -> Batch:  # fmt: skip
        begin, self._bytes = self._bytes, self._bytes + 100
        return Batch(
            source=self.source, begin=begin, end=self._bytes, end_line=self._line, strings=strings,
            communicators=communicators, threads=_rows(threads, tables.THREAD),
            operation_templates=_rows(operation_templates, tables.OPERATION_TEMPLATE),
            operations=_rows(operations, tables.OPERATION_ROW),
        )  # fmt: skip


def _rows(given: Columns | None, dtype: np.dtype[np.void]) -> Columns:
    return no_rows(dtype) if given is None else given


def _program(
    number: int, groups: dict[str, tuple[int, int, int]], layers: int, microbatches: int
) -> tuple[Columns, Columns]:
    """The templates of a rank's calls, and one step of them."""
    _, stages, stage = groups["PP"]
    made: list[tuple[str, str, int, int, int, int]] = []
    step: list[int] = []

    def call(kind: str, op: str, count: int, data_type: int, buffer: int, root: int = 0) -> None:
        made.append((kind, op, count, data_type, buffer, root))
        step.append(len(made) - 1)

    for microbatch in range(microbatches):
        if stage > 0:
            call("PP", "Recv", 1 << 20, 9, 0x9000 + microbatch, stage - 1)
        for layer in range(layers):
            call("TP", "AllGather", 1 << 18, 9, 0x10000 + 64 * layer + microbatch)
            call("TP", "ReduceScatter", 1 << 18, 9, 0x20000 + 64 * layer + microbatch)
        if stage < stages - 1:
            call("PP", "Send", 1 << 20, 9, 0x9100 + microbatch, stage + 1)
    for bucket in range(2):
        call("DP", "ReduceScatter", 1 << 24 | bucket, 7, 0x70000 + bucket)
        call("DP", "AllGather", 1 << 24 | bucket, 9, 0x80000 + bucket)
    call("WORLD", "AllReduce", 1, 7, 0x99000)
    templates = np.zeros(len(made), tables.OPERATION_TEMPLATE)
    for row, (kind, op, count, data_type, buffer, root) in zip(templates, made, strict=True):
        row["device"], row["op"], row["op_name"], row["global_rank"] = number % _PER_HOST, OPERATION_CODES[op], 1, -1
        row["count"], row["data_type"], row["send_buffer"], row["root"] = count, data_type, buffer, root
        row["nranks"], row["communicator"] = groups[kind][1], 0xA0 + _KINDS.index(kind)
        row["stream"] = 0x50 + _KINDS.index(kind)
    return templates, np.asarray(step, np.uint32)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,512,4096")
    given = parser.parse_args()
    clock = _Clock()
    clock.watch()
    print(
        "| ranks | phase | seconds | CPU of all, s | of it telling anew, s | share of one core | longest in one tick "
        f"| numbered | parallelism | RSS |\n|---:|---|{'---:|' * 8}"
    )
    parts: list[str] = []
    for amount in (int(each) for each in given.ranks.split(",")):
        parts += list(_job(amount, clock))
    print(f"\n| ranks | phase | {' | '.join(_TIMED)} |\n|---:|---|{'---:|' * len(_TIMED)}")
    print("\n".join(parts))


def _job(amount: int, clock: _Clock) -> Iterator[str]:
    few = amount > _MANY
    rate = min(_HOST_RATE * amount // _PER_HOST, _MOST_OF_MANY if few else _MOST)
    job = [_Rank(each, amount, layers=2 if few else 8, microbatches=2 if few else 4) for each in range(amount)]
    pipeline, now_ns = Pipeline(), ORIGIN_NS
    inits = [(rank, kind) for kind in _KINDS for rank in job]
    cuts = np.linspace(0, len(inits), _START_TICKS + 1).astype(int).tolist()
    each_tick = rate * _TICK_NS // 10**9 // amount
    phases = {
        "start": [[_init(*each) for each in inits[begin:end]] for begin, end in pairwise(cuts)],
        "training": [[_calls(rank, each_tick) for rank in job] for _ in range(_SECONDS * 10**9 // _TICK_NS)],
    }
    for phase, ticks in phases.items():
        clock.ticks.clear()
        began = time.process_time()
        for batches in ticks:
            now_ns += _TICK_NS
            for make in batches:
                pipeline.feed(make(now_ns), agent="a", session="s", job="j")
            clock.tick()
            pipeline.advance(now_ns)
        spent, seconds = time.process_time() - began, len(ticks) * _TICK_NS / 1e9
        rows = pipeline.store.operations.rows
        numbered = np.mean(rows["iteration_by"] == IterationBy.PERIOD) if len(rows) else np.nan
        known = [each.parallelism == _KINDS[(int(each.comm_id, 16) >> 32) - 1] for each in pipeline.store.communicators]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"| {amount} | {phase} | {seconds:.0f} | {spent:.1f} | {clock.seconds():.2f} "
            f"| {100 * clock.seconds() / seconds:.1f} % | {clock.longest():.3f} s | {100 * numbered:.0f} % "
            f"| {100 * np.mean(known):.0f} % | {peak:.0f} MiB |",
            flush=True,
        )
        yield f"| {amount} | {phase} | {' | '.join(f'{clock.seconds(part):.2f} s' for part in _TIMED)} |"


def _init(rank: _Rank, kind: str) -> Callable[[int], Batch]:
    return lambda _: rank.init(kind)


def _calls(rank: _Rank, amount: int) -> Callable[[int], Batch]:
    return lambda now_ns: rank.calls(amount, now_ns - _TICK_NS, now_ns)


if __name__ == "__main__":
    main()
