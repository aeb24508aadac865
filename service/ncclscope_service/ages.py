"""How old the rows of a store are: where its tables ended at some moments."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from ncclscope_service.store import Store

_APART_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Where the tables ended at some moment: what lies before is at least that old."""

    at_ns: int
    operations: int = 0
    kernels: int = 0
    replays: int = 0
    collectives: int = 0
    ranges: int = 0
    busy: int = 0
    inspected: int = 0
    captures: int = 0


@dataclass(slots=True)
class Ages:
    """Ends that were noted, a second apart at least, oldest first."""

    _noted: deque[Ends] = field(default_factory=deque[Ends])

    def note(self, known: Store, now_ns: int) -> None:
        """Notes where the tables end now."""
        if self._noted and now_ns - self._noted[-1].at_ns < _APART_NS:
            return
        self._noted.append(
            Ends(
                at_ns=now_ns,
                operations=known.operations.next_id,
                kernels=known.kernels.next_id,
                replays=known.replays.next_id,
                collectives=known.collectives.next_id,
                ranges=known.ranges.next_id,
                busy=known.busy.next_id,
                inspected=known.inspected.next_id,
                captures=known.captures.next_id,
            )
        )

    def at(self, at_ns: int) -> Ends | None:
        """The newest that were noted at or before a time; None if that is too long ago."""
        later = bisect_right(self._noted, at_ns, key=lambda ends: ends.at_ns)
        return self._noted[later - 1] if later else None

    def came_at(self, operation: int) -> int | None:
        """By when that operation had come; None where it came after what was noted last, or was noted too long ago."""
        found = None
        for ends in reversed(self._noted):
            if ends.operations <= operation:
                break
            found = ends.at_ns
        return found

    def forget_before(self, at_ns: int) -> None:
        """Keeps only the newest of those noted at or before a time, and all later ones."""
        while len(self._noted) > 1 and self._noted[1].at_ns <= at_ns:
            self._noted.popleft()
