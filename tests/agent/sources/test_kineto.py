from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent.trace_samples import BASE_NS, EVENTS, kernel, launch, note, trace

from ncclscope_agent.files.recognise import FileKind, recognise
from ncclscope_agent.sources.kineto.batches import TRACE_END, is_trace, read_trace
from ncclscope_agent.sources.kineto.collectives import Call, CallReader
from ncclscope_agent.sources.kineto.json_stream import Event, JsonStream, TraceError
from ncclscope_agent.sources.kineto.trace import MEMBERS, TraceLimits
from ncclscope_wire.batch import ROW_TABLES, Batch
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.errors import SourceError
from ncclscope_wire.messages import BatchMessage
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

SOURCE = Source(kind=SourceKind.KINETO, name="node7_42.1700000000000.pt.trace.json", key="k")


def read(tmp_path: Path, data: bytes, **options: Any) -> list[Batch]:
    path = tmp_path / SOURCE.name
    path.write_bytes(data)
    batches = list(read_trace(path, source=SOURCE, **options))
    for batch in batches:
        decode_message(encode_message(BatchMessage(sequence=1, batch=batch)))
    return batches


def joined(batches: list[Batch], name: str) -> Any:
    return np.concatenate([getattr(batch, name) for batch in batches])


def test_a_trace_is_operations_kernels_and_what_they_covered(tmp_path: Path) -> None:
    batches = read(tmp_path, trace())
    first, last = batches[0], batches[-1]
    operations, kernels = joined(batches, "operations"), joined(batches, "kernels")
    assert operations["logged_at_ns"].tolist() == [BASE_NS + 10_500, BASE_NS + 60_000]
    assert first.operation_templates["op"].tolist() == [OPERATION_CODES["AllReduce"], OPERATION_CODES["AllGather"]]
    assert first.operation_templates["count"].tolist() == [1000, 1000]
    assert first.operation_templates["nranks"].tolist() == [2, 2]
    assert first.operation_templates["stream"].tolist() == [21, 21]
    assert kernels["start_ns"].tolist() == [BASE_NS + 30_001, BASE_NS + 70_000]
    assert kernels["end_ns"].tolist() == [BASE_NS + 50_126, BASE_NS + 90_125]
    assert kernels["launch_start_ns"].tolist() == [BASE_NS + 14_250, BASE_NS + 61_000]
    assert kernels["launch_tid"].tolist() == [43, 43]
    assert first.kernel_templates["grid_x"].tolist() == [8, 8]
    outside = joined(batches, "outside")
    assert [first.strings[first.kernel_templates[template]["name"]] for template in outside["template"]] == [
        "NVSHMEM/nvshmem_put"
    ]
    assert [(event.rank, event.nranks, event.pid, event.host) for event in first.communicators] == [(1, 2, 42, "node7")]
    assert [version.version for version in first.versions] == ["2.27.5"]
    assert [first.strings[text] for text in first.range_templates["text"].tolist()] == ["ProfilerStep#7"]
    assert joined(batches, "busy")["start_ns"].tolist() == [BASE_NS + 20_000]
    capture = last.captures[0]
    assert (capture.host, capture.pids) == ("node7", (42,))
    assert (capture.start_ns, capture.end_ns) == (BASE_NS + 1_000, BASE_NS + 121_000)
    assert (capture.nccl_kernels, capture.other_kernels) == (2, 2)
    assert (last.end, last.is_last, last.gaps) == (TRACE_END, True, ())


def test_both_ranks_of_a_group_know_it_by_one_identity(tmp_path: Path) -> None:
    other = json.loads(trace())
    other["distributedInfo"]["rank"] = 0
    ours, theirs = read(tmp_path, trace()), read(tmp_path, json.dumps(other).encode())
    assert ours[0].communicators[0].comm_id == theirs[0].communicators[0].comm_id
    assert theirs[0].communicators[0].rank == 0


@pytest.mark.parametrize("begin", range(5))
def test_reading_goes_on_at_any_position(tmp_path: Path, begin: int) -> None:
    limits = TraceLimits(batch_rows=1)
    whole = read(tmp_path, trace(), limits=limits)
    rest = read(tmp_path, trace(), limits=limits, begin=begin)
    for name in ROW_TABLES:
        assert joined(rest, name).tolist() == joined(whole[begin:], name).tolist()
    assert rest[0].strings == whole[0].strings
    assert rest[0].operation_templates.tolist() == whole[0].operation_templates.tolist()
    assert list(read_trace(tmp_path / SOURCE.name, source=SOURCE, begin=TRACE_END)) == []


def test_a_packed_trace_reads_alike(tmp_path: Path) -> None:
    plain, packed = read(tmp_path, trace()), read(tmp_path, gzip.compress(trace()))
    assert [joined(plain, name).tolist() for name in ROW_TABLES] == [
        joined(packed, name).tolist() for name in ROW_TABLES
    ]


