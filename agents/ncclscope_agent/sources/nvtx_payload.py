"""What NCCL attaches to its NVTX ranges: the communicator's hash and the bytes of the call.

Scope: NVTX_EVENTS.binaryData of nsys exports (filled from 2026 on with `--include-blobs=true`), NCCL 2.16.2 to 2.30.
nsys puts 32 bytes in front: domain, schema, size of the payload, offset or total size (64 bits each, little-endian).
NCCL's struct begins with the communicator's hash from 2.25 on and with the bytes before; its length tells which.
Not in any payload: data type, stream, opCount, the own rank.

*Source:* NCCL `src/include/nvtx_payload_schemas.h`, `src/collectives.cc` at the tags; Nsight Systems documentation.
"""

from __future__ import annotations

import struct
from typing import Final

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


def read_payload(function: str, blob: object) -> tuple[int, int]:
    """Hash of the communicator (0: not told) and bytes of the call (NO_NUMBER: not told).

    Anything that is not such a payload tells nothing; what a cell holds is not trusted.
    """
    lengths = _LENGTHS.get(function)
    if lengths is None or not isinstance(blob, bytes) or len(blob) < _HEADER.size:
        return 0, NO_NUMBER
    _, _, size, _ = _HEADER.unpack_from(blob)
    payload = blob[_HEADER.size : _HEADER.size + size] if size <= 64 else b""
    if len(payload) != size or size not in lengths:
        return 0, NO_NUMBER
    has_hash = size == lengths[1]
    numbers = struct.unpack_from("<2Q" if has_hash else "<Q", payload)
    communicator, moved = numbers if has_hash else (0, numbers[0])
    return communicator, moved if moved <= _LARGEST else NO_NUMBER
