"""What was read of a log since the last batch, as the columns that the batch will carry."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_agent.sources import log_lines, log_stamp
from ncclscope_agent.sources.log_stamp import StampLayout
from ncclscope_wire import tables
from ncclscope_wire.batch import Columns, no_rows
from ncclscope_wire.records import CommunicatorEvent, Counts, VersionSeen
from ncclscope_wire.terms import NO_TIME_NS

_FEW_STAMPS: Final = 16
"""Below this many it is cheaper to read stamps one by one."""


class LoggedTimes:
    """The logged times of a batch's operation rows: some known, some still stamps to be read together."""

    def __init__(self) -> None:
        self.stamps: list[bytes] = []
        """Stamps of the latest rows, all of one length; of each row since `settle`, or of none."""
        self._known: dict[int, int] = {}
        self._read: list[tuple[slice, NDArray[np.int64]]] = []

    def set(self, row: int, time_ns: int) -> None:
        """Says the time of one row; it wins over a stamp."""
        self._known[row] = time_ns

    def settle(self, layout: StampLayout, zone_offset_ns: int, rows: int) -> int:
        """Reads the stamps that wait: they are those of the last of so many rows.

        Returns how many of them are no stamp but a torn piece of an operation line.
        """
        stamps = self.stamps
        if not stamps:
            return 0
        few = len(stamps) < _FEW_STAMPS
        times = np.full(len(stamps), NO_TIME_NS, dtype=np.int64) if few else layout.read(stamps)
        torn = 0
        for at in np.flatnonzero(times == NO_TIME_NS):
            found = log_stamp.AT_END.search(stamps[at])
            if found is not None:
                times[at] = log_stamp.stamp_ns(found, zone_offset_ns)
            elif log_lines.has_fragment(stamps[at]):
                torn += 1
        self._read.append((slice(rows - len(stamps), rows), times))
        stamps.clear()
        return torn

    def column(self, length: int) -> NDArray[np.int64]:
        """The time of each row; NO_TIME_NS where its line had no stamp."""
        column = np.full(length, NO_TIME_NS, dtype=np.int64)
        for rows, times in self._read:
            column[rows] = times
        if self._known:
            column[list(self._known)] = list(self._known.values())
        return column


_NIBBLES: Final = np.full(256, 16, dtype=np.uint8)
"""Value of each hexadecimal digit as NCCL prints it, in lower case; 16 for any other byte."""
_NIBBLES[np.frombuffer(b"0123456789abcdef", dtype=np.uint8)] = np.arange(16)
_LONGEST_OP_COUNT: Final = 16


def read_op_counts(texts: Sequence[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """The values of hexadecimal texts, and which of them are hexadecimal numbers of 64 bits at all."""
    wide = _LONGEST_OP_COUNT
    padded = b"".join([text.rjust(wide, b"0") if 0 < len(text) <= wide else b" " * wide for text in texts])
    nibbles = _NIBBLES[np.frombuffer(padded, dtype=np.uint8)].reshape(len(texts), wide)
    good = np.logical_and.reduce(nibbles < 16, axis=1, dtype=np.bool_)
    big_endian = (nibbles[:, 0::2] << 4) | (nibbles[:, 1::2] & 15)
    return np.ascontiguousarray(big_endian).view(">u8")[:, 0].astype(np.uint64), good


class Gathered:
    """Rows, records and counts since the last batch. Appended to from the reader's inner loop."""

    def __init__(self) -> None:
        self.template_rows: list[bytes] = []
        self.templates = array("I")
        self.lines = array("I")
        self.op_counts: list[bytes] = []
        self.times = LoggedTimes()
        self.tunings: list[bytes] = []
        self.tuning_lines = array("I")
        self.communicators: list[CommunicatorEvent] = []
        self.versions: list[VersionSeen] = []
        self.understood: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()

    def new_templates(self) -> Columns:
        """The templates made since the last batch (OPERATION_TEMPLATE)."""
        return np.frombuffer(b"".join(self.template_rows), dtype=tables.OPERATION_TEMPLATE)

    def add_operation(self, template: int, line: int, op_count: bytes, time_ns: int, stamp_length: int) -> None:
        """Adds one operation row; `stamp_length` is that of the rows whose stamps wait, 0 where none do."""
        if stamp_length:
            self.times.stamps.append(bytes(stamp_length))
        self.times.set(len(self.templates), time_ns)
        self.templates.append(template)
        self.lines.append(line)
        self.op_counts.append(op_count)

    def settle_times(self, layout: StampLayout, zone_offset_ns: int) -> None:
        """Reads the stamps that wait for it, before stamps of another form come or the batch ends."""
        torn = self.times.settle(layout, zone_offset_ns, len(self.templates))
        if torn:
            self.skipped["torn"] += torn

    def operations(self) -> Columns:
        """One row per operation line (OPERATION_ROW), in the order of the file.

        A line known by its bytes but for an opCount that is no number was torn: it is counted here.
        """
        rows = np.empty(len(self.templates), dtype=tables.OPERATION_ROW)
        if not len(rows):
            return rows
        rows["template"] = np.frombuffer(self.templates, dtype=np.uint32)
        rows["line"] = np.frombuffer(self.lines, dtype=np.uint32)
        rows["op_count"], good = read_op_counts(self.op_counts)
        rows["logged_at_ns"] = self.times.column(len(rows))
        if good.all():
            return rows
        self.skipped["torn"] += int(np.count_nonzero(~good))
        return rows[good]

    def tuning_rows(self) -> Columns:
        """One row per TUNING line (TUNING_ROW), in the order of the file."""
        if not self.tunings:
            return no_rows(tables.TUNING_ROW)
        rows = np.frombuffer(b"".join(self.tunings), dtype=tables.TUNING_ROW).copy()
        rows["line"] = np.frombuffer(self.tuning_lines, dtype=np.uint32)
        return rows

    def counts(self, operations: int) -> Counts:
        """How many records were read, by family, and left out, by reason."""
        understood = dict(self.understood)
        for family, rows in (("operation", operations), ("tuning", len(self.tunings))):
            if rows:
                understood[family] = rows
        return Counts(understood=understood, skipped=dict(self.skipped))
