"""Launches of sends and receives, with the other side of every one of them.

A launch may hold one Send or Recv, or a group that NCCL fused into one kernel (a pipeline's steady state, an
all-to-all). It is complete when all of its operations have met their other side; then the last of its peers' starts
is known, which is all that measuring needs.

Where the line of another side was lost, a group tells its peer's start all the same if another operation of it met the
same peer: what two ranks send each other in a group, both do in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import accumulate, distinct, first_positions
from ncclscope_service.columns.table import Ids
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

SIDE: Final = np.dtype(
    [
        ("launch", "<i8"),
        ("operation", "<i8"),
        ("start_true_ns", "<i8"),  # on the reference clock; of two ranks of one host, on that host's
        ("end_true_ns", "<i8"),
        ("censored", "?"),
        ("peer_start_true_ns", "<i8"),  # on the same clock as its own
        ("uncertainty_ns", "<f8"),
        ("bytes", "<i8"),
        ("sends", "?"),
        ("peer", "<i4"),
        ("is_alone", "?"),
    ]
)
"""One Send or Recv on its own rank, that has met its other side, or (`is_alone`) whose other side's line was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """L complete launches, and the operations in them. Times of one are on one clock, the reference or its host's."""

    start_true_ns: NDArray[np.int64]
    end_true_ns: NDArray[np.int64]
    censored: NDArray[np.bool_]
    last_peer_start_true_ns: NDArray[np.int64]
    """NO_TIME_NS if a peer's is not known."""
    uncertainty_ns: NDArray[np.float64]
    """The worst of its peers."""
    moved_bytes: NDArray[np.int64]
    """The larger of the bytes sent and received."""
    operations: Ids
    """Of all launches."""
    launch_of: NDArray[np.intp]
    """For each of the operations: which launch it belongs to."""

    def first_operations(self) -> Ids:
        """One operation of each launch."""
        return self.operations[np.unique(self.launch_of, return_index=True)[1]]


class ExchangeBook:
    """Keeps sides until their launch is complete."""

    def __init__(self) -> None:
        self._new: list[Columns] = []
        """Sides since the launches that are complete were taken."""
        self._waiting: list[Columns] = []
        """Sides before: they are looked at only where the last one of their launch has come since."""
        self._met: dict[int, int] = {}
        """By launch: how many of its sides are among those before."""
        self._sizes: dict[int, int] = {}

    def expect(self, launches: NDArray[np.int64]) -> None:
        """One launch id for each Send or Recv to another rank that was matched; all of a launch at once."""
        distinct, sizes = np.unique(launches, return_counts=True)
        self._sizes.update(zip(distinct.tolist(), sizes.tolist(), strict=True))

    def add(self, sides: Columns) -> None:
        """Sides (SIDE) that met their other side, or will not meet it."""
        if len(sides):
            self._new.append(sides)

    def waiting(self) -> Ids:
        """Operations that met their other side, whose launch is not complete yet."""
        ids: Ids = _joined(self._waiting + self._new)["operation"]
        return ids

    def forget(self, launches: NDArray[np.int64]) -> None:
        """Launches that will not become complete."""
        gone = np.unique(launches)
        for launch in gone.tolist():
            self._sizes.pop(launch, None)
        self._new = [row_ops.filter_rows(each, ~np.isin(each["launch"], gone)) for each in self._new]
        self._take_waiting(gone)

    def take_complete(self) -> Exchanges:
        """The launches of which every operation has met its other side, or another one its peer."""
        new, self._new = _joined(self._new), []
        launches, inverse = distinct(new["launch"])
        amounts = np.bincount(inverse, minlength=len(launches)).tolist()
        is_complete, is_left = np.zeros(len(launches), np.bool_), np.zeros(len(launches), np.bool_)
        for place, (launch, amount) in enumerate(zip(launches.tolist(), amounts, strict=True)):
            size = self._sizes.get(launch)
            if size is None:
                continue  # it was forgotten: this one came too late
            met = self._met.get(launch, 0) + amount
            is_complete[place], is_left[place] = met == size, met != size
            if met != size:
                self._met[launch] = met
        complete = launches[is_complete].astype(np.int64)
        before = self._take_waiting(complete)
        if is_left.any():
            self._waiting.append(row_ops.filter_rows(new, is_left[inverse]))
        for launch in complete.tolist():
            del self._sizes[launch]
        return _exchanges(_with_peers(_joined([before, row_ops.filter_rows(new, is_complete[inverse])])))

    def _take_waiting(self, launches: NDArray[np.int64]) -> Columns:
        """The sides of these launches that came before, which wait no longer."""
        met = [launch for launch in launches.tolist() if self._met.pop(launch, 0)]
        if not met:
            return np.empty(0, SIDE)
        waiting = _joined(self._waiting)
        is_theirs = np.isin(waiting["launch"], met)
        self._waiting = [row_ops.filter_rows(waiting, ~is_theirs)]
        return row_ops.filter_rows(waiting, is_theirs)


def _joined(parts: list[Columns]) -> Columns:
    return row_ops.concat([np.empty(0, SIDE), *parts])


def _with_peers(sides: Columns) -> Columns:
    """The same, where those alone started as others with their peer did; without launches that have no other."""
    if not sides["is_alone"].any():
        return sides
    sides = row_ops.take(sides, np.lexsort((sides["is_alone"], sides["peer"], sides["launch"])))
    begins = np.ones(len(sides), np.bool_)
    begins[1:] = (np.diff(sides["launch"]) != 0) | (np.diff(sides["peer"]) != 0)
    known_at = np.maximum.accumulate(np.where(begins, np.arange(len(sides)), 0))
    unknown = sides["launch"][sides["is_alone"][known_at]]
    for name in ("start_true_ns", "end_true_ns", "censored", "peer_start_true_ns", "uncertainty_ns"):
        sides[name] = sides[name][known_at]
    return row_ops.filter_rows(sides, ~np.isin(sides["launch"], unknown))


def _exchanges(sides: Columns) -> Exchanges:
    launches, launch_of = distinct(sides["launch"])
    first = first_positions(sides["launch"])
    amount = len(launches)
    # Sides of one launch may be on different clocks: only what lies between the two starts of each is compared.
    is_known = (sides["peer_start_true_ns"] != NO_TIME_NS) & (sides["start_true_ns"] != NO_TIME_NS)
    later = np.full(amount, np.iinfo(np.int64).min)
    accumulate(np.maximum, later, launch_of, sides["peer_start_true_ns"] - sides["start_true_ns"])
    unknown = np.zeros(amount, bool)
    unknown[launch_of[~is_known]] = True
    starts = sides["start_true_ns"][first]
    uncertainty = np.zeros(amount)
    accumulate(np.maximum, uncertainty, launch_of, sides["uncertainty_ns"])
    moved = np.zeros(2 * amount, np.int64)
    accumulate(np.add, moved, sides["sends"] * amount + launch_of, sides["bytes"])
    return Exchanges(
        start_true_ns=starts,
        end_true_ns=sides["end_true_ns"][first],
        censored=sides["censored"][first],
        last_peer_start_true_ns=np.where(unknown, NO_TIME_NS, starts + np.where(unknown, 0, later)),
        uncertainty_ns=uncertainty,
        moved_bytes=moved.reshape(2, amount).max(axis=0, initial=0),
        operations=sides["operation"],
        launch_of=launch_of,
    )
