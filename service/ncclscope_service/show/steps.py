"""The job's step time: now, before what is wrong with it began, and since it started; and since when charts show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.buckets import Window, window_until
from ncclscope_service.rollup.recent_sums import RecentSums
from ncclscope_service.store.job_history import JobHistory
from ncclscope_service.store.records import Finding, FindingKind
from ncclscope_service.store.step_history import StepHistory
from ncclscope_service.store.tables import Store

_RECENT_STEPS: Final = 20
_LEAST_STEPS: Final = 5
"""Of each side of a comparison."""
_WARM_UP_STEPS: Final = 3
_COMPARED_STEPS: Final = 100
"""Before a finding."""
_STEADY: Final = 0.05
"""Distance of the quartiles, as a share of the median, up to which steps before a finding are compared with."""
SLOWS_GROUPS: Final = frozenset(
    {FindingKind.SLOW_LINK, FindingKind.BANDWIDTH_DROP, FindingKind.SLOW_DRIFT, FindingKind.BELOW_LIMIT}
)
"""Kinds of findings that show in the bandwidth of communicators."""
LENGTHENS_STEPS: Final = SLOWS_GROUPS | {FindingKind.LATE_RANK, FindingKind.SLOW_STEPS, FindingKind.SLOWER_THAN_PLAN}
"""Kinds of findings that make steps longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeView:
    """How long steps take."""

    steps: int
    """Steps that have ended since the job began."""
    since_ns: int
    """When the first of them began."""
    now_ns: int
    """Duration of a step, median of the last `_RECENT_STEPS` or so."""
    before_ns: int | None
    """The same before the first open finding that makes steps longer; None without one, or with too few or unsteady
    steps before it."""
    slower_since_ns: int | None
    """When that finding began; None where `before_ns` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsView:
    """The steps of a job since it began, in at most 512 buckets of equally many steps."""

    steps_per_bucket: int
    iteration: tuple[int, ...]
    """The first one of each bucket."""
    started_ns: tuple[int, ...]
    mean_ns: tuple[int, ...]
    longest_ns: tuple[int, ...]


def step_time(history: StepHistory | None, findings: Sequence[Finding]) -> StepTimeView | None:
    """The step time of a job; `findings`: all of it. None while no step has ended."""
    rows = None if history is None else history.rows()
    if rows is None or not len(rows):
        return None
    mean_ns = rows["duration_ns"] / rows["steps"]
    since_ns = min(
        (each.since_ns for each in findings if each.until_ns is None and each.kind in LENGTHENS_STEPS), default=None
    )
    before_ns = None
    left = np.cumsum(rows["steps"][::-1])[::-1]
    is_recent = left <= max(_RECENT_STEPS, int(rows["steps"][-1]))
    is_recent[-1] = True
    if since_ns is not None:
        is_before = rows["started_ns"] < since_ns
        is_recent &= ~is_before
        steps_left = np.cumsum((rows["steps"] * is_before)[::-1])[::-1]
        is_before &= (np.cumsum(rows["steps"]) > _WARM_UP_STEPS) & (steps_left <= _COMPARED_STEPS)
        before, weights = mean_ns[is_before], rows["steps"][is_before]
        if weights.sum() >= _LEAST_STEPS and rows["steps"][is_recent].sum() >= _LEAST_STEPS:
            low, middle, high = (_quantile(before, weights, share) for share in (0.25, 0.5, 0.75))
            before_ns = middle if high - low <= _STEADY * middle else None
        is_recent[-1] = True
    return StepTimeView(
        steps=int(rows["steps"].sum()),
        since_ns=int(rows["started_ns"][0]),
        now_ns=_quantile(mean_ns[is_recent], rows["steps"][is_recent], 0.5),
        before_ns=before_ns,
        slower_since_ns=since_ns if before_ns is not None else None,
    )


def _quantile(values: NDArray[np.float64], weights: NDArray[np.int64], share: float) -> int:
    """The weighted quantile."""
    order = np.argsort(values)
    place = np.searchsorted(np.cumsum(weights[order]), weights.sum() * share)
    return int(values[order[place]])


def steps_view(history: StepHistory | None) -> StepsView:
    """The history of a job as the page draws it."""
    rows = (history or StepHistory()).rows()
    return StepsView(
        steps_per_bucket=1 if history is None else history.steps_per_bucket,
        iteration=tuple(rows["iteration"].tolist()),
        started_ns=tuple(rows["started_ns"].tolist()),
        mean_ns=tuple((rows["duration_ns"] // np.maximum(rows["steps"], 1)).tolist()),
        longest_ns=tuple(rows["longest_ns"].tolist()),
    )


def begin_of_job(store: Store, sums: RecentSums, job: str, now_ns: int) -> int:
    """Where charts over the whole time of a job begin: with its first step, else with the first that is known of it."""
    history, steps = store.job_histories.get(job), store.step_histories.get(job)
    first_ns, last_ns = sums.logged.within(window_until(now_ns), len(store.processes))
    own = np.array([name == job for name in store.process_job], np.bool_) & (first_ns <= last_ns)
    known: list[int] = [*first_ns[own].tolist(), now_ns]
    if steps is not None and len(rows := steps.rows()):
        known = [int(rows["started_ns"][0]), now_ns]
    elif history is not None and history.first_ns is not None:
        known.append(history.first_ns)
    return min(known)


def window_of_job(store: Store, sums: RecentSums, job: str, now_ns: int) -> Window:
    """The buckets of charts over the whole time of a job."""
    history = store.job_histories.get(job, JobHistory())
    return history.window(job, begin_of_job(store, sums, job, now_ns), now_ns)
