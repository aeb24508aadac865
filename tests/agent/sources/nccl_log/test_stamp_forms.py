from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from agent.log_samples import SOURCE, operation_line, read_log
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader

SECOND = 1_000_000_000
DAY = 86_400 * SECOND
MOMENT = datetime(2026, 3, 2, 23, 20, 33, 4217, tzinfo=UTC)
NS = int(MOMENT.replace(microsecond=0).timestamp()) * SECOND

WITH_A_DATE = {
    "[%F %T] ": 0,
    "%Y/%m/%d %H:%M:%S ": 0,
    "%Y.%m.%d-%T ": 0,
    "%FT%T.%3f%z ": 4_000_000,
    "%F %T.%6f ": 4_217_000,
    "[%F %T,%9f] ": 4_217_000,
    "[%F %T%6f] ": 4_217_000,
    "%F %I:%M:%S %p ": 0,
    "%a %b %e %H:%M:%S %Y ": 0,
    "%c ": 0,
    "[%c] ": 0,
    "%a %b %e %H:%M:%S UTC %Y ": 0,
    "%d %b %Y %T ": 0,
    "%d/%b/%Y:%T %z ": 0,
    "%d-%b-%Y %r ": 0,
    "%b %d %Y %T ": 0,
    "%s ": 0,
    "[%s.%6f] ": 4_217_000,
    "%s.%9f ": 4_217_000,
    "%s%3f ": 4_000_000,
    "%Y%m%d-%H%M%S ": 0,
    "%Y%m%dT%H%M%S.%3fZ ": 4_000_000,
    "%Y%m%d%H%M%S ": 0,
    "[%F_%T.%6f] ": 4_217_000,
    "%F %T UTC ": 0,
    "%F %T | ": 0,
    "%F %T: ": 0,
}
"""Formats that say the date, and what of the second they say, in ns."""

NEEDS_A_NEAR_TIME = (
    "%x %X ",
    "%D %T ",
    "[%m/%d/%Y %T] ",
    "%d/%m/%y %T ",
    "%m-%d %T ",
    "%b %d %T ",
    "%b %e %T.%6f ",
    "%y-%m-%d %T ",
)
"""Formats without a year, or whose order can be read in two ways."""


def stamp_of(moment: datetime, form: str) -> str:
    """What NCCL prints for a form: strftime, with %Nf as N digits of the second."""
    for digits in (3, 6, 9):
        form = form.replace(f"%{digits}f", f"{moment.microsecond * 1000:09d}"[:digits])
    return moment.strftime(form.replace("%s", str(int(moment.timestamp()))))


def times_of(stamp: str, *, near_ns: int | None = None, zone_ns: int = 0, lines: int = 3) -> list[object]:
    text = operation_line(prefix=stamp + "node17:41822:41903 [2] NCCL INFO ") + "\n"
    log = read_log(text.encode() * lines, reader=NcclLogReader(SOURCE, zone_offset_ns=zone_ns, written_near_ns=near_ns))
    assert {operation["host"] for operation in log.operations} == {"node17"}
    assert len(log.operations) == lines
    return [operation["logged_at_ns"] for operation in log.operations]


@pytest.mark.parametrize("form", WITH_A_DATE)
@pytest.mark.parametrize("near_ns", [None, NS + 400 * DAY])
def test_a_form_that_says_the_date_is_read(form: str, near_ns: int | None) -> None:
    assert times_of(stamp_of(MOMENT, form), near_ns=near_ns) == [NS + WITH_A_DATE[form]] * 3


@pytest.mark.parametrize("form", NEEDS_A_NEAR_TIME)
def test_a_date_that_may_be_read_in_two_ways_is_told_by_a_time_near_it(form: str) -> None:
    moment = MOMENT.replace(microsecond=0)
    assert times_of(stamp_of(moment, form), near_ns=NS + 3 * DAY) == [NS] * 3
    assert times_of(stamp_of(moment, form), near_ns=NS + 300 * DAY) == [None] * 3
    assert times_of(stamp_of(moment, form)) == [None] * 3


def test_a_time_that_cannot_be_told_is_counted_and_the_record_is_read() -> None:
    text = operation_line(prefix="11:20:33.004 node17:1:2 [0] NCCL INFO ") + "\n"
    log = read_log(text.encode() * 5)
    assert [operation["logged_at_ns"] for operation in log.operations] == [None] * 5
    assert log.skipped["time_unknown"] == 5


def test_a_thirteenth_month_tells_the_order() -> None:
    expected = int(datetime(2026, 3, 27, 11, 20, 33, tzinfo=UTC).timestamp()) * SECOND
    assert times_of("03/27/2026 11:20:33 ") == [expected] * 3
    assert times_of("27/03/2026 11:20:33 ") == [expected] * 3
    assert times_of("27.03.2026 11:20:33 ") == [expected] * 3
    assert times_of("02.03.2026 23:20:33 ") == [NS] * 3


def test_the_year_of_a_log_over_new_year_is_that_of_each_stamp() -> None:
    near = int(datetime(2026, 1, 2, tzinfo=UTC).timestamp()) * SECOND
    last = int(datetime(2025, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()) * SECOND
    assert times_of("Dec 31 23:59:59 ", near_ns=near) == [last] * 3
    assert times_of("Jan  1 00:00:00 ", near_ns=near) == [last + SECOND] * 3


@pytest.mark.parametrize("zone", [timezone(timedelta(hours=2)), timezone(timedelta(hours=-3, minutes=-30))])
def test_a_zone_in_figures_wins_and_a_name_is_that_of_the_source(zone: timezone) -> None:
    offset = zone.utcoffset(None)
    zone_ns = int(offset.total_seconds()) * SECOND
    local = MOMENT.replace(microsecond=0).astimezone(zone)
    assert times_of(stamp_of(local, "%d/%b/%Y:%T %z "), zone_ns=7 * SECOND) == [NS] * 3
    assert times_of(stamp_of(local, "%a %b %e %T CEST %Y "), zone_ns=zone_ns) == [NS] * 3
    assert times_of(stamp_of(local, "%s "), zone_ns=zone_ns) == [NS] * 3


def test_twelve_is_before_one_on_a_clock_of_twelve_hours() -> None:
    midnight = int(datetime(2026, 3, 2, tzinfo=UTC).timestamp()) * SECOND
    assert times_of("2026-03-02 12:00:00 AM ") == [midnight] * 3
    assert times_of("2026-03-02 12:00:00 PM ") == [midnight + DAY // 2] * 3
    assert times_of("2026-03-02 13:00:00 PM ") == [None] * 3


def test_text_that_looks_like_a_clock_is_no_stamp() -> None:
    text = operation_line(prefix="step took 11:20:33 node17:1:2 [0] NCCL INFO ") + "\n"
    log = read_log(text.encode() * 3)
    assert log.skipped["time_unknown"] == 0
    assert len(log.operations) == 3


@given(
    st.datetimes(min_value=datetime(2001, 9, 10), max_value=datetime(2090, 1, 1)),
    st.sampled_from([*WITH_A_DATE, *NEEDS_A_NEAR_TIME]),
    st.integers(-13 * DAY, 13 * DAY),
)
def test_no_form_gives_a_wrong_time(moment: datetime, form: str, off_ns: int) -> None:
    """The time is the very second, or not known; that it is known is the other tests' business."""
    moment = moment.replace(tzinfo=UTC)
    exact = int(moment.timestamp()) * SECOND
    times = times_of(stamp_of(moment, form), near_ns=exact + off_ns)
    known = [time for time in times if isinstance(time, int)]
    assert {time - time % SECOND for time in known} <= {exact}
