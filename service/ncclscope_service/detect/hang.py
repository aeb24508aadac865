"""Findings about a job that stands still: which rank is missing, or where the job is stuck, from the logs alone.

The log line is written when the host enqueues an operation. In a hang, ranks that wait have enqueued the next
collective and then go silent. So a communicator that is silent for far longer than it ever was is stuck, and who has
enqueued what says how:

- *not enqueued*: some rank has enqueued fewer operations than those that wait, and it does not itself wait for another
  rank on any communicator (`WaitGraph`). It is missing.
- *inside*: the missing ranks are all ranks of one communicator and have come equally far on it, or nobody is missing at
  all: everybody has enqueued the operation and it does not end.
- *mismatched*: the same, and the ranks called different operations there (`mismatch.py`).
- *stopped*: nobody is missing, and the ranks stopped in several communicators at once. The job was killed, perhaps.
- *unclear*: log lines of these communicators were lost, so the counts of their ranks cannot be compared; or ranks wait
  for each other in collectives.

When a job is over, its last counts alone may prove that it was a hang (`hang_at_end`).

Ranks that have just ended a step (`pauses.py`) may be evaluating or writing a checkpoint: they get far more time.
Send/Recv are counted per ordered pair: the sends of one rank to another against the receives of that other from it.

Blame follows who waits for whom, across communicators. A rank that has enqueued an operation which another rank of the
channel has not waits for that one. So a rank that is missing on one channel and waits on another is a victim: the blame
goes on to whom it waits for there, Send and Recv included. The root is missing and waits for nobody. If ranks wait in a
circle, a Send or Recv behind which its rank has enqueued others does not hold that rank's host: it was started early,
and such waits are left out. All ranks call collectives in one order: a circle of these names nobody.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from ncclscope_service.columns import row_ops
from ncclscope_service.detect import measured_confidence
from ncclscope_service.detect.context import Context, Group, Ledger, duration_text, names_of_ranks, names_with_hosts
from ncclscope_service.detect.kernel_counts import NOTHING_SHOWN, ShownByKernels
from ncclscope_service.detect.pauses import ChannelSilence
from ncclscope_service.detect.progress import ProgressBoard
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_service.store.settings import SECOND_NS
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_COLLECTIVES_SHOWN: Final = 8


class HangState(StrEnum):
    """Kinds of hangs."""

    NOT_ENQUEUED = "not_enqueued"
    INSIDE = "inside"
    MISMATCHED = "mismatched"
    UNCLEAR = "unclear"
    STOPPED = "stopped"
    """All ranks stopped at once and nobody waits for another."""


class Channel(NamedTuple):
    """A communicator's collectives, or one ordered pair of Send and Recv (communicator ranks)."""

    communicator: int
    sender: int
    receiver: int

    def collective_id(self, group: Group, number: int) -> str:
        """The operation of this number, from 0, as `operations.parquet` has it; `group`: that of the communicator."""
        pair = "" if self.sender == NO_NUMBER else f"{self.sender}>{self.receiver}:"
        return f"{group.comm_id}:{pair}{number}"


@dataclass(frozen=True, slots=True)
class StuckChannel:
    """A channel that is silent for longer than is ordinary."""

    channel: Channel
    group: Group
    missing: tuple[int, ...]
    """Global ranks that have not enqueued; empty if all have."""
    waiting: tuple[int, ...]
    since_ns: int
    patience_ns: int
    operations: int
    is_doubted: bool = False
    """Lines of its ranks were lost: the missing rank cannot be determined."""

    @property
    def collective_id(self) -> str:
        """The operation that does not end."""
        return self.channel.collective_id(self.group, self.operations - 1)


def missing_finding(
    culprits: tuple[int, ...],
    waiting: Set[int],
    first: StuckChannel,
    stuck: list[StuckChannel],
    silent_ns: int,
    since_ns: int,
    context: Context,
) -> Finding:
    """Finding that these ranks are missing; `first`: the operation to name; `waiting`: all ranks that wait."""
    hosts = context.hosts_of(culprits)
    verb = "has" if len(culprits) == 1 else "have"
    others = sorted(set(waiting) - set(culprits))
    are = "is" if len(others) == 1 else "are"
    waits = f"{names_of_ranks(others)} {are} waiting" if others else "they are waiting for each other"
    how_sure = (
        measured_confidence.HANG_UNSURE
        if not set(culprits).isdisjoint(waiting)
        else measured_confidence.HANG_OF_ONE_RANK
        if len(culprits) == 1
        else measured_confidence.HANG_OF_SEVERAL
    )
    killed = ", or the job was killed" if len(culprits) > 1 else ""
    found = _finding(HangState.NOT_ENQUEUED, first, stuck, silent_ns, since_ns, context)
    return replace(
        found,
        ranks=culprits,
        hosts=hosts,
        confidence=how_sure,
        summary=(
            f"{names_with_hosts(culprits, hosts)} {verb} not enqueued operation {first.operations} of "
            f"{first.group.name} for {duration_text(silent_ns)}; {waits}{killed}"
        ),
        evidence=dict(found.evidence) | {"waiting_ranks": others},
    )


