"""Our own blindness: input that was lost, operations that found no kernel, and what was seen of each host."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct
from ncclscope_service.columns.table import Ids
from ncclscope_service.detect.context import Context, Ledger, names_of_hosts
from ncclscope_service.detect.settings import BlindSettings
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_service.store.rows import Match
from ncclscope_service.store.settings import SECOND_NS
from ncclscope_service.store.tables import Store, hosts_of
from ncclscope_wire.records import SourceKind

_SETTLED_NS: Final = 30_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HostVisibility:
    """Counters of one host since the start."""

    host: str
    operations: int = 0
    """Lines of operations that were understood."""
    torn_lines: int = 0
    """Lines of NCCL that were not understood."""
    gaps: int = 0
    """Places at which input was lost (`SourceGap`)."""
    covered: int = 0
    """Decided operations inside a capture, matched or not. Those outside prove nothing."""
    matched: int = 0


@dataclass(slots=True)
class _Loss:
    gaps: int = 0
    at_ns: int = 0


class _Fault(StrEnum):
    """Kinds of blindness: each is one finding of a job, whichever hosts have it."""

    TORN = "torn"
    GAP = "gap"
    UNMATCHED = "unmatched"


class Blind:
    """Lost or unusable input of a job's hosts."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._losses: dict[str, _Loss] = {}
        self._named: dict[_Fault, set[str]] = {}
        """Hosts of the findings that are open: a host stays named while others have the same."""
        self._since_ns: dict[_Fault, int] = {}
        """Since when a share is beyond its bound; the finding opens once it has settled, with all hosts of it."""

    def ingest_visibility(self, seen: Sequence[HostVisibility], context: Context, now_ns: int) -> None:
        """Takes the present counters of all hosts of the job."""
        faults = {host.host: self._faults(host, context.settings.blind, now_ns) for host in seen}
        for fault in _Fault:
            hosts = {host for host, own in faults.items() if fault in own}
            if not hosts:
                self._named.pop(fault, None)
                self._since_ns.pop(fault, None)
                self._ledger.close(fault, now_ns)
                continue
            since_ns = self._since_ns.setdefault(fault, now_ns)
            if fault is _Fault.TORN and now_ns - since_ns < _SETTLED_NS and not context.is_over:
                continue  # what tears lines of one host does so on others: the first of them are few
            named = self._named.setdefault(fault, set())
            named |= hosts
            self._ledger.update(
                fault, _finding(fault, [host for host in seen if host.host in named], context, since_ns)
            )

    def findings(self) -> list[Finding]:
        """All findings so far."""
        return self._ledger.findings()

    def _faults(self, seen: HostVisibility, settings: BlindSettings, now_ns: int) -> set[_Fault]:
        loss, found = self._losses.setdefault(seen.host, _Loss()), set[_Fault]()
        if seen.gaps > loss.gaps:
            loss.gaps, loss.at_ns = seen.gaps, now_ns
        lines = seen.operations + seen.torn_lines
        if lines >= settings.least_operations and seen.torn_lines > settings.most_torn_share * lines:
            found.add(_Fault.TORN)
        elif loss.gaps and now_ns - loss.at_ns <= settings.remembered_seconds * SECOND_NS:
            found.add(_Fault.GAP)
        if seen.covered >= settings.least_operations and seen.matched < settings.least_matched_share * seen.covered:
            found.add(_Fault.UNMATCHED)
        return found


def _finding(fault: _Fault, hosts: Sequence[HostVisibility], context: Context, since_ns: int) -> Finding:
    """One kind of blindness of these hosts."""
    names = tuple(sorted(host.host for host in hosts))
    who, severity = names_of_hosts(names), Severity.WARNING
    if fault is _Fault.TORN:
        shares = [host.torn_lines / (host.operations + host.torn_lines) for host in hosts]
        text = f"{_percent(shares)} of the operation lines of {who} are torn"
    elif fault is _Fault.GAP:
        gaps = sum(host.gaps for host in hosts)
        text = f"input from {who} was lost in {gaps} {'place' if gaps == 1 else 'places'}"
    else:
        shares = [host.matched / host.covered for host in hosts]
        if min(shares) < context.settings.blind.critical_matched_share:
            severity = Severity.CRITICAL
        text = f"only {_percent(shares)} of the captured operations of {who} were matched to a kernel"
    counters = ("operations", "torn_lines", "gaps", "covered", "matched")
    return Finding(
        kind=FindingKind.BLIND,
        severity=severity,
        job=context.job,
        hosts=names,
        since_ns=since_ns,
        confidence=1.0,
        summary=f"{text}: findings about {who if len(names) == 1 else 'them'} are less certain",
        evidence={name: sum(getattr(host, name) for host in hosts) for name in counters},
    )


