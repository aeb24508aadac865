"""Communicators put together from their members if no line names them: NCCL up to 2.15, and lost Init lines.

Without a commId each process knows its communicator by a pointer of its own. What the ranks of one communicator share
is its size, what was called on it, that all of its kernels end together, and a place in a regular layout of ranks:

1. *Content*: members of one size that called the same collectives, with the same counts and types, may belong together.
2. *Times*: an N-to-N collective ends on all ranks at once, so the differences of two members' ends are constant but for
   the drift of the clocks: no clock is needed. Ends of another group scatter by its own jitter.
3. *Layout*: frameworks lay groups out alike. The k-th member of each rank, in the order of global ranks, form one
   group, if all groups that come of it are the same figure, moved.

Two that agree are sure; one alone decides with less confidence; if nothing decides, or two contradict each other,
members stay apart, which is said (`Identity.INFERRED` with one member). A wrong group would be worse than none.

Of members that called nothing yet, or whose calls are not logged, Init lines tell rank, size and order only. They are
put together where each rank of a size is printed exactly once, in the whole job or as the k-th communicator of that
size of each process; and where it is printed equally often, by the layout.

Source: the idea of comparing sequences is that of the NCCL Trace Profiler thesis, which takes equal sequences alone;
times and layout decide between groups that do the same.

A member without commId and without a known parent stands alone under a `~` name until its partners are found. Then
one communicator takes all of them in, under a name made of its members; the others are *absorbed* by it: they keep
their index, and are listed no more.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.job import ranks
from ncclscope_service.nccl.topology import Channels
from ncclscope_service.rollup.series import SeriesBook
from ncclscope_service.store.records import Identity, Member
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

Content = tuple[int, int, int, int, int]
"""(operation, count, data type, reduction, root) of a collective."""
Exchange = tuple[int, int, int]
"""(sender, receiver, count) of a Send or Recv, in ranks of the communicator."""

SURE: Final = 0.97
BY_TIMES: Final = 0.9
BY_LAYOUT: Final = 0.75
ONLY_ONE: Final = 0.6
"""One group is all that these members can form; but others may never have spoken."""
AT_STARTUP: Final = 0.9
"""Each rank of a size is printed exactly once, and nothing else is known."""
BY_ORDER: Final = 0.8
"""Each process has several of a size, and each rank is printed once among the first ones, the second ones and so on."""
UNRANKED: Final = 0.8
"""Factor if Init lines are missing too, so that ranks are known by order only."""

_LIKE: Final = 0.9
"""Share of calls that two members must have in common."""
_ENDS_NEEDED: Final = 8
_TOGETHER_NS: Final = 50_000
"""Ends of one collective lie 1 to 10 us apart; the typical difference, its drift removed, stays far below this."""
_CLEARLY: Final = 3.0
"""Another candidate must fit this much worse for times to decide."""
_COMPARED: Final = 512
"""Members of one kind that are compared pair by pair at most; beyond, only layout can propose groups."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One member whose communicator is not known."""

    member: int
    seat: int
    """Place in the order of global ranks: which GPU of the job it is."""
    size: int
    rank: int | None
    """In its communicator; None without its Init line."""
    birth: int
    """How many candidates of this size its seat had before."""
    content: Counter[Content]
    """Collectives that it called."""
    exchanges: Counter[Exchange]
    """Sends and receives that it called; empty if its rank is not known."""
    ends_ns: NDArray[np.int64]
    """Ends of its N-to-N kernels on its host's clock, ascending by `numbers`."""
    numbers: NDArray[np.int64]
    """Which collective of the member each end is of."""


@dataclass(frozen=True, slots=True)
class InferredGroup:
    """Members that form one communicator."""

    members: tuple[int, ...]
    """By rank."""
    confidence: float


