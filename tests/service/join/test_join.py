"""Collectives are joined by number and pairs by number per direction, whatever the order of arrival."""

from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.join.ranks import (
    PAIR_SIDE,
    CollectiveJoin,
    JoinedCollectives,
    KernelMatrix,
    PairJoin,
    PairTimes,
    TimesOf,
)
from ncclscope_service.number.calls import Calls
from ncclscope_service.store.rows import Match, empty_operations
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import NO_NUMBER

_SETTLE, _PATIENCE = 10, 100


def _report(
    join: CollectiveJoin, rank: int, seqs: list[int], ids: list[int], now: int = 0, size: int = 2, communicator: int = 0
) -> None:
    join.report(
        communicator,
        size,
        rank,
        coll_seq=np.asarray(seqs, np.int64),
        operations=np.asarray(ids, np.int64),
        has_kernel=np.asarray([i >= 0 for i in ids]),
        now_ns=now,
    )


def _ids(ready: list[JoinedCollectives]) -> list[list[int]]:
    return [row for joined in ready for row in joined.operations.tolist()]


def test_a_collective_is_given_once_all_ranks_reported_it() -> None:
    join = CollectiveJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    _report(join, 0, [0, 1], [10, 11])
    assert join.take_ready(members_seen={0: 2}, now_ns=0) == []
    _report(join, 1, [0], [20])
    assert _ids(join.take_ready(members_seen={0: 2}, now_ns=0)) == [[10, 20]]
    _report(join, 1, [1], [21])
    ready = join.take_ready(members_seen={0: 2}, now_ns=0)
    assert _ids(ready) == [[11, 21]]
    assert ready[0].coll_seq.tolist() == [1]


def test_kernels_that_were_recorded_and_are_not_known_are_told_from_those_that_were_not() -> None:
    store = Store()
    rows = empty_operations(4)
    rows["match"] = Match.MATCHED, Match.UNMATCHED, Match.NOT_COVERED, Match.NO_KERNEL
    ids = store.operations.append(rows)
    unknown = Calls(store).have_unknown_kernels(np.array([[*ids], [NO_NUMBER] * 4]))
    assert unknown.tolist() == [[True, True, False, False], [False] * 4]


def test_collectives_of_all_communicators_of_a_size_are_given_together() -> None:
    join = CollectiveJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    for communicator, size in ((0, 2), (1, 3), (2, 2)):
        for rank in range(size):
            _report(join, rank, [0, 1], [10 * communicator + rank, 5], size=size, communicator=communicator)
    pairs, triples = join.take_ready(members_seen={0: 2, 1: 3, 2: 2}, now_ns=0)
    assert (pairs.communicator.tolist(), pairs.coll_seq.tolist()) == ([0, 0, 2, 2], [0, 1, 0, 1])
    assert pairs.operations.tolist() == [[0, 1], [5, 5], [20, 21], [5, 5]]
    assert (triples.communicator.tolist(), triples.operations[0].tolist()) == ([1, 1], [10, 11, 12])


def test_kernels_are_compared_only_with_those_of_their_host() -> None:
    hosts = np.array([[4, 9, 4], [9, 9, 4], [NO_NUMBER, 4, NO_NUMBER]], np.int32)
    group = np.array([0, 0, 1, 1, 2])
    starts = np.array([[0, 10**6, 5], [0, 0, 10**6], [0, 10**6, 0], [0, 5, 10**6], [0, 10**6, 10**6]])
    none, every = np.zeros(starts.shape, np.int64), np.zeros(len(group), np.int64)
    kernels = KernelMatrix(
        joined=JoinedCollectives(communicator=group, coll_seq=every, operations=none),
        group=group, hosts=hosts, present=none == 0, start_ns=starts, end_ns=starts + 1000, start_true_ns=none,
        end_true_ns=none, censored=none != 0, confidence=none.astype(np.float32), op=every.astype(np.uint8),
        root=every.astype(np.int32), launch=every, message_bytes=every, agrees=every == 0,
    )  # fmt: skip
    assert kernels.overlap_on_each_host().tolist() == [True, False, False, True, True]
    kernels.censored[1, 0] = True
    assert kernels.overlap_on_each_host().tolist() == [True, True, False, True, True]


def test_a_rank_without_a_kernel_does_not_hold_up_the_others() -> None:
    join = CollectiveJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    _report(join, 0, [0], [10])
    _report(join, 1, [0], [-1])
    assert _ids(join.take_ready(members_seen={0: 2}, now_ns=0)) == [[10, -1]]


def test_a_rank_that_never_spoke_is_waited_for_only_until_things_settled() -> None:
    join = CollectiveJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    _report(join, 0, [0], [10], size=3)
    _report(join, 1, [0], [20], size=3)
    assert join.take_ready(members_seen={0: 2}, now_ns=_SETTLE) == []
    assert _ids(join.take_ready(members_seen={0: 2}, now_ns=_SETTLE + 1)) == [[10, 20, -1]]


def test_a_rank_that_fell_silent_is_waited_for_until_patience_ends() -> None:
    join = CollectiveJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    _report(join, 0, [0], [10])
    assert join.take_ready(members_seen={0: 2}, now_ns=_PATIENCE) == []
    assert _ids(join.take_ready(members_seen={0: 2}, now_ns=_PATIENCE + 1)) == [[10, -1]]


