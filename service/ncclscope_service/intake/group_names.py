"""Names of PyTorch's process groups for the communicators of NCCL's lines."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final, TypeAlias

from ncclscope_service.store.records import Member
from ncclscope_service.store.tables import Store
from ncclscope_wire.facts import Fact, FlightRecord, ProcessGroup, TorchCommunicator, TorchGroup
from ncclscope_wire.records import CommunicatorEvent

_WAITING: Final = 1 << 16
"""Lines whose communicator is not known yet, and set-up lines: 4,096 ranks of 16 groups each."""
_RANKS_KEPT: Final = 1 << 14
_NAMES_OF_A_JOB: Final = 1 << 8
_UNNAMED: Final = frozenset({"undefined", ""})
"""Description of a group that was given none. *Source:* PyTorch Backend.hpp."""
_Group: TypeAlias = tuple[int, str | None, str | None, int]
"""Source, id, uid, rank in the group."""


class GroupNames:
    """Ties the names of PyTorch's process groups to the communicators of NCCL's lines.

    PyTorch prints a group's name with the pointer of the communicator that it created, which is the pointer of NCCL's
    own lines of that process. Its line names no host and no pid, and may stand in another file, and before or behind
    NCCL's. So the process is the one that initialised this pointer in the same file, as the same rank on the same
    device; if none did, the one whose global rank PyTorch prints. Where two fit, and where two names are printed of one
    communicator, there is no name: none is better than a wrong one.

    Traces of the profiler and dumps of the Flight Recorder name a group with its global ranks, and no pointer: it is
    the communicator of these ranks, where there is one group and one communicator of them. What is printed comes first.
    Where there are several, each of these communicators has one of their names (`possible_names`).

    *Source:* PyTorch ProcessGroupNCCL.cpp (`initNCCLComm`, `logPrefix`).
    """

    def __init__(self, known: Store) -> None:
        self._store = known
        self._initialised: dict[int, list[tuple[int, int, int]]] = {}
        """By pointer: (source, line, member) of each Init COMPLETE, in the order of their logs."""
        self._waiting: deque[tuple[str, int, TorchCommunicator]] = deque(maxlen=_WAITING)
        """(job, source, line) that have named no communicator yet."""
        self._global_ranks: dict[_Group, set[int]] = {}
        """Of the ranks of groups, as their set-up lines say."""
        self._printed: set[int] = set()
        """Communicators of which a name was printed; others may have one that NCCL Inspector tells."""
        self._contradicted: set[int] = set()
        """Of those, the ones of which two were printed."""
        self._descriptions: dict[tuple[str, tuple[int, ...]], set[str]] = {}
        """By job and sorted global ranks: names of groups of just these."""
        self._by_ranks: dict[int, str] = {}
        """Names that communicators have by their ranks."""

    def ingest_lines(
        self, job: str, source: int, completed: Sequence[tuple[CommunicatorEvent, int]], facts: Iterable[Fact]
    ) -> bool:
        """Takes the Init COMPLETE events of a batch with their members, and its facts; True if there was a name."""
        for event, member in completed:
            self._initialised.setdefault(event.pointer, []).append((source, event.line, member))
        has_names = False
        for fact in facts:
            if isinstance(fact, FlightRecord | ProcessGroup | TorchCommunicator):
                self._note(job, fact.group if isinstance(fact, TorchCommunicator) else fact.description)
            if isinstance(fact, FlightRecord | ProcessGroup):
                has_names |= self._ingest_ranks(job, fact)
            elif isinstance(fact, TorchGroup) and fact.global_rank is not None:
                group = (source, fact.group_id, fact.group_uid, fact.rank)
                if len(self._global_ranks) < _WAITING:
                    self._global_ranks.setdefault(group, set()).add(fact.global_rank)
            elif isinstance(fact, TorchCommunicator) and (fact.group or "") not in _UNNAMED:
                self._waiting.append((job, source, fact))
                has_names = True
        return has_names

    def assign(self) -> set[int]:
        """Names the communicators that are known by now; gives those whose name changed, by index."""
        changed: set[int] = set()
        waiting, self._waiting = self._waiting, deque(maxlen=_WAITING)
        for job, source, fact in waiting:
            member = self._member_of(job, source, fact)
            if member is None:
                self._waiting.append((job, source, fact))
            elif self._name(member.communicator, fact.group):
                changed.add(member.communicator)
        return changed | self._assign_by_ranks()

    def _note(self, job: str, name: str | None) -> None:
        names = self._store.group_names[job]
        if len(names) < _NAMES_OF_A_JOB:
            names.add("" if name is None or name in _UNNAMED else name)

    def _ingest_ranks(self, job: str, fact: FlightRecord | ProcessGroup) -> bool:
        if fact.description in _UNNAMED or len(fact.group_ranks) < 2:
            return False
        key = job, tuple(sorted(fact.group_ranks))
        if key not in self._descriptions and len(self._descriptions) >= _RANKS_KEPT:
            return False
        known = self._descriptions.setdefault(key, set())
        is_new = fact.description not in known
        known.add(fact.description)
        return is_new

    def _assign_by_ranks(self) -> set[int]:
        """Names by ranks, anew each time: a second communicator or group of the same ranks takes the name back."""
        if not self._descriptions:
            return set()
        jobs, found = {job for job, _ in self._descriptions}, defaultdict[tuple[str, tuple[int, ...]], list[int]](list)
        for communicator in self._store.communicators:
            if communicator.job in jobs and communicator.size > 1:
                seen = [self._store.members[member].global_rank for member in (communicator.members or {}).values()]
                ranks = tuple(sorted(rank for rank in seen if rank is not None))
                if len(ranks) == communicator.size:
                    found[communicator.job, ranks].append(communicator.index)
        wanted = {
            of[0]: next(iter(names))
            for key, names in self._descriptions.items()
            if len(names) == 1 and len(of := found.get(key, [])) == 1 and of[0] not in self._printed
        }
        changed = {
            index for index in wanted.keys() | self._by_ranks.keys() if wanted.get(index) != self._by_ranks.get(index)
        }
        for index in changed - self._printed:
            self._store.communicators[index].name = wanted.get(index)
        self._by_ranks = wanted
        for key, of in found.items():
            names = tuple(sorted(self._descriptions.get(key, ())))
            for index in of:
                communicator = self._store.communicators[index]
                possible = () if index in wanted or index in self._printed else names
                if communicator.possible_names != possible:
                    communicator.possible_names = possible
                    changed.add(index)
        return changed

    def evict_sources(self, sources: Collection[int]) -> None:
        """Forgets what these sources said, of which nothing more comes."""
        if not sources:
            return
        self._waiting = deque((each for each in self._waiting if each[1] not in sources), maxlen=_WAITING)
        self._global_ranks = {of: ranks for of, ranks in self._global_ranks.items() if of[0] not in sources}
        left = {at: [each for each in of if each[0] not in sources] for at, of in self._initialised.items()}
        self._initialised = {at: of for at, of in left.items() if of}

    def _name(self, communicator: int, name: str | None) -> bool:
        """Whether that changed the name of the communicator."""
        of = self._store.communicators[communicator]
        is_first = communicator not in self._printed
        self._printed.add(communicator)
        if of.name == name or communicator in self._contradicted:
            return False
        if not is_first:
            self._contradicted.add(communicator)
        of.name = name if is_first else None
        return True

    def _member_of(self, job: str, source: int, fact: TorchCommunicator) -> Member | None:
        fitting = [
            (at, line, member)
            for at, line, index in self._initialised.get(fact.communicator, ())
            if self._fits(member := self._store.members[index], job, fact)
        ]
        if not fitting:
            return None
        found: dict[int, Member] = {}
        """By process: the last one before PyTorch's line, else the first one behind it."""
        for at, line, member in fitting:
            if at == source and (line < fact.line or member.process not in found):
                found[member.process] = member
        if not found:
            rank = self._global_rank_of(source, fact)
            of_rank = [member for _, _, member in fitting if rank is not None and member.global_rank == rank]
            return of_rank[0] if len(of_rank) == 1 and not of_rank[0].global_rank_is_inferred else None
        of_rank = [member for member in found.values() if len(found) == 1 or member.rank == fact.rank]
        return of_rank[0] if len(of_rank) == 1 else None

    def _fits(self, member: Member, job: str, fact: TorchCommunicator) -> bool:
        if self._store.process_job[member.process] != job:
            return False
        if None not in (fact.device, member.cuda_device) and fact.device != member.cuda_device:
            return False
        # Two ranks that send to each other have a communicator of their own; PyTorch prints their ranks in the group.
        return member.rank in {None, fact.rank} or self._store.communicators[member.communicator].size <= 2

    def _global_rank_of(self, source: int, fact: TorchCommunicator) -> int | None:
        if fact.global_rank is not None:
            return fact.global_rank
        ranks = self._global_ranks.get((source, fact.group_id, fact.group_uid, fact.rank), set[int]())
        return next(iter(ranks)) if len(ranks) == 1 else None
