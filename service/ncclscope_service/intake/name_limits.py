"""Limits on names: how many communicators, processes, hosts, templates and texts one agent and one job may bring.

Names stay as long as the service runs, so whoever may write a log could fill its memory with them. What is over a limit
counts under the name "other": its operations are counted, and take part in nothing that would need to know them apart.
It is counted as skipped, and is a gap of its log.

Each name that never did anything takes 2 KiB at most (`tests/attack/test_names.py`), each that was used 6 KiB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from ncclscope_service.store.tables import Store
from ncclscope_wire.records import SourceGap

TOO_MANY_NAMES: Final = "too_many_names"
"""The reason by which is counted what has no name of its own."""
OTHER: Final = "other"
"""The name that all of these share."""


class Named(StrEnum):
    """Kinds of names, each with limits of its own."""

    COMMUNICATORS = "communicators"
    MEMBERS = "communicators of processes"
    RANKS = "ranks of communicators"
    """As many as communicators say that they have: each rank has its place in memory."""
    PROCESSES = "processes"
    HOSTS = "hosts"
    TEMPLATES = "shapes of calls and kernels"
    TEXTS = "bytes of texts"


MOST_OF_AGENT: Final[Mapping[Named, int]] = {
    Named.COMMUNICATORS: 8_192,
    Named.MEMBERS: 32_768,
    Named.RANKS: 1 << 20,
    Named.PROCESSES: 4_096,
    Named.HOSTS: 1_024,
    Named.TEMPLATES: 1 << 17,
    Named.TEXTS: 1 << 27,
}
"""An honest agent has 8 processes on a node with some thirty communicators each: it may start a thousand times."""
MOST_OF_JOB: Final[Mapping[Named, int]] = {
    Named.COMMUNICATORS: 1 << 17,
    Named.MEMBERS: 1 << 20,
    Named.RANKS: 1 << 22,
    Named.PROCESSES: 1 << 16,
    Named.HOSTS: 1 << 14,
    Named.TEMPLATES: 1 << 21,
    Named.TEXTS: 1 << 29,
}
"""Of all its agents: 4,096 ranks have 120,000 communicators of processes."""


class NameLimits:
    """Counts the names of one store by agent and by job."""

    def __init__(self, known: Store) -> None:
        self.are_enforced = False
        """Offline all names are the user's own, and memory is what the job needs."""
        self.source: int | None = None
        """The source whose events are being followed: processes that logged no call yet have no log of their own."""
        self._store = known
        self._used: Counter[tuple[Named, str]] = Counter()
        """By agent, and by job behind a slash, with which no agent begins."""
        self._refused: Counter[tuple[int | None, Named]] = Counter()
        """By source; None: by one that is gone."""

    def take(self, what: Named, *, agent: str, job: str, source: int | None, amount: int = 1) -> bool:
        """Whether an agent may bring so many more names; if not, that is counted for its source."""
        if not self.are_enforced:
            return True
        of_agent, of_job = (what, agent), (what, f"/{job}")
        is_over = self._used[of_agent] + amount > MOST_OF_AGENT[what] or self._used[of_job] + amount > MOST_OF_JOB[what]
        if is_over:
            self._refused[source, what] += 1
            return False
        self._used[of_agent] += amount
        self._used[of_job] += amount
        return True

    def take_of_process(self, what: Named, process: int, amount: int = 1) -> bool:
        """As `take`, for the agent that named this process first."""
        known = self._store
        source = known.process_source.get(process, self.source)
        return self.take(
            what, agent=known.process_agent[process], job=known.process_job[process], source=source, amount=amount
        )

    def report_refused(self) -> None:
        """Counts what was over the limits since the last time as skipped, and as gaps of its sources."""
        for (source, what), amount in self._refused.items():
            self._store.skipped[TOO_MANY_NAMES] += amount
            if source is not None:
                detail = f"more {what} than an agent or a job may have: what is over the limit counts as {OTHER!r}"
                gap = SourceGap(reason=TOO_MANY_NAMES, amount=amount, unit="names", detail=detail)
                self._store.gaps[source].append(gap)
        self._refused.clear()
