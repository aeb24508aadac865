"""What we wrote ourselves and read after a crash: seeds, and what must hold for any bytes.

The files of journal and state carry checksums, so that mutated ones are mostly refused by these: here what is
inside is mutated, and the checksums are right.
"""

from __future__ import annotations

import hashlib
import pickletools
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Final

import msgspec
from agent.spool_samples import frame
from fuzz.target import Target
from wire.sample_batches import HELLO, log_batch

from ncclscope_agent.spool.records import Entries
from ncclscope_agent.spool.replay import Replay
from ncclscope_service.intake.journal_entry import (
    BatchTaken,
    GoodbyeSaid,
    HelloSaid,
    Ticked,
    decode_entry,
    encode_entry,
)
from ncclscope_service.intake.receive import Receiver, ReplayError
from ncclscope_service.keep import journal
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store import state
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_wire.codec import encode_message
from ncclscope_wire.errors import ProtocolError, StateError
from ncclscope_wire.messages import BatchMessage


def check_spool(data: bytes) -> None:
    """Whatever is in the batches and entries of a spool, what can be used is sent again."""
    whole = frame(2)
    replay = Replay({}, [Entries(1, 1, data)])
    for payload in (data, whole.payload):
        for batch in replay.batches_for(replace(whole, payload=payload)):
            encode_message(BatchMessage(sequence=1, batch=batch))


def spool_seeds() -> list[bytes]:
    """A batch, and dictionary entries."""
    entries = encode_message(BatchMessage(sequence=1, batch=log_batch(0, 0, strings=("h",), templates=1)))
    return [bytes(frame(1).payload), entries]


def check_journal(data: bytes) -> None:
    """A segment gives what is whole of it; an entry is one, or StateError; what it tells of is applied or refused."""
    journal.read_segment(data)
    written = journal.encode_header(journal.SegmentHeader(format=2, first=1, era="e"))
    read = journal.read_segment(written + journal.encode_record(1, data))
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
    header = journal.encode_header(journal.SegmentHeader(format=2, first=1, era="e"))
    return [header + b"".join(journal.encode_record(n, each) for n, each in enumerate(entries, 1)), *entries]


def check_state(data: bytes) -> None:
    """A snapshot with any pickle in it, and a right digest, is restored or StateError."""
    with suppress(StateError):
        state.restore(data, Pipeline)
    if _asks_for_memory(data):
        return
    front, _, *arrays = _snapshot()
    digest = hashlib.blake2b(b"".join([data, *arrays]), digest_size=16).digest()
    header = msgspec.msgpack.encode((*front, digest, [len(data), *map(len, arrays)]))
    with suppress(StateError):
        whole = b"".join([len(header).to_bytes(8, "big"), header, data, *arrays])
        state.restore(whole, Pipeline)


def _asks_for_memory(body: bytes) -> bool:
    """Whether a pickle numbers its objects itself, or has a length of 8 bytes: it may ask for any memory by that."""
    try:
        return any("PUT" in step.name or step.name.endswith("8") for step, _, _ in pickletools.genops(body))
    except ValueError:
        return False


@cache
def _snapshot() -> tuple[tuple[str, int, str], bytes, *tuple[bytes, ...]]:
    """What the header of a new pipeline's snapshot begins with, its pickle, and its large arrays."""
    _, header, body, *arrays = map(bytes, state.parts_of(Pipeline(PipelineSettings())))
    magic, version, name, *_ = msgspec.msgpack.decode(header, type=tuple[str, int, str, bytes, list[int]])
    return (magic, version, name), body, *arrays


def state_seeds() -> list[bytes]:
    """A pickle, and a whole snapshot."""
    return [_snapshot()[1], state.snapshot(Pipeline(PipelineSettings()))]


KEPT_TARGETS: Final = {
    "spool": Target(check_spool, spool_seeds),
    "journal": Target(check_journal, journal_seeds),
    "state": Target(check_state, state_seeds),
}
