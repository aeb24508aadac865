"""Rows of an export's queries to the columns that travel.

Each class holds the dictionaries of one kind of rows (templates only grow; strings are shared) and turns
a chunk of rows into what is new in the dictionaries and the rows that point into them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncclscope_agent.sources.dictionaries import Strings
from ncclscope_agent.sources.nsys import schema
from ncclscope_agent.sources.nsys.busy import Intervals, Times
from ncclscope_agent.sources.nsys.nvtx_payload import read_payload
from ncclscope_agent.sources.nsys.queries import ROW_COLUMNS
from ncclscope_agent.sources.nsys.schema import Session, pid_of
from ncclscope_wire import tables
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

Key = TypeVar("Key")

KernelKey = tuple[bytes]
"""What kernels have in common: the cell of `queries.TEMPLATE_COLUMNS`."""

RangeKey = tuple[int, int, str, object]
"""What ranges have in common: thread, domain, text, payload."""

KERNEL_NUMBERS: Final = np.dtype([(column, "<i8") for column in ROW_COLUMNS])
RANGE_NUMBERS: Final = np.dtype([("event_type", "<i8"), ("start", "<i8"), ("end", "<i8")])
_INTEGERS: Final = b"-,0123456789"
_DEFAULT_DOMAIN: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Templates and rows that one chunk adds."""

    templates: Columns
    rows: Columns
    dropped: int = 0
    """Rows that had no place in a bounded dictionary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Generic[Key]):
    """A chunk of rows of a query that says what rows have in common before the numbers of each."""

    keys: list[Key]
    """All that differ, by first appearance."""
    which: NDArray[np.intp]
    """The key of each row."""
    numbers: Columns


def rows_of(chunk: Sequence[tuple[Any, ...]], dtype: np.dtype[np.void]) -> Rows[Any]:
    """A chunk as SQLite gives it; the last cell of a row has its numbers. Raises ValueError as `numbers_of` does."""
    keys: dict[tuple[Any, ...], int] = {}
    which = [keys.setdefault(row[:-1], len(keys)) for row in chunk]
    return Rows(keys=list(keys), which=np.array(which), numbers=numbers_of([row[-1] for row in chunk], dtype))


def numbers_of(cells: Iterable[bytes], dtype: np.dtype[np.void]) -> Columns:
    """The integers of cells that SQLite packed (`queries`). Raises ValueError for anything else in them."""
    text = b",".join(cells).translate(None, b"[]")
    if strange := text.translate(None, _INTEGERS):
        raise ValueError(f"no integers: {strange[:20]!r}")
    return np.fromstring(text, np.int64, sep=",").view(dtype)


def integers_of(cell: bytes) -> list[int]:
    """The integers of one cell, as `numbers_of` gives those of many."""
    return [int(number) for number in cell[1:-1].split(b",")]


class KernelColumns:
    """Turns rows of `queries.kernels` into KERNEL_TEMPLATE and KERNEL_ROW."""

    def __init__(self, host: str, names: Mapping[int, str], session: Session, strings: Strings) -> None:
        self._host = host
        self._names = names
        self._session = session
        self._strings = strings
        self._templates: dict[KernelKey, int] = {}

    def chunk_of(self, rows: Rows[KernelKey]) -> Chunk:
        """One chunk; a kernel that ends with the capture is censored. Raises OverflowError for impossible numbers."""
        known = len(self._templates)
        templates = np.array([self._templates.setdefault(key, len(self._templates)) for key in rows.keys])
        return Chunk(templates=self._templates_since(known), rows=self._kernels(templates[rows.which], rows.numbers))

    def _templates_since(self, known: int) -> Columns:
        host = self._strings.index(self._host)
        keys = list(self._templates)[known:]
        return np.array(
            [
                (host, pid_of(process), device, stream, self._strings.index(self._names[name]), *launch)
                for process, device, stream, name, *launch in (integers_of(cell) for (cell,) in keys)
            ],
            tables.KERNEL_TEMPLATE,
        )

    def _kernels(self, templates: NDArray[np.int64], values: Columns) -> Columns:
        to_utc_ns = self._session.to_utc_ns
        kernels = np.zeros(len(values), tables.KERNEL_ROW)
        kernels["template"] = templates
        kernels["correlation_id"] = values["correlationId"]
        kernels["start_ns"] = values["start"] + to_utc_ns
        kernels["end_ns"] = values["end"] + to_utc_ns
        kernels["launch_start_ns"] = _known_to_utc(values["launch_start"], to_utc_ns)
        kernels["launch_end_ns"] = _known_to_utc(values["launch_end"], to_utc_ns)
        kernels["launch_tid"] = values["launch_tid"]
        kernels["graph_node_id"] = values["graphNodeId"]
        if self._session.cut_ns is not None:
            kernels["flags"] = np.where(values["end"] == self._session.cut_ns, tables.KERNEL_CENSORED, 0)
        return kernels


class RangeColumns:
    """Turns NVTX rows into RANGE_TEMPLATE and RANGE_ROW."""

    def __init__(
        self,
        host: str,
        domains: Mapping[tuple[int, int], str],
        session: Session,
        strings: Strings,
        *,
        text_limit: int,
        text_length: int,
    ) -> None:
        self._host = host
        self._domains = domains
        self._session = session
        self._strings = strings
        self._text_limit = text_limit
        self._text_length = text_length
        self._templates: dict[tuple[int, int, str, int, int], int] = {}

    def chunk_of(self, rows: Rows[RangeKey]) -> Chunk:
        """One chunk. A range that the end of the capture cut, or that never ended, has no end; a mark ends at once.

        Texts are cut at a length, and a row whose template would be one too many is dropped and counted.
        """
        known = len(self._templates)
        templates = np.array([self._template(*key) for key in rows.keys])[rows.which]
        placed = templates != NO_NUMBER
        return Chunk(
            templates=self._templates_since(known),
            rows=self._ranges(templates[placed], rows.numbers[placed]),
            dropped=len(placed) - int(placed.sum()),
        )

    def _template(self, thread: int, domain: int, text: str, payload: object) -> int:
        """The index of a template; NO_NUMBER if there is no place for it."""
        text = text[: self._text_length]
        key = (thread, domain, text, *read_payload(text, payload))
        index = self._templates.get(key, NO_NUMBER)
        if index == NO_NUMBER and len(self._templates) < self._text_limit:
            index = self._templates[key] = len(self._templates)
        return index

    def _templates_since(self, known: int) -> Columns:
        index_of = self._strings.index
        host = index_of(self._host)
        return np.array(
            [
                (
                    *(host, pid_of(thread), thread & 0xFFFFFF),
                    *(index_of(self._domain_name(thread, domain)), index_of(text), *payload),
                )
                for thread, domain, text, *payload in list(self._templates)[known:]
            ],
            tables.RANGE_TEMPLATE,
        )

    def _domain_name(self, thread: int, domain: int) -> str:
        if domain == _DEFAULT_DOMAIN:
            return ""
        return self._domains.get((thread >> 24, domain), f"domain {domain}")

    def _ranges(self, templates: NDArray[np.int64], values: Columns) -> Columns:
        ranges = np.zeros(len(values), tables.RANGE_ROW)
        ends = values["end"].copy()
        if self._session.cut_ns is not None:
            ends[ends == self._session.cut_ns] = NO_TIME_NS
        latest = self._session.shift_ns + schema.LONGEST_TIME_NS
        ends[(ends < values["start"]) | (ends > latest)] = NO_TIME_NS
        is_mark = values["event_type"] == schema.NVTX_MARK
        ends[is_mark] = values["start"][is_mark]
        ranges["template"] = templates
        ranges["start_ns"] = values["start"] + self._session.to_utc_ns
        ranges["end_ns"] = _known_to_utc(ends, self._session.to_utc_ns)
        return ranges


def busy_rows(intervals: Intervals, host: int, session: Session) -> Columns:
    """Intervals of the union as BUSY_ROW; `host` is the index of its string."""
    busy = np.zeros(len(intervals), tables.BUSY_ROW)
    busy["host"] = host
    busy["pid"] = (intervals["process"] >> 24) & 0xFFFFFF
    busy["device_id"] = intervals["device"]
    busy["start_ns"] = intervals["start"] + session.to_utc_ns
    busy["end_ns"] = intervals["end"] + session.to_utc_ns
    busy["kernels"] = intervals["kernels"]
    return busy


def usable(times: Columns, session: Session) -> tuple[Columns, Counter[str]]:
    """Rows with usable `start` and `end`, and how many of the others there are by reason."""
    start, end, first = times["start"], times["end"], session.shift_ns
    has_no_times = (start == first) & (end == first)
    is_before = start < first
    is_usable = ~is_before & ~has_no_times & (end >= start) & (end <= first + schema.LONGEST_TIME_NS)
    skipped = {
        "kernel_without_times": has_no_times,
        "kernel_before_capture": is_before,
        "kernel_with_impossible_times": ~is_usable & ~is_before & ~has_no_times,
    }
    return times[is_usable], +Counter({reason: int(which.sum()) for reason, which in skipped.items()})


def _known_to_utc(times: Times, to_utc_ns: int) -> Times:
    return np.where(times == NO_TIME_NS, NO_TIME_NS, times + to_utc_ns)
