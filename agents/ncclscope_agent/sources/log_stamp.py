"""Time stamps in front of log lines, as UTC nanoseconds.

Reads at speed what `NCCL_DEBUG_TIMESTAMP_FORMAT` gives for `[%F %T] ` (the default from NCCL 2.26 on) and its
relatives: `T` or `_` for the blank, one to nine digits of the second, a zone (`Z`, `%z`, `+02:00`), with
and without brackets. All other forms are `stamp_forms.py`'s, at about 5 us each.
NCCL prints local time, so without a zone in the stamp the source's own is taken.

NCCL 2.26.2 prints wrong digits of the second (its divisor is 10**6 instead of 10**9); the stamp does not
say its version, so such times are off by up to a second.

*Source:* NCCL `src/debug.cc:ncclDebugInit` and `ncclDebugLog`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_agent.sources import stamp_forms
from ncclscope_wire.terms import NO_TIME_NS

_STAMP: Final = (
    rb"(?P<stamp>\[?(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[ T_]"
    rb"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    rb"(?:[.,](?P<fraction>\d{1,9}))?(?P<zone> ?(?:Z|[+-]\d\d:?\d\d))?(?:\] ?| ))"
)
AT_START: Final = re.compile(_STAMP)
AT_END: Final = re.compile(_STAMP + rb"\Z")
LONGEST: Final = 48
"""No stamp of these forms is longer, in bytes."""

_ANY_DIGIT: Final = bytes.maketrans(b"123456789", b"000000000")
_NS: Final = 1_000_000_000
_DAY_NS: Final = 86_400 * _NS
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_YEARS: Final = range(1970, 2262)
"""Years whose nanoseconds fit in 64 bits."""


@dataclass(frozen=True, slots=True)
class Clock:
    """What a log's stamps leave out."""

    zone_offset_ns: int = 0
    """What local time is ahead of UTC; a zone in the stamp itself wins over it."""
    near_ns: int | None = None
    """A time near to which the log was written, for stamps without a year or with an order that must be guessed."""


def in_front(line: bytes, end: int) -> re.Match[bytes] | None:
    """A stamp of `[%F %T] ` or a relative that ends at `end`."""
    return AT_END.search(line, max(0, end - LONGEST), end)


def in_other_form(line: bytes, end: int) -> re.Match[bytes] | None:
    """A stamp of another form that ends at `end`. It may be text: it counts where the line begins with it only."""
    return stamp_forms.AT_END.search(line, max(0, end - stamp_forms.LONGEST), end)


def stamp_ns(match: re.Match[bytes], clock: Clock) -> int:
    """UTC nanoseconds of a matched stamp; NO_TIME_NS where it is no time of any calendar, or cannot be told."""
    if match.re is stamp_forms.AT_END:
        return stamp_forms.time_ns(match, clock.zone_offset_ns, clock.near_ns)
    year, month, day, hour, minute, second = (int(part) for part in match.group(2, 3, 4, 5, 6, 7))
    days = _days_of(year, month, day)
    if days is None or hour > 23 or minute > 59 or second > 60:
        return NO_TIME_NS
    zone: bytes | None = match.group("zone")
    ahead_ns = clock.zone_offset_ns if zone is None else _zone_ns(zone.lstrip())
    fraction: bytes = match.group("fraction") or b""
    whole_seconds = ((days * 24 + hour) * 60 + minute) * 60 + second
    return whole_seconds * _NS + int(fraction.ljust(9, b"0")) - ahead_ns


def _zone_ns(zone: bytes) -> int:
    if zone == b"Z":
        return 0
    minutes = int(zone[1:3]) * 60 + int(zone[-2:])
    return (-minutes if zone[:1] == b"-" else minutes) * 60 * _NS


