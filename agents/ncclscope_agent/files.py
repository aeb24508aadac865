"""Follows logs and dumps of NCCL Inspector: finds them by pattern, opens, stats and reads them, a fair share at a time.

Carries out what `tail.py` decides. All files are opened read-only and read with positions, so nothing is
shared with the process that writes them. Nothing here sleeps or waits: the caller calls `look` at its tick, and `poll`
when batches are wanted: making them costs by file and batch more than by line.

Known losses: a file that is rotated twice between two looks loses the middle one; one that was deleted is let go after
`grace_ns`, and what its writer writes to it later is not seen; a copy whose name matches a pattern too (logrotate's
copytruncate) is read as a file of its own.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ncclscope_agent import log_zone, tail
from ncclscope_agent.gone import gone_sources, last_batch_of
from ncclscope_agent.health import FollowerStatistics
from ncclscope_agent.paths import PathPatterns, identity_of
from ncclscope_agent.recognise import FileKind, recognise
from ncclscope_agent.release import LogReleaser, data_after
from ncclscope_agent.sources.inspector import DUMP_MARK, InspectorReader
from ncclscope_agent.sources.nccl_log import MAX_LINE_BYTES, MAX_TEMPLATES, NcclLogReader
from ncclscope_agent.sources.text_batches import TextBatch, batches_of
from ncclscope_agent.tail import Decision, FileIdentity, Tail, Verdict
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import Position
from ncclscope_wire.records import Source, SourceGap, SourceKind

_LEARN_BYTES: Final = 65_536
"""First bytes from which a reader that resumes further on learns the hosts of the file."""
_NOT_LOGS: Final = {FileKind.NSYS_SQLITE, FileKind.NSYS_REPORT, FileKind.INSPECTOR, FileKind.NCCL_TOPOLOGY}
_NOT_DUMPS: Final = set(FileKind) - {FileKind.INSPECTOR}
_LOOK_BACK_BYTES: Final = 16 << 20
"""How far back the mark of the dump is looked for in which reading resumes: it has 2,048 records or fewer."""
_LOOK_BACK_STEP: Final = 1 << 20
_REMEMBERED_ENDS: Final = 4096
_CROWDED_SHARE: Final = 0.75
_GONE_AFTER_NS: Final = 30_000_000_000
"""A file whose source is known may appear so late: its directory is mounted after the agent has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowLimits:
    """Bounds of following, with the reason for each default."""

    bytes_per_turn: int = 1 << 18
    """Of one file at a time: about 1,200 lines or a millisecond, so that no file starves the others."""
    bytes_per_poll: int = 8 << 20
    """Of all files in one poll: about 50 ms."""
    gathered_bytes: int = 2 << 20
    """Read ahead by `look` and kept as text; more is asked for at once."""
    rescan_interval_ns: int = 2_000_000_000
    """Between two looks for new, renamed and deleted files, unless `nudge` was called: only what no watch tells,
    on network file systems and below wildcards, waits for it."""
    grace_ns: int = 30_000_000_000
    """A file that has no name left is closed after so long a silence: it holds disk space until then."""
    renamed_grace_ns: int = 3_600_000_000_000
    """The same of one that was renamed to what no pattern matches: NCCL, which cannot open its log anew, goes on
    writing to it, and pauses for longer than `grace_ns` while its job evaluates or saves a checkpoint."""
    unread_grace_ns: int = 600_000_000_000
    """A file that has no name left is let go after so long without room for what it holds: somebody deleted it to get
    its disk space back."""
    max_files: int = 1024
    """Handles open at once; the usual limit of a process is 1,024 to 65,536."""
    max_line_bytes: int = MAX_LINE_BYTES
    max_templates: int = MAX_TEMPLATES


