"""How a job ended: a hang, a crash, a kill, all ranks together, or why that is unclear.

What explains most comes first: a failure that is no consequence of another one, then a hang (as the last counts show
it, or as PyTorch's watchdog says), then signals and exit statuses. Only if nothing failed does it count where the ranks
stood.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ncclscope_service.columns import row_ops
from ncclscope_service.detect.context import Context, duration_text, names_of_hosts, names_of_ranks, names_with_hosts
from ncclscope_service.detect.hang import AT_END, Channel, HangState, ends_of_waits, last_counts, waits_at_end
from ncclscope_service.detect.reported import Failure, Reported, Role, TorchTimeouts
from ncclscope_service.store.records import STANDING_KEPT, Ending, Finding, FindingKind, RankStanding, Verdict
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfRanks:
    """Where the ranks of a job stood at its end."""

    counted: int
    """Communicators, and pairs of Send and Recv, of which operations were logged."""
    apart: int
    """Most operations by which two ranks of one of them differ."""
    unseen: int
    """Ranks of their groups of which no operation was logged."""
    ended: frozenset[int]
    """Global ranks that ended a communicator."""
    not_ended: frozenset[int]
    """Global ranks that ended none."""
    is_lossy: bool
    """Whether log lines were lost."""
    newest_ns: int
    """When the last operation was logged, if times are known."""
    standing: tuple[RankStanding, ...]
    """See `Verdict.standing`, without last words."""

    @property
    def blamed(self) -> frozenset[int]:
        """Global ranks at which all waits end; none if log lines were lost."""
        return frozenset(rank for each in self.standing for rank in each.blamed if not self.is_lossy)

    @property
    def have_all_ended(self) -> bool:
        """Whether each rank ended a communicator."""
        return bool(self.ended) and not self.not_ended


def end_of_ranks(counts: Columns, context: Context, has_ended: Mapping[int, bool]) -> EndOfRanks:
    """From the last counts (`progress.PROGRESS`), and by global rank whether it ended a communicator."""
    own = row_ops.filter_rows(counts, np.isin(counts["communicator"], np.fromiter(context.groups, np.int64)))
    channels = last_counts(own)
    return EndOfRanks(
        counted=len(channels),
        apart=max((max(each.values()) - min(each.values()) for each in channels.values()), default=0),
        unseen=max(
            (
                len(context.groups[channel.communicator].hosts) - len(each)
                for channel, each in channels.items()
                if channel.sender == NO_NUMBER
            ),
            default=0,
        ),
        ended=frozenset(rank for rank, ended in has_ended.items() if ended),
        not_ended=frozenset(rank for rank, ended in has_ended.items() if not ended),
        is_lossy=bool(context.lossy_hosts or context.silent_hosts),
        newest_ns=int(own["last_ns"].max(initial=NO_TIME_NS)),
        standing=_standing(channels, context),
    )


def _standing(channels: Mapping[Channel, dict[int, int]], context: Context) -> tuple[RankStanding, ...]:
    """Each rank on its busiest group of those in which it waits, or if waits end at it of those that stand apart."""
    uneven = {channel: counts for channel, counts in channels.items() if len(set(counts.values())) > 1}
    waits = dict(zip(uneven, waits_at_end(uneven, context), strict=True))
    ends = ends_of_waits(waits.values())
    blamed = {rank for each in ends.values() for rank in each}
    found: dict[int, RankStanding] = {}
    for channel, counts in sorted(uneven.items(), key=lambda each: -max(each[1].values())):
        group, behind, front = context.groups[channel.communicator], waits[channel].behind, max(counts.values())
        for rank, count in counts.items():
            name = group.global_ranks[rank] if rank < len(group.global_ranks) else NO_NUMBER
            is_waiting = count > min(counts.values()) and name not in blamed
            if name == NO_NUMBER or (name in found and (found[name].waits_for or not is_waiting)):
                continue
            found[name] = RankStanding(
                rank=name,
                host=group.hosts[rank] or None,
                comm_id=group.comm_id,
                parallelism=group.parallelism,
                enqueued=count,
                behind=front - count,
                stopped_at=channel.collective_id(group, min(counts.values())),
                waits_for=behind[:_MOST_NAMED] if count > min(counts.values()) else (),
                blamed=ends.get(name, ()),
            )
    order = sorted(found, key=lambda name: (name not in blamed, name))
    return tuple(found[name] for name in order[:STANDING_KEPT])


_MOST_NAMED: Final = 8
"""Ranks for which one waits that are listed."""


_FEW: Final = 2

_WORDLESS: Final = frozenset({HangState.STOPPED, HangState.UNCLEAR})
"""States of a hang that name nobody."""


def judge_end(
    findings: Sequence[Finding], reported: Reported, failures: Sequence[Failure], end: EndOfRanks, context: Context
) -> Verdict:
    """How the job ended; `failures`: those of `reported` that its processes did not survive."""
    found = next(_verdicts(findings, reported, failures, end, context))
    words = reported.lines.last_words()
    of_rank = {line.rank: line.text for line in words}
    return replace(
        found,
        is_provisional=not context.is_over,
        last_words=words,
        standing=tuple(replace(each, last_words=of_rank.get(each.rank)) for each in end.standing),
    )


def _verdicts(
    findings: Sequence[Finding], reported: Reported, failures: Sequence[Failure], end: EndOfRanks, context: Context
) -> Iterator[Verdict]:
    """All that can be said, what explains most first."""
    by_role: defaultdict[Role, list[Failure]] = defaultdict(list[Failure])
    for failure in failures:
        by_role[failure.role].append(failure)
    opened = {finding.kind: finding for finding in reversed(findings) if finding.until_ns is None}
    hang, mismatch = opened.get(FindingKind.HANG), opened.get(FindingKind.MISMATCH)
    causes = [
        each for each in by_role[Role.CAUSE] if not any(_is_after(each, gave_up) for gave_up in by_role[Role.TIMEOUT])
    ]
    if causes:
        yield _failed(Ending.CRASHED, causes, context)
    if hang is not None and hang.evidence["state"] not in _WORDLESS:
        yield _made(Ending.HANG, hang.summary.removeprefix(AT_END), context, hang.ranks)
    timeouts = reported.timeouts()
    silent = _without_words(reported, by_role, end, context)
    if by_role[Role.TIMEOUT] and timeouts is not None and (timeouts.longest_ms is not None or timeouts.error is None):
        yield _gave_up(timeouts, end, context)
    if silent is not None:
        yield silent
    if by_role[Role.KILL]:
        yield _failed(Ending.KILLED, by_role[Role.KILL], context)
    if by_role[Role.EXIT]:
        yield _failed(Ending.CRASHED, by_role[Role.EXCEPTION] or by_role[Role.EXIT], context)
    if hang is not None:
        yield _made(Ending.UNCLEAR, hang.summary, context)
    if mismatch is not None:
        yield _made(Ending.UNCLEAR, f"{mismatch.summary}; no line says why the job ended", context)
    yield _without_failure([*by_role[Role.EXCEPTION], *by_role[Role.CONSEQUENCE]], end, context)


def _without_words(
    reported: Reported, by_role: Mapping[Role, Sequence[Failure]], end: EndOfRanks, context: Context
) -> Verdict | None:
    """What is to be said of the ranks at which all waits end if they said nothing, and others lost connections.

    A process that is killed by the system, or that crashes outside of NCCL and PyTorch, writes nothing. The others stop
    at what it did not call, and their connections to it break at once. If they break long after the last operation,
    the job stood still until somebody ended it.
    """
    if end.is_lossy or end.newest_ns == NO_TIME_NS:
        return None
    broke = [each for each in reported.lines.failures({}) if each.role is Role.CONSEQUENCE]
    times = [
        each.line.at_ns - end.newest_ns for each in broke if each.line.at_ns is not None and each.line.rank is not None
    ]
    blamed = end.blamed
    nameless = [each for role in (Role.KILL, Role.EXCEPTION, Role.EXIT) for each in by_role.get(role, ())]
    if not times or not blamed or nameless or blamed & {each.line.rank for each in broke}:
        return None
    after_ns, ranks = min(times, key=abs), tuple(sorted(blamed))
    who = names_with_hosts(ranks, context.hosts_of(ranks))
    apart = f"{end.apart} operation{'s' if end.apart > 1 else ''}"
    it = "it" if len(ranks) == 1 else "they"
    if abs(after_ns) <= _AT_ONCE_NS:
        was = "was" if len(ranks) == 1 else "were"
        summary = (
            f"{who} ended first, without a word: {it} stopped up to {apart} before others, whose connections broke; "
            f"{it} {was} killed (memory, scheduler) or crashed"
        )
        return _made(Ending.KILLED, summary, context, ranks)
    if after_ns < _STOOD_STILL_NS:
        return None
    summary = (
        f"all others waited for {who}, which stopped up to {apart} before them; after {duration_text(after_ns)} "
        "without an operation connections broke"
    )
    return _made(Ending.HANG, summary, context, ranks)


def _gave_up(timeouts: TorchTimeouts, end: EndOfRanks, context: Context) -> Verdict:
    """The hang that PyTorch's watchdogs report, with whom they name, else with whom the counts of the logs name."""
    ranks, summary = timeouts.culprits(), timeouts.summary()
    if not ranks and end.blamed:
        ranks = tuple(sorted(end.blamed))
        summary += f"; by the counts of operations all waits end at {names_with_hosts(ranks, context.hosts_of(ranks))}"
    return _made(Ending.HANG, summary, context, ranks)


