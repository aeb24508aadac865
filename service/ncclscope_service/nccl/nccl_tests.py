"""Reads what nccl-tests (and rccl-tests) print: how fast a machine has been seen to be.

The table has one row per message size; columns came and went over the versions (`root`, `redop`, `#wrong` or
`error`, in place and out of place). Which operation it was is said by the name of the program, if a command
line or a header shows it, else by the name of the file; how many ranks on how many hosts, by the list of devices.

Source: nccl-tests `src/common.cu` (header, device list, table) and `doc/PERFORMANCE.md` (busbw).
`MeasuredBaseline` holds what was read, over message size.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.terms import OPERATION_CODES

_PROGRAMS: Final = {
    "allreduce": "AllReduce",
    "allgather": "AllGather",
    "reducescatter": "ReduceScatter",
    "alltoall": "AlltoAll",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "gather": "Gather",
    "scatter": "Scatter",
    "sendrecv": "Send",
}
_NAME: Final = "all_?reduce|all_?gather|reduce_?scatter|alltoall|broadcast|reduce|gather|scatter|sendrecv"
_PROGRAM: Final = re.compile(rf"\b({_NAME})_perf\b")
_IN_FILE_NAME: Final = re.compile(rf"({_NAME})")
HEADER_WORD: Final = b" nGpus "
"""Stands in the first line that the program prints, and so in every file that `NcclTests` finds a benchmark in."""
_START: Final = re.compile(r"nThread \d+ nGpus")
_RANK: Final = re.compile(r"\bRank\s+(\d{1,9})\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_TYPE: Final = r"u?int(?:8|32|64)|half|float|double|bfloat16|f8e\dm\d"
_TYPE_WORDS: Final = ("float", "int", "half", "double", "f8e")
"""One of them stands in each row: a log has many lines without, which cost little."""
_TIME: Final = r"\d{1,15}(?:\.\d{1,3})?"
"""Longer ones are none that a machine has measured, and fit no column of 64 bits, as rates."""
_RATE: Final = r"\d{1,9}\.\d\d"
"""Always with two digits (`%6.2f`): fewer are a torn line."""
_WRONG: Final = r"\d{1,18}(?:e[-+]\d{1,3})?|N/A|nan|inf"
_MEASURED: Final = rf"({_TIME})\s+({_RATE})\s+({_RATE})(?:\s+({_WRONG}))?(?!\S)"
_FRONT: Final = re.compile(rf"(?<!\S)\d{{1,18}}\s+\d{{1,18}}\s+(?:{_TYPE})\s")
_ROW: Final = re.compile(
    rf"^\s*(?:\S+:\s+)?(\d{{1,18}})\s+(\d{{1,18}})\s+({_TYPE})\s+(?:([a-z]\w{{0,31}})\s+)?"
    rf"(?:(-?\d{{1,9}})\s+(?={_TIME}\s+{_RATE}\s+{_RATE}))?{_MEASURED}(?:\s+{_MEASURED})?"
)
"""A whole number in front of a time and two rates is the root; in front of two rates alone it is the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One result: out of place or in place."""

    time_ns: int
    algbw: int
    """Bytes per second, as busbw."""
    busbw: int
    wrong: str | None
    """The last column as printed: number of wrong values, largest error (before 2.12), or N/A."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRow:
    """One line of the table."""

    message_bytes: int
    count: int
    out_of_place: Measured
    in_place: Measured | None


