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

from collections import deque
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from ncclscope_service import whole_rows
from ncclscope_service.detect.blame import Blame, Standing
from ncclscope_service.detect.board import Board
from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.findings import Ledger, duration_text, names_of_ranks
from ncclscope_service.rows import Finding, FindingKind, Severity
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_LEAST_SILENCE_NS: Final = 5_000_000_000
_INSIDE_SILENCE_NS: Final = 8_000_000_000
"""Where nobody is missing, silence is all there is to go by."""
_REST_NS: Final = 120_000_000_000
"""Evaluation and checkpoints of a minute or two are ordinary."""
_GAP_FACTOR: Final = 20
_LONGEST_FACTOR: Final = 3
_GAPS_KEPT: Final = 2048
_HOUR_NS: Final = 3_600_000_000_000
_LEAST_OPERATIONS: Final = 3
"""A channel must have worked before its silence means something."""
_LEAST_TO_BE_INSIDE: Final = 100
_SURE, _UNSURE, _INSIDE = 0.9, 0.6, 0.7
_COLLECTIVES_SHOWN: Final = 8


class State(StrEnum):
    """How the ranks of a hang stand."""

    NOT_ENQUEUED = "not_enqueued"
    INSIDE = "inside"
    MISMATCHED = "mismatched"
    UNCLEAR = "unclear"


class _Channel(NamedTuple):
    communicator: int
    sender: int
    receiver: int


@dataclass(slots=True)
class _State:
    ranks: int = 0
    """How many have counted."""
    begin: int = 0
    """Where the counts of its ranks begin on the board."""
    last_ns: int = 0
    front: int = 0
    gaps: deque[tuple[int, int, int]] = field(default_factory=lambda: deque[tuple[int, int, int]](maxlen=_GAPS_KEPT))
    """(when, how long between two looks that saw news, operations in it)."""
    is_resting: bool = False
    """Whether those who are furthest behind had just ended a step when last looked at."""
    longest_rest_ns: int = 0

    def look(self, newest_ns: int, front: int) -> None:
        """Takes the time of the newest operation of any rank, and how far the first rank has come."""
        if newest_ns <= self.last_ns:
            return
        if self.last_ns and self.is_resting:
            self.longest_rest_ns = max(self.longest_rest_ns, newest_ns - self.last_ns)
        elif self.last_ns:
            self.gaps.append((newest_ns, newest_ns - self.last_ns, max(1, front - self.front)))
        self.last_ns, self.front = newest_ns, max(front, self.front)

    def patience_ns(self, *, others_are_stuck: bool = False) -> int:
        """How long a silence is ordinary; where others are stuck already, the longest gap known is enough to go by."""
        recent = [(gap, gap / operations) for when, gap, operations in self.gaps if when > self.last_ns - _HOUR_NS]
        if self.is_resting:
            longest = max((gap for gap, _ in recent), default=0)
            return max(_REST_NS, _LONGEST_FACTOR * max(self.longest_rest_ns, longest))
        if not recent:
            return 4 * _LEAST_SILENCE_NS
        longest = _LONGEST_FACTOR * max(gap for gap, _ in recent)
        if others_are_stuck:
            return max(_LEAST_SILENCE_NS, longest)
        # between two looks many operations pass: their mean gap is the usual one, the look's is only an upper bound
        usual = float(np.percentile([gap for _, gap in recent], 99))
        return round(max(_LEAST_SILENCE_NS, _GAP_FACTOR * usual, longest))


@dataclass(frozen=True, slots=True)
class _Stuck:
    channel: _Channel
    group: Group
    missing: tuple[int, ...]
    """Global ranks that have not enqueued; empty where all have."""
    waiting: tuple[int, ...]
    since_ns: int
    patience_ns: int
    operations: int
    is_doubted: bool = False
    """Lines of its ranks were lost: who is missing cannot be told."""

    @property
    def collective_id(self) -> str:
        """The operation that does not end."""
        if self.channel.sender == NO_NUMBER:
            return f"{self.group.comm_id}:{self.operations - 1}"
        return f"{self.group.comm_id}:{self.channel.sender}>{self.channel.receiver}:{self.operations - 1}"


@dataclass(frozen=True, slots=True)
class _Told:
    """What was last said of the hang that is open."""

    since_ns: int
    at_ns: int
    collective_id: str


