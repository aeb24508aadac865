"""Stage that brings the same operation of all ranks together, and Sends with their Recvs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct, group_by
from ncclscope_service.columns.table import Ids
from ncclscope_service.join.ranks import (
    PAIR_SIDE,
    SHOWN_AT_END,
    CollectiveJoin,
    JoinedCollectives,
    NewestCollectives,
    PairCalls,
    PairJoin,
)
from ncclscope_service.join.send_recv import SIDE, ExchangeBook
from ncclscope_service.number.across_ranks import OVERLAP, STEPS
from ncclscope_service.number.calls import Calls
from ncclscope_service.number.lost_lines import LostLines
from ncclscope_service.store.records import Communicator
from ncclscope_service.store.rows import NumberState
from ncclscope_service.store.settings import JOINED_AT_ONCE
from ncclscope_service.store.tables import Hosts, Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

MEETING: Final = np.dtype(
    [
        ("id", "<i8"),  # of the replay
        ("communicator", "<i4"),
        ("sender", "<i4"),  # of Send and Recv; NO_NUMBER of collectives
        ("receiver", "<i4"),
        ("seq", "<i8"),  # coll_seq or pair_seq of the captured operation
        ("side", "<i4"),  # rank in the communicator; of Send and Recv whether it receives
        ("size", "<i4"),  # sides that take part
        ("reported_at_ns", "<i8"),
    ]
)
"""One replay that waits for the other sides."""

_KEY: Final = ("communicator", "sender", "receiver", "seq")
_FAR: Final = np.int64(2**62)


@dataclass(frozen=True, slots=True)
class Met:
    """Replays of which all sides that could be waited for are there."""

    collectives: list[JoinedCollectives]
    """`operations` are ids of replays."""
    sends: Ids
    receives: Ids
    """The other side of each of `sends`."""
    alone: Ids
    """Sends and Recvs whose other side did not come, and replays that cannot be distinguished."""


@dataclass(slots=True)
class ReplayJoin:
    """Gathers the sides of each replay of a captured operation, by time; memory is bounded by `patience_ns`.

    Numbers do not tell: each process counts the replays that were recorded of it, and recordings begin and end at other
    moments on other nodes. But a captured operation is replayed once per launch of its graph, and ranks end it
    together; so the kernels of one collective that lie nearer to each other than half the time between two of its
    replays are of one replay. That holds while clocks differ by less; what does not overlap in the end is left
    unmeasured (`measured_rows`).
    """

    settle_ns: int
    """How long ranks that never spoke are waited for."""
    patience_ns: int
    """How long any rank is waited for."""
    unjoinable: int = 0
    """Replays that were nearer to another replay of their own rank than to those of the others."""
    _waiting: Columns = field(default_factory=lambda: np.empty(0, MEETING))
    _periods: dict[int, int] = field(default_factory=dict[int, int])
    """By communicator: the shortest time between two replays of one operation on one rank so far."""

    @property
    def pending(self) -> Ids:
        """The replays that wait, in the order in which `take_ready` wants their times."""
        ids: Ids = self._waiting["id"]
        return ids

    def report(self, meetings: Columns) -> None:
        """Takes further replays (MEETING)."""
        self._waiting = np.concatenate([self._waiting, meetings])

    def take_ready(
        self, ends_ns: NDArray[np.int64], *, members_seen: dict[int, int], now_ns: int, final: bool = False
    ) -> Met:
        """The replays that are complete, or have waited long enough; `ends_ns`: when each pending one ended.

        Times are of the reference clock where hosts have one. `members_seen`: ranks seen, by communicator.
        """
        waiting = self._waiting
        if len(waiting) == 0:
            return Met([], waiting["id"], waiting["id"], waiting["id"])
        order = np.lexsort((ends_ns, *(waiting[name] for name in reversed(_KEY))))
        rows, ends_ns = waiting[order], ends_ns[order]
        same = np.ones(len(rows) - 1, bool)
        for name in _KEY:
            same &= rows[name][1:] == rows[name][:-1]
        replay = self._replays(rows, ends_ns, same)
        ready = self._ready(rows, replay, members_seen, now_ns) | final
        self._waiting = rows[~ready]
        rows, replay = rows[ready], replay[ready]
        repeats = _repeats(rows, replay)
        self.unjoinable += int(np.count_nonzero(repeats))
        return _met(rows[~repeats], replay[~repeats], rows["id"][repeats])

    def _replays(self, rows: Columns, ends_ns: NDArray[np.int64], same: NDArray[np.bool_]) -> NDArray[np.int64]:
        """A number that the sides of one replay share."""
        key = np.concatenate([[0], np.cumsum(~same)])
        by_side = np.lexsort((ends_ns, rows["side"], key))
        follows = (key[by_side][1:] == key[by_side][:-1]) & (rows["side"][by_side][1:] == rows["side"][by_side][:-1])
        steps = np.diff(ends_ns[by_side])[follows]
        of = rows["communicator"][by_side][1:][follows]
        for communicator in np.unique(of).tolist():
            shortest = int(steps[of == communicator].min())
            self._periods[communicator] = min(shortest, self._periods.get(communicator, shortest))
        distinct, inverse = np.unique(rows["communicator"], return_inverse=True)
        periods = np.asarray([self._periods.get(each, int(_FAR)) for each in distinct.tolist()], np.int64)[inverse]
        is_near = np.diff(ends_ns) <= periods[1:] // 2
        return np.concatenate([[0], np.cumsum(~(same & is_near))])

    def _ready(
        self, rows: Columns, replay: NDArray[np.int64], members_seen: dict[int, int], now_ns: int
    ) -> NDArray[np.bool_]:
        first = np.flatnonzero(np.concatenate([[True], np.diff(replay) != 0]))
        sides = np.diff(np.append(first, len(rows)))
        since = np.minimum.reduceat(rows["reported_at_ns"], first)
        head = rows[first]
        seen = np.asarray([members_seen.get(each, 0) for each in head["communicator"].tolist()], np.int64)
        is_pair = head["sender"] != NO_NUMBER
        waited = now_ns - since
        ready = (sides >= head["size"]) | (waited > self.patience_ns)
        ready |= ~is_pair & (sides >= seen) & (waited > self.settle_ns)
        return np.repeat(ready, sides)


def _repeats(rows: Columns, replay: NDArray[np.int64]) -> NDArray[np.bool_]:
    """All rows of replays in which a side is there twice."""
    order = np.lexsort((rows["side"], replay))
    twice = (np.diff(replay[order]) == 0) & (np.diff(rows["side"][order]) == 0)
    repeats: NDArray[np.bool_] = np.isin(replay, replay[order][1:][twice])
    return repeats


def _met(rows: Columns, replay: NDArray[np.int64], repeats: Ids) -> Met:
    is_pair = rows["sender"] != NO_NUMBER
    pairs, of_pair = rows[is_pair], replay[is_pair]
    order = np.lexsort((pairs["side"], of_pair))
    pairs, of_pair = pairs[order], of_pair[order]
    sends = np.flatnonzero(np.diff(of_pair) == 0)
    alone = np.ones(len(pairs), bool)
    alone[sends], alone[sends + 1] = False, False
    return Met(
        _collectives(rows[~is_pair], replay[~is_pair]),
        pairs["id"][sends],
        pairs["id"][sends + 1],
        np.concatenate([pairs["id"][alone], repeats]),
    )


def _collectives(rows: Columns, replay: NDArray[np.int64]) -> list[JoinedCollectives]:
    joined: list[JoinedCollectives] = []
    for communicator in np.unique(rows["communicator"]).tolist():
        mine = rows[rows["communicator"] == communicator]
        _, first, place = np.unique(
            replay[rows["communicator"] == communicator], return_index=True, return_inverse=True
        )
        operations = np.full((len(first), int(mine["size"][0])), NO_NUMBER, np.int64)
        operations[place, mine["side"]] = mine["id"]
        joined.append(
            JoinedCollectives(
                communicator=np.full(len(first), communicator), coll_seq=mine["seq"][first], operations=operations
            )
        )
    return joined


_SEND: Final = OPERATION_CODES["Send"]
_RECV: Final = OPERATION_CODES["Recv"]
_IS_PAIRWISE: Final = np.isin(np.arange(256), (_SEND, _RECV))
"""By operation code."""
_MIXED_REMEMBERED: Final = 100_000


class JoinStage:
    """The joins of one store."""

    def __init__(self, known: Store, *, settle_ns: int, patience_ns: int) -> None:
        self.exchanges = ExchangeBook()
        self.mixed: set[int] = set()
        """Launches that hold collectives as well as sends: nothing defines their bandwidth."""
        self.lost_lines = LostLines(known, settle_ns=settle_ns)
        """Gives operations that were aligned their number, before they are reported."""
        self._counted: set[int] = set()
        """Members whose lost lines are counted by a program."""
        self._behind: dict[int, int] = {}
        """By member: the number behind that of its last collective that was reported."""
        self._store = known
        self._hosts = Hosts(known)
        self._calls = Calls(known, self.lost_lines.begun_amid)
        self._collectives = CollectiveJoin(settle_ns=settle_ns, patience_ns=patience_ns, calls=self._calls)
        self._pairs = PairJoin(settle_ns=settle_ns, patience_ns=patience_ns)

    def set_patience(self, patience_ns: int) -> None:
        """Ranks are waited for so long from now on."""
        self._collectives.patience_ns = self._pairs.patience_ns = patience_ns

    @property
    def has_more(self) -> bool:
        """Whether complete collectives were left for the next call."""
        return self._collectives.has_more

    @property
    def is_healing(self) -> bool:
        """Whether collectives wait for what follows them to tell their numbers."""
        return self._collectives.is_healing or self.lost_lines.has_waiting

    def report_operations(
        self, operations: Ids, rows: Columns, matched: NDArray[np.bool_], now_ns: int
    ) -> NDArray[np.bool_]:
        """Takes decided operations with their rows; gives which of them wait for other ranks.

        `matched`: those with a kernel of their own.
        """
        collective = rows["coll_seq"] != NO_NUMBER
        self._remember_mixed(rows["launch"][matched], collective[matched])
        waiting = np.zeros(len(operations), bool)
        for member, placed in group_by(rows["member"]):
            mine = placed[collective[placed] & (rows["number_state"][placed] != NumberState.UNCERTAIN)]
            waiting[mine] = self._report_member(member, operations[mine], rows["coll_seq"][mine], matched[mine], now_ns)
        pairs = np.flatnonzero(matched & ~collective)
        waiting[pairs] = self._report_pairs(operations[pairs], row_ops.take(rows, pairs), now_ns)
        self.exchanges.expect(rows["launch"][pairs[waiting[pairs]]])
        return waiting

    def newest(self, communicator: int) -> NewestCollectives | None:
        """The last collectives of a communicator, as they were numbered in the end; None while some calls wait, and
        no programs tell how far its ranks have come.
        """
        members = self._store.communicators[communicator].members or {}
        # First what costs little: the newest ones may have to be aligned.
        found = self._collectives.newest(communicator) if self.lost_lines.are_decided(members.values()) else None
        if not members or not self.lost_lines.have_programs(members.values()):
            return found
        return self._newest_by_lines(communicator, members) if found is None else replace(found, are_counted=True)

    def _newest_by_lines(self, communicator: int, members: Mapping[int, int]) -> NewestCollectives | None:
        """The same by lines alone, whether they have a kernel or not."""
        size = self._store.communicators[communicator].size
        of_member = self.lost_lines.last_lines(members.values(), SHOWN_AT_END)
        lines = {rank: of_member[member] for rank, member in members.items() if member in of_member}
        if set(lines) != set(range(size)):
            return None
        enqueued = np.asarray([int(lines[rank][1][-1]) + 1 for rank in range(size)], np.int64)
        begin = max(0, int(enqueued.max()) - SHOWN_AT_END)
        operations = np.full((SHOWN_AT_END, size), NO_NUMBER, np.int64)
        for rank, (ids, numbers) in lines.items():
            chosen = numbers >= begin
            operations[numbers[chosen] - begin, rank] = ids[chosen]
        return NewestCollectives(begin, operations, enqueued, are_counted=True, is_by_lines=True)

    def drain_collectives(
        self, members_seen: dict[int, int], now_ns: int, *, final: bool
    ) -> Sequence[JoinedCollectives]:
        """Collectives that are complete or have waited long enough, a bounded number; all if `final`."""
        most = None if final else JOINED_AT_ONCE
        ready = self._collectives.take_ready(members_seen=members_seen, now_ns=now_ns, final=final, most=most)
        self._renumber("coll_seq", *self._collectives.drain_renumbered())
        self._give_up(self._collectives.drain_uncertain())
        for (communicator, reason), amount in self._collectives.healed.items():
            self._store.numbers_healed[self._store.communicators[communicator].job, reason] += amount
        self._collectives.healed.clear()
        for each in ready:
            self.lost_lines.size(each.operations)
        return ready

    def drain_pairs(self, now_ns: int, *, final: bool) -> tuple[Ids, Ids]:
        """Sends and Recvs that belong together."""
        pairs = self._pairs.take_ready(self._pair_calls, now_ns=now_ns, final=final)
        self._renumber("pair_seq", *self._pairs.drain_renumbered())
        self.exchanges.add(self._alone(self._pairs.drain_alone()))
        for communicator, amount in self._pairs.healed.items():
            self._store.numbers_healed[self._store.communicators[communicator].job, OVERLAP] += amount
        self._pairs.healed.clear()
        return pairs

    def _alone(self, sides: Columns) -> Columns:
        """The same as rows of `send_recv.SIDE`, of operations that are still there."""
        sides = row_ops.filter_rows(sides, sides["operation"] >= self._store.operations.first)
        known = self._store.operations.take(sides["operation"], "launch", "message_bytes")
        alone = np.zeros(len(sides), SIDE)
        alone["operation"], alone["launch"] = sides["operation"], known["launch"]
        alone["bytes"] = np.maximum(known["message_bytes"], 0)
        alone["sends"], alone["is_alone"] = ~sides["is_receiver"], True
        alone["peer"] = np.where(sides["is_receiver"], sides["sender"], sides["receiver"])
        return alone

    def _pair_calls(self, operations: Ids) -> PairCalls:
        processes = self._store.operations.take(operations, "process")["process"]
        return PairCalls(self._calls.of_pairs(operations), self._hosts.of_processes()[processes])

    def _renumber(self, name: str, operations: Ids, numbers: NDArray[np.int64]) -> None:
        table = self._store.operations
        known = operations >= table.first
        at, numbers = table.at(operations[known]), numbers[known]
        healed = at[table.rows.values(name, at) != numbers]
        table.rows.put(name, at, numbers)
        states = table.rows.values("number_state", healed)
        table.rows.put("number_state", healed[states != NumberState.LAUNCHED], NumberState.HEALED)

    def _give_up(self, operations: Ids) -> None:
        """Notes that the numbers of these are not known."""
        table = self._store.operations
        operations = operations[operations >= table.first]
        table.rows.put("number_state", table.at(operations), NumberState.UNCERTAIN)
        for process, mine in group_by(table.take(operations, "process")["process"]):
            self._store.numbers_uncertain[self._store.process_job[process]] += len(mine)

    def evict_processes(self, processes: Iterable[int]) -> None:
        """Forgets the programs of these processes, which are gone."""
        self.lost_lines.evict_processes(processes)

    def evict_communicators(self, communicators: Iterable[int]) -> None:
        """Forgets what was reported of these communicators."""
        gone = set(communicators)
        self._collectives.leave(gone)
        for member in [each for each in self._behind if self._store.members[each].communicator in gone]:
            del self._behind[member]
            self._counted.discard(member)

    def _remember_mixed(self, launches: NDArray[np.int64], collective: NDArray[np.bool_]) -> None:
        found, inverse = distinct(launches)
        collectives = np.bincount(inverse[collective], minlength=len(found))
        others = np.bincount(inverse[~collective], minlength=len(found))
        self.mixed.update(found[(collectives > 0) & (others > 0)].tolist())
        if len(self.mixed) > _MIXED_REMEMBERED:
            oldest = np.sort(np.asarray(list(self.mixed)))[: len(self.mixed) - _MIXED_REMEMBERED // 2]
            self.mixed.difference_update(oldest.tolist())

    def _report_member(
        self, member: int, operations: Ids, coll_seq: NDArray[np.int64], matched: NDArray[np.bool_], now_ns: int
    ) -> bool:
        """Reports one member's collectives; False if no other rank can be waited for."""
        of = self._store.members[member]
        communicator = self._store.communicators[of.communicator]
        if communicator.size < 2 or of.rank is None or not 0 <= of.rank < communicator.size:
            return False
        if len(operations):
            if member not in self._counted and self.lost_lines.is_counted(member):
                self._trust_numbers(member, communicator, of.rank, operations)
            lost = self._lost_between(member, coll_seq)
            if len(lost):
                self._store.numbers_healed[communicator.job, STEPS] += len(lost)
            self._collectives.report(
                communicator.index,
                communicator.size,
                of.rank,
                coll_seq=np.concatenate([coll_seq, lost]),
                operations=np.concatenate([operations, np.full(len(lost), NO_NUMBER)]),
                has_kernel=np.concatenate([matched, np.zeros(len(lost), np.bool_)]),
                now_ns=now_ns,
            )
        return True

    def _trust_numbers(self, member: int, communicator: Communicator, rank: int, operations: Ids) -> None:
        """Numbers what waits of a rank anew, as these operations are: a program counts the lines that it lost."""
        logged = operations[self._store.operations.take(operations, "line")["line"] != NO_NUMBER]
        if not len(logged):
            return
        self._counted.add(member)
        waiting = self._collectives.waiting(communicator.index, rank)
        first = logged.min(keepdims=True)
        until = int(self._store.operations.take(first, "coll_seq")["coll_seq"][0])
        numbers = self.lost_lines.count_back(member, waiting, int(first[0]))
        self._collectives.trust_numbers(communicator.index, rank, numbers, until)
        self._behind[member] = until

    def _lost_between(self, member: int, coll_seq: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of a member's collectives before the last of these of which nothing but the number is known."""
        begin = self._behind.get(member, int(coll_seq.min()))
        self._behind[member] = end = max(begin, int(coll_seq.max()) + 1)
        if end - begin == len(coll_seq):
            return coll_seq[:0]
        return np.setdiff1d(np.arange(begin, end), coll_seq)

    def _report_pairs(self, operations: Ids, rows: Columns, now_ns: int) -> NDArray[np.bool_]:
        """Reports sends and receives; gives which of them wait for their other side."""
        templates = self._store.templates_of(rows, "op", "root")
        found, inverse = distinct(rows["member"])
        members = [self._store.members[member] for member in found.tolist()]
        own = np.asarray([NO_NUMBER if of.rank is None else of.rank for of in members], np.int32)[inverse]
        peers = templates["root"]
        receives = templates["op"] == _RECV
        usable: NDArray[np.bool_] = _IS_PAIRWISE[templates["op"]] & (own >= 0) & (peers >= 0) & (own != peers)
        sides = np.zeros(len(rows), PAIR_SIDE)
        sides["communicator"] = np.asarray([of.communicator for of in members], np.int32)[inverse]
        sides["sender"] = np.where(receives, peers, own)
        sides["receiver"] = np.where(receives, own, peers)
        sides["pair_seq"] = rows["pair_seq"]
        sides["is_receiver"] = receives
        sides["operation"] = operations
        sides["reported_at_ns"] = now_ns
        self._pairs.report(row_ops.filter_rows(sides, usable))
        return usable
