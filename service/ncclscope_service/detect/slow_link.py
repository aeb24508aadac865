"""Slow groups that point at a host whose wires (NIC, NVLink, PCIe) are slow.

Groups that are neither slow nor healthy for certain may still tell which of several hosts it is: groups over that host
alone lack about as much as the slow ones, and groups over another one nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from ncclscope_service.detect.context import Context, Group, names_of_hosts, names_of_ranks
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_wire.terms import NO_NUMBER


def hosts_that_explain(slow: Sequence[frozenset[str]], healthy: Sequence[frozenset[str]]) -> frozenset[str]:
    """The hosts that explain the slow groups; empty if none do.

    A host of a healthy group is innocent. Of the rest, hosts are taken greedily by how many slow groups they explain
    until all are; hosts that explain the same groups look the same and are all named. Groups between hosts and
    groups within one cross different wires: call it for each kind apart.
    """
    innocent = frozenset[str]().union(*healthy)
    unexplained = list(slow)
    named: set[str] = set()
    while unexplained:
        candidates = sorted({host for group in unexplained for host in group} - innocent - named)
        if not candidates:
            return frozenset()
        explains = {host: frozenset(i for i, group in enumerate(unexplained) if host in group) for host in candidates}
        best = max(candidates, key=lambda host: len(explains[host]))
        named |= {host for host in candidates if explains[host] == explains[best]}
        unexplained = [group for i, group in enumerate(unexplained) if i not in explains[best]]
    return frozenset(named)


_MOST_LEANING: Final = 3.0
"""Logarithm of the odds by which groups over the same hosts count at most: they have their wires in common."""
_LEAST_POSTERIOR: Final = 0.95
"""Probability from which one of several hosts is named alone."""
_LEAST_GROUPS_OF_RANKS: Final = 2
"""One slow group alone does not tell a card from the group's own work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowGroup:
    """One communicator with less bandwidth than it should have."""

    loss: float
    """Share of the reference busbw that it lacks."""
    level: float
    """Natural logarithm of busbw in bytes per second."""
    reference: float
    reference_is_siblings: bool
    since_ns: int
    confidence: float
    baseline_seconds: int | None = None
    """Length of the baseline; None if the reference are its siblings."""


class Leaning(NamedTuple):
    """How much bandwidth a group lacks against its siblings, since others are slow."""

    behind: float
    """As a difference of natural logarithms."""
    error: float
    """Its standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Slow groups that one set of hosts explains."""

    hosts: frozenset[str]
    is_between_hosts: bool
    communicators: tuple[int, ...]
    healthy: int
    ranks: tuple[int, ...] = ()
    """If not all ranks of the host are slow: those that are, which share a network card or a link."""
    certainty: float = 1.0
    """Probability that it is these hosts and no others that explain the slow groups as well."""


def locate_slow_groups(
    slow: Mapping[int, SlowGroup],
    healthy: frozenset[int],
    context: Context,
    leanings: Mapping[int, Leaning] = MappingProxyType({}),
    measured: Set[int] = frozenset(),
) -> list[Located]:
    """Hosts that explain slow groups, groups between hosts and groups within one apart; groups left out have none.

    `leanings`: of groups that can be compared; `measured`: all whose bandwidth is measured, of which more may be.
    """
    located: list[Located] = []
    if not slow:
        return located
    for is_between in (True, False):
        suspects = {c: context.groups[c].host_set() for c in slow if _is_between(context.groups[c]) == is_between}
        innocents = [context.groups[c].host_set() for c in healthy if _is_between(context.groups[c]) == is_between]
        by_siblings = any(slow[communicator].reference_is_siblings for communicator in suspects)
        if not suspects or not innocents or (len(suspects) < 2 and not by_siblings):
            continue
        hosts, certainty = hosts_that_explain(list(suspects.values()), innocents), 1.0
        if len(hosts) > 1 and all(hosts <= wires for wires in suspects.values()):
            lost = -math.log1p(-max(slow[communicator].loss for communicator in suspects))
            seen = [
                (context.groups[each].host_set(), leaning)
                for each, leaning in leanings.items()
                if each not in suspects and _is_between(context.groups[each]) == is_between
            ]
            hosts, certainty = _likeliest(hosts, lost, seen)
            others = [context.groups[each] for each in (leanings.keys() | measured) & context.groups.keys()]
            may_tell = (_is_between(group) == is_between and len(group.host_set() & hosts) == 1 for group in others)
            if len(hosts) > 1 and any(may_tell):
                continue
        settings = context.settings.bandwidth
        allowed = min(settings.most_hosts, max(1.0, settings.most_hosts_share * len(_all_hosts(context))))
        if not hosts:
            located += _by_ranks(suspects, healthy, context, is_between=is_between)
        if hosts and len(hosts) <= allowed:
            located.append(
                Located(
                    hosts=hosts,
                    is_between_hosts=is_between,
                    communicators=tuple(sorted(suspects)),
                    healthy=len(innocents),
                    certainty=certainty,
                )
            )
    return located


