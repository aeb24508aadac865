"""Why a log has other counts than a trace: lines, operations, launches and kernels of the thesis's jobs.

The naive count is the thesis's: every line whose message begins with a name and a colon. Communicator rank 0 prints a
TUNING line beside each operation line (NCCL src/enqueue.cc), and that begins with the operation's name as well.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from benchmarks.alignment.needleman_wunsch import merged
from benchmarks.alignment.thesis_jobs import TP2_PP2, TP4, ThesisJob

from ncclscope.offline import run_offline
from ncclscope_service.export.operations_file import operations_table
from ncclscope_service.kernel_name import parse_kernel_name
from ncclscope_service.pipeline import PipelineSettings
from ncclscope_service.store import Store
from ncclscope_simulator.player import write

_NAIVE: Final = re.compile(r"NCCL INFO (\w+):")
OPERATIONS: Final = ("AllGather", "AllReduce", "Broadcast", "ReduceScatter", "Send", "Recv", "SendRecv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """One rank's operation of one kind."""

    rank: int
    """From 1, as the thesis counts."""
    operation: str
    lines: int
    """By the naive count."""
    operations: int
    silent: int
    """Operations that launch nothing."""
    launches: int
    kernels: int
    fused: int
    """Operations that share a kernel with another."""

    @property
    def reason(self) -> str:
        """Why the naive count differs from the kernels; empty where it does not."""
        reasons: list[str] = []
        tuning = self.lines - self.operations
        if tuning:
            reasons.append(f"{tuning:,} TUNING lines of communicator rank 0")
        if self.silent:
            reasons.append(f"{self.silent} on one-rank communicators launch nothing")
        if self.operation in {"Send", "Recv"}:
            reasons.append("run as SendRecv")
        if self.operation == "SendRecv":
            reasons.append(f"{self.fused} pairs of Send and Recv in one group, {self.kernels - self.fused} alone")
        return "; ".join(reasons)


def counted(job: ThesisJob, folder: Path, *, iterations: int = 10) -> list[Count]:
    """Simulates a job into an empty folder, reads it as `analyze` does, and counts."""
    write(job.config(iterations), folder, programs=job.programs, first=job.first)
    store = run_offline([folder / "logs", folder / "nsys"], job="counts", settings=PipelineSettings()).pipeline.store
    rows = _rows(store)
    naive, kernels = _naive(folder), _kernels(store)
    return [
        _count(rank, operation, naive[path], rows[path], kernels[pid])
        for rank, (path, pid) in enumerate(_ranks(rows), 1)
        for operation in OPERATIONS
    ]


def print_counts(*, iterations: int = 10) -> None:
    """Both jobs beside the thesis's tables."""
    for job in (TP2_PP2, TP4):
        print(f"\n#### {job.name}\n")
        print(
            "| rank | operation | naive lines | operations | launches | kernels | launches - kernels | why | printed |"
        )
        print("|---:|---|---:|---:|---:|---:|---:|---|---|")
        with tempfile.TemporaryDirectory(prefix="alignment-") as folder:
            counts = counted(job, Path(folder) / "job", iterations=iterations)
        met = 0
        for count in counts:
            printed = job.printed.get((count.rank, count.operation))
            if printed is None:
                continue
            same = (count.lines, count.kernels if count.operation not in {"Send", "Recv"} else 0) == printed
            met += same
            beside = f"{printed[0]:,} / {printed[1]:,}" + ("" if same else " **differs**")
            print(
                f"| {count.rank} | {count.operation} | {count.lines:,} | {count.operations:,} | {count.launches:,}"
                f" | {count.kernels:,} | {count.launches - count.kernels} | {count.reason} | {beside} |"
            )
        print(f"\n{met} of {len(job.printed)} rows (lines and kernels) as printed.")


def _naive(folder: Path) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for path in sorted((folder / "logs").glob("nccl.*")):
        with path.open(encoding="utf-8") as lines:
            counts[path.name] = Counter(found[1] for line in lines if (found := _NAIVE.search(line)))
    return counts


def _rows(store: Store) -> dict[str, list[dict[str, Any]]]:
    """What `operations.parquet` says, by log file."""
    operations = store.operations
    ids = np.arange(operations.first, operations.next_id, dtype=np.int64)
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in operations_table(store, ids).to_pylist():
        rows.setdefault(Path(row["log_file"]).name, []).append(row)
    return rows


def _kernels(store: Store) -> dict[int, Counter[str]]:
    """Kernels in the exports by pid and name."""
    counts: dict[int, Counter[str]] = {}
    rows = store.kernels.rows
    names = store.strings
    templates = store.kernel_templates_of(rows)["name"].tolist()
    for process, name in zip(rows["process"].tolist(), templates, strict=True):
        kind = parse_kernel_name(names[name]).kernel_class
        counts.setdefault(store.processes[process].pid, Counter())[kind.name.title().replace("_", "")] += 1
    return counts


def _ranks(rows: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, int]]:
    by_rank = {own[0]["rank"]: (path, own[0]["pid"]) for path, own in rows.items()}
    for rank in sorted(by_rank):
        yield by_rank[rank]


def _count(rank: int, operation: str, naive: Counter[str], rows: list[dict[str, Any]], kernels: Counter[str]) -> Count:
    """Sends and Recvs launch SendRecv kernels, which are counted there."""
    shown = [row for row in rows if row["op"] == operation]
    launching = [row for row in rows if merged(row["op"]) == operation]
    launches = {row["launch_id"] for row in launching if row["launch_id"] is not None}
    return Count(
        rank=rank,
        operation=operation,
        lines=naive[operation],
        operations=len(shown),
        silent=sum(row["match"] == "no_kernel" for row in shown),
        launches=len(launches),
        fused=sum(row["launch_id"] is not None for row in launching) - len(launches),
        kernels=kernels[operation],
    )