class Hang:
    """Feeds on counts of one job's logs; needs no captures."""

    def __init__(self) -> None:
        self._channels: dict[_Channel, _State] = {}
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
        self._board.put(fed)
        self._note_active(fed, context)
        for key, begin, ranks, newest_ns, front, is_resting in self._board.channels(context):
            state = self._channels.setdefault(_Channel(*key), _State())
            state.begin, state.ranks = begin, ranks
            state.look(newest_ns, front)
            state.is_resting = is_resting

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
            self._renew(_inside_finding(inside, stuck, now_ns - since, since, context, mismatch), inside, now_ns)
        elif culprits:
            uneven = [one for one in stuck if one.missing]
            self._name(culprits, blame.waiting, uneven, now_ns, context)
        else:
            unclear, doubtful = self._unclear(stuck, now_ns, context)
            self._renew(unclear, doubtful, now_ns)
        return self._ledger.findings()

    def _name(self, culprits: set[int], waiting: Set[int], uneven: list[_Stuck], now_ns: int, context: Context) -> None:
        guilty = [one for one in uneven if not culprits.isdisjoint(one.missing)]
        first = self._first(guilty)
        since = self._since(min(one.since_ns for one in guilty))
        made = _missing_finding(tuple(sorted(culprits)), waiting, first, uneven, now_ns - since, since, context)
        self._renew(made, first, now_ns)

    def _renew(self, finding: Finding | None, first: _Stuck | None, now_ns: int) -> None:
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

    def _first(self, guilty: list[_Stuck]) -> _Stuck:
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

    def _that_ended_here(self, state: _State, group: Group) -> list[int]:
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
    ) -> list[_Stuck]:
        found = (self._stuck(channel, now_ns, context, doubted, others_are_stuck) for channel in self._channels)
        return [one for one in found if one is not None]

    def _stuck(
        self, channel: _Channel, now_ns: int, context: Context, doubted: frozenset[int], others_are_stuck: bool
    ) -> _Stuck | None:
        state, group = self._channels[channel], context.groups.get(channel.communicator)
        if now_ns - state.last_ns <= min(_LEAST_SILENCE_NS, _REST_NS):
            return None  # no patience is shorter
        if group is None or state.ranks < 2:
            return None
        front, behind = self._board.standing(state.begin, state.ranks)
        patience = state.patience_ns(others_are_stuck=others_are_stuck)
        if front < _LEAST_OPERATIONS or now_ns - state.last_ns <= patience:
            return None
        is_doubted = not doubted.isdisjoint(group.global_ranks)
        is_even = is_doubted or max(behind.values()) == 0
        missing = () if is_even else self._named(_furthest(behind), group)
        waiting = self._named([rank for rank, lag in behind.items() if lag == 0 or is_doubted], group)
        if not waiting or not (missing or is_even) or not self._all_silent((*missing, *waiting), now_ns):
            return None
        unheard = context.silent_hosts | context.lossy_hosts
        if any(host in unheard for host in context.hosts_of(missing or waiting)):
            return None
        return _Stuck(channel, group, missing, waiting, state.last_ns, patience, front, is_doubted)

    def _waiting_for_resting(self, now_ns: int, context: Context) -> set[int]:
        """Global ranks that wait for one that has just ended a step: they have all the time that it may take."""
        excused: set[int] = set()
        for channel, state in self._channels.items():
            group, silence = context.groups.get(channel.communicator), now_ns - state.last_ns
            if group is None or not state.is_resting or not _LEAST_SILENCE_NS < silence <= state.patience_ns():
                continue
            _, behind = self._board.standing(state.begin, state.ranks)
            if max(behind.values()) > 0:
                excused.update(self._named([rank for rank, lag in behind.items() if lag == 0], group))
        return excused

    def _unclear(
        self, stuck: list[_Stuck], now_ns: int, context: Context
    ) -> tuple[Finding, _Stuck] | tuple[None, None]:
        """That all stands still where counts prove nothing."""
        doubted = [one for one in stuck if one.is_doubted]
        is_silent = self._all_silent(tuple(self._active_ns), now_ns, _INSIDE_SILENCE_NS)
        if not doubted or not is_silent or not context.knows_steps:
            return None, None
        first = max(doubted, key=lambda one: one.since_ns)
        since = self._since(first.since_ns)
        return _unclear_finding(first, doubted, now_ns - since, since, context), first

    def _inside(self, culprits: set[int], stuck: list[_Stuck], now_ns: int, context: Context) -> _Stuck | None:
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

    def _all_silent(self, ranks: tuple[int, ...], now_ns: int, least_ns: int = _LEAST_SILENCE_NS) -> bool:
        return all(now_ns - self._active_ns.get(rank, 0) > least_ns for rank in ranks)

    def _named(self, ranks: list[int], group: Group) -> tuple[int, ...]:
        known = [group.global_ranks[rank] for rank in ranks if rank < len(group.global_ranks)]
        return tuple(sorted(rank for rank in known if rank != NO_NUMBER))