def test_calls_that_a_log_has_are_left_to_it(tmp_path: Path) -> None:
    batches = read(tmp_path, trace(), logged={42: {"node7"}})
    assert len(joined(batches, "operations")) == 0
    assert len(joined(batches, "kernels")) == 2
    assert batches[0].communicators == ()
    assert len(joined(read(tmp_path, trace(), logged={42: {"node8"}}, host="node9"), "operations")) == 2
    assert len(joined(read(tmp_path, trace(), with_calls=False), "operations")) == 0


def test_the_host_is_told_by_trace_or_name_and_else_assumed(tmp_path: Path) -> None:
    assert read(tmp_path, trace(host_name="gpu5.cluster"))[-1].captures[0].host == "gpu5"
    plain = Source(kind=SourceKind.KINETO, name="run/rank3.json", key="k")
    (tmp_path / "rank3.json").write_bytes(trace())
    for host, expected in ((None, "rank3"), ("node1", "node1")):
        last = list(read_trace(tmp_path / "rank3.json", source=plain, host=host))[-1]
        assert (last.captures[0].host, last.captures[0].host_is_recorded) == (expected, False)


@pytest.mark.parametrize(
    ("devices", "gpu"),
    [
        ([{"id": 0, "name": "NVIDIA H200"}, {"id": 1, "name": "NVIDIA H200"}], "NVIDIA H200"),
        ([{"id": 0, "name": "NVIDIA H200"}, {"id": 1, "name": "NVIDIA A40"}], None),
        ([{"id": 0, "name": ["NVIDIA H200"]}, 3], None),
        ([{"id": 0}], None),
        ("NVIDIA H200", None),
    ],
)
def test_the_gpu_of_a_host_is_named_if_all_are_alike(tmp_path: Path, devices: object, gpu: str | None) -> None:
    (seen,) = read(tmp_path, trace(deviceProperties=devices))[-1].captures
    assert seen.gpu == gpu


def test_a_trace_that_breaks_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    data = trace()
    torn = data[: data.index(b'"External id": 2')]
    batches = read(tmp_path, torn)
    assert len(joined(batches, "operations")) == 1
    assert [gap.reason for gap in batches[-1].gaps] == ["trace_torn"]
    with pytest.raises(SourceError) as raised:
        read(tmp_path, torn, is_finished=False)
    assert raised.value.reason == "incomplete"


def test_old_traces_give_kernels_alone(tmp_path: Path) -> None:
    """PyTorch before 2.3 notes calls without arguments."""
    event = {**note(1, 10.5), "args": {"External id": 1}}
    batches = read(tmp_path, trace([event, launch(77, 14), kernel(1, 77, 30)]))
    assert (len(joined(batches, "operations")), len(joined(batches, "kernels"))) == (0, 1)
    assert batches[-1].counts.skipped == {"call_without_group": 1}


def test_kernels_of_cuda_graphs_are_counted_and_left_out(tmp_path: Path) -> None:
    """They have no line and no note, and a trace tells nothing of their nodes."""
    graph = {**launch(78, 20), "name": "cudaGraphLaunch"}
    events = [note(1, 10), launch(77, 14), kernel(1, 77, 30), graph, kernel(1, 78, 40), kernel(1, 78, 50)]
    batches = read(tmp_path, trace(events))
    assert joined(batches, "kernels")["correlation_id"].tolist() == [77]
    capture = batches[-1].captures[0]
    assert (capture.nccl_kernels, capture.graph_launches) == (1, 1)


def test_a_kernel_without_launch_has_no_launch_time(tmp_path: Path) -> None:
    kernels = joined(read(tmp_path, trace([note(1, 10), kernel(1, 77, 30), launch(5, 2)])), "kernels")
    assert (kernels["launch_start_ns"][0], kernels["launch_tid"][0]) == (NO_TIME_NS, NO_NUMBER)


@pytest.mark.parametrize(
    ("name", "elements", "expected"),
    [
        ("allreduce", (640, 640), ("AllReduce", 640)),
        ("_allgather_base", (640, 2560), ("AllGather", 640)),
        ("_reduce_scatter_base", (2560, 640), ("ReduceScatter", 640)),
        ("all_to_allv", (2560, 2400), ("AlltoAll", 640)),
        ("broadcast", (640, 640), ("Broadcast", 640)),
        ("barrier", (1, 1), ("AllReduce", 1)),
        ("scatter", (2560, 640), ("Scatter", 640)),
    ],
)
def test_counts_are_of_one_rank_as_nccl_has_them(
    name: str, elements: tuple[int, int], expected: tuple[str, int]
) -> None:
    told = {
        "Collective name": name,
        "In msg nelems": elements[0],
        "Out msg nelems": elements[1],
        "Process Group Ranks": "[4, 5, 6, 7]",
    }
    call = CallReader().call({**note(1, 0)["args"], **told, "Group size": 4})
    assert isinstance(call, Call)
    assert ((call.op, call.count), call.group.ranks) == (expected, (4, 5, 6, 7))


