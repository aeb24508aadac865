"""The algorithm of every operation, from the lines of those that print it.

Only rank 0 of a communicator prints TUNING lines, and all ranks of a collective run the same algorithm: so what is
known of one rank is known of all. Where that collective's line is lost, other collectives of the communicator with the
same operation and size tell, if they agree. Up to 2.16 AllGather and ReduceScatter have no algorithm but the ring.

*Source:* NCCL `src/enqueue.cc:getAlgoInfo` (rank 0 prints; chosen by communicator, operation and size),
`src/graph/tuning.cc:ncclTopoTuneModel` (2.16: all but AllReduce skip what is not a ring).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.store import Store
from ncclscope_service.version_of import version_of
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import ALGORITHMS, NO_NUMBER, OPERATION_CODES

_Integers = NDArray[np.int64]

_RING: Final = ALGORITHMS.index("RING")
_ONLY_RINGS: Final = np.isin(np.arange(256), [OPERATION_CODES["AllGather"], OPERATION_CODES["ReduceScatter"]])
_OTHERS_SINCE: Final = (2, 17)
_SEQUENCE_BITS: Final = 40


class Algorithms:
    """What is known of the algorithms of one run."""

    def __init__(self, known: Store, slices: Iterable[Columns]) -> None:
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

    def of(self, rows: Columns) -> _Integers:
        """The algorithm of each of these operations (rows.OPERATION), a place in ALGORITHMS; NO_NUMBER if not known."""
        found = rows["algorithm"].astype(np.int64)
        at = np.flatnonzero((found < 0) & (rows["coll_seq"] >= 0) & (rows["member"] >= 0))
        found[at] = self._by_collective(rows[at])
        at = at[found[at] < 0]
        found[at] = self._by_kind(rows[at])
        at = at[found[at] < 0]
        ops = self._store.templates_of(rows[at], "op")["op"]
        found[at] = np.where(_ONLY_RINGS[ops] & self._is_old[rows["process"][at]], _RING, NO_NUMBER)
        return found

    def _told(self, rows: Columns) -> tuple[_Integers, _Integers, _Integers, _Integers]:
        """Collective, algorithm, kind and size of those that say it."""
        rows = rows[(rows["algorithm"] >= 0) & (rows["coll_seq"] >= 0) & (rows["member"] >= 0)]
        algorithms, sizes = rows["algorithm"].astype(np.int64), rows["message_bytes"].astype(np.int64)
        return self._collective_keys(rows), algorithms, self._kind_keys(rows), sizes

    def _collective_keys(self, rows: Columns) -> _Integers:
        keys: _Integers = (self._communicator_of[rows["member"]] << _SEQUENCE_BITS) | rows["coll_seq"]
        return keys

    def _kind_keys(self, rows: Columns) -> _Integers:
        ops = self._store.templates_of(rows, "op")["op"].astype(np.int64)
        keys: _Integers = (self._communicator_of[rows["member"]] << 8) | ops
        return keys

    def _by_collective(self, rows: Columns) -> _Integers:
        keys = self._collective_keys(rows)
        if not len(self._collectives):
            return np.full(len(keys), NO_NUMBER, np.int64)
        at = np.minimum(np.searchsorted(self._collectives, keys), len(self._collectives) - 1)
        return np.where(self._collectives[at] == keys, self._of_collective[at], NO_NUMBER)

    def _by_kind(self, rows: Columns) -> _Integers:
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
