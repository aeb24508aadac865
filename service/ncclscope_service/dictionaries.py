"""Whether the indices of a batch point inside the dictionaries of its source.

Only sizes are kept: the entries themselves are the intake's. A source has new dictionaries in each session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.tables import CALL_MARK_KINDS, CALLS_BEGIN
from ncclscope_wire.terms import (
    ALGORITHMS,
    INSPECTOR_TIMINGS,
    NO_NUMBER,
    OPERATIONS,
    PROTOCOLS,
    UNKNOWN_OPERATION,
    UNKNOWN_TIMING,
)

_REFERENCES: Final[Mapping[str, Mapping[str, str]]] = {
    "threads": {"host": "strings"},
    "operation_templates": {"thread": "threads", "op_name": "strings"},
    "kernel_templates": {"host": "strings", "name": "strings"},
    "range_templates": {"host": "strings", "domain": "strings", "text": "strings"},
    "inspected_ranks": {"host": "strings", "name": "strings"},
    "operations": {"template": "operation_templates"},
    "tunings": {"thread": "threads"},
    "call_marks": {"thread": "threads"},
    "kernels": {"template": "kernel_templates"},
    "ranges": {"template": "range_templates"},
    "busy": {"host": "strings"},
    "inspected": {"inspected_rank": "inspected_ranks"},
}
"""Table to the columns of it that are indices, and into which dictionary."""

_DICTIONARIES: Final = (
    "strings",
    "threads",
    "operation_templates",
    "kernel_templates",
    "range_templates",
    "inspected_ranks",
)

_CODES: Final = (
    ("operation_templates", "op", len(OPERATIONS), UNKNOWN_OPERATION),
    ("tunings", "op", len(OPERATIONS), UNKNOWN_OPERATION),
    ("tunings", "algorithm", len(ALGORITHMS), NO_NUMBER),
    ("tunings", "protocol", len(PROTOCOLS), NO_NUMBER),
    ("call_marks", "kind", CALL_MARK_KINDS, CALLS_BEGIN),
    ("inspected", "op", len(OPERATIONS), UNKNOWN_OPERATION),
    ("inspected", "timing", len(INSPECTOR_TIMINGS), UNKNOWN_TIMING),
    ("inspected", "algorithm", len(ALGORITHMS), NO_NUMBER),
    ("inspected", "protocol", len(PROTOCOLS), NO_NUMBER),
)
"""Columns that index a tuple of terms.py: table, column, length of the tuple, and the value that means none."""

MAX_ENTRIES: Final[Mapping[str, int]] = {
    "strings": 1 << 20,
    "threads": 1 << 16,
    "operation_templates": 1 << 20,
    "kernel_templates": 1 << 18,
    "range_templates": 1 << 20,
    "inspected_ranks": 1 << 16,
}
"""Of one source in one session. Readers start a dictionary anew far earlier (`max_templates`)."""
MAX_STRING_CHARACTERS: Final = 64 * 1024**2
"""Of all strings of one source in one session."""


class DictionaryFullError(ProtocolError):
    """A source has more entries than a source may have."""


class Dictionaries:
    """The sizes of one source's dictionaries in one session."""

    def __init__(self) -> None:
        self._sizes = dict.fromkeys(_DICTIONARIES, 0)
        self._characters = 0

    def apply(self, batch: Batch) -> None:
        """Adds the new entries of a batch after checking every index and code in it.

        Raises:
            DictionaryFullError: there are too many entries.
            ProtocolError: one points outside; nothing was added.
        """
        sizes = {name: size + len(_sized(batch, name)) for name, size in self._sizes.items()}
        characters = self._characters + sum(map(len, batch.strings))
        for name, size in sizes.items():
            if size > MAX_ENTRIES[name]:
                raise DictionaryFullError(f"{name} has {size} entries, and {MAX_ENTRIES[name]} is the limit")
        if characters > MAX_STRING_CHARACTERS:
            raise DictionaryFullError(f"strings have {characters} characters, and {MAX_STRING_CHARACTERS} is the limit")
        for table, column, dictionary in _reference_columns():
            _check_indices(_column(batch, table, column), sizes[dictionary], f"{table}.{column}", dictionary)
        for table, column, length, none in _CODES:
            _check_codes(_column(batch, table, column), length, none, f"{table}.{column}")
        self._sizes, self._characters = sizes, characters


def _reference_columns() -> Iterator[tuple[str, str, str]]:
    for table, columns in _REFERENCES.items():
        for column, dictionary in columns.items():
            yield table, column, dictionary


def _sized(batch: Batch, name: str) -> Columns | tuple[str, ...]:
    return cast("Columns | tuple[str, ...]", getattr(batch, name))


def _column(batch: Batch, table: str, column: str) -> NDArray[np.integer]:
    rows = cast(Columns, getattr(batch, table))
    values: NDArray[np.integer] = rows[column]
    return values


def _check_indices(indices: NDArray[np.integer], size: int, where: str, dictionary: str) -> None:
    if len(indices) and int(indices.max()) >= size:
        row = int(indices.argmax())
        raise ProtocolError(f"row {row}: {where} is {int(indices[row])}, and {dictionary} has {size} entries")


def _check_codes(codes: NDArray[np.integer], length: int, none: int, where: str) -> None:
    if not len(codes):
        return
    wrong = ((codes < 0) | (codes >= length)) & (codes != none)
    if wrong.any():
        row = int(wrong.argmax())
        raise ProtocolError(f"row {row}: {where} is {int(codes[row])}, which is no code of this version")
