"""Frames that are huge, nested, or as full as they may be: refused or taken, in bounded memory, and others go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, cast
from zlib import crc32

import anyio
import msgpack
import numpy as np
import pytest
from agent.family_samples import facts_of, samples
from attack.memory import memory_below
from end_to_end.processes import PATIENCE_SECONDS
from service.intake.test_receive import NOW_NS, answers, connected, hello, numbered, refused, said
from service.loopback import Service
from topology_samples import SWITCHED, block_of
from wire.sample_batches import HELLO, log_batch, log_source
from wire.test_codec import MESSAGES

from ncclscope_service.intake.limits import MAX_ENTRIES
from ncclscope_service.intake.receive import ReceiveLimits, Receiver
from ncclscope_service.pipeline import Pipeline
from ncclscope_wire import compression, tables
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.frame import MAX_FRAME_BYTES, Deframer, encode_frame
from ncclscope_wire.messages import BatchMessage, Refused
from ncclscope_wire.records import (
    CaptureSeen,
    CommunicatorEvent,
    CommunicatorEventKind,
    Counts,
    SourceGap,
    VersionSeen,
)

HELLO_BYTES: Final = ReceiveLimits().max_hello_bytes
_DEEP: Final = 100_000
_PLACE: Final = "the place of a bomb"
_BOMBS: Final = {
    "lists": b"\x91" * _DEEP + b"\xc0",
    "maps": b"\x81\xa1a" * _DEEP + b"\xc0",
    "lists of a depth that msgpack takes": b"\x91" * 400 + b"\xc0",
    "maps of a depth that msgpack takes": b"\x81\xa1a" * 400 + b"\xc0",
    "a list that says it has four billion": b"\xdd\xff\xff\xff\xff",
    "a map that says it has four billion": b"\xdf\xff\xff\xff\xff",
    "a text that says it has four billion": b"\xdb\xff\xff\xff\xff",
    "bytes that say they are four billion": b"\xc6\xff\xff\xff\xff",
    "an extension": b"\xc7\xff\x01" + b"a" * 255,
}


# Announced sizes


@pytest.mark.parametrize("length", [HELLO_BYTES + 1, HELLO_BYTES + 2, MAX_FRAME_BYTES, 2**31 - 1, 2**31, 2**32 - 1])
def test_before_its_hello_nobody_announces_more_than_a_hello(length: int) -> None:
    receiver = Receiver()
    receiver.open(1)
    assert refused(receiver.on_bytes(1, length.to_bytes(4, "big"), NOW_NS)).reason == "frame_too_long"


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, MAX_FRAME_BYTES + 2, 2**31 - 1, 2**31, 2**32 - 1])
def test_behind_its_hello_nobody_announces_more_than_a_frame(length: int) -> None:
    receiver = Receiver()
    connected(receiver, 1)
    assert refused(receiver.on_bytes(1, length.to_bytes(4, "big"), NOW_NS)).reason == "frame_too_long"


@pytest.mark.parametrize("length", [0, 1, HELLO_BYTES - 1, HELLO_BYTES])
@pytest.mark.parametrize("byte", [b"\0", b"\x80", b"\xc1", b"\xff"])
def test_a_frame_of_a_hello_s_size_that_is_none_closes_its_connection_and_no_other(length: int, byte: bytes) -> None:
    receiver = Receiver()
    connected(receiver, 1)
    receiver.open(2)
    frame = length.to_bytes(4, "big") + length * byte
    assert not receiver.on_bytes(2, frame[:-1], NOW_NS).close or length == 0
    assert refused(receiver.on_bytes(2, frame[-1:] if length else frame, NOW_NS)).reason in ("damaged", "undecodable")
    assert receiver.on_bytes(1, said(*numbered(1, log_batch(0, 1))), NOW_NS).received


@pytest.mark.parametrize("byte", [b"\0", b"\x80", b"\x90", b"\xc1", b"\xff"])
def test_a_frame_of_the_largest_size_that_is_none_takes_little_more_than_itself(byte: bytes) -> None:
    receiver = Receiver()
    connected(receiver, 1)
    with memory_below(128):
        receiver.on_bytes(1, MAX_FRAME_BYTES.to_bytes(4, "big"), NOW_NS)
        outcome = receiver.on_bytes(1, byte * MAX_FRAME_BYTES, NOW_NS)
    assert refused(outcome).reason in ("damaged", "undecodable")


# Nesting


def full_batch() -> BatchMessage:
    """A batch with something in every field."""
    batch = log_batch(0, 5, strings=("AllReduce", "h"), templates=2, operations=((0, 1), (1, 2)))
    event = CommunicatorEvent(
        kind=CommunicatorEventKind.INIT_COMPLETE, host="h", pid=1, tid=1, line=1, pointer=1, rank=0, nranks=2
    )
    capture = CaptureSeen(
        host="h", host_is_recorded=True, start_ns=1, end_ns=2, pids=(1,), product_version="1", schema_version="3",
        nccl_kernels=1, other_kernels=1, graph_launches=0, missing=("T",), warnings=("w",),
    )  # fmt: skip
    facts = {type(fact): fact for sample in samples() for fact in facts_of(sample.text)}
    return BatchMessage(
        sequence=1,
        batch=replace(
            batch,
            communicators=(event,),
            versions=(VersionSeen(version="2.28.3", cuda=None, line=1),),
            captures=(capture,),
            facts=tuple(facts.values()),
            topologies=(block_of(SWITCHED),),
            gaps=(SourceGap(reason="torn", amount=1, unit="lines", detail="d"),),
            counts=Counts(understood={"operation": 2}, skipped={"torn": 1}),
        ),
    )


def maps() -> list[dict[str, Any]]:
    """Every message as the map that travels."""
    content = [msgpack.unpackb(encode_message(message)) for message in MESSAGES]
    return [*content, msgpack.unpackb(compression.expanded(encode_message(full_batch())))]


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to every value of a map, itself not."""
    inside = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in inside:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def with_bomb(content: Any, path: tuple[Any, ...], bomb: bytes) -> bytes:
    """The map with a bomb at one place and a right checksum."""
    copy = msgpack.unpackb(msgpack.packb(content))
    inside = copy
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = _PLACE
    copy["crc"] = 2**32 - 1
    packed = cast(bytes, msgpack.packb(copy)).replace(cast(bytes, msgpack.packb(_PLACE)), bomb)
    return packed[:-4] + crc32(packed[:-4]).to_bytes(4, "big")


