"""`operations.parquet` against the contract, and against a slow reading of the same store row by row."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from service.export.small_run import (
    DP0,
    NODE2_AHEAD_NS,
    SEND_RECV_NAME,
    START_NS,
    TP1,
    Builder,
    small_run,
    unknown_operation,
)

from ncclscope_service.export.selection import Part, select
from ncclscope_service.export.summary import WaitedFor, waited_for
from ncclscope_service.export.tables import schema
from ncclscope_service.export.tables.operations_file import operations_table, write_operations
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store
from ncclscope_wire import terms
from ncclscope_wire.records import SourceKind
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATIONS

CONTRACT = """
    job host pid tid rank rank_is_inferred local_rank comm_id comm_epoch comm_ptr comm_rank comm_size
    parallelism iteration nccl_version op op_count seq coll_seq collective_id count dtype red_op root peer
    send_buffer recv_buffer log_stream message_bytes logged_bytes wire_bytes algorithm protocol channels
    log_file kernel_file log_line logged_at_ns observed_at_ns launch_id kernel_correlation_id stream_id start_ns
    end_ns start_true_ns end_true_ns clock_uncertainty_ns match confidence timing_source timing_confidence
    duration_ns wait_ns transfer_ns algbw_bytes_per_second busbw_bytes_per_second
    busbw_apparent_bytes_per_second limit_bytes_per_second limit_reference efficiency_ratio bottleneck
    ranks_seen last_rank
