"""Batches made small: every table comes back as it was, bytes that are none are refused, and how small they are."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import cast

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire.sample_batches import assert_equal_batches, content_of, log_batch

from ncclscope_wire import compression, tables
from ncclscope_wire.batch import ROW_TABLES, Batch
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.compression import compressed, expanded, rows_of, steps_of
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.messages import BatchMessage

_RECURRING = 64


def _iterations(operations: int) -> Batch:
    """Iterations of 64 operations, stamped in microseconds with gaps of which none is like another."""
    random = np.random.default_rng(1)
    rows = np.zeros(operations, tables.OPERATION_ROW)
    rows["template"] = np.resize(random.permutation(_RECURRING), operations)
    rows["line"] = np.cumsum(np.resize(random.integers(1, 3, _RECURRING), operations))
    rows["op_count"] = np.arange(operations) // _RECURRING
    gaps_us = np.exp(random.normal(5, 2, operations)).astype(np.int64)
    rows["logged_at_ns"] = 1_700_000_000_000_000_000 + np.cumsum(gaps_us) * 1000
    return replace(log_batch(0, 9), operations=rows)


@given(data=st.binary(max_size=300), name=st.sampled_from(sorted(ROW_TABLES)))
def test_rows_come_back_from_their_steps(data: bytes, name: str) -> None:
    dtype = ROW_TABLES[name]
    rows = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)
    again = rows_of(steps_of(rows), dtype)
    assert again.tobytes() == rows.tobytes()
    assert again.flags.writeable


def test_every_second_row_of_a_table_comes_back_too() -> None:
    rows = _iterations(100).operations[::2]
    assert rows_of(steps_of(rows), rows.dtype).tobytes() == rows.tobytes()


@pytest.mark.parametrize(("operations", "most"), [(150, 6.0), (1000, 4.5)])
def test_an_operation_of_a_recurring_iteration_costs_at_most_six_bytes(operations: int, most: float) -> None:
    message = BatchMessage(sequence=7, batch=_iterations(operations))
    assert len(encode_message(message)) <= most * operations


def test_a_batch_as_version_1_sent_it_is_read() -> None:
    message = BatchMessage(sequence=1, batch=_iterations(10))
    decoded = decode_message(cast(bytes, msgpack.packb(content_of(encode_message(message)))))
    assert isinstance(decoded, BatchMessage)
    assert_equal_batches(decoded.batch, message.batch)


@given(st.binary(max_size=200))
def test_what_was_compressed_is_expanded(data: bytes) -> None:
    assert expanded(compressed(data)) == data


@given(st.binary(max_size=200))
def test_any_bytes_behind_the_mark_are_a_payload_or_refused(data: bytes) -> None:
    try:
        expanded(b"\xc1" + data)
    except ProtocolError:
        return


def test_cut_bytes_and_bytes_with_more_behind_them_are_refused() -> None:
    whole = compressed(b"x" * 100)
    for wrong in (whole[:-1], whole + b"y", b"\xc1"):
        with pytest.raises(ProtocolError):
            expanded(wrong)


def test_what_expands_to_more_than_a_frame_is_refused_before_it_is_held() -> None:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = b"\xc1" + deflate.compress(bytes(64 << 20)) + deflate.flush()
    assert len(bomb) < 1 << 17
    with pytest.raises(ProtocolError, match="over 16777216 bytes"):
        expanded(bomb)


def test_a_batch_that_no_receiver_would_expand_is_as_long_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    message = BatchMessage(sequence=7, batch=_iterations(1000))
    monkeypatch.setattr(compression, "MAX_EXPANDED_BYTES", 20_000)
    assert len(encode_message(message)) > message.batch.operations.nbytes
