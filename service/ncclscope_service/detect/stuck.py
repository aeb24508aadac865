"""A hang as it is told: the channels that stand still, who waits there for whom, and the sentence about it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.findings import duration_text, names_of_ranks
from ncclscope_service.rows import Finding, FindingKind, Severity
from ncclscope_wire.terms import NO_NUMBER

_SURE, _UNSURE, _INSIDE = 0.9, 0.6, 0.7
_COLLECTIVES_SHOWN: Final = 8


class State(StrEnum):
    """How the ranks of a hang stand."""

    NOT_ENQUEUED = "not_enqueued"
    INSIDE = "inside"
    MISMATCHED = "mismatched"
    UNCLEAR = "unclear"


class Channel(NamedTuple):
    """A communicator's collectives, or one ordered pair of Send and Recv (communicator ranks)."""

    communicator: int
    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class Stuck:
    """One channel whose silence is longer than is ordinary."""

    channel: Channel
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


def missing_finding(
    culprits: tuple[int, ...],
    waiting: Set[int],
    first: Stuck,
    stuck: list[Stuck],
    silent_ns: int,
    since_ns: int,
    context: Context,
) -> Finding:
    """That these ranks are missing; `first` is the operation that is named, `waiting` are all who wait for another."""
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


def inside_finding(
    first: Stuck, stuck: list[Stuck], silent_ns: int, since_ns: int, context: Context, mismatch: Finding | None
) -> Finding:
    """That all have enqueued an operation and it does not end; `mismatch` says that it is not the same one."""
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


def unclear_finding(first: Stuck, stuck: list[Stuck], silent_ns: int, since_ns: int, context: Context) -> Finding:
    """That nothing goes on, and lost lines hide who is missing."""
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
    state: State, first: Stuck, stuck: list[Stuck], silent_ns: int, since_ns: int, context: Context
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
