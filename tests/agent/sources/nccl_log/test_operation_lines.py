# ruff: noqa: E501  log lines are as long as they are
from __future__ import annotations

import pytest
from agent.log_samples import NODE, SOURCE, ReadLog, read_log
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_wire.records import CommunicatorEventKind as Kind
from ncclscope_wire.terms import NO_NUMBER, NO_POINTER, OPERATION_CODES, UNKNOWN_OPERATION

COLL = (
    "sendbuff {s} recvbuff {r} count {n} datatype {t} op {o} root {root} comm 0x55d0c8b3e2a0 [nranks={k}] stream {st}"
)
A, B, STREAM = "0x7f2a40000000", "0x7f2a44000000", "0x55d0c7f01b10"


def coll(name: str, count: str, s: str, r: str, n: int, t: int, o: int, root: int, k: int, st: str = STREAM) -> str:
    return f"{name}: opCount {count} " + COLL.format(s=s, r=r, n=n, t=t, o=o, root=root, k=k, st=st)


def pointer(text: str) -> int:
    return 0 if text == "(nil)" else int(text, 16)


@pytest.mark.parametrize(
    ("version", "name", "op_count", "send", "receive", "count", "data_type", "reduction", "root", "nranks", "stream"),
    [
        ("2.27.3", "AllReduce", "0", A, A, 16777216, 7, 0, 0, 4, STREAM),
        ("2.20.5", "AllReduce", "1f", A, B, 1048576, 9, 4, 0, 8, STREAM),
        ("2.18.3", "AllGather", "3", A, B, 4194304, 0, 0, 0, 4, STREAM),
        ("2.22.3", "AllGather", "3", A, B, 1048576, 7, 0, 0, 4, STREAM),
        ("2.23.4", "ReduceScatter", "10", A, B, 1048576, 6, 0, 0, 4, STREAM),
        ("2.21.5", "Broadcast", "a", A, A, 65536, 0, 0, 3, 4, STREAM),
        ("2.26.2", "Reduce", "b", A, B, 1024, 4, 2, 1, 4, STREAM),
        ("2.10.3", "Send", "2", A, "(nil)", 262144, 7, 0, 3, 4, STREAM),
        ("2.12.12", "Send", "2", "(nil)", A, 262144, 7, 0, 3, 4, STREAM),
        ("2.27.7", "Recv", "0", "(nil)", "0x7f2a48000000", 262144, 7, 0, 3, 4, "(nil)"),
        ("2.28.3", "AlltoAll", "0", A, "0x7f2a48000000", 262144, 9, 0, 0, 4, STREAM),
        ("2.28.9", "Gather", "4", A, "(nil)", 4096, 7, 0, 0, 4, STREAM),
        ("2.28.9", "Scatter", "4", "(nil)", A, 4096, 7, 0, 0, 4, STREAM),
        ("2.29.2", "PutSignal", "0", "(nil)", A, 4096, 7, 0, 1, 4, STREAM),
        ("2.29.2", "WaitSignal", "0", "(nil)", "(nil)", 0, 2, 0, 0, 4, STREAM),
        ("2.24.3", "AllReduce", "7", A, A, 8192, 10, 1583027713, 0, 8, "0x2"),
        ("2.26.6", "AllReduce", "0", A, B, 1024, 7, 0, 0, 1, "0x1"),
        ("2.28.3", "AllGather", "0", "0x7f2a40200000", A, 262144, 7, 0, 0, 4, STREAM),
        ("2.4.8", "Broadcast", "ffffffffffffffff", A, A, 2**64 - 1, -1, -1, -1, 2, "(nil)"),
        ("a later one", "AllToAllV", "1", A, B, 1, 11, 0, 0, 4, STREAM),
    ],
)
def test_an_operation_line_gives_every_field_as_printed(
    version: str,
    name: str,
    op_count: str,
    send: str,
    receive: str,
    count: int,
    data_type: int,
    reduction: int,
    root: int,
    nranks: int,
    stream: str,
) -> None:
    text = NODE + coll(name, op_count, send, receive, count, data_type, reduction, root, nranks, stream)
    log = read_log(text.encode() + b"\n")
    assert log.operations == [
        {
            "host": "node17",
            "pid": 41822,
            "tid": 41903,
            "device": 2,
            "op": OPERATION_CODES.get(name, UNKNOWN_OPERATION),
            "op_name": name,
            "op_count": int(op_count, 16),
            "send_buffer": pointer(send),
            "recv_buffer": pointer(receive),
            "count": count,
            "data_type": data_type,
            "reduction": reduction,
            "root": root,
            "communicator": 0x55D0C8B3E2A0,
            "nranks": nranks,
            "stream": pointer(stream),
            "global_rank": NO_NUMBER,
            "line": 1,
            "logged_at_ns": None,
        }
    ]
    assert log.understood == {"operation": 1}
    assert not log.skipped


