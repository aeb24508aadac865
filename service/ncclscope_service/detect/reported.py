"""Failures that NCCL and PyTorch report themselves: watchdog time-outs, failed calls, memory that ran out.

A log line is evidence enough: what it names is passed on, once for all lines that say the same. A warning of a form
that nobody knows is passed on too, once for each shape. Messages that healthy jobs print too are left out: optional
libraries that are missing, calls that have a fallback, and what is said after a process's last operation because others
exit (their sockets are closed, their communicators aborted). This is reported only if the process goes on, or if
something else failed: by itself it says that a job has ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from ncclscope_service.detect.context import Context, Ledger, names_of_hosts, names_of_ranks
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_wire import facts
from ncclscope_wire.facts import Fact

_FORGOTTEN_NS: Final = 600_000_000_000
"""A finding is closed so long after its last line."""
_REPORTS_KEPT: Final = 64
_LINES_SHOWN: Final = 8
_SEVERE_EVENTS: Final = frozenset({"fatal", "error"})
_OUT_OF_MEMORY: Final = "out of memory"
_SHUTTING_DOWN: Final = "shutting down"
_VARIES: Final = re.compile(r"(?:0x)?[0-9a-f]*\d[0-9a-f]*|\S*[/.:<>@]\S*\d\S*")
"""Numbers, pointers, addresses and names with them in a message: what is left is its shape."""
_LAST_WORDS: Final = frozenset({"Accept failed", "Could not receive type from localRank"})
_LAST_REQUESTS: Final = frozenset({"Close", "Stop"})
"""What NCCL's proxy says and is asked when processes exit without destroying their communicators.

*Source:* NCCL `src/proxy.cc:ncclProxyService`, 2.22 to 2.28.
"""

ProcessKey: TypeAlias = tuple[str, int]
"""Host and pid."""


class LoggedFact(NamedTuple):
    """One fact, with the log and the rank that it came from."""

    fact: Fact
    source: str
    rank: int | None
    """Global rank of the process that wrote it, if it has one."""
    at_ns: int
    """Logged, else observed; the job's newest time if neither is known."""
    is_behind_operations: bool = False
    """Whether its process logged operations in front of it."""


@dataclass(slots=True)
class _Report:
    text: str
    kind: FindingKind
    severity: Severity
    is_minor: bool
    """Whether the job goes on: nothing else becomes a failure by it."""
    may_be_exit: bool
    """Whether its lines are what processes say when others exit."""
    since_ns: int
    newest_ns: int
    lines: int = 0
    shown: list[str] = field(default_factory=list[str])
    ranks: set[int] = field(default_factory=set[int])
    hosts: set[str] = field(default_factory=set[str])
    first_lines: dict[ProcessKey, int] = field(default_factory=dict[ProcessKey, int])
    """By process: its first line that says this."""
    facts: list[Fact] = field(default_factory=list[Fact])
    """A few of them."""


