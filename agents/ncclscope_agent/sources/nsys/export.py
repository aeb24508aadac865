"""Reads a finished nsys export as batches: NCCL kernels with their launches, NVTX ranges, computation, coverage.

`docs/nsys.md` lists what it reads and what it never reads. The rows are streamed; memory is bounded by
`ExportLimits`, apart from SQLite's own temporary store.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from ncclscope_agent.sources.dictionaries import Strings
from ncclscope_agent.sources.nsys import metadata, nvtx_payload, queries, schema
from ncclscope_agent.sources.nsys.busy import INTERVAL, BusyUnion, Intervals
from ncclscope_agent.sources.nsys.calls import CallColumns
from ncclscope_agent.sources.nsys.kernel_names import KernelKind, KernelNames, communication_kernels
from ncclscope_agent.sources.nsys.metadata import shown_warnings
from ncclscope_agent.sources.nsys.nvtx_payload import MEMBER_FUNCTIONS
from ncclscope_agent.sources.nsys.open_export import (
    OpenExport,
    check_complete,
    fault,
    fault_of,
    look_at,
    open_complete,
    open_plain,
)
from ncclscope_agent.sources.nsys.rows import Chunk, KernelColumns, RangeColumns, busy_rows, skipped_kernels, usable
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch, no_rows
from ncclscope_wire.errors import SourceError
from ncclscope_wire.records import CaptureSeen, CommunicatorEvent, Counts, Source, SourceGap

__all__ = [
    "EXPORT_END",
    "ExportDescription",
    "ExportLimits",
    "broken_export",
    "check_complete",
    "describe_export",
    "export_key",
    "read_export",
]

EXPORT_END: Final = 2**31 - 1
"""End of the last batch of every export: a position alone shows whether anything is left."""

_FINGERPRINT_BYTES: Final = 4096
_NO_CALLS: Final = Chunk(templates=no_rows(tables.OPERATION_TEMPLATE), rows=no_rows(tables.OPERATION_ROW))
_KERNEL_TIMES: Final = np.dtype([("process", "<i8"), ("device", "<i8"), ("start", "<i8"), ("end", "<i8")])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLimits:
    """Limits of what one export may hold; what is beyond them is counted."""

    batch_rows: int = 10_000
    """Rows of a batch: 0.6 MB of columns. Larger ones were slower and took more memory (benchmarks/read_export.py)."""
    ranges: int = 500_000
    """NVTX ranges of an export. Of more, those of NCCL's domain are kept first, then the longest."""
    range_templates: int = 50_000
    """Distinct (thread, domain, text) of the NVTX ranges: texts with numbers in them never repeat."""
    text_length: int = 200
    """Characters that are kept of an NVTX text."""
    busy_rows: int = 50_000
    """Intervals of computation. Of more, the shortest gaps between kernels are filled."""
    warnings: int = 20
    warning_length: int = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportDescription:
    """Summary of an export before it is read."""

    host: str | None
    """Recorded host name, cut at the first dot; None if none is recorded."""
    pids: frozenset[int]
    """Processes with CUDA API records."""
    product_version: str | None
    schema_version: str | None
    graph_launches: int
    """Launches of CUDA graphs that were recorded as a whole, without their kernels."""
    has_payloads: bool
    """Whether NVTX ranges may say what NCCL's calls move."""


def export_key(path: Path) -> str:
    """The identity of an export (or report) as it is now: a file that is written again is another one.

    Raises SourceError if the file cannot be read.
    """
    sight = look_at(path)
    try:
        with open_plain(path) as file:
            fingerprint = hashlib.sha256(file.read(_FINGERPRINT_BYTES)).hexdigest()[:16]
    except OSError as error:
        raise fault("unreadable", path, error.strerror or "") from error
    return f"{sight.device:x}-{sight.inode:x}-{sight.size:x}-{sight.mtime_ns:x}-{fingerprint}"


