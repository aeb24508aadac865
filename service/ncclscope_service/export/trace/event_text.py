"""Trace events as JSON text, a column at a time: an object per event would take most of the time of an export.

Each piece of text is a column of arrow, null where an event does not have it; `joined` puts the pieces of each event
side by side. Every event begins with a comma, so that the buffer of a column of events is what the file holds.
Tracks are processes, threads and lanes; slices never cross on one of them.
"""

# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
# (pyarrow carries no types, and pyarrow.compute makes its functions as it is imported)
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct
from ncclscope_service.export.tables.columns import Column

Event: TypeAlias = dict[str, object]
"""One trace event as the Chrome Trace Event Format has it.

*Source:* "Trace Event Format", the document that Perfetto's JSON importer follows.
"""

FINDINGS_PID: Final = 1
COMMUNICATORS_PID: Final = 2
FIRST_RANK_PID: Final = 10
"""Process numbers of the trace; the process's own id is in its name, since two hosts may share one."""


@dataclass(frozen=True, slots=True)
class Track:
    """A kind of track of one process; overlapping slices of it get lanes of their own."""

    sort: int
    """Smaller is higher on screen."""
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class PlacedSlices:
    """Slices of one track, in order of their starts."""

    track: Track
    rows: NDArray[np.intp]
    """The row of each, ascending: tracks are numbered in the order of the rows that need them."""
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


@dataclass(slots=True)
class _Lanes:
    ends: list[list[int]] = dataclasses.field(default_factory=list[list[int]])
    """By lane, the ends of the slices that are open, outermost first."""
    tids: list[int] = dataclasses.field(default_factory=list[int])

    def lanes_of(self, placed: PlacedSlices, *, nests: bool) -> NDArray[np.int64]:
        """The lane of each slice: the first on which it crosses no other."""
        starts, ends = placed.starts, placed.ends
        is_free = not self.ends or not self.ends[0] or self.ends[0][-1] <= starts[0]
        if not nests and is_free and np.all(starts[1:] >= np.maximum.accumulate(ends)[:-1]):  # as on a CUDA stream
            self.ends[:1] = [[int(ends[-1])]]
            return np.zeros(len(starts), np.int64)
        columns = zip(starts.tolist(), ends.tolist(), strict=True)
        return np.array([self._lane(start, end, nests=nests) for start, end in columns], np.int64)

    def _lane(self, start_ns: int, end_ns: int, *, nests: bool) -> int:
        for lane, open_ends in enumerate(self.ends):
            while open_ends and open_ends[-1] <= start_ns:
                open_ends.pop()
            if not open_ends or (nests and end_ns <= open_ends[-1]):
                open_ends.append(end_ns)
                return lane
        self.ends.append([end_ns])
        return len(self.ends) - 1


@dataclass(slots=True)
class ProcessTracks:
    """The tracks of one process of the trace; new ones are announced as metadata events."""

    pid: int
    _lanes: dict[Track, _Lanes] = dataclasses.field(default_factory=dict[Track, _Lanes])
    _announced: list[Event] = dataclasses.field(default_factory=list[Event])
    _next_tid: int = 1

    def place(self, placed: Sequence[PlacedSlices], *, nests: bool = False) -> list[NDArray[np.int64]]:
        """The threads on which these slices cross no other.

        With `nests`, a slice may lie inside an open one (as NVTX ranges do); otherwise it gets its own lane.
        """
        found: list[NDArray[np.int64]] = []
        new: list[tuple[int, int, Track, int]] = []
        for order, each in enumerate(placed):
            lanes = self._lanes.setdefault(each.track, _Lanes())
            found.append(lane_of := lanes.lanes_of(each, nests=nests))
            first = (int(each.rows[np.argmax(lane_of == lane)]) for lane in range(len(lanes.tids), len(lanes.ends)))
            new += [(row, order, each.track, lane) for lane, row in enumerate(first, start=len(lanes.tids))]
        for _, _, track, lane in sorted(new, key=lambda each: each[:2]):
            self._lanes[track].tids.append(self._announce(track, lane))
        return [np.asarray(self._lanes[each.track].tids)[lanes] for each, lanes in zip(placed, found, strict=True)]

    def announcements(self) -> list[Event]:
        """The metadata events of tracks that are new since the last call."""
        announced, self._announced = self._announced, []
        return announced

    def _announce(self, track: Track, lane: int) -> int:
        tid = self._next_tid
        self._next_tid += 1
        name = track.name if lane == 0 else f"{track.name} ({lane + 1})"
        self._announced += [
            thread_metadata("thread_name", self.pid, tid, {"name": name}),
            thread_metadata("thread_sort_index", self.pid, tid, {"sort_index": 100 * track.sort + lane}),
        ]
        return tid


def process_metadata(pid: int, name: str, sort_index: int) -> list[Event]:
    """The events that name and order a process."""
    return [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}},
        {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": sort_index}},
    ]


