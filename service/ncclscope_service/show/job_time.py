"""The time that charts over a whole job cover: from its first step, or the first that is known of it, to now."""

from __future__ import annotations

import numpy as np

from ncclscope_service.columns.buckets import Window, window_until
from ncclscope_service.rollup.recent_sums import RecentSums
from ncclscope_service.store.job_history import JobHistory
from ncclscope_service.store.tables import Store


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
