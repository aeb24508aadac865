"""The SQL that reads an export, made for the tables and columns that this export has.

Only names from `schema` and integers are put into the text. Two temporary tables (they live in
SQLite's temporary store, never in the export) keep memory bounded: the kernels that communicate, and their launches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from ncclscope_agent.sources.nsys import schema
from ncclscope_agent.sources.nsys.schema import KERNEL, LONGEST_TIME_NS, NVTX, RUNTIME, STRINGS, Layout
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

TEMPLATE_COLUMNS: Final = (
    "globalPid",
    "deviceId",
    "streamId",
    "name",
    "gridX",
    "gridY",
    "gridZ",
    "blockX",
    "blockY",
    "blockZ",
    "staticSharedMemory",
    "dynamicSharedMemory",
    "registersPerThread",
)
"""Columns that repeat from kernel to kernel; the first of a row of `kernels`."""

ROW_COLUMNS: Final = (
    "correlationId",
    "start",
    "end",
    "graphNodeId",
    "launch_start",
    "launch_end",
    "launch_tid",
)
"""Columns that change; the last of a row of `kernels`."""

LONGEST_TEXT: Final = 4096
"""Characters of a text that leave SQLite: thousands of rows are fetched at once, and a cell may hold megabytes."""
_LONGEST_PAYLOAD: Final = 128
"""Bytes, more than the longest of NCCL's (`nvtx_payload.read_payload`)."""
_TID_MASK: Final = 0xFFFFFF
_EVENT_TYPES: Final = (schema.NVTX_PUSH_POP, schema.NVTX_START_END, schema.NVTX_MARK)


def kernel_name_column(layout: Layout) -> str | None:
    """The column that names kernels: shortName, else demangledName; None if kernels cannot be read."""
    if not (layout.has(STRINGS, "id", "value") and layout.has(KERNEL, "start", "end")):
        return None
    return next((column for column in ("shortName", "demangledName") if layout.has(KERNEL, column)), None)


def long_name_column(layout: Layout, column: str) -> str | None:
    """The column of demangled names, if it is another one than this: short names lack the namespace."""
    return "demangledName" if column != "demangledName" and layout.has(KERNEL, "demangledName") else None


def copy_kernels(
    layout: Layout, column: str, long_column: str | None, nccl: Collection[int], outside: Collection[int]
) -> str:
    """Copies the kernels that communicate to temp.kernel; `name` is the string id that says so.

    Unknown values become NO_NUMBER.
    """
    kept = [*TEMPLATE_COLUMNS, "correlationId", "graphNodeId"]
    name = column
    if long_column is not None:
        name = f"CASE WHEN {column} NOT IN ({_listed([*nccl, *outside])}) THEN {long_column} ELSE {column} END"
    wanted = ", ".join(_kernel_column(layout, each, name) for each in kept)
    return (
        f'CREATE TEMP TABLE kernel AS SELECT {wanted}, "start", "end" '
        f"FROM main.{KERNEL} WHERE {_communicates(column, long_column, nccl, outside)}"
    )


def _communicates(column: str, long_column: str | None, nccl: Collection[int], outside: Collection[int]) -> str:
    short = f"coalesce({column} IN ({_listed([*nccl, *outside])}), 0)"
    return short if long_column is None else f"({short} OR coalesce({long_column} IN ({_listed(outside)}), 0))"


def _kernel_column(layout: Layout, column: str, name: str) -> str:
    if column == "name":
        return f"{name} AS name"
    unknown = 0 if column == "globalPid" else NO_NUMBER
    return f"coalesce({column}, {unknown}) AS {column}" if layout.has(KERNEL, column) else f"{unknown} AS {column}"


def count_unusable(table: str, shift_ns: int) -> str:
    """Rows of a table whose times are unusable, by reason: none at all, before the capture, impossible."""
    reasons = (
        _no_times(shift_ns),
        f'"start" < {shift_ns}',
        f'"start" >= {shift_ns} AND NOT {_no_times(shift_ns)} AND NOT {_usable(shift_ns)}',
    )
    return f"SELECT {', '.join(f'coalesce(sum({reason}), 0)' for reason in reasons)} FROM {table}"


