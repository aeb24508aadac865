"""Ten runs of a thesis, printed and explained: operations and bytes by figure, and its table 5.1.

Borzyk, Understanding LLM Communication, Heidelberg University 2026, chapters 4 and 5: Megatron-LM core_r0.13.0
(73a28a1) on four GPUs, ten iterations, NCCL 2.28.9. Its figures count kernels of all four ranks; its volumes are logged
bytes, one-rank communicators included, in GiB under the name of GB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ncclscope_models import textbook
from ncclscope_models.emission.megatron import Step, iteration, start
from ncclscope_models.emission.operations import Emitted, kernels_by_op, lines_by_op, logged_by_op
from ncclscope_models.job import (
    Dispatcher,
    Experts,
    Framework,
    Job,
    Layout,
    Precision,
    Recompute,
    Training,
    gpt,
    padded_vocabulary,
)

GPUS = 4
ITERATIONS = 10
TOKENS = 50_257
"""Of GPT-2's tokenizer."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Run:
    """One run: what it was, and what its figures print."""

    name: str
    job: Job
    counts: tuple[str, dict[str, int]]
    """Figure, and kernels of all ranks."""
    volumes: tuple[str, dict[str, float]]
    """Figure, and logged GiB of all ranks."""
    remark: str = ""


def dense(
    layers: int, layout: Layout, *, micro_batch: int = 4, heads: int = 8, has_distributed_optimizer: bool = False
) -> Job:
    """The thesis's dense model on this layout: hidden 512, sequence 1024, global batch 64, FP16."""
    vocabulary = padded_vocabulary(TOKENS, layout.tensor)
    return Job(
        shape=gpt(layers=layers, hidden=512, heads=heads, sequence=1024, vocabulary=vocabulary),
        layout=layout,
        training=Training(
            micro_batch=micro_batch,
            global_batch=64,
            precision=Precision.FP16,
            are_gradients_fp32=False,
            has_distributed_optimizer=has_distributed_optimizer,
            makes_attention_mask=True,
            log_timers_to_tensorboard=True,
        ),
        framework=Framework.MEGATRON,
        version="core_r0.13.0",
    )


def mixture(dispatcher: Dispatcher) -> Job:
    """Its mixture of experts: 4 experts in every second layer, two per token, BF16, no biases, on 4 expert ranks."""
    base = dense(16, Layout(data=4))
    experts = Experts(experts=4, top_k=2, layer_frequency=2, expert_ffn=2048, dispatcher=dispatcher)
    training = replace(base.training, precision=Precision.BF16, are_gradients_fp32=True, recompute=Recompute.SELECTIVE)
    shape = replace(base.shape, experts=experts, has_bias=False, has_qkv_bias=False)
    return replace(base, shape=shape, layout=Layout(data=4, expert=4), training=training)


