"""Where order goes on after a hole in what was recorded, by the correlation ids that were used up meanwhile.

Every call of the CUDA API takes one correlation id, so a program that repeats takes as many per launch behind the
hole as before it: how far the ids jumped says about how many launches were not recorded. Of the places near there
whose launches look like the kernels behind the hole, the most likely is taken, and believed as much more than the
others as it is nearer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.coverage import Coverage
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_HOLE_NS: Final = 50_000_000
"""A shorter hole between captures loses a few launches at most, which aligning sees."""

_HISTORY: Final = 16384
_PATTERN: Final = 256
"""Kernels behind a hole by which their place is recognised; more than most programs' period."""

_SHORTEST: Final = 24
_ORPHANS: Final = 128
_ENOUGH: Final = 64
_SPARE: Final = 512
_SURE: Final = 0.8
_GUESS: Final = 0.5
_SIMILAR: Final = 0.9
_FAR: Final = 4.0
"""A place this many deviations from the expected one is not believed."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where to go on."""

    skipped: int
    """Launches that were not recorded."""
    trust: float


@dataclass(slots=True)
class Resumption:
    """What one thread's pairs say about launches and correlation ids."""

    _numbers: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Launch number of each pair, counted from the thread's first."""
    _ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Its correlation id."""
    _last_ns: int = NO_TIME_NS

    def remember(self, kernels: Columns, kernel: NDArray[np.int64], kernels_used: int, launches_used: int) -> None:
        """Takes in what was decided: the kernel of each launch, the first of which has number `launches_used`."""
        if kernels_used:
            self._last_ns = max(self._last_ns, int(kernels["time_ns"][:kernels_used].max()))
        paired = np.flatnonzero(kernel != NO_NUMBER)
        self._numbers = np.concatenate([self._numbers, paired + launches_used])[-_HISTORY:]
        self._ids = np.concatenate([self._ids, kernels["correlation_id"][kernel[paired]]])[-_HISTORY:]

    def next_border(
        self, kernels: Columns, coverage: Coverage, *, final: bool, is_behind: bool = False
    ) -> tuple[int, bool]:
        """How many kernels come before the next hole, and whether there is one; 0 if it is before the first.

        Kernels of captures that are not over are not counted, unless `final`. `is_behind`: the hole before the
        first kernel is not looked at.
        """
        if len(coverage) == 0 or len(kernels) == 0:
            return len(kernels), False
        times = kernels["time_ns"]
        amount = len(kernels)
        if not final:
            late = np.flatnonzero(times > coverage.known_until_ns)
            amount = int(late[0]) if len(late) else amount
        if amount == 0:
            return 0, False
        stretches = coverage.stretch_of(times, _HOLE_NS)
        stretches = np.minimum.accumulate(stretches[::-1])[::-1][:amount]
        if not is_behind and self._last_ns != NO_TIME_NS:
            before = int(coverage.stretch_of(np.array([self._last_ns]), _HOLE_NS)[0])
            if before < stretches[0]:
                return 0, True
        behind = np.flatnonzero(stretches > stretches[0])
        return (int(behind[0]), True) if len(behind) else (amount, False)

    def find(
        self,
        items: NDArray[np.int64],
        left: NDArray[np.int32],
        kernels: Columns,
        right: NDArray[np.int32],
        compatible: NDArray[np.bool_],
        used: int,
        *,
        final: bool,
    ) -> Resumed | None:
        """Where the first of these kernels goes on among pending items; None while more launches must come first.

        `left`, `right`: symbols of the launches' items (which begin at `items`) and of the kernels (their first rows).
        """
        orphans = np.flatnonzero(kernels["is_orphan"][:_ORPHANS])
        begin = int(orphans[-1]) + 1 if len(orphans) and orphans[-1] + 1 < len(kernels) else 0
        length = min(len(right) - begin, _PATTERN)
        expected, deviation = self._expected(int(kernels["correlation_id"][begin]))
        reach = expected - used + 6 * deviation
        if not final and items[-1] < reach + length + _SPARE:
            return None
        self._last_ns = int(kernels["time_ns"].min())
        if length < _SHORTEST or len(left) < length:
            return Resumed(0, _GUESS)
        first = int(np.searchsorted(items, max(0, expected - used - 6 * deviation)))
        last = min(int(np.searchsorted(items, max(0, reach))) + 1, len(left) - length + 1)
        places = _places(left[first : last + length - 1], right[begin : begin + length], compatible) + first
        if len(places) == 0:
            return Resumed(0, _GUESS)
        away = (items[places] + used - expected) / deviation
        weights = np.exp(-0.5 * (away**2 - (away**2).min()))
        best = int(np.abs(away).argmin())
        trust = float(weights[best] / weights.sum())
        if trust < _SURE or abs(away[best]) > _FAR or len(self._ids) < _ENOUGH:
            trust = min(_GUESS, trust, 1.0 / len(places) if len(places) > 1 else 1.0)
        return Resumed(int(items[max(0, int(places[best]) - begin)]), trust)

    def _expected(self, correlation_id: int) -> tuple[float, float]:
        """Number of the launch with that correlation id, and by how much it may be off (one deviation)."""
        numbers, ids = self._numbers, self._ids
        if len(ids) < _ENOUGH or ids[-1] <= ids[0]:
            return (float(numbers[-1]) if len(numbers) else 0.0), 65536.0
        rate = (numbers[-1] - numbers[0]) / (ids[-1] - ids[0])
        jump = correlation_id - int(ids[-1])
        lag = max(1.0, min(jump, (ids[-1] - ids[0]) / 2))
        begins = ids <= ids[-1] - lag
        ahead = np.interp(ids[begins] + lag, ids, numbers) - numbers[begins]
        deviation = 1.0 + float(np.sqrt(np.mean((ahead - rate * lag) ** 2))) * max(1.0, jump / lag)
        return float(numbers[-1]) + rate * jump, deviation


def _places(text: NDArray[np.int32], pattern: NDArray[np.int32], compatible: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Where the pattern fits the text, nearly as well as where it fits best."""
    if len(text) < len(pattern):
        return np.empty(0, dtype=np.intp)
    fits = np.zeros(len(text) - len(pattern) + 1, dtype=np.int64)
    table = compatible[:, pattern]
    for offset in range(len(pattern)):
        fits += table[text[offset : offset + len(fits)], offset]
    best = int(fits.max())
    if best < _SIMILAR * len(pattern):
        return np.empty(0, dtype=np.intp)
    return np.flatnonzero(fits >= best - 0.02 * len(pattern))