def describe_export(path: Path) -> ExportDescription:
    """Host, processes and versions of a complete export. Raises SourceError as `check_complete` does."""
    opened = open_complete(path)
    try:
        with closing(opened.connection):
            return ExportDescription(
                host=metadata.recorded_host(opened),
                pids=frozenset(metadata.runtime_pids(opened)),
                product_version=opened.meta.get("EXPORT_PRODUCT_VERSION"),
                schema_version=opened.meta.get("EXPORT_SCHEMA_VERSION"),
                graph_launches=metadata.graph_launches(opened),
                has_payloads=metadata.has_payloads(opened) or path.with_suffix(".json").is_file(),
            )
    except sqlite3.Error as error:
        raise fault_of(path, error) from error


FOREIGN: Final = "not_nsys"
"""Reason of a SourceError: a SQLite database of another program, as profilers and experiment trackers keep them."""


def broken_export(source: Source, error: SourceError) -> Batch:
    """The batch that says that an export could not be read. Its source is not the export's own: that may come yet.

    A database of another program is no export that was lost: it is counted, and leaves no gap.
    """
    report = Source(kind=source.kind, name=source.name, key=f"{source.key}!{error.reason}")
    if error.reason == FOREIGN:
        return Batch(source=report, begin=0, end=1, is_last=True, counts=Counts(skipped={"file_not_nsys": 1}))
    gap = SourceGap(reason=error.reason, amount=1, unit="files", detail=str(error))
    return Batch(source=report, begin=0, end=1, is_last=True, gaps=(gap,))


def read_export(
    path: Path,
    *,
    source: Source,
    host: str | None = None,
    begin: int = 0,
    limits: ExportLimits | None = None,
    logged: frozenset[int] | None = None,
    on_progress: Callable[[], None] | None = None,
) -> Iterator[Batch]:
    """The batches of an export from position `begin` on: NCCL's kernels by start, those of other libraries, ranges,
    computation, then its capture.

    Positions count chunks; they are the same at every reading. The last batch ends at EXPORT_END and carries
    the CaptureSeen. Dictionaries begin again with the first batch given. `host` is used if the export
    records none; with neither, the export is its own host, named like its file. If the export does not say
    when its session began, times count from 0 and `CaptureSeen.missing` names TARGET_INFO_SESSION_START_TIME.
    `logged`: processes whose calls a log has; those of all others become operations, as far as NCCL's ranges say them.
    None: of no process.
    `on_progress` is called now and then while SQLite searches (`open_complete`).
    Raises SourceError before the first batch as `check_complete` does, later with "malformed" or "changed".
    """
    if begin >= EXPORT_END:
        return
    opened = open_complete(path, on_progress)
    with closing(opened.connection):
        try:
            yield from _Reading(path, opened, source, host, begin, limits or ExportLimits(), logged).batches()
        except sqlite3.Error as error:
            raise fault_of(path, error) from error
        except (TypeError, ValueError, OverflowError) as error:  # a cell of another kind than its column
            raise fault("malformed", path, str(error)) from error


