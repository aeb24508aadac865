"""Which of the accused ranks are to blame, and which were kept waiting themselves: by peers, sends, receives, links."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from ncclscope_service.detect.accusation import Accusation
from ncclscope_service.detect.context import Context
from ncclscope_service.detect.lateness import Occasion
from ncclscope_service.detect.spent import Spent

_EXPLAINED: Final = 0.5
_AMPLIFIED: Final = 2.0
"""Delays inside a stage add up on the way through the pipeline."""
HANDS_ON: Final = frozenset({"TP", "CP", "EP", "PP"})
"""Groups that ranks pass through on their way to what follows; those of the end of a step delay nothing in it."""


def origins(
    accusations: list[Accusation],
    known: dict[int, list[Occasion]],
    spent: Spent,
    convicted: dict[int, list[Accusation]],
    context: Context,
) -> dict[int, list[Accusation]]:
    """The accused who are to blame, with their cases, the strongest first."""
    delayed_by: dict[int, set[int]] = {}
    kept: dict[int, list[Accusation]] = {}
    for case in accusations:
        received = _received(case, known, context)
        if sum(received.values()) >= _EXPLAINED * case.per_step_ns * case.steps:
            delayed_by.setdefault(max(received, key=lambda rank: received[rank]), set()).add(case.global_rank)
        elif _handed_on(case, known, spent, context) < _EXPLAINED * case.at_once_ns:
            kept.setdefault(case.global_rank, []).append(case)
    for cases in kept.values():
        cases.sort(key=lambda case: (case.is_inner, case.wait_share), reverse=True)
    order = sorted(kept, key=lambda rank: (kept[rank][0].is_inner, _worst(kept[rank])), reverse=True)
    named: dict[int, list[Accusation]] = {}
    for rank in order:
        others = {origin: cases for origin, cases in (convicted | named).items() if origin != rank}
        if not any(
            _is_upstream(origin, cases, rank, kept[rank], delayed_by, context) for origin, cases in others.items()
        ):
            named[rank] = kept[rank]
    return named


def _received(case: Accusation, known: dict[int, list[Occasion]], context: Context) -> dict[int, float]:
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


def _handed_on(case: Accusation, known: dict[int, list[Occasion]], spent: Spent, context: Context) -> float:
    """How much longer than others of its group the accused was in other groups' sends, receives and transfers in a
    step, in ns: waiting for its peers there, or for slow links."""
    times: dict[int, dict[int, int]] = {rank: {} for rank in case.group.global_ranks}
    for communicator, group in context.groups.items():
        if communicator == case.communicator or group.parallelism not in HANDS_ON:
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
    origin_cases: list[Accusation],
    rank: int,
    cases: list[Accusation],
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


def _worst(cases: Iterable[Accusation]) -> float:
    return max(case.per_step_ns for case in cases)
