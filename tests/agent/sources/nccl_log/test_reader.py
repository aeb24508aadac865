from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from agent.log_samples import NODE, SOURCE, operation_line, put_together, read_log
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_wire import facts, tables
from ncclscope_wire.terms import NO_POINTER

INIT = f"{NODE}comm 0x55d0c8b3e2a0 rank 2 nranks 4 cudaDev 2 busId 81000 - Init COMPLETE"
TUNING = f"{NODE}AllReduce: 67108864 Bytes -> Algo RING proto SIMPLE channel{{Lo..Hi}}={{0..23}}"
OTHER = "node17:41820:41901 [0] NCCL INFO "
CUT = NODE + "Recv: opCount 173 sendbuff (nil) recvbuff 0x7f4d53016000 count 1024 datatype 2 op"


def lines(*texts: str) -> bytes:
    return "".join(text + "\n" for text in texts).encode()


# What stands in front of a record


@pytest.mark.parametrize(
    "tag",
    [
        "[1,2]<stdout>:",
        "0: ",
        " 12: ",
        "[default0]:",
        "[rank0]: ",
        "node-3: ",
        "10.0.0.17: ",
        "(Worker pid=77, ip=10.0.0.1) ",
        "\t",
        "0|",
        "\x1b[36m(pid=7)\x1b[0m ",
    ],
)
def test_launchers_tags_are_passed_over(tag: str) -> None:
    [operation] = read_log(lines(tag + operation_line())).operations
    assert (operation["host"], operation["pid"], operation["tid"]) == ("node17", 41822, 41903)


def test_application_text_in_front_is_told_from_the_host_by_what_is_known_of_the_file() -> None:
    log = read_log(lines(INIT, "step 12 loss 3.41" + operation_line(), "      0" + operation_line()))
    assert [operation["host"] for operation in log.operations] == ["node17", "node17"]
    assert not log.skipped


def test_digits_behind_a_dot_in_front_of_an_unknown_host_end_a_number() -> None:
    [operation] = read_log(lines("step 12 loss 3.41" + operation_line())).operations
    assert operation["host"] == "node17"


def test_a_host_that_ends_like_another_is_believed_when_it_comes_again() -> None:
    other = operation_line(prefix="bnode17:7:7 [0] NCCL INFO ")
    log = read_log(lines(operation_line(), other, operation_line(), other, other))
    assert [operation["host"] for operation in log.operations] == ["node17", "node17", "bnode17", "bnode17"]
    assert log.skipped == {"torn": 1}


def test_call_lines_have_no_device_and_others_may_have_none() -> None:
    [operation] = read_log(lines(operation_line(prefix="node17:1:2 NCCL INFO "))).operations
    assert operation["device"] == -1


# Torn lines


def test_a_record_behind_a_torn_one_is_recovered_and_the_torn_one_counted() -> None:
    whole = operation_line("Send", prefix=OTHER, stream="0x2")
    log = read_log(lines(CUT + whole))
    [operation] = log.operations
    assert (operation["host"], operation["pid"], operation["op_name"], operation["line"]) == (
        "node17",
        41820,
        "Send",
        1,
    )
    assert log.skipped == {"torn": 1}


def test_a_record_whose_host_cannot_be_told_is_dropped_and_counted() -> None:
    log = read_log(lines(CUT + operation_line(prefix="other3:1:1 [0] NCCL INFO ")))
    assert not log.operations
    assert log.skipped["torn"] == 2


SEND = operation_line("Send", stream="0x55d0c7f01b10")


@pytest.mark.parametrize("cut_at", range(1, len(SEND)))
def test_no_cut_of_a_record_in_front_of_another_gives_an_invented_one(cut_at: int) -> None:
    log = read_log(lines(INIT, SEND[:cut_at] + operation_line(prefix=OTHER)))
    found = [(operation["op_name"], operation["pid"], operation["host"]) for operation in log.operations]
    if cut_at >= SEND.index(" stream"):
        assert found == [("Send", 41822, "node17"), ("AllReduce", 41820, "node17")]
        assert log.operations[0]["stream"] == NO_POINTER
    else:
        assert found in ([], [("AllReduce", 41820, "node17")])
        assert log.operations or log.skipped


