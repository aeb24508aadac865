"""How often a job that was killed is called a hang: healthy jobs, cut at random moments, and jobs that did hang.

Each job is read once, as `analyze` reads logs; a kill is all lines up to a moment, by the true clock.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow.parquet as pq
from benchmarks.findings.modes import Mode
from benchmarks.findings.replay import arrivals
from benchmarks.findings.scenarios import NOISE, SHAPES
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.detect.context import Context, group_from_communicator
from ncclscope_service.detect.hang import Hang, hang_at_end, standstill
from ncclscope_service.detect.moments import earlier_counts
from ncclscope_service.detect.progress import progress_of_operations
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.records import Ending, Finding
from ncclscope_service.store.tables import Store
from ncclscope_simulator import SimulationConfig, parse_faults
from ncclscope_wire.batch import Columns

HEADER: Final = """\
| jobs | kills | a hang, stamps | no stamps | hangs | found, stamps | no stamps | live | one named | more | none |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""
_SHAPES: Final = ("8: tp2 pp2 dp2", "8: fsdp", "16: tp4 dp4", "16: ep4 dp16", "32: tp4 pp2 dp4", "8: demo")
_LATE: Final = "late_rank:rank=1,ms=90,from=5"
_RANKS: Final = (5, 0, 2)
_STEPS: Final = 25
_SHORTEST: Final = 0.6
"""Share of the job's time before the first kill: a job of few steps does not tell how often it stands unevenly."""
_LIVE_EVERY: Final = 10
"""Of so many kills one is looked at live, too."""
_SILENT_NS: Final = 150_000_000_000


@dataclass(slots=True)
class Row:
    """How many jobs that were killed, and that hung, were called a hang."""

    kills: int = 0
    kills_timed: int = 0
    kills_counted: int = 0
    hangs: int = 0
    hangs_timed: int = 0
    hangs_counted: int = 0
    live_kills: int = 0
    live_named: list[int] = field(default_factory=lambda: [0, 0, 0])
    """Of these: a hang that names one rank, several, nobody."""


def print_kills(kills: int) -> None:
    """The table, with so many kills of each job."""
    print(HEADER)
    for told, noise, fault in (("jitter 1 %", "plain", ""), ("5 %", "rough", ""), ("one late by 10 %", "plain", _LATE)):
        for shape in _SHAPES:
            row = Row()
            _kill(_config(shape, noise, fault), kills, row)
            for rank in _RANKS:
                _hang(_config(shape, noise, fault, f"hang:rank={rank},at=18"), rank, row)
            cells = (
                row.kills, row.kills_timed, row.kills_counted, row.hangs, row.hangs_timed, row.hangs_counted,
                row.live_kills, *row.live_named,
            )  # fmt: skip
            print(f"| {shape}; {told} | {' | '.join(map(str, cells))} |", flush=True)


def _config(shape: str, noise: str, *faults: str) -> SimulationConfig:
    like = NOISE[noise]
    return replace(
        SHAPES[shape], faults=parse_faults(tuple(filter(None, faults))), iterations=_STEPS, hang_seconds=3.0,
        chunk_seconds=1000.0, microbatches=min(2, SHAPES[shape].microbatches), compute_cv=like.compute_cv,
        bandwidth_cv=like.bandwidth_cv, noise_correlation=like.noise_correlation, seed=1,
    )  # fmt: skip


def _read(config: SimulationConfig, *, stamps: bool = True) -> tuple[Store, dict[str, int]]:
    """The store of a job, and by host how far its clock is behind the true one."""
    pipeline, mode = Pipeline(), Mode("usual", stamps=stamps, is_live=False)
    with tempfile.TemporaryDirectory() as folder:
        for second in arrivals(config, Path(folder) / "job"):
            for host, batch in mode.batches(second, config.start_ns):
                pipeline.ingest_batch(batch, agent=host, session="s", job="job")
        names = ["host", "start_ns", "start_true_ns"]
        truth = pq.read_table(Path(folder) / "job" / "truth" / "operations.parquet", columns=names).to_pylist()
    pipeline.finish(config.start_ns + 1_000_000_000_000)
    behind = {each["host"]: each["start_true_ns"] - each["start_ns"] for each in truth if each["start_ns"] is not None}
    return pipeline.store, behind


def _kill(config: SimulationConfig, kills: int, row: Row) -> None:
    store, behind = _read(config)
    context = _context(store)
    earlier = earlier_counts(store, "job")
    for nth, (before, counts) in enumerate(_cut(store, behind, kills)):
        row.kills += 1
        if nth % _LIVE_EVERY == 0:
            row.live_kills += 1
            for finding in _said_live([*before(), counts], context):
                row.live_named[min(len(finding.ranks), 2) - 1] += 1
        if standstill(counts, context) is not None:
            row.kills_timed += hang_at_end(counts, context, lambda: earlier) is not None
            row.kills_counted += hang_at_end(counts, context) is not None


def _context(store: Store) -> Context:
    listed = [each for each in store.listed_communicators() if each.size > 1]
    return Context(job="job", groups={each.index: group_from_communicator(store, each) for each in listed})


def _said_live(counts: list[Columns], context: Context) -> list[Finding]:
    """The open hang of a job of which these counts came, and nothing for long."""
    detector = Hang()
    for each in counts:
        detector.ingest_progress(each, replace(context, knows_steps=True))
    said = detector.findings(int(counts[-1]["last_ns"].max()) + _SILENT_NS)
    return [finding for finding in said if finding.until_ns is None]


def _cut(store: Store, behind: dict[str, int], kills: int) -> Iterator[tuple[Callable[[], list[Columns]], Columns]]:
    """Counts at random moments, and how to get those of some moments before."""
    rows = store.operations.rows
    operations = rows.take(np.arange(len(rows)))
    logged: NDArray[np.int64] = operations["logged_at_ns"]
    offsets = np.asarray([behind.get(process.host, 0) for process in store.processes], np.int64)
    times = logged + offsets[operations["process"]]
    begin, end = np.quantile(times, (_SHORTEST, 0.99)).tolist()

    def at(moment: float) -> Columns:
        is_written = times <= moment
        return progress_of_operations(store, row_ops.filter_rows(operations, is_written), logged[is_written])[0]

    def before(moment: float) -> list[Columns]:
        return [at(begin), at((begin + moment) / 2)]

    for moment in np.random.default_rng(5).uniform(begin, end, kills):
        yield partial(before, moment), at(moment)


def _hang(config: SimulationConfig, rank: int, row: Row) -> None:
    row.hangs += 1
    for stamps in (True, False):
        verdict = _read(config, stamps=stamps)[0].verdicts.get("job")
        is_found = verdict is not None and (verdict.ending, verdict.ranks) == (Ending.HANG, (rank,))
        row.hangs_timed += stamps and is_found
        row.hangs_counted += not stamps and is_found
