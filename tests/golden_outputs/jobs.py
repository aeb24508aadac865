"""The simulated jobs whose outputs are compared with those of the last commit: one for each way of the data."""

from __future__ import annotations

from typing import Final

from ncclscope_simulator import SimulationConfig
from ncclscope_simulator.faults import parse_faults

JOBS: Final = {
    "stamped": SimulationConfig(iterations=8),
    "stamped_lossy": SimulationConfig(
        iterations=8, faults=parse_faults(["drop_lines:ratio=0.02", "drop_kernels:ratio=0.02", "late_rank:rank=1,ms=2"])
    ),
    "nvtx_payload": SimulationConfig(iterations=4, nvtx_payload=True, nccl="2.27.3", nsys="2026.2"),
    "unstamped_2_8": SimulationConfig(iterations=8, nccl="2.8", tp=1, pp=2, dp=4, nsys="2022.4"),
    "unstamped_2_12_lossy": SimulationConfig(
        iterations=8, nccl="2.12", faults=parse_faults(["drop_lines:ratio=0.01", "torn_lines:ratio=0.01"])
    ),
    "unstamped_2_21_lossy": SimulationConfig(
        iterations=8,
        nccl="2.21",
        nvtx=False,
        faults=parse_faults(["drop_lines:ratio=0.05", "drop_kernels:ratio=0.05"]),
    ),
    "graphs": SimulationConfig(
        iterations=10, nodes=1, gpus=2, tp=2, pp=1, dp=1, cuda_graphs=2, cuda_graph_trace="node", recapture_every=4
    ),
    "graphs_unstamped": SimulationConfig(
        iterations=8, nodes=1, gpus=4, tp=2, pp=2, dp=1, cuda_graphs=2, cuda_graph_trace="node", timestamps=False
    ),
    "inspector": SimulationConfig(iterations=8, inspector="v4.2", inspector_holes=0.1, capture="duty:0.3"),
    "inspector_alone": SimulationConfig(iterations=8, inspector="v4.3", capture="none", nccl="2.29.2"),
    "groups": SimulationConfig(
        iterations=6, nccl="2.30", tp=2, pp=1, dp=4, coalesce=True, zero1=True, broadcast_parameters=True, calls=True
    ),
    "cut_groups": SimulationConfig(
        iterations=6, nccl="2.18", tp=1, pp=1, dp=8, coalesce=True, layers=8, work_fifo=16, timestamps=False
    ),
    "experts": SimulationConfig(iterations=6, tp=1, pp=2, dp=4, ep=2, imbalance=0.2, interleave=2),
    "context": SimulationConfig(iterations=6, tp=1, pp=1, dp=4, cp=2, process_per_node=True),
    "sharded": SimulationConfig(iterations=6, tp=1, pp=1, dp=8, fsdp=True, replicate=2),
    "duty": SimulationConfig(iterations=40, capture="duty:0.3", nccl="2.26.5", step_seconds=0.5),
    "faulty": SimulationConfig(
        iterations=60,
        nodes=2,
        gpus=2,
        tp=2,
        pp=1,
        dp=2,
        step_seconds=1.0,
        chunk_seconds=5.0,
        faults=parse_faults(["slow_link:node=1,factor=0.4,from=40", "clock_step:node=1,ms=3,at=20"]),
    ),
    "late": SimulationConfig(
        iterations=60,
        nodes=1,
        gpus=4,
        tp=2,
        pp=1,
        dp=2,
        step_seconds=1.0,
        chunk_seconds=5.0,
        faults=parse_faults(["late_rank:rank=2,ms=5,from=10"]),
    ),
    "hung": SimulationConfig(
        iterations=30,
        nodes=1,
        gpus=4,
        tp=2,
        pp=1,
        dp=2,
        step_seconds=0.5,
        hang_seconds=60.0,
        faults=parse_faults(["hang:rank=1,at=20"]),
    ),
}
"""By name. Small, so that all of them take a minute or two."""

SHORT: Final = ("stamped_lossy", "unstamped_2_12_lossy", "graphs", "inspector")
"""Those that the default tests analyze."""

LIVE: Final = ("stamped_lossy", "unstamped_2_21_lossy", "graphs", "inspector", "duty", "faulty", "late", "hung")
"""Those that are played a second at a time into a service that is restarted in between."""

LIVE_SHORT: Final = ("graphs", "inspector")
