"""The trace: valid JSON that Perfetto's importer can draw without losing a slice, and what it shows."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from service.export.small_run import MS, START_NS, Builder, host_time, logs_only_run, small_run

from ncclscope_service.export.directory import write_trace
from ncclscope_service.export.selection import latest_iterations, select
from ncclscope_service.export.trace import events as trace_events
from ncclscope_service.export.trace.launches import arrows
from ncclscope_service.nccl.bandwidth import classify
from ncclscope_service.store.records import HostClock
from ncclscope_service.store.tables import Store
from ncclscope_wire.records import SourceKind
from ncclscope_wire.terms import NO_TIME_NS, OPERATION_CODES

Event = dict[str, object]


_NAMED: Event = {"name": {"type": "string", "minLength": 1}, "pid": {"type": "integer", "minimum": 0}}
_TIMED: Event = _NAMED | {"ts": {"type": "number", "minimum": 0}}
_ON_TRACK: Event = _TIMED | {"tid": {"type": "integer", "minimum": 1}}
_ARGS: Event = {"type": "object", "minProperties": 1, "additionalProperties": {"not": {"type": "null"}}}


def form(required: Event, **optional: Event) -> Event:
    every = {"ph": {"type": "string"}} | required
    return {"properties": every | optional, "required": sorted(every), "additionalProperties": False}


FORMS: dict[str, Event] = {
    "X": form(_ON_TRACK | {"dur": {"type": "number", "minimum": 0}}, args={"type": "object"}, cname={"type": "string"}),
    "i": form(_ON_TRACK | {"s": {"const": "t"}}, args=_ARGS),
    "C": form(_TIMED | {"args": {"type": "object", "additionalProperties": {"type": "number"}}}),
    "s": form(_ON_TRACK | {"cat": {"type": "string"}, "id": {"type": "integer"}}),
    "f": form(_ON_TRACK | {"cat": {"type": "string"}, "id": {"type": "integer"}, "bp": {"const": "e"}}),
    "M": form(_NAMED | {"args": _ARGS}, tid={"type": "integer"}),
}
"""By phase, what an event must have. *Source:* "Trace Event Format", the document of the format."""


def written(store: Store, folder: Path) -> tuple[list[Event], Event]:
    write_trace(select(store), folder / "trace.json.gz")
    text = gzip.decompress((folder / "trace.json.gz").read_bytes())
    document = json.loads(text, parse_constant=pytest.fail)
    return document["traceEvents"], document["otherData"]


def ns(event: Event, name: str) -> int:
    value = event[name]
    assert isinstance(value, float)
    assert math.isfinite(value)
    return round(value * 1000)


def args(event: Event) -> Event:
    value = event["args"]
    assert isinstance(value, dict)
    return value


def tracks(events: list[Event]) -> dict[tuple[object, object], list[Event]]:
    found: dict[tuple[object, object], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def names(events: list[Event], kind: str) -> dict[tuple[object, object], object]:
    return {(e["pid"], e.get("tid")): args(e)["name"] for e in events if e["name"] == kind}


def on_track(events: list[Event], process: str, thread: str) -> list[Event]:
    processes, threads = names(events, "process_name"), names(events, "thread_name")
    chosen = [key for key, name in threads.items() if name == thread and processes[key[0], None] == process]
    return [event for event in events if event["ph"] != "M" and (event["pid"], event.get("tid")) in chosen]


def assert_can_be_drawn(events: list[Event]) -> None:
    """Slices of one track start in order and either nest or follow each other; arrows end inside slices."""
    for slices in tracks(events).values():
        open_ends: list[int] = []
        before = -1
        for event in slices:
            start, end = ns(event, "ts"), ns(event, "ts") + ns(event, "dur")
            assert 0 <= before <= start or before == -1 <= start
            assert end >= start
            before = start
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)
    assert_arrows_are_paired(events)


def assert_arrows_are_paired(events: list[Event]) -> None:
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    slices = tracks(events)
    for number, begin in begins.items():
        assert ns(begin, "ts") <= ns(ends[number], "ts")
        for arrow in (begin, ends[number]):
            at = ns(arrow, "ts")
            around = slices[arrow["pid"], arrow["tid"]]
            assert any(ns(event, "ts") <= at <= ns(event, "ts") + ns(event, "dur") for event in around)


def test_slices_nest_and_arrows_are_paired(tmp_path: Path) -> None:
    events, _ = written(small_run(), tmp_path)
    assert_can_be_drawn(events)
    flows = [event["name"] for event in events if event["ph"] == "s"]
    assert (flows.count("waited for"), flows.count("evidence")) == (18, 4)


def test_every_event_has_the_form_that_its_phase_asks_for(tmp_path: Path) -> None:
    for store in (small_run(), logs_only_run(with_stamps=True), logs_only_run(with_stamps=False)):
        events, _ = written(store, tmp_path)
        for event in events:
            jsonschema.validate(event, FORMS[str(event["ph"])])


def test_a_process_stands_for_each_rank_in_order(tmp_path: Path) -> None:
    events, _ = written(small_run(), tmp_path)
    processes = names(events, "process_name")
    ordered = [processes[pid, None] for pid in sorted(pid for pid, _ in processes if isinstance(pid, int))]
    ranks = ["rank 0 (node1 pid 100)", "rank 1 (node1 pid 101)", "rank 2 (node2 pid 102)", "rank 3 (node2 pid 103)"]
    assert ordered == ["findings job", "communicators", *ranks]


def test_every_kernel_is_drawn_once_and_one_without_an_operation_is_flagged(tmp_path: Path) -> None:
    events, _ = written(small_run(), tmp_path)
    kernels = [event for event in events if event["ph"] == "X" and "args" in event and "kernel" in args(event)]
    assert len(kernels) == 40
    [alone] = [event for event in kernels if args(event).get("match") == "no operation"]
    assert alone["name"] == "AllReduce (no operation)"


FIGURE = {
    "CUDA Kernel": "kernel",
    "CUDA Grid": "grid",
    "CUDA Block": "block",
    "Shared Mem (Static)": "static_shared_bytes",
    "Shared Mem (Dynamic)": "dynamic_shared_bytes",
    "Registers Per Thread": "registers_per_thread",
    "CUDA Stream ID": "cuda_stream",
    "CUDA Correlation ID": "correlation_id",
    "Iteration": "iteration",
    "Op Count": "op_count",
    "Send Buffer": "send_buffer",
    "Recv Buffer": "recv_buffer",
    "Root Rank": "root",
    "Communicator Ptr": "comm_ptr",
    "NCCL_Stream_Ptr": "log_stream",
    "Element Count": "count",
    "Data Type": "dtype",
    "Reduction Op": "red_op",
    "Message Size": "message_bytes",
    "Algo BW": "algbw_GB_per_s",
    "Bus BW": "busbw_GB_per_s",
    "Bus Factor": "bus_factor",
    "Theoretical Algo BW": "limit_algbw_GB_per_s",
    "Theoretical Bus BW": "limit_busbw_GB_per_s",
    "Bottleneck Link": "bottleneck",
    "NCCL Algorithm": "algorithm",
    "Efficiency": "efficiency_ratio",
    "Bus Efficiency": "efficiency_baseline_ratio",
    "Communicator Size": "comm_size",
    "Parallelism Type": "parallelism",
}
"""Every row of the thesis's figure 4.2 that a capture can tell, and our argument. Local memory is not read."""


