"""Joined operations of hosts whose clock nothing has told yet.

What ties the hosts of a capture together may be aligned after what they sent each other: a process is aligned at a
time. Measured before, waiting would be unknown for ever, and so would times on the reference clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.kernel_matrix import KernelMatrix
from ncclscope_service.store import Ids
from ncclscope_wire.batch import Columns

_WAIT_NS: Final = 10_000_000_000
"""So long clocks are waited for, where there is always something left to align."""

PAIR: Final = np.dtype(
    [
        ("send", "<i8"),
        ("receive", "<i8"),
        ("sender_host", "<i4"),
        ("receiver_host", "<i4"),
        ("since_ns", "<i8"),
    ]
)
"""Operations of a Send and its Recv, the number of the host of each, and when they were joined."""


@dataclass(slots=True)
class Unclocked:
    """Keeps what was joined until the clocks of its hosts are told, or cannot be."""

    _collectives: list[tuple[int, KernelMatrix]] = field(default_factory=list[tuple[int, KernelMatrix]])
    """(when joined, its kernels)."""
    _pairs: Columns = field(default_factory=lambda: np.empty(0, PAIR))

    def add(self, collectives: list[KernelMatrix], pairs: Columns, now_ns: int) -> None:
        """Takes what was joined now; `pairs`: PAIR."""
        self._collectives += [(now_ns, each) for each in collectives]
        if len(pairs):
            self._pairs = whole_rows.joined([self._pairs, pairs])

    def take(
        self, is_told: NDArray[np.bool_], now_ns: int, *, first: int, is_over: bool
    ) -> tuple[list[KernelMatrix], Ids, Ids]:
        """Collectives, Sends and their Recvs that can be measured now, in the order in which they were joined.

        `is_told`: by host number, whether operations tell its clock; `is_over`: no more will be told soon. Of
        operations below `first`, which have left memory meanwhile, nothing is given.
        """
        given: list[KernelMatrix] = []
        left: list[tuple[int, KernelMatrix]] = []
        for since_ns, each in self._collectives:
            hosts = each.hosts[each.hosts >= 0]
            if is_over or is_told[hosts].all() or now_ns - since_ns >= _WAIT_NS:
                given.append(_known(each, first))
            else:
                left.append((since_ns, each))
        pairs = self._pairs
        is_given = is_told[pairs["sender_host"]] & is_told[pairs["receiver_host"]]
        is_given |= is_over | (now_ns - pairs["since_ns"] >= _WAIT_NS)
        self._collectives, self._pairs = left, whole_rows.kept(pairs, ~is_given)
        pairs = whole_rows.kept(pairs, is_given & (pairs["send"] >= first) & (pairs["receive"] >= first))
        return [each for each in given if len(each.present)], pairs["send"], pairs["receive"]


def _known(kernels: KernelMatrix, first: int) -> KernelMatrix:
    """The collectives of which every operation is in memory."""
    is_known = (~kernels.present | (kernels.joined.operations >= first)).all(axis=1)
    return kernels.take(np.flatnonzero(is_known))
