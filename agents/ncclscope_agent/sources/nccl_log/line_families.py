"""All families of NCCL's lines beside operations, tuning, life cycle and versions: one table, one look-up.

The forms that give facts stand by theme in `channel_lines.py`, `setting_lines.py` and `trouble_lines.py`; those that
are only counted in `counted_lines.py`; system blocks and tuning tables, whose lines belong together, in
`topology_lines.py` and `tuning_table.py`.
"""

from __future__ import annotations

import re
from typing import Final

from ncclscope_agent.sources.nccl_log import channel_lines, setting_lines, trouble_lines
from ncclscope_agent.sources.nccl_log.counted_lines import CALLS, COUNTED, TRACE
from ncclscope_agent.sources.nccl_log.line_form import RECORD_BYTES, Family, FamilyIndex, FamilyRead
from ncclscope_agent.sources.nccl_log.prefix import LogRecord, RecordEnd, Writer
from ncclscope_agent.sources.nccl_log.setting_lines import MATRIX_ROW

FAMILIES: Final[tuple[Family, ...]] = (
    *channel_lines.FAMILIES,
    *setting_lines.FAMILIES,
    *trouble_lines.FAMILIES,
    *COUNTED,
)
"""All of them, in the order in which they are tried."""

_FRAME: Final = re.compile(rb"[\w/.-]{1,100}\.(?:cc|h|cu|c):\d{1,6} ")
"""Source file and line, which calls, allocations and downgraded warnings put in front of their message."""
_TRACE_LOCATION: Final = re.compile(rb"\d{1,15}\.\d{6} [\w:~]{1,80}:\d{1,6} ?")
"""The part between `[dev]` and `NCCL TRACE`: milliseconds since start, function, line."""

_INDEX: Final = FamilyIndex(FAMILIES)
_TORCH: Final = FamilyIndex(trouble_lines.TORCH)
_CALLS: Final = FamilyIndex(CALLS)
_MATRIX: Final = FamilyIndex([MATRIX_ROW])

_LOCATION: Final = re.compile(rb"([\w/.-]{1,100}\.(?:cc|h|cu|c)):(\d{1,6})(?: \([\w:~]{1,80}\))?")
_TORCH_AT: Final = re.compile(rb"ProcessGroupNCCL\.cpp:\d{1,6}\] |what\(\):  ")
MATRIX_TITLE: Final = b"Enabled NCCL Func/Proto/Algo Matrix:"


def read_record(record: LogRecord, line: int, logged_at_ns: int | None) -> FamilyRead | None:
    """The family and the record of a message; None if it is of none, or may have been cut."""
    message = record.message
    about = _about(record.writer, line, logged_at_ns)
    if record.level == b"CALL":
        return _CALLS.read(message, about)
    if record.level == b"TRACE":
        return (_INDEX.read(message, about) if record.end is RecordEnd.LINE else None) or _trace(record)
    about[RECORD_BYTES] = record.message_at - record.begin + len(message)
    location = _LOCATION.fullmatch(record.location)
    if location is not None:
        about.update(file=location[1].decode(), file_line=int(location[2]))
    found = _INDEX.read(message, about)
    if found is None and (frame := _FRAME.match(message)) is not None:
        # NCCL prints the warning of a failure that it expects as INFO, with file and line in the message.
        name, _, number = frame[0].decode().strip().rpartition(":")
        found = _INDEX.read(message[frame.end() :], {**about, "file": name, "file_line": int(number)})
    if found is None or record.end is RecordEnd.LINE:
        return found
    is_exact = record.end is RecordEnd.RECORD and not message[-1:].isspace()
    return found if is_exact and found.family.is_closed else None


def _about(writer: Writer, line: int, logged_at_ns: int | None) -> dict[str, object]:
    about: dict[str, object] = {"line": line, "host": writer.host, "pid": writer.pid, "tid": writer.tid}
    if logged_at_ns is not None:
        about["logged_at_ns"] = logged_at_ns
    return about


def _trace(record: LogRecord) -> FamilyRead | None:
    is_trace = record.end is RecordEnd.LINE and _TRACE_LOCATION.fullmatch(record.location) is not None
    return FamilyRead(TRACE, None) if is_trace else None


def read_torch(text: bytes, line: int) -> FamilyRead | None:
    """A line of PyTorch's watchdog, behind any launcher's tag; None if it is none that is known."""
    at = _TORCH_AT.search(text)
    return None if at is None else _TORCH.read(text[at.end() :], {"line": line})


def read_matrix_row(text: bytes, writer: Writer, line: int) -> FamilyRead | None:
    """A continuation line of the matrix of functions, protocols and algorithms; None if it is none."""
    return _MATRIX.read(text, _about(writer, line, None))
