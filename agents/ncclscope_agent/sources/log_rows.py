"""What was read of a log since the last batch, as the columns that the batch will carry."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_agent.sources import log_lines, log_stamp
from ncclscope_agent.sources.log_stamp import Clock, OtherLayout, StampLayout
from ncclscope_agent.sources.recurring_lines import RecurringRows
from ncclscope_wire import tables
from ncclscope_wire.batch import Columns, no_rows
from ncclscope_wire.facts import Fact
from ncclscope_wire.records import CommunicatorEvent, Counts, SourceGap, VersionSeen
from ncclscope_wire.terms import NO_TIME_NS


class LoggedTimes:
    """The logged times of a batch's operation rows: some known, the last ones still stamps to be read together."""

    def __init__(self) -> None:
        self.stamps: list[bytes] = []
        """Stamps of the latest rows, all of one length; of each row since `settle`, or of none."""
        self._joined_rows = 0
        """Where `stamps` holds those of so many rows in one piece."""
        self._known = array("q")
        self._all: NDArray[np.int64] | None = None
        """The times of all rows, where they were read together."""

    @property
    def waiting(self) -> int:
        """Rows whose stamps wait."""
        return self._joined_rows or len(self.stamps)

    def add_joined(self, stamps: bytes, rows: int) -> None:
        """Adds the stamps of the first so many rows in one piece."""
        self.stamps.append(stamps)
        self._joined_rows = rows

    def add(self, time_ns: int, rows: int) -> None:
        """Says the time of the row that follows so many; no stamps wait."""
        self._pad(rows)
        self._known.append(time_ns)

    def doubts(self, times: NDArray[np.int64], clock: Clock) -> Counter[str]:
        """Looks again at the stamps that wait of which `times` does not know the time, and sets those it finds.

        Returns how many of them are no stamp but a torn piece of an operation line, or a stamp whose time cannot be
        told, by reason.
        """
        doubts = Counter[str]()
        for at in np.flatnonzero(times == NO_TIME_NS):
            stamp = self._stamp(int(at))
            found = log_stamp.in_front(stamp, len(stamp)) or log_stamp.in_other_form(stamp, len(stamp))
            if found is not None:
                times[at] = log_stamp.stamp_ns(found, clock)
                doubts["time_unknown"] += times[at] == NO_TIME_NS
            elif log_lines.has_fragment(stamp):
                doubts["torn"] += 1
        return doubts

    def settle(self, times: NDArray[np.int64], rows: int) -> None:
        """Takes the times of the stamps that wait, which are those of the last of so many rows."""
        if self.waiting == rows:
            self._all = times
        else:
            self._pad(rows - self.waiting)
            self._known.frombytes(times.tobytes())
        self.stamps.clear()
        self._joined_rows = 0

    def column(self, rows: int) -> array[int] | memoryview:
        """The time of each row, an int64; NO_TIME_NS where its line had no stamp. No stamps wait."""
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
        """Whether the stamps of many rows can be added in one piece, where they have any."""
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
            self.take_times(self.layout.read(self.times.stamps))

    def take_times(self, times: NDArray[np.int64], *, are_known: bool = False) -> None:
        """Takes the times of the stamps that wait. `are_known`: none of them is NO_TIME_NS."""
        if not are_known:
            self.add_skipped(self.times.doubts(times, self._clock))
        self.times.settle(times, len(self.templates))

    def time_column(self) -> array[int] | memoryview:
        """The time of each operation row, an int64; NO_TIME_NS where its line had no stamp. No stamps wait."""
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
        """What CALL lines say about groups (CALL_MARK), in the order of the file."""
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
        """How many records were read, by family, and left out, by reason."""
        understood = {family: number for family, number in self.understood.items() if number}
        if self.calls:
            understood["call"] = understood.get("call", 0) + self.calls
        for family, rows in (("operation", operations), ("tuning", len(self.tunings))):
            if rows:
                understood[family] = rows
        return Counts(understood=understood, skipped=dict(self.skipped))
