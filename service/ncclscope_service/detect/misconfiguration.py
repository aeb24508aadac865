"""Settings that differ between the ranks of a job, or switch off what makes NCCL fast, seen from the first step.

NCCL prints what it took from the environment, which network, plug-ins and libraries it found, and whether GPUDirect
works, in every process. What differs between processes that share a communicator is a mistake in how the job was
started or how a node was set up. A process that says nothing of a setting is not compared: its line may be lost. One
that says several values, as a job does that changes the environment between two communicators, agrees with all of them.

Which settings are slow: NCCL's user guide, environment variables (NCCL_P2P_DISABLE, NCCL_SHM_DISABLE, NCCL_IB_DISABLE).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from ncclscope_service.detect.context import Context, Ledger, SharedGpu, names_of_hosts, names_of_ranks
from ncclscope_service.detect.reported import LoggedFact, ProcessKey
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_wire import facts
from ncclscope_wire.facts import Fact

_OWN_TO_EACH: Final = ("_FILE", "_IFNAME", "_HCA", "_HOSTID", "_COMM_ID", "_PATH", "_DEBUG", "_DEBUG_SUBSYS")
"""Ends of variables that may well differ: files, names of NICs, how much is logged."""
_MOST_COMPARED: Final = 65_536
"""Values that are remembered of one job; later ones are left out."""
_VALUES_SHOWN: Final = 4
_NONE: Final = "none"

_SWITCHED_OFF: Final[Mapping[tuple[str, str], str]] = {
    ("NCCL_P2P_DISABLE", "1"): "GPUs of one node exchange data through host memory instead of NVLink or PCIe",
    ("NCCL_SHM_DISABLE", "1"): "ranks of one node that cannot use P2P talk over the network",
    ("NCCL_IB_DISABLE", "1"): "nodes talk over TCP sockets instead of InfiniBand or RoCE",
}
"""Settings by which NCCL leaves its fast path, and the effect."""
_LOADED: Final = frozenset({"loaded", "initialized", "assigned", "named"})
_NOT_LOADED: Final = frozenset({"not_found", "no_symbol", "failed"})
_BETWEEN_NODES: Final = frozenset({"NCCL_IB_DISABLE"})
"""Those that matter only to a job of several nodes."""


class _Setting(NamedTuple):
    """One thing that a process says of itself."""

    name: str
    value: str
    is_absence: bool = False
    """Nothing was found: it counts only as long as nothing else is said."""


class WorldOfProcess(NamedTuple):
    """Which processes one process can be compared with."""

    communicator: int
    """The largest communicator that it is a member of."""
    rank: int | None
    """Its global rank."""


class Misconfiguration:
    """Settings of one job."""

    def __init__(self) -> None:
        self._said: defaultdict[str, dict[ProcessKey, set[str]]] = defaultdict(dict[ProcessKey, set[str]])
        """By setting: the values that each process said."""
        self._first_ns: dict[str, int] = {}
        self._newest_ns = 0
        self._amount = 0
        self._judged_amount = self._judged_members = 0
        self._is_suspicious = False
        self._versions: dict[ProcessKey, str] = {}
        self._ledger = Ledger()

    def ingest_facts(self, logged: Iterable[LoggedFact]) -> None:
        """Takes facts as they come."""
        for one in logged:
            reader = _READERS.get(type(one.fact))
            setting = None if reader is None else reader(one.fact)
            if setting is not None and one.fact.host is not None and one.fact.pid is not None:
                self._record((one.fact.host, one.fact.pid), setting, one.at_ns)

    def ingest_versions(self, versions: Mapping[ProcessKey, str], at_ns: int) -> None:
        """NCCL version of each process that printed its own."""
        for process, version in versions.items():
            if self._versions.get(process) != version:
                self._versions[process] = version
                self._record(process, _Setting("NCCL version", version), at_ns)

    def is_due(self, members: int, context: Context) -> bool:
        """Whether `compare` may find something else than before: more was said, or more `members` are known."""
        if self._amount != self._judged_amount:
            self._judged_amount = self._amount
            self._is_suspicious = not all(_agree(said.values()) for said in self._said.values()) or any(
                name in self._said for name, _ in _SWITCHED_OFF
            )
            self._judged_members = -1
        may_find = self._is_suspicious or bool(self._ledger.open_keys()) or bool(context.shared_gpus())
        is_due = may_find and members != self._judged_members
        self._judged_members = members
        return is_due

    def compare(self, worlds: Mapping[ProcessKey, WorldOfProcess], context: Context, at_ns: int) -> None:
        """Renews the findings; only processes of one world are compared."""
        current: dict[Hashable, Finding] = {
            shared: _shared_gpu(shared, context, at_ns) for shared in context.shared_gpus()
        }
        is_of_one_node = len({host for host, _ in worlds}) < 2
        for name, said in self._said.items():
            by_world: defaultdict[int, dict[ProcessKey, set[str]]] = defaultdict(dict[ProcessKey, set[str]])
            for process, values in said.items():
                if process in worlds:
                    by_world[worlds[process].communicator][process] = values
            for world, own in by_world.items():
                if not _agree(own.values()):
                    current[name, world] = self._difference(name, own, worlds, context)
            for (variable, value), effect in _SWITCHED_OFF.items():
                users = sorted(process for process in said if process in worlds and value in said[process])
                if variable == name and users and not (variable in _BETWEEN_NODES and is_of_one_node):
                    current[name, value] = self._slow(name, value, effect, users, context)
        self._ledger.renew(current, self._newest_ns)

    def findings(self) -> list[Finding]:
        """All findings so far."""
        return self._ledger.findings()

    def _record(self, process: ProcessKey, setting: _Setting, at_ns: int) -> None:
        if self._amount >= _MOST_COMPARED:
            return
        values = self._said[setting.name].setdefault(process, set())
        if not setting.is_absence:
            values.discard(_NONE)
        elif values:
            return
        if setting.value in values:
            return
        self._amount += 1
        values.add(setting.value)
        self._newest_ns = max(self._newest_ns, at_ns)
        self._first_ns[setting.name] = min(at_ns, self._first_ns.get(setting.name, at_ns))

    def _difference(
        self,
        name: str,
        said: Mapping[ProcessKey, set[str]],
        worlds: Mapping[ProcessKey, WorldOfProcess],
        context: Context,
    ) -> Finding:
        usual, others = _odd_ones(said)
        named = others if 2 * len(others) < len(said) else []
        amounts = Counter(" and ".join(sorted(values)) for values in said.values())
        shown = ", ".join(f"{value} in {amount}" for value, amount in amounts.most_common(_VALUES_SHOWN))
        ranks = tuple(sorted({rank for each in named if (rank := worlds[each].rank) is not None}))
        hosts = tuple(sorted({host for host, _ in named}))
        where = f": look at {names_of_ranks(ranks) if ranks else names_of_hosts(hosts)}" if named else ""
        return Finding(
            kind=FindingKind.MISCONFIGURATION,
            severity=Severity.WARNING,
            job=context.job,
            ranks=ranks,
            hosts=hosts,
            since_ns=self._first_ns[name],
            confidence=0.95 if named else 0.9,
            summary=f"{name} is not the same in all processes of the job ({shown}){where}",
            evidence={
                "setting": name,
                "usual": usual,
                "processes": dict(amounts.most_common(_VALUES_SHOWN)),
                "different": [f"{host}:{pid}" for host, pid in named[:_VALUES_SHOWN]],
            },
        )

    def _slow(self, name: str, value: str, effect: str, users: list[ProcessKey], context: Context) -> Finding:
        hosts = tuple(sorted({host for host, _ in users}))
        return Finding(
            kind=FindingKind.MISCONFIGURATION,
            severity=Severity.INFO,
            job=context.job,
            hosts=hosts,
            since_ns=self._first_ns[name],
            confidence=0.9,
            summary=f"{name}={value} on {names_of_hosts(hosts)}: {effect}",
            evidence={"setting": name, "value": value, "processes": len(users)},
        )


def _shared_gpu(shared: SharedGpu, context: Context, at_ns: int) -> Finding:
    """NCCL refuses it ("Duplicate GPU detected", init.cc) unless `NCCL_HOSTID` says that hosts differ."""
    return Finding(
        kind=FindingKind.MISCONFIGURATION,
        severity=Severity.WARNING,
        job=context.job,
        ranks=shared.ranks,
        hosts=(shared.host,),
        since_ns=at_ns,
        confidence=0.95,
        summary=f"{names_of_ranks(shared.ranks)} run on one GPU of host {shared.host} (PCI address {shared.bus_id:x}): "
        "their kernels take turns, so none of them is called late",
        evidence={"bus_id": f"{shared.bus_id:x}", "processes": len(shared.ranks)},
    )


def _agree(said: Iterable[set[str]]) -> bool:
    """Whether there is a value that all of them have."""
    every = iter(said)
    common = next(every, None)
    return common is None or bool(common.intersection(*every))


def _odd_ones(said: Mapping[ProcessKey, set[str]]) -> tuple[str, list[ProcessKey]]:
    """The most frequent value, and the processes without it, in order."""
    amounts = Counter(value for values in said.values() for value in sorted(values))
    usual = min(amounts, key=lambda value: (-amounts[value], value))
    return usual, sorted(process for process, values in said.items() if usual not in values)


def _plugin(fact: facts.PluginSeen) -> _Setting | None:
    """Which one was loaded, or none: attempts that fail precede a success in healthy processes."""
    if fact.event in _LOADED:
        return _Setting(f"{fact.kind} plug-in", fact.name or fact.library or "loaded")
    return _Setting(f"{fact.kind} plug-in", _NONE, is_absence=True) if fact.event in _NOT_LOADED else None


_READERS: Final[Mapping[type[Fact], Callable[[Any], _Setting | None]]] = {
    facts.EnvironmentSetting: lambda fact: (
        None if fact.variable.endswith(_OWN_TO_EACH) else _Setting(fact.variable, fact.value)
    ),
    facts.BuildSeen: lambda fact: _Setting(f"{fact.what} version", fact.version),
    facts.NetworkChosen: lambda fact: _Setting("network", fact.network),
    facts.PluginSeen: _plugin,
    facts.GpuDirect: lambda fact: _Setting("GPUDirect RDMA", "enabled" if fact.is_enabled else "disabled"),
}
"""How each type of fact is compared; None: it says nothing that could be."""
