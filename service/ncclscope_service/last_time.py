"""A stretch of work that ends by a time, finished or not."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

_AGAIN_SECONDS: Final = 5.0
"""What is raised while an object is destroyed is lost: it is raised again."""


class TimeIsUpError(BaseException):
    """The time has come. Not an Exception: nobody between may take it for a mistake and go on."""


@contextmanager
def until(at: float | None) -> Generator[None]:
    """Raises TimeIsUpError inside at that time (`time.monotonic`), between two steps of the interpreter.

    None: never. For the main thread of a process that ends: it takes SIGALRM for it.
    """
    if at is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, at - time.monotonic()), _AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ring(number: int, frame: object) -> None:
    del number, frame
    raise TimeIsUpError
