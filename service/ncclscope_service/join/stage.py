"""Stage that brings the same operation of all ranks together, and Sends with their Recvs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct, group_by
from ncclscope_service.columns.table import Ids
from ncclscope_service.join.ranks import PAIR_SIDE, CollectiveJoin, JoinedCollectives, PairJoin
from ncclscope_service.join.send_recv import ExchangeBook
from ncclscope_service.number.calls import Calls
from ncclscope_service.number.lost_lines import LostLines
from ncclscope_service.store.rows import NumberState
from ncclscope_service.store.settings import JOINED_AT_ONCE
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

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
        self.lost_lines = LostLines(known)
        """Gives operations that were aligned their number, before they are reported."""
        self._store = known
        self._collectives = CollectiveJoin(settle_ns=settle_ns, patience_ns=patience_ns, calls=Calls(known))
        self._pairs = PairJoin(patience_ns=patience_ns)

    def set_patience(self, patience_ns: int) -> None:
        """Ranks are waited for so long from now on."""
        self._collectives.patience_ns = self._pairs.patience_ns = patience_ns

    @property
    def has_more(self) -> bool:
        """Whether complete collectives were left for the next call."""
        return self._collectives.has_more

    def report_operations(
        self, operations: Ids, rows: Columns, matched: NDArray[np.bool_], now_ns: int
    ) -> NDArray[np.bool_]:
        """Takes decided operations with their rows; gives which of them wait for other ranks.

        `matched`: those with a kernel of their own.
        """
        for member, number, lost in self.lost_lines.drain_moved():
            of = self._store.members[member]
            if of.rank is not None:
                self._collectives.make_room(of.communicator, of.rank, number, lost)
        collective = rows["coll_seq"] != NO_NUMBER
        self._remember_mixed(rows["launch"][matched], collective[matched])
        waiting = np.zeros(len(operations), bool)
        for member, placed in group_by(rows["member"]):
            mine = placed[collective[placed]]
            waiting[mine] = self._report_member(member, operations[mine], rows["coll_seq"][mine], matched[mine], now_ns)
        pairs = np.flatnonzero(matched & ~collective)
        waiting[pairs] = self._report_pairs(operations[pairs], row_ops.take(rows, pairs), now_ns)
        self.exchanges.expect(rows["launch"][pairs[waiting[pairs]]])
        return waiting

    def drain_collectives(
        self, members_seen: dict[int, int], now_ns: int, *, final: bool
    ) -> Sequence[JoinedCollectives]:
        """Collectives that are complete or have waited long enough, a bounded number; all if `final`."""
        most = None if final else JOINED_AT_ONCE
        ready = self._collectives.take_ready(members_seen=members_seen, now_ns=now_ns, final=final, most=most)
        table = self._store.operations
        operations, numbers = self._collectives.drain_renumbered()
        known = operations >= table.first
        at, numbers = table.at(operations[known]), numbers[known]
        healed = at[table.rows.values("coll_seq", at) != numbers]
        table.rows.put("coll_seq", at, numbers)
        table.rows.put("number_state", healed, NumberState.HEALED)
        for (communicator, reason), amount in self._collectives.healed.items():
            self._store.numbers_healed[self._store.communicators[communicator].job, reason] += amount
        self._collectives.healed.clear()
        for each in ready:
            self.lost_lines.size(each.operations)
        return ready

    def drain_pairs(self, now_ns: int, *, final: bool) -> tuple[Ids, Ids]:
        """Sends and Recvs that belong together."""
        return self._pairs.take_ready(now_ns=now_ns, final=final)

    def evict_communicators(self, communicators: Iterable[int]) -> None:
        """Forgets what was reported of these communicators."""
        self._collectives.leave(communicators)

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
            self._collectives.report(
                communicator.index,
                communicator.size,
                of.rank,
                coll_seq=coll_seq,
                operations=operations,
                has_kernel=matched,
                now_ns=now_ns,
            )
        return True

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
