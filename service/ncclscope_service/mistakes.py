"""What our own code could not apply though it was in order: skipped, told, counted, and never the end of the service.

Live and after a restart the same is skipped: the journal holds what came and when it was worked on, and who replays it
decides as before.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

_TOLD: Final = 8


@dataclass(frozen=True, slots=True)
class Mistake:
    """One, as it is told."""

    where: str
    """In which stage: batch, settle, align, report, ..."""
    what: str
    """What it was working on."""
    trace: str


@dataclass(slots=True)
class Mistakes:
    """Of one pipeline."""

    are_borne: bool = False
    """False: a mistake is raised, for who analyses a run once, and for tests."""
    counted: Counter[str] = field(default_factory=Counter[str])
    """Mistakes so far, by where they happened."""
    _new: deque[Mistake] = field(default_factory=lambda: deque[Mistake](maxlen=_TOLD))

    def bear(self, error: Exception, where: str, what: str) -> None:
        """Notes a mistake, to be told by who takes it; raises it where mistakes are not borne."""
        if not self.are_borne:
            raise error
        self.counted[where] += 1
        self._new.append(Mistake(where, what, "".join(traceback.format_exception(error))))

    def take(self) -> list[Mistake]:
        """The last ones since the last call."""
        new = list(self._new)
        self._new.clear()
        return new
