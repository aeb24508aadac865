"""The rings and trees of a communicator, as NCCL printed them.

Every rank prints its own neighbours (`Ring 00 : 3 -> 0 -> 1`, `Trees [0] 1/-1/-1->0->-1`), rank 0 the whole order of
each ring, of which NCCL may leave out the end.

*Source:* NCCL `src/init.cc:initTransportsRank`, `src/graph/connect.cc`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.facts import Fact, RingNeighbours, RingOrder, TreeNeighbours
from ncclscope_wire.terms import NO_NUMBER

_MAX_CHANNELS: Final = 64
"""NCCL's MAXCHANNELS."""
_MAX_RANKS: Final = 1 << 14
_BELOW: Final = 3
"""NCCL_MAX_TREE_ARITY - 1."""


def _no_channels() -> NDArray[np.int32]:
    return np.empty((0, 0), np.int32)


@dataclass(slots=True, eq=False)
class Channels:
    """Who sends to whom on each channel of one communicator, by rank in it; NO_NUMBER where not printed."""

    size: int
    following: NDArray[np.int32] = field(default_factory=_no_channels)
    """Channels x ranks: the next in the ring."""
    above: NDArray[np.int32] = field(default_factory=_no_channels)
    """Channels x ranks: the parent in the tree; NO_NUMBER for its root as well."""
    below: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0, _BELOW), np.int32))
    """Channels x ranks x 3: the children in the tree."""
    in_tree: NDArray[np.bool_] = field(default_factory=lambda: np.empty((0, 0), np.bool_))
    """Channels x ranks: whether the rank's place in the tree was printed."""

    def __eq__(self, other: object) -> bool:
        """Whether both know the same."""
        if not isinstance(other, Channels):
            return NotImplemented
        same = zip(*((each.following, each.above, each.below, each.in_tree) for each in (self, other)), strict=True)
        return self.size == other.size and all(np.array_equal(one, two) for one, two in same)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def next_of(self, rank: int) -> NDArray[np.int32]:
        """The next rank in each ring of which it is known."""
        found = self.following[:, rank]
        return found[found >= 0]

    def neighbours_of(self, rank: int) -> tuple[NDArray[np.int32], int]:
        """Whom a rank exchanges with in its trees, once for each channel, and over how many channels."""
        known = self.in_tree[:, rank]
        found = np.concatenate([self.above[known, rank], self.below[known, rank].ravel()])
        return found[found >= 0], int(known.sum())

    def take(self, fact: Fact) -> None:
        """Takes a line; one that cannot be of this communicator is left aside."""
        if isinstance(fact, RingNeighbours):
            if self._reserve(fact.channel) and self._is_rank(fact.rank) and self._is_rank(fact.next):
                self.following[fact.channel, fact.rank] = fact.next
        elif isinstance(fact, RingOrder):
            order = np.asarray(fact.ranks, np.int64)
            is_whole = len(order) == self.size and (np.sort(order) == np.arange(self.size)).all()
            if is_whole and not fact.is_cut and self._reserve(fact.channel):
                self.following[fact.channel, order] = np.roll(order, -1)
        elif isinstance(fact, TreeNeighbours) and not fact.is_nvls:
            for node in fact.nodes:
                if self._reserve(node.channel) and self._is_rank(node.rank) and len(node.down) <= _BELOW:
                    self.above[node.channel, node.rank] = node.up if self._is_rank(node.up) else NO_NUMBER
                    down = [rank if self._is_rank(rank) else NO_NUMBER for rank in node.down]
                    self.below[node.channel, node.rank] = down + [NO_NUMBER] * (_BELOW - len(down))
                    self.in_tree[node.channel, node.rank] = True

    def add(self, others: Channels) -> None:
        """Takes what ranks of the same communicator printed that were not known to be its own before."""
        if len(others.following) and others.size == self.size and self._reserve(len(others.following) - 1):
            mine = slice(len(others.following))
            self.following[mine] = np.where(others.following >= 0, others.following, self.following[mine])
            self.above[mine] = np.where(others.in_tree, others.above, self.above[mine])
            self.below[mine] = np.where(others.in_tree[:, :, None], others.below, self.below[mine])
            self.in_tree[mine] |= others.in_tree

    def _is_rank(self, rank: int) -> bool:
        return 0 <= rank < self.size

    def _reserve(self, channel: int) -> bool:
        """Makes room for a channel; False where there are none of that number."""
        if not 0 <= channel < _MAX_CHANNELS or self.size > _MAX_RANKS:
            return False
        more = channel + 1 - len(self.following)
        if more > 0:
            unknown = np.full((more, self.size), NO_NUMBER, np.int32)
            self.following = np.concatenate([self.following.reshape(-1, self.size), unknown])
            self.above = np.concatenate([self.above.reshape(-1, self.size), unknown])
            children = np.full((more, self.size, _BELOW), NO_NUMBER, np.int32)
            self.below = np.concatenate([self.below.reshape(-1, self.size, _BELOW), children])
            self.in_tree = np.concatenate([self.in_tree.reshape(-1, self.size), np.zeros((more, self.size), np.bool_)])
        return True