def run_that_knows_everything() -> Store:
    """The small run with one rooted reduction whose row lacks nothing."""
    store = small_run()
    row, template = store.operations.rows[0], store.operation_templates.rows
    template["op"][row["template"]] = OPERATION_CODES["Reduce"]
    template["op_name"][row["template"]] = store.strings.index_of("Reduce")
    template["root"][row["template"]] = 1
    store.operations.rows["bottleneck"][0] = store.strings.index_of("NET/IB/0")
    store.kernel_templates.rows["dynamic_shared_bytes"][:] = 82240
    series = store.series.rows
    series["op"], series["size_class"] = OPERATION_CODES["Reduce"], classify(store.operations.rows["message_bytes"])[0]
    return store


@pytest.mark.parametrize(("row", "name"), FIGURE.items())
def test_a_slice_carries_every_row_of_the_figure(tmp_path: Path, row: str, name: str) -> None:
    events, _ = written(run_that_knows_everything(), tmp_path)
    first = on_track(events, "rank 0 (node1 pid 100)", "NCCL kernels, stream 31")[0]
    assert args(first)[name] not in (None, ""), row


def test_a_slice_carries_the_arguments_that_people_look_for(tmp_path: Path) -> None:
    events, other = written(small_run(), tmp_path)
    first = on_track(events, "rank 0 (node1 pid 100)", "NCCL kernels, stream 31")[0]
    assert other["time_origin_ns"] is not None
    found = args(first)
    assert None not in found.values()
    assert (found["collective_id"], found["comm_id"], found["coll_seq"]) == ("0xa1:0", "0xa1", 0)
    assert (found["grid"], found["block"], found["wait_us"], found["bus_factor"]) == ("2x1x1", "544x1x1", 300.0, 1.0)
    assert (found["busbw_GB_per_s"], found["limit_algbw_GB_per_s"], found["launch_id"]) == (4.1943, 12.5, 0)
    assert not {"match", "confidence"} & found.keys(), "what is sure needs no words"


