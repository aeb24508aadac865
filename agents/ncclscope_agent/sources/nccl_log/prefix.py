"""Cuts a physical line of a log into the records of NCCL that stand in it, and says who wrote each.

Several processes may write one file, and applications print without a newline, so a physical line can
hold glued text, a torn record, and one or more whole ones. Every record begins with
`host:pid:tid [dev] NCCL LEVEL `, wherever in the line that is.

A host name has no mark where it begins: in `loss 3.41node17:41822:41903` and `datatype 2 opnode17:...`
only the file's known hosts help. So names are learnt from lines that begin cleanly, and a
record behind a torn one is dropped, and counted, if its host is not known.

What launchers put in front of whole lines is taken off first. Container runtimes (CRI: containerd, CRI-O) put time,
stream and `F` or `P` in front, and cut long lines into `P` parts and a last `F` part: these are joined, since the
runtime says that they belong together. Ray leaves out lines that differ in numbers only and says
`[repeated 7x across cluster]` behind one of them: that one is read, the others are counted.

*Source:* the prefix is NCCL `src/debug.cc:ncclDebugLog`; Kubernetes CRI logging format (`kubelet/kuberuntime/logs`);
Ray `python/ray/_private/ray_logging`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from ncclscope_agent.sources.nccl_log import stamps

MARKER: Final = re.compile(rb"NCCL (?:INFO|WARN|CALL|TRACE) ")
"""Stands in every line of NCCL except bare version lines and the continuations of long messages."""

_WRITER: Final = re.compile(rb":(\d{1,10}):(\d{1,10}) ")
"""`:pid:tid ` of the prefix; the host stands directly in front, see `_HOST_BYTES`."""

_HOST_BYTES: Final = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_<>"
"""Characters of a host name: gethostname() is cut at the first dot. Angle brackets are people's masks."""

_BETWEEN: Final = re.compile(rb"(?:\[(-?\d{1,5})\] )?(\S.{0,160} )?")
"""Between `:pid:tid ` and `NCCL LEVEL`: `[dev]`, absent from CALL lines; then file:line, function or a
number, which WARN, TRACE, RCCL and forks print there."""

LAUNCHER_TAG: Final = re.compile(
    rb"(?:\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}(?=\[))?"  # mpirun --timestamp-output
    rb"(?:\[[\w,.@|/-]{1,80}\](?:<\w{1,16}>)?+:?+ ?+|\(\w[^()]{0,120}\) ?+|[\w.@-]{1,80}: ?+"
    rb"|[ \t]{1,16}+|\x1b\[[\d;]{0,8}m){0,8}"
)
"""Tags that mpirun, srun -l, torchrun, pdsh, kubectl and Ray put in front of each line, also several. Possessive,
because a line of blanks would be taken apart in billions of ways."""


_CRI: Final = re.compile(
    rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d) (stdout|stderr) ([FP])(?::[\w:]{0,20})? "
)
_REPEATED: Final = re.compile(
    rb"(?:\x1b\[\d{1,3}m)? ?\[repeated (\d{1,9})x across cluster\](?:\x1b\[\d{1,3}m)?"
    rb"(?: \(Ray deduplicates logs by default\.[^\n]{0,300}\))?(?:\x1b\[\d{1,3}m)?\s*\Z"
)


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A line without its wrapping."""

    text: bytes
    left_out: int = 0
    """Lines like it that Ray did not print."""
    is_part: bool = False
    """More of the line is to come; `text` is empty."""


class Unwrapper:
    """Unwraps the lines of one log; keeps the parts of one line per stream, `max_line_bytes` of each."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._parts: dict[bytes, bytes] = {}

    def unwrap(self, text: bytes) -> Unwrapped | None:
        """The line without its wrapping; None if it has none."""
        if text[:2].isdigit() and (found := _CRI.match(text)) is not None:
            return self._unwrap_cri(found, text[found.end() :])
        if b"x across cluster]" in text and (found := _REPEATED.search(text)) is not None:
            return Unwrapped(text[: found.start()], left_out=int(found[1]))
        return None

    def _unwrap_cri(self, found: re.Match[bytes], rest: bytes) -> Unwrapped:
        stream: bytes = found[1]
        line = (self._parts.pop(stream, b"") + rest)[: self._max_line_bytes + 1]
        if found[2] == b"F":
            return Unwrapped(line)
        self._parts[stream] = line
        return Unwrapped(b"", is_part=True)


