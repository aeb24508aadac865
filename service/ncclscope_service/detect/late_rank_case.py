"""One group's case against a late rank: how late, how sure, which finding, and whether the rank is to blame.

An accused rank may have been kept waiting itself: by peers, sends, receives or links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.detect.context import INNER, Context, Group, duration_text
from ncclscope_service.detect.settings import LateRankSettings
from ncclscope_service.detect.statistics import (
    Firmness,
    Margins,
    firmness,
    log_evidence,
    margins_over_others,
    medians,
    posterior,
)
from ncclscope_service.detect.step_blame import (
    ALL_OPS,
    DEFAULT_STEP_NS,
    LARGEST,
    WINDOWS,
    WINDOWS_BAD,
    ExchangeTimes,
    History,
    JudgedGroups,
    StepBlames,
    steps_per_window,
)
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_wire.terms import NO_NUMBER, OPERATIONS

_JITTER: Final = 0.01
"""Share of a step by which ranks of healthy jobs jitter, as far as the steps that were seen do not tell."""
_LEAST_JITTER: Final = 0.002
"""The same, however steady all ranks look."""
_LEAST_ALIKE: Final = 3
"""Other groups of a kind, and"""
_LEAST_STEPS_ALIKE: Final = 8
"""steps that tell how much ranks jitter."""
_MANY_STEPS: Final = 16
"""Steps in three whole windows, or more, that firmness alone tells from jitter: it was tried on years of windows."""
_NOT_ENOUGH: Final = 0.1
"""Evidence that lacks where many steps are not firm: windows that slide for days give chance many more of them."""
_SUPPORTING: Final = 3.0
"""Firmness of a case that counts only if another group accuses the rank firmly, or it was named a moment ago."""
_STANDS_OUT: Final = 0.75
"""Share of a rank's lateness in one kind of operation from which the sentence names that kind."""
_MOST_CONFIDENCE: Final = 0.99
_COLLECTIVES_SHOWN: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The case of one group against one of its ranks."""

    communicator: int
    group: Group
    global_rank: int
    per_step_ns: float
    """Median blame per step."""
    share: float
    """Of steps in which it was last."""
    largest_ns: float
    """Mean of its usual largest latenesses in a step."""
    longest_ns: float
    """The longest wait for it in a step, and"""
    mean_ns: float
    """the mean over the operations in which it was last: medians over the steps in which it was late."""
    late_operations: int
    """In a step, those for which it was late by half of the longest or more; LARGEST for as many or more."""
    last_operations: int
    """In a step, those in which it was last, of"""
    operations: int
    """so many (of kind `op`)."""
    cost_ns: float
    """Median over steps of the waits for it in a step, less what is usual for ranks of such groups."""
    cost_ratio: float
    """Of a step. What a pipeline bubble hides of it costs nothing."""
    firmness: float
    """Mean margin over its standard error."""
    log_evidence: float
    """Natural logarithm of the e-value; infinite if whole windows are firm."""
    steps: int
    since_ns: int
    last_ns: int
    wait_share: float
    """Share of a step that every other rank of the group waits for it."""
    confidence: float
    op: int
    """ALL_OPS: no kind stands out."""
    collectives: tuple[str, ...]
    """Those that waited longest for it."""

    @property
    def at_once_ns(self) -> float:
        """How far it is behind the others. What delays a rank shows in all that it does in an outer group until the
        next step, and is counted there again and again; in an inner one its peers wait for it each time."""
        return self.per_step_ns if self.is_inner else min(self.per_step_ns, self.largest_ns)

    @property
    def is_inner(self) -> bool:
        """Whether lateness arises in this kind of group rather than being passed on to it."""
        return self.group.parallelism in INNER


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    """Views that accuse a rank worth considering: one that is late in most windows, by more than the skew with which
    ends are recorded, costs something, and not by mere chance. How much is held against it, view by view.
    """

    view: NDArray[np.intp]
    rank: NDArray[np.intp]
    own: Margins
    """Its margins over the others: view by step."""
    per_step_ns: NDArray[np.float64]
    largest_ns: NDArray[np.float64]
    firmness: Firmness
    log_evidence: NDArray[np.float64]


def strongest_cases(
    judged: JudgedGroups, pooled: Firmness, blames: StepBlames, context: Context, window: int
) -> list[Case]:
    """The firmest case of each group that is worth naming: by all operations of a step, the largest blames, or each
    kind. `pooled`: the firmness of the ranks in each view against all groups of their kind; `window`: steps in a whole
    window.
    """
    found = _candidates(judged, pooled, context, window)
    if found is None:
        return []
    firmest: dict[int, int] = {}
    for place, group in enumerate(judged.group[found.view].tolist()):
        if group not in firmest or found.firmness[place] > found.firmness[firmest[group]]:
            firmest[group] = place
    return [_case(judged, found, place, blames, context) for _, place in sorted(firmest.items())]


def _candidates(judged: JudgedGroups, pooled: Firmness, context: Context, window: int) -> _Candidates | None:
    """None if there is none, as in most passes: what is cheap to tell is asked first."""
    groups = [context.groups[communicator] for communicator in judged.communicators]
    group, amount = judged.group, len(groups)
    margins = margins_over_others(judged.blames)
    middles = medians(margins)
    rank, views = middles.argmax(axis=1), np.arange(len(group))
    own = margins[views, rank]
    windows = medians(own.reshape(len(own), WINDOWS, -1)) > 0
    in_all = middles[group, rank]  # the first views are those over all operations
    largest = medians(judged.blames[amount + group, rank])
    places = np.ones(len(group))
    places[amount : 2 * amount] = np.minimum(LARGEST, medians(judged.operations.astype(np.float64))).astype(np.int64)
    per_step = np.maximum(in_all, middles[views, rank] * places)
    settings = context.settings.late_rank
    ranks = np.array([each.global_ranks for each in groups])
    floors = 1e3 * np.array(
        [settings.least_same_host_us if len(each.host_set()) == 1 else settings.least_other_host_us for each in groups]
    )
    view = np.flatnonzero(
        (windows.sum(axis=1) >= WINDOWS_BAD)
        & (ranks[group, rank] != NO_NUMBER)
        & ((judged.op == ALL_OPS) | (in_all > 0))  # else what it loses there, others lose elsewhere
        & (largest >= floors[group])
        & (per_step >= least_per_step(context))
    )
    if not len(view):
        return None
    firm = np.maximum(firmness(own[view]), pooled[view, rank[view]])
    view, firm = view[firm >= _SUPPORTING], firm[firm >= _SUPPORTING]
    if not len(view):
        return None
    steps = judged.at_ns.shape[1]
    usual_step = context.step_ns or DEFAULT_STEP_NS
    kinds = [
        (groups[each].parallelism, int(op), judged.is_largest(view))
        for view, (each, op) in enumerate(zip(group.tolist(), judged.op.tolist(), strict=True))
    ]
    jitter = _jitter(own * places[:, None] / usual_step, kinds, view)
    evidence = log_evidence(own[view], usual_step / places[view] * jitter)
    if steps >= max(_MANY_STEPS, WINDOWS_BAD * window):
        sure = np.inf if window == steps_per_window(context) else evidence
        evidence = np.where(firm >= settings.firmness, sure, np.minimum(evidence, settings.evidence - _NOT_ENOUGH))
    return _Candidates(
        view=view,
        rank=rank[view],
        own=own[view],
        per_step_ns=per_step[view],
        largest_ns=largest[view],
        firmness=firm,
        log_evidence=evidence,
    )


def _jitter(own: Margins, kinds: Sequence[Hashable], chosen: NDArray[np.intp]) -> NDArray[np.float64]:
    """How much ranks of a healthy job jitter, by chosen view, as a share of a step: by what other groups of the same
    kind show if there are enough of them. `own`: margins of the rank that leads each view, as shares of a step.
    """
    jitter = np.full(len(chosen), _JITTER)
    off = own - medians(own)[:, None]
    scatter = (np.sqrt(np.mean(off**2, axis=1)) * (1.0 + 2.0 / np.sqrt(own.shape[1]))).tolist()
    for place, view in enumerate(chosen.tolist()):
        others = [scatter[each] for each, kind in enumerate(kinds) if kind == kinds[view] and each != view]
        if len(others) >= _LEAST_ALIKE and own.shape[1] >= _LEAST_STEPS_ALIKE:
            jitter[place] = max(_LEAST_JITTER, *others)
    return jitter


def _case(judged: JudgedGroups, found: _Candidates, chosen: int, blames: StepBlames, context: Context) -> Case:
    """The case against the rank of one of the candidates."""
    view, rank, own = int(found.view[chosen]), int(found.rank[chosen]), found.own[chosen]
    place = int(judged.group[view])
    communicator, at_ns = judged.communicators[place], judged.at_ns[place]
    group = context.groups[communicator]
    steps = blames.steps_at(communicator, at_ns)
    is_last = own > 0
    is_late = own >= np.median(own) / 2
    is_blame = is_last[:, None] & (steps.largest_seq[rank] != NO_NUMBER)
    worst = sorted(
        zip(steps.largest_ns[rank][is_blame].tolist(), steps.largest_seq[rank][is_blame].tolist(), strict=True),
        reverse=True,
    )
    usual_step = context.step_ns or DEFAULT_STEP_NS
    per_step, share = float(found.per_step_ns[chosen]), float(is_last.mean())
    evidence = float(found.log_evidence[chosen])
    op, hits, blame_ns = _operations_of(steps, rank, int(judged.op[view]))
    hits, blame_ns, largest_ns = hits[:, is_late], blame_ns[:, is_late], steps.largest_ns[rank][is_late]
    last = np.maximum(hits[rank], 1)
    longest_ns = float(np.median(largest_ns[:, 0]))
    cost_ns = _over_peers(judged, place, rank, context)
    if group.parallelism not in INNER:
        cost_ns = min(cost_ns, longest_ns)  # counted in each operation until the next step
    return Case(
        communicator=communicator,
        group=group,
        global_rank=group.global_ranks[rank],
        per_step_ns=per_step,
        share=share,
        largest_ns=float(found.largest_ns[chosen]),
        longest_ns=longest_ns,
        mean_ns=float(np.median(blame_ns[rank] / last)),
        late_operations=round(float(np.median((2 * largest_ns >= largest_ns[:, :1]).sum(axis=1)))),
        last_operations=round(float(np.median(hits[rank]))),
        operations=round(float(np.median(hits.sum(axis=0)))),
        cost_ns=cost_ns,
        cost_ratio=cost_ns / usual_step,
        firmness=float(found.firmness[chosen]),
        log_evidence=evidence,
        steps=len(at_ns),
        since_ns=int(at_ns[is_late][0]),
        last_ns=int(at_ns[is_last][-1]),
        wait_share=min(1.0, max(per_step, 0.0) / usual_step),
        confidence=min(_MOST_CONFIDENCE, posterior(evidence)) * float(steps.confidence[is_last].min()),
        op=op,
        collectives=tuple(f"{group.comm_id}:{seq}" for _, seq in worst[:_COLLECTIVES_SHOWN]),
    )


def _operations_of(steps: History, rank: int, op: int) -> tuple[int, NDArray[np.int32], NDArray[np.int64]]:
    """The kind of operation that a rank is late for, with hits and blame (rank by step) of that kind; ALL_OPS, with
    those of all, if no kind stands out. `op`: the kind by which it was accused, or ALL_OPS.
    """
    if op == ALL_OPS:
        others = np.delete(steps.blame_by_op_ns, rank, axis=1).max(axis=1)
        by_op = np.maximum(0, (steps.blame_by_op_ns[:, rank] - others).sum(axis=1))
        op = steps.ops[int(by_op.argmax())] if by_op.max() >= _STANDS_OUT * by_op.sum() else ALL_OPS
    if op == ALL_OPS:
        return op, steps.hits_by_op.sum(axis=0), steps.blame_ns
    place = steps.ops.index(op)
    return op, steps.hits_by_op[place], steps.blame_by_op_ns[place]


def _over_peers(judged: JudgedGroups, place: int, rank: int, context: Context) -> float:
    """Median blame of a rank per step, less the median of all other ranks in groups of its kind, in ns."""
    kinds = [context.groups[each].parallelism for each in judged.communicators]
    alike = np.flatnonzero([kind == kinds[place] for kind in kinds])
    usual = medians(judged.blames[alike])
    own = int(np.flatnonzero(alike == place)[0]) * usual.shape[1] + rank
    return max(0.0, float(usual.flat[own] - np.median(np.delete(usual, own))))


def least_per_step(context: Context) -> float:
    """Blame per step below this is not worth a person's time."""
    settings = context.settings.late_rank
    return min(settings.least_share * (context.step_ns or DEFAULT_STEP_NS), 1e3 * settings.enough_us)