def inside_finding(
    first: StuckChannel,
    stuck: list[StuckChannel],
    silent_ns: int,
    since_ns: int,
    context: Context,
    mismatch: Finding | None,
) -> Finding:
    """Finding that all have enqueued an operation and it does not end; `mismatch`: that it is not the same one."""
    what = f"all {len(first.waiting)} ranks have enqueued operation {first.operations} of {first.group.name}"
    if mismatch is None:
        return replace(
            _finding(HangState.INSIDE, first, stuck, silent_ns, since_ns, context),
            summary=(
                f"{what} and nothing since, for {duration_text(silent_ns)}: they are stuck in it, or the job was killed"
            ),
        )
    return replace(
        _finding(HangState.MISMATCHED, first, stuck, silent_ns, since_ns, context),
        ranks=mismatch.ranks,
        hosts=mismatch.hosts,
        confidence=mismatch.confidence,
        summary=(
            f"{what}, but not the same operation, and nothing since, for {duration_text(silent_ns)}: {mismatch.summary}"
        ),
    )


_LOST: Final = "; log lines were lost, so the missing rank cannot be determined"
_CIRCLE: Final = "; ranks wait for each other: log lines were lost, or they called operations in different orders"
_STOPPED: Final = ", and no rank waits for another: it was killed, or its groups are stuck at once"


def unclear_finding(
    first: StuckChannel, stuck: list[StuckChannel], silent_ns: int, since_ns: int, context: Context, *, why: str
) -> Finding:
    """Finding that the job stands still, and lost lines hide who is missing; or nobody is (`why`)."""
    is_even = why == _STOPPED
    return replace(
        _finding(HangState.STOPPED if is_even else HangState.UNCLEAR, first, stuck, silent_ns, since_ns, context),
        comm_id=None,
        parallelism=None,
        confidence=measured_confidence.HANG_OF_NOBODY if is_even else measured_confidence.HANG_UNSURE,
        summary=f"the job has enqueued nothing for {duration_text(silent_ns)}{why}",
    )


