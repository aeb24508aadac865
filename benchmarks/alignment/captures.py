"""The tables of simulated jobs: clean captures of every version and shape, and captures of 40 % of the time.

Beside them stands the bound if nothing is lost and nothing tells which Sends and Recvs share a kernel. Lines and
launches of one thread are then known one by one, but for stretches of r Sends and Recvs of one communicator that were
launched as k kernels, with nothing between. Where k is 1 or r, the order decides; else there are (r-1 over k-1) ways to
cut them. An exact method that knows how often two neighbours of these kinds and peers are launched together (from the
truth, which no method has) gets the posterior of "operation i belongs to kernel g" by forward and backward sums over
all cuts, and expects to be right where it is highest. Where opCount moves with every launch, it tells the cuts.

Of meaning (communicator, kind and size) it expects more: a kernel's c-th Send is right if the kernel has that many.
From the probability that kernel g holds operations b to e follow those of "at least c of a kind", and the best answer
gives the operations of a kind to the likeliest of these. In which order they were called is left out of account, so it
is a bound for every method that knows no more than this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np
from benchmarks.alignment.jobs import JobScore, Row, score_simulated
from benchmarks.alignment.scenarios import LOSSES
from numpy.typing import NDArray

from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.faults import Fault
from ncclscope_simulator.version import SHORT_FORMS, traits

_IN_GROUPS = {"Send", "Recv", "AlltoAll", "Gather", "Scatter"}


@dataclass(frozen=True, slots=True)
class OpenGroups:
    """What an exact method expects."""

    operations: int
    """That launch a kernel."""
    expected: float
    """Of these, how many it expects to get right."""
    expected_meaning: float
    """Of these, to how many it expects to give a kernel of their communicator, kind and size."""

    @property
    def f1(self) -> float:
        """Each operation is answered once and has one kernel: F1 is the share that is right."""
        return self.expected / self.operations if self.operations else 1.0

    @property
    def meaning(self) -> float:
        """The share of operations of which communicator, kind and size are right."""
        return self.expected_meaning / self.operations if self.operations else 1.0


def bound_of_groups(rows: Sequence[Row]) -> OpenGroups:
    """The bound for a job's truth (rows of truth/operations.parquet, in call order of each thread)."""
    stretches = _stretches(rows, _counted(rows))
    together: Counter[Hashable] = Counter()
    neighbours: Counter[Hashable] = Counter()
    for before, after in chain.from_iterable(map(pairwise, stretches)):
        neighbours[_kinds(before, after)] += 1
        together[_kinds(before, after)] += before["launch_id"] == after["launch_id"]
    operations = sum(row["launch_id"] is not None for row in rows)
    expected = meaning = float(operations - sum(map(len, stretches)))
    for stretch in stretches:
        pairs = [_kinds(before, after) for before, after in pairwise(stretch)]
        chances = np.array([together[kinds] / neighbours[kinds] for kinds in pairs])
        kernels = len({row["launch_id"] for row in stretch})
        expected += float(membership(chances, kernels).max(axis=1).sum())
        meaning += meaning_bound(chances, kernels, [(row["op"], row["message_bytes"]) for row in stretch])
    return OpenGroups(operations, expected, meaning)


def membership(together: NDArray[np.float64], kernels: int) -> NDArray[np.float64]:
    """Probability of (operation, kernel) for a stretch cut into so many kernels.

    `together`: for each operation but the first, the chance that it is launched with the one before it.
    """
    amount = len(together) + 1
    forward, backward = np.zeros((amount, kernels)), np.zeros((amount, kernels))
    forward[0, 0] = backward[-1, -1] = 1.0
    # Certain neighbours would forbid cuts that the count demands.
    together = np.clip(together, 1e-9, 1 - 1e-9)
    for nth, chance in enumerate(together, 1):
        forward[nth] = forward[nth - 1] * chance
        forward[nth, 1:] += forward[nth - 1, :-1] * (1 - chance)
        forward[nth] /= forward[nth].max()
    for nth in range(amount - 2, -1, -1):
        chance = together[nth]
        backward[nth] = backward[nth + 1] * chance
        backward[nth, :-1] += backward[nth + 1, 1:] * (1 - chance)
        backward[nth] /= backward[nth].max()
    both = forward * backward
    posterior: NDArray[np.float64] = both / both.sum(axis=1, keepdims=True)
    return posterior


