"""A number of its own for each combination of some columns, found for many rows in one go.

Of many rows sorted keys are searched together, where a dictionary of tuples would be asked for each.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_Integers = NDArray[np.integer]
_LOW: Final = 0xFFFFFFFF
_FEW: Final = 128
"""Rows up to which a dictionary is asked for each."""
_GROWN: Final = 1.2
"""Keys are sorted anew when there are so many times those that are sorted."""


class KeyPlaces:
    """Numbers from 0, in the order in which combinations came first."""

    def __init__(self, columns: int) -> None:
        """`columns`: of how many integers of 32 bits a combination is; the first of them is not negative."""
        self._steps = [_Step() for _ in range(max(1, columns - 1))]

    def __len__(self) -> int:
        return len(self._steps[-1].index)

    def of(self, *columns: _Integers) -> NDArray[np.intp]:
        """The number of each row; the next ones to those that are new."""
        first, *others = columns
        places = first.astype(np.int64)
        if not others:
            return self._steps[0].places_of(places)
        for step, column in zip(self._steps, others, strict=True):
            places = step.places_of(places << 32 | (column.astype(np.int64) & _LOW))
        return places


class _Step:
    """The number of each key; most of them sorted, to find many in one go."""

    def __init__(self) -> None:
        self.index: dict[int, int] = {}
        self._sorted: NDArray[np.int64] = np.empty(0, np.int64)
        self._places: NDArray[np.int64] = np.empty(0, np.int64)
        """Of the sorted ones."""

    def places_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(keys) < _FEW:
            return self._one_by_one(keys)
        if len(self.index) > _GROWN * len(self._sorted):
            every = np.fromiter(self.index, np.int64, len(self.index))
            self._places = np.argsort(every)
            self._sorted = every[self._places]
        if not len(self._sorted):
            return self._one_by_one(keys)
        at = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        found = self._places[at]
        others = np.flatnonzero(self._sorted[at] != keys)
        found[others] = self._one_by_one(keys[others])
        return found

    def _one_by_one(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        index = self.index
        return np.asarray([index.setdefault(key, len(index)) for key in keys.tolist()], np.int64)
