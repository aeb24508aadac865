"""Members of communicators that no line names, made of groups that really exist: for tests and benchmarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ncclscope_service.job.identification import Candidate, Content, Exchange, InferredGroup, infer_groups

ALL_REDUCE: Content = (4, 1024, 7, 0, 0)
ALL_GATHER: Content = (1, 4096, 7, 0, 0)
BROADCAST: Content = (0, 16, 7, 0, 0)
OPERATIONS = 60


class Job:
    """Makes candidates of groups that really exist."""

    def __init__(self, seed: int = 1) -> None:
        self._random = np.random.default_rng(seed)
        self.candidates: list[Candidate] = []
        self.groups: list[tuple[int, ...]] = []

    def group(
        self,
        seats: Sequence[int],
        *,
        content: Counter[Content] | None = None,
        timed: bool = False,
        ranked: bool = True,
        offsets_ns: Sequence[int] | None = None,
        drift_ppm: float = 0.0,
        exchanges: Sequence[Counter[Exchange]] | None = None,
    ) -> None:
        """One communicator over these seats, in order of rank."""
        ends = np.cumsum(self._random.integers(1_000_000, 3_000_000, OPERATIONS)) if timed else np.empty(0, np.int64)
        members: list[int] = []
        for rank, seat in enumerate(seats):
            offset = 0 if offsets_ns is None else offsets_ns[rank]
            skew = self._random.integers(0, 10_000, len(ends))
            drifted = (ends * (1 + drift_ppm * 1e-6 * rank)).astype(np.int64)
            members.append(len(self.candidates))
            self.candidates.append(
                Candidate(
                    member=len(self.candidates),
                    seat=seat,
                    size=len(seats),
                    rank=rank if ranked else None,
                    birth=0,
                    content=Counter({ALL_REDUCE: OPERATIONS}) if content is None else content,
                    exchanges=Counter() if exchanges is None else exchanges[rank],
                    ends_ns=drifted + offset + skew,
                    numbers=np.arange(len(ends)),
                )
            )
        self.groups.append(tuple(members))

    def found(self) -> list[tuple[int, ...]]:
        return sorted(group.members for group in self.infer())

    def infer(self) -> list[InferredGroup]:
        return infer_groups(self.candidates)