def _percent(shares: Sequence[float]) -> str:
    """ "0.26 %", "0.2 to 0.28 %"."""
    low, high = (f"{100 * share:.2g}" for share in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def service_blind_finding(job: str, since_ns: int, *, reason: str, summary: str) -> Finding:
    """Finding that the service itself, and no agent, is the reason why a job is not fully observed."""
    return Finding(
        kind=FindingKind.BLIND,
        severity=Severity.WARNING,
        job=job,
        since_ns=since_ns,
        confidence=1.0,
        summary=summary,
        evidence={"reason": reason},
    )


def internal_error_finding(job: str, since_ns: int) -> Finding:
    """Finding that the detectors of a job have failed since then."""
    summary = (
        "the service cannot analyze this job because of an internal error: findings may be missing or out of date; "
        "please report it with the service's log"
    )
    return service_blind_finding(job, since_ns, reason="internal_error", summary=summary)


@dataclass(slots=True)
class _Counters:
    operations: int = 0
    covered: int = 0
    matched: int = 0


class HostCounters:
    """Counters of every host of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._counters: defaultdict[str, _Counters] = defaultdict(_Counters)

    def count_operations(self, processes: NDArray[np.int32]) -> None:
        """Counts new operations, by the process of each."""
        found, inverse = distinct(processes)
        for process, amount in zip(found.tolist(), np.bincount(inverse).tolist(), strict=True):
            self._counters[self._store.processes[process].host].operations += amount

    def count_decided(self, operations: Ids) -> None:
        """Counts operations whose match was decided."""
        rows = self._store.operations.take(operations, "process", "match")
        processes, inverse = distinct(rows["process"])
        is_matched = rows["match"] == Match.MATCHED
        is_covered = is_matched | (rows["match"] == Match.UNMATCHED)
        matched, covered = (np.bincount(inverse, which, len(processes)) for which in (is_matched, is_covered))
        for process, *amounts in zip(processes.tolist(), matched.tolist(), covered.tolist(), strict=True):
            counters = self._counters[self._store.processes[process].host]
            counters.matched += int(amounts[0])
            counters.covered += int(amounts[1])

    def visibility(self, hosts: Iterable[str]) -> list[HostVisibility]:
        """The present counters of these hosts."""
        gaps, torn = self._gaps_by_host(), self._torn_by_host()
        return [
            HostVisibility(
                host=host,
                operations=self._counters[host].operations,
                torn_lines=torn[host],
                gaps=gaps[host],
                covered=self._counters[host].covered,
                matched=self._counters[host].matched,
            )
            for host in hosts
        ]

    def lossy_hosts(self) -> frozenset[str]:
        """Hosts of which some operations may be unknown."""
        return frozenset(self._gaps_by_host(SourceKind.NCCL_LOG))

    def _gaps_by_host(self, *kinds: SourceKind) -> Counter[str]:
        """Gaps in the input of each host, of sources of these kinds or of all."""
        known = self._store
        gaps: Counter[str] = Counter()
        for (kind, host), amount in known.retired.gaps_of_hosts.items():
            if not kinds or kind in kinds:
                gaps[host] += amount
        for source, found in known.gaps.items():
            if found and (not kinds or known.sources[source].source.kind in kinds):
                for host in hosts_of(known, source):
                    gaps[host] += len(found)
        return gaps

    def _torn_by_host(self) -> Counter[str]:
        """Torn lines in the logs of each host; a log of several processes counts once.

        Whose the pieces in a file of several hosts were cannot be told: each host gets the share of them that it has
        of the operations, so that the file's rate is the rate of each.
        """
        torn = self._store.retired.torn_lines.copy()
        for source, lines in self._store.torn_lines.items():
            hosts = sorted(self._store.source_hosts.get(source, ())) if lines else []
            operations = [self._counters[host].operations if len(hosts) > 1 else 1 for host in hosts]
            everything = max(1, sum(operations))
            for host, amount in zip(hosts, operations, strict=True):
                torn[host] += lines * amount // everything
        return torn
