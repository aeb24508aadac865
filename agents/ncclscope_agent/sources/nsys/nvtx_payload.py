"""Payloads of NVTX ranges: the communicator's hash and the bytes of each of NCCL's calls.

Scope: NVTX_EVENTS.binaryData of nsys exports (filled from 2026 on with `--include-blobs=true`), NCCL 2.16.2 to 2.30.
nsys puts 32 bytes in front: domain, schema, size of the payload, offset or total size (64 bits each, little-endian).
NCCL's struct begins with the communicator's hash from 2.25 on and with the bytes before; its length tells which.
Not in the payload of any call: data type, stream, opCount, the own rank.

nsys 2022.4 to 2023.4 have no such column: there payloads come from the JSON export beside the SQLite export
(`nsys export --type=json`), one event a line, of which those with `BinaryData` hold thread, start, schema and payload.
Nothing else of the file is parsed; its first line, the strings of the whole report, may be of any length and is passed
over.

*Source:* NCCL `src/include/nvtx_payload_schemas.h`, `src/collectives.cc` at the tags; Nsight Systems documentation;
exports made with nsys 2022.4.2 and 2023.4.4.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from sqlite3 import Connection
from typing import Final, NamedTuple

import msgspec

from ncclscope_agent.sources.nsys.open_export import open_plain
from ncclscope_wire.terms import NO_NUMBER

_HEADER: Final = struct.Struct("<4Q")
_LENGTHS: Final = {
    "ncclAllGather": (8, 16),
    "ncclAlltoAll": (8, 16),
    "ncclAllReduce": (16, 24),
    "ncclReduceScatter": (16, 24),
    "ncclBroadcast": (16, 24),
    "ncclReduce": (16, 24),
    "ncclSend": (16, 24),
    "ncclRecv": (16, 24),
    "ncclGather": (16, 24),
    "ncclScatter": (16, 24),
}
"""Payload bytes of each function: without the communicator's hash, and with it."""

_LARGEST: Final = 2**62


class Call(NamedTuple):
    """One call of NCCL, as far as its payload says."""

    communicator: int
    """Its hash."""
    bytes: int
    """Count x size of the call: one rank's share of AllGather and ReduceScatter."""
    root: int
    """Root or peer; 0 if the function has none."""


class Member(NamedTuple):
    """One rank of a communicator."""

    communicator: int
    """Its hash."""
    rank: int
    nranks: int
    cuda_device: int


_ROOTED: Final = frozenset({"ncclBroadcast", "ncclReduce", "ncclSend", "ncclRecv", "ncclGather", "ncclScatter"})
_MEMBER: Final = struct.Struct("<Qiii")
_SPLIT: Final = struct.Struct("<QQiii")
_SPLIT_BYTES: Final = (36, 40)
"""Of hash, parent's hash, five numbers; and with what aligns it."""
MEMBER_FUNCTIONS: Final = frozenset(
    {
        *("ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable"),
        *("ncclCommDestroy", "ncclCommAbort", "ncclCommRevoke", "ncclCommSplit"),
    }
)
"""Functions whose payloads name a rank and the size of a communicator; of a split those of the parent."""
_MOST_RANKS: Final = 1 << 20


def read_call(function: str, blob: object) -> Call | None:
    """The call that a payload with a communicator's hash describes; None for any other. Cells are not trusted."""
    payload = _payload_of(blob)
    lengths = _LENGTHS.get(function)
    if payload is None or lengths is None or len(payload) != lengths[1]:
        return None
    communicator, moved = struct.unpack_from("<2Q", payload)
    root = struct.unpack_from("<i", payload, 16)[0] if function in _ROOTED else 0
    if not communicator or moved > _LARGEST or not 0 <= root < _MOST_RANKS:
        return None
    return Call(communicator, moved, root)


def read_member(function: str, blob: object) -> Member | None:
    """The rank that one of `MEMBER_FUNCTIONS` names (NCCL 2.25 on); None for any other payload.

    *Source:* NCCL `src/include/nvtx_payload_schemas.h`; `src/init.cc:ncclCommSplit` gives the parent's size and rank.
    """
    payload = _payload_of(blob)
    if payload is None:
        return None
    if function == "ncclCommSplit" and len(payload) in _SPLIT_BYTES:
        _, communicator, nranks, rank, device = _SPLIT.unpack_from(payload)
    elif function != "ncclCommSplit" and len(payload) in (_MEMBER.size, 24):
        communicator, nranks, rank, device = _MEMBER.unpack_from(payload)
    else:
        return None
    if not communicator or not 0 <= rank < nranks <= _MOST_RANKS or not 0 <= device < 1 << 10:
        return None
    return Member(communicator, rank, nranks, device)