@pytest.mark.parametrize("host", ["node17", "c17", "abc"])
def test_a_pointer_cut_in_front_of_another_record_is_not_taken_for_whole(host: str) -> None:
    second = operation_line(prefix=f"{host}:41820:41901 [0] NCCL INFO ")
    log = read_log(lines(INIT, second, operation_line("Send", stream="0x55d0") + second))
    assert [(operation["op_name"], operation["stream"]) for operation in log.operations] == [
        ("AllReduce", 0x55D0C7F01B10),
        ("Send", NO_POINTER),
        ("AllReduce", 0x55D0C7F01B10),
    ]
    assert not log.skipped


@pytest.mark.parametrize(
    "tail",
    [
        "",
        " strea",
        " stream 0x55d0:41820:4",
        " stream 0x55d0c7f01b10step 5",
        f" str{OTHER}AllRed",
        "00000 count 5 data",
    ],
)
def test_an_operation_whose_stream_was_overwritten_keeps_its_row(tail: str) -> None:
    """On the only stream of its communicator, else of its process; without one if there are several."""
    cut = operation_line("Send", count=7).partition(" stream")[0] + tail
    streams = []
    for before in ([], [operation_line()], [operation_line(), operation_line(stream="0x55d0c7f01b20")]):
        log = read_log(lines(*before, cut, operation_line()))
        [send] = [operation for operation in log.operations if operation["op_name"] == "Send"]
        assert (send["count"], send["communicator"], send["nranks"]) == (7, 0x55D0C8B3E2A0, 4)
        streams.append(send["stream"])
    assert streams == [NO_POINTER, 0x55D0C7F01B10, NO_POINTER]
    elsewhere = cut.replace("comm 0x55d0c8b3e2a0", "comm 0x55d0c8b3e2b0")
    assert read_log(lines(operation_line(), elsewhere)).operations[1]["stream"] == 0x55D0C7F01B10


@pytest.mark.parametrize("stream", ["(nil)", "0x55d0c7f01b10"])
@pytest.mark.parametrize("stamp", ["", "[2026-03-02 11:20:33] "])
def test_two_whole_records_on_a_line_are_two_rows(stream: str, stamp: str) -> None:
    first = stamp + operation_line("Send", stream=stream, op_count="a")
    log = read_log(
        lines(stamp + OTHER + "Using network IB", first + stamp + operation_line(prefix=OTHER, op_count="b"))
    )
    assert [operation["op_count"] for operation in log.operations] == [10, 11]
    assert [operation["line"] for operation in log.operations] == [2, 2]
    assert {operation["host"] for operation in log.operations} == {"node17"}
    assert log.understood == {"operation": 2, "network": 1}
    assert not log.skipped


def test_init_and_tuning_records_with_a_record_glued_to_their_end_are_read() -> None:
    log = read_log(lines(INIT + operation_line(prefix=OTHER), TUNING + operation_line(prefix=OTHER)))
    assert log.understood == {"init": 1, "tuning": 1, "operation": 2}