RUNS = (
    Run(
        "DP 4",
        dense(16, Layout(data=4)),
        ("5.4", {"AllReduce": 220, "AllGather": 84, "Broadcast": 4}),
        ("5.5", {"AllReduce": 5.72, "Broadcast": 0.64, "total": 6.37}),
        "the Broadcasts are the batch on one-rank tensor groups: logged, never sent",
    ),
    Run(
        "DP 4, distributed optimizer",
        dense(16, Layout(data=4), has_distributed_optimizer=True),
        ("5.7", {"AllReduce": 220, "AllGather": 84, "ReduceScatter": 40, "Broadcast": 4}),
        ("5.9", {"ReduceScatter": 1.43, "Broadcast": 0.64, "total": 2.08}),
        "no parameters gathered: all ten FP16 steps overflowed and were skipped; ReduceScatter is logged by the shard",
    ),
    Run(
        "PP 4",
        dense(16, Layout(pipeline=4)),
        ("5.11", {"SendRecv": 1080, "AllReduce": 322, "AllGather": 84, "Broadcast": 4}),
        ("5.12", {"Send": 3.75, "AllReduce": 2.97, "Broadcast": 1.27, "total": 7.99}),
        "Recv lines are not in the volume; gradients of one-rank data groups are",
    ),
    Run(
        "PP 4, 2 chunks",
        dense(16, Layout(pipeline=4, chunks=2)),
        ("5.15", {"SendRecv": 4480, "AllReduce": 334, "AllGather": 84, "Broadcast": 8}),
        ("5.16", {"Send": 8.75, "AllReduce": 2.97, "Broadcast": 2.53, "total": 14.26}),
        "12 AllReduces and 4 Broadcasts of control size are not explained",
    ),
    Run(
        "TP 4",
        dense(8, Layout(tensor=4), heads=4),
        ("5.17", {"AllReduce": 23980, "Broadcast": 3204, "AllGather": 84}),
        ("5.18", {"AllReduce": 86.02, "Broadcast": 2.57, "total": 88.59}),
    ),
    Run(
        "TP 4, sequence parallel",
        dense(8, Layout(tensor=4, is_sequence_parallel=True), heads=4),
        ("5.19", {"AllGather": 32724, "ReduceScatter": 21120, "Broadcast": 3204, "AllReduce": 2900}),
        ("5.20", {"AllGather": 31.88, "ReduceScatter": 20.62, "AllReduce": 3.52, "Broadcast": 2.57, "total": 58.59}),
    ),
    Run(
        "EP 4, all-to-all",
        mixture(Dispatcher.ALLTOALL),
        ("5.23", {"SendRecv": 7680, "AllGather": 1364, "AllReduce": 260, "Broadcast": 4}),
        ("5.24", {"Send": 40.04, "AllReduce": 11.43, "Broadcast": 0.64, "total": 52.11}),
        "Sends to oneself are logged and counted",
    ),
    Run(
        "EP 4, AllGather",
        mixture(Dispatcher.ALLGATHER),
        ("5.25", {"AllGather": 5204, "ReduceScatter": 3840, "AllReduce": 260, "Broadcast": 4}),
        ("5.26", {"AllGather": 10.06, "ReduceScatter": 10.04, "AllReduce": 11.43, "total": 32.17}),
    ),
)
TABLE_4_1 = dense(4, Layout(tensor=2, pipeline=2), micro_batch=2)
TABLE_4_2 = dense(4, Layout(tensor=4, is_sequence_parallel=True))
_TABLES_OF_CHAPTER_4 = (
    ("4.1", TABLE_4_1, 1, "AllReduce", 2966),
    ("4.1", TABLE_4_1, 3, "AllReduce", 3926),
    ("4.1", TABLE_4_1, 1, "Broadcast", 961),
    ("4.1", TABLE_4_1, 1, "SendRecv", 330),
    ("4.2", TABLE_4_2, 1, "AllGather", 4341),
    ("4.2", TABLE_4_2, 1, "ReduceScatter", 2720),
    ("4.2", TABLE_4_2, 1, "AllReduce", 725),
    ("4.2", TABLE_4_2, 1, "Broadcast", 801),
)
"""Table, job, rank from 0, operation, kernels."""


def whole_run(job: Job, stage: int) -> list[Emitted]:
    """All operations of one rank of this stage: the start and ten iterations; FP16 steps all overflowed."""
    step = Step(is_skipped=job.training.precision is Precision.FP16)
    return [*start(job, stage), *(operation.times(ITERATIONS) for operation in iteration(job, stage, step))]


@cache
def by_rank(job: Job) -> tuple[list[Emitted], ...]:
    """`whole_run` of every rank, stage after stage."""
    ranks_of_stage = GPUS // job.layout.pipeline
    return tuple(whole_run(job, stage) for stage in range(job.layout.pipeline) for _ in range(ranks_of_stage))


def _summed(job: Job, count: Callable[[Sequence[Emitted]], Counter[str]]) -> Counter[str]:
    return sum((count(operations) for operations in by_rank(job)), Counter[str]())


def kernels(job: Job) -> Counter[str]:
    """Kernels of all ranks, by operation."""
    return _summed(job, kernels_by_op)


def logged_gib(job: Job) -> dict[str, float]:
    """Logged GiB of all ranks as the thesis sums them: without Recv."""
    found = {op: amount / GIB for op, amount in _summed(job, logged_by_op).items() if op != "Recv"}
    return {**found, "total": sum(found.values())}


def rank_gib(job: Job) -> list[float]:
    """Logged GiB of each rank, without Recv."""
    return [
        sum(amount for op, amount in logged_by_op(operations).items() if op != "Recv") / GIB
        for operations in by_rank(job)
    ]


def wire_gib(job: Job) -> list[float]:
    """GiB that each rank really sends, ring algorithms."""
    return [sum(operation.wire_bytes for operation in operations) / GIB for operations in by_rank(job)]