def drop_unusable(table: str, shift_ns: int) -> str:
    """Drops the rows that `count_unusable` counts."""
    return f"DELETE FROM {table} WHERE NOT {_usable(shift_ns)}"


def _no_times(shift_ns: int) -> str:
    """CUPTI had no times: both are 0 before the shift."""
    return f'("start" = {shift_ns} AND "end" = {shift_ns})'


def _usable(shift_ns: int) -> str:
    return (
        f'("start" >= {shift_ns} AND "end" >= "start" AND "end" > {shift_ns} AND "end" <= {shift_ns + LONGEST_TIME_NS})'
    )


CREATE_LAUNCHES: Final = (
    "CREATE TEMP TABLE launch (correlation INTEGER, process INTEGER, launch_start INTEGER, launch_end INTEGER, "
    "launch_tid INTEGER, PRIMARY KEY (correlation, process)) WITHOUT ROWID"
)


def copy_launches(layout: Layout, shift_ns: int) -> str | None:
    """Copies the API records that launched these kernels to temp.launch; None if they are not recorded.

    A correlation id is unique only within a process, so the process is part of the key. *Source:* Nsight
    Systems User Guide, "SQLite Schema Reference", example "Correlate CUDA Kernel Launches With CUDA API Kernel
    Launches".
    """
    if not (layout.has(RUNTIME, "start", "end", "globalTid", "correlationId") and _has_launch_key(layout)):
        return None
    process = f"globalTid & {~_TID_MASK}"
    return (
        f'INSERT OR IGNORE INTO temp.launch SELECT correlationId, {process}, "start", "end", globalTid & {_TID_MASK} '
        f"FROM main.{RUNTIME} "
        f"WHERE (correlationId, {process}) IN (SELECT correlationId, globalPid FROM temp.kernel) "
        f"AND {_usable(shift_ns)}"
    )


def _has_launch_key(layout: Layout) -> bool:
    return layout.has(KERNEL, "correlationId", "globalPid")


def kernels(names: Collection[int]) -> str:
    """Kernels of these names with their launches, by (start, correlation id): TEMPLATE_COLUMNS, then ROW_COLUMNS."""
    template = ", ".join(f"k.{column}" for column in TEMPLATE_COLUMNS)
    return (
        f'SELECT {template}, k.correlationId, k."start", k."end", k.graphNodeId, '
        f"coalesce(l.launch_start, {NO_TIME_NS}), coalesce(l.launch_end, {NO_TIME_NS}), "
        f"coalesce(l.launch_tid, {NO_NUMBER}) "
        "FROM temp.kernel k LEFT JOIN temp.launch l "
        f"ON l.correlation = k.correlationId AND l.process = k.globalPid WHERE k.name IN ({_listed(names)}) "
        'ORDER BY k."start", k.correlationId, k.rowid'
    )


def computation(
    layout: Layout, column: str, long_column: str | None, nccl: Collection[int], outside: Collection[int]
) -> str:
    """Every kernel that does not communicate: globalPid, device, start, end; in no order."""
    process = "coalesce(globalPid, 0)" if layout.has(KERNEL, "globalPid") else "0"
    device = f"coalesce(deviceId, {NO_NUMBER})" if layout.has(KERNEL, "deviceId") else str(NO_NUMBER)
    return (
        f'SELECT {process}, {device}, "start", "end" FROM main.{KERNEL} '
        f"WHERE NOT {_communicates(column, long_column, nccl, outside)}"
    )


def runtime_pids(layout: Layout) -> str | None:
    """The processes with CUDA API records; None if that is not recorded."""
    return (
        f"SELECT DISTINCT (globalTid >> 24) & {_TID_MASK} FROM main.{RUNTIME}"
        if layout.has(RUNTIME, "globalTid")
        else None
    )


def can_read_ranges(layout: Layout) -> bool:
    """Whether NVTX ranges can be placed and attributed."""
    return layout.has(NVTX, "start", "eventType", "globalTid")