class Reported:
    """Failures that the logs of one job report."""

    def __init__(self) -> None:
        self._reports: dict[Hashable, _Report] = {}
        self._ledger = Ledger()
        self._context: Context | None = None

    def ingest_newest_lines(self, lines: Mapping[ProcessKey, int]) -> None:
        """By process of the job: the line of the newest operation, if it has any."""
        for report in self._reports.values():
            if report.may_be_exit and any(lines.get(process, 0) > line for process, line in report.first_lines.items()):
                report.may_be_exit = False

    def ingest_facts(self, logged: Iterable[LoggedFact], context: Context) -> None:
        """Takes facts as they come."""
        self._context = context
        for one in logged:
            trouble = _TROUBLE.get(type(one.fact))
            key = None if trouble is None else trouble.key(one.fact)
            if trouble is not None and key is not None:
                self._record(key, one, trouble)

    def findings(self, now_ns: int, *, is_stuck: bool = False) -> list[Finding]:
        """All findings so far. `is_stuck`: another detector says that the job stands still or goes wrong."""
        context = self._context
        if context is None:
            return []
        failed = is_stuck or any(not (report.may_be_exit or report.is_minor) for report in self._reports.values())
        for key, report in self._reports.items():
            if report.may_be_exit and not failed:
                continue
            if now_ns - report.newest_ns <= _FORGOTTEN_NS:
                self._ledger.update(key, _finding(report, context))
            else:
                self._ledger.close(key, report.newest_ns)
        return self._ledger.findings()

    def _record(self, key: Hashable, logged: LoggedFact, trouble: _Trouble) -> None:
        report = self._reports.get(key)
        if report is None:
            if len(self._reports) >= _REPORTS_KEPT:
                return
            report = self._reports[key] = _Report(
                text=trouble.text(logged.fact),
                kind=trouble.kind,
                severity=trouble.severity,
                is_minor=trouble.is_minor,
                may_be_exit=_may_be_exit(logged),
                since_ns=logged.at_ns,
                newest_ns=logged.at_ns,
            )
        report.since_ns, report.newest_ns = min(report.since_ns, logged.at_ns), max(report.newest_ns, logged.at_ns)
        report.lines += 1
        if len(report.shown) < _LINES_SHOWN:
            report.shown.append(f"{logged.source}:{logged.fact.line}")
        if len(report.facts) < 4 * _LINES_SHOWN:
            report.facts.append(logged.fact)
        if logged.fact.host:
            report.hosts.add(logged.fact.host)
            report.first_lines.setdefault((logged.fact.host, logged.fact.pid or 0), logged.fact.line)
        if logged.rank is not None:
            report.ranks.add(logged.rank)


TorchFact: TypeAlias = facts.TorchTimeout | facts.TorchProgress
FactType = TypeVar("FactType", bound=Fact)


class _Trouble(NamedTuple):
    """Severity, identity and text of one type of fact."""

    severity: Severity
    key: Callable[[Any], Hashable | None]
    """Equal for lines of the same report; None for lines that report no failure."""
    text: Callable[[Any], str]
    """Text of what a line reports."""
    kind: FindingKind = FindingKind.REPORTED_FAILURE
    is_minor: bool = False


def _with(name: str, value: object) -> str:
    return "" if value is None else f" {name}{value}"


def _torch_key(fact: TorchFact) -> Hashable | None:
    if isinstance(fact, facts.TorchTimeout):
        return ("torch", fact.sequence)
    return ("torch", fact.failed_at) if fact.what == "failure" and fact.failed_at is not None else None


def _gave_up(fact: TorchFact) -> str:
    del fact  # one line does not have all of it: see `_torch`
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
    *,
    finding: FindingKind = FindingKind.REPORTED_FAILURE,
    is_minor: bool = False,
) -> tuple[type[Fact], _Trouble]:
    return kind, _Trouble(severity, key, text, finding, is_minor)


def _may_be_exit(logged: LoggedFact) -> bool:
    """Whether processes say this when others exit, and it is no failure by itself."""
    fact = logged.fact
    if isinstance(fact, facts.ProxyTrouble):
        return fact.what in _LAST_WORDS or fact.operation in _LAST_REQUESTS
    if isinstance(fact, facts.ConnectionTrouble):
        return fact.what == "closed"
    if isinstance(fact, facts.CudaFailure):
        return _SHUTTING_DOWN in fact.error
    if isinstance(fact, facts.OtherWarning):
        return logged.is_behind_operations
    return isinstance(fact, facts.CommunicatorTrouble) and fact.what == "abort"


