"""Measured collectives that no detector has seen yet.

A capture of many hosts is aligned process by process. While some of it is left, what is measured shows some groups and
not yet those that explain them: detectors see it when all is measured, by time, and a bounded amount at a look.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ncclscope_service import rows, whole_rows
from ncclscope_wire.batch import Columns

_WAIT_NS: Final = 10_000_000_000
"""Where there is always something left to align, detectors see what is measured after so long."""
_AT_ONCE: Final = 16_384
"""Collectives that they are given at a look; all that ended in one second together."""
_SECOND_NS: Final = 1_000_000_000


@dataclass(slots=True)
class Unjudged:
    """Collectives (rows.COLLECTIVE), in the order in which they were measured."""

    _parts: list[Columns] = field(default_factory=list[Columns])
    _since_ns: int | None = None
    """When the first of them was measured."""
    _is_released: bool = False

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def is_released(self) -> bool:
        """Whether more can be taken at once."""
        return self._is_released

    def add(self, measured: Columns, now_ns: int) -> None:
        """Takes what was measured."""
        if len(measured):
            self._since_ns = now_ns if self._since_ns is None else self._since_ns
            self._parts.append(measured)

    def take(self, now_ns: int, *, is_whole: bool, final: bool) -> Columns:
        """What detectors may see now: nothing while more is to be measured of the same time (not `is_whole`), unless
        it has waited for long; all of it when `final`.
        """
        waited_ns = 0 if self._since_ns is None else now_ns - self._since_ns
        self._is_released = is_whole or final or self._is_released or waited_ns >= _WAIT_NS
        if not self._is_released:
            return np.empty(0, rows.COLLECTIVE)
        taken = whole_rows.joined([np.empty(0, rows.COLLECTIVE), *self._parts])
        self._parts = []
        is_more = not final and len(taken) > _AT_ONCE
        if is_more:
            seconds = taken["end_true_ns"] // _SECOND_NS
            is_early = seconds <= np.partition(seconds, _AT_ONCE)[_AT_ONCE]
            self._parts = [left] if len(left := whole_rows.kept(taken, ~is_early)) else []
            taken = whole_rows.kept(taken, is_early)
        if not self._parts:
            self._since_ns, self._is_released = None, False
        return taken
