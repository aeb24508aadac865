from __future__ import annotations

from ncclscope_agent.files.exports import Timing, Waiting

TIMING = Timing(settle_ns=10, longest_pause_ns=40, give_up_ns=100)


def waiting() -> Waiting:
    file = Waiting(TIMING, patience_ns=TIMING.settle_ns)
    file.see("size 1", 0)
    return file


def test_a_file_is_tried_when_it_has_settled() -> None:
    file = waiting()
    assert not file.is_due(9)
    assert file.is_due(10)


def test_a_change_starts_the_wait_anew() -> None:
    file = waiting()
    file.see("size 2", 8)
    assert not file.is_due(17)
    assert file.is_due(18)


def test_pauses_double_up_to_the_longest() -> None:
    file = waiting()
    tried = []
    for now in range(10, 200):
        if file.is_due(now):
            tried.append(now)
            file.failed("locked", now)
    assert tried == [10, 20, 40, 80, 120, 160]


def test_a_passing_reason_is_told_once_when_it_did_not_pass() -> None:
    file = waiting()
    assert [file.failed("locked", now) for now in (10, 60, 110, 150)] == [False, False, True, False]
    assert file.failed("incomplete", 160)
    assert not file.is_done


def test_a_lasting_reason_is_told_at_once_and_ends_the_wait() -> None:
    file = waiting()
    assert file.failed("not_sqlite", 10)
    assert file.is_done
    assert not file.is_due(10_000)


def test_a_file_that_was_done_is_waited_for_again_when_it_changes() -> None:
    file = waiting()
    file.failed("not_sqlite", 10)
    file.see("size 3", 20)
    assert file.is_due(30)
