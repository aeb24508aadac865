"""The iteration is found in what a rank calls, whatever repeats inside it and whatever comes between."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclscope_service.job.recurrence import Calls, Cycle, Place, count_iterations, find_cycle, lost_marks, phases_of

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