def test_every_collective_can_be_found_by_its_id(tmp_path: Path) -> None:
    store = small_run()
    events, _ = written(store, tmp_path)
    found = {args(event).get("collective_id") for event in events if event["ph"] in ("X", "i") and "args" in event}
    members = store.members
    expected = {
        f"{store.communicators[members[member].communicator].comm_id}:{seq}"
        for member, seq in zip(*(store.operations.rows[name].tolist() for name in ("member", "coll_seq")), strict=True)
        if member >= 0 and seq >= 0
    }
    assert len(expected) == 19
    assert expected <= found


def test_a_launch_of_several_collectives_lists_the_id_of_each(tmp_path: Path) -> None:
    store = small_run()
    rows = store.operations.rows
    first, second = np.nonzero((rows["launch"] >= 0) & (rows["coll_seq"] >= 0))[0][:2]
    rows["launch"][second], rows["kernel"][second] = rows["launch"][first], rows["kernel"][first]
    events, _ = written(store, tmp_path)
    slice_ = on_track(events, "rank 0 (node1 pid 100)", "NCCL kernels, stream 31")[0]
    assert (slice_["name"], args(slice_)["collective_ids"]) == ("AllReduce x2", ["0xa1:0", "0xa1:1"])


def test_a_wait_is_drawn_inside_its_kernel_before_the_transfer(tmp_path: Path) -> None:
    events, _ = written(small_run(), tmp_path)
    kernel, wait, transfer = on_track(events, "rank 0 (node1 pid 100)", "NCCL kernels, stream 31")[:3]
    assert (wait["name"], ns(wait, "dur"), ns(wait, "ts")) == ("wait", 300_000, ns(kernel, "ts"))
    assert (transfer["name"], ns(transfer, "dur")) == ("transfer", 500_000)
    late = on_track(events, "rank 1 (node1 pid 101)", "NCCL kernels, stream 31")
    assert {event["name"] for event in late if event["ph"] == "X"} == {"AllReduce"}


def test_arrows_go_from_the_rank_that_came_last(tmp_path: Path) -> None:
    events, _ = written(small_run(), tmp_path)
    processes = names(events, "process_name")
    ways = {(processes[e["pid"], None], e["ph"]) for e in events if e["name"] == "waited for"}
    late = {name for name, kind in ways if kind == "s"}
    assert late == {"rank 1 (node1 pid 101)", "rank 2 (node2 pid 102)", "rank 3 (node2 pid 103)"}


@pytest.mark.parametrize(("op", "root"), [("Broadcast", 1), ("Reduce", 0)])
def test_arrows_of_a_rooted_collective_go_from_the_rank_whose_data_was_waited_for(op: str, root: int) -> None:
    store = small_run()
    templates, rows = store.operation_templates.rows, store.operations.rows
    is_reduced = templates["op"] == OPERATION_CODES["AllReduce"]
    templates["op"][is_reduced], templates["root"][is_reduced] = OPERATION_CODES[op], root
    ranks = np.array([member.rank for member in store.members])[rows["member"]]
    rows["wait_ns"][is_reduced[rows["template"]] & (ranks == 1)] = NO_TIME_NS
    found = arrows(select(store))
    rank_of = dict(zip(rows["launch"].tolist(), ranks.tolist(), strict=True))
    assert len(found.late) == 18
    assert {rank_of[launch] for launch in found.late.tolist()} == {1}
    assert {rank_of[launch] for launch in found.waiting.tolist()} == {0}
    rows["start_true_ns"][ranks == 1] = NO_TIME_NS
    assert not len(arrows(select(store)).late)


def test_while_clocks_contradict_causality_there_are_no_arrows(tmp_path: Path) -> None:
    store = small_run()
    store.clocks["job"] = replace(store.clocks["job"], are_trusted=False)
    assert not [event for event in written(store, tmp_path)[0] if event["name"] == "waited for"]


def test_times_are_on_the_reference_clock(tmp_path: Path) -> None:
    events, other = written(small_run(), tmp_path)
    late, early = (
        on_track(events, f"rank {rank} (node{1 + rank // 2} pid {100 + rank})", "NCCL kernels, stream 40")[0]
        for rank in (2, 0)
    )
    origin = other["time_origin_ns"]
    assert isinstance(origin, int)
    assert ns(late, "ts") + origin == ns(early, "ts") + origin == START_NS + 20 * MS