def _finding(
    state: HangState, first: StuckChannel, stuck: list[StuckChannel], silent_ns: int, since_ns: int, context: Context
) -> Finding:
    """The part that all hangs have in common."""
    uneven = [one for one in stuck if (one.missing or one.is_doubted) and one is not first]
    return Finding(
        kind=FindingKind.HANG,
        severity=Severity.CRITICAL,
        job=context.job,
        comm_id=first.group.comm_id,
        parallelism=first.group.parallelism,
        since_ns=since_ns,
        confidence=measured_confidence.HANG_OF_NOBODY,
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


class ChannelWaits(NamedTuple):
    """Waits on one channel; ranks are global."""

    ahead: tuple[int, ...]
    """Ranks that have enqueued what those behind have not."""
    behind: tuple[int, ...]
    """Ranks that are furthest behind; all ranks if nobody is ahead."""
    newest_here: frozenset[int]
    """Ranks whose newest operation of all is on this channel, or that wait here for a collective: only Sends and Recvs
    are enqueued early.
    """


class WaitGraph:
    """Who waits for whom in one job at one time."""

    def __init__(self, standings: Iterable[ChannelWaits] = ()) -> None:
        self._waits_for: defaultdict[int, list[ChannelWaits]] = defaultdict(list)
        self._held: set[int] = set()
        """Ranks that have enqueued nothing after an operation in which they wait."""
        self._ended_evenly: defaultdict[int, list[ChannelWaits]] = defaultdict(list)
        """By rank, the channels of its newest operation on which nobody is missing."""
        for standing in standings:
            if not standing.ahead:
                for rank in standing.newest_here:
                    self._ended_evenly[rank].append(standing)
            for rank in standing.ahead:
                self._waits_for[rank].append(standing)
            self._held.update(standing.newest_here.intersection(standing.ahead))

    @property
    def waiting(self) -> Set[int]:
        """All ranks that wait for another."""
        return self._waits_for.keys()

    def roots(self, missing: Set[int]) -> set[int]:
        """Ranks among these that are to blame; none if all of them wait for others that are not among them, or for each
        other with all hosts held: that shows nothing but lost lines, or calls in different orders.
        """
        free = set(missing) - self.waiting
        if free:
            return {rank for rank in free if not self._is_held_by_others(rank, free)} or free
        if self.ends(missing):
            return set()
        return set(missing) - self._held

    def _is_held_by_others(self, rank: int, free: Set[int]) -> bool:
        """Whether it ended in an operation that everybody has enqueued, beside ranks that wait for another root."""
        mates = {mate for standing in self._ended_evenly[rank] for mate in standing.behind if mate in self._waits_for}
        ends = self.ends(mates) if mates and len(free) > 1 else set[int]()
        return bool(ends & free) and rank not in ends

    def ends(self, ranks: Set[int]) -> set[int]:
        """Ranks at which the blame of these ends: those that wait for nobody."""
        return _reached(ranks, self._waits_for, lambda standing: standing.behind) - self.waiting


def _reached(
    ranks: Iterable[int], waits: Mapping[int, Sequence[ChannelWaits]], onward: Callable[[ChannelWaits], Iterable[int]]
) -> set[int]:
    """These ranks, and those to which their `waits` lead over others; `onward`: to whom one leads."""
    seen = set(ranks)
    left, followed = list(seen), set[int]()
    while left:
        for standing in waits.get(left.pop(), ()):
            if id(standing) not in followed:
                followed.add(id(standing))  # many wait for the same ranks: these are looked at once
                more = set(onward(standing)) - seen
                seen |= more
                left.extend(more)
    return seen


_MOST_ENDS: Final = 8
"""Ranks at which the waits of one job end: if more wait for nobody, it was killed, or logs were cut."""


def ends_of_waits(waits: Iterable[ChannelWaits]) -> dict[int, tuple[int, ...]]:
    """By rank that waits for another, directly or over others: the ranks at which its waits end, which wait for nobody.

    Empty if all wait in a circle, or if too many ranks wait for nobody to blame any.
    """
    uneven = [each for each in waits if each.ahead]
    waiting = {rank for each in uneven for rank in each.ahead}
    held_by: defaultdict[int, list[ChannelWaits]] = defaultdict(list[ChannelWaits])
    for each in uneven:
        for rank in each.behind:
            held_by[rank].append(each)
    roots = held_by.keys() - waiting
    ends: defaultdict[int, tuple[int, ...]] = defaultdict(tuple[int, ...])
    for root in sorted(roots) if len(roots) <= _MOST_ENDS else ():
        for rank in _reached([root], held_by, lambda each: each.ahead) - {root}:
            ends[rank] += (root,)
    return dict(ends)


_STEPS: Final = 2
"""Others cannot go on for so long without a rank."""
_LEAST_OPERATIONS: Final = 3
"""A channel must have worked before its silence means something."""


@dataclass(frozen=True, slots=True)
class _LastReport:
    """The last report of the hang that is open."""

    since_ns: int
    at_ns: int
    collective_id: str


class Hang:
    """Hangs of one job, from counts of its logs; needs no captures."""

    def __init__(self) -> None:
        self._channels: dict[Channel, ChannelSilence] = {}
        self._board = ProgressBoard()
        self._active_ns: dict[int, int] = {}
        """By global rank: time of its newest log line."""
        self._last_on: dict[int, int] = {}
        """By global rank: the communicator of that line."""
        self._enqueued: Mapping[int, Mapping[int, int]] = {}
        """By communicator of which lines were lost: collectives that each rank has enqueued."""
        self._ledger = Ledger()
        self._reported: _LastReport | None = None
        self._context: Context | None = None

    @property
    def is_open(self) -> bool:
        """Whether a hang of the job is open."""
        return bool(self._ledger.open_keys())

    @property
    def is_unclear(self) -> bool:
        """Whether one is, and lost lines hide who is missing."""
        found = self._ledger.open_finding("hang")
        return found is not None and found.evidence["state"] == HangState.UNCLEAR.value

    def ingest_progress(self, progress: Columns, context: Context) -> None:
        """Takes the present counts (`PROGRESS`), about once a second."""
        self._context = context
        fed = row_ops.filter_rows(progress, np.isin(progress["communicator"], np.fromiter(context.groups, np.int64)))
        self._drop_ended(context)
        self._board.update(fed)
        self._record_activity(fed, context)
        for channel in self._board.channels(context):
            key = Channel(channel.communicator, channel.sender, channel.receiver)
            state = self._channels.setdefault(key, ChannelSilence())
            state.begin, state.ranks = channel.begin, channel.ranks
            state.observe(channel.newest_ns, channel.front)
            state.is_resting = channel.is_resting

    def _drop_ended(self, context: Context) -> None:
        """Drops communicators that ended: they do not come back, and some jobs make new ones again and again."""
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
        enqueued: Mapping[int, Mapping[int, int]] | None = None,
    ) -> list[Finding]:
        """All findings so far. `now_ns` is the clock that `last_ns` was read from, or the newest time known of it.

        `mismatches`: findings about communicators whose ranks call different operations, by comm_id; `with_losses`:
        communicators whose log lines were lost; `enqueued`: of those of which it is known all the same, how many
        collectives each rank has enqueued.
        """
        self._enqueued = enqueued or {}
        context = self._context
        if context is None:
            return []
        for channel, state in self._channels.items() if context.silent_hosts else ():
            group = context.groups.get(channel.communicator)
            if group is not None and not context.silent_hosts.isdisjoint(group.hosts):
                state.unheard_ns = now_ns
        doubted = frozenset(context.groups) if self._board.shows_losses else with_losses
        stuck = self._all_stuck(now_ns, context, doubted)
        missing = _missing(stuck)
        excused = self._waiting_for_resting(now_ns, context)
        blame = WaitGraph(self._channel_waits(now_ns, context, doubted) if missing else ())
        culprits = blame.roots(missing) - excused
        if missing and not culprits:
            stuck = self._all_stuck(now_ns, context, doubted, others_are_stuck=True)
            missing = _missing(stuck)
            culprits = blame.roots(missing) - excused
        is_circle = bool(missing) and not culprits and not excused and not blame.ends(missing)
        if (told := self._mismatched(stuck, mismatches or {})) is not None:
            one, wrong = told
            since = self._since(one.since_ns)
            self._renew(inside_finding(one, stuck, now_ns - since, since, context, wrong), one, now_ns)
        elif (missing or excused) and not culprits and not is_circle:
            self._renew(None, None, now_ns)  # who is to blame still has time
        elif not is_circle and (inside := self._inside(culprits, stuck, now_ns, context)) is not None:
            since = self._since(inside.since_ns)
            mismatch = (mismatches or {}).get(inside.group.comm_id)
            if culprits or mismatch or set(inside.waiting) >= self._active_ns.keys():
                made = inside_finding(inside, stuck, now_ns - since, since, context, mismatch)
            else:  # all stopped at once, in several groups: none of them is to blame
                made = unclear_finding(inside, stuck, now_ns - since, since, context, why=_STOPPED)
            self._renew(made, inside, now_ns)
        elif culprits and not self._went_on(culprits, context) and self._may_be_named(culprits, stuck):
            uneven = [one for one in stuck if one.missing]
            self._name(culprits, blame.waiting, uneven, now_ns, context)
        else:
            # Lost last lines look like missing ranks: `hang_at_end` names one, or nobody.
            doubtful = stuck if missing else [one for one in stuck if one.is_doubted]
            why = _CIRCLE if is_circle and not with_losses and not self._enqueued else _LOST
            unclear, shown = self._unclear(doubtful, now_ns, context, why)
            self._renew(unclear, shown, now_ns)
        return self._ledger.findings()

    def _mismatched(
        self, stuck: list[StuckChannel], mismatches: Mapping[str | None, Finding]
    ) -> tuple[StuckChannel, Finding] | None:
        """Where lines were lost: the operation that all ranks have enqueued and that is known not to be the same one.

        Counts that lost lines spoil elsewhere are then of no account.
        """
        for one in stuck if self._enqueued else ():
            mismatch = mismatches.get(one.group.comm_id)
            if mismatch is not None and not one.missing and mismatch.evidence["coll_seq"] == one.operations - 1:
                return one, mismatch
        return None

    def _may_be_named(self, culprits: Set[int], stuck: Sequence[StuckChannel]) -> bool:
        """Whether these are missing although lines were lost: all others stand where they wait for the one there is."""
        uneven = [one for one in stuck if one.missing]
        return not self._enqueued or (
            len(culprits) == 1
            and not any(one.is_doubted for one in stuck)
            and all(set(one.group.global_ranks) == {*one.missing, *one.waiting} for one in uneven)
        )

    def _went_on(self, culprits: Set[int], context: Context) -> bool:
        """Whether others went on for steps without one of these: its log is lost. So they are if all are missing."""
        last_ns = min(self._active_ns[rank] for rank in culprits)
        is_long = context.step_ns is not None and max(self._active_ns.values()) - last_ns > _STEPS * context.step_ns
        return is_long or culprits >= self._active_ns.keys()

    def _name(
        self, culprits: set[int], waiting: Set[int], uneven: list[StuckChannel], now_ns: int, context: Context
    ) -> None:
        guilty = [one for one in uneven if not culprits.isdisjoint(one.missing)]
        first = self._first(guilty)
        since = self._since(min(one.since_ns for one in guilty))
        made = missing_finding(tuple(sorted(culprits)), waiting, first, uneven, now_ns - since, since, context)
        if self._enqueued:  # the last line of a rank may be lost, too
            made = replace(made, confidence=min(made.confidence, measured_confidence.HANG_AMONG_LOSSES))
        self._renew(made, first, now_ns)

    def _renew(self, finding: Finding | None, first: StuckChannel | None, now_ns: int) -> None:
        """Updates or closes the finding: a job has one hang at a time, and it may become clearer."""
        if finding is not None and first is not None:
            self._ledger.update("hang", finding, keeps_since=False)
            self._reported = _LastReport(finding.since_ns, now_ns, first.collective_id)
        elif self._ledger.is_open("hang"):
            self._ledger.close("hang", now_ns)
            self._reported = None

    def _since(self, stopped_ns: int) -> int:
        """Since when the job stands still, by what stopped now: as reported before, unless it has gone on since."""
        reported = self._reported
        return stopped_ns if reported is None or stopped_ns > reported.at_ns else min(stopped_ns, reported.since_ns)

    def _first(self, guilty: list[StuckChannel]) -> StuckChannel:
        """The operation to name: the one that was, while it stands; else that of the busiest channel, which shows best
        where its ranks stopped.
        """
        reported = None if self._reported is None else self._reported.collective_id
        return min(
            guilty,
            key=lambda one: (one.collective_id != reported, one.patience_ns, one.since_ns, len(one.group.global_ranks)),
        )

    def _channel_waits(self, now_ns: int, context: Context, doubted: Set[int]) -> Iterator[ChannelWaits]:
        """Waits of silent ranks on all channels, whether their patience is over or not."""
        for channel, state in self._channels.items():
            group = context.groups.get(channel.communicator)
            if group is None or state.ranks < 2 or self._is_doubted(channel, doubted):
                continue
            front, behind = self._standing(channel, state)
            if front < _LEAST_OPERATIONS:
                continue
            furthest = _furthest(behind)
            most = behind[furthest[0]]
            ahead = _named([rank for rank, lag in behind.items() if lag < most], group)
            newest = _named(self._whose_newest_is_here(state, group), group)
            yield ChannelWaits(
                ahead=tuple(rank for rank in ahead if self._all_silent((rank,), now_ns, context)),
                behind=_named(furthest, group),
                newest_here=frozenset(ahead or newest if channel.sender == NO_NUMBER else newest),
            )

    def _standing(self, channel: Channel, state: ChannelSilence) -> tuple[int, dict[int, int]]:
        """The count of the first rank of a channel, and how many operations each rank is behind it."""
        counts = self._enqueued.get(channel.communicator) if channel.sender == NO_NUMBER else None
        if not counts:
            return self._board.standing(state.begin, state.ranks)
        front = max(counts.values())
        return front, {rank: front - count for rank, count in counts.items()}

    def _is_doubted(self, channel: Channel, doubted: Set[int]) -> bool:
        """Whether lost lines hide how far the ranks of a channel have come: nothing tells of Sends and Receives."""
        is_told = channel.sender == NO_NUMBER and channel.communicator in self._enqueued
        return bool(doubted or self._enqueued) and not is_told

    def _whose_newest_is_here(self, state: ChannelSilence, group: Group) -> list[int]:
        """Ranks whose newest operation of all is on this channel."""
        last_ns = self._board.last_ns(state.begin, state.ranks)
        return [
            rank
            for rank, last in last_ns.items()
            if rank < len(group.global_ranks) and last >= self._active_ns.get(group.global_ranks[rank], 0)
        ]

    def _record_activity(self, rows: Columns, context: Context) -> None:
        """Records where each rank logged last; of several places at one time, the last communicator."""
        names = context.global_ranks_of(rows)
        order = np.lexsort((rows["receiver"], rows["sender"], rows["communicator"], rows["last_ns"], names))
        is_last = np.append(np.diff(names[order]) != 0, True)[: len(order)]
        chosen = order[is_last & (names[order] != NO_NUMBER)]
        columns = names[chosen], rows["last_ns"][chosen], rows["communicator"][chosen]
        for name, last, communicator in zip(*(column.tolist() for column in columns), strict=True):
            if last >= self._active_ns.get(name, 0):
                self._active_ns[name], self._last_on[name] = last, communicator

    def _all_stuck(
        self, now_ns: int, context: Context, doubted: Set[int], *, others_are_stuck: bool = False
    ) -> list[StuckChannel]:
        found = (self._stuck(channel, now_ns, context, doubted, others_are_stuck) for channel in self._channels)
        return [one for one in found if one is not None]

    def _stuck(
        self, channel: Channel, now_ns: int, context: Context, doubted: Set[int], others_are_stuck: bool
    ) -> StuckChannel | None:
        state, group = self._channels[channel], context.groups.get(channel.communicator)
        silence = state.silence_ns(now_ns)
        settings = context.settings.hang
        if silence <= settings.least_silence_seconds * SECOND_NS or group is None or state.ranks < 2:
            return None  # no patience is shorter
        patience = state.patience_ns(settings, others_are_stuck=others_are_stuck)
        if silence <= patience:
            return None
        front, behind = self._standing(channel, state)
        if front < _LEAST_OPERATIONS:
            return None
        is_doubted = self._is_doubted(channel, doubted)
        found = _stuck_channel(channel, group, front, behind, is_doubted=is_doubted)
        is_named = found.missing or is_doubted or max(behind.values()) == 0
        ranks = (*found.missing, *found.waiting)
        if not found.waiting or not is_named or not self._all_silent(ranks, now_ns, context):
            return None
        judged = found.missing or found.waiting
        hosts = (host for rank, host in zip(group.global_ranks, group.hosts, strict=True) if rank in judged)
        if not all(map(context.is_fully_observed, hosts)):
            return None
        return replace(found, since_ns=state.last_ns, patience_ns=patience)

    def _waiting_for_resting(self, now_ns: int, context: Context) -> set[int]:
        """Global ranks that wait for one that has just ended a step: its pause excuses them."""
        excused: set[int] = set()
        settings = context.settings.hang
        least_ns = settings.least_silence_seconds * SECOND_NS
        for channel, state in self._channels.items():
            group, silence = context.groups.get(channel.communicator), state.silence_ns(now_ns)
            if group is None or not state.is_resting or not least_ns < silence <= state.patience_ns(settings):
                continue
            _, behind = self._standing(channel, state)
            if max(behind.values()) > 0:
                excused.update(_named([rank for rank, lag in behind.items() if lag == 0], group))
        return excused

    def _unclear(
        self, doubted: list[StuckChannel], now_ns: int, context: Context, why: str
    ) -> tuple[Finding, StuckChannel] | tuple[None, None]:
        """The finding that the job stands still although counts of these channels prove nothing, if it does."""
        if not doubted or not self._is_job_silent(now_ns, context) or not context.knows_steps:
            return None, None
        first = max(doubted, key=lambda one: one.since_ns)
        since = self._since(first.since_ns)
        return unclear_finding(first, doubted, now_ns - since, since, context, why=why), first

    def _inside(
        self, culprits: set[int], stuck: list[StuckChannel], now_ns: int, context: Context
    ) -> StuckChannel | None:
        """The operation that all ranks of a communicator have enqueued and nothing after it, if there is one."""
        if culprits and len(culprits) < 2:
            return None
        whole = [
            one
            for one in stuck
            if not one.missing
            and not one.is_doubted
            and one.operations >= context.settings.hang.least_inside_operations
            and set(one.waiting) == set(one.group.global_ranks)
            and all(self._last_on.get(rank) == one.channel.communicator for rank in one.waiting)
        ]
        if culprits:
            whole = [one for one in whole if set(one.waiting) <= culprits]
        elif not self._is_job_silent(now_ns, context) or not context.knows_steps:
            return None
        return min(whole, key=lambda one: (len(one.waiting), one.since_ns), default=None)

    def _all_silent(self, ranks: tuple[int, ...], now_ns: int, context: Context) -> bool:
        least_ns = context.settings.hang.least_silence_seconds * SECOND_NS
        return all(now_ns - self._active_ns.get(rank, 0) > least_ns for rank in ranks)

    def _is_job_silent(self, now_ns: int, context: Context) -> bool:
        """Whether all ranks are silent for so long that this alone is evidence."""
        least_ns = context.settings.hang.inside_silence_seconds * SECOND_NS
        return all(now_ns - newest_ns > least_ns for newest_ns in self._active_ns.values())


