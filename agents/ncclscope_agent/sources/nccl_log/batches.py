"""Rows gathered from a log since the last batch, and the batches that they become.

An agent that follows a node's logs gets a hundred lines of each at a time. Columns of so few rows cost by the step
and not by the row, the more so for a process whose code has left the caches while it slept. So readers leave stamps
and opCounts as text, and those of all files are read in one go.
"""

from __future__ import annotations

from array import array
from binascii import unhexlify
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_agent.sources.nccl_log import operation_lines, stamps
from ncclscope_agent.sources.nccl_log.recurring_lines import RecurringRows
from ncclscope_agent.sources.nccl_log.stamps import Clock, OtherLayout, StampLayout
from ncclscope_agent.sources.text_columns import read_hexadecimals
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch, Columns, no_rows
from ncclscope_wire.facts import Fact
from ncclscope_wire.records import CommunicatorEvent, Counts, Source, SourceGap, VersionSeen
from ncclscope_wire.terms import NO_TIME_NS
from ncclscope_wire.topology import TopologySeen, TuningTableSeen


class LoggedTimes:
    """The logged times of a batch's operation rows: some known, the last ones still stamps to be read together."""

    def __init__(self) -> None:
        self.stamps: list[bytes] = []
        """Stamps of the latest rows, all of one length; of each row since `settle`, or of none."""
        self._joined_rows = 0
        """Number of rows whose stamps `stamps` holds in one piece; 0 if each row has its own."""
        self._known = array("q")
        self._all: NDArray[np.int64] | None = None
        """The times of all rows, if they were read together."""

    @property
    def waiting(self) -> int:
        """Number of rows whose stamps have not been read yet."""
        return self._joined_rows or len(self.stamps)

    def add_joined(self, stamps: bytes, rows: int) -> None:
        """Adds the stamps of the first `rows` rows in one piece."""
        self.stamps.append(stamps)
        self._joined_rows = rows

    def add(self, time_ns: int, rows: int) -> None:
        """Sets the time of the row behind the first `rows`; no stamps wait."""
        self._pad(rows)
        self._known.append(time_ns)

    def doubts(self, times: NDArray[np.int64], clock: Clock) -> Counter[str]:
        """Looks again at the stamps that wait of which `times` does not know the time, and sets those it finds.

        Returns how many of them are no stamp but a torn piece of an operation line, or a stamp whose time cannot be
        known, by reason.
        """
        doubts = Counter[str]()
        for at in np.flatnonzero(times == NO_TIME_NS):
            stamp = self._stamp(int(at))
            found = stamps.in_front(stamp, len(stamp)) or stamps.in_other_form(stamp, len(stamp))
            if found is not None:
                times[at] = stamps.stamp_ns(found, clock)
                doubts["time_unknown"] += times[at] == NO_TIME_NS
            elif operation_lines.has_fragment(stamp):
                doubts["torn"] += 1
        return doubts

    def settle(self, times: NDArray[np.int64], rows: int) -> None:
        """Sets the times of the stamps that wait, which are those of the last of `rows` rows."""
        if self.waiting == rows:
            self._all = times
        else:
            self._pad(rows - self.waiting)
            self._known.frombytes(times.tobytes())
        self.stamps.clear()
        self._joined_rows = 0

    def column(self, rows: int) -> array[int] | memoryview:
        """The time of each row, an int64; NO_TIME_NS if its line had no stamp. No stamps wait."""
        if self._all is not None and len(self._all) == rows:
            return self._all.data
        self._pad(rows)
        return self._known

    def _stamp(self, at: int) -> bytes:
        if not self._joined_rows:
            return self.stamps[at]
        length = len(self.stamps[0]) // self._joined_rows
        return self.stamps[0][at * length : (at + 1) * length]

    def _pad(self, rows: int) -> None:
        if self._all is not None:
            self._known.frombytes(self._all.tobytes())
            self._all = None
        missing = rows - len(self._known)
        if missing:
            self._known.extend(_NO_TIME * missing)


_NO_TIME: Final = array("q", [NO_TIME_NS])
_FEW_ROWS: Final = 64
"""Fewer numbers are made faster one by one than as a column."""