class _Followed:
    """One open file."""

    def __init__(self, path: Path, handle: int, state: Tail, *, is_zone_open: bool) -> None:
        self.path = path
        self.handle = handle
        self.tail = state
        self.reader: NcclLogReader | InspectorReader | None = None
        self.must_be_new = False
        """It was truncated: a position known for its key is of the content before."""
        self.is_zone_open = is_zone_open
        """Its stamps may be of several zones, and none of its operations has been read."""
        self.ahead: list[bytes] = []
        """Read from the file up to the tail's offset, and not by the reader yet."""
        self.last_word: Decision | None = None
        """What a look ahead has found: its source ends behind what is `ahead`."""
        self.nameless_since_ns: int | None = None
        """Since when it has no name, and there was no room to read it."""

    def head(self) -> bytes:
        return os.pread(self.handle, tail.HEAD_BYTES, 0)

    def size(self) -> int:
        return os.fstat(self.handle).st_size

    def before(self, end: int) -> bytes:
        """The last bytes in front of a position; fewer where it stands near the beginning."""
        begin = max(0, end - tail.LAST_BYTES)
        return os.pread(self.handle, end - begin, begin)

    def let_go(self) -> None:
        """Gives the file back to its disk; the handle stays, of nothing."""
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, self.handle, inheritable=False)
        os.close(nothing)

    def take_ahead(self) -> bytes:
        data = self.ahead[0] if len(self.ahead) == 1 else b"".join(self.ahead)
        self.ahead.clear()
        return data

    def is_same(self) -> bool:
        return self.tail.is_same(self.head(), self.size())

    def hole_bytes(self) -> int:
        """How many bytes from `offset` on are a hole that data follow."""
        end = data_after(self.handle, self.tail.offset)
        return end - self.tail.offset if end < self.size() else 0


