"""Groups that do the same work, held against each other: a reference from the first minutes, with no baseline."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.levels import Sample, Shape

BLOCK: Final = 4
BLOCKS: Final = 3
_OLD_NS: Final = 60_000_000_000
SLOW: Final = 0.20
"""In log busbw: 18 % slower than its siblings."""
_STILL_SLOW: Final = 0.12
"""One that was slow stays so until its median has come this near: no flapping at the border."""
_HEALTHY: Final = 0.08
SPREADS: Final = 6.0
NOISES: Final = 6.5
"""Times how much single windows scatter: medians of four of a correlated series scatter nearly as much."""
_LEAST_GROUPS: Final = 3
LEAST_HEALTHY: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What its siblings say of a communicator in one shape."""

    communicator: int
    is_slow: bool
    """False: healthy. Those between are not listed."""
    loss: float
    """Share of the siblings' busbw that it lacks."""
    level: float
    reference: float
    since_ns: int
    healthy_siblings: int


@dataclass(slots=True)
class _Recent:
    samples: deque[Sample] = field(default_factory=lambda: deque[Sample](maxlen=BLOCK * BLOCKS))


class Siblings:
    """The last dozen windows of every shape."""

    def __init__(self) -> None:
        self._recent: dict[Shape, _Recent] = {}
        self._seen: Counter[Shape] = Counter()
        self._newest_ns = 0
        self._slow: set[int] = set()

    def feed(self, samples: Iterable[Sample]) -> None:
        """Takes closed windows, oldest first. The first of a shape are warm-up and left out."""
        for sample in samples:
            self._seen[sample.shape] += 1
            self._newest_ns = max(self._newest_ns, sample.at_ns)
            if self._seen[sample.shape] > 3:
                self._recent.setdefault(sample.shape, _Recent()).samples.append(sample)

    def verdicts(self, context: Context) -> list[Verdict]:
        """Slow and healthy communicators, at most one verdict each: slow in any shape is slow."""
        families: dict[Hashable, list[tuple[Shape, list[Sample]]]] = defaultdict(list)
        for shape, recent in self._recent.items():
            samples = list(recent.samples)
            group = context.groups.get(shape.communicator)
            if group is None or len(samples) < BLOCK * BLOCKS or samples[0].at_ns < self._newest_ns - _OLD_NS:
                continue
            families[(shape.op, shape.bucket, *_likeness(group))].append((shape, samples))
        by_communicator: dict[int, Verdict] = {}
        for family in families.values():
            for verdict in _compare(family, self._slow):
                known = by_communicator.get(verdict.communicator)
                if known is None or (verdict.is_slow, verdict.loss) > (known.is_slow, known.loss):
                    by_communicator[verdict.communicator] = verdict
        self._slow = {verdict.communicator for verdict in by_communicator.values() if verdict.is_slow}
        return list(by_communicator.values())


def _likeness(group: Group) -> tuple[Hashable, ...]:
    """Groups with equal likeness cross the same kinds of wires."""
    per_host = tuple(sorted(Counter(group.hosts).values()))
    return (group.parallelism, len(group.global_ranks), per_host)


def noise_of(levels: NDArray[np.float64]) -> float:
    """How much the windows of a family (group by window) scatter, each group around its own median."""
    return 1.4826 * float(np.median(np.abs(levels - np.median(levels, axis=1, keepdims=True))))


def _compare(family: list[tuple[Shape, list[Sample]]], already_slow: set[int]) -> list[Verdict]:
    if len(family) < _LEAST_GROUPS:
        return []
    levels = np.array([[sample.level for sample in samples] for _, samples in family])
    blocks = np.median(levels.reshape(len(family), BLOCKS, BLOCK), axis=2)
    best = np.sort(blocks, axis=0)[-max(LEAST_HEALTHY, len(family) // 3) :]
    reference = np.median(best, axis=0)
    spread = 1.4826 * np.median(np.abs(best - reference), axis=0)
    behind = reference - blocks
    slow = (behind > np.maximum(np.maximum(SLOW, SPREADS * spread), NOISES * noise_of(levels))).all(axis=1)
    was_slow = np.array([shape.communicator in already_slow for shape, _ in family])
    slow |= was_slow & (np.median(behind, axis=1) > _STILL_SLOW)
    healthy = (behind < _HEALTHY).sum(axis=1) > blocks.shape[1] / 2
    if healthy.sum() < LEAST_HEALTHY:
        return []
    return [
        Verdict(
            communicator=shape.communicator,
            is_slow=bool(slow[place]),
            loss=1.0 - float(np.exp(-np.median(behind[place]))),
            level=float(np.median(blocks[place])),
            reference=float(np.median(reference)),
            since_ns=samples[0].at_ns,
            healthy_siblings=int(healthy.sum()),
        )
        for place, (shape, samples) in enumerate(family)
        if slow[place] or healthy[place]
    ]
