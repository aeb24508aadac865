"""Bytes that change on their way: a wrong number is never taken, and what was sent arrives once nevertheless.

TCP's checksum has 16 bits, and takes one wrong segment in 65,536 for a right one where a NIC, a switch or a proxy turns
bits. *Source:* Stone and Partridge, "When the CRC and TCP checksum disagree", SIGCOMM 2000.
"""

from __future__ import annotations

from itertools import count
from typing import cast

import msgpack
import pytest
from wire.sample_batches import HELLO, log_batch

from ncclscope_service.intake.receive import Receiver
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.compression import expanded, is_compressed
from ncclscope_wire.errors import DamagedError, ProtocolError
from ncclscope_wire.frame import HEADER_BYTES, Deframer, encode_frame
from ncclscope_wire.messages import (
    Acknowledge,
    AgentHealth,
    BatchMessage,
    Goodbye,
    Heartbeat,
    Message,
    Position,
    Refused,
    Welcome,
)

BATCH = BatchMessage(
    sequence=1, batch=log_batch(0, 5, strings=("AllReduce", "h"), templates=2, operations=((0, 1), (1, 2)))
)
HEARTBEAT = Heartbeat(agent_wall_ns=1, health=AgentHealth(lines_total=3))


def turned(data: bytes, bit: int) -> bytes:
    """The bytes with another bit at that place."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _packed(content: object) -> bytes:
    return cast(bytes, msgpack.packb(content))


def bits_that_matter(payload: bytes) -> list[int]:
    """Those with which a payload says something else: what was deflated ends within a byte."""
    return [bit for bit in range(8 * len(payload)) if not _says_the_same(payload, turned(payload, bit))]


def _says_the_same(payload: bytes, other: bytes) -> bool:
    try:
        return is_compressed(payload) and is_compressed(other) and expanded(payload) == expanded(other)
    except ProtocolError:
        return False


@pytest.mark.parametrize(
    "message", [HELLO, HEARTBEAT, Goodbye(reason="stopped"), BATCH], ids=lambda it: type(it).__name__
)
def test_a_message_of_an_agent_with_any_bit_turned_is_refused(message: Message) -> None:
    payload = encode_message(message)
    for bit in bits_that_matter(payload):
        with pytest.raises(ProtocolError):
            decode_message(turned(payload, bit), is_sent=True)


@pytest.mark.parametrize(
    "message",
    [
        Welcome(protocol_version=HELLO.protocol_version, session_known=False, acknowledged=0,
                positions={"8:42:beef": Position(end=2**40, end_line=7, content_check=3)}),
        Acknowledge(sequence=2**40),
    ],
    ids=lambda it: type(it).__name__,
)  # fmt: skip
def test_so_is_one_of_a_service(message: Message) -> None:
    payload = encode_message(message)
    for bit in range(8 * len(payload)):
        with pytest.raises(ProtocolError):
            decode_message(turned(payload, bit), is_sent=True)


def test_a_message_without_a_checksum_is_taken_from_disks_only() -> None:
    payload = _packed({"kind": "acknowledge", "sequence": 3})
    assert decode_message(payload) == Acknowledge(sequence=3)
    with pytest.raises(DamagedError, match="no checksum"):
        decode_message(payload, is_sent=True)


def test_what_peers_of_other_versions_say_needs_none() -> None:
    refused = Refused(reason="wrong_version", message="2 and 3")
    for message in (
        {"kind": "hello", "protocol_version": 2},
        {"kind": "refused", "reason": "wrong_version", "message": "2 and 3"},
    ):
        assert decode_message(_packed(message), is_sent=True) in (decode_message(_packed(message)), refused)


def test_a_batch_that_was_damaged_at_any_place_of_its_frame_arrives_once_when_it_is_sent_again() -> None:
    frame = encode_frame(encode_message(BATCH))
    heartbeats = encode_frame(encode_message(HEARTBEAT)) * 8
    receiver = Receiver()
    connections = count(1)
    arrived = 0

    def sent(data: bytes) -> list[Message]:
        nonlocal arrived
        connection = next(connections)
        receiver.open(connection)
        welcome = receiver.on_bytes(connection, encode_frame(encode_message(HELLO)), 0)
        outcome = receiver.on_bytes(connection, data, 0)
        receiver.on_disconnected(connection)
        arrived += len(outcome.received)
        answers = welcome.to_send + outcome.to_send
        return [decode_message(payload, is_sent=True) for payload in Deframer().ingest_bytes(answers)]

    in_payload = [8 * HEADER_BYTES + bit for bit in bits_that_matter(frame[HEADER_BYTES:])]
    assert len(in_payload) > 7 * (len(frame) - HEADER_BYTES)
    for bit in (*range(8 * HEADER_BYTES), *in_payload):
        said = sent(turned(frame, bit) + heartbeats)
        assert arrived == 0
        assert bit < 8 * HEADER_BYTES or (isinstance(said[-1], Refused) and said[-1].reason == "damaged")
    sent(frame + heartbeats)
    sent(frame + heartbeats)
    assert arrived == 1
    assert [agent.name for agent in receiver.agents()] == [HELLO.name]
