"""Puts the lines of a tuning table together: what NCCL expects of each function, algorithm and protocol.

Three layouts: up to 2.17 one block, whose header names algorithm and protocol of each column; 2.18 to 2.22
two blocks of three algorithms; from 2.23 on a third block with one algorithm, under a row of nine protocols.

*Source:* NCCL `src/graph/tuning.cc:ncclTopoTuneModel`.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ncclscope_agent.sources.nccl_log.prefix import Writer
from ncclscope_wire.topology import TuningCell, TuningTableSeen

MAX_OPEN_TABLES: Final = 64
MAX_BLOCKS: Final = 8

_FUNCTIONS: Final = (b"Broadcast", b"Reduce", b"AllGather", b"ReduceScatter", b"AllReduce")
"""In the order of the rows."""
_PROTOCOLS: Final = {b"LL": "LL", b"LL128": "LL128", b"Simple": "SIMPLE"}
_ALGORITHMS: Final = {
    b"Tree": "TREE",
    b"Ring": "RING",
    b"CollNet": "COLLNET",
    b"CollNetDirect": "COLLNET_DIRECT",
    b"CollNetChain": "COLLNET_CHAIN",
    b"NVLS": "NVLS",
    b"NVLSTree": "NVLS_TREE",
    b"PAT": "PAT",
}
"""As printed, to the names that TUNING lines use; CollNet was one algorithm up to 2.13."""
_TWO_BLOCKS: Final = 6
_THREE_BLOCKS: Final = 7

_HEADER: Final = re.compile(rb"\s*Latency/AlgBw \|(?P<columns>(?: *\w+/ *\w+ \|)+)\s*")
_COLUMN: Final = re.compile(rb"(\w+)/ *(\w+)")
_ALGORITHM_ROW: Final = re.compile(rb"\s*Algorithm +\|(?P<columns>(?: +\w+ +\|)+)\s*")
_PROTOCOL_ROW: Final = re.compile(rb"\s*Protocol +\|(?P<columns>(?: +\w+ +\|)+)\s*")
_THREADS_ROW: Final = re.compile(rb"\s*Max NThreads \|(?P<columns>(?: +\d{1,6} \|)+)\s*")
_DATA_ROW: Final = re.compile(
    rb"\s*(?P<function>Broadcast|Reduce|AllGather|ReduceScatter|AllReduce) \|"
    rb"(?P<cells>(?: *-?\d+\.\d/ *-?\d+\.\d \|)+)\s*"
)
_CELL: Final = re.compile(rb"(-?\d+\.\d)/ *(-?\d+\.\d)")
"""-1.0 where 2.31 has nothing available; older ones print 0."""
_WORD: Final = re.compile(rb"\w+")


@dataclass(slots=True)
class _Block:
    """Rows under one header."""

    columns: list[tuple[str, str]]
    """(algorithm, protocol) of each column, as far as they were printed."""
    algorithms: list[str] = field(default_factory=list[str])
    """Of a block whose protocols are in a row of their own."""
    has_threads: bool = False
    rows: int = 0


@dataclass(slots=True)
class _Table:
    """A table of which lines still come."""

    writer: Writer
    line: int
    is_old: bool
    lines: int = 0
    blocks: list[_Block] = field(default_factory=list[_Block])
    cells: list[TuningCell] = field(default_factory=list[TuningCell])
    threads: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])

    def is_complete(self) -> bool:
        """Whether every block that this layout has is there with all of its rows."""
        if not self.blocks or any(block.rows < len(_FUNCTIONS) for block in self.blocks):
            return False
        algorithms = [algorithm for block in self.blocks for algorithm in block.algorithms]
        return self.is_old or len(algorithms) in (_TWO_BLOCKS, _THREE_BLOCKS)


class TuningTable:
    """Assembles tables per (pid, tid) from messages (what stands behind `NCCL INFO `). Nothing raises.

    A table with a missing or torn row is dropped, and its lines are counted: without some of its cells it would
    name the wrong algorithm as NCCL's choice.
    """

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[str, int, int], _Table] = OrderedDict()
        self._done: list[TuningTableSeen] = []
        self._dropped: Counter[str] = Counter()

    def ingest_line(self, writer: Writer, line: int, message: bytes, *, is_whole: bool = True) -> bool:
        """Takes one message; True if it belongs to a table (then it is understood).

        Messages that belong to no table may be fed as well, and should: they say that a table has ended.
        `is_whole` is False if the message may have been cut.
        """
        key = (writer.host, writer.pid, writer.tid)
        table = self._tables.get(key)
        if b"|" not in message or not _is_row(message):
            if table is not None:
                self._end(key, table)
            return False
        if _begins(message, table):
            if table is not None:
                self._end(key, table)
            table = self._begin(key, _Table(writer, line, is_old=_HEADER.fullmatch(message) is not None))
        if table is None:
            self._dropped["torn_table"] += 1
            return True
        table.lines += 1
        if not is_whole or len(table.blocks) > MAX_BLOCKS or not _add(table, message):
            self._drop(key, table)
        elif table.is_complete() and (table.is_old or len(table.blocks[-1].algorithms) == 1):
            self._end(key, table)
        return True

    def tear(self) -> None:
        """A line of the log was torn. Its writer is unknown, so every open table may have lost it."""
        for key, table in list(self._tables.items()):
            self._drop(key, table)

    def finish(self) -> None:
        """The log is at its end: an unfinished table is dropped and counted."""
        for key, table in list(self._tables.items()):
            self._end(key, table)

    def drain_tables(self) -> tuple[TuningTableSeen, ...]:
        """Tables that were completed since the last call."""
        done, self._done = self._done, []
        return tuple(done)

    def drain_dropped(self) -> Counter[str]:
        """Lines of tables that were dropped since the last call, by reason ("torn_table")."""
        dropped = self._dropped
        if dropped:
            self._dropped = Counter()
        return dropped

    def _begin(self, key: tuple[str, int, int], table: _Table) -> _Table:
        self._tables[key] = table
        if len(self._tables) > MAX_OPEN_TABLES:
            self._end(*next(iter(self._tables.items())))
        return table

    def _drop(self, key: tuple[str, int, int], table: _Table) -> None:
        del self._tables[key]
        self._dropped["torn_table"] += table.lines

    def _end(self, key: tuple[str, int, int], table: _Table) -> None:
        if not table.is_complete():
            self._drop(key, table)
            return
        del self._tables[key]
        self._done.append(
            TuningTableSeen(
                host=table.writer.host,
                pid=table.writer.pid,
                tid=table.writer.tid,
                line=table.line,
                cells=tuple(table.cells),
                max_threads=tuple(table.threads),
            )
        )


def _is_row(message: bytes) -> bool:
    return any(form.fullmatch(message) for form in (_DATA_ROW, _THREADS_ROW, _PROTOCOL_ROW, _ALGORITHM_ROW, _HEADER))


def _begins(message: bytes, table: _Table | None) -> bool:
    """Whether this row is the first of a table: the old header, or the block that names Tree."""
    if _HEADER.fullmatch(message):
        return True
    found = _ALGORITHM_ROW.fullmatch(message)
    return found is not None and (_WORD.findall(found["columns"])[0] == b"Tree" or table is None)


def _add(table: _Table, message: bytes) -> bool:
    """Adds one row; False if it does not fit what was there before."""
    if (found := _HEADER.fullmatch(message)) is not None:
        table.blocks.append(_Block([_named(*column) for column in _COLUMN.findall(found["columns"])]))
        return True
    if (found := _ALGORITHM_ROW.fullmatch(message)) is not None:
        is_first_or_next = not table.blocks or table.blocks[-1].rows == len(_FUNCTIONS)
        table.blocks.append(_Block([], [_algorithm(name) for name in _WORD.findall(found["columns"])]))
        return is_first_or_next
    return bool(table.blocks) and _add_to_block(table, table.blocks[-1], message)


def _add_to_block(table: _Table, block: _Block, message: bytes) -> bool:
    if (found := _PROTOCOL_ROW.fullmatch(message)) is not None:
        return _add_protocols(block, _WORD.findall(found["columns"]))
    if (found := _THREADS_ROW.fullmatch(message)) is not None:
        return _add_threads(table, block, [int(text) for text in _WORD.findall(found["columns"])])
    found = _DATA_ROW.fullmatch(message)
    return found is not None and _add_cells(table, block, found["function"], _CELL.findall(found["cells"]))


def _algorithm(printed: bytes) -> str:
    return _ALGORITHMS.get(printed) or printed.decode("ascii", "replace").upper()


def _named(algorithm: bytes, protocol: bytes) -> tuple[str, str]:
    return _algorithm(algorithm), _PROTOCOLS.get(protocol) or protocol.decode("ascii", "replace").upper()


def _add_protocols(block: _Block, printed: Sequence[bytes]) -> bool:
    """Columns are algorithm by algorithm; the row of protocols is nine wide even if the block is not."""
    each = len(_PROTOCOLS)
    if block.columns or block.rows or len(printed) < each * len(block.algorithms):
        return False
    protocols = [_PROTOCOLS.get(name) for name in printed[: each * len(block.algorithms)]]
    if None in protocols:
        return False
    block.columns = [
        (algorithm, protocols[each * at + offset] or "")
        for at, algorithm in enumerate(block.algorithms)
        for offset in range(each)
    ]
    return True


def _add_threads(table: _Table, block: _Block, threads: Sequence[int]) -> bool:
    if block.has_threads or block.rows or len(threads) != len(block.columns):
        return False
    block.has_threads = True
    table.threads += [(*column, count) for column, count in zip(block.columns, threads, strict=True)]
    return True


def _add_cells(table: _Table, block: _Block, function: bytes, cells: Sequence[tuple[bytes, bytes]]) -> bool:
    if block.rows >= len(_FUNCTIONS) or function != _FUNCTIONS[block.rows] or len(cells) != len(block.columns):
        return False
    block.rows += 1
    table.cells += [
        TuningCell(
            function=function.decode(),
            algorithm=algorithm,
            protocol=protocol,
            latency_us=max(float(latency), 0.0),
            bytes_per_second=max(round(float(bandwidth) * 1e9), 0),
        )
        for (algorithm, protocol), (latency, bandwidth) in zip(block.columns, cells, strict=True)
    ]
    return True