class StampLayout:
    """The form of one source's stamps, for reading thousands of them at a time.

    `example` is a stamp of this form: all but the digits of its time recur in every other one.
    """

    def __init__(self, example: re.Match[bytes], clock: Clock) -> None:
        stamp: bytes = example["stamp"]
        zone: bytes | None = example["zone"]
        fraction: bytes = example["fraction"] or b""
        self.length: Final = len(stamp)
        self._zone_offset_ns = clock.zone_offset_ns if zone is None else _zone_ns(zone.lstrip())
        self._clock = Clock(self._zone_offset_ns)
        begin = example.start("stamp")
        numbers = ("year", "month", "day", "hour", "minute", "second")
        at = [column - begin for name in numbers for column in range(*example.span(name))]
        if fraction:
            at += [column - begin for column in range(*example.span("fraction"))]
        self._digit_columns = np.array(at, dtype=np.int64)
        self._other_columns = np.setdiff1d(np.arange(self.length), self._digit_columns)
        self._others = np.frombuffer(stamp, dtype=np.uint8)[self._other_columns]
        # What moves within a minute: two digits, and with a point between them those of the fraction.
        second = example.start("second") - begin
        self._moving = slice(second, second + (3 + len(fraction) if fraction else 2))
        self._lowest = np.frombuffer(stamp.translate(_ANY_DIGIT), dtype=np.uint8)[self._moving, np.newaxis]
        self._range = np.array([5, 9] + [0] * bool(fraction) + [9] * len(fraction), dtype=np.uint8)[:, np.newaxis]
        before, moving = self._moving.start, self._moving.stop - self._moving.start
        # Both texts end with bytes that are not zero, so none compares equal to a shorter one.
        self._parts = np.dtype(
            [
                ("before", f"S{before}"),
                ("moving", np.uint8, (moving,)),
                ("after", f"S{self.length - before - moving}"),
            ]
        )
        self._shape = self._shape_of(stamp)
        self._clock_ns = np.array(
            [36_000 * _NS, 3_600 * _NS, 600 * _NS, 60 * _NS, 10 * _NS, _NS]
            + [10 ** (8 - place) for place in range(len(fraction))],
            dtype=np.int64,
        )
        point = np.zeros(1 if fraction else 0, dtype=np.int64)
        self._moving_ns = np.concatenate([self._clock_ns[4:6], point, self._clock_ns[6:]])

    @property
    def form(self) -> tuple[bytes, Clock]:
        """Layouts of the same form read the same stamps, and the same times from them."""
        return self._shape, self._clock

    def read(self, stamps: list[bytes]) -> NDArray[np.int64]:
        """UTC nanoseconds of many stamps, each `length` bytes; NO_TIME_NS where one has another form."""
        text = np.frombuffer(b"".join(stamps), dtype=np.uint8).reshape(len(stamps), self.length)
        before = self._moving.start
        times = self._read_minute(stamps[0], text) if stamps[0][:before] == stamps[-1][:before] else None
        return self._read_any(text) if times is None else times

    def _read_any(self, text: NDArray[np.uint8]) -> NDArray[np.int64]:
        digits = (text[:, self._digit_columns] - np.uint8(48)).astype(np.int64)  # others wrap to more than 9
        # A bad row may hold any number below, but none that overflows.
        days, good = _days(digits[:, :8])
        good &= (digits <= 9).all(axis=1) & (text[:, self._other_columns] == self._others).all(axis=1)
        good &= (digits[:, 8] * 10 + digits[:, 9] < 24) & (digits[:, 10] < 6)
        good &= (digits[:, 12] < 6) | ((digits[:, 12] == 6) & (digits[:, 13] == 0))  # 60 is a leap second
        times = days * _DAY_NS + digits[:, 8:] @ self._clock_ns - self._zone_offset_ns
        return np.where(good, times, NO_TIME_NS)

    def _read_minute(self, first: bytes, text: NDArray[np.uint8]) -> NDArray[np.int64] | None:
        """The same where all are of the first one's minute, and well; else None. Most stamps that are tailed are."""
        found = AT_START.fullmatch(first) if self._shape_of(first) == self._shape else None
        first_ns = NO_TIME_NS if found is None else stamp_ns(found, self._clock)
        if first_ns == NO_TIME_NS:
            return None
        parts = text.reshape(-1).view(self._parts)
        recurs = [(parts[part] == parts[part][0]).all() for part in ("before", "after")]
        # One row a column of text: numpy's loops are over rows, and a few bytes in each cost mostly their begin.
        moved = np.ascontiguousarray(parts["moving"].T) - self._lowest  # what is lower wraps to more than its range
        if not all(recurs) or not (moved <= self._range).all():
            return None
        moved_ns: NDArray[np.int64] = self._moving_ns @ moved.astype(np.int64)
        times: NDArray[np.int64] = moved_ns + (first_ns - moved_ns[0])
        return times

    def _shape_of(self, stamp: bytes) -> bytes:
        """What recurs in all stamps of this form: all but the digits of its time."""
        return stamp[: self._moving.stop].translate(_ANY_DIGIT) + stamp[self._moving.stop :]


class OtherLayout:
    """The same for stamps of `stamp_forms.py`, one by one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    @property
    def form(self) -> tuple[bytes, Clock]:
        """As of a `StampLayout`: what is read depends on the clock only."""
        return b"", self._clock

    def read(self, stamps: list[bytes]) -> NDArray[np.int64]:
        """UTC nanoseconds of many stamps; NO_TIME_NS where one is of no such form, or cannot be told."""
        return np.fromiter((self._read(stamp) for stamp in stamps), dtype=np.int64, count=len(stamps))

    def _read(self, stamp: bytes) -> int:
        found = stamp_forms.AT_END.match(stamp)
        return NO_TIME_NS if found is None else stamp_ns(found, self._clock)


def layout_of(example: re.Match[bytes], clock: Clock) -> StampLayout | OtherLayout:
    """The layout of a source whose stamps look like this one."""
    return OtherLayout(clock) if example.re is stamp_forms.AT_END else StampLayout(example, clock)


def _days(digits: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Days since 1970-01-01 of dates in eight digits, and whether each is a date that can be told in ns."""
    first = digits[0]
    if bool((digits == first).all()):
        same = _days_of(*(int("".join(map(str, part))) for part in (first[:4], first[4:6], first[6:])))
        known = same is not None
        return np.full(len(digits), same or 0, dtype=np.int64), np.full(len(digits), known, dtype=np.bool_)
    year = digits[:, :4] @ np.array([1000, 100, 10, 1], dtype=np.int64)
    month, day = digits[:, 4] * 10 + digits[:, 5], digits[:, 6] * 10 + digits[:, 7]
    days, is_date = _days_since_epoch(year, month, day)
    good = is_date & (year >= _YEARS.start) & (year < _YEARS.stop)
    return np.where(good, days, 0), good


def _days_of(year: int, month: int, day: int) -> int | None:
    try:
        return date(year, month, day).toordinal() - _EPOCH_DAY if year in _YEARS else None
    except ValueError:
        return None


def _days_since_epoch(
    year: NDArray[np.int64], month: NDArray[np.int64], day: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Days since 1970-01-01, and whether each is a date of the Gregorian calendar at all."""
    month_ok = (month >= 1) & (month <= 12)
    first = _first_of_month(np.where(month_ok, (year - 1970) * 12 + month - 1, 0))
    after = _first_of_month(np.where(month_ok, (year - 1970) * 12 + month, 1))
    return first + day - 1, month_ok & (day >= 1) & (first + day - 1 < after)


def _first_of_month(months: NDArray[np.int64]) -> NDArray[np.int64]:
    return months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