"""

Row = dict[str, object]


def written(store: Store, folder: Path) -> list[Row]:
    write_operations(select(store), folder / "operations.parquet")
    rows: list[Row] = pq.read_table(folder / "operations.parquet").to_pylist()
    return rows


def of_line(rows: list[Row], file: str, line: int) -> Row:
    return next(row for row in rows if row["log_file"] == file and row["log_line"] == line)


def test_the_columns_are_those_of_the_contract_in_its_order(tmp_path: Path) -> None:
    write_operations(select(small_run()), tmp_path / "o.parquet")
    assert pq.read_table(tmp_path / "o.parquet").schema.names == CONTRACT.split()


@pytest.mark.parametrize("make", [small_run, Store])
def test_the_types_in_the_file_are_the_schemas_with_rows_and_without(make: type[Store], tmp_path: Path) -> None:
    write_operations(select(make()), tmp_path / "o.parquet")
    assert pq.read_table(tmp_path / "o.parquet").schema.equals(schema.OPERATIONS)


def test_every_cell_is_what_a_slow_reading_of_the_store_gives(tmp_path: Path) -> None:
    store = small_run()
    for number, row in enumerate(written(store, tmp_path)):
        for name, expected in slow_row(store, number).items():
            assert same(row[name], expected), (number, name, row[name], expected)


def test_small_slices_and_one_large_slice_give_the_same_rows(tmp_path: Path) -> None:
    store = small_run()
    part = select(store).operations
    pieces = [operations_table(store, np.arange(begin, min(begin + 7, 46))).to_pylist() for begin in range(0, 46, 7)]
    assert [row for piece in pieces for row in piece] == written(store, tmp_path)
    assert sum(len(rows) for rows in Part(part.rows, np.arange(10)).slices(3)) == 10


def test_a_rank_that_no_line_prints_is_flagged(tmp_path: Path) -> None:
    store = small_run()
    assert {row["rank_is_inferred"] for row in written(store, tmp_path)} <= {False, None}
    store.members[0].global_rank_is_inferred = True
    flagged = [row for row in written(store, tmp_path) if row["rank_is_inferred"]]
    assert flagged
    assert {(row["comm_id"], row["comm_rank"]) for row in flagged} == {
        (store.communicators[store.members[0].communicator].comm_id, store.members[0].rank)
    }


def test_a_row_of_which_nothing_is_known_has_no_sentinel_anywhere(tmp_path: Path) -> None:
    build = Builder()
    build.process("node1", 1, version=None)
    build.operation_template(0, "AllGather", data_type=0)
    row = unknown_operation()
    row["template"] = row["process"] = 0
    build.store.operations.append(row)
    [found] = written(build.store, tmp_path)
    known = {name for name, value in found.items() if value is not None}
    logged = {"job", "host", "pid", "tid", "comm_ptr", "comm_size", "op", "op_count", "count", "logged_bytes"}
    assert known == logged | {"send_buffer", "recv_buffer", "log_stream"}
    assert not {NO_NUMBER, NO_TIME_NS} & {value for value in found.values() if isinstance(value, int)}


def test_unsigned_numbers_keep_their_highest_bit(tmp_path: Path) -> None:
    build = Builder()
    process = build.process("node1", 1)
    template = build.operation_template(process, "AllReduce", count=2**64 - 1, send_buffer=2**64 - 2)
    build.operation(template, NO_NUMBER, op_count=2**63)
    [found] = written(build.store, tmp_path)
    assert (found["count"], found["op_count"]) == (2**64 - 1, 2**63)
    assert found["send_buffer"] == "0xfffffffffffffffe"


@pytest.mark.parametrize(
    ("version", "op", "number", "expected"),
    [
        ("2.21.5", "AllGather", 0, None),
        ("2.18.6", "Broadcast", 0, None),
        (None, "AllGather", 0, None),
        ("2.22.3", "AllGather", 0, "int8"),
        ("2.28.3+cuda12.9", "Broadcast", 0, "int8"),
        ("2.18.6", "AllReduce", 0, "int8"),
        ("2.18.6", "AllGather", 9, "bfloat16"),
        ("2.28.3", "AllReduce", 99, None),
    ],
)
def test_the_type_is_null_where_nccl_logged_bytes(
    version: str | None, op: str, number: int, expected: str | None, tmp_path: Path
) -> None:
    build = Builder()
    process = build.process("node1", 1, version=version)
    build.operation(build.operation_template(process, op, data_type=number), NO_NUMBER)
    [found] = written(build.store, tmp_path)
    assert found["dtype"] == expected


def test_a_send_names_a_peer_and_a_broadcast_a_root_and_nothing_else_does(tmp_path: Path) -> None:
    rows = written(small_run(), tmp_path)
    assert {row["op"] for row in rows if row["peer"] is not None} == {"Send", "Recv"}
    assert {row["op"] for row in rows if row["root"] is not None} == {"Broadcast"}
    assert {row["op"] for row in rows if row["red_op"] is not None} == {"AllReduce"}


def test_a_pair_has_one_id_on_both_sides_and_a_collective_on_all_ranks(tmp_path: Path) -> None:
    rows = written(small_run(), tmp_path)
    sides: dict[object, set[object]] = {}
    for row in rows:
        if row["collective_id"] is not None:
            sides.setdefault(row["collective_id"], set()).add((row["op"], row["rank"]))
    assert sides["0xd0:0>1:0"] == {("Send", 0), ("Recv", 2)}
    assert sides["0xd0:1>0:0"] == {("Send", 2), ("Recv", 0)}
    assert sides["0xd0:3"] == {("AllReduce", 0), ("AllReduce", 2)}


def test_the_four_verdicts_have_their_names_and_a_pending_row_has_none(tmp_path: Path) -> None:
    rows = written(small_run(), tmp_path)
    found = [of_line(rows, "logs/rank0.log", line)["match"] for line in (50, 51, 52, 53)]
    assert found == ["unmatched", "not_covered", "no_kernel", None]
    assert {row["match"] for row in rows} == {"matched", "unmatched", "not_covered", "no_kernel", None}


def test_a_kernel_that_the_capture_cut_has_times_but_no_duration(tmp_path: Path) -> None:
    cut = of_line(written(small_run(), tmp_path), "logs/rank0.log", 61)
    assert cut["start_ns"] is not None
    assert cut["end_ns"] is not None
    assert (cut["duration_ns"], cut["transfer_ns"], cut["busbw_bytes_per_second"]) == (None, None, None)


def test_operations_of_a_group_share_launch_kernel_and_times(tmp_path: Path) -> None:
    rows = written(small_run(), tmp_path)
    pair = [of_line(rows, "logs/rank0.log", line) for line in (30, 31)]
    for name in ("launch_id", "kernel_correlation_id", "stream_id", "start_ns", "end_ns", "kernel_file"):
        assert pair[0][name] == pair[1][name] is not None


def test_a_kernel_that_was_dropped_leaves_its_columns_null(tmp_path: Path) -> None:
    store = small_run()
    store.kernels.drop_before(5)
    row = of_line(written(store, tmp_path), "logs/rank0.log", 10)
    assert (row["kernel_file"], row["kernel_correlation_id"], row["stream_id"]) == (None, None, None)
    assert row["start_ns"] is not None


def test_true_times_follow_the_published_clock_whatever_was_known_when_the_row_was_measured(tmp_path: Path) -> None:
    store = small_run()
    clock = replace(store.clocks["job"].hosts["node2"], drift_ppm=25.0, at_ns=START_NS, sigma_ns=1700.4)
    store.clocks["job"].hosts["node2"] = clock
    rows = [row for row in written(store, tmp_path) if row["host"] == "node2" and row["start_ns"] is not None]
    assert rows
    for row in rows:
        for name in ("start", "end"):
            host_ns, true_ns = row[f"{name}_ns"], row[f"{name}_true_ns"]
            assert isinstance(host_ns, int)
            assert isinstance(true_ns, int)
            since = host_ns - clock.at_ns
            assert abs(true_ns - (host_ns - NODE2_AHEAD_NS - since * 25 // 10**6)) <= 1
    assert {row["clock_uncertainty_ns"] for row in rows} == {1700}


def test_a_host_without_a_clock_has_no_true_time_and_no_uncertainty(tmp_path: Path) -> None:
    store = small_run()
    del store.clocks["job"].hosts["node2"]
    rows = [row for row in written(store, tmp_path) if row["host"] == "node2"]
    names = ("start_true_ns", "end_true_ns", "clock_uncertainty_ns")
    assert {row[name] for row in rows for name in names} == {None}


def test_no_ranks_seen_is_not_known_rather_than_none(tmp_path: Path) -> None:
    store = small_run()
    store.operations.rows["ranks_seen"][:2] = (0, 2)
    assert [row["ranks_seen"] for row in written(store, tmp_path)[:2]] == [None, 2]


def test_a_process_that_printed_no_version_has_that_of_its_job(tmp_path: Path) -> None:
    build = Builder()
    for version in ("2.19.3", None):
        process = build.process("node1", len(build.store.processes), version=version)
        build.operation(build.operation_template(process, "AllGather", data_type=0), NO_NUMBER)
    build.store.job_versions["job"] = {"2.19.3"}
    assert [row["nccl_version"] for row in written(build.store, tmp_path)] == ["2.19.3"] * 2
    build.store.process_version, build.store.job_versions["job"] = {0: "2.22.3"}, {"2.22.3"}
    assert [row["dtype"] for row in written(build.store, tmp_path)] == ["int8"] * 2


def test_one_job_of_two_is_written_alone(tmp_path: Path) -> None:
    build = Builder()
    for job in ("a", "b"):
        process = build.process("node1", 1, job=job)
        source = build.source(f"{job}.log", SourceKind.NCCL_LOG)
        build.operation(build.operation_template(process, "AllReduce"), NO_NUMBER, source=source)
    write_operations(select(build.store, job="b"), tmp_path / "o.parquet")
    rows = pq.read_table(tmp_path / "o.parquet").to_pylist()
    assert [(row["job"], row["log_file"]) for row in rows] == [("b", "b.log")]


def test_a_stretch_of_time_holds_what_ended_since_and_nothing_without_a_time() -> None:
    store = small_run()
    last_ns = int(store.operations.rows["end_ns"].max())
    selection = select(store, since_ns=last_ns - NODE2_AHEAD_NS // 2)
    assert 0 < len(selection.operations) < len(store.operations)
    assert (selection.operations.column("end_ns") >= last_ns - NODE2_AHEAD_NS // 2).all()
    assert SEND_RECV_NAME in {
        store.strings[int(name)] for name in store.kernel_templates_of(next(selection.kernels.slices()))["name"]
    }


def slow_row(store: Store, number: int) -> Row:
    """One row by hand: plain Python on single records, as the contract reads."""
    row = store.operations.rows[number]
    template = store.operation_templates.rows[row["template"]]
    process = store.processes[row["process"]]
    member = store.members[row["member"]] if row["member"] >= 0 else None
    communicator = store.communicators[member.communicator] if member else None
    operation = OPERATIONS[template["op"]] if template["op"] < len(OPERATIONS) else None
    kernel = store.kernels.rows[row["kernel"]] if row["kernel"] >= 0 else None
    peer = int(template["root"]) if operation and not operation.is_collective else None
    timed = row["start_ns"] != NO_TIME_NS and not row["censored"]
    return {
        "job": store.process_job[row["process"]],
        "host": process.host,
        "pid": process.pid,
        "rank": member.global_rank if member else None,
        "comm_id": communicator.comm_id if communicator else None,
        "comm_rank": member.rank if member else None,
        "parallelism": communicator.parallelism if communicator else None,
        "op": store.strings[int(template["op_name"])],
        "seq": number_or_none(row["seq"]),
        "coll_seq": number_or_none(row["coll_seq"]),
        "collective_id": slow_collective_id(communicator.comm_id, member.rank, peer, template, row)
        if communicator and member
        else None,
        "dtype": terms.DATA_TYPES[template["data_type"]].name if template["data_type"] < 12 else None,
        "red_op": terms.reduction_name(int(template["reduction"])) if operation and operation.reduces else None,
        "root": int(template["root"]) if operation and operation.is_rooted else None,
        "peer": peer,
        "message_bytes": number_or_none(row["message_bytes"]),
        "algorithm": terms.ALGORITHMS[row["algorithm"]] if row["algorithm"] >= 0 else None,
        "kernel_file": store.sources[kernel["source"]].source.name if kernel is not None else None,
        "kernel_correlation_id": int(kernel["correlation_id"]) if kernel is not None else None,
        "stream_id": int(store.kernel_templates.rows[kernel["template"]]["stream_id"]) if kernel is not None else None,
        "start_true_ns": slow_true_time(store, process.host, row["start_ns"]),
        "end_true_ns": slow_true_time(store, process.host, row["end_ns"]),
        "clock_uncertainty_ns": 210 if row["start_ns"] != NO_TIME_NS else None,
        "match": None if row["match"] == Match.PENDING else Match(row["match"]).name.lower(),
        "duration_ns": int(row["end_ns"] - row["start_ns"]) if timed else None,
        "busbw_bytes_per_second": float_or_none(row["busbw"]),
        "efficiency_ratio": float_or_none(row["busbw"] / row["limit"]),
    }


def slow_true_time(store: Store, host: str, host_ns: int) -> int | None:
    """The formula of the contract with the clock that is published."""
    if host_ns == NO_TIME_NS:
        return None
    clock, at_ns = store.clocks["job"].hosts[host], int(host_ns)
    return at_ns - round(clock.offset_ns + clock.drift_ppm * 1e-6 * (at_ns - clock.at_ns))


def slow_collective_id(comm_id: str, rank: int | None, peer: int | None, template: np.void, row: np.void) -> str | None:
    if row["coll_seq"] >= 0:
        return f"{comm_id}:{row['coll_seq']}"
    if peer is None or rank is None or row["pair_seq"] < 0:
        return None
    sender, receiver = (rank, peer) if OPERATIONS[template["op"]].name == "Send" else (peer, rank)
    return f"{comm_id}:{sender}>{receiver}:{row['pair_seq']}"


def number_or_none(value: int) -> int | None:
    return None if value == NO_NUMBER else int(value)


def float_or_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def same(left: object, right: object) -> bool:
    return left == right and type(left) is type(right)


def test_the_small_run_has_what_these_tests_are_about() -> None:
    store = small_run()
    assert store.communicators[DP0].parallelism == "DP"
    assert {Match(value) for value in store.operations.rows["match"].tolist()} == {*Match} - {Match.LINE_LOST}


def late_run(late_ns: int, ranks_seen: int = 2) -> Store:
    """`small_run` in which rank 1 of TP1, global rank 3, was measured to be that late to each AllReduce."""
    store = small_run()
    found = store.collectives.rows
    is_late = found["communicator"] == TP1
    for name, value in (("blame_ns", late_ns), ("wait_ns", late_ns), ("ranks_seen", ranks_seen)):
        found[name][is_late] = value
    return store


@pytest.mark.parametrize(("late_ns", "ranks_seen", "last"), [(300_000, 2, 3), (300_000, 1, None), (19_000, 2, None)])
def test_the_last_rank_is_named_if_all_were_seen_and_it_was_clearly_last(
    late_ns: int, ranks_seen: int, last: int | None, tmp_path: Path
) -> None:
    rows = written(late_run(late_ns, ranks_seen), tmp_path)
    assert {row["last_rank"] for row in rows if (row["comm_id"], row["op"]) == ("0xa2", "AllReduce")} == {last}
    assert {row["last_rank"] for row in rows if (row["comm_id"], row["op"]) != ("0xa2", "AllReduce")} == {None}


@pytest.mark.parametrize(("late_ns", "last"), [(300_000, 6), (19_000, 0)])
def test_others_wait_for_a_rank_that_is_clearly_last(late_ns: int, last: int) -> None:
    found = waited_for(select(late_run(late_ns)))
    assert WaitedFor("job", 2, "TP", 6, 0, 0) in found
    assert WaitedFor("job", 3, "TP", 6, last, last * late_ns) in found
    assert last == 0 or found[0].rank == 3


def test_replays_that_differ_in_who_was_last_name_nobody(tmp_path: Path) -> None:
    store = late_run(300_000)
    replayed = store.collectives.rows[store.collectives.rows["communicator"] == TP1]
    replayed["last_rank"][-1] = 0
    store.collectives.append(replayed)
    rows = [row for row in written(store, tmp_path) if (row["comm_id"], row["op"]) == ("0xa2", "AllReduce")]
    assert {(row["coll_seq"], row["last_rank"]) for row in rows} == {*((k, 3) for k in range(5)), (5, None)}