def _furthest(behind: dict[int, int]) -> list[int]:
    """Ranks that are furthest behind; all if nobody is."""
    most = max(behind.values())
    return [rank for rank, lag in behind.items() if lag == most]


def _named(ranks: Iterable[int], group: Group) -> tuple[int, ...]:
    """Global ranks of these ranks of a group, as far as they are known."""
    known = [group.global_ranks[rank] for rank in ranks if rank < len(group.global_ranks)]
    return tuple(sorted(rank for rank in known if rank != NO_NUMBER))


def _stuck_channel(
    channel: Channel, group: Group, front: int, behind: dict[int, int], *, is_doubted: bool = False
) -> StuckChannel:
    """A channel of which the first rank has enqueued `front` operations, and each other one so many fewer."""
    is_even = is_doubted or max(behind.values()) == 0
    foremost = [rank for rank, lag in behind.items() if lag == 0 or is_doubted]
    return StuckChannel(
        channel=channel,
        group=group,
        missing=() if is_even else _named(_furthest(behind), group),
        waiting=_named(foremost, group),
        since_ns=0,
        patience_ns=0,
        operations=front,
        is_doubted=is_doubted,
    )


def _missing(stuck: list[StuckChannel]) -> set[int]:
    return {rank for one in stuck for rank in one.missing}


