"""Replays of CUDA graphs that both NCCL Inspector and nsys tell of, so that each is counted once.

A replay has no log line, so no record of it names an operation, and the number that NCCL gives it need not be one of
its own. But a record is dumped a moment after its kernel ended: where nsys recorded a replay of the same rank,
operation and size shortly before the dump, the record is of a replay that nsys tells of as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.distinct import distinct_together, groups
from ncclscope_service.store import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

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
        for kind, mine in groups(key[amount:]):
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
        for kind, mine in groups(key):
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
        for kind, mine in groups(key):
            member, op, size = (int(column[kind]) for column in keys)
            ends = replays["end_ns"][mine]
            known_end = ends != NO_TIME_NS
            for since, until in self._counted.get((member, op, size), ()):
                found[mine] |= known_end & (ends > since - _WITHIN_NS) & (ends <= until + _CLOCK_SLACK_NS)
        return found
