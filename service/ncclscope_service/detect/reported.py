"""Failures that NCCL and PyTorch report themselves: watchdog time-outs, failed calls, memory that ran out.

A log line is evidence enough: what it names is passed on, once for all lines that say the same. A warning of a form
that nobody knows is passed on too, once for each shape. Messages that healthy jobs print too are left out: optional
libraries that are missing, calls that have a fallback, and what is said after a process's last operation because others
exit (their sockets are closed, their communicators aborted). This is reported only if the process goes on, or if
something else failed: by itself it says that a job has ended.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from ncclscope_service.detect.context import Context, Ledger, names_of_hosts, names_of_ranks
from ncclscope_service.store.records import FailureLine, Finding, FindingKind, Severity
from ncclscope_service.store.settings import SECOND_NS
from ncclscope_wire import facts
from ncclscope_wire.facts import Fact

_REPORTS_KEPT: Final = 64
_LINES_SHOWN: Final = 8
_SEVERE_EVENTS: Final = frozenset({"fatal", "error"})
_OUT_OF_MEMORY: Final = "out of memory"
_SHUTTING_DOWN: Final = "shutting down"
_VARIES: Final = re.compile(r"(?:0x)?[0-9a-f]*\d[0-9a-f]*|\S*[/.:<>@]\S*\d\S*")
"""Numbers, pointers, addresses and names with them in a message: what is left is its shape."""
_LAST_WORDS: Final = frozenset({"Accept failed", "Could not receive type from localRank"})
_LAST_REQUESTS: Final = frozenset({"Close", "Stop"})
"""Messages and requests of NCCL's proxy when processes exit without destroying their communicators.

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
    has_time: bool = True
    """Whether the line has a time of its own."""
    process: ProcessKey | None = None
    """Whose log it stands in, if it is about that process."""


TorchFact: TypeAlias = facts.TorchTimeout | facts.TorchProgress


def _failed_at(fact: TorchFact) -> int | None:
    """The sequence number on which its rank gave up."""
    if isinstance(fact, facts.TorchTimeout):
        return fact.sequence
    return fact.failed_at if fact.what == "failure" else None


_TIMEOUTS_KEPT: Final = 4096
"""Ranks, groups and sequence numbers that are remembered of one event."""
_DEFAULT_GROUPS: Final = frozenset({"0", "default_pg"})
"""PyTorch's first group: its ranks are those of the job."""


class _Place(NamedTuple):
    """One rank of one of PyTorch's process groups; parts that no line says are None."""

    group_id: str | None
    group_uid: str | None
    rank: int


