"""Where the time of a step goes: sums to the nanosecond, and the bubble of pipelines."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from benchmarks.models.budget import true_bubble_ns
from hypothesis import given
from hypothesis import strategies as st

from ncclscope.offline import run_offline
from ncclscope_service.export.directory import write_run
from ncclscope_service.job.step_budget import Segments, budget
from ncclscope_service.job.step_parts import Part
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import SimulationConfig, parse_faults, write

PARTS = len(Part)
(LATE_BY_10_MS,) = parse_faults(["late_rank:rank=1,ms=10"])
TIMES = st.integers(0, 40)


def segments(spans: list[tuple[int, int, int]]) -> Segments:
    table = np.asarray(spans, np.int64).reshape(-1, 3)
    return Segments(table[:, 0], table[:, 0] + table[:, 1], table[:, 2])


def nanosecond_by_nanosecond(begin: int, end: int, computing: Segments, communication: Segments) -> dict[int, Fraction]:
    """What each label has of the step, with equal shares of every nanosecond."""
    found: dict[int, Fraction] = defaultdict(Fraction)
    for at in range(begin, end):
        busy = bool(((computing.start <= at) & (at < computing.end)).any())
        running = communication.label[(communication.start <= at) & (at < communication.end)].tolist()
        if not running:
            found[Part.COMPUTATION if busy else Part.IDLE] += 1
        for label in running:
            found[label // PARTS * PARTS + Part.HIDDEN if busy else label] += Fraction(1, len(running))
    return found


LABELS = st.sampled_from([PARTS + Part.EXPOSED_WAIT, PARTS + Part.EXPOSED_TRANSFER, 2 * PARTS + Part.EXPOSED])


@given(
    st.lists(st.tuples(TIMES, st.integers(0, 9), st.just(0)), max_size=5),
    st.lists(st.tuples(TIMES, st.integers(0, 9), LABELS), max_size=6),
)
def test_parts_are_what_counting_every_nanosecond_gives_and_sum_up_exactly(
    busy: list[tuple[int, int, int]], running: list[tuple[int, int, int]]
) -> None:
    computing, communication = segments(busy), segments(running)
    borders = np.asarray([[3, 17], [17, 31]], np.int64)
    labels, amounts = budget(borders[:, 0], borders[:, 1], computing, communication)
    assert amounts.sum(axis=1).tolist() == [14, 14]
    for row, (begin, end) in zip(amounts, borders.tolist(), strict=True):
        expected = nanosecond_by_nanosecond(begin, end, computing, communication)
        for label, amount in zip(labels.tolist(), row.tolist(), strict=True):
            assert abs(amount - expected[label]) < 14  # a share of a stretch is rounded to whole ns
            if len(running) <= 1:
                assert amount == expected[label]


def test_kernels_at_once_share_a_stretch_in_whole_nanoseconds() -> None:
    wait, transfer = PARTS + Part.EXPOSED_WAIT, 2 * PARTS + Part.EXPOSED_TRANSFER
    both = segments([(0, 7, wait), (0, 7, transfer)])
    labels, amounts = budget(np.asarray([0]), np.asarray([7]), segments([]), both)
    spent = dict(zip(labels.tolist(), amounts[0].tolist(), strict=True))
    assert spent[wait] + spent[transfer] == 7
    assert abs(spent[wait] - spent[transfer]) == 1


def steps_of(folder: Path, **options: object) -> list[dict[str, object]]:
    job = folder / "job"
    write(SimulationConfig(**{"iterations": 8, "profiled": (1, 7), **options}), job)  # type: ignore[arg-type]
    run = run_offline([job / "logs", job / "nsys"], job="job", settings=PipelineSettings())
    write_run(run.pipeline.store, folder / "out")
    table: list[dict[str, object]] = pq.read_table(folder / "out" / "step_budget.parquet").to_pylist()
    return table


def sums(rows: list[dict[str, object]], *names: str) -> int:
    return sum(int(str(row["part_ns"])) for row in rows if row["part"] in names)


def test_the_parts_of_every_step_of_a_job_sum_up_to_it(tmp_path: Path) -> None:
    rows = steps_of(tmp_path, nodes=2, gpus=2, tp=2, pp=1, dp=2)
    whole: dict[tuple[object, ...], int] = defaultdict(int)
    for row in rows:
        assert int(str(row["part_ns"])) > 0
        whole[row["host"], row["pid"], row["iteration"], row["duration_ns"]] += int(str(row["part_ns"]))
    assert len(whole) == len({key[:3] for key in whole}) == 4 * 7
    assert all(key[3] == total for key, total in whole.items())
    assert {row["parallelism"] for row in rows if row["part"] == "exposed_transfer"} >= {"TP", "DP"}
    assert sums(rows, "bubble", "imbalance") == 0


ALONE = {"tp": 1, "dp": 1, "nodes": 1}


@pytest.mark.parametrize(
    "options",
    [
        {**ALONE, "nodes": 2, "gpus": 1, "pp": 2},
        {**ALONE, "nodes": 4, "gpus": 1, "pp": 4, "hidden": 8192, "sequence": 8192},
        {**ALONE, "gpus": 4, "pp": 4, "interleave": 2},
        {**ALONE, "gpus": 2, "pp": 2, "microbatches": 8, "interleave": 2},
    ],
    ids=["two", "long_messages", "chunks", "two_with_chunks"],
)
def test_the_bubble_of_a_pipeline_is_what_its_stages_wait_without_noise(
    tmp_path: Path, options: dict[str, object]
) -> None:
    rows = steps_of(tmp_path, **options)
    config = SimulationConfig(iterations=4, compute_cv=0.0, bandwidth_cv=0.0, **options)  # type: ignore[arg-type]
    steps = len({(row["rank"], row["iteration"]) for row in rows})
    assert sums(rows, "bubble") / steps == pytest.approx(true_bubble_ns(config, tmp_path / "truth"), rel=0.02)
    in_the_pipeline = [row for row in rows if row["parallelism"] in ("PP", "EMBEDDING", "WORLD")]
    assert sums(in_the_pipeline, "exposed_wait") <= 0.04 * sums(rows, "bubble")


def test_waiting_for_a_rank_that_a_finding_names_is_late(tmp_path: Path) -> None:
    rows = steps_of(
        tmp_path, nodes=1, gpus=2, tp=2, pp=1, dp=1, iterations=30, profiled=(1, 29), faults=(LATE_BY_10_MS,)
    )
    late = [row for row in rows if row["part"] == "late" and row["parallelism"] == "TP"]
    assert {row["rank"] for row in late} == {0}
    assert len(late) >= 20  # steps; the finding says when it began
    assert sums(late, "late") / len(late) == pytest.approx(11_000_000, rel=0.15)  # 10 ms, and jitter


def graph_steps(folder: Path, trace: str) -> list[dict[str, object]]:
    write(
        SimulationConfig(nodes=1, gpus=2, iterations=8, tp=2, pp=1, dp=1, cuda_graphs=2, cuda_graph_trace=trace), folder
    )
    run = run_offline([folder / "logs", folder / "nsys"], job="job", settings=PipelineSettings())
    write_run(run.pipeline.store, folder / "out")
    table: list[dict[str, object]] = pq.read_table(folder / "out" / "step_budget.parquet").to_pylist()
    return table


def test_replays_of_graphs_communicate_as_the_steps_before_them(tmp_path: Path) -> None:
    rows = [row for row in graph_steps(tmp_path, "node") if row["parallelism"] == "TP"]
    before, replayed = (
        sums([row for row in rows if row["iteration"] == number], "exposed_transfer", "hidden") for number in (1, 5)
    )
    assert replayed == pytest.approx(before, rel=0.05)


def test_graphs_that_were_recorded_as_wholes_leave_their_steps_unknown(tmp_path: Path) -> None:
    assert graph_steps(tmp_path, "graph") == []