def meaning_bound(together: NDArray[np.float64], kernels: int, kinds: Sequence[Hashable]) -> float:
    """Operations of a stretch whose kernel has one of their kind each, as the best answer expects."""
    amount = len(kinds)
    held = held_stretches(together, kernels)
    found = 0.0
    for kind in set(kinds):
        before = np.concatenate([[0], np.cumsum([own == kind for own in kinds])])
        inside = before[None, :] - before[:, None]
        most = int(before[-1])
        at_least = [held[:, inside >= count].sum(axis=1) for count in range(1, most + 1)]
        found += float(np.sort(np.concatenate(at_least))[::-1][:most].sum())
    return min(found, float(amount))


def held_stretches(together: NDArray[np.float64], kernels: int) -> NDArray[np.float64]:
    """Probability (kernel, begin, end) that a kernel holds just the operations from begin to end."""
    amount = len(together) + 1
    chance = np.concatenate([[0.0], np.log(np.clip(together, 1e-9, 1 - 1e-9))])
    cut = np.concatenate([[0.0], np.log1p(-np.clip(together, 1e-9, 1 - 1e-9)), [0.0]])
    joined = np.cumsum(chance)
    # inner[b, e]: of operations b to e - 1, all but the first run with the one before.
    inner = np.where(
        np.arange(amount + 1)[None, :] > np.arange(amount)[:, None],
        np.append(joined, 0.0)[np.arange(amount + 1) - 1][None, :] - joined[:, None],
        -np.inf,
    )
    ahead = np.full((kernels + 1, amount + 1), -np.inf)
    behind = np.full((kernels + 1, amount + 1), -np.inf)
    ahead[0, 0] = behind[kernels, amount] = 0.0
    for nth in range(kernels):
        ahead[nth + 1] = np.logaddexp.reduce((ahead[nth, :-1] + cut[:-1])[:, None] + inner, axis=0)
    for nth in range(kernels - 1, -1, -1):
        behind[nth, :-1] = np.logaddexp.reduce(cut[:-1, None] + inner + behind[nth + 1][None, :], axis=1)
    found = np.exp(
        (ahead[:-1, :-1] + cut[:-1])[:, :, None] + inner[None] + behind[1:, None, :] - ahead[kernels, amount]
    )
    held: NDArray[np.float64] = np.pad(found, ((0, 0), (0, 1), (0, 0)))
    return held


def _kinds(before: Row, after: Row) -> Hashable:
    return before["op"], before["peer"], after["op"], after["peer"]


def _counted(rows: Sequence[Row]) -> set[Hashable]:
    """Communicators, as processes know them, whose opCount moved with every launch."""
    launches: dict[Hashable, set[int]] = {}
    counts: dict[Hashable, set[int]] = {}
    for row in rows:
        if row["launch_id"] is not None:
            launches.setdefault(_member(row), set()).add(row["launch_id"])
            counts.setdefault(_member(row), set()).add(row["op_count"])
    return {member for member, own in launches.items() if len(own) == len(counts[member])}


def _member(row: Row) -> Hashable:
    return row["host"], row["pid"], row["comm_ptr"]


def _stretches(rows: Sequence[Row], counted: set[Hashable]) -> list[list[Row]]:
    """Sends and Recvs of one thread and communicator with no other launch of the thread between."""
    stretches: list[list[Row]] = []
    last: dict[Hashable, Row] = {}
    current: dict[Hashable, list[Row]] = {}
    for row in rows:
        if row["launch_id"] is None:
            continue
        thread = (row["host"], row["pid"], row["tid"])
        before, last[thread] = last.get(thread), row
        if row["op"] not in _IN_GROUPS or _member(row) in counted:
            continue
        if before is not None and before["op"] in _IN_GROUPS and before["comm_ptr"] == row["comm_ptr"]:
            current[thread].append(row)
        else:
            current[thread] = [row]
            stretches.append(current[thread])
    return stretches


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
