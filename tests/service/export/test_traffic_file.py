"""traffic.parquet, its sums by node, and what the report draws of both."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from service.export.small_run import Builder, logs_only_run, small_run

from ncclscope_service.export.directory import write_run
from ncclscope_service.export.report.data import traffic_map
from ncclscope_service.export.report.iterations import per_iteration
from ncclscope_service.export.report.timeline import on_off, placed_kernels, timeline
from ncclscope_service.export.selection import select
from ncclscope_service.export.summary import summary_document
from ncclscope_service.export.tables import schema, traffic_file
from ncclscope_service.export.tables.traffic_file import measure_traffic
from ncclscope_service.store.tables import Store
from ncclscope_wire.records import SourceKind

ALL_REDUCES, SENDS = 6 << 21, 1 << 20
"""Bytes of each pair of the small run: six AllReduces of two ranks, of which each sends S, and one Send."""


def test_each_pair_of_the_small_run_sends_what_its_operations_say(tmp_path: Path) -> None:
    table = pq.read_table(write_run(small_run(), tmp_path)["traffic.parquet"])
    assert table.schema.names == schema.TRAFFIC.names
    found = {(row["from_rank"], row["to_rank"], row["op"], row["parallelism"]): row for row in table.to_pylist()}
    pairs = [(0, 1, "TP"), (1, 0, "TP"), (2, 3, "TP"), (3, 2, "TP"), (0, 2, "DP"), (2, 0, "DP")]
    all_reduces = {(a, b, "AllReduce", kind): ALL_REDUCES for a, b, kind in pairs}
    sends = {(0, 2, "Send", "DP"): SENDS, (2, 0, "Send", "DP"): SENDS}
    assert {key: row["bytes"] for key, row in found.items()} == all_reduces | sends
    assert {row["assumed_bytes"] for row in found.values()} == {0}
    send = found[0, 2, "Send", "DP"]
    assert (send["from_host"], send["to_host"], send["through"]) == ("node1", "node2", None)


def test_the_summary_has_it_node_by_node() -> None:
    document = summary_document(select(small_run()))["traffic"]
    assert isinstance(document, dict)
    assert document["bytes"] == 6 * ALL_REDUCES + 2 * SENDS
    amounts = {(row["from"], row["to"]): row["bytes"] for row in document["by_node"]}
    inside, across = 2 * ALL_REDUCES, ALL_REDUCES + SENDS
    assert amounts == {
        ("node1", "node1"): inside,
        ("node2", "node2"): inside,
        ("node1", "node2"): across,
        ("node2", "node1"): across,
    }


def test_beyond_the_limit_rows_are_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    by_rank = measure_traffic(select(small_run()))
    monkeypatch.setattr(traffic_file, "MAX_RANKS", 3)
    by_node = measure_traffic(select(small_run()))
    assert by_rank.is_by_rank
    assert not by_node.is_by_rank
    assert {row.sender.rank for row in by_node.rows} == {None}
    assert traffic_file.traffic_by_node(by_node) == traffic_file.traffic_by_node(by_rank)


def test_without_an_algorithm_all_of_an_all_reduce_is_assumed() -> None:
    document = summary_document(select(logs_only_run(with_stamps=False)))["traffic"]
    assert isinstance(document, dict)
    assert document["bytes"] == document["assumed_bytes"] == 2 * 3 << 21


def test_a_receiver_that_never_spoke_gets_no_row_but_is_counted() -> None:
    build = Builder()
    log = build.source("rank.log", SourceKind.NCCL_LOG)
    build.communicator("0xa1", 4, None)
    process = build.process("node1", 10)
    member = build.member(0, process, 0, 0, 0)
    build.operation(build.operation_template(process, "AllReduce"), member, source=log, message_bytes=1 << 20)
    traffic = measure_traffic(select(build.store))
    assert (traffic.rows, traffic.unplaced_calls) == ((), 1)


def test_the_map_has_a_row_and_a_column_for_each_rank_and_null_where_nothing_was_sent() -> None:
    found = traffic_map(measure_traffic(select(small_run())))
    assert found is not None
    assert found["senders"] == found["receivers"] == ["0", "1", "2", "3"]
    across = ALL_REDUCES + SENDS
    assert found["bytes"] == [
        [None, ALL_REDUCES, across, None],
        [ALL_REDUCES, None, None, None],
        [across, None, None, ALL_REDUCES],
        [None, None, ALL_REDUCES, None],
    ]


def test_what_is_not_recorded_has_no_figure() -> None:
    for store in (logs_only_run(with_stamps=True), Store()):
        selection = select(store)
        kernels = placed_kernels(selection)
        assert on_off(selection, kernels) is timeline(selection, kernels) is per_iteration(selection) is None
    assert traffic_map(measure_traffic(select(Store()))) is None


def test_the_share_of_time_with_kernels_adds_up_to_their_time() -> None:
    selection = select(small_run())
    found = on_off(selection, placed_kernels(selection))
    assert found is not None
    assert found["ranks"] == ["0", "1", "2", "3"]
    width = found["seconds_per_bin"]
    assert isinstance(width, float)
    running = [sum(share or 0 for share in row) * width * 1e3 for row in found["share"]]  # type: ignore[attr-defined]
    # rank 1: six AllReduces of 0.5 ms; rank 3 the same; a figure holds three digits of each share
    assert running[1] == pytest.approx(3.0, rel=0.02)
    assert running[3] == pytest.approx(3.0, rel=0.02)


def test_iterations_sum_to_the_operations_that_lie_in_one() -> None:
    found = per_iteration(select(small_run()))
    assert found is not None
    assert found["ops"] == {"AllReduce": {"operations": [12, 12, 12], "bytes": [12 << 21] * 3}}
    assert found["without"] == 10


def test_the_timeline_tells_waiting_from_transfer_where_it_is_known() -> None:
    selection = select(small_run())
    found = timeline(selection, placed_kernels(selection))
    assert found is not None
    assert found["iterations"] == [0, 1]
    bars = found["ops"]["AllReduce"]  # type: ignore[index]
    assert sorted(set(bars["wait"])) == [0.0, 0.3]
    assert all(length - wait == pytest.approx(0.5) for length, wait in zip(bars["length"], bars["wait"], strict=True))
