"""NCCL Inspector's records of one collective on all of its ranks, and what they measure together.

coll_sn is the same on all ranks, so no log is needed: (communicator, kind, coll_sn) is the collective. In an
N-to-N collective the shortest duration holds no waiting, and no clock is needed (`transfer.py`). When a kernel starts
Inspector does not tell, so the transfer of rooted collectives and of Send and Recv is not known.

Durations are whole us, rounded down: a transfer of 20 us is known within 5 %.

Replays of CUDA graphs that both NCCL Inspector and nsys recorded are found here, so that each is counted once. A replay
has no log line, so no record of it names an operation, and the number that NCCL gives it need not be one of its own.
But a record is dumped a moment after its kernel ended: where nsys recorded a replay of the same rank, operation and
size shortly before the dump, the record is of a replay that nsys tells of as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct_together, group_by
from ncclscope_service.columns.table import Ids
from ncclscope_service.measure import transfer
from ncclscope_service.measure.transfer import Measures, collective_rows
from ncclscope_service.nccl import bandwidth
from ncclscope_service.store import rows
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import KERNEL_GPU, NO_NUMBER, NO_TIME_NS, OPERATIONS

_IS_N_TO_N: Final = np.array(
    [operation.is_collective and not operation.is_rooted for operation in OPERATIONS]
    + [False] * (256 - len(OPERATIONS))
)
MAX_WAITING: Final = 1_000_000
"""Records that wait for other ranks; beyond it the oldest are given up, which is counted."""


def is_usable(records: Columns) -> NDArray[np.bool_]:
    """Which records (rows.INSPECTED) have a time that the GPU took."""
    usable: NDArray[np.bool_] = (records["timing"] == KERNEL_GPU) & (records["duration_ns"] != NO_TIME_NS)
    return usable


class InspectorJoin:
    """Gathers the ranks of each collective."""

    def __init__(self, known: Store, *, settle_ns: int, patience_ns: int) -> None:
        """`settle_ns`: how long ranks that never spoke are waited for; `patience_ns`: how long any rank is."""
        self._store = known
        self._settle_ns = settle_ns
        self._patience_ns = patience_ns
        self._waiting: Ids = np.empty(0, np.int64)
        self._ranks: dict[int, set[int]] = {}

    @property
    def waiting(self) -> Ids:
        """Records that wait for other ranks."""
        return self._waiting

    def report(self, records: Ids) -> None:
        """New records whose communicator is known."""
        told = self._store.inspected.take(records)
        of_use = is_usable(told) & _IS_N_TO_N[told["op"]] & (told["message_bytes"] >= 0) & (told["communicator"] >= 0)
        sizes = np.asarray([communicator.size for communicator in self._store.communicators] or [0], np.int64)
        of_use &= (told["rank"] >= 0) & (told["rank"] < sizes[np.maximum(told["communicator"], 0)])
        for communicator, rank in set(
            zip(told["communicator"][of_use].tolist(), told["rank"][of_use].tolist(), strict=True)
        ):
            self._ranks.setdefault(communicator, set()).add(rank)
        self._waiting = np.concatenate([self._waiting, records[of_use]])

    def take_ready(self, now_ns: int, *, final: bool) -> list[Ids]:
        """Records of collectives that are complete, or waited for long enough: an array per communicator.

        Each array is sorted by (kind, coll_sn, rank).
        """
        waiting = self._waiting[self._waiting >= self._store.inspected.first]
        self._store.skipped.update(_counted("inspector_not_joined", max(0, len(waiting) - MAX_WAITING)))
        waiting = waiting[-MAX_WAITING:]
        if not len(waiting):
            self._waiting = waiting
            return []
        told = self._store.inspected.take(waiting)
        order = np.lexsort((told["rank"], told["sequence"], told["op"], told["communicator"]))
        waiting, told = waiting[order], told[order]
        begins, group = _groups(told)
        amounts = np.bincount(group)
        waited = now_ns - np.minimum.reduceat(told["arrived_at_ns"], begins)
        communicators = told["communicator"][begins]
        sizes = np.asarray([self._store.communicators[index].size for index in communicators.tolist()])
        spoke = np.asarray([len(self._ranks.get(index, ())) for index in communicators.tolist()])
        ready = (amounts >= sizes) | ((amounts >= spoke) & (waited > self._settle_ns)) | (waited > self._patience_ns)
        chosen = ready[group] | final
        self._waiting = waiting[~chosen]
        taken, of = waiting[chosen], told["communicator"][chosen]
        return [taken[of == communicator] for communicator in np.unique(of).tolist()]

    def measure(self, records: Ids) -> tuple[Columns, Ids]:
        """Measures collectives of one communicator, and writes the results to their records.

        Gives a rows.COLLECTIVE for each that was seen on two ranks (times as NO_TIME_NS, coll_seq as NO_NUMBER), and
        for each of those the K x R records, NO_NUMBER if a rank has none.
        """
        told = self._store.inspected.take(records)
        of = self._store.communicators[int(told["communicator"][0])]
        begins, group = _groups(told)
        matrix = np.full((len(begins), of.size), NO_NUMBER, np.int64)
        matrix[group, told["rank"]] = records
        agrees = np.minimum.reduceat(told["message_bytes"], begins) == np.maximum.reduceat(
            told["message_bytes"], begins
        )
        agrees &= (matrix != NO_NUMBER).sum(axis=1) == np.bincount(group)
        self._store.skipped.update(_counted("inspector_unjoinable", int(np.count_nonzero(~agrees))))
        matrix, reference = matrix[agrees], told[begins[agrees]]
        if not len(matrix):
            return np.empty(0, rows.COLLECTIVE), matrix
        present = matrix != NO_NUMBER
        durations = np.full(matrix.shape, NO_TIME_NS, np.int64)
        durations[present] = self._store.inspected.take(matrix[present])["duration_ns"]
        moved = reference["message_bytes"]
        weighted = moved * bandwidth.factor(reference["op"], np.full(len(moved), of.size, np.int32))
        measures = transfer.measure_all_to_all(
            np.where(present, 0, NO_TIME_NS), durations, np.zeros(matrix.shape, bool), moved, weighted
        )
        self._write_back(matrix, present, measures)
        known = measures.transfer_ns >= 0
        return _collectives(of.index, reference, measures)[known], matrix[known]

    def _write_back(self, matrix: Ids, present: NDArray[np.bool_], measures: Measures) -> None:
        at = self._store.inspected.at(matrix[present])
        table = self._store.inspected.rows
        wait = np.where(measures.wait_ns < 0, NO_TIME_NS, measures.wait_ns)
        transfer = np.where(measures.transfer_ns < 0, NO_TIME_NS, measures.transfer_ns)
        table["wait_ns"][at] = wait[present]
        table["transfer_ns"][at] = np.broadcast_to(transfer[:, None], present.shape)[present]
        table["ranks_seen"][at] = np.broadcast_to(measures.ranks_seen[:, None], present.shape)[present]


def _groups(told: Columns) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Of sorted records: where each collective begins, and to which one each record belongs."""
    new = np.ones(len(told), bool)
    new[1:] = False
    for name in ("communicator", "op", "sequence"):
        new[1:] |= told[name][1:] != told[name][:-1]
    return np.flatnonzero(new), np.cumsum(new) - 1


