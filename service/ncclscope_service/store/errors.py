"""Errors of the service's own code: isolated, counted and reported, so that they do not end the service.

Live and after a restart the same is skipped: the journal holds what came and when it was worked on, and replaying it
decides as before.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

_REPORTED: Final = 8


@dataclass(frozen=True, slots=True)
class InternalError:
    """One error, as it is reported."""

    where: str
    """In which stage: batch, settle, align, report, ..."""
    what: str
    """The input that was being worked on."""
    trace: str


@dataclass(slots=True)
class InternalErrors:
    """Errors of one pipeline."""

    are_isolated: bool = False
    """False: an error is raised, for a run that is analysed once, and for tests."""
    counts: Counter[str] = field(default_factory=Counter[str])
    """Errors so far, by the stage in which they happened."""
    _new: deque[InternalError] = field(default_factory=lambda: deque[InternalError](maxlen=_REPORTED))

    def record(self, error: Exception, where: str, what: str) -> None:
        """Counts an error and keeps it for `drain`; raises it if errors are not isolated."""
        if not self.are_isolated:
            raise error
        self.counts[where] += 1
        self._new.append(InternalError(where, what, "".join(traceback.format_exception(error))))

    def isolated(self, where: str, what: str, on_error: Callable[[], None] | None = None) -> _Isolation:
        """Goes on behind an error in this block, if errors are isolated: it is recorded, then `on_error` is called."""
        return _Isolation(self, where, what, on_error)

    def drain(self) -> list[InternalError]:
        """The last errors since the previous call."""
        new = list(self._new)
        self._new.clear()
        return new


@dataclass(frozen=True, slots=True)
class _Isolation:
    """The one place in which an error of our own code is caught, whatever it is."""

    errors: InternalErrors
    where: str
    what: str
    on_error: Callable[[], None] | None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not self.errors.are_isolated or not isinstance(error, Exception):
            return False
        self.errors.record(error, self.where, self.what)
        if self.on_error is not None:
            self.on_error()
        return True
