"""Metadata of an open export: host, processes, session, losses. Each question is one query."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

from ncclscope_agent.sources.nsys import queries, schema
from ncclscope_agent.sources.nsys.open_export import OpenExport
from ncclscope_agent.sources.nsys.schema import Session, pid_of

_NOTHING_COLLECTED: Final = re.compile(r"^No .* events collected", re.IGNORECASE)
_PATH: Final = re.compile(r"(?<![\w.])~?/[^\s\"')]*/[^\s\"',;)]*")


def shown_warnings(
    found: Iterable[tuple[str, int]], cuda_pids: Collection[int], *, limit: int, length: int
) -> tuple[str, ...]:
    """Texts of (text, globalPid) worth showing, in order of first appearance; at most `limit`, each cut at `length`.

    nsys says "No ... events collected" of every launcher (mpirun, torchrun), so it counts only if its
    process has CUDA records or none has.
    """
    kept: dict[str, None] = {}
    for text, process in found:
        if _NOTHING_COLLECTED.match(text) and cuda_pids and pid_of(process) not in cuda_pids:
            continue
        kept[_PATH.sub("<path>", " ".join(text.split()))[:length]] = None
        if len(kept) == limit:
            break
    return tuple(kept)


_LONGEST_HOST: Final = 253
_LONGEST_GPU: Final = 64


def session_of(opened: OpenExport) -> Session:
    """Time base of the export. Raises ValueError if the shift that the exporter added cannot be read."""
    epoch = _number(opened, schema.SESSION_START, "utcEpochNs")
    duration = _number(opened, schema.ANALYSIS, "duration")
    return Session(
        utc_epoch_ns=epoch if epoch is not None and 0 < epoch < 2**62 else None,
        shift_ns=_bounded(int(opened.meta.get("EXPORT_CONFIG_TIME_SHIFT", "0"))),
        duration_ns=duration if duration is not None and 0 <= duration <= schema.LONGEST_TIME_NS else None,
    )


def _bounded(shift_ns: int) -> int:
    if abs(shift_ns) >= 2**61:
        raise ValueError("EXPORT_CONFIG_TIME_SHIFT is beyond any time")
    return shift_ns


def _number(opened: OpenExport, table: str, column: str) -> int | None:
    """The integer of a table with one row; None if it is not there."""
    if not opened.layout.has(table, column):
        return None
    query = f"SELECT {column} FROM main.{table} WHERE typeof({column}) = 'integer' LIMIT 1"
    row = opened.connection.execute(query).fetchone()
    return None if row is None else int(row[0])


def recorded_host(opened: OpenExport) -> str | None:
    """The host name cut at the first dot, as NCCL's log prints it. No other row of its table is read.

    *Source:* NCCL `src/misc/utils.cc:getHostName`.
    """
    if not opened.layout.has(schema.SYSTEM, "name", "value"):
        return None
    query = f"SELECT substr(value, 1, {queries.LONGEST_TEXT}) FROM main.{schema.SYSTEM} WHERE name = 'Hostname' LIMIT 1"
    row = opened.connection.execute(query).fetchone()
    name = "" if row is None or row[0] is None else str(row[0]).strip().split(".", 1)[0]
    return name[:_LONGEST_HOST] or None


def gpu_name(opened: OpenExport) -> str | None:
    """CUDA's name of the GPUs of the host; None if they differ."""
    if not opened.layout.has(schema.GPU, "name"):
        return None
    rows = opened.connection.execute(
        f"SELECT DISTINCT substr(name, 1, {_LONGEST_GPU}) FROM main.{schema.GPU} WHERE typeof(name) = 'text' LIMIT 2"
    ).fetchall()
    return str(rows[0][0]) if len(rows) == 1 else None


def has_payloads(opened: OpenExport) -> bool:
    """Whether any NVTX range carries a payload."""
    if not queries.tells_payloads(opened.layout):
        return False
    query = f"SELECT 1 FROM main.{schema.NVTX} WHERE typeof(binaryData) = 'blob' LIMIT 1"
    return opened.connection.execute(query).fetchone() is not None


def runtime_pids(opened: OpenExport) -> set[int]:
    """Processes with CUDA API records."""
    query = queries.runtime_pids(opened.layout)
    return set() if query is None else {int(pid) for (pid,) in opened.connection.execute(query) if pid}


def domains_of(opened: OpenExport) -> dict[tuple[int, int], str]:
    """Names of NVTX domains by (process, domainId): an id means another domain in another process."""
    rows = opened.connection.execute(queries.domains(opened.layout))
    return {(int(process), int(domain)): name for process, domain, name in rows if process is not None and name}


def graph_launches(opened: OpenExport) -> int:
    """CUDA-graph launches that were recorded as a whole."""
    if schema.GRAPH_TRACE not in opened.layout.tables:
        return 0
    return int(opened.connection.execute(f"SELECT count(*) FROM main.{schema.GRAPH_TRACE}").fetchone()[0])


def missing_of(opened: OpenExport, session: Session) -> tuple[str, ...]:
    """Tables and columns that were looked for and are not there, or lack the one row that matters."""
    absent = dict.fromkeys(opened.layout.missing())
    if session.utc_epoch_ns is None:
        absent[schema.SESSION_START] = None
    if session.duration_ns is None:
        absent[schema.ANALYSIS] = None
    return tuple(absent)


def diagnostics(opened: OpenExport) -> list[tuple[str, int]]:
    """Warnings of nsys as (text, globalPid), each once, in order; empty if the version does not export them."""
    layout = opened.layout
    if not layout.has(schema.DIAGNOSTICS, "severity", "text"):
        return []
    process = "coalesce(globalPid, 0)" if layout.has(schema.DIAGNOSTICS, "globalPid") else "0"
    rows = opened.connection.execute(
        f"SELECT substr(text, 1, {queries.LONGEST_TEXT}), {process}, min(rowid) FROM main.{schema.DIAGNOSTICS} "
        f"WHERE severity >= 2 AND text IS NOT NULL GROUP BY 1, 2 ORDER BY 3 LIMIT 10000"
    )
    return [(str(text), int(global_pid)) for text, global_pid, _ in rows]