def _counted(reason: str, amount: int) -> dict[str, int]:
    return {reason: amount} if amount else {}


def _collectives(communicator: int, reference: Columns, measures: Measures) -> Columns:
    collectives = collective_rows(reference["op"], reference["message_bytes"], measures)
    collectives["communicator"] = communicator
    collectives["coll_seq"] = NO_NUMBER
    collectives["first_start_true_ns"] = collectives["end_true_ns"] = NO_TIME_NS
    collectives["confidence"] = measures.ranks_seen / measures.duration_ns.shape[1]
    return collectives


_WITHIN_NS: Final = 1_000_000_000
"""How long after its kernel a record is dumped at most: the plug-in's pause between dumps is a fraction of a second."""
_CLOCK_SLACK_NS: Final = 1_000_000
_STRETCHES: Final = 64

_Key = tuple[int, int, int]
"""Member, operation code, message size."""


@dataclass(slots=True)
class InspectedReplays:
    """Keeps stretches of time in which records without an operation were counted, a bounded number of each kind."""

    _counted: dict[_Key, list[tuple[int, int]]] = field(default_factory=dict[_Key, list[tuple[int, int]]])
    """When their dumps were made, oldest stretch first."""

    def have_kernels(self, known: Store, records: Columns, members: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these records (rows.INSPECTED), of these members, are of replays that nsys recorded."""
        replays = known.replays.rows
        found = np.zeros(len(records), np.bool_)
        if not len(replays) or not len(records):
            return found
        ops = known.templates_of(replays, "op")["op"]
        amount = len(replays)
        columns = (
            np.concatenate([replays["member"].astype(np.int64), members]),
            np.concatenate([ops.astype(np.int64), records["op"].astype(np.int64)]),
            np.concatenate([replays["message_bytes"], records["message_bytes"]]),
        )
        _, key = distinct_together(*columns)
        order = np.lexsort((replays["end_ns"], key[:amount]))
        ends, of = replays["end_ns"][order], key[:amount][order]
        for kind, mine in group_by(key[amount:]):
            own = ends[np.searchsorted(of, kind, side="left") : np.searchsorted(of, kind, side="right")]
            if len(own):
                dumped = records["dumped_at_ns"][mine]
                at = np.searchsorted(own, dumped + _CLOCK_SLACK_NS, side="right") - 1
                found[mine] = (at >= 0) & (dumped - own[np.maximum(at, 0)] <= _WITHIN_NS)
        return found

    def count(self, records: Columns, members: NDArray[np.int64]) -> None:
        """Takes note of records without an operation that were counted."""
        columns = (members, records["op"].astype(np.int64), records["message_bytes"])
        keys, key = distinct_together(*columns)
        for kind, mine in group_by(key):
            member, op, size = (int(column[kind]) for column in keys)
            stretches = self._counted.setdefault((member, op, size), [])
            for dumped in np.sort(records["dumped_at_ns"][mine]).tolist():
                if stretches and stretches[-1][0] - _WITHIN_NS <= dumped <= stretches[-1][1] + _WITHIN_NS:
                    stretches[-1] = min(dumped, stretches[-1][0]), max(dumped, stretches[-1][1])
                else:
                    stretches.append((dumped, dumped))
            del stretches[:-_STRETCHES]

    def were_counted(self, known: Store, replays: Columns) -> NDArray[np.bool_]:
        """Which of these replays (rows.REPLAYED) were counted from records before nsys told of them."""
        found = np.zeros(len(replays), np.bool_)
        if not self._counted or not len(replays):
            return found
        ops = known.templates_of(replays, "op")["op"].astype(np.int64)
        keys, key = distinct_together(replays["member"].astype(np.int64), ops, replays["message_bytes"])
        for kind, mine in group_by(key):
            member, op, size = (int(column[kind]) for column in keys)
            ends = replays["end_ns"][mine]
            known_end = ends != NO_TIME_NS
            for since, until in self._counted.get((member, op, size), ()):
                found[mine] |= known_end & (ends > since - _WITHIN_NS) & (ends <= until + _CLOCK_SLACK_NS)
        return found
