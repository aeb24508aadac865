"""The clock by which silences are measured: it does not run while the service itself stood still.

A service that was stopped, or whose machine was (a suspended virtual machine, a node that swaps), has heard nobody
meanwhile. What was written in that time is still on its way when it goes on, and is no silence of the job.
"""

from __future__ import annotations

from typing import Final

_LONGEST_LOOK_NS: Final = 5_000_000_000
"""A service that works looks more often, however much it has to do."""
_REMEMBERED_NS: Final = 60_000_000_000
"""By then agents have caught up, or are held for gone."""


class Watched:
    """Takes the time of every look."""

    def __init__(self) -> None:
        self._looked_ns: int | None = None
        self._missed: list[tuple[int, int]] = []
        """When a time in which nobody looked was over, and how long it was."""

    def at(self, now_ns: int, newest_ns: int) -> int:
        """The time of this look without those that were missed since the newest line (`newest_ns`) or in a minute."""
        looked_ns, self._looked_ns = self._looked_ns, now_ns
        if looked_ns is not None and now_ns - looked_ns > _LONGEST_LOOK_NS:
            self._missed.append((now_ns, now_ns - looked_ns))
        self._missed = [each for each in self._missed if each[0] > max(newest_ns, now_ns - _REMEMBERED_NS)]
        return now_ns - sum(missed for _, missed in self._missed)
