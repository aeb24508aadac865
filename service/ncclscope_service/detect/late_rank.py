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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from ncclscope_service.detect import lateness, margin
from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.findings import Ledger, duration_text
from ncclscope_service.detect.lateness import Occasion, Occasions
from ncclscope_service.detect.margin import Blames
from ncclscope_service.detect.pooled import Firmness, Pooled
from ncclscope_service.detect.spent import Spent
from ncclscope_service.rows import Finding, FindingKind, Severity
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES, OPERATIONS

_WINDOW_NS: Final = 4_000_000_000
_WINDOWS: Final = 4
_WINDOWS_BAD: Final = 3
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
_UNEVEN: Final = 1.5
_COLLECTIVES_SHOWN: Final = 8
_EXPLAINED: Final = 0.5
_EXCUSED_FOR: Final = 5
"""Looks in a row at which a named rank must turn out to be delayed by others before it is named no longer."""
_AMPLIFIED: Final = 2.0
"""Delays inside a stage add up on the way through the pipeline."""
_SPANS_STAGES: Final = frozenset({"PP", "EMBEDDING"})
_HANDS_ON: Final = frozenset({"TP", "CP", "EP", "PP"})
"""Groups that ranks pass through on their way to what follows; those of the end of a step delay nothing in it."""
_NOT_SURE: Final = frozenset({"WORLD", None})
_LEAST_CONFIDENCE: Final = 0.5
_ROOTED: Final = frozenset(OPERATION_CODES[name] for name in ("Broadcast", "Reduce", "Gather", "Scatter"))


_BlamesByOp: TypeAlias = dict[int | None, Blames]
"""By operation; None: all of them."""
_Kind: TypeAlias = tuple[str | None, int, int | None]
"""Parallelism and size of groups, and the operation, None for all of them."""
_Pooled: TypeAlias = Mapping[tuple[int, int | None], Firmness]
"""By communicator and operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accusation:
    """One group's case against one rank."""

    communicator: int
    group: Group
    global_rank: int
    per_step_ns: float
    """Median blame per step."""
    per_operation_ns: float
    share: float
    """Of steps in which it was last."""
    largest_ns: float
    """Its usual largest lateness in a step."""
    firmness: float
    """Mean margin over its standard error."""
    steps: int
    operations: int
    hits: int
    since_ns: int
    last_ns: int
    wait_share: float
    """Of the time that every other rank of the group waits for it."""
    confidence: float
    op: int
    collectives: tuple[str, ...]
    """Those that waited longest for it."""

    @property
    def at_once_ns(self) -> float:
        """How far it is behind the others. What delays a rank shows in all that it does in an outer group until the
        next step, and is counted there again and again; in an inner one its peers wait for it each time."""
        return self.per_step_ns if self.is_inner else min(self.per_step_ns, self.largest_ns)

    @property
    def is_inner(self) -> bool:
        """Whether the group is the one in which lateness is born rather than passed on."""
        return self.group.parallelism in {"TP", "CP", "EP"}


