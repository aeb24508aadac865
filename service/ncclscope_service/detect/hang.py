"""A job that stands still: who is missing, or where it is stuck; from the logs alone.

The log line is written when the host enqueues an operation. In a hang, ranks that wait have enqueued the next
collective and then go silent. So a communicator that is silent for far longer than it ever was is stuck, and it is
told apart by who has enqueued what:

- *not enqueued*: some rank has enqueued fewer operations than those that wait, and does not itself wait for another on
  any communicator, from where the blame comes (`blame.py`). It is missing.
- *inside*: the missing ranks are all ranks of one communicator and have come equally far on it, or nobody is missing at
  all: everybody has enqueued the operation and it does not end.
- *mismatched*: the same, and the ranks called different operations there (`mismatch.py`).
- *unclear*: log lines of these communicators were lost: counts of their ranks cannot be held against each other.

Ranks that have just ended a step (`rests.py`) may be evaluating or writing a checkpoint: they get far more time.
Send/Recv are counted per ordered pair: the sends of one rank to another against the receives of that other from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Final

import numpy as np

from ncclscope_service import whole_rows
from ncclscope_service.detect.blame import Blame, Standing
from ncclscope_service.detect.board import Board
from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.findings import Ledger
from ncclscope_service.detect.silence import LEAST_SILENCE_NS, Silence
from ncclscope_service.detect.stuck import Channel, Stuck, inside_finding, missing_finding, unclear_finding
from ncclscope_service.rows import Finding
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_INSIDE_SILENCE_NS: Final = 8_000_000_000
"""Where nobody is missing, silence is all there is to go by."""
_LEAST_OPERATIONS: Final = 3
"""A channel must have worked before its silence means something."""
_LEAST_TO_BE_INSIDE: Final = 100


@dataclass(frozen=True, slots=True)
class _Told:
    """What was last said of the hang that is open."""

    since_ns: int
    at_ns: int
    collective_id: str


class Hang:
    """Feeds on counts of one job's logs; needs no captures."""

    def __init__(self) -> None:
        self._channels: dict[Channel, Silence] = {}
        self._board = Board()
        self._active_ns: dict[int, int] = {}
        """By global rank: when it last logged anything."""
        self._last_on: dict[int, int] = {}
        """By global rank: the communicator on which that was."""
        self._ledger = Ledger()
        self._told: _Told | None = None
        self._context: Context | None = None

    @property
    def is_open(self) -> bool:
        """Whether the job is held for stuck."""
        return bool(self._ledger.open_keys())

    def feed(self, progress: Columns, context: Context) -> None:
        """Takes the present counts (`PROGRESS`), as often as there are news; call it about once a second."""
        self._context = context
        fed = whole_rows.kept(progress, np.isin(progress["communicator"], np.fromiter(context.groups, np.int64)))
        self._forget_all_but(context)
        self._board.put(fed)
        self._note_active(fed, context)
        for key, begin, ranks, newest_ns, front, is_resting in self._board.channels(context):
            state = self._channels.setdefault(Channel(*key), Silence())
            state.begin, state.ranks = begin, ranks
            state.look(newest_ns, front)
            state.is_resting = is_resting

    def _forget_all_but(self, context: Context) -> None:
        """Communicators that ended do not come back; others are made in their place, again and again in some jobs."""
        if any(channel.communicator not in context.groups for channel in self._channels):
            self._board.forget_all_but(context)
            self._channels = {
                channel: state for channel, state in self._channels.items() if channel.communicator in context.groups
            }

    def findings(
        self,
        now_ns: int,
        mismatches: Mapping[str | None, Finding] | None = None,
        with_losses: frozenset[int] = frozenset(),
    ) -> list[Finding]:
        """All findings so far. `now_ns` is the clock that `last_ns` was read from, or the newest time known of it.

        `mismatches`: what is known of communicators whose ranks call different operations, by comm_id; `with_losses`:
        communicators of which log lines were lost.
        """
        context = self._context
        if context is None:
            return []
        groups = [context.groups[communicator] for communicator in with_losses & context.groups.keys()]
        doubted = frozenset(rank for group in groups for rank in group.global_ranks)
        stuck = self._all_stuck(now_ns, context, doubted)
        missing = _missing(stuck)
        excused = self._waiting_for_resting(now_ns, context)
        blame = Blame(self._standings(now_ns, context, doubted) if missing else ())
        culprits = blame.roots(missing) - excused
        if missing and not culprits:
            stuck = self._all_stuck(now_ns, context, doubted, others_are_stuck=True)
            missing = _missing(stuck)
            culprits = blame.roots(missing) - excused
        if (missing or excused) and not culprits:
            self._renew(None, None, now_ns)  # who is to blame still has time
        elif (inside := self._inside(culprits, stuck, now_ns, context)) is not None:
            since = self._since(inside.since_ns)
            mismatch = (mismatches or {}).get(inside.group.comm_id)
            self._renew(inside_finding(inside, stuck, now_ns - since, since, context, mismatch), inside, now_ns)
        elif culprits:
            uneven = [one for one in stuck if one.missing]
            self._name(culprits, blame.waiting, uneven, now_ns, context)
        else:
            unclear, doubtful = self._unclear(stuck, now_ns, context)
            self._renew(unclear, doubtful, now_ns)
        return self._ledger.findings()

    def _name(self, culprits: set[int], waiting: Set[int], uneven: list[Stuck], now_ns: int, context: Context) -> None:
        guilty = [one for one in uneven if not culprits.isdisjoint(one.missing)]
        first = self._first(guilty)
        since = self._since(min(one.since_ns for one in guilty))
        made = missing_finding(tuple(sorted(culprits)), waiting, first, uneven, now_ns - since, since, context)
        self._renew(made, first, now_ns)

    def _renew(self, finding: Finding | None, first: Stuck | None, now_ns: int) -> None:
        """One hang of a job at a time: what is said of it may become clearer."""
        if finding is not None and first is not None:
            self._ledger.update("hang", finding, keeps_since=False)
            self._told = _Told(finding.since_ns, now_ns, first.collective_id)
        elif self._ledger.is_open("hang"):
            self._ledger.close("hang", now_ns)
            self._told = None

    def _since(self, stopped_ns: int) -> int:
        """Since when the job stands still, by what stopped now: as was told before, unless it has gone on since."""
        told = self._told
        return stopped_ns if told is None or stopped_ns > told.at_ns else min(stopped_ns, told.since_ns)

    def _first(self, guilty: list[Stuck]) -> Stuck:
        """The operation to name: the one that was, while it stands; else that of the busiest channel, which shows best
        where its ranks stopped.
        """
        told = None if self._told is None else self._told.collective_id
        return min(
            guilty,
            key=lambda one: (
                one.collective_id != told,
                one.patience_ns,
                one.since_ns,
                len(one.group.global_ranks),
            ),
        )

    def _standings(self, now_ns: int, context: Context, doubted: frozenset[int]) -> Iterator[Standing]:
        """Of all channels, whether their patience is over or not: who of those that are silent waits for whom."""
        for channel, state in self._channels.items():
            group = context.groups.get(channel.communicator)
            if group is None or state.ranks < 2 or not doubted.isdisjoint(group.global_ranks):
                continue
            front, behind = self._board.standing(state.begin, state.ranks)
            if front < _LEAST_OPERATIONS:
                continue
            furthest = _furthest(behind)
            most = behind[furthest[0]]
            ahead = self._named([rank for rank, lag in behind.items() if lag < most], group)
            yield Standing(
                ahead=tuple(rank for rank in ahead if self._all_silent((rank,), now_ns)),
                behind=self._named(furthest, group),
                newest_here=frozenset(self._named(self._that_ended_here(state, group), group)),
            )

    def _that_ended_here(self, state: Silence, group: Group) -> list[int]:
        """Ranks whose newest operation of all is on this channel."""
        last_ns = self._board.last_ns(state.begin, state.ranks)
        return [
            rank
            for rank, last in last_ns.items()
            if rank < len(group.global_ranks) and last >= self._active_ns.get(group.global_ranks[rank], 0)
        ]

    def _note_active(self, rows: Columns, context: Context) -> None:
        """Where each rank logged last; of several places at one time, on the last communicator."""
        names = context.global_ranks_of(rows)
        order = np.lexsort((rows["receiver"], rows["sender"], rows["communicator"], rows["last_ns"], names))
        is_last = np.append(np.diff(names[order]) != 0, True)[: len(order)]
        chosen = order[is_last & (names[order] != NO_NUMBER)]
        columns = names[chosen], rows["last_ns"][chosen], rows["communicator"][chosen]
        for name, last, communicator in zip(*(column.tolist() for column in columns), strict=True):
            if last >= self._active_ns.get(name, 0):
                self._active_ns[name], self._last_on[name] = last, communicator

    def _all_stuck(
        self, now_ns: int, context: Context, doubted: frozenset[int], *, others_are_stuck: bool = False
    ) -> list[Stuck]:
        found = (self._stuck(channel, now_ns, context, doubted, others_are_stuck) for channel in self._channels)
        return [one for one in found if one is not None]

    def _stuck(
        self, channel: Channel, now_ns: int, context: Context, doubted: frozenset[int], others_are_stuck: bool
    ) -> Stuck | None:
        state, group = self._channels[channel], context.groups.get(channel.communicator)
        if now_ns - state.last_ns <= LEAST_SILENCE_NS or group is None or state.ranks < 2:
            return None  # no patience is shorter
        patience = state.patience_ns(others_are_stuck=others_are_stuck)
        if now_ns - state.last_ns <= patience:
            return None
        front, behind = self._board.standing(state.begin, state.ranks)
        if front < _LEAST_OPERATIONS:
            return None
        is_doubted = not doubted.isdisjoint(group.global_ranks)
        is_even = is_doubted or max(behind.values()) == 0
        furthest = [] if is_even else _furthest(behind)
        foremost = [rank for rank, lag in behind.items() if lag == 0 or is_doubted]
        missing, waiting = self._named(furthest, group), self._named(foremost, group)
        if not waiting or not (missing or is_even) or not self._all_silent((*missing, *waiting), now_ns):
            return None
        if not all(context.hears_all_of(group.hosts[rank]) for rank in furthest or foremost if rank < len(group.hosts)):
            return None
        return Stuck(channel, group, missing, waiting, state.last_ns, patience, front, is_doubted)

    def _waiting_for_resting(self, now_ns: int, context: Context) -> set[int]:
        """Global ranks that wait for one that has just ended a step: they have all the time that it may take."""
        excused: set[int] = set()
        for channel, state in self._channels.items():
            group, silence = context.groups.get(channel.communicator), now_ns - state.last_ns
            if group is None or not state.is_resting or not LEAST_SILENCE_NS < silence <= state.patience_ns():
                continue
            _, behind = self._board.standing(state.begin, state.ranks)
            if max(behind.values()) > 0:
                excused.update(self._named([rank for rank, lag in behind.items() if lag == 0], group))
        return excused

    def _unclear(self, stuck: list[Stuck], now_ns: int, context: Context) -> tuple[Finding, Stuck] | tuple[None, None]:
        """That all stands still where counts prove nothing."""
        doubted = [one for one in stuck if one.is_doubted]
        is_silent = self._all_silent(tuple(self._active_ns), now_ns, _INSIDE_SILENCE_NS)
        if not doubted or not is_silent or not context.knows_steps:
            return None, None
        first = max(doubted, key=lambda one: one.since_ns)
        since = self._since(first.since_ns)
        return unclear_finding(first, doubted, now_ns - since, since, context), first

    def _inside(self, culprits: set[int], stuck: list[Stuck], now_ns: int, context: Context) -> Stuck | None:
        """The operation that all ranks of a communicator have enqueued, behind which nothing comes any more."""
        if culprits and len(culprits) < 2:
            return None
        whole = [
            one
            for one in stuck
            if not one.missing
            and not one.is_doubted
            and one.operations >= _LEAST_TO_BE_INSIDE
            and set(one.waiting) == set(one.group.global_ranks)
            and all(self._last_on.get(rank) == one.channel.communicator for rank in one.waiting)
        ]
        if culprits:
            whole = [one for one in whole if set(one.waiting) <= culprits]
        elif not self._all_silent(tuple(self._active_ns), now_ns, _INSIDE_SILENCE_NS) or not context.knows_steps:
            return None
        return min(whole, key=lambda one: (len(one.waiting), one.since_ns), default=None)

    def _all_silent(self, ranks: tuple[int, ...], now_ns: int, least_ns: int = LEAST_SILENCE_NS) -> bool:
        return all(now_ns - self._active_ns.get(rank, 0) > least_ns for rank in ranks)

    def _named(self, ranks: list[int], group: Group) -> tuple[int, ...]:
        known = [group.global_ranks[rank] for rank in ranks if rank < len(group.global_ranks)]
        return tuple(sorted(rank for rank in known if rank != NO_NUMBER))


def _furthest(behind: dict[int, int]) -> list[int]:
    """Those who are furthest behind; all, where nobody is."""
    most = max(behind.values())
    return [rank for rank, lag in behind.items() if lag == most]


def _missing(stuck: list[Stuck]) -> set[int]:
    return {rank for one in stuck for rank in one.missing}
