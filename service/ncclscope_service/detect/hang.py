"""A job that stands still, and who is missing: from the logs alone.

The log line is written when the host enqueues an operation. In a hang, ranks that wait have enqueued the next
collective and then go silent; the culprit has not. So a communicator that is silent for far longer than it ever was,
and whose ranks have enqueued different numbers of operations, is stuck, and the ranks with the lowest count are
missing: unless they themselves wait on another stuck communicator, from where the blame comes.

Send/Recv are counted per ordered pair: the sends of one rank to another against the receives of that other from it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.findings import Ledger, duration_text, names_of_ranks
from ncclscope_service.rows import Finding, FindingKind, Severity
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

PROGRESS: Final = np.dtype(
    [
        ("communicator", "<i4"),
        ("sender", "<i4"),  # communicator ranks of an ordered pair; NO_NUMBER for collectives
        ("receiver", "<i4"),
        ("rank", "<i4"),  # the communicator rank that counted
        ("operations", "<i8"),  # enqueued so far on this channel
        ("last_ns", "<i8"),  # when the newest of them was logged, or observed where lines have no stamp
    ]
)
"""How far each rank has come on each channel: a communicator's collectives, or one ordered pair of Send and Recv."""

_LEAST_SILENCE_NS: Final = 5_000_000_000
_GAP_FACTOR: Final = 20
_LONGEST_FACTOR: Final = 3
_GAPS_KEPT: Final = 2048
_HOUR_NS: Final = 3_600_000_000_000
_LEAST_OPERATIONS: Final = 3
"""A channel must have worked before its silence means something."""


class _Channel(NamedTuple):
    communicator: int
    sender: int
    receiver: int


@dataclass(slots=True)
class _State:
    counts: dict[int, int] = field(default_factory=dict[int, int])
    """By communicator rank."""
    least_lag: dict[int, int] = field(default_factory=dict[int, int])
    """The smallest distance to the front that a rank ever had: what was lost before we looked, not lateness."""
    last_ns: int = 0
    front: int = 0
    gaps: deque[tuple[int, int, int]] = field(default_factory=lambda: deque[tuple[int, int, int]](maxlen=_GAPS_KEPT))
    """(when, how long between two looks that saw news, operations in it)."""

    def behind(self) -> dict[int, int]:
        """How many operations each rank is missing."""
        front = max(self.counts.values())
        return {rank: front - count - self.least_lag.get(rank, 0) for rank, count in self.counts.items()}

    def patience_ns(self) -> int:
        """How long a silence is ordinary."""
        recent = [(gap, gap / operations) for when, gap, operations in self.gaps if when > self.last_ns - _HOUR_NS]
        if not recent:
            return 4 * _LEAST_SILENCE_NS
        # between two looks many operations pass: their mean gap is the usual one, the look's is only an upper bound
        usual = float(np.percentile([gap for _, gap in recent], 99))
        return round(max(_LEAST_SILENCE_NS, _GAP_FACTOR * usual, _LONGEST_FACTOR * max(gap for gap, _ in recent)))


@dataclass(frozen=True, slots=True)
class _Stuck:
    channel: _Channel
    group: Group
    missing: tuple[int, ...]
    """Global ranks that have not enqueued."""
    waiting: tuple[int, ...]
    since_ns: int
    patience_ns: int
    operations: int