def theory_gb() -> dict[str, float]:
    """The thesis's own theory of table 5.1, decimal GB of wire bytes per rank; what is wrong in it is kept."""
    data = ITERATIONS * textbook.data_parallel(50.4e6, 4, 2) / 1e9
    boundary = ITERATIONS * textbook.pipeline_boundary(b=4, s=1024, h=512, micro_batches=16, element_bytes=2) / 1e9
    tensor = ITERATIONS * textbook.tensor_parallel(
        b=4, s=1024, h=512, layers=8, tensor=4, micro_batches=4, element_bytes=2, is_recomputed=False
    )
    cluster = textbook.expert_parallel(tokens=64 * 1024, h=512, top_k=1, expert=4, layers=4, element_bytes=2)
    return {
        "DP=4": data,
        "PP=4 (edge)": boundary,
        "PP=4 (mid)": 2 * boundary,
        "TP=4": tensor / 1e9,
        "EP=4": ITERATIONS * cluster / 4 / 1e9 + data * 12 / 16,
    }


def _print_counts() -> None:
    print("Counts: kernels of four ranks, start and ten iterations\n")
    print(f"{'figure':<8}{'run':<30}{'operation':<16}{'printed':>9}{'rules':>9}{'left':>7}")
    for run in RUNS:
        figure, printed = run.counts
        found = kernels(run.job)
        for op in printed:
            print(f"{figure:<8}{run.name:<30}{op:<16}{printed[op]:>9,}{found[op]:>9,}{printed[op] - found[op]:>7,}")
    for table, job, rank, op, amount in _TABLES_OF_CHAPTER_4:
        found = kernels_by_op(by_rank(job)[rank])
        name = f"table, rank {rank + 1}"
        print(f"{table:<8}{name:<30}{op:<16}{amount:>9,}{found[op]:>9,}{amount - found[op]:>7,}")
    for table, job, rank, amount in (
        ("4.1", TABLE_4_1, 1, 2987),
        ("4.1", TABLE_4_1, 3, 3946),
        ("4.2", TABLE_4_2, 1, 745),
    ):
        lines = lines_by_op(by_rank(job)[rank])["AllReduce"]
        name = f"table, rank {rank + 1}, log lines"
        print(f"{table:<8}{name:<30}{'AllReduce':<16}{amount:>9,}{lines:>9,}{amount - lines:>7,}")
    print("         lines without a kernel are gradients and, on the last stage, loss on data groups of one rank")


def _print_volumes() -> None:
    print("\nVolumes: logged GiB of four ranks, ten iterations\n")
    print(f"{'figure':<8}{'run':<30}{'operation':<16}{'printed':>9}{'rules':>11}")
    for run in RUNS:
        figure, printed = run.volumes
        found = logged_gib(run.job)
        for op in printed:
            print(f"{figure:<8}{run.name:<30}{op:<16}{printed[op]:>9.2f}{found[op]:>11.4f}")
        if run.remark:
            print(f"         {run.remark}")


def _print_table() -> None:
    print("\nTable 5.1: per rank, ten iterations; theory in GB of wire bytes, observed and rules in GiB as logged\n")
    jobs = {run.name: run.job for run in RUNS}
    theory = theory_gb()
    rows = (
        ("DP=4", "DP 4", 0, 1.59, "chance: P too small, ring factor counted, one-rank Broadcasts added"),
        ("PP=4 (edge)", "PP 4", 0, 2.50, "one-rank gradients and batch added, Recvs not; embedding on the edges only"),
        ("PP=4 (mid)", "PP 4", 1, 1.50, "one-rank gradients added, Recvs not counted"),
        ("TP=4", "TP 4", 0, 22.15, "16 micro-batches, not 4; messages, not wire; embedding, head, cross-entropy"),
        (
            "EP=4",
            "EP 4, all-to-all",
            0,
            13.03,
            "8 layers of experts, not 4; top-2, not 1; FP32 gradients; sends to self",
        ),
    )
    print(f"{'':<14}{'theory':>8}{'observed':>10}{'rules':>9}{'sent':>8}   why they differ")
    for label, name, rank, observed, why in rows:
        logged, sent = rank_gib(jobs[name])[rank], wire_gib(jobs[name])[rank]
        print(f"{label:<14}{theory[label]:>8.2f}{observed:>10.2f}{logged:>9.3f}{sent:>8.2f}   {why}")


def main() -> None:
    """Prints the three tables."""
    _print_counts()
    _print_volumes()
    _print_table()
