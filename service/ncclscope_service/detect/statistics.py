"""Statistical tests of detectors: is a rank's lateness more than chance, and has a series dropped below its past.

*Lateness.* The margin by which one rank leads all others in blame: ranks of a group jitter, and a rank that is slow in
one step is slow in the next, so the standard error of a mean margin is widened by sqrt((1 + phi) / (1 - phi)), phi the
margin's autocorrelation, which short series underestimate: it counts as 0.5 at least.

Few steps may be alike by chance. What they say of a lasting lateness is an e-value: a likelihood ratio that mere jitter
exceeds by a factor x with a probability of 1 / x at most, however often one looks (Ville 1939). So a rank is named as
soon as the stated error rate allows, after five steps of a clear case or sixteen of a faint one.

Sixteen steps of one group say little of its scatter, and a rank must stand far out of it to differ from chance. Groups
of one kind do the same work: their scatter, and how much of it lasts from step to step, is that of all of them, known
well after some steps. A rank's lateness is its blame less the mean of the others' (what all ranks share falls out).
This says nothing if scatter lasts: then few steps, of however many groups, are fewer still.

*Drops.* For a series of levels to have dropped below its own past, two conditions must hold at once. A CUSUM of
log-likelihood ratios against the baseline's noise: the first window of a loss differs from what the window before it
predicts by all of the loss, the next ones only by what autocorrelation leaves; so a loss differs from the excursions of
autocorrelated noise, which begin in the same way but decay. And the median of the last windows is below the baseline by
a stated share, as a certain loss may still be too small to matter. Sources: Page 1954 (CUSUM); Lorden 1971 and
Moustakides 1998, "Quickest detection of abrupt changes for a class of random processes": if noise and loss are known,
nothing finds it sooner at as few false alarms.

A level is modelled as autoregressive, the innovation of each window with the tails of Student's t with four degrees of
freedom: rare far outliers belong to healthy series and say little. Source: Lange, Little, Taylor 1989, "Robust
statistical modeling using the t distribution".
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.detect.context import Context
from ncclscope_service.detect.step_blame import Blames, JudgedGroups

Margins: TypeAlias = NDArray[np.float64]
Firmness: TypeAlias = NDArray[np.float64]
"""By group and rank: its mean lateness over the standard error of that."""
_Kind: TypeAlias = tuple[str | None, int, int]
"""Parallelism and size of groups, and the operation, ALL_OPS for all of them."""

_MAD_TO_SIGMA: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_MEAN_TO_SIGMA: Final = 1.2533
"""The same over its mean absolute deviation."""
_MARGIN_WINSOR: Final = 3.0
"""Robust spreads at which outliers are cut: one stall must not set the scale."""
_LEAST_PHI, _MOST_MARGIN_PHI = 0.5, 0.9
_PRIOR_STEPS: Final = 4.0
"""Independent steps as which what is known of jitter counts, and"""
_EFFECT: Final = 30.0
"""how many times jitter a lateness may well be: in logarithms hardly any matter."""
_LATE_BEFOREHAND: Final = 0.001
_MOST_EVIDENCE: Final = 100.0
_POOLED_MOST_PHI: Final = 0.3
"""Scatter that lasts longer leaves too few independent steps."""
_LEAST_SPREAD_NS: Final = 1_000.0
"""Below, timestamps themselves scatter."""
_LEAST_ESTIMATES: Final = 8
"""Passes after which the autocorrelation of a kind is known well enough."""
_MEMORY: Final = 64
"""Passes over which the autocorrelation is averaged."""
_LEAST_SAMPLES: Final = 100
"""Steps by ranks, all groups together."""


def medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the last axis: as `numpy.median`, at a fifth of its price for small arrays."""
    count = values.shape[-1]
    ordered = np.partition(values, (count - 1) // 2 if count % 2 else (count // 2 - 1, count // 2), axis=-1)
    middle: NDArray[np.float64] = ordered[..., count // 2]
    return middle if count % 2 else (ordered[..., count // 2 - 1] + middle) / 2


def margins_over_others(blames: Blames) -> Margins:
    """Each rank's blame less the largest of any other rank, in each step; ranks are on the last axis but one."""
    if blames.shape[-2] < 2:
        return blames
    is_first = blames.argmax(axis=-2)[..., None, :] == np.arange(blames.shape[-2])[:, None]
    others = np.where(is_first, -np.inf, blames).max(axis=-2, keepdims=True)
    margins: Margins = blames - np.where(is_first, others, blames.max(axis=-2, keepdims=True))
    return margins


def firmness(margins: Margins) -> Margins:
    """The mean of margins over its standard error, steps on the last axis; winsorised at three robust spreads."""
    mean, deviation, looks = _moments(margins, widening=1.0)
    firm: Margins = mean / (deviation * (1.0 + 2.0 / np.sqrt(margins.shape[-1])) / np.sqrt(looks))
    return firm


def log_evidence(margins: Margins, jitter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of the e-value of a lasting lateness against jitter alone, steps on the last axis.

    That margins of mere jitter ever reach e^x has a probability of at most e^-x, however often one looks: the test may
    go on until the evidence suffices, be it after four steps or after hundreds. `jitter`: how much ranks of a healthy
    job jitter, which counts as four steps do; so few steps that are alike by chance are no evidence. Correlated steps
    count as the fewer independent ones. Source: Wang, Ramdas 2025, "Anytime-valid t-tests and confidence sequences for
    Gaussian means with unknown variance"; here the prior of the mean is normal with a standard deviation of 30 jitters.
    """
    mean, deviation, looks = _moments(margins, widening=0.5)
    weight = looks + _PRIOR_STEPS
    square = mean**2 * looks * weight / (looks * deviation**2 + _PRIOR_STEPS * jitter**2)
    wide = 1 + _EFFECT**2 * looks
    found = (weight + 1) / 2 * (np.log1p(square / weight) - np.log1p(square / weight / wide)) - np.log(wide) / 2
    evidence: NDArray[np.float64] = np.where(mean > 0, found, 0.0)
    return evidence


def posterior(evidence: float) -> float:
    """Probability that a rank is late by the logarithm of its e-value: one rank of a thousand is late beforehand."""
    return 1 / (1 + math.exp(-min(evidence, _MOST_EVIDENCE)) / _LATE_BEFOREHAND)


def _moments(margins: Margins, *, widening: float) -> tuple[Margins, Margins, Margins]:
    """Mean and standard deviation of margins, winsorised, and as how many independent steps they count; `widening`:
    standard errors by which their autocorrelation may be larger than it looks.
    """
    count = margins.shape[-1]
    middle = medians(margins)
    off = margins - middle[..., None]
    spread = np.maximum(_MAD_TO_SIGMA * medians(np.abs(off)), _LEAST_SPREAD_NS)
    most = _MARGIN_WINSOR * spread[..., None]
    off = np.minimum(np.maximum(off, -most), most)  # a third of what numpy.clip takes
    power = (off**2).sum(axis=-1)
    phi = (off[..., 1:] * off[..., :-1]).sum(axis=-1) / np.maximum(power, _LEAST_SPREAD_NS)
    phi = np.clip(phi + widening / np.sqrt(count), _LEAST_PHI, _MOST_MARGIN_PHI)
    deviation = np.maximum(np.sqrt(power / count), spread)
    return middle + off.sum(axis=-1) / count, deviation, count * (1 - phi) / (1 + phi)


@dataclass(slots=True)
class PooledScatter:
    """Scatter of all groups of one kind: of one parallelism and size."""

    _lasting: float = 0.0
    estimates: int = 0
    _newest_ns: int = 0
    """The newest step that was used."""

    def firmness(self, blames: Sequence[Blames], newest_ns: int) -> list[Firmness]:
        """Of every rank, from blames by group, rank and step, those of groups with as many steps together; empty if too
        little is known.

        `newest_ns`: when the newest of these steps began. Without new ones nothing is learnt: if steps are long, the
        same ones are judged again and again.
        """
        if not blames:
            return []
        contrasts = [_contrast(each) for each in blames]
        middles = [medians(each) for each in contrasts]
        offs = [each - middle[..., None] for each, middle in zip(contrasts, middles, strict=True)]
        everything = np.abs(np.concatenate([each.ravel() for each in offs]))
        most = _MARGIN_WINSOR * max(
            _MAD_TO_SIGMA * float(medians(everything)), _MEAN_TO_SIGMA * float(everything.mean()), _LEAST_SPREAD_NS
        )
        offs = [np.minimum(np.maximum(each, -most), most) for each in offs]
        power = sum(float((each**2).sum()) for each in offs)
        samples = sum(each.size - each[:, 0].size for each in offs)
        steps = sum(each[:, 0].size for each in offs) / sum(map(len, offs))
        if newest_ns > self._newest_ns:
            self._newest_ns = newest_ns
            self._learn(sum(float((each[..., 1:] * each[..., :-1]).sum()) for each in offs), power, steps)
        phi = self._lasting + (1 + 3 * max(self._lasting, 0.0)) / steps
        phi += 2.0 / math.sqrt(samples)
        if self.estimates < _LEAST_ESTIMATES or samples < _LEAST_SAMPLES or phi >= _POOLED_MOST_PHI:
            return []
        common = power / sum(each.size for each in offs)
        wide = (1 + max(phi, 0.0)) / (1 - max(phi, 0.0))
        firm: list[Firmness] = []
        for off, middle in zip(offs, middles, strict=True):
            count = off.shape[-1]
            deviation = np.sqrt(np.maximum(common, (off**2).sum(axis=-1) / count))
            error = np.maximum(deviation, _LEAST_SPREAD_NS) * math.sqrt(wide / count)
            firm.append((middle + off.sum(axis=-1) / count) / error)
        return firm

    def _learn(self, lasting: float, power: float, steps: float) -> None:
        """Averages the autocorrelation over the last passes."""
        keep = 1.0 - 1.0 / min(self.estimates + 1, _MEMORY)
        scale = max(power, _LEAST_SPREAD_NS**2)
        self._lasting = keep * self._lasting + (1 - keep) * lasting / scale * steps / max(steps - 1, 1.0)
        self.estimates += 1


class ScatterByKind:
    """The groups of all kinds of a job."""

    def __init__(self) -> None:
        self._kinds: dict[_Kind, PooledScatter] = {}

    def firmness(self, judged: Sequence[JudgedGroups], context: Context) -> list[Firmness]:
        """Of the ranks in each view of these groups, against all groups of their kind; 0 if too little is known."""
        kinds: dict[_Kind, list[tuple[int, NDArray[np.intp]]]] = {}
        for place, groups in enumerate(judged):
            of_kind: dict[_Kind, list[int]] = {}
            for view, (group, op) in enumerate(zip(groups.group.tolist(), groups.op.tolist(), strict=True)):
                parallelism = context.groups[groups.communicators[group]].parallelism
                if not groups.is_largest(view):
                    of_kind.setdefault((parallelism, groups.blames.shape[1], op), []).append(view)
            for kind, views in of_kind.items():
                kinds.setdefault(kind, []).append((place, np.asarray(views, np.intp)))
        found = [np.zeros(groups.blames.shape[:2]) for groups in judged]
        for kind, places in kinds.items():
            blames = [judged[place].blames[mine] for place, mine in places]
            newest_ns = max(int(judged[place].at_ns[judged[place].group[mine], -1].max()) for place, mine in places)
            firm = self._kinds.setdefault(kind, PooledScatter()).firmness(blames, newest_ns)
            for (place, mine), each in zip(places, firm, strict=False):
                found[place][mine] = each
        return found


def _contrast(blames: Blames) -> Blames:
    """The blame of each rank less the mean of the others'."""
    others: Blames = (blames.sum(axis=-2, keepdims=True) - blames) / (blames.shape[-2] - 1)
    return np.subtract(blames, others)


_FREEDOM: Final = 4
_QUARTILE: Final = 0.7407
"""Half of Student's t with four degrees of freedom lies within plus or minus this."""
_SCALE_OF_SPREAD: Final = math.sqrt(0.5)
"""Scale of Student's t with four degrees of freedom, for a standard deviation of 1."""
_WINSOR: Final = 4.0
"""Robust spreads at which outliers of a baseline are cut."""
_LEAST_SPREAD: Final = 0.02
"""In log busbw: a series that looks steadier is not known for long enough."""
_MOST_PHI: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Noise of a baseline."""

    middle: float
    """Median."""
    spread: float
    """Standard deviation of single windows."""
    phi: float
    """Autocorrelation from one window to the next."""
    scale: float
    """Scale of Student's t of the innovation of a window: its deviation less phi times the last one's."""

    @property
    def sigma(self) -> float:
        """The spread for sums of windows, which autocorrelation makes wider."""
        return max(self.spread, _LEAST_SPREAD) * math.sqrt((1 + self.phi) / (1 - self.phi))


def noise_of(baseline: NDArray[np.float64]) -> Noise:
    """The noise of a healthy past, oldest window first, stated wider the less of it there is.

    Deviations are winsorised at four MAD; the spread is that of those, as the MAD alone understates how far a series
    with heavy tails wanders. Short series underestimate their autocorrelation, which counts for more therefore.
    """
    few = 1.0 / math.sqrt(len(baseline))
    middle = float(medians(baseline))
    mad = 1.4826 * float(medians(np.abs(baseline - middle)))
    off = np.clip(baseline - middle, -_WINSOR * max(mad, 1e-9), _WINSOR * max(mad, 1e-9))
    power = float((off**2).sum())
    phi = float((off[1:] * off[:-1]).sum()) / power if power > 0 else 0.0
    phi = min(max(phi + few, 0.0), _MOST_PHI)
    new = float(medians(np.abs(off[1:] - phi * off[:-1]))) / _QUARTILE
    least = _LEAST_SPREAD * _SCALE_OF_SPREAD * math.sqrt(1 - phi**2)
    return Noise(
        middle=middle,
        spread=(1 + few) * max(mad, math.sqrt(power / len(off))),
        phi=phi,
        scale=max((1 + few) * new, least),
    )


def log_likelihood_ratio(new: float, shift: float) -> float:
    """Log-likelihood ratio of a shift down by `shift` against none, for a window's innovation `new`; both in scales.

    A value deeper than the shift counts as if it lay there, else a collapse would count for less than a loss.
    """
    new = max(new, -shift)
    return (_FREEDOM + 1) / 2 * math.log((_FREEDOM + new * new) / (_FREEDOM + (new + shift) ** 2))


_DRIFT_WINSOR: Final = 3.0
_REFIT_EVERY: Final = 10
"""Windows after which the noise is estimated again."""
_DOUBT: Final = 6.0
"""Windows at which the CUSUM is higher are not learnt: they may belong to a loss."""
_DRIFT_WEIGHT: Final = 0.02
"""Lambda of the exponential mean: a memory of about eight minutes."""
_DRIFT_ERRORS: Final = 5.0
"""Standard errors of the exponential mean."""
_DRIFT_WINDOWS: Final = 180
"""Half an hour of ten-second windows."""
_WARMUP: Final = 5
"""First windows of a series: warm-up steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRule:
    """Windows and evidence that an alarm needs."""

    baseline: int
    """Windows that must have been seen before anything is judged."""
    baseline_kept: int
    h: float
    """Height of the CUSUM that alarms."""
    recent: int
    """Windows whose median is compared with the gate."""
    gate: float = 0.10
    """Least drop, as a share of the baseline."""
    gate_spreads: float = 3.0
    """The same in spreads of a window, if the series is noisy."""
    sought: float = 0.15
    """The loss that the CUSUM is tuned for; it grows from half of it on."""
    sought_spreads: float = 4.0
    """The same in spreads of a window, if the series is noisy."""


QUICK: Final = DropRule(baseline=30, baseline_kept=900, h=24.0, recent=10)
"""One-second windows, for the first hour: short baselines are uncertain, so it needs nearly twice the evidence."""
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

    def ingest_window(self, at_ns: int, level: float) -> None:
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
        """Adds up the evidence for a loss that goes on, or for one that begins now if that is stronger."""
        new = (level - noise.middle - noise.phi * (last - noise.middle)) / noise.scale
        sought = self._sought / noise.scale
        begins = log_likelihood_ratio(new, sought)
        goes_on = self._cusum + log_likelihood_ratio(new, sought * (1 - noise.phi))
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

    def ingest_window(self, at_ns: int, level: float, *, least_drift: float = 0.05) -> None:
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
        level = min(max(level, self._middle - _DRIFT_WINSOR * self._sigma), self._middle + _DRIFT_WINSOR * self._sigma)
        self._mean += _DRIFT_WEIGHT * (level - self._mean)
        error = self._sigma * np.sqrt(_DRIFT_WEIGHT / (2 - _DRIFT_WEIGHT) + 1 / len(self._first))
        behind = self._middle - self._mean
        if behind <= max(least_drift, _DRIFT_ERRORS * error) * (0.5 if self.drift else 1.0):
            self._below, self.drift = 0, None
            return
        self._since_ns = self._since_ns if self._below else at_ns
        self._below += 1
        if self._below >= _DRIFT_WINDOWS:
            self.drift = Drop(
                rule=STEADY, since_ns=self._since_ns, baseline=self._middle, level=self._mean, windows=len(self._first)
            )
