"""Scenarios with truth: operations drawn one by one from a mix, over one stream or several, with losses.

The source is as plain as a bound can be computed for: each operation's kind is drawn from the mix, each line and each
kernel is lost with its rate, independently. What a published thesis prints of its own scenarios is their size (4
ranks of 200 operations) and the losses, not the mix: hence several, from uniform to 80 % AllReduce, and those of the
two jobs whose counts it does print.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from benchmarks.alignment.case import (
    OPERATION_NAMES,
    TRUTH,
    Case,
    Loss,
    kernel_data_type,
    kernel_kind,
    no_kernels,
    no_operations,
)

from ncclscope_wire.batch import Columns

NCCL_VERSION: Final = "2.28.3"
"""Within one node its opCount stands still: it tells nothing of losses."""

FLOAT32: Final = 7
BFLOAT16: Final = 9
_THREAD: Final = 4711
_FIRST_STREAM_ID: Final = 19


@dataclass(frozen=True, slots=True)
class Mix:
    """How often each kind of operation occurs."""

    name: str
    shares: dict[str, float]
    """`SendRecv` stands for lone Sends and Recvs in turn, each with a kernel of its own."""


def _mostly(share: float) -> Mix:
    rest = (1 - share) / 4
    others = dict.fromkeys(("AllGather", "ReduceScatter", "Broadcast", "SendRecv"), rest)
    return Mix(f"{share:.0%} AllReduce", {"AllReduce": share, **others})


MIXES: Final = (
    Mix("uniform", dict.fromkeys(("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "SendRecv"), 0.2)),
    _mostly(0.4),
    _mostly(0.6),
    _mostly(0.8),
    Mix("job TP=4", {"AllGather": 4341, "AllReduce": 725, "Broadcast": 801, "ReduceScatter": 2720}),
    Mix("job TP=2 PP=2", {"AllGather": 21, "AllReduce": 2966, "Broadcast": 961, "SendRecv": 330}),
)
"""The last two are the kernels that the thesis counts in table 4.2 and, on rank 2, in table 4.1."""

LOSSES: Final = (
    Loss(lines=0.0, kernels=0.0),
    Loss(lines=0.0, kernels=0.2),
    Loss(lines=0.2, kernels=0.0),
    Loss(lines=0.2, kernels=0.2),
)


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What log and export tell beside the names."""

    name: str
    streams: tuple[float, ...] = (1.0,)
    """Share of the collectives on each stream, each with a communicator of its own."""
    apart: bool = False
    """Sends and Recvs run on one more stream (PP)."""
    stamps: bool = False


NAMES: Final = Knowledge("names only")
EVEN_STREAMS: Final = Knowledge("streams TP, DP, CP alike + PP", streams=(1 / 3, 1 / 3, 1 / 3), apart=True)
TP_STREAMS: Final = Knowledge("streams 70 % TP, 20 % DP, 10 % CP + PP", streams=(0.7, 0.2, 0.1), apart=True)
STAMPS: Final = Knowledge("names and time stamps", stamps=True)
KNOWLEDGE: Final = (NAMES, EVEN_STREAMS, TP_STREAMS, STAMPS)


Symbol = tuple[int, int, int]
"""All that order and names tell of a kernel: stream, kind, type."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operation as a program issues it."""

    operation: str
    communicator: int = 0
    count: int = 1024
    data_type: int = FLOAT32
    peer: int = 0


@dataclass(slots=True)
class Recorder:
    """Turns lone calls of one process into log lines, kernels and truth; one stream per communicator."""

    rng: np.random.Generator
    stamps: bool
    calls: list[Call] = field(default_factory=list[Call])

    def record(self, loss: Loss, name: str, shares: dict[Symbol, float] | None = None) -> Case:
        """What is left of the calls after the losses; `shares`: of the symbols, else as they occur."""
        drawn = [_symbol(call) for call in self.calls]
        shares = shares or {symbol: amount / len(drawn) for symbol, amount in Counter(drawn).items()}
        operations, kernels = self._operations(), self._kernels()
        truth = self._truth([list(shares).index(symbol) for symbol in drawn], operations, kernels)
        self._time(operations, kernels)
        kept_lines = self.rng.random(len(operations)) >= loss.lines
        kept_kernels = self.rng.random(len(kernels)) >= loss.kernels
        kernels = kernels[kept_kernels]
        return Case(
            name=name,
            nccl_version=NCCL_VERSION,
            operations=operations[kept_lines],
            kernels=kernels[np.argsort(kernels["start_ns"], kind="stable")],
            truth=truth,
            loss=loss,
            shares=tuple(shares.values()),
        )

    def _operations(self) -> Columns:
        rows = no_operations(len(self.calls))
        # Numbers with gaps everywhere, so that a gap tells no lost line.
        rows["id"], rows["thread"], rows["ranks"] = np.cumsum(self.rng.geometric(1 / 5, len(rows))), _THREAD, 4
        rows["operation"] = [OPERATION_NAMES.index(call.operation) for call in self.calls]
        for name in ("communicator", "count", "data_type", "peer"):
            rows[name] = [getattr(call, name) for call in self.calls]
        rows["stream"] = 0x5580_0000_0000 + 0x9F0 * rows["communicator"].astype(np.uint64)
        # CALL lines say that a Send is alone: groups are another scenario.
        rows["group"] = rows["id"]
        return rows

    def _kernels(self) -> Columns:
        rows = no_kernels(len(self.calls))
        rows["id"], rows["thread"] = self.rng.permutation(len(rows)), _THREAD
        rows["kind"] = [int(kernel_kind(call.operation)) for call in self.calls]
        rows["data_type"] = [kernel_data_type(call.operation, call.data_type) for call in self.calls]
        rows["stream"] = [_FIRST_STREAM_ID + 4 * call.communicator for call in self.calls]
        # Other API calls lie between two launches, so that a gap in the numbers tells no lost kernel.
        rows["correlation"] = 1000 + np.cumsum(self.rng.geometric(1 / 20, len(rows)))
        return rows

    def _truth(self, symbols: list[int], operations: Columns, kernels: Columns) -> Columns:
        rows = np.empty(len(self.calls), dtype=TRUTH)
        rows["operation"], rows["kernel"] = operations["id"], kernels["id"]
        rows["symbol"] = symbols
        meanings: dict[Call, int] = {}
        rows["meaning"] = [meanings.setdefault(replace(call, peer=0), len(meanings)) for call in self.calls]
        return rows

    def _time(self, operations: Columns, kernels: Columns) -> None:
        """Calls some 0.2 ms apart, launches a few microseconds later, kernels one after the other on their stream."""
        count = len(operations)
        called = 1_772_449_200_000_000_000 + np.cumsum(self.rng.exponential(200_000, count).astype(np.int64) + 15_000)
        kernels["launched_at_ns"] = called + 4_000 + self.rng.exponential(2_000, count).astype(np.int64)
        durations = (20_000 * self.rng.lognormal(0.0, 0.7, count)).astype(np.int64)
        for stream in np.unique(kernels["stream"]).tolist():
            free_at_ns = 0
            for index in np.flatnonzero(kernels["stream"] == stream).tolist():
                start = max(int(kernels["launched_at_ns"][index]) + 4_000, free_at_ns + 1_000)
                free_at_ns = start + int(durations[index])
                kernels["start_ns"][index], kernels["end_ns"][index] = start, free_at_ns
        if self.stamps:
            operations["logged_at_ns"] = called // 1000 * 1000