@dataclass(slots=True)
class TorchTimeouts:
    """Who gave up on which sequence number of which process group, from lines of which each has a part of it."""

    _sequences: dict[_Place, int] = field(default_factory=dict[_Place, int])
    """The first operation on which each rank gave up."""
    _enqueued: dict[_Place, tuple[int, int]] = field(default_factory=dict[_Place, tuple[int, int]])
    """The last operations that each rank had enqueued and finished."""
    _global_ranks: dict[_Place, int] = field(default_factory=dict[_Place, int])
    _names: dict[tuple[str | None, str | None], str] = field(default_factory=dict[tuple[str | None, str | None], str])
    """Descriptions of groups."""
    _operations: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict[tuple[int, int], tuple[str, int]])
    """By rank of the group and sequence number: what was called, and after how many ms the rank gave up."""
    error: str | None = None
    """The error of NCCL for which watchdogs gave up, if they say so: then nobody waited too long."""

    @property
    def longest_ms(self) -> int | None:
        """How long a rank waited before its watchdog gave up; None if none says that it waited too long."""
        return max((timeout_ms for _, timeout_ms in self._operations.values()), default=None)

    def add(self, fact: TorchFact) -> None:
        """Takes a line. What is logged, thrown and printed by `what()` is one time-out."""
        sequence = _failed_at(fact)
        if sequence is None or len(self._sequences) >= _TIMEOUTS_KEPT:
            return
        place = _Place(fact.group_id, fact.group_uid, fact.rank)
        self._sequences[place] = min(sequence, self._sequences.get(place, sequence))
        if fact.group:
            self._names[place[:2]] = fact.group
        if isinstance(fact, facts.TorchTimeout):
            self._operations[fact.rank, sequence] = fact.operation, fact.timeout_ms
        else:
            self._enqueued[place] = fact.last_enqueued, fact.last_completed
        if fact.global_rank is not None:
            self._global_ranks[place] = fact.global_rank
        elif _DEFAULT_GROUPS & {fact.group_id, fact.group}:
            self._global_ranks[place] = fact.rank

    def _by_group(self) -> list[list[_Place]]:
        """Ranks that gave up, by group, the largest first. Lines that name no group repeat others, if others do."""
        named = {(place.rank, at) for place, at in self._sequences.items() if place[:2] != (None, None)}
        groups: dict[tuple[str | None, str | None], list[_Place]] = defaultdict(list[_Place])
        for place, at in sorted(self._sequences.items(), key=lambda each: (each[0].rank, each[1])):
            if place[:2] != (None, None) or (place.rank, at) not in named:
                groups[place[:2]].append(place)
        return sorted(groups.values(), key=lambda places: (-len(places), str(places[0])))

    def global_ranks(self) -> tuple[int, ...]:
        """Ranks of the job that gave up, as far as lines say them."""
        return tuple(sorted(set(self._global_ranks.values())))

    def culprits(self) -> tuple[int, ...]:
        """Ranks of the job that are furthest behind in the largest group, as far as lines say them."""
        places = self._by_group()[0]
        behind = self._behind(places) or self._furthest_behind(places)
        return tuple(sorted({self._global_ranks[place] for place in behind if place in self._global_ranks}))

    def _names_of(self, places: list[_Place]) -> str:
        """These ranks of one group: those of the job if all are known."""
        known = [self._global_ranks[place] for place in places if place in self._global_ranks]
        if len(known) == len(places):
            return names_of_ranks(sorted(set(known)))
        return f"{names_of_ranks([place.rank for place in places])} of the group"

    def _behind(self, places: list[_Place]) -> list[_Place]:
        """Ranks of one group that had not enqueued what another gave up on."""
        front = max(self._sequences[place] for place in places)
        return [place for place in places if place in self._enqueued and self._enqueued[place][0] < front]

    def _furthest_behind(self, places: list[_Place]) -> list[_Place]:
        """Ranks of one group whose last enqueued operation, or else the one given up, is the earliest; if not all."""
        at = {
            place: self._enqueued[place][0] if place in self._enqueued else self._sequences[place] for place in places
        }
        behind = self._behind(places) or places
        first = min(at[place] for place in behind)
        furthest = [place for place in behind if at[place] == first]
        return [] if len({self._sequences[place] for place in places}) == 1 and behind is places else furthest

    def summary(self) -> str:
        """Says who gave up on what, and who is furthest behind."""
        places, *others = self._by_group()
        by_sequence: dict[int, list[_Place]] = defaultdict(list[_Place])
        for place in places:
            by_sequence[self._sequences[place]].append(place)
        what = " and ".join(
            self._call(at, own) + (f" ({self._names_of(own)})" if len(by_sequence) > 1 else "")
            for at, own in sorted(by_sequence.items(), key=lambda each: (-len(each[1]), each[0]))[:3]
        )
        timeout_ms = next((self._operations[key][1] for key in self._calls(places)), None)
        after = "" if timeout_ms is None else f" after {timeout_ms / 1000:.0f} s"
        why = f" for {self.error}" if timeout_ms is None and self.error else ""
        more = f" and on operations of {len(others)} other group{'s' if len(others) > 1 else ''}" if others else ""
        missing, behind = self._behind(places), self._furthest_behind(places)
        if missing and len(by_sequence) == 1:
            note = f"; {self._names_of(missing)} had not enqueued it"
        else:
            verb = "is" if len(behind) == 1 else "are"
            note = f"; {self._names_of(behind)} {verb} furthest behind" if behind else ""
        return (
            f"PyTorch's watchdog gave up on {what} of {self._group_name(places[0])}{after}{more}{why}{note} "
            f"(reported by {self._names_of([*places, *chain(*others)])})"
        )

    def _calls(self, places: list[_Place]) -> list[tuple[int, int]]:
        """Of these ranks, what `_operations` has."""
        keys = ((place.rank, self._sequences[place]) for place in places)
        return [key for key in keys if key in self._operations]

    def _call(self, sequence: int, places: list[_Place]) -> str:
        return f"{next((self._operations[key][0] for key in self._calls(places)), 'collective')} {sequence}"

    def _group_name(self, place: _Place) -> str:
        number = f"process group {place.group_id}" if place.group_id else "a process group"
        return self._names.get(place[:2], number)

    def evidence(self) -> dict[str, object]:
        """The numbers of the largest group that gave up, and how many groups did."""
        groups = self._by_group()
        places = groups[0]
        calls = [self._operations[key] for key in self._calls(places)]
        progress = [self._enqueued[place] for place in places if place in self._enqueued]
        return {
            "operation": calls[0][0] if calls else None,
            "sequence": Counter(self._sequences[place] for place in places).most_common(1)[0][0],
            "sequences": {str(place.rank): self._sequences[place] for place in places},
            "group": self._names.get(places[0][:2]),
            "groups": len(groups),
            "timeout_ms": calls[0][1] if calls else None,
            "error": self.error,
            "group_ranks": [place.rank for place in places],
            "group_ranks_behind": [place.rank for place in self._behind(places)],
            "group_ranks_furthest_behind": [place.rank for place in self._furthest_behind(places)],
            "last_enqueued": sorted({enqueued for enqueued, _ in progress}),
            "last_completed": sorted({completed for _, completed in progress}),
        }


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
    first_fact: Fact | None = None
    timeouts: TorchTimeouts = field(default_factory=TorchTimeouts)
    """Statements of PyTorch's watchdogs, if those are what is reported."""


