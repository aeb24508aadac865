"""False alarms of healthy jobs over many days, window by window, and how soon a loss of bandwidth is found.

A job-day is a job that starts and runs for 24 hours: four groups of one parallelism, each with a series of bandwidth
by window, and four groups of four ranks with a blame in each step of a second. All of it is noise: autoregressive, 0.6
from one window or step to the next, with the tails of Student's t with four degrees of freedom. The baseline rules are
the detectors' own objects; the rules of siblings and of late ranks are the same arithmetic over a day at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np
from benchmarks.findings.least_delay import Series, least_delays, noise
from numpy.typing import NDArray

from ncclscope_service.detect import comparable_groups
from ncclscope_service.detect.settings import DEFAULTS
from ncclscope_service.detect.statistics import QUICK, STEADY, DriftWatch, DropWatch, firmness

_SERIES: Final = 4
_GROUPS, _RANKS = 4, 4
_DAY: Final = 86_400
_HOUR: Final = 3_600
_WINDOW: Final = 10
_JUDGED_EVERY: Final = 4
_STEPS: Final = 16
_PHI: Final = 0.6
_MILLISECOND: Final = 1e6
_SPREAD_NS: Final = 20 * _MILLISECOND
"""Spread of when ranks arrive, for a coefficient of variation of 1."""
_AT_ONCE: Final = 20
"""Job-days that are drawn together."""
_STEP_NS: Final = 1e9
_BAR: Final = 0.1
"""False alarms per job-day."""

ALARMS_HEADER: Final = """\
| noise | short baseline | hour's baseline | shared wires | drift | siblings | late | per job-day | at most (95 %) |
|---|---:|---:|---:|---:|---:|---:|---:|---:|"""
DELAYS_HEADER: Final = """\
| baseline | noise | loss | found | delay p50 | p90 |
|---|---|---:|---:|---:|---:|"""


def print_false_alarms(days: int) -> None:
    """The table: alarms by rule, their rate and its 95 % upper bound (exact for Poisson counts)."""
    print(f"{days} job-days per row; {_SERIES} series of bandwidth and {_GROUPS} groups of {_RANKS} ranks each.\n")
    print(ALARMS_HEADER)
    for cv in (0.05, 0.10):
        alarms: Counter[str] = Counter()
        for first in range(0, days, _AT_ONCE):
            random = np.random.default_rng([first, round(100 * cv)])
            alarms.update(_alarms_of_days(random, cv, min(_AT_ONCE, days - first)))
        total = sum(alarms.values())
        columns = " | ".join(str(alarms[name]) for name in ("quick", "steady", "wires", "drift", "siblings", "late"))
        print(f"| CV {cv:.0%} | {columns} | {total / days:.3f} | {upper_bound(total) / days:.3f} |", flush=True)


def print_delays(trials: int) -> None:
    """The table: how long after a loss of bandwidth the rules with a baseline find it."""
    print(f"\n{DELAYS_HEADER}")
    baselines = (
        ("an hour of 10 s", STEADY.baseline, _steady, _WINDOW, 1),
        ("the same, four groups that share wires", STEADY.baseline, _steady, _WINDOW, _SERIES),
        ("60 s of 1 s", QUICK.baseline, _quick, 1, 1),
        ("the same, four groups that share wires", QUICK.baseline, _quick, 1, _SERIES),
    )
    for name, baseline, watching, seconds, groups in baselines:
        for told, phi, heavy in (("CV 5 %, independent", 0.0, False), ("CV 5 %, correlated, heavy tails", _PHI, True)):
            for loss in (0.2, 0.4):
                delays = _delays(watching, max(baseline + 30, 60), seconds, (trials, groups), phi, loss, heavy=heavy)
                middle, late = np.percentile(delays, (50, 90)) if delays else (np.nan, np.nan)
                print(
                    f"| {name} | {told} | {loss:.0%} | {len(delays)} of {trials} | {middle:.0f} s | {late:.0f} s |",
                    flush=True,
                )
    for loss in (0.2, 0.4):
        best = _WINDOW * least_delays(loss, 0.05, _PHI, _BAR / (_SERIES * _DAY / _WINDOW), trials)
        middle, late = np.percentile(best, (50, 90))
        print(
            f"| known, as is the loss: the least possible | CV 5 %, correlated, heavy tails | {loss:.0%} | "
            f"{len(best)} of {trials} | {middle:.0f} s | {late:.0f} s |",
            flush=True,
        )


def upper_bound(count: int) -> float:
    """The largest mean of which so few events come in 5 % of cases; by bisection of Poisson's distribution."""
    low, high = float(count), 3.0 * count + 10.0
    for _ in range(60):
        mean = (low + high) / 2
        terms = np.cumsum(np.concatenate([[0.0], np.log(mean) - np.log(np.arange(1, count + 1))]))
        at_most = float(np.exp(terms - mean).sum())
        low, high = (mean, high) if at_most > 0.05 else (low, mean)
    return low