_AT_ONCE_NS: Final = 5_000_000_000
_STOOD_STILL_NS: Final = 30_000_000_000


def _is_after(one: Failure, other: Failure) -> bool:
    """Whether it was logged later, as far as times or the lines of one file tell: what comes behind a time-out comes of
    processes that end by it.
    """
    if one.order[1] == other.order[1]:
        return one.order[2] > other.order[2]
    return one.line.at_ns is not None and other.line.at_ns is not None and one.line.at_ns > other.line.at_ns


def _without_failure(said: Sequence[Failure], end: EndOfRanks, context: Context) -> Verdict:
    """How a job ended of which nothing says that it failed."""
    lost = "log lines were lost, " if end.is_lossy else ""
    if end.apart:
        words = f" ({min(said).line.text})" if said else ""
        why = (
            f"{lost}ranks stopped up to {end.apart} operation{'s' if end.apart > 1 else ''} apart{_furthest(end)}, and "
            f"no line says why{words}: the job hung or was killed, or its logs end before it did"
        )
        return _made(Ending.UNCLEAR, why, context)
    if end.have_all_ended:
        what = "at the same operations, and ended its communicators" if end.counted else "its communicators"
        return _made(Ending.ENDED_TOGETHER, f"every rank ended {what}", context)
    if end.ended:
        some, others = (names_of_ranks(sorted(ranks)) for ranks in (end.ended, end.not_ended))
        return _made(Ending.UNCLEAR, f"{some} ended communicators, {others} ended none, and no line says why", context)
    if not end.counted:
        why = "neither operations nor the end of communicators were logged, and no line reports a failure"
        return _made(Ending.UNCLEAR, why, context)
    if end.unseen or end.is_lossy:
        why = (
            lost.removesuffix(", ") or f"operations of {end.unseen} rank{'s' if end.unseen > 1 else ''} were not logged"
        )
        return _made(Ending.UNCLEAR, f"no line reports a failure, but {why}", context)
    return _made(Ending.ENDED_TOGETHER, "every rank ended at the same operations", context)


