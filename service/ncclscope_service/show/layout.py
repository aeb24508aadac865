"""Where a job runs, as a picture needs it: its hosts, the GPUs on them, and the groups that connect them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from ncclscope_service.job.ranks import MAX_RANK
from ncclscope_service.show.communicators import efficiencies, four_digits
from ncclscope_service.show.details import JobQuery

MAX_HOSTS: Final = 256
"""Hosts that are drawn, by their lowest rank; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutHost:
    """A host, with the ranks on it."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks that are known, ascending."""
    gpus: tuple[int | None, ...]
    """By rank: its GPU as NVML counts, else as CUDA does; None if no line said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutGroup:
    """A communicator of at least two ranks."""

    alias: str
    parallelism: str | None
    ranks: tuple[int, ...]
    """Global ranks, in the order of its own."""
    efficiency: float | None
    """Bus bandwidth of its main operation over what is expected of it; None if either is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutView:
    """The layout of one job."""

    hosts: tuple[LayoutHost, ...]
    """By lowest rank."""
    hosts_known: int
    groups: tuple[LayoutGroup, ...]
    """Those with at least two known ranks on these hosts."""


def layout_view(query: JobQuery) -> LayoutView:
    """The hosts, ranks and groups of a job; ranks whose global number is not known are left out."""
    places: dict[str, dict[int, int | None]] = defaultdict(dict)
    for member in query.members():
        rank = member.global_rank
        if rank is not None and 0 <= rank < MAX_RANK:
            gpu = member.cuda_device if member.nvml_device is None else member.nvml_device
            ranks = places[query.store.processes[member.process].host]
            ranks[rank] = gpu if ranks.get(rank) is None else ranks[rank]
    found = sorted(places.items(), key=lambda each: min(each[1]))
    hosts = tuple(
        LayoutHost(name=name, ranks=tuple(sorted(ranks)), gpus=tuple(ranks[rank] for rank in sorted(ranks)))
        for name, ranks in found[:MAX_HOSTS]
    )
    drawn = {rank for host in hosts for rank in host.ranks}
    ratios = efficiencies(query.store)
    groups = []
    for each in query.store.listed_communicators():
        own = (
            [rank for _, rank in sorted(query.ranks_of(each).items()) if rank in drawn] if each.job == query.job else []
        )
        if len(own) > 1:
            groups.append(
                LayoutGroup(
                    alias=query.aliases[each.index],
                    parallelism=each.parallelism,
                    ranks=tuple(own),
                    efficiency=four_digits(ratios[each.index]),
                )
            )
    return LayoutView(hosts=hosts, hosts_known=len(found), groups=tuple(groups))
