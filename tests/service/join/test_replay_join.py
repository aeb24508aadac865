"""Replays of captured operations meet across ranks by time."""

from __future__ import annotations

import numpy as np

from ncclscope_service.join.stage import MEETING, ReplayJoin
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_S = 1_000_000_000


def _meetings(rank: int, ids: list[int], *, seq: int = 0, size: int = 2, at_ns: int = 0) -> Columns:
    rows = np.zeros(len(ids), MEETING)
    rows["id"], rows["side"], rows["seq"], rows["size"], rows["reported_at_ns"] = ids, rank, seq, size, at_ns
    rows["sender"] = rows["receiver"] = NO_NUMBER
    return rows


def _join() -> ReplayJoin:
    return ReplayJoin(settle_ns=10 * _S, patience_ns=120 * _S)


def _taken(join: ReplayJoin, ends_ns: dict[int, int], *, now_ns: int = 0, final: bool = False) -> list[list[int]]:
    ends = np.array([ends_ns[each] for each in join.pending.tolist()], np.int64)
    met = join.take_ready(ends, members_seen={0: 2}, now_ns=now_ns, final=final)
    return [row for each in met.collectives for row in each.operations.tolist()]


def test_replays_meet_by_time_although_one_rank_was_recorded_later() -> None:
    join = _join()
    join.report(_meetings(0, [10, 11, 12]))
    join.report(_meetings(1, [21, 22]))
    ends = {10: 0, 11: 400, 12: 800, 21: 430, 22: 829}
    assert sorted(_taken(join, ends)) == [[11, 21], [12, 22]]
    assert join.pending.tolist() == [10]
    assert _taken(join, ends, now_ns=11 * _S) == []
    assert _taken(join, ends, final=True) == [[10, NO_NUMBER]]


def test_a_rank_whose_export_comes_later_is_waited_for() -> None:
    join = _join()
    join.report(_meetings(0, [10, 11]))
    ends = {10: 0, 11: 400, 20: 3, 21: 403}
    assert _taken(join, ends) == []
    join.report(_meetings(1, [20, 21]))
    assert sorted(_taken(join, ends)) == [[10, 20], [11, 21]]
    assert len(join.pending) == 0


def test_patience_ends() -> None:
    join = _join()
    join.report(_meetings(0, [10]))
    assert _taken(join, {10: 0}, now_ns=121 * _S) == [[10, NO_NUMBER]]


def test_different_operations_never_meet() -> None:
    join = _join()
    join.report(_meetings(0, [10], seq=0))
    join.report(_meetings(1, [20], seq=1))
    assert sorted(_taken(join, {10: 5, 20: 5}, final=True)) == [[NO_NUMBER, 20], [10, NO_NUMBER]]


def test_a_send_meets_the_receive_of_its_own_replay() -> None:
    join = _join()
    sends, receives = _meetings(0, [10, 11]), _meetings(1, [20, 21])
    for rows in (sends, receives):
        rows["sender"], rows["receiver"] = 0, 1
    join.report(sends)
    join.report(receives)
    ends = {10: 0, 11: 400, 20: 401, 21: 2}
    met = join.take_ready(
        np.array([ends[each] for each in join.pending.tolist()]), members_seen={}, now_ns=0, final=False
    )
    assert sorted(zip(met.sends.tolist(), met.receives.tolist(), strict=True)) == [(10, 21), (11, 20)]
    assert len(met.alone) == 0