def test_rccl_adds_task_and_global_rank() -> None:
    text = NODE + coll("AllReduce", "1c", A, A, 16777216, 7, 0, 0, 8) + " task 0 globalrank 2"
    [operation] = read_log(text.encode() + b"\n").operations
    assert (operation["global_rank"], operation["stream"], operation["op_count"]) == (2, 0x55D0C7F01B10, 0x1C)


@pytest.mark.parametrize(
    "between",
    ["ncclEnqueueCheck, 2306 ", "ncclEnqueueCheck(), enqueue.cc:2306 ", "1558545003174220 ", "enqueue.cc:1712 (f) "],
)
def test_text_of_forks_between_device_and_level_is_passed_over(between: str) -> None:
    text = f"node17:41822:41822 [2] {between}NCCL INFO " + coll("AllGather", "1", A, B, 67108864, 7, 0, 0, 4)
    [operation] = read_log(text.encode() + b"\n").operations
    assert (operation["host"], operation["tid"], operation["device"]) == ("node17", 41822, 2)


@pytest.mark.parametrize(
    ("version", "text", "op", "size", "algorithm", "protocol", "channels", "expected"),
    [
        ("2.20.5", "67108864 Bytes -> Algo 1 proto 2 time 412.334503", None, 67108864, 1, 2, -1, 412.334503),
        (
            "2.23.4",
            "AllReduce: 67108864 Bytes -> Algo 4 proto 2 time 250.117203",
            "AllReduce",
            67108864,
            4,
            2,
            -1,
            250.117203,
        ),
        (
            "2.24.3",
            "AllReduce: 67108864 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}",
            "AllReduce",
            67108864,
            1,
            2,
            24,
            None,
        ),
        (
            "2.31.2",
            "ReduceScatter: 1048576 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..1} cgaClusterSize 4",
            "ReduceScatter",
            1048576,
            1,
            2,
            2,
            None,
        ),
        (
            "2.24.3",
            "Broadcast: 4 Bytes -> Algo Unknown proto LL128 channel{Lo..Hi}={2..2}",
            "Broadcast",
            4,
            -1,
            1,
            1,
            None,
        ),
        (
            "2.27.3",
            "AllReduce [Symmetric]: 65536 Bytes -> Kernel AllReduce_RSxLDMC_AGxSTMC nchannels 8 nthreads 512",
            "AllReduce",
            65536,
            -1,
            -1,
            8,
            None,
        ),
        (
            "2.28.3",
            "AllGather [Symmetric]: 131072 Bytes -> Kernel AllGather_STMC nchannels 8 nthreads 512 nWorks 2",
            "AllGather",
            131072,
            -1,
            -1,
            8,
            None,
        ),
        (
            "2.29.2",
            "AllGather [Copy Engine]: 33554432 Bytes -> cudaMemcpy; CE synchronization with NVLS",
            "AllGather",
            33554432,
            -1,
            -1,
            -1,
            None,
        ),
        (
            "2.30.7",
            "AllGather [Hierarchical CE]: 33554432 Bytes -> RMA proxy + CE",
            "AllGather",
            33554432,
            -1,
            -1,
            -1,
            None,
        ),
    ],
)
def test_a_tuning_line_gives_what_it_says(
    version: str,
    text: str,
    op: str | None,
    size: int,
    algorithm: int,
    protocol: int,
    channels: int,
    expected: float | None,
) -> None:
    log = read_log(f"node17:41820:41901 [0] NCCL INFO {text}\n".encode())
    assert log.tunings == [
        {
            "host": "node17",
            "pid": 41820,
            "line": 1,
            "op": UNKNOWN_OPERATION if op is None else OPERATION_CODES[op],
            "bytes": size,
            "algorithm": algorithm,
            "protocol": protocol,
            "channels": channels,
            "expected_us": expected,
        }
    ]
    assert not log.operations
    assert log.understood == {"tuning": 1}


