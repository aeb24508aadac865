"""Runs of nccl-tests for people and files: what was tested, and what each message size reached."""

from __future__ import annotations

from dataclasses import asdict

from ncclscope_service.export.selection import Selection
from ncclscope_service.nccl.nccl_tests import Benchmark
from ncclscope_wire.terms import OPERATIONS


def benchmarks_document(selection: Selection) -> list[dict[str, object]]:
    """The section of `summary.json`, file by file and in the order printed; bandwidths in bytes per second."""
    return [
        {
            "file": table.file,
            "op": _operation(table),
            "dtype": table.dtype,
            "red_op": table.red_op,
            "root": table.root,
            "ranks": table.ranks,
            "hosts": table.nodes,
            "torn_rows": table.torn_rows,
            "rows": [asdict(row) for row in table.rows],
        }
        for table in selection.benchmarks
    ]


def benchmark_name(table: Benchmark) -> str:
    """The test in words, for instance `AllReduce float sum, 16 ranks on 2 hosts`; the file is not part of it."""
    op = _operation(table) or "operation not printed"
    red_op = None if table.red_op == "none" else table.red_op
    root = None if table.root is None or table.root < 0 else f"root {table.root}"
    what = " ".join(word for word in (op, table.dtype, red_op, root) if word)
    if table.ranks is None:
        return f"{what}, ranks not printed"
    return f"{what}, {amount_text(table.ranks, 'rank')} on {amount_text(len(table.nodes), 'host')}"


def amount_text(amount: int, one: str, many: str | None = None) -> str:
    """A number of things, with thousands apart: `1 rank`, `2,048 ranks`."""
    return f"{amount:,} {one if amount == 1 else many or f'{one}s'}"


def _operation(table: Benchmark) -> str | None:
    """A row of sendrecv is a Send and a Recv of each rank."""
    name = None if table.op is None else OPERATIONS[table.op].name
    return "SendRecv" if name == "Send" else name


def files_read(selection: Selection) -> int:
    """Logs, dumps and exports, and files that hold nothing but tables of nccl-tests."""
    names = {state.source.name for state in selection.store.sources}
    return len(selection.store.sources) + len({table.file for table in selection.benchmarks} - names)
