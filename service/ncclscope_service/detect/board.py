"""How far each rank has come on each channel, of all channels of a job side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.detect.context import Context
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

PROGRESS: Final = np.dtype(
    [
        ("communicator", "<i4"),
        ("sender", "<i4"),  # communicator ranks of an ordered pair; NO_NUMBER for collectives
        ("receiver", "<i4"),
        ("rank", "<i4"),  # the communicator rank that counted
        ("operations", "<i8"),  # enqueued so far on this channel
        ("last_ns", "<i8"),  # when the newest of them was logged, or observed where lines have no stamp
    ]
)
"""How far each rank has come on each channel: a communicator's collectives, or one ordered pair of Send and Recv."""

_CHANNEL: Final = ("communicator", "sender", "receiver")
_NEVER: Final = np.iinfo(np.int64).max


class Board:
    """The newest count of every rank, and the smallest distance to the front that it ever had."""

    def __init__(self) -> None:
        self._rows: Columns = np.empty(0, PROGRESS)
        """By channel and rank."""
        self._least_lag: NDArray[np.int64] = np.empty(0, np.int64)
        """What was lost before we looked is no lateness."""

    def put(self, progress: Columns) -> None:
        """Takes present counts (`PROGRESS`); of ranks that are not among them the last ones stay."""
        rows = whole_rows.joined([self._rows, progress])
        least = np.concatenate([self._least_lag, np.full(len(progress), _NEVER)])
        order = np.lexsort((rows["rank"], *(rows[name] for name in reversed(_CHANNEL))))
        rows, least = whole_rows.taken(rows, order), least[order]
        begins = _begins(rows, (*_CHANNEL, "rank"))
        self._rows = whole_rows.taken(rows, np.append(begins[1:], len(rows))[: len(begins)] - 1)
        lags = self._fronts()[1] - self._rows["operations"]
        self._least_lag = np.minimum(np.minimum.reduceat(least, begins), lags) if len(rows) else least

    def forget_all_but(self, context: Context) -> None:
        """Drops the counts of communicators that are not among these groups."""
        stays = np.isin(self._rows["communicator"], np.fromiter(context.groups, np.int64))
        self._rows, self._least_lag = whole_rows.kept(self._rows, stays), self._least_lag[stays]

    def channels(self, context: Context) -> Iterator[tuple[tuple[int, int, int], int, int, int, int, bool]]:
        """Of each channel of a group: its name, where its ranks begin, how many there are, the time of the newest
        operation, how far the first rank has come, and whether those furthest behind are known to rest.
        """
        rows = self._rows
        begins, fronts = self._fronts()
        if not len(rows):
            return
        ends = np.append(begins[1:], len(rows))
        newest = np.maximum.reduceat(rows["last_ns"], begins)
        behind = fronts - rows["operations"] - self._least_lag
        most = np.repeat(np.maximum.reduceat(behind, begins), ends - begins)
        is_listed = np.isin(rows["communicator"], np.fromiter(context.groups, np.int64))
        names = np.full(len(rows), NO_NUMBER, np.int64)
        names[is_listed] = context.global_ranks_of(whole_rows.kept(rows, is_listed))
        is_last = (behind == most) & (names != NO_NUMBER)
        rests = np.isin(names, np.fromiter(context.resting_ranks, np.int64))
        resting = np.logical_or.reduceat(is_last, begins) & ~np.logical_or.reduceat(is_last & ~rests, begins)
        columns = *(rows[name][begins] for name in _CHANNEL), begins, ends - begins, newest, fronts[begins], resting
        listed = is_listed[begins].tolist()
        for is_own, (communicator, sender, receiver, *rest) in zip(
            listed, zip(*(column.tolist() for column in columns), strict=True), strict=True
        ):
            if is_own:
                yield (communicator, sender, receiver), *rest

    def standing(self, begin: int, ranks: int) -> tuple[int, dict[int, int]]:
        """Of one channel: how far the first rank has come, and how many operations each rank is missing."""
        rows = self._rows[begin : begin + ranks]
        front = int(rows["operations"].max())
        behind = front - rows["operations"] - self._least_lag[begin : begin + ranks]
        return front, dict(zip(rows["rank"].tolist(), behind.tolist(), strict=True))

    def last_ns(self, begin: int, ranks: int) -> dict[int, int]:
        """Of one channel: when each rank enqueued its newest operation there."""
        rows = self._rows[begin : begin + ranks]
        return dict(zip(rows["rank"].tolist(), rows["last_ns"].tolist(), strict=True))

    def _fronts(self) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Where each channel begins; and for each row how far the first of its channel has come."""
        begins = _begins(self._rows, _CHANNEL)
        if not len(begins):
            return begins, np.empty(0, np.int64)
        sizes = np.diff(np.append(begins, len(self._rows)))
        return begins, np.repeat(np.maximum.reduceat(self._rows["operations"], begins), sizes)


def _begins(rows: Columns, names: tuple[str, ...]) -> NDArray[np.intp]:
    """Where another value of these columns begins, of rows in their order."""
    if not len(rows):
        return np.empty(0, np.intp)
    changes = np.any([np.diff(rows[name]) != 0 for name in names], axis=0)
    return np.concatenate([[0], np.flatnonzero(changes) + 1])
