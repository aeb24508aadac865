"""Steps that take longer than they should, by the job's description and the calibration of an earlier run.

Off unless both were given, the rules of the framework's version were held against real logs, and the job's traffic is
what its description says. It opens when each of the last 20 steps took longer than what hardly any job does
(`ExpectedStep.limit`), and closes when half of them do not. While another finding says why steps are longer, this one
is silent.

It names the part that grew where both sides have it: the same job was recorded with its kernels, and so are steps of
this one that took longer than the limit.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from ncclscope_models.expected_step import ExpectedPart, ExpectedStep
from ncclscope_service.detect.context import Context, Ledger, duration_text
from ncclscope_service.detect.slow_steps import explains
from ncclscope_service.job.iterations import STEP_KEPT_NS
from ncclscope_service.job.step_budget import MeanStep
from ncclscope_service.store.plan_records import PlanRecord
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_wire.batch import Columns

_STEPS: Final = 20


_WORDS: Final = {
    "computation": "computation",
    "exposed_transfer": "exposed transfer",
    "exposed_wait": "waiting that nothing explains",
    "bubble": "waiting in the pipeline",
    "imbalance": "waiting for unequal stages",
    "late": "waiting for a late rank",
    "exposed": "exposed communication",
    "idle": "idle time",
}
_COMPUTING: Final = ("computation", "hidden")
"""Parts in which a GPU computes, with communication beside it or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChange:
    """A part of the mean step, beside the same of the run that was recorded."""

    part: str
    """`computation` is with what it hides."""
    parallelism: str | None
    ns: float
    expected_ns: float

    @property
    def growth_ns(self) -> float:
        """How much longer it is."""
        return self.ns - self.expected_ns


def _newest() -> deque[tuple[int, int]]:
    return deque(maxlen=_STEPS)


@dataclass(slots=True, eq=False)
class SlowerThanPlan:
    """The steps of one job."""

    # Fields with defaults: a state of a build that had one of them not yet is read on.
    _ledger: Ledger = field(default_factory=Ledger)
    _steps: deque[tuple[int, int]] = field(default_factory=_newest)
    """Begin and duration of the newest ones."""
    _changes: tuple[PartChange, ...] = ()
    """Of slow steps; empty if it is not known where they go."""
    _looked_ns: int | None = None
    """When parts were last asked for."""

    def ingest_steps(self, steps: Columns) -> None:
        """Takes steps (`step_times.STEP`) in order."""
        self._steps += [(row[1], row[2]) for row in steps.tolist()[-_STEPS:] if row[2] > 0]

    def compare(
        self,
        expected: ExpectedStep | None,
        plan: PlanRecord | None,
        slow_step: Callable[[float], MeanStep | None],
        context: Context,
        now_ns: int,
    ) -> None:
        """Holds the newest steps against what is expected of them; `slow_step`: where those go that are longer."""
        is_sure = plan is not None and plan.may_raise and not plan.edits and not plan.unexplained_operations
        durations = [duration_ns for _, duration_ns in self._steps]
        if expected is None or not is_sure or len(durations) < _STEPS:
            return
        limit_ns = expected.limit * 1e9
        if min(durations) > limit_ns:
            if expected.parts and (self._looked_ns is None or now_ns - self._looked_ns >= STEP_KEPT_NS):
                self._changes, self._looked_ns = part_changes(slow_step(limit_ns), expected.parts), now_ns
            self._ledger.update("steps", _finding(expected, durations, self._changes, context, self._steps[0][0]))
        elif median(durations) <= limit_ns:
            self._ledger.close("steps", now_ns)
            self._changes, self._looked_ns = (), None

    def findings(self, others: Sequence[Finding]) -> list[Finding]:
        """All findings so far, but those that one of the `others` of this job explains."""
        return [each for each in self._ledger.findings() if not any(explains(other, each) for other in others)]


def part_changes(observed: MeanStep | None, expected: Sequence[ExpectedPart]) -> tuple[PartChange, ...]:
    """The parts that either has, the one that grew most first; none where nothing is observed."""
    if observed is None:
        return ()
    now, before = defaultdict[tuple[str, str | None], float](float), defaultdict[tuple[str, str | None], float](float)
    for each in observed.parts:
        now[_together(each.part, each.parallelism)] += each.mean_ns
    for part in expected:
        before[_together(part.part, part.parallelism)] += part.seconds * 1e9
    found = [
        PartChange(part=part, parallelism=parallelism, ns=now[part, parallelism], expected_ns=before[part, parallelism])
        for part, parallelism in {**before, **now}
    ]
    return tuple(sorted(found, key=lambda each: -each.growth_ns))


def _together(part: str, parallelism: str | None) -> tuple[str, str | None]:
    return ("computation", None) if part in _COMPUTING else (part, parallelism)


def _where(changes: Sequence[PartChange]) -> str:
    """Which part grew, for the end of a sentence; nothing if none did."""
    if not changes or changes[0].growth_ns <= 0:
        return ""
    first, whole = changes[0], sum(each.growth_ns for each in changes)
    share = "most of it is" if 2 * first.growth_ns >= whole else "it is spread over several parts, the largest is"
    kind = "" if first.parallelism is None else f" of {first.parallelism}"
    before = duration_text(first.expected_ns) if first.expected_ns else "none"
    return f"; {share} {_WORDS[first.part]}{kind}, {duration_text(first.ns)} of a step instead of {before}"


def _finding(
    expected: ExpectedStep, durations: list[int], changes: Sequence[PartChange], context: Context, since_ns: int
) -> Finding:
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
            f"was recorded on this machine; no other finding says why{_where(changes)}"
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
            "parts": [
                {
                    "part": each.part,
                    "parallelism": each.parallelism,
                    "ns": round(each.ns),
                    "expected_ns": round(each.expected_ns),
                }
                for each in changes
            ],
        },
    )
