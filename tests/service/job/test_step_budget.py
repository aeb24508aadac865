"""Where the time of a step goes: sums to the nanosecond, and the bubble of pipelines."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope.offline import run_offline
from ncclscope_service.export.directory import write_run
from ncclscope_service.job.step_budget import Part, Segments, budget
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import SimulationConfig, write

PARTS = len(Part)
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
    write(SimulationConfig(iterations=8, profiled=(1, 7), **options), job)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("stages", [2, 4])
def test_the_bubble_of_a_pipeline_is_what_its_schedule_says(tmp_path: Path, stages: int) -> None:
    """Simulated stages are alike, so nearly all that they wait is bubble: (p - 1) / m of their work."""
    rows = steps_of(tmp_path, nodes=stages, gpus=1, tp=1, pp=stages, dp=1)
    bubble, waits = sums(rows, "bubble"), sums(rows, "bubble", "exposed_wait", "imbalance")
    assert bubble >= 0.98 * waits
    assert sums(rows, "imbalance") <= 0.02 * waits


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
