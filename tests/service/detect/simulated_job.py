"""Joined collectives of a made-up training job, step by step, with faults to find.

Ranks are laid out tensor-parallel first, then data, then pipeline. Lateness travels as in a real job: a rank that
arrives late in its tensor-parallel group delays its peers, these their pipeline and their data-parallel groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.detect.context import Context, Group
from ncclscope_service.store import rows
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

ALL_REDUCE = OPERATION_CODES["AllReduce"]
RECV = OPERATION_CODES["Recv"]
ORIGIN_NS = 1_750_000_000_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The shape of the job and its noise."""

    tensor: int = 2
    data: int = 2
    pipeline: int = 2
    gpus_per_host: int = 2
    step_ns: float = 250e6
    microbatches: int = 4
    jitter: float = 0.01
    """Spread of compute times, relative."""
    rank_correlation: float = 0.6
    """From one step to the next, of a rank's compute time."""
    busbw_cv: float = 0.05
    imbalance_ns: float = 0.0
    """Experts: in each step some rank of each data-parallel group computes this much longer."""
    late_rank: int | None = None
    late_ns: float = 0.0
    """Per operation of its tensor-parallel group, else of its data-parallel group."""
    exchange_ns: float = 0.0
    """How long a stage's activations or gradients take to the next; 0: no time, and nobody sees it."""
    slow_host: int | None = None
    slow_share: float = 0.0
    fault_from_step: int = 0
    fault_to_step: int = 10**9

    @property
    def ranks(self) -> int:
        """How many."""
        return self.tensor * self.data * self.pipeline

    def host(self, rank: int) -> str:
        """The host of a global rank."""
        return f"node{rank // self.gpus_per_host}"


