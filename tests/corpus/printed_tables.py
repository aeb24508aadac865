"""Rows of real nccl-tests output, read apart from the service's own reader."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ncclscope_service.nccl import bandwidth
from ncclscope_wire.terms import OPERATION_CODES

OPERATIONS = {
    "all_reduce": "AllReduce",
    "allreduce": "AllReduce",
    "all_gather": "AllGather",
    "allgather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "reducescatter": "ReduceScatter",
    "alltoall": "AlltoAll",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "sendrecv": "Send",
}
PROGRAM = re.compile(r"\b(all_?reduce|all_?gather|reduce_?scatter|alltoall|broadcast|reduce|sendrecv)_perf\b")
IN_NAME = re.compile(r"(all_?reduce|all_?gather|reduce_?scatter|alltoall|broadcast|reduce|sendrecv)")
START = re.compile(r"nThread \d+ nGpus")
RANK = re.compile(r"\bRank\s+(\d+)\s+(?:Group|Pid)")
ROW = re.compile(
    r"^\s*(?:\S+:\s+)?(\d+)\s+(\d+)\s+(?:int8|uint8|int32|uint32|int64|uint64|half|float|double|bfloat16)\s"
)
NUMBER = re.compile(r"^\d+(?:\.\d+)?$")


@dataclass(frozen=True)
class Printed:
    """One measurement as nccl-tests printed it."""

    where: str
    op: str
    nranks: int
    size: int
    time: str
    algbw: str
    busbw: str


def measurements(path: Path, skipped: Counter[str]) -> Iterator[Printed]:
    """Every (size, type, time, busbw) of a file; rows whose operation or ranks the file does not say are counted."""
    named = IN_NAME.search(path.name.lower())
    op = OPERATIONS[named.group(1)] if named else None
    nranks = 0
    is_rank_list_open = False
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        if program := PROGRAM.search(line):
            op = OPERATIONS[program.group(1)]
        if START.search(line):
            nranks, is_rank_list_open = 0, True
        if (rank := RANK.search(line)) and is_rank_list_open:
            nranks = max(nranks, int(rank.group(1)) + 1)
        row = ROW.match(line)
        if row is None:
            continue
        if not nranks or op is None:
            skipped["ranks not printed" if op else "operation not printed"] += 1
            continue
        for time, algbw, busbw in triples(line[row.end() :]):
            yield Printed(f"{path.name}:{number}", op, nranks, int(row.group(1)), time, algbw, busbw)


def triples(rest: str) -> Iterator[tuple[str, str, str]]:
    """Out of place and in place: a time (0 would be a root or a count of errors), then two numbers with a point."""
    words = rest.split()
    places = [
        at
        for at in range(len(words) - 2)
        if NUMBER.match(words[at])
        and float(words[at])
        and all("." in word and NUMBER.match(word) for word in words[at + 1 : at + 3])
    ]
    taken = -1
    for at in places:
        if at > taken:
            taken = at + 2
            yield words[at], words[at + 1], words[at + 2]


def half_a_digit(text: str) -> float:
    """Half a unit of the last printed digit."""
    return 0.5 * 10.0 ** -(len(text) - text.index(".") - 1 if "." in text else 0)


def files(corpus: Path) -> list[Path]:
    """All outputs of nccl-tests in the corpus."""
    return sorted(path for path in (corpus / "nccl_tests").rglob("*") if path.is_file() and path.name != "SOURCE.txt")


def differing(printed: list[Printed]) -> list[str]:
    """The rows whose busbw is not what we compute of size, time and ranks, within half of the last digit printed."""
    operations = np.array([OPERATION_CODES[one.op] for one in printed], dtype=np.uint8)
    sizes = np.array([one.size for one in printed], dtype=np.int64)
    times = np.array([float(one.time) for one in printed])
    factors = bandwidth.factor(operations, np.array([one.nranks for one in printed], dtype=np.int32))
    durations = np.rint(times * 1e3).astype(np.int64)
    ours = bandwidth.busbw(sizes, durations, factors) / 1e9
    wrong: list[str] = []
    for one, computed, time in zip(printed, ours.tolist(), times.tolist(), strict=True):
        tolerance = half_a_digit(one.busbw) + computed * half_a_digit(one.time) / time + 1e-9
        if abs(computed - float(one.busbw)) > tolerance:
            wrong.append(f"{one.where} {one.op} n={one.nranks}: {computed:.3f}, printed {one.busbw}")
    return wrong
