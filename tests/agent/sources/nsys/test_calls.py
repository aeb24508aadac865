"""What payloads of NCCL's ranges say of calls and communicators; anything else says nothing."""

from __future__ import annotations

import struct

import pytest

from ncclscope_agent.sources.nsys.nvtx_payload import Call, Member, read_call, read_member

HASH, PARENT = 0xF00D_0000_0000_0001, 0xCAFE


def blob(content: bytes) -> bytes:
    return struct.pack("<4Q", 1, 1 << 24, len(content), 32) + content


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