def _furthest(end: EndOfRanks) -> str:
    """Who is behind, where that is a few against all others: the one to look at, since a kill leaves the same trace."""
    behind = [each for each in end.standing if each.behind == end.apart]
    if len(behind) > _FEW or any(0 < each.behind < end.apart for each in end.standing):
        return ""
    names = names_of_ranks([each.rank for each in behind])
    hosts = sorted({each.host for each in behind if each.host is not None})
    return f" ({names}{f' on {names_of_hosts(hosts)}' if hosts else ''} behind all others)"


def _failed(ending: Ending, failures: Sequence[Failure], context: Context) -> Verdict:
    """The first of these failures, with all ranks that failed in the same words at first."""
    first = min(failures)
    same = [each.line.rank for each in failures if each.line.text == first.line.text and each.line.rank is not None]
    ranks = tuple(sorted(set(same)))
    hosts = context.hosts_of(ranks) or (() if first.line.host is None else (first.line.host,))
    who = names_with_hosts(ranks, hosts) if ranks else names_of_hosts(hosts) if hosts else "a process"
    if ending is Ending.CRASHED:
        summary = f"{who} failed first: {first.line.text}"
    else:
        summary = f"{who}: {first.line.text}" if hosts or ranks else first.line.text
    line = replace(first.line, host=first.line.host or next(iter(context.hosts_of(ranks[:1])), None))
    return replace(_made(ending, summary, context, ranks, hosts), first_failure=line)


def _made(
    ending: Ending, summary: str, context: Context, ranks: tuple[int, ...] = (), hosts: tuple[str, ...] | None = None
) -> Verdict:
    return Verdict(
        job=context.job,
        ending=ending,
        is_provisional=False,
        ranks=ranks,
        hosts=context.hosts_of(ranks) if hosts is None else hosts,
        summary=summary,
    )