def late_rank_finding(rank: int, cases: list[Case], context: Context) -> Finding:
    """The finding about a late rank: all its numbers are of its strongest case."""
    case = cases[0]
    hosts = context.hosts_of((rank,))
    bound = "up to " if any(group.parallelism == "PP" for group in context.groups.values()) else ""
    return Finding(
        kind=FindingKind.LATE_RANK,
        severity=severity_of_cost(case.cost_ratio, context.settings.late_rank),
        job=context.job,
        comm_id=case.group.comm_id,
        parallelism=case.group.parallelism,
        ranks=(rank,),
        hosts=hosts,
        since_ns=min(one.since_ns for one in cases),
        confidence=round(max(one.confidence for one in cases), 3),
        summary=(
            f"rank {rank}{f' ({hosts[0]})' if hosts else ''} is a straggler: {_how_late(case)}; "
            f"costs {bound}{100 * case.cost_ratio:.1f} % of step time"
        ),
        evidence={
            "longest_ns": round(case.longest_ns),
            "mean_ns": round(case.mean_ns),
            "late_operations_per_step": case.late_operations
            if case.late_operations < LARGEST
            else case.last_operations,
            "operations_per_step": case.operations,
            "operation": _name_of(case.op) or "all",
            "cost_ns": round(case.cost_ns),
            "cost_ratio": round(case.cost_ratio, 4),
            "steps_last": round(case.share * case.steps),
            "steps": case.steps,
            "firmness": round(min(case.firmness, 1e6), 2),
            "collectives": list(case.collectives),
            "groups": [one.group.comm_id for one in cases],
            "from_ns": case.since_ns,
            "to_ns": case.last_ns,
        },
    )


