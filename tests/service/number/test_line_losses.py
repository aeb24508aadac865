"""Lost lines are counted by the program of their process: one by one, by the hundred, and in whole steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.alignment.lost_lines import Loss, Tally, follow, tally, true_operations

from ncclscope_service.number.across_ranks import STEPS
from ncclscope_simulator import SimulationConfig, write
from ncclscope_simulator.faults import Fault


def _counted(folder: Path, loss: Loss, *, stamps: bool, **more: Any) -> tuple[Tally, int]:
    """Of a job of 8 ranks; and how many lost lines its program showed."""
    wanted: dict[str, Any] = {"gpus": 4, "tp": 4, "pp": 1, "dp": 2, "layers": 2, "step_seconds": 0.5, "iterations": 30}
    write(SimulationConfig(**{**wanted, **more}, timestamps=stamps), folder)
    rows = true_operations(folder)
    found = follow(folder, loss, rows)
    return tally(found, rows), found.store.numbers_healed["job", STEPS]


@pytest.mark.parametrize("stamps", [True, False])
def test_lines_lost_by_the_hundred_count_although_whole_steps_are_among_them(tmp_path: Path, stamps: bool) -> None:
    counted, healed = _counted(tmp_path, Loss("bursts", bursts=0.02), stamps=stamps, capture="none")
    assert healed > 100
    assert counted.numbered >= 0.99 * counted.lines
    assert not counted.findings


@pytest.mark.parametrize("stamps", [True, False])
def test_steps_of_which_nothing_was_written_count_as_the_other_processes_made_them(
    tmp_path: Path, stamps: bool
) -> None:
    counted, healed = _counted(tmp_path, Loss("silent", silent_ns=4_000_000_000), stamps=stamps, capture="none")
    assert healed > 100
    assert counted.numbered >= 0.99 * counted.lines
    assert not counted.findings


@pytest.mark.parametrize("stamps", [True, False])
def test_what_waits_is_numbered_anew_when_a_program_is_learnt(tmp_path: Path, stamps: bool) -> None:
    counted, _ = _counted(tmp_path, Loss("5 %", lost=0.05), stamps=stamps, step_seconds=1.0, capture="duty:0.4")
    assert counted.measured >= 0.95 * counted.possible
    assert counted.wrong <= 0.001 * counted.judged
    assert counted.numbered >= 0.8 * counted.lines


@pytest.mark.parametrize("apart_ms", [80.0, 3000.0])
def test_a_pause_of_all_is_none_although_clocks_are_apart(tmp_path: Path, apart_ms: float) -> None:
    pauses = tuple(Fault("pause", first=first, seconds=0.5) for first in (12, 20))
    wanted: dict[str, Any] = {"step_seconds": 0.1, "clock_offset_ms": apart_ms, "seed": 3, "capture": "none"}
    counted, healed = _counted(tmp_path, Loss("none"), stamps=True, faults=pauses, **wanted)
    assert healed == 0
    assert counted.numbered == counted.lines


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("pp", [1, 2])
def test_an_evaluation_lost_nothing(tmp_path: Path, pp: int, steps: int) -> None:
    wanted: dict[str, Any] = {"tp": 4 // pp, "pp": pp, "evaluate_every": 10, "evaluate_steps": steps}
    counted, healed = _counted(tmp_path, Loss("none"), stamps=True, capture="none", **wanted)
    assert healed == 0
    assert counted.numbered == counted.lines


@pytest.mark.slow
def test_a_pipeline_of_many_microbatches_is_counted_by_its_whole_steps(tmp_path: Path) -> None:
    """Its first lines are those of microbatches, which leave out calls as it fills and drains."""
    wanted: dict[str, Any] = {"tp": 1, "pp": 4, "dp": 2, "layers": 8, "microbatches": 32, "step_seconds": 1.0}
    counted, _ = _counted(tmp_path, Loss("1 %", lost=0.01), stamps=True, capture="none", **wanted)
    assert counted.numbered >= 0.99 * counted.lines


@pytest.mark.slow
def test_ranks_without_a_program_take_their_numbers_from_those_with_one(tmp_path: Path) -> None:
    fsdp: dict[str, Any] = {"tp": 1, "dp": 8, "fsdp": True, "layers": 4, "step_seconds": 1.0}
    counted, _ = _counted(tmp_path, Loss("5 %", lost=0.05), stamps=True, capture="duty:0.4", **fsdp)
    assert counted.measured >= 0.95 * counted.possible
    assert counted.numbered >= 0.99 * counted.lines


@pytest.mark.slow
def test_steps_that_hosts_with_clocks_apart_paused_in_are_not_lost_with_lines_beside(tmp_path: Path) -> None:
    pauses = tuple(Fault("pause", first=first, seconds=0.5) for first in (12, 16, 20, 24))
    wanted: dict[str, Any] = {"step_seconds": 0.1, "clock_offset_ms": 300.0, "seed": 3, "capture": "none"}
    counted, _ = _counted(tmp_path, Loss("5 %", lost=0.05), stamps=True, faults=pauses, **wanted)
    assert counted.numbered >= 0.99 * counted.lines


def test_a_job_that_lost_nothing_has_no_holes(tmp_path: Path) -> None:
    counted, healed = _counted(tmp_path, Loss("none"), stamps=True, capture="none")
    assert healed == 0
    assert counted.numbered == counted.lines
