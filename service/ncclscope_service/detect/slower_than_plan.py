"""Steps that take longer than they should, by the job's description and the calibration of an earlier run.

Off unless both were given, the rules of the framework's version were held against real logs, and the job's traffic is
what its description says. It opens when each of the last 20 steps took longer than what hardly any job does
(`ExpectedStep.limit`), and closes when half of them do not. While another finding says why steps are longer, this one
is silent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

from ncclscope_models.expected_step import ExpectedStep
from ncclscope_service.detect.context import Context, Ledger, duration_text
from ncclscope_service.detect.slow_steps import explains
from ncclscope_service.store.plan_records import PlanRecord
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_wire.batch import Columns

_STEPS: Final = 20


class SlowerThanPlan:
    """The steps of one job."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._steps: deque[tuple[int, int]] = deque(maxlen=_STEPS)
        """Begin and duration of the newest ones."""

    def ingest_steps(self, steps: Columns) -> None:
        """Takes steps (`step_times.STEP`) in order."""
        self._steps += [(row[1], row[2]) for row in steps.tolist()[-_STEPS:] if row[2] > 0]

    def compare(self, expected: ExpectedStep | None, plan: PlanRecord | None, context: Context, now_ns: int) -> None:
        """Holds the newest steps against what is expected of them."""
        is_sure = plan is not None and plan.may_raise and not plan.edits and not plan.unexplained_operations
        durations = [duration_ns for _, duration_ns in self._steps]
        if expected is None or not is_sure or len(durations) < _STEPS:
            return
        limit_ns = expected.limit * 1e9
        if min(durations) > limit_ns:
            self._ledger.update("steps", _finding(expected, durations, context, self._steps[0][0]))
        elif median(durations) <= limit_ns:
            self._ledger.close("steps", now_ns)

    def findings(self, others: Sequence[Finding]) -> list[Finding]:
        """All findings so far, but those that one of the `others` of this job explains."""
        return [each for each in self._ledger.findings() if not any(explains(other, each) for other in others)]


def _finding(expected: ExpectedStep, durations: list[int], context: Context, since_ns: int) -> Finding:
    step_ns = median(durations)
    low, typical, high = (round(each * 1e9) for each in (expected.low, expected.typical, expected.high))
    same = "the same job" if expected.is_same else f"job {expected.run}, laid out differently,"
    return Finding(
        kind=FindingKind.SLOWER_THAN_PLAN,
        severity=Severity.WARNING,
        job=context.job,
        since_ns=since_ns,
        confidence=0.9,
        summary=(
            f"steps take {duration_text(step_ns)}, {step_ns / typical - 1:.1%} longer than the "
            f"{duration_text(typical)} that are expected ({duration_text(low)} to {duration_text(high)}) since {same} "
            "was recorded on this machine; no other finding says why"
        ),
        evidence={
            "step_ns": round(step_ns),
            "expected_ns": typical,
            "expected_low_ns": low,
            "expected_high_ns": high,
            "limit_ns": round(expected.limit * 1e9),
            "steps": len(durations),
            "recorded_job": expected.run,
            "is_same_layout": expected.is_same,
        },
    )
