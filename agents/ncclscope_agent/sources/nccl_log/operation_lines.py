"""Lines of operations, tuning, life cycle and version: their patterns, and their rows and records on the wire.

Scope: NCCL 2.4 to 2.30, RCCL, and forks that put text between `[dev]` and `NCCL INFO`. All patterns are over bytes
and run in linear time on lines of bounded length. What is left out on purpose, and the NCCL function that prints each
form, is listed in `docs/formats.md`. Each function takes a message (or the part behind `opCount N `) and gives its
packed columns or a record, or None if it is not of that family or may not be whole.

*Source:* the format strings in NCCL `src/enqueue.cc:ncclEnqueueCheck` (operation), `src/enqueue.cc` and
`src/scheduler/symmetric_sched.cc` (tuning), `src/init.cc` (life cycle, version).
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from typing import Final

from ncclscope_agent.sources.nccl_log.prefix import RecordEnd, Writer
from ncclscope_wire.records import CommunicatorEvent, CommunicatorEventKind, VersionSeen
from ncclscope_wire.terms import ALGORITHMS, NO_NUMBER, NO_POINTER, OPERATION_CODES, PROTOCOLS, UNKNOWN_OPERATION

_POINTER = rb"0x[0-9a-f]{1,16}|\(nil\)"

OPERATION_HEAD: Final = re.compile(rb"(\w{1,64}): opCount ([0-9a-f]{1,16}) ")

_FIELDS = (
    rb"sendbuff (" + _POINTER + rb") recvbuff (" + _POINTER + rb")"
    rb"(?: acc (?:" + _POINTER + rb"))?"  # one fork
    rb" count (\d{1,20}) datatype (-?\d{1,5}) op (-?\d{1,10}) root (-?\d{1,10})"
    rb" comm (0x[0-9a-f]{1,16}) \[nranks=(\d{1,10})\]"
)
OPERATION_FIELDS: Final = re.compile(_FIELDS)
"""All that says what the operation is: it is whole, whatever became of the stream behind it."""
OPERATION_TAIL: Final = re.compile(
    _FIELDS + rb" stream (" + _POINTER + rb")"
    rb"(?: task -?\d{1,10} globalrank (-?\d{1,10}))?"  # RCCL
)
"""The part behind `opCount N `, which recurs and which templates are made of."""


_FRAGMENT: Final = re.compile(
    rb": opCount [0-9a-f]|[a-z]buff (?:0x[0-9a-f]{1,16}|\(nil\)) (?:recvbuff|count)|[ndv]buff (?:0x[0-9a-f]{0,16})? ?\Z"
    rb"| \[nranks=\d| datatype \d{1,2} op "
)


def has_fragment(text: bytes) -> bool:
    """Whether a piece of an operation line stands here: words in an order that only operation lines have.

    A pointer behind `buff` alone is none: lines of TRACE builds and of applications have that too.
    """
    return _FRAGMENT.search(text) is not None


TUNING: Final = re.compile(
    rb"(?:(\w{1,64})(?: \[(?:Symmetric|Copy Engine|Hierarchical CE)\])?: )?(\d{1,20}) Bytes -> "
    rb"(?:Algo (\w{1,32}) proto (\w{1,32})(?: time (\d{1,18}\.\d{6})| channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(-?\d{1,4})\}"
    rb"(?: cgaClusterSize \d{1,4})?)"
    rb"|Kernel \w{1,128} nchannels (\d{1,4}) nthreads \d{1,5}(?: nWorks \d{1,6})?"
    rb"|cudaMemcpy(?:; CE synchronization with NVLS)?"
    rb"|RMA proxy \+ CE)"
)
"""The TUNING line in all its forms, NCCL 2.20 to 2.31; without a name before 2.23."""

TUNING_FRAGMENT: Final = re.compile(rb"\d Bytes -> ")

INIT: Final = re.compile(
    rb"(?:\[Rank \d{1,10}\] )?(?:(ncclComm\w{1,64}) )?comm (0x[0-9a-f]{1,16})"
    rb" rank (-1|\d{1,9}) n[rR]anks (-1|\d{1,9}) cudaDev (-1|\d{1,9})"
    rb"(?: nvmlDev (-1|\d{1,9}))?(?: busId ([0-9a-f]{1,16}))?"
    rb"(?: commId 0x([0-9a-f]{1,16})(?= parent))?"  # of parts of others, 2.31
    rb"(?: parent (0x[0-9a-f]{1,16})(?: (?:split|child)Count (-?\d{1,10}))? color (-?\d{1,10}) key (-?\d{1,10}))?"
    rb"(?: commId 0x([0-9a-f]{1,16}))?"
    rb"(?: localSize (?: ?-?\w{1,32}+){1,12}+)?"  # RCCL: memory of the thread
    rb" ?- (Init START|Init COMPLETE|Destroy COMPLETE|Abort START|Abort COMPLETE)"
)
"""The life of a communicator: with and without commId, nvmlDev, busId, parent and entry point."""

VERSION: Final = re.compile(
    rb"[NR]CCL version (?:: )?(\d{1,4}\.\d{1,4}\.\d{1,4}(?:[-.]\w{1,32}(?::\w{1,40})?)?)"
    rb"(?:\+cuda([\w.]{1,32}?)|\+hip[\w.]{1,32}(?: [\w./-]{1,40}:\w{1,40}\+?)?)?(?=\s|$|[NR]CCL version )"
)
"""`NCCL version 2.28.3+cuda12.9`: bare up to 2.21, a message of an INFO line later. RCCL puts its commit behind it."""

PACK_TEMPLATE: Final = struct.Struct("<IhBIhqiiQQQQQi").pack
"""One row of OPERATION_TEMPLATE; struct also refuses numbers that do not fit their column."""
PACK_TUNING: Final = struct.Struct("<IIBbbhQd").pack
"""One row of TUNING_ROW."""

BUFFERS_AND_COUNT: Final = re.compile(
    rb"sendbuff (?:0x[0-9a-f]{1,16}|\(nil\)) recvbuff (?:0x[0-9a-f]{1,16}|\(nil\)) count \d{1,19}"
)
"""The begin of `OPERATION_TAIL`, in the form that all versions have: six words, and a count that fits."""
AFTER_COUNT: Final = b" datatype "

_LONGEST_POINTER: Final = len(b"0x7fffffffffff")
"""A pointer of a process on x86-64 or arm64 has 47 or 48 bits: with 12 digits it cannot have been cut."""
_POISON: Final = 2**64 - 1
"""busId and commId of a freed communicator. Source: NCCL `src/init.cc:commPoison`."""

_EVENT_KINDS: Final = {
    b"Init START": CommunicatorEventKind.INIT_START,
    b"Init COMPLETE": CommunicatorEventKind.INIT_COMPLETE,
    b"Destroy COMPLETE": CommunicatorEventKind.DESTROY,
    b"Abort START": CommunicatorEventKind.ABORT,
    b"Abort COMPLETE": CommunicatorEventKind.ABORT,
}
_ALGORITHM_INDEX: Final = {
    text: index for index, name in enumerate(ALGORITHMS) for text in (name.encode(), str(index).encode())
}
_PROTOCOL_INDEX: Final = {
    text: index for index, name in enumerate(PROTOCOLS) for text in (name.encode(), str(index).encode())
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationHead:
    """Thread and operation: the part of a template that stands in front of opCount."""

    process: tuple[str, int]
    """Host and pid."""
    thread: int
    device: int
    op: int
    op_name: int


def operation_code(name: bytes) -> int:
    """The code of an operation's name; UNKNOWN_OPERATION for one that NCCL does not have yet."""
    return OPERATION_CODES.get(name.decode("ascii", "replace"), UNKNOWN_OPERATION)


