"""Who is to blame where ranks wait for each other: blame goes along who waits for whom, across communicators.

A rank that has enqueued an operation which another of the channel has not waits for that one. So a rank that is missing
on one channel and waits on another is a victim: the blame goes on to whom it waits for there, Send and Recv included.
The root is missing and waits for nobody. Where ranks wait in a circle, an operation behind which its rank has enqueued
others does not hold that rank's host (a Send that was started early): such waits are left out there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from typing import NamedTuple


class Standing(NamedTuple):
    """One channel; ranks are global."""

    ahead: tuple[int, ...]
    """Have enqueued what those behind have not."""
    behind: tuple[int, ...]
    """Are furthest behind; all, where nobody is ahead."""
    newest_here: frozenset[int]
    """Ranks whose newest operation of all is on this channel."""


class Blame:
    """The waits of one job at one time."""

    def __init__(self, standings: Iterable[Standing] = ()) -> None:
        self._waits_for: defaultdict[int, list[Standing]] = defaultdict(list)
        self._held: set[int] = set()
        """Ranks that have enqueued nothing behind an operation in which they wait."""
        self._ended_evenly: defaultdict[int, list[Standing]] = defaultdict(list)
        """By rank, the channels of its newest operation where nobody is missing."""
        for standing in standings:
            if not standing.ahead:
                for rank in standing.newest_here:
                    self._ended_evenly[rank].append(standing)
            for rank in standing.ahead:
                self._waits_for[rank].append(standing)
            self._held.update(standing.newest_here.intersection(standing.ahead))

    @property
    def waiting(self) -> Set[int]:
        """All ranks that wait for another."""
        return self._waits_for.keys()

    def roots(self, missing: Set[int]) -> set[int]:
        """Who of these is to blame; nobody, where all of them wait for others that are not among them."""
        free = set(missing) - self.waiting
        if free:
            return {rank for rank in free if not self._is_held_by_others(rank, free)} or free
        if self._ends(missing):
            return set()
        return set(missing) - self._held or set(missing)

    def _is_held_by_others(self, rank: int, free: Set[int]) -> bool:
        """Whether it ended in an operation that everybody has enqueued, beside ranks that wait for another root."""
        mates = {mate for standing in self._ended_evenly[rank] for mate in standing.behind if mate in self._waits_for}
        ends = self._ends(mates) if mates and len(free) > 1 else set[int]()
        return bool(ends & free) and rank not in ends

    def _ends(self, ranks: Set[int]) -> set[int]:
        """Where the blame comes to from these ranks: those who wait for nobody."""
        seen, left = set(ranks), list(ranks)
        followed: set[int] = set()
        while left:
            for standing in self._waits_for.get(left.pop(), ()):
                if id(standing) not in followed:
                    followed.add(id(standing))  # many wait for the same ranks: these are looked at once
                    more = set(standing.behind) - seen
                    seen |= more
                    left.extend(more)
        return seen - self.waiting
