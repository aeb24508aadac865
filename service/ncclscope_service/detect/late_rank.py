"""Names ranks that keep others waiting.

A group accuses a rank when it is later than every other rank of the group, step after step, by a margin that is large
against the ends' skew, against the step and against how much that margin changes from step to step, in three of the
last four windows. The margin is taken over all of a step, over each kind of its operations, and over the few
operations for which the rank is latest.

An accused rank that had itself been kept waiting in another group passes the blame on; so does one that spent so much
longer in sends, receives and transfers of other groups than the group's others did (it waited for a late rank, or for a
slow link), and one whose pipeline or tensor-parallel group holds a rank that is late inside the latter
(`late_rank_case`). Groups within a host are seen before those across hosts, and are remembered until these explain
themselves. What is left is named, once the groups through which blame may have come were seen over the same time; a
name is withdrawn when the blame turns out to have been passed on.

Groups that span pipeline stages (PP, EMBEDDING, and WORLD in a job with a pipeline) have a last arriver by design and
accuse nobody. Ranks that share a GPU wait for their turns on it and are not named: nothing tells a turn from a delay.
"""

from __future__ import annotations

from collections.abc import Hashable, Set
from dataclasses import replace
from typing import Final

import numpy as np

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct
from ncclscope_service.detect.context import Context, Ledger, spans_stages
from ncclscope_service.detect.late_rank_case import (
    MID_STEP_GROUPS,
    SAME_WORK,
    Case,
    hidden_lateness,
    late_rank_finding,
    least_per_step,
    root_causes,
    seats_in_pipelines,
    strongest_cases,
    waits_in_pipelines,
)
from ncclscope_service.detect.statistics import ScatterByKind
from ncclscope_service.detect.step_blame import (
    DEFAULT_STEP_NS,
    MORE_STEPS,
    ROOTED,
    WINDOW_NS,
    WINDOWS,
    ExchangeTimes,
    MemberSteps,
    StepBlames,
    steps_per_window,
)
from ncclscope_service.store.records import Finding
from ncclscope_wire.batch import Columns

_REMEMBERED_NS: Final = 64_000_000_000
"""How long ago a group may have been seen to explain the lateness in others: a group across hosts is seen when the last
of its hosts is, one within a host at once."""
_MOST_REMEMBERED: Final = 128
"""Steps of a group that are remembered, unless more are judged."""
_STEP_CHANGED: Final = 1.15
_STEP_CHANGED_FOR: Final = 8
"""Batches in a row for which the step must be so much longer or shorter: it must not follow every tremor."""
_STEP_IS_ANOTHER: Final = 1.5
"""Beyond it steps of the old length cannot be compared with those of the new one."""
_EXCUSED_FOR: Final = 5
"""Passes in a row at which others must explain the lateness of a named rank before its finding is closed."""


