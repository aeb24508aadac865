"""Calls whose lines were lost are put in where the program has them, and nowhere else."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ncclscope_service.align.lost_calls import Filled, LostCalls
from ncclscope_service.columns import row_ops
from ncclscope_wire.batch import Columns

_ROW = np.dtype([("text", "<i4"), ("nth", "<i8")])
_STEP = [*([1, 2, 3, 1, 2, 4] * 4), 5, 6, 7, 7, 8, 9]


def _rows(texts: list[int]) -> Columns:
    rows = np.zeros(len(texts), _ROW)
    rows["text"], rows["nth"] = texts, np.arange(len(texts))
    return rows


def _filled(rows: Columns) -> Filled:
    found = LostCalls(("text",)).fill(rows, final=True)
    assert found.amount == len(rows)
    assert found.rows["nth"][~found.is_lost].tolist() == rows["nth"].tolist()
    return found


@pytest.mark.parametrize("lost", [0.0, 0.01, 0.05, 0.1])
def test_lines_that_were_lost_one_by_one_are_where_the_program_has_them(lost: float) -> None:
    whole = _rows(_STEP * 60)
    gone = np.random.default_rng(3).random(len(whole)) < lost
    gone[[0, -1]] = False
    found = _filled(whole[~gone])
    assert found.rows["text"].tolist() == whole["text"].tolist()
    assert np.count_nonzero(found.is_lost) == np.count_nonzero(gone)


def test_a_burst_is_filled_up_to_whole_steps() -> None:
    whole = _rows(_STEP * 40)
    burst = slice(400, 400 + 2 * len(_STEP) + 7)
    found = _filled(np.delete(whole, burst))
    assert np.count_nonzero(found.is_lost) == 7


_FORWARD, _BACKWARD = list(range(20, 30)), list(range(40, 52))


@pytest.mark.parametrize(
    ("step", "evaluated"),
    [
        pytest.param(_FORWARD + _BACKWARD, _FORWARD, id="forward only"),
        pytest.param([*_FORWARD, *((_FORWARD + _BACKWARD) * 5), *_BACKWARD, 60], _FORWARD * 6, id="pipeline"),
    ],
)
def test_an_evaluation_that_goes_forward_only_has_lost_nothing(step: list[int], evaluated: list[int]) -> None:
    whole = _rows((step * 50 + evaluated * 12) * 3 + step * 10)
    assert not _filled(whole).is_lost.any()
    calls, waiting, amount = LostCalls(("text",)), whole[:0], 0
    for begin in range(0, len(whole), 50):
        waiting = row_ops.concat([waiting, whole[begin : begin + 50]])
        found = calls.fill(waiting, final=False)
        assert not found.is_lost.any()
        amount, waiting = amount + found.amount, waiting[found.amount :]
    assert len(waiting) < 2 * len(step) + 100


@pytest.mark.parametrize("ahead", [0, 1])
def test_steps_of_more_microbatches_have_lost_nothing(ahead: int) -> None:
    def step(microbatches: int) -> list[int]:
        steady = (_FORWARD + _BACKWARD) * (microbatches - ahead)
        return [*(_FORWARD * ahead), *steady, *(_BACKWARD * ahead), 60, 61, 62]

    whole = _rows(step(4) * 60 + step(6) * 60 + step(8) * 60)
    assert not _filled(whole).is_lost.any()


def test_what_an_evaluation_lost_itself_is_still_put_in() -> None:
    whole = _rows((_FORWARD + _BACKWARD) * 50 + _FORWARD * 12 + (_FORWARD + _BACKWARD) * 10)
    gone = [1100 + 10 * nth + nth % 8 + 1 for nth in range(0, 12, 3)]
    assert _filled(np.delete(whole, gone)).rows["text"].tolist() == whole["text"].tolist()


@pytest.mark.parametrize(("microbatches", "lost"), [(8, 0.0), (8, 0.01), (40, 0.01)])
def test_calls_at_the_end_of_a_step_are_of_the_program_however_many_microbatches_it_has(
    microbatches: int, lost: float
) -> None:
    """The first calls are those of microbatches alone, which are a program too: lost ones are counted afterwards."""
    end = [60, 61, 62, 63, 64]
    whole = _rows(((_FORWARD + _BACKWARD) * microbatches + end) * (1000 // microbatches))
    gone = np.random.default_rng(microbatches).random(len(whole)) < lost
    gone[[0, -1]] = False
    calls, waiting = LostCalls(("text",)), whole[:0]
    found = Counter[int]()
    for begin in range(0, len(whole), 100):
        waiting = row_ops.concat([waiting, whole[begin : begin + 100][~gone[begin : begin + 100]]])
        filled = calls.fill(waiting, final=begin + 100 >= len(whole))
        found.update(filled.rows["text"][filled.is_lost].tolist())
        found.update(int(each["text"][0]) for each in filled.missed)
        waiting = waiting[filled.amount :]
    assert calls.step == len((_FORWARD + _BACKWARD) * microbatches + end)
    assert sum(abs(found[text] - np.count_nonzero(whole["text"][gone] == text)) for text in end) == 0
    assert abs(sum(found.values()) - np.count_nonzero(gone)) <= 0.1 * np.count_nonzero(gone)


def test_what_the_program_does_not_call_is_left_where_it_is() -> None:
    texts = _STEP * 40
    texts[500:500] = [11, 12, 1, 13]
    assert not _filled(_rows(texts)).is_lost.any()


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(np.random.default_rng(1).integers(0, 5, 3000).tolist(), id="at random"),
        pytest.param([7] * 3000, id="one call"),
        pytest.param([text for step in range(60) for text in (*_STEP, *([20, 21] if step % 2 else []))], id="optional"),
        pytest.param(
            [text for step in range(60) for text in (*_STEP, *((20, 21) if step % 3 else (21, 20)))], id="order changes"
        ),
        pytest.param(list(range(3000)), id="never again"),
    ],
)
def test_a_program_whose_steps_differ_has_lost_nothing(texts: list[int]) -> None:
    assert not _filled(_rows(texts)).is_lost.any()


def test_calls_of_unknown_text_are_left_as_they_are() -> None:
    whole = _rows(_STEP * 40)
    whole["text"] = -1
    assert not _filled(np.delete(whole, 300)).is_lost.any()


def test_another_program_is_learnt_where_the_first_one_has_ended() -> None:
    other = [text + 20 for text in reversed(_STEP)]
    whole = _rows(_STEP * 40 + other * 80)
    gone = np.arange(2500, len(whole), 40)
    found = _filled(np.delete(whole, gone))
    assert np.count_nonzero(found.is_lost) == len(gone)


def test_portions_make_no_difference() -> None:
    draw = np.random.default_rng(5)
    whole = _rows(_STEP * 60 + [text + 20 for text in _STEP] * 60)
    rows = whole[draw.random(len(whole)) > 0.03]
    once = LostCalls(("text",)).fill(rows, final=True)
    calls, parts, begin = LostCalls(("text",)), [], 0
    for end in [*np.sort(draw.integers(0, len(rows), 60)).tolist(), len(rows)]:
        part = calls.fill(rows[begin:end], final=end == len(rows))
        parts.append(part)
        begin += part.amount
    assert begin == len(rows)
    assert row_ops.concat([each.rows for each in parts])["nth"].tolist() == once.rows["nth"].tolist()
    assert np.concatenate([each.is_lost for each in parts]).tolist() == once.is_lost.tolist()


def test_the_next_call_that_is_there_is_told() -> None:
    whole = _rows(_STEP * 40)
    found = _filled(np.delete(whole, [301, 302, 400]))
    assert found.rows["nth"][found.following].tolist() == [303, 303, 401]
    assert (~found.is_lost[found.following]).all()
