"""Steps that became longer: what everybody watches, from logs alone.

The duration of each step is compared with the job's own healthy past by the rule that watches bandwidth
(`statistics.DropWatch`), a step a window. Who makes the steps longer is the matter of other detectors: while one
of them has an open finding that explains it, or may still find one, this one is silent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ncclscope_service.detect.context import Context, duration_text
from ncclscope_service.detect.statistics import Drop, DropRule, DropWatch
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_service.store.settings import SECOND_NS
from ncclscope_wire.batch import Columns

_RULE: Final = DropRule(
    baseline=30, baseline_kept=720, h=24.0, recent=11, gate=0.04, gate_spreads=1.2, sought=0.08, sought_spreads=1.5
)
"""Windows are steps: 30 healthy ones, then about ten longer by a tenth. `gate` and `h` are settings."""
_MEMORY: Final = 1 / 8
"""Share of the newest step in the usual duration."""
_REMEMBERED: Final = 720
_CLOSED_KEPT: Final = 32
_EXPLAIN: Final = frozenset(
    {
        FindingKind.LATE_RANK,
        FindingKind.SLOW_LINK,
        FindingKind.BANDWIDTH_DROP,
        FindingKind.SLOW_DRIFT,
        FindingKind.HANG,
        FindingKind.MISMATCH,
        FindingKind.BELOW_LIMIT,
        FindingKind.SLOW_STEPS,
    }
)
"""Kinds of findings that say why steps are longer, or that they are."""


class SlowSteps:
    """The steps of one job."""

    def __init__(self) -> None:
        self._context = Context(job="")
        self._watch = DropWatch(_RULE)
        self._steps: deque[tuple[int, int, int, float, float]] = deque(maxlen=_REMEMBERED)
        """Rows of `step_times.STEP`."""
        self._usual_ns = 0.0
        self._newest_ns = 0
        self._alarm: Drop | None = None
        self._alarmed_ns = 0
        """When the alarm came on."""
        self._before = np.zeros(3)
        """Medians by then of the steps before those that are longer: duration, operations, bytes."""
        self._first = 0
        """The first step that was longer."""
        self._closed: deque[Finding] = deque(maxlen=_CLOSED_KEPT)

    def ingest_steps(self, steps: Columns, context: Context) -> None:
        """Takes steps (`step_times.STEP`) in order."""
        self._context = context
        settings = context.settings.slow_steps
        self._watch.rule = replace(_RULE, gate=settings.least_share, h=settings.evidence)
        for step in steps.tolist():
            _, started_ns, duration_ns, _, _ = step
            if duration_ns <= 0 or (self._usual_ns and duration_ns > settings.long_steps * self._usual_ns):
                continue
            self._usual_ns += (duration_ns - self._usual_ns) * (_MEMORY if self._usual_ns else 1.0)
            self._watch.ingest_window(started_ns, -math.log(duration_ns))
            drop = self._watch.drop
            if drop is None and self._alarm is not None:
                self._closed.append(replace(self._finding(self._alarm), until_ns=started_ns))
            self._steps.append(step)
            if drop is not None and self._alarm is None:
                self._alarmed_ns = started_ns
                self._remember_before(drop)
            self._newest_ns = max(self._newest_ns, started_ns + duration_ns)
            self._alarm = drop

    def findings(self, others: Sequence[Finding]) -> list[Finding]:
        """All findings so far, but those that one of the `others` of this job explains."""
        found = list(self._closed)
        wait_ns = self._context.settings.slow_steps.others_first_seconds * SECOND_NS
        is_due = self._context.is_over or self._newest_ns - self._alarmed_ns >= wait_ns
        if self._alarm is not None and is_due:
            found.append(self._finding(self._alarm))
        return [each for each in found if not any(explains(other, each) for other in others)]

    def _remember_before(self, drop: Drop) -> None:
        """Keeps what steps were: an alarm may stay on for longer than steps are remembered."""
        self._first = next(number for number, start, *_ in self._steps if start >= drop.since_ns)
        earlier = [row[2:] for row in self._steps if row[1] < drop.since_ns]
        self._before = np.median(np.array(earlier or [self._steps[0][2:]]), axis=0)

    def _finding(self, drop: Drop) -> Finding:
        slow = np.array([row[2:] for row in self._steps if row[1] >= drop.since_ns])
        before, now = self._before, np.median(slow, axis=0)
        share = now[0] / before[0] - 1.0
        operations, size = (float(now[at] / before[at] - 1.0) if before[at] else 0.0 for at in (1, 2))
        has_changed = max(abs(operations), abs(size)) > self._context.settings.slow_steps.changed_share
        is_critical = share >= self._context.settings.slow_steps.critical_share and not has_changed
        cause = (
            f"a step has {operations:+.1%} operations and {size:+.1%} bytes: the work itself has changed"
            if has_changed
            else "operations and bytes of a step are what they were"
        )
        return Finding(
            kind=FindingKind.SLOW_STEPS,
            severity=Severity.CRITICAL if is_critical else Severity.WARNING,
            job=self._context.job,
            since_ns=drop.since_ns,
            confidence=0.95,
            summary=(
                f"steps take {duration_text(now[0])}, {share:.1%} longer than the {duration_text(before[0])} before "
                f"step {self._first}; {cause}"
            ),
            evidence={
                "step_ns": int(now[0]),
                "step_before_ns": int(before[0]),
                "first_step": self._first,
                "steps": len(slow),
                "operations_per_step": float(now[1]),
                "operations_per_step_before": float(before[1]),
                "bytes_per_step": float(now[2]),
                "bytes_per_step_before": float(before[2]),
            },
        )


def explains(other: Finding, slow: Finding) -> bool:
    """Whether this finding says why steps were longer: it is of such a kind, and was open at some time of theirs."""
    is_before = other.until_ns is not None and other.until_ns < slow.since_ns
    is_after = slow.until_ns is not None and other.since_ns > slow.until_ns
    return other.kind in _EXPLAIN and not is_before and not is_after
