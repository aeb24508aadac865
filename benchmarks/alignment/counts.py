"""Why a log has other counts than a trace: lines, operations, launches and kernels of the thesis's jobs.

The naive count is the thesis's: every line whose message begins with a name and a colon. Communicator rank 0 prints a
TUNING line beside each operation line (NCCL src/enqueue.cc), and that begins with the operation's name as well.

The thesis prints counts of two jobs (tables 4.1 and 4.2), not the programs. Those below follow Megatron-LM for a GPT of
4 layers with learned positions, and come to its kernel counts figure by figure. Per microbatch and layer: with sequence
parallelism (TP=4) 6 AllGathers and 4 ReduceScatters, without (TP=2 PP=2) 4 AllReduces; embedding and output layer on
top; three AllReduces for the loss; five Broadcasts of the batch (three on each stage of two). Per step two AllGathers
of the timers, eight AllReduces (gradient norm, overflow and the like) on the world, two on one-rank data-parallel
communicators. What is left over (1 AllGather, 1 Broadcast, 5 or 6 AllReduces) is put into a step before the first.

Source: L. Borzyk, Understanding LLM Communication, 2026, tables 4.1 and 4.2; Megatron-LM
core/tensor_parallel/layers.py, mappings.py, cross_entropy.py, core/pipeline_parallel/schedules.py, training/utils.py
get_batch_on_this_tp_rank.
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

from ncclscope.offline import run_offline
from ncclscope_service.export.tables.operations_file import operations_table
from ncclscope_service.nccl.launch_rules import parse_kernel_name
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_service.store.tables import Store
from ncclscope_simulator.actions import Act, Action
from ncclscope_simulator.builder import Buffers, Builder
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.data_types import BFLOAT16, FLOAT32, INT64, SUM, DataType
from ncclscope_simulator.groups import Endpoint, Group, coordinates
from ncclscope_simulator.operations import Launch
from ncclscope_simulator.player import write

_LAYERS: Final = 4
_TOKENS: Final = 1024 * 512
"""Elements of one microbatch's activations: 1024 tokens, hidden size 512."""
_WORLD_REDUCTIONS: Final = 8
_ONE_RANK_REDUCTIONS: Final = 2
_TIMERS: Final = 2
_COMPUTE_NS: Final = 60_000


@dataclass(frozen=True, slots=True)
class ThesisJob:
    """A job of the thesis."""

    name: str
    tp: int
    pp: int
    microbatches: int
    first_reductions: int
    """AllReduces before the first iteration."""
    printed: dict[tuple[int, str], tuple[int, int]]
    """(lines, kernels) by rank from 1 and operation, as its table prints them."""

    def config(self, iterations: int = 10) -> SimulationConfig:
        """The simulation: one step more than iterations, for the set-up."""
        return SimulationConfig(
            nccl="2.28.3",
            nodes=1,
            gpus=4,
            tp=self.tp,
            pp=self.pp,
            dp=1,
            iterations=iterations + 1,
            microbatches=self.microbatches,
            sequence_parallel=self.pp == 1,
        )

    def programs(
        self,
        config: SimulationConfig,
        groups: tuple[Group, ...],
        endpoints: list[dict[int, Endpoint]],
    ) -> list[list[Action]]:
        """What each rank does in an iteration."""
        ranks = range(config.world)
        return [_Rank(self, config, groups, endpoints[rank], rank).iteration() for rank in ranks]

    def first(
        self,
        config: SimulationConfig,
        groups: tuple[Group, ...],
        endpoints: list[dict[int, Endpoint]],
    ) -> list[list[Action]]:
        """What each rank does before the first."""
        ranks = range(config.world)
        return [_Rank(self, config, groups, endpoints[rank], rank).set_up() for rank in ranks]


