"""Records of a spool: batches, dictionary entries, chapters, and one transaction over them.

A *chapter* is one session: one run of sequence numbers and dictionaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ncclscope_wire.messages import PROTOCOL_VERSION, Position


@dataclass(slots=True)
class Frame:
    """One batch, encoded, and where in its source it lies. Not frozen, since that would cost more than the spool."""

    chapter: int
    sequence: int
    key: str
    begin: int
    end: int
    end_line: int
    is_last: bool
    observed_at_ns: int | None
    entries: int
    """Records of dictionaries that its chapter had up to this batch, its own one included."""
    payload: bytes | memoryview
    """A view if the frame as it is sent is kept besides: one copy is enough."""
    content_check: int | None = None
    """As `Batch.content_check`. Not on the disk, beside its payload: there it is with the positions."""

    @property
    def position(self) -> Position:
        """The position behind it, at which its source is read on."""
        return Position(
            end=self.end, end_line=self.end_line, is_complete=self.is_last, content_check=self.content_check
        )


@dataclass(frozen=True, slots=True)
class Entries:
    """New dictionary entries, as an encoded batch that has nothing else; its sequence is that of the batch."""

    chapter: int
    number: int
    """From 1 in each chapter."""
    payload: bytes


@dataclass(slots=True)
class Chapter:
    """One session, and what of it the spool has."""

    number: int
    session_id: str
    protocol_version: int = PROTOCOL_VERSION
    acknowledged: int = 0
    """Last sequence number that is not needed any more."""
    last: int = 0
    """Last sequence number that it has."""
    written: int = 0
    """Last sequence number on the disk."""
    expired: int = 0
    """Last sequence number that was dropped for its age."""
    entries: int = 0
    """Records of dictionaries made so far."""
    entries_bytes: int = 0
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=dict[str, list[tuple[int, int]]])
    """All that it has had of each source, in order: more than one range if something between was lost."""
    gone: dict[str, int] = field(default_factory=dict[str, int])
    """Up to where that is no longer there, by source: acknowledged, or dropped."""

    @property
    def is_done(self) -> bool:
        """Nothing of it is wanted any more, unless something is added."""
        return self.acknowledged >= self.last

    @property
    def is_on_disk(self) -> bool:
        """The disk has something of it that is wanted."""
        return self.written > max(self.acknowledged, self.expired)

    def ranges_of(self, key: str) -> Iterator[tuple[int, int]]:
        """The ranges of a source that are still there."""
        gone = self.gone.get(key, 0)
        for begin, end in self.ranges.get(key, ()):
            if end > gone:
                yield max(begin, gone), end

    def add(self, frame: Frame) -> None:
        """Counts a batch that was added at its end."""
        self.last = frame.sequence
        ranges = self.ranges.setdefault(frame.key, [])
        if ranges and ranges[-1][1] == frame.begin:
            ranges[-1] = (ranges[-1][0], frame.end)
        else:
            ranges.append((frame.begin, frame.end))

    def drop(self, ends: Mapping[str, int]) -> None:
        """Its sources are gone up to there."""
        for key, end in ends.items():
            self.gone[key] = max(end, self.gone.get(key, 0))


@dataclass(frozen=True, slots=True)
class Owner:
    """The agent of a spool, as in its `Hello`: for who sends the spool in its place."""

    agent_id: str
    name: str = ""
    host: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """Changes of the database; all of it or nothing counts as done."""

    now_ns: int
    owner: Owner | None
    chapters: Sequence[Chapter] = ()
    """Chapters of the frames and entries that are added."""
    frames: Sequence[Frame] = ()
    entries: Sequence[Entries] = ()
    positions: Mapping[str, Position] = field(default_factory=dict[str, Position])
    replaces_positions: bool = False
    acknowledged: Mapping[int, int] = field(default_factory=dict[int, int])
    """By chapter: batches up to this one go."""
    finished: Sequence[int] = ()
    """Chapters that go with all that they have."""
    expires_before_ns: int | None = None
    """Batches that were written before this go."""
    is_synced: bool = False
    """It outlives a loss of power, with all before it."""


@dataclass(frozen=True, slots=True)
class Expired:
    """Batches of a chapter that were dropped for their age."""

    chapter: int
    batches: int
    last: int
    ends: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskState:
    """The database after a transaction."""

    file_bytes: int = 0
    used_bytes: int = 0
    oldest_ns: int | None = None
    """When the oldest batch in it was written."""
    expired: Sequence[Expired] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The content of a spool that an earlier start left."""

    owner: Owner | None
    chapters: Sequence[Chapter]
    frames: Iterable[Frame]
    """Without their payloads, in order. To be read once."""
    positions: Mapping[str, Position]
    disk: DiskState = field(default_factory=DiskState)