@dataclass(slots=True, kw_only=True)
class Benchmark:
    """Rows of one run of nccl-tests with one type, reduction and root."""

    file: str
    op: int | None
    """Code in terms.OPERATIONS; Send for sendrecv. None if neither the text nor the name of the file says it."""
    dtype: str | None = None
    red_op: str | None = None
    root: int | None = None
    hosts: dict[int, str] = field(default_factory=dict[int, str])
    """By rank, of the list of devices; shared by the tables of a run."""
    rows: list[BenchmarkRow] = field(default_factory=list[BenchmarkRow])
    torn_rows: int = 0
    """Lines that hold the beginning of a row and are not whole, or glued to others: skipped, but for a whole result."""

    @property
    def ranks(self) -> int | None:
        """None if no device is listed."""
        return max(self.hosts) + 1 if self.hosts else None

    @property
    def nodes(self) -> list[str]:
        """The hosts, sorted."""
        return sorted(set(self.hosts.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSize:
    """Measured bus bandwidth of one operation, shape and message size."""

    op: int
    """Code in terms.OPERATIONS; Send for sendrecv."""
    ranks: int
    nodes: int
    message_bytes: int
    busbw: float
    """Bytes per second."""


@dataclass(slots=True)
class NcclTests:
    """Reads output line by line; text around tables is passed over."""

    file_name: str
    """Names the operation if nothing in the text does."""

    def read(self, lines: Iterable[str], skipped: Counter[str]) -> Iterator[MeasuredSize]:
        """Every measurement; rows of which the operation or the ranks are not said are counted in `skipped`."""
        for table in self.benchmarks(lines):
            if table.op is None or table.ranks is None:
                skipped["operation_not_printed" if table.op is None else "ranks_not_printed"] += len(table.rows)
                continue
            for row in table.rows:
                for measured in filter(None, (row.out_of_place, row.in_place)):
                    yield MeasuredSize(
                        op=table.op,
                        ranks=table.ranks,
                        nodes=len(table.nodes),
                        message_bytes=row.message_bytes,
                        busbw=float(measured.busbw),
                    )

    def benchmarks(self, lines: Iterable[str]) -> list[Benchmark]:
        """Every table in order, also one whose header was printed and no row; rows may stand without a header."""
        named = _IN_FILE_NAME.search(self.file_name.lower())
        op = _operation(named[1]) if named else None
        found: list[Benchmark] = []
        is_open = False
        for line in lines:
            if "_perf" in line and (program := _PROGRAM.search(line)):
                op = _operation(program[1])
            if "nThread" in line and _START.search(line):
                found.append(Benchmark(file=self.file_name, op=op))
                is_open = True
            elif is_open and "Rank" in line and (device := _RANK.search(line)):
                found[-1].hosts[int(device[1])] = device[2]
            elif not any(word in line for word in _TYPE_WORDS):
                continue
            elif row := _ROW.match(line):
                if not found:
                    found.append(Benchmark(file=self.file_name, op=op))
                _add(found, op, row)
            elif found and _FRONT.search(line):
                found[-1].torn_rows += 1
        return found


def _add(found: list[Benchmark], op: int | None, row: re.Match[str]) -> None:
    """Puts a row into the last table, or begins another where type, reduction or root are others."""
    last, root = found[-1], None if row[5] is None else int(row[5])
    if last.rows and (last.op, last.dtype, last.red_op, last.root) != (op, row[3], row[4], root):
        last = replace(last, rows=[], torn_rows=0)
        found.append(last)
    last.op, last.dtype, last.red_op, last.root = op, row[3], row[4], root
    last.torn_rows += row[10] is None and bool(row.string[row.end() :].strip())
    last.rows.append(
        BenchmarkRow(
            message_bytes=int(row[1]),
            count=int(row[2]),
            out_of_place=_measured(*row.group(6, 7, 8, 9)),
            in_place=_measured(*row.group(10, 11, 12, 13)) if row[10] else None,
        )
    )


def _measured(time: str, algbw: str, busbw: str, wrong: str | None) -> Measured:
    """Of the columns us, GB/s, GB/s and the count of wrong values."""
    return Measured(
        time_ns=round(float(time) * 1e3),
        algbw=round(float(algbw) * 1e9),
        busbw=round(float(busbw) * 1e9),
        wrong=wrong,
    )


def _operation(program: str) -> int:
    return OPERATION_CODES[_PROGRAMS[program.replace("_", "")]]


Shape = tuple[int, int, int]
"""(operation, ranks, nodes)."""


class MeasuredBaseline:
    """Bus bandwidth over message size, for each (operation, ranks, nodes) that was tested."""

    def __init__(self, tested: Iterable[MeasuredSize]) -> None:
        """Of several measurements of one size the best counts."""
        best: dict[Shape, dict[int, float]] = defaultdict(dict)
        for each in tested:
            if each.message_bytes > 0 and each.busbw > 0:
                sizes = best[each.op, each.ranks, each.nodes]
                sizes[each.message_bytes] = max(each.busbw, sizes.get(each.message_bytes, 0.0))
        self._curves: dict[Shape, tuple[NDArray[np.float64], NDArray[np.float64]]] = {
            shape: (np.log(np.array(sorted(sizes))), np.log([sizes[size] for size in sorted(sizes)]))
            for shape, sizes in best.items()
        }

    @property
    def shapes(self) -> list[Shape]:
        """(operation, ranks, nodes) that were tested, sorted."""
        return sorted(self._curves)

    def busbw(self, shape: Shape, message_bytes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Bytes per second at these sizes: straight lines between the tested ones, both axes logarithmic.

        Above the largest size its bandwidth holds; below the smallest, and for a shape that was not tested, NaN.
        """
        curve = self._curves.get(shape)
        if curve is None:
            return np.full(len(message_bytes), np.nan)
        sizes, rates = curve
        asked = np.log(np.maximum(message_bytes, 1))
        found: NDArray[np.float64] = np.exp(np.interp(asked, sizes, rates))
        return np.where(asked < sizes[0] - 1e-9, np.nan, found)

    def largest_busbw(self, shape: Shape) -> float | None:
        """The best at any size, bytes per second; None for a shape that was not tested."""
        curve = self._curves.get(shape)
        return None if curve is None else float(np.exp(curve[1].max()))
