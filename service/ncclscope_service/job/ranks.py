"""Global and local ranks: as the communicator that spans the job prints them, else from where processes sit.

The largest communicator of a job names the global ranks if it can be the job: no fewer ranks than GPUs that print one,
and no rank on two of them. What a process prints stays, whatever lines of others were lost; who has lost its own gets
one of the ranks that are left. Communicators that nothing names (NCCL before 2.16) count as one if their members do not
contradict each other. A process that follows another on its GPU has its rank, as after a restart.

Where no communicator can be the job, nodes are ordered by host name and ranks by device within a node (the rule of the
NCCL Trace Profiler thesis). There are never more ranks than the largest communicator has, unless several of that size
are seen side by side; where there are more GPUs than ranks, nobody is given one.

Ranks that were not printed are flagged as inferred.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from ncclscope_service.store.records import Communicator, Identity, Member
from ncclscope_service.store.tables import Store

MAX_RANK: Final = 1 << 20
"""Global ranks from here on are taken for a damaged line and left out."""

Seat = tuple[int, int]
"""(process, CUDA device in the process): what holds one rank."""
Gpu = tuple[str, int, int]
"""(host, bus id, 0), or (host, process, CUDA device) where no bus id was printed."""
_FAR: Final = 1 << 20
"""From here on places are numbered that have no rank."""


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
            changed |= _Job(known, by_job[job], gpus_per_node).assign()
    return changed


def places(known: Store, members: Iterable[Member], gpus_per_node: int | None = None) -> dict[int, int]:
    """By index of each of these members of one job, a number that orders GPUs: the global rank where it is known."""
    job = _Job(known, list(members), gpus_per_node)
    order = job.by_host()
    return {
        member.index: _FAR + order[job.seat(member)] if member.global_rank is None else member.global_rank
        for member in job.members
    }


class _Job:
    """The members of one job, and where they sit."""

    def __init__(self, known: Store, members: list[Member], gpus_per_node: int | None) -> None:
        self._store = known
        self.members = members
        self._gpus_per_node = gpus_per_node
        devices: dict[int, set[int]] = defaultdict(set)
        for member in members:
            if member.cuda_device is not None:
                devices[member.process].add(member.cuda_device)
        self._only_device = {process: min(of) for process, of in devices.items()}
        self._seats: dict[Seat, list[Member]] = defaultdict(list)
        for member in members:
            self._seats[self.seat(member)].append(member)
        self._gpus = {seat: self._gpu(seat) for seat in self._seats}
        self._local = self._local_ranks()
        self._size = max((known.communicators[member.communicator].size for member in members), default=0)

    def seat(self, member: Member) -> Seat:
        """Where a member sits; one whose Init line was lost sits on the (first) device of its process."""
        if member.cuda_device is not None:
            return member.process, member.cuda_device
        return member.process, self._only_device.get(member.process, 0)

    def assign(self) -> set[int]:
        """Sets the ranks of all members; gives the communicators in which a global rank changed, by index."""
        printed = self._printed()
        inferred = self._inferred() if printed is None else self._left(printed)
        printed = printed or {}
        changed: set[int] = set()
        for seat, seated in self._seats.items():
            global_rank = printed.get(seat, inferred.get(seat))
            for member in seated:
                if member.global_rank != global_rank:
                    changed.add(member.communicator)
                member.local_rank = self._local[seat]
                member.global_rank = global_rank
                member.global_rank_is_inferred = seat not in printed and global_rank is not None
        return changed

    def by_host(self) -> dict[Seat, int]:
        """Seats numbered by host name, then by device."""
        hosts = sorted({self._host(seat) for seat in self._seats})
        node = {host: index for index, host in enumerate(hosts)}
        per_node = self._gpus_per_node or max((rank + 1 for rank in self._local.values()), default=1)
        return {seat: node[self._host(seat)] * per_node + self._local[seat] for seat in self._seats}

    def _host(self, seat: Seat) -> str:
        return self._store.processes[seat[0]].host

    def _gpu(self, seat: Seat) -> Gpu:
        for member in self._seats[seat]:
            if member.bus_id is not None:
                return self._host(seat), member.bus_id, 0
        return self._host(seat), *seat

    def _local_ranks(self) -> dict[Seat, int]:
        by_host: dict[str, list[Seat]] = defaultdict(list)
        for seat in self._seats:
            by_host[self._host(seat)].append(seat)
        local: dict[Seat, int] = {}
        for on_host in by_host.values():
            on_host.sort(key=lambda seat: (_device_order(self._seats[seat]), self._store.processes[seat[0]].pid))
            gpus: dict[Gpu, int] = {}
            for seat in on_host:
                local[seat] = gpus.setdefault(self._gpus[seat], len(gpus))
        return local

    def _printed(self) -> dict[Seat, int] | None:
        """The rank that each seat prints of the communicator of all; None if there is none."""
        claims: dict[int, dict[Seat, int]] = defaultdict(dict)
        """By communicator; -1 for all that nothing names."""
        for member in self.members:
            of = self._store.communicators[member.communicator]
            if member.rank is not None and of.size == self._size:
                claims[-1 if _is_alone(of) else of.index].setdefault(self.seat(member), member.rank)
        if not claims:
            return None
        ordered = sorted(claims.items(), key=lambda claim: (-len(claim[1]), claim[0]))
        world = dict(ordered[0][1])
        for _, other in ordered[1:]:
            if not {self._gpus[seat] for seat in other} & {self._gpus[seat] for seat in world}:
                return None  # groups side by side
            world = {**other, **world}
        gpus: dict[int, set[Gpu]] = defaultdict(set)
        for seat, rank in world.items():
            gpus[rank].add(self._gpus[seat])
        if any(len(on) > 1 for on in gpus.values()):
            return None
        others = {
            self._gpus[seat] for seat, seated in self._seats.items() if any(each.rank is not None for each in seated)
        }
        return world if len(others | {self._gpus[seat] for seat in world}) <= self._size else None

    def _left(self, printed: Mapping[Seat, int]) -> dict[Seat, int]:
        """Ranks for the seats that print none: in the layout of those that do, else those that are left, in order."""
        of_gpu = {self._gpus[seat]: rank for seat, rank in printed.items()}
        found = {seat: of_gpu[gpu] for seat, gpu in self._gpus.items() if seat not in printed and gpu in of_gpu}
        missing = [seat for seat in self._seats if seat not in printed and seat not in found]
        free = set(range(self._size)) - set(printed.values())
        if not missing or len({self._gpus[seat] for seat in missing}) > len(free):
            return found  # some of these are no rank of the job, and nothing says which
        first: dict[str, set[int]] = defaultdict(set)
        for seat, rank in printed.items():
            first[self._host(seat)].add(rank - self._local[seat])
        order = self.by_host()
        for seat in sorted(missing, key=order.__getitem__):
            of_host = first.get(self._host(seat), set())
            guess = min(of_host) + self._local[seat] if len(of_host) == 1 else None
            if guess in free:
                found[seat] = guess
                free.discard(guess)
        rest = sorted((seat for seat in missing if seat not in found), key=order.__getitem__)
        return {**found, **dict(zip(rest, sorted(free), strict=False))}

    def _inferred(self) -> dict[Seat, int]:
        order = self.by_host()
        if len(set(self._gpus.values())) <= self._size or self._has_groups():
            return order
        return {}

    def _has_groups(self) -> bool:
        """Whether communicators of the largest size are shown to be several, side by side."""
        gpus: dict[tuple[int, int], set[Gpu]] = defaultdict(set)
        named: set[int] = set()
        for member in self.members:
            of = self._store.communicators[member.communicator]
            if of.size == self._size and member.rank is not None:
                gpus[0, member.rank].add(self._gpus[self.seat(member)])
            if of.size == self._size and not _is_alone(of):
                named.add(of.index)
        return len(named) > 1 or any(len(on) > 1 for on in gpus.values())


def _is_alone(communicator: Communicator) -> bool:
    """Whether nothing ties it to other processes."""
    return communicator.identity is Identity.INFERRED and communicator.identity_confidence == 0.0


def _device_order(seated: list[Member]) -> int:
    """The physical order of a device on its node: nvmlDev, else bus id, else the CUDA ordinal."""
    for member in seated:
        if member.nvml_device is not None:
            return member.nvml_device
    for member in seated:
        if member.bus_id is not None:
            return member.bus_id
    return next((member.cuda_device for member in seated if member.cuda_device is not None), 0)


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
