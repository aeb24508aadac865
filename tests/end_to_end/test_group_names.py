"""A log in which PyTorch says what its groups are called: from its lines to `communicators.parquet`."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
from end_to_end.processes import run_command

_NAMES = ("default_pg", "TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP")


def _lines(rank: int) -> list[str]:
    """Of one of four ranks: groups 0-1, 2-3 of tensors, and 0-2, 1-3 of data."""
    tensor, data = rank // 2, rank % 2
    groups = ((rank, 4, 0x10), (rank % 2, 2, 0x20 + tensor), (rank // 2, 2, 0x30 + data))
    found: list[str] = []
    for number, (own, size, comm_id) in enumerate(groups):
        pointer = f"0x55d0c8b3e{number}{rank}0"
        nccl = f"node1:{10 + rank}:{10 + rank} [{rank}] NCCL INFO "
        device = f"cudaDev {rank} nvmlDev {rank} busId {rank + 1}000"
        init = f"comm {pointer} rank {own} nranks {size} {device} commId 0x{comm_id:x}"
        found += [
            f"{nccl}ncclCommInitRankConfig {init} - Init START",
            f"{nccl}ncclCommInitRankConfig {init} - Init COMPLETE",
            f"[rank{rank}]:[I1120 12:00:00.123456789 ProcessGroupNCCL.cpp:2281] [PG ID {number} PG GUID {comm_id}"
            f"({_NAMES[number]}) Rank {own}] ProcessGroupNCCL created ncclComm_ {pointer} on CUDA device: {rank}",
            f"{nccl}AllReduce: opCount 0 sendbuff 0x7f0000000000 recvbuff 0x7f0000000000 count 1048576 datatype 9 op 0 "
            f"root 0 comm {pointer} [nranks={size}] stream 0x55d0c9000000",
        ]
    return found


def test_names_of_a_log_are_in_the_table_of_communicators_and_in_the_report(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("\n".join(line for rank in range(4) for line in _lines(rank)) + "\n")
    done = run_command("analyze", str(log), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(tmp_path / "out" / "communicators.parquet").to_pylist()
    found = {
        (tuple(row["ranks"]), row["group_name"], row["parallelism"], row["parallelism_confidence"]) for row in rows
    }
    assert found == {
        ((0, 1, 2, 3), "default_pg", "WORLD", 1.0),
        ((0, 1), "TENSOR_MODEL_PARALLEL_GROUP", "TP", 1.0),
        ((2, 3), "TENSOR_MODEL_PARALLEL_GROUP", "TP", 1.0),
        ((0, 2), "DATA_PARALLEL_GROUP", "DP", 1.0),
        ((1, 3), "DATA_PARALLEL_GROUP", "DP", 1.0),
    }
    assert "tp-0 0x20 TENSOR_MODEL_PARALLEL_GROUP" in done.stdout
    assert "TENSOR_MODEL_PARALLEL_GROUP" in (tmp_path / "out" / "report.html").read_text()
