"""What NCCL and PyTorch say themselves: watchdog time-outs, failed calls, memory that could not be had.

A line of the log is evidence enough: what it names is passed on, once for all lines that say the same. Left out is
what healthy jobs print too: libraries that are looked for in vain, calls that have a fallback, communicators that are
aborted at the end of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from ncclscope_service.detect.context import Context
from ncclscope_service.detect.findings import Ledger, names_of_hosts, names_of_ranks
from ncclscope_service.rows import Finding, FindingKind, Severity
from ncclscope_wire import facts
from ncclscope_wire.facts import Fact

_FORGOTTEN_NS: Final = 600_000_000_000
"""A report is closed so long after the last line that says the same."""
_REPORTS_KEPT: Final = 64
_LINES_SHOWN: Final = 8
_SEVERE_EVENTS: Final = frozenset({"fatal", "error"})
_OUT_OF_MEMORY: Final = "out of memory"


class Said(NamedTuple):
    """One fact with where it stands."""

    fact: Fact
    source: str
    rank: int | None
    """Global rank of the process that wrote it, where it has one."""
    at_ns: int
    """Logged, else observed; the job's newest time where neither is known."""


@dataclass(slots=True)
class _Report:
    text: str
    severity: Severity
    since_ns: int
    newest_ns: int
    lines: int = 0
    shown: list[str] = field(default_factory=list[str])
    ranks: set[int] = field(default_factory=set[int])
    hosts: set[str] = field(default_factory=set[str])
    facts: list[Fact] = field(default_factory=list[Fact])
    """A few of them."""


class Reported:
    """Feeds on facts of one job's logs."""

    def __init__(self) -> None:
        self._reports: dict[Hashable, _Report] = {}
        self._ledger = Ledger()
        self._context: Context | None = None
        self.left_out = 0
        """Facts of reports beyond those that are kept."""

    def feed(self, said: Iterable[Said], context: Context) -> None:
        """Takes facts as they come."""
        self._context = context
        for one in said:
            trouble = _TROUBLE.get(type(one.fact))
            key = None if trouble is None else trouble.key(one.fact)
            if trouble is not None and key is not None:
                self._note(key, one, trouble)

    def findings(self, now_ns: int) -> list[Finding]:
        """All findings so far."""
        context = self._context
        if context is None:
            return []
        for key, report in self._reports.items():
            if now_ns - report.newest_ns <= _FORGOTTEN_NS:
                self._ledger.update(key, _finding(report, context))
            else:
                self._ledger.close(key, report.newest_ns)
        return self._ledger.findings()

    def _note(self, key: Hashable, said: Said, trouble: _Trouble) -> None:
        report = self._reports.get(key)
        if report is None:
            if len(self._reports) >= _REPORTS_KEPT:
                self.left_out += 1
                return
            text = trouble.text(said.fact)
            report = self._reports[key] = _Report(text, trouble.severity, said.at_ns, said.at_ns)
        report.since_ns, report.newest_ns = min(report.since_ns, said.at_ns), max(report.newest_ns, said.at_ns)
        report.lines += 1
        if len(report.shown) < _LINES_SHOWN:
            report.shown.append(f"{said.source}:{said.fact.line}")
        if len(report.facts) < 4 * _LINES_SHOWN:
            report.facts.append(said.fact)
        if said.fact.host:
            report.hosts.add(said.fact.host)
        if said.rank is not None:
            report.ranks.add(said.rank)


TorchFact: TypeAlias = facts.TorchTimeout | facts.TorchProgress
FactType = TypeVar("FactType", bound=Fact)


class _Trouble(NamedTuple):
    """What a type of fact is held for."""

    severity: Severity
    key: Callable[[Any], Hashable | None]
    """What makes two lines the same report; None for lines that are no trouble."""
    text: Callable[[Any], str]
    """What happened, to be followed by who says so."""


def _with(name: str, value: object) -> str:
    return "" if value is None else f" {name}{value}"


def _torch_key(fact: TorchFact) -> Hashable | None:
    if isinstance(fact, facts.TorchTimeout):
        return ("torch", fact.sequence)
    return ("torch", fact.failed_at) if fact.what == "failure" and fact.failed_at is not None else None


def _gave_up(fact: TorchFact) -> str:
    del fact  # one line does not tell all: see `_torch`
    return "PyTorch's watchdog gave up on a collective"


def _what(
    fact: facts.MemoryFailure | facts.ConnectionTrouble | facts.ProxyTrouble | facts.CommunicatorTrouble | facts.Misuse,
) -> Hashable:
    """Lines of one type that say the same."""
    return (type(fact).__name__, fact.what)


def _bytes_of(fact: facts.MemoryFailure) -> str:
    return "" if fact.size_bytes is None else f" of {fact.size_bytes} bytes"


def _ranks_of(fact: facts.Misuse) -> str:
    return f" (communicator ranks {', '.join(map(str, fact.ranks))})" if fact.ranks else ""


def _of(
    kind: type[FactType],
    severity: Severity,
    key: Callable[[FactType], Hashable | None],
    text: Callable[[FactType], str],
) -> tuple[type[Fact], _Trouble]:
    return kind, _Trouble(severity, key, text)


