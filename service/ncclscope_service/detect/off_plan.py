"""A job that does something else than its description says, by what a sample of its ranks logged.

Off unless the user gave a description, and the rules of the framework's version were held against real logs. Every
`off_plan.look_seconds` the last whole iterations of a few ranks are compared with the description; tensor operations
must differ alike in three iterations of a rank and in more than half of them, none of which lacks lines, in two looks
one after the other. Routing, skipped steps and lost lines are explained and never alarm (`ncclscope_models`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from ncclscope_models.description import Completed
from ncclscope_models.difference import Row
from ncclscope_models.explanation import AGREEING_ITERATIONS, explain, is_one_step, off_plan_rows
from ncclscope_models.job import ModelError
from ncclscope_models.minimal_edit import Edit
from ncclscope_service.detect.context import Context, Ledger
from ncclscope_service.job.plan import Plan, edits_of, may_raise, plan_record, verdict, why
from ncclscope_service.job.step_lines import StepLines
from ncclscope_service.store.plan_records import PlanRecord
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_service.store.settings import SECOND_NS
from ncclscope_wire.terms import NO_TIME_NS

_SHOWN: Final = 8
"""Lines in the evidence."""
_LOOKS: Final = 2
"""Looks in a row that must show a difference."""


class OffPlan:
    """One job against the description that the user gave."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._looked_ns = NO_TIME_NS
        self._since_ns = NO_TIME_NS
        """Of the first of the looks that showed a difference; NO_TIME_NS: the last one showed none."""
        self._looks = 0
        """How many in a row showed one."""
        self._sought = ""
        """The differences for which changes of a field were looked for last."""
        self._found: tuple[Edit, ...] = ()
        self.record: PlanRecord | None = None
        """What the last look showed; None if the description is of no job of so many ranks."""

    def is_due(self, described: Completed, context: Context, now_ns: int) -> bool:
        """Whether it is time for a look."""
        every_ns = context.settings.off_plan.look_seconds * SECOND_NS
        if not (context.is_over or self._looked_ns == NO_TIME_NS or now_ns - self._looked_ns >= every_ns):
            return False
        if not context.groups or not _fits(described, context):
            self.record = None
            return False
        return True

    def compare(self, described: Completed, lines: Callable[[], StepLines], context: Context, now_ns: int) -> None:
        """Holds the last iterations of a sample of ranks against the description."""
        self._looked_ns = now_ns
        seen = lines()
        if not seen.seen:
            return
        try:
            plan = Plan(context.job, described, seen, explain(described.job, seen.seen, seen.gaps), None)
        except ModelError:  # no rules for this layout
            self.record = None
            return
        if 2 * sum(map(is_one_step, plan.explanation.differences.values())) <= len(plan.explanation.differences):
            return  # parts of steps are numbered as steps yet
        differing = off_plan_rows(plan.explanation) if may_raise(described) else []
        if differing:
            plan = replace(plan, edits=self._edits(plan, differing))
        is_new = self.record is None or self.record.iterations != tuple(plan.explanation.iterations())
        self.record = plan_record(plan)
        if differing:
            self._since_ns = now_ns if self._since_ns == NO_TIME_NS else self._since_ns
            self._looks += is_new
            if self._looks >= _LOOKS or context.is_over:
                self._ledger.update("plan", _finding(plan, context, self._since_ns))
        elif _is_judged(plan):
            self._looks, self._since_ns = 0, NO_TIME_NS
            self._ledger.close("plan", now_ns)

    def _edits(self, plan: Plan, differing: Sequence[Row]) -> tuple[Edit, ...]:
        """What would explain it, looked for again when something else differs."""
        key = str([(row.op, row.dtype, row.elements, row.expected, row.observed) for row in differing])
        if key != self._sought:
            self._sought, self._found = key, edits_of(plan)
        return self._found

    def findings(self) -> list[Finding]:
        """All findings so far."""
        return self._ledger.findings()


def _fits(described: Completed, context: Context) -> bool:
    """Whether the job has as many ranks as the description."""
    ranks = described.job.layout.ranks
    groups = context.groups.values()
    largest = max(len(group.global_ranks) for group in groups)
    return ranks in (largest, 1 + max(max(group.global_ranks) for group in groups))


def _is_judged(plan: Plan) -> bool:
    """Whether enough iterations without losses were compared to say that the job is on its plan."""
    found = plan.explanation
    return len({iteration for rank, iteration in found.differences if (rank, iteration) not in found.lossy}) >= (
        AGREEING_ITERATIONS
    )


def _finding(plan: Plan, context: Context, since_ns: int) -> Finding:
    rows = sorted(off_plan_rows(plan.explanation), key=lambda row: (row.is_one_rank, -abs(row.difference)))
    operations = sum(abs(row.difference) or 1 for row in rows)
    first = rows[0]
    group = "/".join(first.groups) or f"{first.ranks} ranks"
    size = "several sizes" if first.elements is None else f"{first.elements:,} elements"
    return Finding(
        kind=FindingKind.OFF_PLAN,
        severity=Severity.WARNING,
        job=context.job,
        parallelism=first.groups[0].upper() if first.groups else None,
        since_ns=since_ns,
        confidence=0.95 if plan.edits else 0.8,
        summary=(
            f"{verdict(plan)}: {operations:,} operations of a rank and iteration differ, such as {first.op} of "
            f"{size} in {group}, expected {first.expected:,}, observed {first.observed:,}"
        ),
        evidence={
            "operations": operations,
            "bytes": sum(abs(row.logged_bytes - row.expected_bytes) for row in rows),
            "iterations": plan.explanation.iterations(),
            "fields": [
                {"field": edit.field, "described": edit.before, "observed": edit.after} for edit in plan.edits or ()
            ],
            "lines": [
                {
                    "groups": list(map(str, row.groups)),
                    "op": row.op,
                    "dtype": row.dtype,
                    "count": row.elements,
                    "expected": row.expected,
                    "observed": row.observed,
                    "why": why(row),
                }
                for row in rows[:_SHOWN]
            ],
            "rules": plan.basis.sentence,
        },
    )
