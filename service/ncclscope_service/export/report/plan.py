"""The plan in the report: what each job should send by its description, what it sent at the end, and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from ncclscope_service.export.report.figures import Figures
from ncclscope_service.export.report.tables import bytes_text, cell, count_text, table
from ncclscope_service.export.selection import Selection
from ncclscope_service.store.plan_records import PlanClass, PlanLine

_SHOWN: Final = 6
"""Kinds of ranks; plan.json has all."""
_NAMED: Final = 8
_COLUMNS: Final = (
    ("Group", "text"), ("Operation", "text"), ("Elements", ""), ("Expected", ""), ("Observed", ""), ("Logged", ""),
    ("Wire", ""), ("Reason", "text"),
)  # fmt: skip


def plan_section(selection: Selection, figures: Figures) -> Iterator[str]:
    """The verdict of each job that has a description, and a table for each kind of rank."""
    for job in selection.jobs:
        plan = selection.store.plans.get(job)
        if plan is None:
            continue
        yield f'<p class="lead">{escape(job)}: {escape(plan.verdict)}.</p>'
        yield f"<p>{escape(plan.model)}; {escape(plan.rules)}.</p>"
        for each in plan.classes[:_SHOWN]:
            yield table(f"<b>Table {figures.next_table()}.</b> {_ranks(each)}.", _COLUMNS, map(_row, each.lines))
        if len(plan.classes) > _SHOWN:
            yield f"<p>{len(plan.classes) - _SHOWN} more are in plan.json.</p>"


def _ranks(each: PlanClass) -> str:
    ranks = each.ranks
    named = ", ".join(map(str, ranks)) if len(ranks) <= _NAMED else f"{ranks[0]} to {ranks[-1]}"
    return f"Ranks {named}, {each.rank_iterations} of their last iterations"


def _row(line: PlanLine) -> tuple[str, ...]:
    return (
        f"{escape('/'.join(line.groups) or 'none')} ({line.comm_size})",
        escape(f"{line.op} {line.dtype}"),
        cell("mixed") if line.count is None else count_text(line.count),
        count_text(line.expected),
        count_text(line.observed),
        bytes_text(line.logged_bytes),
        bytes_text(line.wire_bytes),
        escape(line.why),
    )
