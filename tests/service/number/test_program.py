"""Lines of logs without kernels are placed in their step by what the steps before called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.alignment.lost_lines import Loss, follow, tally, true_operations

from ncclscope_service.number.across_ranks import CALL
from ncclscope_service.number.program import Program
from ncclscope_simulator import SimulationConfig, write
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

_PROGRAM = (7, 7, 7, 3, 7, 7, 4, 4)
"""Templates of the lines of one step."""
_STEPS = 8


def _rank(lost: tuple[int, ...] = (), others: dict[int, int] | None = None, steps: int = _STEPS) -> Columns:
    """One rank's calls without the lines of these collectives; `others`: what it calls in place of some."""
    kept = np.setdiff1d(np.arange(steps * len(_PROGRAM)), lost)
    templates = np.resize(_PROGRAM, steps * len(_PROGRAM))
    for at, template in (others or {}).items():
        templates[at] = template
    calls = np.zeros(len(kept), CALL)
    calls["id"], calls["template"], calls["step"] = kept, templates[kept], kept // len(_PROGRAM)
    calls["is_counted"] = True
    for name in ("start_ns", "end_ns", "stamp_ns"):
        calls[name] = NO_TIME_NS
    return calls


def _placed(calls: dict[int, Columns]) -> list[dict[int, list[int]]]:
    """By step: the collectives of each rank's lines, as far as steps could be placed one after the other."""
    program = Program()
    program.learn(calls)
    steps: list[dict[int, list[int]]] = []
    left = dict(calls)
    while any(len(own) for own in left.values()):
        found = program.place(left, is_end=True)
        if found is None:
            break
        steps.append({rank: own.tolist() for rank, own in found.items()})
        program.note({rank: left[rank][: len(own)] for rank, own in found.items()})
        left = {rank: own[len(found.get(rank, ())) :] for rank, own in left.items()}
    return steps


def test_a_line_that_was_lost_among_others_is_placed_by_the_steps_around() -> None:
    lost = 3 * len(_PROGRAM) + 3
    steps = _placed({0: _rank(), 1: _rank((lost,))})
    assert len(steps) == _STEPS
    assert steps[3] == {0: list(range(8)), 1: [0, 1, 2, 4, 5, 6, 7]}
    assert all(own == list(range(8)) for nth, step in enumerate(steps) if nth != 3 for own in step.values())


def test_each_rank_is_placed_by_its_own_steps_even_if_all_lost_lines_of_one() -> None:
    begin = 4 * len(_PROGRAM)
    steps = _placed({0: _rank((begin + 3,)), 1: _rank((begin + 6,)), 2: _rank((begin + 2,))})
    assert steps[4] == {0: [0, 1, 2, 4, 5, 6, 7], 1: [0, 1, 2, 3, 4, 5, 6], 2: [0, 1, 3, 4, 5, 6, 7]}


def test_a_rank_that_calls_what_no_step_called_is_not_placed() -> None:
    other = 5 * len(_PROGRAM) + 2
    steps = _placed({0: _rank(), 1: _rank(others={other: 99})})
    assert len(steps) == 5


def test_nothing_is_lost_where_a_rank_called_other_steps_otherwise() -> None:
    program = Program()
    assert not program.learn({0: _rank(), 1: _rank()})
    assert not program.learn({0: _rank(others={20: 99}), 1: _rank(others={20: 99})})
    assert program.learn({0: _rank(), 1: _rank((19,))})


def test_a_step_is_waited_for_until_all_ranks_are_past_it() -> None:
    program = Program()
    program.learn({0: _rank(), 1: _rank()})
    calls = {0: _rank()[: len(_PROGRAM) + 4], 1: _rank()[:6]}
    assert program.place(calls, is_end=False) is None
    assert program.waits
    assert program.place(calls, is_end=True) is not None


@pytest.mark.parametrize("stamps", [True, False])
@pytest.mark.parametrize(
    "shape", [{"gpus": 4, "tp": 4, "dp": 2}, {"fsdp": True}, {"ep": 2}], ids=["tensors", "fsdp", "experts"]
)
def test_collectives_of_logs_alone_have_their_true_numbers_although_lines_were_lost(
    tmp_path: Path, shape: dict[str, Any], stamps: bool
) -> None:
    wanted: dict[str, Any] = {"gpus": 2, "tp": 1, "pp": 1, "dp": 4, "layers": 2, "step_seconds": 0.5, **shape}
    write(SimulationConfig(**wanted, iterations=16, timestamps=stamps, capture="none"), tmp_path)
    rows = true_operations(tmp_path)
    counted = tally(follow(tmp_path, Loss("lost", lost=0.01), rows), rows)
    assert counted.lines >= 500
    assert counted.numbered >= 0.99 * counted.lines
    assert not counted.findings
