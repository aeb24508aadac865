"""Which rank misses which collective, by the dumps of PyTorch's Flight Recorder of several ranks.

PyTorch numbers the collectives of a process group, alike on all of its ranks. So the ranks of a group that have not
enqueued the collective in which others wait are those that are missing; if all have, and their calls differ, they do
not fit together. It is said beside what logs show: a dump has the stack.

A rank that is missing holds up others, which are then missing elsewhere, and kernels behind those that wait: all of it
is one finding about the ranks at which the waits end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ncclscope_service.detect.context import Context, Ledger, names_of_ranks
from ncclscope_service.detect.hang import ChannelWaits, ends_of_waits
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_wire.facts import FlightRecord
from ncclscope_wire.terms import NO_TIME_NS

_GROUPS_KEPT: Final = 4_096
_STACKS_SHOWN: Final = 4
_ROOTS: Final = ""
"""Key of the finding about the ranks at which all waits end; groups have names."""


@dataclass(slots=True)
class FlightRecords:
    """Dumps of the ranks of one job."""

    _groups: dict[str, dict[int, FlightRecord]] = field(default_factory=dict[str, dict[int, FlightRecord]])
    """By group and global rank."""
    _ledger: Ledger = field(default_factory=Ledger)
    _context: Context | None = None

    def ingest_records(self, records: Iterable[FlightRecord], context: Context) -> None:
        """Takes what dumps say; of a rank that dumped twice what has come further."""
        for record in records:
            self._context = context
            if record.group in self._groups or len(self._groups) < _GROUPS_KEPT:
                group = self._groups.setdefault(record.group, {})
                known = group.get(record.global_rank)
                if known is None or known.last_enqueued <= record.last_enqueued:
                    group[record.global_rank] = record

    def findings(self) -> list[Finding]:
        """One for the ranks at which all waits end, with all that waits for them; else one for each group in which
        ranks wait for others, or for what does not fit.
        """
        if self._context is not None:
            found = dict(_findings(self._groups, self._context))
            for key in set(self._ledger.open_keys()) - found.keys():
                self._ledger.withdraw(key)  # the dumps of other ranks explain it
            for key, finding in found.items():
                self._ledger.update(key, finding)
        return self._ledger.findings()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """One group in which ranks wait."""

    name: str
    label: str
    """As PyTorch's user named it."""
    at: int
    """Number of the first collective that did not complete."""
    stuck: Mapping[int, FlightRecord]
    """By global rank, those that wait there; so are the next two."""
    missing: Mapping[int, FlightRecord]
    """Those that have not called it."""
    records: Mapping[int, FlightRecord]
    silent: tuple[int, ...]
    """Ranks of the group that left no dump."""
    calls: Mapping[tuple[str, str], Sequence[int]]
    """Ranks that wait by what they called, with its sizes."""

    @property
    def operation(self) -> tuple[str, str]:
        """What most of them called."""
        return max(self.calls, key=lambda call: len(self.calls[call]))


def _wait(name: str, group: Mapping[int, FlightRecord]) -> _Wait | None:
    """None if nobody waits, or only one rank left a dump."""
    waiting = {rank: record for rank, record in group.items() if record.last_enqueued > record.last_completed}
    if len(group) < 2 or not waiting:
        return None
    at = min(record.sequence for record in waiting.values())
    stuck = {rank: record for rank, record in waiting.items() if record.sequence == at}
    calls: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, record in stuck.items():
        calls[record.operation, record.sizes].append(rank)
    members = next((record.group_ranks for record in group.values() if record.group_ranks), ())
    return _Wait(
        name=name,
        label=next((record.description for record in group.values() if record.description), "") or f"group {name}",
        at=at,
        stuck=stuck,
        missing={rank: record for rank, record in group.items() if record.last_enqueued < at},
        records=group,
        silent=tuple(rank for rank in members if rank not in group),
        calls=calls,
    )