class Role(IntEnum):
    """What a failure says about the end of its job; the earlier ones explain the later ones."""

    CAUSE = 0
    TIMEOUT = 1
    KILL = 2
    EXCEPTION = 3
    """One that no line says to have ended its program: those that were caught are printed, too."""
    EXIT = 4
    """A program ended with an error, and nothing says why."""
    CONSEQUENCE = 5
    """What processes say when others are gone."""


class Failure(NamedTuple):
    """A line that says that something failed, and what it says about the end of the job."""

    role: Role
    order: tuple[int, str, int]
    """By time, if the line has one, by file and by line."""
    line: FailureLine


_WRITERS_KEPT: Final = 16_384
"""Ranks, processes or files of which first failures and last words are kept."""
_WORDS_SHOWN: Final = 240
_BY_OTHERS: Final = re.compile(
    r"remote process exited|network error|onnection (?:reset|closed|refused)|Broken pipe|[Ww]atchdog|ChildFailedError|"
    r"ProcessRaisedException|ncclRemoteError|NCCL communicator was aborted"
)
"""In exceptions that come of others."""


def _role_of(fact: Fact) -> Role | None:
    """None if the line says nothing about the end of its job."""
    if isinstance(fact, facts.ProgramFailure):
        return _role_of_program(fact)
    if isinstance(fact, facts.TorchTimeout | facts.TorchProgress):
        return Role.TIMEOUT
    if isinstance(fact, facts.ConnectionTrouble | facts.ProxyTrouble | facts.CommunicatorTrouble):
        return Role.CONSEQUENCE
    if isinstance(fact, facts.RasMissing | facts.RasBehind):
        return Role.CAUSE if isinstance(fact, facts.RasMissing) and fact.state == "dead" else Role.CONSEQUENCE
    is_shutting_down = isinstance(fact, facts.CudaFailure) and _SHUTTING_DOWN in fact.error
    return None if is_shutting_down or isinstance(fact, facts.OtherWarning | facts.PathNotUsed) else Role.CAUSE


def _role_of_program(fact: facts.ProgramFailure) -> Role:
    if fact.what in _ROLES:
        return _ROLES[fact.what]
    is_known = fact.global_rank is not None or fact.text.startswith(_ENGINES)
    return Role.CONSEQUENCE if _BY_OTHERS.search(fact.text) else Role.CAUSE if is_known else Role.EXCEPTION


_ROLES: Final = {_OUT_OF_MEMORY: Role.CAUSE, "killed": Role.KILL, "exited": Role.EXIT}
_OF_NCCL: Final = "NCCL error"
_ASYNC_ERROR: Final = "NCCL error: "
_NCCL_VERSION: Final = re.compile(r",? NCCL version [\w.+-]+")
_ENGINES: Final = (_OF_NCCL, "CUDA error")
"""Beginnings of exceptions of C++ that nobody catches."""