AT_END: Final = "the job ended in a hang: "
"""Beginning of the sentence."""
_LEAST_EVEN: Final = 2
"""Ranks that stand where another one of their channel stands, and at least half of them: files are cut anywhere."""
_MOST_MOMENTS: Final = 0.05
"""Share of earlier moments at which the job stood like this: no setting, as it is how often a kill is called a hang."""


class Standstill(NamedTuple):
    """Counts by which all ranks wait for one, directly or over others, and stand evenly but for it."""

    culprit: int
    waiting: frozenset[int]
    communicators: int
    """On how many ranks stand apart."""
    lag: int
    """Most operations by which they do."""
    uneven: Mapping[Channel, dict[int, int]]
    last_ns: int
    """When the culprit enqueued its last operation, if times are known."""
    newest_ns: int
    """When any rank did."""

    def is_like(self, other: Standstill | None) -> bool:
        """Whether this one is no clearer than another one."""
        return other is not None and self.communicators <= other.communicators and self.lag <= other.lag


def standstill(
    progress: Columns, context: Context, lacking: Mapping[int, float] | None = None, *, is_even: bool = True
) -> Standstill | None:
    """Whether the counts (`PROGRESS`) of a job at one moment are those of ranks that all wait for one.

    Ranks that wait stand evenly, if `is_even`: all at one operation where they wait for the culprit, and most of them
    elsewhere. `lacking`: by global rank how many operations more it may have enqueued; such a rank need not wait.
    """
    rows = row_ops.filter_rows(progress, np.isin(progress["communicator"], np.fromiter(context.groups, np.int64)))
    names = context.global_ranks_of(rows)
    channels = last_counts(rows)
    if (names == NO_NUMBER).any() or any(
        channel.sender == NO_NUMBER and len(counts) < len(context.groups[channel.communicator].hosts)
        for channel, counts in channels.items()
    ):
        return None  # ranks that were not seen may be anywhere
    uneven = _uneven(_at_least(channels, lacking or {}, context))
    waits = list(waits_at_end(uneven, context))
    waiting = {rank for each in waits for rank in each.ahead}
    culprits = {rank for each in waits for rank in each.behind} - waiting
    if len(culprits) != 1 or not set(names.tolist()) <= waiting | culprits | (lacking or {}).keys():
        return None
    (culprit,) = culprits
    if is_even and not _stand_evenly(channels, culprit, context):
        return None
    return Standstill(
        culprit=culprit,
        waiting=frozenset(waiting),
        communicators=len({channel.communicator for channel in uneven}),
        lag=max(max(counts.values()) - min(counts.values()) for counts in uneven.values()),
        uneven=uneven,
        last_ns=max(int(rows["last_ns"][names == culprit].max()), 0),
        newest_ns=int(rows["last_ns"].max()),
    )


