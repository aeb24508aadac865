"""What one scrape leaves to the next: what changes seldom or costs much. It can be made anew at any time.

The iterations of the newest operations are looked at anew every few seconds, since that is a look at each of these
operations; the labels of series and the hosts of a communicator when they have changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from ncclscope_service.iteration_times import IterationSummary, iteration_times, summarise
from ncclscope_service.ranks import hosts_of
from ncclscope_service.rows import Communicator
from ncclscope_service.series_metrics import SeriesLabels
from ncclscope_service.store import Store
from ncclscope_service.window import MAX_OPERATIONS

ITERATIONS_KEPT_NS: Final = 5_000_000_000
"""How long the iterations' summary serves: a look at MAX_OPERATIONS costs 10 to 100 ms of CPU."""


class IterationSummaries:
    """The iterations of each job, over the newest MAX_OPERATIONS operations, at most ITERATIONS_KEPT_NS old."""

    def __init__(self) -> None:
        self._at_ns: int | None = None
        self._of: dict[str, IterationSummary] = {}

    def of(self, store: Store, jobs: Sequence[str], now_ns: int) -> Mapping[str, IterationSummary]:
        """By job, in this order; looked at anew where a job is new."""
        is_fresh = self._at_ns is not None and 0 <= now_ns - self._at_ns < ITERATIONS_KEPT_NS
        if not is_fresh or list(self._of) != list(jobs):
            self._at_ns = now_ns
            self._of = _summaries(store, jobs)
        return self._of


class HostCounts:
    """On how many hosts each communicator is."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, int, int]] = {}
        """By communicator: how many members it had, the sum of their indices, and its hosts."""

    def amount(self, store: Store, communicator: Communicator) -> int:
        """Of one communicator; counted anew where others are in it."""
        members = communicator.members or {}
        amount, total = len(members), sum(members.values())
        known = self._of.get(communicator.index)
        if known is None or known[:2] != (amount, total):
            known = self._of[communicator.index] = (amount, total, len(hosts_of(store, communicator)))
        return known[2]


class ScrapeMemo:
    """All of it."""

    def __init__(self) -> None:
        self.iterations = IterationSummaries()
        self.hosts = HostCounts()
        self.labels = SeriesLabels()


def _summaries(store: Store, jobs: Sequence[str]) -> dict[str, IterationSummary]:
    found = iteration_times(store, store.operations.rows[-MAX_OPERATIONS:])
    places = {job: place for place, job in enumerate(jobs)}
    job_of = np.asarray([places[job] for job in store.process_job], np.int64)
    place_of = job_of[found["process"]] if len(found) else np.empty(0, np.int64)
    return {job: summarise(found[place_of == place]) for place, job in enumerate(jobs)}