@pytest.mark.parametrize(
    "piece",
    [
        operation_line()[60:],
        operation_line(prefix=""),
        "1] NCCL INFO AllReduce: opCount 0 sendbuff 0x1",
        operation_line()[:-29],
        operation_line(count=2**64),
        operation_line().replace("opCount 1f", "opCount 1g"),
        operation_line().replace("opCount 1f", "opCount "),
        operation_line().replace("opCount 1f", "opCount 1f1f1f1f1f1f1f1f1"),
        NODE + "67108864 Bytes -> Algo 1 proto 2 time 412.33",
    ],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_not_whole_is_counted_and_gives_no_row(piece: str, is_known: bool) -> None:
    before = [operation_line()] if is_known else []
    log = read_log(lines(*before, piece))
    assert len(log.operations) == len(before)
    assert not log.tunings
    assert sum(log.skipped.values()) == 1
    assert set(log.skipped) <= {"torn", "out_of_range"}


def test_a_known_line_with_a_stamp_torn_off_is_read_without_a_time() -> None:
    stamped = "[2026-03-02 11:20:33] " + operation_line()
    log = read_log(lines(*[stamped] * 20, "x" * 22 + operation_line(), "x recvbuff 0x55d0c8b3 " + operation_line()))
    assert [operation["logged_at_ns"] for operation in log.operations[-2:]] == [None, None]
    assert log.skipped == {"torn": 1}


def test_carriage_returns_and_zeros_of_a_hole_are_passed_over() -> None:
    data = b"\0" * 3000 + operation_line().encode() + b"\r\n" + operation_line().encode() + b"\r\n"
    assert [operation["line"] for operation in read_log(data).operations] == [1, 2]


# The end of the file


@pytest.mark.parametrize("stream", ["(nil)", "0x55d0c7f01b10"])
def test_a_last_line_without_newline_is_read_if_it_is_whole(stream: str) -> None:
    data = lines(INIT) + operation_line(stream=stream).encode()
    log = read_log(data)
    assert (log.end, log.end_line) == (len(data), 2)
    assert [operation["stream"] for operation in log.operations] == [0 if stream == "(nil)" else NO_POINTER]
    again = read_log(lines(operation_line(stream=stream)) + operation_line(stream=stream, op_count="20").encode())
    assert len(again.operations) == 2


def test_the_last_batch_says_that_it_is_the_last() -> None:
    reader = NcclLogReader(SOURCE)
    [first] = reader.ingest_bytes(lines(INIT), 5)
    [last] = reader.finish(6)
    assert (first.is_last, first.observed_at_ns, last.is_last, last.observed_at_ns) == (False, 5, True, 6)


# Positions and batches


def test_batches_are_contiguous_and_bounded() -> None:
    reader = NcclLogReader(SOURCE, lines_per_batch=3)
    data = lines(*[operation_line(op_count=f"{number:x}") for number in range(10)])
    batches = reader.ingest_bytes(data[:1000]) + reader.ingest_bytes(data[1000:]) + reader.finish()
    assert [batch.begin for batch in batches[1:]] == [batch.end for batch in batches[:-1]]
    assert max(len(batch.operations) for batch in batches) == 3
    assert batches[-1].end == len(data)
    assert [operation["op_count"] for operation in put_together(batches).operations] == list(range(10))


@pytest.mark.parametrize("at_line", range(6))
def test_a_reader_resumes_at_the_end_of_any_line(at_line: int) -> None:
    texts = [
        INIT,
        operation_line(),
        TUNING,
        "step 1.5" + operation_line(op_count="2"),
        CUT + operation_line(prefix=OTHER),
    ]
    data = lines(*texts)
    begin = len(lines(*texts[:at_line]))
    reader = NcclLogReader(SOURCE, begin=begin, line=at_line)
    reader.learn(data[:begin] or lines(INIT))
    log = read_log(data[begin:], reader=reader)
    whole = read_log(data)
    assert log.operations == [operation for operation in whole.operations if int(str(operation["line"])) > at_line]
    assert (log.end, log.end_line) == (whole.end, whole.end_line)


def test_a_row_has_the_dtype_of_the_wire() -> None:
    [batch] = NcclLogReader(SOURCE).ingest_bytes(lines(operation_line(), TUNING))
    assert batch.operations.dtype == tables.OPERATION_ROW
    assert batch.operation_templates.dtype == tables.OPERATION_TEMPLATE
    assert batch.tunings.dtype == tables.TUNING_ROW
    assert batch.threads.dtype == tables.THREAD


def test_lines_that_recur_share_a_template() -> None:
    texts = [operation_line(op_count=f"{number:x}", count=number % 5) for number in range(100)]
    [batch] = NcclLogReader(SOURCE).ingest_bytes(lines(*texts))
    assert len(batch.operation_templates) == 5
    assert np.array_equal(batch.operations["op_count"], np.arange(100))


# Limits


def test_a_line_that_is_too_long_is_skipped_however_it_comes() -> None:
    data = lines(operation_line(), "x" * 5000 + operation_line(), operation_line(op_count="2"))
    for cuts in ([], list(range(0, len(data), 7)), [3000, 4000]):
        log = read_log(data, cuts, NcclLogReader(SOURCE, max_line_bytes=4096))
        assert [operation["line"] for operation in log.operations] == [1, 3]
        assert log.skipped == {"too_long": 1}
        assert (log.end, log.end_line) == (len(data), 3)


def test_a_line_without_end_is_not_kept() -> None:
    reader = NcclLogReader(SOURCE, max_line_bytes=4096)
    for _ in range(100):
        assert not reader.ingest_bytes(b"y" * 4096)
    assert reader.unfinished_bytes == 409_600
    log = put_together([*reader.ingest_bytes(b"\n" + lines(operation_line())), *reader.finish()])
    assert (len(log.operations), log.skipped, log.end_line) == (1, {"too_long": 1}, 2)


def test_more_templates_than_are_remembered_cost_no_row() -> None:
    texts = [operation_line(count=number % 50) for number in range(500)]
    reader = NcclLogReader(SOURCE, max_templates=20)
    log = read_log(lines(*texts), reader=reader)
    assert [operation["count"] for operation in log.operations] == [number % 50 for number in range(500)]
    assert reader.statistics().template_lookup_resets > 0
    assert reader.statistics().templates_remembered <= 20


# Any cuts, any bytes

_TEXTS = [
    INIT,
    TUNING,
    CUT,
    "",
    "NCCL version 2.18.3+cuda12.1",
    "step 3 loss 2.5",
    "node17:41822:41822 NCCL CALL ncclGroupStart()",
    operation_line(),
    operation_line(op_count="20"),
    operation_line("Send", stream="0x2", op_count="a1"),
    operation_line("Recv", stream="(nil)", prefix=OTHER),
    *["[2026-03-02 11:20:33.123456] " + text for text in (operation_line(), TUNING, operation_line(count=7))],
    "[2026-03-02 11:20:34] " + operation_line(),
    "0: [2026-03-02 11:20:34] " + operation_line(),
]
_LOGS = st.lists(st.tuples(st.sampled_from(_TEXTS), st.sampled_from(["\n", "\n", "\n", "\r\n", "", "\0"])), max_size=40)


def _text(pieces: Sequence[tuple[str, str]]) -> bytes:
    return "".join(text + end for text, end in pieces).encode()


@settings(max_examples=150)
@given(pieces=_LOGS, data=st.data())
def test_the_same_bytes_give_the_same_however_they_are_cut(pieces: list[tuple[str, str]], data: st.DataObject) -> None:
    log = _text(pieces)
    whole = read_log(log)
    assert read_log(log, range(1, len(log))) == whole
    cuts = data.draw(st.lists(st.integers(0, len(log)), max_size=10))
    assert read_log(log, cuts, NcclLogReader(SOURCE, lines_per_batch=2)) == whole
    assert whole.end == len(log)
    assert whole.end_line == log.count(b"\n") + (bool(log) and not log.endswith(b"\n"))


@settings(max_examples=150)
@given(pieces=_LOGS, forgetting=st.integers(1, 3))
def test_what_is_remembered_changes_no_row(pieces: list[tuple[str, str]], forgetting: int) -> None:
    log = b"\n".join(_text([piece]) for piece in pieces) + b"\n"
    whole, forgetful = read_log(log), read_log(log, reader=NcclLogReader(SOURCE, max_templates=forgetting))
    assert whole.operations == forgetful.operations
    assert whole.tunings == forgetful.tunings
    assert (whole.understood, whole.skipped) == (forgetful.understood, forgetful.skipped)


_WORDS = st.sampled_from(
    [
        b"NCCL INFO ",
        b"NCCL version ",
        b": opCount ",
        b":1:2 ",
        b"node17",
        b"[0] ",
        b"\n",
        b"\0",
        b"sendbuff 0x1 ",
        b" Bytes -> ",
        b"comm 0x1 rank 0 nranks 1 cudaDev 0 - Init START",
        b"[2026-03-02 11:20:33] ",
        operation_line().encode(),
    ]
)


@settings(max_examples=300)
@given(pieces=st.lists(_WORDS | st.binary(max_size=20), max_size=40))
@example([b"node17:4294967296:1 [0] NCCL INFO x\n"])
@example([b":1:2 NCCL INFO x\n"])
def test_any_bytes_give_rows_or_counts(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    log = read_log(data)
    assert log.end == len(data)
    read = sum(log.understood.values()) + sum(log.skipped.values())
    assert read >= log.end_line
    assert log.understood["operation"] == len(log.operations)


@pytest.mark.parametrize(
    "piece",
    [b"a", b"a:", b":1:2 ", b"NCCL INFO ", b"a:1:2 NCCL INFO ", b"[[", b" ", b"a: ", b"NCCL version 1.1.1", b"(a "],
)
def test_a_hostile_line_takes_no_longer_than_another(piece: bytes) -> None:
    # A pattern that backtracks would take hours here.
    log = read_log(piece * (60_000 // len(piece)) + b" NCCL version 1.1.1\n")
    assert log.end_line == 1


def test_call_lines_tell_where_groups_begin_and_end() -> None:
    call = "node17:41822:41903 NCCL CALL "
    lines = [
        f"{call}ncclGroupStart()",
        operation_line(),
        f"{call}ncclAllReduce(0,0,1,7,0,0,0x1,0x2)",
        f"{call}ncclGroupEnd()",
    ]
    data = ("\n".join([operation_line(), *lines * 3]) + "\n").encode()
    reader = NcclLogReader(SOURCE)
    batches = [*reader.ingest_bytes(data[:300]), *reader.ingest_bytes(data[300:]), *reader.finish()]
    marks = [(int(row["line"]), int(row["kind"])) for batch in batches for row in batch.call_marks]
    begins = [(2, tables.CALLS_BEGIN)]
    assert marks == begins + [
        mark for first in (2, 6, 10) for mark in ((first, tables.GROUP_START), (first + 3, tables.GROUP_END))
    ]
    assert sum(batch.counts.understood.get("call", 0) for batch in batches) == 9


def test_a_torn_line_among_call_lines_is_marked() -> None:
    call = "node17:41822:41903 NCCL CALL "
    torn = operation_line()[:90] + operation_line()
    data = "\n".join([torn, f"{call}ncclGroupStart()", operation_line(), torn, f"{call}ncclGroupEnd()", ""]).encode()
    reader = NcclLogReader(SOURCE)
    marks = [row for batch in (*reader.ingest_bytes(data), *reader.finish()) for row in batch.call_marks.tolist()]
    assert [(line, kind) for _, line, kind in marks] == [
        (2, tables.CALLS_BEGIN),
        (2, tables.GROUP_START),
        (4, tables.CALLS_TORN),
        (5, tables.GROUP_END),
    ]


# What is torn, and what only looks so


@pytest.mark.parametrize(
    "text",
    [
        "node17:41822:41903 [2] 1523.114000 ncclProxySend:88 NCCL TRACE posted, sendbuff 0x7f2a40000000 size 4096",
        "node17:41822:41903 [2] 1523.114000 netSend:9 NCCL TRACE req 0x7f2a40000000, buff 0x7f2a44000000 tag 3",
        "node17:41822:41903 [2] enqueue.cc:88 NCCL TRACE buff 0x7f2a44000000",
    ],
)
def test_a_line_of_a_trace_build_is_not_torn_for_a_buffer_in_it(text: str) -> None:
    log = read_log(lines(operation_line(), text))
    assert log.understood == {"operation": 1, "trace": 1}
    assert not log.skipped


def test_text_of_an_application_that_names_a_buffer_is_no_torn_line() -> None:
    log = read_log(lines(operation_line(), "copy to recvbuff 0x7f2a44000000 took 3 us", "buff 0x1"))
    assert log.skipped == {"not_nccl": 2}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("3] NCCL INFO Using network IB", "torn"),
        ("41822:41903 [2] NCCL INFO Using network IB", "torn"),
        ("903 [2] NCCL INFO Using network IB", "torn"),
        ("node18:419] NCCL INFO Using network IB", "torn"),
        ("see the line NCCL INFO Using network IB", "no_prefix"),
        ("[2] NCCL INFO Using network IB", "no_prefix"),
    ],
)
def test_a_part_of_a_prefix_is_told_from_a_quotation(text: str, reason: str) -> None:
    assert read_log(lines(operation_line(), text)).skipped == {reason: 1}


# Hosts that nobody has


@pytest.mark.parametrize("row", ["   65536    16384   float     sum", "  8  2  bfloat16     avg      -1"])
def test_a_result_row_of_nccl_tests_in_front_of_the_first_record_is_no_part_of_its_host(row: str) -> None:
    [operation] = read_log(lines(row + operation_line())).operations
    assert operation["host"] == "node17"


def test_a_prefix_that_another_record_cut_off_is_no_launchers_tag() -> None:
    """Where `name:` in front of a record is a host of the file, or is followed by a number, it was torn."""
    other = "node18:7:7 [0] NCCL INFO "
    log = read_log(
        lines(
            "node17:41822:41903" + operation_line(prefix=other),
            operation_line(),
            "node17:418" + operation_line(prefix=other),
            operation_line(prefix=other),
        )
    )
    assert [operation["host"] for operation in log.operations] == ["node17", "node18"]
    assert log.skipped == {"torn": 2}


# Warnings


def test_a_warning_that_no_family_reads_is_passed_on_with_its_text() -> None:
    text = "node17:41822:41903 [2] misc/new.cc:12 NCCL WARN Something new happened to 0x7f00 after 3 s\n"
    [batch] = [batch for batch in NcclLogReader(SOURCE).ingest_bytes(text.encode()) if batch.facts]
    assert batch.facts == (
        facts.OtherWarning(
            line=1,
            host="node17",
            pid=41822,
            tid=41903,
            text="Something new happened to 0x7f00 after 3 s",
        ),
    )
    assert batch.counts.skipped == {"other_warning": 1}


def test_remarks_of_plug_ins_are_counted_and_their_warnings_are_not_lost() -> None:
    remark = "NET/OFI NIC group 0 has a line of its own in every version"
    log = read_log(lines(NODE + remark, NODE.replace("NCCL INFO", "nic.c:7 NCCL WARN") + remark))
    assert (log.understood, log.skipped) == ({"remark": 1}, {"other_warning": 1})


def test_a_head_with_all_its_fields_is_a_row_whether_its_tail_comes_or_not() -> None:
    cut = operation_line().index(" stream") + 9
    torn = f"[1,0]<stdout>:{operation_line()[:cut]}[1,1]<stdout>:{operation_line('Send', prefix=OTHER)}"
    log = read_log(lines(torn, f"[1,0]<stdout>:{operation_line()[cut:]}"))
    assert [operation["op_name"] for operation in log.operations] == ["AllReduce", "Send"]
