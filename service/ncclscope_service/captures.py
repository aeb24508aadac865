"""The captures that came: those of the window one by one, of older ones only how many they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from ncclscope_wire.records import CaptureSeen
from ncclscope_wire.terms import NO_TIME_NS


@dataclass(slots=True)
class Captures:
    """(source, capture) in order of arrival. Ids are absolute: that of the oldest one kept is `first`."""

    first: int = 0
    """So many were forgotten."""
    newest_ns: int = NO_TIME_NS
    """The latest end of any, on its host's clock."""
    graph_launches: int = 0
    """CUDA graphs that were recorded as a whole, in all of them."""
    _kept: deque[tuple[int, CaptureSeen]] = field(default_factory=deque[tuple[int, CaptureSeen]])

    @property
    def next_id(self) -> int:
        """The id that the next one will have; how many there were in all."""
        return self.first + len(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[int, CaptureSeen]]:
        return iter(self._kept)

    def append(self, source_and_capture: tuple[int, CaptureSeen]) -> None:
        """One more came."""
        self._kept.append(source_and_capture)
        self.newest_ns = max(self.newest_ns, source_and_capture[1].end_ns)
        self.graph_launches += source_and_capture[1].graph_launches

    def since(self, capture_id: int) -> list[tuple[int, CaptureSeen]]:
        """Those with this id or a later one, as far as they are kept."""
        newer = list(islice(reversed(self._kept), max(0, self.next_id - capture_id)))
        return newer[::-1]

    def drop_before(self, capture_id: int) -> None:
        """Forgets those with a smaller id."""
        while self._kept and self.first < capture_id:
            self._kept.popleft()
            self.first += 1

    def copy(self) -> Captures:
        """The same, on its own."""
        return replace(self, _kept=self._kept.copy())