class _Rank:
    def __init__(
        self,
        job: ThesisJob,
        config: SimulationConfig,
        groups: tuple[Group, ...],
        endpoints: dict[int, Endpoint],
        rank: int,
    ) -> None:
        self._job = job
        self._builder = Builder(config, rank, endpoints, Buffers(config.seed, rank))
        self._groups = {group.parallelism: group for group in groups if rank in group.members}
        self._stage = coordinates(config, rank)[2]
        self._actions: list[Action] = []

    def set_up(self) -> list[Action]:
        self._collective("WORLD", "Broadcast", 1, 128, INT64)
        self._collective("WORLD", "AllReduce", self._job.first_reductions, 1, FLOAT32)
        self._collective("WORLD", "AllGather", 1, 1, FLOAT32)
        self._act(Act.SYNCHRONISE)
        return self._actions

    def iteration(self) -> list[Action]:
        if self._job.pp == 1:
            for _ in range(self._job.microbatches):
                self._forward()
                self._backward()
        else:
            self._pipeline()
        self._collective("DP", "AllReduce", _ONE_RANK_REDUCTIONS, 1, FLOAT32)
        self._collective("WORLD", "AllReduce", _WORLD_REDUCTIONS, 1, FLOAT32)
        self._collective("WORLD", "AllGather", _TIMERS, 4, FLOAT32)
        self._act(Act.SYNCHRONISE)
        return self._actions

    def _pipeline(self) -> None:
        """1F1B over two stages: the first is one microbatch ahead."""
        amount = self._job.microbatches
        if self._stage == 0:
            self._forward()
            self._exchange("Send")
            for _ in range(amount - 1):
                self._forward()
                self._exchange("Send", "Recv")
                self._backward()
            self._exchange("Recv")
            self._backward()
            return
        self._exchange("Recv")
        for nth in range(amount):
            self._forward()
            self._backward()
            self._exchange("Send", *(["Recv"] if nth < amount - 1 else []))

    def _forward(self) -> None:
        first, last = self._stage == 0, self._stage == self._job.pp - 1
        self._collective("TP", "Broadcast", 5 if first and last else 3, 1024, INT64)
        if first:
            self._collective("TP", "AllReduce", 1, _TOKENS, BFLOAT16)
        self._layers(gathers=2, scatters=2, reductions=2)
        if last:
            if self._job.pp == 1:
                self._collective("TP", "AllGather", 1, _TOKENS // self._job.tp, BFLOAT16)
            self._collective("TP", "AllReduce", 3, 1024, FLOAT32)

    def _backward(self) -> None:
        if self._job.pp == 1:
            # The output layer gathers its input anew and reduces its gradient; the embedding gathers its own.
            self._collective("TP", "AllGather", 1, _TOKENS // self._job.tp, BFLOAT16)
            self._collective("TP", "ReduceScatter", 1, _TOKENS // self._job.tp, BFLOAT16)
        elif self._stage == self._job.pp - 1:
            self._collective("TP", "AllReduce", 1, _TOKENS, BFLOAT16)
        self._layers(gathers=4, scatters=2, reductions=2)
        if self._job.pp == 1:
            self._collective("TP", "AllGather", 1, _TOKENS // self._job.tp, BFLOAT16)

    def _layers(self, *, gathers: int, scatters: int, reductions: int) -> None:
        for _ in range(_LAYERS // self._job.pp):
            self._act(Act.COMPUTE, duration_ns=_COMPUTE_NS, kernel="gemm_forward")
            if self._job.pp > 1:
                self._collective("TP", "AllReduce", reductions, _TOKENS, BFLOAT16)
                continue
            self._collective("TP", "AllGather", gathers, _TOKENS // self._job.tp, BFLOAT16)
            self._collective("TP", "ReduceScatter", scatters, _TOKENS // self._job.tp, BFLOAT16)

    def _exchange(self, *ops: str) -> None:
        pairs = [(op, 1 - self._stage) for op in ops]
        self._launch(
            self._builder.point_to_point(self._groups["PP"], pairs, name="pipeline", count=_TOKENS, dtype=BFLOAT16)
        )
        self._act(Act.SYNCHRONISE)

    def _collective(self, parallelism: str, op: str, times: int, count: int, dtype: DataType) -> None:
        group = self._groups[parallelism]
        for nth in range(times):
            red = SUM if op in {"AllReduce", "ReduceScatter"} else 0
            name = f"{parallelism}.{op}.{nth}"
            self._launch(self._builder.collective(group, op, name=name, count=count, dtype=dtype, red=red))

    def _launch(self, launch: Launch) -> None:
        self._actions.append(Action(act=Act.ISSUE, launch=launch))

    def _act(self, act: Act, *, duration_ns: int = 0, kernel: str = "") -> None:
        self._actions.append(Action(act=act, duration_ns=duration_ns, kernel=kernel))


def _table_2() -> dict[tuple[int, str], tuple[int, int]]:
    own = {"AllGather": 4341, "AllReduce": 725, "Broadcast": 801, "ReduceScatter": 2720}
    doubled = {"AllGather": 8682, "AllReduce": 1470, "Broadcast": 1602, "ReduceScatter": 5440}
    single = {**own, "AllReduce": 745}
    printed: dict[tuple[int, str], tuple[int, int]] = {}
    for rank in range(1, 5):
        printed |= {(rank, op): ((doubled if rank == 1 else single)[op], kernels) for op, kernels in own.items()}
    return printed


TP4: Final = ThesisJob(name="TP=4 (table 4.2)", tp=4, pp=1, microbatches=16, first_reductions=5, printed=_table_2())
TP2_PP2: Final = ThesisJob(
    name="TP=2 PP=2 (table 4.1)",
    tp=2,
    pp=2,
    microbatches=32,
    first_reductions=6,
    printed={
        **{(rank, "AllGather"): (42 if rank == 1 else 21, 21) for rank in range(1, 5)},
        (1, "AllReduce"): (5942, 2966),
        (2, "AllReduce"): (2987, 2966),
        (3, "AllReduce"): (7786, 3926),
        (4, "AllReduce"): (3946, 3926),
        (1, "Broadcast"): (1922, 961),
        (2, "Broadcast"): (961, 961),
        (3, "Broadcast"): (1921, 961),
        (4, "Broadcast"): (961, 961),
        **{(rank, op): (320, 0) for rank in range(1, 5) for op in ("Send", "Recv")},
        **{(rank, "SendRecv"): (0, 330) for rank in range(1, 5)},
    },
)


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
