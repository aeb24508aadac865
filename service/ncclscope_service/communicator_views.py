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
from ncclscope_service.recent_sums import BUSY, MOVED, TRANSFER, WAIT, RecentSums, ratio, series_key
from ncclscope_service.rows import SIZE_CLASSES, Communicator
from ncclscope_service.store import Store
from ncclscope_service.tally import operation_name
from ncclscope_service.window import Floats, Int64s, Window
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

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


def recent_of_communicators(store: Store, sums: RecentSums, window: Window) -> Recent:
    """The last minutes of all communicators of the store."""
    return Recent(
        busbw=_busbw_history(store, sums, window),
        bytes_per_second=_bytes_history(store, sums, window),
        wait_ratio=recent_wait_ratio(sums, len(store.communicators), window),
    )


def main_series(store: Store) -> Int64s:
    """By communicator: position in `series` of what moved most bytes (then most operations); -1 without series."""
    series = store.series.rows
    main = np.full(len(store.communicators), -1, np.int64)
    order = np.lexsort((series["operations"], series["bytes"]))
    order = order[series["communicator"][order] >= 0]
    main[series["communicator"][order]] = order
    return main


def recent_wait_ratio(sums: RecentSums, count: int, window: Window) -> Floats:
    """By communicator: waiting over kernel time of the collectives of the last minute; NaN without."""
    last = Window(
        begin_ns=window.end_ns - _RECENT_BUCKETS * window.bucket_ns,
        bucket_ns=window.bucket_ns,
        buckets=_RECENT_BUCKETS,
    )
    whole = sums.collectives.whole(last, count)
    return ratio(whole[WAIT], whole[BUSY])


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


def _busbw_history(store: Store, sums: RecentSums, window: Window) -> Floats:
    """All bytes that passed the bus in a bucket over the time that their transfers took, main series only."""
    main, series = main_series(store), store.series.rows
    has_main = np.flatnonzero(main >= 0)
    rows = series[main[has_main]]
    main_key = np.full(len(main), NO_NUMBER, np.int64)
    main_key[has_main] = series_key(rows["communicator"], rows["op"], rows["size_class"])
    keys = sums.series_keys()
    of = keys >> 16
    shown = np.flatnonzero(main_key[of] == keys)
    moved, took = (
        sums.bandwidths.by_bucket(column, window, shown, of[shown], len(main)) for column in (MOVED, TRANSFER)
    )
    return ratio(moved, took)


def _bytes_history(store: Store, sums: RecentSums, window: Window) -> Floats:
    """Bytes per second; buckets before the first line and the one that is still filling are not known."""
    count = len(store.communicators)
    taken_in = [each.index if each.absorbed_by is None else each.absorbed_by for each in store.communicators]
    into = np.array(taken_in, np.int64)
    rates = sums.bytes.by_bucket(0, window, np.arange(count), into, count) / window.bucket_seconds
    first_ns, last_ns = sums.logged.within(window, len(store.processes))
    logged = first_ns[first_ns <= last_ns]
    first = int(window.bucket_of(logged.min()[None])[0]) if len(logged) else window.buckets
    rates[:, : first + 1] = np.nan
    rates[:, -1] = np.nan
    return rates
