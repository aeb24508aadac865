"""How far ranks had come at earlier moments of a job, by the stamps of its lines: how a kill would have left them then.

Stamps of hosts are put on one clock by the collectives between them: ranks enqueue the same one at about the same time,
by the median of many. Where no collective joins two hosts, or stamps are coarse, nothing is said.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.detect.progress import counted_operations
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_MOST_MOMENTS, _LEAST_MOMENTS = 400, 100
"""Enough to tell 2 % from 1 %, or at least from 0."""
_MOST_COUNTS: Final = 400_000
"""Over all moments: of a job of many ranks fewer moments are looked at."""
_COARSE_NS: Final = 10_000_000
"""Stamps of whole hundredths of a second make ranks look even that were not."""
_COLUMNS: Final = ("process", "member", "template", "coll_seq", "pair_seq", "logged_at_ns")
_BEGIN, _END = 0.2, 0.97
"""Shares of the operations before the first moment, as a job begins otherwise than it goes on, and the last one."""


def earlier_counts(store: Store, job: str) -> list[Columns]:
    """The counts (`progress.PROGRESS`) of a job at moments that are spread evenly over the time of its lines in memory.

    Empty if the stamps of its lines do not tell.
    """
    is_of_job = np.asarray([each == job for each in store.process_job], np.bool_)
    rows = store.operations.rows
    operations = rows.take(np.flatnonzero(is_of_job[rows["process"]] & (rows["match"] != Match.LINE_LOST)), *_COLUMNS)
    stamps = operations["logged_at_ns"]
    if len(operations) < _LEAST_MOMENTS or (stamps == NO_TIME_NS).any() or not (stamps % _COARSE_NS).any():
        return []
    ahead_ns = _ahead_by_process(store, operations)
    return [] if ahead_ns is None else _counts(store, operations, stamps - ahead_ns[operations["process"]])


def _counts(store: Store, operations: Columns, times: NDArray[np.int64]) -> list[Columns]:
    placed = counted_operations(store, operations)
    ordered = np.sort(times)
    amount = min(_MOST_MOMENTS, max(_LEAST_MOMENTS, _MOST_COUNTS // max(1, len(placed.counts))))
    begin, end = np.quantile(times, (_BEGIN, _END)).tolist()
    moments = np.linspace(begin, end, amount)
    before = np.searchsorted(ordered, moments, side="right").tolist()
    rank_of_time = np.searchsorted(ordered, times[placed.positions])
    order = np.lexsort((rank_of_time, placed.of_operation))
    keys, enqueued = placed.of_operation[order], placed.enqueued[order]
    places = np.arange(len(placed.counts))
    begins = np.searchsorted(keys, places)
    by_key_and_time = keys * np.int64(len(times)) + rank_of_time[order]
    found: list[Columns] = []
    for seen in before:
        newest = np.searchsorted(by_key_and_time, places * np.int64(len(times)) + seen) - 1
        counts = row_ops.copy(placed.counts)
        counts["operations"] = np.where(newest >= begins, enqueued[np.maximum(newest, 0)], enqueued[begins] - 1)
        found.append(counts)
    return found


def _ahead_by_process(store: Store, operations: Columns) -> NDArray[np.int64] | None:
    """By process: by how much the clock of its host is ahead of that of the first one; None if not known of all."""
    hosts = [process.host for process in store.processes]
    wanted = {hosts[process] for process in np.unique(operations["process"]).tolist()}
    collectives = row_ops.filter_rows(operations, operations["coll_seq"] != NO_NUMBER)
    joins: defaultdict[int, dict[str, int]] = defaultdict(dict[str, int])
    """By communicator and host: one of its members."""
    for member in np.unique(collectives["member"]).tolist():
        joins[store.members[member].communicator].setdefault(hosts[store.members[member].process], member)
    ahead = {min(wanted): 0.0}
    reached = 0
    while reached != len(ahead) < len(wanted):
        reached = len(ahead)
        for members in joins.values():
            known = sorted(members.keys() & ahead.keys())
            for host in sorted(members.keys() - ahead.keys()) if known else ():
                later = _median_difference(collectives, members[known[0]], members[host])
                if later is not None:
                    ahead[host] = ahead[known[0]] + later
    if len(ahead) < len(wanted):
        return None
    return np.asarray([round(ahead.get(host, 0.0)) for host in hosts], np.int64)


def _median_difference(collectives: Columns, one: int, other: int) -> float | None:
    """By how much the stamps of a member are later than those of another one of the same collectives."""
    first, second = (row_ops.filter_rows(collectives, collectives["member"] == each) for each in (one, other))
    _, at, its = np.intersect1d(first["coll_seq"], second["coll_seq"], return_indices=True)
    return float(np.median(second["logged_at_ns"][its] - first["logged_at_ns"][at])) if len(at) else None
