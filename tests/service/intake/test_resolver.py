"""What sources say in their own dictionaries becomes rows that all sources share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from service.log_batches import Kernel, Line, Mark, Tuning, export_batch, init, log_batch

from ncclscope_service.intake.resolver import BatchResolver
from ncclscope_service.store.records import Process
from ncclscope_service.store.rows import empty_operations
from ncclscope_service.store.tables import Store
from ncclscope_wire import tables
from ncclscope_wire.batch import no_rows
from ncclscope_wire.facts import NetworkDevices
from ncclscope_wire.records import Counts, SourceGap, VersionSeen
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS


class _Service:
    def __init__(self) -> None:
        self.store = Store()
        self.intake = BatchResolver(self.store)


def test_equal_templates_of_two_sources_share_one() -> None:
    service = _Service()
    log = log_batch([Line(line=1), Line(line=2, count=7)])
    other = replace(log, source=replace(log.source, key="another file"))
    first = service.intake.resolve_batch(log, agent="a", session="s", job="j")
    second = service.intake.resolve_batch(other, agent="a", session="s", job="j")
    assert first.operations["template"].tolist() == second.operations["template"].tolist() == [0, 1]
    assert len(service.store.operation_templates) == 2
    assert (first.source, second.source) == (0, 1)


def test_templates_that_differ_in_their_process_alone_are_not_shared() -> None:
    service = _Service()
    first = service.intake.resolve_batch(log_batch([Line(line=1)], pid=10), agent="a", session="s", job="j")
    second = service.intake.resolve_batch(log_batch([Line(line=1)], pid=11), agent="a", session="s", job="j")
    assert first.operations["template"].tolist() != second.operations["template"].tolist()


def test_rows_point_at_entries_of_earlier_batches_of_the_session() -> None:
    service = _Service()
    log = log_batch([Line(line=1), Line(line=2, count=7)])
    service.intake.resolve_batch(log, agent="a", session="s", job="j")
    operations = np.array([(1, 3, 5, NO_TIME_NS)], tables.OPERATION_ROW)
    later = replace(
        log, begin=100, end=200, strings=(), threads=no_rows(tables.THREAD),
        operation_templates=no_rows(tables.OPERATION_TEMPLATE), operations=operations,
    )  # fmt: skip
    arrived = service.intake.resolve_batch(later, agent="a", session="s", job="j")
    assert arrived.operations["template"].tolist() == [1]
    assert service.store.templates_of(arrived.operations)["count"].tolist() == [7]
    assert service.store.sources[0].position == 200


def test_a_new_session_starts_the_dictionaries_of_its_source_anew() -> None:
    service = _Service()
    service.intake.resolve_batch(log_batch([Line(line=1, count=5)]), agent="a", session="one", job="j")
    again = service.intake.resolve_batch(log_batch([Line(line=2, count=9)]), agent="a", session="two", job="j")
    assert service.store.templates_of(again.operations)["count"].tolist() == [9]
    assert len(service.store.sources) == 1


def test_after_the_last_batch_of_a_source_its_dictionaries_start_anew() -> None:
    service = _Service()
    whole = replace(log_batch([Line(line=1, count=5)]), is_last=True)
    service.intake.resolve_batch(whole, agent="a", session="s", job="j")
    assert service.store.sources[0].is_complete
    again = service.intake.resolve_batch(log_batch([Line(line=1, count=9)]), agent="a", session="s", job="j")
    assert service.store.templates_of(again.operations)["count"].tolist() == [9]


def test_one_key_of_two_agents_is_two_sources() -> None:
    service = _Service()
    for agent in ("a", "b"):
        service.intake.resolve_batch(log_batch([Line(line=1)]), agent=agent, session="s", job="j")
    assert [state.agent for state in service.store.sources] == ["a", "b"]


def test_kernels_get_the_process_of_their_host_and_pid_and_job() -> None:
    service = _Service()
    log = log_batch([Line(line=1)], host="node2", pid=12)
    service.intake.resolve_batch(log, agent="a", session="s", job="j")
    own = service.intake.resolve_batch(
        export_batch([Kernel(start_ns=1, end_ns=2)], host="node2", pid=12), agent="b", session="t", job="j"
    )
    foreign = service.intake.resolve_batch(
        export_batch([Kernel(start_ns=1, end_ns=2)], host="node2", pid=12), agent="c", session="u", job="other"
    )
    assert own.kernels["process"].tolist() == [0]
    assert foreign.kernels["process"].tolist() == [1]
    assert service.store.processes == [Process(host="node2", pid=12)] * 2
    assert service.store.process_job == ["j", "other"]


def test_a_kernel_that_the_capture_cut_is_marked_and_has_no_launch_yet() -> None:
    service = _Service()
    arrived = service.intake.resolve_batch(
        export_batch([Kernel(start_ns=1, end_ns=2), Kernel(start_ns=3, end_ns=4, censored=True)]),
        agent="a",
        session="s",
        job="j",
    )
    assert arrived.kernels["censored"].tolist() == [False, True]
    assert arrived.kernels["launch"].tolist() == arrived.kernels["replay"].tolist() == [NO_NUMBER, NO_NUMBER]
    assert arrived.kernels["launch_start_ns"].tolist() == [NO_TIME_NS, NO_TIME_NS]
    names = service.store.kernel_templates_of(arrived.kernels)["name"].tolist()
    assert {service.store.strings[name] for name in names} == {"ncclDevKernel_AllReduce_Sum_f32_RING_LL"}


def test_events_and_tunings_come_with_their_process() -> None:
    service = _Service()
    log = log_batch(
        [Line(line=2, tid=21)], host="node3", pid=5, events=[init(line=1, host="node3", pid=5)],
        tunings=[Tuning(line=3, bytes=64, tid=21)],
    )  # fmt: skip
    arrived = service.intake.resolve_batch(log, agent="a", session="s", job="j")
    assert arrived.event_processes == (0,)
    assert arrived.tunings[["process", "tid", "line", "bytes"]].tolist() == [(0, 21, 3, 64)]


def test_operations_say_when_their_bytes_were_seen() -> None:
    service = _Service()
    live = replace(log_batch([Line(line=1)]), observed_at_ns=77)
    arrived = service.intake.resolve_batch(live, agent="a", session="s", job="j")
    assert arrived.operations["observed_at_ns"].tolist() == [77]
    offline = service.intake.resolve_batch(log_batch([Line(line=2)]), agent="a", session="t", job="j")
    assert offline.operations["observed_at_ns"].tolist() == [NO_TIME_NS]


def test_ranges_and_busy_stretches_go_to_the_store_with_their_process() -> None:
    service = _Service()
    busy = np.array([(0, 10, 0, 5, 9, 3), (0, 11, 1, 6, 8, 1)], tables.BUSY_ROW)
    export = replace(export_batch([], marks=[Mark(text="iteration 3", start_ns=4, end_ns=40)]), busy=busy)
    service.intake.resolve_batch(export, agent="a", session="s", job="j")
    assert service.store.ranges.rows[["process", "start_ns", "end_ns"]].tolist() == [(0, 4, 40)]
    assert service.store.strings[int(service.store.ranges.rows["text"][0])] == "iteration 3"
    assert service.store.busy.rows.copy().tolist() == [(0, 0, 5, 9, 3), (1, 1, 6, 8, 1)]
    assert [process.pid for process in service.store.processes] == [10, 11]


def test_counts_gaps_and_versions_go_to_the_store() -> None:
    service = _Service()
    gap = SourceGap(reason="truncated", amount=5, unit="bytes")
    log = replace(
        log_batch([Line(line=1)]),
        counts=Counts(understood={"operation": 1}, skipped={"torn": 2, "not_nccl": 4}),
        gaps=(gap,),
        versions=(
            VersionSeen(version="2.21.5", cuda=None, line=1),
            VersionSeen(version="2.28.3", cuda=None, line=2, host="node1", pid=10),
        ),
    )
    for session in ("one", "two"):
        service.intake.resolve_batch(log, agent="a", session=session, job="j")
    store = service.store
    assert store.understood["operation"] == 2
    assert (store.skipped["torn"], store.torn_lines[0], store.skipped["not_nccl"]) == (4, 4, 8)
    assert list(store.gaps[0]) == [gap, gap]
    assert store.process_version == {0: "2.28.3"}
    assert store.source_versions[0] == store.job_versions["j"] == {"2.21.5", "2.28.3"}
    assert store.process_source == {0: 0}


def test_nothing_is_known_of_an_empty_row() -> None:
    (row,) = empty_operations(1)
    assert {int(row[name]) for name in ("start_ns", "end_true_ns", "wait_ns", "logged_at_ns")} == {NO_TIME_NS}
    assert {int(row[name]) for name in ("member", "iteration", "kernel", "algorithm")} == {NO_NUMBER}
    assert np.isnan([row["busbw"], row["limit"]]).all()
    assert not row["finished"]


def test_network_cards_of_a_node_are_those_that_any_of_its_processes_may_use() -> None:
    service = _Service()
    for pid, devices in ((1, ("mlx5_0:1", "mlx5_1:1")), (2, ("mlx5_1:1", "mlx5_2:1")), (3, ("mlx5_0:1",))):
        fact = NetworkDevices(line=1, host="n1" if pid < 3 else "n2", pid=pid, network="IB", devices=devices)
        batch = replace(log_batch([Line(line=1)], pid=pid), facts=(fact,))
        batch = replace(batch, source=replace(batch.source, key=f"file {pid}"))
        service.intake.resolve_batch(batch, agent="a", session="s", job="j")
    assert service.store.network_devices == {
        ("j", "n1"): {"mlx5_0:1", "mlx5_1:1", "mlx5_2:1"},
        ("j", "n2"): {"mlx5_0:1"},
    }
    assert {process.host for process in service.store.processes} == {"node1"}, "it is no sign of a process"


def test_network_cards_of_a_node_are_bounded() -> None:
    service = _Service()
    for first in (0, 40):
        names = tuple(f"veth{at}" for at in range(first, first + 40))
        fact = NetworkDevices(line=1, host="n1", pid=1, network="Socket", devices=names)
        batch = replace(log_batch([]), facts=(fact,), begin=first, end=first + 40)
        service.intake.resolve_batch(batch, agent="a", session=f"s{first}", job="j")
    assert len(service.store.network_devices["j", "n1"]) == 64
