"""Divides a run of Sends and Receives among the kernels that ran them, where no group boundary is known.

Adjacent point-to-point operations of one communicator are launched one by one, or fused when they are in a
group. Between two other launches of the thread only their number and that of the kernels is known; what cannot be
told is guessed from how frameworks group (a Send with a Receive, each peer once) and said to be a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.terms import OPERATION_CODES

Kind = tuple[int, int, bool]
"""(operation, peer, whether its group is open)."""

_SEND: Final = OPERATION_CODES["Send"]
_LARGEST: Final = 40_000
"""Above so many (operations x kernels) a run is not worth dividing exactly."""

_SAME_PEER, _SEND_FIRST, _OTHER, _REPEATED, _CLOSED = 1.0, 0.8, 0.5, -1.0, -50.0


@dataclass(slots=True)
class Divider:
    """Divides runs, remembering what recurs."""

    _known: dict[tuple[tuple[Kind, ...], int], tuple[NDArray[np.int64], float]] = field(
        default_factory=dict[tuple[tuple[Kind, ...], int], tuple[NDArray[np.int64], float]]
    )

    def divide(self, kinds: tuple[Kind, ...], kernels: int) -> tuple[NDArray[np.int64], float]:
        """The kernel (0 .. kernels-1, ascending) of each operation, and how sure that is.

        With more kernels than operations the first ones are taken: lines were lost, or launches were split.
        """
        if len(kinds) == kernels:
            return np.arange(kernels, dtype=np.int64), 0.99
        if kernels == 1:
            return np.zeros(len(kinds), dtype=np.int64), 0.95
        if kernels > len(kinds):
            return np.arange(len(kinds), dtype=np.int64), 0.4
        if len(kinds) * kernels > _LARGEST:
            return np.minimum(np.arange(len(kinds)), kernels - 1), 0.1
        key = (kinds, kernels)
        if key not in self._known:
            self._known[key] = _divide(kinds, kernels)
        return self._known[key]


def _divide(kinds: tuple[Kind, ...], kernels: int) -> tuple[NDArray[np.int64], float]:
    """Best division into exactly so many groups: a table of (operations so far, groups so far)."""
    size = len(kinds)
    longest = size - kernels + 1
    table = np.full((size + 1, kernels + 1), -np.inf)
    back = np.zeros((size + 1, kernels + 1), dtype=np.int64)
    table[0, 0] = 0.0
    for end in range(1, size + 1):
        for begin in range(max(0, end - longest), end):
            candidate = table[begin, :-1] + _worth(kinds[begin:end])
            better = candidate > table[end, 1:] + 1e-9
            table[end, 1:][better] = candidate[better]
            back[end, 1:][better] = begin
    groups = np.empty(size, dtype=np.int64)
    end = size
    for group in range(kernels, 0, -1):
        begin = int(back[end, group])
        groups[begin:end] = group - 1
        end = begin
    return groups, 0.6


def _worth(group: tuple[Kind, ...]) -> float:
    """How likely frameworks are to put these operations in one group, as a sum over what is joined."""
    worth = 0.0
    for before, after in pairwise(group):
        if not (before[2] and after[2]):
            return _CLOSED
        if before[0] == after[0]:
            worth += 0.0
        elif before[0] == _SEND:
            worth += _SAME_PEER if before[1] == after[1] else _SEND_FIRST
        else:
            worth += _OTHER
    if len({(kind[0], kind[1]) for kind in group}) < len(group):
        worth += _REPEATED
    return worth
