"""What NCCL attaches to its NVTX ranges, whole and damaged."""

from __future__ import annotations

import struct

import pytest

from ncclscope_agent.sources.nsys.nvtx_payload import read_payload
from ncclscope_wire.terms import NO_NUMBER

HASH, SIZE = 0xDEAD_BEEF_0BAD_CAFE, 4096


def blob(content: bytes, size: int | None = None) -> bytes:
    """The payload with what nsys puts in front."""
    return struct.pack("<4Q", 1, (1 << 24) + 5, len(content) if size is None else size, 32) + content


@pytest.mark.parametrize(
    ("function", "tail"), [("ncclAllGather", b""), ("ncclAllReduce", bytes(8)), ("ncclSend", bytes(8))]
)
def test_the_length_tells_whether_a_hash_stands_in_front(function: str, tail: bytes) -> None:
    assert read_payload(function, blob(struct.pack("<QQ", HASH, SIZE) + tail)) == (HASH, SIZE)
    assert read_payload(function, blob(struct.pack("<Q", SIZE) + tail)) == (0, SIZE)


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        "text",
        7,
        b"",
        b"\xff" * 31,
        blob(struct.pack("<QQ", HASH, SIZE) + bytes(8))[:-1],
        blob(struct.pack("<QQ", HASH, SIZE) + bytes(8), size=2**63),
        blob(struct.pack("<QQ", HASH, SIZE) + bytes(9)),
        blob(b""),
    ],
)
def test_a_damaged_payload_tells_nothing(damaged: object) -> None:
    assert read_payload("ncclAllReduce", damaged) == (0, NO_NUMBER)


def test_functions_without_a_known_payload_tell_nothing() -> None:
    assert read_payload("ncclCommInitRank", blob(struct.pack("<QQ", HASH, SIZE))) == (0, NO_NUMBER)


def test_bytes_beyond_all_memory_are_not_believed() -> None:
    assert read_payload("ncclAllGather", blob(struct.pack("<QQ", HASH, 2**63))) == (HASH, NO_NUMBER)