COMM = "comm 0x55d0c8b3e2a0 rank 2 nranks 4 cudaDev 2"
CHILD = "comm 0x55d0ca10bb40 rank 1 nranks 2 cudaDev 2 nvmlDev 2 busId 81000 parent 0x55d0c8b3e2a0"
BASE = {"pointer": 0x55D0C8B3E2A0, "rank": 2, "nranks": 4, "cuda_device": 2, "bus_id": 0x81000}
SPLIT = {
    "pointer": 0x55D0CA10BB40,
    "rank": 1,
    "nranks": 2,
    "cuda_device": 2,
    "nvml_device": 2,
    "bus_id": 0x81000,
    "parent": 0x55D0C8B3E2A0,
    "color": 0,
    "key": 2,
}
ID = 0x8F2C4A1D0B7E6635


@pytest.mark.parametrize(
    ("version", "text", "kind", "fields"),
    [
        ("2.4.8", f"{COMM} nvmlDev 2 - Init COMPLETE", Kind.INIT_COMPLETE, {**BASE, "bus_id": None, "nvml_device": 2}),
        ("2.8.3", f"{COMM} busId 81000 - Init COMPLETE", Kind.INIT_COMPLETE, BASE),
        (
            "2.16.2",
            f"{COMM} busId 81000 commId 0x8f2c4a1d0b7e6635 - Init COMPLETE",
            Kind.INIT_COMPLETE,
            {**BASE, "comm_id": ID},
        ),
        (
            "2.18.3",
            f"{COMM} nvmlDev 6 busId 81000 commId 0x8f2c4a1d0b7e6635 - Init START",
            Kind.INIT_START,
            {**BASE, "nvml_device": 6, "comm_id": ID},
        ),
        (
            "2.21.5",
            f"ncclCommInitRank {COMM} nvmlDev 2 busId 81000 commId 0x8f2c4a1d0b7e6635 - Init START",
            Kind.INIT_START,
            {**BASE, "nvml_device": 2, "comm_id": ID, "api": "ncclCommInitRank"},
        ),
        (
            "2.21.5",
            f"ncclCommSplit {CHILD} color 0 key 2 commId 0x11fe98a4b2c07d03 - Init COMPLETE",
            Kind.INIT_COMPLETE,
            {**SPLIT, "comm_id": 0x11FE98A4B2C07D03, "api": "ncclCommSplit"},
        ),
        (
            "2.23.4",
            f"ncclCommSplit {CHILD} color -1206342021 key 2- Init START",
            Kind.INIT_START,
            {**SPLIT, "color": -1206342021, "api": "ncclCommSplit"},
        ),
        (
            "2.26.2",
            f"ncclCommSplit {CHILD} splitCount 1 color 0 key 2 - Init COMPLETE",
            Kind.INIT_COMPLETE,
            {**SPLIT, "split_count": 1, "api": "ncclCommSplit"},
        ),
        (
            "2.27.3",
            f"ncclCommShrink {CHILD} splitCount 1 color 0 key 2- Init START",
            Kind.INIT_START,
            {**SPLIT, "split_count": 1, "api": "ncclCommShrink"},
        ),
        (
            "2.28.9",
            f"ncclCommInitRankConfig {COMM} nvmlDev 2 busId 81000 commId 0x8f2c4a1d0b7e6635 - Init COMPLETE",
            Kind.INIT_COMPLETE,
            {**BASE, "nvml_device": 2, "comm_id": ID, "api": "ncclCommInitRankConfig"},
        ),
        (
            "2.29.2",
            f"[Rank 2] ncclCommInitRankScalable {COMM} nvmlDev 2 busId 81000 commId 0x8f2c4a1d0b7e6635 - Init START",
            Kind.INIT_START,
            {**BASE, "nvml_device": 2, "comm_id": ID, "api": "ncclCommInitRankScalable"},
        ),
        (
            "2.30.7",
            f"ncclCommSplit {CHILD} childCount 1 color 0 key 2 - Init COMPLETE",
            Kind.INIT_COMPLETE,
            {**SPLIT, "split_count": 1, "api": "ncclCommSplit"},
        ),
        (
            "2.31.2",
            f"ncclCommSplit {CHILD.replace(' parent', ' commId 0xdf362bbfd2fef11b parent')} childCount 1 color 0 key 2 - Init START",
            Kind.INIT_START,
            {**SPLIT, "comm_id": 0xDF362BBFD2FEF11B, "split_count": 1, "api": "ncclCommSplit"},
        ),
        ("2.12.7", f"{COMM} busId 81000 - Destroy COMPLETE", Kind.DESTROY, BASE),
        ("2.22.3", f"{COMM} busId 81000 - Abort COMPLETE", Kind.ABORT, BASE),
        ("2.28.3", "comm 0x55d0c8b3e2a0 rank 2 nRanks 4 cudaDev 2 busId 81000 - Abort START", Kind.ABORT, BASE),
        (
            "freed",
            "comm 0x55d0c8b3e2a0 rank -1 nranks -1 cudaDev -1 busId ffffffffffffffff - Abort COMPLETE",
            Kind.ABORT,
            {"pointer": 0x55D0C8B3E2A0, "rank": -1, "nranks": -1, "cuda_device": None, "bus_id": None},
        ),
    ],
)
def test_a_life_cycle_line_gives_every_field(version: str, text: str, kind: Kind, fields: dict[str, object]) -> None:
    log = read_log((NODE + text + "\n").encode())
    [event] = log.communicators
    assert (event.kind, event.host, event.pid, event.tid, event.line) == (kind, "node17", 41822, 41903, 1)
    names = (
        "pointer",
        "rank",
        "nranks",
        "cuda_device",
        "nvml_device",
        "bus_id",
        "comm_id",
        "parent",
        "split_count",
        "color",
        "key",
        "api",
    )
    assert {name: getattr(event, name) for name in names} == {**dict.fromkeys(names), **fields}
    assert log.understood == {"init": 1}


