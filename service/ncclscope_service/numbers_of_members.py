"""The place of each operation in its communicator, as each member counts them: all, collectives, by kind, by peer."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.distinct import distinct, distinct_together
from ncclscope_service.key_places import KeyPlaces
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import OPERATIONS, UNKNOWN_OPERATION

_LOWERED: Final = ("AlltoAll", "Gather", "Scatter")
"""Become sends and receives. *Source:* NCCL `src/enqueue.cc:taskAppend`."""
_IS_NUMBERED: Final = np.array(
    [operation.is_collective and operation.name not in _LOWERED for operation in OPERATIONS]
    + [False] * (256 - len(OPERATIONS))
)
"""Collectives that have a counter of their own, comm->seqNumber. *Source:* NCCL `src/plugin/profiler.cc`."""
_IS_COLLECTIVE: Final = np.array(
    [operation.is_collective for operation in OPERATIONS] + [False] * (256 - len(OPERATIONS))
) & (np.arange(256) != UNKNOWN_OPERATION)

NUMBERED_BY: Final = ("op", "root", "nranks", "count")
"""Columns of a template."""


class Numbers:
    """Counts the operations of every member, of all in one go."""

    def __init__(self) -> None:
        self._rows: NDArray[np.int64] = np.zeros(0, np.int64)
        """By member: operations seen so far."""
        self._collectives: NDArray[np.int64] = np.zeros(0, np.int64)
        self._kinds = _Counts(2)
        """By (member, operation code): collectives that NCCL launches."""
        self._pairs = _Counts(3)
        """By (member, operation code, peer)."""

    def give(self, operations: Columns, templates: Columns, members: int) -> None:
        """Fills seq, coll_seq, kind_seq and pair_seq of operations (`member` is filled) in the order of their logs.

        `templates`: NUMBERED_BY of each operation's; `members`: how many there are.
        """
        self._reserve(members)
        codes = templates["op"]
        everything = np.arange(len(operations))
        operations["seq"] = self._counted(self._rows, operations["member"])
        is_collective = _IS_COLLECTIVE[codes]
        collectives = everything[is_collective]
        operations["coll_seq"][collectives] = self._counted(self._collectives, operations["member"][collectives])
        kinds = np.flatnonzero(_IS_NUMBERED[codes] & (templates["nranks"] > 1) & (templates["count"] > 0))
        operations["kind_seq"][kinds] = self._kinds.counted(operations["member"][kinds], codes[kinds])
        others = everything[~is_collective]
        keys = operations["member"][others], codes[others], templates["root"][others]
        operations["pair_seq"][others] = self._pairs.counted(*keys)

    def _counted(self, counts: NDArray[np.int64], members: NDArray[np.int32]) -> NDArray[np.int64]:
        """The number of each of these operations of its member, from 0."""
        found, inverse = distinct(members)
        running, amounts = _running(inverse, len(found))
        numbers: NDArray[np.int64] = counts[found][inverse] + running
        counts[found] += amounts
        return numbers

    def _reserve(self, members: int) -> None:
        more = members - len(self._rows)
        if more > 0:
            none = np.zeros(max(more, len(self._rows)), np.int64)
            self._rows = np.concatenate([self._rows, none])
            self._collectives = np.concatenate([self._collectives, none])


class _Counts:
    """How many rows there were so far of each combination of some columns."""

    def __init__(self, columns: int) -> None:
        self._places = KeyPlaces(columns)
        self._amounts: NDArray[np.int64] = np.zeros(0, np.int64)

    def counted(self, *columns: NDArray[np.integer]) -> NDArray[np.int64]:
        """The number of each row among those of equal columns, from 0."""
        if not len(columns[0]):
            return np.empty(0, np.int64)
        found, inverse = distinct_together(*columns)
        running, amounts = _running(inverse, len(found[0]))
        places = self._places.of(*found)
        more = len(self._places) - len(self._amounts)
        if more > 0:
            self._amounts = np.concatenate([self._amounts, np.zeros(max(more, len(self._amounts)), np.int64)])
        numbers: NDArray[np.int64] = self._amounts[places][inverse] + running
        self._amounts[places] += amounts
        return numbers


def _running(inverse: NDArray[np.intp], amount: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many rows of the same group come before each row, and how many each group has."""
    amounts = np.bincount(inverse, minlength=amount).astype(np.int64)
    # Few values fit the 16 bits that numpy sorts by counting.
    order = np.argsort(inverse.astype(np.uint16) if amount < 2**16 else inverse, kind="stable")
    running = np.empty(len(inverse), np.int64)
    running[order] = np.arange(len(inverse)) - np.repeat(np.cumsum(amounts) - amounts, amounts)
    return running, amounts
