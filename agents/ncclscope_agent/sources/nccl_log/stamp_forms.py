"""Time stamps of other forms than `stamps.py` reads at speed: what people put into strftime.

Read are dates with the year in front, names of months in English (`%c`, `%b %d`, syslog), epoch seconds (`%s`),
12-hour clocks with AM or PM, digits of the second behind a point or none, compact forms (`%Y%m%d-%H%M%S`), and dates
in digits whose order is certain. The calendar decides it (a 13th month is none), and `near_ns`, a time near to
which the log was written: of several readings the one within two weeks of it counts, if it is the only one. The same
holds for a missing year. A stamp without a date, or with a date that may be read in two ways, is a stamp whose time
is not known. Not recognised: `%I` without `%p`, whose afternoons look like mornings.

*Source:* C11 7.27.3.5 (strftime); in the C locale, which NCCL does not leave, `%x` is `%m/%d/%y` and `%X` is `%T`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime
from typing import Final

from ncclscope_wire.terms import NO_TIME_NS

_MONTH: Final = rb"Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_DAY: Final = rb"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? )?"
_CLOCK: Final = (
    rb"(?P<hour{0}>\d\d):(?P<minute{0}>\d\d):(?P<second{0}>\d\d)"
    rb"(?:[.,:]?(?P<fraction{0}>\d{{1,9}}))?(?: ?(?P<half{0}>[AP]M))?"
)
_ZONE: Final = rb"(?: ?(?P<zone{0}>Z|[+-]\d\d:?\d\d|[A-Z]{{3,5}}))?"


def _numbered(pattern: bytes, number: int) -> bytes:
    """The pattern with its groups made different from those of other forms."""
    return pattern.replace(b"{0}", str(number).encode()).replace(b"{{", b"{").replace(b"}}", b"}")


_FORMS: Final = (
    rb"(?P<year{0}>\d{{4}})[-/.](?P<month{0}>\d\d)[-/.](?P<day{0}>\d\d)(?:[ T_:-]|, )" + _CLOCK + _ZONE,
    rb"(?P<year{0}>\d{{4}})(?P<month{0}>\d\d)(?P<day{0}>\d\d)[ T_:-]?"
    rb"(?P<hour{0}>\d\d):?(?P<minute{0}>\d\d):?(?P<second{0}>\d\d)(?:[.,](?P<fraction{0}>\d{{1,9}}))?" + _ZONE,
    rb"(?P<first{0}>\d\d)(?P<sign{0}>[/.-])(?P<middle{0}>\d\d)[/.-](?P<last{0}>\d{{4}}|\d\d)(?:[ T_:-]|, )"
    + _CLOCK
    + _ZONE,
    _DAY + rb"(?P<name{0}>" + _MONTH + rb")[ -](?P<day{0}>[ \d]\d)(?:,? (?P<year{0}>\d{{4}}))? " + _CLOCK + _ZONE,
    _DAY + rb"(?P<name{0}>" + _MONTH + rb") (?P<day{0}>[ \d]\d) " + _CLOCK + _ZONE + rb" (?P<year{0}>\d{{4}})",
    _DAY
    + rb"(?P<day{0}>\d\d)[ /-](?P<name{0}>"
    + _MONTH
    + rb")[ /-](?P<year{0}>\d{{4}})(?:[ T_:-]|, )"
    + _CLOCK
    + _ZONE,
    rb"(?P<first{0}>\d\d)(?P<sign{0}>[/.-])(?P<middle{0}>\d\d) " + _CLOCK + _ZONE,
    rb"(?P<epoch{0}>\d{{10}})(?:[.,](?P<fraction{0}>\d{{1,9}})|(?P<digits{0}>\d{{3}}|\d{{6}}|\d{{9}}))?",
    _CLOCK + _ZONE,
)
_BODY: Final = b"|".join(_numbered(form, number) for number, form in enumerate(_FORMS))
AT_END: Final = re.compile(rb"(?P<stamp>[\[(<]?(?:" + _BODY + rb")(?:[\])>]:? ?| ?[|:-]? ))\Z")
"""A stamp that ends directly in front of the host."""
LONGEST: Final = 72
"""No stamp of these forms is longer, in bytes."""

_NS: Final = 1_000_000_000
_NAMES: Final = {name: number for number, name in enumerate(_MONTH.split(b"|"), 1)}
_NEAR_NS: Final = 14 * 86_400 * _NS
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_EPOCH_SECONDS: Final = range(1_000_000_000, 4_102_444_800)
"""From 2001, when they have ten digits, to 2100."""
_UTC_NAMES: Final = frozenset({b"Z", b"UTC", b"GMT"})


def time_ns(found: re.Match[bytes], zone_offset_ns: int, near_ns: int | None) -> int:
    """UTC nanoseconds of a stamp; NO_TIME_NS if it has no date, or an ambiguous one.

    `zone_offset_ns` is what local time is ahead of UTC; a zone in the stamp itself wins over it, if it is a number
    or UTC: another name is that of the local zone.
    """
    parts = {name.rstrip("0123456789"): text for name, text in found.groupdict().items() if text is not None}
    fraction_ns = int((parts.get("fraction") or parts.get("digits") or b"0").ljust(9, b"0"))
    if "epoch" in parts:
        seconds_since = int(parts["epoch"])
        return seconds_since * _NS + fraction_ns if seconds_since in _EPOCH_SECONDS else NO_TIME_NS
    seconds = _second_of_day(parts)
    if seconds is None:
        return NO_TIME_NS
    ahead_ns = _ahead_ns(parts.get("zone"), zone_offset_ns)
    times = {
        (day.toordinal() - _EPOCH_DAY) * 86_400 * _NS + seconds * _NS + fraction_ns - ahead_ns
        for day in _days(parts, near_ns)
    }
    if "year" in parts and "last" not in parts:
        return times.pop() if times else NO_TIME_NS
    if near_ns is not None and (len(times) > 1 or "last" not in parts):
        times = {time for time in times if abs(time - near_ns) <= _NEAR_NS}
    return times.pop() if len(times) == 1 else NO_TIME_NS


def _second_of_day(parts: dict[str, bytes]) -> int | None:
    hour, minute, second = int(parts["hour"]), int(parts["minute"]), int(parts["second"])
    half = parts.get("half")
    if half is not None:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + 12 * (half == b"PM")
    if hour > 23 or minute > 59 or second > 60:
        return None
    return (hour * 60 + minute) * 60 + second


def _ahead_ns(zone: bytes | None, zone_offset_ns: int) -> int:
    if zone is None:
        return zone_offset_ns
    if zone in _UTC_NAMES:
        return 0
    if zone[:1] not in b"+-":
        return zone_offset_ns
    minutes = int(zone[1:3]) * 60 + int(zone[-2:])
    return (-minutes if zone[:1] == b"-" else minutes) * 60 * _NS


def _days(parts: dict[str, bytes], near_ns: int | None) -> Iterator[date]:
    """Every day that the stamp's date may be."""
    for year, month, day in _readings(parts, near_ns):
        try:
            read = date(year, month, day)
        except ValueError:
            continue
        if 1970 <= read.year < 2262:
            yield read


def _readings(parts: dict[str, bytes], near_ns: int | None) -> Iterator[tuple[int, int, int]]:
    """Year, month and day in every order that people write."""
    near = None if near_ns is None else datetime.fromtimestamp(near_ns // _NS, tz=UTC).year
    if "first" in parts:
        first, middle = int(parts["first"]), int(parts["middle"])
        last = parts.get("last")
        years = _years(near) if last is None else [int(last) + (2000 if len(last) == 2 else 0)]
        for year in years:
            yield year, middle, first
            if parts["sign"] != b".":
                yield year, first, middle
        if last is not None and len(last) == 2:
            yield 2000 + first, middle, int(last)
    elif "day" in parts:
        month = _NAMES[parts["name"]] if "name" in parts else int(parts["month"])
        for year in _years(near) if "year" not in parts else [int(parts["year"])]:
            yield year, month, int(parts["day"])


def _years(near: int | None) -> list[int]:
    return [] if near is None else [near - 1, near, near + 1]
