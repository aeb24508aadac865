"""Tuning tables: the three layouts, and what becomes of a table that is not whole."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.sources.nccl_log.prefix import Writer
from ncclscope_agent.sources.nccl_log.tuning_table import TuningTable
from ncclscope_wire.topology import TuningTableSeen

_WRITER = Writer(host="node01", pid=100, tid=101, device=0)
_FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
_PROTOCOLS = ("LL", "LL128", "Simple")


def _old(algorithms: Sequence[str]) -> list[str]:
    """One block, as up to 2.17: NCCL src/graph/tuning.cc prints " %7s/%6s |", " %14d |" and "%8.1f/%6.1f |"."""
    header = "".join(f" {algorithm:>7}/{protocol:>6} |" for algorithm in algorithms for protocol in _PROTOCOLS)
    threads = "".join(f" {512:14d} |" for _ in range(3 * len(algorithms)))
    return [f"Latency/AlgBw |{header}", f" Max NThreads |{threads}", *_rows(algorithms)]


def _blocks(*blocks: Sequence[str]) -> list[str]:
    """Blocks of algorithms, as from 2.18 on; the protocols fill nine columns in every block."""
    lines: list[str] = []
    for algorithms in blocks:
        lines.append(
            "  Algorithm   |" + "".join(f"{'':14} {algorithm:^14} {'':14}       |" for algorithm in algorithms)
        )
        lines.append("  Protocol    |" + "".join(f" {protocol:>14} |" for _ in range(3) for protocol in _PROTOCOLS))
        lines.append(" Max NThreads |" + "".join(f" {512:14d} |" for _ in range(3 * len(algorithms))))
        lines += _rows(algorithms)
    return lines


def _rows(algorithms: Sequence[str]) -> list[str]:
    return [
        f"{function:>13} |"
        + "".join(f"{10 * number + at + 0.5:8.1f}/{100 * number + at:6.1f} |" for at in range(3 * len(algorithms)))
        for number, function in enumerate(_FUNCTIONS)
    ]


_LAYOUTS = {
    "2.8": _old(["Tree", "Ring", "CollNet"]),
    "2.16": _old(["Tree", "Ring", "CollNetDirect", "CollNetChain"]),
    "2.17": _old(["Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS"]),
    "2.18": _blocks(["Tree", "Ring", "CollNetDirect"], ["CollNetChain", "NVLS", "NVLSTree"]),
    "2.23": _blocks(["Tree", "Ring", "CollNetDirect"], ["CollNetChain", "NVLS", "NVLSTree"], ["PAT"]),
}
_ALGORITHMS = {
    "2.8": ["TREE", "RING", "COLLNET"],
    "2.16": ["TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN"],
    "2.17": ["TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS"],
    "2.18": ["TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE"],
    "2.23": ["TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"],
}


def _read(lines: Sequence[str]) -> tuple[TuningTable, tuple[TuningTableSeen, ...]]:
    table = TuningTable()
    for number, line in enumerate(lines, 1):
        table.ingest_line(_WRITER, number, line.encode())
    table.finish()
    return table, table.drain_tables()


def test_what_is_not_available_is_negative_in_2_31_and_has_no_bandwidth() -> None:
    lines = [re.sub(r"Broadcast \| .*? \|", "Broadcast |    -1.0/  -1.0 |", line, count=1) for line in _LAYOUTS["2.23"]]
    _, (table,) = _read(lines)
    (cell,) = (
        each for each in table.cells if (each.function, each.algorithm, each.protocol) == ("Broadcast", "TREE", "LL")
    )
    assert (cell.latency_us, cell.bytes_per_second) == (0.0, 0)


@pytest.mark.parametrize("version", list(_LAYOUTS))
def test_every_layout_gives_every_cell(version: str) -> None:
    table, (seen,) = _read(_LAYOUTS[version])
    algorithms = _ALGORITHMS[version]
    assert not table.drain_dropped()
    assert list(dict.fromkeys(cell.algorithm for cell in seen.cells)) == algorithms
    assert len({(cell.function, cell.algorithm, cell.protocol) for cell in seen.cells}) == 15 * len(algorithms)
    ring = {
        cell.protocol: (cell.latency_us, cell.bytes_per_second)
        for cell in seen.cells
        if (cell.function, cell.algorithm) == ("AllReduce", "RING")
    }
    assert ring == {"LL": (43.5, 403 * 10**9), "LL128": (44.5, 404 * 10**9), "SIMPLE": (45.5, 405 * 10**9)}
    assert len(seen.max_threads) == 3 * len(algorithms)
    assert (seen.host, seen.pid, seen.tid, seen.line) == ("node01", 100, 101, 1)


@pytest.mark.parametrize("version", list(_LAYOUTS))
def test_a_table_without_one_of_its_lines_is_dropped_and_counted(version: str) -> None:
    lines = _LAYOUTS[version]
    for lost in range(len(lines)):
        table, seen = _read(lines[:lost] + lines[lost + 1 :])
        if "Max NThreads" in lines[lost]:
            assert len(seen) == 1  # of no use to the model
        else:
            assert seen == (), lines[lost]
            assert table.drain_dropped()["torn_table"] > 0


def test_another_thread_may_write_in_between_and_another_table_may_follow() -> None:
    table = TuningTable()
    other = Writer(host="node01", pid=100, tid=202, device=1)
    for number, line in enumerate(_LAYOUTS["2.23"] + _LAYOUTS["2.23"], 1):
        assert table.ingest_line(_WRITER, number, line.encode())
        assert not table.ingest_line(other, number, b"init.cc:447 Cuda Alloc Size 23648 pointer 0x7fc3adc00000")
    assert len(table.drain_tables()) == 2


def test_a_row_that_was_cut_drops_the_table() -> None:
    table = TuningTable()
    lines = _LAYOUTS["2.8"]
    for line in lines[:4]:
        table.ingest_line(_WRITER, 1, line.encode())
    table.ingest_line(_WRITER, 1, lines[4].encode(), is_whole=False)
    assert table.drain_tables() == ()
    assert table.drain_dropped() == {"torn_table": 5}


def test_a_torn_line_in_the_log_drops_the_table_that_is_open() -> None:
    table = TuningTable()
    table.ingest_line(_WRITER, 1, _LAYOUTS["2.8"][0].encode())
    table.tear()
    assert table.drain_dropped() == {"torn_table": 1}


def test_a_fork_with_an_algorithm_of_its_own_keeps_its_name() -> None:
    _, (seen,) = _read(_old(["Tree", "Ring", "Star"]))
    assert {cell.algorithm for cell in seen.cells} == {"TREE", "RING", "STAR"}


@given(st.lists(st.sampled_from(_LAYOUTS["2.8"] + _LAYOUTS["2.23"]) | st.text(max_size=60), max_size=60))
def test_lines_in_any_order_give_tables_or_counts_and_never_an_error(lines: list[str]) -> None:
    table = TuningTable()
    understood = sum(table.ingest_line(_WRITER, number, line.encode()) for number, line in enumerate(lines))
    table.finish()
    for seen in table.drain_tables():
        assert len(seen.cells) % 15 == 0
    assert sum(table.drain_dropped().values()) <= understood
