"""A launch of sends and receives can be measured once the other side of every one of them is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_service.join.send_recv import SIDE, ExchangeBook, Exchanges
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS


def _side(
    launch: int,
    operation: int,
    *,
    start: int = 100,
    peer_start: int = 100,
    moved: int = 10,
    sends: bool = True,
    uncertainty: float = 1.0,
    censored: bool = False,
    peer: int = 1,
) -> Columns:
    return np.array(
        [(launch, operation, start, start + 50, censored, peer_start, uncertainty, moved, sends, peer, False)], SIDE
    )  # fmt: skip


def _alone(launch: int, operation: int, *, peer: int, moved: int = 10, sends: bool = True) -> Columns:
    """The line of its other side was lost."""
    return np.array([(launch, operation, 0, 0, False, 0, 0.0, moved, sends, peer, True)], SIDE)


def _expecting(*launches: int) -> ExchangeBook:
    book = ExchangeBook()
    book.expect(np.asarray(launches, np.int64))
    return book


def _taken(exchanges: Exchanges) -> list[int]:
    return sorted(exchanges.operations.tolist())


def test_one_send_is_complete_once_it_has_met_its_other_side() -> None:
    book = _expecting(5)
    assert _taken(book.take_complete()) == []
    book.add(_side(5, 1, start=100, peer_start=130, moved=64))
    done = book.take_complete()
    assert _taken(done) == [1]
    assert (done.start_true_ns.tolist(), done.end_true_ns.tolist()) == ([100], [150])
    assert (done.last_peer_start_true_ns.tolist(), done.moved_bytes.tolist()) == ([130], [64])


def test_sides_of_a_launch_may_be_on_different_clocks() -> None:
    book = _expecting(5, 5)
    book.add(_side(5, 1, start=100, peer_start=90))
    book.add(_side(5, 2, start=7_100, peer_start=7_140))
    done = book.take_complete()
    assert (done.start_true_ns.tolist(), done.last_peer_start_true_ns.tolist()) == ([100], [140])


def test_a_group_is_complete_only_when_all_of_its_sides_are_there() -> None:
    book = _expecting(5, 5, 5)
    book.add(_side(5, 1))
    book.add(_side(5, 3))
    assert _taken(book.take_complete()) == []
    book.add(_side(5, 2))
    assert _taken(book.take_complete()) == [1, 2, 3]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_side_alone_started_with_what_else_its_launch_exchanged_with_that_peer(is_first: bool) -> None:
    book = _expecting(5, 5, 5, 5)
    met = [
        _side(5, 1, peer_start=130, peer=1, sends=False),
        _side(5, 2, peer_start=170, peer=2, moved=20),
        _side(5, 3, peer_start=170, peer=2, moved=20, sends=False),
    ]
    alone = _alone(5, 4, peer=1, moved=30)
    for each in [alone, *met] if is_first else [*met, alone]:
        assert _taken(book.take_complete()) == []
        book.add(each)
    done = book.take_complete()
    assert _taken(done) == [1, 2, 3, 4]
    assert (done.start_true_ns.tolist(), done.end_true_ns.tolist()) == ([100], [150])
    assert (done.last_peer_start_true_ns.tolist(), done.moved_bytes.tolist()) == ([170], [50])


def test_a_launch_of_which_a_peer_is_met_in_no_operation_is_not_given() -> None:
    book = _expecting(5, 5, 6)
    book.add(np.concatenate([_side(5, 1, peer=1), _alone(5, 2, peer=2), _side(6, 3)]))
    assert _taken(book.take_complete()) == [3]
    assert _taken(book.take_complete()) == []
    assert book.waiting().tolist() == []


def test_a_complete_launch_is_given_once() -> None:
    book = _expecting(5)
    book.add(_side(5, 1))
    book.take_complete()
    assert _taken(book.take_complete()) == []


def test_a_launch_that_lacks_a_side_does_not_hold_up_others() -> None:
    book = _expecting(5, 5, 6)
    book.add(np.concatenate([_side(5, 1), _side(6, 2)]))
    assert _taken(book.take_complete()) == [2]
    book.add(_side(5, 3))
    assert _taken(book.take_complete()) == [1, 3]


def test_the_last_and_the_worst_of_the_peers_count() -> None:
    book = _expecting(5, 5)
    book.add(np.concatenate([_side(5, 1, peer_start=90), _side(5, 2, peer_start=140, uncertainty=9.0)]))
    done = book.take_complete()
    assert done.last_peer_start_true_ns.tolist() == [140]
    assert done.uncertainty_ns.tolist() == [9.0]


def test_with_one_peer_unknown_the_last_start_is_unknown() -> None:
    book = _expecting(5, 5)
    book.add(np.concatenate([_side(5, 1, peer_start=NO_TIME_NS), _side(5, 2, peer_start=140)]))
    assert book.take_complete().last_peer_start_true_ns.tolist() == [NO_TIME_NS]


def test_moved_is_the_larger_of_what_was_sent_and_what_was_received() -> None:
    book = _expecting(5, 5, 5)
    book.add(
        np.concatenate(
            [_side(5, 1, moved=30), _side(5, 2, moved=30), _side(5, 3, moved=50, sends=False)],
        )
    )
    assert book.take_complete().moved_bytes.tolist() == [60]


def test_operations_say_which_launch_they_belong_to() -> None:
    book = _expecting(9, 5, 5)
    book.add(np.concatenate([_side(9, 1), _side(5, 2, censored=True), _side(5, 3, censored=True)]))
    done = book.take_complete()
    launch_of = dict(zip(done.operations.tolist(), done.launch_of.tolist(), strict=True))
    assert launch_of[2] == launch_of[3] != launch_of[1]
    assert [bool(done.censored[launch_of[operation]]) for operation in (1, 2)] == [False, True]
    assert sorted(done.first_operations().tolist()) in ([1, 2], [1, 3])


def test_what_is_forgotten_never_completes() -> None:
    book = _expecting(5, 5, 6)
    book.add(np.concatenate([_side(5, 1), _side(6, 2)]))
    book.forget(np.array([5, 5]))
    assert _taken(book.take_complete()) == [2]
    book.add(_side(5, 3))
    assert _taken(book.take_complete()) == []


@given(st.lists(st.lists(st.integers(0, 6), max_size=8), max_size=8), st.sets(st.integers(0, 6)), st.integers(0, 8))
def test_launches_come_when_their_last_side_does_however_the_sides_come(
    ticks: list[list[int]], forgotten: set[int], forgotten_at: int
) -> None:
    sizes = {launch: 1 + launch % 4 for launch in range(7)}
    book = _expecting(*(launch for launch, size in sizes.items() for _ in range(size)))
    met: dict[int, list[int]] = {launch: [] for launch in sizes}
    operation = 0
    for tick, launches in enumerate(ticks):
        if tick == forgotten_at:
            book.forget(np.array(sorted(forgotten), np.int64))
            for launch in forgotten:
                sizes[launch], met[launch] = 0, []
        for launch in launches:
            if len(met[launch]) < sizes[launch]:
                book.add(_side(launch, operation))
                met[launch].append(operation)
            operation += 1
        complete = [launch for launch, size in sizes.items() if size and len(met[launch]) == size]
        assert _taken(book.take_complete()) == sorted(each for launch in complete for each in met[launch])
        for launch in complete:
            sizes[launch], met[launch] = 0, []
        assert sorted(book.waiting().tolist()) == sorted(each for mine in met.values() for each in mine)