def test_a_group_is_one_slice_that_lists_its_operations(tmp_path: Path) -> None:
    events, _ = written(small_run(), tmp_path)
    [group] = on_track(events, "rank 0 (node1 pid 100)", "NCCL kernels, stream 40")
    assert group["name"] == "Send+Recv x2"
    assert args(group)["operation_list"] == ["Send 1048576 B to 1", "Recv 1048576 B from 1"]


def test_nvtx_shows_the_thread_that_has_most_ranges(tmp_path: Path) -> None:
    events, _ = written(small_run(), tmp_path)
    found = [event["name"] for event in on_track(events, "rank 0 (node1 pid 100)", "NVTX")]
    assert found == ["iteration 0", "forward", "iteration 1", "forward", "iteration 2", "forward"]


def test_operations_without_a_kernel_are_instants_at_their_stamps(tmp_path: Path) -> None:
    events, other = written(small_run(), tmp_path)
    found = on_track(events, "rank 0 (node1 pid 100)", "logged, no kernel")
    assert [(event["ph"], args(event)["match"]) for event in found] == [
        ("i", "unmatched"),
        ("i", "not_covered"),
        ("i", "no_kernel"),
    ]
    assert other["operations_without_time"] == 2


def test_operations_without_any_time_stand_beside_the_one_logged_before_them(tmp_path: Path) -> None:
    events, _ = written(small_run(), tmp_path)
    [stamped] = [
        e for e in on_track(events, "rank 0 (node1 pid 100)", "logged, no kernel") if args(e)["log_line"] == 52
    ]
    found = on_track(events, "rank 0 (node1 pid 100)", "logged, time not known")
    assert [(event["ts"], args(event)["log_line"]) for event in found] == [(stamped["ts"], 53), (stamped["ts"], 60)]
    assert all(args(event)["time"] == "not known" for event in found)


def test_an_open_finding_lasts_to_the_end_of_the_trace(tmp_path: Path) -> None:
    events, other = written(small_run(), tmp_path)
    origin = other["time_origin_ns"]
    assert isinstance(origin, int)
    [finding] = [event for event in on_track(events, "findings job", "findings") if event["ph"] == "X"]
    assert ns(finding, "ts") + ns(finding, "dur") + origin == START_NS + 33 * MS
    assert args(finding)["ranks"] == [2]


def test_a_finding_leads_to_the_culprits_kernels_that_it_names(tmp_path: Path) -> None:
    events, _ = written(small_run(), tmp_path)
    processes = names(events, "process_name")
    [finding] = [event for event in on_track(events, "findings job", "findings") if event["ph"] == "X"]
    assert args(finding)["collective_ids"] == ["0xd0:1", "0xd0:2"]
    ends = [event for event in events if event["ph"] == "f" and event["name"] == "evidence"]
    slices = [e for e in on_track(events, "rank 2 (node2 pid 102)", "NCCL kernels, stream 33") if "args" in e]
    shown = {args(e)["collective_id"] for e in slices if e["ts"] in [end["ts"] for end in ends]}
    assert {processes[end["pid"], None] for end in ends} == {"rank 2 (node2 pid 102)"}
    assert shown == {"0xd0:1", "0xd0:2"}


def test_a_late_rank_leads_to_the_collectives_for_which_it_is_blamed_most(tmp_path: Path) -> None:
    store = small_run()
    store.findings[:] = [replace(store.findings[0], evidence={})]
    collectives = store.collectives.rows
    collectives["blame_ns"] = np.arange(len(collectives)) * 1000
    collectives["blame_ns"][collectives["coll_seq"] == 4] = 9_000_000
    events, _ = written(store, tmp_path)
    [finding] = [event for event in on_track(events, "findings job", "findings") if event["ph"] == "X"]
    assert args(finding)["collective_ids"] == [f"0xd0:{seq}" for seq in range(1, 6)]


def test_bytes_in_flight_rise_with_the_first_start_and_fall_with_the_end(tmp_path: Path) -> None:
    store = small_run()
    collectives = store.collectives.rows
    collectives["first_start_true_ns"] = collectives["end_true_ns"] - 800_000
    collectives["transfer_ns"], collectives["message_bytes"] = 500_000, 1 << 20
    events, other = written(store, tmp_path)
    origin = other["time_origin_ns"]
    assert isinstance(origin, int)
    points = [(ns(e, "ts") + origin - START_NS, e["name"], e["args"]) for e in events if e["ph"] == "C"]
    flying = [(at, args_) for at, name, args_ in points if name == "bytes in flight TP"]
    assert flying[:2] == [(2 * MS, {"bytes": 2 << 20}), (2 * MS + 800_000, {"bytes": 0})]
    assert flying[-1][1] == {"bytes": 0}
    rates = [(at, args_) for at, name, args_ in points if name == "busbw TP"]
    assert rates[:2] == [(2 * MS + 300_000, {"GB/s": 4.2}), (2 * MS + 800_000, {"GB/s": 0.0})]
    assert sum(name == "busbw tp-0 (0xa1)" for _, name, _ in points) == 6


