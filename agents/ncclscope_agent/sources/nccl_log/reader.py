"""NCCL debug logs to batches.

Scope: what `NCCL_DEBUG=INFO` prints, NCCL 2.4 to 2.30, RCCL, and forks that decorate the prefix; one
process or many in a file, behind any launcher's tags, with or without time stamps. Read are operations
(the COLL line), the life of communicators, TUNING lines, versions and calls; other lines of NCCL are counted.
The forms and their sources are in `operation_lines.py`, `line_families.py` and `docs/formats.md`.

How it is fast: a line is cut at its opCount into what recurs (who, what, buffers, stream) and what does
not (stamp, opCount). Both recurring parts are looked up as bytes (`known_lines.py`); only what was never seen
is parsed. If whole iterations recur, their lines are not even looked up (`recurring_lines.py`). Stamps,
opCounts, and buffers and counts that never recur are read thousands at a time (`text_columns.py`). Records are
read by family in `record_reader.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ncclscope_agent.sources.lines import HOLE, LineReader
from ncclscope_agent.sources.nccl_log import operation_lines, prefix, stamps
from ncclscope_agent.sources.nccl_log.batches import NO_NEWS, Gathered, News, TextBatch, batches_of
from ncclscope_agent.sources.nccl_log.known_lines import KnownHead, KnownLines
from ncclscope_agent.sources.nccl_log.prefix import KnownHosts, LogRecord, RecordEnd, Unwrapped, Unwrapper, cut_line
from ncclscope_agent.sources.nccl_log.record_reader import RecordReader, is_lookup_form, stamp_length
from ncclscope_agent.sources.nccl_log.recurring_lines import LEAST_LINE_BYTES, Recurrence
from ncclscope_agent.sources.nccl_log.stamps import Clock
from ncclscope_agent.sources.nccl_log.torn_records import TornRecords
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import Source

MAX_LINE_BYTES: Final = 65_536
"""NCCL's own lines have 1,024 bytes (2.8 to 2.28) or a little more; applications print longer ones."""
MAX_TEMPLATES: Final = 16_384
"""Templates that are remembered, about 350 bytes each. A rank of a large model uses up to a few thousand
buffers and sizes per iteration."""
LINES_PER_BATCH: Final = 20_000
"""Physical lines in one batch, at most: 480 kB of operation rows."""

_LEAST_LINE_BYTES: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderStatistics:
    """Sizes of a reader's look-ups, and how often a limit was met."""

    templates_sent: int
    templates_remembered: int
    template_lookup_resets: int
    """Times that more than `max_templates` came and the look-up was emptied. No row is lost by that."""
    lines_in_iterations: int
    """Lines that were read together, since they recurred in the order of an iteration."""


