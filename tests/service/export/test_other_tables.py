"""kernels, communicators and efficiency: columns, nulls and numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from service.export.small_run import MS, NODE2_AHEAD_NS, START_NS, logs_only_run, small_run

from ncclscope_service.export.directory import write_run
from ncclscope_service.export.selection import Selection, select
from ncclscope_service.export.tables import schema
from ncclscope_service.export.tables.communicators_file import write_communicators
from ncclscope_service.export.tables.iterations_file import write_efficiency
from ncclscope_service.export.tables.kernels_file import launch_plans, write_kernels
from ncclscope_service.export.tables.operations_file import last_operations_of
from ncclscope_service.store import rows
from ncclscope_service.store.records import Ending, FailureLine, HostClock, JobClocks, Verdict
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

Row = dict[str, object]
Write = Callable[[Selection, Path], None]


def written(write: Write, store: Store, folder: Path) -> list[Row]:
    write(select(store), folder / "t.parquet")
    found: list[Row] = pq.read_table(folder / "t.parquet").to_pylist()
    return found


@pytest.mark.parametrize("make", [small_run, Store])
@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (write_kernels, schema.KERNELS.names),
        (write_communicators, schema.COMMUNICATORS.names),
        (write_efficiency, schema.EFFICIENCY.names),
    ],
)
def test_the_columns_are_the_schemas_with_rows_and_without(
    write: Write, expected: list[str], make: Callable[[], Store], tmp_path: Path
) -> None:
    write(select(make()), tmp_path / "t.parquet")
    assert pq.read_table(tmp_path / "t.parquet").schema.names == expected


def test_kernel_columns_are_those_of_the_contract() -> None:
    contract = """host pid kernel_file correlation_id device_id stream_id library name op grid_x block_x
    static_shared_bytes dynamic_shared_bytes registers launch_start_ns launch_end_ns launch_tid start_ns end_ns
    start_true_ns end_true_ns censored launch_id plan replay wait_ns transfer_ns busbw_bytes_per_second ranks_seen"""
    assert schema.KERNELS.names == contract.split()


def test_a_kernel_without_an_operation_keeps_its_row_and_has_no_launch(tmp_path: Path) -> None:
    found = written(write_kernels, small_run(), tmp_path)
    assert len(found) == 40
    alone = [row for row in found if row["launch_id"] is None]
    assert [(row["start_ns"], row["plan"], row["replay"]) for row in alone] == [(START_NS + 30 * MS, None, None)]
    assert alone[0]["dynamic_shared_bytes"] is None
    assert {row["op"] for row in found} == {"AllReduce", "SendRecv"}


def test_reference_times_follow_the_published_formula(tmp_path: Path) -> None:
    store = small_run()
    clock = HostClock(
        offset_ns=1e6,
        drift_ppm=50.0,
        at_ns=START_NS,
        sigma_ns=1.0,
        interval_lo_ns=None,
        interval_hi_ns=None,
        samples=3,
    )
    store.clocks["job"] = JobClocks(hosts={"node2": clock})
    found = written(write_kernels, store, tmp_path)
    for row in found:
        start = row["start_ns"]
        assert isinstance(start, int)
        expected = start - 1_000_000 - round(50e-6 * (start - START_NS)) if row["host"] == "node2" else None
        assert row["start_true_ns"] == expected


def test_kernels_of_one_launch_and_replay_are_counted_as_plans() -> None:
    kernels = np.zeros(6, dtype=rows.KERNEL)
    kernels["launch"] = [5, 5, NO_NUMBER, 5, 2, 5]
    kernels["replay"] = [0, 0, NO_NUMBER, 1, 0, 1]
    kernels["start_ns"] = [20, 10, 0, 40, 5, 30]
    assert launch_plans(kernels).tolist() == [1, 0, NO_NUMBER, 1, 0, 0]


def test_a_communicator_lists_its_ranks_in_its_own_order(tmp_path: Path) -> None:
    found = {row["comm_id"]: row for row in written(write_communicators, small_run(), tmp_path)}
    assert found["0xd0"]["ranks"] == [0, 2]
    assert found["0xd0"]["hosts"] == ["node1", "node2"]
    assert found["0xa1"]["hosts"] == ["node1"]
    assert found["0xa2"]["operations"] == 12
    assert found["0xa2"]["bytes"] == 12 << 21
    assert found["0xa2"]["first_ns"] == START_NS + 2 * MS + 10_000
    assert found["0xa1"]["limits"] == {"topology": 12.5e9, "nccl_model": None, "baseline": 5e9}


def test_last_operations_say_where_each_rank_stood_and_how_far_behind(tmp_path: Path) -> None:
    table = pq.read_table(write_run(small_run(), tmp_path)["last_operations.parquet"])
    assert table.schema.names == schema.LAST_OPERATIONS.names
    shown = ("collective_id", "sender", "receiver", "comm_rank", "rank", "host", "operations", "behind", "op")
    assert [tuple(row[name] for name in shown) for row in table.to_pylist()] == [
        ("0xa1:9", None, None, 0, 0, "node1", 10, 0, "AllReduce"),
        ("0xa1:5", None, None, 1, 1, "node1", 6, 4, "AllReduce"),
        ("0xa2:5", None, None, 0, 2, "node2", 6, 0, "AllReduce"),
        ("0xa2:5", None, None, 1, 3, "node2", 6, 0, "AllReduce"),
        ("0xd0:5", None, None, 0, 0, "node1", 6, 0, "AllReduce"),
        ("0xd0:5", None, None, 1, 2, "node2", 6, 0, "AllReduce"),
        ("0xd0:0>1:0", 0, 1, 0, 0, "node1", 1, 0, "Send"),
        ("0xd0:0>1:0", 0, 1, 1, 2, "node2", 1, 0, "Recv"),
        ("0xd0:1>0:0", 1, 0, 0, 0, "node1", 1, 0, "Recv"),
        ("0xd0:1>0:0", 1, 0, 1, 2, "node2", 1, 0, "Send"),
    ]


def test_of_groups_that_stand_unevenly_the_one_furthest_behind_comes_first() -> None:
    store = small_run()
    member = next(each for each in store.members if (each.communicator, each.rank) == (1, 1))
    own = np.flatnonzero(store.operations.rows["member"] == member.index)
    store.operations.rows.put("coll_seq", own, np.zeros(len(own), np.int64))
    uneven = last_operations_of(select(store)).uneven
    assert [(row["comm_id"], row["comm_rank"], row["behind"]) for row in uneven] == [
        ("0xa2", 1, 5),
        ("0xa2", 0, 0),
        ("0xa1", 1, 4),
        ("0xa1", 0, 0),
    ]


def test_last_operations_say_what_each_rank_waits_for_at_whom_waits_end_and_its_last_words() -> None:
    store = small_run()
    words = FailureLine(rank=1, host="node1", text="RuntimeError: bad", at_ns=None, where="out.log:7")
    store.verdicts["job"] = Verdict(
        job="job", ending=Ending.CRASHED, is_provisional=False, summary="it crashed", last_words=(words,)
    )
    last = last_operations_of(select(store))
    columns = ("comm_id", "rank", "stopped_at", "waits_for", "blamed", "last_words")
    assert [tuple(row[name] for name in columns) for row in last.uneven] == [
        ("0xa1", 1, "0xa1:6", None, None, "RuntimeError: bad"),
        ("0xa1", 0, "0xa1:6", [1], [1], None),
    ]
    dp = [row for row in last.table.to_pylist() if row["comm_id"] == "0xd0" and row["rank"] == 0]
    assert {(row["stopped_at"], row["waits_for"], row["last_words"]) for row in dp} == {(None, None, None)}
    assert {tuple(row["blamed"]) for row in dp} == {(1,)}, "it waits elsewhere"


def test_last_operations_say_what_is_known_to_have_finished() -> None:
    store = small_run()
    member = next(each for each in store.members if (each.communicator, each.rank) == (1, 0))
    own = np.flatnonzero(store.operations.rows["member"] == member.index)
    late = own[store.operations.rows["coll_seq"][own] >= 3]
    store.operations.rows.put("end_ns", late, np.full(len(late), NO_TIME_NS))
    rows = last_operations_of(select(store)).table.to_pylist()
    assert {(row["rank"], row["operations"], row["finished"]) for row in rows if row["comm_id"] == "0xa2"} == {
        (2, 6, 3),
        (3, 6, 6),
    }
    logs = last_operations_of(select(logs_only_run(with_stamps=True))).table.to_pylist()
    assert {row["finished"] for row in logs} == {None}


@pytest.mark.parametrize("with_stamps", [True, False])
def test_last_operations_need_no_stamps_and_no_stretch_of_time(with_stamps: bool, tmp_path: Path) -> None:
    store = logs_only_run(with_stamps=with_stamps)
    table = pq.read_table(write_run(store, tmp_path, since_ns=START_NS + MS * 100)["last_operations.parquet"])
    stamp = START_NS + 2 * MS if with_stamps else None
    found = [(row["comm_rank"], row["operations"], row["logged_at_ns"]) for row in table.to_pylist()]
    assert found == [(0, 3, stamp), (1, 3, stamp)]


def test_a_rank_that_never_spoke_is_null_among_the_ranks(tmp_path: Path) -> None:
    store = small_run()
    store.communicators[2].size = 4
    [row] = [row for row in written(write_communicators, store, tmp_path) if row["comm_id"] == "0xd0"]
    assert row["ranks"] == [0, 2, None, None]


def test_efficiency_has_each_measured_collective_once_per_reference(tmp_path: Path) -> None:
    found = written(write_efficiency, small_run(), tmp_path)
    pairs = [(row["collective_id"], row["reference"]) for row in found]
    assert len(pairs) == len(set(pairs)) == 3 * 6 * 2
    busbw = (1 << 21) / 0.0005
    assert {(row["reference"], row["efficiency_ratio"]) for row in found} == {
        ("topology", busbw / 12.5e9),
        ("baseline", busbw / 5e9),
    }


def test_the_second_host_is_brought_to_the_first_ones_clock(tmp_path: Path) -> None:
    for row in written(write_kernels, small_run(), tmp_path):
        start, true = row["start_ns"], row["start_true_ns"]
        assert isinstance(start, int)
        assert true == start - (NODE2_AHEAD_NS if row["host"] == "node2" else 0)
