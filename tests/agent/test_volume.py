"""How much log is written: by stamps, by growth, by process and node, and of what kind."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from agent.log_samples import operation_line
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.nccl_settings.volume import LogLook, Rate, by_node, by_process, look_at, shares

BEGIN = datetime(2025, 11, 21, 23, 59, 30, tzinfo=UTC)
TUNING = "node17:41822:41903 [2] NCCL INFO AllReduce: 16384 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}"


def stamped(seconds: float, line: str) -> str:
    return f"[{(BEGIN + timedelta(seconds=seconds)).strftime('%F %T.%f')}] {line}"


def look(*lines: str, name: str = "a.log", at: int = 0) -> LogLook:
    data = "".join(line + "\n" for line in lines).encode()
    return look_at(name, size_bytes=at + len(data), beginning=b"", last_part=data, last_part_at=at)


def operations_over(seconds: int, per_second: int, *, prefix: str = "node17:41822:41903 [2] NCCL INFO ") -> list[str]:
    line = operation_line(prefix=prefix)
    return [stamped(number / per_second, line) for number in range(seconds * per_second + 1)]


def test_the_rate_is_that_between_the_first_and_the_last_stamp() -> None:
    lines = operations_over(40, 25)
    rate = look(*lines).rate_by_stamps()
    assert rate is not None
    assert rate.method == "stamps"
    assert (rate.seconds, rate.lines_per_second) == (40.0, 25.0)
    assert rate.bytes_per_second == 25 * (len(lines[0]) + 1)


def test_lines_without_a_stamp_count_and_those_outside_the_stamps_do_not() -> None:
    bare = operation_line()
    warned = look(bare, stamped(0, bare), bare, bare, stamped(10, bare), bare)
    rate = warned.rate_by_stamps()
    assert rate is not None
    assert rate.lines_per_second == 0.3
    assert warned.stamped_lines == 2


@pytest.mark.parametrize(
    "lines",
    [
        [operation_line()] * 3,
        [stamped(0, operation_line())],
        [stamped(0, operation_line()), stamped(0.5, operation_line())],
        [stamped(10, operation_line()), stamped(0, operation_line())],  # the clock was set back
        ["[2025-13-41 25:61:61] " + operation_line()] * 2,
        [],
    ],
)
def test_without_stamps_that_are_a_second_apart_there_is_no_rate(lines: list[str]) -> None:
    assert look(*lines).rate_by_stamps() is None


@pytest.mark.parametrize("form", ["[%F %T] ", "[%F_%T] ", "%FT%T.123 ", "%F %T,123456789+0200 ", "1,2: [%F %T.001] "])
def test_stamps_of_many_forms_are_read(form: str) -> None:
    line = operation_line()
    first, last = BEGIN.strftime(form) + line, (BEGIN + timedelta(seconds=60)).strftime(form) + line
    rate = look(first, last).rate_by_stamps()
    assert rate is not None
    assert rate.seconds == 60.0


def test_growth_gives_a_rate_where_there_are_no_stamps() -> None:
    found = look(operation_line(), operation_line())
    size = len(operation_line()) + 1
    rate = found.rate_by_growth(50 * size, 10.0)
    assert rate == Rate(bytes_per_second=5.0 * size, lines_per_second=5.0, seconds=10.0, method="observed")
    assert found.rate_by_growth(-1, 10.0) is None  # it was written anew
    assert found.rate_by_growth(10, 0.0) is None


def test_processes_of_one_file_share_its_rate_and_nodes_sum_their_processes() -> None:
    one = "node17:1:1 [0] NCCL INFO "
    two = "node17:2:2 [1] NCCL INFO "
    other = "node18:1:1 [0] NCCL INFO "
    shared = look(*(line for pair in zip(operations_over(10, 5, prefix=one), operations_over(10, 5, prefix=two),
                                         strict=True) for line in pair))  # fmt: skip
    alone = look(*operations_over(10, 7, prefix=other))
    processes = by_process([(shared, shared.rate_by_stamps()), (alone, alone.rate_by_stamps())])
    assert [(volume.host, volume.pid) for volume in processes] == [("node17", 1), ("node17", 2), ("node18", 1)]
    assert [volume.operations_per_second for volume in processes] == pytest.approx([5.05, 5.05, 7.0])
    nodes = by_node(processes)
    assert [(volume.host, volume.pid, volume.logs) for volume in nodes] == [("node17", None, 2), ("node18", None, 1)]
    of_node = nodes[0].bytes_per_hour
    rate = shared.rate_by_stamps()
    assert rate is not None
    assert of_node == pytest.approx(rate.bytes_per_second * 3600)


def test_a_node_with_a_log_of_unknown_rate_has_an_unknown_rate() -> None:
    known, unknown = look(*operations_over(10, 5)), look(operation_line(prefix="node17:7:7 [0] NCCL INFO "))
    processes = by_process([(known, known.rate_by_stamps()), (unknown, unknown.rate_by_stamps())])
    assert [(volume.pid, volume.bytes_per_hour is None) for volume in processes] == [(7, True), (41_822, False)]
    (node,) = by_node(processes)
    assert node.bytes_per_hour is None


@pytest.mark.parametrize(
    ("subsystem", "line"),
    [
        ("COLL", operation_line()),
        ("COLL", stamped(0, operation_line())),
        ("TUNING", TUNING),
        ("TUNING", TUNING.replace("AllReduce: ", "")),
        ("INIT", "node17:1:2 [0] NCCL INFO comm 0x55 rank 0 nranks 2 cudaDev 0 busId 1000 commId 0x1 - Init COMPLETE"),
        ("INIT", "node17:1:2 [0] NCCL INFO ncclCommInitRank comm 0x55 rank 0 nranks 2 - Init START"),
        ("ENV", "node17:1:2 [0] NCCL INFO NCCL_DEBUG_SUBSYS set by environment to COLL"),
        ("NET", "node17:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB"),
        ("NET", "node17:1:2 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[2] [send] via NET/IB/0"),
        ("P2P", "node17:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read"),
        ("GRAPH", "node17:1:2 [0] NCCL INFO === System : maxBw 80.0 totalBw 80.0 ==="),
        ("GRAPH", "node17:1:2 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1"),
        ("BOOTSTRAP", "node17:1:2 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>"),
        ("CALL", "node17:1:2 NCCL CALL ncclGroupStart()"),
        ("WARN", "node17:1:2 [0] net.cc:12 NCCL WARN something broke"),
        ("other", "node17:1:2 [0] NCCL INFO something never seen"),
        ("not NCCL", "iteration 100 loss 3.2"),
    ],
)
def test_the_form_of_a_line_tells_its_subsystem(subsystem: str, line: str) -> None:
    found = look(line)
    assert dict(found.by_subsystem) == {subsystem: len(line) + 1}
    assert shares([found]) == {subsystem: 1.0}


def test_a_last_part_is_looked_at_from_its_first_whole_line_on() -> None:
    line = operation_line()
    assert look(line[40:], line, line, at=5000).lines == 2
    data = f"{line}\n{line}\n{line[:90]}".encode()
    unfinished = look_at("a", size_bytes=len(data), beginning=b"", last_part=data, last_part_at=0)
    assert (unfinished.lines, unfinished.operations) == (2, 2)


def test_versions_are_told_from_the_beginning_and_the_last_part() -> None:
    found = look_at(
        "a",
        size_bytes=10_000,
        beginning=b"NCCL version 2.21.5+cuda12.4\n",
        last_part=b"x\nnode17:1:2 [0] NCCL INFO NCCL version 2.28.9+cuda13.0\n",
        last_part_at=9_000,
    )
    assert found.versions == {"2.21.5", "2.28.9"}


@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_looked_at_without_an_exception(data: bytes, is_cut: bool) -> None:
    data = data.replace(b"\x00", b"node17:1:2 [0] NCCL INFO ").replace(b"\x01", b"[2025-11-21 23:59:30] ")
    found = look_at("a", size_bytes=len(data), beginning=data, last_part=data, last_part_at=int(is_cut))
    assert sum(found.by_subsystem.values()) <= len(data)
    assert found.operations <= found.nccl_lines <= found.lines
    processes = by_process([(found, found.rate_by_growth(1000, 1.0))])
    assert sum(volume.bytes_per_second or 0 for volume in processes) <= 1000.001
