"""Names ranks that keep others waiting.

A rank is accused in a group when it is later than every other rank of it, step after step, by a margin that is large
against the ends' skew, against the step and against how much that margin changes from step to step, in three of the
last four windows. The margin is taken over all of a step, over each kind of its operations, and over the few
operations for which the rank is latest.
An accused rank that had itself been kept waiting in another group passes the blame on; so does one that spent so much
longer in sends, receives and transfers of other groups than the group's others did (it waited for a late rank, or for
a slow link), and one whose pipeline or tensor-parallel group holds a rank that is late inside the latter. Groups within
a host are seen before those across hosts, and are remembered until these explain themselves. What is left is named,
once the groups through which blame may have come were seen over the same time; a name is taken back when the blame
turns out to have been handed on.

Groups that span pipeline stages (PP, EMBEDDING, and WORLD in a job with a pipeline) have a last arriver by design and
accuse nobody.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

import numpy as np

from ncclscope_service.detect import lateness, margin
from ncclscope_service.detect.accusation import Accusation, finding_of
from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.findings import Ledger
from ncclscope_service.detect.judged_steps import (
    WINDOW_NS,
    WINDOWS,
    WINDOWS_BAD,
    BlamesByOp,
    blames_of,
    by_rank,
    per_window,
    whole,
)
from ncclscope_service.detect.lateness import Occasion, Occasions
from ncclscope_service.detect.margin import Blames
from ncclscope_service.detect.origins import HANDS_ON, origins
from ncclscope_service.detect.pooled import FirmnessByOp, PooledKinds
from ncclscope_service.detect.spent import Spent
from ncclscope_service.rows import Finding
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_REMEMBERED_NS: Final = 64_000_000_000
"""How long ago a group may have been seen to explain the lateness in others: a group across hosts is seen when the last
of its hosts is, one within a host at once."""
_MOST_REMEMBERED: Final = 128
"""Occasions of a group, where those in which ranks are judged are fewer."""
_SAME_HOST_FLOOR_NS: Final = 5_000
_OTHER_HOST_FLOOR_NS: Final = 30_000
"""Three times the skew with which hosts end a collective."""
_SHARE_OF_STEP: Final = 0.01
_FLOOR_AT_MOST_NS: Final = 500_000
"""A rank that costs half a millisecond per step is worth naming in a step of any length."""
_STEP_CHANGED: Final = 1.15
_STEP_CHANGED_FOR: Final = 8
"""Looks in a row at which the step must be another: it must not follow every tremor."""
_STEP_IS_ANOTHER: Final = 1.5
"""Beyond it occasions of the old length cannot be held against those of the new one."""
FIRM: Final = 6.5
"""Mean margin over its standard error that names a rank."""
_SUPPORTING: Final = 3.0
"""The same where the rank is accused by another group already, or was named a moment ago."""
_COLLECTIVES_SHOWN: Final = 8
_EXCUSED_FOR: Final = 5
"""Looks in a row at which a named rank must turn out to be delayed by others before it is named no longer."""
_SPANS_STAGES: Final = frozenset({"PP", "EMBEDDING"})
_NOT_SURE: Final = frozenset({"WORLD", None})
_LEAST_CONFIDENCE: Final = 0.5


class LateRank:
    """Feeds on joined collectives of one job."""

    def __init__(self) -> None:
        self._occasions: dict[int, Occasions] = {}
        self._bin_ns = lateness.DEFAULT_STEP_NS
        self._step_changed_for = 0
        self._spent = Spent()
        self._pooled = PooledKinds()
        self._ledger = Ledger()
        self._context: Context | None = None
        self._excused_for: dict[int, int] = {}
        """By named rank: looks in a row at which others explained its lateness."""
        self._convicted: dict[int, list[Accusation]] = {}
        """Last cases against ranks that were named a short while ago: what they delayed outlasts them."""

    def feed(self, collectives: Columns, context: Context) -> None:
        """Takes joined collectives (`rows.COLLECTIVE`) of one job, in any order."""
        self._context = context
        known = (collectives["confidence"] >= _LEAST_CONFIDENCE) & np.isin(
            collectives["communicator"], np.array(sorted(context.groups), dtype=np.int64)
        )
        usable = known & (collectives["last_rank"] >= 0) & (collectives["blame_ns"] >= 0)
        self._settle_step(context)
        keep = WINDOWS * per_window(context) + 2
        remembered = max(keep, min(_REMEMBERED_NS // self._bin_ns, _MOST_REMEMBERED))
        self._spent.feed(collectives[known & (collectives["rank"] >= 0)], self._bin_ns, keep)
        for tally in lateness.tallies(collectives[usable], self._bin_ns):
            occasions = self._occasions.setdefault(tally.communicator, Occasions())
            occasions.at(tally.at_ns).add(tally)
            occasions.last_op = tally.op
            occasions.forget_all_but(remembered)

    def leave(self, communicators: Set[int]) -> None:
        """Lets go of these communicators."""
        for communicator in communicators:
            self._occasions.pop(communicator, None)

    def _settle_step(self, context: Context) -> None:
        """Occasions are cut by one length of step, which must not follow every tremor of the measured one."""
        ratio = context.step_ns / self._bin_ns if context.step_ns else 1.0
        is_other = not 1 / _STEP_IS_ANOTHER < ratio < _STEP_IS_ANOTHER
        self._step_changed_for = 0 if 1 / _STEP_CHANGED < ratio < _STEP_CHANGED else self._step_changed_for + 1
        if context.step_ns and (is_other or self._step_changed_for >= _STEP_CHANGED_FOR):
            self._bin_ns, self._step_changed_for = context.step_ns, 0
            if is_other:
                self._occasions.clear()
                self._spent.clear()

    def findings(self, now_ns: int) -> list[Finding]:
        """Everyone named so far. `now_ns` is not needed: the data's own time decides."""
        del now_ns
        context = self._context
        if context is None:
            return []
        if context.clock_is_trusted:
            self._judge(context)
        return self._ledger.findings()

    def _judge(self, context: Context) -> None:
        recent = {
            communicator: occasions.newest(WINDOWS * per_window(context))
            for communicator, occasions in self._occasions.items()
            if communicator in context.groups and _is_judged(context.groups[communicator], context)
        }
        judged = {c: steps for c, all_of_it in recent.items() if (steps := whole(all_of_it, context))}
        blames = {c: blames_of(steps, len(context.groups[c].global_ranks)) for c, steps in judged.items()}
        newest_ns = {c: steps[-1].at_ns for c, steps in judged.items()}
        pooled = self._pooled.firmness(blames, newest_ns, context)
        accusations = [
            accusation
            for communicator, mine in blames.items()
            if (accusation := self._accuse(communicator, recent[communicator], mine, pooled, context)) is not None
        ]
        sure = {case.global_rank for case in accusations if case.firmness >= FIRM}
        sure |= {key for key in self._ledger.open_keys() if isinstance(key, int)}
        accusations = [case for case in accusations if case.global_rank in sure]
        known = (
            {communicator: self._occasions[communicator].all_over() for communicator in recent} if accusations else {}
        )
        named = origins(accusations, known, self._spent, self._convicted, context)
        self._convicted |= named
        memory_ns = 2 * WINDOWS * per_window(context) * (context.step_ns or lateness.DEFAULT_STEP_NS)
        newest = max((occasions[-1].at_ns for occasions in recent.values() if occasions), default=0)
        for rank in [rank for rank, cases in self._convicted.items() if cases[0].last_ns < newest - memory_ns]:
            del self._convicted[rank]
        for rank, cases in named.items():
            if self._ledger.is_open(rank) or self._is_all_seen(rank, cases, context):
                self._ledger.update(rank, finding_of(rank, cases, context))
        accused = {case.global_rank: case.last_ns for case in accusations}
        for key in self._ledger.open_keys():
            if isinstance(key, int):
                is_excused = key in accused and key not in named
                self._excused_for[key] = self._excused_for.get(key, 0) + 1 if is_excused else 0
                if key not in named:
                    healed = _healed_at(key, recent, context)
                    ended = accused[key] if self._excused_for[key] >= _EXCUSED_FOR else healed
                    if ended is not None:
                        self._ledger.close(key, ended)
                        del self._excused_for[key]

    def _is_all_seen(self, rank: int, cases: list[Accusation], context: Context) -> bool:
        """Whether the groups that may have delayed the rank were seen for as long as those in which it was late."""
        if cases[0].is_inner:
            return True
        until_ns = cases[0].last_ns - WINDOW_NS
        for communicator, group in context.groups.items():
            if group.parallelism in HANDS_ON and rank in group.global_ranks and len(group.global_ranks) > 1:
                own = group.global_ranks.index(rank)
                seen = self._spent.of(communicator, own).keys() | self._occasions.get(communicator, Occasions()).times()
                if max(seen, default=until_ns - 1) < until_ns:
                    return False
        return True

    def _accuse(
        self,
        communicator: int,
        recent: list[Occasion],
        by_op: BlamesByOp,
        pooled: FirmnessByOp,
        context: Context,
    ) -> Accusation | None:
        group = context.groups[communicator]
        usable = whole(recent, context)
        largest = by_rank([occasion.usual_largest() for occasion in usable], len(group.global_ranks))
        cases = [
            case
            for op, blames in (
                (None, by_op[None]),
                (None, largest),
                *(each for each in by_op.items() if each[0] is not None),
            )
            if (case := self._case(communicator, op, blames, by_op[None], largest, usable, pooled, context)) is not None
            and _is_considerable(case, group, context)
        ]
        return max(cases, key=lambda case: case.firmness, default=None)

    def _case(
        self,
        communicator: int,
        op: int | None,
        blames: Blames,
        sums: Blames,
        largest: Blames,
        considered: list[Occasion],
        pooled: FirmnessByOp,
        context: Context,
    ) -> Accusation | None:
        """The case against whom these blames (occasion by rank; of one operation or all) accuse most, if any."""
        group = context.groups[communicator]
        margins = margin.over_others(blames)
        rank = int(np.median(margins, axis=0).argmax())
        own = margins[:, rank]
        against_all = (
            float(pooled[communicator, op][rank]) if blames is not largest and (communicator, op) in pooled else 0.0
        )
        windows = np.median(own.reshape(-1, per_window(context)), axis=1)
        if np.count_nonzero(windows > 0) < min(WINDOWS_BAD, len(windows)) or group.global_ranks[rank] == NO_NUMBER:
            return None
        in_all = float(np.median(margin.over_others(sums)[:, rank]))
        if op is not None and in_all <= 0:
            return None  # what it loses there, others lose elsewhere
        last = [occasion for occasion, ahead in zip(considered, own.tolist(), strict=True) if ahead > 0]
        times = np.array([occasion.at_ns for occasion in considered])
        usual_step = float(np.median(np.diff(times))) if len(times) > 1 else float(lateness.DEFAULT_STEP_NS)
        usual_largest = float(np.median(largest[:, rank]))
        places = min(lateness.LARGEST, int(np.median([occasion.operations for occasion in considered])))
        per_step = max(in_all, float(np.median(own)) * (places if blames is largest else 1))
        worst = sorted((blame for occasion in last for blame in occasion.largest.get(rank, ())), reverse=True)
        return Accusation(
            communicator=communicator,
            group=group,
            global_rank=group.global_ranks[rank],
            per_step_ns=per_step,
            per_operation_ns=float(np.median([o.blame_ns[rank] / o.hits[rank] for o in last if o.hits.get(rank)])),
            share=len(last) / len(considered),
            largest_ns=usual_largest,
            firmness=max(float(margin.firmness(own)), against_all),
            steps=len(considered),
            operations=sum(occasion.operations for occasion in considered),
            hits=sum(occasion.hits.get(rank, 0) for occasion in considered),
            since_ns=last[0].at_ns,
            last_ns=last[-1].at_ns,
            wait_share=min(1.0, max(per_step, 0.0) / usual_step),
            confidence=min(0.99, len(last) / len(considered)) * min(occasion.confidence for occasion in last),
            op=self._occasions[communicator].last_op if op is None else op,
            collectives=tuple(f"{group.comm_id}:{blame.coll_seq}" for blame in worst[:_COLLECTIVES_SHOWN]),
        )


