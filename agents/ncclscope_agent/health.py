"""What the agent says of itself in every heartbeat."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ncclscope_agent.kernel_clock import read_kernel_clock
from ncclscope_agent.session import SessionStatistics
from ncclscope_agent.spool_limits import SpoolStatistics
from ncclscope_wire.messages import AgentHealth

_STATM = "/proc/self/statm"
_STATM_BYTES = 256
"""It is seven numbers on a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerStatistics:
    """What one follower has read since the agent's start."""

    files: int = 0
    """Followed now."""
    files_waiting: int = 0
    """There, but not ready to be read: an export that is still being written."""
    lines_total: int = 0
    bytes_read_total: int = 0
    lag_bytes: int = 0
    """Seen at the last look, and not read yet."""
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Lines, records and files that were skipped, by reason."""


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
        cpu_seconds=time.process_time(),
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
    """What could not be sent, by reason."""
    counts = {"batch_too_large": session.too_large_total}
    if spool is not None:
        counts |= {f"spool_{reason}": number for reason, number in spool.dropped.items()}
    return {reason: number for reason, number in counts.items() if number}


def clock_error_ns() -> int | None:
    """How far the wall clock may be off; None where nothing keeps it."""
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
