"""Groups that have been slow from their first step: far below what their links can carry, with no past to show it.

Judged are messages that keep the links busy for long enough that latency does not matter. A group in a well-made job
reaches 70 to 95 % of the narrowest cut of its machines; below half of it, something is set up wrongly: no GPUDirect, a
card of the other socket, a link at half its width.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Set
from typing import Final

import numpy as np

from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.findings import Ledger
from ncclscope_service.detect.levels import Sample, Shape, bytes_of
from ncclscope_service.rows import Finding, FindingKind, Severity
from ncclscope_wire.terms import NO_NUMBER

_LEAST_SECONDS: Final = 150e-6
"""What a message must take at the limit."""
_WINDOWS: Final = 12
_BLOCKS: Final = 3
_EARLY: Final = 3
"""First windows of a shape: warm-up."""
_BELOW: Final = 0.5
_HEALED: Final = 0.6
_CONFIDENCE: Final = 0.7
_COLLECTIVES_SHOWN: Final = 8


class BelowLimit:
    """Feeds on closed windows of one job."""

    def __init__(self) -> None:
        self._recent: dict[Shape, deque[Sample]] = {}
        self._early: dict[Shape, int] = defaultdict(int)
        self._below: set[int] = set()
        self._ledger = Ledger()
        self._context: Context | None = None
        self._newest_ns = 0

    def feed(self, samples: Iterable[Sample], context: Context) -> None:
        """Takes windows, oldest first."""
        self._context = context
        for sample in samples:
            group = context.groups.get(sample.shape.communicator)
            self._newest_ns = max(self._newest_ns, sample.at_ns)
            if group is None or not group.limit or bytes_of(sample.shape) / group.limit < _LEAST_SECONDS:
                continue
            self._early[sample.shape] += 1
            if self._early[sample.shape] > _EARLY:
                self._recent.setdefault(sample.shape, deque(maxlen=_WINDOWS)).append(sample)

    def leave(self, communicators: Set[int]) -> None:
        """Lets go of these communicators."""
        for shape in [shape for shape in self._early if shape.communicator in communicators]:
            del self._early[shape]
            self._recent.pop(shape, None)

    def findings(self, explained: frozenset[int]) -> list[Finding]:
        """All findings so far; `explained`: communicators of which another finding says that they are slow."""
        context = self._context
        if context is None:
            return []
        slow = self._slow(context) if context.clock_is_trusted else {}
        self._below = set(slow)
        by_parallelism: dict[str | None, list[Shape]] = defaultdict(list)
        for communicator, shape in slow.items():
            if communicator not in explained:
                by_parallelism[context.groups[communicator].parallelism].append(shape)
        for parallelism, shapes in by_parallelism.items():
            self._ledger.update(parallelism, self._finding(shapes, context))
        for key in self._ledger.open_keys():
            if key not in by_parallelism:
                self._ledger.close(key, self._newest_ns)
        return self._ledger.findings()

    def _slow(self, context: Context) -> dict[int, Shape]:
        """By communicator below its limit, the shape that shows it most."""
        worst: dict[int, tuple[float, Shape]] = {}
        for shape, samples in self._recent.items():
            group = context.groups.get(shape.communicator)
            if group is None or not group.limit or len(samples) < _WINDOWS:
                continue
            levels = np.array([sample.level for sample in samples]).reshape(_BLOCKS, -1)
            efficiency = np.exp(np.median(levels, axis=1)) / group.limit
            bar = _HEALED if shape.communicator in self._below else _BELOW
            if (efficiency < bar).all():
                known = worst.get(shape.communicator)
                found = float(np.median(efficiency))
                if known is None or found < known[0]:
                    worst[shape.communicator] = (found, shape)
        return {communicator: shape for communicator, (_, shape) in worst.items()}

    def _finding(self, shapes: list[Shape], context: Context) -> Finding:
        groups = {shape: context.groups[shape.communicator] for shape in shapes}
        reached = {shape: math.exp(np.median([sample.level for sample in self._recent[shape]])) for shape in shapes}
        worst = min(shapes, key=lambda shape: reached[shape] / (groups[shape].limit or math.inf))
        group, limit = groups[worst], groups[worst].limit or math.nan
        who = group.name if len(shapes) == 1 else f"{len(shapes)} {group.parallelism or 'unnamed'} groups"
        return Finding(
            kind=FindingKind.BELOW_LIMIT,
            severity=Severity.WARNING,
            job=context.job,
            comm_id=group.comm_id if len(shapes) == 1 else None,
            parallelism=group.parallelism,
            ranks=(),
            hosts=(),
            since_ns=min(self._recent[shape][0].at_ns for shape in shapes),
            until_ns=None,
            confidence=_CONFIDENCE,
            summary=(
                f"{who}: {reached[worst] / 1e9:.3g} GB/s of bus bandwidth, {100 * reached[worst] / limit:.0f} % of the "
                f"{limit / 1e9:.3g} GB/s that {group.limit_name or 'its links'} can carry"
            ),
            evidence={
                "efficiency_ratio": round(reached[worst] / limit, 4),
                "busbw_bytes_per_second": round(reached[worst]),
                "limit_bytes_per_second": round(limit),
                "bottleneck": group.limit_name,
                "message_bytes": bytes_of(worst),
                "groups": sorted({each.comm_id for each in groups.values()}),
                "collectives": _collectives(groups, worst, self._recent[worst]),
            },
        )


def _collectives(groups: dict[Shape, Group], worst: Shape, samples: Iterable[Sample]) -> list[str]:
    known = [sample for sample in samples if sample.worst_seq != NO_NUMBER]
    return [f"{groups[worst].comm_id}:{sample.worst_seq}" for sample in known[-_COLLECTIVES_SHOWN:]]