def hang_at_end(
    progress: Columns,
    context: Context,
    moments: Callable[[], Sequence[Columns]] = tuple,
    enqueued: Mapping[int, Mapping[int, int]] | None = None,
    shown: Callable[[], ShownByKernels] = lambda: NOTHING_SHOWN,
) -> Finding | None:
    """The hang that the last counts (`PROGRESS`) of a job show; None if they may have another reason.

    All ranks wait for one. A job that was killed may have stood like this, too: how often tell its counts at
    `moments` long before, drawn evenly over time. Without them, several ranks must stand at one operation.
    `enqueued`: by communicator of which lines were lost, how many collectives each rank has enqueued all the same;
    `shown`: what kernels and steps show beside.
    """
    if context.lossy_hosts or context.silent_hosts:
        return None
    by_kernels = shown() if enqueued else NOTHING_SHOWN
    lacking = by_kernels.lacking
    earlier = moments() if enqueued else ()
    is_even = not earlier  # a lost last line makes ranks uneven, and moments tell how often lines are lost so
    found = _standstill_with_losses(progress, enqueued or {}, by_kernels, context, is_even=is_even)
    if found is None or _may_be_of_losses(found, progress, shown().in_a_step, context, are_known=bool(enqueued)):
        return None
    earlier = earlier or moments()
    if earlier:
        like = found._replace(lag=0) if enqueued else found  # lines are lost in bursts, too: a larger lag is no clearer
        alike = sum(like.is_like(standstill(each, context, lacking, is_even=is_even)) for each in earlier)
        if alike + 1 > _MOST_MOMENTS * (len(earlier) + 1):
            return None
        how_sure = measured_confidence.DEAD_BY_TIMES
    else:
        several = found.communicators > 1
        if enqueued and not several:
            return None
        how_sure = measured_confidence.DEAD_BY_COUNTS if several else measured_confidence.DEAD_BY_COUNTS_OF_ONE
    if enqueued:  # the last line of a rank may be lost, too
        how_sure = min(how_sure, measured_confidence.HANG_AMONG_LOSSES)
    stuck = [
        _stuck_channel(channel, context.groups[channel.communicator], front, _lags(counts))
        for channel, counts in found.uneven.items()
        for front in (max(counts.values()),)
    ]
    culprit = (found.culprit,)
    first = max(
        (one for one in stuck if found.culprit in one.missing), key=lambda one: (len(one.waiting), one.operations)
    )
    silent_ns = max(found.newest_ns - found.last_ns, 0)
    made = missing_finding(culprit, found.waiting, first, stuck, silent_ns, found.last_ns, context)
    on = "".join(f" ({host})" for host in made.hosts)
    heard = " that were heard" if lacking else ""
    return replace(
        made,
        confidence=how_sure,
        summary=(
            f"{AT_END}{names_of_ranks(culprit)}{on} never enqueued operation {first.operations} of "
            f"{first.group.name}; all other ranks{heard} were waiting for it, directly or over others"
        ),
    )


