"""What of the agent's batches lies on disk: which bytes go to which file, what may be removed, what was lost.

Decides; `spool_files.py` reads and writes. A *chapter* is one session: one run of sequence numbers and dictionaries.

    frames-0000000007-000003     frames of chapter 3, begun with where all readers were
    chapter-000003               all dictionary entries of chapter 3: what a service that lost them must be told first

Frames are written as they come, in one go per look at the logs, and wait in memory while the disk does not take them:
a full or slow disk costs nothing but the room in memory. A file is removed when all in it is acknowledged and a newer
one is there; files that are too old are removed unacknowledged, and counted. When the spool has all the bytes that it
may have, it takes nothing more, and the logs wait unread.

Files are synced when they are full, and every `sync_ns` while something in them is not acknowledged; the entries first,
since frames are of no use without them. What a power loss takes was written after that, and is read again.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ncclscope_agent.spool_chapter import Chapter, Stretch
from ncclscope_agent.spool_limits import SpoolJob, SpoolLimits, SpoolStatistics
from ncclscope_agent.spool_records import (
    FORMAT_VERSION,
    Entries,
    Frame,
    Header,
    entries_record,
    frame_record,
    header_record,
    positions_record,
    scan,
)
from ncclscope_wire.messages import Position

_CHAPTER_NAME: Final = re.compile(r"chapter-(\d{6})")
_FRAMES_NAME: Final = re.compile(r"frames-(\d{10})-(\d{6})")
_End: TypeAlias = tuple[int, int, bool]
"""As `Position`: end, end_line, is_complete."""
_NOWHERE: Final[_End] = (-1, 0, False)
_ROLLS_PER_AGE: Final = 8
"""Files are at most such a part of the age limit long, so that little that is younger goes with what is too old."""
_MAX_POSITIONS: Final = 20_000
"""As many sources as a service knows of one agent."""


@dataclass(slots=True)
class _File:
    name: str
    chapter: int
    begun_ns: int
    first: int = 0
    last: int = 0
    size: int = 0
    newest_ns: int = 0
    frames: int = 0
    ends: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class _Pending:
    """A frame on its way to the disk, and its dictionary entries; without it where it was acknowledged meanwhile."""

    chapter: Chapter
    frame: Frame | None
    entries: bytes

    @property
    def size(self) -> int:
        return len(self.entries) + (0 if self.frame is None else len(self.frame.payload))


@dataclass(slots=True, kw_only=True)
class _Flying:
    """A job that was given out."""

    items: list[_Pending]
    new_file: _File | None
    frames: list[Frame]
    frames_bytes: int
    entries_bytes: int
    syncs: bool
    removes: tuple[str, ...]
    moved: dict[str, _End] = field(default_factory=dict[str, _End])


class Spool:
    """The machine: `append` and `acknowledge` batches, carry out `take_job`, say what came of it with `on_done`.

    All times are of one clock that only goes forward, and is near the wall clock at the start.
    """

    def __init__(self, *, agent_id: str, limits: SpoolLimits | None = None) -> None:
        self._agent_id = agent_id
        self._limits = limits or SpoolLimits()
        self._chapters: dict[int, Chapter] = {}
        self._live: Chapter | None = None
        self._files: deque[_File] = deque()
        self._current: _File | None = None
        self._pending: deque[_Pending] = deque()
        self._loose: deque[_Pending] = deque()
        """Entries that are still to be written, of frames that need not be."""
        self._flying: _Flying | None = None
        self._pending_bytes = 0
        self._file_bytes = 0
        self._entries_sizes: dict[str, int] = {}
        self._ends: dict[str, _End] = {}
        self._disk_ends: dict[str, _End] = {}
        self._moved: dict[str, _End] = {}
        """Of batches that are acknowledged and were not written."""
        self._seen: _Pending | None = None
        self._noted_ns = 0
        self._removes: list[str] = []
        self._next_file = self._next_chapter = 1
        self._synced_ns = 0
        self._is_dirty = False
        self._retry_ns = 0
        self._written = self._failures = self._damaged_bytes = 0
        self._fault: str | None = None
        self.wants_new_chapter = False
        """The dictionaries of the present chapter have become too large."""
        self.replayed = 0
        """Batches that were read back, as whoever reads them counts."""
        self._dropped = Counter[str]()
        self._unusable = Counter[str]()

    # What was there at the start

    def recover(self, name: str, data: bytes) -> None:
        """Takes in a file of an earlier start. Give them in the order of their names, then call `begin`."""
        if chapter := _CHAPTER_NAME.fullmatch(name):
            self._recover_entries(name, int(chapter[1]), data)
        elif frames := _FRAMES_NAME.fullmatch(name):
            self._recover_frames(name, int(frames[1]), int(frames[2]), data)

    @staticmethod
    def is_ours(name: str) -> bool:
        """Whether a file of this name may be part of a spool."""
        return (_CHAPTER_NAME.fullmatch(name) or _FRAMES_NAME.fullmatch(name)) is not None

    def _recover_entries(self, name: str, number: int, data: bytes) -> None:
        self._next_chapter = max(self._next_chapter, number + 1)
        header = scan(data[: 1 << 16]).header
        if header is not None and not self._is_readable(header):
            self._unusable["other_version"] += 1
            return
        self._entries_sizes[name] = len(data)
        self._file_bytes += len(data)
        if header is not None:
            self._known_chapter(number, header)

    def _recover_frames(self, name: str, number: int, chapter: int, data: bytes) -> None:
        self._next_file = max(self._next_file, number + 1)
        self._next_chapter = max(self._next_chapter, chapter + 1)
        scanned = scan(data)
        if scanned.header is not None and not self._is_readable(scanned.header):
            self._unusable["other_version"] += 1
            return
        self._damaged_bytes += scanned.damaged_bytes
        if scanned.header is not None:
            self._known_chapter(chapter, scanned.header)
            self._take_ends({key: _end_of(position) for key, position in scanned.header.positions.items()})
        known = self._chapters.get(chapter)
        if known is None:
            self._unusable["no_header"] += 1
            self._removes.append(name)
            return
        begun_ns = scanned.header.created_ns if scanned.header is not None else 0
        file = _File(name, chapter, begun_ns, size=len(data), newest_ns=begun_ns)
        for frame in scanned.frames:
            self._recover_frame(known, file, frame)
        for positions in scanned.positions:
            for key, position in positions.items():
                self._take_ends({key: max(_end_of(position), self._ends.get(key, _NOWHERE))})
        self._files.append(file)
        self._file_bytes += file.size

    def _is_readable(self, header: Header) -> bool:
        return header.format_version == FORMAT_VERSION and header.agent_id == self._agent_id

    def _known_chapter(self, number: int, header: Header) -> None:
        self._chapters.setdefault(number, Chapter(number, header.session_id, header.protocol_version))

    def _recover_frame(self, chapter: Chapter, file: _File, frame: Frame) -> None:
        if frame.sequence <= chapter.last:
            return  # a write that failed half-way was tried again
        if chapter.last == 0:
            chapter.acknowledged = frame.sequence - 1
        chapter.entries = frame.entries
        self._note(chapter, file, frame, file.begun_ns if frame.observed_at_ns is None else frame.observed_at_ns)
        chapter.last = frame.sequence
        chapter.note(frame.key, frame.begin, frame.end)
        self._take_ends({frame.key: (frame.end, frame.end_line, frame.is_last)})

    def begin(self, session_id: str) -> Chapter:
        """Begins a chapter: what is appended from now on belongs to it."""
        self._live = Chapter(self._next_chapter, session_id)
        self._chapters[self._live.number] = self._live
        self._next_chapter += 1
        self.wants_new_chapter = False
        self._disk_ends = self._disk_ends or dict(self._ends)
        self._remove_what_is_done()
        return self._live

    def rebase(self, positions: Mapping[str, Position]) -> None:
        """Readers go on at these positions, and not where the last batches end."""
        self._ends = {key: _end_of(position) for key, position in positions.items()}
        self._disk_ends = dict(self._ends)
        self._moved.clear()

    @property
    def positions(self) -> dict[str, Position]:
        """Where its last batches end, by source key: readers go on there."""
        return _positions_of(self._ends)

    @property
    def chapters(self) -> Sequence[Chapter]:
        """Those that have batches which are not acknowledged, and the present one, in order."""
        return [known for _, known in sorted(self._chapters.items()) if not known.is_done or known is self._live]

    # What comes, and what is done with

    @property
    def has_room(self) -> bool:
        """Whether it may have another batch."""
        return (
            self._pending_bytes < self._limits.pending_bytes
            and self._file_bytes + self._pending_bytes < self._limits.max_bytes
        )

    def _is_chapter_full(self, chapter: Chapter) -> bool:
        """Whether its dictionaries have become too large, on disk or in memory."""
        if chapter.entries_bytes > self._limits.entries_bytes:
            return True
        return sum(item.size for item in self._loose) > self._limits.pending_bytes // 4

    def append(self, frame: Frame, entries: bytes | None) -> None:
        """Takes the next batch of the present chapter; `entries`: its new dictionary entries, as a message."""
        chapter = self._live
        assert chapter is not None, "a batch was spooled before a chapter was begun"
        assert frame.sequence == chapter.last + 1, "a batch was left out of the spool"
        record = b""
        if entries is not None:
            chapter.entries += 1
            record = entries_record(entries, number=chapter.entries)
            chapter.entries_bytes += len(record)
            self.wants_new_chapter = self._is_chapter_full(chapter)
        chapter.last = frame.sequence
        chapter.note(frame.key, frame.begin, frame.end)
        if frame.key not in self._ends:
            self._make_room()
        self._ends[frame.key] = frame.end, frame.end_line, frame.is_last
        item = _Pending(chapter, frame, record)
        self._pending.append(item)
        self._pending_bytes += item.size

    def acknowledge(self, chapter: Chapter, sequence: int, reached: Mapping[str, int]) -> None:
        """The service has all batches up to this one; `reached` says where those end, by source key."""
        chapter.acknowledged = max(chapter.acknowledged, sequence)
        for key, end in reached.items():
            chapter.gone[key] = max(end, chapter.gone.get(key, 0))
        self._forget_acknowledged()
        self._remove_what_is_done()

    def _forget_acknowledged(self) -> None:
        """Frames that are acknowledged before they were written need not be, but their entries must."""
        while self._pending and (frame := self._pending[0].frame) is not None:
            if frame.sequence > self._pending[0].chapter.acknowledged:
                break
            item = self._pending.popleft()
            self._pending_bytes -= item.size
            self._moved[frame.key] = frame.end, frame.end_line, frame.is_last
            if item.entries:
                item.frame = None
                self._loose.append(item)

    def lose(self, reason: str, batches: int = 1) -> None:
        """So many batches were found to be of no use."""
        self._dropped[reason] += batches

    def expire(self, now_ns: int) -> None:
        """Drops what is too old, acknowledged or not."""
        while self._files and now_ns - self._files[0].newest_ns > self._limits.max_age_ns:
            file = self._files[0]
            if file is self._current:
                if self._flying is not None:
                    return
                self._current = None
            chapter = self._chapters.get(file.chapter)
            if chapter is not None:
                self._dropped["expired"] += max(0, file.last - max(file.first - 1, chapter.acknowledged))
                chapter.expired = max(chapter.expired, file.last)
                for key, end in file.ends.items():
                    chapter.gone[key] = max(end, chapter.gone.get(key, 0))
            self._remove_first_file()

    def _remove_first_file(self) -> None:
        file = self._files.popleft()
        self._file_bytes -= file.size
        self._removes.append(file.name)

    def _remove_what_is_done(self) -> None:
        while len(self._files) > 1 and self._files[0] is not self._current:
            chapter = self._chapters.get(self._files[0].chapter)
            if chapter is not None and self._files[0].last > chapter.acknowledged:
                break
            self._remove_first_file()
        if len(self._chapters) > 1:
            self._remove_done_chapters()

    def _remove_done_chapters(self) -> None:
        held = {file.chapter for file in self._files}
        if self._flying is not None:
            held.update(item.chapter.number for item in self._flying.items)
        for number, chapter in list(self._chapters.items()):
            if chapter is not self._live and chapter.is_done and number not in held:
                del self._chapters[number]
                self._loose = deque(item for item in self._loose if item.chapter is not chapter)
                if (size := self._entries_sizes.pop(chapter.entries_name, None)) is not None:
                    self._file_bytes -= size
                    self._removes.append(chapter.entries_name)

    # The disk

    def take_job(self, now_ns: int, *, at_once: bool = True) -> SpoolJob | None:
        """What is to be done on disk now; None where nothing is, or the last job is not done.

        Batches that came since the last call are left for the next one, unless `at_once`: the service may have
        acknowledged them by then.
        """
        if self._flying is not None or now_ns < self._retry_ns:
            return None
        is_left = self._pending and self._pending[0] is self._seen
        self._seen = self._pending[0] if self._pending else None
        if self._pending and (at_once or is_left):
            return self._write_job(self._take_items(), now_ns)
        if (self._loose or self._moved) and (at_once or now_ns - self._noted_ns >= self._limits.note_ns):
            return self._write_job(self._take_items(only_loose=True), now_ns)
        is_due = self._is_dirty and self._current is not None and now_ns - self._synced_ns >= self._limits.sync_ns
        syncs = self._names_to_sync() if is_due and not self._is_all_acknowledged() else ()
        if not syncs and not self._removes:
            return None
        self._flying = _Flying(
            items=[],
            new_file=None,
            frames=[],
            frames_bytes=0,
            entries_bytes=0,
            syncs=bool(syncs),
            removes=tuple(self._removes),
        )
        self._synced_ns = now_ns if syncs else self._synced_ns
        return SpoolJob(syncs=syncs, removes=self._flying.removes)

    def take_sync(self) -> SpoolJob | None:
        """A sync of all that was written and not synced, due or not; None where nothing is to be synced."""
        if self._flying is not None or not self._is_dirty or self._current is None:
            return None
        self._flying = _Flying(
            items=[], new_file=None, frames=[], frames_bytes=0, entries_bytes=0, syncs=True, removes=()
        )
        return SpoolJob(syncs=self._names_to_sync())

    def on_done(self, now_ns: int, fault: str | None = None) -> None:
        """The job that was taken last was done, or failed: nothing of it counts then."""
        flying, self._flying = self._flying, None
        assert flying is not None, "a job was reported that was never given"
        self._fault = fault
        if fault is not None:
            self._failures += 1
            self._retry_ns = now_ns + self._limits.retry_ns
            self._pending.extendleft(reversed([item for item in flying.items if item.frame is not None]))
            self._loose.extendleft(reversed([item for item in flying.items if item.frame is None]))
            self._moved = flying.moved | self._moved
            self._forget_acknowledged()
            return
        done = set(flying.removes)
        self._removes = [name for name in self._removes if name not in done]
        if flying.items or flying.moved:
            self._count_written(flying, now_ns)
        if flying.syncs:
            self._is_dirty = False

    def read_next(self, chapter: Chapter, sequence: int) -> Stretch | None:
        """Where the batches from this one on are; None where there are no more. They may begin further on."""
        for file in self._files:
            if file.chapter == chapter.number and file.last >= sequence:
                return Stretch(file.name, (), file.last)
        frames = [item.frame for item in self._held(chapter) if item.frame is not None]
        frames = [frame for frame in frames if frame.sequence >= sequence]
        return Stretch(None, frames, frames[-1].sequence) if frames else None

    def _held(self, chapter: Chapter) -> list[_Pending]:
        """What of a chapter is in memory."""
        flying = self._flying.items if self._flying is not None else []
        return [item for item in (*flying, *self._loose, *self._pending) if item.chapter is chapter]

    def entries_of(self, chapter: Chapter, data: bytes) -> Sequence[Entries]:
        """All dictionary entries of a chapter: those in its file, of which these are the bytes, and those in memory."""
        held = b"".join(item.entries for item in self._held(chapter))
        found = {entries.number: entries for part in (data, held) for entries in scan(part).entries}
        whole: list[Entries] = []
        while (entries := found.get(len(whole) + 1)) is not None:
            whole.append(entries)
        return whole

    def statistics(self) -> SpoolStatistics:
        """A snapshot of the spool."""
        return SpoolStatistics(
            bytes_on_disk=self._file_bytes,
            pending_bytes=self._pending_bytes,
            oldest_ns=self._oldest_ns(),
            written_total=self._written,
            replayed_total=self.replayed,
            dropped=dict(self._dropped),
            unusable_files=dict(self._unusable),
            damaged_bytes=self._damaged_bytes,
            failures_total=self._failures,
            fault=self._fault,
        )

    def _write_job(self, items: list[_Pending], now_ns: int) -> SpoolJob:
        chapter = items[0].chapter if items else self._live
        assert chapter is not None, "something is to be written before a chapter was begun"
        moved, self._moved = self._moved, {}
        self._noted_ns = now_ns
        appends: list[tuple[str, bytes]] = []
        entries = b"".join(item.entries for item in items)
        if entries:
            is_new = chapter.entries_name not in self._entries_sizes
            entries = (header_record(self._header(chapter, now_ns, {})) if is_new else b"") + entries
            appends.append((chapter.entries_name, entries))
        frames = [item.frame for item in items if item.frame is not None]
        syncs, new_file = self._roll(chapter, now_ns) if frames or moved else ((), None)
        written = b""
        if frames or moved:
            header = self._header(chapter, now_ns, _positions_of(self._disk_ends)) if new_file is not None else None
            written = self._frames_of(chapter, items, header)
            written += positions_record(_positions_of(moved)) if moved else b""
            file = new_file or self._current
            assert file is not None, "frames have no file to go to"
            appends.append((file.name, written))
        self._flying = _Flying(
            items=items,
            new_file=new_file,
            frames=frames,
            frames_bytes=len(written),
            entries_bytes=len(entries),
            syncs=False,
            removes=tuple(self._removes),
            moved=moved,
        )
        return SpoolJob(appends=tuple(appends), syncs=syncs, removes=self._flying.removes, is_roll=new_file is not None)

    def _take_items(self, *, only_loose: bool = False) -> list[_Pending]:
        """The oldest of what waits, of one chapter, and about as much as a file may have."""
        items: list[_Pending] = []
        size = 0
        for waiting in (self._loose,) if only_loose else (self._loose, self._pending):
            while waiting and size < self._limits.file_bytes:
                if items and waiting[0].chapter is not items[0].chapter:
                    break
                items.append(waiting.popleft())
                size += items[-1].size
            if waiting:
                break
        return items

    def _frames_of(self, chapter: Chapter, items: Sequence[_Pending], header: Header | None) -> bytes:
        """The frames among these, each with how many records of dictionaries there are up to it."""
        behind = sum(bool(item.entries) for item in (*self._loose, *self._pending) if item.chapter is chapter)
        number = chapter.entries - behind - sum(bool(item.entries) for item in items)
        records = [] if header is None else [header_record(header)]
        for item in items:
            number += bool(item.entries)
            if item.frame is not None:
                records.append(frame_record(item.frame.payload, entries=number))
        return b"".join(records)

    def _roll(self, chapter: Chapter, now_ns: int) -> tuple[tuple[str, ...], _File | None]:
        """Another file, where the present one is full, old, or of another chapter; and what is synced before it."""
        current = self._current
        is_fit = current is not None and current.chapter == chapter.number and current.size < self._limits.file_bytes
        if is_fit and current is not None and now_ns - current.begun_ns < self._limits.max_age_ns // _ROLLS_PER_AGE:
            return (), None
        syncs = self._names_to_sync() if current is not None and not self._is_all_acknowledged() else ()
        name = f"frames-{self._next_file:010d}-{chapter.number:06d}"
        self._next_file += 1
        return syncs, _File(name, chapter.number, now_ns)

    def _names_to_sync(self) -> tuple[str, ...]:
        assert self._current is not None, "there is no file to sync"
        chapter = self._chapters.get(self._current.chapter)
        names = [chapter.entries_name] if chapter is not None and chapter.entries_name in self._entries_sizes else []
        return (*names, self._current.name)

    def _count_written(self, flying: _Flying, now_ns: int) -> None:
        chapter = flying.items[0].chapter if flying.items else self._live
        assert chapter is not None, "something was written before a chapter was begun"
        self._disk_ends.update(flying.moved)
        if flying.entries_bytes:
            name = chapter.entries_name
            self._entries_sizes[name] = self._entries_sizes.get(name, 0) + flying.entries_bytes
            self._file_bytes += flying.entries_bytes
        if flying.new_file is not None:
            self._current = flying.new_file
            self._files.append(flying.new_file)
        if flying.frames_bytes:
            assert self._current is not None, "frames were written to no file"
            self._current.size += flying.frames_bytes
            self._file_bytes += flying.frames_bytes
            for frame in flying.frames:
                self._note(chapter, self._current, frame, now_ns)
                self._disk_ends[frame.key] = frame.end, frame.end_line, frame.is_last
        self._written += len(flying.frames)
        self._pending_bytes -= sum(item.size for item in flying.items if item.frame is not None)
        self._is_dirty = True
        self._remove_what_is_done()

    def _note(self, chapter: Chapter, file: _File, frame: Frame, now_ns: int) -> None:
        assert file.chapter == chapter.number, "a frame went to the file of another chapter"
        file.first = file.first or frame.sequence
        file.last = frame.sequence
        file.frames += 1
        file.newest_ns = max(file.newest_ns, now_ns)
        file.ends[frame.key] = frame.end

    def _header(self, chapter: Chapter, now_ns: int, positions: Mapping[str, Position]) -> Header:
        return Header(
            format_version=FORMAT_VERSION,
            protocol_version=chapter.protocol_version,
            agent_id=self._agent_id,
            session_id=chapter.session_id,
            chapter=chapter.number,
            created_ns=now_ns,
            positions=dict(positions),
        )

    def _take_ends(self, ends: Mapping[str, _End]) -> None:
        for key, end in ends.items():
            if key not in self._ends:
                self._make_room()
            self._ends[key] = end

    def _make_room(self) -> None:
        """Forgets a source that is complete, where there are too many."""
        if len(self._ends) >= _MAX_POSITIONS:
            done = next((known for known, (_, _, is_complete) in self._ends.items() if is_complete), None)
            if done is not None:
                del self._ends[done]

    def _is_all_acknowledged(self) -> bool:
        return all(chapter.is_done for chapter in self._chapters.values())

    def _oldest_ns(self) -> int | None:
        for file in self._files:
            chapter = self._chapters.get(file.chapter)
            if chapter is not None and file.last > chapter.acknowledged:
                return file.begun_ns
        return None


def _end_of(position: Position) -> _End:
    return position.end, position.end_line, position.is_complete


def _positions_of(ends: Mapping[str, _End]) -> dict[str, Position]:
    return {key: Position(end=end, end_line=line, is_complete=done) for key, (end, line, done) in ends.items()}