class Gathered:
    """Rows, records and counts since the last batch. Appended to from the reader's inner loop."""

    def __init__(self, layout: StampLayout | OtherLayout | None, clock: Clock) -> None:
        self.layout = layout
        """The form of the stamps that wait."""
        self._clock = clock
        self.templates = array("I")
        self.lines = array("I")
        self.op_counts: list[bytes] = []
        self.op_count_digits = b""
        """Instead of `op_counts`: 16 digits of each row."""
        self.times = LoggedTimes()
        self.tunings: list[bytes] = []
        self.tuning_lines = array("I")
        self.call_marks: list[tuple[int, int, int]] = []
        """Thread, line and kind (tables.CALL_MARK)."""
        self.calls = 0
        """CALL lines that are known by their bytes."""
        self.communicators: list[CommunicatorEvent] = []
        self.versions: list[VersionSeen] = []
        self.facts: list[Fact] = []
        self.understood = defaultdict[str, int](int)
        self.skipped = defaultdict[str, int](int)
        self.released_bytes = 0
        """Of lines with a hole in them."""

    def add_rows(self, templates: list[int], begin: int, end: int, others: list[int]) -> None:
        """Notes the templates of operation rows and their lines, which are all between two but for `others`.

        Empties both lists. All else of the rows is added by the caller.
        """
        self.templates.fromlist(templates)
        for other in others:
            self._add_lines(begin, other)
            begin = other + 1
        self._add_lines(begin, end)
        templates.clear()
        others.clear()

    def _add_lines(self, begin: int, end: int) -> None:
        if end - begin < _FEW_ROWS:
            self.lines.extend(range(begin, end))
        else:
            self.lines.frombytes(np.arange(begin, end, dtype=np.uint32).tobytes())

    def add_operation(self, template: int, line: int, op_count: bytes, time_ns: int) -> None:
        """Adds one operation row; no stamps wait."""
        self.times.add(time_ns, len(self.templates))
        self.templates.append(template)
        self.lines.append(line)
        self.op_counts.append(op_count)

    @property
    def takes_joined_stamps(self) -> bool:
        """Whether the stamps of many rows can be added in one piece, if they have any."""
        return isinstance(self.layout, StampLayout)

    def add_recurring(self, rows: RecurringRows, first_line: int) -> None:
        """Adds all rows of a batch at once, whose lines follow each other."""
        self.templates.frombytes(rows.templates)
        self._add_lines(first_line, first_line + rows.lines)
        self.op_count_digits = rows.op_counts
        if rows.stamps:
            self.times.add_joined(rows.stamps, rows.lines)

    def settle_times(self) -> None:
        """Reads the stamps that wait, before stamps of another form come."""
        if self.times.stamps and self.layout is not None:
            self.set_times(self.layout.read(self.times.stamps))

    def set_times(self, times: NDArray[np.int64], *, are_known: bool = False) -> None:
        """Takes the times of the stamps that wait. `are_known`: none of them is NO_TIME_NS."""
        if not are_known:
            self.add_skipped(self.times.doubts(times, self._clock))
        self.times.settle(times, len(self.templates))

    def time_column(self) -> array[int] | memoryview:
        """The time of each operation row, an int64; NO_TIME_NS if its line had no stamp. No stamps wait."""
        return self.times.column(len(self.templates))

    def add_skipped(self, skipped: Mapping[str, int]) -> None:
        """Counts what was left out, by reason."""
        for reason, number in skipped.items():
            self.skipped[reason] += number

    def tuning_rows(self) -> Columns:
        """One row per TUNING line (TUNING_ROW), in the order of the file."""
        if not self.tunings:
            return no_rows(tables.TUNING_ROW)
        rows = np.frombuffer(bytearray().join(self.tunings), dtype=tables.TUNING_ROW)
        rows["line"] = np.frombuffer(self.tuning_lines, dtype=np.uint32)
        return rows

    def mark_rows(self) -> Columns:
        """Beginnings and ends of groups by CALL lines (CALL_MARK), in the order of the file."""
        return np.array(self.call_marks, dtype=tables.CALL_MARK) if self.call_marks else no_rows(tables.CALL_MARK)

    def gaps(self, name: str) -> tuple[SourceGap, ...]:
        """The gap that holes in the log `name` leave, if there were any."""
        if not self.released_bytes:
            return ()
        detail = (
            f"{name}: {self.released_bytes} bytes are not in the file any more: an agent with --release-logs gave "
            "their space back, or they were never written. Numbers of later lines count from what is left."
        )
        return (SourceGap(reason="released", amount=self.released_bytes, unit="bytes", detail=detail),)

    def counts(self, operations: int) -> Counts:
        """Counts of records that were read, by family, and left out, by reason."""
        understood = {family: number for family, number in self.understood.items() if number}
        if self.calls:
            understood["call"] = understood.get("call", 0) + self.calls
        for family, rows in (("operation", operations), ("tuning", len(self.tunings))):
            if rows:
                understood[family] = rows
        return Counts(understood=understood, skipped=dict(self.skipped))


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """New dictionary entries and finished blocks of a log; most batches of a log that is tailed have none."""

    strings: tuple[str, ...] = ()
    threads: Columns = field(default_factory=lambda: no_rows(tables.THREAD))
    operation_templates: Columns = field(default_factory=lambda: no_rows(tables.OPERATION_TEMPLATE))
    topologies: tuple[TopologySeen, ...] = ()
    tuning_tables: tuple[TuningTableSeen, ...] = ()


