"""What our own code could not apply though it was in order: skipped, told, and never the end of the service.

Live and after a restart the same batches are skipped: the journal holds them, and who replays it decides as before.
"""

from __future__ import annotations

import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import Final

_TOLD: Final = 8


@dataclass(slots=True)
class Mistakes:
    """Of one pipeline."""

    are_borne: bool = False
    """False: a mistake is raised, for who analyses a run once, and for tests."""
    _new: deque[str] = field(default_factory=lambda: deque[str](maxlen=_TOLD))

    def bear(self, error: Exception, what: str) -> None:
        """Notes a mistake, to be told by who takes it; raises it where mistakes are not borne."""
        if not self.are_borne:
            raise error
        self._new.append(f"{what}\n{''.join(traceback.format_exception(error))}")

    def take(self) -> list[str]:
        """The last ones since the last call: what could not be applied, and the trace."""
        new = list(self._new)
        self._new.clear()
        return new
