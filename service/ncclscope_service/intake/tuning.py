"""Algorithm, protocol and channels of each operation, from TUNING lines.

A TUNING line names no communicator. It is printed on communicator rank 0 when its operation is planned, so it
belongs to the latest operation of the same thread with the same name and bytes that has none yet. "Bytes" is the
message size of nccl-tests up to 2.23, and one rank's share from 2.24 on: either is accepted, since no two
operations of one thread differ in that alone. A line that fits none is counted, not forced.
Source: NCCL `src/enqueue.cc` (`topoGetAlgoInfo`, `scheduleCollTasksToPlan`).

Only rank 0 of a communicator prints TUNING lines, and all ranks of a collective run the same algorithm: so what is
known of one rank is known of all. If that collective's line is lost, other collectives of the communicator with the
same operation and size decide, if they agree. Up to 2.16 AllGather and ReduceScatter have no algorithm but the ring.

*Source:* NCCL `src/enqueue.cc:getAlgoInfo` (rank 0 prints; chosen by communicator, operation and size),
`src/graph/tuning.cc:ncclTopoTuneModel` (2.16: all but AllReduce skip what is not a ring).

Copy engines carry out some operations: NCCL launches no kernel for them, on no rank. Only communicator rank 0 says so,
in a TUNING line (`[Copy Engine]`, `[Hierarchical CE]`; 2.29.2 on); the other ranks' lines of the same collective are
found by its number, and must be of the same kind and size.
Source: NCCL `src/enqueue.cc` (2.29.2 to 2.30.4), `src/ce_coll.cc` (2.30.7).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import group_by
from ncclscope_service.columns.table import AnyRows, Ids
from ncclscope_service.store.tables import Store, version_of
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import ALGORITHMS, NO_NUMBER, OPERATION_CODES, OPERATIONS, UNKNOWN_OPERATION

_Integers = NDArray[np.int64]

_RING: Final = ALGORITHMS.index("RING")
_ONLY_RINGS: Final = np.isin(np.arange(256), [OPERATION_CODES["AllGather"], OPERATION_CODES["ReduceScatter"]])
_OTHERS_SINCE: Final = (2, 17)
_SEQUENCE_BITS: Final = 40
_OF_ALGORITHM: Final = ("member", "template", "coll_seq", "algorithm", "message_bytes")


class Algorithms:
    """The known algorithms of one run."""

    def __init__(self, known: Store, slices: Iterable[AnyRows]) -> None:
        """`slices`: all operations (rows.OPERATION) of the run."""
        self._store = known
        self._communicator_of = np.asarray([of.communicator for of in known.members] + [NO_NUMBER], np.int64)
        old = [_is_older(version_of(known, process)) for process in range(len(known.processes))]
        self._is_old = np.asarray([*old, False], np.bool_)
        told = [self._told(rows) for rows in slices]
        nothing = np.empty(0, np.int64)
        collectives, algorithms, kinds, sizes = (
            np.concatenate([nothing, *(each[column] for each in told)]) for column in range(4)
        )
        self._collectives, first = np.unique(collectives, return_index=True)
        self._of_collective = algorithms[first]
        order = np.lexsort((sizes, kinds))
        self._kinds, self._sizes, self._of_kind = _agreed(kinds[order], sizes[order], algorithms[order])

    def algorithms_of(self, rows: AnyRows) -> _Integers:
        """The algorithm of each of these operations (rows.OPERATION), a place in ALGORITHMS; NO_NUMBER if not known."""
        found = rows["algorithm"].astype(np.int64)
        at = np.flatnonzero((found < 0) & (rows["coll_seq"] >= 0) & (rows["member"] >= 0))
        found[at] = self._by_collective(row_ops.take_columns(rows, at, _OF_ALGORITHM))
        at = at[found[at] < 0]
        found[at] = self._by_kind(row_ops.take_columns(rows, at, _OF_ALGORITHM))
        at = at[found[at] < 0]
        ops = self._store.operation_templates.rows["op"][rows["template"][at]]
        found[at] = np.where(_ONLY_RINGS[ops] & self._is_old[rows["process"][at]], _RING, NO_NUMBER)
        return found

    def _told(self, rows: AnyRows) -> tuple[_Integers, _Integers, _Integers, _Integers]:
        """Collective, algorithm, kind and size of those that say it."""
        said = (rows["algorithm"] >= 0) & (rows["coll_seq"] >= 0) & (rows["member"] >= 0)
        rows = row_ops.take_columns(rows, np.flatnonzero(said), _OF_ALGORITHM)
        algorithms, sizes = rows["algorithm"].astype(np.int64), rows["message_bytes"].astype(np.int64)
        return self._collective_keys(rows), algorithms, self._kind_keys(rows), sizes

    def _collective_keys(self, rows: AnyRows) -> _Integers:
        keys: _Integers = (self._communicator_of[rows["member"]] << _SEQUENCE_BITS) | rows["coll_seq"]
        return keys

    def _kind_keys(self, rows: AnyRows) -> _Integers:
        ops = self._store.templates_of(rows, "op")["op"].astype(np.int64)
        keys: _Integers = (self._communicator_of[rows["member"]] << 8) | ops
        return keys

    def _by_collective(self, rows: AnyRows) -> _Integers:
        keys = self._collective_keys(rows)
        if not len(self._collectives):
            return np.full(len(keys), NO_NUMBER, np.int64)
        at = np.minimum(np.searchsorted(self._collectives, keys), len(self._collectives) - 1)
        return np.where(self._collectives[at] == keys, self._of_collective[at], NO_NUMBER)

    def _by_kind(self, rows: AnyRows) -> _Integers:
        if not len(self._kinds):
            return np.full(len(rows), NO_NUMBER, np.int64)
        known = {
            (kind, size): algorithm
            for kind, size, algorithm in zip(
                self._kinds.tolist(), self._sizes.tolist(), self._of_kind.tolist(), strict=True
            )
        }
        keys = zip(self._kind_keys(rows).tolist(), rows["message_bytes"].tolist(), strict=True)
        return np.asarray([known.get(key, NO_NUMBER) for key in keys], np.int64)


def _agreed(kinds: _Integers, sizes: _Integers, algorithms: _Integers) -> tuple[_Integers, _Integers, _Integers]:
    """Each (kind, size) of sorted columns of which all say the same, and what."""
    if not len(kinds):
        return kinds, sizes, algorithms
    begins = np.flatnonzero(np.append(True, (np.diff(kinds) != 0) | (np.diff(sizes) != 0)))
    agree = np.minimum.reduceat(algorithms, begins) == np.maximum.reduceat(algorithms, begins)
    chosen = begins[agree]
    return kinds[chosen], sizes[chosen], algorithms[chosen]


def _is_older(version: str | None) -> bool:
    parts = [] if version is None else [int(part) for part in version.split(".")[:2] if part.isdigit()]
    return len(parts) == 2 and tuple(parts) < _OTHERS_SINCE


NO_CHANNELS: Final = 0
"""`channels` of an operation that copy engines carry out."""

COPIES_LIMIT: Final = 1_000_000
"""Collectives that are remembered; beyond, the oldest are forgotten."""

_COPY: Final = np.dtype([("member", "<i4"), ("coll_seq", "<i8"), ("op", "<u1"), ("message_bytes", "<i8")])
_COLLECTIVE: Final = np.dtype([("communicator", "<i8"), ("coll_seq", "<i8"), ("op", "<i8"), ("message_bytes", "<i8")])


def speaks_of_copies(tunings: Columns) -> NDArray[np.bool_]:
    """Which TUNING lines (store.TUNING) name copy engines: those with neither algorithm, channels nor estimate."""
    untold = (tunings["algorithm"] == NO_NUMBER) & (tunings["protocol"] == NO_NUMBER)
    copies: NDArray[np.bool_] = untold & (tunings["channels"] == NO_NUMBER) & np.isnan(tunings["expected_us"])
    return copies


@dataclass(slots=True)
class Copies:
    """The collectives of all communicators that rank 0 said are copied."""

    _store: Store
    _known: Columns = field(default_factory=lambda: np.empty(0, _COPY))

    def ingest_operations(self, operations: Ids) -> None:
        """Operations of which a TUNING line said it."""
        if len(operations):
            self._known = np.concatenate([self._known, self._rows(operations)])[-COPIES_LIMIT:]

    def holds(self, operations: Ids) -> NDArray[np.bool_]:
        """Which of these are, on any rank of their communicator."""
        if len(self._known) == 0 or len(operations) == 0:
            return np.zeros(len(operations), np.bool_)
        asked, known = self._collectives(self._rows(operations)), self._collectives(self._known)
        held: NDArray[np.bool_] = np.isin(asked, known) & (asked["coll_seq"] != NO_NUMBER)
        return held

    def _rows(self, operations: Ids) -> Columns:
        told = self._store.operations.take(operations, "template", "member", "coll_seq", "message_bytes")
        rows = np.empty(len(operations), _COPY)
        for name in ("member", "coll_seq", "message_bytes"):
            rows[name] = told[name]
        rows["op"] = self._store.templates_of(told, "op")["op"]
        return rows

    def _collectives(self, rows: Columns) -> Columns:
        communicator_of = np.asarray([member.communicator for member in self._store.members], np.int64)
        collectives = np.empty(len(rows), _COLLECTIVE)
        collectives["communicator"] = communicator_of[rows["member"]]
        for name in ("coll_seq", "op", "message_bytes"):
            collectives[name] = rows[name]
        return collectives


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

    def drain_copied(self) -> Ids:
        """The operations since the last call of which a line said that copy engines carry them out."""
        copied, self._copied = self._copied, []
        return np.concatenate([_NONE, *copied])

    def evict_processes(self, processes: Iterable[int]) -> None:
        """No more lines will come of these processes."""
        for process in processes:
            self._waiting.pop(process, None)

    def ingest_lines(self, operations: Ids, tunings: Columns) -> None:
        """New operations (store rows, one source, line order) and the TUNING lines of the same batch."""
        self._fresh.append(operations)
        self._fresh_rows += len(operations)
        if len(tunings) or self._fresh_rows > _FRESH:
            self._sort_in(np.concatenate(self._fresh), tunings)
            self._fresh, self._fresh_rows = [], 0

    def _sort_in(self, operations: Ids, tunings: Columns) -> None:
        operations = operations[operations >= self._store.operations.first]
        processes = self._store.operations.take(operations, "process")["process"]
        added = {process: operations[at] for process, at in group_by(processes)}
        said = {process: row_ops.take(tunings, at) for process, at in group_by(tunings["process"])}
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
            table.put(name, positions, tunings[name][hit])
        is_copied = speaks_of_copies(tunings[hit])
        if is_copied.any():
            table.put("channels", positions[is_copied], NO_CHANNELS)
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
    """For each line the operation just before it, if it fits; else NO_NUMBER.

    It has that operation to itself: lines before it come after earlier operations.
    """
    is_first = np.ones(len(before), bool)
    is_first[1:] = before[1:] > np.maximum.accumulate(before)[:-1]
    at = np.flatnonzero(is_first & (before >= 0))
    own, line = row_ops.take(known, before[at]), row_ops.take(tunings, at)
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