def _is_judged(group: Group, context: Context) -> bool:
    if group.parallelism in _SPANS_STAGES:
        return False
    return group.parallelism not in _NOT_SURE or not any(g.parallelism == "PP" for g in context.groups.values())


def _least_margin(group: Group) -> int:
    """Blame per operation below this may be the skew with which ends are recorded."""
    return _SAME_HOST_FLOOR_NS if len(group.host_set()) == 1 else _OTHER_HOST_FLOOR_NS


def _least_per_step(context: Context) -> float:
    """Blame per step below this is not worth a person's time."""
    return min(_SHARE_OF_STEP * (context.step_ns or lateness.DEFAULT_STEP_NS), _FLOOR_AT_MOST_NS)


def _is_considerable(case: Accusation, group: Group, context: Context) -> bool:
    if case.largest_ns < _least_margin(group) or case.per_step_ns < _least_per_step(context):
        return False
    return case.firmness >= _SUPPORTING


def _healed_at(rank: int, recent: dict[int, list[Occasion]], context: Context) -> int | None:
    """When the rank was last late; None while it leads more than half of the last two windows in any of its groups."""
    last = None
    for communicator, occasions in recent.items():
        group = context.groups[communicator]
        newest = occasions[-2 * per_window(context) :]
        if rank not in group.global_ranks or len(newest) < 2 * per_window(context):
            continue
        own = group.global_ranks.index(rank)
        late = [o.at_ns for o in occasions if o.latest() == own and o.blame_ns[own] >= _least_per_step(context)]
        if 2 * sum(at >= newest[0].at_ns for at in late) > len(newest):
            return None
        last = max(last or 0, late[-1] if late else newest[0].at_ns)
    return last
