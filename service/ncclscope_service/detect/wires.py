"""Groups that cross the same wires, taken together: what no single one shows above its noise, all of them show.

Groups of one size over the same hosts that run the same operation with messages of one size share their links. What
slows these slows all of them; what slows one group alone (its card, its algorithm) is that group's own matter, and
must not become a fault of all. So a window's level is their upper quartile: it moves only when most of them do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.levels import Sample

QUANTILE: Final = 75
_LEAST_MEMBERS: Final = 2
_SHARE_PRESENT: Final = 0.75
"""Of the members that were seen: with fewer, a window says who was late rather than what the wires carry."""
_GONE_NS: Final = 600_000_000_000
"""A member that was not seen for so long is not waited for: communicators are closed, and others take their place."""


class Wires(NamedTuple):
    """What is compared over time."""

    op: int
    bucket: int
    ranks_of_hosts: tuple[tuple[str, int], ...]
    """How many ranks on which host."""


class Level(NamedTuple):
    """One window of the groups that cross the same wires."""

    wires: Wires
    at_ns: int
    level: float
    """Natural logarithm of busbw in bytes per second."""


@dataclass(slots=True)
class SharedWires:
    """Finds groups that share wires, and sums up their windows."""

    _members: dict[Wires, dict[int, int]] = field(default_factory=dict[Wires, "dict[int, int]"])
    """Communicators, and when each was last seen."""

    def feed(self, samples: Iterable[Sample], context: Context) -> Iterator[Level]:
        """Takes closed windows, and gives those of groups that are several, oldest first."""
        levels: defaultdict[tuple[int, Wires], list[float]] = defaultdict(list)
        for sample in samples:
            wires = Wires(
                sample.shape.op, sample.shape.bucket, _ranks_of_hosts(context.groups[sample.shape.communicator])
            )
            seen = self._members.setdefault(wires, {})
            seen[sample.shape.communicator] = max(sample.at_ns, seen.get(sample.shape.communicator, 0))
            levels[sample.at_ns, wires].append(sample.level)
        for (at_ns, wires), values in levels.items():
            self._forget(wires, at_ns)
            if len(values) >= max(_LEAST_MEMBERS, _SHARE_PRESENT * len(self._members[wires])):
                yield Level(wires, at_ns, float(np.percentile(values, QUANTILE)))

    def members(self, wires: Wires) -> frozenset[int]:
        """The communicators that cross them."""
        return frozenset(self._members.get(wires, ()))

    def _forget(self, wires: Wires, at_ns: int) -> None:
        seen = self._members[wires]
        if min(seen.values()) < at_ns - _GONE_NS:
            self._members[wires] = {one: last_ns for one, last_ns in seen.items() if last_ns >= at_ns - _GONE_NS}


def _ranks_of_hosts(group: Group) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(group.hosts).items()))
