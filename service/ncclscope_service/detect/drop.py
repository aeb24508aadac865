"""Whether one series of levels has dropped below its own past.

Two conditions must hold at once: a one-sided CUSUM of winsorised z against the baseline's median and MAD, with
sigma widened for the baseline's autocorrelation; and the median of the last windows below the baseline by a stated
share. Either alone gives false alarms: textbook CUSUMs several a day on autocorrelated series, plain thresholds as
many where the noise is wide. Sources: Page 1954 (CUSUM); sqrt((1 + phi) / (1 - phi)) is by how much autocorrelation
widens the standard error of a mean, for an AR(1) series.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_WINSOR: Final = 3.0
_LEAST_SIGMA: Final = 0.02
_MOST_PHI: Final = 0.9
_REFIT_EVERY: Final = 10
_DRIFT_WEIGHT: Final = 0.02
_DRIFT_GATE: Final = 0.05
_DRIFT_ERRORS: Final = 5.0
_DRIFT_WINDOWS: Final = 180
_WARMUP: Final = 5
"""First windows of a series: warm-up steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRule:
    """How many windows prove what."""

    baseline: int
    """Windows that must have been seen before anything is judged."""
    baseline_kept: int
    h: float
    """Height of the CUSUM that alarms."""
    recent: int
    """Windows whose median is held against the gate."""
    k: float = 1.0
    """Slack of the CUSUM: what a window must deviate by to count."""
    gate: float = 0.10
    """Least drop, as a share of the baseline."""
    gate_spreads: float = 3.0
    """The same in spreads of a window, where the series is noisy."""