class LateRank:
    """Feeds on joined collectives of one job."""

    def __init__(self) -> None:
        self._occasions: dict[int, Occasions] = {}
        self._bin_ns = lateness.DEFAULT_STEP_NS
        self._step_changed_for = 0
        self._spent = Spent()
        self._pooled: dict[_Kind, Pooled] = {}
        self._ledger = Ledger()
        self._context: Context | None = None
        self._excused_for: dict[int, int] = {}
        """By named rank: looks in a row at which others explained its lateness."""
        self._convicted: dict[int, list[_Accusation]] = {}
        """Last cases against ranks that were named a short while ago: what they delayed outlasts them."""

    def feed(self, collectives: Columns, context: Context) -> None:
        """Takes joined collectives (`rows.COLLECTIVE`) of one job, in any order."""
        self._context = context
        known = (collectives["confidence"] >= _LEAST_CONFIDENCE) & np.isin(
            collectives["communicator"], np.array(sorted(context.groups), dtype=np.int64)
        )
        usable = known & (collectives["last_rank"] >= 0) & (collectives["blame_ns"] >= 0)
        self._settle_step(context)
        keep = _WINDOWS * _per_window(context) + 2
        remembered = max(keep, min(_REMEMBERED_NS // self._bin_ns, _MOST_REMEMBERED))
        self._spent.feed(collectives[known & (collectives["rank"] >= 0)], self._bin_ns, keep)
        for tally in lateness.tallies(collectives[usable], self._bin_ns):
            occasions = self._occasions.setdefault(tally.communicator, Occasions())
            occasions.at(tally.at_ns).add(tally)
            occasions.last_op = tally.op
            occasions.forget_all_but(remembered)

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
            communicator: occasions.newest(_WINDOWS * _per_window(context))
            for communicator, occasions in self._occasions.items()
            if communicator in context.groups and _is_judged(context.groups[communicator], context)
        }
        blames = {
            c: _blames(mine, len(context.groups[c].global_ranks))
            for c, all_of_it in recent.items()
            if (mine := _whole(all_of_it, context))
        }
        pooled = self._pooled_firmness(blames, context)
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
        named = _origins(accusations, known, self._spent, self._convicted, context)
        self._convicted |= named
        memory_ns = 2 * _WINDOWS * _per_window(context) * (context.step_ns or lateness.DEFAULT_STEP_NS)
        newest = max((occasions[-1].at_ns for occasions in recent.values() if occasions), default=0)
        for rank in [rank for rank, cases in self._convicted.items() if cases[0].last_ns < newest - memory_ns]:
            del self._convicted[rank]
        for rank, cases in named.items():
            if self._ledger.is_open(rank) or self._is_all_seen(rank, cases, context):
                self._ledger.update(rank, _finding(rank, cases, context))
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

    def _is_all_seen(self, rank: int, cases: list[_Accusation], context: Context) -> bool:
        """Whether the groups that may have delayed the rank were seen for as long as those in which it was late."""
        if cases[0].is_inner:
            return True
        until_ns = cases[0].last_ns - _WINDOW_NS
        for communicator, group in context.groups.items():
            if group.parallelism in _HANDS_ON and rank in group.global_ranks and len(group.global_ranks) > 1:
                own = group.global_ranks.index(rank)
                seen = self._spent.of(communicator, own).keys() | self._occasions.get(communicator, Occasions()).times()
                if max(seen, default=until_ns - 1) < until_ns:
                    return False
        return True

    def _pooled_firmness(self, blames: Mapping[int, _BlamesByOp], context: Context) -> _Pooled:
        """Of the ranks of each communicator, against the scatter of all groups of its parallelism and size."""
        kinds: dict[_Kind, dict[int, Blames]] = {}
        for communicator, by_op in blames.items():
            group = context.groups[communicator]
            for op, mine in by_op.items():
                if len(group.global_ranks) > 1:
                    kinds.setdefault((group.parallelism, len(group.global_ranks), op), {})[communicator] = mine
        return {
            (communicator, kind[2]): firmness
            for kind, mine in kinds.items()
            for communicator, firmness in self._pooled.setdefault(kind, Pooled()).firmness(mine).items()
        }

    def _accuse(
        self,
        communicator: int,
        recent: list[Occasion],
        by_op: _BlamesByOp,
        pooled: _Pooled,
        context: Context,
    ) -> _Accusation | None:
        group = context.groups[communicator]
        usable = _whole(recent, context)
        largest = np.zeros((len(usable), len(group.global_ranks)))
        for place, occasion in enumerate(usable):
            for rank in occasion.largest:
                if rank < largest.shape[1]:
                    largest[place, rank] = occasion.usual_largest(rank)
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
        pooled: _Pooled,
        context: Context,
    ) -> _Accusation | None:
        """The case against whom these blames (occasion by rank; of one operation or all) accuse most, if any."""
        group = context.groups[communicator]
        margins = margin.over_others(blames)
        rank = int(np.median(margins, axis=0).argmax())
        own = margins[:, rank]
        against_all = (
            float(pooled[communicator, op][rank]) if blames is not largest and (communicator, op) in pooled else 0.0
        )
        windows = np.median(own.reshape(-1, _per_window(context)), axis=1)
        if np.count_nonzero(windows > 0) < min(_WINDOWS_BAD, len(windows)) or group.global_ranks[rank] == NO_NUMBER:
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
        return _Accusation(
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


def _by_operation(considered: list[Occasion], ranks: int) -> list[tuple[int, Blames]]:
    """Blames (occasion by rank) of each kind of operation, where there are several; rooted ones wait for their root."""
    found: dict[int, Blames] = {}
    for place, occasion in enumerate(considered):
        for (rank, op), blame_ns in occasion.blame_by_op.items():
            if op not in _ROOTED and rank < ranks:
                found.setdefault(op, np.zeros((len(considered), ranks)))[place, rank] = blame_ns
    return list(found.items()) if len(found) > 1 else []


def _whole(recent: list[Occasion], context: Context) -> list[Occasion]:
    """The newest occasions that make whole windows; none where they are too few."""
    per_window = _per_window(context)
    usable = recent[len(recent) % per_window :]
    return usable if len(usable) >= _WINDOWS_BAD * per_window else []


def _blames(occasions: list[Occasion], ranks: int) -> _BlamesByOp:
    """Blames (occasion by rank) of all operations together, and of each kind of them where there are several."""
    together = np.zeros((len(occasions), ranks))
    for place, occasion in enumerate(occasions):
        for rank, blame_ns in occasion.blame_ns.items():
            if rank < ranks:
                together[place, rank] = blame_ns
    return {None: together, **dict(_by_operation(occasions, ranks))}


def _per_window(context: Context) -> int:
    """Occasions per window: four seconds of them, at least two steps."""
    return max(2, round(_WINDOW_NS / (context.step_ns or lateness.DEFAULT_STEP_NS)))


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


def _is_considerable(case: _Accusation, group: Group, context: Context) -> bool:
    if case.largest_ns < _least_margin(group) or case.per_step_ns < _least_per_step(context):
        return False
    return case.firmness >= _SUPPORTING


def _origins(
    accusations: list[_Accusation],
    known: dict[int, list[Occasion]],
    spent: Spent,
    convicted: dict[int, list[_Accusation]],
    context: Context,
) -> dict[int, list[_Accusation]]:
    """The accused who are to blame, with their cases, the strongest first."""
    delayed_by: dict[int, set[int]] = {}
    kept: dict[int, list[_Accusation]] = {}
    for case in accusations:
        received = _received(case, known, context)
        if sum(received.values()) >= _EXPLAINED * case.per_step_ns * case.steps:
            delayed_by.setdefault(max(received, key=lambda rank: received[rank]), set()).add(case.global_rank)
        elif _handed_on(case, known, spent, context) < _EXPLAINED * case.at_once_ns:
            kept.setdefault(case.global_rank, []).append(case)
    for cases in kept.values():
        cases.sort(key=lambda case: (case.is_inner, case.wait_share), reverse=True)
    order = sorted(kept, key=lambda rank: (kept[rank][0].is_inner, _worst(kept[rank])), reverse=True)
    named: dict[int, list[_Accusation]] = {}
    for rank in order:
        origins = {origin: cases for origin, cases in (convicted | named).items() if origin != rank}
        if not any(
            _is_upstream(origin, cases, rank, kept[rank], delayed_by, context) for origin, cases in origins.items()
        ):
            named[rank] = kept[rank]
    return named


def _received(case: _Accusation, known: dict[int, list[Occasion]], context: Context) -> dict[int, float]:
    """By global rank: how long the accused itself was kept waiting by it in other groups, over the same time."""
    received: dict[int, float] = {}
    for communicator, occasions in known.items():
        group = context.groups[communicator]
        if communicator == case.communicator or case.global_rank not in group.global_ranks:
            continue
        own = group.global_ranks.index(case.global_rank)
        for occasion in occasions:
            if case.since_ns <= occasion.at_ns <= case.last_ns:
                for rank, blame in occasion.blame_ns.items():
                    if rank != own and rank < len(group.global_ranks):
                        guilty = group.global_ranks[rank]
                        received[guilty] = received.get(guilty, 0.0) + blame - occasion.blame_ns.get(own, 0)
    return {guilty: blame for guilty, blame in received.items() if blame > 0}


def _handed_on(case: _Accusation, known: dict[int, list[Occasion]], spent: Spent, context: Context) -> float:
    """How much longer than others of its group the accused was in other groups' sends, receives and transfers in a
    step, in ns: waiting for its peers there, or for slow links."""
    times: dict[int, dict[int, int]] = {rank: {} for rank in case.group.global_ranks}
    for communicator, group in context.groups.items():
        if communicator == case.communicator or group.parallelism not in _HANDS_ON:
            continue
        for own, rank in enumerate(group.global_ranks):
            if rank in times:
                seen = [(at_ns, ns) for at_ns, ns in spent.of(communicator, own).items()]
                seen += [(occasion.at_ns, occasion.transfer_ns) for occasion in known.get(communicator, ())]
                for at_ns, ns in seen:
                    if case.since_ns <= at_ns <= case.last_ns:
                        times[rank][at_ns] = times[rank].get(at_ns, 0) + ns
    own_times = times.pop(case.global_rank)
    others = [each for each in times.values() if each]
    if not others or not own_times:
        return 0.0
    more = [ns - float(np.median([each.get(at_ns, 0) for each in others])) for at_ns, ns in own_times.items()]
    return float(np.median(more))


def _is_upstream(
    origin: int,
    origin_cases: list[_Accusation],
    rank: int,
    cases: list[_Accusation],
    delayed_by: dict[int, set[int]],
    context: Context,
) -> bool:
    """Whether the lateness of `rank` came to it from `origin`, who is already named: as its peer, or by a pipeline."""
    if cases[0].is_inner:
        return False  # late inside its own group: a fault of its own
    peers = _peers(origin, context)
    if origin_cases[0].is_inner and rank in peers and _worst(cases) * _EXPLAINED <= _worst(origin_cases):
        return True  # what its peers waited for, the groups of each of them wait for
    if _worst(cases) * _EXPLAINED > _worst(origin_cases) * (_AMPLIFIED if origin_cases[0].is_inner else 1.0):
        return False
    sources = {origin} | delayed_by.get(origin, set()) | peers
    return any(
        rank in group.global_ranks and not sources.isdisjoint(group.global_ranks)
        for group in context.groups.values()
        if group.parallelism == "PP"
    )


def _peers(rank: int, context: Context) -> set[int]:
    """Ranks that share a tensor- or context-parallel group with this one: its delay is theirs."""
    return {
        peer
        for group in context.groups.values()
        if group.parallelism in {"TP", "CP"} and rank in group.global_ranks
        for peer in group.global_ranks
    }


def _worst(cases: Iterable[_Accusation]) -> float:
    return max(case.per_step_ns for case in cases)


def _healed_at(rank: int, recent: dict[int, list[Occasion]], context: Context) -> int | None:
    """When the rank was last late; None while it leads more than half of the last two windows in any of its groups."""
    last = None
    for communicator, occasions in recent.items():
        group = context.groups[communicator]
        newest = occasions[-2 * _per_window(context) :]
        if rank not in group.global_ranks or len(newest) < 2 * _per_window(context):
            continue
        own = group.global_ranks.index(rank)
        late = [o.at_ns for o in occasions if o.latest() == own and o.blame_ns[own] >= _least_per_step(context)]
        if 2 * sum(at >= newest[0].at_ns for at in late) > len(newest):
            return None
        last = max(last or 0, late[-1] if late else newest[0].at_ns)
    return last


def _finding(rank: int, cases: list[_Accusation], context: Context) -> Finding:
    case = cases[0]
    others = len(case.group.global_ranks) - 1
    hosts = context.hosts_of((rank,))
    operation = OPERATIONS[case.op].name if case.op < len(OPERATIONS) else "operations"
    wait = max(one.wait_share for one in cases)
    waiters = "the other rank waits" if others == 1 else f"the {others} other ranks wait"
    is_uneven = case.largest_ns > _UNEVEN * case.per_operation_ns
    how_late = f"up to {duration_text(case.largest_ns)}" if is_uneven else duration_text(case.per_operation_ns)
    return Finding(
        kind=FindingKind.LATE_RANK,
        severity=Severity.CRITICAL if wait >= 0.1 else Severity.WARNING,
        job=context.job,
        comm_id=case.group.comm_id,
        parallelism=case.group.parallelism,
        ranks=(rank,),
        hosts=hosts,
        since_ns=min(one.since_ns for one in cases),
        until_ns=None,
        confidence=round(max(one.confidence for one in cases), 3),
        summary=(
            f"rank {rank}{f' ({hosts[0]})' if hosts else ''} arrives {how_late} late in "
            f"{100 * case.hits / max(1, case.operations):.0f} % of {operation} of {case.group.name}; "
            f"{waiters} for it {100 * case.wait_share:.0f} % of each step"
        ),
        evidence={
            "blame_per_operation_ns": round(case.per_operation_ns),
            "blame_per_step_ns": round(case.per_step_ns),
            "steps_last": round(case.share * case.steps),
            "steps": case.steps,
            "operations_last": case.hits,
            "operations": case.operations,
            "wait_share": round(wait, 4),
            "largest_ns": round(case.largest_ns),
            "firmness": round(min(case.firmness, 1e6), 2),
            "collectives": list(case.collectives),
            "groups": [one.group.comm_id for one in cases],
            "from_ns": case.since_ns,
            "to_ns": case.last_ns,
        },
    )