def thread_metadata(kind: str, pid: int, tid: int, args: dict[str, object]) -> Event:
    """An event that names or orders a thread."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


@dataclass(frozen=True, slots=True)
class Axis:
    """The time axis of a trace: microseconds since its origin."""

    origin_ns: int

    def at(self, time_ns: int) -> float:
        """Microseconds since the origin: the shortest decimal that is exact to the nanosecond for 100 days."""
        return (time_ns - self.origin_ns) / 1000

    def slice(self, name: str, pid: int, tid: int, start_ns: int, end_ns: int) -> Event:
        """A complete event without arguments."""
        return {
            "name": name,
            "ph": "X",
            "ts": self.at(start_ns),
            "dur": (end_ns - start_ns) / 1000,
            "pid": pid,
            "tid": tid,
        }


Piece: TypeAlias = pa.Array | str
"""Text of each event, or one that all have."""

_THOUSANDTHS: Final = pa.array([f".{number:03}".rstrip("0") if number else ".0" for number in range(1000)])


@dataclass(frozen=True, slots=True)
class EventText:
    """Some events as the file holds them, with commas between them."""

    data: bytes | memoryview
    events: int


def of_objects(events: Sequence[Event]) -> EventText:
    """Events that are made one by one; numbers that JSON does not have become null."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return EventText(memoryview(orjson.dumps(events, default=str, option=options))[1:-1], len(events))


def of_texts(texts: pa.Array, events: int, before: Sequence[Event] = ()) -> EventText:
    """So many events in a column of texts that begin with commas, behind those `before`."""
    data = memoryview(texts.buffers()[2] or b"")  # a column of no text has no buffer
    if not before:
        return EventText(data[1:], events)
    return EventText(b"".join((of_objects(before).data, data)), len(before) + events)


def joined(*pieces: Piece) -> pa.Array:
    """The pieces of each row side by side; those that are null are left out."""
    texts = (constant(piece) if isinstance(piece, str) else piece for piece in pieces)
    return pc.binary_join_element_wise(*texts, constant(""), null_handling="skip")


def constant(text: str) -> pa.Scalar:
    """One text of all rows. Its type is given: arrow looks for packages on disk each time that it has to guess."""
    return pa.scalar(text, pa.string())


def slices(
    axis: Axis, names: pa.Array, pid: int, tids: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[Piece, ...]:
    """Complete events up to what follows the thread, as `Axis.slice` makes them; names are JSON (`words`)."""
    spans = (',"ph":"X","ts":', micros(starts - axis.origin_ns), ',"dur":', micros(ends - starts))
    return (',{"name":', names, *spans, f',"pid":{pid},"tid":', numbers(tids))


def instants(
    axis: Axis, names: pa.Array, pid: int, tids: NDArray[np.int64], at: NDArray[np.int64]
) -> tuple[Piece, ...]:
    """Instant events likewise."""
    when = (',"ph":"i","s":"t","ts":', micros(at - axis.origin_ns))
    return (',{"name":', names, *when, f',"pid":{pid},"tid":', numbers(tids))


def numbers(values: NDArray[np.number]) -> pa.Array:
    """Numbers in decimal."""
    return pa.array(values).cast(pa.string())


def micros(spans_ns: NDArray[np.int64]) -> pa.Array:
    """Nanoseconds, not negative, as microseconds with all their digits."""
    whole, rest = np.divmod(spans_ns, 1000)
    return joined(numbers(whole), _THOUSANDTHS.take(pa.array(rest)))


def words(values: Sequence[str]) -> pa.Array:
    """Texts as JSON, escaped and in quotation marks."""
    known = {value: orjson.dumps(value).decode() for value in set(values)}
    return pa.array([known[value] for value in values], pa.string())


def fields(arguments: Mapping[str, object]) -> str:
    """`,"name":value` of each."""
    return f",{orjson.dumps(arguments, default=str).decode()[1:-1]}" if arguments else ""


def field(name: str, column: Column) -> pa.Array:
    """`,"name":value` where the value is known."""
    if column.words is None:
        begin = constant(f',"{name}":')
        texts = pa.array(column.values, mask=~column.is_known).cast(pa.string())
        return pc.binary_join_element_wise(begin, texts, constant(""))
    values = np.where(column.is_known, column.values, 0).astype(np.int64)
    found, place = distinct(values)
    known = [column.words[word] if word < len(column.words) else "" for word in found.tolist()]
    texts = pa.array([f',"{name}":{orjson.dumps(word).decode()}' for word in known], pa.string())
    return texts.take(pa.array(place, mask=~column.is_known))


def at_rows(texts: pa.Array, rows: NDArray[np.intp], amount: int) -> pa.Array:
    """Texts of some of so many rows, null in the others."""
    places = np.full(amount, -1, np.int64)
    places[rows] = np.arange(len(rows))
    return texts.take(pa.array(places, mask=places < 0))
