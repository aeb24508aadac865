"""Columns of the output files: values, which of them are known, and the words they stand for.

Everything is computed once as numpy columns; parquet, the trace and the report take them from here, so
that what is null in one is null in all. `OperationView` holds some operations and, beside them, what they point at:
templates, processes, members, kernels.
"""

# pyright: reportUnknownParameterType=false
# (pyarrow carries no types)
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct
from ncclscope_service.columns.table import AnyRows
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_POINTER, NO_TIME_NS

Values: TypeAlias = NDArray[np.number]
Mask: TypeAlias = NDArray[np.bool_]

_MANY_WORDS: Final = 64
"""From here on only the words that occur are put into a row group's dictionary."""


@dataclass(frozen=True, slots=True)
class Column:
    """Values with their mask; with `words`, the values are indices into it."""

    values: Values
    is_known: Mask
    words: tuple[str, ...] | None = None

    def arrow(self, kind: pa.DataType) -> pa.Array:
        """The column as an arrow array of that type; words come dictionary-encoded."""
        unknown = None if self.is_known.all() else ~self.is_known
        if self.words is None:
            return pa.array(self.values, mask=unknown).cast(kind)
        values, words = self.values, tuple(dict.fromkeys(self.words))
        if len(words) < len(self.words):
            # Of a dictionary in which a word stands twice, the writer of parquet makes no use, and what its page has
            # behind the last word is whatever was in memory.
            places = {word: place for place, word in enumerate(words)}
            values = np.array([places[word] for word in self.words])[np.where(self.is_known, values, 0)]
        if len(words) > _MANY_WORDS:
            used, values = distinct(np.where(self.is_known, values, 0).astype(np.int64))
            words = words if len(used) == len(words) else tuple(map(words.__getitem__, used.tolist()))
        indices = pa.array(values.astype(np.int32, copy=False), mask=unknown)
        return pa.DictionaryArray.from_arrays(indices, pa.array(words, pa.string()))

    def objects(self) -> list[object]:
        """The column as Python values, None if unknown."""
        if self.words is not None:
            table = np.array([*self.words, None], dtype=object)
            return list(table[np.where(self.is_known, self.values, len(self.words)).astype(np.intp)])
        if self.is_known.all():
            listed: list[object] = self.values.tolist()
            return listed
        boxed = self.values.astype(object)
        boxed[~self.is_known] = None
        return list(boxed)

    def where(self, condition: Mask) -> Column:
        """The same column, unknown outside the condition."""
        return Column(self.values, self.is_known & condition, self.words)


def plain(values: Values, is_known: Mask | None = None) -> Column:
    """Values that are all known, or known where the mask says so."""
    return Column(values, np.ones(len(values), dtype=np.bool_) if is_known is None else is_known)


def times(values: Values) -> Column:
    """Nanoseconds in which NO_TIME_NS is unknown."""
    return Column(values, np.asarray(values != NO_TIME_NS))


def spans(values: Values) -> Column:
    """Lengths of time: NO_TIME_NS is unknown, and so is every negative length."""
    return Column(values, np.asarray(values >= 0))


def numbers(values: Values) -> Column:
    """Integers that cannot be negative; NO_NUMBER (-1) is unknown."""
    return Column(values, np.asarray(values > NO_NUMBER))


def rates(values: Values) -> Column:
    """Floats; NaN and infinities are unknown."""
    return Column(values, np.isfinite(values))


def words_at(indices: Values, words: Sequence[str]) -> Column:
    """Words of a fixed or small list; an index outside of it is unknown."""
    return Column(indices, np.asarray((indices >= 0) & (indices < len(words))), tuple(words))


def optional_words_at(indices: Values, words: Sequence[str | None]) -> Column:
    """Like `words_at` for a list that itself has unknown places."""
    column = words_at(indices, [word or "" for word in words])
    has_word = np.array([*(word is not None for word in words), False], dtype=np.bool_)
    return column.where(has_word[np.where(column.is_known, indices, len(words)).astype(np.intp)])


