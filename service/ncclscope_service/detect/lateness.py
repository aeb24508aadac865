"""Who was last, step by step: the memory of the late-rank detector.

Operations of one step are not independent (whoever computes slowly in it is late for all of them), so a step, not an
operation, is the unit that is counted: an *occasion*. Each keeps, per rank, how often it was last, the sum of how much
later it came than the second last (blame), that sum by operation, and its largest blames: a rank that is slow all
over shows in the first, one that is late to one kind in the second, whatever the jitter of the others, and one that
loses time at a few places of a step in the third.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.batch import Columns

DEFAULT_STEP_NS: Final = 500_000_000
"""Length of an occasion while the duration of a step is not known."""
LARGEST: Final = 4
"""Blames that are kept by themselves."""
_EARLY: Final = 3
_WHOLE: Final = 0.75
"""Of the operations that a step usually has."""


class Blame(NamedTuple):
    """One operation that waited for its last rank."""

    blame_ns: int
    coll_seq: int


@dataclass(slots=True)
class Occasion:
    """One step of one group."""

    at_ns: int
    is_early: bool = False
    """One of the group's first: lazy connections and warm-up."""
    operations: int = 0
    transfer_ns: int = 0
    """Of its operations: how long they took once all had come."""
    confidence: float = 1.0
    hits: dict[int, int] = field(default_factory=dict[int, int])
    """By communicator rank: operations in which it was last."""
    blame_ns: dict[int, int] = field(default_factory=dict[int, int])
    largest: dict[int, tuple[Blame, ...]] = field(default_factory=dict[int, "tuple[Blame, ...]"])
    """The largest blames first."""
    blame_by_op: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """By communicator rank and operation."""

    def add(self, tally: Tally) -> None:
        """Takes what a batch says of one rank."""
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
        """The mean of the largest blames of each rank that has any; places at which it was not last count as none."""
        places = max(1, min(LARGEST, self.operations))
        return {rank: sum(blame.blame_ns for blame in blames) / places for rank, blames in self.largest.items()}

    def latest(self) -> int:
        """The rank with the most blame."""
        return max(self.blame_ns, key=lambda rank: (self.blame_ns[rank], -rank))


class Occasions:
    """The last occasions of one group, oldest first; late news of a known occasion is added to it."""

    def __init__(self) -> None:
        self._by_time: dict[int, Occasion] = {}
        self._made = 0
        self.last_op = 0

    def at(self, at_ns: int) -> Occasion:
        """The occasion of that time, made when it is new."""
        occasion = self._by_time.get(at_ns)
        if occasion is None:
            occasion = self._by_time[at_ns] = Occasion(at_ns, is_early=self._made < _EARLY)
            self._made += 1
        return occasion

    def newest(self, count: int) -> list[Occasion]:
        """The last `count` occasions that are over (the newest may still grow), oldest first.

        Left out are early ones, and those of which a capture saw but a part: a rank that is late all the step through
        is late in them by less, which would read as a lateness that comes and goes.
        """
        over = [self._by_time[time] for time in sorted(self._by_time)[:-1]]
        usual = sorted(occasion.operations for occasion in over[-count:])[len(over[-count:]) // 2] if over else 0
        whole = [occasion for occasion in over if occasion.operations >= _WHOLE * usual]
        return [occasion for occasion in whole[-count:] if not occasion.is_early]

    def all_over(self) -> list[Occasion]:
        """As `newest`, of all that are remembered."""
        return self.newest(len(self._by_time))

    def times(self) -> Set[int]:
        """When each of them begins."""
        return self._by_time.keys()

    def forget_all_but(self, count: int) -> None:
        """Bounds the memory."""
        if len(self._by_time) > 2 * count:
            for time in sorted(self._by_time)[:-count]:
                del self._by_time[time]


@dataclass(frozen=True, slots=True)
class Tally:
    """What one batch says of one rank of one group in one occasion."""

    communicator: int
    at_ns: int
    rank: int
    hits: int
    blame_ns: int
    transfer_ns: int
    op: int
    confidence: float
    largest: tuple[Blame, ...]
    by_op: tuple[tuple[int, int], ...]
    """Operation, blame."""


def tallies(collectives: Columns, step_ns: int) -> Iterator[Tally]:
    """Collectives summed by group, occasion and last rank. Rows that name no last rank must be left out before."""
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
        yield Tally(
            communicator=int(rows["communicator"][begin]),
            at_ns=int(at[begin]),
            rank=int(rows["last_rank"][begin]),
            hits=count,
            blame_ns=total,
            transfer_ns=moving,
            op=int(rows["op"][begin]),
            confidence=sure,
            largest=tuple(
                Blame(blame_ns, seq)
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