class NcclLogReader(LineReader):
    """Reads one log from bytes in any cuts; the same bytes give the same rows however they are cut.

    `begin` and `line` say where in the file the first byte stands, for resuming: bytes and physical lines
    in front of it. `zone_offset_ns` is what the log's local time is ahead of UTC, `written_near_ns` a time within two
    weeks of its stamps, if one is known: it gives a missing year (`stamp_forms.py`). A line longer than
    `max_line_bytes` (2,048 at least) is skipped and counted. Nothing raises, whatever the bytes are.
    """

    def __init__(
        self,
        source: Source,
        *,
        zone_offset_ns: int = 0,
        written_near_ns: int | None = None,
        begin: int = 0,
        line: int = 0,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_templates: int = MAX_TEMPLATES,
        lines_per_batch: int = LINES_PER_BATCH,
    ) -> None:
        super().__init__(source, begin=begin, line=line, max_line_bytes=max(max_line_bytes, _LEAST_LINE_BYTES))
        self._lines_per_batch = lines_per_batch
        self._unwrapper = Unwrapper(self._max_line_bytes)
        self._hosts = KnownHosts()
        self._known = KnownLines(max_templates)
        self._torn = TornRecords(self._known, self._hosts)
        self._records = RecordReader(self._known, clock=Clock(zone_offset_ns, written_near_ns))
        self._recurrence = Recurrence(self._known)
        self._lines_in_iterations = 0
        self._has_read_other = False
        """Since the last batch a line was read that was not known by its bytes: there may be news."""

    def statistics(self) -> ReaderStatistics:
        """Sizes and counts as of now."""
        return ReaderStatistics(
            templates_sent=self._records.templates.size,
            templates_remembered=self._known.templates,
            template_lookup_resets=self._known.resets,
            lines_in_iterations=self._lines_in_iterations,
        )

    @property
    def has_read_operations(self) -> bool:
        """Whether a line of an operation was read: the file is a log of NCCL, whatever else it holds."""
        return self._records.templates.size > 0

    def watch_unknown(self, on_unknown: Callable[[bytes], None]) -> None:
        """From now on, calls this with level and message of each line without a family: it may be a new form."""
        self._records.others.on_unknown = on_unknown

    def set_zone(self, offset_ns: int) -> None:
        """From the next bytes on, the log's local time is this far ahead of UTC."""
        self._records.set_zone(offset_ns)

    def learn(self, data: bytes) -> None:
        """Learns the hosts of the file from its beginning, if reading resumes further on. Gives no rows."""
        unwrapper = Unwrapper(self._max_line_bytes)
        for text in data.split(b"\n"):
            if len(text) <= self._max_line_bytes:
                unwrapped = unwrapper.unwrap(text)
                cut_line(_trimmed(unwrapped.text if unwrapped else text), self._hosts)

    def ingest_bytes(self, data: bytes, observed_at_ns: int | None = None) -> list[Batch]:
        """The batches of the lines that these bytes finish; none if they finish no line."""
        return batches_of(self.read(data, observed_at_ns))

    def finish(self, observed_at_ns: int | None = None) -> list[Batch]:
        """The last batch: the file is at its end, and a last line without a newline is read if it is whole."""
        return batches_of([self.read_last(observed_at_ns)])

    def read(self, data: bytes, observed_at_ns: int | None = None) -> list[TextBatch]:
        """The same as `ingest_bytes`, for numbers to be read together with those of other logs."""
        fed_to = self._position + self._cutter.unfinished_bytes + len(data)
        if self._read_recurring(data):
            return [self._batch(fed_to - self._cutter.unfinished_bytes, observed_at_ns, is_last=False)]
        cut = self._cutter.ingest_bytes(data)
        whole_to = fed_to - self._cutter.unfinished_bytes
        read_lines = self._read_lines
        if HOLE in data or (cut.lines and HOLE in cut.lines[0]):
            read_lines = self._read_lines_with_holes
        batches: list[TextBatch] = []
        for at in range(0, len(cut.lines), self._lines_per_batch):
            some = cut.lines[at : at + self._lines_per_batch]
            excess = cut.first_line_excess if at == 0 else 0
            is_rest = at + len(some) == len(cut.lines)
            end = whole_to if is_rest else self._position + sum(map(len, some)) + len(some) + excess
            read_lines(some)
            self._add_excess(some[0], excess)
            self._learn_recurrence(len(some))
            batches.append(self._batch(end, observed_at_ns, is_last=False))
        return batches

    def read_last(self, observed_at_ns: int | None = None) -> TextBatch:
        """The same as `finish`, for numbers to be read together with those of other logs."""
        end = self._position + self._cutter.unfinished_bytes
        last = self._cutter.drain_unfinished()
        if last is not None:
            self._line += 1
            self._read_unterminated(last)
            self._add_excess(last, end - self._position - len(last))
        return self._batch(end, observed_at_ns, is_last=True)

    # Lines

    def _read_recurring(self, data: bytes) -> bool:
        """Reads all lines that these bytes finish, if they are those of an iteration that recurs."""
        if not self._recurrence.is_expecting or len(data) > self._lines_per_batch * LEAST_LINE_BYTES:
            return False
        gathered, stamp_length = self._records.gathered, self._records.stamp_length
        if stamp_length and not gathered.takes_joined_stamps:
            return False
        rows = self._recurrence.rows(self._cutter.whole_lines(data), stamp_length)
        if rows is None:
            return False
        self._cutter.pass_over(data)
        gathered.add_recurring(rows, self._line + 1)
        self._line += rows.lines
        self._lines_in_iterations += rows.lines
        return True

    def _learn_recurrence(self, lines: int) -> None:
        """Passes the operations of `lines` lines, which were read one by one, to `Recurrence.learn`."""
        gathered = self._records.gathered
        has_others = len(gathered.templates) != lines
        self._recurrence.learn(
            gathered.templates, gathered.op_counts, self._records.stamp_length, has_others=has_others
        )

    def _read_lines(self, lines: Sequence[bytes]) -> None:
        """Reads whole physical lines: those whose bytes are known here, the others by `_read_line`."""
        gathered, find_head, new_template = self._records.gathered, self._known.heads.get, self._records.new_template
        templates: list[int] = []
        others: list[int] = []
        add_template, add_op_count = templates.append, gathered.op_counts.append
        add_stamp, find_tuning, calls = gathered.times.stamps.append, self._known.tunings.get, self._known.calls
        skip = self._records.stamp_length
        stamp, behind_stamp = slice(skip), slice(skip, None)
        first = self._line + 1
        head: KnownHead | None = None
        latest = b""
        """The bytes of `head`: the next line's are compared with them sooner than they are looked up."""
        for text in lines:
            before, mark, after = text.partition(b": opCount ")
            if mark:
                if (beginning := before[behind_stamp]) != latest or head is None:
                    head, latest = find_head(beginning), beginning
                if head is not None:
                    op_count, _, tail = after.partition(b" ")
                    template = head.templates.get(tail)
                    if template is None:
                        template = new_template(head, tail)
                    if template is not None:
                        add_template(template)
                        add_op_count(op_count)
                        if skip:
                            add_stamp(before[stamp])
                        continue
            elif (tuning := find_tuning(text[behind_stamp])) is not None:
                number = first + len(templates) + len(others)
                gathered.tunings.append(tuning)
                gathered.tuning_lines.append(number)
                others.append(number)
                continue
            elif (known := text[behind_stamp]) in calls:
                number = first + len(templates) + len(others)
                call_mark = calls[known]
                gathered.calls += 1
                if call_mark is not None:
                    gathered.call_marks.append((call_mark[0], number, call_mark[1]))
                others.append(number)
                continue
            self._line = first + len(templates) + len(others)
            gathered.add_rows(templates, first, self._line, others)
            self._read_line(text)
            first = self._line + 1
            skip = self._records.stamp_length
            stamp, behind_stamp = slice(skip), slice(skip, None)
        self._line = first - 1 + len(templates) + len(others)
        gathered.add_rows(templates, first, self._line + 1, others)

    def _read_lines_with_holes(self, lines: Sequence[bytes]) -> None:
        """The same for lines some of which have a hole: none of these is known by its bytes."""
        for text in lines:
            if HOLE in text:
                self._line += 1
                self._read_line(text)
            else:
                self._read_lines([text])

    # One line

    def _read_line(self, text: bytes) -> None:
        """Reads a physical line that is not known by its bytes."""
        self._has_read_other = True
        if len(text) > self._max_line_bytes or HOLE in text:
            self._skip_overlong(text)
            return
        unwrapped = self._unwrapper.unwrap(text)
        if unwrapped is not None:
            self._read_unwrapped(unwrapped)
            return
        if self._torn.is_open and (joined := self._torn.join(_trimmed(text), self._line)) is not None:
            self._records.gathered.skipped["rejoined"] += 1
            self._line -= 1
            self._read_lines([joined])
            return
        if self._read_known_writer(text):
            return
        text = text.lstrip(b"\0")
        line = _trimmed(text)
        if b"CCL " not in line:
            self._skip_text(line)
        elif prefix.MARKER.search(line) is None:
            self._read_bare(line)
        else:
            self._read_records(text, line, RecordEnd.LINE)

    def _read_unwrapped(self, unwrapped: Unwrapped) -> None:
        """Reads a line that a launcher wrapped, as if it stood there by itself."""
        if unwrapped.left_out:
            self._records.gathered.skipped["repeated"] += unwrapped.left_out
        if unwrapped.is_part:
            self._records.gathered.skipped["continued"] += 1
        else:
            self._line -= 1
            self._read_lines([unwrapped.text])

    def _read_unterminated(self, text: bytes) -> None:
        """Reads a last line without a newline: it may have been cut anywhere."""
        if len(text) > self._max_line_bytes or HOLE in text:
            self._skip_overlong(text)
            return
        before, mark, after = text.partition(b": opCount ")
        head = self._known.heads.get(before[self._records.stamp_length :])
        if mark and head is not None and after.partition(b" ")[2] in head.templates:
            self._line -= 1
            self._read_lines([text])  # equal to a line that was whole, so it is whole
            return
        line = _trimmed(text)
        if prefix.MARKER.search(line) is None:
            self._read_bare(line, is_whole=False)
        else:
            self._read_records(text, line, RecordEnd.UNSURE)

    def _skip_overlong(self, text: bytes) -> None:
        """Counts a line that is too long, or that has a hole: both its ends are torn then."""
        is_released = HOLE in text
        self._records.tear(self._line)
        self._records.gathered.skipped["released" if is_released else "too_long"] += 1
        self._records.gathered.released_bytes += len(text) * is_released

    def _add_excess(self, text: bytes, excess: int) -> None:
        """Counts what a line in whose place `text` stands had beyond that, if it has a hole."""
        if excess and HOLE in text:
            self._records.gathered.released_bytes += excess

    def _read_known_writer(self, text: bytes) -> bool:
        """Reads a line of one record whose prefix is known; False if there is more to it."""
        at = text.find(b" NCCL INFO ")
        if at < 0:
            return False
        writer = self._known.writers.get(text[self._records.stamp_length : at])
        if writer is None or text.find(b"NCCL ", at + 11) >= 0:
            return False
        stamp = stamps.AT_START.match(text) if self._records.stamp_length else None
        if self._records.stamp_length and (stamp is None or stamp.end() != self._records.stamp_length):
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
        self._records.read(text, record, self._line)
        return True

    def _read_records(self, text: bytes, line: bytes, end: RecordEnd) -> None:
        cut = cut_line(line, self._hosts, end)
        if cut.lost or operation_lines.has_fragment(cut.rest):
            self._records.tear(self._line)
            self._hosts.has_tears |= bool(cut.records)  # else it may be a host that is not certain yet
        if cut.lost:
            torn = cut.lost if operation_lines.has_fragment(line) else cut.torn
            lost = {"torn": torn, "no_prefix": cut.lost - torn}
            self._records.gathered.add_skipped({reason: amount for reason, amount in lost.items() if amount})
        elif operation_lines.has_fragment(cut.rest):
            self._records.gathered.skipped["torn"] += 1
        records = cut.records
        if self._torn.open(line, cut, self._line, self._records.stamp_length):
            self._records.tear(self._line)
            records = records[-1:]
        for record in records:
            self._records.read(text, record, self._line)
            if len(cut.records) == 1 and record.is_clean and record.end is RecordEnd.LINE and not cut.lost:
                self._remember_writer(text, record)

    def _remember_writer(self, text: bytes, record: LogRecord) -> None:
        """Remembers a clean prefix by its bytes, if these will recur."""
        skip = self._records.stamp_length
        if record.level == b"INFO" and stamp_length(record) == skip and is_lookup_form(record):
            self._known.add_writer(text[skip : record.message_at - len(b" NCCL INFO ")], record.writer)

    def _skip_text(self, line: bytes, *, is_whole: bool = True) -> None:
        if self._records.others.read_text(line, self._line, self._records.gathered, is_whole=is_whole):
            return
        if operation_lines.has_fragment(line):
            self._records.tear(self._line)
            self._hosts.has_tears = True
            self._records.gathered.skipped["torn"] += 1
        else:
            self._records.gathered.skipped["not_nccl"] += 1

    def _read_bare(self, line: bytes, *, is_whole: bool = True) -> None:
        """Reads a line without a prefix: a version line of NCCL up to 2.21, or text."""
        at = line.find(b"CCL version ") - 1
        before = line[: max(at, 0)]
        stamp = stamps.in_front(before, len(before)) or stamps.in_other_form(before, len(before))
        if stamp is not None:
            before = before[: len(before) - len(stamp[0])]
        seen = []
        if at >= 0 and len(before) <= 256 and prefix.LAUNCHER_TAG.fullmatch(before):
            seen = operation_lines.versions(line[at:], self._line, None)
        if not seen:
            self._skip_text(line, is_whole=is_whole)
            return
        self._records.gathered.versions += seen
        self._records.gathered.understood["version"] += len(seen)

    # Batches

    def _batch(self, end: int, observed_at_ns: int | None, *, is_last: bool) -> TextBatch:
        if is_last:
            self._records.others.finish()
        gathered = self._records.drain_gathered()
        has_news = is_last or self._has_read_other or self._records.templates.has_new
        begin, self._position = self._position, end
        return TextBatch(
            source=self.source,
            begin=begin,
            end=end,
            end_line=self._line,
            is_last=is_last,
            observed_at_ns=observed_at_ns,
            news=self._drain_news(gathered, is_last=is_last) if has_news else NO_NEWS,
            gathered=gathered,
        )

    def _drain_news(self, gathered: Gathered, *, is_last: bool) -> News:
        self._has_read_other = False
        gathered.add_skipped(self._records.others.drain_dropped())
        gathered.add_skipped(self._torn.drain_dropped(is_last=is_last))
        return News(
            strings=self._records.strings.drain_new(),
            threads=self._records.threads.drain_new(),
            operation_templates=self._records.templates.drain_new(),
            topologies=self._records.others.topology.drain_blocks(),
            tuning_tables=self._records.others.tuning_table.drain_tables(),
        )


def _trimmed(text: bytes) -> bytes:
    """The line without a carriage return, and without the zeros that a truncated file is filled up with."""
    return text.strip(b"\0").rstrip(b"\r")
