"""Context and ledger of the detectors: the groups and hosts of a job with what is uncertain, and its findings.

The ledger opens each finding once, updates it while it lasts, and closes it when it heals. The order of findings and
the words that they share are here too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct
from ncclscope_service.detect.settings import DEFAULTS, DetectionSettings
from ncclscope_service.store.records import Communicator, Finding, FindingKind, Severity
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER


def group_name(parallelism: str | None, comm_id: str, name: str | None = None) -> str:
    """Name of a communicator in sentences; `name`: what PyTorch calls its group."""
    said = "" if name is None else f" ({name})"
    return f"{parallelism} group {comm_id}{said}" if parallelism else f"communicator {comm_id}{said}"


class SharedGpu(NamedTuple):
    """One GPU on which several ranks of a group run."""

    host: str
    bus_id: int
    """PCI address as NCCL writes it."""
    ranks: tuple[int, ...]
    """Global ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One communicator of a job."""

    comm_id: str
    parallelism: str | None
    """TP, DP, PP, EP, CP, EMBEDDING, WORLD, ...; None if not known."""
    group_name: str | None = None
    """As PyTorch prints it."""
    global_ranks: tuple[int, ...]
    """By communicator rank; NO_NUMBER if not known."""
    hosts: tuple[str, ...]
    """By communicator rank; "" if not known."""
    limit: float | None = None
    """Bus bandwidth that its links can carry, in bytes per second; None if the topology does not tell."""
    limit_name: str = ""
    """Name of the link that sets the limit."""
    shared_gpus: tuple[SharedGpu, ...] = ()

    @property
    def name(self) -> str:
        """Name of the group in the sentences of findings."""
        return group_name(self.parallelism, self.comm_id, self.group_name)

    def host_set(self) -> frozenset[str]:
        """The hosts that are known."""
        return frozenset(host for host in self.hosts if host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A job as it stands: cheap to build, passed with every input."""

    job: str
    groups: Mapping[int, Group] = field(default_factory=dict[int, Group])
    """By communicator index. Communicators that ended are left out."""
    clock_is_trusted: bool = True
    """False while causality is violated: then no rank is named."""
    step_ns: int | None = None
    """Duration of an iteration; None while not known."""
    silent_hosts: frozenset[str] = frozenset()
    """Hosts whose agent does not answer: their silence proves nothing."""
    lossy_hosts: frozenset[str] = frozenset()
    """Hosts whose input was lost: counts and sequences of their ranks prove nothing."""
    resting_ranks: frozenset[int] = frozenset()
    """Global ranks that stand between two steps: they may evaluate or write a checkpoint."""
    knows_steps: bool = False
    """Whether the end of a step is known of all ranks."""
    has_lines_without_stamps: bool = False
    """Which kernels are theirs is found by order alone."""
    has_lost_lines: bool = False
    """Whether kernels or other ranks showed that lines of operations were lost."""
    is_over: bool = False
    """Whether no more input comes."""
    settings: DetectionSettings = DEFAULTS
    """The thresholds of this job."""

    def shared_gpus(self) -> list[SharedGpu]:
        """GPUs on which several ranks run, by host: their kernels take turns there."""
        ranks: defaultdict[tuple[str, int], set[int]] = defaultdict(set[int])
        for shared in chain.from_iterable(group.shared_gpus for group in self.groups.values()):
            ranks[shared.host, shared.bus_id] |= {*shared.ranks}
        return [SharedGpu(*seat, tuple(sorted(own))) for seat, own in sorted(ranks.items())]

    def is_fully_observed(self, host: str) -> bool:
        """Whether none of this host's input is known to be missing."""
        return host not in self.silent_hosts and host not in self.lossy_hosts

    def hosts_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """The hosts of these global ranks, each once, by name."""
        wanted = set(ranks)
        return tuple(
            sorted(
                {
                    host
                    for group in self.groups.values()
                    for rank, host in zip(group.global_ranks, group.hosts, strict=True)
                    if rank in wanted and host
                }
            )
        )

    def global_ranks_of(self, rows: Columns) -> NDArray[np.int64]:
        """Of each row, by its `communicator` (one of `groups`) and `rank`; NO_NUMBER if not known."""
        found, inverse = distinct(rows["communicator"])
        ranks_of = [self.groups[communicator].global_ranks for communicator in found.tolist()]
        sizes = np.asarray([len(ranks) for ranks in ranks_of], np.int64)
        every = np.fromiter(chain(*ranks_of, (NO_NUMBER,)), np.int64)
        is_known = (rows["rank"] >= 0) & (rows["rank"] < sizes[inverse])
        begins = np.cumsum(sizes) - sizes
        return every[np.where(is_known, begins[inverse] + rows["rank"], len(every) - 1)]


