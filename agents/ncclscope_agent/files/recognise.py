"""Recognises what a file is by its first bytes.

Names count only if the bytes cannot decide: an nsys report is a binary form without published
magic, so there the ending `.nsys-rep` decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from ncclscope_agent.sources.kineto.json_stream import first_text

ENOUGH_BYTES: Final = 1 << 20
"""As many first bytes as are looked at: job scripts and Python imports print before NCCL does."""

_SQLITE_MAGIC: Final = b"SQLite format 3\0"
"""*Source:* SQLite file format, section 1.3."""
_REPORT_ENDINGS: Final = (".nsys-rep", ".qdrep")

_NCCL_LINE: Final = re.compile(
    rb"NCCL (?:INFO|WARN|CALL|TRACE) |NCCL version \d{1,4}\.\d{1,4}\.\d{1,4}| Bytes -> Algo |=== System : max"
    rb"|ProcessGroupNCCL\.cpp:\d{1,6}\] |Watchdog caught collective operation timeout: WorkNCCL\("
)
"""Words that stand in lines of NCCL and of PyTorch's watchdog over it only. Notes with pasted lines hold them too, and
are read as logs."""
_INSPECTOR: Final = re.compile(rb'\s{0,16}\{"header": ?\{')
_INSPECTOR_LATER: Final = re.compile(rb'\n\s{0,16}\{"header": ?\{[^\n]{1,4096}"inspector_output_format_version"')
_INSPECTOR_WORD: Final = b'"inspector_output_format_version"'
"""*Source:* NCCL `ext-profiler/inspector/inspector.cc`. A dump whose first line is torn is one by its later lines."""
_INSPECTOR_METRICS: Final = re.compile(rb"^nccl_(?:p2p_)?bus_bandwidth_gbs\{", re.MULTILINE)
"""*Source:* NCCL `plugins/profiler/inspector/inspector_prom.cc`."""
_TOPOLOGY: Final = re.compile(rb'\s{0,64}(?:<\?xml[^>]{0,200}\?>\s{0,64})?<system version="\d+">\s{0,64}<cpu ')
"""*Source:* NCCL `src/graph/xml.cc`."""
_KINETO: Final = re.compile(rb'\s{0,64}\{\s{0,64}"schemaVersion":\s{0,64}\d{1,9},')
"""*Source:* Kineto `libkineto/src/output_json.cpp:handleTraceStart`."""
_DUMPS: Final = (b"\x80", b"{")
_DUMP_WORD: Final = b"collective_seq_id"
"""*Source:* PyTorch `torch/csrc/distributed/c10d/FlightRecorder.hpp`."""
_TRACE_BYTES: Final = 4096
_NCCL_TESTS: Final = re.compile(rb"nThread \d+ nGpus \d|out-of-place {2,60}in-place|# Avg bus bandwidth")
"""*Source:* nccl-tests `src/common.cu`, `src/util.cu`."""


class FileKind(StrEnum):
    """Kinds of files, by how they are read."""

    NCCL_LOG = "nccl_log"
    """Holds at least one line of NCCL or of PyTorch about it, whatever else: job output, or notes with pasted lines."""
    NSYS_SQLITE = "nsys_sqlite"
    """An SQLite database; whether nsys wrote it shows when it is opened."""
    NSYS_REPORT = "nsys_report"
    NSYS_TABLES = "nsys_tables"
    """A folder with a file for each table of an export (parquetdir, arrowdir), which no first bytes tell."""
    NCCL_TOPOLOGY = "nccl_topology"
    """The XML file that NCCL_TOPO_DUMP_FILE names."""
    INSPECTOR = "inspector"
    """JSON lines of NCCL's Inspector plug-in."""
    INSPECTOR_METRICS = "inspector_metrics"
    """What that plug-in writes for Prometheus instead (`*.prom`): means of 30 s by kind and size, without communicator
    and rank. Nothing can be told from them about an operation, so they are named and not read."""
    KINETO = "kineto"
    """A trace of the PyTorch profiler, packed or not."""
    FLIGHT_RECORDER = "flight_recorder"
    """A dump of PyTorch's Flight Recorder, as pickle or JSON."""
    NCCL_TESTS = "nccl_tests"
    """Result tables of nccl-tests without any line of NCCL; a log may hold them too."""
    EMPTY = "empty"
    UNKNOWN = "unknown"


def recognise(first_bytes: bytes, name: str) -> FileKind:
    """The kind of a file with these first bytes (up to `ENOUGH_BYTES` are looked at) and this name."""
    looked_at = first_bytes[:ENOUGH_BYTES]
    for kind, is_kind in _TESTS:
        if is_kind(looked_at, name):
            return kind
    return FileKind.UNKNOWN


_TESTS: Final[tuple[tuple[FileKind, Callable[[bytes, str], bool]], ...]] = (
    (FileKind.EMPTY, lambda data, _: not data),
    (FileKind.NSYS_SQLITE, lambda data, _: data.startswith(_SQLITE_MAGIC)),
    (FileKind.NSYS_REPORT, lambda data, name: name.endswith(_REPORT_ENDINGS) and b"\0" in data[:4096]),
    (FileKind.INSPECTOR, lambda data, _: _INSPECTOR.match(data) is not None and _INSPECTOR_WORD in data[:4096]),
    (FileKind.KINETO, lambda data, _: _KINETO.match(first_text(data, _TRACE_BYTES)) is not None),
    (FileKind.FLIGHT_RECORDER, lambda data, _: data.startswith(_DUMPS) and _DUMP_WORD in data),
    (FileKind.NCCL_TOPOLOGY, lambda data, _: _TOPOLOGY.match(data) is not None),
    (FileKind.NCCL_LOG, lambda data, _: _NCCL_LINE.search(data) is not None),
    (FileKind.INSPECTOR, lambda data, _: _INSPECTOR_LATER.search(data[:65536]) is not None),
    (FileKind.INSPECTOR_METRICS, lambda data, _: _INSPECTOR_METRICS.search(data[:65536]) is not None),
    (FileKind.NCCL_TESTS, lambda data, _: _NCCL_TESTS.search(data) is not None),
)
"""Asked in this order: a job's output may hold lines of NCCL and tables of nccl-tests, and is a log then."""
