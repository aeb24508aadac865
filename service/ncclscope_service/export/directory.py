"""All output files of a run, written so that a reader sees the old file or the whole new one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import orjson

from ncclscope_service.export.chrome_trace import write_trace
from ncclscope_service.export.clocks_file import clocks_document
from ncclscope_service.export.communicators_file import write_communicators
from ncclscope_service.export.efficiency_file import write_efficiency
from ncclscope_service.export.findings_file import findings_document
from ncclscope_service.export.kernels_file import write_kernels
from ncclscope_service.export.operations_file import write_operations
from ncclscope_service.export.perfetto_trace import write_perfetto_trace
from ncclscope_service.export.report import write_report
from ncclscope_service.export.selection import Selection, select
from ncclscope_service.export.summary import summary_document
from ncclscope_service.export.totals import Totals, totals
from ncclscope_service.export.trace_events import TraceCounts
from ncclscope_service.export.traffic_file import Traffic, measure_traffic, write_traffic
from ncclscope_service.store import Store


@dataclass(frozen=True, slots=True)
class Content:
    """What several of the files show, computed once."""

    selection: Selection
    totals: Totals
    traffic: Traffic


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
    "kernels.parquet": lambda content, path: write_kernels(content.selection, path),
    "communicators.parquet": lambda content, path: write_communicators(content.selection, path),
    "efficiency.parquet": lambda content, path: write_efficiency(content.selection, path),
    "traffic.parquet": lambda content, path: write_traffic(content.traffic, path),
    "clocks.json": _json_writer(lambda content: clocks_document(content.selection)),
    "findings.json": _json_writer(lambda content: findings_document(content.selection)),
    "summary.json": _json_writer(lambda content: summary_document(content.selection, content.totals, content.traffic)),
    "trace.json.gz": lambda content, path: write_trace(content.selection, path),
    "report.html": lambda content, path: write_report(content.selection, path, content.totals, content.traffic),
}
"""Every output file and what writes it; `docs/outputs.md` explains each."""

PERFETTO_TRACE: Final = "trace.perfetto-trace"
"""Written beside the others where it is asked for: it needs a package of its own."""


def write_run(
    store: Store,
    out: Path,
    *,
    job: str | None = None,
    since_ns: int | None = None,
    iterations: tuple[int, int] | None = None,
    with_perfetto: bool = False,
    on_file: Callable[[str], None] | None = None,
) -> dict[str, Path]:
    """Writes all files into a directory, which is made; gives their paths by name.

    All of them are written under temporary names first and then take their places one by one, so a run
    that fails half-way leaves the files of the one before. `on_file` hears of each before it is written.
    The store must not change meanwhile. A Perfetto trace of an earlier run is removed where none is asked for now.
    """
    writers = WRITERS | ({PERFETTO_TRACE: _perfetto} if with_perfetto else {})
    selection = select(store, job=job, since_ns=since_ns, iterations=iterations)
    content = Content(selection, totals(selection), measure_traffic(selection))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".writing-") as folder:
        for name, write in writers.items():
            if on_file is not None:
                on_file(name)
            write(content, Path(folder) / name)
        for name in writers:
            os.replace(Path(folder) / name, out / name)
    if not with_perfetto:
        (out / PERFETTO_TRACE).unlink(missing_ok=True)
    return {name: out / name for name in writers}


def _perfetto(content: Content, path: Path) -> TraceCounts:
    return write_perfetto_trace(content.selection, path)
