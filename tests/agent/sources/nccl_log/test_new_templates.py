"""Operation lines that were not seen before: read together in columns, to the same as each alone."""

from __future__ import annotations

import pytest
from agent.log_samples import NODE, SOURCE, ReadLog, read_log
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_wire.terms import NO_POINTER

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
    """What readers say of these lines that know nothing yet."""
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
