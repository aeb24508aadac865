"""Meaning of the tables of an nsys export: columns by version, identifiers, times, the file's own header.

An export of Nsight Systems is one SQLite file. Its tables come and go by version and by what happened
("lazy" export: no rows, no table), so everything is asked for by name and may be absent.
*Source:* Nsight Systems User Guide, "SQLite Schema Reference", and exports of 2022.2 to 2026.2;
see `docs/nsys.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

KNOWN_MAJORS: Final = (2, 3)
"""Majors of EXPORT_SCHEMA_VERSION that are understood; a new major may change anything, a minor only some columns."""

META_TABLES: Final = ("META_DATA_EXPORT", "EXPORT_META_DATA")
"""The table that is made last: its name from 2023.3 on, and before."""

KERNEL: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
RUNTIME: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
GRAPH_TRACE: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
NVTX: Final = "NVTX_EVENTS"
STRINGS: Final = "StringIds"
SESSION_START: Final = "TARGET_INFO_SESSION_START_TIME"
ANALYSIS: Final = "ANALYSIS_DETAILS"
SYSTEM: Final = "TARGET_INFO_SYSTEM_ENV"
DIAGNOSTICS: Final = "DIAGNOSTIC_EVENT"
GPU: Final = "TARGET_INFO_GPU"

LOOKED_FOR: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        STRINGS: ("id", "value"),
        KERNEL: (
            "start",
            "end",
            "globalPid",
            "deviceId",
            "streamId",
            "shortName",
            "gridX",
            "gridY",
            "gridZ",
            "blockX",
            "blockY",
            "blockZ",
            "staticSharedMemory",
            "dynamicSharedMemory",
            "registersPerThread",
            "correlationId",
            "graphNodeId",
        ),
        RUNTIME: ("start", "end", "globalTid", "correlationId"),
        NVTX: ("start", "end", "eventType", "text", "textId", "globalTid", "domainId"),
        SESSION_START: ("utcEpochNs",),
        ANALYSIS: ("duration",),
        SYSTEM: ("name", "value"),
        DIAGNOSTICS: ("severity", "text", "globalPid"),
    }
)
"""Tables and columns whose absence loses something, and is therefore reported (`CaptureSeen.missing`)."""

READ_TABLES: Final = frozenset({*LOOKED_FOR, *META_TABLES, GRAPH_TRACE, GPU})
"""Every table that is read. GRAPH_TRACE is there only when CUDA graphs were launched: its absence loses nothing, and
that of GPU a name."""

NVTX_PUSH_POP: Final = 59
NVTX_START_END: Final = 60
NVTX_MARK: Final = 34
NVTX_DOMAIN: Final = 75
"""Values of NVTX_EVENTS.eventType. *Source:* ENUM_NSYS_EVENT_TYPE."""

LONGEST_TIME_NS: Final = 2**60
"""A time since the start of the session beyond this (36 years) is damage, not time."""

_MAGIC: Final = b"SQLite format 3\x00"
HEADER_BYTES: Final = 100
"""Length of the header of a SQLite file. *Source:* sqlite.org/fileformat.html section 1.3."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The tables of one export and their columns."""

    tables: Mapping[str, frozenset[str]]

    def has(self, table: str, *columns: str) -> bool:
        """Whether the table is there with all of these columns."""
        found = self.tables.get(table)
        return found is not None and found.issuperset(columns)

    def missing(self) -> tuple[str, ...]:
        """Tables ("NVTX_EVENTS") and columns ("NVTX_EVENTS.textId") that were looked for and are not there."""
        absent: list[str] = []
        for table, columns in LOOKED_FOR.items():
            found = self.tables.get(table)
            if found is None:
                absent.append(table)
            else:
                absent.extend(f"{table}.{column}" for column in columns if column not in found)
        return tuple(absent)

    @property
    def meta_table(self) -> str | None:
        """The metadata table of this version; None if there is none."""
        return next((table for table in META_TABLES if self.has(table, "name", "value")), None)

    @property
    def is_of_nsys(self) -> bool:
        """Whether any table is one that nsys writes."""
        return any(table in LOOKED_FOR or table in META_TABLES for table in self.tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Time base of one export."""

    utc_epoch_ns: int | None
    """UTC ns of the session's start; None if it is not recorded: then times count from 0."""
    shift_ns: int
    """Added by the exporter to every time (--ts-normalize, --ts-shift)."""
    duration_ns: int | None
    """Length of the collection; None if it is not recorded."""

    @property
    def to_utc_ns(self) -> int:
        """Added to a time of the export, gives UTC: UTC = time - EXPORT_CONFIG_TIME_SHIFT + utcEpochNs."""
        return (self.utc_epoch_ns or 0) - self.shift_ns

    @property
    def cut_ns(self) -> int | None:
        """The time, as the export prints it, at which whatever was still running was cut; None if not known."""
        return None if self.duration_ns is None else self.duration_ns + self.shift_ns


def pid_of(global_id: int) -> int:
    """The pid in a globalPid or globalTid.

    *Source:* Nsight Systems User Guide, "SQLite Schema Reference": hardware id, VM id, PID and TID from the top.
    """
    return (global_id >> 24) & 0xFFFFFF


def major_of(schema_version: str) -> int | None:
    """The major of "3.7.2"; None if it is not a version."""
    major = schema_version.split(".", 1)[0]
    return int(major) if major.isascii() and major.isdigit() and len(major) < 9 else None


def header_fault(header: bytes, size: int) -> str | None:
    """The reason why a file with these first bytes and this size is no complete SQLite file; None if it may be.

    The exporter writes page 1 last, so a zero page is an export under way (or one that was killed); a file
    that is shorter than its header says was cut. *Source:* sqlite.org/fileformat.html section 1.3.
    """
    if size == 0:
        return "empty"
    if not any(header[: len(_MAGIC)]):
        return "incomplete"
    if not header.startswith(_MAGIC):
        return "not_sqlite"
    return "incomplete" if size < _declared_size(header) else None


def _declared_size(header: bytes) -> int:
    """Bytes that the header says the file has; a header that is itself cut demands more than there can be."""
    if len(header) < HEADER_BYTES:
        return 2**63
    page_size = int.from_bytes(header[16:18], "big")
    pages_are_valid = header[24:28] == header[92:96]  # else an old SQLite wrote it, and the field says nothing
    pages = int.from_bytes(header[28:32], "big") if pages_are_valid else 1
    return pages * (65536 if page_size == 1 else page_size)
