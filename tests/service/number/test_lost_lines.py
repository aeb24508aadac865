"""Jobs whose logs lost lines, followed to their end: what is measured of them is what ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.alignment.lost_lines import Followed, Loss, Tally, follow, tally, true_operations

from ncclscope_service.number import lost_lines
from ncclscope_service.store.records import FindingKind
from ncclscope_service.store.rows import Match, NumberState
from ncclscope_simulator import SimulationConfig, write
from ncclscope_simulator.faults import Fault

_SHAPES: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "experts": {"ep": 2},
    "pipeline": {"pp": 2, "dp": 2, "microbatches": 4},
    "tensors": {"gpus": 4, "tp": 4, "dp": 2},
    "both": {"gpus": 4, "tp": 2, "pp": 2, "dp": 2, "layers": 4},
}


def _followed(
    folder: Path, loss: float, shape: str, *, stamps: bool, iterations: int = 8, **more: Any
) -> tuple[Followed, Tally]:
    wanted: dict[str, Any] = {"gpus": 2, "tp": 1, "pp": 1, "dp": 4, "layers": 2, "step_seconds": 0.5, **more}
    config = SimulationConfig(**{**wanted, **_SHAPES[shape]}, iterations=iterations, timestamps=stamps)
    write(config, folder)
    rows = true_operations(folder)
    found = follow(folder, Loss("lost", lost=loss), rows)
    return found, tally(found, rows)


@pytest.mark.parametrize("shape", ["fsdp", "experts"])
@pytest.mark.parametrize("stamps", [True, False])
def test_collectives_of_which_a_line_was_lost_are_measured_by_their_kernels(
    tmp_path: Path, shape: str, stamps: bool
) -> None:
    _, counted = _followed(tmp_path, 0.05, shape, stamps=stamps)
    assert counted.possible >= 200
    assert counted.measured >= 0.99 * counted.possible
    assert counted.wrong == 0


@pytest.mark.slow
def test_captures_without_stamps_find_their_place_although_lines_between_them_were_lost(tmp_path: Path) -> None:
    _, counted = _followed(
        tmp_path, 0.01, "tensors", stamps=False, iterations=20, layers=4, step_seconds=1.0, capture="duty:0.4"
    )
    assert counted.measured >= 0.95 * counted.possible
    assert counted.wrong <= 0.001 * counted.judged


@pytest.mark.parametrize("stamps", [True, False])
def test_sends_and_receives_of_which_a_line_was_lost_are_unmeasured_and_no_other(tmp_path: Path, stamps: bool) -> None:
    _, whole = _followed(tmp_path / "whole", 0.0, "pipeline", stamps=stamps)
    assert whole.measured == whole.possible
    _, counted = _followed(tmp_path / "lossy", 0.05, "pipeline", stamps=stamps, iterations=20)
    # Of the Sends and Recvs 10 % lost a line, and with them what one launch ran for the other way.
    assert counted.measured >= 0.85 * counted.possible
    assert counted.wrong == 0


@pytest.mark.parametrize("stamps", [True, False])
def test_sends_and_recvs_have_their_true_numbers_by_logs_alone(tmp_path: Path, stamps: bool) -> None:
    _, counted = _followed(tmp_path, 0.02, "both", stamps=stamps, iterations=16, capture="none")
    assert counted.numbered == counted.lines > 10_000


def test_a_lost_line_gives_a_row_with_the_operation_of_its_neighbours(tmp_path: Path) -> None:
    # An AlltoAll runs in a kernel that Sends and Recvs share.
    found, counted = _followed(tmp_path, 0.05, "experts", stamps=True)
    rows = found.store.operations.rows
    lost = np.flatnonzero(rows["match"] == Match.LINE_LOST)
    ops = found.store.operation_templates.take(rows["template"][lost], "op")["op"]
    assert len(lost) > 10
    assert len(np.unique(ops)) == 2
    assert counted.numbered == counted.lines


def test_which_line_is_of_a_kernel_may_be_a_guess_but_not_its_number(tmp_path: Path) -> None:
    # Of three steps no program is learnt.
    found, counted = _followed(tmp_path, 0.05, "experts", stamps=False, iterations=3)
    states = found.store.operations.rows["number_state"]
    assert np.count_nonzero(states == NumberState.LAUNCHED) > 0
    assert counted.mispaired > 0
    assert counted.wrong == 0


def test_lines_without_stamps_are_paired_exactly_by_a_program_that_repeats_itself(tmp_path: Path) -> None:
    _, counted = _followed(tmp_path, 0.05, "experts", stamps=False, iterations=16)
    assert counted.measured == counted.possible
    assert counted.mispaired == counted.wrong == 0
    assert counted.numbered == counted.lines


@pytest.mark.parametrize(("capture", "lost"), [("full", 0.05), ("none", 0.02)])
def test_the_rank_that_hung_is_named_at_the_end_though_lines_were_lost(
    tmp_path: Path, capture: str, lost: float
) -> None:
    hang = Fault(kind="hang", rank=5, first=14)
    found, _ = _followed(
        tmp_path, lost, "tensors", stamps=True, iterations=18, capture=capture, faults=(hang,), hang_seconds=1.0
    )
    named = [each.ranks for each in found.store.findings if each.kind is FindingKind.HANG and each.until_ns is None]
    assert named == [(5,)]
    assert {each.ranks for each in found.findings.values() if each.kind is FindingKind.HANG} <= {(), (5,)}


def test_of_an_unstamped_log_a_clock_that_was_set_amid_a_capture_is_told(tmp_path: Path) -> None:
    clock_step = Fault(kind="clock_step", node=1, ms=5.0, first=10)
    found, _ = _followed(tmp_path, 0.01, "tensors", stamps=False, iterations=20, faults=(clock_step,))
    named = [each.hosts for each in found.store.findings if each.kind is FindingKind.CLOCK_FAULT]
    assert named == [("node00", "node01")], "of two hosts nothing tells whose clock it was"


@pytest.mark.parametrize(("ms", "is_told"), [(5.0, True), (200.0, False)])
def test_of_an_unstamped_log_a_clock_that_was_set_between_captures_is_told_if_no_other_step_explains_it(
    tmp_path: Path, ms: float, is_told: bool
) -> None:
    clock_step = Fault(kind="clock_step", node=1, ms=ms, first=14)
    settings: dict[str, Any] = {"capture": "duty:0.4", "iterations": 32, "faults": (clock_step,)}
    found, _ = _followed(tmp_path, 0.01, "tensors", stamps=False, **settings)
    own = [each for each in found.store.findings if each.kind is FindingKind.CLOCK_FAULT]
    assert [each.hosts for each in own] == ([("node00", "node01")] if is_told else [])
    sizes = [each.evidence["stepped_ns"] for each in own]
    assert all(isinstance(size, int) and abs(abs(size) - ms * 1e6) < 0.5e6 for size in sizes)


def test_of_a_capture_amid_an_unstamped_job_no_line_before_its_first_is_made_up(tmp_path: Path) -> None:
    config = SimulationConfig(
        gpus=4, tp=4, dp=1, layers=2, step_seconds=0.25, iterations=16, timestamps=False, chunk_seconds=1.0
    )
    write(config, tmp_path)
    for each in (tmp_path / "nsys").rglob("capture_0000.sqlite"):
        each.unlink()
    found = follow(tmp_path, Loss("none"), true_operations(tmp_path))
    rows = found.store.operations.rows
    assert np.count_nonzero(rows["match"] == Match.MATCHED) > 100
    assert np.count_nonzero(rows["match"] == Match.LINE_LOST) == 0
    assert not found.store.numbers_healed


def test_ranks_whose_captures_begin_in_different_steps_of_an_unstamped_job_are_joined_in_the_same(
    tmp_path: Path,
) -> None:
    # The first stage is idle when the captures begin, and the last is in the step before.
    config = SimulationConfig(
        nodes=2, gpus=2, tp=1, pp=2, dp=2, layers=1, microbatches=2, step_seconds=0.1, iterations=50, timestamps=False,
        chunk_seconds=2.06,
    )  # fmt: skip
    write(config, tmp_path)
    for each in (tmp_path / "nsys").rglob("capture_000[01].sqlite"):
        each.unlink()
    rows = true_operations(tmp_path)
    counted = tally(follow(tmp_path, Loss("none"), rows), rows)
    assert counted.measured > 150
    assert counted.wrong <= 0.01 * counted.measured


@pytest.mark.parametrize("stamps", [True, False])
def test_lines_that_are_not_decided_are_found_a_stretch_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stamps: bool
) -> None:
    settings: dict[str, Any] = {"capture": "duty:0.4", "iterations": 16}
    _, at_once = _followed(tmp_path / "at once", 0.05, "tensors", stamps=stamps, **settings)
    monkeypatch.setattr(lost_lines, "_LOOKED_AT_ONCE", 13)
    _, in_stretches = _followed(tmp_path / "in stretches", 0.05, "tensors", stamps=stamps, **settings)
    assert at_once.measured > 0
    assert in_stretches == at_once
