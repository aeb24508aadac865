"""How many operations each rank has enqueued on each channel, from the logs as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import KeyIndex, distinct_together
from ncclscope_service.detect.context import Context
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

PROGRESS: Final = np.dtype(
    [
        ("communicator", "<i4"),
        ("sender", "<i4"),  # communicator ranks of an ordered pair; NO_NUMBER for collectives
        ("receiver", "<i4"),
        ("rank", "<i4"),  # the communicator rank that counted
        ("operations", "<i8"),  # enqueued so far on this channel
        ("last_ns", "<i8"),  # when the newest of them was logged, or observed if lines have no stamp; NO_TIME_NS
    ]
)
"""How far each rank has come on each channel: a communicator's collectives, or one ordered pair of Send and Recv."""

_SEND: Final = OPERATION_CODES["Send"]
_RECV: Final = OPERATION_CODES["Recv"]
_CHANNEL: Final = ("communicator", "sender", "receiver")
_NEVER: Final = np.iinfo(np.int64).max
_BLOCK: Final = 8
"""Passes in which the job went on: after one or two blocks a rank that is behind at all of them has lost lines."""


class ChannelProgress(NamedTuple):
    """One channel of a job: a communicator's collectives, or one ordered pair of Send and Recv."""

    communicator: int
    sender: int
    receiver: int
    begin: int
    """Row of the board at which the counts of its ranks begin."""
    ranks: int
    newest_ns: int
    """Time of the newest operation."""
    front: int
    """Count of the rank that is furthest ahead."""
    is_resting: bool
    """Whether the ranks furthest behind are known to have just ended a step."""


class ProgressBoard:
    """The newest count of every rank, and its smallest distance to the front so far and of late."""

    def __init__(self) -> None:
        self._rows: Columns = np.empty(0, PROGRESS)
        """By channel and rank."""
        self._least_lags: NDArray[np.int64] = np.empty((0, 3), np.int64)
        """Smallest distances to the front: so far, as lines that were lost before the first pass are no lateness; in
        the last block of passes; and in the present one.
        """
        self._passes = 0
        """Of the present block."""

    def update(self, progress: Columns) -> None:
        """Takes present counts (`PROGRESS`); ranks that are not among them keep their last ones."""
        before = self._fronts()[1].sum()
        rows = row_ops.concat([self._rows, progress])
        least = np.concatenate([self._least_lags, np.full((len(progress), 3), _NEVER)])
        order = np.lexsort((rows["rank"], *(rows[name] for name in reversed(_CHANNEL))))
        rows, least = row_ops.take(rows, order), least[order]
        begins = _begins(rows, (*_CHANNEL, "rank"))
        self._rows = row_ops.take(rows, np.append(begins[1:], len(rows))[: len(begins)] - 1)
        fronts = self._fronts()[1]
        lags = (fronts - self._rows["operations"])[:, None]
        self._least_lags = np.minimum(np.minimum.reduceat(least, begins), lags) if len(rows) else least
        self._passes += bool(fronts.sum() > before)
        if self._passes > _BLOCK:
            self._passes = 0
            self._least_lags[:, 1] = self._least_lags[:, 2]
            self._least_lags[:, 2] = _NEVER

    @property
    def shows_losses(self) -> bool:
        """Whether a rank stayed behind in a collective of late, while others went on: they cannot without it."""
        is_late = np.minimum(self._least_lags[:, 1], self._least_lags[:, 2]) > self._least_lags[:, 0]
        is_known = (self._least_lags[:, 1] < _NEVER) & (self._rows["sender"] == NO_NUMBER)
        return bool((is_late & is_known).any())

    def forget_all_but(self, context: Context) -> None:
        """Drops the counts of communicators that are not among these groups."""
        stays = np.isin(self._rows["communicator"], np.fromiter(context.groups, np.int64))
        self._rows, self._least_lags = row_ops.filter_rows(self._rows, stays), self._least_lags[stays]

    def channels(self, context: Context) -> Iterator[ChannelProgress]:
        """Each channel of a group."""
        rows = self._rows
        begins, fronts = self._fronts()
        if not len(rows):
            return
        ends = np.append(begins[1:], len(rows))
        newest = np.maximum.reduceat(rows["last_ns"], begins)
        behind = fronts - rows["operations"] - self._least_lags[:, 0]
        most = np.repeat(np.maximum.reduceat(behind, begins), ends - begins)
        is_listed = np.isin(rows["communicator"], np.fromiter(context.groups, np.int64))
        names = np.full(len(rows), NO_NUMBER, np.int64)
        names[is_listed] = context.global_ranks_of(row_ops.filter_rows(rows, is_listed))
        is_last = (behind == most) & (names != NO_NUMBER)
        rests = np.isin(names, np.fromiter(context.resting_ranks, np.int64))
        resting = np.logical_or.reduceat(is_last, begins) & ~np.logical_or.reduceat(is_last & ~rests, begins)
        columns = *(rows[name][begins] for name in _CHANNEL), begins, ends - begins, newest, fronts[begins], resting
        listed = is_listed[begins].tolist()
        for is_own, values in zip(listed, zip(*(column.tolist() for column in columns), strict=True), strict=True):
            if is_own:
                yield ChannelProgress(*values)

    def standing(self, begin: int, ranks: int) -> tuple[int, dict[int, int]]:
        """The count of the first rank of a channel, and how many operations each rank is behind it."""
        rows = self._rows[begin : begin + ranks]
        front = int(rows["operations"].max())
        behind = front - rows["operations"] - self._least_lags[begin : begin + ranks, 0]
        return front, dict(zip(rows["rank"].tolist(), behind.tolist(), strict=True))

    def last_ns(self, begin: int, ranks: int) -> dict[int, int]:
        """When each rank of a channel enqueued its newest operation there."""
        rows = self._rows[begin : begin + ranks]
        return dict(zip(rows["rank"].tolist(), rows["last_ns"].tolist(), strict=True))

    def _fronts(self) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """The row where each channel begins; and for each row the count of the first rank of its channel."""
        begins = _begins(self._rows, _CHANNEL)
        if not len(begins):
            return begins, np.empty(0, np.int64)
        sizes = np.diff(np.append(begins, len(self._rows)))
        return begins, np.repeat(np.maximum.reduceat(self._rows["operations"], begins), sizes)


