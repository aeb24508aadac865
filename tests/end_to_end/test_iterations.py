"""Iterations are found without marks, and operation counts follow from the program exactly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ncclscope.offline import run_offline
from ncclscope.simulate import configuration_of
from ncclscope_service.export.directory import write_run
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import write

Row = dict[str, Any]
Counts = dict[tuple[str, str], int]

_LAYERS, _MICROBATCHES = 2, 4


def _rows(folder: Path, *arguments: str, iterations: int = 6) -> tuple[list[Row], dict[tuple[str, int], Row]]:
    """What the analysis says of each operation, and the truth by log line."""
    job = folder / "job"
    write(configuration_of(("--out", str(job), "--iterations", str(iterations), *arguments)), job)
    run = run_offline([job], job="default", settings=PipelineSettings())
    write_run(run.pipeline.store, folder / "out")
    truth: list[Row] = pq.read_table(job / "truth" / "operations.parquet").to_pylist()
    found: list[Row] = pq.read_table(folder / "out" / "operations.parquet").to_pylist()
    return found, {(Path(row["log_file"]).name, row["log_line"]): row for row in truth}


def _agreement(found: list[Row], truth: dict[tuple[str, int], Row]) -> float:
    same = [row["iteration"] == truth[Path(row["log_file"]).name, row["log_line"]]["iteration"] for row in found]
    return float(np.mean(same))


_SHAPES = {
    "DP4": "--nodes 1 --tp 1 --pp 1",
    "ZeRO-1": "--nodes 1 --tp 1 --pp 1 --zero1",
    "FSDP4": "--nodes 1 --tp 1 --pp 1 --fsdp",
    "PP4": "--nodes 1 --tp 1 --pp 4",
    "TP4, one microbatch": "--nodes 1 --tp 4 --pp 1 --microbatches 1",
    "EP4": "--nodes 1 --tp 1 --pp 1 --ep 4",
    "CP4": "--nodes 1 --tp 1 --pp 1 --cp 4",
    "TP2 PP2 DP2": "--tp 2 --pp 2",
    "without stamps": "--nodes 1 --tp 2 --pp 1 --nccl 2.21",
}


@pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES.keys())
def test_the_period_numbers_iterations_where_no_mark_does(shape: str, tmp_path: Path) -> None:
    assert _agreement(*_rows(tmp_path, "--capture", "none", *shape.split())) == 1.0


@pytest.mark.slow
def test_captures_of_a_part_lend_their_numbers_to_the_rest(tmp_path: Path) -> None:
    assert _agreement(*_rows(tmp_path, "--capture", "duty:0.4", iterations=12)) == 1.0


@pytest.mark.slow
def test_lost_lines_do_not_shift_the_numbers(tmp_path: Path) -> None:
    arguments = ("--capture", "none", "--fault", "drop_lines:ratio=0.1")
    assert _agreement(*_rows(tmp_path, *arguments, iterations=12)) > 0.99


def _forms() -> dict[str, tuple[str, dict[int, Counts]]]:
    """Shape and, by rank, operations of each kind in one iteration, as the program's loops say."""
    blocks = 2 * _LAYERS * _MICROBATCHES  # attention and MLP, in each microbatch
    world: Counts = {("WORLD", "AllReduce"): 1}
    gradients: Counts = {("DP", "AllReduce"): _LAYERS}
    reading: Counts = {("TP", "Broadcast"): _MICROBATCHES}
    loss: Counts = {("TP", "AllReduce"): 3 * _MICROBATCHES}
    sequence: Counts = {("TP", "AllGather"): 2 * blocks, ("TP", "ReduceScatter"): 2 * blocks}
    alone: Counts = {("None", "AllReduce"): _LAYERS}  # gradients in a communicator of one rank
    embedding: Counts = {("EMBEDDING", "AllReduce"): 1}
    ends: Counts = {("PP", "Send"): _MICROBATCHES, ("PP", "Recv"): _MICROBATCHES}
    middle: Counts = {("PP", "Send"): 2 * _MICROBATCHES, ("PP", "Recv"): 2 * _MICROBATCHES}
    experts: Counts = {("EP", "AlltoAll"): 2 * blocks}
    return {
        "DP4": ("--nodes 1 --tp 1 --pp 1", dict.fromkeys(range(4), world | gradients)),
        "TP4": ("--nodes 1 --tp 4 --pp 1", dict.fromkeys(range(4), world | alone | reading | loss | sequence)),
        "EP4": ("--nodes 1 --tp 1 --pp 1 --ep 4", dict.fromkeys(range(4), world | gradients | experts)),
        "PP4": (
            "--nodes 1 --tp 1 --pp 4",
            {stage: world | alone | (middle if stage in {1, 2} else ends | embedding) for stage in range(4)},
        ),
        "TP2 PP2 DP2": (
            "--tp 2 --pp 2",
            {
                rank: world | gradients | ends | embedding | reading | sequence | (loss if rank >= 4 else {})
                for rank in range(8)
            },
        ),
    }


@pytest.mark.parametrize("shape", _forms())
def test_operation_counts_of_each_rank_and_iteration_are_those_of_the_program(shape: str, tmp_path: Path) -> None:
    arguments, expected = _forms()[shape]
    found, _ = _rows(tmp_path, "--capture", "none", *arguments.split(), iterations=4)
    counted: Counter[tuple[int, int, str, str]] = Counter(
        (row["rank"], row["iteration"], str(row["parallelism"]), row["op"]) for row in found
    )
    assert counted == {
        (rank, iteration, kind, op): amount
        for rank, counts in expected.items()
        for iteration in range(4)
        for (kind, op), amount in counts.items()
    }
    table: list[Row] = pq.read_table(tmp_path / "out" / "iterations.parquet").to_pylist()
    totals = {(row["rank"], row["iteration"]): row["operations"] for row in table}
    assert totals == {(rank, step): sum(counts.values()) for rank, counts in expected.items() for step in range(4)}
    assert {row["iteration_by"] for row in table} == {"period"}


@pytest.mark.slow
def test_kernels_tell_how_much_of_an_iteration_is_communication(tmp_path: Path) -> None:
    _, truth = _rows(tmp_path, "--tp", "2", "--pp", "2", iterations=4)
    table: list[Row] = pq.read_table(tmp_path / "out" / "iterations.parquet").to_pylist()
    for row in table:
        spans = {
            (each["start_ns"], each["end_ns"])
            for each in truth.values()
            if each["rank"] == row["rank"] and each["iteration"] == row["iteration"] and each["start_ns"] is not None
        }
        covered = np.unique(np.concatenate([np.arange(start // 1000, end // 1000) for start, end in spans]))
        assert row["communication_ns"] == pytest.approx(1000 * len(covered), rel=0.01)
        assert 0 < row["exposed_ns"] <= row["communication_ns"]
