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
accuse nobody.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

import numpy as np

from ncclscope_service.detect.context import Context, Group, Ledger
from ncclscope_service.detect.late_rank_case import (
    MID_STEP_GROUPS,
    Case,
    late_rank_finding,
    least_per_step,
    root_causes,
    strongest_case,
)
from ncclscope_service.detect.statistics import ScatterByKind
from ncclscope_service.detect.step_blame import (
    DEFAULT_STEP_NS,
    WINDOW_NS,
    WINDOWS,
    ExchangeTimes,
    GroupBlames,
    GroupStep,
    GroupSteps,
    step_tallies,
    steps_per_window,
    whole_windows,
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
FIRM: Final = 6.5
"""Mean margin over its standard error that names a rank."""
_EXCUSED_FOR: Final = 5
"""Passes in a row at which others must explain the lateness of a named rank before its finding is closed."""
_SPANS_STAGES: Final = frozenset({"PP", "EMBEDDING"})
_MAY_SPAN_STAGES: Final = frozenset({"WORLD", None})
_LEAST_CONFIDENCE: Final = 0.5
"""Of the alignment: kernels that were matched with less are as likely wrong."""


class LateRank:
    """Late ranks of one job, from joined collectives."""

    def __init__(self) -> None:
        self._steps: dict[int, GroupSteps] = {}
        """By communicator."""
        self._step_ns = DEFAULT_STEP_NS
        """Length by which collectives are cut into steps."""
        self._step_changed_for = 0
        self._exchange_times = ExchangeTimes()
        self._scatter = ScatterByKind()
        self._ledger = Ledger()
        self._context: Context | None = None
        self._excused_for: dict[int, int] = {}
        """By named rank: passes in a row at which others explained its lateness."""
        self._convicted: dict[int, list[Case]] = {}
        """Last cases against ranks that were named a short while ago: what they delayed outlasts them."""

    def ingest_collectives(self, collectives: Columns, context: Context) -> None:
        """Takes joined collectives (`rows.COLLECTIVE`) of one job, in any order."""
        self._context = context
        known = (collectives["confidence"] >= _LEAST_CONFIDENCE) & np.isin(
            collectives["communicator"], np.array(sorted(context.groups), dtype=np.int64)
        )
        usable = known & (collectives["last_rank"] >= 0) & (collectives["blame_ns"] >= 0)
        self._update_step_length(context)
        keep = WINDOWS * steps_per_window(context) + 2
        remembered = max(keep, min(_REMEMBERED_NS // self._step_ns, _MOST_REMEMBERED))
        self._exchange_times.ingest_exchanges(collectives[known & (collectives["rank"] >= 0)], self._step_ns, keep)
        for tally in step_tallies(collectives[usable], self._step_ns):
            steps = self._steps.setdefault(tally.communicator, GroupSteps())
            steps.at(tally.at_ns).add(tally)
            steps.last_op = tally.op
            steps.keep_newest(remembered)

    def evict_communicators(self, communicators: Set[int]) -> None:
        """Forgets these communicators."""
        for communicator in communicators:
            self._steps.pop(communicator, None)

    def _update_step_length(self, context: Context) -> None:
        """Collectives are cut by one length of step, which must not follow every tremor of the measured one."""
        ratio = context.step_ns / self._step_ns if context.step_ns else 1.0
        is_other = not 1 / _STEP_IS_ANOTHER < ratio < _STEP_IS_ANOTHER
        self._step_changed_for = 0 if 1 / _STEP_CHANGED < ratio < _STEP_CHANGED else self._step_changed_for + 1
        if context.step_ns and (is_other or self._step_changed_for >= _STEP_CHANGED_FOR):
            self._step_ns, self._step_changed_for = context.step_ns, 0
            if is_other:
                self._steps.clear()
                self._exchange_times.clear()

    def findings(self) -> list[Finding]:
        """Every rank named so far."""
        if self._context is None:
            return []
        if self._context.clock_is_trusted:
            self._judge(self._context)
        return self._ledger.findings()

    def _judge(self, context: Context) -> None:
        recent = {
            communicator: steps.newest(WINDOWS * steps_per_window(context))
            for communicator, steps in self._steps.items()
            if communicator in context.groups and _is_judged(context.groups[communicator], context)
        }
        accusations = self._accusations(recent, context)
        known = {communicator: self._steps[communicator].all_over() for communicator in recent} if accusations else {}
        named = root_causes(accusations, known, self._exchange_times, self._convicted, context)
        self._convicted |= named
        memory_ns = 2 * WINDOWS * steps_per_window(context) * (context.step_ns or DEFAULT_STEP_NS)
        newest = max((steps[-1].at_ns for steps in recent.values() if steps), default=0)
        for rank in [rank for rank, cases in self._convicted.items() if cases[0].last_ns < newest - memory_ns]:
            del self._convicted[rank]
        for rank, cases in named.items():
            if self._ledger.is_open(rank) or self._is_all_seen(rank, cases, context):
                self._ledger.update(rank, late_rank_finding(rank, cases, context))
        self._close_healed(accusations, named.keys(), recent, context)

    def _accusations(self, recent: dict[int, list[GroupStep]], context: Context) -> list[Case]:
        """The case of each group, if it is firm, supports a firm one, or is against a rank that is named already."""
        judged = {
            communicator: GroupBlames.from_steps(steps, len(context.groups[communicator].global_ranks))
            for communicator, all_recent in recent.items()
            if (steps := whole_windows(all_recent, context))
        }
        pooled = self._scatter.firmness(judged, context)
        cases = [
            case
            for communicator, blames in judged.items()
            if (
                case := strongest_case(
                    communicator, blames, pooled[communicator], self._steps[communicator].last_op, context
                )
            )
            is not None
        ]
        sure = {case.global_rank for case in cases if case.firmness >= FIRM} | self._named_ranks()
        return [case for case in cases if case.global_rank in sure]

    def _named_ranks(self) -> set[int]:
        return {key for key in self._ledger.open_keys() if isinstance(key, int)}

    def _close_healed(
        self, accusations: list[Case], named: Set[int], recent: dict[int, list[GroupStep]], context: Context
    ) -> None:
        """Closes the findings of ranks that are late no more, or that others have excused for long."""
        accused = {case.global_rank: case.last_ns for case in accusations}
        for rank in [key for key in self._ledger.open_keys() if isinstance(key, int)]:
            is_excused = rank in accused and rank not in named
            self._excused_for[rank] = self._excused_for.get(rank, 0) + 1 if is_excused else 0
            if rank not in named:
                healed = _healed_at(rank, recent, context)
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
                seen = exchanged | self._steps.get(communicator, GroupSteps()).times()
                if max(seen, default=until_ns - 1) < until_ns:
                    return False
        return True


def _is_judged(group: Group, context: Context) -> bool:
    if group.parallelism in _SPANS_STAGES:
        return False
    return group.parallelism not in _MAY_SPAN_STAGES or not any(g.parallelism == "PP" for g in context.groups.values())


def _healed_at(rank: int, recent: dict[int, list[GroupStep]], context: Context) -> int | None:
    """When the rank was last late; None while it leads more than half of the last two windows in any of its groups."""
    last = None
    for communicator, steps in recent.items():
        group = context.groups[communicator]
        newest = steps[-2 * steps_per_window(context) :]
        if rank not in group.global_ranks or len(newest) < 2 * steps_per_window(context):
            continue
        own = group.global_ranks.index(rank)
        late = [s.at_ns for s in steps if s.latest() == own and s.blame_ns[own] >= least_per_step(context)]
        if 2 * sum(at >= newest[0].at_ns for at in late) > len(newest):
            return None
        last = max(last or 0, late[-1] if late else newest[0].at_ns)
    return last
