"""Frames: cutting a stream into payloads."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.frame import Deframer, encode_frame

PAYLOADS = st.lists(st.binary(max_size=40), max_size=6)


@given(payloads=PAYLOADS, cuts=st.lists(st.integers(0, 300), max_size=10))
def test_frames_come_out_the_same_whole_by_bytes_and_in_random_cuts(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(encode_frame(payload) for payload in payloads)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[begin:end] for begin, end in itertools.pairwise(edges)]

    for feeding in ([stream], [bytes([byte]) for byte in stream], pieces):
        deframer = Deframer()
        assert [payload for piece in feeding for payload in deframer.ingest_bytes(piece)] == payloads
        assert deframer.pending_bytes == 0


def test_an_announced_length_of_2_gib_is_refused_before_anything_is_kept() -> None:
    deframer = Deframer()
    with pytest.raises(ProtocolError, match=r"2147483648 bytes: the limit is 16777216 bytes"):
        deframer.ingest_bytes((2**31).to_bytes(4, "big") + b"x" * 100)
    assert deframer.pending_bytes == 0


@pytest.mark.parametrize(
    ("begins", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", r"this is an HTTP port: .*--listen"),
        (b"GET / HTTP/1.1\r\n", r"this port is for agents: .*--http"),
        (b"POST /api/snapshot HTTP/1.1\r\n", r"this port is for agents: .*--http"),
    ],
)
def test_a_peer_that_speaks_http_is_told_which_port_it_wants(begins: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        Deframer().ingest_bytes(begins)
    deframer = Deframer()
    assert deframer.ingest_bytes(begins[:3]) == []
    with pytest.raises(ProtocolError, match=said):
        deframer.ingest_bytes(begins[3:])


def test_after_a_frame_that_is_too_long_nothing_is_understood_any_more() -> None:
    deframer = Deframer(max_frame_bytes=10)
    with pytest.raises(ProtocolError):
        deframer.ingest_bytes(encode_frame(b"x" * 11))
    with pytest.raises(ProtocolError, match="11 bytes"):
        deframer.ingest_bytes(encode_frame(b"fine"))


def test_the_longest_frame_that_is_allowed_passes() -> None:
    assert Deframer(max_frame_bytes=10).ingest_bytes(encode_frame(b"x" * 10)) == [b"x" * 10]


def test_a_payload_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="11 bytes cannot be sent: the limit is 10"):
        encode_frame(b"x" * 11, max_frame_bytes=10)


def test_flush_forgets_an_unfinished_frame() -> None:
    deframer = Deframer()
    deframer.ingest_bytes(encode_frame(b"half")[:-2])
    assert deframer.finish() == []
    assert deframer.ingest_bytes(encode_frame(b"whole")) == [b"whole"]
