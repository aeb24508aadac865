"""Bandwidth by second: the samples that bandwidth detectors judge.

Sizes are compared with their like: a *shape* is a communicator, an operation and a size rounded to an eighth of an
octave, as busbw depends on size and a mix of sizes would read as noise. One sample is the median of log(busbw of the
transfer) over a window of one second with data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ncclscope_wire.batch import Columns

WINDOW_NS: Final = 1_000_000_000
LEAST_BYTES: Final = 64 * 1024
"""Below, time is latency and busbw says nothing of the wires."""
_BUCKETS_PER_OCTAVE: Final = 8
_SHAPES_PER_COMMUNICATOR: Final = 12
_LATE_WINDOWS: Final = 2
"""Windows that stay open for news that comes late."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is compared over time."""

    communicator: int
    op: int
    bucket: int


def bytes_of(shape: Shape) -> int:
    """About how large the messages of a shape are."""
    return round(2 ** (shape.bucket / _BUCKETS_PER_OCTAVE))


@dataclass(frozen=True, slots=True)
class Sample:
    """One window of one shape."""

    shape: Shape
    at_ns: int
    level: float
    """Natural logarithm of busbw in bytes per second."""
    operations: int
    worst_seq: int
    """Of the slowest of them: its number on its communicator; NO_NUMBER for Send and Recv."""


class _Window(NamedTuple):
    levels: list[float]
    seqs: list[int]


_Open: TypeAlias = dict[int, _Window]


@dataclass(slots=True)
class Levels:
    """Collectives to samples; windows close when data two windows younger has come."""

    left_out: int = 0
    """Operations of communicators that have more shapes than are kept."""
    _open: dict[Shape, _Open] = field(default_factory=dict[Shape, _Open])
    _shapes: dict[int, int] = field(default_factory=dict[int, int])
    _newest: int = 0
    _closed_before: int = 0

    def feed(self, collectives: Columns) -> list[Sample]:
        """Takes joined collectives (`rows.COLLECTIVE`) and returns the windows that closed, oldest first."""
        usable = (
            (collectives["busbw"] > 0)
            & (collectives["message_bytes"] >= LEAST_BYTES)
            & (collectives["end_true_ns"] // WINDOW_NS >= self._closed_before)
        )
        for shape, window, values in _segments(collectives[usable]):
            if shape not in self._open and not self._admit(shape, len(values.levels)):
                continue
            known = self._open.setdefault(shape, {}).setdefault(window, _Window([], []))
            known.levels.extend(values.levels)
            known.seqs.extend(values.seqs)
            self._newest = max(self._newest, window)
        self._closed_before = max(self._closed_before, self._newest - _LATE_WINDOWS + 1)
        return self._close()

    def _admit(self, shape: Shape, operations: int) -> bool:
        known = self._shapes.get(shape.communicator, 0)
        if known >= _SHAPES_PER_COMMUNICATOR:
            self.left_out += operations
            return False
        self._shapes[shape.communicator] = known + 1
        return True

    def _close(self) -> list[Sample]:
        closed: list[Sample] = []
        for shape, windows in self._open.items():
            for window in [window for window in windows if window < self._closed_before]:
                levels, seqs = windows.pop(window)
                worst = seqs[levels.index(min(levels))]
                closed.append(Sample(shape, window * WINDOW_NS, float(np.median(levels)), len(levels), worst))
        return sorted(closed, key=lambda sample: sample.at_ns)


def _segments(rows: Columns) -> Iterator[tuple[Shape, int, _Window]]:
    if not len(rows):
        return
    buckets = np.rint(np.log2(rows["message_bytes"].astype(np.float64)) * _BUCKETS_PER_OCTAVE).astype(np.int64)
    windows = rows["end_true_ns"] // WINDOW_NS
    order = np.lexsort((windows, buckets, rows["op"], rows["communicator"]))
    rows, buckets, windows = rows[order], buckets[order], windows[order]
    values = np.log(rows["busbw"])
    changes = np.zeros(len(rows), dtype=np.bool_)
    for column in (rows["communicator"], rows["op"], buckets, windows):
        changes[1:] |= column[1:] != column[:-1]
    begins = np.concatenate([[0], np.flatnonzero(changes)])
    ends = np.append(begins[1:], len(rows))
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        shape = Shape(int(rows["communicator"][begin]), int(rows["op"][begin]), int(buckets[begin]))
        yield shape, int(windows[begin]), _Window(values[begin:end].tolist(), rows["coll_seq"][begin:end].tolist())
