"""Simulated jobs: logs and exports in their real formats, with the truth beside them, and how well a tool reads them.

A tool takes the folder of a job (`logs/`, `nsys/`) and says, for each operation line, which kernel ran it: rows with
`log_file`, `log_line` (from 1), `kernel_correlation_id` (null where none) and `confidence`. `ncclscope analyze` writes
these as operations.parquet; any tool that writes such a file can be scored.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from benchmarks.alignment.case import TRUTH, Case, Loss, no_kernels, no_operations, pairs_of
from benchmarks.alignment.score import Score

from ncclscope.offline import OfflineRun, run_offline
from ncclscope_service.export.tables.operations_file import operations_table
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.player import write
from ncclscope_wire.batch import Columns

Row = Mapping[str, Any]
"""A row of a parquet file."""

Place = tuple[str, int]
"""A line: name of its file and number from 1."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a tool says of one operation line."""

    correlation: int | None
    confidence: float
    match: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScore:
    """How well a job was read."""

    score: Score
    rows: Sequence[Row]
    """The truth."""
    not_captured: int
    """Operations that launched a kernel which no capture recorded."""
    said_so: int
    """Of these, those that are said to be `not_covered`."""


@contextmanager
def simulated(config: SimulationConfig) -> Generator[Path, None, None]:
    """The folder of a simulated job, which is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="alignment-") as folder:
        write(config, Path(folder) / "job")
        yield Path(folder) / "job"


def score_simulated(config: SimulationConfig) -> JobScore:
    """Simulates a job, reads it offline as `analyze` does, and scores what was found."""
    with simulated(config) as job:
        run = run_offline([job / "logs", job / "nsys"], job="benchmark", settings=PipelineSettings())
        return score_job(job, answers_of_run(run))


def score_file(job: Path, operations: Path) -> JobScore:
    """Scores what a tool wrote of a job: a parquet file as the head of this module has it."""
    columns = ("log_file", "log_line", "kernel_correlation_id", "confidence", "match")
    known = [name for name in columns if name in pq.read_schema(operations).names]
    return score_job(job, _answers(pq.read_table(operations, columns=known)))


def answers_of_run(run: OfflineRun) -> dict[Place, Answer]:
    """What ncclscope says of each line."""
    operations = run.pipeline.store.operations
    ids = np.arange(operations.first, operations.next_id, dtype=np.int64)
    return _answers(operations_table(run.pipeline.store, ids))


def _answers(table: pa.Table) -> dict[Place, Answer]:
    return {
        (Path(row["log_file"]).name, row["log_line"]): Answer(
            row["kernel_correlation_id"], row.get("confidence") or 1.0, row.get("match") or ""
        )
        for row in table.to_pylist()
        if row["log_line"] is not None
    }


def score_job(job: Path, answers: Mapping[Place, Answer]) -> JobScore:
    """Scores the answers to a job against its truth. Kernels cut by the border of a capture do not count.

    The kernels of a launch that needed several count as one: which of them ran an operation is told nowhere.
    """
    rows: list[Row] = pq.read_table(job / "truth" / "operations.parquet").to_pylist()
    numbers: dict[tuple[str, int, int], int] = {}
    first_of = _first_of_launches(job)
    truth: list[tuple[int, int, int, int]] = []
    found: list[tuple[int, int, float]] = []
    meanings: dict[tuple[object, ...], int] = {}
    not_captured = said_so = 0
    logged: list[int] = []
    for nth, row in enumerate(rows):
        place = (Path(row["log_file"]).name, row["log_line"])
        answer = answers.get(place) if row["log_line"] is not None else None
        correlation = row["kernel_correlation_id"]
        if row["launch_id"] is not None and correlation is None:
            not_captured += 1
            said_so += answer is not None and answer.match == "not_covered"
        if row["kernel_cut"]:
            continue
        if row["log_line"] is not None:
            logged.append(nth)
        meaning = meanings.setdefault((row["comm_id"], row["op"], row["message_bytes"]), len(meanings))
        if correlation is not None:
            key = (row["host"], row["pid"], correlation)
            truth.append((nth, numbers.setdefault(key, len(numbers)), meaning, 0))
        elif row["launch_id"] is not None:
            truth.append((nth, -1 - nth, meaning, 0))
        if answer is not None and answer.correlation is not None:
            key = (row["host"], row["pid"], answer.correlation)
            key = first_of.get(key, key)
            found.append((nth, numbers.setdefault(key, len(numbers)), answer.confidence))
    score = Score()
    score.add(_case(job.name, logged, len(numbers), truth), _pairs(found))
    return JobScore(score=score, rows=rows, not_captured=not_captured, said_so=said_so)


def _first_of_launches(job: Path) -> dict[tuple[str, int, int], tuple[str, int, int]]:
    """The first recorded kernel of the launch of each kernel, of those launches that took several."""
    file = job / "truth" / "plans.parquet"
    rows: list[Row] = pq.read_table(file).to_pylist() if file.exists() else []
    firsts: dict[tuple[str, int, int], tuple[str, int, int]] = {}
    found: dict[tuple[str, int, int], tuple[str, int, int]] = {}
    for row in rows:
        if row["covered"] and not row["lost"]:
            key = (row["host"], row["pid"], row["correlation_id"])
            found[key] = firsts.setdefault((row["host"], row["pid"], row["launch_id"]), key)
    return found


def _case(name: str, logged: list[int], kernels: int, truth: list[tuple[int, int, int, int]]) -> Case:
    """A case of ids only: what the score needs."""
    lines, ran = no_operations(len(logged)), no_kernels(kernels)
    lines["id"], ran["id"] = logged, np.arange(kernels)
    return Case(
        name=name,
        nccl_version="",
        operations=lines,
        kernels=ran,
        truth=np.array(truth, dtype=TRUTH),
        loss=Loss(lines=0.0, kernels=0.0),
        shares=(),
    )


def _pairs(found: list[tuple[int, int, float]]) -> Columns:
    operations, kernels = (np.array([row[at] for row in found], dtype=np.int64) for at in (0, 1))
    return pairs_of(operations, kernels, np.array([row[2] for row in found]))
