"""What the kernel knows of this machine's clock: whether a daemon (NTP, PTP) keeps it, and how far off it may be."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

_UNSYNCHRONISED: Final = 0x0040


@dataclass(frozen=True, slots=True)
class KernelClock:
    """The state of CLOCK_REALTIME."""

    is_synchronised: bool
    estimated_error_ns: int
    most_error_ns: int
    """Grows from the last correction on, at 500 ppm."""


class _Timex(ctypes.Structure):
    """The first fields of struct timex. *Source:* adjtimex(2)."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    )


@cache
def _adjtimex() -> Callable[..., int] | None:
    """The function of the C library; None where it has none."""
    return getattr(ctypes.CDLL(None), "adjtimex", None)


def read_kernel_clock() -> KernelClock | None:
    """What adjtimex(2) says, as `timedatectl` shows it; it needs no rights. None where it does not answer."""
    read = _Timex()
    adjtimex = _adjtimex()
    if adjtimex is None or adjtimex(ctypes.byref(read)) < 0:
        return None
    is_synchronised = not int(read.status) & _UNSYNCHRONISED
    return KernelClock(is_synchronised, int(read.esterror) * 1_000, int(read.maxerror) * 1_000)
