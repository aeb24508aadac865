"""How much log processes write: bytes and lines per second by process and node, and of what kind they are.

Estimated from the last part of each log. Its rate comes from the stamps of its lines, if they have some, or from how
much the file grew while it was watched; a log with neither has no rate, and is not taken for a silent one. The
subsystem of a line is not printed by NCCL: it is taken from the line's form, so shares are estimates.

*Source:* NCCL `src/debug.cc:ncclDebugLog` (prefix, stamp), and the format strings of `src/enqueue.cc`, `src/init.cc`,
`src/graph` and `src/transport` (forms).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from typing import Final

SECONDS_PER_HOUR: Final = 3600
_LEAST_SECONDS: Final = 1.0
"""Stamps of the default form have whole seconds: a rate over less time would be a guess."""

_STAMP: Final = re.compile(
    rb"(\d{4})-(\d\d)-(\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?[^:\n]{0,12} (?=[\w<>-]{1,64}:\d{1,10}:\d)"
)
_RECORD: Final = re.compile(
    rb"([\w<>-]{1,64}):(\d{1,10}):\d{1,10} (?:\[-?\d{1,5}\] )?(?:\S[^\n]{0,160}? )?NCCL (INFO|WARN|CALL|TRACE) "
)
_VERSION: Final = re.compile(rb"NCCL version (\d{1,3}\.\d{1,3}\.\d{1,3})")
_NS: Final = 1_000_000_000
_LONGEST: Final = 4096
"""A line is searched for its prefix this far."""

_FORMS: Final[tuple[tuple[str, re.Pattern[bytes]], ...]] = (
    ("COLL", re.compile(rb"\w{1,64}: opCount ")),
    ("TUNING", re.compile(rb"(?:[^\n]{0,120} )?\d+ Bytes -> |\s*(?:Algorithm|Max NThreads|Latency/AlgBw)\b|\s*\w+ \|")),
    ("ENV", re.compile(rb"NCCL_\w+ set by environment|\w+ set by environment|Reading NCCL_")),
    ("NET", re.compile(rb"NET/|NCCL_SOCKET|Using (?:network|internal |\[)|Channel [\d/]+ : [^\n]{0,80}via NET/")),
    ("P2P", re.compile(rb"P2P |Channel [\d/]+ : [^\n]{0,80}via P2P")),
    ("SHM", re.compile(rb"SHM |Channel [\d/]+ : [^\n]{0,80}via SHM")),
    ("BOOTSTRAP", re.compile(rb"[Bb]ootstrap")),
    ("GRAPH", re.compile(rb"=== |\s*(?:CPU|GPU|NIC|PCI|NET|NVS)/|\s+\+ |Pattern |\s*\d+ : |Trees? |Ring "
                         rb"|Channel \d+/\d+ : ")),
    ("INIT", re.compile(rb"(?:\[Rank \d+\] )?(?:nccl\w+ )?comm 0x|Init|Connected|Channel |NCCL version"
                        rb"|\d+ coll channels|threadThresholds|cuda\w*Version|comm: ")),
    ("PROXY", re.compile(rb"[^\n]{0,24}[Pp]roxy")),
    ("ALLOC", re.compile(rb"(?:Alloc|Mem|[^\n]{0,24}[Aa]llocat)")),
)  # fmt: skip
"""Subsystem and how the messages of its lines begin; the first that fits counts."""
_OTHER: Final = "other"
_TEXT: Final = "not NCCL"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessKey:
    """A process, as the prefix of its lines names it."""

    host: str
    pid: int


@dataclass(slots=True)
class Amount:
    """How much of a log's last part a process wrote."""

    bytes: int = 0
    lines: int = 0
    operations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stamped:
    """A line with a stamp."""

    time_ns: int
    """Since any day: only differences count, since the zone of a stamp is not known."""
    at: int
    """Bytes of the last part in front of it."""
    line: int