class FailureLines:
    """The first failure of each role and the last words of each rank, process or file."""

    def __init__(self) -> None:
        self._first: dict[tuple[Role, Hashable], tuple[Failure, LoggedFact]] = {}
        self._last: dict[Hashable, Failure] = {}

    def add(self, logged: LoggedFact, text: str) -> None:
        """Takes a failure in these words."""
        fact, role = logged.fact, _role_of(logged.fact)
        writer: Hashable = logged.rank if logged.rank is not None else fact.host and (fact.host, fact.pid)
        writer = logged.source if writer is None else writer
        if len(self._last) >= _WRITERS_KEPT and writer not in self._last:
            return
        line = FailureLine(
            rank=logged.rank,
            host=fact.host,
            text=text[:_WORDS_SHOWN],
            at_ns=logged.at_ns if logged.has_time else None,
            where=f"{logged.source}:{fact.line}",
        )
        order = logged.at_ns if logged.has_time else 0, logged.source, fact.line
        made = Failure(Role.CONSEQUENCE if role is None else role, order, line)
        if writer not in self._last or self._last[writer].order <= order:
            self._last[writer] = made
        if role is not None and (role, writer) not in self._first:
            self._first[role, writer] = made, logged

    def failures(self, newest_lines: Mapping[ProcessKey, int]) -> list[Failure]:
        """The first of each role of each rank, process or file, behind which its process logged no operation."""
        return [
            each
            for each, logged in self._first.values()
            if logged.process is None or newest_lines.get(logged.process, 0) <= logged.fact.line
        ]

    def last_words(self) -> tuple[FailureLine, ...]:
        """Of each rank, by rank; those of processes and files without one are last."""
        lines = (each.line for each in self._last.values())
        return tuple(sorted(lines, key=lambda line: (line.rank is None, line.rank or 0, line.where)))


@dataclass(slots=True)
class Reported:
    """Failures that the logs of one job report."""

    _reports: dict[Hashable, _Report] = field(default_factory=dict[Hashable, _Report])
    _ledger: Ledger = field(default_factory=Ledger)
    _context: Context | None = None
    lines: FailureLines = field(default_factory=FailureLines)
    _async_error: str | None = None
    """The first error of NCCL that a watchdog of PyTorch found in a collective."""

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
            if isinstance(one.fact, facts.ProgramFailure) and one.fact.text.startswith(_ASYNC_ERROR):
                self._async_error = self._async_error or _NCCL_VERSION.sub("", one.fact.text)
            key = None if trouble is None else trouble.key(one.fact)
            if trouble is not None and key is not None:
                self._record(key, one, trouble)
            if trouble is not None and (key is not None or isinstance(one.fact, facts.ProgramFailure)):
                self.lines.add(one, _words_of(one.fact, trouble))

    def timeouts(self) -> TorchTimeouts | None:
        """What PyTorch's watchdogs say, if they gave up."""
        report = self._reports.get(_TIMED_OUT)
        if report is None:
            return None
        report.timeouts.error = self._async_error
        return report.timeouts

    def findings(self, now_ns: int, *, is_stuck: bool = False) -> list[Finding]:
        """All findings so far. `is_stuck`: another detector says that the job stands still or goes wrong."""
        context = self._context
        if context is None:
            return []
        self.timeouts()  # with the error
        failed = is_stuck or any(not (report.may_be_exit or report.is_minor) for report in self._reports.values())
        for key, report in self._reports.items():
            if report.may_be_exit and not failed:
                continue
            if now_ns - report.newest_ns <= context.settings.other.reported_failure_seconds * SECOND_NS:
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
        report.first_fact = report.first_fact or logged.fact
        if isinstance(logged.fact, facts.TorchTimeout | facts.TorchProgress):
            report.timeouts.add(logged.fact)
        if logged.fact.host:
            report.hosts.add(logged.fact.host)
            report.first_lines.setdefault((logged.fact.host, logged.fact.pid or 0), logged.fact.line)
        if logged.rank is not None:
            report.ranks.add(logged.rank)


FactType = TypeVar("FactType", bound=Fact)


_TIMED_OUT: Final = "torch"
"""Key of the report of all time-outs."""


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
    """Time-outs of all ranks and groups of a job are one event: one hang makes all of them."""
    return _TIMED_OUT if isinstance(fact, facts.TorchTimeout) or _failed_at(fact) is not None else None


def _words_of(fact: Fact, trouble: _Trouble) -> str:
    """What one line says."""
    if isinstance(fact, facts.TorchTimeout):
        return f"gave up on {fact.operation} {fact.sequence} after {fact.timeout_ms / 1000:.0f} s (PyTorch's watchdog)"
    if isinstance(fact, facts.TorchProgress):
        return f"gave up on collective {fact.failed_at}, had enqueued {fact.last_enqueued} (PyTorch's watchdog)"
    return fact.text if isinstance(fact, facts.ProgramFailure) else trouble.text(fact)


