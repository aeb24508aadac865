"""A store's operations are numbered by the period of what their rank calls, live as offline."""

from __future__ import annotations

import numpy as np
import pytest
from service.log_batches import Line, Reading, log_batch

from ncclscope_service.columns.table import Ids
from ncclscope_service.job.iteration_numbering import Periods
from ncclscope_service.store.rows import IterationBy
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_STEP = ("G", "a", "b", "a", "b", "H", "n")
_CALLS = {
    "a": {"op": "AllGather", "count": 1 << 20, "stream": 1},
    "b": {"op": "Send", "count": 1 << 20, "stream": 2},
    "G": {"op": "AllReduce", "count": 1 << 20, "stream": 3},
    "H": {"op": "AllReduce", "count": 1 << 20, "stream": 4},
    "n": {"op": "AllReduce", "count": 1, "stream": 5},
}


class _Rank:
    """One process whose log is read in portions."""

    def __init__(self) -> None:
        self.reading = Reading()
        self.periods = Periods(self.reading.store)
        self._line = 0

    def read(self, letters: list[str], stamps_ns: list[int] | None = None) -> Ids:
        lines = []
        for letter, at_ns in zip(letters, stamps_ns or [NO_TIME_NS] * len(letters), strict=True):
            self._line += 1
            lines.append(Line(line=self._line, logged_at_ns=at_ns, **_CALLS[letter]))  # type: ignore[arg-type]  # texts and numbers
        ids = self.reading.feed(log_batch(lines))
        self.periods.number(ids)
        return ids

    @property
    def numbers(self) -> list[int]:
        numbers: list[int] = self.reading.store.operations.rows["iteration"].tolist()
        return numbers


def _steps(amount: int) -> list[str]:
    return [call for _ in range(amount) for call in _STEP]