def domains(layout: Layout) -> str:
    """NVTX domains: process (globalTid >> 24), domainId, name."""
    return (
        f"SELECT n.globalTid >> 24, {_nvtx_column(layout, 'domainId', '0')}, {_nvtx_text(layout)} "
        f"FROM main.{NVTX} n {_nvtx_strings(layout)} WHERE n.eventType = {schema.NVTX_DOMAIN}"
    )


def count_ranges(shift_ns: int) -> str:
    """NVTX ranges and marks: how many in all, and how many begin before the capture."""
    return (
        f'SELECT count(*), coalesce(sum("start" < {shift_ns} OR "start" > {shift_ns + LONGEST_TIME_NS}), 0) '
        f"FROM main.{NVTX} WHERE eventType IN ({_listed(_EVENT_TYPES)}) AND globalTid IS NOT NULL"
    )


def tells_payloads(layout: Layout) -> bool:
    """Whether the export has a column for the payloads of NVTX ranges."""
    return layout.has(NVTX, "binaryData")


def ranges(
    layout: Layout,
    shift_ns: int,
    preferred: Collection[tuple[int, int]],
    limit: int | None,
    *,
    are_payloads_beside: bool = False,
) -> str:
    """NVTX ranges and marks by start: globalTid, domainId, text, eventType, start, end (NO_TIME_NS: open), payload.

    Of more than `limit`, those of the `preferred` (process, domainId) are kept first, then the longest.
    `are_payloads_beside`: they are in temp.json_payload (`nvtx_payload.copy_payloads`).
    """
    payload = f"substr({_nvtx_column(layout, 'binaryData', 'NULL')}, 1, {_LONGEST_PAYLOAD})"
    if are_payloads_beside:
        payload = (
            "(SELECT p.payload FROM temp.json_payload p "
            f'WHERE p.thread = n.globalTid AND p.start = n."start" - {shift_ns})'
        )
    end = _nvtx_column(layout, '"end"', "NULL")
    usable = (
        f"n.eventType IN ({_listed(_EVENT_TYPES)}) AND n.globalTid IS NOT NULL "
        f'AND n."start" BETWEEN {shift_ns} AND {shift_ns + LONGEST_TIME_NS}'
    )
    kept = usable
    if limit is not None:
        key = f"(n.globalTid >> 24, {_nvtx_column(layout, 'domainId', '0')})"
        first = f"{key} IN (VALUES {_pairs(preferred)}) DESC, " if preferred else ""
        kept = (
            f"n.rowid IN (SELECT n.rowid FROM main.{NVTX} n WHERE {usable} "
            f'ORDER BY {first}coalesce({end}, n."start") - n."start" DESC, n.rowid LIMIT {limit})'
        )
    return (
        f"SELECT n.globalTid, {_nvtx_column(layout, 'domainId', '0')}, {_nvtx_text(layout)} AS text, n.eventType, "
        f'n."start", coalesce({end}, {NO_TIME_NS}), {payload} '
        f'FROM main.{NVTX} n {_nvtx_strings(layout)} WHERE {kept} ORDER BY n."start", n.rowid'
    )


def _nvtx_column(layout: Layout, column: str, otherwise: str) -> str:
    if not layout.has(NVTX, column.strip('"')):
        return otherwise
    return f"n.{column}" if otherwise == "NULL" else f"coalesce(n.{column}, {otherwise})"


def _nvtx_text(layout: Layout) -> str:
    """The text of an NVTX event: its own, or that of the registered string."""
    own = _nvtx_column(layout, "text", "NULL")
    registered = "s.value" if _nvtx_strings(layout) else "NULL"
    return f"substr(coalesce({own}, {registered}, ''), 1, {LONGEST_TEXT})"


def _nvtx_strings(layout: Layout) -> str:
    if layout.has(NVTX, "textId") and layout.has(STRINGS, "id", "value"):
        return f"LEFT JOIN main.{STRINGS} s ON s.id = n.textId"
    return ""


def _pairs(pairs: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"({first}, {second})" for first, second in pairs)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in numbers)
