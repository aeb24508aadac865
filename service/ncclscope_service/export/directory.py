"""All output files of a run, written so that a reader sees the old file or the whole new one.

`trace.json.gz` is the run on one clock, as a Chrome trace that opens in Perfetto. Events are made and written in
batches, so memory does not grow with the length of the run (beyond a few indices of eight bytes per row).
"""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Final, TypeAlias

import orjson

from ncclscope_service.export.comparison import RunFigures, compare_document, figures_of_selection
from ncclscope_service.export.json_files import clocks_document, findings_document
from ncclscope_service.export.report.page import write_report
from ncclscope_service.export.selection import Selection, select
from ncclscope_service.export.summary import summary_document
from ncclscope_service.export.tables import schema
from ncclscope_service.export.tables.communicators_file import write_communicators
from ncclscope_service.export.tables.expected_file import expected_tables
from ncclscope_service.export.tables.expected_times_file import calibration_document, write_expected_times
from ncclscope_service.export.tables.iterations_file import write_efficiency, write_iterations, write_step_budget
from ncclscope_service.export.tables.kernels_file import write_kernels
from ncclscope_service.export.tables.operations_file import (
    LastOperations,
    last_operations_of,
    write_last_operations,
    write_operations,
    write_slices,
)
from ncclscope_service.export.tables.traffic_file import Traffic, measure_traffic, write_traffic
from ncclscope_service.export.totals import Totals, totals
from ncclscope_service.export.trace.events import TraceCounts, TraceEvents
from ncclscope_service.job.plan import Plan, plan_record
from ncclscope_service.store.plan_records import PlanPattern
from ncclscope_service.store.tables import Store
from ncclscope_wire.errors import StateError

_GZIP_LEVEL: Final = 3
"""Of a trace of 114 MB, 5 takes 1.6 times as long and saves a sixth (0.86 s and 9.1 MB; 0.53 s and 11.1 MB)."""


def write_trace(selection: Selection, path: Path) -> TraceCounts:
    """Writes the trace; what it shows and leaves out stands in its `otherData`."""
    trace = TraceEvents(selection)
    written = 0
    # No time of writing in the header: equal runs give equal bytes.
    with gzip.GzipFile(path, "wb", compresslevel=_GZIP_LEVEL, mtime=0) as file:
        file.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
        for events in trace.batches():
            if events.events:
                file.write(b",\n" if written else b"")
                file.write(events.data)
                written += events.events
        counts = trace.counts(written)
        file.write(b'\n],"otherData":' + orjson.dumps(trace.metadata(counts)) + b"}\n")
    return counts


@dataclass(frozen=True)
class Content:
    """Selected rows and their sums, as the files show them; a sum is made when the first file needs it, and once."""

    selection: Selection
    comparison: dict[str, object] | None = None
    """Content of `compare.json`; None if no other run was given."""

    @cached_property
    def totals(self) -> Totals:
        """Sums over all operations."""
        return totals(self.selection)

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes between ranks."""
        return measure_traffic(self.selection)

    @cached_property
    def last_operations(self) -> LastOperations:
        """The last operations of each rank."""
        return last_operations_of(self.selection)


TRACE_FILE: Final = "trace.json.gz"

Writer: TypeAlias = Callable[[Content, Path], object]


def _json_writer(document: Callable[[Content], object]) -> Writer:
    def write(content: Content, path: Path) -> None:
        path.write_bytes(packed_json(document(content)))

    return write


def packed_json(document: object) -> bytes:
    """Indented JSON; numbers that JSON does not have become null."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(document, default=str, option=options)


