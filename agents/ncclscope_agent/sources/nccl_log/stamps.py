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

from ncclscope_agent.sources.nccl_log import stamp_forms
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

_DIGITS: Final = b"0123456789"
_MINUTE_DIGITS: Final = 12
"""Of year, month, day, hour and minute."""
_ANY_DIGIT: Final = bytes.maketrans(b"123456789", b"000000000")
_NS: Final = 1_000_000_000
_DAY_NS: Final = 86_400 * _NS
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_YEARS: Final = range(1970, 2262)
"""Years whose nanoseconds fit in 64 bits."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Time zone and approximate date of a log, which its stamps leave out."""

    zone_offset_ns: int = 0
    """Local time minus UTC; a zone in the stamp itself wins over it."""
    near_ns: int | None = None
    """A time near to which the log was written, for stamps without a year or with an order that must be guessed."""


def in_front(line: bytes, end: int) -> re.Match[bytes] | None:
    """A stamp of `[%F %T] ` or a relative that ends at `end`."""
    return AT_END.search(line, max(0, end - LONGEST), end)


def in_other_form(line: bytes, end: int) -> re.Match[bytes] | None:
    """A stamp of another form that ends at `end`. It may be text: it counts only if the line begins with it."""
    return stamp_forms.AT_END.search(line, max(0, end - stamp_forms.LONGEST), end)


def stamp_ns(match: re.Match[bytes], clock: Clock) -> int:
    """UTC nanoseconds of a matched stamp; NO_TIME_NS if it is no time of any calendar, or ambiguous."""
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
        moving_end = example.start("second") - begin + (3 + len(fraction) if fraction else 2)
        self._shape = stamp[:moving_end].translate(_ANY_DIGIT) + stamp[moving_end:]
        self._blank = stamp.translate(_ANY_DIGIT)
        self._marks = stamp.translate(None, _DIGITS)
        self._zone_digits = b"" if zone is None else zone.translate(None, self._marks)
        self._moving = slice(_MINUTE_DIGITS, _MINUTE_DIGITS + 2 + len(fraction))
        self._minute = b""
        self._minute_ns = NO_TIME_NS
        """Of the digits of `_minute` and zeros behind it."""
        self._clock_ns = np.array(
            [36_000 * _NS, 3_600 * _NS, 600 * _NS, 60 * _NS, 10 * _NS, _NS]
            + [10 ** (8 - place) for place in range(len(fraction))],
            dtype=np.int64,
        )
        self._moving_ns = self._clock_ns[4:]
        self._zero_ns = ord("0") * int(self._moving_ns.sum())

    @property
    def form(self) -> tuple[bytes, Clock]:
        """Layouts of the same form read the same stamps, and the same times from them."""
        return self._shape, self._clock

    def read(self, stamps: list[bytes]) -> NDArray[np.int64]:
        """UTC nanoseconds of many stamps, each `length` bytes, in any pieces; NO_TIME_NS if one has another form."""
        text = b"".join(stamps)
        times = self._read_minute(text[: self.length], text, len(text) // self.length)
        return self._read_any(np.frombuffer(text, dtype=np.uint8).reshape(-1, self.length)) if times is None else times

    def _read_any(self, text: NDArray[np.uint8]) -> NDArray[np.int64]:
        digits = (text[:, self._digit_columns] - np.uint8(48)).astype(np.int64)  # others wrap to more than 9
        # A bad row may hold any number below, but none that overflows.
        days, good = _days(digits[:, :8])
        good &= (digits <= 9).all(axis=1) & (text[:, self._other_columns] == self._others).all(axis=1)
        good &= (digits[:, 8] * 10 + digits[:, 9] < 24) & (digits[:, 10] < 6)
        good &= (digits[:, 12] < 6) | ((digits[:, 12] == 6) & (digits[:, 13] == 0))  # 60 is a leap second
        times = days * _DAY_NS + digits[:, 8:] @ self._clock_ns - self._zone_offset_ns
        return np.where(good, times, NO_TIME_NS)

    def _read_minute(self, first: bytes, text: bytes, count: int) -> NDArray[np.int64] | None:
        """The same if all are of the first one's minute, and well; else None. Most stamps that are tailed are.

        Of steps over bytes rather than columns: each kind of step on columns that an agent wakes up for costs it more
        than the step itself, since its code has left the caches.
        """
        if text.translate(_ANY_DIGIT) != self._blank * count:
            return None
        digits = np.frombuffer(text.translate(None, self._marks), dtype=np.uint8).reshape(count, -1)
        minutes = digits[:, :_MINUTE_DIGITS].tobytes()
        if minutes != minutes[:_MINUTE_DIGITS] * count or not self._has_minute(first, minutes[:_MINUTE_DIGITS]):
            return None
        zones, moving = digits[:, self._moving.stop :].tobytes(), digits[:, self._moving]
        if zones != self._zone_digits * count or moving[:, 0].tobytes().translate(None, b"012345"):
            return None
        times: NDArray[np.int64] = moving.astype(np.int64) @ self._moving_ns
        times += self._minute_ns - self._zero_ns
        return times

    def _has_minute(self, first: bytes, minute: bytes) -> bool:
        """Whether that minute, of which the first stamp is, has a time: it is the minute of most calls."""
        if minute != self._minute:
            found = AT_START.fullmatch(first)
            first_ns = NO_TIME_NS if found is None else stamp_ns(found, self._clock)
            self._minute, self._minute_ns = minute, NO_TIME_NS
            if found is not None and first_ns != NO_TIME_NS:
                self._minute_ns = first_ns - int(found["second"] + (found["fraction"] or b"").ljust(9, b"0"))
        return self._minute_ns != NO_TIME_NS


class OtherLayout:
    """The same for stamps of `stamp_forms.py`, one by one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    @property
    def form(self) -> tuple[bytes, Clock]:
        """As of a `StampLayout`: what is read depends on the clock only."""
        return b"", self._clock

    def read(self, stamps: list[bytes]) -> NDArray[np.int64]:
        """UTC nanoseconds of many stamps; NO_TIME_NS if one is of no such form, or ambiguous."""
        return np.fromiter((self._read(stamp) for stamp in stamps), dtype=np.int64, count=len(stamps))

    def _read(self, stamp: bytes) -> int:
        found = stamp_forms.AT_END.match(stamp)
        return NO_TIME_NS if found is None else stamp_ns(found, self._clock)


def layout_of(example: re.Match[bytes], clock: Clock) -> StampLayout | OtherLayout:
    """The layout of a source whose stamps look like this one."""
    return OtherLayout(clock) if example.re is stamp_forms.AT_END else StampLayout(example, clock)


def _days(digits: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Days since 1970-01-01 of dates in eight digits, and whether each is a date that fits in ns."""
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
