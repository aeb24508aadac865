"""The tables of simulated jobs: clean captures of every version and shape, and captures of 40 % of the time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from benchmarks.alignment.jobs import JobScore, score_simulated
from benchmarks.alignment.open_groups import bound_of_groups
from benchmarks.alignment.scenarios import LOSSES

from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.faults import Fault
from ncclscope_simulator.version import SHORT_FORMS, traits

ALL: Final = tuple(SHORT_FORMS)
SOME: Final = ("2.8", "2.12", "2.18", "2.21", "2.26", "2.28", "2.30")


_DUTIES: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("stamps", "2.28", {"nvtx": False}),
    ("NVTX", "2.28", {"timestamps": False}),
    ("NVTX; opCount moves", "2.21", {}),
    ("neither; opCount moves", "2.21", {"nvtx": False}),
    ("neither", "2.28", {"nvtx": False, "timestamps": False}),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of job. `wanted` names fields of SimulationConfig; a row of which one does not exist says so."""

    name: str
    versions: tuple[str, ...] = SOME
    wanted: dict[str, Any] = field(default_factory=dict[str, Any])


_STAGES: Final = {"nodes": 1, "pp": 4, "dp": 1}
_INTERLEAVED: Final = {**_STAGES, "interleave": 2, "microbatches": 8}

_SIX: Final = {"coalesce": True, "zero1": True, "layers": 6}

SHAPES: Final = (
    Shape("2 nodes, TP=2 PP=2 DP=2", ALL),
    Shape("1 node, TP=2 PP=2 DP=2: opCount stuck from 2.27", SOME, {"nodes": 1, "gpus": 8}),
    Shape("1 node, PP=4: nothing between Sends and Recvs", SOME, {**_STAGES, "tp": 1}),
    Shape("EP=2 all-to-all", SOME, {"ep": 2}),
    Shape("one process for all GPUs of a node", SOME, {"process_per_node": True}),
    Shape("opCount stuck by a live graph", ("2.13", "2.18", "2.23"), {"nodes": 1, "gpus": 8, "stuck_op_count": True}),
    Shape("gradients in one group (coalesced)", SOME, {"coalesce": True, "zero1": True}),
    Shape("1 node, gradients of six layers in one group", ("2.28", "2.30"), {**_SIX, "nodes": 1, "gpus": 4, "tp": 1}),
    Shape("groups of several kernels, work FIFO of 8", ("2.13", "2.18", "2.21"), {**_SIX, "work_fifo": 8}),
    Shape(
        "groups of several kernels, work FIFO of 384 bytes",
        ("2.22", "2.26", "2.28", "2.30"),
        {**_SIX, "work_fifo": 384},
    ),
    Shape(
        "groups of Broadcasts, AllGatherV from 2.29", ("2.26", "2.28", "2.30"), {**_SIX, "broadcast_parameters": True}
    ),
    Shape("PP=4 interleaved, TP=1", SOME, {**_INTERLEAVED, "tp": 1}),
    Shape("PP=4 interleaved, TP=2", SOME, {**_INTERLEAVED, "gpus": 8}),
    Shape("CUDA graphs, traced by node", SOME, {"cuda_graphs": 2, "cuda_graph_trace": "node"}),
    Shape("NVTX payloads in the export", ("2.28", "2.30"), {"nvtx_payload": True, "timestamps": False}),
)


def print_clean(*, short: bool = False) -> None:
    """Clean captures: F1 of exact pairs with all that the version can tell, and the bare case beside its bound."""
    print("| job | NCCL | told | bare | bare: bound | bare: meaning right | bare: its bound | bare: mean confidence |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for shape in SHAPES:
        for version in shape.versions[-1:] if short else shape.versions:
            _print_clean(shape, version)


def print_lossy(*, iterations: int = 20) -> None:
    """A job's own program and streams with rows lost at random, by what is told."""
    print("| told | NCCL | lost | F1 | precision | recall | meaning right | ECE |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for told, version, more in _DUTIES:
        for loss in LOSSES[1:]:
            faults = (Fault(kind="drop_lines", ratio=loss.lines), Fault(kind="drop_kernels", ratio=loss.kernels))
            wanted: dict[str, Any] = {"nodes": 1, "gpus": 8, **more}
            job = score_simulated(SimulationConfig(nccl=version, iterations=iterations, faults=faults, **wanted))
            exact, meaning = job.score.exact, job.score.meaning
            print(
                f"| {told} | {version} | {loss.name} | {exact.f1:.3f} | {exact.precision:.3f} | {exact.recall:.3f}"
                f" | {meaning.precision:.3f} | {job.score.calibration_error:.3f} |",
                flush=True,
            )


def print_duty(*, iterations: int = 120) -> None:
    """Captures of 40 % of the time: what was captured is paired, what was not is said to be not covered."""
    print("| told | NCCL | F1 | precision | meaning right | `not_covered` where true | confidence >= 0.9 | right |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    duty: dict[str, Any] = {
        "nodes": 1,
        "gpus": 4,
        "tp": 2,
        "pp": 2,
        "dp": 1,
        "capture": "duty:0.4",
        "chunk_seconds": 5.0,
    }
    for told, version, more in _DUTIES:
        job = score_simulated(SimulationConfig(nccl=version, iterations=iterations, **{**duty, **more}))
        exact, meaning = job.score.exact, job.score.meaning
        sure = [each for each in job.score.reliability() if each.low >= 0.9]
        amount = sum(each.answers for each in sure)
        right = sum(each.right * each.answers for each in sure) / amount if amount else 1.0
        print(
            f"| {told} | {version} | {exact.f1:.3f} | {exact.precision:.3f} | {meaning.precision:.3f}"
            f" | {job.said_so / job.not_captured:.3f} | {amount:,} of {exact.given:,} | {right:.3f} |",
            flush=True,
        )


def _print_clean(shape: Shape, version: str) -> None:
    missing = sorted(set(shape.wanted) - {each.name for each in fields(SimulationConfig)})
    if missing:
        print(f"| {shape.name} | {version} | the simulator has no {', '.join(missing)} | | | | | |", flush=True)
        return
    wanted: dict[str, Any] = {"iterations": 4, "calls": traits(version).calls, **shape.wanted}
    full = SimulationConfig(nccl=version, **wanted)
    told = score_simulated(full)
    bare = score_simulated(_bare(full))
    bound = bound_of_groups(bare.rows)
    print(
        f"| {shape.name} | {version} | {told.score.exact.f1:.4f} | {bare.score.exact.f1:.4f} | {bound.f1:.4f}"
        f" | {bare.score.meaning.precision:.4f} | {bound.meaning:.4f} | {_stated(bare):.3f} |",
        flush=True,
    )


def _bare(config: SimulationConfig) -> SimulationConfig:
    """The same job, told by names and order only; opCount does what the version does."""
    silent: dict[str, Any] = {"nvtx": False, "calls": False, "timestamps": False}
    if hasattr(config, "nvtx_payload"):
        silent["nvtx_payload"] = False
    return replace(config, **silent)


def _stated(job: JobScore) -> float:
    """Mean confidence of the answers."""
    bins: Iterable[tuple[float, int]] = ((each.stated, each.answers) for each in job.score.reliability())
    given = job.score.exact.given
    return sum(stated * answers for stated, answers in bins) / given if given else 1.0
