"""Followers: what the agent asks to read sources, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerStatistics:
    """Counts of what one follower has read since the agent's start."""

    files: int = 0
    """Files that are followed now."""
    files_waiting: int = 0
    """There, but not ready to be read: an export that is still being written."""
    lines_total: int = 0
    bytes_read_total: int = 0
    lag_bytes: int = 0
    """Seen at the last look, and not read yet."""
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Lines, records and files that were skipped, by reason."""


class Follower(Protocol):
    """Something that reads sources as they grow."""

    def poll(self, now_wall_ns: int) -> Iterable[Batch]:
        """Batches of what is new since the last time; may be a generator that reads as it goes."""
        ...

    def reset(self, positions: Mapping[str, Position]) -> None:
        """Forgets everything, dictionaries too, and goes on at these positions (by source key)."""
        ...

    def close(self, now_wall_ns: int) -> Iterable[Batch]:
        """Nothing more will be written: what was held back because more could have followed."""
        ...

    def holds(self, key: str, position: Position) -> bool:
        """Whether this source can be read from its file, from that position on."""
        ...

    def statistics(self) -> FollowerStatistics:
        """Counts of what was read so far."""
        ...

    @property
    def has_more(self) -> bool:
        """The last poll took its share and left something that is ready to be read: ask again at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A follower, and how often it is asked."""

    follower: Follower
    tick_min_seconds: float
    tick_max_seconds: float
    in_thread: bool = False
    """It may block for long: it is asked in a worker thread, while the others go on."""
    look: Callable[[int], bool] | None = None
    """Reads ahead for the next poll, at the longest tick; True: there is reason to poll at once."""
    notice: Callable[[int], None] | None = None
    """Looks how much waits to be read, once a second while there is no room for it."""
    gather_seconds: float = 0.0
    """Longest time between two polls that give something, if it is looked ahead meanwhile."""
    release: Callable[[Mapping[str, int]], object] | None = None
    """Gives back the space of what was applied; its argument is how far that is by source key. Called between two
    polls, in a worker thread. None: nothing is given back."""
    refresh: Callable[[int], None] | None = None
    """Looks for directories that were not there, before each poll and on its thread."""

    def poll(self, now_wall_ns: int) -> Iterable[Batch]:
        """Batches of what is new since the last time."""
        if self.refresh is not None:
            self.refresh(now_wall_ns)
        return self.follower.poll(now_wall_ns)
