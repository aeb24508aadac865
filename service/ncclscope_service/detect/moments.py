"""How far ranks had come at earlier moments of a job: how a kill would have left them then.

By the stamps of its lines or, without stamps, by the launches of its kernels. Of a lost line nothing is known until its
kernel has ended. Clocks of hosts are put on one by the collectives between them: ranks enqueue the same one at about
the same time, by the median of many. Where no collective joins two hosts, or stamps are coarse, nothing is said.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct_together
from ncclscope_service.detect.progress import CountedOperations, counted_operations
from ncclscope_service.store.rows import Match, has_launch
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_MOST_MOMENTS, _LEAST_MOMENTS = 400, 100
"""Enough to tell 2 % from 1 %, or at least from 0."""
_MOST_COUNTS: Final = 400_000
"""Over all moments: of a job of many ranks fewer moments are looked at."""
_COARSE_NS: Final = 10_000_000
"""Stamps of whole hundredths of a second make ranks look even that were not."""
_COLUMNS: Final = ("process", "member", "template", "coll_seq", "pair_seq", "logged_at_ns", "match", "kernel", "end_ns")
_NEVER: Final = np.iinfo(np.int64).max
_BEGIN, _END = 0.2, 0.97
"""Shares of the operations before the first moment, as a job begins otherwise than it goes on, and the last one."""


def earlier_counts(store: Store, job: str, *, are_ends_known: bool = False) -> list[Columns]:
    """The counts (`progress.PROGRESS`) of a job at moments that are spread evenly over the time of its lines in memory.

    Empty if the stamps of its lines do not tell. `are_ends_known`: what lost lines hid then counts too, as it does
    not matter at the end.
    """
    is_of_job = np.asarray([each == job for each in store.process_job], np.bool_)
    rows = store.operations.rows
    operations = rows.take(np.flatnonzero(is_of_job[rows["process"]]), *_COLUMNS)
    enqueued_ns = _enqueued_ns(store, operations, are_ends_known=are_ends_known)
    if ((enqueued_ns == NO_TIME_NS) & (operations["match"] == Match.NOT_COVERED)).any():
        return []
    operations, enqueued_ns = (
        row_ops.filter_rows(operations, enqueued_ns != NO_TIME_NS),
        enqueued_ns[enqueued_ns != NO_TIME_NS],
    )
    if len(operations) < _LEAST_MOMENTS or not (enqueued_ns % _COARSE_NS).any():
        return []
    ahead_ns = _ahead_by_process(store, operations, enqueued_ns)
    if ahead_ns is None:
        return []
    ahead_ns = ahead_ns[operations["process"]]
    has_kernel = has_launch(operations["match"])
    ended_ns = np.where(has_kernel, operations["end_ns"] - ahead_ns, _NEVER)
    return _counts(store, operations, enqueued_ns - ahead_ns, ended_ns)


def _enqueued_ns(store: Store, operations: Columns, *, are_ends_known: bool) -> NDArray[np.int64]:
    """When it was seen that each of these operations was enqueued; NO_TIME_NS if not known.

    When its line was written, or its kernel launched; if its line was lost, when its kernel had ended, unless
    `are_ends_known`.
    """
    times = operations["logged_at_ns"].copy()
    if not are_ends_known:
        is_lost = operations["match"] == Match.LINE_LOST
        times[is_lost] = operations["end_ns"][is_lost]
    launched = np.flatnonzero((times == NO_TIME_NS) & has_launch(operations["match"]))
    times[launched] = store.kernels.take(operations["kernel"][launched], "launch_start_ns")["launch_start_ns"]
    return times


def _counts(store: Store, operations: Columns, times: NDArray[np.int64], ended_ns: NDArray[np.int64]) -> list[Columns]:
    placed = counted_operations(store, operations)
    amount = min(_MOST_MOMENTS, max(_LEAST_MOMENTS, _MOST_COUNTS // max(1, len(placed.counts))))
    begin, end = np.quantile(times, (_BEGIN, _END)).tolist()
    moments = np.linspace(begin, end, amount)
    enqueued = _newest(placed, times[placed.positions], moments)
    ended = _newest(placed, ended_ns[placed.positions], moments)
    # A kernel that ended shows that its peer had enqueued the other side.
    columns = (placed.counts[name] for name in ("communicator", "sender", "receiver"))
    _, channel = distinct_together(*columns)
    order = np.lexsort((placed.counts["rank"], channel))
    is_pair = (placed.counts["sender"] != NO_NUMBER) & (np.bincount(channel)[channel] == 2)
    sides = order[is_pair[order]].reshape(-1, 2)
    enqueued[:, sides] = np.maximum(enqueued[:, sides], ended[:, sides[:, ::-1]])
    found: list[Columns] = []
    for each in enqueued:
        counts = row_ops.copy(placed.counts)
        counts["operations"] = each
        found.append(counts)
    return found


def _newest(placed: CountedOperations, times: NDArray[np.int64], moments: NDArray[np.float64]) -> NDArray[np.int64]:
    """M x K: the count of each row of `placed.counts` at each moment, by operations of which these are the times."""
    ordered = np.sort(times)
    before = np.searchsorted(ordered, moments, side="right")
    rank_of_time = np.searchsorted(ordered, times)
    order = np.lexsort((rank_of_time, placed.of_operation))
    keys, enqueued = placed.of_operation[order], placed.enqueued[order]
    places = np.arange(len(placed.counts))
    begins = np.searchsorted(keys, places)
    by_key_and_time = keys * np.int64(len(times) + 1) + rank_of_time[order]
    newest = np.searchsorted(by_key_and_time, places * np.int64(len(times) + 1) + before[:, None]) - 1
    return np.where(newest >= begins, enqueued[np.maximum(newest, 0)], enqueued[begins] - 1)


def _ahead_by_process(store: Store, operations: Columns, times: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """By process: by how much the clock of its host is ahead of that of the first one; None if not known of all."""
    hosts = [process.host for process in store.processes]
    wanted = {hosts[process] for process in np.unique(operations["process"]).tolist()}
    is_line = (operations["coll_seq"] != NO_NUMBER) & (operations["match"] != Match.LINE_LOST)
    collectives, times = row_ops.filter_rows(operations, is_line), times[is_line]
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
                later = _median_difference(collectives, times, members[known[0]], members[host])
                if later is not None:
                    ahead[host] = ahead[known[0]] + later
    if len(ahead) < len(wanted):
        return None
    return np.asarray([round(ahead.get(host, 0.0)) for host in hosts], np.int64)


def _median_difference(collectives: Columns, times: NDArray[np.int64], one: int, other: int) -> float | None:
    """By how much a member enqueued the same collectives later than another one, by the clocks of their hosts."""
    first, second = (np.flatnonzero(collectives["member"] == each) for each in (one, other))
    numbers = collectives["coll_seq"]
    _, at, its = np.intersect1d(numbers[first], numbers[second], return_indices=True)
    return float(np.median(times[second[its]] - times[first[at]])) if len(at) else None
