"""Reads one record of a log by the family that it is of, into what is gathered for the next batch.

Operations, tuning, life cycle and versions give columns and records of their own. Any other line becomes a fact
(`ncclscope_wire/facts.py`), a part of a system block or tuning table, or is counted under its family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ncclscope_agent.sources.dictionaries import LOOKUP_LIMIT, Strings, Templates, Threads
from ncclscope_agent.sources.nccl_log import line_families, operation_lines, stamps
from ncclscope_agent.sources.nccl_log.batches import Gathered
from ncclscope_agent.sources.nccl_log.counted_lines import MATRIX_HEADER
from ncclscope_agent.sources.nccl_log.known_lines import KnownHead, KnownLines
from ncclscope_agent.sources.nccl_log.line_form import FamilyRead
from ncclscope_agent.sources.nccl_log.operation_lines import OperationHead
from ncclscope_agent.sources.nccl_log.prefix import LogRecord, RecordEnd, Writer
from ncclscope_agent.sources.nccl_log.stamps import Clock
from ncclscope_agent.sources.nccl_log.topology_lines import TopologyLines
from ncclscope_agent.sources.nccl_log.tuning_table import TuningTable
from ncclscope_wire import tables
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_PATHS: Final = (b"GPU/", b"NET/", b"CPU/", b"NVS/")


class OtherRecords:
    """Reads other records of one log, in their order."""

    def __init__(self) -> None:
        self.topology = TopologyLines()
        self.tuning_table = TuningTable()
        self.on_unknown: Callable[[bytes], None] | None = None
        """Called with level and message of each line without a family, if somebody looks for new forms."""
        self._matrix_of: Writer | None = None
        """Writer of the title of a matrix in the line before; its rows have no prefix."""

    def read(self, record: LogRecord, line: int, logged_at_ns: int | None, gathered: Gathered) -> None:
        """Reads one record into what is gathered, and counts it under its family or the reason it was left out."""
        self._matrix_of = None
        if record.end is not RecordEnd.LINE:
            self.tear()
        elif self._read_block(record, line, gathered):
            return
        found = line_families.read_record(record, line, logged_at_ns)
        if found is None:
            self._skip(record, line, logged_at_ns, gathered)
        else:
            _add(found, gathered)

    def tear(self) -> None:
        """A line was torn: blocks that are open may have lost it."""
        self.topology.tear()
        self.tuning_table.tear()

    def finish(self) -> None:
        """The log is at its end: blocks that are open stay unfinished."""
        self.topology.finish()
        self.tuning_table.finish()

    def drain_dropped(self) -> Counter[str]:
        """Lines of blocks that were dropped since the last call, by reason."""
        blocks, tables = self.topology.drain_dropped(), self.tuning_table.drain_dropped()
        return blocks + tables if tables else blocks

    def read_text(self, text: bytes, line: int, gathered: Gathered, *, is_whole: bool) -> bool:
        """Reads a line without a prefix, if it is one that is known; the last line may not be whole."""
        found = None
        if self._matrix_of is not None:
            if MATRIX_HEADER.fullmatch(text) is not None:
                gathered.understood["function_matrix"] += 1
                return True
            found = line_families.read_matrix_row(text)
            if found is None:
                self._matrix_of = None
        if found is None:
            found = line_families.read_torch(text, line) or line_families.read_program(text, line)
        if found is None or not (is_whole or found.family.is_closed):
            return False
        _add(found, gathered)
        return True

    def _skip(self, record: LogRecord, line: int, logged_at_ns: int | None, gathered: Gathered) -> None:
        if _is_torn(record):
            gathered.skipped["torn"] += 1
            return
        if not record.message.strip():
            gathered.skipped["empty"] += 1
            return
        if record.level == b"WARN":
            gathered.skipped["other_warning"] += 1
            gathered.facts.append(line_families.other_warning(record, line, logged_at_ns))
        else:
            gathered.skipped["other_nccl"] += 1
        if self.on_unknown is not None:
            self.on_unknown(record.level + b" " + record.message)

    def _read_block(self, record: LogRecord, line: int, gathered: Gathered) -> bool:
        """Reads a line that belongs together with its neighbours."""
        message = record.message
        if message.startswith(line_families.MATRIX_TITLE):
            self._matrix_of = record.writer
            gathered.understood["function_matrix"] += 1
        elif self.topology.ingest_line(record.writer, line, message):
            is_path = message.startswith(_PATHS) and b" :" in message[:48]
            gathered.understood["paths" if is_path else "topology"] += 1
        elif self.tuning_table.ingest_line(record.writer, line, message):
            gathered.understood["tuning_table"] += 1
        else:
            return False
        return True


def _add(found: FamilyRead, gathered: Gathered) -> None:
    if not found.is_in_bounds:
        gathered.skipped["out_of_range"] += 1
        return
    gathered.understood[found.family.name] += 1
    if found.fact is not None:
        gathered.facts.append(found.fact)


def _is_torn(record: LogRecord) -> bool:
    return (
        record.end is not RecordEnd.LINE
        or operation_lines.has_fragment(record.message)
        or operation_lines.TUNING_FRAGMENT.search(record.message) is not None
    )


_LONGEST_HEAD: Final = 1024
"""Lines known by their bytes are not measured again: head, opCount and tail stay below the least limit."""

_GROUP_CALLS: Final = {b"ncclGroupStart()": tables.GROUP_START, b"ncclGroupEnd()": tables.GROUP_END}
"""*Source:* NCCL `src/group.cc`: the first is printed when the group is open, the second when all of it is launched."""


class RecordReader:
    """Reads the records of one log, in their order; keeps its dictionaries, and makes clean lines known.

    `clock` says what the log's stamps leave out.
    """

    def __init__(self, known: KnownLines, *, clock: Clock) -> None:
        self.gathered = Gathered(None, clock)
        self.strings = Strings()
        self.threads = Threads(self.strings)
        self.templates = Templates()
        self.others = OtherRecords()
        self.stamp_length = 0
        """Bytes of the stamp with which the latest operation lines began."""
        self._streams = operation_lines.StreamsOfProcesses(LOOKUP_LIMIT)
        self._calling: set[tuple[str, int]] = set()
        """Processes of which CALL lines were read."""
        self._known = known
        self._clock = clock

    def set_zone(self, offset_ns: int) -> None:
        """From the next record on, local time is this far ahead of UTC; to be called when nothing is gathered."""
        self._clock = replace(self._clock, zone_offset_ns=offset_ns)
        self.gathered, self.stamp_length = Gathered(None, self._clock), 0

    def drain_gathered(self) -> Gathered:
        """Rows and records since the last call; their stamps and opCounts are still text."""
        gathered, self.gathered = self.gathered, Gathered(self.gathered.layout, self._clock)
        return gathered

    def read(self, text: bytes, record: LogRecord, line: int) -> None:
        """Reads one record by the first family that it is of, and counts it.

        `text` is the physical line of that number in which it stands.
        """
        if b": opCount " in record.message[:96]:
            self._read_operation(text, record, line)
        elif record.level != b"INFO" or not (
            self._read_tuning(text, record, line) or self._read_event(record, line) or self._read_version(record, line)
        ):
            understood = self.gathered.understood["call"]
            self.others.read(record, line, self._time_ns(record), self.gathered)
            if record.end is not RecordEnd.LINE:
                self.tear(line)
            elif self.gathered.understood["call"] > understood:
                self._mark_call(text, record, line)

    def tear(self, line: int) -> None:
        """A line was torn: what is open across lines may have lost it."""
        self.others.tear()
        if self._calling:
            self.gathered.call_marks.append((0, line, tables.CALLS_TORN))

    def new_template(self, head: KnownHead, tail: bytes) -> int | None:
        """The template of a tail not seen before behind this head; None if it must be read with care."""
        beginning, _, rest = tail.partition(operation_lines.AFTER_COUNT)
        like = head.rows.get(rest)
        if like is not None and operation_lines.BUFFERS_AND_COUNT.fullmatch(beginning) is not None:
            index = self.templates.add_like(like, beginning)
        else:
            found = operation_lines.OPERATION_TAIL.fullmatch(tail)
            packed = None if found is None else operation_lines.pack_template(head.operation, found)
            if found is None or packed is None:
                return None
            self._streams.add(head.operation.process, found)
            index = self.templates.add(packed)
            self._known.add_row(head, rest, packed)
        self._known.add_template(head, tail, index)
        return index

    def _mark_call(self, text: bytes, record: LogRecord, line: int) -> None:
        """Notes what a CALL line says about groups, and makes a clean one known by its bytes."""
        writer = record.writer
        thread = self.threads.index(writer.host, writer.pid, writer.tid)
        if (writer.host, writer.pid) not in self._calling:
            self._calling.add((writer.host, writer.pid))
            self.gathered.call_marks.append((thread, line, tables.CALLS_BEGIN))
        kind = _GROUP_CALLS.get(record.message)
        mark = None if kind is None else (thread, kind)
        if mark is not None:
            self.gathered.call_marks.append((thread, line, mark[1]))
        if record.is_clean and stamp_length(record) == self.stamp_length and is_lookup_form(record):
            self._known.add_call(text[self.stamp_length :], mark)

    def _read_operation(self, text: bytes, record: LogRecord, line: int) -> None:
        message = record.message
        head = operation_lines.OPERATION_HEAD.match(message)
        tail = operation_lines.OPERATION_TAIL.match(message, head.end()) if head else None
        is_whole = tail is not None and operation_lines.is_whole_operation(tail, message, record.end)
        if head is not None and not is_whole:
            tail = operation_lines.OPERATION_FIELDS.match(message, head.end())
        if not is_whole:
            self.tear(line)
        if head is None or tail is None:
            self.gathered.skipped["torn"] += 1
            return
        operation_head = self._operation_head(record.writer, head[1])
        if is_whole:
            self._streams.add(operation_head.process, tail)
            packed = operation_lines.pack_template(operation_head, tail)
        else:
            stream = self._streams.only_one(operation_head.process, tail)
            packed = operation_lines.pack_template(operation_head, tail, stream)
        if packed is None:
            self.gathered.skipped["out_of_range"] += 1
            return
        template = self.templates.add(packed)
        time_ns = self._time_ns(record)
        self.gathered.settle_times()
        self.gathered.add_operation(template, line, head[2], NO_TIME_NS if time_ns is None else time_ns)
        if is_whole and record.is_clean and record.end is RecordEnd.LINE and is_lookup_form(record):
            self._remember_operation(text, record, operation_head, template)

    def _operation_head(self, writer: Writer, name: bytes) -> OperationHead:
        return OperationHead(
            process=(writer.host, writer.pid),
            thread=self.threads.index(writer.host, writer.pid, writer.tid),
            device=NO_NUMBER if writer.device is None else writer.device,
            op=operation_lines.operation_code(name),
            op_name=self.strings.index(name.decode("ascii", "replace")),
        )

    def _remember_operation(self, text: bytes, record: LogRecord, head: OperationHead, template: int) -> None:
        """Remembers a clean operation line by its bytes without stamp and opCount."""
        self._use_layout_of(record)
        before, _, after = text.partition(b": opCount ")
        if len(before) <= _LONGEST_HEAD:
            known = self._known.head(before[self.stamp_length :], head)
            self._known.add_template(known, after.partition(b" ")[2], template)

    def _use_layout_of(self, record: LogRecord) -> None:
        """Expects the stamps of the next lines to have the form of this operation line's."""
        if stamp_length(record) == self.stamp_length:
            return
        self.gathered.layout = stamps.layout_of(record.stamp, self._clock) if record.stamp else None
        self.stamp_length = stamp_length(record)

    def _read_tuning(self, text: bytes, record: LogRecord, line: int) -> bool:
        if b" Bytes -> " not in record.message[:128]:
            return False
        writer = record.writer
        packed = operation_lines.pack_tuning(self.threads.index(writer.host, writer.pid, writer.tid), record.message)
        if packed is None:
            return False
        self.gathered.tunings.append(packed)
        self.gathered.tuning_lines.append(line)
        if record.is_clean and record.end is RecordEnd.LINE and stamp_length(record) == self.stamp_length:
            self._known.add_tuning(text[self.stamp_length :], packed)
        return True

    def _read_event(self, record: LogRecord, line: int) -> bool:
        if b"comm 0x" not in record.message[:96]:
            return False
        event = operation_lines.communicator_event(record.writer, record.message, line, self._time_ns(record))
        if event is None:
            return False
        self.gathered.communicators.append(event)
        self.gathered.understood["init"] += 1
        return True

    def _time_ns(self, record: LogRecord) -> int | None:
        if record.stamp is None:
            return None
        time_ns = stamps.stamp_ns(record.stamp, self._clock)
        if time_ns == NO_TIME_NS:
            self.gathered.skipped["time_unknown"] += 1
            return None
        return time_ns

    def _read_version(self, record: LogRecord, line: int) -> bool:
        if record.end is not RecordEnd.LINE or not record.message.startswith((b"NCCL version ", b"RCCL version ")):
            return False
        seen = operation_lines.versions(record.message, line, record.writer)
        self.gathered.versions += seen
        self.gathered.understood["version"] += len(seen)
        return bool(seen)


def stamp_length(record: LogRecord) -> int:
    """Bytes of a stamp at the very beginning of the line, else 0."""
    stamp = record.stamp
    return len(stamp["stamp"]) if stamp is not None and stamp.start() == 0 else 0


def is_lookup_form(record: LogRecord) -> bool:
    """Whether the line without its first `stamp length` bytes recurs: no stamp further inside."""
    return record.stamp is None or record.stamp.start() == 0