_PREFIX_WINDOW: Final = 512
"""Bytes in front of `NCCL LEVEL` in which the prefix may begin: host 64, numbers 20, location 160, and room."""
_TAG_WINDOW: Final = 256
_HOST_LIMIT: Final = 64
"""HOST_NAME_MAX of Linux."""
_SEPARATORS: Final = frozenset(bytes([byte]) for byte in b" \t\r\0\"'`]):>}|,;=*") | {b""}
"""Characters that may stand in front of a host without being a part of it."""
_SIGHTINGS_WHERE_TORN: Final = 8
_STREAMS: Final = frozenset({b"<stdout>", b"<stderr>", b"<stddiag>"})
"""The end of a tag of mpirun, which stands in front of a torn `pid:tid` like a host."""
_KNOWN_LIMIT: Final = 4096
"""Processes whose hosts are remembered; beyond it learning is emptied."""


class RecordEnd(Enum):
    """The end of a record on its physical line."""

    LINE = auto()
    """The newline: NCCL writes a record and its newline at once, so the record is all there."""
    RECORD = auto()
    """Another record, whose begin is known exactly; what went before may be cut, but nothing is added."""
    UNSURE = auto()
    """Something whose begin is not known, or the end of a file without a newline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Process and thread that wrote a record."""

    host: str
    pid: int
    tid: int
    device: int | None
    """`[dev]`: the CUDA ordinal that was current in that thread; neither rank nor NVML number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One record of a physical line."""

    writer: Writer
    level: bytes
    message: bytes
    end: RecordEnd
    begin: int
    """Offset of its stamp or host in the line."""
    message_at: int
    stamp: re.Match[bytes] | None
    is_clean: bool
    """It stands at the begin of its line, or behind a stamp or a launcher's tag only."""
    location: bytes = b""
    """The part between `[dev]` and `NCCL LEVEL`: file and line of warnings, function of forks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutLine:
    """A physical line, taken apart."""

    records: Sequence[LogRecord]
    lost: int
    """NCCL markers whose host, pid and tid are missing or uncertain."""
    torn: int
    """Those of them in front of which a part of these stands, or all of them behind an uncertain beginning."""
    rest: bytes
    """The text in front of the first record, or the whole line if there is none."""


class KnownHosts:
    """The host names of one file, learnt from lines that begin cleanly."""

    def __init__(self) -> None:
        self._by_pid: dict[int, tuple[bytes, ...]] = {}
        self._all: dict[bytes, None] = {}
        self._doubtful: dict[int, dict[bytes, int]] = {}
        self.has_tears = False
        """Whether torn lines were seen: the same tear may come again and again then."""

    def learn_if_certain(self, token: bytes, pid: int) -> bool:
        """Learns the token that begins a line as a host, unless it may be text glued to a host.

        `4node17`, if `node17` is known, may be a piece of a torn line in front of it, and `17` the rest of a name that
        was torn. It is a host of its own when it comes again from the same process; if lines are
        torn, or the process is known under the longer name, when it comes again and again and the other name does not.
        """
        needed = self._sightings_needed(token, pid)
        if needed:
            if len(self._doubtful) >= _KNOWN_LIMIT:
                self._doubtful.clear()
            sightings = self._doubtful.setdefault(pid, {})
            seen = sightings.get(token, 0) + 1
            if len(sightings) < _HOST_LIMIT:
                sightings[token] = seen
            if seen < needed:
                return False
        self.learn(token, pid)
        return True

    def _sightings_needed(self, token: bytes, pid: int) -> int:
        if any(host != token and host.endswith(token) for host in self._by_pid.get(pid, ())):
            return _SIGHTINGS_WHERE_TORN
        if token in self._all:
            return 0
        if any(host.endswith(token) for host in self._all) or self.host_of_file(token) is not None:
            return _SIGHTINGS_WHERE_TORN if self.has_tears else 2
        return 0

    def learn(self, host: bytes, pid: int) -> None:
        """Remembers that this process runs on this host."""
        if len(self._by_pid) >= _KNOWN_LIMIT or len(self._all) >= _KNOWN_LIMIT:
            self._by_pid.clear()
            self._all.clear()
        hosts = self._by_pid.get(pid, ())
        if host not in hosts:
            self._by_pid[pid] = (*hosts[-7:], host)
            self._all[host] = None

    def is_known(self, host: bytes) -> bool:
        """Whether a process of this file runs on this host."""
        return host in self._all

    def host_of_process(self, token: bytes, pid: int) -> bytes | None:
        """The known host of that process with which the token ends; None if there is none."""
        known = _longest_end(token, self._by_pid.get(pid, ()))
        if known is not None:
            self._doubtful.pop(pid, None)
        return known

    def host_of_file(self, token: bytes) -> bytes | None:
        """The known host of any process with which the token ends; None if there is none."""
        if token in self._all:
            return token
        return _longest_end(token, tuple(self._all))


def _longest_end(token: bytes, hosts: Sequence[bytes]) -> bytes | None:
    if token in hosts:
        return token
    return max((host for host in hosts if token.endswith(host)), key=len, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefix:
    """A marker with the numbers in front of it; where the host begins is still open."""

    token: bytes
    token_at: int
    host_end: int
    pid: int
    tid: int
    device: int | None
    level: bytes
    message_at: int
    location: bytes


_PREFIX_END: Final = re.compile(rb"(?:\d \[-?\d{1,5}|:\d{1,10}|\A\d{1,5})\] \Z")
"""The rest of a torn prefix in front of `NCCL`; `[0] ` alone may be a quotation that left out the rest."""


def cut_line(line: bytes, hosts: KnownHosts, end: RecordEnd = RecordEnd.LINE) -> CutLine:
    """The records of one physical line, in their order, and what is left over; `end` is the line's own."""
    records: list[LogRecord] = []
    lost = torn = 0
    message_end = len(line)
    # From the last to the first: where a record ends is known when the next one's begin is.
    prefixes = _prefixes(line)
    known = _learn_from_first(line, prefixes, hosts)
    for index in range(len(prefixes) - 1, -1, -1):
        prefix = prefixes[index]
        if isinstance(prefix, int):
            lost += 1
            torn += _PREFIX_END.search(line, max(0, prefix - _PREFIX_WINDOW), prefix) is not None
            message_end, end = prefix, RecordEnd.UNSURE
            continue
        host = known if index == 0 else _certain_host(prefix, hosts)
        if host is None:
            lost += 1
            torn += 1
            message_end, end = prefix.token_at, RecordEnd.UNSURE
            continue
        record = _record(line, prefix, host, message_end, end, is_first=index == 0)
        records.append(record)
        message_end, end = record.begin, RecordEnd.RECORD
    records.reverse()
    return CutLine(records=records, lost=lost, torn=torn, rest=line[: records[0].begin] if records else line)