def _alarms_of_days(random: np.random.Generator, cv: float, days: int) -> Counter[str]:
    seconds = cv * noise(random, _DAY, days * _SERIES, _PHI)
    windows = cv * noise(random, _DAY // _WINDOW, days * _SERIES, _PHI)
    alarms = Counter(
        quick=sum(_drops(_quick(), column.tolist()) for column in seconds[:_HOUR].T),
        steady=sum(_drops(_steady(), column.tolist()) for column in windows.T),
        wires=sum(_drops(_quick(), column.tolist()) for column in _together(seconds[:_HOUR], days).T)
        + sum(_drops(_steady(), column.tolist()) for column in _together(windows, days).T),
        drift=sum(_drifts(column.tolist()) for column in windows.T),
        siblings=sum(_slow_siblings(of_job) for of_job in np.split(seconds, days, axis=1)),
    )
    del seconds
    lateness = cv * _SPREAD_NS * noise(random, _DAY, days * _GROUPS * _RANKS, _PHI)
    for of_job in np.split(lateness, days, axis=1):
        alarms["late"] += _late_ranks(of_job.reshape(_DAY, _GROUPS, _RANKS))
    return alarms


def _together(levels: Series, jobs: int) -> Series:
    """The series of each job taken together, as groups that share wires are."""
    by_job = levels.reshape(len(levels), jobs, -1)
    together: Series = np.percentile(by_job, comparable_groups.QUANTILE, axis=2)
    return together


def _quick() -> DropWatch:
    return DropWatch(QUICK)


def _steady() -> DropWatch:
    return DropWatch(STEADY)


def _drops(watch: DropWatch, levels: list[float]) -> int:
    alarms, was_on = 0, False
    for at, level in enumerate(levels):
        watch.ingest_window(at, level)
        alarms += watch.drop is not None and not was_on
        was_on = watch.drop is not None
    return alarms


def _drifts(levels: list[float]) -> int:
    watch, alarms, was_on = DriftWatch(), 0, False
    for at, level in enumerate(levels):
        watch.ingest_window(at, level)
        alarms += watch.drift is not None and not was_on
        was_on = watch.drift is not None
    return alarms


def _slow_siblings(levels: Series) -> int:
    """Groups that turn slow by the rule of `comparable_groups.py`, judged each second."""
    block, blocks = comparable_groups.BLOCK, comparable_groups.BLOCKS
    medians = np.median(np.lib.stride_tricks.sliding_window_view(levels, block, axis=0), axis=2)
    count = len(medians) - block * (blocks - 1)
    behind, gaps = np.empty((2, blocks, count, levels.shape[1]))
    for place in range(blocks):
        mine = medians[place * block : place * block + count]
        best = np.sort(mine, axis=1)[:, -max(comparable_groups.LEAST_HEALTHY, levels.shape[1] // 3) :]
        reference = np.median(best, axis=1)
        spread = 1.4826 * np.median(np.abs(best - reference[:, None]), axis=1)
        gap = reference[:, None] - mine
        gaps[place] = gap
        behind[place] = gap - np.maximum(DEFAULTS.siblings.least_log_loss, DEFAULTS.siblings.spreads * spread)[:, None]
    span = np.lib.stride_tricks.sliding_window_view(levels, block * blocks, axis=0)
    scatter = np.abs(span - np.median(span, axis=2, keepdims=True)).reshape(len(span), -1)
    least = DEFAULTS.siblings.noises * 1.4826 * np.median(scatter, axis=1)[:count, None]
    slow: NDArray[np.bool_] = np.logical_and.reduce((behind > 0) & (gaps > least), axis=0)
    return int(np.count_nonzero(slow[1:] & ~slow[:-1]))


def _late_ranks(lateness: NDArray[np.float64]) -> int:
    """Ranks that are named by the rule of `late_rank.py`, judged every four steps over the last sixteen."""
    ordered = np.sort(lateness, axis=2)
    last, blame = lateness.argmax(axis=2), ordered[:, :, -1] - ordered[:, :, -2]
    margins = np.where(np.arange(lateness.shape[2]) == last[:, :, None], blame[:, :, None], -blame[:, :, None])
    windows = np.lib.stride_tricks.sliding_window_view(margins, _STEPS, axis=0)[::_JUDGED_EVERY]
    middles = np.median(windows, axis=3)
    rank = middles.argmax(axis=2)
    own = np.take_along_axis(windows, rank[:, :, None, None], axis=2)[:, :, 0]
    by_window = np.median(own.reshape(*own.shape[:2], _JUDGED_EVERY, -1), axis=3)
    per_step = np.median(own, axis=2)
    named = (firmness(own) >= DEFAULTS.late_rank.firmness) & ((by_window > 0).sum(axis=2) >= 3)
    named &= per_step >= min(0.01 * _STEP_NS, 0.5 * _MILLISECOND)
    return int(np.count_nonzero(named[1:] & ~named[:-1]))


def _delays(
    watching: Callable[[], DropWatch],
    before: int,
    seconds: int,
    trials: tuple[int, int],
    phi: float,
    loss: float,
    *,
    heavy: bool,
) -> list[float]:
    """Seconds from the loss, after so many windows, to the alarm, of the (jobs, groups) in which there was one."""
    jobs, groups = trials
    single = 0.05 * noise(np.random.default_rng(7), before + 200, jobs * groups, phi, heavy=heavy)
    values = _together(single, jobs) if groups > 1 else single
    values[before:] += np.log1p(-loss)
    delays: list[float] = []
    for column in range(jobs):
        watch = watching()
        for at, level in enumerate(values[:, column].tolist()):
            watch.ingest_window(at, level)
            if at >= before and watch.drop is not None:
                delays.append(seconds * (at - before + 1))
                break
    return delays