def _payload_of(blob: object) -> bytes | None:
    """NCCL's struct behind what nsys puts in front."""
    if not isinstance(blob, bytes) or len(blob) < _HEADER.size:
        return None
    _, _, size, _ = _HEADER.unpack_from(blob)
    payload = blob[_HEADER.size : _HEADER.size + size] if size <= 64 else b""
    return payload if len(payload) == size else None


def read_payload(function: str, blob: object) -> tuple[int, int]:
    """Hash of the communicator (0: not given) and bytes of the call (NO_NUMBER: not given).

    Anything else than such a payload gives neither; cells are not trusted.
    """
    lengths, payload = _LENGTHS.get(function), _payload_of(blob)
    if lengths is None or payload is None or len(payload) not in lengths:
        return 0, NO_NUMBER
    has_hash = len(payload) == lengths[1]
    numbers = struct.unpack_from("<2Q" if has_hash else "<Q", payload)
    communicator, moved = numbers if has_hash else (0, numbers[0])
    return communicator, moved if moved <= _LARGEST else NO_NUMBER


PAYLOADS_LIMIT: Final = 1_000_000
"""Of one file; further ranges have none."""

_LONGEST_LINE: Final = 1 << 16
_FIRST_SCHEMA: Final = 1 << 24
_LAST_SCHEMA: Final = _FIRST_SCHEMA + 63
"""NCCL's own schemas: *Source:* NCCL `src/include/nvtx.h` (NVTX_SID_*)."""


CREATE: Final = (
    "CREATE TEMP TABLE json_payload(thread INTEGER, start INTEGER, payload BLOB, PRIMARY KEY(thread, start)) "
    "WITHOUT ROWID"
)
_INSERT: Final = "INSERT OR IGNORE INTO temp.json_payload VALUES (?, ?, ?)"


class _Blob(msgspec.Struct, rename="pascal"):
    schema_id: str
    data: bytes


class _Payload(msgspec.Struct, rename="pascal"):
    binary_data: list[_Blob]


class _Event(msgspec.Struct, rename="pascal"):
    timestamp: str
    global_tid: str
    payload: _Payload


class _Line(msgspec.Struct, rename="pascal"):
    nvtx_event: _Event


_DECODER: Final = msgspec.json.Decoder(_Line)


def copy_payloads(export: Path, connection: Connection) -> bool:
    """Fills temp.json_payload (globalTid, start since the session began, payload as `read_payload` takes it) from
    the JSON export of the same stem; False if there is none, or none that can be read."""
    connection.execute(CREATE)
    path = export.with_suffix(".json")
    try:
        with open_plain(path) as file:
            lines = iter(lambda: file.readline(_LONGEST_LINE), b"")
            connection.executemany(_INSERT, islice(_payloads(lines), PAYLOADS_LIMIT))
    except OSError:
        return False
    return True


def _payloads(lines: Iterator[bytes]) -> Iterator[tuple[int, int, bytes]]:
    is_whole = True
    for line in lines:
        begins, is_whole = is_whole, line.endswith(b"\n")
        if begins and is_whole and b'"BinaryData"' in line and (found := _payload(line)) is not None:
            yield found


def _payload(line: bytes) -> tuple[int, int, bytes] | None:
    """Thread, start and payload of an event, with the header that the column of later versions has."""
    try:
        event = _DECODER.decode(line).nvtx_event
        thread, start = int(event.global_tid), int(event.timestamp)
        blobs = [(int(blob.schema_id), blob.data) for blob in event.payload.binary_data]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if not (0 <= thread < 2**63 and 0 <= start < 2**62):
        return None
    for schema, data in blobs:
        if _FIRST_SCHEMA <= schema <= _LAST_SCHEMA and len(data) <= 64:
            return thread, start, _HEADER.pack(0, schema, len(data), _HEADER.size) + data
    return None