@pytest.mark.parametrize(
    ("text", "version", "cuda", "host"),
    [
        ("NCCL version 2.8.4+cuda11.1", "2.8.4", "11.1", None),
        ("node17:41820:41901 [0] NCCL INFO NCCL version 2.27.5+cuda12.9", "2.27.5", "12.9", "node17"),
        ("[2026-03-02 11:20:33] NCCL version 2.26.2+cuda12.2", "2.26.2", "12.2", None),
        (" 0: NCCL version 2.4.8+cuda10.1", "2.4.8", "10.1", None),
        ("[1,0]<stdout>:NCCL version 2.9.9+cuda11.3", "2.9.9", "11.3", None),
        ("node17:1:1 [0] NCCL INFO NCCL version 2.5.7+cudaCUDA_MAJOR.CUDA_MINOR", "2.5.7", None, "node17"),
        ("node17:1:1 [0] NCCL INFO NCCL version 2.27.5", "2.27.5", None, "node17"),
    ],
)
def test_a_version_line_gives_the_version(text: str, version: str, cuda: str | None, host: str | None) -> None:
    [seen] = read_log(text.encode() + b"\n").versions
    assert (seen.version, seen.cuda, seen.host, seen.line) == (version, cuda, host, 1)


def test_version_lines_of_processes_that_were_glued_together_are_all_read() -> None:
    log = read_log(b"NCCL version 2.7.8+cuda10.2NCCL version 2.7.8+cuda10.2\n")
    assert [seen.version for seen in log.versions] == ["2.7.8", "2.7.8"]
    assert log.understood == {"version": 2}


@pytest.mark.parametrize(
    "text",
    [
        "tested with NCCL version 2.18.3",
        "network error, NCCL version 2.27.5",
        "NCCL version 2.18.3+cuda12.1 is too old",
    ],
)
def test_prose_about_versions_is_no_version_line(text: str) -> None:
    log = read_log(text.encode() + b"\n")
    assert not log.versions
    assert log.skipped == {"not_nccl": 1}


@pytest.mark.parametrize(
    "call",
    [
        "ncclGroupStart()",
        "ncclAllReduce(7f2a40000000,7f2a40000000,16777216,7,0,0,0x55d0c8b3e2a0,0x55d0c7f01b10)",
        "ncclCommInitRank(0x55d0c8b3e2a0, 4, 0x8f2c4a1d0b7e6635, 2, 2)",
    ],
)
def test_calls_are_counted(call: str) -> None:
    log = read_log(f"node17:41822:41822 NCCL CALL {call}\n".encode())
    assert log.understood == {"call": 1}
    assert not log.skipped


@pytest.mark.parametrize("text", ["a line of a later version", "Channel 00/24", "NCCL_P2P_DISABLE"])
def test_other_lines_of_nccl_are_counted_apart(text: str) -> None:
    log = read_log((NODE + text + "\n").encode())
    assert log.skipped == {"other_nccl": 1}
    assert not log.understood


