"""How long ranks are inside of communication that others hold up: sends and receives, step by step.

A rank that waits in a receive, or whose transfer takes long, comes late to what follows without a fault of its own.
Kernels of sends and receives are known rank by rank; what they hold of a step is compared between ranks of one group,
which do the same work: what one spends there more than the others was handed to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ncclscope_service.distinct import distinct_together
from ncclscope_wire.batch import Columns

_MOST_MEMBERS: Final = 65_536
"""Ranks of communicators that are followed: 16 for each of 4,096. What others spend is not known."""


@dataclass(slots=True)
class Spent:
    """Time in sends and receives, by communicator, its rank and the occasion (`lateness.Occasion.at_ns`)."""

    _by_member: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict[tuple[int, int], "dict[int, int]"])

    def feed(self, exchanges: Columns, step_ns: int, keep: int) -> None:
        """Takes launches of sends and receives (`rows.COLLECTIVE` with a rank); of each member so many are kept."""
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

    def of(self, communicator: int, rank: int) -> dict[int, int]:
        """By occasion: ns in sends and receives of this rank; empty where none was seen."""
        return self._by_member.get((communicator, rank), {})

    def clear(self) -> None:
        """Forgets all: occasions are cut anew."""
        self._by_member.clear()
