"""Who was last, and how long ranks were in sends and receives, step by step: the memory of the late-rank detector.

Operations of one step are not independent (a rank that computes slowly in it is late for all of them), so a step, not
an operation, is the unit that is counted. Each keeps, per rank, how often it was last, the sum of how much later it
came than the second last (blame), that sum by operation, and its largest blames: a rank that is slow all over shows in
the first, one that is late to one kind of operation in the second, whatever the jitter of the others, and one that
loses time at a few places of a step in the third.

A rank that waits in a receive, or whose transfer takes long, comes late to what follows through no fault of its own.
Kernels of sends and receives are known rank by rank; the time in them is compared between ranks of one group, which do
the same work: what one spends there beyond the others was caused by another rank or a link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct_together
from ncclscope_service.detect.context import Context
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import OPERATION_CODES

Blames: TypeAlias = NDArray[np.float64]
"""Step by rank, in ns."""

DEFAULT_STEP_NS: Final = 500_000_000
"""Length of a step while the job's own is not known."""
WINDOW_NS: Final = 4_000_000_000
"""A rank must be late in most of the last WINDOWS windows of so long: one stall is no late rank."""
WINDOWS: Final = 4
WINDOWS_BAD: Final = 3
_LEAST_STEPS_PER_WINDOW: Final = 2
LARGEST: Final = 4
"""Blames of a rank in a step that are kept one by one."""
_EARLY: Final = 3
"""First steps of a group: lazy connections and warm-up."""
_WHOLE: Final = 0.75
"""Share of the operations that a step usually has; one with fewer was captured in part."""
_ROOTED: Final = frozenset(OPERATION_CODES[name] for name in ("Broadcast", "Reduce", "Gather", "Scatter"))
"""Operations that wait for their root by design."""
_MOST_MEMBERS: Final = 65_536
"""Ranks of communicators whose sends and receives are followed: 16 for each of 4,096 ranks."""


class OperationBlame(NamedTuple):
    """One operation that waited for its last rank."""

    blame_ns: int
    coll_seq: int


@dataclass(slots=True)
class GroupStep:
    """One step of one group."""

    at_ns: int
    is_early: bool = False
    operations: int = 0
    transfer_ns: int = 0
    """Time that its operations took once all ranks had come."""
    confidence: float = 1.0
    hits: dict[int, int] = field(default_factory=dict[int, int])
    """By communicator rank: operations in which it was last."""
    blame_ns: dict[int, int] = field(default_factory=dict[int, int])
    largest: dict[int, tuple[OperationBlame, ...]] = field(default_factory=dict[int, "tuple[OperationBlame, ...]"])
    """The largest blames first."""
    blame_by_op: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """By communicator rank and operation."""

    def add(self, tally: StepTally) -> None:
        """Adds what a batch holds of one rank."""
        self.operations += tally.hits
        self.transfer_ns += tally.transfer_ns
        self.confidence = min(self.confidence, tally.confidence)
        self.hits[tally.rank] = self.hits.get(tally.rank, 0) + tally.hits
        self.blame_ns[tally.rank] = self.blame_ns.get(tally.rank, 0) + tally.blame_ns
        both = (*self.largest.get(tally.rank, ()), *tally.largest)
        self.largest[tally.rank] = tuple(sorted(both, reverse=True)[:LARGEST])
        for op, blame_ns in tally.by_op:
            self.blame_by_op[tally.rank, op] = self.blame_by_op.get((tally.rank, op), 0) + blame_ns

    def usual_largest(self) -> dict[int, float]:
        """Mean of the largest blames of each rank that has any; places at which it was not last count as 0."""
        places = max(1, min(LARGEST, self.operations))
        return {rank: sum(blame.blame_ns for blame in blames) / places for rank, blames in self.largest.items()}

    def latest(self) -> int:
        """The rank with the most blame."""
        return max(self.blame_ns, key=lambda rank: (self.blame_ns[rank], -rank))


