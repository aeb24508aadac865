"""How batches are made small: training repeats itself, and so do the rows of its iterations.

A table becomes steps: each byte of a row as its difference to that of the row before, and all first bytes, all second
bytes and so on together. Templates and opCounts that recur, lines at constant distances and the upper bytes of times
are then the same bytes again and again, which deflate finds. An operation of an iteration like the one before costs
some 4 bytes in a batch of 300, 24 without; nearly all of them are its time.

Each batch stands for itself: nothing of it refers to an earlier one, so one that is sent again, or alone, is whole.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np

from ncclscope_wire.batch import Columns
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.frame import MAX_FRAME_BYTES

MAX_EXPANDED_BYTES: Final = MAX_FRAME_BYTES
"""Longest map of a batch: what travelled uncompressed was bounded by the frame, and memory has to be as before."""

_MARK: Final = b"\xc1"
"""First byte of what is compressed: the one that msgpack never begins with. *Source:* msgpack spec.md, "Formats"."""
_LEVEL: Final = 1
"""zlib's fastest: 3 saves 3 % of the bytes, 6 saves 7 % and costs 1.5 times as much."""
_RAW_DEFLATE: Final = -15
"""32 KiB of history, neither header nor checksum. *Source:* zlib.h, deflateInit2."""
_USUAL: Final = (
    b"\xa7skipped\x80\xa3pid\xa3tid\xa4line\xa7threads\xa7strings\xb3operation_templates\xaacall_marks"
    b"\xa7tunings\xa7kernels\xa6ranges\xa4busy\xa9inspected\xa4nsys\xa9inspector\xa7is_last\xc3"
    b"\x83\xa4kind\xa5batch\xa8sequence\xcd\x01\x00\xa5batch\xde\x00\x07\xa6source\x83\xa4kind\xa8nccl_log\xa4name\xb8"
    b"nccl.node.log\xa3key\xbe\xa5begin\xce\x00\x00\xa3end\xce\x00\x00\xa8end_line\xcd\x01\x90\xaeobserved_at_ns\xcf\x18"
    b"\xa6tables\x81\xaaoperations\x92\xce\xc4\xc5\xa6counts\x82\xaaunderstood\x81\xa9operation\xcd\xa7skipped\x80"
)
"""The bytes that most batches hold between their columns, for deflate to refer to. Both sides need the same: another
one is another protocol version."""


def compressed(payload: bytes) -> bytes:
    """The payload, deflated, behind the mark."""
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW_DEFLATE, zdict=_USUAL)
    return b"".join((_MARK, deflate.compress(payload), deflate.flush()))


def is_compressed(payload: bytes) -> bool:
    """Whether a payload begins with the mark."""
    return payload.startswith(_MARK)


def expanded(payload: bytes) -> bytes:
    """The payload that `compressed` was given.

    Raises:
        ProtocolError: it is cut or damaged, more follows it, or it would have more than MAX_EXPANDED_BYTES.
    """
    inflate = zlib.decompressobj(_RAW_DEFLATE, _USUAL)
    try:
        found = inflate.decompress(memoryview(payload)[len(_MARK) :], MAX_EXPANDED_BYTES)
    except zlib.error as error:
        raise ProtocolError(f"a payload of {len(payload)} bytes cannot be expanded: {error}") from error
    if not inflate.eof or inflate.unused_data:
        raise ProtocolError(f"a payload of {len(payload)} bytes is cut, or expands to over {MAX_EXPANDED_BYTES} bytes")
    return found


def steps_of(rows: Columns) -> bytes:
    """The bytes of packed rows as differences, by their place in the row."""
    table = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), rows.dtype.itemsize)
    steps = table.copy()
    steps[1:] -= table[:-1]
    return steps.T.tobytes()


def rows_of(steps: bytes, dtype: np.dtype[np.void]) -> Columns:
    """The rows of which these are the steps; they may be written to. The length has to be a multiple of the row's."""
    table = np.frombuffer(steps, np.uint8).reshape(dtype.itemsize, len(steps) // dtype.itemsize)
    return np.ascontiguousarray(np.cumsum(table, axis=1, dtype=np.uint8).T).view(dtype).reshape(-1)
