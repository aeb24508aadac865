"""NCCL debug logs to batches.

Scope: what `NCCL_DEBUG=INFO` prints, NCCL 2.4 to 2.30, RCCL, and forks that decorate the prefix; one
process or many in a file, behind any launcher's tags, with or without time stamps. Read are operations
(the COLL line), the life of communicators, TUNING lines, versions and calls; other lines of NCCL are counted.
The forms and their sources are in `log_lines.py` and `docs/formats.md`.

How it is fast: a line is cut at its opCount into what recurs (who, what, buffers, stream) and what does
not (stamp, opCount). Both recurring parts are looked up as bytes; only what was never seen is parsed.
Time stamps of one form are read thousands at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ncclscope_agent.sources import log_lines, log_records, log_stamp
from ncclscope_agent.sources.dictionaries import Strings, Threads
from ncclscope_agent.sources.line_cutter import LineCutter
from ncclscope_agent.sources.log_prefix import KnownHosts, LogRecord, RecordEnd, Writer, cut_line
from ncclscope_agent.sources.log_records import OperationHead
from ncclscope_agent.sources.log_rows import Gathered
from ncclscope_agent.sources.log_stamp import StampLayout
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import Source
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

MAX_LINE_BYTES: Final = 65_536
"""NCCL's own lines have 1,024 bytes (2.8 to 2.28) or a little more; applications print longer ones."""
MAX_TEMPLATES: Final = 16_384
"""Templates that are remembered, about 350 bytes each. A rank of a large model uses up to a few thousand
buffers and sizes per iteration."""
LINES_PER_BATCH: Final = 20_000
"""Physical lines in one batch, at most: 480 kB of operation rows."""