def severity_of_cost(cost_ratio: float, settings: LateRankSettings) -> Severity:
    """Severity of a finding that costs this share of a step: nothing is information, a tenth is worth a page."""
    if cost_ratio < settings.info_share:
        return Severity.INFO
    return Severity.CRITICAL if cost_ratio >= settings.critical_share else Severity.WARNING


def _how_late(case: Case) -> str:
    """How often in a step, for what and by how much: by the few operations for which it is late, or by all."""
    name = _name_of(case.op)
    if case.late_operations >= LARGEST:
        return (
            f"in each step it is the last to reach {case.last_operations} of {case.operations} "
            f"{f'{name} operations' if name else 'operations'} of {case.group.name}, "
            f"by {duration_text(case.mean_ns)} on average"
        )
    name = name or "operation"
    often = "once per step" if case.late_operations == 1 else f"{case.late_operations} times per step"
    longest = f"{'' if case.late_operations == 1 else 'up to '}{duration_text(case.longest_ns)}"
    return (
        f"{often} it reaches {'an' if name[0] in 'Ao' else 'a'} {name} of {case.group.name} {longest} late "
        f"({case.late_operations} of {case.operations})"
    )


def _name_of(op: int) -> str:
    return OPERATIONS[op].name if 0 <= op < len(OPERATIONS) else ""