@dataclass(slots=True, kw_only=True)
class LogLook:
    """Counts and rates from the parts of one log that were looked at."""

    name: str
    size_bytes: int
    """Of the whole file."""
    lines: int = 0
    """Of the last part, as all that follows but the versions."""
    nccl_lines: int = 0
    stamped_lines: int = 0
    operations: int = 0
    versions: set[str] = field(default_factory=set[str])
    by_subsystem: Counter[str] = field(default_factory=Counter[str])
    """Bytes of lines; "WARN", "CALL" and "TRACE" by their level, "other" for other lines of NCCL, "not NCCL"."""
    by_process: dict[ProcessKey, Amount] = field(default_factory=dict[ProcessKey, Amount])
    _first: _Stamped | None = None
    _last: _Stamped | None = None

    @property
    def looked_bytes(self) -> int:
        """Bytes of the lines that were looked at."""
        return self.by_subsystem.total()

    def add(self, line: bytes, at: int) -> None:
        """Looks at one line, which begins `at` bytes behind the begin of the last part."""
        self.lines += 1
        size = len(line) + 1
        record = _RECORD.search(line, 0, _LONGEST) if b"NCCL " in line else None
        if record is None:
            self.by_subsystem[_TEXT] += size
            return
        self.nccl_lines += 1
        subsystem = _subsystem(record[3], line[record.end() : record.end() + 256])
        self.by_subsystem[subsystem] += size
        process = self.by_process.setdefault(ProcessKey(host=record[1].decode(), pid=int(record[2])), Amount())
        process.bytes += size
        process.lines += 1
        if subsystem == "COLL":
            process.operations += 1
            self.operations += 1
        stamp = _STAMP.search(line, max(0, record.start() - 64), record.end()) if record.start() else None
        if stamp is not None and (time_ns := _stamp_ns(stamp)) is not None:
            self.stamped_lines += 1
            self._last = _Stamped(time_ns=time_ns, at=at, line=self.lines)
            self._first = self._first or self._last

    def rate_by_stamps(self) -> Rate | None:
        """How fast it grew between the first and the last stamp; None if these are less than a second apart."""
        if self._first is None or self._last is None:
            return None
        seconds = (self._last.time_ns - self._first.time_ns) / _NS
        if seconds < _LEAST_SECONDS:
            return None
        return Rate(
            bytes_per_second=(self._last.at - self._first.at) / seconds,
            lines_per_second=(self._last.line - self._first.line) / seconds,
            seconds=seconds,
            method="stamps",
        )

    def rate_by_growth(self, grown_bytes: int, seconds: float) -> Rate | None:
        """How fast it grew while it was watched; None if nothing can be said: it was not watched, or shrank."""
        if seconds <= 0 or grown_bytes < 0:
            return None
        mean = self.looked_bytes / self.lines if self.lines else 0
        return Rate(
            bytes_per_second=grown_bytes / seconds,
            lines_per_second=grown_bytes / seconds / mean if mean else 0.0,
            seconds=seconds,
            method="observed",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast a log grows."""

    bytes_per_second: float
    lines_per_second: float
    seconds: float
    """The time over which the rate was measured."""
    method: str
    """"stamps" or "observed"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """How much one process or node writes; rates are None if a log of it has none."""

    host: str
    pid: int | None
    """None: all of the node."""
    logs: int
    bytes_per_second: float | None
    lines_per_second: float | None
    operations_per_second: float | None

    @property
    def bytes_per_hour(self) -> float | None:
        """The same rate for an hour."""
        return None if self.bytes_per_second is None else self.bytes_per_second * SECONDS_PER_HOUR


def look_at(name: str, *, size_bytes: int, beginning: bytes, last_part: bytes, last_part_at: int) -> LogLook:
    """Looks at a log. `beginning` tells its versions; `last_part`, from byte `last_part_at` on, all else.

    The first line of a last part that does not begin the file is left out, and so is an unfinished last one.
    """
    look = LogLook(name=name, size_bytes=size_bytes)
    for part in (beginning, last_part):
        look.versions.update(found[1].decode() for found in _VERSION.finditer(part))
    at = last_part.find(b"\n") + 1 if last_part_at else 0
    for line in last_part[at : last_part.rfind(b"\n") + 1].split(b"\n")[:-1]:
        look.add(line, at)
        at += len(line) + 1
    return look


def by_process(logs: Iterable[tuple[LogLook, Rate | None]]) -> list[Volume]:
    """The volume of every process, by host and pid: its share of the logs that it writes to."""
    found: dict[ProcessKey, list[Volume]] = {}
    for look, rate in logs:
        total = Amount(bytes=look.looked_bytes, lines=look.lines)
        for process, amount in look.by_process.items():
            found.setdefault(process, []).append(_share(process, amount, total, rate))
    keys = sorted(found, key=lambda key: (key.host, key.pid))
    return [_sum(found[key], key.host, key.pid) for key in keys]


def by_node(processes: Iterable[Volume]) -> list[Volume]:
    """The volume of every node: the sum of its processes."""
    found: dict[str, list[Volume]] = {}
    for process in processes:
        found.setdefault(process.host, []).append(process)
    return [_sum(found[host], host, None) for host in sorted(found)]


def shares(logs: Iterable[LogLook]) -> dict[str, float]:
    """The share of each subsystem in the bytes that were looked at, the largest first."""
    total = Counter[str]()
    for look in logs:
        total.update(look.by_subsystem)
    return {name: number / total.total() for name, number in total.most_common()}


def _share(process: ProcessKey, amount: Amount, total: Amount, rate: Rate | None) -> Volume:
    lines = None if rate is None else rate.lines_per_second * amount.lines / total.lines
    return Volume(
        host=process.host,
        pid=process.pid,
        logs=1,
        bytes_per_second=None if rate is None else rate.bytes_per_second * amount.bytes / total.bytes,
        lines_per_second=lines,
        operations_per_second=None if lines is None else lines * amount.operations / amount.lines,
    )


def _sum(parts: list[Volume], host: str, pid: int | None) -> Volume:
    return Volume(
        host=host,
        pid=pid,
        logs=sum(part.logs for part in parts),
        bytes_per_second=_total([part.bytes_per_second for part in parts]),
        lines_per_second=_total([part.lines_per_second for part in parts]),
        operations_per_second=_total([part.operations_per_second for part in parts]),
    )


def _total(rates: list[float | None]) -> float | None:
    """The sum; None if one is not known, since the sum of the others would be too small."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) if len(known) == len(rates) else None


def _subsystem(level: bytes, message: bytes) -> str:
    if level != b"INFO":
        return level.decode()
    return next((subsystem for subsystem, form in _FORMS if form.match(message)), _OTHER)


def _stamp_ns(stamp: re.Match[bytes]) -> int | None:
    year, month, day, hour, minute, second = (int(part) for part in stamp.group(1, 2, 3, 4, 5, 6))
    try:
        days = date(year, month, day).toordinal()
    except ValueError:
        return None
    seconds = ((days * 24 + hour) * 60 + minute) * 60 + second
    return seconds * _NS + int((stamp[7] or b"0").ljust(9, b"0"))
