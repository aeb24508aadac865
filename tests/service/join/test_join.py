"""Collectives are joined by number and pairs by number per direction, whatever the order of arrival."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ncclscope_service.columns.table import Ids
from ncclscope_service.join.ranks import (
    PAIR_SIDE,
    CallsOf,
    CollectiveJoin,
    JoinedCollectives,
    KernelMatrix,
    PairCalls,
    PairJoin,
)
from ncclscope_service.number.across_ranks import CALL
from ncclscope_service.number.calls import Calls
from ncclscope_service.store.rows import Match, empty_operations
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

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


def _unknown(operations: Ids) -> PairCalls:
    calls = np.zeros(len(operations), CALL)
    calls["start_ns"] = calls["end_ns"] = calls["stamp_ns"] = NO_TIME_NS
    return PairCalls(calls, np.zeros(len(operations), np.int32))


_MS = 1_000_000
_STARTS = np.cumsum(np.random.default_rng(1).integers(1, 9, 1000)) * _MS


def _at_starts(hosts: tuple[int, int], receiver_ahead_ms: float) -> CallsOf:
    """Operation k ran at its start (k % 1000); those from 1000 on are Recvs, whose clock is ahead."""

    def calls_of(operations: Ids) -> PairCalls:
        is_receiver = operations >= 1000
        calls = np.zeros(len(operations), CALL)
        calls["is_sized"] = calls["is_n_to_n"] = True
        calls["start_ns"] = _STARTS[operations % 1000] + is_receiver * receiver_ahead_ms * _MS
        calls["end_ns"] = calls["start_ns"] + _MS // 10
        calls["stamp_ns"] = NO_TIME_NS
        return PairCalls(calls, np.array(hosts, np.int32)[is_receiver.astype(np.intp)])

    return calls_of


def _in_bursts(operations: Ids) -> PairCalls:
    """As `_at_starts`, on one host: six messages of 30 us at a time, one behind the other."""
    calls = _at_starts((0, 0), 0.0)(operations)
    burst, place = np.divmod(operations % 1000, 6)
    calls.calls["start_ns"] = _STARTS[burst] + place * 33_000
    calls.calls["end_ns"] = calls.calls["start_ns"] + 30_000
    return calls


_HOSTS = pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])


def _clocks_of(hosts: tuple[int, int]) -> CallsOf:
    return _at_starts(hosts, 500.0 if hosts[0] != hosts[1] else 0.0)


def _sides(lost: tuple[set[int], set[int]], numbers: range, now: int = 0) -> np.ndarray:
    """Sends and Recvs of these numbers, counted by the lines left."""
    return np.concatenate([
        _side(0, 1, k - sum(k > each for each in lost[side]), k + 1000 * side, receives=bool(side), now=now)
        for side in (0, 1)
        for k in numbers
        if k not in lost[side]
    ])  # fmt: skip


@_HOSTS
@given(losses=st.tuples(*[st.sets(st.integers(0, 119), max_size=12)] * 2))
@example(losses=({0, 1, 2, 3, 89, 92}, {0, 91}))  # three pairs of neighbours are equally far apart
def test_lines_lost_on_both_sides_join_no_two_messages(
    hosts: tuple[int, int], losses: tuple[set[int], set[int]]
) -> None:
    join = PairJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    join.report(_sides(losses, range(120)))
    sends, receives = join.take_ready(_clocks_of(hosts), now_ns=0, final=True)
    assert (receives - sends == 1000).all()
    # Of the last ones nothing behind them tells.
    assert set(sends.tolist()) >= {k for k in range(110) if k not in losses[0] | losses[1]}


@given(losses=st.tuples(*[st.sets(st.integers(0, 119), max_size=12)] * 2))
def test_lines_lost_in_bursts_of_short_messages_join_no_two_of_them(losses: tuple[set[int], set[int]]) -> None:
    join = PairJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    sides = _sides(losses, range(120))
    join.report(sides)
    sends, receives = join.take_ready(_in_bursts, now_ns=0, final=True)
    assert (receives - sends == 1000).all()
    numbers = dict(zip(sides["operation"].tolist(), sides["pair_seq"].tolist(), strict=True))
    numbers |= dict(zip(*(each.tolist() for each in join.drain_renumbered()), strict=True))
    assert all(numbers[each] == numbers[each + 1000] for each in sends.tolist())
    alone = join.drain_alone()["operation"].tolist()
    assert sorted([*alone, *sends.tolist(), *receives.tolist()]) == sorted(sides["operation"].tolist())


@_HOSTS
def test_a_pair_is_not_given_before_it_is_known_which_side_lost_a_line(hosts: tuple[int, int]) -> None:
    join = PairJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    lost: tuple[set[int], set[int]] = ({2}, set())
    join.report(_sides(lost, range(6)))
    sends, _ = join.take_ready(_clocks_of(hosts), now_ns=0)
    assert set(sends.tolist()) <= {0, 1}
    join.report(_sides(lost, range(6, 12), now=_SETTLE))
    found = {*sends.tolist(), *join.take_ready(_clocks_of(hosts), now_ns=_SETTLE + 1)[0].tolist()}
    found |= {*join.take_ready(_clocks_of(hosts), now_ns=3 * _SETTLE)[0].tolist()}
    assert found == set(range(12)) - {2}


def test_first_lines_that_were_lost_shift_no_pair_between_two_hosts() -> None:
    join = PairJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    join.report(_sides(({0}, set()), range(8)))
    sends, receives = join.take_ready(_clocks_of((0, 1)), now_ns=_SETTLE + 1)
    assert sends.tolist() == list(range(1, 8))
    assert (receives - sends == 1000).all()


@pytest.mark.parametrize("receives", [False, True])
@_HOSTS
def test_a_lost_line_of_one_side_shifts_no_later_pair(receives: bool, hosts: tuple[int, int]) -> None:
    join = PairJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)
    lost: tuple[set[int], set[int]] = (set(), {7, 8, 25}) if receives else ({7, 8, 25}, set())
    found: list[tuple[int, int]] = []
    for begin in (0, 20):  # the second half comes later
        now = begin * _SETTLE
        join.report(_sides(lost, range(begin, begin + 20), now=now))
        ready = join.take_ready(_clocks_of(hosts), now_ns=now + _SETTLE + 1)
        found += zip(*(ids.tolist() for ids in ready), strict=True)
    assert sorted(found) == [(k, 1000 + k) for k in range(40) if k not in {7, 8, 25}]
    assert join.healed == {0: 3}
    operations, numbers = join.drain_renumbered()
    newest = dict(zip(operations.tolist(), numbers.tolist(), strict=True))
    assert all(number == operation % 1000 for operation, number in newest.items())
    assert len(newest) == 40 - 3 - 7


@pytest.mark.parametrize("at_once", [True, False])
def test_messages_behind_a_gap_in_which_clocks_drifted_are_joined_at_once(at_once: bool) -> None:
    join = PairJoin(settle_ns=_SETTLE, patience_ns=_PATIENCE)

    def calls_of(operations: Ids) -> PairCalls:
        of = _clocks_of((0, 1))(operations)
        is_behind = operations % 1000 >= 5
        for name in ("start_ns", "end_ns"):  # 4 s later, the clock of the second host has run ahead by 0.2 ms
            of.calls[name][is_behind] += 4_000 * _MS
            of.calls[name][is_behind & (operations >= 1000)] += _MS // 5
        return of

    for part in (range(10),) if at_once else (range(5), range(5, 10)):
        join.report(_sides((set(), set()), part))
        sends, receives = join.take_ready(calls_of, now_ns=0)
        assert sends.tolist() == list(part)
        assert receives.tolist() == [1000 + k for k in part]
    assert not join.healed


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
