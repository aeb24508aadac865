"""Topologies and tuning tables over the wire."""

from __future__ import annotations

from typing import cast

import msgpack
import pytest
from topology_samples import MESH, SWITCHED, TWO_PAIRS, block_of
from wire.sample_batches import content_of

from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.messages import BatchMessage
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.topology import TuningCell, TuningTableSeen

_SOURCE = Source(kind=SourceKind.NCCL_LOG, name="a.log", key="a")
_TABLE = TuningTableSeen(
    host="node01",
    pid=1,
    tid=2,
    line=3,
    cells=(
        TuningCell(function="AllReduce", algorithm="RING", protocol="LL", latency_us=7.8, bytes_per_second=20 * 10**9),
    ),
    max_threads=(("RING", "LL", 512),),
)


def _encoded(batch: Batch) -> bytes:
    return encode_message(BatchMessage(sequence=1, batch=batch))


def _decoded(payload: bytes) -> Batch:
    message = decode_message(payload)
    assert isinstance(message, BatchMessage)
    return message.batch


def test_blocks_and_tables_come_back_equal() -> None:
    blocks = tuple(block_of(text) for text in (TWO_PAIRS, SWITCHED, MESH))
    batch = Batch(source=_SOURCE, begin=0, end=1, topologies=blocks, tuning_tables=(_TABLE,))
    back = _decoded(_encoded(batch))
    assert back.topologies == blocks
    assert back.tuning_tables == (_TABLE,)


def test_a_block_of_a_node_is_small() -> None:
    empty = len(_encoded(Batch(source=_SOURCE, begin=0, end=1)))
    with_block = len(_encoded(Batch(source=_SOURCE, begin=0, end=1, topologies=(block_of(TWO_PAIRS),))))
    assert with_block - empty < 1200


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("links", [0, 99, "NVL", 1]),
        ("paths", [0, 99, 1, 1, "NVL"]),
        ("links", [0, -1, "NVL", 1]),
        ("links", [0, 1, "WIRE", 1]),
        ("links", [0, 1, "NVL", -1]),
        ("nodes", ["GPU", 256, 0, None, None, ""]),
        ("nodes", ["GPU", 0, 2**60, None, None, ""]),
        ("nodes", ["GPU", 0]),
    ],
)
def test_what_cannot_be_a_topology_is_refused(field: str, wrong: list[object]) -> None:
    payload = _encoded(Batch(source=_SOURCE, begin=0, end=1, topologies=(block_of(TWO_PAIRS),)))
    content = content_of(payload)
    content["batch"]["topologies"][0][field].append(wrong)
    with pytest.raises(ProtocolError):
        decode_message(cast(bytes, msgpack.packb(content)))