def _may_be_of_losses(
    found: Standstill, progress: Columns, in_a_step: Mapping[int, int], context: Context, *, are_known: bool
) -> bool:
    """Whether the culprit may seem to be behind because its lines were lost; `are_known`: whether any are known to be.

    A lost line shows soonest where its rank enqueues most. Others cannot go on there for longer than a step, and lost
    lines easily hide a whole one.
    """
    lines = last_counts(row_ops.filter_rows(progress, np.isin(progress["communicator"], list(context.groups))))
    channel = _busiest(lines, context)[found.culprit][1]
    if channel not in found.uneven:
        return are_known
    rank = context.groups[channel.communicator].global_ranks.index(found.culprit)
    return channel.sender == NO_NUMBER and _lags(found.uneven[channel])[rank] >= in_a_step.get(
        found.culprit, math.inf
    ) + (not are_known)


def _standstill_with_losses(
    progress: Columns,
    enqueued: Mapping[int, Mapping[int, int]],
    shown: ShownByKernels,
    context: Context,
    *,
    is_even: bool,
) -> Standstill | None:
    """As the counts show with lost lines; as the lines alone do, if those are uneven and no hang explains them.

    A capture from amid the job may have kernels at its edge that are taken for lost lines. Even counts mean no hang.
    """
    if not enqueued:
        return standstill(progress, context)
    counts = _with_lost_lines(progress, enqueued, shown.exchanged)
    found = standstill(counts, context, shown.lacking, is_even=is_even)
    if found is not None or not _uneven(last_counts(counts)):
        return found
    found = standstill(progress, context)
    return found if found is not None and _lost_none(found, enqueued, context) else None