_EXPLAINED: Final = 0.5
"""Share of a lateness that others must have caused to excuse it."""
_AMPLIFIED: Final = 2.0
"""Delays inside a stage add up on the way through the pipeline."""
MID_STEP_GROUPS: Final = frozenset({"TP", "CP", "EP", "PP"})
"""Groups that a rank uses in the middle of a step; those at the end of a step delay nothing in it."""


def root_causes(
    accusations: list[Case],
    known: dict[int, History],
    exchange_times: ExchangeTimes,
    convicted: dict[int, list[Case]],
    context: Context,
) -> dict[int, list[Case]]:
    """The accused who are to blame, with their cases, the strongest first."""
    delayed_by: dict[int, set[int]] = {}
    kept: dict[int, list[Case]] = {}
    for case in accusations:
        waited = _waits_by_culprit(case, known, context)
        if sum(waited.values()) >= _EXPLAINED * case.per_step_ns * case.steps:
            delayed_by.setdefault(max(waited, key=lambda rank: waited[rank]), set()).add(case.global_rank)
        elif _delay_by_others(case, known, exchange_times, context) < _EXPLAINED * case.at_once_ns:
            kept.setdefault(case.global_rank, []).append(case)
    for cases in kept.values():
        cases.sort(key=lambda case: (case.is_inner, case.wait_share), reverse=True)
    order = sorted(kept, key=lambda rank: (kept[rank][0].is_inner, _worst(kept[rank])), reverse=True)
    named: dict[int, list[Case]] = {}
    for rank in order:
        others = {origin: cases for origin, cases in (convicted | named).items() if origin != rank}
        if not any(
            _is_upstream(origin, cases, rank, kept[rank], delayed_by, context) for origin, cases in others.items()
        ):
            named[rank] = kept[rank]
    return named