class GroupsOfStore:
    """The groups of a store's communicators, made again when more of their ranks are known."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._groups: dict[int, tuple[int, Group]] = {}
        """By communicator: how many of its ranks were known, and the group as it was then."""

    def forget(self, communicators: Iterable[int]) -> None:
        """Names, ranks, limits or the use of these communicators changed."""
        for index in communicators:
            self._groups.pop(index, None)

    def group_of(self, communicator: Communicator) -> Group:
        """A communicator as detectors see it."""
        amount, known = len(communicator.members or {}), self._groups.get(communicator.index)
        if known is None or known[0] != amount:
            known = self._groups[communicator.index] = (amount, group_from_communicator(self._store, communicator))
        return known[1]

    def without_ended(self, context: Context) -> Context:
        """The same job without communicators that ended: nothing more is expected of them."""
        ended = {member.index for member in self._store.members if not member.is_alive}
        if not ended:
            return context
        communicators = self._store.communicators
        living = {
            index: group
            for index, group in context.groups.items()
            if ended.isdisjoint((communicators[index].members or {}).values())
        }
        return replace(context, groups=living)


def group_from_communicator(store: Store, communicator: Communicator) -> Group:
    """A communicator as detectors see it now."""
    ranks = [NO_NUMBER] * communicator.size
    hosts = [""] * communicator.size
    seats: defaultdict[tuple[str, int], set[int]] = defaultdict(set[int])
    for rank, index in (communicator.members or {}).items():
        if 0 <= rank < communicator.size:
            member = store.members[index]
            ranks[rank] = NO_NUMBER if member.global_rank is None else member.global_rank
            hosts[rank] = store.processes[member.process].host
            if member.bus_id is not None and member.global_rank is not None:
                seats[hosts[rank], member.bus_id].add(member.global_rank)
    bottleneck = communicator.bottleneck
    return Group(
        comm_id=communicator.comm_id,
        parallelism=communicator.parallelism,
        group_name=communicator.name,
        global_ranks=tuple(ranks),
        hosts=tuple(hosts),
        limit=None if bottleneck is None else bottleneck.bytes_per_second,
        limit_name="" if bottleneck is None else bottleneck.told,
        shared_gpus=tuple(SharedGpu(*seat, tuple(sorted(own))) for seat, own in seats.items() if len(own) > 1),
    )


_REOPENS_WITHIN_NS: Final = 60_000_000_000
"""A fault that comes back within a minute is the same fault."""
_CLOSED_KEPT: Final = 256

_URGENCY: Final = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
_PLACE_OF_KIND: Final = {kind: place for place, kind in enumerate(FindingKind)}


class Ledger:
    """Findings of one detector by key; a key is one fault (a rank, a set of hosts, a communicator)."""

    def __init__(self) -> None:
        self._open: dict[Hashable, Finding] = {}
        self._closed: dict[Hashable, Finding] = {}
        self._history: list[Finding] = []

    def is_open(self, key: Hashable) -> bool:
        """Whether this fault is open."""
        return key in self._open

    def open_finding(self, key: Hashable) -> Finding | None:
        """The last finding of this fault; None if it is not open."""
        return self._open.get(key)

    def open_keys(self) -> tuple[Hashable, ...]:
        """The faults that are open, oldest first."""
        return tuple(self._open)

    def update(self, key: Hashable, finding: Finding, *, keeps_since: bool = True) -> None:
        """Opens a fault, or updates an open one, which keeps its first `since_ns` unless `keeps_since` is false, and
        the gravest severity that it had: one that swings about a bound would page again and again.
        """
        known = self._open.get(key)
        if known is None:
            known = self._reopened(key, finding)
        if known is not None and keeps_since:
            finding = replace(finding, since_ns=min(known.since_ns, finding.since_ns))
        if known is not None and _URGENCY[known.severity] < _URGENCY[finding.severity]:
            finding = replace(finding, severity=known.severity)
        self._open[key] = replace(finding, until_ns=None)

    def close(self, key: Hashable, until_ns: int) -> None:
        """Closes a fault; nothing happens if it is not open."""
        finding = self._open.pop(key, None)
        if finding is None:
            return
        previous = self._closed.pop(key, None)
        if previous is not None:
            self._history.append(previous)
        self._closed[key] = replace(finding, until_ns=max(until_ns, finding.since_ns))
        while len(self._closed) > _CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]
        del self._history[: max(0, len(self._history) - _CLOSED_KEPT)]

    def renew(self, current: Mapping[Hashable, Finding], until_ns: int) -> None:
        """Opens or updates these faults, and closes all others."""
        for key, finding in current.items():
            self.update(key, finding)
        for key in self.open_keys():
            if key not in current:
                self.close(key, until_ns)

    def withdraw(self, key: Hashable) -> None:
        """Drops an open fault of which more is known now: another one says it better."""
        self._open.pop(key, None)

    def findings(self) -> list[Finding]:
        """All of them, open and closed, in the order of `by_urgency`."""
        return by_urgency([*self._open.values(), *self._closed.values(), *self._history])

    def _reopened(self, key: Hashable, finding: Finding) -> Finding | None:
        previous = self._closed.get(key)
        if previous is None or previous.until_ns is None:
            return None
        if finding.since_ns - previous.until_ns > _REOPENS_WITHIN_NS:
            return None
        return self._closed.pop(key)


INNER: Final = frozenset({"TP", "CP", "EP"})
"""Groups in which lateness arises rather than being passed on to them."""


def spans_stages(parallelism: str | None, *, has_pipeline: bool) -> bool:
    """Whether such groups are of ranks of several pipeline stages, one of which is the last to come by design."""
    return parallelism in {"PP", "EMBEDDING"} or (has_pipeline and parallelism in {"WORLD", None})


_LEADS: Final = (FindingKind.SLOW_LINK, FindingKind.BANDWIDTH_DROP, FindingKind.BELOW_LIMIT)
"""Findings about wires, the strongest explanation first."""


def without_explained(findings: Iterable[Finding], groups: Mapping[str, Group]) -> list[Finding]:
    """One finding for one fault of wires: of those about the same wires at the same time the strongest leads, and has
    the others in its evidence (`explains`: the kind and the group of each). `groups`: by `comm_id`.

    A slow link explains what is slow in groups that all use its host; another finding what is slow in groups over just
    the same hosts. Groups between hosts and groups within one use different wires. Who waits for a slow link comes late
    to what follows: it explains a rank that is late since then in groups to which lateness is passed on.
    """
    leading: list[Finding] = []
    explained: dict[int, list[str]] = {}
    for finding in sorted(findings, key=_strength):
        wires = _hosts_of_groups(finding, groups)
        leader = next((at for at, lead in enumerate(leading) if _explains(lead, finding, wires, groups)), None)
        if leader is None:
            leading.append(finding)
        else:
            explained.setdefault(leader, []).extend(f"{finding.kind} {each}" for each in groups_of(finding))
    return [
        replace(lead, evidence={**lead.evidence, "explains": explained[at]}) if at in explained else lead
        for at, lead in enumerate(leading)
    ]


def _strength(finding: Finding) -> tuple[int, bool, float, int]:
    loss = finding.evidence.get("loss_ratio")
    kind = _LEADS.index(finding.kind) if finding.kind in _LEADS else len(_LEADS)
    return kind, finding.until_ns is not None, -loss if isinstance(loss, float) else 0.0, finding.since_ns


def groups_of(finding: Finding) -> list[str]:
    """The communicators (`comm_id`) that the evidence of a finding about wires names."""
    named = finding.evidence.get("slow_groups", finding.evidence.get("groups"))
    return [str(each) for each in named] if isinstance(named, list) else []


def _hosts_of_groups(finding: Finding, groups: Mapping[str, Group]) -> list[frozenset[str]]:
    return [groups[each].host_set() for each in groups_of(finding) if each in groups]


def _explains(lead: Finding, finding: Finding, wires: list[frozenset[str]], groups: Mapping[str, Group]) -> bool:
    own = _hosts_of_groups(lead, groups)
    is_then = (lead.until_ns is None or finding.since_ns <= lead.until_ns) and (
        finding.until_ns is None or lead.since_ns <= finding.until_ns
    )
    if finding.kind is FindingKind.LATE_RANK and lead.kind is FindingKind.SLOW_LINK:
        is_passed_on = finding.parallelism not in INNER and finding.severity is not Severity.CRITICAL
        return is_then and is_passed_on and lead.since_ns <= finding.since_ns
    if not own or not wires or not {lead.kind, finding.kind} <= set(_LEADS):
        return False
    if not is_then or {len(each) > 1 for each in own} != {len(each) > 1 for each in wires}:
        return False
    if lead.kind is FindingKind.SLOW_LINK:
        return finding.kind is not FindingKind.SLOW_LINK and all(each & set(lead.hosts) for each in wires)
    return frozenset[str]().union(*own) == frozenset[str]().union(*wires)


def by_urgency(findings: Iterable[Finding]) -> list[Finding]:
    """Open before closed, then by severity, by urgency of the kind, by confidence and by age."""
    return sorted(
        findings,
        key=lambda finding: (
            finding.until_ns is not None,
            _URGENCY[finding.severity],
            _PLACE_OF_KIND[finding.kind],
            -finding.confidence,
            finding.since_ns,
            finding.ranks,
        ),
    )


def names_of_ranks(ranks: Iterable[int]) -> str:
    """ "rank 5", "ranks 5 and 7", "ranks 5, 6, 7 and 12 more"."""
    return _names("rank", "ranks", [str(rank) for rank in ranks])


def names_with_hosts(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """ "rank 5 (node2)"; more than three hosts are left out."""
    return names_of_ranks(ranks) + (f" ({', '.join(hosts)})" if 0 < len(hosts) <= 3 else "")


def names_of_hosts(hosts: Iterable[str]) -> str:
    """ "host node2", "hosts node2 and node3"."""
    return _names("host", "hosts", list(hosts))


def _names(one: str, many: str, names: list[str]) -> str:
    if len(names) == 1:
        return f"{one} {names[0]}"
    if len(names) > 4:
        return f"{many} {', '.join(names[:3])} and {len(names) - 3} more"
    return f"{many} {', '.join(names[:-1])} and {names[-1]}" if names else f"no {one}"


def name_of_groups(names: Sequence[str], parallelism: str | None) -> str:
    """ "TP group tp-1", "3 TP groups"."""
    if len(names) == 1:
        return names[0]
    return f"{len(names)} {parallelism} groups" if parallelism else f"{len(names)} communicators"


def duration_text(duration_ns: float) -> str:
    """A duration for a sentence: "2.0 ms"."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(duration_ns) >= size:
            return f"{duration_ns / size:.1f} {unit}"
    return f"{duration_ns:.0f} ns"