def test_a_peer_is_a_rank_of_the_group() -> None:
    told = {"Collective name": "recv", "Process Group Ranks": "[4, 9]", "Src Rank": 9}
    call = CallReader().call({**note(1, 0)["args"], **told})
    assert isinstance(call, Call)
    assert (call.op, call.peer) == ("Recv", 1)
    assert CallReader().call({**note(1, 0)["args"], **told, "Src Rank": 5}) == "incomplete"


def test_ranks_that_are_cut_short_come_from_the_list_of_groups_or_from_their_stride() -> None:
    cut = {**note(1, 0)["args"], "Process Group Ranks": "[0, 2, ..., 126]", "Group size": 64}
    assert CallReader().call(cut) == "without_group"
    call = CallReader().call({**cut, "Global rank start": 0, "Global rank stride": 2})
    assert isinstance(call, Call)
    assert call.group.ranks == tuple(range(0, 128, 2))
    listed = CallReader()
    listed.learn({"pg_config": [{"pg_name": "0", "ranks": list(range(0, 128, 2))}]})
    call = listed.call(cut)
    assert isinstance(call, Call)
    assert call.group.ranks == tuple(range(0, 128, 2))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"Collective name": "wait"}, None),
        ({"Collective name": "teleport"}, "unknown_collective"),
        ({"dtype": "ComplexFloat"}, "incomplete"),
        ({"In msg nelems": -1}, "incomplete"),
        ({"Process Group Name": 3}, "without_group"),
        ({"Process Group Ranks": "[0, 0]"}, "without_group"),
        ({"Process Group Ranks": "[" * 5000}, "without_group"),
    ],
)
def test_a_call_that_cannot_be_told_has_a_reason(arguments: dict[str, object], reason: str | None) -> None:
    assert CallReader().call({**note(1, 0)["args"], **arguments}) == reason


def _members(event: Event) -> dict[str, object]:
    members: dict[str, object] = {name: getattr(event, name) for name in Event.__struct_fields__ if name != "args"}
    told = {name: value for name, value in members.items() if value is not None and (name, value) != ("dur", 0)}
    return {**told, "args": dict(event.arguments())} if event.args else told


def test_events_come_alike_however_the_bytes_are_cut() -> None:
    data = trace(EVENTS)
    for size in (1, 7, 300, 1 << 20):
        stream = JsonStream((data[at : at + size] for at in range(0, len(data), size)), {"traceName"})
        assert [_members(event) for event in stream.events()] == EVENTS
        assert stream.is_whole
        assert stream.members["traceName"] == "t.json"


@pytest.mark.parametrize(
    "odd",
    [
        '{"name": "}, {", "args": {"a": [{"b": 1}, {"b": 2}]}}',
        '{"name": "x", "args": {"occupancy": NaN, "device": 3}}',
        '{"name": "\\ud800", "ts": 123456789012345678901234567890}',
        '[{"name": "in a list"}, {"name": "too"}]',
        "17, null",
        '{"name": "without a comma"} {"name": "two"}',
    ],
)
def test_many_events_at_once_are_those_that_come_singly(odd: str) -> None:
    usual = ", ".join(f'{{"name": "{number}", "args": {{"n": {number}}}}}' for number in range(50))
    data = f'{{"traceEvents": [{usual}, {odd}, {usual}]}}'.encode()
    singly = JsonStream((data[at : at + 1] for at in range(len(data))), MEMBERS)
    expected = [_members(event) for event in singly.events()]
    for size in (100, 1000, 1 << 20):
        stream = JsonStream((data[at : at + size] for at in range(0, len(data), size)), MEMBERS)
        assert [_members(event) for event in stream.events()] == expected
    assert len(expected) >= 100


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"a": 1',
        b'{"traceEvents": [{"a": ',
        b'{"traceEvents": [' + b"[" * 100_000,
        b"{1: 2}",
        gzip.compress(trace())[:200],
    ],
)
def test_what_is_no_whole_trace_says_so(data: bytes) -> None:
    stream = JsonStream([data], MEMBERS)
    with pytest.raises(TraceError):
        list(stream.events())
    assert not stream.is_whole


def test_a_trace_is_told_by_its_first_bytes() -> None:
    assert recognise(trace(), "x") is FileKind.KINETO
    assert recognise(gzip.compress(trace()), "x") is FileKind.KINETO
    assert recognise(b'{"traceEvents": []}', "x") is FileKind.UNKNOWN  # a Chrome trace of another program
    assert is_trace(SOURCE.name)
    assert not is_trace("trace.json")


def test_a_group_name_that_comes_again_with_other_ranks_is_another_group(tmp_path: Path) -> None:
    """As when a job makes its groups anew; found by the fuzzer."""
    again = note(3, 80, **{"Process Group Ranks": "[5, 1]"})
    batches = read(tmp_path, trace([*EVENTS, again], distributedInfo={"rank": 1}))
    communicators = batches[0].operation_templates["communicator"]
    assert len(joined(batches, "operations")) == 3
    assert len(set(communicators.tolist())) == 2
