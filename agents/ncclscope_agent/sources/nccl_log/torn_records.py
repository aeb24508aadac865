"""Joins the head and the tail of a record that another process's whole record tore apart, if that is certain.

What comes into a file is `head` + `another record` + newline, and further down `tail` + newline. That the two fit
together proves nothing: processes that opened one file each for itself overwrite each other, and then what follows a
head is the tail of a later record of the same form, at the same place of it. So a tail is joined only if

- a launcher put the same tag in front of both that stands for one process (mpirun, torchrun): the launcher wrote the
  file alone, so nothing is lost between them, and the two together are one record whose form ends by itself; or
- the head alone says what the record is: it holds everything up to the count, a whole line with that beginning was
  read of that thread before, one only, and the tail is the rest of that line, to the byte.

One head is open at a time, or one for each tag; what is not joined is counted as torn, head and tail by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ncclscope_agent.sources.nccl_log import line_families, operation_lines, prefix
from ncclscope_agent.sources.nccl_log.known_lines import KnownLines
from ncclscope_agent.sources.nccl_log.prefix import CutLine, KnownHosts, LogRecord, RecordEnd, cut_line

_LINES_APART: Final = 1000
"""A tail comes soon: a launcher reads its processes in turn."""
_HEADS_OPEN: Final = 1024
_KNOWN_LOOKED_AT: Final = 4096
"""Known lines that are compared with a head, at most."""
_TAG: Final = re.compile(rb"\[\d{1,9},\d{1,9}(?:,\d{1,9})?\](?:<\w{1,16}>)?:|\[(?:default|rank)\d{1,9}\]:")
"""Tags that say which process it was: mpirun --tag-output, torchrun. Others name a host, or have no clear begin."""
_TAG_BEFORE: Final = re.compile(rb"(?:" + _TAG.pattern + rb") ?\Z")
_PREFIX_HEAD: Final = re.compile(
    rb"[\w<>-]{1,64}(?::\d{0,10}){0,2}(?: \[?-?\d{0,5}\]?(?: (?:N|NC|NCC|NCCL(?: (?:I|IN|INF|INFO)?)?)?)?)?"
)
"""The beginning of a prefix that was torn itself."""
_LONGEST_TAG: Final = 48
_NOTHING: Final[Mapping[str, int]] = MappingProxyType({})
_BY_ITSELF: Final = b""
"""In place of the tag of a head without one."""


@dataclass(frozen=True, slots=True)
class _Head:
    text: bytes
    """With its tag or stamp, up to the tear."""
    tag: bytes
    line: int
    rest: bytes | None
    """Expected tail; None if the tag identifies the process."""
    is_counted: bool = True
    """False if it may be text of an application."""


class TornRecords:
    """The open heads of one log."""

    def __init__(self, known: KnownLines, hosts: KnownHosts) -> None:
        self._known = known
        self._hosts = hosts
        self._heads: dict[bytes, _Head] = {}
        self._dropped = 0

    @property
    def is_open(self) -> bool:
        """Whether a tail is waited for."""
        return bool(self._heads)

    def drain_dropped(self, *, is_last: bool) -> Mapping[str, int]:
        """Heads whose tail did not come since this was last asked, as torn; the open ones too if nothing follows."""
        if is_last:
            self._drop_all()
        dropped, self._dropped = self._dropped, 0
        return {"torn": dropped} if dropped else _NOTHING

    def open(self, line: bytes, cut: CutLine, number: int, stamp_length: int) -> bool:
        """Whether the line is a head that may be joined, and one whole record of another process behind it."""
        if cut.lost or not 1 <= len(cut.records) <= 2 or cut.records[-1].end is not RecordEnd.LINE:
            return False
        whole = cut.records[-1]
        if len(cut.records) == 2 and (_is_of(whole, cut.records[0]) or _is_operation(cut.records[0])):
            return False
        tag = _TAG.match(line)
        if tag is not None:
            return self._open_tagged(line, whole, number, tag[0])
        if len(cut.records) == 2 and cut.records[0].is_clean:
            return self._open_known(line[: whole.begin], number, stamp_length)
        return False

    def join(self, text: bytes, number: int) -> bytes | None:
        """The whole line of which this one is the tail; None if it is of none that is open."""
        tag = _TAG.match(text)
        head = self._heads.pop(_BY_ITSELF if tag is None else tag[0], None)
        if head is None:
            return None
        if number - head.line <= _LINES_APART and text.startswith(head.tag):
            joined = head.text + text[len(head.tag) :]
            if text == head.rest or (head.rest is None and self._is_record(joined)):
                return joined
        self._dropped += head.is_counted
        return None

    def _open_tagged(self, line: bytes, whole: LogRecord, number: int, tag: bytes) -> bool:
        other = _TAG_BEFORE.search(line, max(0, whole.begin - _LONGEST_TAG), whole.begin)
        if other is None or other.start() <= len(tag) or other[0].rstrip() == tag:
            return False
        head = line[: other.start()]
        is_record = prefix.MARKER.search(head) is not None
        if head.startswith(tag + b" "):
            tag += b" "
        if not is_record and _PREFIX_HEAD.fullmatch(head, len(tag)) is None:
            return False
        self._add(tag.rstrip(), _Head(head, tag, number, None, is_record))
        return True

    def _open_known(self, text: bytes, number: int, stamp_length: int) -> bool:
        before, mark, after = text.partition(b": opCount ")
        known = self._known.heads.get(before[stamp_length:]) if mark else None
        tail = after.partition(b" ")[2]
        if known is None or b" datatype " not in tail or len(known.templates) > _KNOWN_LOOKED_AT:
            return False
        like = [line for line in known.templates if line.startswith(tail)]
        if len(like) != 1 or len(like[0]) == len(tail):
            return False
        self._add(_BY_ITSELF, _Head(text, b"", number, like[0][len(tail) :]))
        return True

    def _add(self, key: bytes, head: _Head) -> None:
        before = self._heads.pop(key, None)
        if before is not None:
            self._dropped += before.is_counted
        if len(self._heads) >= _HEADS_OPEN:
            self._drop_all()
        self._heads[key] = head

    def _drop_all(self) -> None:
        self._dropped += sum(head.is_counted for head in self._heads.values())
        self._heads.clear()

    def _is_record(self, line: bytes) -> bool:
        cut = cut_line(line, self._hosts)
        if cut.lost or len(cut.records) != 1 or not cut.records[0].is_clean:
            return False
        record = cut.records[0]
        message = record.message.rstrip()
        head = operation_lines.OPERATION_HEAD.match(message)
        if head is not None:
            return operation_lines.OPERATION_TAIL.fullmatch(message, head.end()) is not None
        if operation_lines.TUNING.fullmatch(message) is not None or operation_lines.INIT.fullmatch(message) is not None:
            return True
        found = line_families.read_record(record, 0, None)
        return found is not None and found.is_in_bounds and found.family.is_closed


def _is_operation(record: LogRecord) -> bool:
    """Whether all that says what the operation is stands there: it has a row without its tail."""
    head = operation_lines.OPERATION_HEAD.match(record.message)
    return head is not None and operation_lines.OPERATION_FIELDS.match(record.message, head.end()) is not None


def _is_of(record: LogRecord, other: LogRecord) -> bool:
    """Whether one process wrote both."""
    return (record.writer.host, record.writer.pid) == (other.writer.host, other.writer.pid)