class LogFollower:
    """Follows all files of a kind that match some patterns, and gives what they say as batches.

    `kind` is NCCL_LOG or INSPECTOR; files that are something else are counted and left alone.
    `zones_ns`: what local time may be ahead of UTC in these logs, the likeliest first; of several, each file's last
    change tells its own (`log_zone.py`).
    `positions` tells by source key where a source is to be read on; the key is `tail.source_key`.
    Batches of one source are contiguous and in order; a source whose file was rotated away or deleted ends with a batch
    that has `is_last`, one whose file was truncated, or is gone when reading begins again, with a SourceGap besides.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        *,
        root: Path | None = None,
        kind: SourceKind = SourceKind.NCCL_LOG,
        zones_ns: Sequence[int] = (0,),
        positions: Mapping[str, Position] = MappingProxyType({}),
        limits: FollowLimits | None = None,
    ) -> None:
        self._patterns = PathPatterns(patterns, root)
        self._kind = kind
        self._zones_ns = zones_ns
        self._positions = positions
        self._limits = limits or FollowLimits()
        self._followed: dict[FileIdentity, _Followed] = {}
        self._not_logs: dict[FileIdentity, Path] = {}
        self._ends: dict[str, Position] = {}
        self._nudged = threading.Event()
        self._nudged.set()
        self._scanned_ns = 0
        self._unopened: set[FileIdentity] = set()
        """Files that were found and cannot be followed."""
        self._looks_for_gone = True
        """Whether what is gone is still to be told of."""
        self._began_ns: int | None = None
        """When the first poll at these positions was."""
        self.beside: Sequence[LogFollower] = ()
        """Others that were told the same positions: what they follow is not gone."""
        self.tells_of_gone = True
        """Of several that were told the same positions one does."""
        self._turn = 0
        self._was_cut_short = False
        self._ahead_bytes = 0
        self._bytes_read = 0
        self._lines = 0
        self._skipped: Counter[str] = Counter()

    @property
    def has_more(self) -> bool:
        """Whether the last poll took its share and left something unread: poll again at once.

        What was written while it was read does not count: of a log that grows all the time, that can wait.
        """
        return self._was_cut_short and any(
            followed.tail.unread_bytes and followed.reader is not None for followed in self._followed.values()
        )

    def nudge(self) -> None:
        """Says, from any thread, that files may have appeared, moved or gone: the next poll looks for them."""
        self._nudged.set()

    def look(self, now_wall_ns: int) -> bool:
        """Reads ahead what is new in files that are known, for the next `poll`; True: there is reason to ask for it.

        That is when much has gathered, a file has more than its share, a source ends, or files are to be looked for.
        """
        is_asked = self._is_scan_due(now_wall_ns)
        for followed in self._followed.values():
            if self._ahead_bytes >= self._limits.gathered_bytes:
                return True
            if followed.reader is not None and followed.last_word is None:
                decision = self._look_at(followed, now_wall_ns, self._limits.bytes_per_turn)
                if decision.ends_source:
                    followed.last_word = decision
                is_asked |= decision.verdict is not Verdict.WAIT
        return is_asked

    def poll(self, now_wall_ns: int) -> list[Batch]:
        """What is new: what was read ahead, and at most `bytes_per_poll` in all and `bytes_per_turn` of each file.

        Never raises for a file: one that cannot be read is counted, and tried again at the next scan.
        """
        if self._is_scan_due(now_wall_ns):
            self._nudged.clear()
            self._scan()
            self._scanned_ns = now_wall_ns
        read: list[TextBatch | Batch] = []
        budget = self._limits.bytes_per_poll
        self._was_cut_short = False
        order = list(self._followed.values())
        self._turn = (self._turn + 1) % max(1, len(order))
        for followed in order[self._turn :] + order[: self._turn]:
            if budget <= 0:
                self._was_cut_short = True
                break
            before = self._bytes_read
            read += self._take_turn(followed, now_wall_ns, budget)
            budget -= self._bytes_read - before
        return self._counted(batches_of(read)) + self._tell_gone(now_wall_ns)

    def notice(self, now_wall_ns: int) -> None:
        """Looks at the sizes of the files and reads nothing: what waits is known, and what is lost of it meanwhile.

        To be called while there is no room for more. Files that were deleted are not held for long then.
        """
        for followed in self._followed.values():
            with suppress(OSError):  # the next look says so
                if followed.last_word is None:
                    self._notice(followed, now_wall_ns)

    def _notice(self, followed: _Followed, now_ns: int) -> None:
        status = os.fstat(followed.handle)
        followed.tail.on_notice(status.st_size, followed.head())
        if status.st_nlink > 0:
            followed.nameless_since_ns = None
        elif followed.nameless_since_ns is None or now_ns < followed.nameless_since_ns:
            followed.nameless_since_ns = now_ns
        elif now_ns - followed.nameless_since_ns >= self._limits.unread_grace_ns:
            followed.last_word = followed.tail.give_up("deleted")
            followed.let_go()

    def reset(self, positions: Mapping[str, Position]) -> None:
        """Forgets all files, dictionaries too, and goes on at these positions. Gives nothing."""
        for followed in list(self._followed.values()):
            self._drop(followed)
        self._not_logs.clear()
        self._ends.clear()
        self._positions = positions
        self._looks_for_gone, self._began_ns = True, None
        self._was_cut_short = False
        self.nudge()

    def close(self, now_wall_ns: int | None = None) -> list[Batch]:
        """Reads what is left and closes all files, where nothing more will be written.

        A last line without a newline is read if it is whole, and each source gets its last batch. An agent
        that stops while the job goes on does not call this: it leaves unfinished lines to the next one.
        """
        read: list[TextBatch | Batch] = []
        for followed in list(self._followed.values()):
            read += self._read_to_the_end(followed, now_wall_ns)
            if followed.tail.identity in self._followed:
                self._drop(followed)
        return self._counted(batches_of(read))

    def release(self, applied: Mapping[str, int], releaser: LogReleaser) -> int:
        """Has the space of what was applied given back; returns how many bytes that were.

        `applied` tells by source key how far the service has a source. Not to be called while `poll` runs.
        """
        released = 0
        followed_keys: set[str] = set()
        for followed in self._followed.values():
            if followed.reader is not None:
                key = followed.reader.source.key
                followed_keys.add(key)
                released += releaser.release(
                    followed.handle,
                    key=key,
                    name=followed.reader.source.name,
                    applied=min(applied.get(key, 0), followed.reader.position),
                    is_same=followed.is_same,
                )
        releaser.keep_only(followed_keys)
        return released

    def holds(self, key: str, position: Position) -> bool:
        """Whether the file of this source is there, with what lies behind that position and no hole right there."""
        for followed in self._followed.values():
            if followed.reader is not None and followed.reader.source.key == key:
                size = followed.size()
                return position.end == size or (
                    position.end < size and data_after(followed.handle, position.end) == position.end
                )
        return False

    def statistics(self) -> FollowerStatistics:
        """Counts since this follower was made, and what is unread now.

        Files that cannot be followed are among what was skipped, once per look: "file_unreadable",
        "file_not_a_log" ("file_not_inspector"), "file_too_many".
        """
        return FollowerStatistics(
            files=len(self._followed),
            lines_total=self._lines,
            bytes_read_total=self._bytes_read,
            lag_bytes=self._ahead_bytes + sum(followed.tail.unread_bytes for followed in self._followed.values()),
            skipped=dict(self._skipped),
        )

    def _counted(self, batches: list[Batch]) -> list[Batch]:
        for batch in batches:
            if batch.counts.skipped:
                self._skipped.update(batch.counts.skipped)
        return batches

    # Finding files

    def _is_scan_due(self, now_ns: int) -> bool:
        return self._nudged.is_set() or not 0 <= now_ns - self._scanned_ns < self._limits.rescan_interval_ns

    def _scan(self) -> None:
        found: dict[FileIdentity, Path] = {}
        for path in self._patterns.paths():
            identity = identity_of(path)
            if identity is not None:
                found.setdefault(identity, path)
        for identity, followed in self._followed.items():
            followed.path = found.get(identity, followed.path)
            followed.tail.on_path(identity if identity in found else identity_of(followed.path))
        self._not_logs = {identity: path for identity, path in self._not_logs.items() if found.get(identity) == path}
        for identity, path in found.items():
            if identity not in self._followed and identity not in self._not_logs:
                self._open(path)
        self._unopened = found.keys() - self._followed.keys() - self._not_logs.keys()

    def _tell_gone(self, now_ns: int) -> list[Batch]:
        """The last batches of sources whose files are gone, once, when these have had time to appear."""
        if not self._looks_for_gone:
            return []
        if self._began_ns is None or now_ns < self._began_ns:
            self._began_ns = now_ns
        have_others_begun = all(each._began_ns is not None for each in self.beside)
        if not self.tells_of_gone or not have_others_begun or now_ns - self._began_ns < _GONE_AFTER_NS:
            return []
        self._looks_for_gone = False
        all_of = (self, *self.beside)
        gone = gone_sources(
            self._positions,
            followed={key for each in all_of for key in each._known_keys()},
            unread={identity for each in all_of for identity in each._unread_files()},
        )
        return [last_batch_of(key, position, self._kind, now_ns) for key, position in gone.items()]

    def _known_keys(self) -> list[str]:
        """The sources that are read, or were and are at their end."""
        reading = [known.reader.source.key for known in self._followed.values() if known.reader is not None]
        return [*reading, *self._ends]

    def _unread_files(self) -> list[FileIdentity]:
        """Files that are there, and of which it is not known yet what they hold."""
        begun_not = [known.tail.identity for known in self._followed.values() if known.reader is None and known.head()]
        return [*begun_not, *self._unopened]

    def _open(self, path: Path) -> None:
        if len(self._followed) >= self._limits.max_files:
            self._skipped["file_too_many"] += 1
            return
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            self._skipped["file_unreadable"] += 1
            return
        status = os.fstat(handle)
        identity = FileIdentity(status.st_dev, status.st_ino)
        if not stat.S_ISREG(status.st_mode) or identity in self._followed:
            os.close(handle)
            return
        self._followed[identity] = _Followed(path, handle, self._tail(identity), is_zone_open=len(self._zones_ns) > 1)

    def _tail(self, identity: FileIdentity) -> Tail:
        limits = self._limits
        return Tail(identity, grace_ns=limits.grace_ns, named_grace_ns=max(limits.grace_ns, limits.renamed_grace_ns))

    @property
    def _is_crowded(self) -> bool:
        """So many files are held that those which are away make room soon."""
        return len(self._followed) >= _CROWDED_SHARE * self._limits.max_files

    def _drop(self, followed: _Followed) -> None:
        os.close(followed.handle)
        self._ahead_bytes -= len(followed.take_ahead())
        del self._followed[followed.tail.identity]

    # Reading one

    def _take_turn(self, followed: _Followed, now_ns: int, budget: int) -> Sequence[TextBatch | Batch]:
        try:
            if followed.reader is None and not self._begin(followed):
                return ()
        except OSError:
            self._skipped["file_unreadable"] += 1
            return self._carry_out(followed, followed.tail.give_up(), now_ns)
        decision = followed.last_word or self._look_at(followed, now_ns, budget)
        batches = self._read_ahead(followed, now_ns)
        return [*batches, *self._carry_out(followed, decision, now_ns)] if decision.ends_source else batches

    def _look_at(self, followed: _Followed, now_ns: int, budget: int) -> Decision:
        """Looks whether a file has more, and reads a share of that ahead."""
        followed.nameless_since_ns = None
        try:
            status = os.fstat(followed.handle)
            has_name = status.st_nlink > 0 and not self._is_crowded
            decision = followed.tail.on_look(status.st_size, now_ns, status.st_mtime_ns, has_name=has_name)
            if decision.verdict is Verdict.READ:
                return self._read(followed, status.st_size, budget)
        except OSError:
            self._skipped["file_unreadable"] += 1
            return followed.tail.give_up()
        return decision

    def _read(self, followed: _Followed, size: int, budget: int) -> Decision:
        """Reads ahead a share of what a file of this size has more than was read."""
        most = min(budget, self._limits.bytes_per_turn)
        offset, overlap = followed.tail.offset, followed.tail.overlap
        # A buffer of the whole share would be asked of the kernel, and given back, for each read.
        data = os.pread(followed.handle, overlap + min(most, size - offset), offset - overlap)
        last, data = data[:overlap], data[overlap:]
        if data.startswith(b"\0") and followed.tail.offset >= tail.HEAD_BYTES and (hole := followed.hole_bytes()):
            return self._pass_over(followed, hole)
        decision = followed.tail.on_read(data, followed.head(), size, last)
        if data and decision.verdict is not Verdict.BEGIN_ANEW:
            self._was_cut_short |= len(data) >= most
            self._bytes_read += len(data)
            self._ahead_bytes += len(data)
            followed.ahead.append(data)
        return decision

    def _read_ahead(self, followed: _Followed, now_ns: int | None) -> Sequence[TextBatch | Batch]:
        """Has the reader of a file read what is ahead of it."""
        reader = followed.reader
        if reader is None or not followed.ahead:
            return ()
        data = followed.take_ahead()
        self._ahead_bytes -= len(data)
        if followed.is_zone_open and isinstance(reader, NcclLogReader) and b": opCount " in data:
            self._tell_zone(followed, reader)
        lines = reader.line
        batches = reader.read(data, now_ns)
        self._lines += reader.line - lines
        return batches

    def _tell_zone(self, followed: _Followed, reader: NcclLogReader) -> None:
        """Sets the zone of a log before its first operations are read, by what stands at its end now."""
        status = os.fstat(followed.handle)
        end = os.pread(followed.handle, log_zone.END_BYTES, max(0, status.st_size - log_zone.END_BYTES))
        stamp_ns = log_zone.newest_stamp_ns(b"\n" + end, status.st_mtime_ns)
        followed.is_zone_open = False
        if stamp_ns is not None:
            zone = log_zone.zone_that_fits(stamp_ns, status.st_mtime_ns, self._zones_ns)
            reader.set_zone(self._zones_ns[0] if zone is None else zone)

    def _pass_over(self, followed: _Followed, hole: int) -> Decision:
        """Goes on behind a hole without reading its zeros: they may be many more than the disk has room for.

        Where something is ahead of the reader, that comes first.
        """
        self._was_cut_short = True
        if followed.ahead:
            return Decision(verdict=Verdict.READ)
        decision = followed.tail.on_hole(hole, followed.head(), followed.size())
        if decision.verdict is not Verdict.BEGIN_ANEW and followed.reader is not None:
            followed.reader.feed_zeros(hole)
        return decision

    def _carry_out(self, followed: _Followed, decision: Decision, now_ns: int) -> list[TextBatch | Batch]:
        """Ends a source; gives its last batch."""
        batches = self._end(followed, decision, now_ns)
        if decision.verdict is Verdict.BEGIN_ANEW:
            followed.tail = self._tail(followed.tail.identity)
            followed.reader = followed.last_word = None
            followed.must_be_new = True
            # The new tail knows nothing of the path yet.
            followed.tail.on_path(identity_of(followed.path))
        else:
            self._drop(followed)
        return batches

    def _end(self, followed: _Followed, decision: Decision, now_ns: int | None) -> list[TextBatch | Batch]:
        """The last batch of a source, which says why it ends."""
        if followed.reader is None:
            return []
        lines = followed.reader.line
        last = followed.reader.read_last(now_ns)
        self._lines += followed.reader.line - lines
        self._remember_end(followed.reader)
        if decision.reason is None:
            return [last]
        gap = SourceGap(
            reason=decision.reason,
            amount=decision.lost_bytes,
            unit="bytes",
            detail=_DETAILS[decision.reason].format(name=followed.reader.source.name, lost=decision.lost_bytes),
        )
        return [replace(last, gaps=(*last.gaps, gap))]

    def _remember_end(self, reader: NcclLogReader | InspectorReader) -> None:
        if len(self._ends) >= _REMEMBERED_ENDS:
            self._ends.clear()
        self._ends[reader.source.key] = Position(end=reader.position, end_line=reader.line)

    def _read_to_the_end(self, followed: _Followed, now_ns: int | None) -> list[TextBatch | Batch]:
        batches: list[TextBatch | Batch] = []
        decision = followed.last_word or Decision(verdict=Verdict.FINISH)
        try:
            if followed.reader is None and not self._begin(followed, is_complete=True):
                return []
            batches += self._read_ahead(followed, now_ns)
            while (size := followed.size()) > followed.tail.offset and decision.verdict is not Verdict.BEGIN_ANEW:
                decision = self._read(followed, size, self._limits.bytes_per_turn)
                batches += self._read_ahead(followed, now_ns)
        except OSError:
            self._skipped["file_unreadable"] += 1
            decision = followed.tail.give_up()
        return batches + self._end(followed, decision, now_ns)

    # Beginning one

    def _begin(self, followed: _Followed, *, is_complete: bool = False) -> bool:
        """Makes the reader of a file as soon as its identity is known; False while it is not."""
        head = followed.head()
        is_complete = is_complete or followed.tail.is_away
        print_of_head = tail.fingerprint(head, is_complete=is_complete)
        if print_of_head is None:
            if followed.tail.is_away:
                self._drop(followed)
            return False
        is_log = self._kind is SourceKind.NCCL_LOG
        if recognise(head, followed.path.name) in (_NOT_LOGS if is_log else _NOT_DUMPS):
            self._skipped["file_not_a_log" if is_log else "file_not_inspector"] += 1
            self._not_logs[followed.tail.identity] = followed.path
            self._drop(followed)
            return False
        key, position = self._where(followed, print_of_head)
        source = Source(kind=self._kind, name=self._patterns.name(followed.path), key=key)
        followed.reader = self._reader(source, position, followed.handle)
        if position.end:
            followed.reader.learn(self._before(followed.handle, position.end))
            if data_after(followed.handle, position.end) > position.end:
                followed.reader.tear()
        followed.tail.start(position.end, head, followed.before(position.end))
        return True

    def _reader(self, source: Source, position: Position, handle: int) -> NcclLogReader | InspectorReader:
        if self._kind is SourceKind.INSPECTOR:
            return InspectorReader(source, begin=position.end, line=position.end_line)
        return NcclLogReader(
            source,
            zone_offset_ns=self._zones_ns[0],
            written_near_ns=os.fstat(handle).st_mtime_ns,
            begin=position.end,
            line=position.end_line,
            max_line_bytes=self._limits.max_line_bytes,
            max_templates=self._limits.max_templates,
        )

    def _before(self, handle: int, position: int) -> bytes:
        """What a reader that resumes at a position has to learn of the bytes in front of it."""
        if self._kind is SourceKind.INSPECTOR:
            return since_last_dump(handle, position)
        return os.pread(handle, min(position, _LEARN_BYTES), 0).partition(b"\0")[0]

    def _where(self, followed: _Followed, print_of_head: str) -> tuple[str, Position]:
        """The key of a file, and the byte and line from which it is to be read.

        Of the generations that are known (see `tail.source_key`) the last is the file's; where what was read of that
        one is not in front of its position, or the file was seen being truncated, it is one generation further.
        """
        generation = 0
        known: tuple[str, Position] | None = None
        key = tail.source_key(followed.tail.identity, print_of_head, generation)
        while (position := self._ends.get(key) or self._positions.get(key)) is not None:
            known = key, position
            generation += 1
            key = tail.source_key(followed.tail.identity, print_of_head, generation)
        if known is not None and not followed.must_be_new and self._is_at_a_line(followed, known[1]):
            return known
        return key, Position(end=0)

    def _is_at_a_line(self, followed: _Followed, position: Position) -> bool:
        """Whether a file may be the one that was read up to there: reading ends with a line, but for the last.

        A job that starts again in a container writes the same first line to the same file. That a line of another
        content ends right there is as likely as its lines are long: 1 in 150 or so.
        """
        if position.end > followed.size():
            return False
        if not position.end or position.is_complete or data_after(followed.handle, position.end - 1) >= position.end:
            return True
        return os.pread(followed.handle, 1, position.end - 1) in (b"\n", b"\0")


def since_last_dump(handle: int, end: int) -> bytes:
    """The whole lines of an Inspector dump in front of `end`, from the last mark of a dump on; none without a mark.

    Formats without marks (v4.0) need nothing: each record names its communicator.
    """
    if DUMP_MARK not in os.pread(handle, min(end, tail.HEAD_BYTES), 0):
        return b""
    found = b""
    begin = end
    while begin > 0 and len(found) < _LOOK_BACK_BYTES:
        step = min(_LOOK_BACK_STEP, begin)
        begin -= step
        found = os.pread(handle, step, begin) + found
        mark = found.rfind(DUMP_MARK)
        line = found.rfind(b"\n", 0, max(mark, 0)) + 1
        if mark >= 0 and (line or not begin):
            return found[line:]
    return b""


_DETAILS: Final = {
    "truncated": "{name} was truncated or written anew; {lost} bytes that were seen were not read before.",
    "deleted": "{name} was deleted, and let go after 10 minutes without room for it; {lost} bytes were not read.",
    "unreadable": "{name} cannot be read any more; {lost} bytes were not read. Look at the disk and the mount.",
}