NO_NEWS: Final = News()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatch:
    """A `Batch` to be; its operations are in `gathered`, as text."""

    source: Source
    begin: int
    end: int
    end_line: int
    is_last: bool
    observed_at_ns: int | None
    news: News
    gathered: Gathered
    gaps: tuple[SourceGap, ...] = ()
    """Gaps that the follower of the log found; those inside the log are in `gathered`."""
    content_check: int | None = None
    """As `Batch.content_check`."""


def batches_of(read: Sequence[TextBatch | Batch]) -> list[Batch]:
    """These batches with their numbers read, in the same order; their operations are parts of one table."""
    together = [text.gathered for text in read if isinstance(text, TextBatch)]
    _settle_times(together)
    operations = iter(_operations(together))
    return [_batch(text, next(operations)) if isinstance(text, TextBatch) else text for text in read]


def _settle_times(together: Sequence[Gathered]) -> None:
    """Reads the stamps that still wait; those of one form in one go."""
    waiting: dict[tuple[bytes, Clock], list[Gathered]] = {}
    for gathered in together:
        if gathered.times.stamps and gathered.layout is not None:
            waiting.setdefault(gathered.layout.form, []).append(gathered)
    for alike in waiting.values():
        layout = alike[0].layout
        assert layout is not None, "stamps wait, and their form is not known"
        times = layout.read(list(chain.from_iterable(gathered.times.stamps for gathered in alike)))
        are_known = times.min() > NO_TIME_NS
        at = 0
        for gathered in alike:
            begin, at = at, at + gathered.times.waiting
            gathered.set_times(times[begin:at], are_known=are_known)


def _operations(together: Sequence[Gathered]) -> list[Columns]:
    """One row per operation line (OPERATION_ROW), in the order of the file, for each.

    A line known by its bytes but for an opCount that is no number was torn: it is counted there.
    """
    ends = list(accumulate(len(gathered.templates) for gathered in together))
    if not ends or not ends[-1]:
        return [no_rows(tables.OPERATION_ROW) for _ in together]
    rows = np.empty(ends[-1], dtype=tables.OPERATION_ROW)
    rows["template"] = np.frombuffer(b"".join([gathered.templates for gathered in together]), dtype=np.uint32)
    rows["line"] = np.frombuffer(b"".join([gathered.lines for gathered in together]), dtype=np.uint32)
    rows["logged_at_ns"] = np.frombuffer(b"".join([gathered.time_column() for gathered in together]), dtype=np.int64)
    rows["op_count"], good = _op_counts(together)
    parts = [rows[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return parts if good is None else _without_torn(together, parts, good)


def _op_counts(together: Sequence[Gathered]) -> tuple[NDArray[np.uint64], NDArray[np.bool_] | None]:
    """All opCounts, and which of them are numbers at all; None: all."""
    are_digits = [bool(gathered.op_count_digits) for gathered in together]
    if not any(are_digits):
        return read_hexadecimals(list(chain.from_iterable([gathered.op_counts for gathered in together])))
    digits = np.frombuffer(unhexlify(b"".join([gathered.op_count_digits for gathered in together])), dtype=">u8")
    texts = list(chain.from_iterable([gathered.op_counts for gathered in together]))
    if not texts:
        return digits, None
    is_text = np.repeat(np.logical_not(are_digits), [len(gathered.templates) for gathered in together])
    values, good = np.empty(len(is_text), dtype=np.uint64), np.ones(len(is_text), dtype=np.bool_)
    values[~is_text] = digits
    values[is_text], whole = read_hexadecimals(texts)
    if whole is None:
        return values, None
    good[is_text] = whole
    return values, good


def _without_torn(together: Sequence[Gathered], parts: Sequence[Columns], good: NDArray[np.bool_]) -> list[Columns]:
    whole: list[Columns] = []
    at = 0
    for gathered, part in zip(together, parts, strict=True):
        begin, at = at, at + len(part)
        whole.append(part[good[begin:at]])
        if torn := len(part) - len(whole[-1]):
            gathered.skipped["torn"] += torn
    return whole


def _batch(text: TextBatch, operations: Columns) -> Batch:
    gathered, news = text.gathered, text.news
    return Batch(
        source=text.source,
        begin=text.begin,
        end=text.end,
        end_line=text.end_line,
        is_last=text.is_last,
        content_check=text.content_check,
        observed_at_ns=text.observed_at_ns,
        strings=news.strings,
        threads=news.threads,
        operation_templates=news.operation_templates,
        operations=operations,
        tunings=gathered.tuning_rows(),
        call_marks=gathered.mark_rows(),
        communicators=tuple(gathered.communicators),
        versions=tuple(gathered.versions),
        facts=tuple(gathered.facts),
        topologies=news.topologies,
        tuning_tables=news.tuning_tables,
        gaps=(*gathered.gaps(text.source.name), *text.gaps),
        counts=gathered.counts(len(operations)),
    )