def drawn_cases(
    mix: Mix, known: Knowledge, loss: Loss, *, ranks: int = 4, operations: int = 200, seed: int = 0
) -> list[Case]:
    """The ranks of one job: all issue the same drawn operations, each loses lines and kernels of its own."""
    shares = _shares(mix, known)
    drawn = _drawn(np.random.default_rng([seed, 1]), shares, operations)
    return [
        Recorder(np.random.default_rng([seed, 2, rank]), known.stamps, drawn).record(
            loss, f"{mix.name}; {known.name}; {loss.name}; seed {seed}, rank {rank}", shares
        )
        for rank in range(ranks)
    ]


def equal_runs(loss: Loss, *, seed: int = 0, rounds: int = 8, run: int = 24) -> Case:
    """Runs of equal AllReduces between single other operations, on one stream: only the ends of a run are told."""
    calls: list[Call] = []
    for _ in range(rounds):
        calls += [Call("AllGather", count=4096), *[Call("AllReduce", count=65_536)] * run]
        calls += [Call("ReduceScatter", count=4096), *[Call("AllReduce", count=262_144, data_type=BFLOAT16)] * run]
    recorder = Recorder(np.random.default_rng([seed, 3]), stamps=False, calls=calls)
    return recorder.record(loss, f"runs of {run} equal operations; {loss.name}; seed {seed}")


def case_of_names(name: str, kernels: Sequence[str], lines: Sequence[str]) -> Case:
    """Two sequences of names as one process, ids being places; the truth is left open."""
    lost_nothing, rng = Loss(lines=0.0, kernels=0.0), np.random.default_rng(0)
    logged = Recorder(rng, stamps=False, calls=[Call(line) for line in lines]).record(lost_nothing, name)
    ran = Recorder(rng, stamps=False, calls=[Call(kernel) for kernel in kernels]).record(lost_nothing, name)
    in_order = ran.launched()
    logged.operations["id"], in_order["id"] = np.arange(len(lines)), np.arange(len(kernels))
    return replace(logged, kernels=in_order, truth=logged.truth[:0], shares=())


def _shares(mix: Mix, known: Knowledge) -> dict[Symbol, float]:
    whole = sum(mix.shares.values())
    shares: dict[Symbol, float] = {}
    for operation, share in mix.shares.items():
        if operation == "SendRecv":
            shares[_symbol(Call("Send", len(known.streams) if known.apart else 0))] = share / whole
            continue
        for stream, part in enumerate(known.streams):
            shares[_symbol(Call(operation, stream))] = share / whole * part
    return shares


def _drawn(rng: np.random.Generator, shares: dict[Symbol, float], count: int) -> list[Call]:
    picked = rng.choice(len(shares), count, p=list(shares.values())).tolist()
    sizes, sends = rng.integers(0, 3, count).tolist(), rng.random(count).tolist()
    symbols = list(shares)
    calls: list[Call] = []
    for index, size, send in zip(picked, sizes, sends, strict=True):
        communicator, kind, _ = symbols[index]
        operation = _NAMES.get(kind) or ("Send" if send < 0.5 else "Recv")
        calls.append(Call(operation, communicator, 1024 << 4 * size))
    return calls


def _symbol(call: Call) -> Symbol:
    return (
        call.communicator,
        int(kernel_kind(call.operation)),
        kernel_data_type(call.operation, call.data_type),
    )


_NAMES: Final = {int(kernel_kind(name)): name for name in ("AllReduce", "AllGather", "ReduceScatter", "Broadcast")}
