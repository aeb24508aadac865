"""Stages of a made-up pipeline that only send to each other, on made-up clocks: for tests and benchmarks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.clock.estimator import ClockEstimator

ORIGIN_NS = 1_750_000_000_000_000_000
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