def _waits_by_culprit(case: Case, known: dict[int, History], context: Context) -> dict[int, float]:
    """By global rank: how long it kept the accused waiting in other groups, over the same time."""
    waited: dict[int, float] = {}
    for communicator, steps in known.items():
        group = context.groups[communicator]
        if communicator == case.communicator or case.global_rank not in group.global_ranks:
            continue
        own = group.global_ranks.index(case.global_rank)
        is_then = (case.since_ns <= steps.at_ns) & (steps.at_ns <= case.last_ns)
        more = np.where((steps.hits > 0) & is_then, steps.blame_ns - steps.blame_ns[own], 0).sum(axis=1)
        for rank, guilty in enumerate(group.global_ranks):
            if rank != own:
                waited[guilty] = waited.get(guilty, 0.0) + float(more[rank])
    return {guilty: blame for guilty, blame in waited.items() if blame > 0}


def _delay_by_others(case: Case, known: dict[int, History], exchange_times: ExchangeTimes, context: Context) -> float:
    """How much longer than others of its group the accused was in other groups' sends, receives and transfers in a
    step, in ns: waiting for its peers there, or for slow links."""
    times: dict[int, dict[int, int]] = {rank: {} for rank in case.group.global_ranks}
    for communicator, group in context.groups.items():
        if communicator == case.communicator or group.parallelism not in MID_STEP_GROUPS:
            continue
        for own, rank in enumerate(group.global_ranks):
            if rank in times:
                seen = list(exchange_times.times_of(communicator, own).items())
                if (steps := known.get(communicator)) is not None:
                    seen += zip(steps.at_ns.tolist(), steps.transfer_ns.tolist(), strict=True)
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
    origin_cases: list[Case],
    rank: int,
    cases: list[Case],
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
        if group.parallelism in SAME_WORK and rank in group.global_ranks
        for peer in group.global_ranks
    }


def _worst(cases: Iterable[Case]) -> float:
    return max(case.per_step_ns for case in cases)


SAME_WORK: Final = frozenset({"TP", "CP"})
"""Groups whose ranks receive the same from their pipelines, at the same time."""