class Simulation:
    """Steps of a job as columns."""

    def __init__(self, job: Job, seed: int = 0) -> None:
        self.job = job
        self.groups: dict[int, Group] = {}
        self.by_kind: dict[str, list[int]] = {}
        self._random = np.random.default_rng(seed)
        tensor, data, pipeline = job.tensor, job.data, job.pipeline
        ids = np.arange(job.ranks).reshape(pipeline, data, tensor)
        self._add("TP", [ids[p, d, :] for p in range(pipeline) for d in range(data)])
        self._add("DP", [ids[p, :, t] for p in range(pipeline) for t in range(tensor)])
        self._add("PP", [ids[:, d, t] for d in range(data) for t in range(tensor)])
        if pipeline > 1:
            self._add("EMBEDDING", [ids[[0, -1], d, t] for d in range(data) for t in range(tensor)])
        self._add("WORLD", [ids.reshape(-1)])
        self._ids = ids
        self._time = np.zeros(job.ranks)
        self._slowness = np.zeros(job.ranks)
        self._noise: dict[int, float] = {}
        self._seq: dict[int, int] = {}
        self._step = 0

    @property
    def context(self) -> Context:
        """What detectors are told of it; the duration of a step is measured, as in a real job."""
        measured = round(float(self._time.max()) / self._step) if self._step else None
        return Context(job="job", groups=self.groups, step_ns=measured)

    @property
    def now_ns(self) -> int:
        """The present of the job."""
        return ORIGIN_NS + int(self._time.max())

    def steps(self, count: int) -> Iterator[Columns]:
        """The collectives of each of the next steps."""
        for _ in range(count):
            yield self._one_step()

    def seconds(self, seconds: float) -> Iterator[Columns]:
        """The collectives of the next seconds, a batch per second or per step, whichever is longer."""
        end = self._time.max() + seconds * 1e9
        while self._time.max() < end:
            begin = self._time.max()
            parts = [self._one_step()]
            while self._time.max() < begin + 1e9:
                parts.append(self._one_step())
            yield np.concatenate(parts)

    def _add(self, kind: str, members: Sequence[NDArray[np.int_]]) -> None:
        for ranks in members:
            index = len(self.groups)
            self.groups[index] = Group(
                comm_id=f"{kind.lower()}{len(self.by_kind.get(kind, []))}",
                parallelism=kind,
                global_ranks=tuple(int(rank) for rank in ranks),
                hosts=tuple(self.job.host(int(rank)) for rank in ranks),
            )
            self.by_kind.setdefault(kind, []).append(index)

    def _one_step(self) -> Columns:
        job, random = self.job, self._random
        made: list[tuple[object, ...]] = []
        phi = job.rank_correlation
        self._slowness = phi * self._slowness + np.sqrt(1 - phi**2) * random.standard_t(4, job.ranks) / np.sqrt(2)
        compute = job.step_ns / (2 * (job.microbatches + job.pipeline - 1)) * (1 + job.jitter * self._slowness)
        if job.imbalance_ns:
            for index in self.by_kind["DP"]:
                compute[random.choice(self.groups[index].global_ranks)] += job.imbalance_ns / (2 * job.microbatches)
        is_faulty = job.fault_from_step <= self._step < job.fault_to_step
        for sweep in (range(job.pipeline), range(job.pipeline - 1, -1, -1)):
            for _ in range(job.microbatches):
                arrived: NDArray[np.float64] | None = None
                for stage in sweep:
                    ranks = self._ids[stage].reshape(-1)
                    if arrived is not None:
                        self._receive(ranks, arrived, is_faulty, made)
                    self._compute(stage, compute, is_faulty, made)
                    arrived = self._time[ranks].copy()
        for index in self.by_kind["DP"]:
            if job.tensor == 1 and is_faulty and job.late_rank in self.groups[index].global_ranks:
                self._time[job.late_rank] += job.late_ns
            self._collective(index, 64 * 1024**2, 4e9, is_faulty, made)
        for index in [*self.by_kind.get("EMBEDDING", []), *self.by_kind["WORLD"]]:
            self._collective(index, 1024, 1e9, False, made)
        self._step += 1
        return np.array(made, dtype=rows.COLLECTIVE)

    def _receive(
        self, ranks: NDArray[np.int_], sent: NDArray[np.float64], is_faulty: bool, made: list[tuple[object, ...]]
    ) -> None:
        """Each of these ranks waits for what its neighbour in the pipeline sends."""
        job = self.job
        for rank, sent_at in zip(ranks.tolist(), sent.tolist(), strict=True):
            index = next(index for index in self.by_kind["PP"] if rank in self.groups[index].global_ranks)
            group, began = self.groups[index], self._time[rank]
            is_slow = is_faulty and job.slow_host is not None and f"node{job.slow_host}" in group.host_set()
            moving = job.exchange_ns / (1 - job.slow_share if is_slow else 1.0)
            wait = max(0.0, sent_at - began)
            self._time[rank] = end = began + wait + moving
            if moving:
                own = group.global_ranks.index(rank)
                made.append(
                    (
                        index, NO_NUMBER, RECV, 3, 8 * 1024**2, 1, ORIGIN_NS + int(began), ORIGIN_NS + int(end),
                        int(moving), int(wait), int(wait), int(wait + moving), NO_NUMBER, NO_NUMBER,
                        8 * 1024**2 / moving * 1e9, 1.0, own, 1 - own,
                    )
                )  # fmt: skip

    def _compute(
        self, stage: int, compute: NDArray[np.float64], is_faulty: bool, made: list[tuple[object, ...]]
    ) -> None:
        job = self.job
        ranks = self._ids[stage].reshape(-1)
        self._time[ranks] += compute[ranks] * (1 + 0.003 * np.abs(self._random.normal(size=len(ranks))))
        if job.tensor == 1:
            return
        for index in self.by_kind["TP"]:
            group = self.groups[index]
            if group.global_ranks[0] in ranks:
                if is_faulty and job.late_rank in group.global_ranks:
                    self._time[job.late_rank] += job.late_ns
                self._collective(index, 8 * 1024**2, 100e9, False, made)

    def _collective(
        self, index: int, moved: int, busbw: float, may_be_slow: bool, made: list[tuple[object, ...]]
    ) -> None:
        job, group = self.job, self.groups[index]
        ranks = np.array(group.global_ranks)
        if len(ranks) < 2:
            return
        noise = 0.6 * self._noise.get(index, 0.0) + 0.8 * float(self._random.normal(0, job.busbw_cv))
        self._noise[index] = noise
        speed = busbw * np.exp(noise)
        touches = job.slow_host is not None and f"node{job.slow_host}" in group.host_set()
        if may_be_slow and touches and len(group.host_set()) > 1:
            speed *= 1 - job.slow_share
        factor = 2 * (len(ranks) - 1) / len(ranks)
        transfer = moved * factor / speed * 1e9
        arrival = self._time[ranks]
        end = arrival.max() + transfer
        skew = self._random.uniform(0, 3_000 if len(group.host_set()) == 1 else 10_000, len(ranks))
        duration = end - arrival + skew
        self._time[ranks] = end + skew
        order = np.argsort(duration)
        shortest = float(duration[order[0]])
        seq = self._seq[index] = self._seq.get(index, -1) + 1
        made.append(
            (
                index, seq, ALL_REDUCE, 3, moved, len(ranks), ORIGIN_NS + int(arrival.min()), ORIGIN_NS + int(end),
                int(shortest), int(duration.max() - shortest), int((duration - shortest).sum()), int(duration.sum()),
                int(order[0]), int(duration[order[1]] - shortest), moved * factor / shortest * 1e9, 1.0,
                NO_NUMBER, NO_NUMBER,
            )
        )  # fmt: skip