class GroupSteps:
    """The last steps of one group, oldest first; a late batch is added to the step that it belongs to."""

    def __init__(self) -> None:
        self._by_time: dict[int, GroupStep] = {}
        self._made = 0
        self.last_op = 0

    def at(self, at_ns: int) -> GroupStep:
        """The step of that time, made when it is new."""
        step = self._by_time.get(at_ns)
        if step is None:
            step = self._by_time[at_ns] = GroupStep(at_ns, is_early=self._made < _EARLY)
            self._made += 1
        return step

    def newest(self, count: int) -> list[GroupStep]:
        """The last `count` steps that are over (the newest may still grow), oldest first.

        Left out are early ones, and those of which a capture saw but a part: a rank that is late all the step through
        is late in them by less, which would read as a lateness that comes and goes.
        """
        over = [self._by_time[time] for time in sorted(self._by_time)[:-1]]
        usual = sorted(step.operations for step in over[-count:])[len(over[-count:]) // 2] if over else 0
        whole = [step for step in over if step.operations >= _WHOLE * usual]
        return [step for step in whole[-count:] if not step.is_early]

    def all_over(self) -> list[GroupStep]:
        """As `newest`, of all that are remembered."""
        return self.newest(len(self._by_time))

    def times(self) -> Set[int]:
        """When each of them begins."""
        return self._by_time.keys()

    def keep_newest(self, count: int) -> None:
        """Forgets all but the newest `count` steps, once there are more than twice as many."""
        if len(self._by_time) > 2 * count:
            for time in sorted(self._by_time)[:-count]:
                del self._by_time[time]


@dataclass(frozen=True, slots=True)
class StepTally:
    """Sums of one batch for one rank of one group in one step."""

    communicator: int
    at_ns: int
    rank: int
    hits: int
    blame_ns: int
    transfer_ns: int
    op: int
    confidence: float
    largest: tuple[OperationBlame, ...]
    by_op: tuple[tuple[int, int], ...]
    """Operation, blame."""


def step_tallies(collectives: Columns, step_ns: int) -> Iterator[StepTally]:
    """Collectives summed by group, step and last rank. Rows that name no last rank must be left out before."""
    if not len(collectives):
        return
    at = collectives["end_true_ns"] // step_ns * step_ns
    order = np.lexsort((-collectives["blame_ns"], collectives["last_rank"], at, collectives["communicator"]))
    rows, at = collectives[order], at[order]
    changes = (np.diff(rows["communicator"]) != 0) | (np.diff(at) != 0) | (np.diff(rows["last_rank"]) != 0)
    begins = np.concatenate([[0], np.flatnonzero(changes) + 1])
    hits = np.diff(np.append(begins, len(rows)))
    blame = np.add.reduceat(rows["blame_ns"], begins)
    transfer = np.add.reduceat(rows["transfer_ns"], begins)
    confidence = np.minimum.reduceat(rows["confidence"], begins)
    for begin, count, total, moving, sure in zip(
        begins.tolist(), hits.tolist(), blame.tolist(), transfer.tolist(), confidence.tolist(), strict=True
    ):
        yield StepTally(
            communicator=int(rows["communicator"][begin]),
            at_ns=int(at[begin]),
            rank=int(rows["last_rank"][begin]),
            hits=count,
            blame_ns=total,
            transfer_ns=moving,
            op=int(rows["op"][begin]),
            confidence=sure,
            largest=tuple(
                OperationBlame(blame_ns, seq)
                for blame_ns, seq in zip(
                    rows["blame_ns"][begin : begin + min(count, LARGEST)].tolist(),
                    rows["coll_seq"][begin : begin + min(count, LARGEST)].tolist(),
                    strict=True,
                )
            ),
            by_op=_by_op(rows["op"][begin : begin + count], rows["blame_ns"][begin : begin + count]),
        )


def _by_op(ops: NDArray[np.uint8], blame_ns: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    if (ops == ops[0]).all():
        return ((int(ops[0]), int(blame_ns.sum())),)
    sums = np.bincount(ops, blame_ns)
    return tuple((op, int(sums[op])) for op in np.unique(ops).tolist())


@dataclass(slots=True)
class ExchangeTimes:
    """Time in sends and receives, by communicator, its rank and step (`GroupStep.at_ns`)."""

    _by_member: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict[tuple[int, int], "dict[int, int]"])

    def ingest_exchanges(self, exchanges: Columns, step_ns: int, keep: int) -> None:
        """Takes launches of sends and receives (`rows.COLLECTIVE` with a rank); `keep` steps of each member stay."""
        if not len(exchanges):
            return
        at = exchanges["end_true_ns"] // step_ns * step_ns
        keys, inverse = distinct_together(exchanges["communicator"], exchanges["rank"], at)
        sums = [0] * len(keys[0])
        for place, busy_ns in zip(inverse.tolist(), exchanges["busy_ns"].tolist(), strict=True):
            sums[place] += busy_ns
        for communicator, rank, at_ns, busy_ns in zip(*(each.tolist() for each in keys), sums, strict=True):
            mine = self._by_member.get((communicator, rank))
            if mine is None:
                if len(self._by_member) >= _MOST_MEMBERS:
                    continue
                mine = self._by_member[communicator, rank] = {}
            mine[at_ns] = mine.get(at_ns, 0) + busy_ns
            if len(mine) > 2 * keep:
                for old in sorted(mine)[:-keep]:
                    del mine[old]

    def times_of(self, communicator: int, rank: int) -> dict[int, int]:
        """By step: ns in sends and receives of this rank; empty if none was seen."""
        return self._by_member.get((communicator, rank), {})

    def clear(self) -> None:
        """Forgets all: steps have another length from now on."""
        self._by_member.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBlames:
    """The steps by which the ranks of one group are judged, and the blames of its ranks in them."""

    steps: list[GroupStep]
    total: Blames
    """Of all operations of a step."""
    by_op: Mapping[int, Blames]
    """Of each kind of operation if there are several; rooted ones wait for their root, and are left out."""

    @classmethod
    def from_steps(cls, steps: list[GroupStep], ranks: int) -> GroupBlames:
        """Blames of all ranks of a group over these steps."""
        found: dict[int, Blames] = {}
        for place, step in enumerate(steps):
            for (rank, op), blame_ns in step.blame_by_op.items():
                if op not in _ROOTED and rank < ranks:
                    found.setdefault(op, np.zeros((len(steps), ranks)))[place, rank] = blame_ns
        total = _matrix([step.blame_ns for step in steps], ranks)
        return cls(steps=steps, total=total, by_op=found if len(found) > 1 else {})

    def largest(self) -> Blames:
        """The usual largest blames of a step."""
        return _matrix([step.usual_largest() for step in self.steps], self.total.shape[1])


def whole_windows(recent: list[GroupStep], context: Context) -> list[GroupStep]:
    """The newest steps that make whole windows; none if they are too few."""
    size = steps_per_window(context)
    usable = recent[len(recent) % size :]
    return usable if len(usable) >= WINDOWS_BAD * size else []


def steps_per_window(context: Context) -> int:
    """Steps in WINDOW_NS, at least two."""
    return max(_LEAST_STEPS_PER_WINDOW, round(WINDOW_NS / (context.step_ns or DEFAULT_STEP_NS)))


def _matrix(by_step: Sequence[Mapping[int, float]], ranks: int) -> Blames:
    """A value per step and rank; 0 for ranks that a step lacks. Ranks beyond `ranks` are left out."""
    found = np.zeros((len(by_step), ranks))
    for place, values in enumerate(by_step):
        for rank, value in values.items():
            if rank < ranks:
                found[place, rank] = value
    return found
