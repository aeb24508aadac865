"""Conditions of hosts' NICs and GPUs, as agents read them: evidence in findings, and findings if they are faults.

A finding quotes the conditions of its hosts that hold at its time: those of NICs where wires are slow, those of GPUs of
the ranks that it names. Where a group spans all hosts, no other group says which link is slow; a NIC's condition on one
of its hosts alone (a fault before what is only evidence) points at that host. It is a hint, so confidence stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

from ncclscope_service.detect.context import Context, Ledger, groups_of
from ncclscope_service.detect.reported import LoggedFact
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_wire.facts import MachineCondition

_WIRES: Final = frozenset(
    {FindingKind.SLOW_LINK, FindingKind.BANDWIDTH_DROP, FindingKind.BELOW_LIMIT, FindingKind.HANG}
)
_STEPS: Final = frozenset({FindingKind.LATE_RANK, FindingKind.SLOW_STEPS})
_PASSING_NS: Final = 60_000_000_000
"""A condition that ended so shortly before a finding belongs to it: a window is over when it is judged."""
_KEPT: Final = 4_096
_QUOTED: Final = 2
"""In a sentence; all are in the evidence."""
_SHOWN: Final = 16

GpuSeats = Mapping[tuple[str, int], int]
"""Global rank by host and PCI address as NCCL writes it."""


@dataclass(slots=True)
class _Lasting:
    """One condition."""

    fact: MachineCondition
    host: str
    since_ns: int
    until_ns: int | None = None

    def is_then(self, finding: Finding) -> bool:
        """Whether it holds while the finding is open, or held shortly before."""
        begins_in_time = finding.until_ns is None or self.since_ns <= finding.until_ns
        return begins_in_time and (self.until_ns is None or self.until_ns + _PASSING_NS >= finding.since_ns)

    def text(self, seats: GpuSeats) -> str:
        """ "mlx5_2 port 1 of node07 runs at 4x instead of 8x since 12:03 UTC"."""
        rank = seats.get((self.host, self.fact.gpu_bus_id or 0))
        who = f"{self.fact.device} of {self.host}" + ("" if rank is None else f" (rank {rank})")
        until = "" if self.until_ns is None else f" until {_clock(self.until_ns)}"
        return f"{who} {self.fact.text} since {_clock(self.since_ns)}{until} UTC"


@dataclass(slots=True)
class Machines:
    """Conditions on the hosts of one job."""

    _lasting: dict[tuple[str, str, str], _Lasting] = field(default_factory=dict[tuple[str, str, str], _Lasting])
    """Those that hold, or held last, by host, device and kind."""
    _ledger: Ledger = field(default_factory=Ledger)
    _seats: GpuSeats = field(default_factory=dict[tuple[str, int], int])
    _context: Context | None = None

    @property
    def is_used(self) -> bool:
        """Whether any agent reads counters."""
        return bool(self._lasting)

    def ingest_facts(self, logged: Iterable[LoggedFact]) -> None:
        """Takes conditions that begin, change or end."""
        for one in logged:
            fact = one.fact
            if isinstance(fact, MachineCondition) and fact.host:
                self._ingest(fact, fact.host, one.at_ns)

    def _ingest(self, fact: MachineCondition, host: str, at_ns: int) -> None:
        key = host, fact.device, fact.what
        known = self._lasting.get(key)
        if fact.is_over:
            if known is not None:
                known.until_ns = at_ns
                self._ledger.close(key, at_ns)
            return
        is_same = known is not None and known.until_ns is None
        since_ns = known.since_ns if known is not None and is_same else at_ns
        self._lasting.pop(key, None)
        self._lasting[key] = _Lasting(fact, host, since_ns)
        while len(self._lasting) > _KEPT:
            del self._lasting[next(iter(self._lasting))]

    def update_context(self, context: Context, seats: GpuSeats) -> None:
        """The job as it stands, and which rank has which GPU."""
        self._context, self._seats = context, seats

    def findings(self) -> list[Finding]:
        """One for each fault."""
        for key, lasting in self._lasting.items():
            if lasting.fact.is_fault and lasting.until_ns is None and self._context is not None:
                self._ledger.update(key, _finding(lasting, self._seats, self._context))
        return self._ledger.findings()

    def quoted_in(self, findings: Sequence[Finding]) -> list[Finding]:
        """These findings, with the conditions that may explain them as evidence (`machine`)."""
        context = self._context
        if context is None or not self._lasting:
            return list(findings)
        return [self._quoted(finding, context) for finding in findings]

    def _quoted(self, finding: Finding, context: Context) -> Finding:
        if finding.kind not in _WIRES | _STEPS:
            return finding
        named = {finding.comm_id, *groups_of(finding)}
        groups = [group.host_set() for group in context.groups.values() if group.comm_id in named]
        hosts = set(finding.hosts or frozenset[str]().union(*groups))
        explaining = sorted(
            (
                each
                for each in self._lasting.values()
                if each.host in hosts and each.is_then(finding) and self._may_explain(each, finding)
            ),
            key=lambda each: (each.since_ns, each.host, each.fact.device),
        )
        if not explaining:
            return finding
        texts = [each.text(self._seats) for each in explaining]
        nics = [each for each in explaining if each.fact.gpu_bus_id is None]
        located = {each.host for each in nics if each.fact.is_fault} or {each.host for each in nics}
        evidence: dict[str, object] = {**finding.evidence, "machine": texts[:_SHOWN]}
        points = ""
        if len(hosts) > 1 and len(located) == 1 and finding.kind in _WIRES:
            evidence["host_by_counters"] = (host := next(iter(located)))
            points = f"counters point at {host}: "
            texts = [each.text(self._seats) for each in explaining if each.host == host]
        more = f" and {len(texts) - _QUOTED} more" if len(texts) > _QUOTED else ""
        summary = f"{finding.summary}; {points}{', '.join(texts[:_QUOTED])}{more}"
        return replace(finding, summary=summary, evidence=evidence)

    def _may_explain(self, lasting: _Lasting, finding: Finding) -> bool:
        if lasting.fact.gpu_bus_id is None:
            return finding.kind in _WIRES or finding.kind is FindingKind.SLOW_STEPS
        rank = self._seats.get((lasting.host, lasting.fact.gpu_bus_id))
        return not finding.ranks or rank is None or rank in finding.ranks


def _finding(lasting: _Lasting, seats: GpuSeats, context: Context) -> Finding:
    rank = seats.get((lasting.host, lasting.fact.gpu_bus_id or 0))
    return Finding(
        kind=FindingKind.REPORTED_FAILURE,
        severity=Severity.WARNING,
        job=context.job,
        ranks=() if rank is None else (rank,),
        hosts=(lasting.host,),
        since_ns=lasting.since_ns,
        confidence=1.0,
        summary=f"the machine's counters say: {lasting.text(seats)}",
        evidence={"device": lasting.fact.device, "condition": lasting.fact.what},
    )


def _clock(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns // 1_000_000_000, tz=UTC).strftime("%H:%M")