@pytest.mark.parametrize("name", _BOMBS)
def test_a_bomb_in_any_field_of_any_message_is_refused_or_passed_over(name: str) -> None:
    tried = 0
    for content in maps():
        for path in places(content):
            if path == ("crc",):
                continue
            tried += 1
            payload = with_bomb(content, path, _BOMBS[name])
            for sent in (payload, compression.compressed(payload)) if content["kind"] == "batch" else (payload,):
                try:
                    taken = decode_message(sent, is_sent=True)
                except ProtocolError:
                    continue
                # Depths that msgpack takes are passed over where a later version may have put something.
                assert "takes" in name, (path, taken)
    assert tried > 300


@pytest.mark.asyncio
async def test_who_has_shown_no_token_ends_no_port_by_nesting() -> None:
    content = msgpack.unpackb(compression.expanded(encode_message(full_batch())))
    bomb = with_bomb({"kind": "batch", "sequence": 1, **content}, ("batch", "source"), b"\x81\xa1a" * 2_000 + b"\xc0")
    assert len(bomb) < HELLO_BYTES
    service = Service()
    with anyio.fail_after(PATIENCE_SECONDS):
        async with service.listening() as port:
            for payload in (bomb, compression.compressed(bomb)):
                async with await anyio.connect_tcp("127.0.0.1", port) as stranger:
                    await stranger.send(encode_frame(payload))
                    (answer,) = Deframer().ingest_bytes(await stranger.receive())
                    refusal = decode_message(answer)
                    assert isinstance(refusal, Refused)
                    assert refusal.reason == "undecodable"
            async with await anyio.connect_tcp("127.0.0.1", port) as agent:
                await agent.send(said(HELLO))
                assert await agent.receive()


def test_a_field_that_nobody_knows_may_nest_and_be_passed_over() -> None:
    content = msgpack.unpackb(encode_message(HELLO))
    del content["crc"]
    bomb = {"x": _PLACE, **content}
    assert decode_message(with_bomb(bomb, ("x",), _BOMBS["lists of a depth that msgpack takes"])) == HELLO
    with pytest.raises(ProtocolError):
        decode_message(with_bomb(bomb, ("x",), _BOMBS["lists"]))


