"""The agent's report of itself in every heartbeat."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

from ncclscope_agent.files.follower import FollowerStatistics
from ncclscope_agent.link.session import SessionStatistics
from ncclscope_agent.spool.limits import SpoolStatistics
from ncclscope_wire.messages import AgentHealth

_STATM: Final = "/proc/self/statm"
_STATM_BYTES: Final = 256
"""It is seven numbers on a line."""
_UNSYNCHRONISED: Final = 0x0040


def agent_health(
    followers: Iterable[FollowerStatistics],
    session: SessionStatistics,
    *,
    waiting_batches: int,
    now_wall_ns: int,
    rss_bytes: int,
    spool: SpoolStatistics | None = None,
    is_slowed: bool = False,
) -> AgentHealth:
    """All of it together, with the use of the processor as of now."""
    known = list(followers)
    skipped = Counter[str]()
    for follower in known:
        skipped.update(follower.skipped)
    oldest_ns = session.oldest_observed_at_ns
    return AgentHealth(
        lines_total=sum(follower.lines_total for follower in known),
        bytes_read_total=sum(follower.bytes_read_total for follower in known),
        batches_total=session.batches_total,
        files=sum(follower.files for follower in known),
        skipped=dict(skipped),
        dropped=_dropped(session, spool),
        cpu_seconds=processor_seconds(),
        rss_bytes=rss_bytes,
        window_bytes=session.window_bytes,
        window_batches=session.window_batches,
        waiting_batches=waiting_batches,
        lag_bytes=sum(follower.lag_bytes for follower in known),
        lag_seconds=0.0 if oldest_ns is None else max(0, now_wall_ns - oldest_ns) / 1e9,
        connections_total=session.connections_total,
        spool_bytes=None if spool is None else spool.bytes_on_disk,
        spool_oldest_seconds=0.0 if spool is None else spool.oldest_seconds(now_wall_ns),
        spool_dropped=0 if spool is None else sum(spool.dropped.values()),
        spool_replayed=0 if spool is None else spool.replayed_total,
        spool_failures=0 if spool is None else spool.failures_total,
        sent_bytes_total=session.sent_bytes_total,
        is_slowed=is_slowed,
        clock_error_ns=clock_error_ns(),
    )


def _dropped(session: SessionStatistics, spool: SpoolStatistics | None) -> dict[str, int]:
    """Number of batches that could not be sent, by reason."""
    counts = dict(session.stripped)
    if spool is not None:
        counts |= {f"spool_{reason}": number for reason, number in spool.dropped.items()}
    return {reason: number for reason, number in counts.items() if number}


def processor_seconds() -> float:
    """Processor time of this process and of those that it had read exports, as far as they have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def clock_error_ns() -> int | None:
    """How far the wall clock may be off; None if nothing keeps it."""
    known = read_kernel_clock()
    return known.most_error_ns if known is not None and known.is_synchronised else None


def resident_bytes() -> int:
    """Memory of this process that is in RAM. Source: proc(5), second field of /proc/self/statm, in pages."""
    try:
        statm = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        # Not by a file object: that asks the kernel four times more, and each agent asks every second.
        return int(os.read(statm, _STATM_BYTES).split()[1]) * resource.getpagesize()
    finally:
        os.close(statm)


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
    """The function of the C library; None if it has none."""
    return getattr(ctypes.CDLL(None), "adjtimex", None)


def read_kernel_clock() -> KernelClock | None:
    """The kernel's clock state by adjtimex(2), as `timedatectl` shows it; needs no rights. None without an answer."""
    read = _Timex()
    adjtimex = _adjtimex()
    if adjtimex is None or adjtimex(ctypes.byref(read)) < 0:
        return None
    is_synchronised = not int(read.status) & _UNSYNCHRONISED
    return KernelClock(is_synchronised, int(read.esterror) * 1_000, int(read.maxerror) * 1_000)
