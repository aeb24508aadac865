"""Makes small nsys exports, with the tables and columns that nsys itself writes."""

from __future__ import annotations

import sqlite3
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

EPOCH_NS = 1_760_000_000_000_000_000
DURATION_NS = 10_000_000_000

TABLES: Mapping[str, str] = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
    "ANALYSIS_DETAILS": (
        "globalVid INTEGER NOT NULL, duration INTEGER NOT NULL, startTime INTEGER NOT NULL, stopTime INTEGER NOT NULL"
    ),
    "TARGET_INFO_SYSTEM_ENV": (
        "globalVid INTEGER, devStateName TEXT NOT NULL, name TEXT NOT NULL, nameEnum INTEGER NOT NULL, "
        "value TEXT NOT NULL"
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
        "greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, "
        "demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, "
        "cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, "
        "gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, "
        "staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL, "
        "localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL, "
        "sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, correlationId INTEGER, "
        "globalPid INTEGER, graphId INTEGER, graphExecId INTEGER"
    ),
    "NVTX_EVENTS": (
        "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, "
        "color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, "
        "uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, "
        "floatValue REAL, jsonTextId INTEGER, jsonText TEXT"
    ),
    "DIAGNOSTIC_EVENT": (
        "timestamp INTEGER NOT NULL, timestampType INTEGER NOT NULL, source INTEGER NOT NULL, "
        "severity INTEGER NOT NULL, text TEXT NOT NULL, globalPid INTEGER"
    ),
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
}
"""Columns as nsys 2023.4 makes them; DIAGNOSTIC_EVENT as 2024.5 does. *Source:* exports of those versions."""


def global_pid(pid: int) -> int:
    """The globalPid of a process of the local host."""
    return (1 << 48) | (pid << 24)


@dataclass(slots=True)
class MadeExport:
    """Rows of an export to be written, by table; tables without rows are not written, as nsys does by default."""

    rows: dict[str, list[dict[str, object]]] = field(default_factory=dict[str, list[dict[str, object]]])
    strings: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, table: str, **columns: object) -> None:
        """One row; columns that cannot be null and are not given become 0."""
        self.rows.setdefault(table, []).append(columns)

    def string(self, text: str) -> int:
        """The id of a string."""
        return self.strings.setdefault(text, len(self.strings) + 1)

    def session(self, *, host: str | None = "node-0", epoch_ns: int = EPOCH_NS, duration_ns: int = DURATION_NS) -> None:
        """Session start, duration, host and metadata."""
        self.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2023.4.4.54")
        self.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.7.2")
        self.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=epoch_ns)
        self.add("ANALYSIS_DETAILS", globalVid=0, duration=duration_ns)
        if host is not None:
            self.add("TARGET_INFO_SYSTEM_ENV", devStateName="Local", name="Hostname", nameEnum=619, value=host)

    def kernel(self, name: str, start: int, end: int, *, pid: int = 100, **columns: object) -> None:
        """One kernel; a correlation id makes no launch by itself."""
        given: dict[str, object] = {
            "streamId": 7,
            "gridX": 24,
            "blockX": 512,
            "dynamicSharedMemory": 82240,
            "registersPerThread": 96,
            "globalPid": global_pid(pid),
            "shortName": self.string(name),
            "demangledName": self.string(name + "(ncclDevKernelArgsStorage<(unsigned long)4096>)"),
        }
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, **{**given, **columns})

    def launch(self, correlation: int, start: int, end: int, *, pid: int = 100, tid: int = 101) -> None:
        """One CUDA API call."""
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start,
            end=end,
            globalTid=global_pid(pid) | tid,
            correlationId=correlation,
            nameId=self.string("cudaLaunchKernelExC_v11060"),
        )

    def range(self, text: str, start: int, end: int | None, *, pid: int = 100, kind: int = 59, domain: int = 0) -> None:
        """One NVTX range (59, 60), mark (34) or domain (75), with a text of its own."""
        thread = global_pid(pid) | (pid + 1)
        self.add("NVTX_EVENTS", start=start, end=end, eventType=kind, text=text, globalTid=thread, domainId=domain)

    def write(self, path: Path, *, without: tuple[str, ...] = ()) -> Path:
        """Writes the export in one transaction, leaving out tables ("T") and columns ("T.c")."""
        database = sqlite3.connect(path)
        with database:
            for table, columns in TABLES.items():
                if table not in without and (table in self.rows or (table == "StringIds" and self.strings)):
                    self._write_table(database, table, columns, without)
        database.close()
        return path

    def _write_table(self, database: sqlite3.Connection, table: str, columns: str, without: tuple[str, ...]) -> None:
        kept = [column for column in columns.split(", ") if f"{table}.{column.split()[0]}" not in without]
        database.execute(f"CREATE TABLE {table} ({', '.join(kept)})")
        names = [column.split()[0] for column in kept]
        unset = {column.split()[0]: 0 if "NOT NULL" in column else None for column in kept}
        rows = self.rows.get(table, [])
        if table == "StringIds":
            rows = [{"id": number, "value": text} for text, number in self.strings.items()]
        database.executemany(
            f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})",
            [[row.get(name, unset[name]) for name in names] for row in rows],
        )


def nccl_export() -> MadeExport:
    """Two NCCL kernels of one process with launches, and one kernel of computation."""
    made = MadeExport()
    made.session()
    made.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 5_000, 9_000, correlationId=11)
    made.kernel("ncclDevKernel_SendRecv", 12_000, 13_500, correlationId=12)
    made.kernel("gemm", 1_000, 4_000, correlationId=10)
    made.launch(10, 100, 200)
    made.launch(11, 300, 400)
    made.launch(12, 500, 600)
    return made


STAND_IN = """#!{python}
import shutil, sys
arguments = dict(argument.split("=", 1) for argument in sys.argv[2:-1])
assert sys.argv[1] == "export" and arguments["--type"] == "sqlite"
{body}
"""


def stand_in_for_nsys(folder: Path, body: str) -> str:
    """A program that takes the arguments of `nsys export`."""
    path = folder / "nsys"
    path.write_text(STAND_IN.format(python=sys.executable, body=body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def copying_nsys(folder: Path) -> str:
    """A stand-in whose exports are all `nccl_export`."""
    made = nccl_export().write(folder / "made.db")
    return stand_in_for_nsys(folder, f'shutil.copy({str(made)!r}, arguments["--output"])')
