"""Joined operations of hosts whose clock nothing has told yet.

What ties the hosts of a capture together may be aligned after what they sent each other: a process is aligned at a
time. Measured before, waiting would be unknown for ever, and so would times on the reference clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ncclscope_service import whole_rows
from ncclscope_service.clocks import Clocks
from ncclscope_service.hosts import Hosts
from ncclscope_service.kernel_matrix import KernelMatrix
from ncclscope_service.store import Ids, Table
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

_WAIT_NS: Final = 10_000_000_000
"""So long clocks are waited for, where there is always something left to align."""

_PAIR: Final = np.dtype(
    [
        ("send", "<i8"),
        ("receive", "<i8"),
        ("sender", "<i4"),
        ("receiver", "<i4"),
        ("since_ns", "<i8"),
    ]
)
"""A Send and its Recv, the number of the host of each, and when they were joined."""


@dataclass(frozen=True, slots=True)
class Clocked:
    """What can be measured, on the reference clock as far as that is known."""

    collectives: list[KernelMatrix]
    sends: Ids
    receives: Ids
    """The other side of each of `sends`."""


@dataclass(slots=True)
class Unclocked:
    """Keeps what was joined until the clocks of its hosts are told, or cannot be."""

    clocks: Clocks
    hosts: Hosts
    table: Table
    """Whose rows were joined, with the columns of rows.OPERATION."""
    _collectives: list[tuple[int, KernelMatrix]] = field(default_factory=list[tuple[int, KernelMatrix]])
    """(when joined, its kernels)."""
    _pairs: Columns = field(default_factory=lambda: np.empty(0, _PAIR))

    def admit(
        self,
        collectives: Sequence[KernelMatrix],
        sends: Ids,
        receives: Ids,
        now_ns: int,
        *,
        is_whole: bool,
        final: bool,
    ) -> Clocked:
        """Takes what was joined now, and gives what can be measured now, in the order in which it was joined.

        `is_whole`: nothing is left to align that might tell a clock; it is waited for an estimate from all of it. What
        has left memory meanwhile is not given.
        """
        self._collectives += [(now_ns, each) for each in collectives]
        if len(sends):
            self._pairs = whole_rows.joined([self._pairs, self._paired(sends, receives, now_ns)])
        given = self._take(now_ns, is_over=final or (is_whole and self.clocks.is_current()))
        self._correct(given)
        return given

    def waiting(self) -> Ids:
        """Rows that were joined, and that nothing was given of."""
        collectives = [each.joined.operations[each.present] for _, each in self._collectives]
        return np.concatenate([self._pairs["send"], self._pairs["receive"], *collectives])

    def _paired(self, sends: Ids, receives: Ids, now_ns: int) -> Columns:
        pairs = np.empty(len(sends), _PAIR)
        hosts = self.hosts.of_processes()
        pairs["send"], pairs["receive"], pairs["since_ns"] = sends, receives, now_ns
        for name, rows in (("sender", sends), ("receiver", receives)):
            pairs[name] = hosts[self.table.take(rows, "process")["process"]]
        return pairs

    def _take(self, now_ns: int, *, is_over: bool) -> Clocked:
        is_told, first = self.clocks.are_told(), self.table.first
        given: list[KernelMatrix] = []
        left: list[tuple[int, KernelMatrix]] = []
        for since_ns, each in self._collectives:
            if is_over or is_told[each.hosts[each.hosts >= 0]].all() or now_ns - since_ns >= _WAIT_NS:
                given.append(_known(each, first))
            else:
                left.append((since_ns, each))
        pairs = self._pairs
        is_given = is_told[pairs["sender"]] & is_told[pairs["receiver"]]
        is_given |= is_over | (now_ns - pairs["since_ns"] >= _WAIT_NS)
        self._collectives, self._pairs = left, whole_rows.kept(pairs, ~is_given)
        pairs = whole_rows.kept(pairs, is_given & (pairs["send"] >= first) & (pairs["receive"] >= first))
        return Clocked([each for each in given if len(each.present)], pairs["send"], pairs["receive"])

    def _correct(self, given: Clocked) -> None:
        """Puts on the reference clock what was decided before its host's was told."""
        collectives = [each.joined.operations[each.present] for each in given.collectives]
        rows = np.concatenate([given.sends, given.receives, *collectives])
        times = self.table.take(rows, "start_true_ns")["start_true_ns"]
        self.clocks.correct(rows[times == NO_TIME_NS], self.table)
        for each in given.collectives:
            each.refresh(self.table)


def _known(kernels: KernelMatrix, first: int) -> KernelMatrix:
    """The collectives of which every row is in memory, from `first` on."""
    is_known = (~kernels.present | (kernels.joined.operations >= first)).all(axis=1)
    return kernels.take(np.flatnonzero(is_known))
