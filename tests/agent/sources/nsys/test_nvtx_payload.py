"""What NCCL attaches to its NVTX ranges, whole and damaged."""

from __future__ import annotations

import struct

import pytest

from ncclscope_agent.sources.nsys.nvtx_payload import Call, Member, read_call, read_member, read_payload
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


PARENT = 0xCAFE


@pytest.mark.parametrize(
    ("function", "content", "call"),
    [
        ("ncclAllReduce", struct.pack("<QQii", HASH, 4096, 0, 0), Call(HASH, 4096, 0)),
        ("ncclBroadcast", struct.pack("<QQii", HASH, 4096, 3, 0), Call(HASH, 4096, 3)),
        ("ncclSend", struct.pack("<QQii", HASH, 64, 1, 0), Call(HASH, 64, 1)),
        ("ncclAllGather", struct.pack("<QQ", HASH, 512), Call(HASH, 512, 0)),
        ("ncclAllGather", struct.pack("<Q", 512), None),  # before 2.25: whose it is is not said
        ("ncclSend", struct.pack("<QQii", HASH, 64, -5, 0), None),
        ("ncclAllReduce", struct.pack("<QQii", HASH, 2**63, 0, 0), None),
        ("ncclAllReduce", struct.pack("<QQii", 0, 64, 0, 0), None),
        ("ncclGroupEnd", b"", None),
    ],
)
def test_a_call_is_read_if_its_payload_names_the_communicator(function: str, content: bytes, call: Call | None) -> None:
    assert read_call(function, blob(content)) == call
    assert read_call(function, blob(content)[:-1]) is None or call is None
    assert read_call(function, "text") is None


@pytest.mark.parametrize(
    ("function", "content", "member"),
    [
        ("ncclCommInitRankConfig", struct.pack("<Qiiii", HASH, 8, 3, 1, 0), Member(HASH, 3, 8, 1)),
        ("ncclCommDestroy", struct.pack("<Qiii", HASH, 8, 7, 7), Member(HASH, 7, 8, 7)),
        ("ncclCommSplit", struct.pack("<QQiiiiii", HASH, PARENT, 8, 3, 1, 2, 3, 0), Member(PARENT, 3, 8, 1)),
        ("ncclCommInitRank", struct.pack("<iii", 3, 8, 1), None),  # before 2.25
        ("ncclCommDestroy", struct.pack("<Qiii", HASH, 8, 8, 0), None),
        ("ncclCommDestroy", struct.pack("<Qiii", HASH, 8, 0, -1), None),
    ],
)
def test_a_member_is_read_of_ranges_that_make_split_or_destroy(
    function: str, content: bytes, member: Member | None
) -> None:
    assert read_member(function, blob(content)) == member
