"""Which rank misses which collective, by the dumps of PyTorch's Flight Recorder of several ranks.

PyTorch numbers the collectives of a process group, alike on all of its ranks. So the ranks of a group that have not
enqueued the collective in which others wait are those that are missing; if all have, and their calls differ, they do
not fit together. It is said beside what logs show: a dump has the stack.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ncclscope_service.detect.context import Context, Ledger, names_of_ranks
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_wire.facts import FlightRecord
from ncclscope_wire.terms import NO_TIME_NS

_GROUPS_KEPT: Final = 4_096
_STACKS_SHOWN: Final = 4


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
        """One for each group in which ranks wait for others, or for what does not fit."""
        if self._context is not None:
            for name, group in self._groups.items():
                finding = _finding(name, group, self._context)
                if finding is not None:
                    self._ledger.update(name, finding)
        return self._ledger.findings()


def _finding(name: str, group: dict[int, FlightRecord], context: Context) -> Finding | None:
    waiting = {rank: record for rank, record in group.items() if record.last_enqueued > record.last_completed}
    if len(group) < 2 or not waiting:
        return None
    at = min(record.sequence for record in waiting.values())
    stuck = {rank: record for rank, record in waiting.items() if record.sequence == at}
    missing = {rank: record for rank, record in group.items() if record.last_enqueued < at}
    calls: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, record in stuck.items():
        calls[record.operation, record.sizes].append(rank)
    members = next((record.group_ranks for record in group.values() if record.group_ranks), ())
    silent = tuple(rank for rank in members if rank not in group)
    called = max(calls, key=lambda call: len(calls[call]))
    label = next((record.description for record in group.values() if record.description), "") or f"group {name}"
    waits = (
        f"{names_of_ranks(tuple(sorted(stuck)))} wait{'s' if len(stuck) == 1 else ''} in {called[0]} {at} of {label}"
    )
    if missing:
        culprits, why = tuple(sorted(missing)), "has" if len(missing) == 1 else "have"
        summary = f"{waits}, which {names_of_ranks(culprits)} {why} not called (PyTorch's flight recorder)"
    elif len(calls) > 1:
        others = sorted(rank for call, ranks in calls.items() if call != called for rank in ranks)
        culprits, other = tuple(others), next(call for call in calls if call != called)
        summary = (
            f"{waits}, in the place of which {names_of_ranks(culprits)} called {other[0]} {other[1]} and others "
            f"{called[1]} (PyTorch's flight recorder)"
        )
    elif silent:
        culprits = ()
        summary = f"{waits}; {names_of_ranks(silent)} left no dump (PyTorch's flight recorder)"
    else:
        culprits = ()
        summary = f"{waits}, which all of its ranks have called (PyTorch's flight recorder)"
    times = [record.logged_at_ns for record in stuck.values() if record.logged_at_ns is not None]
    shown = {**missing, **stuck} if missing else stuck
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
            "group": name,
            "sequence": at,
            "operation": called[0],
            "sizes": called[1],
            "waiting": sorted(stuck),
            "last_enqueued": {str(rank): record.last_enqueued for rank, record in sorted(group.items())},
            "without_dump": list(silent),
            "stacks": {
                f"rank {rank}, in {record.operation} {record.sequence}": list(record.stack)
                for rank, record in list(shown.items())[:_STACKS_SHOWN]
            },
        },
    )
