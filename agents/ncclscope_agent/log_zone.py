"""Whether a log's stamps are local time or UTC: the one under which its last line was written when the file changed.

NCCL prints local time without a zone, and a container may have another zone than its node, mostly UTC. A stamp is
taken just before its line is written, so read in the right zone the last one lies shortly before the last change of
the file; in a wrong one it lies hours before it, or after it, which cannot be.

Source: NCCL `src/debug.cc:ncclDebugLog` (strftime of localtime_r, then fwrite).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ncclscope_agent.sources.nccl_log import NcclLogReader
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.terms import NO_TIME_NS

END_BYTES: Final = 64 * 1024
"""How much of the end of a log is looked at."""

_AHEAD_NS: Final = 2_000_000_000
"""A stamp may seem to be this much after the change: 2.26.2 prints wrong digits, file systems round."""
_SOURCE: Final = Source(kind=SourceKind.NCCL_LOG, name="end", key="end")


def newest_stamp_ns(end_of_log: bytes, changed_at_ns: int) -> int | None:
    """The stamp of the last operation in these bytes but the first line, which may be a piece; None without one.

    As UTC ns, if it were UTC.
    """
    _, _, lines = end_of_log.partition(b"\n")
    reader = NcclLogReader(_SOURCE, written_near_ns=changed_at_ns)
    stamps = [int(time) for batch in reader.feed(lines) for time in batch.operations["logged_at_ns"].tolist()]
    known = [stamp for stamp in stamps if stamp != NO_TIME_NS]
    return known[-1] if known else None


def zone_that_fits(stamp_ns: int, changed_at_ns: int, zones_ns: Sequence[int]) -> int | None:
    """Which of these zones (ns ahead of UTC) puts the stamp closest before the change; None where none does."""
    lags = {zone: changed_at_ns - (stamp_ns - zone) for zone in zones_ns}
    possible = [zone for zone in zones_ns if lags[zone] >= -_AHEAD_NS]
    return min(possible, key=lambda zone: lags[zone], default=None)
