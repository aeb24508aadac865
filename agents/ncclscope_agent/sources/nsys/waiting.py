"""Times at which a file that appeared is tried: when it has settled, then after pauses; and when to report it.

seen ── same for `settle_ns` ──> tried ──> read, or refused for good: done with this state of the file
  ^                                │
  └── changed: all forgotten       └── not complete yet: again after a pause that doubles; after
                                       `give_up_ns` its reason is reported, once, and trying continues
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

PASSING_REASONS: Final = frozenset({"empty", "incomplete", "locked", "changed"})
"""Reasons of SourceError that pass by themselves when the exporter continues."""

_MILLISECOND: Final = 1_000_000
_SECOND: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of waiting for files, in ns."""

    settle_ns: int = 200 * _MILLISECOND
    """A file is tried when it has stayed the same for this long."""
    longest_pause_ns: int = 5 * _SECOND
    """Pauses between attempts double up to this."""
    give_up_ns: int = 60 * _SECOND
    """A file that could not be read for this long is reported."""
    report_grace_ns: int = 5 * _SECOND
    """A .nsys-rep is exported when nobody else did so for this long: nsys writes the .sqlite after it."""
    rescan_ns: int = 2 * _SECOND
    """Directories are looked through at least this often; a nudge does it at once."""


@dataclass(slots=True)
class Waiting:
    """One file that is waited for. All times are of one clock, given by the caller."""

    timing: Timing
    patience_ns: int
    """Time for which the file must stay the same before the first attempt."""
    is_done: bool = False
    """Nothing more is to be done with the file as it is now."""
    _sight: object = None
    _next_try_ns: int = 0
    _pause_ns: int = 0
    _failing_since_ns: int | None = None
    _reported: set[str] = field(default_factory=set[str])

    def see(self, sight: object, now_ns: int) -> None:
        """The file was looked at; anything that compares equal means that it is the same as before."""
        if sight == self._sight:
            return
        self._sight = sight
        self.is_done = False
        self._next_try_ns = now_ns + self.patience_ns
        self._pause_ns = self.timing.settle_ns
        self._failing_since_ns = None
        self._reported.clear()

    def is_due(self, now_ns: int) -> bool:
        """Whether the file should be tried now."""
        return not self.is_done and self._sight is not None and now_ns >= self._next_try_ns

    def failed(self, reason: str, now_ns: int) -> bool:
        """An attempt failed; True if that should be reported now."""
        if reason not in PASSING_REASONS:
            self.is_done = True
            return True
        if self._failing_since_ns is None:
            self._failing_since_ns = now_ns
        self._next_try_ns = now_ns + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, self.timing.longest_pause_ns)
        if now_ns - self._failing_since_ns < self.timing.give_up_ns or reason in self._reported:
            return False
        self._reported.add(reason)
        return True
