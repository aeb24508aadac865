"""Which ranks form which communicator, learnt from Init lines; and the place of each operation in it.

In the log a communicator is a pointer of one process, reused after Destroy: so a *member* is (process,
pointer, epoch), and a new epoch begins at each Init START (or COMPLETE without START, as up to NCCL 2.18.1).
Across processes a communicator is known by

- the printed commId (equal on all ranks; when one rank gets the same commId again, as successive splits of one
  colour do from 2.18 to 2.22, the second communicator is `<commId>#2`);
- for splits without one (2.23 on): parent, split count, colour: `<parent>/<count>/<colour>`;
- else nothing joins it, and it stands for itself under a `~` name until `identification` finds its other ranks.

Source: NCCL `src/init.cc` (Init and Destroy lines), `ncclCommInitChildComm` (split count).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.comm_hash import split_hash
from ncclscope_service.distinct import values_of
from ncclscope_service.numbers_of_members import NUMBERED_BY, Numbers
from ncclscope_service.rows import Communicator, Identity, Member
from ncclscope_service.store import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import CommunicatorEvent, CommunicatorEventKind
from ncclscope_wire.terms import NO_NUMBER

MAX_RANKS: Final = 1 << 17
"""Of one communicator: each rank has its place in memory, and a line or an agent may announce 2**31 of them."""


class _Device(TypedDict):
    cuda_device: int | None
    bus_id: int | None
    nvml_device: int | None


class Communicators:
    """Follows communicators of all processes in one store; fed in line order of each process."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._open: dict[tuple[int, int], int] = {}
        """(process, pointer) to the member that is alive."""
        self._started: set[int] = set()
        """Members whose Init START was seen and COMPLETE not yet."""
        self._epochs: Counter[tuple[int, int]] = Counter()
        self._by_identity: dict[tuple[str, str], int] = {}
        self._by_hash: dict[tuple[str, int], int] = {}
        self._ids_seen: Counter[tuple[int, int, int]] = Counter()
        """How often a (process, commId, rank) was initialised."""
        self._splits_of: Counter[int] = Counter()
        """How many communicators were split from a member so far."""
        self._member_of_template: NDArray[np.int32] = np.empty(0, np.int32)
        self._templates_of_pointer: dict[tuple[int, int], list[int]] = {}
        self._numbers = Numbers()
        self._members_of: dict[int, list[int]] = {}
        self.completed: list[tuple[CommunicatorEvent, int]] = []
        """Init COMPLETE lines with their member, since this was last emptied."""
        self.changed: set[str] = set()
        """Jobs whose membership changed since this was last emptied: their global ranks must be found again."""

    def place(
        self, operations: Columns, events: tuple[CommunicatorEvent, ...], event_processes: tuple[int, ...]
    ) -> None:
        """Fills member, seq, coll_seq and pair_seq of these operations, and follows these events.

        Both come from one batch: operations in line order, events likewise. An event takes effect for the lines
        after it.
        """
        done = 0
        for event, process in zip(events, event_processes, strict=True):
            upto = int(np.searchsorted(operations["line"], event.line))
            self._place_run(operations[done:upto])
            done = upto
            self._follow(event, process)
        self._place_run(operations[done:])

    def members_of(self, templates: NDArray[np.integer]) -> NDArray[np.int32]:
        """The member that operations of each of these templates are of, now; NO_NUMBER where that is not known yet."""
        known = templates < len(self._member_of_template)
        members = np.full(len(templates), NO_NUMBER, np.int32)
        members[known] = self._member_of_template[templates[known]]
        return members

    def of_hash(self, job: str, comm_hash: int) -> int | None:
        """The communicator that NCCL knows by this hash; None where no line named it so far."""
        return self._by_hash.get((job, comm_hash))

    def inspected(self, process: int, comm_hash: int, *, size: int, rank: int) -> int:
        """The communicator of this hash, made where no log line did, with this process in it as that rank."""
        job = self._store.process_job[process]
        index = self._by_hash.get((job, comm_hash))
        if index is None:
            index = self._named(f"0x{comm_hash:x}", job, size, Identity.COMM_ID)
            self._know_hash(index, comm_hash)
        members = self._store.communicators[index].members
        if members is not None and rank not in members and rank >= 0:
            members[rank] = len(self._store.members)
            # No line gives it a pointer, so nothing is ever placed in it and its end is never told.
            self._store.members.append(
                Member(
                    index=members[rank],
                    communicator=index,
                    process=process,
                    pointer=0,
                    epoch=0,
                    rank=rank,
                    **self._only_device(process),
                )
            )
            self.changed.add(job)
        return index

    def _only_device(self, process: int) -> _Device:
        """The device of all communicators of a process, where it drives one."""
        mine = [self._store.members[member] for member in self._members_of.get(process, ())]
        if len({member.cuda_device for member in mine}) != 1:
            return _Device(cuda_device=None, bus_id=None, nvml_device=None)
        of = mine[0]
        return _Device(cuda_device=of.cuda_device, bus_id=of.bus_id, nvml_device=of.nvml_device)

    def _know_hash(self, communicator: int, comm_hash: int) -> None:
        of = self._store.communicators[communicator]
        of.comm_hash = comm_hash
        self._by_hash[of.job, comm_hash] = communicator

    def has_ended(self, process: int) -> bool:
        """Whether every communicator that this process initialised was destroyed or aborted, and it had one."""
        mine = self._members_of.get(process, ())
        return bool(mine) and not any(self._store.members[member].is_alive for member in mine)

    def _follow(self, event: CommunicatorEvent, process: int) -> None:
        alive = self._open.get((process, event.pointer))
        match event.kind:
            case CommunicatorEventKind.INIT_START:
                self._started.add(self._initialise(event, process))
            case CommunicatorEventKind.INIT_COMPLETE:
                if alive is not None and alive in self._started:
                    self._started.discard(alive)
                else:
                    alive = self._initialise(event, process)
                self.completed.append((event, alive))
            case CommunicatorEventKind.DESTROY | CommunicatorEventKind.ABORT:
                if alive is not None:
                    self._store.members[alive].is_alive = False
                    self._forget_pointer(process, event.pointer)

    def _initialise(self, event: CommunicatorEvent, process: int) -> int:
        self._forget_pointer(process, event.pointer)
        communicator = self._communicator(event, process)
        return self._add_member(
            communicator=communicator,
            process=process,
            pointer=event.pointer,
            rank=event.rank if event.rank >= 0 else None,
            cuda_device=event.cuda_device,
            bus_id=event.bus_id,
            nvml_device=event.nvml_device,
        )

    def _communicator(self, event: CommunicatorEvent, process: int) -> int:
        job = self._store.process_job[process]
        if event.comm_id is not None:
            return self._by_comm_id(event, event.comm_id, process, job)
        parent = None if event.parent is None else self._open.get((process, event.parent))
        if parent is not None and event.color is not None:
            return self._by_split(event, parent, job)
        return self._unidentified(process, event.pointer, event.nranks, job)

    def _by_comm_id(self, event: CommunicatorEvent, comm_id: int, process: int, job: str) -> int:
        self._ids_seen[process, comm_id, event.rank] += 1
        repeat = self._ids_seen[process, comm_id, event.rank]
        name = f"0x{comm_id:x}" if repeat == 1 else f"0x{comm_id:x}#{repeat}"
        parent = None if event.parent is None else self._open.get((process, event.parent))
        index = self._named(
            name,
            job,
            event.nranks,
            Identity.COMM_ID,
            parent_comm_id=None if parent is None else self._comm_id_of(parent),
            color=event.color,
        )
        self._know_hash(index, comm_id)
        return index

    def _by_split(self, event: CommunicatorEvent, parent: int, job: str) -> int:
        self._splits_of[parent] += 1
        count = self._splits_of[parent] if event.split_count is None else event.split_count
        parent_id = self._comm_id_of(parent)
        index = self._named(
            f"{parent_id}/{count}/{event.color}",
            job,
            event.nranks,
            Identity.SPLIT,
            parent_comm_id=parent_id,
            split_count=count,
            color=event.color,
        )
        parent_hash = self._store.communicators[self._store.members[parent].communicator].comm_hash
        if parent_hash is not None and event.color is not None and event.split_count is not None:
            self._know_hash(index, split_hash(parent_hash, event.split_count, event.color))
        return index

    def _unidentified(self, process: int, pointer: int, nranks: int, job: str) -> int:
        """A communicator that nothing ties to other processes: it stands for this one member only."""
        of = self._store.processes[process]
        epoch = self._epochs[process, pointer]
        digest = hashlib.blake2b(f"{of.host}:{of.pid}:{pointer:x}:{epoch}".encode(), digest_size=6).hexdigest()
        return self._named(f"~{digest}", job, nranks, Identity.INFERRED, identity_confidence=0.0)

    def _comm_id_of(self, member: int) -> str:
        return self._store.communicators[self._store.members[member].communicator].comm_id

    def _named(
        self,
        name: str,
        job: str,
        size: int,
        identity: Identity,
        *,
        identity_confidence: float = 1.0,
        parent_comm_id: str | None = None,
        split_count: int | None = None,
        color: int | None = None,
    ) -> int:
        index = self._by_identity.get((job, name))
        if index is None:
            index = self._by_identity[job, name] = len(self._store.communicators)
            self._store.communicators.append(
                Communicator(
                    index=index,
                    job=job,
                    comm_id=name,
                    size=min(size, MAX_RANKS),
                    identity=identity,
                    identity_confidence=identity_confidence,
                    parent_comm_id=parent_comm_id,
                    split_count=split_count,
                    color=color,
                    members={},
                )
            )
        return index

    def _add_member(
        self,
        *,
        communicator: int,
        process: int,
        pointer: int,
        rank: int | None,
        cuda_device: int | None,
        bus_id: int | None,
        nvml_device: int | None,
    ) -> int:
        index = len(self._store.members)
        self._store.members.append(
            Member(
                index=index,
                communicator=communicator,
                process=process,
                pointer=pointer,
                epoch=self._epochs[process, pointer],
                rank=rank,
                cuda_device=cuda_device,
                bus_id=bus_id,
                nvml_device=nvml_device,
            )
        )
        members = self._store.communicators[communicator].members
        if rank is not None and members is not None:
            members[rank] = index
        self._members_of.setdefault(process, []).append(index)
        self._open[process, pointer] = index
        self._epochs[process, pointer] += 1
        self.changed.add(self._store.process_job[process])
        return index

    def _forget_pointer(self, process: int, pointer: int) -> None:
        self._open.pop((process, pointer), None)
        for template in self._templates_of_pointer.pop((process, pointer), ()):
            self._member_of_template[template] = NO_NUMBER

    def _place_run(self, operations: Columns) -> None:
        """Places operations between which nothing happened to any communicator."""
        if not len(operations):
            return
        self._resolve(values_of(operations["template"]))
        members = self._member_of_template[operations["template"]]
        operations["member"] = members
        self._numbers.give(operations, self._store.templates_of(operations, *NUMBERED_BY), len(self._store.members))

    def _resolve(self, templates: Sequence[int]) -> None:
        """Finds the member of each of these templates; one that no Init line named gets a member of its own."""
        total = len(self._store.operation_templates)
        if len(self._member_of_template) < total:
            grown = np.full(max(total, 2 * len(self._member_of_template)), NO_NUMBER, np.int32)
            grown[: len(self._member_of_template)] = self._member_of_template
            self._member_of_template = grown
        for template in templates:
            if self._member_of_template[template] >= 0:
                continue
            row = self._store.operation_templates.rows[template]
            process, pointer = int(row["process"]), int(row["communicator"])
            member = self._open.get((process, pointer))
            if member is None:
                member = self._add_member(
                    communicator=self._unidentified(
                        process, pointer, int(row["nranks"]), self._store.process_job[process]
                    ),
                    process=process,
                    pointer=pointer,
                    rank=None,
                    cuda_device=None,
                    bus_id=None,
                    nvml_device=None,
                )
            self._member_of_template[template] = member
            self._templates_of_pointer.setdefault((process, pointer), []).append(template)
