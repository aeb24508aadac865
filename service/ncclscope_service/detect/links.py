"""Links: pairs of ranks of one communicator that exchange by Send and Recv, each watched as a group of its own.

A pipeline's communicator spans many hosts, and each of its sends crosses but one pair of them: taken together, three
healthy links hide the slow one, and acquit its host.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ncclscope_service.detect.context import Context, Group
from ncclscope_service.distinct import distinct_together
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_FIRST_NUMBER: Final = -2
"""Links are numbered downwards from here, where neither a communicator nor NO_NUMBER is."""
_MOST_LINKS: Final = 65_536
"""Twice what 4,096 ranks have in pipelines of eight; others stay with their communicator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Group):
    """Two ranks of a communicator."""

    @property
    def name(self) -> str:
        """How sentences call it."""
        one, other = self.global_ranks
        return f"ranks {one} and {other} of {self.parallelism or 'communicator'} group {self.comm_id}"


@dataclass(slots=True)
class Links:
    """Gives links numbers, under which they stand beside the communicators of a job."""

    left_out: int = 0
    """Launches of links beyond those that are kept: they count to their communicator."""
    _numbers: dict[tuple[int, int, int], int] = field(default_factory=dict[tuple[int, int, int], int])
    """By communicator and its two ranks, the lower one first."""

    def numbered(self, collectives: Columns) -> Columns:
        """The same joined collectives (`rows.COLLECTIVE`), those between two ranks under the number of their link."""
        between = (collectives["coll_seq"] == NO_NUMBER) & (collectives["rank"] >= 0) & (collectives["peer"] >= 0)
        between &= collectives["rank"] != collectives["peer"]
        if not between.any():
            return collectives
        numbered = collectives.copy()
        mine = collectives[between]
        pairs = np.sort([mine["rank"], mine["peer"]], axis=0)
        found, inverse = distinct_together(mine["communicator"], pairs[0], pairs[1])
        numbers = [self._number(key) for key in zip(*(each.tolist() for each in found), strict=True)]
        self.left_out += int(np.count_nonzero(np.array([number >= 0 for number in numbers])[inverse]))
        numbered["communicator"][between] = np.array(numbers)[inverse]
        return numbered

    def added_to(self, context: Context) -> Context:
        """The job with its links among the groups, each as a group of two ranks."""
        links = {
            number: _link(group, low, high)
            for (communicator, low, high), number in self._numbers.items()
            if (group := context.groups.get(communicator)) is not None and high < len(group.global_ranks)
        }
        return replace(context, groups={**context.groups, **links}) if links else context

    def _number(self, key: tuple[int, int, int]) -> int:
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= _MOST_LINKS:
                return key[0]
            number = self._numbers[key] = _FIRST_NUMBER - len(self._numbers)
        return number


def _link(group: Group, low: int, high: int) -> Link:
    return Link(
        comm_id=group.comm_id,
        parallelism=group.parallelism,
        global_ranks=(group.global_ranks[low], group.global_ranks[high]),
        hosts=(group.hosts[low], group.hosts[high]),
        limit=group.limit,
        limit_name=group.limit_name,
    )
