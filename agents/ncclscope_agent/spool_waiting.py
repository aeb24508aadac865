"""What of a spool is in memory: batches that the disk has not taken yet, and entries of those that it need not take.

Frames that are acknowledged before they were written are not written; their dictionary entries are, since later frames
point at them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ncclscope_agent.spool_chapter import Chapter
from ncclscope_agent.spool_ends import End, end_of_frame
from ncclscope_agent.spool_records import Frame


@dataclass(slots=True)
class Waiting:
    """A frame on its way to the disk, and its dictionary entries; without it where it was acknowledged meanwhile."""

    chapter: Chapter
    frame: Frame | None
    entries: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.entries) + (0 if self.frame is None else len(self.frame.payload))


class WaitingBatches:
    """All that waits, in order."""

    def __init__(self) -> None:
        self.bytes = 0
        """Of what has a frame."""
        self._frames: deque[Waiting] = deque()
        self._loose: deque[Waiting] = deque()
        """Entries that are still to be written, of frames that need not be."""
        self._seen: Waiting | None = None

    @property
    def has_frames(self) -> bool:
        """Frames wait."""
        return bool(self._frames)

    @property
    def has_loose(self) -> bool:
        """Entries wait whose frames need not be written."""
        return bool(self._loose)

    @property
    def loose_bytes(self) -> int:
        """Of these entries."""
        return sum(item.size for item in self._loose)

    def add(self, item: Waiting) -> None:
        """The next batch."""
        self._frames.append(item)
        self.bytes += item.size

    def was_seen(self) -> bool:
        """Whether the oldest frame was there when this was asked last."""
        is_left = bool(self._frames) and self._frames[0] is self._seen
        self._seen = self._frames[0] if self._frames else None
        return is_left

    def forget_acknowledged(self) -> dict[str, End]:
        """Drops the oldest frames as far as they are acknowledged; gives where they leave their sources."""
        moved: dict[str, End] = {}
        while self._frames and (frame := self._frames[0].frame) is not None:
            if frame.sequence > self._frames[0].chapter.acknowledged:
                break
            item = self._frames.popleft()
            self.bytes -= item.size
            moved[frame.key] = end_of_frame(frame)
            if item.entries:
                item.frame = None
                self._loose.append(item)
        return moved

    def forget_entries(self, chapter: Chapter) -> None:
        """The entries of a chapter that is gone need not be written."""
        self._loose = deque(item for item in self._loose if item.chapter is not chapter)

    def take(self, most_bytes: int, *, only_loose: bool = False) -> list[Waiting]:
        """The oldest of what waits, of one chapter, and about so much."""
        items: list[Waiting] = []
        size = 0
        for waiting in (self._loose,) if only_loose else (self._loose, self._frames):
            while waiting and size < most_bytes:
                if items and waiting[0].chapter is not items[0].chapter:
                    break
                items.append(waiting.popleft())
                size += items[-1].size
            if waiting:
                break
        return items

    def written(self, items: Sequence[Waiting]) -> None:
        """What was taken is on the disk."""
        self.bytes -= sum(item.size for item in items if item.frame is not None)

    def put_back(self, items: Sequence[Waiting]) -> None:
        """What was taken could not be written."""
        self._frames.extendleft(reversed([item for item in items if item.frame is not None]))
        self._loose.extendleft(reversed([item for item in items if item.frame is None]))

    def of(self, chapter: Chapter) -> list[Waiting]:
        """What waits of a chapter."""
        return [item for item in (*self._loose, *self._frames) if item.chapter is chapter]