def seats_in_pipelines(context: Context) -> dict[int, list[tuple[int, int]]]:
    """By global rank: the pipelines that it is in, and its rank there."""
    seats: dict[int, list[tuple[int, int]]] = {}
    for communicator, pipeline in context.groups.items():
        if pipeline.parallelism == "PP":
            for own, rank in enumerate(pipeline.global_ranks):
                seats.setdefault(rank, []).append((communicator, own))
    return seats


def waits_in_pipelines(
    group: Group, seats: Mapping[int, Sequence[tuple[int, int]]], waits: ExchangeTimes, context: Context
) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """How long each rank of a group waited in its pipeline's sends and receives: when steps began, and waits by rank
    and step, without the newest; None if there are fewer steps than windows. `seats`: `seats_in_pipelines`.

    Only steps of which most were seen: where a line is lost, and pairs of Sends and Recvs wait for one, a rank
    seems not to wait.
    """
    waited: dict[int, Counter[int]] = {rank: Counter() for rank in group.global_ranks}
    whole: dict[int, set[int]] = {rank: set() for rank in group.global_ranks}
    for rank, own in waited.items():
        for seat in seats.get(rank, ()):
            own.update(waits.times_of(*seat))
            whole[rank] |= waits.whole_steps_of(*seat)
    steps = sorted(set.intersection(*whole.values()))[:-1]
    count = min(len(steps), WINDOWS * steps_per_window(context)) // WINDOWS * WINDOWS
    if not count:
        return None
    chosen = steps[-count:]
    return np.asarray(chosen, np.int64), np.array([[each[at] for at in chosen] for each in waited.values()], np.float64)


def hidden_lateness(
    group: Group,
    at_ns: NDArray[np.int64],
    waits_ns: NDArray[np.float64],
    context: Context,
    is_open: Set[tuple[int, ...]],
) -> Finding | None:
    """The finding about the rank of a group that a pipeline bubble hides: it waits for its pipeline by so much less
    than each other rank of the group, step after step, and nobody waits for it. Information only: it costs nothing.

    `is_open`: ranks of open findings, for which half of the least lateness is enough.
    """
    settings, step_ns = context.settings.late_rank, context.step_ns or DEFAULT_STEP_NS
    margins = margins_over_others(-waits_ns)
    middles = medians(margins)
    own = int(middles.argmax())
    least_ns = settings.least_share * step_ns / (2 if (group.global_ranks[own],) in is_open else 1)
    if middles[own] < least_ns or group.global_ranks[own] == NO_NUMBER:
        return None
    evidence = float(log_evidence(margins[own], np.array(_JITTER * step_ns)))
    windows = medians(margins[own].reshape(WINDOWS, -1)) > 0
    if evidence < settings.evidence or windows.sum() < WINDOWS_BAD:
        return None
    rank, late_ns = group.global_ranks[own], float(middles[own])
    hosts = context.hosts_of((rank,))
    return Finding(
        kind=FindingKind.LATE_RANK,
        severity=Severity.INFO,
        job=context.job,
        comm_id=group.comm_id,
        parallelism=group.parallelism,
        ranks=(rank,),
        hosts=hosts,
        since_ns=int(at_ns[0]),
        confidence=round(min(_MOST_CONFIDENCE, posterior(evidence)), 3),
        summary=(
            f"rank {rank}{f' ({hosts[0]})' if hosts else ''} is {duration_text(late_ns)} later in each step than the "
            f"other ranks of {group.name} where it waits for its pipeline: a bubble hides it; costs 0.0 % of step time"
        ),
        evidence={
            "hidden_ns": round(late_ns),
            "cost_ns": 0,
            "cost_ratio": 0.0,
            "steps_last": int((margins[own] > 0).sum()),
            "steps": len(at_ns),
            "groups": [group.comm_id],
            "from_ns": int(at_ns[0]),
            "to_ns": int(at_ns[-1]),
        },
    )
