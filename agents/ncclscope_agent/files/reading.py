"""Reads open files: where each begins, a share of what is new, and the zone of its stamps.

Carries out what `tail.py` decides. Nothing here sleeps or waits.

NCCL prints local time without a zone, and a container may have another zone than its node, mostly UTC. A stamp is
taken just before its line is written, so read in the right zone the last one lies shortly before the last change of
the file; in a wrong one it lies hours before it, or after it, which cannot be. If neither the node's zone nor UTC
fits, any other may. It is looked at again in every quarter of an hour: summer time begins and ends at one.

*Source:* NCCL `src/debug.cc:ncclDebugLog` (strftime of localtime_r, then fwrite).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Final

from ncclscope_agent.files import tail
from ncclscope_agent.files.finding import FollowLimits, OpenFile
from ncclscope_agent.files.paths import PathPatterns
from ncclscope_agent.files.recognise import FileKind, recognise
from ncclscope_agent.files.release import data_after
from ncclscope_agent.files.tail import Decision, Verdict
from ncclscope_agent.sources.inspector import DUMP_MARK, InspectorReader
from ncclscope_agent.sources.nccl_log.batches import TextBatch
from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import Position
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.terms import NO_TIME_NS

_LEARN_BYTES: Final = 65_536
"""First bytes from which a reader that resumes further on learns the hosts of the file."""
_NOT_LOGS: Final = set(FileKind) - {FileKind.NCCL_LOG, FileKind.NCCL_TESTS, FileKind.EMPTY, FileKind.UNKNOWN}
"""Lines of NCCL may follow what is empty, unknown or a table of nccl-tests so far."""
_NOT_DUMPS: Final = set(FileKind) - {FileKind.INSPECTOR}
_LOOK_BACK_BYTES: Final = 16 << 20
"""How far back the mark of the dump is looked for in which reading resumes: it has 2,048 records or fewer."""
_LOOK_BACK_STEP: Final = 1 << 20
_REMEMBERED_ENDS: Final = 4096
END_BYTES: Final = 64 * 1024
"""How much of the end of a log is looked at."""

_AHEAD_NS: Final = 2_000_000_000
"""A stamp may seem to be this much after the change: 2.26.2 prints wrong digits, file systems round."""
_QUARTER_NS: Final = 900_000_000_000
_ALL_ZONES_NS: Final = tuple(quarter * _QUARTER_NS for quarter in range(-12 * 4, 14 * 4 + 1))
_LIKELY_WITHIN_NS: Final = 600_000_000_000
"""Logs change for other reasons than operations: so much later, it may still be the likely zone."""
_ANY_WITHIN_NS: Final = 10_000_000_000
"""A file that was copied or touched at any time fits one of all zones that well in 1 of 75 cases."""
_SOURCE: Final = Source(kind=SourceKind.NCCL_LOG, name="end", key="end")


class Begun(Enum):
    """Whether a file is read."""

    READING = auto()
    NOT_YET = auto()
    """It is not known yet whether the file is of the kind that is read."""
    SOMETHING_ELSE = auto()


class FileReading:
    """Reads files of a kind, and counts what was read.

    `positions` tells by source key where a source is to be read on.
    """

    def __init__(
        self,
        kind: SourceKind,
        names: PathPatterns,
        zones_ns: Sequence[int],
        limits: FollowLimits,
        skipped: Counter[str],
        *,
        positions: Mapping[str, Position],
    ) -> None:
        self._kind = kind
        self._names = names
        self._zones_ns = zones_ns
        self._limits = limits
        self._skipped = skipped
        self.positions = positions
        self.ends: dict[str, Position] = {}
        """By source key: the position at which a source ended."""
        self.was_cut_short = False
        """A file had more than its share."""
        self.ahead_bytes = self.bytes_read = self.lines = 0

    def begin(self, file: OpenFile, *, is_complete: bool = False) -> Begun:
        """Makes the reader of a file as soon as its identity is known."""
        begin, text = file.text()
        print_of_head = tail.fingerprint(text, is_complete=is_complete or file.tail.is_away)
        if print_of_head is None:
            return Begun.NOT_YET
        is_log = self._kind is SourceKind.NCCL_LOG
        if recognise(text, file.path.name) in (_NOT_LOGS if is_log else _NOT_DUMPS):
            self._skipped["file_not_a_log" if is_log else "file_not_inspector"] += 1
            return Begun.SOMETHING_ELSE
        key, position = self._start(file, print_of_head)
        reader = self._reader(Source(kind=self._kind, name=self._names.name(file.path), key=key), position, file.handle)
        if begin and begin == file.emptied_at:
            reader.pass_front_zeros()
        if position.end:
            reader.learn(self._context(file.handle, position.end))
            if data_after(file.handle, position.end) > position.end:
                reader.tear()
        file.reader = reader
        file.last_parsed = file.before(position.end)
        file.tail.start(position.end, file.head(), file.last_parsed)
        return Begun.READING

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

    def _context(self, handle: int, position: int) -> bytes:
        """The bytes in front of a position from which a reader that resumes there has to learn."""
        if self._kind is SourceKind.INSPECTOR:
            return since_last_dump(handle, position)
        begin = min(data_after(handle, 0), position)
        return os.pread(handle, min(position - begin, _LEARN_BYTES), begin).lstrip(b"\0").partition(b"\0")[0]

    def _start(self, file: OpenFile, print_of_head: str) -> tuple[str, Position]:
        """The key of a file, and the byte and line from which it is to be read.

        Of the generations that are known (see `tail.source_key`) the last is the file's; if what was read of that
        one is not in front of its position, or the file was seen being truncated, it is one generation further.
        """
        generation = 0
        known: tuple[str, Position] | None = None
        key = tail.source_key(file.tail.identity, print_of_head, generation)
        while (position := self.ends.get(key) or self.positions.get(key)) is not None:
            known = key, position
            generation += 1
            key = tail.source_key(file.tail.identity, print_of_head, generation)
        if known is not None and not file.must_be_new and _may_be_read_on(file, known[1]):
            return known
        return key, Position(end=0)

    def look(self, file: OpenFile, now_ns: int, budget: int, *, is_crowded: bool) -> Decision:
        """Looks whether a file has more, and reads a share of that ahead."""
        file.nameless_since_ns = None
        try:
            status = os.fstat(file.handle)
            has_name = status.st_nlink > 0 and not is_crowded
            decision = file.tail.on_look(status.st_size, now_ns, status.st_mtime_ns, has_name=has_name)
            if decision.verdict is Verdict.READ:
                return self.read(file, status.st_size, budget)
        except OSError:
            self._skipped["file_unreadable"] += 1
            return file.tail.give_up()
        return decision

    def read(self, file: OpenFile, size: int, budget: int) -> Decision:
        """Reads ahead a share of what a file of this size has more than was read."""
        most = min(budget, self._limits.bytes_per_turn)
        offset, overlap = file.tail.offset, file.tail.overlap
        # A buffer of the whole share would be asked of the kernel, and given back, for each read.
        data = os.pread(file.handle, overlap + min(most, size - offset), offset - overlap)
        last, data = data[:overlap], data[overlap:]
        if data.startswith(b"\0") and offset >= tail.HEAD_BYTES and (hole := file.hole_bytes()):
            return self._pass_over(file, hole)
        decision = file.tail.on_read(data, file.head(), size, last)
        if data and decision.verdict is not Verdict.BEGIN_ANEW:
            self.was_cut_short |= len(data) >= most
            self.bytes_read += len(data)
            self.ahead_bytes += len(data)
            file.ahead.append(data)
        return decision

    def _pass_over(self, file: OpenFile, hole: int) -> Decision:
        """Goes on behind a hole without reading its zeros: they may be many more than the disk has room for.

        If something is ahead of the reader, that comes first.
        """
        self.was_cut_short = True
        if file.ahead:
            return Decision(verdict=Verdict.READ)
        decision = file.tail.on_hole(hole, file.head(), file.size())
        if decision.verdict is not Verdict.BEGIN_ANEW and file.reader is not None:
            file.reader.ingest_zeros(hole)
            file.last_parsed = bytes(tail.LAST_BYTES)
        return decision

    def parse(self, file: OpenFile, now_ns: int | None) -> Sequence[TextBatch | Batch]:
        """Has the reader of a file read what is ahead of it."""
        reader = file.reader
        if reader is None or not file.ahead:
            return ()
        data = self.drain_ahead(file)
        if file.is_zone_open and isinstance(reader, NcclLogReader):
            self._set_zone(file, reader, data, now_ns)
        lines, begin = reader.line, reader.position + reader.unfinished_bytes
        batches = reader.read(data, now_ns)
        self.lines += reader.line - lines
        checked = [_checked(batch, file, _last_of(file.last_parsed, data, batch.end - begin)) for batch in batches]
        file.last_parsed = _last_of(file.last_parsed, data, len(data))
        return checked

    def parse_end(self, file: OpenFile, now_ns: int | None) -> TextBatch | Batch | None:
        """The last batch of a source; None if nothing of it was read."""
        reader = file.reader
        if reader is None:
            return None
        lines = reader.line
        last = _checked(reader.read_last(now_ns), file, file.last_parsed)
        self.lines += reader.line - lines
        if len(self.ends) >= _REMEMBERED_ENDS:
            self.ends.clear()
        self.ends[reader.source.key] = Position(
            end=reader.position, end_line=reader.line, content_check=last.content_check
        )
        return last

    def drain_ahead(self, file: OpenFile) -> bytes:
        """Takes out the bytes of a file that were read ahead."""
        data = file.drain_ahead()
        self.ahead_bytes -= len(data)
        return data

    def _set_zone(self, file: OpenFile, reader: NcclLogReader, data: bytes, now_ns: int | None) -> None:
        """Sets the zone of a log before operations are read, by what stands at its end now: once in a quarter."""
        quarter = 0 if now_ns is None else now_ns // _QUARTER_NS
        if quarter == file.zone_told_in or b": opCount " not in data:
            return
        file.zone_told_in = quarter
        status = os.fstat(file.handle)
        end = os.pread(file.handle, END_BYTES, max(0, status.st_size - END_BYTES))
        stamp_ns = newest_stamp_ns(b"\n" + end, status.st_mtime_ns)
        if stamp_ns is not None:
            zone = zone_that_fits(stamp_ns, status.st_mtime_ns, self._zones_ns)
            reader.set_zone(self._zones_ns[0] if zone is None else zone)


def _last_of(before: bytes, data: bytes, end: int) -> bytes:
    """The last bytes of `before` and `end` bytes of data behind it, `LAST_BYTES` of them."""
    last = data[max(0, end - tail.LAST_BYTES) : end]
    return last if len(last) == tail.LAST_BYTES else (before + last)[-tail.LAST_BYTES :]


def _checked(batch: TextBatch | Batch, file: OpenFile, last: bytes) -> TextBatch | Batch:
    """The batch with the checksum of what was read up to its end; `last`: the bytes right in front of it."""
    return replace(batch, content_check=tail.content_check(file.tail.head(batch.end), last))


def _may_be_read_on(file: OpenFile, position: Position) -> bool:
    """Whether a file is the one that was read up to there, as far as can be known.

    A job that starts again in a container writes the same first line to the same file. An agent before protocol
    version 3 left no checksum; its readers stopped at the end of a line, but for the last.
    """
    if position.end > file.size():
        return False
    if not position.end or data_after(file.handle, position.end - 1) >= position.end:
        return True
    last = file.before(position.end)
    if position.content_check is not None:
        return tail.is_checked_content(position.content_check, file.head()[: position.end], last)
    return position.is_complete or last[-1:] in (b"\n", b"\0")


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


def newest_stamp_ns(end_of_log: bytes, changed_at_ns: int) -> int | None:
    """The stamp of the last operation in these bytes but the first line, which may be a piece; None without one.

    As UTC ns, if it were UTC.
    """
    _, _, lines = end_of_log.partition(b"\n")
    reader = NcclLogReader(_SOURCE, written_near_ns=changed_at_ns)
    stamps = [int(time) for batch in reader.ingest_bytes(lines) for time in batch.operations["logged_at_ns"].tolist()]
    known = [stamp for stamp in stamps if stamp != NO_TIME_NS]
    return known[-1] if known else None


def zone_that_fits(stamp_ns: int, changed_at_ns: int, zones_ns: Sequence[int]) -> int | None:
    """The zone (ns ahead of UTC) that puts the stamp shortly before the change; None if none does.

    The best of these, unless another one fits far better.
    """
    lags = {zone: changed_at_ns - (stamp_ns - zone) for zone in (*zones_ns, *_ALL_ZONES_NS)}
    possible = [zone for zone in zones_ns if lags[zone] >= -_AHEAD_NS]
    likely = min(possible, key=lambda zone: lags[zone], default=None)
    if likely is not None and lags[likely] < _LIKELY_WITHIN_NS:
        return likely
    return next((zone for zone in _ALL_ZONES_NS if -_AHEAD_NS <= lags[zone] < _ANY_WITHIN_NS), likely)
