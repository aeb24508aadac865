"""Communicators as Init lines show them, and the place of each operation in its communicator.

In the log a communicator is a pointer of one process, reused after Destroy: so a *member* is (process,
pointer, epoch), and a new epoch begins at each Init START (or COMPLETE without START, as up to NCCL 2.18.1).
Across processes a communicator is known by

- the printed commId (equal on all ranks; when one rank gets the same commId again, as successive splits of one
  colour do from 2.18 to 2.22, the second communicator is `<commId>#2`);
- for splits without one (2.23 on): parent, split count, colour: `<parent>/<count>/<colour>`;
- else nothing joins it, and it stands for itself under a `~` name until `identification` finds its other ranks.

Source: NCCL `src/init.cc` (Init and Destroy lines), `ncclCommInitChildComm` (split count).

Each member counts its operations in four ways: all, collectives, by kind, by peer.

Tuning tables, rings and trees name no communicator. A thread prints them while it initialises one (tables: rank 0's
alone), so they belong to the next communicator of which that thread says Init COMPLETE. Source: NCCL
`src/init.cc:initTransportsRank`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import KeyIndex, distinct, distinct_together, distinct_values
from ncclscope_service.intake.limits import OTHER, Named, NameLimits
from ncclscope_service.nccl.topology import Channels
from ncclscope_service.store.records import Communicator, Identity, Member
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.facts import Fact, RingNeighbours, RingOrder, TreeNeighbours
from ncclscope_wire.records import CommunicatorEvent, CommunicatorEventKind
from ncclscope_wire.terms import NO_NUMBER, OPERATIONS, UNKNOWN_OPERATION
from ncclscope_wire.topology import TuningTableSeen

_LOWERED: Final = ("AlltoAll", "Gather", "Scatter")
"""Become sends and receives. *Source:* NCCL `src/enqueue.cc:taskAppend`."""
_IS_NUMBERED: Final = np.array(
    [operation.is_collective and operation.name not in _LOWERED for operation in OPERATIONS]
    + [False] * (256 - len(OPERATIONS))
)
"""Collectives that have a counter of their own, comm->seqNumber. *Source:* NCCL `src/plugin/profiler.cc`."""
_IS_COLLECTIVE: Final = np.array(
    [operation.is_collective for operation in OPERATIONS] + [False] * (256 - len(OPERATIONS))
) & (np.arange(256) != UNKNOWN_OPERATION)

NUMBERED_BY: Final = ("op", "root", "nranks", "count")
"""Columns of a template by which operations are numbered."""


class SequenceNumbers:
    """Counts the operations of every member, of all in one go."""

    def __init__(self) -> None:
        self._rows: NDArray[np.int64] = np.zeros(0, np.int64)
        """By member: operations seen so far."""
        self._collectives: NDArray[np.int64] = np.zeros(0, np.int64)
        self._kinds = _Counts(2)
        """By (member, operation code): collectives that NCCL launches."""
        self._pairs = _Counts(3)
        """By (member, operation code, peer)."""

    def give(self, operations: Columns, templates: Columns, members: int) -> None:
        """Fills seq, coll_seq, kind_seq and pair_seq of operations (`member` is filled) in the order of their logs.

        `templates`: NUMBERED_BY of each operation's; `members`: how many there are.
        """
        self._reserve(members)
        codes = templates["op"]
        everything = np.arange(len(operations))
        operations["seq"] = self._counted(self._rows, operations["member"])
        is_collective = _IS_COLLECTIVE[codes]
        collectives = everything[is_collective]
        operations["coll_seq"][collectives] = self._counted(self._collectives, operations["member"][collectives])
        kinds = np.flatnonzero(_IS_NUMBERED[codes] & (templates["nranks"] > 1) & (templates["count"] > 0))
        operations["kind_seq"][kinds] = self._kinds.counted(operations["member"][kinds], codes[kinds])
        others = everything[~is_collective]
        keys = operations["member"][others], codes[others], templates["root"][others]
        operations["pair_seq"][others] = self._pairs.counted(*keys)

    def _counted(self, counts: NDArray[np.int64], members: NDArray[np.int32]) -> NDArray[np.int64]:
        """The number of each of these operations of its member, from 0."""
        found, inverse = distinct(members)
        running, amounts = _running(inverse, len(found))
        numbers: NDArray[np.int64] = counts[found][inverse] + running
        counts[found] += amounts
        return numbers

    def _reserve(self, members: int) -> None:
        more = members - len(self._rows)
        if more > 0:
            none = np.zeros(max(more, len(self._rows)), np.int64)
            self._rows = np.concatenate([self._rows, none])
            self._collectives = np.concatenate([self._collectives, none])


class _Counts:
    """How many rows there were so far of each combination of some columns."""

    def __init__(self, columns: int) -> None:
        self._places = KeyIndex(columns)
        self._amounts: NDArray[np.int64] = np.zeros(0, np.int64)

    def counted(self, *columns: NDArray[np.integer]) -> NDArray[np.int64]:
        """The number of each row among those of equal columns, from 0."""
        if not len(columns[0]):
            return np.empty(0, np.int64)
        found, inverse = distinct_together(*columns)
        running, amounts = _running(inverse, len(found[0]))
        places = self._places.number(*found)
        more = len(self._places) - len(self._amounts)
        if more > 0:
            self._amounts = np.concatenate([self._amounts, np.zeros(max(more, len(self._amounts)), np.int64)])
        numbers: NDArray[np.int64] = self._amounts[places][inverse] + running
        self._amounts[places] += amounts
        return numbers


def _running(inverse: NDArray[np.intp], amount: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many rows of the same group come before each row, and how many each group has."""
    amounts = np.bincount(inverse, minlength=amount).astype(np.int64)
    # Few values fit the 16 bits that numpy sorts by counting.
    order = np.argsort(inverse.astype(np.uint16) if amount < 2**16 else inverse, kind="stable")
    running = np.empty(len(inverse), np.int64)
    running[order] = np.arange(len(inverse)) - np.repeat(np.cumsum(amounts) - amounts, amounts)
    return running, amounts


