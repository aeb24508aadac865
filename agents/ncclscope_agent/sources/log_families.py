"""Every family of NCCL's lines beside operations, tuning, life cycle and calls: one table, one look-up.

The forms stand by theme in `families_communicators.py`, `families_network.py`, `families_trouble.py`,
`families_machinery.py`, `families_ras.py`, `families_calls.py` and `families_fork.py`; system blocks and tuning tables,
whose lines belong together, in `topology_lines.py` and `tuning_table.py`. What is understood is read into a record with
checked fields (`ncclscope_wire/facts.py`).
"""

from __future__ import annotations

import re
from typing import Final

from ncclscope_agent.sources import (
    families_communicators,
    families_fork,
    families_machinery,
    families_network,
    families_ras,
    families_trouble,
)
from ncclscope_agent.sources.families_calls import CALLS, FRAME, STACK, TRACE
from ncclscope_agent.sources.families_network import MATRIX_ROW
from ncclscope_agent.sources.log_family import RECORD_BYTES, Family, FamilyIndex, FamilyRead, form
from ncclscope_agent.sources.log_prefix import LogRecord, RecordEnd, Writer
from ncclscope_wire import facts

SEARCH: Final[tuple[Family, ...]] = (
    form(
        "search",
        facts.GraphFound,
        "Pattern ",
        r"Pattern (?P<pattern>\d+), crossNic (?P<cross_nic>\d+), nChannels (?P<channels>\d+),"
        r" (?:bw|speed) (?P<intra_gb_per_s>\d+\.\d+)/(?P<inter_gb_per_s>\d+\.\d+),"
        r" type (?P<intra_path>[A-Z0-9]{2,4})/(?P<inter_path>[A-Z0-9]{2,4}), sameChannels (?P<same_channels>\d)",
    ),
    form(
        "search",
        facts.GraphChannel,
        "",
        r" ?(?P<channel>\d+) :(?P<nodes>(?: (?:NET|GPU|GIN|RMA)/[0-9A-Fa-f]{1,16}(?:-[0-9A-Fa-f]{1,16})?)+)",
        finish=lambda fields: {**fields, "nodes": str(fields["nodes"]).split()},
    ),
)
"""What the search for rings and trees found. *Source:* NCCL `src/graph/search.cc:ncclTopoPrintGraph`."""

FAMILIES: Final[tuple[Family, ...]] = (
    *families_communicators.FAMILIES,
    *families_network.FAMILIES,
    *SEARCH,
    *families_trouble.FAMILIES,
    *families_machinery.FAMILIES,
    *families_ras.FAMILIES,
    *STACK,
    *families_fork.FAMILIES,
)
"""All of them, in the order in which they are tried."""

NAMES: Final[tuple[str, ...]] = tuple(
    dict.fromkeys(family.name for family in (*FAMILIES, MATRIX_ROW, *CALLS, *families_trouble.TORCH))
)
"""The families' names, as they are counted."""

_INDEX: Final = FamilyIndex(FAMILIES)
_TORCH: Final = FamilyIndex(families_trouble.TORCH)
_CALLS: Final = FamilyIndex(CALLS)
_MATRIX: Final = FamilyIndex([MATRIX_ROW])

_LOCATION: Final = re.compile(rb"([\w/.-]{1,100}\.(?:cc|h|cu|c)):(\d{1,6})(?: \([\w:~]{1,80}\))?")
_TORCH_AT: Final = re.compile(rb"ProcessGroupNCCL\.cpp:\d{1,6}\] |what\(\):  ")
MATRIX_TITLE: Final = b"Enabled NCCL Func/Proto/Algo Matrix:"


def read_record(record: LogRecord, line: int, logged_at_ns: int | None) -> FamilyRead | None:
    """The family and the record of a message; None where it is of none, or may have been cut."""
    message = record.message
    about = _about(record.writer, line, logged_at_ns)
    if record.level == b"CALL":
        return _CALLS.read(message, about)
    if record.level == b"TRACE":
        return (_INDEX.read(message, about) if record.end is RecordEnd.LINE else None) or _trace(record, about)
    about[RECORD_BYTES] = record.message_at - record.begin + len(message)
    location = _LOCATION.fullmatch(record.location)
    if location is not None:
        about.update(file=location[1].decode(), file_line=int(location[2]))
    found = _INDEX.read(message, about)
    if found is None and (frame := FRAME.match(message)) is not None:
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


def _trace(record: LogRecord, about: dict[str, object]) -> FamilyRead | None:
    found = TRACE.fullmatch(record.location)
    if found is None or record.end is not RecordEnd.LINE:
        return None
    fact = facts.TraceSeen(
        line=int(str(about["line"])),
        host=record.writer.host,
        pid=record.writer.pid,
        tid=record.writer.tid,
        after_ms=float(found[1]),
        function=found[2].decode(),
    )
    return FamilyRead(_TRACE_FAMILY, fact)


_TRACE_FAMILY: Final = form("trace", facts.TraceSeen, "", r"", travels=False)


def read_torch(text: bytes, line: int) -> FamilyRead | None:
    """A line of PyTorch's watchdog, behind any launcher's tag; None where it is none that is known."""
    at = _TORCH_AT.search(text)
    return None if at is None else _TORCH.read(text[at.end() :], {"line": line})


def read_matrix_row(text: bytes, writer: Writer, line: int) -> FamilyRead | None:
    """A continuation line of the matrix of functions, protocols and algorithms; None where it is none."""
    return _MATRIX.read(text, _about(writer, line, None))
