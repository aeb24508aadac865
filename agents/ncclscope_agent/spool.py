"""What of the agent's batches lies on disk: which bytes go to which file, what may be removed, what was lost.

Decides; `spool_files.py` reads and writes. `spool_waiting.py` is what is in memory, `spool_shelf.py` what is on disk,
`spool_recovery.py` what an earlier start left. A *chapter* is one session: one run of numbers and dictionaries.

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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ncclscope_agent.spool_chapter import Chapter, Stretch
from ncclscope_agent.spool_ends import End, Ends, end_of_frame, positions_of
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
from ncclscope_agent.spool_recovery import Recovery, is_of_a_spool
from ncclscope_agent.spool_shelf import FramesFile, Shelf
from ncclscope_agent.spool_waiting import Waiting, WaitingBatches
from ncclscope_wire.messages import Position

_ROLLS_PER_AGE: Final = 8
"""Files are at most such a part of the age limit long, so that little that is younger goes with what is too old."""


@dataclass(slots=True, kw_only=True)
class _Flying:
    """A job that was given out."""

    items: list[Waiting] = field(default_factory=list[Waiting])
    new_file: FramesFile | None = None
    frames: list[Frame] = field(default_factory=list[Frame])
    frames_bytes: int = 0
    entries_bytes: int = 0
    syncs: bool = False
    removes: tuple[str, ...] = ()
    moved: dict[str, End] = field(default_factory=dict[str, End])


class Spool:
    """The machine: `append` and `acknowledge` batches, carry out `take_job`, say what came of it with `on_done`.

    All times are of one clock that only goes forward, and is near the wall clock at the start. `name`, `host` and `job`
    are the agent's: they are written down for who sends in its place when it is gone.
    """

    def __init__(
        self, *, agent_id: str, limits: SpoolLimits | None = None, name: str = "", host: str = "", job: str = ""
    ) -> None:
        self._agent_id = agent_id
        self._name, self._host, self._job = name, host, job
        self._limits = limits or SpoolLimits()
        self._shelf = Shelf()
        self._waiting = WaitingBatches()
        self._ends = Ends()
        self._disk_ends = Ends()
        self._recovery = Recovery(agent_id, self._shelf, self._ends)
        self._live: Chapter | None = None
        self._flying: _Flying | None = None
        self._moved: dict[str, End] = {}
        """Of batches that are acknowledged and were not written."""
        self._noted_ns = 0
        self._synced_ns = 0
        self._is_dirty = False
        self._retry_ns = 0
        self._written = self._failures = 0
        self._fault: str | None = None
        self.wants_new_chapter = False
        """The dictionaries of the present chapter have become too large."""
        self.replayed = 0
        """Batches that were read back, as whoever reads them counts."""
        self._dropped = Counter[str]()

    # What was there at the start

    def recover(self, name: str, data: bytes) -> None:
        """Takes in a file of an earlier start. Give them in the order of their names, then call `begin`."""
        self._recovery.feed(name, data)

    @staticmethod
    def is_ours(name: str) -> bool:
        """Whether a file of this name may be part of a spool."""
        return is_of_a_spool(name)

    @property
    def left_by(self) -> Header | None:
        """Who wrote last what was recovered; None where nothing of it says so."""
        return self._recovery.newest

    def begin(self, session_id: str) -> Chapter:
        """Begins a chapter: what is appended from now on belongs to it."""
        self._live = self._shelf.begin_chapter(session_id)
        self.wants_new_chapter = False
        self._disk_ends = self._disk_ends or self._ends.copy()
        self._remove_what_is_done()
        return self._live

    def rebase(self, positions: Mapping[str, Position]) -> None:
        """Readers go on at these positions, and not where the last batches end."""
        self._ends.replace(positions)
        self._disk_ends.replace(positions)
        self._moved.clear()

    @property
    def positions(self) -> dict[str, Position]:
        """Where its last batches end, by source key: readers go on there."""
        return self._ends.positions

    @property
    def chapters(self) -> Sequence[Chapter]:
        """Those that have batches which are not acknowledged, and the present one, in order."""
        return [known for _, known in sorted(self._shelf.chapters.items()) if not known.is_done or known is self._live]

    # What comes, and what is done with

    @property
    def has_room(self) -> bool:
        """Whether it may have another batch."""
        waiting = self._waiting.bytes
        return waiting < self._limits.pending_bytes and self._shelf.bytes + waiting < self._limits.max_bytes

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
        self._ends.note(frame.key, end_of_frame(frame))
        self._waiting.add(Waiting(chapter, frame, record))

    def _is_chapter_full(self, chapter: Chapter) -> bool:
        """Whether its dictionaries have become too large, on disk or in memory."""
        if chapter.entries_bytes > self._limits.entries_bytes:
            return True
        return self._waiting.loose_bytes > self._limits.pending_bytes // 4

    def acknowledge(self, chapter: Chapter, sequence: int, reached: Mapping[str, int]) -> None:
        """The service has all batches up to this one; `reached` says where those end, by source key."""
        chapter.acknowledged = max(chapter.acknowledged, sequence)
        for key, end in reached.items():
            chapter.gone[key] = max(end, chapter.gone.get(key, 0))
        self._moved.update(self._waiting.forget_acknowledged())
        self._remove_what_is_done()

    def lose(self, reason: str, batches: int = 1) -> None:
        """So many batches were found to be of no use."""
        self._dropped[reason] += batches

    def expire(self, now_ns: int) -> None:
        """Drops what is too old, acknowledged or not."""
        shelf = self._shelf
        while shelf.files and now_ns - shelf.files[0].newest_ns > self._limits.max_age_ns:
            if shelf.files[0] is shelf.current:
                if self._flying is not None:
                    return
                shelf.current = None
            self._dropped["expired"] += shelf.expire_first()

    def _remove_what_is_done(self) -> None:
        self._shelf.remove_files_that_are_done()
        if len(self._shelf.chapters) > 1:
            flying = () if self._flying is None else self._flying.items
            held = {item.chapter.number for item in flying}
            for chapter in self._shelf.remove_chapters_that_are_done(self._live, held):
                self._waiting.forget_entries(chapter)

    # The disk

    def take_job(self, now_ns: int, *, at_once: bool = True) -> SpoolJob | None:
        """What is to be done on disk now; None where nothing is, or the last job is not done.

        Batches that came since the last call are left for the next one, unless `at_once`: the service may have
        acknowledged them by then.
        """
        if self._flying is not None or now_ns < self._retry_ns:
            return None
        was_seen = self._waiting.was_seen()
        if self._waiting.has_frames and (at_once or was_seen):
            return self._write_job(self._waiting.take(self._limits.file_bytes), now_ns)
        is_noteworthy = self._waiting.has_loose or self._moved
        if is_noteworthy and (at_once or now_ns - self._noted_ns >= self._limits.note_ns):
            return self._write_job(self._waiting.take(self._limits.file_bytes, only_loose=True), now_ns)
        is_due = self._is_dirty and self._shelf.current is not None and now_ns - self._synced_ns >= self._limits.sync_ns
        syncs = self._shelf.names_to_sync() if is_due and self._shelf.has_wanted else ()
        if not syncs and not self._shelf.removes:
            return None
        self._flying = _Flying(syncs=bool(syncs), removes=tuple(self._shelf.removes))
        self._synced_ns = now_ns if syncs else self._synced_ns
        return SpoolJob(syncs=syncs, removes=self._flying.removes)

    def take_sync(self) -> SpoolJob | None:
        """A sync of all that was written and not synced, due or not; None where nothing is to be synced."""
        if self._flying is not None or not self._is_dirty or self._shelf.current is None:
            return None
        self._flying = _Flying(syncs=True)
        return SpoolJob(syncs=self._shelf.names_to_sync())

    def on_done(self, now_ns: int, fault: str | None = None) -> None:
        """The job that was taken last was done, or failed: nothing of it counts then."""
        flying, self._flying = self._flying, None
        assert flying is not None, "a job was reported that was never given"
        self._fault = fault
        if fault is not None:
            self._failures += 1
            self._retry_ns = now_ns + self._limits.retry_ns
            self._waiting.put_back(flying.items)
            self._moved = flying.moved | self._moved | self._waiting.forget_acknowledged()
            return
        done = set(flying.removes)
        self._shelf.removes = [name for name in self._shelf.removes if name not in done]
        if flying.items or flying.moved:
            self._count_written(flying, now_ns)
        if flying.syncs:
            self._is_dirty = False

    def read_next(self, chapter: Chapter, sequence: int) -> Stretch | None:
        """Where the batches from this one on are; None where there are no more. They may begin further on."""
        for file in self._shelf.files:
            if file.chapter == chapter.number and file.last >= sequence:
                return Stretch(file.name, (), file.last)
        frames = [item.frame for item in self._held(chapter) if item.frame is not None]
        frames = [frame for frame in frames if frame.sequence >= sequence]
        return Stretch(None, frames, frames[-1].sequence) if frames else None

    def _held(self, chapter: Chapter) -> list[Waiting]:
        """What of a chapter is in memory."""
        flying = self._flying.items if self._flying is not None else []
        return [*(item for item in flying if item.chapter is chapter), *self._waiting.of(chapter)]

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
            bytes_on_disk=self._shelf.bytes,
            pending_bytes=self._waiting.bytes,
            oldest_ns=self._shelf.oldest_ns,
            written_total=self._written,
            replayed_total=self.replayed,
            dropped=dict(self._dropped),
            unusable_files=dict(self._recovery.unusable),
            damaged_bytes=self._recovery.damaged_bytes,
            failures_total=self._failures,
            fault=self._fault,
        )

    def _write_job(self, items: list[Waiting], now_ns: int) -> SpoolJob:
        chapter = items[0].chapter if items else self._live
        assert chapter is not None, "something is to be written before a chapter was begun"
        moved, self._moved = self._moved, {}
        self._noted_ns = now_ns
        appends: list[tuple[str, bytes]] = []
        entries = b"".join(item.entries for item in items)
        if entries:
            is_new = chapter.entries_name not in self._shelf.entries_sizes
            entries = (header_record(self._header(chapter, now_ns, {})) if is_new else b"") + entries
            appends.append((chapter.entries_name, entries))
        frames = [item.frame for item in items if item.frame is not None]
        syncs, new_file = self._roll(chapter, now_ns) if frames or moved else ((), None)
        written = b""
        if frames or moved:
            header = self._header(chapter, now_ns, self._disk_ends.positions) if new_file is not None else None
            written = self._frames_of(chapter, items, header)
            written += positions_record(positions_of(moved)) if moved else b""
            file = new_file or self._shelf.current
            assert file is not None, "frames have no file to go to"
            appends.append((file.name, written))
        self._flying = _Flying(
            items=items,
            new_file=new_file,
            frames=frames,
            frames_bytes=len(written),
            entries_bytes=len(entries),
            removes=tuple(self._shelf.removes),
            moved=moved,
        )
        return SpoolJob(appends=tuple(appends), syncs=syncs, removes=self._flying.removes, is_roll=new_file is not None)

    def _frames_of(self, chapter: Chapter, items: Sequence[Waiting], header: Header | None) -> bytes:
        """The frames among these, each with how many records of dictionaries there are up to it."""
        behind = sum(bool(item.entries) for item in self._waiting.of(chapter))
        number = chapter.entries - behind - sum(bool(item.entries) for item in items)
        records = [] if header is None else [header_record(header)]
        for item in items:
            number += bool(item.entries)
            if item.frame is not None:
                records.append(frame_record(item.frame.payload, entries=number))
        return b"".join(records)

    def _roll(self, chapter: Chapter, now_ns: int) -> tuple[tuple[str, ...], FramesFile | None]:
        """Another file, where the present one is full, old, or of another chapter; and what is synced before it."""
        current = self._shelf.current
        is_fit = current is not None and current.chapter == chapter.number and current.size < self._limits.file_bytes
        if is_fit and current is not None and now_ns - current.begun_ns < self._limits.max_age_ns // _ROLLS_PER_AGE:
            return (), None
        is_wanted = current is not None and self._shelf.has_wanted
        return self._shelf.names_to_sync() if is_wanted else (), self._shelf.new_file(chapter, now_ns)

    def _count_written(self, flying: _Flying, now_ns: int) -> None:
        chapter = flying.items[0].chapter if flying.items else self._live
        assert chapter is not None, "something was written before a chapter was begun"
        shelf = self._shelf
        self._disk_ends.note_all(flying.moved)
        if flying.entries_bytes:
            shelf.grow_entries(chapter.entries_name, flying.entries_bytes)
        if flying.new_file is not None:
            shelf.current = flying.new_file
            shelf.add_file(flying.new_file)
        if flying.frames_bytes:
            assert shelf.current is not None, "frames were written to no file"
            assert shelf.current.chapter == chapter.number, "a frame went to the file of another chapter"
            shelf.current.size += flying.frames_bytes
            shelf.bytes += flying.frames_bytes
            for frame in flying.frames:
                shelf.current.note(frame, now_ns)
                self._disk_ends.note_all({frame.key: end_of_frame(frame)})
        self._written += len(flying.frames)
        self._waiting.written(flying.items)
        self._is_dirty = True
        self._remove_what_is_done()

    def _header(self, chapter: Chapter, now_ns: int, positions: Mapping[str, Position]) -> Header:
        return Header(
            format_version=FORMAT_VERSION,
            protocol_version=chapter.protocol_version,
            agent_id=self._agent_id,
            session_id=chapter.session_id,
            chapter=chapter.number,
            created_ns=now_ns,
            positions=dict(positions),
            name=self._name,
            host=self._host,
            job=self._job,
        )
