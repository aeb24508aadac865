from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from agent.log_samples import SOURCE, operation_line, read_log
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.sources.nccl_log import stamps
from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_agent.sources.nccl_log.stamps import Clock, StampLayout
from ncclscope_wire.terms import NO_TIME_NS

SECOND = 1_000_000_000
BASE = int(datetime(2026, 3, 2, 11, 20, 33, tzinfo=UTC).timestamp()) * SECOND


@pytest.mark.parametrize(
    ("stamp", "expected"),
    [
        ("[2026-03-02 11:20:33] ", BASE),
        ("[2026-03-02 11:20:33.004] ", BASE + 4_000_000),
        ("[2026-03-02 11:20:33.004217] ", BASE + 4_217_000),
        ("[2026-03-02 11:20:33.004217998] ", BASE + 4_217_998),
        ("[2026-03-02_11:20:33.004217] ", BASE + 4_217_000),
        ("2026-03-02T11:20:33.5Z ", BASE + SECOND // 2),
        ("[2026-03-02T11:20:33+0200] ", BASE - 7200 * SECOND),
        ("[2026-03-02 11:20:33 -05:30] ", BASE + 19800 * SECOND),
        ("2026-03-02 11:20:33,250 ", BASE + SECOND // 4),
        ("[1,0]<stdout>:[2026-03-02 11:20:33] ", BASE),
        ("node17: [2026-03-02 11:20:33] ", BASE),
        ("[2026-02-30 11:20:33] ", None),
        ("[2026-13-01 11:20:33] ", None),
        ("[2026-03-02 24:00:00] ", None),
        ("[2026-03-02 11:60:00] ", None),
        ("[3026-03-02 11:20:33] ", None),
        ("[11:20:33] ", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("lines", [1, 40])
def test_a_stamp_in_front_of_the_host_is_utc_ns(stamp: str, expected: int | None, lines: int) -> None:
    text = operation_line(prefix=stamp + "node17:41822:41903 [2] NCCL INFO ") + "\n"
    log = read_log(text.encode() * lines)
    assert [operation["logged_at_ns"] for operation in log.operations] == [expected] * lines
    assert {operation["host"] for operation in log.operations} == {"node17"}


def test_a_stamp_without_a_zone_is_read_in_the_zone_of_the_source() -> None:
    local = operation_line(prefix="[2026-03-02 11:20:33] node17:1:2 [0] NCCL INFO ")
    zoned = operation_line(prefix="[2026-03-02 11:20:33+0000] node17:1:2 [0] NCCL INFO ")
    reader = NcclLogReader(SOURCE, zone_offset_ns=3600 * SECOND)
    log = read_log("\n".join([local, zoned, *[local] * 40, *[zoned] * 40, ""]).encode(), reader=reader)
    early, late = BASE - 3600 * SECOND, BASE
    assert [operation["logged_at_ns"] for operation in log.operations] == [early, late, *[early] * 40, *[late] * 40]


def test_a_stamp_behind_which_a_launcher_wrote_is_not_the_records() -> None:
    text = operation_line(prefix="2026-03-02T11:20:33.123456789Z stdout F node17:1:2 [0] NCCL INFO ")
    [operation] = read_log(text.encode() + b"\n").operations
    assert operation["logged_at_ns"] is None


def test_the_day_may_change_within_a_batch() -> None:
    stamps = [f"[2026-02-28 23:59:{second:02d}] " for second in range(40, 60)]
    stamps += [f"[2026-03-01 00:00:{second:02d}] " for second in range(20)]
    lines = [operation_line(prefix=f"{stamp}node17:1:2 [0] NCCL INFO ") for stamp in stamps]
    times = [operation["logged_at_ns"] for operation in read_log("\n".join([*lines, ""]).encode()).operations]
    first = int(datetime(2026, 2, 28, 23, 59, 40, tzinfo=UTC).timestamp()) * SECOND
    assert times == [first + number * SECOND for number in range(40)]


def test_init_lines_carry_their_stamp() -> None:
    text = "[2026-03-02 11:20:33] node17:1:2 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 - Init COMPLETE\n"
    [event] = read_log(text.encode()).communicators
    assert event.logged_at_ns == BASE


_TIMES = st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(2261, 12, 30))


@given(
    times=st.lists(_TIMES, min_size=1, max_size=20),
    digits=st.integers(0, 9),
    separator=st.sampled_from(" T_"),
    zone=st.sampled_from(["", "Z", "+0100", "-03:30"]),
    spoiled=st.none() | st.integers(0, 30),
)
def test_many_stamps_at_once_read_as_each_alone(
    times: list[datetime], digits: int, separator: str, zone: str, spoiled: int | None
) -> None:
    def text(time: datetime) -> bytes:
        fraction = f".{time.microsecond:06d}789"[: digits + 1] if digits else ""
        return f"[{time:%Y-%m-%d}{separator}{time:%H:%M:%S}{fraction}{zone}] ".encode()

    texts = [text(time) for time in times]
    example = stamps.AT_START.match(texts[0])
    assert example is not None
    layout = StampLayout(example, Clock(5))
    if spoiled is not None:
        at = spoiled % len(texts[-1])
        texts[-1] = texts[-1][:at] + b"\xff" + texts[-1][at + 1 :]
    read = layout.read(texts)
    alone = [stamps.AT_END.match(stamp) for stamp in texts]
    assert read.tolist() == [NO_TIME_NS if one is None else stamps.stamp_ns(one, Clock(5)) for one in alone]


@given(time=_TIMES)
def test_a_stamp_agrees_with_the_calendar(time: datetime) -> None:
    found = stamps.AT_START.match(f"[{time:%Y-%m-%d %H:%M:%S}.{time.microsecond:06d}] ".encode())
    assert found is not None
    since = time - datetime(1970, 1, 1)
    assert stamps.stamp_ns(found, Clock()) == since // timedelta(microseconds=1) * 1000
