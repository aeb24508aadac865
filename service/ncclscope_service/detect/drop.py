"""Whether one series of levels has dropped below its own past.

Two conditions must hold at once. A CUSUM of log-likelihood ratios against the baseline's noise (`noise.py`): the first
window of a loss differs from what the window before it foretells by all of the loss, the next ones only by what
autocorrelation leaves; so a loss is told from the excursions of autocorrelated noise, which begin in the same way but
decay. And the median of the last windows below the baseline by a stated share, as what is certain may still be too
little to matter. Sources: Page 1954 (CUSUM); Lorden 1971 and Moustakides 1998, "Quickest detection of abrupt changes
for a class of random processes": where noise and loss are known, nothing finds it sooner at as few false alarms.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from ncclscope_service.detect.noise import Noise, evidence, noise_of

_WINSOR: Final = 3.0
_REFIT_EVERY: Final = 10
_DOUBT: Final = 6.0
"""Windows at which the CUSUM is higher are not learnt: they may belong to a loss."""
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
    gate: float = 0.10
    """Least drop, as a share of the baseline."""
    gate_spreads: float = 3.0
    """The same in spreads of a window, where the series is noisy."""
    sought: float = 0.15
    """The loss that the CUSUM is made for; it grows from half of it on."""
    sought_spreads: float = 4.0
    """The same in spreads of a window, where the series is noisy."""


QUICK: Final = DropRule(baseline=30, baseline_kept=900, h=24.0, recent=10)
"""One-second windows, guards the first hour: short baselines are uncertain, so it wants nearly twice the evidence."""
STEADY: Final = DropRule(baseline=360, baseline_kept=720, h=13.0, recent=5)
"""Ten-second windows against an hour. A false alarm comes about every e^h windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """An alarm that is on."""

    rule: DropRule
    since_ns: int
    baseline: float
    """Natural logarithm of bytes per second."""
    level: float
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
        self._last = 0.0
        self._noise: Noise | None = None
        self._gate = self._sought = 0.0

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
        last, self._last = self._last, level
        if self._noise is None:
            self._learn(level)
            return
        self._recent.append(level)
        self._weigh(at_ns, level, last, self._noise)
        self._decide(self._noise)
        if self.drop is None and self._cusum < _DOUBT:
            self._learn(level)

    def _weigh(self, at_ns: int, level: float, last: float, noise: Noise) -> None:
        """Adds up what speaks for a loss that goes on; one that begins now may have more to say."""
        new = (level - noise.middle - noise.phi * (last - noise.middle)) / noise.scale
        sought = self._sought / noise.scale
        begins = evidence(new, sought)
        goes_on = self._cusum + evidence(new, sought * (1 - noise.phi))
        if self._cusum == 0.0 or begins > goes_on:
            self._rising_since_ns = at_ns
        self._cusum = min(max(begins, goes_on, 0.0), 2 * self.rule.h)

    def _decide(self, noise: Noise) -> None:
        if self.drop is None and self._cusum < self.rule.h:
            return
        recent = sorted(self._recent)[len(self._recent) // 2]
        dropped = recent < noise.middle - self._gate
        if self.drop is None:
            is_on = dropped and len(self._recent) == self.rule.recent
        else:
            is_on = recent < noise.middle - self._gate / 2
        if not is_on:
            if self.drop is not None:
                self._cusum = 0.0
            self.drop = None
            return
        self.drop = Drop(
            rule=self.rule,
            since_ns=self.drop.since_ns if self.drop else self._rising_since_ns,
            baseline=noise.middle,
            level=recent,
            windows=len(self._baseline),
        )

    def _learn(self, level: float) -> None:
        self._baseline.append(level)
        self._since_fit += 1
        if self.is_ready and (self._since_fit >= _REFIT_EVERY or self._noise is None):
            self._since_fit = 0
            self._noise = noise_of(np.array(self._baseline))
            spread = self._noise.spread
            self._gate = max(-math.log1p(-self.rule.gate), self.rule.gate_spreads * spread)
            self._sought = max(-math.log1p(-self.rule.sought), self.rule.sought_spreads * spread)


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
                noise = noise_of(np.array(self._first))
                self._middle = self._mean = noise.middle
                self._sigma = noise.sigma
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
                windows=len(self._first),
            )