class LateRank:
    """Late ranks of one job, from joined collectives."""

    def __init__(self) -> None:
        self._blames = StepBlames()
        self._step_ns = DEFAULT_STEP_NS
        """Length by which collectives are cut into steps."""
        self._step_changed_for = 0
        self._exchange_times = ExchangeTimes()
        self._exchange_waits = ExchangeTimes()
        self._scatter = ScatterByKind()
        self._ledger = Ledger()
        self._context: Context | None = None
        self._newest_ns = 0
        self._excused_for: dict[int, int] = {}
        """By named rank: passes in a row at which others explained its lateness."""
        self._convicted: dict[int, list[Case]] = {}
        """Last cases against ranks that were named a short while ago: what they delayed outlasts them."""

    def ingest_collectives(self, collectives: Columns, context: Context) -> None:
        """Takes joined collectives (`rows.COLLECTIVE`) of one job, in any order."""
        self._context = context
        self._newest_ns = max(self._newest_ns, int(collectives["end_true_ns"].max(initial=0)))
        found, inverse = distinct(collectives["communicator"])
        is_group = np.array([communicator in context.groups for communicator in found.tolist()], np.bool_)
        known = (collectives["confidence"] >= context.settings.late_rank.least_confidence) & is_group[inverse]
        usable = known & (collectives["last_rank"] >= 0) & (collectives["blame_ns"] >= 0)
        is_rooted = np.isin(collectives["op"], ROOTED)
        self._update_step_length(context)
        keep = WINDOWS * max(steps_per_window(context), MORE_STEPS) + 2
        remembered = max(keep, min(_REMEMBERED_NS // self._step_ns, _MOST_REMEMBERED))
        exchanges = row_ops.filter_rows(collectives, known & (collectives["rank"] >= 0))
        steps = MemberSteps.of_exchanges(exchanges, self._step_ns)
        self._exchange_waits.ingest_exchanges(steps, exchanges["wait_ns"], keep)
        self._exchange_times.ingest_exchanges(steps, exchanges["busy_ns"], keep)
        for_roots = _waits_for_roots(row_ops.filter_rows(collectives, usable & is_rooted), context)
        steps = MemberSteps.of_exchanges(for_roots, self._step_ns)
        self._exchange_times.ingest_exchanges(steps, for_roots["busy_ns"], keep)
        judged = row_ops.filter_rows(collectives, usable & ~is_rooted)
        self._blames.ingest_collectives(judged, self._step_ns, context, remembered)

    def evict_communicators(self, communicators: Set[int]) -> None:
        """Forgets these communicators."""
        self._blames.evict_communicators(communicators)

    def _update_step_length(self, context: Context) -> None:
        """Collectives are cut by one length of step, which must not follow every tremor of the measured one."""
        ratio = context.step_ns / self._step_ns if context.step_ns else 1.0
        is_other = not 1 / _STEP_IS_ANOTHER < ratio < _STEP_IS_ANOTHER
        self._step_changed_for = 0 if 1 / _STEP_CHANGED < ratio < _STEP_CHANGED else self._step_changed_for + 1
        if context.step_ns and (is_other or self._step_changed_for >= _STEP_CHANGED_FOR):
            self._step_ns, self._step_changed_for = context.step_ns, 0
            if is_other:
                self._blames.clear()
                self._exchange_times.clear()
                self._exchange_waits.clear()

    def findings(self) -> list[Finding]:
        """Every rank named so far."""
        if self._context is None:
            return []
        if self._context.clock_is_trusted:
            self._judge(self._context)
        return self._ledger.findings()

    def _judge(self, context: Context) -> None:
        has_pipeline = any(group.parallelism == "PP" for group in context.groups.values())
        judged = [
            each
            for each in self._blames.communicators()
            if each in context.groups and not spans_stages(context.groups[each].parallelism, has_pipeline=has_pipeline)
        ]
        accusations = self._accusations(judged, context)
        is_clear = not accusations
        is_open, least = self._named_ranks(), context.settings.late_rank.evidence
        if not is_open and not any(case.log_evidence >= least for case in accusations):
            accusations = []
        known = {communicator: self._blames.history(communicator) for communicator in judged} if accusations else {}
        causes = root_causes(accusations, known, self._exchange_times, self._convicted, context)
        taking_turns = {rank for shared in context.shared_gpus() for rank in shared.ranks}
        named = {
            rank: cases
            for rank, cases in causes.items()
            if rank not in taking_turns
            if rank in is_open or any(case.log_evidence >= least for case in cases)
        }
        self._convicted |= named
        if self._convicted:
            memory_ns = 2 * WINDOWS * steps_per_window(context) * (context.step_ns or DEFAULT_STEP_NS)
            oldest_ns = self._blames.last_whole_ns(judged, WINDOWS * steps_per_window(context)) - memory_ns
            for rank in [rank for rank, cases in self._convicted.items() if cases[0].last_ns < oldest_ns]:
                del self._convicted[rank]
        for rank, cases in named.items():
            before = self._ledger.open_finding(rank)
            if before is not None or self._is_all_seen(rank, cases, context):
                found = late_rank_finding(rank, cases, context)
                if before is not None:  # what named it is still evidence when the last steps alone would not suffice
                    found = replace(found, confidence=max(found.confidence, before.confidence))
                self._ledger.update(rank, found)
        self._close_healed(accusations, named.keys(), judged, context)
        self._judge_hidden(context, is_clear=is_clear)

    def _accusations(self, communicators: list[int], context: Context) -> list[Case]:
        """The case of each group that is firm, or may explain one that is; by more steps if steps are long and a few of
        them do not suffice.
        """
        window = steps_per_window(context)
        judged = self._blames.judged(communicators, window)
        pooled = self._scatter.firmness(judged, context)
        cases = {
            case.communicator: case
            for groups, firm in zip(judged, pooled, strict=True)
            for case in strongest_cases(groups, firm, self._blames, context, window)
        }
        least = context.settings.late_rank.evidence
        unsure = [each for each in communicators if each not in cases or cases[each].log_evidence < least]
        for groups in self._blames.judged(unsure, MORE_STEPS) if window < MORE_STEPS else ():
            for case in strongest_cases(groups, np.zeros(groups.blames.shape[:2]), self._blames, context, MORE_STEPS):
                if case.log_evidence >= least:
                    cases[case.communicator] = case
        return list(cases.values())

    def _judge_hidden(self, context: Context, *, is_clear: bool) -> None:
        """Names, as information, ranks whose lateness a pipeline hides, but no further one while one may be late that
        nothing hides (not `is_clear`): it changes how long others wait.
        """
        found: dict[Hashable, Finding] = {}
        hidden = {key for key in self._ledger.open_keys() if not isinstance(key, int)}
        is_open = frozenset(each.ranks for each in self._ledger.findings() if each.until_ns is None)
        inner = [each for each in context.groups.values() if each.parallelism in SAME_WORK and not each.shared_gpus]
        seats = seats_in_pipelines(context)
        for group in [] if self._named_ranks() else inner:
            waits = waits_in_pipelines(group, seats, self._exchange_waits, context)
            case = None if waits is None else hidden_lateness(group, *waits, context, is_open)
            if case is not None and (is_clear or case.ranks in is_open):
                found["hidden", case.ranks] = case
        for key in hidden - found.keys():
            self._ledger.close(key, self._newest_ns)
        for key, finding in found.items():
            self._ledger.update(key, finding)

    def _named_ranks(self) -> set[int]:
        return {key for key in self._ledger.open_keys() if isinstance(key, int)}

    def _close_healed(self, accusations: list[Case], named: Set[int], judged: list[int], context: Context) -> None:
        """Closes the findings of ranks that are late no more, or that others have excused for long."""
        accused = {case.global_rank: case.last_ns for case in accusations}
        for rank in [key for key in self._ledger.open_keys() if isinstance(key, int)]:
            is_excused = rank in accused and rank not in named
            self._excused_for[rank] = self._excused_for.get(rank, 0) + 1 if is_excused else 0
            if rank not in named:
                healed = _healed_at(rank, self._blames, judged, context)
                ended = accused[rank] if self._excused_for[rank] >= _EXCUSED_FOR else healed
                if ended is not None:
                    self._ledger.close(rank, ended)
                    del self._excused_for[rank]

    def _is_all_seen(self, rank: int, cases: list[Case], context: Context) -> bool:
        """Whether the groups that may have delayed the rank were seen for as long as those in which it was late."""
        if cases[0].is_inner:
            return True
        until_ns = cases[0].last_ns - WINDOW_NS
        for communicator, group in context.groups.items():
            if group.parallelism in MID_STEP_GROUPS and rank in group.global_ranks and len(group.global_ranks) > 1:
                own = group.global_ranks.index(rank)
                exchanged = self._exchange_times.times_of(communicator, own).keys()
                newest_ns = self._blames.newest_ns(communicator)
                if max((*exchanged, until_ns - 1 if newest_ns is None else newest_ns)) < until_ns:
                    return False
        return True


def _waits_for_roots(rooted: Columns, context: Context) -> Columns:
    """How long ranks waited for the last one in operations that wait for their root by design, each rank like one
    launch of a receive: it accuses nobody, but what they are late for afterwards is explained.
    """
    sizes = np.array([len(context.groups[each].global_ranks) for each in rooted["communicator"].tolist()], np.int64)
    waits = row_ops.take(rooted, np.repeat(np.arange(len(rooted)), sizes))
    waits["rank"] = np.arange(len(waits)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    waits["busy_ns"] = waits["blame_ns"]
    return row_ops.filter_rows(waits, waits["rank"] != waits["last_rank"])


def _healed_at(rank: int, blames: StepBlames, communicators: list[int], context: Context) -> int | None:
    """When the rank was last late; None while it leads more than half of the last two windows in any of its groups."""
    last, newest = None, 2 * steps_per_window(context)
    for communicator in communicators:
        group = context.groups[communicator]
        if rank not in group.global_ranks:
            continue
        steps = blames.history(communicator, WINDOWS * steps_per_window(context))
        if len(steps.at_ns) < newest:
            continue
        own = group.global_ranks.index(rank)
        is_late = (steps.blame_ns.argmax(axis=0) == own) & (steps.blame_ns[own] >= least_per_step(context))
        if 2 * np.count_nonzero(is_late[-newest:]) > newest:
            return None
        last = max(last or 0, int(steps.at_ns[is_late][-1] if is_late.any() else steps.at_ns[-newest]))
    return last