WRITERS: Final[dict[str, Writer]] = {
    "operations.parquet": lambda content, path: write_operations(content.selection, path),
    "last_operations.parquet": lambda content, path: write_last_operations(content.last_operations, path),
    "kernels.parquet": lambda content, path: write_kernels(content.selection, path),
    "communicators.parquet": lambda content, path: write_communicators(
        content.selection, path, content.totals.signatures
    ),
    "iterations.parquet": lambda content, path: write_iterations(content.selection, path, content.totals.iterations),
    "step_budget.parquet": lambda content, path: write_step_budget(content.selection, path, content.totals.budget),
    "expected_times.parquet": lambda content, path: write_expected_times(content.selection, path, content.totals),
    "calibration.json": _json_writer(lambda content: calibration_document(content.selection, content.totals)),
    "efficiency.parquet": lambda content, path: write_efficiency(content.selection, path),
    "traffic.parquet": lambda content, path: write_traffic(content.traffic, path),
    "clocks.json": _json_writer(lambda content: clocks_document(content.selection)),
    "findings.json": _json_writer(lambda content: findings_document(content.selection)),
    "summary.json": _json_writer(lambda content: summary_document(content.selection, content.totals, content.traffic)),
    TRACE_FILE: lambda content, path: write_trace(content.selection, path),
    "report.html": lambda content, path: write_report(
        content.selection, path, content.totals, content.traffic, content.comparison, content.last_operations
    ),
}
"""Every output file and what writes it; `docs/outputs.md` explains each."""

PLAN_FILES: Final = ("plan.json", "expected.parquet")
"""Written beside them if a description of the job is given."""


def write_plans(plans: Mapping[str, Plan], patterns: Mapping[str, PlanPattern], out: Path) -> None:
    """Writes plan.json and expected.parquet of jobs into a directory, which is made."""
    out.mkdir(parents=True, exist_ok=True)
    plan_file, expected_file = PLAN_FILES
    with tempfile.TemporaryDirectory(dir=out, prefix=".writing-") as folder:
        documents = [{**asdict(plan_record(plan)), "pattern": patterns[name]} for name, plan in plans.items()]
        (Path(folder) / plan_file).write_bytes(packed_json(documents))
        write_slices(expected_tables(plans), schema.EXPECTED, Path(folder) / expected_file)
        for file in PLAN_FILES:
            os.replace(Path(folder) / file, out / file)


COMPARE_FILE: Final = "compare.json"
"""Written beside them if another run is given."""


def write_run(
    store: Store,
    out: Path,
    *,
    job: str | None = None,
    since_ns: int | None = None,
    on_file: Callable[[str], None] | None = None,
) -> dict[str, Path]:
    """Writes all files into a directory, which is made; gives their paths by name. The store must not change meanwhile.

    `on_file` hears of each before it is written.
    """
    return write_content(content_of(select(store, job=job, since_ns=since_ns)), out, on_file=on_file)


def content_of(selection: Selection, *, compare: RunFigures | None = None, name: str = "this run") -> Content:
    """Everything that the files show. With `compare`, that run is put beside this one, which is called `name`."""
    comparison = None if compare is None else compare_document(figures_of_selection(selection, name), compare)
    return Content(selection, comparison)


def write_content(
    content: Content,
    out: Path,
    *,
    on_file: Callable[[str], None] | None = None,
    trace_of: Selection | None = None,
    trace_beside: bool = False,
) -> dict[str, Path]:
    """Writes all files into a directory, which is made; gives their paths by name.

    All of them are written under temporary names first and then take their places one by one, so a run
    that fails half-way leaves the files of the one before. A comparison of an earlier run is removed if none is asked
    for now. The trace shows `trace_of` where it is given; with `trace_beside`, a forked process writes it meanwhile,
    which is for programs of one thread.

    Raises:
        StateError: the process that wrote the trace has failed; it has printed why.
    """
    writers = dict(WRITERS)
    if content.comparison is not None:
        writers[COMPARE_FILE] = _json_writer(lambda each: each.comparison)
    of_trace = content if trace_of is None else replace(content, selection=trace_of)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".writing-") as folder:
        beside = None
        if trace_beside:
            write_it = partial(writers[TRACE_FILE], of_trace, Path(folder) / TRACE_FILE)
            beside = get_context("fork").Process(target=write_it, daemon=True)
            beside.start()
        for file, write in writers.items():
            if file == TRACE_FILE and beside is not None:
                continue
            if on_file is not None:
                on_file(file)
            write(of_trace if file == TRACE_FILE else content, Path(folder) / file)
        if beside is not None:
            beside.join()
            if beside.exitcode:
                raise StateError(f"{out / TRACE_FILE}: the process that wrote it ended with status {beside.exitcode}")
        for file in writers:
            os.replace(Path(folder) / file, out / file)
    if COMPARE_FILE not in writers:
        (out / COMPARE_FILE).unlink(missing_ok=True)
    return {file: out / file for file in writers}