def _prefixes(line: bytes) -> list[_Prefix | int]:
    """The prefix of each marker, or the marker's position if it has none."""
    found: list[_Prefix | int] = []
    floor = 0
    for marker in MARKER.finditer(line):
        found.append(_prefix(line, marker, max(floor, marker.start() - _PREFIX_WINDOW)) or marker.start())
        floor = marker.end()
    return found


def _prefix(line: bytes, marker: re.Match[bytes], floor: int) -> _Prefix | None:
    writer = None
    for candidate in _WRITER.finditer(line, floor, marker.start()):
        writer = candidate
    if writer is None:
        return None
    between = _BETWEEN.fullmatch(line, writer.end(), marker.start())
    lowest = max(floor, writer.start() - _HOST_LIMIT)
    before = line[lowest : writer.start()]
    token = before[len(before.rstrip(_HOST_BYTES)) :]
    pid, tid = int(writer[1]), int(writer[2])
    if between is None or not token or token in _STREAMS or max(pid, tid) >= 2**32:
        return None
    device = between[1]
    return _Prefix(
        token=token,
        token_at=writer.start() - len(token),
        host_end=writer.start(),
        pid=pid,
        tid=tid,
        device=None if device is None or not -(2**15) <= int(device) < 2**15 else int(device),
        level=line[marker.start() + 5 : marker.end() - 1],
        message_at=marker.end(),
        location=(between[2] or b"").rstrip(),
    )


