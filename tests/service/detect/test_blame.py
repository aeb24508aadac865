from __future__ import annotations

from collections.abc import Iterator

from ncclscope_service.detect.blame import Blame, Standing


def standing(ahead: tuple[int, ...], behind: tuple[int, ...], newest_here: tuple[int, ...] = ()) -> Standing:
    return Standing(ahead=ahead, behind=behind, newest_here=frozenset(newest_here))


def test_who_waits_for_another_is_not_to_blame_however_long_the_chain() -> None:
    chain = [standing((rank,), (rank + 1,), newest_here=(rank,)) for rank in range(6)]
    assert Blame(chain).roots({1, 2, 3, 4, 5, 6}) == {6}
    assert Blame(chain).waiting == {0, 1, 2, 3, 4, 5}


def test_nobody_is_to_blame_where_the_root_is_not_among_the_missing() -> None:
    assert Blame([standing((0,), (1,)), standing((1,), (2,))]).roots({1}) == set()


def test_two_that_wait_for_nobody_are_both_roots() -> None:
    assert Blame([standing((0,), (1,)), standing((2,), (3,))]).roots({1, 3}) == {1, 3}


def test_in_a_circle_a_send_that_was_started_early_does_not_excuse_its_rank() -> None:
    circle = [standing((5,), (13,)), standing((13,), (5,), newest_here=(13,))]
    assert Blame(circle).roots({5, 13}) == {5}


def test_a_circle_in_which_everybody_is_held_is_named_whole() -> None:
    circle = [standing((1,), (2,), newest_here=(1,)), standing((2,), (1,), newest_here=(2,))]
    assert Blame(circle).roots({1, 2}) == {1, 2}


def test_a_rank_that_ended_in_an_operation_whose_other_members_wait_for_the_root_is_a_victim() -> None:
    even = standing((), (7, 8), newest_here=(7,))
    held = [even, standing((8,), (5,), newest_here=(8,)), standing((3,), (7,)), standing((4,), (5,))]
    assert Blame(held).roots({5, 7}) == {5}


def test_a_root_whose_last_operation_was_shared_with_its_victims_stays_the_root() -> None:
    even = standing((), (5, 8), newest_here=(5,))
    assert Blame([even, standing((8,), (5,), newest_here=(8,)), standing((3,), (6,))]).roots({5, 6}) == {5, 6}


def test_in_large_groups_that_wait_for_each_other_each_group_is_followed_once() -> None:
    looked_at: list[int] = []

    class Watched(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            looked_at.append(len(self))
            return super().__iter__()

    one, other = Watched(range(500)), Watched(range(500, 1000))
    blame = Blame([standing(one, other), standing(other, one)])
    looked_at.clear()
    missing = set(range(500, 1000))
    assert blame.roots(missing) == missing
    assert len(looked_at) <= 2
