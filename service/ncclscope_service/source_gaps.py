"""What was lost of one source: the newest gaps one by one, all of them by reason."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from ncclscope_wire.records import SourceGap

GAPS_KEPT: Final = 1024
"""Gaps of one source that are kept one by one: a third of a megabyte."""


@dataclass(slots=True)
class SourceGaps:
    """The gaps of one source, in order of arrival; as many as there were are counted, the newest can be asked for."""

    by_reason: Counter[str] = field(default_factory=Counter[str])
    """How many there were, those that are not kept included."""
    _kept: deque[SourceGap] = field(default_factory=lambda: deque[SourceGap](maxlen=GAPS_KEPT))

    def __len__(self) -> int:
        """How many there were."""
        return self.by_reason.total()

    def __iter__(self) -> Iterator[SourceGap]:
        """Those that are kept."""
        return iter(self._kept)

    def append(self, gap: SourceGap) -> None:
        """One more."""
        self._kept.append(gap)
        self.by_reason[gap.reason] += 1

    def extend(self, gaps: Iterable[SourceGap]) -> None:
        """Some more."""
        for gap in gaps:
            self.append(gap)

    def forgotten(self) -> Counter[str]:
        """How many by reason are not kept."""
        return self.by_reason - Counter(gap.reason for gap in self._kept)
