"""Messages to bytes and back, and what becomes of bytes that are none."""

from __future__ import annotations

from dataclasses import replace
from typing import cast
from zlib import crc32

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire.sample_batches import HELLO, assert_equal_batches, batches, content_of, log_batch, log_source

from ncclscope_wire import tables
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.facts import NetworkChosen
from ncclscope_wire.messages import (
    PROTOCOL_VERSION,
    Acknowledge,
    AgentHealth,
    BatchMessage,
    ForeignHello,
    Goodbye,
    Heartbeat,
    Message,
    Position,
    Refused,
    Welcome,
)
from ncclscope_wire.records import Source, SourceGap, SourceKind
from ncclscope_wire.terms import NO_TIME_NS

MESSAGES: list[Message] = [
    HELLO,
    Welcome(
        protocol_version=PROTOCOL_VERSION,
        session_known=False,
        acknowledged=0,
        positions={"8:42:beef": Position(end=2**40, end_line=7, is_complete=True)},
    ),
    Heartbeat(
        agent_wall_ns=1_700_000_000_123_456_789,
        health=AgentHealth(lines_total=3, skipped={"torn": 2}, dropped={}, cpu_seconds=0.25, lag_seconds=1.5),
    ),
    Acknowledge(sequence=2**40),
    Goodbye(reason="stopped"),
    Refused(reason="wrong_version", message="no"),
]


def tampered(batch: Batch, **changes: object) -> bytes:
    """The message of a batch with some fields of its map replaced."""
    content = content_of(encode_message(BatchMessage(sequence=1, batch=batch)))
    content["batch"].update(changes)
    return cast(bytes, msgpack.packb(content))


def packed(content: object) -> bytes:
    return cast(bytes, msgpack.packb(content))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


@given(batch=batches(), sequence=st.integers(1, 2**63 - 1))
@settings(max_examples=60)
def test_any_batch_comes_back_equal(batch: Batch, sequence: int) -> None:
    message = decode_message(encode_message(BatchMessage(sequence=sequence, batch=batch)))
    assert isinstance(message, BatchMessage)
    assert message.sequence == sequence
    assert_equal_batches(message.batch, batch)


def test_decoded_columns_are_our_own_memory() -> None:
    payload = encode_message(BatchMessage(sequence=1, batch=log_batch(0, 10, operations=((0, 1), (0, 2)))))
    message = decode_message(payload)
    assert isinstance(message, BatchMessage)
    message.batch.operations["line"] += 1
    assert message.batch.operations["line"].tolist() == [2, 3]


def test_lone_surrogates_become_question_marks() -> None:
    message = decode_message(encode_message(Goodbye(reason="a\udcffb")))
    assert message == Goodbye(reason="a?b")


def test_another_version_is_told_even_where_it_names_its_kinds_anew() -> None:
    assert decode_message(packed({"type": "hello", "protocol_version": 999})) == ForeignHello(protocol_version=999)


def test_unknown_fields_are_ignored() -> None:
    payload = packed({"kind": "acknowledge", "sequence": 3, "colour": "blue"})
    assert decode_message(payload) == Acknowledge(sequence=3)


def test_a_batch_of_rows_is_read_alike_whatever_else_its_message_holds() -> None:
    plain = BatchMessage(sequence=1, batch=log_batch(0, 9, operations=((0, 1), (0, 2))))
    content = content_of(encode_message(plain))
    content["batch"]["later"] = 1
    for payload in (encode_message(plain), cast(bytes, msgpack.packb(content))):
        decoded = decode_message(payload)
        assert isinstance(decoded, BatchMessage)
        assert_equal_batches(decoded.batch, plain.batch)
        assert decoded.batch.operations.flags.writeable


def test_records_of_inspector_of_an_earlier_build_are_read() -> None:
    rows = np.zeros(2, tables.INSPECTED_ROW)
    rows["sequence"], rows["busbw"] = (4, 5), (1e9, np.nan)
    batch = Batch(source=Source(kind=SourceKind.INSPECTOR, name="n", key="k"), begin=0, end=2, inspected=rows)
    earlier = tables.EARLIER_LAYOUTS["inspected"]
    older = np.zeros(2, earlier)
    for name in earlier.names or ():
        older[name] = rows[name]
    sent = [crc32(repr(earlier.descr).encode()), older.tobytes()]
    message = decode_message(tampered(batch, tables={"inspected": sent}))
    assert isinstance(message, BatchMessage)
    read = message.batch.inspected
    assert read.dtype == tables.INSPECTED_ROW
    assert read["sequence"].tolist() == [4, 5]
    assert (read["start_ns"] == NO_TIME_NS).all()
    assert (read["end_ns"] == NO_TIME_NS).all()


