"""Simulated groups that take several kernels, and what of them is read."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ncclscope.offline import run_offline
from ncclscope_service.store.rows import Match
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.player import write

_SHAPE: dict[str, Any] = {"nodes": 1, "gpus": 4, "tp": 1, "dp": 2, "iterations": 4, "layers": 6, "zero1": True}
_TOLD: dict[str, dict[str, Any]] = {
    "all": {},
    "stamps": {"nvtx": False},
    "CALL lines": {"nvtx": False, "timestamps": False, "calls": True},
    "bare": {"nvtx": False, "timestamps": False},
}


_CUT: list[tuple[str, dict[str, Any]]] = [
    ("2.21", {"work_fifo": 8, "nodes": 2, "gpus": 2}),
    ("2.26", {"work_fifo": 384}),
    ("2.28", {"work_fifo": 384}),
    ("2.30", {"work_fifo": 384}),
    ("2.30", {"broadcast_parameters": True}),
]
"""What makes groups of each version take several kernels."""


def _is_told(version: str, told: str) -> bool:
    """Lines have stamps from 2.26 on; from 2.27 on opCount stands still, and nothing of bare lines tells groups."""
    return not (told == "stamps" and version < "2.26") and not (told == "bare" and version >= "2.27")


@pytest.mark.parametrize(
    ("version", "more", "told"),
    [(version, more, told) for version, more in _CUT for told in _TOLD if _is_told(version, told)],
)
def test_all_kernels_of_a_cut_group_are_one_launch_and_measured_as_one(
    version: str, more: dict[str, Any], told: str, tmp_path: Path
) -> None:
    config = SimulationConfig(nccl=version, coalesce=True, **{**_SHAPE, **more}, **_TOLD[told])
    write(config, tmp_path / "job")
    run = run_offline([tmp_path / "job" / "logs", tmp_path / "job" / "nsys"], job="cut", settings=PipelineSettings())
    store = run.pipeline.store
    kernels, operations = store.kernels.rows, store.operations.rows
    assert (kernels["launch"] >= 0).all()
    assert (operations["match"] == Match.MATCHED).all()
    of_process = {(each.host, each.pid): index for index, each in enumerate(store.processes)}
    launch_of = {
        (int(row["process"]), int(row["correlation_id"])): (int(row["launch"]), int(row["start_ns"])) for row in kernels
    }
    cut_launches: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in pq.read_table(tmp_path / "job" / "truth" / "plans.parquet").to_pylist():
        cut_launches[row["host"], row["pid"], row["launch_id"]].append(row)
    assert len(cut_launches) > 10
    for (host, pid, _), rows in cut_launches.items():
        launches = {launch_of[of_process[host, pid], row["correlation_id"]][0] for row in rows}
        assert len(launches) == 1
        mine = operations[operations["launch"] == launches.pop()]
        assert len(mine) > 1
        assert (mine["start_ns"] == min(row["start_ns"] for row in rows)).all()
        assert (mine["end_ns"] == max(row["end_ns"] for row in rows)).all()
    truth = pq.read_table(tmp_path / "job" / "truth" / "operations.parquet").to_pylist()
    by_line = {(Path(row["log_file"]).name, row["log_line"]): row for row in truth}
    names = [Path(each.source.name).name for each in store.sources]
    wanted = np.array(
        [by_line[names[row["source"]], int(row["line"])]["transfer_ns"] or -1 for row in operations], dtype=np.int64
    )
    reduces = np.array([by_line[names[row["source"]], int(row["line"])]["op"] == "ReduceScatter" for row in operations])
    measured = reduces & (operations["transfer_ns"] > 0)
    assert measured.mean() > 0.2
    assert np.abs(operations["transfer_ns"] / wanted - 1.0)[measured].max() < 0.01