_COMPLETED: Final = 64
"""Communicators and tables of one thread that are remembered; both come in one batch or in the next."""
_WAITING: Final = 1024
"""Rings and trees of one thread that wait for their communicator: one initialisation prints 129 of them at most."""
_Completed: TypeAlias = "deque[tuple[int, int]]"
_Key: TypeAlias = tuple[int, str | None, int | None, int | None]
"""Source, host, pid, tid."""


@dataclass(slots=True)
class _Thread:
    """Lines of one thread, in line order."""

    completed: _Completed = field(default_factory=lambda: deque[tuple[int, int]](maxlen=_COMPLETED))
    """(line, member) of each Init COMPLETE."""
    completed_as_rank_0: _Completed = field(default_factory=lambda: deque[tuple[int, int]](maxlen=_COMPLETED))
    tables: deque[TuningTableSeen] = field(default_factory=lambda: deque[TuningTableSeen](maxlen=_COMPLETED))
    channels: deque[Fact] = field(default_factory=lambda: deque[Fact](maxlen=_WAITING))


class InitLines:
    """Ties the lines of initialisations to communicators in one store."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._threads: dict[_Key, _Thread] = {}

    def ingest_lines(
        self,
        source: int,
        completed: Sequence[tuple[CommunicatorEvent, int]],
        tables: Sequence[TuningTableSeen],
        facts: Sequence[Fact],
    ) -> None:
        """Takes the Init COMPLETE events of a batch with their members, its tuning tables and its facts."""
        touched: dict[_Key, _Thread] = {}
        for event, member in completed:
            thread = self._touched(touched, (source, event.host, event.pid, event.tid))
            thread.completed.append((event.line, member))
            if event.rank == 0:
                thread.completed_as_rank_0.append((event.line, member))
        for table in tables:
            self._touched(touched, (source, table.host, table.pid, table.tid)).tables.append(table)
        for fact in facts:
            if isinstance(fact, RingNeighbours | RingOrder | TreeNeighbours):
                self._touched(touched, (source, fact.host, fact.pid, fact.tid)).channels.append(fact)
        for thread in touched.values():
            self._tie_tables(thread)
            self._tie_channels(thread)

    def evict_sources(self, sources: Collection[int]) -> None:
        """Forgets the threads of these sources, of which nothing more comes."""
        for key in [key for key in self._threads if key[0] in sources] if sources else ():
            del self._threads[key]

    def _touched(self, touched: dict[_Key, _Thread], key: _Key) -> _Thread:
        return touched.setdefault(key, self._threads.setdefault(key, _Thread()))

    def _tie_tables(self, thread: _Thread) -> None:
        for table in list(thread.tables):
            member = next((member for line, member in thread.completed_as_rank_0 if line > table.line), None)
            if member is None:
                continue
            thread.tables.remove(table)
            of = self._store.members[member]
            if of.rank == 0:
                self._store.tuning_tables.setdefault(of.communicator, table)

    def _tie_channels(self, thread: _Thread) -> None:
        lines = [line for line, _ in thread.completed]
        while thread.channels:
            at = bisect_right(lines, thread.channels[0].line)
            if at == len(lines):
                return
            fact = thread.channels.popleft()
            communicator = self._store.communicators[self._store.members[thread.completed[at][1]].communicator]
            if communicator.size > 0:
                self._store.channels.setdefault(communicator.index, Channels(communicator.size)).add_fact(fact)


_WORD: Final = 2**64 - 1


def split_hash(parent: int, split_count: int, color: int) -> int:
    """comm->commHash of a communicator that was split from the one with that hash.

    Up to 2.22 its Init line prints it. From 2.24 on that prints parent, split count and colour instead, from which NCCL
    makes the hash. From 2.26 on it is the number that NCCL Inspector and NCCL's NVTX payloads carry.
    Source: NCCL `src/init.cc:ncclCommInitRankFunc` (2.26 on), `src/include/utils.h:eatHash`, `digestHash`.
    """
    state = (1, 1)
    for value, size in ((parent, 8), (split_count, 4), (color, 4)):
        state = _eat(state, value & (2 ** (8 * size) - 1), size)
    return _digest(state)


def _eat(state: tuple[int, int], value: int, size: int) -> tuple[int, int]:
    """State of the hash after a number of up to eight bytes."""
    first, second = state[0] ^ size, state[1]
    first = (first + second) & _WORD
    second ^= first
    first = ((first ^ first >> 31) * 0x9DE62BBC8CEF3CE3) & _WORD
    second = ((second ^ second >> 32) * 0x485CD6311B599E79) & _WORD
    return (first + value) & _WORD, second


def _digest(state: tuple[int, int]) -> int:
    result = ((state[0] ^ state[0] >> 31) * 0xBAC3BD562846DE6B) & _WORD
    result = (result + state[1]) & _WORD
    return ((result ^ result >> 32) * 0x995A187A14E7B445) & _WORD


MAX_RANKS: Final = 1 << 17
"""Of one communicator: each rank has its place in memory, and a line or an agent may announce 2**31 of them."""


class _Device(TypedDict):
    cuda_device: int | None
    bus_id: int | None
    nvml_device: int | None


class Communicators:
    """Follows communicators of all processes in one store; fed in line order of each process."""

    def __init__(self, known: Store, names: NameLimits | None = None) -> None:
        """`names`: how many there may be."""
        self._store = known
        self._names = NameLimits(known) if names is None else names
        self._others: dict[int, int] = {}
        """By process: its member that stands for all that are over the limits."""
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
        self._numbers = SequenceNumbers()
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
        """The member that operations of each of these templates are of, now; NO_NUMBER if that is not known yet."""
        known = templates < len(self._member_of_template)
        members = np.full(len(templates), NO_NUMBER, np.int32)
        members[known] = self._member_of_template[templates[known]]
        return members

    def of_hash(self, job: str, comm_hash: int) -> int | None:
        """The communicator that NCCL knows by this hash; None if no line named it so far."""
        return self._by_hash.get((job, comm_hash))

    def inspected(self, process: int, comm_hash: int, *, size: int, rank: int) -> int:
        """The communicator of this hash, made if no log line did, with this process in it as that rank."""
        job = self._store.process_job[process]
        index = self._by_hash.get((job, comm_hash))
        if index is None:
            index = self._named(f"0x{comm_hash:x}", process, size, Identity.COMM_ID)
            self._know_hash(index, comm_hash)
        of = self._store.communicators[index]
        members = of.members
        is_new = members is not None and rank not in members and rank >= 0 and of.comm_id != OTHER
        if members is not None and is_new and self._names.take_of_process(Named.MEMBERS, process):
            members[rank] = len(self._store.members)
            # No line gives it a pointer, so nothing is ever placed in it and its end is never known.
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

    def name_unnamed(self, communicator: int, name: str) -> None:
        """Gives it the name that its application gave NCCL, unless PyTorch's lines named it; "": none was given."""
        of = self._store.communicators[communicator]
        if name and of.name is None and of.comm_id != OTHER:
            of.name = name
            self.changed.add(of.job)

    def _only_device(self, process: int) -> _Device:
        """The device of all communicators of a process, if it drives one."""
        mine = [self._store.members[member] for member in self._members_of.get(process, ())]
        if len({member.cuda_device for member in mine}) != 1:
            return _Device(cuda_device=None, bus_id=None, nvml_device=None)
        of = mine[0]
        return _Device(cuda_device=of.cuda_device, bus_id=of.bus_id, nvml_device=of.nvml_device)

    def _know_hash(self, communicator: int, comm_hash: int) -> None:
        of = self._store.communicators[communicator]
        if of.comm_id == OTHER:
            return
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
                self._complete(event, alive, process)
            case CommunicatorEventKind.KNOWN:
                if alive is None or self._store.members[alive].rank is None:
                    alive = self._initialise(event, process)
                self._complete(event, alive, process)
            case CommunicatorEventKind.DESTROY | CommunicatorEventKind.ABORT:
                if alive is not None:
                    self._store.members[alive].is_alive = False
                    self._forget_pointer(process, event.pointer)

    def _complete(self, event: CommunicatorEvent, member: int, process: int) -> None:
        if member != self._others.get(process):
            self.completed.append((event, member))

    def _initialise(self, event: CommunicatorEvent, process: int) -> int:
        self._forget_pointer(process, event.pointer)
        if not self._names.take_of_process(Named.MEMBERS, process):
            return self._other(process)
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
        if event.comm_id is not None:
            return self._by_comm_id(event, event.comm_id, process)
        parent = None if event.parent is None else self._open.get((process, event.parent))
        if parent is not None and event.color is not None:
            return self._by_split(event, parent, process)
        return self._unidentified(process, event.pointer, event.nranks)

    def _by_comm_id(self, event: CommunicatorEvent, comm_id: int, process: int) -> int:
        self._ids_seen[process, comm_id, event.rank] += 1
        repeat = self._ids_seen[process, comm_id, event.rank]
        name = f"0x{comm_id:x}" if repeat == 1 else f"0x{comm_id:x}#{repeat}"
        parent = None if event.parent is None else self._open.get((process, event.parent))
        index = self._named(
            name,
            process,
            event.nranks,
            Identity.COMM_ID,
            parent_comm_id=None if parent is None else self._comm_id_of(parent),
            color=event.color,
        )
        self._know_hash(index, comm_id)
        return index

    def _by_split(self, event: CommunicatorEvent, parent: int, process: int) -> int:
        self._splits_of[parent] += 1
        count = self._splits_of[parent] if event.split_count is None else event.split_count
        parent_id = self._comm_id_of(parent)
        index = self._named(
            f"{parent_id}/{count}/{event.color}",
            process,
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

    def _unidentified(self, process: int, pointer: int, nranks: int) -> int:
        """A communicator that nothing ties to other processes: it stands for this one member only."""
        of = self._store.processes[process]
        epoch = self._epochs[process, pointer]
        digest = hashlib.blake2b(f"{of.host}:{of.pid}:{pointer:x}:{epoch}".encode(), digest_size=6).hexdigest()
        return self._named(f"~{digest}", process, nranks, Identity.INFERRED, identity_confidence=float(nranks == 1))

    def _comm_id_of(self, member: int) -> str:
        return self._store.communicators[self._store.members[member].communicator].comm_id

    def _named(
        self,
        name: str,
        process: int,
        size: int,
        identity: Identity,
        *,
        identity_confidence: float = 1.0,
        parent_comm_id: str | None = None,
        split_count: int | None = None,
        color: int | None = None,
    ) -> int:
        """The communicator of this name in the job of a process; that of all others if there are too many."""
        job = self._store.process_job[process]
        index = self._by_identity.get((job, name))
        size = min(size, MAX_RANKS)
        if index is None and name != OTHER:
            may = self._names.take_of_process(Named.COMMUNICATORS, process)
            if not (may and self._names.take_of_process(Named.RANKS, process, max(1, size))):
                return self._named(OTHER, process, 0, Identity.INFERRED, identity_confidence=0.0)
        if index is None:
            index = self._by_identity[job, name] = len(self._store.communicators)
            self._store.communicators.append(
                Communicator(
                    index=index,
                    job=job,
                    comm_id=name,
                    size=size,
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
        of = self._store.communicators[communicator]
        if rank is not None and of.members is not None and of.comm_id != OTHER:
            of.members[rank] = index
        self._members_of.setdefault(process, []).append(index)
        self._open[process, pointer] = index
        self._epochs[process, pointer] += 1
        self.changed.add(self._store.process_job[process])
        return index

    def _other(self, process: int) -> int:
        """The member of a process that stands for all of its communicators over the limits."""
        if process not in self._others:
            self._others[process] = self._add_member(
                communicator=self._named(OTHER, process, 0, Identity.INFERRED, identity_confidence=0.0),
                process=process,
                pointer=0,
                rank=None,
                cuda_device=None,
                bus_id=None,
                nvml_device=None,
            )
        return self._others[process]

    def _forget_pointer(self, process: int, pointer: int) -> None:
        self._open.pop((process, pointer), None)
        for template in self._templates_of_pointer.pop((process, pointer), ()):
            self._member_of_template[template] = NO_NUMBER

    def _place_run(self, operations: Columns) -> None:
        """Places operations between which nothing happened to any communicator."""
        if not len(operations):
            return
        self._resolve(distinct_values(operations["template"]))
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
        new = [template for template in templates if self._member_of_template[template] < 0]
        rows = self._store.operation_templates.rows.take(np.array(new, np.intp), "process", "communicator", "nranks")
        for template, (process, pointer, nranks) in zip(new, rows.tolist(), strict=True):
            member = self._open.get((process, pointer))
            if member is None and not self._names.take_of_process(Named.MEMBERS, process):
                member = self._other(process)
            if member is None:
                member = self._add_member(
                    communicator=self._unidentified(process, pointer, nranks),
                    process=process,
                    pointer=pointer,
                    rank=None,
                    cuda_device=None,
                    bus_id=None,
                    nvml_device=None,
                )
            size = self._store.communicators[self._store.members[member].communicator].size
            if nranks < 1 <= size:  # a recording names the communicator of a call, and not its size
                self._store.operation_templates.rows["nranks"][template] = size
            self._member_of_template[template] = member
            self._templates_of_pointer.setdefault((process, pointer), []).append(template)
