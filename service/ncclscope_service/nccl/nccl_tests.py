"""Reads what nccl-tests (and rccl-tests) print: how fast a machine has been seen to be.

The table has one row per message size; columns came and went over the versions (`root`, `redop`, `#wrong` or
`error`, in place and out of place), so a row is read from its ends: size, count, type in front, and behind them one
or two triples of time, algbw and busbw. Which operation it was is said by the name of the program, if a command
line or a header shows it, else by the name of the file; how many ranks on how many hosts, by the list of devices.

Source: nccl-tests `src/common.cu` (header, device list, table) and `doc/PERFORMANCE.md` (busbw).
`MeasuredBaseline` holds what was read, over message size.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
_START: Final = re.compile(r"nThread \d+ nGpus")
_RANK: Final = re.compile(r"\bRank\s+(\d{1,9})\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_TYPE: Final = r"u?int(?:8|32|64)|half|float|double|bfloat16|f8e\dm\d"
_ROW: Final = re.compile(rf"^\s*(?:\S+:\s+)?(\d{{1,18}})\s+(\d{{1,18}})\s+(?:{_TYPE})\s")
_NUMBER: Final = re.compile(r"^\d{1,18}(?:\.\d{1,18})?$")
"""Longer ones are none that a machine has measured, and fit no column."""


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
        named = _IN_FILE_NAME.search(self.file_name.lower())
        op = _operation(named[1]) if named else None
        hosts: dict[int, str] = {}
        is_list_open = False
        for line in lines:
            if program := _PROGRAM.search(line):
                op = _operation(program[1])
            if _START.search(line):
                hosts, is_list_open = {}, True
            if is_list_open and (device := _RANK.search(line)):
                hosts[int(device[1])] = device[2]
            row = _ROW.match(line)
            if row is None:
                continue
            if op is None or not hosts:
                skipped["operation_not_printed" if op is None else "ranks_not_printed"] += 1
                continue
            for _, _, busbw in _triples(line[row.end() :]):
                yield MeasuredSize(
                    op=op,
                    ranks=max(hosts) + 1,
                    nodes=len(set(hosts.values())),
                    message_bytes=int(row[1]),
                    busbw=float(busbw) * 1e9,
                )


def _operation(program: str) -> int:
    return OPERATION_CODES[_PROGRAMS[program.replace("_", "")]]


def _triples(rest: str) -> Iterator[tuple[str, str, str]]:
    """Out of place and in place: a time (0 would be a root or a count of errors), then two numbers with a point."""
    words = rest.split()
    taken = -1
    for at in range(len(words) - 2):
        is_time = bool(_NUMBER.match(words[at])) and float(words[at]) > 0
        if at > taken and is_time and all("." in word and _NUMBER.match(word) for word in words[at + 1 : at + 3]):
            taken = at + 2
            yield words[at], words[at + 1], words[at + 2]


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
