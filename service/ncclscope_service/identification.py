"""Communicators that nothing named, put together: evidence from the store to `membership`, its groups written back.

A member without commId and without a known parent stands alone under a `~` name until its partners are found. Then
one communicator takes all of them in, under a name made of its members; the others are *absorbed* by it: they keep
their index, and are listed no more.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import ranks
from ncclscope_service.channels import Channels
from ncclscope_service.membership import Candidate, Content, Exchange, InferredGroup, infer_groups
from ncclscope_service.rows import Identity, Match, Member
from ncclscope_service.series import SeriesBook
from ncclscope_service.store import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

_SEND: Final = OPERATION_CODES["Send"]
_RECV: Final = OPERATION_CODES["Recv"]
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

    def is_open(self) -> NDArray[np.bool_]:
        """By member: whether its communicator has other ranks that are not known yet; one more, for no member."""
        waiting = np.zeros(len(self._store.members) + 1, np.bool_)
        waiting[[member.index for member in self._open_members()]] = True
        return waiting

    def advance(self, now_ns: int, *, final: bool) -> set[str]:
        """Puts together what can be told by now; the jobs of which any communicator was found."""
        if len(self._store.members) != self._members_seen:
            self._members_seen, self._settled_at_ns = len(self._store.members), now_ns
        open_members = self._open_members()
        if not open_members or not (final or self._is_worth_a_look(now_ns)):
            return set()
        self._looked_at_rows = self._store.operations.next_id
        largest = max(member_size(self._store, member) for member in open_members)
        # Global ranks come from the largest communicator, and the layout of all others from global ranks.
        found = self._put_together(open_members, [largest])
        sizes = sorted({member_size(self._store, member) for member in open_members} - {largest}, reverse=True)
        return found | self._put_together(self._open_members(), sizes)

    def _is_worth_a_look(self, now_ns: int) -> bool:
        is_settled = self._settled_at_ns is not None and now_ns - self._settled_at_ns >= self._settle_ns
        return is_settled and self._store.operations.next_id > _MORE * self._looked_at_rows

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
                if left.index in self._store.tuning_tables:
                    self._store.tuning_tables.setdefault(target.index, self._store.tuning_tables[left.index])
                if left.index in self._store.channels:
                    channels = self._store.channels.setdefault(target.index, Channels(target.size))
                    channels.add(self._store.channels.pop(left.index))
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
        seats = self._seats(members)
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

    def _seats(self, members: Sequence[Member]) -> dict[int, int]:
        """By member, the place of its GPU: its global rank, which `ranks` gives every member."""
        return {each.index: NO_NUMBER if each.global_rank is None else each.global_rank for each in members}

    def _rows_of(self, members: Sequence[Member]) -> Columns:
        wanted = np.zeros(len(self._store.members) + 1, np.bool_)
        wanted[[member.index for member in members]] = True
        rows = self._store.operations.rows
        chosen: Columns = rows[wanted[rows["member"]]]
        return chosen

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
        known &= (rows["coll_seq"] != NO_NUMBER) & np.isin(self._store.templates_of(rows)["op"], _END_TOGETHER)
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