def _furthest(behind: dict[int, int]) -> list[int]:
    """Those who are furthest behind; all, where nobody is."""
    most = max(behind.values())
    return [rank for rank, lag in behind.items() if lag == most]


def _missing(stuck: list[_Stuck]) -> set[int]:
    return {rank for one in stuck for rank in one.missing}


def _missing_finding(
    culprits: tuple[int, ...],
    waiting: Set[int],
    first: _Stuck,
    stuck: list[_Stuck],
    silent_ns: int,
    since_ns: int,
    context: Context,
) -> Finding:
    hosts = context.hosts_of(culprits)
    verb = "has" if len(culprits) == 1 else "have"
    others = sorted(set(waiting) - set(culprits))
    on = f" ({', '.join(hosts)})" if hosts and len(hosts) <= 3 else ""
    wait = "waits" if len(others) == 1 else "wait"
    waits = f"{names_of_ranks(others)} {wait}" if others else "they wait for each other"
    found = _finding(State.NOT_ENQUEUED, first, stuck, silent_ns, since_ns, context)
    return replace(
        found,
        ranks=culprits,
        hosts=hosts,
        confidence=_SURE if set(culprits).isdisjoint(waiting) else _UNSURE,
        summary=(
            f"{names_of_ranks(culprits)}{on} {verb} not enqueued operation {first.operations} of "
            f"{first.group.name} for {duration_text(silent_ns)}; {waits}"
        ),
        evidence=dict(found.evidence) | {"waiting_ranks": others},
    )


def _inside_finding(
    first: _Stuck, stuck: list[_Stuck], silent_ns: int, since_ns: int, context: Context, mismatch: Finding | None
) -> Finding:
    what = f"all {len(first.waiting)} ranks have enqueued operation {first.operations} of {first.group.name}"
    if mismatch is None:
        return replace(
            _finding(State.INSIDE, first, stuck, silent_ns, since_ns, context),
            summary=f"{what}, and nothing more comes for {duration_text(silent_ns)}: they are stuck inside it",
        )
    return replace(
        _finding(State.MISMATCHED, first, stuck, silent_ns, since_ns, context),
        ranks=mismatch.ranks,
        hosts=mismatch.hosts,
        confidence=mismatch.confidence,
        summary=(
            f"{what}, but not the same one, and nothing more comes for {duration_text(silent_ns)}: {mismatch.summary}"
        ),
    )


def _unclear_finding(first: _Stuck, stuck: list[_Stuck], silent_ns: int, since_ns: int, context: Context) -> Finding:
    return replace(
        _finding(State.UNCLEAR, first, stuck, silent_ns, since_ns, context),
        comm_id=None,
        parallelism=None,
        confidence=_UNSURE,
        summary=(
            f"the job has enqueued nothing for {duration_text(silent_ns)}; lines of its logs were lost, so who is "
            "missing cannot be told"
        ),
    )


def _finding(
    state: State, first: _Stuck, stuck: list[_Stuck], silent_ns: int, since_ns: int, context: Context
) -> Finding:
    """What all hangs have in common."""
    uneven = [one for one in stuck if (one.missing or one.is_doubted) and one is not first]
    return Finding(
        kind=FindingKind.HANG,
        severity=Severity.CRITICAL,
        job=context.job,
        comm_id=first.group.comm_id,
        parallelism=first.group.parallelism,
        ranks=(),
        hosts=(),
        since_ns=since_ns,
        until_ns=None,
        confidence=_INSIDE,
        summary="",
        evidence={
            "state": state.value,
            "silent_ns": silent_ns,
            "patience_ns": first.patience_ns,
            "operation": first.operations,
            "collectives": [one.collective_id for one in [first, *uneven][:_COLLECTIVES_SHOWN]],
            "stuck_groups": sorted({one.group.comm_id for one in [first, *uneven]}),
            "waiting_ranks": sorted(first.waiting),
        },
    )