def test_a_counter_of_very_many_points_keeps_its_peaks_and_where_it_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_events, "MAX_POINTS", 6)
    store = small_run()
    collectives = store.collectives.rows
    collectives["first_start_true_ns"] = collectives["end_true_ns"] - 800_000
    collectives["message_bytes"] = 1 << 20
    collectives["message_bytes"][2] = 1 << 30
    events, _ = written(store, tmp_path)
    flying = [args(event)["bytes"] for event in events if event["name"] == "bytes in flight TP"]
    assert flying == [2 << 20, 0, (1 << 30) + (1 << 20), 0, 2 << 20, 0]


def test_logs_with_stamps_give_a_trace_on_their_stamps(tmp_path: Path) -> None:
    events, other = written(logs_only_run(with_stamps=True), tmp_path)
    assert other["time"] == "log stamps"
    assert [ns(event, "ts") for event in events if event["ph"] == "i"] == [0, MS, 2 * MS] * 2


def test_logs_without_stamps_give_a_trace_that_says_it_is_order_only(tmp_path: Path) -> None:
    events, other = written(logs_only_run(with_stamps=False), tmp_path)
    assert (other["time"], other["time_origin_ns"]) == ("order only", None)
    assert [event["ts"] for event in events if event["ph"] == "i"] == [0.0, 1.0, 2.0] * 2


def test_nothing_at_all_gives_a_valid_empty_trace(tmp_path: Path) -> None:
    events, other = written(Store(), tmp_path)
    assert events == []
    assert other["events"] == 0


def test_kernels_that_overlap_on_one_stream_get_lanes(tmp_path: Path) -> None:
    build = Builder()
    process = build.process("node1", 1)
    source = build.source("a.sqlite", SourceKind.NSYS)
    template = build.kernel_template(process, "ncclDevKernel_SendRecv", 7)
    for start, end in ((0, 100), (50, 150), (100, 200), (120, 130), (120, 130)):
        build.kernel(template, source, START_NS + start, START_NS + end)
    events, other = written(build.store, tmp_path)
    assert_can_be_drawn(events)
    assert sum(event["ph"] == "X" for event in events) == 5
    assert other["hosts_without_clock"] == ["node1"]


def test_ranges_that_cross_get_lanes_and_an_unended_one_is_an_instant(tmp_path: Path) -> None:
    build = Builder()
    process = build.process("node1", 1)
    for start, end in ((0, 100), (0, 50), (60, 140), (60, 70), (200, None)):
        ended = host_time(build, process, START_NS + end) if end is not None else -(2**63)
        build.range(process, 7, f"{start}-{end}", START_NS + start, ended)
    events, _ = written(build.store, tmp_path)
    assert_can_be_drawn(events)
    assert [event["name"] for event in events if event["ph"] == "i"] == ["200-None"]


def test_an_arrow_that_the_clocks_contradict_is_left_out(tmp_path: Path) -> None:
    store = small_run()
    wrong = store.operations.rows
    on_node2 = [store.processes[index].host == "node2" for index in wrong["process"].tolist()]
    has_time = wrong["start_true_ns"] > 0
    for name in ("start_true_ns", "end_true_ns"):
        wrong[name][has_time & on_node2] += 10 * MS
    store.clocks["job"].hosts["node2"] = HostClock(
        offset_ns=40.0 * MS,
        drift_ppm=0.0,
        at_ns=START_NS,
        sigma_ns=1.0,
        interval_lo_ns=None,
        interval_hi_ns=None,
        samples=1,
    )
    events, other = written(store, tmp_path)
    assert_can_be_drawn(events)
    assert other["arrows"] == 12


@pytest.mark.parametrize(("operations", "drawn"), [(46, None), (45, (0, 2)), (36, (0, 2)), (35, (1, 2)), (1, (2, 2))])
def test_a_trace_of_so_many_operations_shows_the_latest_iterations_and_at_least_one(
    operations: int, drawn: tuple[int, int] | None
) -> None:
    assert latest_iterations(select(small_run()), operations) == drawn