_LEAST_LINE_BYTES: Final = 2048
_LONGEST_HEAD: Final = 1024
"""Lines known by their bytes are not measured again: head, opCount and tail stay below the least limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderStatistics:
    """What a reader remembers and how often a limit was met."""

    templates_sent: int
    templates_remembered: int
    template_lookup_resets: int
    """How often more than `max_templates` came, and the look-up started afresh. No row is lost by that."""


@dataclass(frozen=True, slots=True)
class KnownHead:
    """What stands in front of opCount, with the templates that were seen behind it."""

    operation: OperationHead
    templates: dict[bytes, int]
    """By the bytes behind opCount."""


class NcclLogReader:
    """Reads one log from bytes in any cuts; the same bytes give the same rows however they are cut.

    `begin` and `line` say where in the file the first byte stands, for resuming: bytes and physical lines
    in front of it. `zone_offset_ns` is what the log's local time is ahead of UTC. A line longer than
    `max_line_bytes` (2,048 at least) is skipped and counted. Nothing raises, whatever the bytes are.
    """

    def __init__(
        self,
        source: Source,
        *,
        zone_offset_ns: int = 0,
        begin: int = 0,
        line: int = 0,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_templates: int = MAX_TEMPLATES,
        lines_per_batch: int = LINES_PER_BATCH,
    ) -> None:
        self.source = source
        self._zone_offset_ns = zone_offset_ns
        self._max_line_bytes = max(max_line_bytes, _LEAST_LINE_BYTES)
        self._max_templates = max_templates
        self._lines_per_batch = lines_per_batch
        self._position = begin
        self._line = line
        self._cutter = LineCutter(self._max_line_bytes)

        self._strings = Strings()
        self._threads = Threads(self._strings)
        self._hosts = KnownHosts()
        self._layout: StampLayout | None = None
        self._stamp_length = 0
        self._templates_sent = 0
        self._lookup_resets = 0
        # Look-ups by the bytes of a line without its stamp; all bounded by max_templates.
        self._heads: dict[bytes, KnownHead] = {}
        self._remembered = 0
        self._tunings: dict[bytes, bytes] = {}
        self._writers: dict[bytes, Writer] = {}
        self._gathered = Gathered()

    @property
    def position(self) -> int:
        """Bytes of the file that were read to the end of their line."""
        return self._position

    @property
    def line(self) -> int:
        """Physical lines of the file that were read."""
        return self._line

    @property
    def unfinished_bytes(self) -> int:
        """Bytes behind `position` that were fed and wait for the end of their line."""
        return self._cutter.unfinished_bytes

    def statistics(self) -> ReaderStatistics:
        """What is remembered now."""
        return ReaderStatistics(
            templates_sent=self._templates_sent,
            templates_remembered=self._remembered,
            template_lookup_resets=self._lookup_resets,
        )

    def learn(self, data: bytes) -> None:
        """Learns the hosts of the file from its beginning, where reading resumes further on. Gives no rows."""
        for text in data.split(b"\n"):
            if len(text) <= self._max_line_bytes:
                cut_line(_trimmed(text), self._hosts)

    def feed(self, data: bytes, observed_at_ns: int | None = None) -> list[Batch]:
        """The batches of the lines that these bytes finish; none where they finish no line."""
        cut = self._cutter.feed(data)
        batches: list[Batch] = []
        for at in range(0, len(cut.lines), self._lines_per_batch):
            some = cut.lines[at : at + self._lines_per_batch]
            size = sum(map(len, some)) + len(some) + (cut.first_line_excess if at == 0 else 0)
            self._read_lines(some)
            batches.append(self._batch(self._position + size, observed_at_ns, is_last=False))
        return batches

    def flush(self, observed_at_ns: int | None = None) -> list[Batch]:
        """The last batch: the file is at its end, and a last line without a newline is read if it is whole."""
        end = self._position + self._cutter.unfinished_bytes
        last = self._cutter.take_unfinished()
        if last is not None:
            self._line += 1
            self._read_unterminated(last)
        return [self._batch(end, observed_at_ns, is_last=True)]

    # Lines

    def _read_lines(self, lines: Sequence[bytes]) -> None:
        """Reads whole physical lines: those whose bytes are known here, the others by `_read_line`."""
        gathered = self._gathered
        add_template, add_line = gathered.templates.append, gathered.lines.append
        add_op_count, add_stamp = gathered.op_counts.append, gathered.times.stamps.append
        find_head, tunings = self._heads.get, self._tunings
        skip = self._stamp_length
        number = before_first = self._line
        for number, text in enumerate(lines, before_first + 1):
            before, mark, after = text.partition(b": opCount ")
            if mark:
                head = find_head(before[skip:])
                if head is not None:
                    op_count, _, tail = after.partition(b" ")
                    template = head.templates.get(tail)
                    if template is None:
                        template = self._new_template(head, tail)
                    if template is not None:
                        add_template(template)
                        add_line(number)
                        add_op_count(op_count)
                        if skip:
                            add_stamp(before[:skip])
                        continue
            elif text[skip:] in tunings:
                gathered.tunings.append(tunings[text[skip:]])
                gathered.tuning_lines.append(number)
                continue
            self._line = number
            self._read_line(text)
            skip = self._stamp_length
        self._line = number

    def _new_template(self, head: KnownHead, tail: bytes) -> int | None:
        """The template of a tail not seen before behind this head; None where it must be read with care."""
        found = log_lines.OPERATION_TAIL.fullmatch(tail)
        if found is None:
            return None
        packed = log_records.pack_template(head.operation, found)
        if packed is None:
            return None
        if self._remembered >= self._max_templates:
            self._forget()
        index = self._add_template(packed)
        head.templates[tail] = index
        self._remembered += 1
        return index

    def _add_template(self, packed: bytes) -> int:
        self._gathered.template_rows.append(packed)
        self._templates_sent += 1
        return self._templates_sent - 1

    def _forget(self) -> None:
        """Starts the look-ups afresh; templates that were sent stay valid."""
        for head in self._heads.values():
            head.templates.clear()
        self._remembered = 0
        self._lookup_resets += 1

    # One line

    def _read_line(self, text: bytes) -> None:
        """Reads a physical line that is not known by its bytes."""
        if len(text) > self._max_line_bytes:
            self._gathered.skipped["too_long"] += 1
            return
        if self._read_known_writer(text):
            return
        text = text.lstrip(b"\0")
        line = _trimmed(text)
        if b"NCCL " not in line:
            self._skip_text(line)
        elif log_lines.MARKER.search(line) is None:
            self._read_bare(line)
        else:
            self._read_records(text, line, RecordEnd.LINE)

    def _read_unterminated(self, text: bytes) -> None:
        """Reads a last line without a newline: it may have been cut anywhere."""
        if len(text) > self._max_line_bytes:
            self._gathered.skipped["too_long"] += 1
            return
        before, mark, after = text.partition(b": opCount ")
        head = self._heads.get(before[self._stamp_length :])
        if mark and head is not None and after.partition(b" ")[2] in head.templates:
            self._line -= 1
            self._read_lines([text])  # equal to a line that was whole, so it is whole
            return
        line = _trimmed(text)
        if log_lines.MARKER.search(line) is None:
            self._read_bare(line)
        else:
            self._read_records(text, line, RecordEnd.UNSURE)

    def _read_known_writer(self, text: bytes) -> bool:
        """Reads a line of one record whose prefix is known; False where there is more to it."""
        at = text.find(b" NCCL INFO ")
        if at < 0:
            return False
        writer = self._writers.get(text[self._stamp_length : at])
        if writer is None or text.find(b"NCCL ", at + 11) >= 0:
            return False
        stamp = log_stamp.AT_START.match(text) if self._stamp_length else None
        if self._stamp_length and (stamp is None or stamp.end() != self._stamp_length):
            return False
        record = LogRecord(
            writer=writer,
            level=b"INFO",
            message=_trimmed(text[at + 11 :]),
            end=RecordEnd.LINE,
            begin=0,
            message_at=at + 11,
            stamp=stamp,
            is_clean=True,
        )
        self._read_record(text, record)
        return True

    def _read_records(self, text: bytes, line: bytes, end: RecordEnd) -> None:
        cut = cut_line(line, self._hosts, end)
        if cut.lost:
            self._gathered.skipped["torn" if log_lines.has_fragment(line) else "no_prefix"] += cut.lost
        elif log_lines.has_fragment(cut.rest):
            self._gathered.skipped["torn"] += 1
        for record in cut.records:
            self._read_record(text, record)
            if len(cut.records) == 1 and record.is_clean and record.end is RecordEnd.LINE and not cut.lost:
                self._remember_writer(text, record)

    def _remember_writer(self, text: bytes, record: LogRecord) -> None:
        """Remembers a clean prefix by its bytes, where these will recur."""
        if record.level != b"INFO" or _stamp_length(record) != self._stamp_length or not _is_lookup_form(record):
            return
        if len(self._writers) >= self._max_templates:
            self._writers.clear()
        self._writers[text[self._stamp_length : record.message_at - len(b" NCCL INFO ")]] = record.writer

    def _skip_text(self, line: bytes) -> None:
        self._gathered.skipped["torn" if log_lines.has_fragment(line) else "not_nccl"] += 1

    def _read_bare(self, line: bytes) -> None:
        """Reads a line without a prefix: a version line of NCCL up to 2.21, or text."""
        at = line.find(b"NCCL version ")
        before = line[: max(at, 0)]
        stamp = log_stamp.AT_END.search(before[-log_stamp.LONGEST :])
        if stamp is not None:
            before = before[: len(before) - len(stamp[0])]
        seen = []
        if at >= 0 and len(before) <= 256 and log_lines.LAUNCHER_TAG.fullmatch(before):
            seen = log_records.versions(line[at:], self._line, None)
        if not seen:
            self._skip_text(line)
            return
        self._gathered.versions += seen
        self._gathered.understood["version"] += len(seen)

    # One record

    def _read_record(self, text: bytes, record: LogRecord) -> None:
        """Reads one record by the first family that it is of, and counts it."""
        if record.level == b"CALL":
            is_call = log_lines.CALL.match(record.message) is not None
            self._count(is_call, "call", "torn")
        elif b": opCount " in record.message[:96]:
            self._read_operation(text, record)
        elif record.level != b"INFO":
            self._gathered.skipped["other_nccl"] += 1
        elif not (self._read_tuning(text, record) or self._read_event(record) or self._read_version(record)):
            self._skip_record(record)

    def _count(self, is_understood: bool, family: str, reason: str) -> None:
        if is_understood:
            self._gathered.understood[family] += 1
        else:
            self._gathered.skipped[reason] += 1

    def _skip_record(self, record: LogRecord) -> None:
        is_torn = (
            record.end is not RecordEnd.LINE
            or log_lines.has_fragment(record.message)
            or log_lines.TUNING_FRAGMENT.search(record.message) is not None
        )
        self._gathered.skipped["torn" if is_torn else "other_nccl"] += 1

    def _read_operation(self, text: bytes, record: LogRecord) -> None:
        message = record.message
        head = log_lines.OPERATION_HEAD.match(message)
        tail = log_lines.OPERATION_TAIL.match(message, head.end()) if head else None
        if head is None or tail is None or not log_records.is_whole_operation(tail, message, record.end):
            self._gathered.skipped["torn"] += 1
            return
        operation_head = self._operation_head(record.writer, head[1])
        packed = log_records.pack_template(operation_head, tail)
        if packed is None:
            self._gathered.skipped["out_of_range"] += 1
            return
        template = self._add_template(packed)
        time_ns = NO_TIME_NS if record.stamp is None else log_stamp.stamp_ns(record.stamp, self._zone_offset_ns)
        self._gathered.add_operation(template, self._line, head[2], time_ns, self._stamp_length)
        if record.is_clean and record.end is RecordEnd.LINE and _is_lookup_form(record):
            self._remember_operation(text, record, operation_head, template)

    def _operation_head(self, writer: Writer, name: bytes) -> OperationHead:
        return OperationHead(
            thread=self._threads.index(writer.host, writer.pid, writer.tid),
            device=NO_NUMBER if writer.device is None else writer.device,
            op=log_records.operation_code(name),
            op_name=self._strings.index(name.decode("ascii", "replace")),
        )

    def _remember_operation(self, text: bytes, record: LogRecord, head: OperationHead, template: int) -> None:
        """Remembers a clean operation line by its bytes without stamp and opCount."""
        self._use_layout_of(record)
        before, _, after = text.partition(b": opCount ")
        if len(before) > _LONGEST_HEAD:
            return
        if self._remembered >= self._max_templates:
            self._forget()
        if len(self._heads) >= self._max_templates:
            self._heads.clear()
            self._remembered = 0
        known = self._heads.setdefault(before[self._stamp_length :], KnownHead(head, {}))
        known.templates[after.partition(b" ")[2]] = template
        self._remembered += 1

    def _use_layout_of(self, record: LogRecord) -> None:
        """Expects the stamps of the next lines to have the form of this operation line's."""
        if _stamp_length(record) == self._stamp_length:
            return
        self._settle_times()
        self._layout = StampLayout(record.stamp, self._zone_offset_ns) if record.stamp else None
        self._stamp_length = _stamp_length(record)

    def _settle_times(self) -> None:
        if self._layout is not None:
            self._gathered.settle_times(self._layout, self._zone_offset_ns)

    def _read_tuning(self, text: bytes, record: LogRecord) -> bool:
        if b" Bytes -> " not in record.message[:128]:
            return False
        writer = record.writer
        packed = log_records.pack_tuning(self._threads.index(writer.host, writer.pid, writer.tid), record.message)
        if packed is None:
            return False
        self._gathered.tunings.append(packed)
        self._gathered.tuning_lines.append(self._line)
        if record.is_clean and record.end is RecordEnd.LINE and _stamp_length(record) == self._stamp_length:
            if len(self._tunings) >= self._max_templates:
                self._tunings.clear()
            self._tunings[text[self._stamp_length :]] = packed
        return True

    def _read_event(self, record: LogRecord) -> bool:
        if b"comm 0x" not in record.message[:96]:
            return False
        time_ns = None
        if record.stamp is not None:
            stamp_ns = log_stamp.stamp_ns(record.stamp, self._zone_offset_ns)
            time_ns = None if stamp_ns == NO_TIME_NS else stamp_ns
        event = log_records.communicator_event(record.writer, record.message, self._line, time_ns)
        if event is None:
            return False
        self._gathered.communicators.append(event)
        self._gathered.understood["init"] += 1
        return True

    def _read_version(self, record: LogRecord) -> bool:
        if record.end is not RecordEnd.LINE or not record.message.startswith(b"NCCL version "):
            return False
        seen = log_records.versions(record.message, self._line, record.writer)
        self._gathered.versions += seen
        self._gathered.understood["version"] += len(seen)
        return bool(seen)

    # Batches

    def _batch(self, end: int, observed_at_ns: int | None, *, is_last: bool) -> Batch:
        self._settle_times()
        gathered, self._gathered = self._gathered, Gathered()
        begin, self._position = self._position, end
        operations = gathered.operations()
        return Batch(
            source=self.source,
            begin=begin,
            end=end,
            end_line=self._line,
            is_last=is_last,
            observed_at_ns=observed_at_ns,
            strings=self._strings.take_new(),
            threads=self._threads.take_new(),
            operation_templates=gathered.new_templates(),
            operations=operations,
            tunings=gathered.tuning_rows(),
            communicators=tuple(gathered.communicators),
            versions=tuple(gathered.versions),
            counts=gathered.counts(len(operations)),
        )


def _trimmed(text: bytes) -> bytes:
    """The line without a carriage return, and without the zeros that a truncated file is filled up with."""
    return text.strip(b"\0").rstrip(b"\r")


def _stamp_length(record: LogRecord) -> int:
    """Bytes of a stamp at the very beginning of the line, else 0."""
    stamp = record.stamp
    return len(stamp["stamp"]) if stamp is not None and stamp.start() == 0 else 0


def _is_lookup_form(record: LogRecord) -> bool:
    """Whether the line without its first `stamp length` bytes recurs: no stamp further inside."""
    return record.stamp is None or record.stamp.start() == 0
