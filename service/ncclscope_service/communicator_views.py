"""What is shown of each communicator: what it moved, how fast, against which limit, and its last minutes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.aliases import Aliases
from ncclscope_service.ranks import global_ranks, hosts_of
from ncclscope_service.rows import SIZE_CLASSES, Communicator
from ncclscope_service.store import Store
from ncclscope_service.tally import operation_name
from ncclscope_service.window import (
    BandwidthPoints,
    Floats,
    Int64s,
    RecentOperations,
    Window,
    bandwidth_points,
    ratio_by_bucket,
    recent_collectives,
    sum_by_bucket,
)
from ncclscope_wire.batch import Columns

MAX_SHOWN: Final = 64
"""Communicators of a job on the page."""

_RECENT_BUCKETS: Final = 12
"""The last minute: what "now" means for waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorView:
    """One communicator. Bandwidths are of its main series: the operation and size class that moved most bytes."""

    alias: str
    comm_id: str
    parallelism: str | None
    size: int
    hosts: int
    ranks: tuple[int, ...]
    """Global ranks that are known, ascending."""
    operations: int
    bytes: int
    ops: tuple[tuple[str, int], ...]
    """Operations by name, most frequent first."""
    main_op: str | None
    main_size_class: str | None
    busbw: float | None
    """Bytes per second, median over the last minute with data."""
    limit: float | None
    """By topology."""
    baseline: float | None
    """The best that the main series has shown."""
    wait_ratio: float | None
    """Over the last minute."""
    busbw_history: tuple[float | None, ...]
    """By bucket of the window."""
    bytes_history: tuple[float | None, ...]
    """Logged bytes per second and bucket, over all ranks: what there is with logs only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """The last minutes of all communicators, rows by communicator index."""

    busbw: Floats
    """Bytes per second by bucket, of the main series; NaN without data."""
    bytes_per_second: Floats
    """Logged, by bucket; NaN where nothing can be known."""
    wait_ratio: Floats
    """Over the last minute; NaN without data."""


def recent_of_communicators(store: Store, operations: RecentOperations, window: Window) -> Recent:
    """The last minutes of all communicators of the store."""
    count = len(store.communicators)
    collectives = recent_collectives(store)
    return Recent(
        busbw=_busbw_history(bandwidth_points(collectives), store, window),
        bytes_per_second=_bytes_history(operations, count, window),
        wait_ratio=recent_wait_ratio(collectives, count, window),
    )


def main_series(store: Store) -> Int64s:
    """By communicator: position in `series` of what moved most bytes (then most operations); -1 without series."""
    series = store.series.rows
    main = np.full(len(store.communicators), -1, np.int64)
    order = np.lexsort((series["operations"], series["bytes"]))
    order = order[series["communicator"][order] >= 0]
    main[series["communicator"][order]] = order
    return main


def recent_wait_ratio(collectives: Columns, count: int, window: Window) -> Floats:
    """By communicator: waiting over kernel time of the collectives of the last minute; NaN without."""
    last = Window(
        begin_ns=window.end_ns - _RECENT_BUCKETS * window.bucket_ns,
        bucket_ns=_RECENT_BUCKETS * window.bucket_ns,
        buckets=1,
    )
    return ratio_by_bucket(
        collectives["communicator"].astype(np.int64),
        collectives["end_true_ns"].astype(np.int64),
        collectives["wait_ns"],
        collectives["busy_ns"],
        count=count,
        window=last,
    )[:, 0]


def most_telling(
    views: Sequence[Communicator], bytes_of: NDArray[np.int64], named: frozenset[str]
) -> list[Communicator]:
    """MAX_SHOWN communicators: those that findings name, then the busiest of each kind in turn."""
    by_bytes = sorted(views, key=lambda each: (-int(bytes_of[each.index]), each.index))
    kinds = dict.fromkeys(each.parallelism for each in by_bytes)
    in_turn = zip_longest(*([each for each in by_bytes if each.parallelism == kind] for kind in kinds))
    mixed = [each for each in chain.from_iterable(in_turn) if each is not None]
    chosen = sorted(mixed, key=lambda each: each.comm_id not in named)[:MAX_SHOWN]
    return sorted(chosen, key=lambda each: each.index)


class CommunicatorViews:
    """Makes the views of chosen communicators from what was computed for all of them."""

    def __init__(self, store: Store, aliases: Aliases, recent: Recent) -> None:
        self._store = store
        self._aliases = aliases
        self._recent = recent
        self._series = store.series.rows
        self._main = main_series(store)

    def view(self, communicator: Communicator) -> CommunicatorView:
        """One communicator's view."""
        index = communicator.index
        own = self._series[self._series["communicator"] == index]
        main = self._series[self._main[index]] if self._main[index] >= 0 else None
        return CommunicatorView(
            alias=self._aliases[index],
            comm_id=communicator.comm_id,
            parallelism=communicator.parallelism,
            size=communicator.size,
            hosts=len(hosts_of(self._store, communicator)),
            ranks=tuple(sorted(global_ranks(self._store, communicator).values())),
            operations=int(own["operations"].sum()),
            bytes=int(own["bytes"].sum()),
            ops=_operations_by_name(own),
            main_op=None if main is None else operation_name(int(main["op"])),
            main_size_class=None if main is None else size_class_name(int(main["size_class"])),
            busbw=None if main is None else known(float(main["busbw"].item())),
            limit=None if main is None else known(float(main["limit"].item())),
            baseline=None if main is None else known(float(main["baseline"].item())),
            wait_ratio=known(self._recent.wait_ratio[index]),
            busbw_history=tuple(known(value) for value in self._recent.busbw[index].tolist()),
            bytes_history=tuple(known(value) for value in self._recent.bytes_per_second[index].tolist()),
        )