class Hang:
    """Feeds on counts of one job's logs; needs no captures."""

    def __init__(self) -> None:
        self._channels: dict[_Channel, _State] = defaultdict(_State)
        self._active_ns: dict[int, int] = {}
        """By global rank: when it last logged anything."""
        self._ledger = Ledger()
        self._context: Context | None = None

    def feed(self, progress: Columns, context: Context) -> None:
        """Takes the present counts (`PROGRESS`), as often as there are news; call it about once a second."""
        self._context = context
        order = np.lexsort((progress["receiver"], progress["sender"], progress["communicator"]))
        rows = progress[order]
        begins = np.flatnonzero(
            np.concatenate([[True], np.any([np.diff(rows[name]) != 0 for name in _Channel._fields], axis=0)])
            if len(rows)
            else np.zeros(0, dtype=np.bool_)
        )
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(rows)], strict=True):
            first = rows[begin]
            group = context.groups.get(int(first["communicator"]))
            if group is not None:
                channel = _Channel(int(first["communicator"]), int(first["sender"]), int(first["receiver"]))
                self._advance(self._channels[channel], rows[begin:end], group)

    def findings(self, now_ns: int) -> list[Finding]:
        """All findings so far. `now_ns` is the clock that `last_ns` was read from, or the newest time known of it."""
        context = self._context
        if context is None:
            return []
        stuck = [one for channel in self._channels if (one := self._stuck(channel, now_ns, context)) is not None]
        waiting = {rank for one in stuck for rank in one.waiting}
        missing = {rank for one in stuck for rank in one.missing}
        culprits = (missing - waiting) or missing
        if culprits:
            guilty = [one for one in stuck if not culprits.isdisjoint(one.missing)]
            self._ledger.update("hang", self._finding(tuple(sorted(culprits)), guilty, stuck, now_ns))
        else:
            for key in self._ledger.open_keys():
                self._ledger.close(key, now_ns)
        return self._ledger.findings()

    def _advance(self, state: _State, rows: Columns, group: Group) -> None:
        newest, front = int(rows["last_ns"].max()), int(rows["operations"].max())
        if newest > state.last_ns:
            if state.last_ns:
                state.gaps.append((newest, newest - state.last_ns, max(1, front - state.front)))
            state.last_ns, state.front = newest, max(front, state.front)
        for rank, count, last in zip(
            rows["rank"].tolist(), rows["operations"].tolist(), rows["last_ns"].tolist(), strict=True
        ):
            state.counts[rank] = count
            if rank < len(group.global_ranks) and group.global_ranks[rank] != NO_NUMBER:
                name = group.global_ranks[rank]
                self._active_ns[name] = max(self._active_ns.get(name, 0), last)
        front = max(state.counts.values())
        for rank, count in state.counts.items():
            lag = front - count
            state.least_lag[rank] = min(state.least_lag.get(rank, lag), lag)

    def _stuck(self, channel: _Channel, now_ns: int, context: Context) -> _Stuck | None:
        state, group = self._channels[channel], context.groups.get(channel.communicator)
        if group is None or len(state.counts) < 2 or max(state.counts.values()) < _LEAST_OPERATIONS:
            return None
        patience = state.patience_ns()
        if now_ns - state.last_ns <= patience:
            return None
        behind = state.behind()
        missing = self._named([rank for rank, lag in behind.items() if lag > 0 and lag == max(behind.values())], group)
        waiting = self._named([rank for rank, lag in behind.items() if lag == 0], group)
        if channel.sender != NO_NUMBER and missing and not waiting:
            return None
        if not missing or not waiting or not self._all_silent((*missing, *waiting), now_ns):
            return None
        unheard = context.silent_hosts | context.lossy_hosts
        if any(host in unheard for host in context.hosts_of(missing)):
            return None
        return _Stuck(channel, group, missing, waiting, state.last_ns, patience, max(state.counts.values()))

    def _all_silent(self, ranks: tuple[int, ...], now_ns: int) -> bool:
        return all(now_ns - self._active_ns.get(rank, 0) > _LEAST_SILENCE_NS for rank in ranks)

    def _named(self, ranks: list[int], group: Group) -> tuple[int, ...]:
        known = [group.global_ranks[rank] for rank in ranks if rank < len(group.global_ranks)]
        return tuple(sorted(rank for rank in known if rank != NO_NUMBER))

    def _finding(self, culprits: tuple[int, ...], guilty: list[_Stuck], stuck: list[_Stuck], now_ns: int) -> Finding:
        context = self._context
        assert context is not None, "a finding is made only after something was fed"
        first = min(guilty, key=lambda one: (len(one.group.global_ranks), one.since_ns))
        since = min(one.since_ns for one in guilty)
        hosts = context.hosts_of(culprits)
        verb = "has" if len(culprits) == 1 else "have"
        waiting = sorted({rank for one in stuck for rank in one.waiting} - set(culprits))
        on = f" ({', '.join(hosts)})" if hosts and len(hosts) <= 3 else ""
        return Finding(
            kind=FindingKind.HANG,
            severity=Severity.CRITICAL,
            job=context.job,
            comm_id=first.group.comm_id,
            parallelism=first.group.parallelism,
            ranks=culprits,
            hosts=hosts,
            since_ns=since,
            until_ns=None,
            confidence=0.9 if not set(culprits) & set(waiting) else 0.6,
            summary=(
                f"{names_of_ranks(culprits)}{on} {verb} not enqueued operation {first.operations} of "
                f"{first.group.name} for {duration_text(now_ns - since)}; {names_of_ranks(waiting)} "
                f"{'waits' if len(waiting) == 1 else 'wait'}"
            ),
            evidence={
                "silent_ns": now_ns - since,
                "patience_ns": first.patience_ns,
                "operation": first.operations,
                "waiting_ranks": waiting,
                "stuck_groups": sorted({one.group.comm_id for one in stuck}),
            },
        )
