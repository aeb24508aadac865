"""Steps back behind the job: low priority for processor and disk, for this thread and all that it starts.

*Source:* setpriority(2), ioprio_set(2) and its numbers in the kernel's tables of system calls.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from typing import Final

KEEP_IO_PRIORITY: Final = -1
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30, "ppc64le": 273}
"""By machine; the C library has no function for it."""
_OF_PROCESS: Final = 1
_BEST_EFFORT: Final = 2
_CLASS_SHIFT: Final = 13


def step_back(*, nice: int, io_priority: int) -> list[str]:
    """Takes a niceness and a level of best-effort I/O (0 to 7); returns what was refused, a sentence each.

    A priority that is lower already stays, and nothing is an error: an agent that may not step back works as well.
    `KEEP_IO_PRIORITY` leaves that of I/O as it is. To be called before threads are started: they inherit it.
    """
    return [*_set_niceness(nice), *_set_io_priority(io_priority)]


def _set_niceness(nice: int) -> Iterator[str]:
    try:
        if os.getpriority(os.PRIO_PROCESS, 0) < nice:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError as error:
        yield f"niceness {nice}: {error.strerror}"


def _set_io_priority(level: int) -> Iterator[str]:
    if level == KEEP_IO_PRIORITY:
        return
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        yield f"I/O priority {level}: not known how on {platform.machine()}"
        return
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, _OF_PROCESS, 0, _BEST_EFFORT << _CLASS_SHIFT | level):
        yield f"I/O priority {level}: {os.strerror(ctypes.get_errno())}"
