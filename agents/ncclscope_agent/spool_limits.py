"""What a spool may take, what it asks of its disk, and what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolLimits:
    """What a spool may take."""

    max_bytes: int = 1 << 30
    """On disk; about 40 million operations."""
    max_age_ns: int = 3 * 86_400 * 1_000_000_000
    """A service that is away over a weekend."""
    file_bytes: int = 4 << 20
    """A file is read whole, so it also bounds memory."""
    entries_bytes: int = 64 << 20
    """Dictionary entries of one chapter; beyond it readers begin new dictionaries."""
    pending_bytes: int = 16 << 20
    """In memory, because the disk has not taken them yet."""
    sync_ns: int = 1_000_000_000
    note_ns: int = 5_000_000_000
    """Between two notes of where readers are, while the service takes everything before it is written: so much is read
    again where agent and service fail together, and not given twice."""
    retry_ns: int = 2_000_000_000
    """After a failed write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolJob:
    """What is to be done on disk, in this order. All of it or nothing counts as done."""

    appends: tuple[tuple[str, bytes], ...] = ()
    """File and what is added at its end; a file that is not there is made."""
    syncs: tuple[str, ...] = ()
    removes: tuple[str, ...] = ()
    is_roll: bool = False
    """Files other than those named are not written again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolStatistics:
    """A snapshot of the spool; totals count from the start of the agent."""

    bytes_on_disk: int
    pending_bytes: int
    """In memory, and not on disk yet."""
    oldest_ns: int | None
    """When the oldest batch that is not acknowledged was written; None where there is none."""
    written_total: int
    """Batches."""
    replayed_total: int
    """Batches that were read back."""
    dropped: Mapping[str, int]
    """Batches that are lost to the spool, by why: "expired", "damaged", "unusable"."""
    unusable_files: Mapping[str, int]
    """Files that were left alone, by why: "other_version", "no_header"."""
    damaged_bytes: int
    failures_total: int
    fault: str | None
    """Why the last write failed; None where it did not."""

    def oldest_seconds(self, now_ns: int) -> float:
        """Age of the oldest batch that is not acknowledged; 0 where there is none."""
        return 0.0 if self.oldest_ns is None else max(0, now_ns - self.oldest_ns) / 1e9
