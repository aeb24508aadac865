"""The budget of steps against the truth of simulated pipelines: 1F1B of many shapes, with a late rank, slow links.

The truth of a bubble is what stages wait in the same job without noise and faults, by the simulator's own waits, less
what those without embedding wait for the others' AllReduce of it. Beside it the formula of textbooks,
(p - 1) / (m + p - 1) of the step (with v chunks, (p - 1) / (v m + p - 1)).
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from ncclscope.offline import run_offline
from ncclscope_service.export.directory import write_run
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import SimulationConfig, parse_faults, parse_model, write

_PIPELINE: Final = ("PP", "EMBEDDING", "MP", "WORLD")
_JOBS: Final[dict[str, dict[str, Any]]] = {
    "p2 m4": {"nodes": 2, "gpus": 1, "tp": 1, "pp": 2, "dp": 1},
    "p4 m8": {"nodes": 4, "gpus": 1, "tp": 1, "pp": 4, "dp": 1, "microbatches": 8},
    "p4 m8, long messages": {
        "nodes": 4, "gpus": 1, "tp": 1, "pp": 4, "dp": 1, "microbatches": 8, "hidden": 8192, "sequence": 8192,
    },
    "p8 m8": {"nodes": 1, "gpus": 8, "tp": 1, "pp": 8, "dp": 1, "microbatches": 8},
    "p4 m16 t2": {"nodes": 2, "gpus": 4, "tp": 2, "pp": 4, "dp": 1, "microbatches": 16},
    "p2 m4 t2 d2, ZeRO-1": {"nodes": 1, "gpus": 8, "tp": 2, "pp": 2, "dp": 2, "zero1": True},
    "p4 m8, 2 chunks": {"nodes": 1, "gpus": 4, "tp": 1, "pp": 4, "dp": 1, "microbatches": 8, "interleave": 2},
    "p2 m8, 2 chunks": {"nodes": 1, "gpus": 2, "tp": 1, "pp": 2, "dp": 1, "microbatches": 8, "interleave": 2},
    "p2 m8 t2, Megatron-LM's operations": {
        "nodes": 1, "gpus": 4, "tp": 2, "pp": 2, "dp": 1, "microbatches": 8, "hidden": 512, "sequence": 256,
        "megatron": parse_model("rms,gated,bias=0,learned=0,tied=0,ffn=1536"),
    },
    "p4 m4 t2, a rank late by 10 ms a micro-batch": {
        "nodes": 1, "gpus": 8, "tp": 2, "pp": 4, "dp": 1, "iterations": 30,
        "faults": parse_faults(["late_rank:rank=3,ms=10,every=microbatch"]),
    },
}  # fmt: skip


def main() -> None:
    """Prints the table; it takes a minute or two."""
    print("\nBubbles of simulated pipelines, ms of a step, mean over ranks; waiting in the pipeline beside it\n")
    print("| job | steps of a rank | off by, ns | truth | found | difference | textbook | late | unexplained |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, options in _JOBS.items():
        config = SimulationConfig(**options)
        with tempfile.TemporaryDirectory() as folder:
            print(f"| {name} | {' | '.join(_cells(config, Path(folder)))} |", flush=True)


def _cells(config: SimulationConfig, folder: Path) -> list[str]:
    truth_ms = true_bubble_ns(replace(config, compute_cv=0.0, bandwidth_cv=0.0, faults=()), folder / "truth") / 1e6
    write(config, folder / "job")
    run = run_offline([folder / "job" / "logs", folder / "job" / "nsys"], job="job", settings=PipelineSettings())
    write_run(run.pipeline.store, folder / "out")
    rows = pq.read_table(folder / "out" / "step_budget.parquet").to_pylist()
    whole = Counter[tuple[object, ...]]()
    for row in rows:
        whole[row["host"], row["pid"], row["iteration"], row["duration_ns"]] += row["part_ns"]
    off_ns = max(abs(int(str(key[3])) - total) for key, total in whole.items())
    mine = defaultdict[str, float](float)
    for row in rows:
        if row["parallelism"] in _PIPELINE or row["part"] == "late":
            mine[row["part"]] += row["part_ns"] / 1e6 / len(whole)
    step_ms = sum(int(str(key[3])) for key in whole) / 1e6 / len(whole)
    textbook_ms = (config.pp - 1) / (config.interleave * config.microbatches + config.pp - 1) * step_ms
    return [
        f"{len(whole)}", f"{off_ns}", f"{truth_ms:.1f}", f"{mine['bubble']:.1f}",
        f"{100 * (mine['bubble'] / truth_ms - 1):+.1f} %", f"{100 * (textbook_ms / truth_ms - 1):+.1f} %",
        f"{mine['late']:.1f}", f"{mine['exposed_wait']:.1f}",
    ]  # fmt: skip


def true_bubble_ns(config: SimulationConfig, folder: Path) -> float:
    """Mean over ranks and steps of what stages of this job, which has no noise, wait for the schedule."""
    write(config, folder)
    table = pq.read_table(folder / "truth" / "operations.parquet").to_pylist()
    launches = {(row["rank"], row["launch_id"]): row for row in table if row["wait_ns"] is not None}
    steps = {(row["rank"], row["iteration"]) for row in launches.values()}
    waits = sum(row["wait_ns"] for row in launches.values() if row["parallelism"] in _PIPELINE)
    transfers = Counter[tuple[int, int]]()
    for row in launches.values():
        if row["parallelism"] == "EMBEDDING":
            transfers[row["rank"], row["iteration"]] += row["transfer_ns"]
    longest = max(transfers.values(), default=0)
    return float(waits - sum(longest - transfers[step] for step in steps)) / len(steps)