def known(value: float) -> float | None:
    """A number to four digits, which is what a screen can show; None for NaN."""
    return None if math.isnan(value) else float(f"{value:.4g}")


def size_class_name(size_class: int) -> str:
    """The name of a size class; "unknown" outside the table."""
    return SIZE_CLASSES[size_class] if 0 <= size_class < len(SIZE_CLASSES) else "unknown"


def _operations_by_name(series: Columns) -> tuple[tuple[str, int], ...]:
    amounts = np.bincount(series["op"], weights=series["operations"]) if len(series) else np.zeros(0)
    named = [(operation_name(code), int(amount)) for code, amount in enumerate(amounts.tolist()) if amount]
    return tuple(sorted(named, key=lambda pair: -pair[1]))


def _busbw_history(points: BandwidthPoints, store: Store, window: Window) -> Floats:
    """All bytes that passed the bus in a bucket over the time that their transfers took, main series only."""
    main, series = main_series(store), store.series.rows
    main_kind = np.full(len(main), -1, np.int64)
    has_main = main >= 0
    main_kind[has_main] = _kinds(series["op"][main[has_main]], series["size_class"][main[has_main]])
    kinds = _kinds(points.op, points.size_class)
    groups = np.full(len(kinds), -1, np.int64)
    inside = (points.communicator >= 0) & (points.communicator < len(main))
    own = points.communicator[inside]
    groups[inside] = np.where(main_kind[own] == kinds[inside], own, -1)
    moved = points.busbw * points.transfer_ns
    return ratio_by_bucket(groups, points.time_ns, moved, points.transfer_ns, count=len(main), window=window)


def _kinds(ops: NDArray[np.integer], size_classes: NDArray[np.integer]) -> Int64s:
    return ops.astype(np.int64) * 256 + size_classes


def _bytes_history(operations: RecentOperations, count: int, window: Window) -> Floats:
    """Bytes per second; buckets before the first line and the one that is still filling are not known."""
    sized = np.maximum(operations.message_bytes, 0)
    sums = sum_by_bucket(operations.communicator, operations.logged_ns, sized, count=count, window=window)
    rates = sums / window.bucket_seconds
    inside = operations.logged_ns[window.holds(operations.logged_ns)]
    first = int(window.bucket_of(inside.min()[None])[0]) if len(inside) else window.buckets
    rates[:, : first + 1] = np.nan
    rates[:, -1] = np.nan
    return rates