def test_a_number_that_is_decided_later_than_those_behind_it_is_waited_for_a_while() -> None:
    for first_again, expected in ((_SETTLE, [[10, 20], [11, 21]]), (_SETTLE + 1, [[11, 21]])):
        join = CollectiveJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
        for rank in (0, 1):
            _report(join, rank, [1], [11 + 10 * rank])
        ready = join.take_ready(members_seen={0: 2}, now_ns=first_again)
        for rank in (0, 1):
            _report(join, rank, [0], [10 + 10 * rank], now=first_again)
        ready += join.take_ready(members_seen={0: 2}, now_ns=first_again)
        assert _ids(ready) == expected


def test_a_report_that_comes_after_its_collective_was_given_is_counted() -> None:
    join = CollectiveJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    _report(join, 0, [0], [10])
    join.take_ready(members_seen={0: 2}, now_ns=_PATIENCE + 1)
    _report(join, 1, [0], [20])
    assert join.late == 1
    assert join.take_ready(members_seen={0: 2}, now_ns=_PATIENCE + 1, final=True) == []


def test_reports_in_any_order_give_the_same_as_in_order() -> None:
    rng = np.random.default_rng(5)
    join = CollectiveJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    reports = [(rank, seq) for rank in range(4) for seq in range(200)]
    rng.shuffle(reports)
    got: list[list[int]] = []
    for rank, seq in reports:
        _report(join, rank, [seq], [1000 * rank + seq], size=4)
        got += _ids(join.take_ready(members_seen={0: 4}, now_ns=0))
    assert sorted(got) == [[seq, 1000 + seq, 2000 + seq, 3000 + seq] for seq in range(200)]


def _side(sender: int, receiver: int, seq: int, operation: int, *, receives: bool, now: int = 0) -> np.ndarray:
    return np.array([(0, sender, receiver, seq, receives, operation, now)], PAIR_SIDE)


def _unknown(sends: np.ndarray, receives: np.ndarray) -> PairTimes:
    nothing = np.full((2, len(sends)), np.nan)
    return PairTimes(nothing, nothing, np.zeros((2, len(receives)), np.int32))


def _every_ms(hosts: tuple[int, int], receiver_ahead_ms: float) -> TimesOf:
    """Operation k ran in millisecond k % 1000; those from 1000 on are Recvs, whose clock is ahead."""

    def times_of(sends: np.ndarray, receives: np.ndarray) -> PairTimes:
        starts = np.stack([sends % 1000, receives % 1000 + receiver_ahead_ms]) * 1e6
        return PairTimes(starts, starts + 1e5, np.tile(np.array(hosts, np.int32)[:, None], len(sends)))

    return times_of


@pytest.mark.parametrize("receives", [False, True])
@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
def test_a_lost_line_of_one_side_shifts_no_later_pair(receives: bool, hosts: tuple[int, int]) -> None:
    join = PairJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    found: list[tuple[int, int]] = []
    for begin in (0, 20):  # the second half comes later
        for is_receiver in (False, True):
            ran = [k for k in range(begin, begin + 20) if is_receiver is not receives or k not in {7, 8, 25}]
            for k in ran:
                number = k if is_receiver is not receives else k - sum(k > lost for lost in (7, 8, 25))
                join.report(_side(0, 1, number, k + 1000 * is_receiver, receives=is_receiver))
        times_of = _every_ms(hosts, 500.0 if hosts[0] != hosts[1] else 0.0)
        found += zip(*(ids.tolist() for ids in join.take_ready(times_of, now_ns=0)), strict=True)
    assert sorted(found) == [(k, 1000 + k) for k in range(40) if k not in {7, 8, 25}]
    assert join.healed == {0: 3}
    operations, numbers = join.drain_renumbered()
    newest = dict(zip(operations.tolist(), numbers.tolist(), strict=True))
    assert all(number == operation % 1000 for operation, number in newest.items())
    assert len(newest) == 40 - 3 - 7


def test_a_send_meets_the_receive_of_its_number_and_direction() -> None:
    join = PairJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    join.report(_side(0, 1, 0, 10, receives=False))
    join.report(_side(0, 1, 1, 11, receives=False))
    join.report(_side(1, 0, 0, 30, receives=True))
    join.report(_side(0, 1, 1, 21, receives=True))
    sends, receives = join.take_ready(_unknown, now_ns=0)
    assert (sends.tolist(), receives.tolist()) == ([11], [21])
    join.report(_side(0, 1, 0, 20, receives=True))
    sends, receives = join.take_ready(_unknown, now_ns=0)
    assert (sends.tolist(), receives.tolist()) == ([10], [20])


def test_a_side_whose_peer_never_comes_is_forgotten() -> None:
    join = PairJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    join.report(_side(0, 1, 0, 10, receives=False))
    join.take_ready(_unknown, now_ns=_PATIENCE + 1)
    join.report(_side(0, 1, 0, 20, receives=True, now=_PATIENCE + 1))
    sends, _ = join.take_ready(_unknown, now_ns=_PATIENCE + 1)
    assert len(sends) == 0
