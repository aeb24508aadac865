"""Files and answers that unfold, nest or drip without end: an agent refuses each, and reads what else is there."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from agent.flight_samples import dump, entry
from agent.ras_server import RasServer, json_status, rank
from agent.trace_samples import EVENTS, note, trace
from attack.memory import memory_below
from attack.test_exports import follow, told

from ncclscope_agent.files.exports import ExportFollower, Timing
from ncclscope_agent.files.flight_dumps import MOST_LIVE_BYTES, FlightDumpFollower
from ncclscope_agent.link.frames import Window, WindowLimits
from ncclscope_agent.node import ras_port
from ncclscope_agent.node.ras_port import RasFollower
from ncclscope_agent.sources.flight_recorder.dump import read_dump
from ncclscope_agent.sources.inspector import InspectorReader
from ncclscope_agent.sources.nsys.reader_process import ReaderLimits
from ncclscope_agent.sources.ras import read_answer
from ncclscope_agent.sources.topology_xml import MAX_BYTES, read_topology_xml
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import decode_message
from ncclscope_wire.errors import FormatError
from ncclscope_wire.messages import BatchMessage
from ncclscope_wire.records import Source, SourceKind

QUICK = ReaderLimits(cpu_seconds=1, bytes_per_cpu_second=1e12, memory_bytes=96 << 20)


# Traces, which a process of its own reads


def packed(begin: bytes, again: bytes, gigabytes: int) -> bytes:
    """A gzip stream that unfolds to so much: a block that refers to nothing in front of it comes again and again."""
    packer = zlib.compressobj(9, wbits=31)
    head = packer.compress(begin) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(again * ((8 << 20) // len(again))) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + block * (gigabytes * 128)


BEGIN = b'{"schemaVersion": 1, "traceEvents": ['
BOMBS: dict[str, Callable[[], bytes]] = {
    "10 GB of zeros": lambda: packed(BEGIN, b"\0", 10),
    "10 GB of blanks": lambda: packed(BEGIN, b" ", 10),
    "10 GB of one text": lambda: packed(BEGIN + b'{"name":"', b"a", 10),
    "10 GB of one name of a member": lambda: packed(b'{"schemaVersion": 1, "', b"a", 10),
    "10 GB of members": lambda: packed(b'{"schemaVersion": 1, ', b'"a":[[],[],[],[]],', 10),
    "10 GB of empty events": lambda: packed(BEGIN, b"{},", 10),
    "an event that nests 100,000 deep": lambda: packed(BEGIN + b'{"args":' * 100_000, b" ", 1),
    "an event of 200 MB": lambda: packed(BEGIN + b'{"args":{"x":[', b"[],", 1)[: 1 << 18],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_trace_that_unfolds_without_end_ends_its_reader_and_the_next_is_read(tmp_path: Path, name: str) -> None:
    bad, good = tmp_path / "bad.pt.trace.json.gz", tmp_path / "good.pt.trace.json"
    bad.write_bytes(BOMBS[name]())
    os.utime(bad, ns=(0, 0))  # it comes first
    good.write_bytes(trace(EVENTS))
    ends = told(follow(tmp_path, limits=QUICK, polls=80))
    assert ends.pop(good.name) == []
    assert ends in ({bad.name: ["killed_reader"]}, {bad.name: ["incomplete"]})


@pytest.mark.slow
def test_a_trace_without_an_end_is_read_twice_and_not_for_ever(tmp_path: Path) -> None:
    """One whose writer was killed: each attempt reads it whole."""
    path = tmp_path / "torn.pt.trace.json"
    path.write_bytes(trace(EVENTS)[:-200])
    reads: list[float] = []
    follower = ExportFollower([tmp_path], host="h", is_applied=lambda _: None, reader_limits=QUICK, timing=Timing())
    batches: list[Batch] = []
    for second in range(300):
        used = os.times().children_user
        batches += follower.poll(second * 1_000_000_000)
        reads += [1.0] if os.times().children_user > used else []
    assert told(batches) == {path.name: ["incomplete"]}
    assert len(reads) == 2
    assert follower.statistics().waiting == 0


@pytest.mark.slow
def test_groups_that_a_few_bytes_make_huge_are_left_out(tmp_path: Path) -> None:
    huge = {"Group size": 1 << 20, "Global rank start": 0, "Global rank stride": 1, "Process Group Ranks": "[0, ...]"}
    notes = [note(number, number, **{**huge, "Process Group Name": f"g{number}"}) for number in range(2_000)]
    path = tmp_path / "huge.pt.trace.json"
    path.write_bytes(trace(notes, distributedInfo={"rank": 1}))
    batches = follow(tmp_path, limits=ReaderLimits())
    assert told(batches) == {path.name: []}
    skipped = [batch.counts.skipped for batch in batches if batch.is_last]
    assert skipped == [{"call_without_group": 1_998}]


# Dumps of the Flight Recorder, which the agent reads itself


def long(value: int) -> bytes:
    """LONG1. *Source:* CPython `Lib/pickletools.py`."""
    data = value.to_bytes(16, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


PICKLES: dict[str, bytes] = {
    "empty maps": b"\x80\x02]q\0(" + b"}" * (8 << 20) + b"e.",
    "lists on the stack": b"\x80\x02" + b"]" * (8 << 20),
    "a list that is recalled": b"\x80\x02]q\0(" + b"h\0" * (6 << 20) + b"e.",
    "a list in itself": b"\x80\x02]q\0" + b"h\0a" * (2 << 20) + b".",
    "tuples in tuples": b"\x80\x02)" + b"\x85" * (8 << 20) + b".",
    "marks": b"\x80\x02" + b"(" * (8 << 20) + b"t.",
    "texts": b"\x80\x02](" + b"\x8c\x02ab" * (2 << 20) + b"e.",
    "memos": b"\x80\x02N" + b"\x94" * (8 << 20) + b".",
    "keys of one hash": b"\x80\x02}(" + b"".join(long(n * (2**61 - 1)) + b"N" for n in range(1, 200_000)) + b"u.",
    "LONG4": b"\x80\x02\x8b\xff\xff\xff\x7f" + b"\0" * (1 << 20) + b".",
    "LONG1 of 255 bytes": b"\x80\x02\x8a\xff" + b"\1" * 255 + b".",
    "a text of 4 GB": b"\x80\x02X\xff\xff\xff\xff" + b"a" * (1 << 20) + b".",
    "BINBYTES8": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"a.",
    "a frame of an exabyte": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "GLOBAL": b"\x80\x02cos\nsystem\n(X\x02\0\0\0idtR.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "INST": b"(S'id'\nios\nsystem\n.",
    "EXT1": b"\x80\x02\x82\x01.",
    "PERSID": b"\x80\x02Pid\n.",
    "BUILD": b"\x80\x02}}b.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_that_unfolds_nests_or_runs_something_is_refused(name: str) -> None:
    began = time.process_time()
    with memory_below(200), pytest.raises(FormatError):
        read_dump(PICKLES[name], "rank_1")
    assert time.process_time() - began < 60


@pytest.mark.slow
def test_a_dump_of_two_thousand_calls_with_deep_stacks_is_read() -> None:
    """The bounds are far from what PyTorch writes: 2,000 entries, which is its default, with stacks of 50 frames."""
    frames = [{"name": f"f{n}", "filename": f"dir/file{n}.py", "line": 1_000 + n} for n in range(50)]
    content = dump(*(entry(number, frames=[{**each} for each in frames]) for number in range(1, 2_001)))
    for data in (pickle.dumps(content, 2), json.dumps(content).encode()):
        (record,) = read_dump(data, "rank_1")
        assert record.last_enqueued == 2_000


JSONS = {
    "lists": b'{"entries":[' + b"[]," * (4 << 20) + b'"collective_seq_id"]}',
    "maps": b'{"entries":[' + b"{}," * (4 << 20) + b'"collective_seq_id"]}',
    "texts": b'{"entries":[' + b'"ab",' * (3 << 20) + b'"collective_seq_id"]}',
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JSONS)
def test_a_dump_of_16_mb_that_would_take_hundreds_is_one_gap_and_others_are_read(tmp_path: Path, name: str) -> None:
    bad = JSONS[name].replace(b'{"', b'{"collective_seq_id":1,"', 1)[:MOST_LIVE_BYTES]
    (tmp_path / "nccl_trace_rank_1").write_bytes(bad)
    (tmp_path / "nccl_trace_rank_2").write_bytes(json.dumps(dump(entry(1))).encode())
    follower = FlightDumpFollower([f"{tmp_path}/nccl_trace_rank_*"])
    with memory_below(100):
        batches = [batch for number in range(30) for batch in follower.poll(number)]
    assert sorted(gap.reason for batch in batches for gap in batch.gaps) == ["unreadable_dump"]
    assert sum(len(batch.facts) for batch in batches) == 1


# What a service would refuse must not be sent: it would be sent again for ever


@pytest.mark.parametrize(
    "more",
    [
        {"collective_seq_id": 2**40},
        {"collective_seq_id": 2**61},
        {"time_created_ns": 2**62},
        {"profiling_name": ""},
        {"profiling_name": "\ud800"},
        {"process_group": ("\ud800", "x" * 1000)},
        {"state": "x" * 1000},
        {"input_sizes": [[2**61]]},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("ranks", [[0], [2**31], [-1], "[" + "1," * 600_000 + "1]"], ids=lambda it: str(it)[:9])
def test_what_a_dump_says_is_taken_by_every_service(more: dict[str, object], ranks: object) -> None:
    content = dump({**entry(1), **more}, entry(2))
    content["pg_config"] = {"0": {"ranks": ranks}, "\ud800": {"ranks": ranks}}
    facts = tuple(read_dump(json.dumps(content).encode(), "rank_1"))
    batch = Batch(source=Source(kind=SourceKind.FLIGHT_RECORDER, name="d", key="k"), begin=0, end=1, facts=facts)
    message = decode_message(Window(WindowLimits()).payload(batch, 1))
    assert isinstance(message, BatchMessage)
    assert len(message.batch.facts) == len(facts) or [gap.reason for gap in message.batch.gaps] == ["batch_not_valid"]


# Answers of RAS: any program on the node may listen at its port


def dripping(connection: socket.socket, begin: bytes, is_over: threading.Event) -> None:
    """Sends what does not end, byte by byte."""
    with connection:
        try:
            connection.sendall(begin)
            while not is_over.wait(0.02):
                connection.sendall(b" ")
        except OSError:
            return


@pytest.mark.parametrize("begin", [b"", b"SERVER PROTOCOL 2\nOK\nOK\n", b"SERVER PROTOCOL 2\nOK\nOK\n{"])
def test_an_answer_that_drips_is_given_up_within_its_time(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras_port, "_STEP_SECONDS", 0.3)
    is_over = threading.Event()
    threads: list[threading.Thread] = []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=dripping, args=(connection, begin, is_over)))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads.append(threading.Thread(target=serve, args=(listener,)))
        threads[0].start()
        follower = RasFollower("127.0.0.1", listener.getsockname()[1], seconds=0.5)
        began = time.monotonic()
        batches = list(follower.poll(1))
        took = time.monotonic() - began
        is_over.set()
        listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(60)
    assert [batch.counts.skipped for batch in batches] == [{"ras_silent": 1}]
    assert took < 30


def test_an_answer_without_end_is_cut_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras_port, "LONGEST_ANSWER", 1 << 20)
    monkeypatch.setattr(ras_port, "LONGEST_TEXT", 1 << 20)
    with RasServer(lambda _: b"{" + b" " * (8 << 20), knows_json=True) as server:
        (batch,) = RasFollower("127.0.0.1", server.port).poll(1)
    assert batch.counts.skipped == {"ras_too_long": 1}


RANK = b'{"rank":0},'
ANSWERS: dict[str, Callable[[], bytes]] = {
    "ranks": lambda: b'{"communicators":[{"hash":"0x1","size":2,"ranks":[' + RANK * 6_000_000 + b'{"rank":1}]}]}',
    "communicators": lambda: b'{"communicators":[' + b'{"hash":"","size":0},' * 3_000_000 + b'{"hash":"","size":0}]}',
    "operations": lambda: (
        b'{"communicators":[{"hash":"0x1","size":2,"ranks":[{"rank":0,"collective_counts":{'
        + b",".join(b'"%x":1' % number for number in range(5_000_000))
        + b"}}]}]}"
    ),
    "operations of each rank": lambda: (
        b'{"communicators":[{"hash":"0x1","size":2,"ranks":['
        + b",".join(b'{"rank":0,"collective_counts":{"%x":1}}' % number for number in range(100_000))
        + b"]}]}"
    ),
    "what nobody knows": lambda: b'{"communicators":[],"x":[' + b"[]," * 20_000_000 + b"1]}",
    "lines": lambda: b"NCCL version 2.24.3\n" + b"\n" * (8 << 20) + b"\nWarnings\n========\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_ras_takes_little_more_memory_than_it_is_long(name: str) -> None:
    answer = ANSWERS[name]()
    assert len(answer) <= ras_port.LONGEST_ANSWER
    with memory_below(250):
        try:
            assert read_answer(answer) == []
        except FormatError:
            return


@pytest.mark.parametrize(
    ("key", "value"),
    [("pid", 2**40), ("pid", -5), ("rank", 2**31), ("host", "x" * 300), ("collective_counts", {"x" * 200: 1})],
)
def test_an_answer_with_what_no_service_takes_is_refused(key: str, value: object) -> None:
    ranks = [rank(0, AllReduce=1), {**rank(1, AllReduce=2), key: value}]
    with pytest.raises(FormatError):
        read_answer(json_status(("0x1", ranks, [])))


# Dumps of Inspector, and topology files

ABOUT = (
    b'{"header":{"id":"0x1","rank":0,"n_ranks":4},"metadata":{"inspector_output_format_version":"v4.2",'
    b'"dump_timestamp_us":1,"hostname":"h","pid":1},'
)


@pytest.mark.parametrize(
    "line",
    [
        ABOUT + b'"proxy_trace":[' + b"[]," * 80_000 + b"1]}",
        ABOUT + b'"coll_perf":{"coll":"AllReduce","coll_sn":' + b"9" * 4_000 + b"}}",
        ABOUT + b'"coll_perf":{"coll":"' + b"x" * 250_000 + b'"}}',
        b'{"header":' * 25_000,
        ABOUT + b'"x":"' + b"\\u0000" * 40_000 + b'"}',
    ],
    ids=["a list", "a number", "a name", "headers", "escapes"],
)
def test_a_line_of_inspector_is_bounded_and_the_next_one_is_read(line: bytes) -> None:
    reader = InspectorReader(Source(kind=SourceKind.INSPECTOR, name="n", key="k"))
    with memory_below(40):
        batches = [*reader.ingest_bytes((line + b"\n") * 20), *reader.ingest_bytes(ABOUT + b'"proxy_trace":{}}\n')]
    assert batches[-1].counts.understood["inspector_proxy"] >= 1


@pytest.mark.parametrize(
    "element",
    [
        b'<cpu numaid="%d" host_hash="0x1"/>',
        b'<cpu numaid="0" host_hash="0x%d"/>',
        b'<cpu numaid="0" host_hash="0x1"><pci busid="%d:00:00.0"/></cpu>',
    ],
    ids=["NUMA nodes", "machines", "bridges"],
)
def test_a_topology_that_links_all_with_all_is_refused(element: bytes) -> None:
    inside = b"".join(element % number for number in range(60_000))
    data = b'<system version="1">' + inside[: MAX_BYTES - 40].rpartition(b"<cpu")[0] + b"</system>"
    began = time.process_time()
    with pytest.raises(FormatError):
        read_topology_xml(data, "host")
    assert time.process_time() - began < 20


# What a service would refuse for ever is not sent


def test_a_batch_that_a_service_would_refuse_is_sent_without_its_records() -> None:
    (fact,) = read_dump(json.dumps(dump(entry(1))).encode(), "rank_1")
    bad = replace(fact, group_ranks=(2**40,))
    source = Source(kind=SourceKind.FLIGHT_RECORDER, name="d", key="k")
    window = Window(WindowLimits())
    message = decode_message(window.payload(Batch(source=source, begin=0, end=1, facts=(bad, fact)), 1))
    assert isinstance(message, BatchMessage)
    assert message.batch.facts == ()
    assert [(gap.reason, gap.amount) for gap in message.batch.gaps] == [("batch_not_valid", 2)]
    assert window.stripped == {"batch_not_valid": 1}
