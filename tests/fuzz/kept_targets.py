"""What we wrote ourselves and read after a crash: seeds, and what must hold for any bytes.

The files of spool, journal and state carry checksums, so that mutated ones are mostly refused by these: here what is
inside is mutated, and the checksums are right.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from typing import Final

import msgspec
from agent.spool_samples import frame
from fuzz.target import Target
from wire.sample_batches import HELLO, log_batch

from ncclscope_agent.replay import Replay
from ncclscope_agent.spool_records import (
    FORMAT_VERSION,
    Header,
    entries_record,
    frame_record,
    header_record,
    positions_record,
    scan,
)
from ncclscope_service import journal_segment, state
from ncclscope_service.journal_entry import BatchTaken, GoodbyeSaid, HelloSaid, Ticked, decode_entry, encode_entry
from ncclscope_service.pipeline import Pipeline, PipelineSettings
from ncclscope_service.receive import Receiver, ReplayError
from ncclscope_wire import record
from ncclscope_wire.codec import encode_message
from ncclscope_wire.errors import ProtocolError, StateError
from ncclscope_wire.messages import PROTOCOL_VERSION, BatchMessage, Position

_KINDS: Final = 4


def check_spool(data: bytes) -> None:
    """A file of the spool gives what is whole of it; whatever is in its records, what can be used is sent again."""
    scan(data)
    kind, body = (data[0] % _KINDS + 1, data[1:]) if data else (1, data)
    scanned = scan(_HEADER + record.encode_record(kind, body) + frame_record(frame(1).payload, entries=0))
    assert scanned.header is not None
    assert frame(1).payload in [each.payload for each in scanned.frames], "the record behind it is whole"
    replay = Replay({}, scanned.entries)
    for each in scanned.frames:
        for batch in replay.feed(each):
            encode_message(BatchMessage(sequence=1, batch=batch))


_HEADER = header_record(
    Header(
        format_version=FORMAT_VERSION,
        protocol_version=PROTOCOL_VERSION,
        agent_id="a",
        session_id="s",
        chapter=1,
        created_ns=0,
    )
)


def spool_seeds() -> list[bytes]:
    """A whole file, and bodies of each kind behind the number of their kind."""
    entries = encode_message(BatchMessage(sequence=1, batch=log_batch(0, 0, strings=("h",), templates=1)))
    records = [
        _HEADER,
        frame_record(frame(1).payload, entries=0),
        entries_record(entries, number=1),
        positions_record({"0:1:abc": Position(end=5)}),
    ]
    bodies = [bytes([kind]) + written[record.RECORD_BYTES :] for kind, written in enumerate(records)]
    return [b"".join(records), *bodies]


def check_journal(data: bytes) -> None:
    """A segment gives what is whole of it; an entry is one, or StateError; what it tells of is applied or refused."""
    journal_segment.read_segment(data)
    written = journal_segment.encode_header(journal_segment.SegmentHeader(format=2, first=1, era="e"))
    read = journal_segment.read_segment(written + journal_segment.encode_record(1, data))
    assert [each.content for each in read.records] == [data]
    try:
        entry = decode_entry(data)
    except StateError:
        return
    receiver = Receiver()
    receiver.replay(HelloSaid(payload=encode_message(HELLO), at_ns=0))
    if isinstance(entry, HelloSaid | BatchTaken | GoodbyeSaid):
        with suppress(ReplayError, ProtocolError):
            receiver.replay(entry)
    receiver.statistics()


def journal_seeds() -> list[bytes]:
    """A segment, and entries."""
    batch = encode_message(BatchMessage(sequence=1, batch=log_batch(0, 5, strings=("h",), templates=1)))
    entries = [
        encode_entry(HelloSaid(payload=encode_message(HELLO), at_ns=1, is_new=True)),
        encode_entry(BatchTaken(agent=HELLO.agent_id, session=HELLO.session_id, payload=batch, at_ns=2, job="j")),
        encode_entry(GoodbyeSaid(agent=HELLO.agent_id)),
        encode_entry(Ticked(at_ns=3, silent=("h",))),
    ]
    header = journal_segment.encode_header(journal_segment.SegmentHeader(format=2, first=1, era="e"))
    return [header + b"".join(journal_segment.encode_record(n, each) for n, each in enumerate(entries, 1)), *entries]


def check_state(data: bytes) -> None:
    """A snapshot with any graph in it, and a right digest, is restored or StateError."""
    with suppress(StateError):
        state.restore(data, Pipeline(PipelineSettings()))
    front, _, *arrays = _snapshot()
    digest = hashlib.blake2b(b"".join([data, *arrays]), digest_size=16).digest()
    header = msgspec.msgpack.encode((*front, digest, [len(data), *map(len, arrays)]))
    with suppress(StateError):
        whole = b"".join([len(header).to_bytes(8, "big"), header, data, *arrays])
        state.restore(whole, Pipeline(PipelineSettings()))


@cache
def _snapshot() -> tuple[tuple[str, int, str], bytes, *tuple[bytes, ...]]:
    """What the header of a new pipeline's snapshot begins with, its graph, and its large arrays."""
    _, header, graph, *arrays = map(bytes, state.parts_of(Pipeline(PipelineSettings())))
    magic, version, name, *_ = msgspec.msgpack.decode(header, type=tuple[str, int, str, bytes, list[int]])
    return (magic, version, name), graph, *arrays


def state_seeds() -> list[bytes]:
    """A graph, and a whole snapshot."""
    return [_snapshot()[1], state.snapshot(Pipeline(PipelineSettings()))]


KEPT_TARGETS: Final = {
    "spool": Target(check_spool, spool_seeds),
    "journal": Target(check_journal, journal_seeds),
    "state": Target(check_state, state_seeds),
}