_TROUBLE: Final[Mapping[type[Fact], _Trouble]] = dict(
    (
        _of(facts.TorchTimeout, Severity.CRITICAL, _torch_key, _gave_up),
        _of(facts.TorchProgress, Severity.CRITICAL, _torch_key, _gave_up),
        _of(
            facts.CudaFailure,
            Severity.CRITICAL,
            lambda fact: ("cuda", fact.error),
            lambda fact: f"a CUDA call failed: {fact.error}",
        ),
        _of(
            facts.MemoryFailure,
            Severity.CRITICAL,
            _what,
            lambda fact: f"memory could not be had: {fact.what}{_bytes_of(fact)}",
        ),
        _of(
            facts.IbCompletionError,
            Severity.CRITICAL,
            lambda fact: ("completion", fact.host, fact.status),
            lambda fact: (
                f"a work request of InfiniBand failed with {fact.status_name or f'status {fact.status}'}"
                f"{_with('on ', fact.nic)}{_with('to ', fact.peer)}"
            ),
        ),
        _of(
            facts.IbEvent,
            Severity.CRITICAL,
            lambda fact: ("event", fact.host, fact.nic, fact.event) if fact.severity in _SEVERE_EVENTS else None,
            lambda fact: f"a NIC{_with('', fact.nic)} reports {fact.severity}: {fact.event}",
        ),
        _of(
            facts.PortFailover,
            Severity.CRITICAL,
            lambda fact: ("port", fact.host, fact.device) if fact.is_failed else None,
            lambda fact: f"network device {fact.device} was given up",
        ),
        _of(
            facts.ConnectionTrouble,
            Severity.WARNING,
            _what,
            lambda fact: f"a connection of NCCL broke: {fact.what}{_with('by ', fact.peer)}",
        ),
        _of(
            facts.ProxyTrouble,
            Severity.WARNING,
            _what,
            lambda fact: f"a thread of NCCL failed: {fact.what}{_with('', fact.operation)}",
        ),
        _of(
            facts.CommunicatorTrouble,
            Severity.WARNING,
            _what,
            lambda fact: f"a communicator of NCCL is in {fact.what}",
        ),
        _of(
            facts.Misuse,
            Severity.CRITICAL,
            _what,
            lambda fact: f"NCCL refuses what it was asked: {fact.what}{_ranks_of(fact)}",
        ),
    )
)


def _finding(report: _Report, context: Context) -> Finding:
    is_torch = isinstance(report.facts[0], facts.TorchTimeout | facts.TorchProgress)
    text, evidence = _torch(report) if is_torch else (report.text, {})
    ranks, hosts = tuple(sorted(report.ranks)), tuple(sorted(report.hosts))
    who = names_of_ranks(ranks) if ranks else names_of_hosts(hosts) if hosts else "a process that is not named"
    times = "once" if report.lines == 1 else f"{report.lines} times"
    return Finding(
        kind=FindingKind.REPORTED_FAILURE,
        severity=report.severity,
        job=context.job,
        comm_id=None,
        parallelism=None,
        ranks=ranks,
        hosts=hosts,
        since_ns=report.since_ns,
        until_ns=None,
        confidence=1.0,
        summary=f"{text}: said {times}" + ("" if is_torch else f" by {who}"),
        evidence={
            "lines": report.lines,
            "where": list(report.shown),
            "out_of_memory": _OUT_OF_MEMORY in report.text or isinstance(report.facts[0], facts.MemoryFailure),
            **evidence,
        },
    )


def _torch(report: _Report) -> tuple[str, dict[str, object]]:
    """Which collective of which process group, and which of its ranks had not enqueued it."""
    timeouts = [fact for fact in report.facts if isinstance(fact, facts.TorchTimeout)]
    progress = [fact for fact in report.facts if isinstance(fact, facts.TorchProgress)]
    said: list[TorchFact] = [*timeouts, *progress]
    group = next((fact.group for fact in said if fact.group), None)
    sequence = timeouts[0].sequence if timeouts else progress[0].failed_at
    behind = sorted(
        {fact.rank for fact in progress if fact.failed_at is not None and fact.last_enqueued < fact.failed_at}
    )
    what = f"{timeouts[0].operation} {sequence}" if timeouts else f"collective {sequence}"
    after = f" after {timeouts[0].timeout_ms / 1000:.0f} s" if timeouts else ""
    missing = f"; {names_of_ranks(behind)} of the group had not enqueued it" if behind else ""
    text = f"PyTorch's watchdog gave up on {what} of {group or 'a process group'}{after}{missing}"
    return text, {
        "operation": timeouts[0].operation if timeouts else None,
        "sequence": sequence,
        "group": group,
        "timeout_ms": timeouts[0].timeout_ms if timeouts else None,
        "group_ranks": sorted({fact.rank for fact in said}),
        "group_ranks_behind": behind,
        "last_enqueued": sorted({fact.last_enqueued for fact in progress}),
        "last_completed": sorted({fact.last_completed for fact in progress}),
    }