def optional_numbers_at(indices: Values, table: Sequence[int | None], kind: type[np.signedinteger]) -> Column:
    """Numbers of a small table by index; an index outside of it and a None in it are unknown."""
    values = np.array([*[0 if number is None else number for number in table], 0], dtype=kind)
    has_number = np.array([*[number is not None for number in table], False], dtype=np.bool_)
    places = np.where((indices >= 0) & (indices < len(table)), indices, len(table)).astype(np.intp)
    return Column(values[places], has_number[places])


def pointers(values: Values) -> Column:
    """Addresses as lower-case hexadecimal text ("0x7f21c0a00000"); 0 is NCCL's (nil) and stays "0x0".

    NO_POINTER is null.
    """
    addresses, indices = np.unique(values, return_inverse=True)
    return Column(indices, values != np.uint64(NO_POINTER), tuple(map(hex, addresses.tolist())))


def spread(column: Column, rows: NDArray[np.intp]) -> Column:
    """The column's value at each of these rows: a template's column laid out over its operations."""
    return Column(column.values[rows], column.is_known[rows], column.words)


class OperationView:
    """Operations and, row by row, what they point at.

    What lies in templates is computed once per template that occurs, then laid out over the rows.
    """

    def __init__(self, store: Store, rows: AnyRows) -> None:
        self.store = store
        self.rows = rows
        used, self._of_row = distinct(rows["template"])
        self._templates: Columns = store.operation_templates.rows[used]

    def of_template(self, make: Callable[[Columns], Column]) -> Column:
        """A column made from the operation templates, spread over the rows."""
        return spread(make(self._templates), self._of_row)

    def is_op(self, table: Mask) -> Mask:
        """Whether the row's operation code has what the table (by code, 256 long) says."""
        is_so: Mask = table[self._templates["op"]][self._of_row]
        return is_so

    def of_source(self) -> Column:
        """The name of each row's log."""
        return optional_words_at(self.rows["source"], [state.source.name for state in self.store.sources])

    def of_process(self, words: Sequence[str | None]) -> Column:
        """The word of each row's process; `words` are by process index."""
        return optional_words_at(self.rows["process"], words)

    def pids(self) -> Column:
        """The process id of each row."""
        pids = np.array([process.pid for process in self.store.processes], dtype=np.int64)
        return plain(pids[self.rows["process"]])

    def of_member(self, table: Sequence[int | None]) -> Column:
        """The number of each row's member; `table` is by member index."""
        return optional_numbers_at(self.rows["member"], table, np.int64)

    def of_communicator(self, words: Sequence[str | None]) -> Column:
        """The word of each row's communicator; `words` are by communicator index."""
        return optional_words_at(self.communicators(), words)

    def communicators(self) -> NDArray[np.intp]:
        """The communicator index; NO_NUMBER if the row has no member."""
        table = np.array([*[member.communicator for member in self.store.members], NO_NUMBER], dtype=np.intp)
        member = self.rows["member"]
        is_known = (member >= 0) & (member < len(self.store.members))
        return table[np.where(is_known, member, len(table) - 1)]

    def moved_bytes(self) -> NDArray[np.int64]:
        """Message bytes that go to another rank; 0 where they are not known."""
        return self.store.moved_bytes(self.communicators(), self.rows["message_bytes"])

    def of_kernel(self, name: str) -> Column:
        """A column of the first kernel of the row's launch; unknown if there is none or it was dropped."""
        table, kernels = self.store.kernels, self.rows["kernel"]
        is_known = (kernels >= max(0, table.first)) & (kernels < table.next_id)
        values = np.zeros(len(self.rows), table.dtype[name])
        values[is_known] = table.rows.values(name, table.at(kernels[is_known]))
        return Column(values, is_known)

    def of_kernel_template(self, name: str) -> Column:
        """A column of that kernel's template; negative numbers are unknown."""
        templates = self.of_kernel("template")
        if not templates.is_known.any():
            return Column(np.zeros(len(self.rows), dtype=np.int64), templates.is_known)
        values = self.store.kernel_templates.rows[name][templates.values.astype(np.intp)]
        return Column(values, templates.is_known & (values > NO_NUMBER))
