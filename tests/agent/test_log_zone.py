"""Local time or UTC: the last change of a log tells under which its stamps can be true."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.files.logs import LogFollower
from ncclscope_agent.files.reading import newest_stamp_ns, zone_that_fits

HOUR_NS = 3600 * 10**9
NOON = datetime(2026, 3, 2, 12, 0, 0, tzinfo=UTC)
NOON_NS = int(NOON.timestamp()) * 10**9


def line(stamp: str) -> str:
    return (
        f"[{stamp}] node17:41822:41903 [2] NCCL INFO AllReduce: opCount 0 sendbuff 0x7f2a40000000 "
        "recvbuff 0x7f2a44000000 count 1 datatype 7 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=4] stream 0x55d0c7f01b10\n"
    )


def printed(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def followed_times(path: Path, zones_ns: tuple[int, ...]) -> list[int]:
    follower = LogFollower([str(path)], zones_ns=zones_ns)
    batches = [*follower.poll(NOON_NS), *follower.close(NOON_NS)]
    return [int(time) for batch in batches for time in batch.operations["logged_at_ns"].tolist()]


@pytest.mark.parametrize("ahead", [2, -5, 5.5])
@pytest.mark.parametrize("is_local", [True, False])
def test_a_followed_log_is_read_in_the_zone_that_its_change_tells(ahead: float, is_local: bool, tmp_path: Path) -> None:
    local_ns = int(ahead * HOUR_NS)
    path = tmp_path / "nccl.log"
    first, last = NOON - timedelta(minutes=30), NOON - timedelta(seconds=1)
    shown = timedelta(hours=ahead) if is_local else timedelta()
    path.write_text(line(printed(first + shown)) + line(printed(last + shown)))
    os.utime(path, ns=(NOON_NS, NOON_NS))
    times = followed_times(path, (local_ns, 0))
    assert times == [NOON_NS - 30 * 60 * 10**9, NOON_NS - 10**9]


def test_with_one_zone_given_nothing_is_guessed(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    path.write_text(line(printed(NOON)) + line(printed(NOON)))
    os.utime(path, ns=(NOON_NS, NOON_NS))
    assert followed_times(path, (HOUR_NS,)) == [NOON_NS - HOUR_NS] * 2


def test_lines_before_the_first_operation_do_not_decide(tmp_path: Path) -> None:
    """Operations may come long after the file began: the zone is told when the first of them is read."""
    path = tmp_path / "nccl.log"
    path.write_text("[2026-03-02 11:00:00] node17:41822:41903 [2] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\n" * 40)
    os.utime(path, ns=(NOON_NS, NOON_NS))
    follower = LogFollower([str(path)], zones_ns=(-5 * HOUR_NS, 0))
    batches = list(follower.poll(NOON_NS))
    with path.open("a") as log:
        log.write(line(printed(NOON)))
    os.utime(path, ns=(NOON_NS, NOON_NS))
    batches += [*follower.poll(NOON_NS + 10**9), *follower.close(NOON_NS + 2 * 10**9)]
    times = [int(time) for batch in batches for time in batch.operations["logged_at_ns"].tolist()]
    assert times == [NOON_NS]


def test_a_log_without_stamps_has_no_newest_one() -> None:
    assert newest_stamp_ns(line("x").replace("[x] ", "").encode(), NOON_NS) is None


def test_the_newest_stamp_is_that_of_the_last_operation() -> None:
    end = "torn piece\n" + line("2026-03-02 11:00:00") + line("2026-03-02 11:59:59") + "iteration 7 done\n"
    assert newest_stamp_ns(end.encode(), NOON_NS) == NOON_NS - 10**9


def test_no_zone_fits_a_stamp_of_the_future() -> None:
    assert zone_that_fits(NOON_NS + 9 * HOUR_NS + HOUR_NS // 10, NOON_NS, [2 * HOUR_NS, 0]) is None


@pytest.mark.parametrize("hours", [-8, 5, 5.75])
def test_a_zone_that_is_neither_local_nor_utc_is_told_by_a_line_that_was_just_written(hours: float) -> None:
    zone_ns = int(hours * HOUR_NS)
    assert zone_that_fits(NOON_NS - 10**9 + zone_ns, NOON_NS, [0, 0]) == zone_ns


def test_stamps_of_no_zone_are_read_in_the_likeliest_one() -> None:
    assert zone_that_fits(NOON_NS - HOUR_NS // 3, NOON_NS, [0, 0]) == 0


@pytest.mark.parametrize("change", [1, -1])
def test_summer_time_in_the_middle_of_a_log_is_followed(change: int, tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    path.write_text("node17:41822:41903 [2] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\n" * 40)
    follower = LogFollower([str(path)], zones_ns=(HOUR_NS, 0))
    times: list[int] = []
    for hours, second in ((1, -1), (1 + change, 0), (1 + change, 1)):
        with path.open("a") as log:
            log.write(line(printed(NOON + timedelta(hours=hours, seconds=second))))
        now_ns = NOON_NS + second * 10**9
        os.utime(path, ns=(now_ns, now_ns))
        for batch in follower.poll(now_ns):
            times += batch.operations["logged_at_ns"].tolist()
    assert times == [NOON_NS - 10**9, NOON_NS, NOON_NS + 10**9]


@given(
    ahead=st.integers(-48, 56).filter(bool),
    lag_s=st.integers(0, 600),
    is_local=st.booleans(),
)
def test_the_true_zone_is_told_while_the_last_line_is_fresh(ahead: int, lag_s: int, is_local: bool) -> None:
    local_ns = ahead * HOUR_NS // 4
    stamp_ns = NOON_NS - lag_s * 10**9 + (local_ns if is_local else 0)
    assert zone_that_fits(stamp_ns, NOON_NS, [local_ns, 0]) == (local_ns if is_local else 0)
