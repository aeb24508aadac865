"""What an open export says about itself: host, processes, session, names, losses. Each question is one query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ncclscope_agent.sources import nsys_queries, nsys_schema
from ncclscope_agent.sources.nsys_complete import OpenExport
from ncclscope_agent.sources.nsys_names import NAME_PATTERNS, KernelKind, kernel_kind
from ncclscope_agent.sources.nsys_schema import Session

_LONGEST_HOST: Final = 253


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNames:
    """Which strings name kernels that communicate."""

    column: str
    """Column of the kernel table that points at them."""
    nccl: Mapping[int, str]
    """String id to name, for NCCL's kernels."""
    foreign: Mapping[int, str]
    """Likewise, for kernels that communicate and are not NCCL's."""

    @property
    def communication(self) -> list[int]:
        """All of them."""
        return [*self.nccl, *self.foreign]


def kernel_names(opened: OpenExport) -> KernelNames | None:
    """The names of kernels that communicate; None where kernels cannot be read.

    Only strings that may be such names are read: the table also holds environments and command lines.
    """
    column = nsys_queries.kernel_name_column(opened.layout)
    if column is None:
        return None
    where = " OR ".join(["value LIKE ?"] * len(NAME_PATTERNS))
    query = f"SELECT id, value FROM main.{nsys_schema.STRINGS} WHERE {where}"
    kinds: dict[KernelKind, dict[int, str]] = {kind: {} for kind in KernelKind}
    for number, name in opened.connection.execute(query, NAME_PATTERNS):
        kinds[kernel_kind(name)][int(number)] = name
    return KernelNames(column=column, nccl=kinds[KernelKind.NCCL], foreign=kinds[KernelKind.OTHER_COMMUNICATION])


def session_of(opened: OpenExport) -> Session:
    """Where the times of the export lie. Raises ValueError where what was added to them cannot be told."""
    epoch = _number(opened, nsys_schema.SESSION_START, "utcEpochNs")
    duration = _number(opened, nsys_schema.ANALYSIS, "duration")
    return Session(
        utc_epoch_ns=epoch if epoch is not None and 0 < epoch < 2**62 else None,
        shift_ns=_bounded(int(opened.meta.get("EXPORT_CONFIG_TIME_SHIFT", "0"))),
        duration_ns=duration if duration is not None and 0 <= duration <= nsys_schema.LONGEST_TIME_NS else None,
    )


def _bounded(shift_ns: int) -> int:
    if abs(shift_ns) >= 2**61:
        raise ValueError("EXPORT_CONFIG_TIME_SHIFT is beyond any time")
    return shift_ns


def _number(opened: OpenExport, table: str, column: str) -> int | None:
    """The integer of a table with one row; None where it is not there."""
    if not opened.layout.has(table, column):
        return None
    query = f"SELECT {column} FROM main.{table} WHERE typeof({column}) = 'integer' LIMIT 1"
    row = opened.connection.execute(query).fetchone()
    return None if row is None else int(row[0])


def recorded_host(opened: OpenExport) -> str | None:
    """The host name cut at the first dot, as NCCL's log prints it. No other row of its table is read.

    *Source:* NCCL `src/misc/utils.cc:getHostName`.
    """
    if not opened.layout.has(nsys_schema.SYSTEM, "name", "value"):
        return None
    query = f"SELECT value FROM main.{nsys_schema.SYSTEM} WHERE name = 'Hostname' LIMIT 1"
    row = opened.connection.execute(query).fetchone()
    name = "" if row is None or row[0] is None else str(row[0]).strip().split(".", 1)[0]
    return name[:_LONGEST_HOST] or None


def runtime_pids(opened: OpenExport) -> set[int]:
    """Processes with CUDA API records."""
    query = nsys_queries.runtime_pids(opened.layout)
    return set() if query is None else {int(pid) for (pid,) in opened.connection.execute(query) if pid}


def domains_of(opened: OpenExport) -> dict[tuple[int, int], str]:
    """Names of NVTX domains by (process, domainId): an id means another domain in another process."""
    rows = opened.connection.execute(nsys_queries.domains(opened.layout))
    return {(int(process), int(domain)): name for process, domain, name in rows if process is not None and name}


def graph_launches(opened: OpenExport) -> int:
    """CUDA-graph launches that were recorded as a whole."""
    if nsys_schema.GRAPH_TRACE not in opened.layout.tables:
        return 0
    return int(opened.connection.execute(f"SELECT count(*) FROM main.{nsys_schema.GRAPH_TRACE}").fetchone()[0])


def missing_of(opened: OpenExport, session: Session) -> tuple[str, ...]:
    """Tables and columns that were looked for and are not there, or lack the one row that matters."""
    absent = dict.fromkeys(opened.layout.missing())
    if session.utc_epoch_ns is None:
        absent[nsys_schema.SESSION_START] = None
    if session.duration_ns is None:
        absent[nsys_schema.ANALYSIS] = None
    return tuple(absent)


def diagnostics(opened: OpenExport) -> list[tuple[str, int]]:
    """Warnings of nsys as (text, globalPid), each once, in order; empty where the version does not export them."""
    layout = opened.layout
    if not layout.has(nsys_schema.DIAGNOSTICS, "severity", "text"):
        return []
    process = "coalesce(globalPid, 0)" if layout.has(nsys_schema.DIAGNOSTICS, "globalPid") else "0"
    rows = opened.connection.execute(
        f"SELECT text, {process}, min(rowid) FROM main.{nsys_schema.DIAGNOSTICS} "
        f"WHERE severity >= 2 AND text IS NOT NULL GROUP BY 1, 2 ORDER BY 3 LIMIT 10000"
    )
    return [(str(text), int(global_pid)) for text, global_pid, _ in rows]
