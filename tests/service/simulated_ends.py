"""Collectives of a made-up cluster on made-up clocks, with the truth: for tests and benchmarks of the clocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.clock.estimator import ClockEstimator

ORIGIN_NS = 1_750_000_000_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How the clocks, the network and the job behave."""

    hosts: int = 4
    gpus: int = 8
    operations_per_second: float = 10.0
    drift_ppm: float = 50.0
    offset_ns: float = 80e6
    in_node_skew_ns: float = 2_000.0
    """Spread of ends in a node."""
    between_nodes_skew_ns: float = 10_000.0
    """Spread of ends between nodes."""
    tail_ns: float = 0.0
    """Every host ends this much later than the one before it, in each operation: a bias."""
    straggler_ns: float = 0.0
    """How late the last rank is in every operation."""
    jitter_ns: float = 200_000.0
    """Ordinary spread of arrivals."""
    transfer_ns: tuple[int, ...] = (30_000, 200_000, 2_000_000)
    misaligned: float = 0.0
    """Share of operations in which one rank has the times of another operation."""
    step_at_ns: int | None = None
    """When the clock of host 1 is set, from the origin."""
    step_ns: int = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One group of ranks over all hosts, one rank per host, on the hosts' clocks."""

    hosts: NDArray[np.int64]
    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    transfer_ns: NDArray[np.int64]


class Clocks:
    """True clocks of the hosts; host 0 is the reference."""

    def __init__(self, cluster: Cluster, random: np.random.Generator) -> None:
        self.cluster = cluster
        self.offset = np.rint(random.uniform(-cluster.offset_ns, cluster.offset_ns, cluster.hosts)).astype(np.int64)
        self.rate = random.uniform(-cluster.drift_ppm, cluster.drift_ppm, cluster.hosts) * 1e-6
        self.offset[0] = 0
        self.rate[0] = 0.0

    def read(self, host: int, since_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """What the clock of `host` shows at these true times (ns from the origin)."""
        shown: NDArray[np.int64] = (
            ORIGIN_NS + since_ns + self.offset[host] + np.rint(self.rate[host] * since_ns).astype(np.int64)
        )
        if self.cluster.step_at_ns is not None and host == 1:
            shown = shown + np.where(since_ns >= self.cluster.step_at_ns, self.cluster.step_ns, 0)
        return shown


def simulate(cluster: Cluster, clocks: Clocks, seconds: float, random: np.random.Generator) -> list[Simulated]:
    """One data-parallel group per GPU index, each over all hosts, for this long."""
    return [_group(cluster, clocks, seconds, random) for _ in range(cluster.gpus)]


def _group(cluster: Cluster, clocks: Clocks, seconds: float, random: np.random.Generator) -> Simulated:
    count, hosts = max(3, int(seconds * cluster.operations_per_second)), cluster.hosts
    begin = np.sort(random.uniform(0, seconds * 1e9, count)).astype(np.int64)
    arrival = begin[:, None] + np.abs(random.normal(0, cluster.jitter_ns, (count, hosts))).astype(np.int64)
    arrival[:, -1] += int(cluster.straggler_ns)
    transfer = random.choice(np.array(cluster.transfer_ns), count)
    skew = np.abs(random.normal(0, cluster.between_nodes_skew_ns, (count, hosts)))
    skew += random.uniform(0.5, 1.5, (count, hosts)) * cluster.in_node_skew_ns + np.arange(hosts) * cluster.tail_ns
    end = arrival.max(axis=1)[:, None] + transfer[:, None] + skew.astype(np.int64)
    wrong = random.random(count) < cluster.misaligned
    rank = random.integers(0, hosts, count)
    shift = np.zeros((count, hosts), dtype=np.int64)
    shift[np.flatnonzero(wrong), rank[wrong]] = random.integers(1_000_000, 50_000_000, int(wrong.sum()))
    return Simulated(
        hosts=np.arange(hosts),
        starts_ns=np.stack([clocks.read(host, arrival[:, host] + shift[:, host]) for host in range(hosts)], axis=1),
        ends_ns=np.stack([clocks.read(host, end[:, host] + shift[:, host]) for host in range(hosts)], axis=1),
        transfer_ns=(end - arrival).min(axis=1),
    )


MESSAGES = 600


class Stages:
    """Stages, one host each, that send activations forward and gradients back."""

    def __init__(self, hosts: int, seed: int, *, seconds: float = 60.0, asymmetry_ns: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.offset = self.random.integers(-80_000_000, 80_000_000, hosts)
        self.rate = self.random.uniform(-50e-6, 50e-6, hosts)
        self.offset[0], self.rate[0] = 0, 0.0
        self.hosts, self.seconds, self.asymmetry_ns = hosts, seconds, asymmetry_ns

    def read(self, host: int, since_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        drifted: NDArray[np.int64] = np.rint(self.rate[host] * since_ns).astype(np.int64)
        return ORIGIN_NS + since_ns + int(self.offset[host]) + drifted

    def messages(self, sender: int, receiver: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        sent = np.sort(self.random.integers(0, int(self.seconds * 1e9), MESSAGES))
        waited = self.random.exponential(2e6, MESSAGES).astype(np.int64)  # the receiver may be later than the sender
        way = 400_000 + (self.asymmetry_ns if sender < receiver else 0)
        return self.read(sender, sent), self.read(receiver, sent + way + waited)

    def feed(self, estimator: ClockEstimator) -> None:
        for stage in range(self.hosts - 1):
            for sender, receiver in ((stage, stage + 1), (stage + 1, stage)):
                sent, received = self.messages(sender, receiver)
                for part in np.array_split(np.arange(MESSAGES), 5):
                    estimator.add_messages(sender, receiver, sent[part], received[part])