def test_a_warning_is_an_empty_line_and_one_of_nccl() -> None:
    text = "\n[2026-03-02 11:20:33] node17:41822:41990 [2] misc/socket.cc:560 (f) NCCL WARN Connection closed by remote peer node18<47320>\n"
    log = read_log(text.encode())
    assert log.skipped == {"not_nccl": 1}
    assert log.understood == {"connection": 1}


POINTERS = st.sampled_from(["(nil)", "0x0", "0x7f2a40000000", "0xffffffffffffffff", "0x00000001", "0X1", "0x1g", "nil"])
COUNTS = st.sampled_from(["0", "7", "007", "9" * 18, "9" * 19, str(2**64 - 1), str(2**64), "9" * 20, "-1", "", "1 2"])
ENDINGS = st.sampled_from(["", "", " task 0 globalrank 5", " x", "\r"])
FORKS = st.sampled_from(["", "", "", " acc 0x1"])
TAILS = st.tuples(POINTERS, POINTERS, FORKS, COUNTS, st.sampled_from(["1", "8"]), ENDINGS)
Tail = tuple[str, str, str, str, str, str]


def line(tail: Tail, stamp: str = "") -> bytes:
    send, receive, fork, count, root, ending = tail
    return (
        f"{stamp}{NODE}Broadcast: opCount 1f sendbuff {send} recvbuff {receive}{fork} count {count} datatype 7 op 0 "
        f"root {root} comm 0x55d0c8b3e2a0 [nranks=4] stream 0x55d0c7f01b10{ending}\n"
    ).encode()


def _but_cut_streams(row: dict[str, object]) -> dict[str, object]:
    """Without the stream, if it is the only one that these lines have: one that was cut off may be it or not known."""
    return {name: value for name, value in row.items() if value not in {NO_POINTER, 0x55D0C7F01B10}}


def read_each_alone(lines: list[bytes]) -> ReadLog:
    """Calls in these lines, by readers that know nothing yet."""
    together = ReadLog()
    for number, text in enumerate(lines):
        log = read_log(text, reader=NcclLogReader(SOURCE, line=number))
        together.operations += log.operations
        together.understood.update(log.understood)
        together.skipped.update(log.skipped)
    return together


@settings(max_examples=200)
@given(tails=st.lists(TAILS, min_size=1, max_size=12), limit=st.integers(1, 8))
@example([("0x1", "0x2", "", "3", "1", ""), ("0x3", "(nil)", "", "9" * 20, "1", "")], 8)
def test_lines_read_together_say_what_each_alone_says(tails: list[Tail], limit: int) -> None:
    lines = [line(tail) for tail in tails]
    alone = read_each_alone(lines)
    for reader in (NcclLogReader(SOURCE), NcclLogReader(SOURCE, max_templates=limit)):
        together = read_log(b"".join(lines), reader=reader)
        assert list(map(_but_cut_streams, together.operations)) == list(map(_but_cut_streams, alone.operations))
        assert (together.understood, together.skipped) == (alone.understood, alone.skipped)


def test_what_is_remembered_of_lines_that_never_recur_is_bounded() -> None:
    reader = NcclLogReader(SOURCE, max_templates=50)
    lines = [line((hex(4096 + number), "(nil)", "", "1", str(number), "")) for number in range(500)]
    log = read_log(b"".join(lines), reader=reader)
    assert [operation["root"] for operation in log.operations] == list(range(500))
    assert reader.statistics().templates_sent == 500
    assert reader.statistics().templates_remembered <= 50


@pytest.mark.parametrize("zone", ["", "+0530"])
@pytest.mark.parametrize(
    "bad",
    [
        "[2026-03-02 11:20:33.12x456",
        "[2026-03-02 11:2:033.123456",
        "[2026-03-02 11:20:33;123456",
        "[2026-03-02 11:20:73.123456",
        "[2026-03-02 11:20:3a.123456",
        "xxxxxxxxxxxxxxxxxxxxxxxxxxx",
    ],
)
def test_one_bad_stamp_among_those_of_a_second_spoils_no_other(zone: str, bad: str) -> None:
    tail = ("0x1", "0x2", "", "3", "1", "")
    stamps = [f"[2026-03-02 11:20:33.{number:06d}{zone}] " for number in range(40)]
    stamps[7] = f"{bad}{zone}] "
    log = read_log(b"".join(line(tail, stamp) for stamp in stamps))
    first = int(str(log.operations[0]["logged_at_ns"]))
    expected = [None if number == 7 else first + number * 1000 for number in range(40)]
    assert [operation["logged_at_ns"] for operation in log.operations] == expected