def infer_groups(candidates: Sequence[Candidate]) -> list[InferredGroup]:
    """Groups among these candidates of one job, largest communicators first; who is in none stays alone."""
    by_size: dict[int, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.size > 1:
            by_size[candidate.size].append(candidate)
    found: list[InferredGroup] = []
    for size in sorted(by_size, reverse=True):
        if not any(candidate.content or candidate.exchanges for candidate in by_size[size]):
            found += _groups_at_startup(by_size[size], size)
        for alike in _alike(by_size[size]):
            for layer in _layers(alike):
                found += _groups_of(layer, size)
    return found


def _groups_at_startup(silent: list[Candidate], size: int) -> list[InferredGroup]:
    """Groups of members that called nothing; none if the k-th of some process may be another's k+1-th."""
    found: list[InferredGroup] = []
    layers = list(_layers(sorted(silent, key=lambda each: (each.seat, each.birth))))
    for layer in layers:
        groups = _by_layout(layer, size)
        if groups is None:
            return []
        confidence = AT_STARTUP if len(groups) == 1 else BY_LAYOUT
        confidence = confidence if len(layers) == 1 else min(confidence, BY_ORDER)
        found += [InferredGroup(tuple(each.member for each in group), confidence) for group in groups]
    return found


def scatter_ns(one: Candidate, other: Candidate) -> float | None:
    """How far the ends of two members' collectives typically stray from a constant difference, drift removed, in ns.

    Small for two ranks of one communicator, whatever their clocks; None with fewer than 8 collectives in common.
    """
    _, mine, theirs = np.intersect1d(one.numbers, other.numbers, assume_unique=True, return_indices=True)
    if len(mine) < _ENDS_NEEDED:
        return None
    difference = (one.ends_ns[mine] - other.ends_ns[theirs]).astype(np.float64)
    at = (one.ends_ns[mine] - one.ends_ns[mine[0]]).astype(np.float64)
    third = max(2, len(at) // 3)
    span = float(np.median(at[-third:]) - np.median(at[:third]))
    rate = (np.median(difference[-third:]) - np.median(difference[:third])) / span if span > 0 else 0.0
    left = difference - rate * at
    return float(np.median(np.abs(left - np.median(left))))


def _alike(candidates: list[Candidate]) -> Iterator[list[Candidate]]:
    """Candidates that called the same; those who called nothing yet tell nothing and are left out."""
    classes: list[tuple[Candidate, list[Candidate]]] = []
    by_keys: dict[tuple[frozenset[Content], bool], list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.content or candidate.exchanges:
            by_keys[frozenset(candidate.content), not candidate.content].append(candidate)
    for same in by_keys.values():
        found = next((members for known, members in classes if _is_alike(known, same[0])), None)
        if found is None:
            classes.append((same[0], same))
        else:
            found += same
    for _, members in classes:
        yield sorted(members, key=lambda each: (each.seat, each.birth))


def _is_alike(one: Candidate, other: Candidate) -> bool:
    """Whether what the shorter called, the longer called too: one rank's log may be behind the other's."""
    shorter = min(one.content.total(), other.content.total())
    if not shorter:
        return not one.content and not other.content
    return (one.content & other.content).total() >= _LIKE * shorter


def _layers(alike: list[Candidate]) -> Iterator[list[Candidate]]:
    """Candidates of one seat belong to different communicators: its first with the first of others, and so on."""
    layers: list[list[Candidate]] = []
    seen: Counter[int] = Counter()
    for candidate in alike:
        if seen[candidate.seat] == len(layers):
            layers.append([])
        layers[seen[candidate.seat]].append(candidate)
        seen[candidate.seat] += 1
    yield from layers


def _groups_of(layer: list[Candidate], size: int) -> list[InferredGroup]:
    if any(candidate.rank is None for candidate in layer):
        return _groups_without_ranks(layer, size)
    proposed = _by_layout(layer, size)
    if proposed is not None and all(_is_whole(group) for group in proposed):
        judged = [_judge(group, layer, is_only=len(proposed) == 1) for group in proposed]
        if all(each is not None for each in judged):
            return [each for each in judged if each is not None]
    return _by_times(layer, size)


def _by_layout(layer: list[Candidate], size: int) -> list[tuple[Candidate, ...]] | None:
    """The k-th member of each rank together; None unless all such groups are one figure, moved."""
    columns: list[list[Candidate]] = [[] for _ in range(size)]
    for candidate in layer:
        if candidate.rank is None or not 0 <= candidate.rank < size:
            return None
        columns[candidate.rank].append(candidate)
    if len({len(column) for column in columns}) != 1:
        return None
    groups = list(zip(*columns, strict=True))
    figures = {tuple(each.seat - group[0].seat for each in group) for group in groups}
    return groups if len(figures) == 1 else None


def _is_whole(group: Iterable[Candidate]) -> bool:
    """Whether its members' sends and receives are each other's."""
    sides: dict[Exchange, dict[int, int]] = defaultdict(dict)
    members = {each.rank: each for each in group}
    for rank, member in members.items():
        for exchange, count in member.exchanges.items():
            sides[exchange][rank or 0] = count
    for (sender, receiver, _), counts in sides.items():
        if sender != receiver and sender in members and receiver in members:
            most = max(counts.values())
            if most > 1 and min(counts.get(sender, 0), counts.get(receiver, 0)) < most / 2:
                return False
    return True


def _judge(group: tuple[Candidate, ...], layer: Sequence[Candidate], *, is_only: bool) -> InferredGroup | None:
    """A group of the right layout, with what times say of it; None if they say otherwise."""
    members = tuple(each.member for each in group)
    scatters = [scatter_ns(group[0], other) for other in group[1:]]
    known = [scatter for scatter in scatters if scatter is not None]
    if known and max(known) > _TOGETHER_NS:
        return None
    if known and len(known) == len(scatters):
        return InferredGroup(members, SURE)
    return InferredGroup(members, ONLY_ONE if is_only and not _spans_the_job(group, layer) else BY_LAYOUT)


def _spans_the_job(group: tuple[Candidate, ...], layer: Sequence[Candidate]) -> bool:
    """Whether the group holds every seat up to its size: the communicator of all."""
    return len(group) == len(layer) and sorted(each.seat for each in group) == list(range(len(group)))


def _by_times(layer: list[Candidate], size: int) -> list[InferredGroup]:
    """Members whose ends stay together, each with its clearly best partner of every other rank."""
    if len(layer) > _COMPARED:
        return []
    by_rank: dict[int, list[Candidate]] = defaultdict(list)
    for candidate in layer:
        by_rank[-1 if candidate.rank is None else candidate.rank].append(candidate)
    if set(by_rank) != set(range(size)):
        return []
    taken: set[int] = set()
    groups: list[InferredGroup] = []
    for first in by_rank[0]:
        partners = [_clearly_best(first, by_rank[rank], taken) for rank in range(1, size)]
        if all(partner is not None for partner in partners):
            members = (first.member, *(partner.member for partner in partners if partner is not None))
            taken.update(members)
            groups.append(InferredGroup(members, BY_TIMES))
    return groups


def _clearly_best(first: Candidate, others: Sequence[Candidate], taken: set[int]) -> Candidate | None:
    scatters: list[tuple[float, int]] = []
    for index, other in enumerate(others):
        scatter = None if other.member in taken else scatter_ns(first, other)
        if scatter is not None:
            scatters.append((scatter, index))
    scatters.sort()
    if not scatters or scatters[0][0] > _TOGETHER_NS:
        return None
    if len(scatters) > 1 and scatters[1][0] < max(_CLEARLY * scatters[0][0], _TOGETHER_NS / 10):
        return None
    return others[scatters[0][1]]


def _groups_without_ranks(layer: list[Candidate], size: int) -> list[InferredGroup]:
    """Members that end together, in the order of seats, if exactly as many as the size do."""
    if len(layer) > _COMPARED:
        return []
    groups: list[InferredGroup] = []
    left = list(layer)
    while left:
        first = left[0]
        scatters: Mapping[int, float | None] = {each.member: scatter_ns(first, each) for each in left[1:]}
        near = [each for each in left[1:] if (scatters[each.member] or 0.0) <= _TOGETHER_NS]
        together = [first, *(each for each in near if scatters[each.member] is not None)]
        if len(together) == size:
            groups.append(InferredGroup(_by_seat(together), BY_TIMES * UNRANKED))
        elif len(layer) == size and all(scatter is None for scatter in scatters.values()):
            return [InferredGroup(_by_seat(layer), ONLY_ONE * UNRANKED)]
        taken = {each.member for each in together}
        left = [each for each in left if each.member not in taken]
    return groups


def _by_seat(group: Iterable[Candidate]) -> tuple[int, ...]:
    return tuple(each.member for each in sorted(group, key=lambda each: (each.rank or 0, each.seat)))


_SEND: Final = OPERATION_CODES["Send"]
_RECV: Final = OPERATION_CODES["Recv"]
_OF_MEMBER: Final = ("member", "template", "coll_seq", "match", "confidence", "censored", "end_ns")
_END_TOGETHER: Final = [OPERATION_CODES[name] for name in ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll")]
_ENDS_KEPT: Final = 4096
"""Ends of one member that are compared: the latest."""
_A_GUESS: Final = 0.5
_MORE: Final = 1.5
"""Evidence must have grown by this factor before what was not decided is looked at again."""


class Identification:
    """Finds the communicators of a store's unnamed members."""

    def __init__(self, known: Store, series: SeriesBook, *, settle_ns: int, gpus_per_node: int | None) -> None:
        """`settle_ns`: how long no member may have appeared before layouts are believed to be whole."""
        self._store = known
        self._series = series
        self._settle_ns = settle_ns
        self._gpus_per_node = gpus_per_node
        self._members_seen = 0
        self._noted = 0
        self._unnamed: list[int] = []
        """Members of communicators of several ranks which nothing names, but those that were put together."""
        self._settled_at_ns: int | None = None
        self._looked_at_rows = 0
        self._looked_at_members = 0

    def is_open(self) -> NDArray[np.bool_]:
        """By member: whether its communicator has other ranks that are not known yet; one more, for no member."""
        waiting = np.zeros(len(self._store.members) + 1, np.bool_)
        waiting[[member.index for member in self._open_members()]] = True
        return waiting

    def advance(self, now_ns: int, *, final: bool) -> set[str]:
        """Puts communicators together as far as the evidence decides; gives the jobs of those that were found."""
        if len(self._store.members) != self._members_seen:
            self._members_seen, self._settled_at_ns = len(self._store.members), now_ns
        open_members = self._open_members()
        if not open_members or not (final or self._is_worth_a_look(now_ns)):
            return set()
        self._looked_at_rows, self._looked_at_members = self._store.operations.next_id, self._members_seen
        largest = max(member_size(self._store, member) for member in open_members)
        # Global ranks come from the largest communicator, and the layout of all others from global ranks.
        found = self._put_together(open_members, [largest])
        sizes = sorted({member_size(self._store, member) for member in open_members} - {largest}, reverse=True)
        return found | self._put_together(self._open_members(), sizes)

    def _is_worth_a_look(self, now_ns: int) -> bool:
        is_settled = self._settled_at_ns is not None and now_ns - self._settled_at_ns >= self._settle_ns
        has_more = self._store.operations.next_id > _MORE * self._looked_at_rows
        return is_settled and (has_more or self._members_seen != self._looked_at_members)

    def _note_new_members(self) -> None:
        for member in self._store.members[self._noted :]:
            communicator = self._store.communicators[member.communicator]
            if communicator.size > 1 and communicator.comm_id.startswith("~"):
                self._unnamed.append(member.index)
        self._noted = len(self._store.members)

    def _open_members(self) -> list[Member]:
        """Unnamed members that are alone in their communicator."""
        self._note_new_members()
        unnamed = [self._store.members[index] for index in self._unnamed]
        mates = Counter(member.communicator for member in unnamed)
        return [member for member in unnamed if mates[member.communicator] == 1]

    def _put_together(self, members: Iterable[Member], sizes: Sequence[int]) -> set[str]:
        chosen = [member for member in members if member_size(self._store, member) in sizes]
        groups: list[InferredGroup] = []
        by_job: dict[str, list[Member]] = defaultdict(list)
        for member in chosen:
            by_job[self._store.process_job[member.process]].append(member)
        for job in sorted(by_job):
            groups += infer_groups(self._candidates(by_job[job]))
        absorbed: dict[int, int] = {}
        for group in groups:
            absorbed |= self._unite(group)
        united = {member for group in groups for member in group.members}
        self._unnamed = [member for member in self._unnamed if member not in united]
        jobs = {self._store.communicators[index].job for index in absorbed}
        if absorbed:
            self._series.absorb(absorbed)
            ranks.assign_ranks(self._store, jobs=jobs, gpus_per_node=self._gpus_per_node)
        return jobs

    def _unite(self, group: InferredGroup) -> dict[int, int]:
        """Makes one communicator of the group; gives what became of the others: index to index."""
        members = [self._store.members[index] for index in group.members]
        target = self._store.communicators[members[0].communicator]
        target.comm_id = self._name(members)
        target.identity = Identity.INFERRED
        target.identity_confidence = group.confidence
        target.members = {}
        absorbed: dict[int, int] = {}
        for rank, member in enumerate(members):
            if member.communicator != target.index:
                absorbed[member.communicator] = target.index
                left = self._store.communicators[member.communicator]
                left.absorbed_by, left.members = target.index, {}
                target.name = target.name or left.name
                if left.index in self._store.tuning_tables:
                    self._store.tuning_tables.setdefault(target.index, self._store.tuning_tables[left.index])
                if left.index in self._store.channels:
                    channels = self._store.channels.setdefault(target.index, Channels(target.size))
                    channels.merge(self._store.channels.pop(left.index))
            member.communicator, member.rank = target.index, rank
            target.members[rank] = member.index
        return absorbed

    def _name(self, members: Sequence[Member]) -> str:
        """`~` and a hash of who is in it: the same whatever order data came in."""
        seats = [
            f"{self._store.processes[each.process].host}:{self._store.processes[each.process].pid}"
            f":{each.pointer:x}:{each.epoch}"
            for each in members
        ]
        return f"~{hashlib.blake2b(' '.join(sorted(seats)).encode(), digest_size=6).hexdigest()}"

    def _candidates(self, members: Sequence[Member]) -> list[Candidate]:
        rows = self._rows_of(members)
        content, exchanges = self._calls(rows, {member.index: member for member in members})
        ends = self._ends(rows)
        seats = ranks.places(self._store, members, self._gpus_per_node)
        births: Counter[tuple[int, int]] = Counter()
        candidates: list[Candidate] = []
        for member in sorted(members, key=lambda each: each.index):
            size = member_size(self._store, member)
            numbers, ends_ns = ends.get(member.index, (np.empty(0, np.int64), np.empty(0, np.int64)))
            candidates.append(
                Candidate(
                    member=member.index,
                    seat=seats[member.index],
                    size=size,
                    rank=member.rank,
                    birth=births[seats[member.index], size],
                    content=content[member.index],
                    exchanges=exchanges[member.index],
                    ends_ns=ends_ns,
                    numbers=numbers,
                )
            )
            births[seats[member.index], size] += 1
        return candidates

    def _rows_of(self, members: Sequence[Member]) -> Columns:
        wanted = np.zeros(len(self._store.members) + 1, np.bool_)
        wanted[[member.index for member in members]] = True
        rows = self._store.operations.rows
        return rows.take(np.flatnonzero(wanted[rows["member"]]), *_OF_MEMBER)

    def _calls(
        self, rows: Columns, members: Mapping[int, Member]
    ) -> tuple[defaultdict[int, Counter[Content]], defaultdict[int, Counter[Exchange]]]:
        """By member: what collectives it called, and what it sent and received."""
        content: defaultdict[int, Counter[Content]] = defaultdict(Counter)
        exchanges: defaultdict[int, Counter[Exchange]] = defaultdict(Counter)
        keys = rows["member"].astype(np.int64) << 32 | rows["template"].astype(np.int64)
        for key, count in zip(*(column.tolist() for column in np.unique(keys, return_counts=True)), strict=True):
            of, rank = self._store.operation_templates.rows[key & 0xFFFFFFFF], members[key >> 32].rank
            op, root, amount = int(of["op"]), int(of["root"]), int(of["count"])
            if op not in (_SEND, _RECV):
                content[key >> 32][op, amount, int(of["data_type"]), int(of["reduction"]), root] += count
            elif rank is not None:
                sides = (rank, root) if op == _SEND else (root, rank)
                exchanges[key >> 32][(*sides, amount)] += count
        return content, exchanges

    def _ends(self, rows: Columns) -> dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """By member: (coll_seq, end in ns) of its latest N-to-N kernels that were seen whole."""
        known = (rows["match"] == Match.MATCHED) & (rows["confidence"] > _A_GUESS) & ~rows["censored"]
        known &= (rows["coll_seq"] != NO_NUMBER) & np.isin(self._store.templates_of(rows, "op")["op"], _END_TOGETHER)
        rows = rows[known]
        rows = rows[np.lexsort((rows["coll_seq"], rows["member"]))]
        cuts = np.flatnonzero(np.diff(rows["member"])) + 1
        return {
            int(part["member"][0]): (part["coll_seq"][-_ENDS_KEPT:].copy(), part["end_ns"][-_ENDS_KEPT:].copy())
            for part in np.split(rows, cuts)
            if len(part)
        }


def member_size(known: Store, member: Member) -> int:
    """Ranks of its communicator, as its process knows it."""
    return known.communicators[member.communicator].size