def _likeliest(
    hosts: frozenset[str], lost: float, seen: Sequence[tuple[frozenset[str], Leaning]]
) -> tuple[frozenset[str], float]:
    """Of hosts that explain the slow groups equally well, the one for which other groups speak, or all of them; and how
    sure that is. `lost`: what the slow groups lack, as a difference of logarithms; `seen`: other groups.
    """
    by_wires: defaultdict[frozenset[str], list[Leaning]] = defaultdict(list[Leaning])
    for wires, leaning in seen:
        if len(wires & hosts) == 1:
            by_wires[wires].append(leaning)
    odds = dict.fromkeys(hosts, 0.0)
    for wires, leanings in by_wires.items():
        (host,) = wires & hosts
        behind, error = (statistics.median(values) for values in zip(*leanings, strict=True))
        odds[host] += min(max((behind - lost / 2) * lost / error**2, -_MOST_LEANING), _MOST_LEANING)
    best = max(hosts, key=lambda host: odds[host])
    posterior = 1 / sum(math.exp(each - odds[best]) for each in odds.values())
    return (frozenset({best}), posterior) if posterior >= _LEAST_POSTERIOR else (hosts, 1.0)


def _by_ranks(
    suspects: Mapping[int, frozenset[str]], healthy: frozenset[int], context: Context, *, is_between: bool
) -> list[Located]:
    """Ranks of one host that explain the slow groups if others of that host are healthy: a card among several."""
    of = {communicator: _rank_set(context.groups[communicator]) for communicator in (*suspects, *healthy)}
    innocents = [of[c] for c in healthy if _is_between(context.groups[c]) == is_between]
    ranks = hosts_that_explain([of[c] for c in suspects], innocents)
    hosts = context.hosts_of(tuple(int(rank) for rank in ranks))
    if not ranks or len(hosts) != 1 or len(suspects) < _LEAST_GROUPS_OF_RANKS:
        return []
    return [
        Located(
            hosts=frozenset(hosts),
            is_between_hosts=is_between,
            communicators=tuple(sorted(suspects)),
            healthy=len(innocents),
            ranks=tuple(sorted(int(rank) for rank in ranks)),
        )
    ]


def _rank_set(group: Group) -> frozenset[str]:
    return frozenset(str(rank) for rank in group.global_ranks if rank != NO_NUMBER)


def slow_link_finding(located: Located, slow: Mapping[int, SlowGroup], context: Context) -> Finding:
    """Finding that names the hosts."""
    groups = {communicator: slow[communicator] for communicator in located.communicators}
    worst = max(groups, key=lambda communicator: groups[communicator].loss)
    kinds = sorted({context.groups[communicator].parallelism or "" for communicator in groups} - {""})
    who = " ".join(
        part for part in (str(len(groups)), "/".join(kinds), "groups" if len(groups) > 1 else "group") if part
    )
    loss = groups[worst].loss
    many = len(groups) > 1
    reference = f"{'their' if many else 'its'} siblings" if groups[worst].reference_is_siblings else "before"
    where = f"that cross{'' if many else 'es'} into" if located.is_between_hosts else "inside"
    hosts = tuple(sorted(located.hosts))
    devices = "NIC, cable and switch port" if located.is_between_hosts else "NVLink and PCIe links"
    suspects = names_of_ranks(located.ranks) if located.ranks else names_of_hosts(hosts)
    # several hosts that no group tells apart: one of them is at fault
    certainty = 1.0 / len(hosts) if len(groups) == 1 else 1.0 / (1.0 + 0.5 * (len(hosts) - 1))
    return Finding(
        kind=FindingKind.SLOW_LINK,
        severity=Severity.CRITICAL
        if loss >= context.settings.bandwidth.critical_loss and len(groups) > 1
        else Severity.WARNING,
        job=context.job,
        comm_id=context.groups[worst].comm_id,
        parallelism=context.groups[worst].parallelism,
        ranks=located.ranks or _ranks_on(located, context),
        hosts=hosts,
        since_ns=min(group.since_ns for group in groups.values()),
        confidence=round(max(group.confidence for group in groups.values()) * certainty * located.certainty, 3),
        summary=(
            f"{who} {where} {names_of_hosts(hosts)} "
            f"{'have' if many else 'has'} {100 * loss:.0f} % less bandwidth than {reference}, while "
            f"{located.healthy} other group{' is' if located.healthy == 1 else 's are'} healthy: "
            f"check the {devices} of {suspects}"
        ),
        evidence={
            "loss_ratio": round(loss, 4),
            "slow_groups": sorted({context.groups[communicator].comm_id for communicator in groups}),
            "healthy_groups": located.healthy,
            "busbw_bytes_per_second": _exp(groups[worst].level),
            "reference_bytes_per_second": _exp(groups[worst].reference),
            "reference": "siblings" if groups[worst].reference_is_siblings else "baseline",
        },
    )


def _exp(level: float) -> float:
    return round(math.exp(level))


def _is_between(group: Group) -> bool:
    return len(group.host_set()) > 1


def _all_hosts(context: Context) -> frozenset[str]:
    return frozenset[str]().union(*(group.host_set() for group in context.groups.values()))


def _ranks_on(located: Located, context: Context) -> tuple[int, ...]:
    """All ranks of these hosts, whichever of their groups are slow at the moment."""
    return tuple(
        sorted(
            {
                rank
                for group in context.groups.values()
                for rank, host in zip(group.global_ranks, group.hosts, strict=True)
                if host in located.hosts and rank >= 0
            }
        )
    )
