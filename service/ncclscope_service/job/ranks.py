"""Global and local ranks: from the communicator that spans the job, else from where processes sit.

The largest communicator of a job names the global ranks, provided that every rank that was seen is in it.
Where there is none, nodes are ordered by host name and ranks by device within a node, and every rank is
flagged as inferred (the rule of the NCCL Trace Profiler thesis).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from ncclscope_service.store.records import Communicator, Member
from ncclscope_service.store.tables import Store

Seat = tuple[int, int]
"""(process, CUDA device in the process): what holds one rank."""


def assign_ranks(known: Store, *, jobs: Collection[str] | None = None, gpus_per_node: int | None = None) -> set[int]:
    """Sets global_rank, local_rank and global_rank_is_inferred of every member of these jobs; None: of all jobs.

    Gives the communicators in which a global rank changed, by index.
    """
    changed: set[int] = set()
    if jobs is not None and not jobs:
        return changed
    by_job: dict[str, list[Member]] = defaultdict(list)
    for member in known.members:
        by_job[known.process_job[member.process]].append(member)
    for job in sorted(by_job):
        if jobs is None or job in jobs:
            changed |= _assign_job(known, by_job[job], gpus_per_node)
    return changed


def _assign_job(known: Store, members: list[Member], gpus_per_node: int | None) -> set[int]:
    changed: set[int] = set()
    seats: dict[Seat, list[Member]] = defaultdict(list)
    for member in members:
        seats[_seat(member)].append(member)
    local = _local_ranks(known, seats)
    printed = _ranks_of_world(known, members, seats)
    inferred = {} if printed is not None else _inferred_ranks(known, seats, local, gpus_per_node)
    for seat, seated in seats.items():
        global_rank = inferred.get(seat) if printed is None else printed[seat]
        for member in seated:
            if member.global_rank != global_rank:
                changed.add(member.communicator)
            member.local_rank = local[seat]
            member.global_rank = global_rank
            member.global_rank_is_inferred = printed is None
    return changed


def _seat(member: Member) -> Seat:
    return member.process, member.cuda_device if member.cuda_device is not None else 0


def _ranks_of_world(known: Store, members: list[Member], seats: dict[Seat, list[Member]]) -> dict[Seat, int] | None:
    """The rank of every seat in the job's largest communicator; None unless all seats are in it."""
    worlds: dict[int, dict[Seat, int]] = defaultdict(dict)
    for member in members:
        if member.rank is not None:
            worlds[member.communicator].setdefault(_seat(member), member.rank)
    complete = [
        (known.communicators[index].size, -index, ranks)
        for index, ranks in worlds.items()
        if len(ranks) == len(seats) and len(set(ranks.values())) == len(ranks)
    ]
    if not complete:
        return None
    size, _, ranks = max(complete, key=lambda candidate: candidate[:2])
    largest = max((known.communicators[member.communicator].size for member in members), default=0)
    return ranks if size == largest else None


def _local_ranks(known: Store, seats: dict[Seat, list[Member]]) -> dict[Seat, int]:
    by_host: dict[str, list[Seat]] = defaultdict(list)
    for seat in seats:
        by_host[known.processes[seat[0]].host].append(seat)
    local: dict[Seat, int] = {}
    for on_host in by_host.values():
        on_host.sort(key=lambda seat: (_device_order(seats[seat]), known.processes[seat[0]].pid))
        local.update({seat: rank for rank, seat in enumerate(on_host)})
    return local


def _device_order(seated: list[Member]) -> int:
    """The physical order of a device on its node: nvmlDev, else bus id, else the CUDA ordinal."""
    for member in seated:
        if member.nvml_device is not None:
            return member.nvml_device
    for member in seated:
        if member.bus_id is not None:
            return member.bus_id
    return next((member.cuda_device for member in seated if member.cuda_device is not None), 0)


def _inferred_ranks(
    known: Store, seats: dict[Seat, list[Member]], local: dict[Seat, int], gpus_per_node: int | None
) -> dict[Seat, int]:
    hosts = sorted({known.processes[process].host for process, _ in seats})
    node = {host: index for index, host in enumerate(hosts)}
    per_node = gpus_per_node or max((rank + 1 for rank in local.values()), default=1)
    return {seat: node[known.processes[seat[0]].host] * per_node + local[seat] for seat in seats}


def global_ranks(known: Store, communicator: Communicator) -> dict[int, int]:
    """Communicator rank to global rank, for the ranks that were seen."""
    found: dict[int, int] = {}
    for rank, member in (communicator.members or {}).items():
        global_rank = known.members[member].global_rank
        if global_rank is not None:
            found[rank] = global_rank
    return found


def hosts_of(known: Store, communicator: Communicator) -> tuple[str, ...]:
    """The hosts of the ranks that were seen, sorted."""
    members = (communicator.members or {}).values()
    return tuple(sorted({known.processes[known.members[member].process].host for member in members}))


def host_of_ranks(known: Store) -> dict[str, dict[int, str]]:
    """The host of each global rank of every job."""
    found: dict[str, dict[int, str]] = {job: {} for job in known.process_job}
    for member in known.members:
        if member.global_rank is not None:
            found[known.process_job[member.process]][member.global_rank] = known.processes[member.process].host
    return found
