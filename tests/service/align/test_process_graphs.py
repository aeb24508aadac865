"""Kernels of CUDA graphs find the lines that they were captured from."""

from __future__ import annotations

import numpy as np

from ncclscope_service.align.process_graphs import CapturedLaunch, ProcessGraphs
from ncclscope_service.align.records import blank_kernels, blank_operations
from ncclscope_service.nccl.launch_rules import operation_class
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

_STEP = ("AllGather", "ReduceScatter", "AllGather", "AllReduce")
_MS = 1_000_000


def _lines(ops: tuple[str, ...], *, first: int, at_ns: int | None) -> Columns:
    rows = blank_operations(len(ops))
    rows["id"] = first + np.arange(len(ops))
    rows["tid"], rows["stream"], rows["nranks"], rows["count"], rows["data_type"] = 7, 99, 4, 1024, 7
    rows["op"] = [OPERATION_CODES[op] for op in ops]
    rows["logged_at_ns"] = NO_TIME_NS if at_ns is None else at_ns + 10_000 * np.arange(len(ops))
    return rows


def _kernels(ops: tuple[str, ...], *, first: int, correlation: int, launched_ns: int, graph: int | None) -> Columns:
    rows = blank_kernels(len(ops))
    rows["id"] = first + np.arange(len(ops))
    rows["kernel_class"] = [int(operation_class(OPERATION_CODES[op])) for op in ops]
    rows["data_type"] = NO_NUMBER
    rows["start_ns"] = launched_ns + 50_000 + 1_000 * np.arange(len(ops))
    rows["end_ns"] = rows["start_ns"] + 500
    rows["launch_start_ns"] = launched_ns
    rows["correlation_id"] = correlation if graph is not None else correlation + np.arange(len(ops))
    if graph is None:
        rows["launch_start_ns"] += 10_000 * np.arange(len(ops))
    else:
        rows["graph_node_id"] = (graph << 32) + np.arange(len(ops))
    return rows


def _job(*, stamped: bool) -> tuple[Columns, Columns, list[Columns]]:
    """Two ordinary steps, a capture, and three launches of the graph."""
    steps = [_lines(_STEP, first=4 * nth, at_ns=nth * 10 * _MS if stamped else None) for nth in range(3)]
    launched = [
        _kernels(_STEP, first=100 + 4 * nth, correlation=10 + 10 * nth, launched_ns=nth * 10 * _MS + 2_000, graph=None)
        for nth in range(2)
    ]
    replays = [
        _kernels(_STEP, first=200 + 4 * nth, correlation=50 + nth, launched_ns=(30 + nth) * _MS, graph=3)
        for nth in range(3)
    ]
    return np.concatenate(steps), np.concatenate(launched), replays


def _operations(found: list[CapturedLaunch]) -> list[list[int]]:
    return [each.operations.tolist() for each in sorted(found, key=lambda each: each.node)]


def test_a_graph_is_the_stretch_of_lines_that_launched_nothing_itself() -> None:
    for stamped in (True, False):
        lines, launched, replays = _job(stamped=stamped)
        graphs = ProcessGraphs("2.28.3")
        for kernels in replays:
            graphs.ingest_kernels(kernels)
        found = graphs.look_for_lines(lines, np.empty(0, np.int64), launched, final=False)
        assert _operations(found) == [[8], [9], [10], [11]]
        assert min(each.confidence for each in found) > 0.9
        told = graphs.drain_replays(final=False)
        assert told["kernel"].tolist() == list(range(200, 212))
        assert told["replay"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert told["launch"].tolist() == [8, 9, 10, 11] * 3
        assert told["is_first"].tolist() == [True] * 4 + [False] * 8


def test_nothing_is_decided_before_a_launch_has_shown_all_nodes_twice() -> None:
    lines, launched, replays = _job(stamped=True)
    graphs = ProcessGraphs("2.28.3")
    graphs.ingest_kernels(replays[0][2:])
    graphs.ingest_kernels(replays[1])
    assert not graphs.wants_lines(len(lines), final=False)
    graphs.ingest_kernels(replays[2])
    assert graphs.wants_lines(len(lines), final=False)
    graphs.look_for_lines(lines, np.empty(0, np.int64), launched, final=False)
    told = graphs.drain_replays(final=False)
    assert told["replay"].tolist() == [0] * 2 + [1] * 4 + [2] * 4
    assert told["launch"][told["is_first"]].tolist() == [10, 11, 8, 9]


def test_replays_of_a_graph_whose_capture_was_not_logged_are_given_no_launch() -> None:
    lines, launched, replays = _job(stamped=True)
    graphs = ProcessGraphs("2.28.3")
    for kernels in replays:
        graphs.ingest_kernels(kernels)
    taken = lines["id"][:8].astype(np.int64)
    assert graphs.look_for_lines(lines[:8], taken, launched, final=True) == []
    told = graphs.drain_replays(final=True)
    assert told["launch"].tolist() == [NO_NUMBER] * 12


def test_a_graph_that_is_captured_anew_gets_the_lines_of_its_own_capture() -> None:
    lines, launched, replays = _job(stamped=True)
    again = _lines(_STEP, first=12, at_ns=60 * _MS)
    graphs = ProcessGraphs("2.28.3")
    for kernels in replays:
        graphs.ingest_kernels(kernels)
    for nth in range(2):
        graphs.ingest_kernels(
            _kernels(_STEP, first=300 + 4 * nth, correlation=90 + nth, launched_ns=(70 + nth) * _MS, graph=4)
        )
    found = graphs.look_for_lines(np.concatenate([lines, again]), np.empty(0, np.int64), launched, final=True)
    assert _operations(found) == [[8], [9], [10], [11], [12], [13], [14], [15]]
