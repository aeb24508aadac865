"""Cases and answers as JSON, one a line, for aligners in any language.

A case: `{"case": name, "nccl_version": "2.28.3", "operations": {...}, "kernels": {...}}`, where operations and kernels
hold one list per field of `case.OPERATION` and `case.KERNEL`, with operations and kinds by name ("AllReduce",
"SendRecv") and null for what is not known. The answer to it: `{"case": name, "pairs": [[operation, kernel,
confidence], ...]}`, of ids; confidence may be left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.alignment.case import OPERATION_NAMES, PAIR, Case, pairs_of
from benchmarks.alignment.needleman_wunsch import kernel_names

from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_TIMES = ("logged_at_ns", "launched_at_ns")
_OPTIONAL = ("group", "data_type", "thread")


def write_cases(cases: Iterable[Case], path: Path) -> int:
    """Writes what aligners may see of the cases; gives how many."""
    amount = 0
    with path.open("w", encoding="utf-8") as file:
        for case in cases:
            file.write(json.dumps(as_document(case)) + "\n")
            amount += 1
    return amount


def as_document(case: Case) -> dict[str, Any]:
    """A case without its truth."""
    operations, kernels = _columns(case.operations), _columns(case.kernels)
    operations["operation"] = [OPERATION_NAMES[code] for code in operations["operation"]]
    kernels["kind"] = kernel_names(case.kernels)
    return {"case": case.name, "nccl_version": case.nccl_version, "operations": operations, "kernels": kernels}


def read_answers(path: Path) -> Iterator[tuple[str, Columns]]:
    """Name of the case and PAIR rows of each answer in a file.

    Raises:
        ValueError: a line is not an answer; says which.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                answer = json.loads(line)
                name, given = str(answer["case"]), answer["pairs"]
                pairs = [(int(pair[0]), int(pair[1]), float((*pair, 1.0)[2])) for pair in given]
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not {{'case': ..., 'pairs': [[...]]}}: {error}") from error
            ids = np.array([pair[:2] for pair in pairs], dtype=np.int64).reshape(-1, 2)
            yield name, pairs_of(ids[:, 0], ids[:, 1], np.array([pair[2] for pair in pairs]))


def no_pairs() -> Columns:
    """The answer of an aligner that gives none."""
    return np.empty(0, dtype=PAIR)


def _columns(rows: Columns) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for name in rows.dtype.names or ():
        missing = NO_TIME_NS if name in _TIMES else NO_NUMBER if name in _OPTIONAL else None
        values = rows[name].tolist()
        columns[name] = values if missing is None else [None if value == missing else value for value in values]
    return columns