def _program_key(fact: facts.ProgramFailure) -> Hashable | None:
    """Lines of programs that report what failed. Errors of NCCL are in its own lines; how programs end is a matter of
    the verdict.
    """
    if _role_of(fact) is not Role.CAUSE or _OF_NCCL in fact.text:
        return None
    return "program", fact.what if fact.what == _OUT_OF_MEMORY else _shape(fact.text)


def _gave_up(fact: TorchFact) -> str:
    del fact  # one line does not have all of it: see `TorchTimeouts`
    return "PyTorch's watchdog gave up on a collective"


def _what(
    fact: facts.MemoryFailure | facts.ConnectionTrouble | facts.ProxyTrouble | facts.CommunicatorTrouble | facts.Misuse,
) -> Hashable:
    """Lines of one type that say the same."""
    return (type(fact).__name__, fact.what)


def _bytes_of(fact: facts.MemoryFailure) -> str:
    return "" if fact.size_bytes is None else f" of {fact.size_bytes} bytes"


def _ofi_text(fact: facts.OfiFailure) -> str:
    code = "" if fact.code is None else f" (error {fact.code})"
    return f"libfabric could not {fact.what}{': ' if fact.error else ''}{fact.error or ''}{code}"


RasFact: TypeAlias = facts.RasMissing | facts.RasBehind
_RAS_STATES: Final = {
    "dead": "cannot be reached, and counts as dead",
    "unresponsive": "does not answer",
    "left": "has left a communicator that others are in",
}


def _ras_key(fact: RasFact) -> Hashable:
    return type(fact).__name__, fact.communicator, fact.ranks, fact.pids


def _ras_text(fact: RasFact) -> str:
    """Who it is as NCCL's RAS names it: global ranks if all processes were named, else ranks of the communicator."""
    places = dict.fromkeys(f"process {pid} on {node}" for pid, node in zip(fact.pids, fact.nodes, strict=False) if node)
    who = names_of_ranks(_global_ranks(fact)) if _global_ranks(fact) else ""
    if not who and fact.communicator:
        who = f"communicator {names_of_ranks(tuple(fact.ranks))}"
    shown = list(places)[:_LINES_SHOWN]
    who = who or "a process"
    more = f" ({', '.join(shown)}{', ...' if len(places) > len(shown) else ''})" if shown else ""
    of = f" of communicator 0x{fact.communicator:x}" if fact.communicator else ""
    if isinstance(fact, facts.RasMissing):
        return f"NCCL's RAS says: {who}{more}{of} {_RAS_STATES.get(fact.state, fact.state)}"
    done = f"launched {fact.launched:,} x {fact.operation} and others {fact.others:,}"
    return f"NCCL's RAS says: {who}{more}{of} stays behind: {done}"


def _global_ranks(fact: RasFact) -> tuple[int, ...]:
    """Empty if one is not known."""
    ranks = tuple(sorted(fact.global_ranks))
    amount = fact.ranks_missing if isinstance(fact, facts.RasMissing) else fact.ranks_behind
    return ranks if ranks and ranks[0] >= 0 and len(ranks) == amount else ()


def _ranks_of(fact: facts.Misuse) -> str:
    return f" (communicator ranks {', '.join(map(str, fact.ranks))})" if fact.ranks else ""


