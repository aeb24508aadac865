"""Contents of the spool: what goes to the disk and when, what may go from it, what was lost.

Decides; `database.py` writes and reads, `keeper.py` brings the two together.

Batches wait in memory until the disk takes them: a full or slow disk costs nothing but the room in memory. A batch that
is acknowledged before it was written is not written; its dictionary entries are, since later batches point at them. A
batch that is too old is dropped, acknowledged or not, and counted. When the spool has all the bytes that it may have,
it takes nothing more, and the logs wait unread.

Transactions are synced every `sync_ns` while something on the disk is not acknowledged. What a power loss takes was
written after that, and is read again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ncclscope_agent.spool.limits import SpoolLimits, SpoolStatistics
from ncclscope_agent.spool.records import Chapter, DiskState, Entries, Frame, Owner, Recovered, Transaction
from ncclscope_wire.messages import Position

_MAX_SOURCES: Final = 20_000
"""As many sources as a service knows of one agent."""


@dataclass(slots=True)
class _Waiting:
    """A batch on its way to the disk, and its dictionary entries; without it if it was acknowledged meanwhile."""

    chapter: Chapter
    frame: Frame | None
    entries: Entries | None

    @property
    def size(self) -> int:
        entries = 0 if self.entries is None else len(self.entries.payload)
        return entries + (0 if self.frame is None else len(self.frame.payload))


@dataclass(frozen=True, slots=True)
class _Flying:
    """A transaction that is being written, and the items that it was made of."""

    items: Sequence[_Waiting]
    wanted: Transaction
    moved: dict[str, Position]


class Spool:
    """The machine: `append` and `acknowledge` batches, carry out `next_transaction`, report it to `on_done`.

    All times are of one clock that only goes forward, and is near the wall clock at the start. Without an `owner` it
    stays that of who wrote what is recovered.
    """

    def __init__(self, owner: Owner | None, *, limits: SpoolLimits | None = None) -> None:
        self._owner = owner
        self._limits = limits or SpoolLimits()
        self._chapters: dict[int, Chapter] = {}
        self._next_chapter = 1
        self._live: Chapter | None = None
        self._frames: deque[_Waiting] = deque()
        """Batches that are to be written, in order."""
        self._loose: deque[_Waiting] = deque()
        """Entries that are still to be written, of batches that need not be."""
        self._frame_bytes = 0
        self._oldest_seen: _Waiting | None = None
        self._flying: _Flying | None = None
        self._positions: dict[str, Position] = {}
        self._moved: dict[str, Position] = {}
        """Of batches of the present chapter that are acknowledged and were not written."""
        self._on_disk: dict[str, Position] = {}
        """Positions that the disk has, or is to have once `_is_rebased` is carried out."""
        self._is_rebased = False
        self._deleted: dict[int, int] = {}
        """By chapter: up to where acknowledged batches are gone from the disk."""
        self._finished: list[int] = []
        self._disk = DiskState()
        self._written_ns = self._positions_ns = self._synced_ns = self._retry_ns = 0
        self._is_unsynced = False
        self._failures = 0
        self._fault: str | None = None
        self.left_by: Owner | None = None
        """Who wrote what was recovered; None if nothing of it says so."""
        self.unusable_files: Mapping[str, int] = {}
        self.wants_new_chapter = False
        """The dictionaries of the present chapter have become too large."""
        self.replayed = 0
        """Batches that were read back, as whoever reads them counts."""
        self._dropped = Counter[str]()

    def recover(self, found: Recovered) -> None:
        """Takes in what an earlier start left. To be called before `begin`."""
        self.left_by, self._disk = found.owner, found.disk
        self._chapters = {chapter.number: chapter for chapter in found.chapters}
        self._next_chapter = max(self._chapters, default=0) + 1
        for key, position in found.positions.items():
            self._reach(key, position)
        ends: dict[str, Position] = {}
        for frame in found.frames:
            ends[frame.key] = frame.position
            chapter = self._chapters.get(frame.chapter)
            if chapter is None:  # its row was damaged
                self._dropped["damaged"] += 1
                continue
            if not chapter.last:
                chapter.acknowledged = self._deleted[chapter.number] = frame.sequence - 1
            chapter.add(frame)
            chapter.written, chapter.entries = frame.sequence, frame.entries
        for key in ends.keys() - found.positions.keys():  # these were damaged
            self._reach(key, ends[key])
        self._on_disk = dict(self._positions)

    def begin(self, session_id: str) -> Chapter:
        """Begins a chapter: what is appended from now on belongs to it."""
        self._live = self._chapters[self._next_chapter] = Chapter(self._next_chapter, session_id)
        self._next_chapter += 1
        self.wants_new_chapter = False
        self._is_rebased = True
        self._forget_finished_chapters()
        return self._live

    def rebase(self, positions: Mapping[str, Position]) -> None:
        """Readers go on at these positions, and not where the last batches end."""
        self._positions = dict(positions)
        self._on_disk = dict(positions)
        self._is_rebased = True
        self._moved.clear()
        if self._flying is not None:
            self._flying.moved.clear()

    @property
    def positions(self) -> dict[str, Position]:
        """Where its last batches end, by source key: readers go on there."""
        return dict(self._positions)

    @property
    def chapters(self) -> Sequence[Chapter]:
        """Those that have batches which are not acknowledged, and the present one, in order."""
        return [known for _, known in sorted(self._chapters.items()) if not known.is_done or known is self._live]

    @property
    def has_room(self) -> bool:
        """Whether it may have another batch."""
        return (
            self._frame_bytes < self._limits.pending_bytes
            and self._disk.used_bytes + self._frame_bytes < self._limits.max_bytes
        )

    def append(self, frame: Frame, entries: bytes | None) -> None:
        """Takes the next batch of the present chapter; `entries`: its new dictionary entries, as a message."""
        chapter = self._live
        assert chapter is not None, "a batch was spooled before a chapter was begun"
        assert (frame.chapter, frame.sequence) == (chapter.number, chapter.last + 1), (
            "a batch was left out of the spool"
        )
        new: Entries | None = None
        if entries is not None:
            chapter.entries += 1
            chapter.entries_bytes += len(entries)
            new = Entries(chapter.number, chapter.entries, entries)
            self.wants_new_chapter = self._is_full(chapter)
        frame.entries = chapter.entries
        chapter.add(frame)
        self._reach(frame.key, frame.position)
        item = _Waiting(chapter, frame, new)
        self._frames.append(item)
        self._frame_bytes += item.size

    def _is_full(self, chapter: Chapter) -> bool:
        """Whether its dictionaries have become too large, on disk or in memory."""
        if chapter.entries_bytes > self._limits.entries_bytes:
            return True
        return sum(item.size for item in self._loose) > self._limits.pending_bytes // 4

    def _reach(self, key: str, position: Position) -> None:
        """A source was read up to there. One that is complete is forgotten if there are too many."""
        if key not in self._positions and len(self._positions) >= _MAX_SOURCES:
            done = next((known for known, at in self._positions.items() if at.is_complete), None)
            if done is not None:
                del self._positions[done]
        self._positions[key] = position

    def acknowledge(self, chapter: Chapter, sequence: int, ends: Mapping[str, int]) -> None:
        """The service has all batches up to this one, which end there by source key."""
        chapter.acknowledged = max(chapter.acknowledged, sequence)
        chapter.drop(ends)
        self._forget_acknowledged()
        self._forget_finished_chapters()

    def _forget_acknowledged(self) -> None:
        """Drops the oldest batches in memory as far as they are acknowledged."""
        while self._frames and (frame := self._frames[0].frame) is not None:
            if frame.sequence > self._frames[0].chapter.acknowledged:
                return
            item = self._frames.popleft()
            self._frame_bytes -= item.size
            if item.chapter is self._live:
                self._moved[frame.key] = frame.position
            if item.entries is not None:
                item.frame = None
                self._loose.append(item)

    def _forget_finished_chapters(self) -> None:
        if len(self._chapters) == 1:
            return
        flying = () if self._flying is None else self._flying.items
        held = {item.chapter.number for item in (*flying, *self._frames)}
        for chapter in list(self._chapters.values()):
            if chapter is not self._live and chapter.is_done and chapter.number not in held:
                del self._chapters[chapter.number]
                self._deleted.pop(chapter.number, None)
                self._finished.append(chapter.number)
                self._loose = deque(item for item in self._loose if item.chapter is not chapter)

    def count_lost(self, reason: str, batches: int = 1) -> None:
        """Counts batches that are lost to the spool, by reason."""
        self._dropped[reason] += batches

    # The disk

    def next_transaction(self, now_ns: int, *, at_once: bool = True) -> Transaction | None:
        """The next transaction to write; None if there is nothing to write, or the last transaction is not done.

        Batches that came since the last call are left for the next one, unless `at_once`: the service may have
        acknowledged them by then.
        """
        if self._flying is not None or now_ns < self._retry_ns:
            return None
        was_seen = bool(self._frames) and self._frames[0] is self._oldest_seen
        self._oldest_seen = self._frames[0] if self._frames else None
        if self._frames and (at_once or was_seen):
            return self._transaction(now_ns, self._drain_waiting(self._loose, self._frames))
        is_moved = bool(self._loose or self._moved)
        if is_moved and (at_once or now_ns - self._positions_ns >= self._limits.positions_ns):
            return self._transaction(now_ns, self._drain_waiting(self._loose))
        is_due = now_ns - self._written_ns >= self._limits.sync_ns
        if is_due and (self._to_delete() or self._expires(now_ns) or self._needs_sync(now_ns)):
            return self._transaction(now_ns, [])
        return None

    def last_transaction(self, now_ns: int) -> Transaction | None:
        """A sync of all that was written, due or not; None if nothing is to be synced."""
        if self._flying is not None or not (self._is_unsynced or self._to_delete()):
            return None
        return self._transaction(now_ns, [], is_last=True)

    def on_done(self, now_ns: int, disk: DiskState) -> None:
        """The transaction that was given out last was carried out."""
        flying = self._drain_flying()
        self._fault = None
        self._disk = disk
        self._written_ns = now_ns
        for frame in flying.wanted.frames:
            chapter = self._chapters.get(frame.chapter)
            if chapter is not None:
                chapter.written = frame.sequence
        self._frame_bytes -= sum(item.size for item in flying.items if item.frame is not None)
        self._is_unsynced = not flying.wanted.is_synced
        if not self._is_rebased:  # else these are positions from before
            self._on_disk.update(flying.wanted.positions)
        self._deleted.update((key, at) for key, at in flying.wanted.acknowledged.items() if key in self._chapters)
        self._finished = [number for number in self._finished if number not in flying.wanted.finished]
        for expired in disk.expired:
            self._dropped["expired"] += expired.batches
            chapter = self._chapters.get(expired.chapter)
            if chapter is not None:
                chapter.expired = max(chapter.expired, expired.last)
                chapter.drop(expired.ends)
        self._forget_finished_chapters()

    def on_failed(self, now_ns: int, fault: str) -> None:
        """Nothing of it was carried out."""
        flying = self._drain_flying()
        self._fault = fault
        self._failures += 1
        self._retry_ns = now_ns + self._limits.retry_ns
        self._frames.extendleft(reversed([item for item in flying.items if item.frame is not None]))
        self._loose.extendleft(reversed([item for item in flying.items if item.frame is None]))
        self._is_rebased |= flying.wanted.replaces_positions
        self._moved = flying.moved | self._moved
        self._forget_acknowledged()

    def _drain_flying(self) -> _Flying:
        flying, self._flying = self._flying, None
        assert flying is not None, "a transaction was reported that was never given out"
        return flying

    def _transaction(self, now_ns: int, items: Sequence[_Waiting], *, is_last: bool = False) -> Transaction:
        frames = [item.frame for item in items if item.frame is not None]
        moved, self._moved = self._moved, {}
        # Batches from before the readers went elsewhere are written first: positions are never ahead of them.
        is_up_to_date = not self._frames or self._frames[0].chapter is self._live
        replaces = self._is_rebased and is_up_to_date and bool(items or moved)
        self._is_rebased &= not replaces
        positions = dict(self._on_disk) if replaces else {}
        positions |= moved
        positions |= {frame.key: frame.position for frame in frames if not replaces or self._is_live(frame)}
        if moved:
            self._positions_ns = now_ns
        expires = self._expires(now_ns)
        is_synced = is_last or (now_ns - self._synced_ns >= self._limits.sync_ns and (bool(frames) or self._has_wanted))
        self._synced_ns = now_ns if is_synced else self._synced_ns
        wanted = Transaction(
            now_ns=now_ns,
            owner=self._owner,
            chapters=list({item.chapter.number: item.chapter for item in items}.values()),
            frames=frames,
            entries=[item.entries for item in items if item.entries is not None],
            positions=positions,
            replaces_positions=replaces,
            acknowledged=self._to_delete(),
            finished=tuple(self._finished),
            expires_before_ns=now_ns - self._limits.max_age_ns if expires else None,
            is_synced=is_synced,
        )
        self._flying = _Flying(items, wanted, moved)
        return wanted

    def _is_live(self, frame: Frame) -> bool:
        return self._live is not None and frame.chapter == self._live.number

    def _to_delete(self) -> dict[int, int]:
        """Up to where acknowledged batches are still on the disk, by chapter."""
        reached = {chapter.number: min(chapter.acknowledged, chapter.written) for chapter in self._chapters.values()}
        return {number: at for number, at in reached.items() if at > self._deleted.get(number, 0)}

    def _expires(self, now_ns: int) -> bool:
        return self._disk.oldest_ns is not None and now_ns - self._disk.oldest_ns > self._limits.max_age_ns

    def _needs_sync(self, now_ns: int) -> bool:
        return self._is_unsynced and self._has_wanted and now_ns - self._synced_ns >= self._limits.sync_ns

    @property
    def _has_wanted(self) -> bool:
        return any(chapter.is_on_disk for chapter in self._chapters.values())

    def _drain_waiting(self, *queues: deque[_Waiting]) -> list[_Waiting]:
        """The oldest of what waits, about as much as a transaction may have."""
        items: list[_Waiting] = []
        size = 0
        for waiting in queues:
            while waiting and size < self._limits.transaction_bytes:
                items.append(waiting.popleft())
                size += items[-1].size
        return items

    # What it has

    def frames_in_memory(self, chapter: Chapter, sequence: int) -> list[Frame] | None:
        """The batches from this one on that are in memory; None if it is on the disk: that is to be read first."""
        if sequence <= chapter.written:
            return None
        frames = [item.frame for item in self._held(chapter) if item.frame is not None]
        return [frame for frame in frames if frame.sequence >= sequence]

    def entries_of(self, chapter: Chapter, on_disk: Iterable[Entries]) -> Sequence[Entries]:
        """All dictionary entries of a chapter, as far as none is missing: those on the disk and those in memory."""
        held = (item.entries for item in self._held(chapter) if item.entries is not None)
        found = {entries.number: entries for part in (on_disk, held) for entries in part}
        whole: list[Entries] = []
        while (entries := found.get(len(whole) + 1)) is not None:
            whole.append(entries)
        return whole

    def _held(self, chapter: Chapter) -> list[_Waiting]:
        """The items of a chapter that are in memory."""
        flying = () if self._flying is None else self._flying.items
        return [item for item in (*flying, *self._loose, *self._frames) if item.chapter is chapter]

    def statistics(self) -> SpoolStatistics:
        """A snapshot of the spool."""
        return SpoolStatistics(
            bytes_on_disk=self._disk.file_bytes,
            pending_bytes=self._frame_bytes,
            oldest_ns=self._disk.oldest_ns if self._has_wanted else None,
            replayed_total=self.replayed,
            dropped=dict(self._dropped),
            unusable_files=self.unusable_files,
            failures_total=self._failures,
            fault=self._fault,
        )