def _findings(groups: Mapping[str, Mapping[int, FlightRecord]], context: Context) -> Iterator[tuple[str, Finding]]:
    """By key. Ranks that wait for one that is missing hold up others, in other groups and of their own: as long as
    somebody is missing who waits for nobody, only calls that do not fit together are said beside that.
    """
    waits = [wait for name, group in groups.items() if (wait := _wait(name, group)) is not None]
    ends = ends_of_waits(
        ChannelWaits(ahead=tuple(wait.stuck), behind=tuple(wait.missing), newest_here=frozenset())
        for wait in waits
        if wait.missing
    )
    roots = {rank for each in ends.values() for rank in each}
    held = [wait for wait in waits if not roots.isdisjoint(wait.missing)]
    if held:
        yield _ROOTS, _missing(tuple(sorted(roots)), held, waits, context)
    for wait in waits:
        if not roots or (len(wait.calls) > 1 and not wait.missing):
            yield wait.name, _finding(wait, context)


def _missing(roots: tuple[int, ...], held: Sequence[_Wait], waits: Sequence[_Wait], context: Context) -> Finding:
    """That these ranks are missing; `held`: where somebody waits for one of them; `waits`: all that stands still."""
    first = max(held, key=lambda wait: (len(set(roots).intersection(wait.missing)), len(wait.stuck), wait.label))
    waiting = sorted({rank for wait in waits for rank in wait.stuck} - set(roots))
    others = len(held) - 1
    more = f" and operations of {others} other group{'s' if others > 1 else ''}" if others else ""
    summary = (
        f"{names_of_ranks(roots)} {'has' if len(roots) == 1 else 'have'} not called {first.operation[0]} {first.at} of "
        f"{first.label}{more}; {names_of_ranks(waiting)} {'is' if len(waiting) == 1 else 'are'} waiting (PyTorch's "
        "flight recorder)"
    )
    found = _made(first, roots, summary, context)
    operations = [f"{wait.operation[0]} {wait.at} of {wait.label}" for wait in held]
    return replace(found, evidence=dict(found.evidence) | {"waiting": waiting, "operations": operations})


def _finding(wait: _Wait, context: Context) -> Finding:
    """That ranks of one group wait."""
    called, stuck = wait.operation, wait.stuck
    waits = (
        f"{names_of_ranks(tuple(sorted(stuck)))} wait{'s' if len(stuck) == 1 else ''} in {called[0]} {wait.at} of "
        f"{wait.label}"
    )
    culprits: tuple[int, ...] = ()
    if wait.missing:
        culprits, why = tuple(sorted(wait.missing)), "has" if len(wait.missing) == 1 else "have"
        summary = f"{waits}, which {names_of_ranks(culprits)} {why} not called (PyTorch's flight recorder)"
    elif len(wait.calls) > 1:
        culprits = tuple(sorted(rank for call, ranks in wait.calls.items() if call != called for rank in ranks))
        other = next(call for call in wait.calls if call != called)
        summary = (
            f"{waits}, in the place of which {names_of_ranks(culprits)} called {other[0]} {other[1]} and others "
            f"{called[1]} (PyTorch's flight recorder)"
        )
    elif wait.silent:
        summary = f"{waits}; {names_of_ranks(wait.silent)} left no dump (PyTorch's flight recorder)"
    else:
        summary = f"{waits}, which all of its ranks have called (PyTorch's flight recorder)"
    return _made(wait, culprits, summary, context)


def _made(wait: _Wait, culprits: tuple[int, ...], summary: str, context: Context) -> Finding:
    times = [record.logged_at_ns for record in wait.stuck.values() if record.logged_at_ns is not None]
    return Finding(
        kind=FindingKind.REPORTED_FAILURE,
        severity=Severity.CRITICAL,
        job=context.job,
        ranks=culprits,
        hosts=context.hosts_of(culprits),
        since_ns=min(times, default=NO_TIME_NS + 1),
        confidence=1.0,
        summary=summary,
        evidence={
            "group": wait.name,
            "sequence": wait.at,
            "operation": wait.operation[0],
            "sizes": wait.operation[1],
            "waiting": sorted(wait.stuck),
            "last_enqueued": {str(rank): record.last_enqueued for rank, record in sorted(wait.records.items())},
            "without_dump": list(wait.silent),
            "stacks": {
                f"rank {rank}, in {record.operation} {record.sequence}": list(record.stack)
                for rank, record in list({**wait.missing, **wait.stuck}.items())[:_STACKS_SHOWN]
            },
        },
    )