@pytest.mark.slow
@pytest.mark.parametrize("inside", [b"\x80", b"\x90", b"\x93\x80\x80\x80", b"\xa2ab", b"\xcb" + b"\1" * 8])
def test_a_frame_of_kilobytes_that_becomes_millions_of_small_things_is_refused(inside: bytes) -> None:
    """16 MiB of empty maps are 1 GiB in memory; of a list that is too long none is made, so these are many."""
    each = 1 << 19
    lists = MAX_FRAME_BYTES // (each * len(inside) + 5) or 1
    bomb = b"\xdc" + lists.to_bytes(2, "big") + (b"\xdd" + each.to_bytes(4, "big") + inside * each) * lists
    content = msgpack.unpackb(compression.expanded(encode_message(full_batch())))
    content["batch"]["later"] = _PLACE
    payload = with_bomb(content, ("batch", "later"), bomb[: MAX_FRAME_BYTES - 20_000])
    with memory_below(160), pytest.raises(ProtocolError):
        decode_message(compression.compressed(payload), is_sent=True)


# As full as may be


def _texts(begin: int, amount: int) -> tuple[str, ...]:
    return tuple(f"t{number:x}" for number in range(begin, begin + amount))


def test_a_frame_with_a_hundred_thousand_texts_is_taken_and_the_next_agent_is_served() -> None:
    receiver, pipeline = Receiver(), Pipeline()
    pipeline.limit_names()
    connected(receiver, 1)
    batch = log_batch(0, 5, strings=("AllReduce", "h", *_texts(0, 100_000)), templates=1, operations=((0, 1),))
    with memory_below(200):
        (received,) = receiver.on_bytes(1, said(*numbered(1, batch)), NOW_NS).received
        assert pipeline.ingest_batch(received.batch, agent="a", session="s", job="j")
        pipeline.process_backlog(NOW_NS)
    assert not pipeline.errors.counts
    assert len(pipeline.store.operations) == 1
    connected(receiver, 2, hello(agent_id="b"))
    assert receiver.on_bytes(2, said(*numbered(1, log_batch(0, 1))), NOW_NS).received


def test_indices_may_point_at_the_last_entry_of_a_dictionary_and_not_behind_it() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    full = [
        Batch(source=log_source(), begin=at, end=at + 1, strings=("",) * (MAX_ENTRIES["strings"] // 4))
        for at in range(1, 5)
    ]
    first = Batch(source=log_source(), begin=0, end=1, threads=np.zeros(0, tables.THREAD))
    for message in numbered(1, first, *full):
        assert receiver.on_bytes(1, said(message), NOW_NS).received
    last = MAX_ENTRIES["strings"] - 1
    threads = np.zeros(1, tables.THREAD)
    threads["host"] = last
    (taken,) = numbered(6, Batch(source=log_source(), begin=5, end=6, threads=threads))
    assert receiver.on_bytes(1, said(taken), NOW_NS).received
    threads = threads.copy()
    threads["host"] = last + 1
    (behind,) = numbered(7, Batch(source=log_source(), begin=6, end=7, threads=threads))
    assert refused(receiver.on_bytes(1, said(behind), NOW_NS)).reason == "index_out_of_range"


def test_one_text_more_than_a_dictionary_holds_ends_the_session_and_the_agent_begins_another() -> None:
    receiver = Receiver()
    connected(receiver, 1)
    quarter = MAX_ENTRIES["strings"] // 4
    full = [Batch(source=log_source(), begin=at, end=at + 1, strings=("",) * quarter) for at in range(4)]
    for message in numbered(1, *full):
        assert receiver.on_bytes(1, said(message), NOW_NS).received
    (more,) = numbered(5, Batch(source=log_source(), begin=4, end=5, strings=("",)))
    assert refused(receiver.on_bytes(1, said(more), NOW_NS)).reason == "dictionary_too_large"
    receiver.on_disconnected(1)
    welcome = connected(receiver, 2, hello(session_id="another"))
    assert not welcome.session_known
    assert welcome.positions[log_source().key].end == 4
    assert receiver.on_bytes(2, said(*numbered(1, log_batch(4, 5))), NOW_NS).received
    assert answers(receiver.on_bytes(2, said(*numbered(2, log_batch(5, 6))), NOW_NS))
