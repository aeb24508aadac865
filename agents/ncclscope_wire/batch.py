"""A batch: what was read from one source between two positions, as columns and records.

A batch is the unit of everything: readers make them, the link carries them, the service applies each
exactly once, and the offline command feeds the very same ones. `begin` and `end` are positions in the
source (bytes of a log, chunks of an export); the batches of one source are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire import tables
from ncclscope_wire.facts import Fact
from ncclscope_wire.records import CaptureSeen, CommunicatorEvent, Counts, Source, SourceGap, VersionSeen
from ncclscope_wire.topology import TopologySeen, TuningTableSeen

Columns: TypeAlias = NDArray[np.void]
"""A structured array; its dtype is said where it is used."""


_NO_ROWS: dict[np.dtype[np.void], Columns] = {}


def no_rows(dtype: np.dtype[np.void]) -> Columns:
    """An empty table of that dtype; the same one each time, since most tables of most batches are empty."""
    table = _NO_ROWS.get(dtype)
    if table is None:
        table = _NO_ROWS[dtype] = np.empty(0, dtype=dtype)
    return table


def _always(table: Columns) -> Callable[[], Columns]:
    """A factory that returns the same table each time, at no cost: a batch leaves most of its tables out."""
    return repeat(table).__next__


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows and records of one source between two of its positions.

    `strings`, `threads` and the templates are only the *new* dictionary entries: they follow the entries
    of earlier batches of the same source, and rows may point at old and new ones alike.
    """

    source: Source
    begin: int
    end: int
    end_line: int = 0
    """Physical lines of the source that lie before `end`; 0 for exports. A reader resumes at (end, end_line)."""
    is_last: bool = False
    """The source is complete: nothing follows (an export, or a log at the end of an offline run)."""
    content_check: int | None = None
    """As `Position.content_check`."""
    observed_at_ns: int | None = None
    """Agent's wall clock when the bytes were read: an upper bound for when they were written. None offline."""

    strings: tuple[str, ...] = ()
    threads: Columns = field(default_factory=_always(no_rows(tables.THREAD)))
    operation_templates: Columns = field(default_factory=_always(no_rows(tables.OPERATION_TEMPLATE)))
    kernel_templates: Columns = field(default_factory=_always(no_rows(tables.KERNEL_TEMPLATE)))
    range_templates: Columns = field(default_factory=_always(no_rows(tables.RANGE_TEMPLATE)))
    inspected_ranks: Columns = field(default_factory=_always(no_rows(tables.INSPECTED_RANK)))

    operations: Columns = field(default_factory=_always(no_rows(tables.OPERATION_ROW)))
    tunings: Columns = field(default_factory=_always(no_rows(tables.TUNING_ROW)))
    call_marks: Columns = field(default_factory=_always(no_rows(tables.CALL_MARK)))
    kernels: Columns = field(default_factory=_always(no_rows(tables.KERNEL_ROW)))
    outside: Columns = field(default_factory=_always(no_rows(tables.KERNEL_ROW)))
    """Kernels that communicate without NCCL: the name of their template is LIBRARY/KERNEL."""
    ranges: Columns = field(default_factory=_always(no_rows(tables.RANGE_ROW)))
    busy: Columns = field(default_factory=_always(no_rows(tables.BUSY_ROW)))
    inspected: Columns = field(default_factory=_always(no_rows(tables.INSPECTED_ROW)))

    communicators: tuple[CommunicatorEvent, ...] = ()
    versions: tuple[VersionSeen, ...] = ()
    captures: tuple[CaptureSeen, ...] = ()
    facts: tuple[Fact, ...] = ()
    topologies: tuple[TopologySeen, ...] = ()
    tuning_tables: tuple[TuningTableSeen, ...] = ()
    gaps: tuple[SourceGap, ...] = ()
    counts: Counts = field(default_factory=Counts)


DICTIONARY_TABLES = {
    "threads": tables.THREAD,
    "operation_templates": tables.OPERATION_TEMPLATE,
    "kernel_templates": tables.KERNEL_TEMPLATE,
    "range_templates": tables.RANGE_TEMPLATE,
    "inspected_ranks": tables.INSPECTED_RANK,
}
"""The dictionary columns of a batch: field name to dtype."""

ROW_TABLES = {
    "operations": tables.OPERATION_ROW,
    "tunings": tables.TUNING_ROW,
    "call_marks": tables.CALL_MARK,
    "kernels": tables.KERNEL_ROW,
    "outside": tables.KERNEL_ROW,
    "ranges": tables.RANGE_ROW,
    "busy": tables.BUSY_ROW,
    "inspected": tables.INSPECTED_ROW,
}
"""The row columns of a batch: field name to dtype."""


def without_rows(batch: Batch, gap: SourceGap) -> Batch:
    """The positions and dictionaries of a batch, and a gap in the place of its rows and records."""
    marks = batch.call_marks[:1].copy()
    marks["kind"] = tables.CALLS_TORN
    return replace(
        batch,
        operations=no_rows(tables.OPERATION_ROW),
        tunings=no_rows(tables.TUNING_ROW),
        call_marks=marks,
        kernels=no_rows(tables.KERNEL_ROW),
        outside=no_rows(tables.KERNEL_ROW),
        ranges=no_rows(tables.RANGE_ROW),
        busy=no_rows(tables.BUSY_ROW),
        inspected=no_rows(tables.INSPECTED_ROW),
        communicators=(),
        versions=(),
        facts=(),
        topologies=(),
        tuning_tables=(),
        gaps=(*batch.gaps, gap),
    )
