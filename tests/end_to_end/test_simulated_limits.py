"""Limits of a simulated job: NVLink inside a node, network cards between nodes, as the simulator's model has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from end_to_end.processes import run_command

Row = dict[str, Any]


def _analyze(folder: Path, nccl: str) -> Path:
    shape = ("--nodes", "2", "--gpus", "4", "--tp", "4", "--pp", "1", "--dp", "2", "--iterations", "3", "--seed", "3")
    for command in (
        ("simulate", "--out", str(folder / "job"), "--nccl", nccl, *shape),
        ("analyze", str(folder / "job"), "--out", str(folder / "out"), "--tp", "4", "--dp", "2"),
    ):
        done = run_command(*command)
        assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nccl", "nvlink", "pci", "card"), [("2.16.5", 240.0, 24.0, 25.0), ("2.27.5", 370.8, 48.0, 50.0)]
)
def test_groups_have_the_limits_of_the_machine_that_was_simulated(
    tmp_path: Path, nccl: str, nvlink: float, pci: float, card: float
) -> None:
    """The simulated machine has a card of 25 or 50 GB/s beside each GPU, on a PCI link of 24 or 48 GB/s."""
    out = _analyze(tmp_path, nccl)
    groups: list[Row] = pq.read_table(out / "communicators.parquet").to_pylist()
    of_kind = {kind: [each for each in groups if each["parallelism"] == kind] for kind in ("TP", "DP", "WORLD")}
    assert {kind: len(found) for kind, found in of_kind.items()} == {"TP": 2, "DP": 4, "WORLD": 1}
    for each in of_kind["TP"]:
        assert each["limits"]["topology"] == nvlink * 1e9
        assert each["bottleneck"].startswith(f"NVL {nvlink:.1f} GB/s between GPU ")
    for each in of_kind["DP"]:
        assert each["limits"]["topology"] == min(pci, card) * 1e9
        assert each["bottleneck"].startswith(f"PCI {pci:.1f} GB/s of NIC ")
        assert each["bottleneck"].endswith((" on node00", " on node01"))
    (world,) = of_kind["WORLD"]
    assert world["limits"]["topology"] == 4 * min(pci, card) * 1e9

    operations: list[Row] = pq.read_table(out / "operations.parquet").to_pylist()
    limited = [row for row in operations if row["parallelism"] in ("TP", "DP") and row["busbw_bytes_per_second"]]
    assert limited
    for row in limited:
        assert row["limit_reference"] == "topology"
        assert row["limit_bytes_per_second"] == (nvlink if row["parallelism"] == "TP" else min(pci, card)) * 1e9
        assert row["bottleneck"]
    # Large messages come near: the simulator gives 0.9 of the card, with some noise.
    large = [row["efficiency_ratio"] for row in limited if row["message_bytes"] >= 16 << 20]
    assert large
    assert 0.75 < min(large) <= max(large) < 1.1
    references = pq.read_table(out / "efficiency.parquet").column("reference").to_pylist()
    assert {"topology", "baseline"} <= set(references)