def _of(
    kind: type[FactType],
    key: Callable[[FactType], Hashable | None],
    text: Callable[[FactType], str],
    *,
    severity: Severity = Severity.CRITICAL,
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
    if isinstance(fact, facts.OtherWarning | facts.OfiFailure):
        return logged.is_behind_operations
    return isinstance(fact, facts.CommunicatorTrouble) and fact.what == "abort"


def _shape(text: str) -> str:
    """A message without what differs between lines that say the same."""
    return _VARIES.sub("#", text)


_TROUBLE: Final[Mapping[type[Fact], _Trouble]] = dict(
    (
        _of(facts.TorchTimeout, _torch_key, _gave_up),
        _of(facts.TorchProgress, _torch_key, _gave_up),
        _of(facts.CudaFailure, lambda fact: ("cuda", fact.error), lambda fact: f"a CUDA call failed: {fact.error}"),
        _of(facts.MemoryFailure, _what, lambda fact: f"memory could not be allocated: {fact.what}{_bytes_of(fact)}"),
        _of(
            facts.IbCompletionError,
            lambda fact: ("completion", fact.host, fact.status),
            lambda fact: (
                f"an InfiniBand work request failed with {fact.status_name or f'status {fact.status}'}"
                f"{_with('on ', fact.nic)}{_with('to ', fact.peer)}"
            ),
        ),
        _of(
            facts.VerbsFailure,
            lambda fact: ("verbs", fact.call, fact.error),
            lambda fact: f"{fact.call} failed{_with('with ', fact.error)}{_with('on ', fact.nic)}",
        ),
        _of(
            facts.IbEvent,
            lambda fact: ("event", fact.host, fact.nic, fact.event) if fact.severity in _SEVERE_EVENTS else None,
            lambda fact: f"{_with('NIC ', fact.nic).strip() or 'a NIC'} reported {fact.severity}: {fact.event}",
        ),
        _of(
            facts.PortFailover,
            lambda fact: ("port", fact.host, fact.device) if fact.is_failed else None,
            lambda fact: f"NCCL stopped using network device {fact.device}",
        ),
        _of(facts.OfiFailure, lambda fact: ("ofi", fact.what, fact.code), _ofi_text),
        _of(
            facts.ConnectionTrouble,
            _what,
            lambda fact: f"an NCCL connection broke: {fact.what}{_with('by ', fact.peer)}",
            severity=Severity.WARNING,
        ),
        _of(
            facts.ProxyTrouble,
            _what,
            lambda fact: f"an NCCL proxy thread failed: {fact.text or fact.what + _with('', fact.operation)}",
            severity=Severity.WARNING,
        ),
        _of(
            facts.OtherWarning,
            lambda fact: ("warning", _shape(fact.text)),
            lambda fact: f"NCCL warned: {fact.text}",
            is_minor=True,
            severity=Severity.WARNING,
        ),
        _of(
            facts.PathNotUsed,
            lambda fact: ("path", fact.path),
            lambda fact: f"{fact.path} could not be used, and NCCL goes on with a slower path: {fact.reason}",
            finding=FindingKind.MISCONFIGURATION,
            is_minor=True,
            severity=Severity.WARNING,
        ),
        _of(
            facts.CommunicatorTrouble,
            _what,
            lambda fact: f"an NCCL communicator is in {fact.what}",
            severity=Severity.WARNING,
        ),
        _of(facts.Misuse, _what, lambda fact: f"NCCL rejected a call: {fact.what}{_ranks_of(fact)}"),
        _of(facts.RasMissing, _ras_key, _ras_text),
        _of(facts.RasBehind, _ras_key, _ras_text),
        _of(
            facts.ProgramFailure,
            _program_key,
            lambda fact: f"a program failed: {fact.text}" if fact.what == "exception" else fact.text,
        ),
    )
)


def _finding(report: _Report, context: Context) -> Finding:
    times = "once" if report.lines == 1 else f"{report.lines} times"
    ranks, hosts = tuple(sorted(report.ranks)), tuple(sorted(report.hosts))
    who = names_of_ranks(ranks) if ranks else names_of_hosts(hosts) if hosts else "an unknown process"
    summary, evidence = f"{report.text} (reported {times} by {who})", dict[str, object]()
    if isinstance(report.first_fact, facts.TorchTimeout | facts.TorchProgress):
        summary, evidence = report.timeouts.summary(), report.timeouts.evidence()
        ranks = report.timeouts.global_ranks()
        hosts = hosts or context.hosts_of(ranks)
    if isinstance(report.first_fact, facts.RasMissing | facts.RasBehind):
        ranks, summary = _global_ranks(report.first_fact), report.text
        hosts = context.hosts_of(ranks)
        evidence = {"communicator_ranks": list(report.first_fact.ranks), "nodes": list(report.first_fact.nodes)}
    return Finding(
        kind=report.kind,
        severity=report.severity,
        job=context.job,
        ranks=ranks,
        hosts=hosts,
        since_ns=report.since_ns,
        confidence=1.0,
        summary=summary,
        evidence={
            "lines": report.lines,
            "where": list(report.shown),
            "processes": len(report.first_lines),
            "out_of_memory": _OUT_OF_MEMORY in report.text.lower()
            or isinstance(report.first_fact, facts.MemoryFailure),
            **evidence,
        },
    )
