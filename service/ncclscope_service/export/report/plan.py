"""The plan in the report: what each job should send by its description, what it sent at the end, and the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Final

from ncclscope_service.export.report.figures import Figures
from ncclscope_service.export.report.tables import bytes_text, cell, count_text, ratio_text, table
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.summary import expected_step_text, utilization_text, utilizations
from ncclscope_service.export.totals import Totals
from ncclscope_service.job.plan_pattern import pattern_of_plan, plan_pattern
from ncclscope_service.store.plan_records import PlanClass, PlanExperts, PlanLine, PlanPattern, PlanRhythm

_SHOWN: Final = 6
"""Kinds of ranks; plan.json has all."""
_NAMED: Final = 8
_COLUMNS: Final = (
    ("Group", "text"), ("Operation", "text"), ("Elements", ""), ("Expected", ""), ("Observed", ""), ("Logged", ""),
    ("Wire", ""), ("Reason", "text"),
)  # fmt: skip


def plan_patterns(selection: Selection) -> dict[str, PlanPattern]:
    """Who talks to whom and when, of each job that has a description."""
    given = {job: pattern_of_plan(selection.store, job) for job in selection.jobs}
    return {job: plan_pattern(each) for job, each in given.items() if each is not None}


def plan_maps(patterns: Mapping[str, PlanPattern]) -> list[dict[str, object]]:
    """Data of the heat maps of traffic, expected and observed, of each of these jobs."""
    maps: list[dict[str, object]] = []
    for pattern in patterns.values():
        traffic = pattern.traffic
        shown = {"what": traffic.by, "places": traffic.places}
        maps.append({**shown, "expected": traffic.expected, "observed": traffic.observed})
    return maps


def plan_section(
    selection: Selection, sums: Totals, figures: Figures, patterns: Mapping[str, PlanPattern]
) -> Iterator[str]:
    """The verdict of each job that has a description, who should talk to whom, and a table for each kind of rank."""
    used = utilizations(selection, sums)
    for job in selection.jobs:
        plan = selection.store.plans.get(job)
        if plan is None:
            continue
        yield f'<p class="lead">{escape(job)}: {escape(plan.verdict)}.</p>'
        yield f"<p>{escape(plan.model)}; {escape(plan.rules)}.</p>"
        said = [utilization_text(of) for of in used if of.job == job]
        if (step := selection.store.expected_step_of(job)) is not None:
            said.append(expected_step_text(step))
        yield from (f"<p>{escape(sentence[0].upper() + sentence[1:])}.</p>" for sentence in said)
        pattern = patterns.get(job)
        if pattern is not None:
            yield from _pattern(pattern, figures, list(patterns).index(job))
        for each in plan.classes[:_SHOWN]:
            yield table(f"<b>Table {figures.next_table()}.</b> {_ranks(each)}.", _COLUMNS, map(_row, each.lines))
        if len(plan.classes) > _SHOWN:
            yield f"<p>{len(plan.classes) - _SHOWN} more are in plan.json.</p>"


def _pattern(pattern: PlanPattern, figures: Figures, at: int) -> Iterator[str]:
    traffic = pattern.traffic
    yield '<div class="pair">'
    yield figures.figure(
        f"plan-expected-{at}",
        "plan_maps",
        f"<b>Bytes of an iteration</b> that each {traffic.by} should send to each other.",
    )
    mean = f"mean of {count_text(len(traffic.iterations))} iterations" if traffic.iterations else "none is whole"
    yield figures.figure(
        f"plan-observed-{at}", "plan_maps", f"<b>The same as it was observed</b>, in the same colours ({mean})."
    )
    yield "</div>"
    if traffic.differing:
        more = traffic.differing_known - len(traffic.differing)
        rest = f" {more:,} more are in plan.json." if more else ""
        yield table(
            f"<b>Table {figures.next_table()}.</b> Pairs that are off by more than 1 % of what the sender sends.{rest}",
            (("From", "text"), ("To", "text"), ("Expected", ""), ("Observed", "")),
            (
                (escape(each.sender), escape(each.receiver), bytes_text(each.expected), bytes_text(each.observed))
                for each in traffic.differing
            ),
        )
    if pattern.experts:
        yield table(
            f"<b>Table {figures.next_table()}.</b> All-to-alls of tokens of an iteration, by group: of each layer "
            "and micro-batch one matrix comes forward and backward, and so does its transpose. Busiest: what the "
            "busiest rank gets, over the mean.",
            (("Ranks", "text"), ("Expected", ""), ("Seen", ""), ("Equal or transposed", "text"), ("Busiest", "")),
            map(_experts, pattern.experts),
        )
    if pattern.rhythm:
        yield table(
            f"<b>Table {figures.next_table()}.</b> Rhythm: blocks of tensor-parallel operations of an iteration, two "
            "for each micro-batch, and how their lengths scatter over iterations.",
            (("Rank", ""), ("Stage", ""), ("Expected", ""), ("Seen", ""), ("Scatter", ""), ("Verdict", "text")),
            map(_rhythm, pattern.rhythm),
        )


def _experts(each: PlanExperts) -> tuple[str, ...]:
    busiest = [value for value in each.imbalance if value is not None]
    return (
        escape(", ".join(map(str, each.ranks))),
        count_text(each.expected),
        count_text(min(each.exchanges, default=None)),
        "all" if each.is_whole else "not all",
        f"{max(busiest):.2f}" if busiest else cell(None),
    )


def _rhythm(each: PlanRhythm) -> tuple[str, ...]:
    return (
        count_text(each.rank),
        count_text(each.stage),
        count_text(each.expected),
        ", ".join(f"{blocks:,}" for blocks in dict.fromkeys(each.blocks)),
        ratio_text(each.spread),
        escape(each.beat),
    )


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