def _shape(text: str) -> str:
    """A message without what differs between lines that say the same."""
    return _VARIES.sub("#", text)


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
            lambda fact: f"memory could not be allocated: {fact.what}{_bytes_of(fact)}",
        ),
        _of(
            facts.IbCompletionError,
            Severity.CRITICAL,
            lambda fact: ("completion", fact.host, fact.status),
            lambda fact: (
                f"an InfiniBand work request failed with {fact.status_name or f'status {fact.status}'}"
                f"{_with('on ', fact.nic)}{_with('to ', fact.peer)}"
            ),
        ),
        _of(
            facts.IbEvent,
            Severity.CRITICAL,
            lambda fact: ("event", fact.host, fact.nic, fact.event) if fact.severity in _SEVERE_EVENTS else None,
            lambda fact: f"{_with('NIC ', fact.nic).strip() or 'a NIC'} reported {fact.severity}: {fact.event}",
        ),
        _of(
            facts.PortFailover,
            Severity.CRITICAL,
            lambda fact: ("port", fact.host, fact.device) if fact.is_failed else None,
            lambda fact: f"NCCL stopped using network device {fact.device}",
        ),
        _of(
            facts.ConnectionTrouble,
            Severity.WARNING,
            _what,
            lambda fact: f"an NCCL connection broke: {fact.what}{_with('by ', fact.peer)}",
        ),
        _of(
            facts.ProxyTrouble,
            Severity.WARNING,
            _what,
            lambda fact: f"an NCCL proxy thread failed: {fact.text or fact.what + _with('', fact.operation)}",
        ),
        _of(
            facts.OtherWarning,
            Severity.WARNING,
            lambda fact: ("warning", _shape(fact.text)),
            lambda fact: f"NCCL warned: {fact.text}",
            is_minor=True,
        ),
        _of(
            facts.PathNotUsed,
            Severity.WARNING,
            lambda fact: ("path", fact.path),
            lambda fact: f"{fact.path} could not be used, and NCCL goes on with a slower path: {fact.reason}",
            finding=FindingKind.MISCONFIGURATION,
            is_minor=True,
        ),
        _of(
            facts.CommunicatorTrouble,
            Severity.WARNING,
            _what,
            lambda fact: f"an NCCL communicator is in {fact.what}",
        ),
        _of(
            facts.Misuse,
            Severity.CRITICAL,
            _what,
            lambda fact: f"NCCL rejected a call: {fact.what}{_ranks_of(fact)}",
        ),
    )
)


def _finding(report: _Report, context: Context) -> Finding:
    is_torch = isinstance(report.facts[0], facts.TorchTimeout | facts.TorchProgress)
    text, evidence = _torch(report) if is_torch else (report.text, {})
    ranks, hosts = tuple(sorted(report.ranks)), tuple(sorted(report.hosts))
    who = names_of_ranks(ranks) if ranks else names_of_hosts(hosts) if hosts else "an unknown process"
    times = "once" if report.lines == 1 else f"{report.lines} times"
    return Finding(
        kind=report.kind,
        severity=report.severity,
        job=context.job,
        ranks=ranks,
        hosts=hosts,
        since_ns=report.since_ns,
        confidence=1.0,
        summary=f"{text} (reported {times}{'' if is_torch else f' by {who}'})",
        evidence={
            "lines": report.lines,
            "where": list(report.shown),
            "processes": len(report.first_lines),
            "out_of_memory": _OUT_OF_MEMORY in report.text or isinstance(report.facts[0], facts.MemoryFailure),
            **evidence,
        },
    )


def _torch(report: _Report) -> tuple[str, dict[str, object]]:
    """Which collective of which process group, and which of its ranks had not enqueued it."""
    timeouts = [fact for fact in report.facts if isinstance(fact, facts.TorchTimeout)]
    progress = [fact for fact in report.facts if isinstance(fact, facts.TorchProgress)]
    both: list[TorchFact] = [*timeouts, *progress]
    group = next((fact.group for fact in both if fact.group), None)
    number = next((fact.group_id for fact in both if fact.group_id), None)
    name = group or (f"process group {number}" if number else "a process group")
    sequence = timeouts[0].sequence if timeouts else progress[0].failed_at
    behind = sorted(
        {fact.rank for fact in progress if fact.failed_at is not None and fact.last_enqueued < fact.failed_at}
    )
    what = f"{timeouts[0].operation} {sequence}" if timeouts else f"collective {sequence}"
    after = f" after {timeouts[0].timeout_ms / 1000:.0f} s" if timeouts else ""
    missing = f"; {names_of_ranks(behind)} of the group had not enqueued it" if behind else ""
    text = f"PyTorch's watchdog gave up on {what} of {name}{after}{missing}"
    return text, {
        "operation": timeouts[0].operation if timeouts else None,
        "sequence": sequence,
        "group": group,
        "timeout_ms": timeouts[0].timeout_ms if timeouts else None,
        "group_ranks": sorted({fact.rank for fact in both}),
        "group_ranks_behind": behind,
        "last_enqueued": sorted({fact.last_enqueued for fact in progress}),
        "last_completed": sorted({fact.last_completed for fact in progress}),
    }
