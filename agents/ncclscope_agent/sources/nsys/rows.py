"""Rows of an export's queries to the columns that travel.

Each class holds the dictionaries of one kind of rows (templates only grow; strings are shared) and turns
a chunk of rows into what is new in the dictionaries and the rows that point into them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from ncclscope_agent.sources.dictionaries import Strings
from ncclscope_agent.sources.nsys import schema
from ncclscope_agent.sources.nsys.busy import Intervals, Times
from ncclscope_agent.sources.nsys.nvtx_payload import read_payload
from ncclscope_agent.sources.nsys.queries import ROW_COLUMNS, TEMPLATE_COLUMNS
from ncclscope_agent.sources.nsys.schema import Session, pid_of
from ncclscope_wire import tables
from ncclscope_wire.batch import Columns, no_rows
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

KernelRow = tuple[int, ...]
"""One row of `queries.kernels`."""

RangeRow = tuple[int, int, str, int, int, int, object]
"""One row of `queries.ranges`."""

_TEMPLATE_WIDTH: Final = len(TEMPLATE_COLUMNS)
_CHANGING: Final = np.dtype([("template", "<i8"), *((column, "<i8") for column in ROW_COLUMNS)])
_RANGE_TIMES: Final = np.dtype([("template", "<i8"), ("event_type", "<i8"), ("start", "<i8"), ("end", "<i8")])
_DEFAULT_DOMAIN: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Templates and rows that one chunk adds."""

    templates: Columns
    rows: Columns
    dropped: int = 0
    """Rows that had no place in a bounded dictionary."""


class KernelColumns:
    """Turns rows of kernels that communicate into KERNEL_TEMPLATE and KERNEL_ROW."""

    def __init__(self, host: str, names: Mapping[int, str], session: Session, strings: Strings) -> None:
        self._host = host
        self._names = names
        self._session = session
        self._strings = strings
        self._templates: dict[tuple[int, ...], int] = {}

    def chunk_of(self, rows: Sequence[KernelRow]) -> Chunk:
        """One chunk; a kernel that ends with the capture is censored. Raises OverflowError for impossible numbers."""
        known = len(self._templates)
        templates = self._templates
        index = [templates.setdefault(row[:_TEMPLATE_WIDTH], len(templates)) for row in rows]
        values = np.fromiter(
            ((template, *row[_TEMPLATE_WIDTH:]) for template, row in zip(index, rows, strict=True)),
            _CHANGING,
            len(rows),
        )
        return Chunk(templates=self._templates_since(known), rows=self._kernels(values))

    def _templates_since(self, known: int) -> Columns:
        host = self._strings.index(self._host)
        keys = list(self._templates)[known:]
        return np.array(
            [
                (host, pid_of(process), device, stream, self._strings.index(self._names[name]), *launch)
                for process, device, stream, name, *launch in keys
            ],
            tables.KERNEL_TEMPLATE,
        )

    def _kernels(self, values: Columns) -> Columns:
        to_utc_ns = self._session.to_utc_ns
        kernels = no_rows(tables.KERNEL_ROW) if len(values) == 0 else np.zeros(len(values), tables.KERNEL_ROW)
        kernels["template"] = values["template"]
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
        self._template = lru_cache(text_limit)(self._find_template)

    def chunk_of(self, rows: Sequence[RangeRow]) -> Chunk:
        """One chunk. A range that the end of the capture cut, or that never ended, has no end; a mark ends at once.

        Texts are cut at a length, and a row whose template would be one too many is dropped and counted.
        """
        known = len(self._templates)
        threads, domains, texts, event_types, starts, ends, payloads = zip(*rows, strict=True)
        values = np.empty(len(rows), _RANGE_TIMES)
        values["template"] = list(map(self._template, threads, domains, texts, payloads))
        values["event_type"], values["start"], values["end"] = event_types, starts, ends
        placed = values[values["template"] != NO_NUMBER]
        return Chunk(
            templates=self._templates_since(known),
            rows=self._ranges(placed),
            dropped=len(rows) - len(placed),
        )

    def _find_template(self, thread: int, domain: int, text: str, payload: object) -> int:
        """Its index; NO_NUMBER if it would be one too many."""
        text = text[: self._text_length]
        key = (thread, domain, text, *read_payload(text, payload))
        if len(self._templates) >= self._text_limit:
            return self._templates.get(key, NO_NUMBER)
        return self._templates.setdefault(key, len(self._templates))

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

    def _ranges(self, values: Columns) -> Columns:
        ranges = np.zeros(len(values), tables.RANGE_ROW)
        ends = values["end"].copy()
        if self._session.cut_ns is not None:
            ends[ends == self._session.cut_ns] = NO_TIME_NS
        latest = self._session.shift_ns + schema.LONGEST_TIME_NS
        ends[(ends < values["start"]) | (ends > latest)] = NO_TIME_NS
        is_mark = values["event_type"] == schema.NVTX_MARK
        ends[is_mark] = values["start"][is_mark]
        ranges["template"] = values["template"]
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
    skipped = skipped_kernels(
        int(has_no_times.sum()), int(is_before.sum()), int((~is_usable & ~is_before & ~has_no_times).sum())
    )
    return times[is_usable], skipped


def skipped_kernels(without_times: int, before_capture: int, impossible: int) -> Counter[str]:
    """The counters of kernels that were skipped; only those that are not 0."""
    return +Counter(
        {
            "kernel_without_times": without_times,
            "kernel_before_capture": before_capture,
            "kernel_with_impossible_times": impossible,
        }
    )


def _known_to_utc(times: Times, to_utc_ns: int) -> Times:
    return np.where(times == NO_TIME_NS, NO_TIME_NS, times + to_utc_ns)
