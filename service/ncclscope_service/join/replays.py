"""The same replay of a captured operation across ranks, by time.

Numbers do not tell: each process counts the replays that were recorded of it, and recordings begin and end at other
moments on other nodes. But a captured operation is replayed once per launch of its graph, and ranks end it together; so
the kernels of one collective that lie nearer to each other than half the time between two of its replays are of one
replay. That holds while clocks differ by less; what does not overlap in the end is left unmeasured (`measured_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.table import Ids
from ncclscope_service.join.ranks import JoinedCollectives
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

MEETING: Final = np.dtype(
    [
        ("id", "<i8"),  # of the replay
        ("communicator", "<i4"),
        ("sender", "<i4"),  # of Send and Recv; NO_NUMBER of collectives
        ("receiver", "<i4"),
        ("seq", "<i8"),  # coll_seq or pair_seq of the captured operation
        ("side", "<i4"),  # rank in the communicator; of Send and Recv whether it receives
        ("size", "<i4"),  # sides that take part
        ("reported_at_ns", "<i8"),
    ]
)
"""One replay that waits for the other sides."""

_KEY: Final = ("communicator", "sender", "receiver", "seq")
_FAR: Final = np.int64(2**62)


@dataclass(frozen=True, slots=True)
class Met:
    """Replays of which all sides that could be waited for are there."""

    collectives: list[JoinedCollectives]
    """`operations` are ids of replays."""
    sends: Ids
    receives: Ids
    """The other side of each of `sends`."""
    alone: Ids
    """Sends and Recvs whose other side did not come, and replays that cannot be distinguished."""


@dataclass(slots=True)
class ReplayJoin:
    """Gathers the sides of each replay; memory is bounded by `patience_ns`."""

    settle_ns: int
    """How long ranks that never spoke are waited for."""
    patience_ns: int
    """How long any rank is waited for."""
    unjoinable: int = 0
    """Replays that were nearer to another replay of their own rank than to those of the others."""
    _waiting: Columns = field(default_factory=lambda: np.empty(0, MEETING))
    _periods: dict[int, int] = field(default_factory=dict[int, int])
    """By communicator: the shortest time between two replays of one operation on one rank so far."""

    @property
    def pending(self) -> Ids:
        """The replays that wait, in the order in which `take_ready` wants their times."""
        ids: Ids = self._waiting["id"]
        return ids

    def report(self, meetings: Columns) -> None:
        """Takes further replays (MEETING)."""
        self._waiting = np.concatenate([self._waiting, meetings])

    def take_ready(
        self, ends_ns: NDArray[np.int64], *, members_seen: dict[int, int], now_ns: int, final: bool = False
    ) -> Met:
        """The replays that are complete, or have waited long enough; `ends_ns`: when each pending one ended.

        Times are of the reference clock where hosts have one. `members_seen`: ranks seen, by communicator.
        """
        waiting = self._waiting
        if len(waiting) == 0:
            return Met([], waiting["id"], waiting["id"], waiting["id"])
        order = np.lexsort((ends_ns, *(waiting[name] for name in reversed(_KEY))))
        rows, ends_ns = waiting[order], ends_ns[order]
        same = np.ones(len(rows) - 1, bool)
        for name in _KEY:
            same &= rows[name][1:] == rows[name][:-1]
        replay = self._replays(rows, ends_ns, same)
        ready = self._ready(rows, replay, members_seen, now_ns) | final
        self._waiting = rows[~ready]
        rows, replay = rows[ready], replay[ready]
        repeats = _repeats(rows, replay)
        self.unjoinable += int(np.count_nonzero(repeats))
        return _met(rows[~repeats], replay[~repeats], rows["id"][repeats])

    def _replays(self, rows: Columns, ends_ns: NDArray[np.int64], same: NDArray[np.bool_]) -> NDArray[np.int64]:
        """A number that the sides of one replay share."""
        key = np.concatenate([[0], np.cumsum(~same)])
        by_side = np.lexsort((ends_ns, rows["side"], key))
        follows = (key[by_side][1:] == key[by_side][:-1]) & (rows["side"][by_side][1:] == rows["side"][by_side][:-1])
        steps = np.diff(ends_ns[by_side])[follows]
        of = rows["communicator"][by_side][1:][follows]
        for communicator in np.unique(of).tolist():
            shortest = int(steps[of == communicator].min())
            self._periods[communicator] = min(shortest, self._periods.get(communicator, shortest))
        distinct, inverse = np.unique(rows["communicator"], return_inverse=True)
        periods = np.asarray([self._periods.get(each, int(_FAR)) for each in distinct.tolist()], np.int64)[inverse]
        is_near = np.diff(ends_ns) <= periods[1:] // 2
        return np.concatenate([[0], np.cumsum(~(same & is_near))])

    def _ready(
        self, rows: Columns, replay: NDArray[np.int64], members_seen: dict[int, int], now_ns: int
    ) -> NDArray[np.bool_]:
        first = np.flatnonzero(np.concatenate([[True], np.diff(replay) != 0]))
        sides = np.diff(np.append(first, len(rows)))
        since = np.minimum.reduceat(rows["reported_at_ns"], first)
        head = rows[first]
        seen = np.asarray([members_seen.get(each, 0) for each in head["communicator"].tolist()], np.int64)
        is_pair = head["sender"] != NO_NUMBER
        waited = now_ns - since
        ready = (sides >= head["size"]) | (waited > self.patience_ns)
        ready |= ~is_pair & (sides >= seen) & (waited > self.settle_ns)
        return np.repeat(ready, sides)


def _repeats(rows: Columns, replay: NDArray[np.int64]) -> NDArray[np.bool_]:
    """All rows of replays in which a side is there twice."""
    order = np.lexsort((rows["side"], replay))
    twice = (np.diff(replay[order]) == 0) & (np.diff(rows["side"][order]) == 0)
    repeats: NDArray[np.bool_] = np.isin(replay, replay[order][1:][twice])
    return repeats


def _met(rows: Columns, replay: NDArray[np.int64], repeats: Ids) -> Met:
    is_pair = rows["sender"] != NO_NUMBER
    pairs, of_pair = rows[is_pair], replay[is_pair]
    order = np.lexsort((pairs["side"], of_pair))
    pairs, of_pair = pairs[order], of_pair[order]
    sends = np.flatnonzero(np.diff(of_pair) == 0)
    alone = np.ones(len(pairs), bool)
    alone[sends], alone[sends + 1] = False, False
    return Met(
        _collectives(rows[~is_pair], replay[~is_pair]),
        pairs["id"][sends],
        pairs["id"][sends + 1],
        np.concatenate([pairs["id"][alone], repeats]),
    )


def _collectives(rows: Columns, replay: NDArray[np.int64]) -> list[JoinedCollectives]:
    joined: list[JoinedCollectives] = []
    for communicator in np.unique(rows["communicator"]).tolist():
        mine = rows[rows["communicator"] == communicator]
        _, first, place = np.unique(
            replay[rows["communicator"] == communicator], return_index=True, return_inverse=True
        )
        operations = np.full((len(first), int(mine["size"][0])), NO_NUMBER, np.int64)
        operations[place, mine["side"]] = mine["id"]
        joined.append(
            JoinedCollectives(
                communicator=np.full(len(first), communicator), coll_seq=mine["seq"][first], operations=operations
            )
        )
    return joined