def _learn_from_first(line: bytes, prefixes: Sequence[_Prefix | int], hosts: KnownHosts) -> bytes | None:
    """The host of the line's first record, learnt if the line begins cleanly; None if it is uncertain."""
    if not prefixes or isinstance(prefixes[0], int):
        return None
    first = prefixes[0]
    known = hosts.host_of_process(first.token, first.pid)
    if known is not None:
        return known
    stamp = _stamp_before(line, first.token_at)
    before = line[: stamp.start() if stamp else first.token_at]
    if _is_clean(before) and not _is_torn_prefix(before, hosts):
        return first.token if hosts.learn_if_certain(first.token, first.pid) else None
    return hosts.host_of_file(first.token) or _after_text(line, first)


_HOST_AND_PID: Final = re.compile(rb"([\w<>-]{1,64}):(\d{1,10}:)?\Z")


def _is_torn_prefix(before: bytes, hosts: KnownHosts) -> bool:
    """Whether the text directly in front of a host is no tag but another record's prefix, up to its pid or tid."""
    found = _HOST_AND_PID.search(before)
    return found is not None and (found[2] is not None or hosts.is_known(found[1]))


_RESULT_ROW: Final = re.compile(
    rb"\s*\d{1,20}\s+\d{1,20}\s+[a-z]\w{2,10}\s+(?:sum|prod|max|min|avg|mulsum|none)(?: {1,10}-1)?"
)
"""The begin of a result row of nccl-tests, behind which NCCL may print. *Source:* nccl-tests `src/common.cu`."""


def _after_text(line: bytes, prefix: _Prefix) -> bytes | None:
    """The host behind text of an application, in a file whose hosts are not known yet.

    A host has no dot, so digits behind one end a number. Digits behind anything else, and letters behind a
    sign such as the slash of `12.3it/s`, may be the text's or the host's: None.
    """
    row = _RESULT_ROW.match(line)
    if row is not None and prefix.token_at < row.end() < prefix.host_end:
        return line[row.end() : prefix.host_end]
    token, before = prefix.token, line[prefix.token_at - 1 : prefix.token_at]
    if before == b".":
        return token.lstrip(b"0123456789") or None
    if before in _SEPARATORS:
        return None if token[:1].isdigit() and not token.isdigit() else token
    return None


def _certain_host(prefix: _Prefix, hosts: KnownHosts) -> bytes | None:
    return hosts.host_of_process(prefix.token, prefix.pid) or hosts.host_of_file(prefix.token)


def _record(
    line: bytes, prefix: _Prefix, host: bytes, message_end: int, end: RecordEnd, *, is_first: bool
) -> LogRecord:
    host_at = prefix.host_end - len(host)
    stamp = _stamp_before(line, host_at)
    begin = stamp.start() if stamp else host_at
    return LogRecord(
        writer=Writer(host=host.decode("ascii"), pid=prefix.pid, tid=prefix.tid, device=prefix.device),
        level=prefix.level,
        message=line[prefix.message_at : message_end],
        end=end,
        begin=begin,
        message_at=prefix.message_at,
        stamp=stamp,
        is_clean=is_first and _is_clean(line[:begin]),
        location=prefix.location,
    )


def _stamp_before(line: bytes, host_at: int) -> re.Match[bytes] | None:
    if line[host_at - 1 : host_at] not in {b" ", b"]"}:
        return None
    found = stamps.in_front(line, host_at)
    if found is None and (other := stamps.in_other_form(line, host_at)) is not None:
        found = other if _is_clean(line[: other.start()]) else None
    return found


def _is_clean(before: bytes) -> bool:
    return not before or (len(before) <= _TAG_WINDOW and LAUNCHER_TAG.fullmatch(before) is not None)
