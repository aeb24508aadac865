"""Limits of a spool, and its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolLimits:
    """Limits of a spool: space, age, and how often it writes."""

    max_bytes: int = 1 << 30
    """On disk; about 40 million operations."""
    max_age_ns: int = 3 * 86_400 * 1_000_000_000
    """A service that is away over a weekend."""
    transaction_bytes: int = 4 << 20
    """Written or read at once, so it also bounds memory."""
    entries_bytes: int = 64 << 20
    """Dictionary entries of one chapter; beyond it readers begin new dictionaries."""
    pending_bytes: int = 16 << 20
    """In memory, because the disk has not taken them yet."""
    sync_ns: int = 1_000_000_000
    positions_ns: int = 5_000_000_000
    """Between two writes of positions alone, while the service takes everything before it is written: so much is read
    again if agent and service fail together, and not applied twice."""
    retry_ns: int = 2_000_000_000
    """Pause after a failed write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolStatistics:
    """A snapshot of the spool; totals count from the start of the agent."""

    bytes_on_disk: int
    pending_bytes: int
    """In memory, and not on disk yet."""
    oldest_ns: int | None
    """When the oldest batch that is not acknowledged was written; None if there is none."""
    replayed_total: int
    """Batches that were read back."""
    dropped: Mapping[str, int]
    """Batches that are lost to the spool, by why: "expired", "damaged", "unusable"."""
    unusable_files: Mapping[str, int]
    """Files that were left alone, by why: "other_version"."""
    failures_total: int
    fault: str | None
    """Why the last write failed; None if it did not."""

    def oldest_seconds(self, now_ns: int) -> float:
        """Age of the oldest batch that is not acknowledged; 0 if there is none."""
        return 0.0 if self.oldest_ns is None else max(0, now_ns - self.oldest_ns) / 1e9