def test_a_table_of_another_layout_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"table operations has layout 0x1, and 0x\w+ is expected"):
        decode_message(tampered(log_batch(0, 1), tables={"operations": [1, b""]}))


def test_a_table_with_half_a_row_is_refused() -> None:
    content = content_of(encode_message(BatchMessage(sequence=1, batch=log_batch(0, 1, operations=((0, 1),)))))
    layout, data = content["batch"]["tables"]["operations"]
    with pytest.raises(ProtocolError, match="table operations has 23 bytes, not a multiple of 24"):
        decode_message(tampered(log_batch(0, 1), tables={"operations": [layout, data[:-1]]}))


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown table 'gossip'"):
        decode_message(tampered(log_batch(0, 1), tables={"gossip": [0, b""]}))


def test_text_in_the_place_of_a_table_is_refused() -> None:
    with pytest.raises(ProtocolError, match="Expected `bytes`, got `str`"):
        decode_message(tampered(log_batch(0, 1), tables={"operations": [0, "AAAA"]}))


def test_a_batch_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ProtocolError, match="begins at 5 and ends before that, at 1"):
        decode_message(tampered(log_batch(0, 1), begin=5))


def test_a_number_that_no_column_could_hold_is_refused() -> None:
    batch = replace(log_batch(0, 1), gaps=(SourceGap(reason="r", amount=2**64 - 1, unit="lines"),))
    with pytest.raises(ProtocolError, match=r"SourceGap.amount is 18446744073709551615"):
        decode_message(encode_message(BatchMessage(sequence=1, batch=batch)))


def test_the_error_names_the_field() -> None:
    with pytest.raises(ProtocolError, match=r"batch: Expected `str`, got `int` - at `\$.batch.source.name`"):
        decode_message(tampered(log_batch(0, 1), source={"kind": "nccl_log", "name": 3, "key": "k"}))


def test_a_row_costs_its_columns_and_a_batch_a_little_more() -> None:
    operations = tuple((0, line) for line in range(1000))
    payload = encode_message(BatchMessage(sequence=1, batch=log_batch(0, 1, operations=operations)))
    assert len(payload) < 1000 * 24 + 400


def test_nan_in_a_column_survives() -> None:
    batch = log_batch(0, 1)
    tunings = np.zeros(1, batch.tunings.dtype)
    tunings["expected_us"] = np.nan
    message = decode_message(encode_message(BatchMessage(sequence=1, batch=replace(batch, tunings=tunings))))
    assert isinstance(message, BatchMessage)
    assert np.isnan(message.batch.tunings["expected_us"][0])


# Facts


def _with_facts(content: list[object]) -> bytes:
    message = BatchMessage(sequence=1, batch=Batch(source=log_source(), begin=0, end=1))
    decoded = content_of(encode_message(message))
    decoded["batch"]["facts"] = content
    return cast(bytes, msgpack.packb(decoded))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ([["RingNeighbours", {"line": 1, "channel": 0, "previous": 0, "rank": 1}]], "next"),
        ([["RingNeighbours", {"line": 1, "channel": -1, "previous": 0, "rank": 1, "next": 2}]], "RingNeighbours"),
        ([["RingNeighbours", {"line": 1, "channel": 0, "previous": 0, "rank": 1, "next": 2**31}]], "RingNeighbours"),
        ([["NetworkChosen", {"line": 1, "network": "x" * 200}]], "NetworkChosen"),
        (["NetworkChosen"], "facts"),
    ],
)
def test_a_fact_that_is_none_is_refused(content: list[object], word: str) -> None:
    with pytest.raises(ProtocolError, match=word):
        decode_message(_with_facts(content))


def test_facts_of_another_release_are_left_out_and_counted() -> None:
    sent: list[object] = [["ForkLine", {"line": 1}], ["NetworkChosen", {"line": 2, "network": "IB"}], ["X", {}]]
    message = decode_message(_with_facts(sent))
    assert isinstance(message, BatchMessage)
    assert message.batch.facts == (NetworkChosen(line=2, network="IB"),)
    assert message.batch.counts.skipped == {"unknown_fact": 2}