def _begins(rows: Columns, names: tuple[str, ...]) -> NDArray[np.intp]:
    """Rows at which a value of these columns changes."""
    if not len(rows):
        return np.empty(0, np.intp)
    changes = np.any([np.diff(rows[name]) != 0 for name in names], axis=0)
    return np.concatenate([[0], np.flatnonzero(changes) + 1])


_KEY: Final = ("communicator", "sender", "receiver", "rank")


class ProgressTable:
    """The present counts of one job."""

    def __init__(self) -> None:
        self._places = KeyIndex(len(_KEY))
        self._rows: Columns = np.zeros(0, PROGRESS)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def rows(self) -> Columns:
        """All of them (`PROGRESS`), in the order in which they came first."""
        return self._rows[: len(self._places)]

    def update(self, counts: Columns) -> None:
        """Takes newer counts (`PROGRESS`)."""
        places = self._places.number(*(counts[name] for name in _KEY))
        if len(self._places) > len(self._rows):
            grown = np.zeros(2 * len(self._places), PROGRESS)
            grown["last_ns"] = NO_TIME_NS
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        last_ns = np.maximum(self._rows["last_ns"][places], counts["last_ns"])
        self._rows[places] = counts
        self._rows["last_ns"][places] = last_ns


class CountedOperations(NamedTuple):
    """Operations, each with the channel and the rank that it counts for."""

    counts: Columns
    """`PROGRESS` of each rank on each channel, before any of the operations, without times."""
    processes: NDArray[np.int32]
    """The process of each of these."""
    of_operation: NDArray[np.intp]
    """Of each operation at `positions`, the row of `counts`."""
    enqueued: NDArray[np.int64]
    """How many operations its rank has enqueued with it on that channel."""
    positions: NDArray[np.intp]
    """Positions of the operations that count: those of unknown ranks do not."""


def counted_operations(store: Store, operations: Columns) -> CountedOperations:
    """Where these operations (with columns of `rows.PLACED`) count."""
    templates = store.templates_of(operations, "op", "root")
    collective = operations["coll_seq"] != NO_NUMBER
    (members, ops, peers), inverse = distinct_together(
        operations["member"],
        np.where(collective, 0, templates["op"]),
        np.where(collective, NO_NUMBER, templates["root"]),
    )
    records = [store.members[member] for member in members.tolist()]
    own = np.asarray([NO_NUMBER if each.rank is None else each.rank for each in records], np.int32)
    counts = np.zeros(len(members), PROGRESS)
    counts["communicator"] = [each.communicator for each in records]
    counts["rank"] = own
    counts["sender"] = np.where(peers == NO_NUMBER, NO_NUMBER, np.where(ops == _SEND, own, peers))
    counts["receiver"] = np.where(peers == NO_NUMBER, NO_NUMBER, np.where(ops == _SEND, peers, own))
    counts["last_ns"] = NO_TIME_NS
    is_pair = (ops == _SEND) | (ops == _RECV)
    usable = (own != NO_NUMBER) & ((peers == NO_NUMBER) | is_pair) & (peers != own)
    places = np.cumsum(usable) - 1
    counted = np.flatnonzero(usable[inverse])
    enqueued = np.where(collective, operations["coll_seq"], operations["pair_seq"])[counted].astype(np.int64) + 1
    processes = np.asarray([each.process for each in records], np.int32)[usable]
    return CountedOperations(
        row_ops.filter_rows(counts, usable), processes, places[inverse[counted]], enqueued, counted
    )


def progress_of_operations(
    store: Store, operations: Columns, times: NDArray[np.int64]
) -> tuple[Columns, NDArray[np.int32]]:
    """The newest count of each rank on each channel (`PROGRESS`) in these operations, and the process of each rank."""
    counts, processes, at, enqueued, counted = counted_operations(store, operations)
    np.maximum.at(counts["operations"], at, enqueued)
    np.maximum.at(counts["last_ns"], at, times[counted])
    return counts, processes
