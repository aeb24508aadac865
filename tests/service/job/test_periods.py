"""A store's operations are numbered by the period of what their rank calls, live as offline."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from service.log_batches import Line, Reading, log_batch

from ncclscope_service.columns.table import Ids
from ncclscope_service.job.iteration_numbering import Periods
from ncclscope_service.job.recurrence import Calls, Cycle, Place, count_iterations, find_cycle, lost_marks, phases_of
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


_TENSORS = set("ABGHR")
"""Reductions of tensors: activations A and B, gradients G and H, one more R."""
_SCALARS = set("nlc")
"""A norm, a loss, a checkpoint's barrier."""


def _calls(text: str, at_ns: NDArray[np.int64] | None = None) -> Calls:
    """Each letter is a kind of call, numbered as in the alphabet of the text."""
    letters = sorted(set(text))
    kind = np.array([letters.index(letter) for letter in text], np.int64)
    return Calls(
        kind=kind,
        is_tensor_reduction=np.array([letter in _TENSORS for letter in text]),
        is_scalar=np.array([letter in _SCALARS for letter in text]),
        at_ns=at_ns,
    )


def _numbers(text: str, cycle: Cycle) -> list[int]:
    calls = _calls(text)
    phases = phases_of(calls.kind, cycle.kinds, int(calls.kind.max()) + 1)
    numbers: list[int] = count_iterations(phases, len(cycle.kinds), Place())[0].tolist()
    return numbers


def _found(text: str) -> tuple[str, list[int]]:
    cycle = find_cycle(_calls(text))
    assert cycle is not None
    letters = sorted(set(text))
    return "".join(letters[kind] for kind in cycle.kinds), _numbers(text, cycle)


@pytest.mark.parametrize(
    ("step", "marks"),
    [
        ("GHn", "GHn"),  # data parallelism
        ("ABABABABGHn", "GHn"),  # four microbatches, then gradients
        ("ABABABABn", "n"),  # tensor parallelism: the gradients are nobody's
        ("srsrsrn", "n"),  # a stage of a pipeline
        ("pqABABGpqABABHn", "GHn"),
    ],
)
def test_an_iteration_is_what_repeats_with_its_gradients_and_norm(step: str, marks: str) -> None:
    found, numbers = _found(step * 10)
    assert found == marks
    assert numbers == [index // len(step) for index in range(10 * len(step))]


def test_evaluation_and_checkpoints_belong_to_the_iteration_after_them() -> None:
    step, pause = "ABABABABGHn", "ABABABABABABl" + "c"
    text = (step * 5 + pause) * 4
    found, numbers = _found(text)
    assert found == "GHn"
    assert max(numbers) == 20  # what follows the last norm is of the 21st
    begins = [index for index in range(len(text)) if text[index] == "n"]
    assert [numbers[at] for at in begins] == list(range(20))


@pytest.mark.parametrize("seed", range(5))
def test_lost_lines_lose_no_iteration_where_it_has_several_marks(seed: int) -> None:
    step = "ABABABABGHRn"
    kept = np.flatnonzero(np.random.default_rng(seed).random(40 * len(step)) > 0.1)
    text = "".join((step * 40)[index] for index in kept)
    _, numbers = _found(text)
    true = kept // len(step)
    assert np.mean(np.array(numbers) == true) > 0.99


def test_the_longest_pause_is_the_border_where_no_scalar_is() -> None:
    text = "GHR" * 8
    steps = np.tile([10, 900, 10], 8)  # the pause is between G and H
    cycle = find_cycle(_calls(text, np.cumsum(steps).astype(np.int64)))
    assert cycle is not None
    assert [sorted(set(text))[kind] for kind in cycle.kinds] == ["H", "R", "G"]


@pytest.mark.parametrize("text", ["", "G", "GHnGHn", "sr" * 50])
def test_without_recurring_reductions_there_is_no_period(text: str) -> None:
    assert find_cycle(_calls(text)) is None


def test_what_does_not_recur_evenly_is_no_period() -> None:
    letters = np.random.default_rng(1).choice(list("GHn"), 200, p=[0.1, 0.85, 0.05])
    cycle = find_cycle(_calls("".join(letters)))
    assert cycle is None or cycle.confidence < 0.7


def test_few_iterations_are_less_sure_than_many() -> None:
    few, many = find_cycle(_calls("GHn" * 3)), find_cycle(_calls("GHn" * 30))
    assert few is not None
    assert many is not None
    assert few.confidence < 0.75 < many.confidence


def test_a_period_that_no_scalar_confirms_is_less_sure() -> None:
    found = find_cycle(_calls("GHR" * 30))
    assert found is not None
    assert found.confidence <= 0.6


@pytest.mark.parametrize("seed", range(10))
def test_portions_count_as_the_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    phases = np.tile([-1, -1, 0, -1, 1, 2, -1], 20)
    phases = phases[rng.random(len(phases)) > 0.2]
    whole, end, _ = count_iterations(phases, 3, Place())
    cuts = [0, *sorted(rng.integers(0, len(phases), 15).tolist()), len(phases)]
    numbers, place, since_mark = np.zeros(len(phases), np.int64), Place(), 0
    for begin, stop in pairwise(cuts):
        numbers[begin:stop], place, late = count_iterations(phases[begin:stop], 3, place)
        if late:
            numbers[since_mark:begin] += 1
        marks = np.flatnonzero(phases[:stop] >= 0)
        since_mark = int(marks[-1]) + 1 if len(marks) else 0
    assert numbers.tolist() == whole.tolist()
    assert place == end


_SHARDED = "pppRpppRppRppRn"
"""Parameters of each microbatch gathered, gradients reduced, one norm: a step of FSDP with two microbatches."""


def _lost_before(text: str) -> list[int]:
    letters = np.array(list(text))
    is_first = (letters == "p") & (np.concatenate([["n"], letters[:-1]]) != "p")
    found: list[int] = lost_marks(letters == "n", letters == "R", is_first, 4).tolist()
    return found


def test_a_lost_mark_is_missed_where_one_stretch_reduces_what_two_do() -> None:
    assert not any(_lost_before(_SHARDED * 5))
    length = len(_SHARDED)
    lost = _SHARDED * 2 + _SHARDED[:-1] + _SHARDED * 2
    assert _lost_before(lost) == [0] * (3 * length - 1) + [1] * (2 * length)
    twice = _SHARDED + 2 * _SHARDED[:-1] + _SHARDED
    assert _lost_before(twice) == [0] * (2 * length - 1) + [1] * (length - 1) + [2] * length


def test_evaluation_between_two_marks_is_no_lost_mark() -> None:
    assert not any(_lost_before(_SHARDED * 2 + "p" * 40 + _SHARDED * 2))


def test_a_lost_mark_is_missed_although_reductions_are_lost_as_well() -> None:
    step = _SHARDED[:-1].replace("ppRppR", "ppppR", 1)
    lost = _SHARDED + step + _SHARDED
    assert _lost_before(lost) == [0] * (len(_SHARDED) + len(step)) + [1] * len(_SHARDED)