def _lost_none(found: Standstill, enqueued: Mapping[int, Mapping[int, int]], context: Context) -> bool:
    """Whether the culprit lost no line of the collectives in which others wait for it."""
    for channel, counts in found.uneven.items():
        names = context.groups[channel.communicator].global_ranks
        for rank, count in counts.items():
            known = enqueued.get(channel.communicator, {}).get(rank)
            if names[rank] == found.culprit and channel.sender == NO_NUMBER and known != count:
                return False
    return True


def _uneven(channels: Mapping[Channel, dict[int, int]]) -> dict[Channel, dict[int, int]]:
    """Those on which not all ranks have enqueued as many."""
    return {channel: counts for channel, counts in channels.items() if len(set(counts.values())) > 1}


def _at_least(
    channels: Mapping[Channel, dict[int, int]], lacking: Mapping[int, float], context: Context
) -> dict[Channel, dict[int, int]]:
    """Counts without those of ranks that may be behind or not: their calls, and as many more as they may lack."""
    found: dict[Channel, dict[int, int]] = {}
    for channel, counts in channels.items():
        names = context.groups[channel.communicator].global_ranks
        most = {rank: count + lacking.get(names[rank], 0) for rank, count in counts.items()}
        least = min(most.values())
        found[channel] = {
            rank: count if count > least else int(least)
            for rank, count in counts.items()
            if count > least or most[rank] == least < math.inf
        }
    return found


def _with_lost_lines(progress: Columns, enqueued: Mapping[int, Mapping[int, int]], exchanged: Columns) -> Columns:
    """Counts of collectives (`PROGRESS`) with what is known of lost lines, and of Sends and Recvs those that are."""
    is_told = np.isin(progress["communicator"], list(enqueued)) & (progress["sender"] == NO_NUMBER)
    counts = row_ops.copy(row_ops.filter_rows(progress, is_told))
    for communicator, by_rank in enqueued.items():
        for rank, operations in by_rank.items():
            own = (counts["communicator"] == communicator) & (counts["rank"] == rank)
            counts["operations"][own] = operations
    return row_ops.concat([counts, exchanged])


def last_counts(progress: Columns) -> dict[Channel, dict[int, int]]:
    """Operations that each communicator rank of each channel has enqueued, from its counts (`PROGRESS`)."""
    channels: defaultdict[Channel, dict[int, int]] = defaultdict(dict[int, int])
    columns = (progress[name].tolist() for name in ("communicator", "sender", "receiver", "rank", "operations"))
    for communicator, sender, receiver, rank, operations in zip(*columns, strict=True):
        channels[Channel(communicator, sender, receiver)][rank] = operations
    return channels


def _lags(counts: Mapping[int, int]) -> dict[int, int]:
    """How many operations each rank is behind the first one."""
    front = max(counts.values())
    return {rank: front - count for rank, count in counts.items()}


def waits_at_end(channels: Mapping[Channel, dict[int, int]], context: Context) -> Iterator[ChannelWaits]:
    """Waits of ranks of which nothing more comes."""
    for channel, counts in channels.items():
        group, least = context.groups[channel.communicator], min(counts.values())
        yield ChannelWaits(
            ahead=_named((rank for rank, count in counts.items() if count > least), group),
            behind=_named((rank for rank, count in counts.items() if count == least), group),
            newest_here=frozenset(),
        )


def _stand_evenly(channels: Mapping[Channel, dict[int, int]], culprit: int, context: Context) -> bool:
    """Whether ranks other than the culprit stand where others of their busiest channel do, as after a hang."""
    busiest = _busiest(channels, context)
    own: list[list[int]] = []
    for channel, counts in channels.items():
        names = context.groups[channel.communicator].global_ranks
        by_name = {names[rank]: count for rank, count in counts.items()}
        if culprit in by_name and len(set(by_name.values()) - {by_name[culprit]}) > 1:
            return False
        own.append([count for name, count in by_name.items() if name != culprit and busiest[name][1] == channel])
    even = sum(len(counts) - len(set(counts)) for counts in own)
    return even >= max(_LEAST_EVEN, sum(len(counts) - 1 for counts in own if counts) / 2)


def _busiest(channels: Mapping[Channel, dict[int, int]], context: Context) -> dict[int, tuple[int, Channel]]:
    """By global rank its largest count, and the channel that has it."""
    busiest: dict[int, tuple[int, Channel]] = {}
    for channel, counts in channels.items():
        names = context.groups[channel.communicator].global_ranks
        for rank, count in counts.items():
            busiest[names[rank]] = max(busiest.get(names[rank], (0, channel)), (count, channel))
    return busiest
