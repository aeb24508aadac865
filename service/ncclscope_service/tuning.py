"""TUNING lines to the operations they speak of: algorithm, protocol and number of channels.

A TUNING line names no communicator. It is printed on communicator rank 0 when its operation is planned, so it
belongs to the latest operation of the same thread with the same name and bytes that has none yet. "Bytes" is the
message size of nccl-tests up to 2.23, and one rank's share from 2.24 on: either is accepted, since no two
operations of one thread are told apart by that alone. A line that fits none is counted, not forced.
Source: NCCL `src/enqueue.cc` (`topoGetAlgoInfo`, `scheduleCollTasksToPlan`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.copy_engine import NO_CHANNELS, speaks_of_copies
from ncclscope_service.distinct import groups
from ncclscope_service.store import Ids, Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATIONS, UNKNOWN_OPERATION

_LOOK_BACK: Final = 256
"""Operations of a process that may wait for their TUNING line: a group is planned, and printed, as a whole."""

_FRESH: Final = 250_000
"""Operations that are sorted by process in one go."""

_NONE: Final = np.empty(0, np.int64)

_CANDIDATE: Final = np.dtype([("line", "<i8"), ("tid", "<u4"), ("op", "<u1"), ("bytes", "<u8"), ("share_bytes", "<u8")])
"""An operation that may be spoken of."""


class TuningJoin:
    """Attaches TUNING lines, process by process, in line order."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._waiting: dict[int, Ids] = {}
        self._fresh: list[Ids] = []
        """Operations since lines last came; most jobs print none."""
        self._fresh_rows = 0
        self.unattached = 0
        """TUNING lines that fitted no operation."""
        self._copied: list[Ids] = []

    def take_copied(self) -> Ids:
        """The operations since the last call of which a line said that copy engines carry them out."""
        copied, self._copied = self._copied, []
        return np.concatenate([_NONE, *copied])

    def leave(self, processes: Iterable[int]) -> None:
        """No more lines will come of these processes."""
        for process in processes:
            self._waiting.pop(process, None)

    def feed(self, operations: Ids, tunings: Columns) -> None:
        """New operations (store rows, one source, line order) and the TUNING lines of the same batch."""
        self._fresh.append(operations)
        self._fresh_rows += len(operations)
        if len(tunings) or self._fresh_rows > _FRESH:
            self._sort_in(np.concatenate(self._fresh), tunings)
            self._fresh, self._fresh_rows = [], 0

    def _sort_in(self, operations: Ids, tunings: Columns) -> None:
        operations = operations[operations >= self._store.operations.first]
        processes = self._store.operations.take(operations, "process")["process"]
        added = {process: operations[at] for process, at in groups(processes)}
        said = {process: whole_rows.taken(tunings, at) for process, at in groups(tunings["process"])}
        for process in sorted(added.keys() | said.keys()):
            waiting = self._waiting.get(process, _NONE)
            candidates = np.concatenate([waiting, added.get(process, _NONE)])
            candidates = candidates[candidates >= self._store.operations.first]
            if process in said:
                candidates = self._attach(candidates, said[process])
            self._waiting[process] = candidates[-_LOOK_BACK:]

    def _attach(self, candidates: Ids, tunings: Columns) -> Ids:
        """Attaches one process's lines; gives the candidates that still wait."""
        known = self._known(candidates)
        before = np.searchsorted(known["line"], tunings["line"]) - 1
        at = _directly_before(known, tunings, before)
        free = np.ones(len(candidates), bool)
        free[at[at >= 0]] = False
        for index in np.flatnonzero(at < 0).tolist():
            found = _latest_fit(known, tunings[index], int(before[index]), free)
            if found is not None:
                at[index] = found
                free[found] = False
        hit = at >= 0
        self.unattached += int(np.count_nonzero(~hit))
        positions = self._store.operations.at(candidates[at[hit]])
        table = self._store.operations.rows
        for name in ("algorithm", "protocol", "channels"):
            table[name][positions] = tunings[name][hit]
        is_copied = speaks_of_copies(tunings[hit])
        if is_copied.any():
            table["channels"][positions[is_copied]] = NO_CHANNELS
            self._copied.append(candidates[at[hit]][is_copied])
        return candidates[free]

    def _known(self, candidates: Ids) -> Columns:
        rows = self._store.operations.take(candidates, "line", "template", "message_bytes")
        templates = self._store.templates_of(rows, "tid", "op", "nranks")
        known = np.empty(len(candidates), _CANDIDATE)
        known["line"], known["tid"], known["op"] = rows["line"], templates["tid"], templates["op"]
        known["bytes"] = rows["message_bytes"]
        scaled = rows["message_bytes"] // np.maximum(templates["nranks"], 1)
        known["share_bytes"] = np.where(_SCALES[templates["op"]], scaled, rows["message_bytes"])
        return known


_SCALES: Final = np.array(
    [code < len(OPERATIONS) and OPERATIONS[code].scales_with_ranks for code in range(256)], dtype=np.bool_
)
"""By code: whether the message size of an operation is count x size x nranks."""


def _directly_before(known: Columns, tunings: Columns, before: NDArray[np.intp]) -> NDArray[np.int64]:
    """For each line the operation just before it, where it fits; else NO_NUMBER.

    It has that operation to itself: lines before it come after earlier operations.
    """
    is_first = np.ones(len(before), bool)
    is_first[1:] = before[1:] > np.maximum.accumulate(before)[:-1]
    at = np.flatnonzero(is_first & (before >= 0))
    own, line = whole_rows.taken(known, before[at]), whole_rows.taken(tunings, at)
    fits = own["tid"] == line["tid"]
    fits &= (own["op"] == line["op"]) | (line["op"] == UNKNOWN_OPERATION)
    fits &= (own["bytes"] == line["bytes"]) | (own["share_bytes"] == line["bytes"])
    found = np.full(len(before), NO_NUMBER, np.int64)
    found[at[fits]] = before[at[fits]]
    return found


def _latest_fit(known: Columns, tuning: np.void, last: int, free: NDArray[np.bool_]) -> int | None:
    """The latest free operation up to `last` that a line fits."""
    begin = max(0, last - _LOOK_BACK + 1)
    near = known[begin : last + 1]
    fits = free[begin : last + 1] & (near["tid"] == tuning["tid"])
    fits &= (near["op"] == tuning["op"]) | (tuning["op"] == UNKNOWN_OPERATION)
    fits &= (near["bytes"] == tuning["bytes"]) | (near["share_bytes"] == tuning["bytes"])
    found = np.flatnonzero(fits)
    return begin + int(found[-1]) if len(found) else None
