"""What hosts did together is measured when their clocks are told, or when it is clear that they will not be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclscope_service.clock.host_clocks import ClockPrior, Clocks, Unclocked
from ncclscope_service.join.ranks import JoinedCollectives, KernelMatrix
from ncclscope_service.store.records import Process
from ncclscope_service.store.rows import Match, empty_operations
from ncclscope_service.store.tables import Hosts, Store
from ncclscope_wire.terms import NO_NUMBER

_SECOND = 1_000_000_000
_NOBODY = np.array([False, False, False])


def _collectives(hosts: list[int], *operations: list[int]) -> KernelMatrix:
    """As many as there are lists of operations, one of each rank."""
    of = np.array(operations, np.int64)
    none = np.zeros(of.shape, np.int64)
    every = np.zeros(len(of), np.int64)
    return KernelMatrix(
        joined=JoinedCollectives(communicator=every, coll_seq=every, operations=of),
        group=every, hosts=np.array([hosts], np.int32), present=of != NO_NUMBER, start_ns=none, end_ns=none,
        start_true_ns=none, end_true_ns=none, censored=none != 0, confidence=none.astype(np.float32),
        op=every.astype(np.uint8),
        root=every.astype(np.int32), launch=every, message_bytes=every, agrees=every == 0,
    )  # fmt: skip


class _Clocks(Clocks):
    """Of which the test says what is told."""

    told = _NOBODY
    sigma_ns_of = np.array([0.0, 0.0, 0.0])
    current = False

    def __init__(self, store: Store) -> None:
        self.store, self.hosts = store, Hosts(store)
        super().__init__(store, self.hosts)

    def are_told(self, most_sigma_ns: float = np.inf) -> NDArray[np.bool_]:
        return self.told & (self.sigma_ns_of <= most_sigma_ns)

    def is_current(self) -> bool:
        return self.current


@pytest.fixture
def clocks() -> _Clocks:
    """Of three processes on hosts of their own, with ten operations each, in turn."""
    store = Store()
    store.processes += [Process(host=f"node{host}", pid=1) for host in range(3)]
    store.process_job += ["j"] * 3
    rows = empty_operations(30)
    rows["process"] = np.arange(30) % 3
    store.operations.append(rows)
    return _Clocks(store)


@pytest.fixture
def unclocked(clocks: _Clocks) -> Unclocked:
    return Unclocked(clocks, clocks.hosts, clocks.store.operations)


def _admitted(
    unclocked: Unclocked, now_ns: int, *collectives: KernelMatrix, pairs: Sequence[tuple[int, int]] = (),
    is_whole: bool = False, final: bool = False,
) -> tuple[list[list[list[int]]], list[tuple[int, int]]]:  # fmt: skip
    """Operations of the collectives, and pairs, that are given."""
    sends, receives = np.array(pairs, np.int64).reshape(-1, 2).T
    given = unclocked.admit(collectives, sends, receives, now_ns, is_whole=is_whole, final=final)
    found = zip(given.sends.tolist(), given.receives.tolist(), strict=True)
    return [each.joined.operations.tolist() for each in given.collectives], list(found)


def test_what_was_joined_waits_until_the_clock_of_each_of_its_hosts_is_told(
    clocks: _Clocks, unclocked: Unclocked
) -> None:
    alone = _collectives([NO_NUMBER, 2], [NO_NUMBER, 2])
    assert _admitted(unclocked, 0, _collectives([0, 1], [0, 1]), alone, pairs=[(3, 4)]) == ([], [])
    assert sorted(unclocked.waiting().tolist()) == [0, 1, 2, 3, 4]
    clocks.told = np.array([True, True, False])
    assert _admitted(unclocked, _SECOND, pairs=[(6, 8), (9, 10)]) == ([[[0, 1]]], [(3, 4), (9, 10)])
    assert _admitted(unclocked, _SECOND) == ([], [])
    clocks.told = np.array([True, True, True])
    assert _admitted(unclocked, 2 * _SECOND) == ([[[NO_NUMBER, 2]]], [(6, 8)])
    assert not len(unclocked.waiting())


@pytest.mark.parametrize(
    ("now_ns", "current", "is_whole", "final", "is_given"),
    [
        (9 * _SECOND, False, True, False, False),
        (9 * _SECOND, True, False, False, False),
        (9 * _SECOND, True, True, False, True),
        (10 * _SECOND, False, False, False, True),
        (0, False, False, True, True),
    ],
)
def test_it_waits_for_an_estimate_from_all_that_came_and_never_for_long(
    clocks: _Clocks, unclocked: Unclocked, now_ns: int, *, current: bool, is_whole: bool, final: bool, is_given: bool
) -> None:
    assert _admitted(unclocked, 0, _collectives([0, 1], [0, 1]), pairs=[(3, 4)]) == ([], [])
    clocks.current = current
    all_of_it = [[[0, 1]]], [(3, 4)]
    assert _admitted(unclocked, now_ns, is_whole=is_whole, final=final) == (all_of_it if is_given else ([], []))


@pytest.mark.parametrize(
    ("sigma_ns", "now_ns", "is_whole", "final", "is_given"),
    [
        (20_000.0, 0, False, False, True),
        (100_000.0, 9 * _SECOND, False, False, False),
        (100_000.0, 9 * _SECOND, True, False, True),
        (1_000_000.0, 9 * _SECOND, True, False, False),
        (1_000_000.0, 10 * _SECOND, True, False, True),
        (1_000_000.0, 0, False, True, True),
    ],
)
def test_messages_wait_for_clocks_that_are_sure_and_collectives_do_not(
    clocks: _Clocks, unclocked: Unclocked, sigma_ns: float, now_ns: int, *, is_whole: bool, final: bool, is_given: bool
) -> None:
    """A clock told by messages alone is as unsure as these take long, and one of a few operations says nothing yet."""
    clocks.told, clocks.current = ~_NOBODY, True
    clocks.sigma_ns_of = np.array([0.0, sigma_ns, 0.0])
    first = _admitted(unclocked, 0, _collectives([0, 1], [0, 1]), pairs=[(3, 4), (9, 8)], final=final)
    at_once = [(3, 4), (9, 8)] if final or sigma_ns <= 20_000 else [(9, 8)]
    assert first == ([[[0, 1]]], at_once)
    later = _admitted(unclocked, now_ns, is_whole=is_whole, final=final)
    assert later == ([], [(3, 4)] if is_given and (3, 4) not in at_once else [])


def test_times_are_of_the_estimate_by_which_they_are_measured(clocks: _Clocks, unclocked: Unclocked) -> None:
    rows = clocks.store.operations.rows
    rows["match"], rows["start_ns"], rows["end_ns"] = Match.MATCHED, 1_000_000, 2_000_000
    for now_ns, offset_ns in ((0, 500_000), (_SECOND, 700_000)):
        offsets = {"node0": 0, "node1": offset_ns}
        clocks.believe({host: ClockPrior(heartbeat_offset_ns=of, error_ns=None) for host, of in offsets.items()})
        clocks.estimate(now_ns)
        if not now_ns:
            clocks.correct(np.array([3, 4]))
            assert _admitted(unclocked, now_ns, pairs=[(3, 4)]) == ([], [])
    clocks.told = ~_NOBODY
    assert _admitted(unclocked, _SECOND) == ([], [(3, 4)])
    assert rows["start_true_ns"][3:5].tolist() == [1_000_000, 300_000]


def test_what_has_left_memory_meanwhile_is_not_given(clocks: _Clocks, unclocked: Unclocked) -> None:
    joined = _collectives([0, 1], [0, 1], [6, NO_NUMBER]), _collectives([0, 1], [3, 4])
    _admitted(unclocked, 0, *joined, pairs=[(0, 7), (9, 10)])
    clocks.store.operations.drop_before(5)
    clocks.told = np.array([True, True, True])
    assert _admitted(unclocked, 0) == ([[[6, NO_NUMBER]]], [(9, 10)])