def pack_template(head: OperationHead, tail: re.Match[bytes], cut_stream: int = NO_POINTER) -> bytes | None:
    """One row of OPERATION_TEMPLATE; None if a number is larger than any that NCCL prints.

    `tail` is a match of OPERATION_TAIL, or of OPERATION_FIELDS with `cut_stream` for the stream.
    """
    send, receive, count, data_type, reduction, root, communicator, nranks, *behind = tail.groups()
    stream, rank = behind or (None, None)
    try:
        return PACK_TEMPLATE(
            head.thread,
            head.device,
            head.op,
            head.op_name,
            int(data_type),
            int(reduction),
            int(root),
            int(nranks),
            int(count),
            _pointer(send),
            _pointer(receive),
            int(communicator, 16),
            cut_stream if stream is None else _pointer(stream),
            NO_NUMBER if rank is None else int(rank),
        )
    except struct.error:
        return None


class StreamsOfProcesses:
    """The streams that operations of each process and communicator are on; what is remembered is bounded."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._only: dict[tuple[str, int, bytes], bytes | None] = {}
        """By process and communicator, and by process alone; None where there are several."""

    def add(self, process: tuple[str, int], tail: re.Match[bytes]) -> None:
        """Notes the stream of a whole operation, by its match of OPERATION_TAIL."""
        if len(self._only) >= self._limit:
            self._only.clear()
        stream: bytes = tail[9]
        for communicator in (tail[7], b""):
            if self._only.setdefault((*process, communicator), stream) != stream:
                self._only[*process, communicator] = None

    def only_one(self, process: tuple[str, int], fields: re.Match[bytes]) -> int:
        """The only stream of this operation's communicator so far, or of its process; NO_POINTER if it is not known.

        `fields` is a match of OPERATION_FIELDS.
        """
        of_process = self._only.get((*process, b""))
        stream = self._only.get((*process, fields[7]), of_process)
        return NO_POINTER if stream is None else _pointer(stream)


def _pointer(text: bytes) -> int:
    return 0 if text == b"(nil)" else int(text, 16)


def is_whole_operation(tail: re.Match[bytes], message: bytes, end: RecordEnd) -> bool:
    """Whether nothing of the record was cut off or glued to it.

    The stream pointer (RCCL: the global rank) comes last. Before a newline it is whole. Before another
    record it is whole only if it could not be longer: `(nil)`, or a pointer with all its digits.
    """
    if end is RecordEnd.LINE:
        return not message[tail.end() :].strip()
    stream: bytes = tail[9]
    if tail.end() == tail.end(9) and stream == b"(nil)":
        return True
    if end is RecordEnd.RECORD:
        is_exact = tail.end() == len(message) and tail.end() == tail.end(9)
        return is_exact and len(stream) == _LONGEST_POINTER
    return False


def pack_tuning(thread: int, message: bytes) -> bytes | None:
    """One row of TUNING_ROW with line 0; None if the message is no TUNING line.

    A text behind it is no harm: every number that is used has something of the same line behind it.
    """
    found = TUNING.match(message)
    if found is None:
        return None
    name, size, algorithm, protocol, expected, low, high, channels = found.groups()
    count = NO_NUMBER
    if low is not None and int(high) >= int(low):
        count = int(high) - int(low) + 1
    elif channels is not None:
        count = int(channels)
    try:
        return PACK_TUNING(
            thread,
            0,
            UNKNOWN_OPERATION if name is None else operation_code(name),
            _ALGORITHM_INDEX.get(algorithm, NO_NUMBER),
            _PROTOCOL_INDEX.get(protocol, NO_NUMBER),
            count,
            int(size),
            math.nan if expected is None else float(expected),
        )
    except struct.error:
        return None


def communicator_event(writer: Writer, message: bytes, line: int, logged_at_ns: int | None) -> CommunicatorEvent | None:
    """The Init, Destroy or Abort that a message reports; None if it reports none."""
    found = INIT.match(message)
    if found is None:
        return None
    api, pointer, rank, nranks, cuda, nvml, bus, id_of_part, parent, split, color, key, comm_id, event = found.groups()
    return CommunicatorEvent(
        kind=_EVENT_KINDS[event],
        host=writer.host,
        pid=writer.pid,
        tid=writer.tid,
        line=line,
        pointer=int(pointer, 16),
        rank=int(rank),
        nranks=int(nranks),
        cuda_device=_unless(-1, cuda, 10),
        nvml_device=_unless(-1, nvml, 10),
        bus_id=_unless(_POISON, bus, 16, most=2**63 - 1),
        comm_id=_unless(_POISON, comm_id or id_of_part, 16),
        parent=None if parent is None else int(parent, 16),
        split_count=None if split is None else int(split),
        color=None if color is None else int(color),
        key=None if key is None else int(key),
        api=None if api is None else api.decode("ascii", "replace"),
        logged_at_ns=logged_at_ns,
    )


def _unless(unknown: int, text: bytes | None, base: int, *, most: int = 2**64 - 1) -> int | None:
    if text is None:
        return None
    number = int(text, base)
    return None if number == unknown or number > most else number


def versions(message: bytes, line: int, writer: Writer | None) -> list[VersionSeen]:
    """The versions that a message names, all of it being version text; processes may glue theirs together."""
    seen: list[VersionSeen] = []
    at = 0
    while found := VERSION.match(message, at):
        cuda: bytes | None = found[2]
        seen.append(
            VersionSeen(
                version=found[1].decode("ascii", "replace"),
                # NCCL 2.5.7 printed the names of its own macros here.
                cuda=cuda.decode("ascii", "replace") if cuda and cuda[:1].isdigit() else None,
                line=line,
                host=writer.host if writer else None,
                pid=writer.pid if writer else None,
            )
        )
        at = found.end()
    return seen if not message[at:].strip() else []