QUICK: Final = DropRule(baseline=30, baseline_kept=900, h=16.0, recent=10)
"""One-second windows, guards the first hour: short baselines are uncertain, so it wants twice the evidence."""
STEADY: Final = DropRule(baseline=360, baseline_kept=720, h=8.0, recent=5)
"""Ten-second windows against an hour; a winsorised z needs five windows anyway."""
SUSTAINED: Final = DropRule(baseline=360, baseline_kept=720, h=8.0, recent=9, k=0.5, gate_spreads=3.7)
"""The same for what lasts: with less slack a loss of four spreads counts fully, however correlated the windows are, and
a gate that is deeper and asks five windows of nine keeps out the excursions of heavy tails. For groups that share
wires, whose noise is narrower: on single series it raises more false alarms than `STEADY`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """An alarm that is on."""

    rule: DropRule
    since_ns: int
    baseline: float
    """Natural logarithm of bytes per second."""
    level: float
    sigma: float
    cusum: float
    windows: int
    """Windows of the baseline."""

    @property
    def share(self) -> float:
        """How much of the baseline is lost."""
        return 1.0 - float(np.exp(self.level - self.baseline))


class DropWatch:
    """The state of one series under one rule."""

    def __init__(self, rule: DropRule) -> None:
        self.rule = rule
        self.drop: Drop | None = None
        self._baseline: deque[float] = deque(maxlen=rule.baseline_kept)
        self._recent: deque[float] = deque(maxlen=rule.recent)
        self._cusum = 0.0
        self._rising_since_ns = 0
        self._warmup = _WARMUP
        self._since_fit = 0
        self._middle = 0.0
        self._sigma = 0.0
        self._gate = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether a baseline is known."""
        return len(self._baseline) >= self.rule.baseline

    @property
    def is_quiet(self) -> bool:
        """Whether a baseline is known and nothing points to a drop: not even the beginning of one."""
        return self.is_ready and self.drop is None and self._cusum < self.rule.h / 4

    @property
    def is_unsuspicious(self) -> bool:
        """Whether a baseline is known and what points to a drop is not half of what alarms."""
        return self.is_ready and self.drop is None and self._cusum < self.rule.h / 2

    def feed(self, at_ns: int, level: float) -> None:
        """Takes the next window; `drop` says afterwards whether the alarm is on."""
        if self._warmup:
            self._warmup -= 1
            return
        if not self.is_ready:
            self._learn(level)
            return
        self._recent.append(level)
        z = min(max((self._middle - level) / self._sigma, -_WINSOR), _WINSOR)
        if self._cusum == 0.0:
            self._rising_since_ns = at_ns
        self._cusum = min(max(0.0, self._cusum + z - self.rule.k), 2 * self.rule.h)
        self._decide()
        if self.drop is None and self._cusum < self.rule.h / 2:
            self._learn(level)

    def _decide(self) -> None:
        if self.drop is None and self._cusum < self.rule.h:
            return
        recent = sorted(self._recent)[len(self._recent) // 2]
        dropped = recent < self._middle - self._gate
        if self.drop is None:
            is_on = dropped and len(self._recent) == self.rule.recent
        else:
            is_on = recent < self._middle - self._gate / 2
        if not is_on:
            if self.drop is not None:
                self._cusum = 0.0
            self.drop = None
            return
        self.drop = Drop(
            rule=self.rule,
            since_ns=self.drop.since_ns if self.drop else self._rising_since_ns,
            baseline=self._middle,
            level=recent,
            sigma=self._sigma,
            cusum=self._cusum,
            windows=len(self._baseline),
        )

    def _learn(self, level: float) -> None:
        self._baseline.append(level)
        self._since_fit += 1
        if self.is_ready and (self._since_fit >= _REFIT_EVERY or self._sigma == 0.0):
            self._since_fit = 0
            values = np.array(self._baseline)
            self._middle, spread, self._sigma = spread_of(values)
            self._gate = max(-float(np.log1p(-self.rule.gate)), self.rule.gate_spreads * spread)


class SteadyWatch:
    """The ten-second windows of groups that share wires, under both rules with an hour's baseline."""

    def __init__(self) -> None:
        self._steady, self._sustained = DropWatch(STEADY), DropWatch(SUSTAINED)

    @property
    def drop(self) -> Drop | None:
        """The alarm that is on."""
        return self._steady.drop or self._sustained.drop

    @property
    def is_ready(self) -> bool:
        """Whether a baseline is known."""
        return self._steady.is_ready and self._sustained.is_ready

    @property
    def is_quiet(self) -> bool:
        """Whether a baseline is known and nothing points to a drop."""
        return self._steady.is_quiet and self._sustained.drop is None

    @property
    def is_unsuspicious(self) -> bool:
        """Whether a baseline is known and little points to a drop."""
        return self._steady.is_unsuspicious and self._sustained.is_unsuspicious

    def feed(self, at_ns: int, level: float) -> None:
        """Takes the next window. What one rule holds for a fault the other does not learn."""
        if self._sustained.drop is None or self._steady.drop is not None:
            self._steady.feed(at_ns, level)
        if self._steady.drop is None or self._sustained.drop is not None:
            self._sustained.feed(at_ns, level)


class DriftWatch:
    """Whether one series has become slower than in its first hour, too slowly for `DropWatch`, which learns from it.

    An exponential mean (lambda 0.02) of ten-second windows against the first 360 of them; it must lie below by 5 % and
    by five of its standard errors for half an hour. Source: Roberts 1959 (EWMA).
    """

    def __init__(self) -> None:
        self.drift: Drop | None = None
        self._first: list[float] = []
        self._middle = self._sigma = self._mean = 0.0
        self._since_ns = 0
        self._below = 0
        self._warmup = _WARMUP

    def feed(self, at_ns: int, level: float) -> None:
        """Takes the next ten-second window; `drift` says afterwards whether the alarm is on."""
        if self._warmup:
            self._warmup -= 1
            return
        if len(self._first) < STEADY.baseline:
            self._first.append(level)
            if len(self._first) == STEADY.baseline:
                self._middle, _, self._sigma = spread_of(np.array(self._first))
                self._mean = self._middle
            return
        level = min(max(level, self._middle - _WINSOR * self._sigma), self._middle + _WINSOR * self._sigma)
        self._mean += _DRIFT_WEIGHT * (level - self._mean)
        error = self._sigma * np.sqrt(_DRIFT_WEIGHT / (2 - _DRIFT_WEIGHT) + 1 / len(self._first))
        behind = self._middle - self._mean
        if behind <= max(_DRIFT_GATE, _DRIFT_ERRORS * error) * (0.5 if self.drift else 1.0):
            self._below, self.drift = 0, None
            return
        self._since_ns = self._since_ns if self._below else at_ns
        self._below += 1
        if self._below >= _DRIFT_WINDOWS:
            self.drift = Drop(
                rule=STEADY,
                since_ns=self._since_ns,
                baseline=self._middle,
                level=self._mean,
                sigma=self._sigma,
                cusum=0.0,
                windows=len(self._first),
            )


def spread_of(baseline: NDArray[np.float64]) -> tuple[float, float, float]:
    """Median, spread and working sigma of a baseline.

    The spread is the deviation of values winsorised at four MAD: the MAD alone understates how far a series with heavy
    tails wanders. The working sigma is widened for autocorrelation and for how little was seen.
    """
    middle = float(np.median(baseline))
    mad = 1.4826 * float(np.median(np.abs(baseline - middle)))
    off = np.clip(baseline - middle, -4 * max(mad, 1e-9), 4 * max(mad, 1e-9))
    power = float((off**2).sum())
    spread = max(mad, float(np.sqrt(power / len(off))))
    phi = float((off[1:] * off[:-1]).sum()) / power if power > 0 else 0.0
    phi = min(max(phi + 1.5 / np.sqrt(len(off)), 0.0), _MOST_PHI)  # short series underestimate it
    widened = max(spread * (1.0 + 2.0 / np.sqrt(len(off))), _LEAST_SIGMA) * np.sqrt((1 + phi) / (1 - phi))
    return middle, spread, float(widened)