def test_before_a_period_is_known_nothing_is_numbered_and_then_all_is() -> None:
    rank = _Rank()
    rank.read(_steps(2))
    rank.periods.learn(final=False)
    assert set(rank.numbers) == {NO_NUMBER}
    rank.read(_steps(2))
    rank.periods.learn(final=False)
    assert rank.numbers == [index // len(_STEP) for index in range(4 * len(_STEP))]
    assert rank.periods.iterations() == {"j": 4}


def test_what_repeats_within_the_first_iteration_is_not_taken_for_one_for_ever() -> None:
    step = ["a", "H", "b", "H"] * 12 + ["G", "n"]
    rank = _Rank()
    rank.read(step[:40])
    rank.periods.learn(final=False)
    assert rank.periods.iterations()["j"] >= 8  # of microbatches: nothing else was seen yet
    rank.read(step[40:])
    for _ in range(5):
        rank.read(step)
        rank.periods.learn(final=False)
    assert rank.periods.iterations() == {"j": 6}
    assert rank.numbers == [number for number in range(6) for _ in step]


_MS = 1_000_000


def _stamps(steps: int, *, pause_ms: int = 0) -> list[int]:
    """Each step lasts 400 ms; after half of them there is a pause."""
    return [
        (step * 400 + place * 5 + (pause_ms if 2 * step >= steps else 0)) * _MS
        for step in range(steps)
        for place in range(len(_STEP))
    ]


@pytest.mark.parametrize("portions", [1, 7])
def test_the_stamps_of_iterations_tell_how_long_they_last(portions: int) -> None:
    rank, letters, stamps = _Rank(), _steps(30), _stamps(30)
    for part in np.array_split(np.arange(len(letters)), portions):
        rank.read([letters[place] for place in part], [stamps[place] for place in part])
        rank.periods.learn(final=False)
    assert rank.periods.steps_ns() == {"j": 400 * _MS}


def test_lost_lines_and_a_pause_do_not_change_how_long_a_step_is() -> None:
    rank, rng = _Rank(), np.random.default_rng(5)
    read = [pair for pair in zip(_steps(60), _stamps(60, pause_ms=3_000), strict=True) if rng.random() > 0.05]
    rank.read([letter for letter, _ in read], [at_ns for _, at_ns in read])
    rank.periods.learn(final=False)
    assert rank.periods.steps_ns() == {"j": 400 * _MS}


def test_few_steps_or_lines_without_stamps_do_not_tell_how_long_a_step_is() -> None:
    few, unstamped = _Rank(), _Rank()
    few.read(_steps(3), _stamps(3))
    unstamped.read(_steps(30))
    for rank in (few, unstamped):
        rank.periods.learn(final=False)
        assert rank.periods.steps_ns() == {}


def test_marks_win_and_lend_their_numbers_to_the_rest() -> None:
    rank = _Rank()
    rank.read(_steps(6))
    rows = rank.reading.store.operations.rows
    rows["iteration"][14:28], rows["iteration_by"][14:28] = [102] * 7 + [103] * 7, IterationBy.MARKS
    rank.periods.learn(final=False)
    assert rank.numbers == [100 + index // len(_STEP) for index in range(6 * len(_STEP))]
    rank.read(_steps(1))
    assert rank.numbers[-7:] == [106] * 7


def test_a_period_that_contradicts_the_marks_is_dropped() -> None:
    rank = _Rank()
    rank.read(_steps(6))
    rows = rank.reading.store.operations.rows
    rows["iteration"][:28] = [index // 14 for index in range(28)]
    rows["iteration_by"][:28] = IterationBy.MARKS
    rank.periods.learn(final=True)
    assert rank.numbers == [index // 14 for index in range(28)] + [NO_NUMBER] * 14


def test_a_program_that_changes_is_followed() -> None:
    rank = _Rank()
    rank.read(_steps(6))
    rank.periods.learn(final=False)
    changed = ["G", "a", "a", "n"]
    for _ in range(40):
        rank.read([letter for letter in changed if letter != "G"])
        rank.periods.learn(final=False)
    numbers = rank.numbers
    assert numbers == sorted(numbers)
    assert numbers[-1] > numbers[6 * len(_STEP)] + 20


@pytest.mark.parametrize("portions", [1, 23])
def test_where_an_iteration_has_one_mark_a_lost_one_does_not_shift_the_numbers(portions: int) -> None:
    rank, step = _Rank(), ("a", "b", "G", "a", "b", "H", "a", "b", "G", "a", "b", "H", "n")
    letters = list(step) * 12
    truth = [index // len(step) for index in range(len(letters))]
    for lost in (5 * len(step) - 1, 9 * len(step) - 1):
        del letters[lost], truth[lost]
    for part in np.array_split(np.arange(len(letters)), portions):
        rank.read([letters[place] for place in part])
        rank.periods.learn(final=False)
    rank.periods.learn(final=True)
    assert rank.numbers == truth


class _Ranks:
    """Processes whose logs are read in portions, and numbered together."""

    def __init__(self) -> None:
        self.reading = Reading()
        self.periods = Periods(self.reading.store)

    def read(self, pid: int, letters: list[str]) -> None:
        lines = [Line(line=number, **_CALLS[letter]) for number, letter in enumerate(letters, 1)]  # type: ignore[arg-type]  # texts and numbers
        self.reading.feed(log_batch(lines, pid=pid))

    def numbers(self, pid: int) -> list[int]:
        store = self.reading.store
        process = next(index for index, each in enumerate(store.processes) if each.pid == pid)
        numbers: list[int] = store.operations.rows["iteration"][store.operations.rows["process"] == process].tolist()
        return numbers


_PROGRAMS = (_STEP, ("a", "b", "G", "n"), ("a", "b", "G", "a", "b", "H", "a", "b", "G", "a", "b", "H", "n"))
"""Of three ranks; a step of the last has one mark."""


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_read_together_are_numbered_as_each_alone(seed: int) -> None:
    rng, together = np.random.default_rng(seed), _Ranks()
    alone = [_Ranks() for _ in _PROGRAMS]
    for _ in range(30):
        for pid, (program, by_itself) in enumerate(zip(_PROGRAMS, alone, strict=True)):
            part = [letter for letter in program * int(rng.integers(0, 3)) if rng.random() > 0.05]
            together.read(pid, part)
            by_itself.read(pid, part)
        for ranks in (together, *alone):
            ranks.periods.learn(final=False)
    for pid, by_itself in enumerate(alone):
        assert together.numbers(pid) == by_itself.numbers(pid)
        assert together.numbers(pid)[-1] > 10


def test_a_lost_mark_is_missed_also_while_another_rank_waits_for_its_only_one() -> None:
    ranks, alone = _Ranks(), _Ranks()
    for each in (ranks, alone):
        each.read(0, _steps(9))
    ranks.read(1, list(_PROGRAMS[2]) * 9)
    for each in (ranks, alone):
        each.periods.learn(final=False)
    ranks.read(1, list(_PROGRAMS[2][:4]))
    for each in (ranks, alone):
        each.read(0, list("GababH"))  # the norm at its end is lost
        each.periods.learn(final=False)
        each.read(0, list("ab"))
        each.periods.learn(final=False)
    ranks.read(1, list(_PROGRAMS[2][4:6]))
    for each in (ranks, alone):
        each.read(0, list("GababHn"))
        each.periods.learn(final=False)
    assert ranks.numbers(0) == alone.numbers(0)
    assert ranks.numbers(0)[-9:] == [10] * 9


def test_of_many_ranks_some_are_looked_at_and_the_others_in_turn() -> None:
    ranks = _Ranks()
    for pid in range(300):
        ranks.read(pid, _steps(4))
    store = ranks.reading.store
    numbered = []
    ranks.periods.learn(final=False)
    for _ in range(3):
        numbered.append(int((store.operations.rows["iteration"] != NO_NUMBER).sum()) // (4 * len(_STEP)))
        ranks.periods.go_on()
    assert 0 < numbered[0] < numbered[1] < numbered[2] == 300


def test_a_rank_with_much_that_is_new_comes_before_those_with_little() -> None:
    ranks = _Ranks()
    for pid in range(300):
        ranks.read(pid, _steps(1))
    for _ in range(3):
        ranks.periods.learn(final=False)
    for pid in range(300):
        ranks.read(pid, _steps(10 if pid == 299 else 1))
    ranks.periods.learn(final=False)
    assert ranks.numbers(299)[-1] == 10


def test_when_nothing_more_comes_all_ranks_are_looked_at() -> None:
    ranks = _Ranks()
    for pid in range(300):
        ranks.read(pid, _steps(4))
    ranks.periods.learn(final=True)
    assert (ranks.reading.store.operations.rows["iteration"] != NO_NUMBER).all()


def test_much_that_was_read_is_numbered_before_it_is_time_to_look_again() -> None:
    ranks = _Ranks()
    ranks.read(0, _steps(10))
    ranks.periods.learn(final=False)
    ranks.read(0, _steps(1))
    ranks.periods.go_on()
    assert ranks.numbers(0)[-1] == NO_NUMBER
    ranks.read(0, _steps(10_000))
    ranks.periods.go_on()
    assert ranks.numbers(0)[-1] == 10_010
