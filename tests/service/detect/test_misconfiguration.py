"""Settings that differ between ranks, and those that switch off what makes NCCL fast."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ncclscope_service.detect.context import Context, Group, SharedGpu
from ncclscope_service.detect.misconfiguration import Misconfiguration, WorldOfProcess
from ncclscope_service.detect.reported import LoggedFact, ProcessKey
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_wire.facts import EnvironmentSetting, Fact, GpuDirect, PluginSeen

_PROCESSES: tuple[ProcessKey, ...] = (("node01", 10), ("node01", 11), ("node02", 20), ("node02", 21))
_WORLD: dict[ProcessKey, WorldOfProcess] = {process: WorldOfProcess(0, rank) for rank, process in enumerate(_PROCESSES)}
_TWO_JOBS: dict[ProcessKey, WorldOfProcess] = {
    process: WorldOfProcess(rank // 2, rank) for rank, process in enumerate(_PROCESSES)
}


def variable(process: ProcessKey, name: str, value: str) -> LoggedFact:
    host, pid = process
    return said(EnvironmentSetting(line=1, host=host, pid=pid, variable=name, value=value))


def said(fact: Fact) -> LoggedFact:
    return LoggedFact(fact, "log", None, 5)


def findings(
    logged: list[LoggedFact],
    worlds: Mapping[ProcessKey, WorldOfProcess] = _WORLD,
    versions: Mapping[ProcessKey, str] | None = None,
) -> list[Finding]:
    detector = Misconfiguration()
    detector.ingest_facts(logged)
    detector.ingest_versions(versions or {}, 7)
    if detector.is_due(len(worlds), Context(job="job")):
        detector.compare(worlds, Context(job="job"), 9)
    return detector.findings()


def on_all(name: str, values: list[str]) -> list[LoggedFact]:
    return [variable(process, name, value) for process, value in zip(_PROCESSES, values, strict=True)]


def test_one_rank_with_another_value_is_named() -> None:
    (found,) = findings(on_all("NCCL_ALGO", ["Ring", "Ring", "Ring", "Tree"]))
    assert (found.kind, found.severity) == (FindingKind.MISCONFIGURATION, Severity.WARNING)
    assert (found.ranks, found.hosts, found.since_ns) == ((3,), ("node02",), 5)
    assert "Ring in 3, Tree in 1" in found.summary


def test_half_and_half_names_nobody() -> None:
    (found,) = findings(on_all("NCCL_PROTO", ["LL", "LL", "Simple", "Simple"]))
    assert (found.ranks, found.hosts) == ((), ())


@pytest.mark.parametrize(
    "values", [["1", "1", "1", "1"], ["1", "1", "1", None]], ids=["equal", "one says nothing: its line may be lost"]
)
def test_equal_settings_are_no_finding(values: list[str | None]) -> None:
    given = [
        variable(process, "NCCL_CROSS_NIC", value)
        for process, value in zip(_PROCESSES, values, strict=True)
        if value is not None
    ]
    assert not findings(given)


def test_a_job_that_changes_its_environment_in_between_agrees_with_itself() -> None:
    first, second = on_all("NCCL_COLLNET_ENABLE", ["1"] * 4), on_all("NCCL_COLLNET_ENABLE", ["0"] * 4)
    assert not findings([*first, *second[:2]])


def test_names_of_files_and_interfaces_may_differ() -> None:
    assert not findings(on_all("NCCL_SOCKET_IFNAME", ["eth0", "eth0", "eth1", "eth1"]))


def test_processes_of_different_jobs_are_not_compared() -> None:
    assert not findings(on_all("NCCL_ALGO", ["Ring", "Ring", "Tree", "Tree"]), _TWO_JOBS)


def test_a_version_that_differs_is_a_finding() -> None:
    versions = dict(zip(_PROCESSES, ["2.28.3", "2.28.3", "2.28.3", "2.27.5"], strict=True))
    (found,) = findings([], versions=versions)
    assert found.ranks == (3,)
    assert "NCCL version" in found.summary


def test_a_plugin_that_one_node_lacks_is_a_finding_however_often_the_others_tried() -> None:
    tried = [said(PluginSeen(line=1, host=host, pid=pid, kind="NET", event="not_found")) for host, pid in _PROCESSES]
    loaded = [
        said(PluginSeen(line=2, host=host, pid=pid, kind="NET", event="loaded", name="AWS Libfabric"))
        for host, pid in _PROCESSES[:3]
    ]
    assert not findings(tried)
    (found,) = findings([*tried, *loaded])
    assert found.ranks == (3,)


def test_gpu_direct_that_works_on_some_nics_of_a_process_is_compared_as_that() -> None:
    def direct(process: ProcessKey, *, works: bool) -> LoggedFact:
        return said(GpuDirect(line=1, host=process[0], pid=process[1], is_enabled=works))

    mixed = [direct(process, works=works) for process in _PROCESSES for works in (True, False)]
    assert not findings(mixed)
    (found,) = findings([direct(process, works=process[0] == "node01") for process in _PROCESSES])
    assert "GPUDirect RDMA" in found.summary


def test_a_setting_that_switches_off_a_fast_path_is_information() -> None:
    (found,) = findings(on_all("NCCL_P2P_DISABLE", ["1"] * 4))
    assert (found.severity, found.hosts) == (Severity.INFO, ("node01", "node02"))


def test_sockets_in_a_job_of_one_node_cost_nothing() -> None:
    one_node: dict[ProcessKey, WorldOfProcess] = {
        process: world for process, world in _WORLD.items() if process[0] == "node01"
    }
    assert not findings([variable(process, "NCCL_IB_DISABLE", "1") for process in one_node], one_node)
    assert findings(on_all("NCCL_IB_DISABLE", ["1"] * 4))


def test_a_difference_that_later_lines_explain_is_closed() -> None:
    detector, context = Misconfiguration(), Context(job="job")
    detector.ingest_facts(on_all("NCCL_ALGO", ["Ring", "Ring", "Ring", "Tree"]))
    assert detector.is_due(4, context)
    detector.compare(_WORLD, context, 9)
    assert not detector.is_due(4, context)
    detector.ingest_facts([variable(process, "NCCL_ALGO", "Tree") for process in _PROCESSES])
    assert detector.is_due(4, context)
    detector.compare(_WORLD, context, 9)
    (found,) = detector.findings()
    assert found.until_ns is not None


def test_ranks_on_one_gpu_are_one_finding_however_many_groups_they_are_in() -> None:
    def group(*ranks: int) -> Group:
        shared = (SharedGpu("node01", 0x60, ranks),)
        return Group(comm_id="a", parallelism=None, global_ranks=ranks, hosts=("node01",) * 2, shared_gpus=shared)

    detector, context = Misconfiguration(), Context(job="job", groups={0: group(0, 1), 1: group(1, 2)})
    assert detector.is_due(3, context)
    detector.compare({}, context, 9)
    assert not detector.is_due(3, context)
    (found,) = detector.findings()
    assert (found.ranks, found.hosts, found.since_ns) == ((0, 1, 2), ("node01",), 9)
    assert found.summary.startswith("ranks 0, 1 and 2 run on one GPU of host node01 (PCI address 60)")
