"""Recurring combinations of columns as small integers, so that work is done once per combination."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_wire.batch import Columns

_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
"""2^64 / golden ratio: spreads small differences over all bits (Knuth, TAOCP 6.4)."""


class Signatures:
    """Numbers the distinct combinations of some columns, in order of first appearance.

    Combinations are told apart by a 64-bit hash: among a million of them two meet with a chance of 3e-8.
    Numbering n rows costs O(n log(combinations)).
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = tuple(fields)
        self._rows: list[Columns] = []
        self._all: Columns | None = None
        self._hashes = np.empty(0, dtype=np.uint64)
        self._numbers = np.empty(0, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def rows(self) -> Columns:
        """The first row seen of each combination, by number."""
        if self._all is None:
            self._all = np.concatenate(self._rows)
            self._rows = [self._all]
        return self._all

    def number(self, rows: Columns) -> NDArray[np.int32]:
        """The number of each row's combination; new combinations get the next numbers."""
        hashes = self._hash(rows)
        places = np.searchsorted(self._hashes, hashes)
        if len(self._hashes):
            places[places == len(self._hashes)] = 0
            is_new = self._hashes[places] != hashes
        else:
            is_new = np.ones(len(rows), dtype=bool)
        if is_new.any():
            self._add(whole_rows.kept(rows, is_new), hashes[is_new])
            places = np.searchsorted(self._hashes, hashes)
        numbers: NDArray[np.int32] = self._numbers[places]
        return numbers

    def _add(self, rows: Columns, hashes: NDArray[np.uint64]) -> None:
        _, first = np.unique(hashes, return_index=True)
        first.sort()
        added = np.arange(len(self._numbers), len(self._numbers) + len(first), dtype=np.int32)
        self._rows.append(whole_rows.taken(rows, first))
        self._all = None
        all_hashes = np.concatenate([self._hashes, hashes[first]])
        order = np.argsort(all_hashes)
        self._hashes, self._numbers = all_hashes[order], np.concatenate([self._numbers, added])[order]

    def _hash(self, rows: Columns) -> NDArray[np.uint64]:
        mixed = np.zeros(len(rows), dtype=np.uint64)
        for name in self._fields:
            mixed += rows[name].astype(np.uint64)
            mixed *= _MULTIPLIER
            mixed ^= mixed >> np.uint64(29)
        return mixed
