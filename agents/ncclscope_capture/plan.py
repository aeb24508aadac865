"""When to record: a budget becomes a share of time, and the share becomes starts that all nodes choose alike.

`duty = budget / overhead`: a job that is 10 % slower while it is recorded, and may lose 1 %, is recorded a tenth of the
time. All helpers with the same settings start at the same multiples of the period since 1970, so that the ranks of a
collective are recorded together, as far as the clocks of their nodes agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

_FIRST_BACKOFF_SECONDS = 30.0
_LAST_BACKOFF_SECONDS = 600.0
_MOST_FAILURES = 6
"""In a row. Then nothing is recorded any more: nsys does not work here."""


class Outcome(Enum):
    """The outcome of one recording."""

    FINISHED = "finished"
    FAILED = "failed"
    SKIPPED = "skipped"
    """Not begun: there is no room on the disk."""


@dataclass(frozen=True)
class Budget:
    """The time that recording may cost, and what follows from it."""

    budget_ratio: float
    """Share of the job's time that may be lost."""
    overhead_ratio: float
    """How much slower the job is while it is recorded."""
    chunk_seconds: float

    @property
    def duty(self) -> float:
        """Share of time that is recorded at most."""
        return min(1.0, self.budget_ratio / self.overhead_ratio)

    @property
    def period_seconds(self) -> float:
        """From the start of one recording to the next."""
        return self.chunk_seconds / self.duty


class Plan:
    """Says when to record next. Times are seconds since 1970."""

    def __init__(self, budget: Budget, *, now: float) -> None:
        self._budget = budget
        self._began = now
        self._spent = 0.0
        self._failures = 0
        self._not_before = now

    @property
    def has_given_up(self) -> bool:
        """Whether too many recordings failed in a row: no more is tried."""
        return self._failures >= _MOST_FAILURES

    def next_start(self, now: float) -> float:
        """The next start: a multiple of the period, late enough that the share of time stays within the budget.

        nsys records on while a command stops it, so the time of a recording counts from the command that begins it
        to the end of the one that ends it; what was longer than planned is made up for by leaving periods out.
        """
        period = self._budget.period_seconds
        affordable = self._began + (self._spent + self._budget.chunk_seconds) / self._budget.duty - period
        earliest = max(now, self._not_before, affordable)
        period_ms = max(1, round(period * 1000))
        return math.ceil(earliest * 1000 / period_ms - 1e-9) * period_ms / 1000

    def recorded(self, outcome: Outcome, *, seconds: float, now: float) -> None:
        """Records the outcome of a recording that took `seconds` from start to stop."""
        self._spent += seconds
        if outcome is not Outcome.FAILED:
            self._failures = 0 if outcome is Outcome.FINISHED else self._failures
            return
        self._failures += 1
        self._not_before = now + min(_FIRST_BACKOFF_SECONDS * 2 ** (self._failures - 1), _LAST_BACKOFF_SECONDS)
