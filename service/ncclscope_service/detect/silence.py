"""For how long a channel was silent before, and so which silence of it is ordinary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ncclscope_wire.batch import Columns

LEAST_SILENCE_NS: Final = 5_000_000_000
_REST_NS: Final = 120_000_000_000
"""Evaluation and checkpoints of a minute or two are ordinary."""
_GAP_FACTOR: Final = 20
_LONGEST_FACTOR: Final = 3
_GAPS_KEPT: Final = 2048
_HOUR_NS: Final = 3_600_000_000_000
_FIRST_GAPS: Final = 16

_GAP: Final = np.dtype(
    [
        ("at_ns", "<i8"),  # when news came after it
        ("gap_ns", "<i8"),  # between two looks that saw news
        ("operations", "<i4"),  # that came in it
    ]
)


@dataclass(slots=True)
class Silence:
    """The looks at one channel."""

    ranks: int = 0
    """How many have counted."""
    begin: int = 0
    """Where the counts of its ranks begin on the board."""
    last_ns: int = 0
    front: int = 0
    is_resting: bool = False
    """Whether those who are furthest behind had just ended a step when last looked at."""
    longest_rest_ns: int = 0
    _gaps: Columns = field(default_factory=lambda: np.empty(0, _GAP))
    """The last ones, each in the place of the oldest: thousands of channels keep them."""
    _seen: int = 0
    _recent: tuple[int, int] | None = None
    """How many gaps the last hour has, and the longest; None while that is to be told anew."""
    _usual_ns: float | None = None
    """What most of them are, for one operation; None likewise."""

    def look(self, newest_ns: int, front: int) -> None:
        """Takes the time of the newest operation of any rank, and how far the first rank has come."""
        if newest_ns <= self.last_ns:
            return
        if self.last_ns and self.is_resting:
            self.longest_rest_ns = max(self.longest_rest_ns, newest_ns - self.last_ns)
        elif self.last_ns:
            self._remember(newest_ns, max(1, front - self.front))
        self.last_ns, self.front = newest_ns, max(front, self.front)
        self._recent = self._usual_ns = None

    def _remember(self, newest_ns: int, operations: int) -> None:
        if self._seen == len(self._gaps) < _GAPS_KEPT:
            grown = np.zeros(max(_FIRST_GAPS, 2 * self._seen), _GAP)  # what is never written must be saved alike
            grown[: self._seen] = self._gaps
            self._gaps = grown
        self._gaps[self._seen % _GAPS_KEPT] = newest_ns, newest_ns - self.last_ns, min(operations, 2**31 - 1)
        self._seen += 1

    def patience_ns(self, *, others_are_stuck: bool = False) -> int:
        """How long a silence is ordinary; where others are stuck already, the longest gap known is enough to go by."""
        if self._recent is None:
            gaps = self._last_hour()["gap_ns"]
            self._recent = len(gaps), int(gaps.max(initial=0))
        amount, longest_gap = self._recent
        longest = _LONGEST_FACTOR * longest_gap
        if self.is_resting:
            return max(_REST_NS, _LONGEST_FACTOR * self.longest_rest_ns, longest)
        if not amount:
            return 4 * LEAST_SILENCE_NS
        if others_are_stuck:
            return max(LEAST_SILENCE_NS, longest)
        # between two looks many operations pass: their mean gap is the usual one, the look's is only an upper bound
        if self._usual_ns is None:
            recent = self._last_hour()
            self._usual_ns = float(np.percentile(recent["gap_ns"] / recent["operations"], 99))
        return round(max(LEAST_SILENCE_NS, _GAP_FACTOR * self._usual_ns, longest))

    def _last_hour(self) -> Columns:
        known = self._gaps[: self._seen]
        return known[known["at_ns"] > self.last_ns - _HOUR_NS]
