"""TUNING lines to the operations they speak of: algorithm, protocol and number of channels.

A TUNING line names no communicator. It is printed on communicator rank 0 when its operation is planned, so it
belongs to the latest operation of the same thread with the same name and bytes that has none yet. "Bytes" is the
message size of nccl-tests up to 2.23, and one rank's share from 2.24 on: either is accepted, since no two
operations of one thread are told apart by that alone. A line that fits none is counted, not forced.
Source: NCCL `src/enqueue.cc` (`topoGetAlgoInfo`, `scheduleCollTasksToPlan`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.store import Ids, Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATIONS, UNKNOWN_OPERATION

_LOOK_BACK: Final = 256
"""Operations of a process that may wait for their TUNING line: a group is planned, and printed, as a whole."""


class TuningJoin:
    """Attaches TUNING lines, process by process, in line order."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._waiting: dict[int, Ids] = {}
        self.unattached = 0
        """TUNING lines that fitted no operation."""

    def feed(self, operations: Ids, tunings: Columns) -> None:
        """New operations (store rows, one source, line order) and the TUNING lines of the same batch."""
        rows = self._store.operations.take(operations)
        processes = self._store.templates_of(rows)["process"]
        for process in np.unique(np.concatenate([processes, tunings["process"]])).tolist():
            waiting = self._waiting.get(process, np.empty(0, np.int64))
            candidates = np.concatenate([waiting, operations[processes == process]])
            candidates = candidates[candidates >= self._store.operations.first]
            mine = tunings[tunings["process"] == process]
            if len(mine):
                candidates = self._attach(candidates, mine)
            self._waiting[process] = candidates[-_LOOK_BACK:]

    def _attach(self, candidates: Ids, tunings: Columns) -> Ids:
        """Attaches one process's lines; gives the candidates that still wait."""
        rows = self._store.operations.take(candidates)
        templates = self._store.templates_of(rows)
        share = self._share_bytes(rows, templates)
        free = np.ones(len(candidates), bool)
        chosen = np.searchsorted(rows["line"], tunings["line"]) - 1
        at = np.full(len(tunings), NO_NUMBER, np.int64)
        for index, last in enumerate(chosen.tolist()):
            found = _latest_fit(tunings[index], last, rows, templates, share, free)
            if found is not None:
                at[index] = found
                free[found] = False
        hit = at >= 0
        self.unattached += int(np.count_nonzero(~hit))
        positions = self._store.operations.at(candidates[at[hit]])
        table = self._store.operations.rows
        for name in ("algorithm", "protocol", "channels"):
            table[name][positions] = tunings[name][hit]
        return candidates[free]

    def _share_bytes(self, rows: Columns, templates: Columns) -> NDArray[np.int64]:
        """One rank's share of each message."""
        scaled = rows["message_bytes"] // np.maximum(templates["nranks"], 1)
        return np.where(np.isin(templates["op"], _SCALED), scaled, rows["message_bytes"])


_SCALED = tuple(code for code, operation in enumerate(OPERATIONS) if operation.scales_with_ranks)
"""Codes of the operations whose message size is count x size x nranks."""


def _latest_fit(
    tuning: np.void,
    last: int,
    rows: Columns,
    templates: Columns,
    share: NDArray[np.int64],
    free: NDArray[np.bool_],
) -> int | None:
    """The latest operation before a line that it fits."""
    for index in range(last, max(-1, last - _LOOK_BACK), -1):
        if (
            free[index]
            and templates["tid"][index] == tuning["tid"]
            and tuning["op"] in (templates["op"][index], UNKNOWN_OPERATION)
            and tuning["bytes"] in (rows["message_bytes"][index], share[index])
        ):
            return index
    return None