class _Reading:
    """One reading of one export."""

    def __init__(
        self,
        path: Path,
        opened: OpenExport,
        source: Source,
        host: str | None,
        begin: int,
        limits: ExportLimits,
        logged: frozenset[int] | None,
    ) -> None:
        self._logged = logged
        self._path = path
        self._opened = opened
        self._connection = opened.connection
        self._layout = opened.layout
        self._source = source
        self._begin = begin
        self._limits = limits
        self._position = 0
        self._strings = Strings()
        self._session = metadata.session_of(opened)
        self._recorded_host = metadata.recorded_host(opened)
        self._host = self._recorded_host or host or Path(source.name).stem
        self._skipped: Counter[str] = Counter()
        self._gaps: list[SourceGap] = []
        self._pids: set[int] = set()
        self._latest = self._session.shift_ns
        self._read = Counter[KernelKind]()

    def batches(self) -> Iterator[Batch]:
        names = communication_kernels(self._opened)
        if names is not None:
            yield from self._kernel_batches(names)
        if queries.can_read_ranges(self._layout):
            yield from self._range_batches()
        if names is not None:
            yield from self._busy_batches(names)
        last = self._last_batch()
        if look_at(self._path) != self._opened.sight:
            raise fault("changed", self._path)
        yield last

    def _advance(self) -> bool:
        """Steps over one chunk; False if it was applied before."""
        self._position += 1
        return self._position > self._begin

    def _kernel_batches(self, names: KernelNames) -> Iterator[Batch]:
        self._copy_kernels(names)
        columns = KernelColumns(self._host, {**names.nccl, **names.outside}, self._session, self._strings)
        for kind, ours in ((KernelKind.NCCL, names.nccl), (KernelKind.OUTSIDE, names.outside)):
            rows = self._connection.execute(queries.kernels(ours))
            while chunk := rows.fetchmany(self._limits.batch_rows):
                self._read[kind] += len(chunk)
                if self._advance():
                    made = columns.chunk_of(chunk)
                    empty = Batch(
                        source=self._source,
                        begin=self._position - 1,
                        end=self._position,
                        strings=self._strings.drain_new(),
                        kernel_templates=made.templates,
                        counts=Counts(understood={kind.value: len(chunk)}),
                    )
                    yield (
                        replace(empty, kernels=made.rows)
                        if kind is KernelKind.NCCL
                        else replace(empty, outside=made.rows)
                    )

    def _copy_kernels(self, names: KernelNames) -> None:
        """Fills temp.kernel and temp.launch, and learns what they say as a whole."""
        run = self._connection.execute
        run(queries.copy_kernels(self._layout, names.column, names.long_column, names.nccl, names.outside))
        self._skipped += skipped_kernels(*run(queries.count_unusable("temp.kernel", self._session.shift_ns)).fetchone())
        run(queries.drop_unusable("temp.kernel", self._session.shift_ns))
        run(queries.CREATE_LAUNCHES)
        launches = queries.copy_launches(self._layout, self._session.shift_ns)
        if launches is not None:
            run(launches)
        for process, latest in run('SELECT globalPid, max("end") FROM temp.kernel GROUP BY globalPid'):
            self._saw(process, latest)

    def _range_batches(self) -> Iterator[Batch]:
        columns = RangeColumns(
            self._host,
            domains := metadata.domains_of(self._opened),
            self._session,
            self._strings,
            text_limit=self._limits.range_templates,
            text_length=self._limits.text_length,
        )
        nccl_domains = [key for key, name in domains.items() if name == "NCCL"]
        limit = self._range_limit()
        is_beside = bool(nccl_domains) and not queries.tells_payloads(self._layout)
        is_beside = is_beside and nvtx_payload.copy_payloads(self._path, self._connection)
        calls = None
        if self._logged is not None and not {process & 0xFFFFFF for process, _ in nccl_domains} <= self._logged:
            calls = CallColumns(
                self._host, domains, self._session, self._strings, self._logged, limit=self._limits.range_templates
            )
        query = queries.ranges(self._layout, self._session.shift_ns, nccl_domains, limit, are_payloads_beside=is_beside)
        events = self._communicators(calls, query)
        rows = self._connection.execute(query)
        dropped = 0
        while chunk := rows.fetchmany(self._limits.batch_rows):
            if self._advance():
                made = columns.chunk_of(chunk)
                called = _NO_CALLS if calls is None else calls.chunk_of(chunk)
                dropped += made.dropped
                yield Batch(
                    source=self._source,
                    begin=self._position - 1,
                    end=self._position,
                    strings=self._strings.drain_new(),
                    threads=no_rows(tables.THREAD) if calls is None else calls.threads.drain_new(),
                    communicators=tuple(events),
                    operation_templates=called.templates,
                    operations=called.rows,
                    range_templates=made.templates,
                    ranges=made.rows,
                    counts=Counts(
                        understood={
                            "nvtx_range": len(made.rows),
                            **({"operation": len(called.rows)} if len(called.rows) else {}),
                        }
                    ),
                )
                events = []
        self._lost("nvtx_texts", dropped, f"NVTX ranges beyond {self._limits.range_templates} different texts")

    def _communicators(self, calls: CallColumns | None, query: str) -> list[CommunicatorEvent]:
        """What the whole export says of communicators: a range that destroys one comes behind its calls."""
        if calls is None:
            return []
        texts = ", ".join(f"'{name}'" for name in sorted(MEMBER_FUNCTIONS))
        return calls.communicators(self._connection.execute(f"SELECT * FROM ({query}) WHERE text IN ({texts})"))

    def _range_limit(self) -> int | None:
        """The limit, if there are more ranges than that; counts what is not read."""
        query = queries.count_ranges(self._session.shift_ns)
        found, before = self._connection.execute(query).fetchone()
        self._skipped += +Counter({"nvtx_before_capture": int(before)})
        surplus = found - before - self._limits.ranges
        if surplus <= 0:
            return None
        self._lost("nvtx_limit", surplus, f"NVTX ranges beyond {self._limits.ranges}; NCCL's and the longest were kept")
        return self._limits.ranges

    def _busy_batches(self, names: KernelNames) -> Iterator[Batch]:
        intervals = self._computation(names)
        for at in range(0, len(intervals), self._limits.batch_rows):
            if self._advance():
                host = self._strings.index(self._host)
                yield Batch(
                    source=self._source,
                    begin=self._position - 1,
                    end=self._position,
                    strings=self._strings.drain_new(),
                    busy=busy_rows(intervals[at : at + self._limits.batch_rows], host, self._session),
                )

    def _computation(self, names: KernelNames) -> Intervals:
        union = BusyUnion(self._limits.busy_rows)
        rows = self._connection.execute(
            queries.computation(self._layout, names.column, names.long_column, names.nccl, names.outside)
        )
        while len(times := np.fromiter(islice(rows, self._limits.batch_rows), _KERNEL_TIMES)):
            times, skipped = usable(times, self._session)
            self._skipped += skipped
            self._read[KernelKind.COMPUTATION] += len(times)
            intervals = np.ones(len(times), INTERVAL)
            for column in _KERNEL_TIMES.names or ():
                intervals[column] = times[column]
            union.ingest_intervals(intervals)
        united = union.result()
        if union.filled_gap_ns:
            sentence = f"intervals of computation: gaps up to {union.filled_gap_ns} ns between kernels count as busy"
            self._lost("busy_coarsened", self._read[KernelKind.COMPUTATION], sentence)
        for process in np.unique(united["process"]).tolist():
            self._saw(process, int(united["end"][united["process"] == process].max()))
        attributed: Intervals = united[united["process"] != 0]  # the others say nothing about anybody
        return attributed

    def _saw(self, process: int, latest: int) -> None:
        """A process had kernels, the last of which ended then."""
        self._pids.add(schema.pid_of(process))
        self._latest = max(self._latest, latest)

    def _lost(self, reason: str, amount: int, what: str) -> None:
        if amount:
            detail = f"{self._source.name}: {what} (record shorter captures, or fewer ranges)"
            self._gaps.append(SourceGap(reason=reason, amount=amount, unit="records", detail=detail))

    def _last_batch(self) -> Batch:
        understood = {KernelKind.COMPUTATION.value: self._read[KernelKind.COMPUTATION]}
        return Batch(
            source=self._source,
            begin=max(self._position, self._begin),
            end=EXPORT_END,
            is_last=True,
            strings=self._strings.drain_new(),
            captures=(self._capture(),),
            gaps=tuple(self._gaps),
            counts=Counts(understood=dict(+Counter(understood)), skipped=dict(self._skipped)),
        )

    def _capture(self) -> CaptureSeen:
        session = self._session
        pids = (self._pids | metadata.runtime_pids(self._opened)) - {0}
        end_ns = session.cut_ns if session.cut_ns is not None else self._latest
        return CaptureSeen(
            host=self._host,
            host_is_recorded=self._recorded_host is not None,
            start_ns=session.utc_epoch_ns or 0,
            end_ns=end_ns + session.to_utc_ns,
            pids=tuple(sorted(pids)),
            product_version=self._opened.meta.get("EXPORT_PRODUCT_VERSION"),
            schema_version=self._opened.meta.get("EXPORT_SCHEMA_VERSION"),
            nccl_kernels=self._read[KernelKind.NCCL],
            other_kernels=self._read[KernelKind.COMPUTATION] + self._read[KernelKind.OUTSIDE],
            graph_launches=metadata.graph_launches(self._opened),
            missing=metadata.missing_of(self._opened, session),
            warnings=shown_warnings(
                metadata.diagnostics(self._opened),
                pids,
                limit=self._limits.warnings,
                length=self._limits.warning_length,
            ),
            gpu=metadata.gpu_name(self._opened),
        )
