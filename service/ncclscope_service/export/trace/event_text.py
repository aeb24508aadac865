"""Trace events as JSON text, a column at a time: an object per event would take most of the time of an export.

Each piece of text is a column of arrow, null where an event does not have it; `joined` puts the pieces of each event
side by side. Every event begins with a comma, so that the buffer of a column of events is what the file holds.
"""

# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
# (pyarrow carries no types, and pyarrow.compute makes its functions as it is imported)
from __future__ import annotations

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
from ncclscope_service.export.trace.tracks import Axis, Event

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
