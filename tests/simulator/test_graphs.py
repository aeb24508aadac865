"""CUDA graphs: lines once at capture, kernels at every replay."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from simulator.jobs import Row, Simulate, columns_of, exports, rows_of, truth

_GRAPHS: dict[str, Any] = {"iterations": 5, "cuda_graphs": 2, "nodes": 1, "gpus": 2, "pp": 1, "dp": 1}
_KERNELS = (
    "SELECT (k.globalPid >> 24) & 0xFFFFFF, k.correlationId, k.graphNodeId, k.start + s.utcEpochNs"
    " FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds n ON n.id = k.shortName"
    " JOIN TARGET_INFO_SESSION_START_TIME s WHERE n.value LIKE 'nccl%'"
)


def _replays(folder: Path) -> list[Row]:
    parquet: Any = import_module("pyarrow.parquet")
    rows: list[Row] = parquet.read_table(folder / "truth" / "replays.parquet").to_pylist()
    return rows


def test_by_default_nsys_lists_no_kernel_of_a_graph_but_its_launch_as_a_whole(simulate: Simulate) -> None:
    folder = simulate(**_GRAPHS)
    (path,) = exports(folder)
    assert all(node is None for _, _, node, _ in rows_of(path, _KERNELS))
    ((launches,),) = rows_of(path, "SELECT count(*) FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE")
    assert launches == len({(row["pid"], row["correlation_id"]) for row in _replays(folder)}) == 2 * 3
    assert "CUPTI_ACTIVITY_KIND_GRAPH_TRACE" not in columns_of(exports(simulate(**_GRAPHS, cuda_graph_trace="node"))[0])


@pytest.mark.parametrize(
    ("version", "moves"), [("2.12", True), ("2.18", False), ("2.22", False), ("2.25", True), ("2.28", False)]
)
def test_op_count_of_plain_launches_beside_a_graph_follows_the_rule_of_its_version(
    version: str, moves: bool, simulate: Simulate
) -> None:
    rows = truth(simulate(**_GRAPHS, nccl=version))
    world = [row for row in rows if row["parallelism"] == "WORLD" and row["rank"] == 0]
    assert len({row["op_count"] for row in world if row["iteration"] >= 2}) == (3 if moves else 1)


def test_replays_with_network_work_move_op_count_between_lines(simulate: Simulate) -> None:
    shape = _GRAPHS | {"nodes": 2, "gpus": 1, "tp": 2, "iterations": 6}
    rows = truth(simulate(**shape, nccl="2.28", recapture_every=2))
    captured = [row for row in rows if row["captured"] and row["parallelism"] == "TP" and row["rank"] == 0]
    first, second = ({row["op_count"] for row in captured if row["iteration"] == iteration} for iteration in (2, 4))
    assert len(first) == len(second) == 1
    assert second.pop() - first.pop() == 2 * sum(row["iteration"] == 2 for row in captured)
