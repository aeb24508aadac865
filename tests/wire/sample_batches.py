"""Batches for tests: any that the types allow, and how to compare two."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast
from zlib import crc32

import msgpack
import numpy as np
from agent.family_samples import facts_of, samples
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from topology_samples import MESH, SWITCHED, TWO_PAIRS, block_of

from ncclscope_wire import tables
from ncclscope_wire.batch import DICTIONARY_TABLES, ROW_TABLES, Batch, Columns
from ncclscope_wire.compression import compressed, expanded, is_compressed, rows_of
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.facts import Fact
from ncclscope_wire.messages import PROTOCOL_VERSION, Hello
from ncclscope_wire.records import (
    CaptureSeen,
    CommunicatorEvent,
    CommunicatorEventKind,
    Counts,
    Source,
    SourceGap,
    SourceKind,
    VersionSeen,
)
from ncclscope_wire.terms import ALGORITHMS, PROTOCOLS
from ncclscope_wire.topology import TopologySeen, TuningCell, TuningTableSeen


def content_of(payload: bytes) -> dict[str, Any]:
    """The map of a message as version 1 of the protocol sent it: not compressed, no steps, no checksum."""
    content: dict[str, Any] = msgpack.unpackb(expanded(payload) if is_compressed(payload) else payload)
    content.pop("crc", None)
    sent = content["batch"].get("tables", {}) if "batch" in content else {}
    for name, (layout, steps) in sent.items():
        sent[name] = [layout, rows_of(steps, {**DICTIONARY_TABLES, **ROW_TABLES}[name]).tobytes()]
    return content


def with_right_checksum(payload: bytes) -> bytes:
    """The payload with its last four bytes made a checksum of what is in front, also in what it expands to."""
    if not is_compressed(payload):
        return payload[:-4] + crc32(payload[:-4]).to_bytes(4, "big")
    try:
        return compressed(with_right_checksum(expanded(payload)))
    except ProtocolError:
        return payload


HELLO = Hello(
    protocol_version=PROTOCOL_VERSION,
    agent_id="a",
    session_id="s",
    name="n",
    host="h",
    job="j",
    software_version="0",
    pid=1,
)
"""Of an agent that is nobody in particular."""

TEXTS = st.text(max_size=20)
UINT32 = st.integers(0, 2**32 - 1)
INT32 = st.integers(-1, 2**31 - 1)
UINT64 = st.integers(0, 2**64 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)


def table_rows(dtype: np.dtype[np.void], *, max_rows: int = 4) -> SearchStrategy[Columns]:
    """Any bytes are rows of any table."""
    size = dtype.itemsize

    def parsed(rows: int, data: bytes) -> Columns:
        return np.frombuffer((data * (rows * size))[: rows * size], dtype=dtype).copy()

    return st.builds(parsed, st.integers(0, max_rows), st.binary(min_size=1, max_size=32))


SOURCES = st.builds(Source, kind=st.sampled_from(SourceKind), name=TEXTS, key=TEXTS)
EVENTS = st.builds(
    CommunicatorEvent,
    kind=st.sampled_from(CommunicatorEventKind),
    host=TEXTS,
    pid=UINT32,
    tid=UINT32,
    line=st.integers(0, 2**53),
    pointer=UINT64,
    rank=INT32,
    nranks=INT32,
    cuda_device=st.none() | INT32,
    nvml_device=st.none() | INT32,
    bus_id=st.none() | INT64,
    comm_id=st.none() | UINT64,
    parent=st.none() | UINT64,
    split_count=st.none() | INT64,
    color=st.none() | INT64,
    key=st.none() | INT64,
    api=st.none() | TEXTS,
    logged_at_ns=st.none() | INT64,
)
VERSIONS = st.builds(
    VersionSeen,
    version=TEXTS,
    cuda=st.none() | TEXTS,
    line=st.integers(0, 2**53),
    host=st.none() | TEXTS,
    pid=st.none() | UINT32,
)
CAPTURES = st.builds(
    CaptureSeen,
    host=TEXTS,
    host_is_recorded=st.booleans(),
    start_ns=INT64,
    end_ns=INT64,
    pids=st.lists(UINT32, max_size=3).map(tuple),
    product_version=st.none() | TEXTS,
    schema_version=st.none() | TEXTS,
    nccl_kernels=INT64,
    other_kernels=INT64,
    graph_launches=INT64,
    missing=st.lists(TEXTS, max_size=3).map(tuple),
    warnings=st.lists(TEXTS, max_size=3).map(tuple),
)
GAPS = st.builds(SourceGap, reason=TEXTS, amount=INT64, unit=TEXTS, detail=TEXTS)
COUNTS = st.builds(
    Counts,
    understood=st.dictionaries(TEXTS, INT64, max_size=3),
    skipped=st.dictionaries(TEXTS, INT64, max_size=3),
)


FACTS: SearchStrategy[Fact] = st.sampled_from([fact for sample in samples() for fact in facts_of(sample.text)])
"""A fact of each form that is read."""
BLOCKS: SearchStrategy[TopologySeen] = st.sampled_from([block_of(text) for text in (TWO_PAIRS, SWITCHED, MESH)])
_CELLS = st.builds(
    TuningCell,
    function=TEXTS,
    algorithm=st.sampled_from(ALGORITHMS),
    protocol=st.sampled_from(PROTOCOLS),
    latency_us=st.floats(0, 1e6),
    bytes_per_second=st.integers(0, 10**15),
)
TUNING_TABLES = st.builds(
    TuningTableSeen,
    host=TEXTS,
    pid=UINT32,
    tid=UINT32,
    line=st.integers(0, 2**53),
    cells=st.lists(_CELLS, max_size=3).map(tuple),
    max_threads=st.lists(
        st.tuples(st.sampled_from(ALGORITHMS), st.sampled_from(PROTOCOLS), st.integers(0, 1024)), max_size=3
    ).map(tuple),
)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Any batch that the types allow; its indices point anywhere."""
    begin = draw(st.integers(0, 2**62))
    columns: dict[str, Any] = {
        name: draw(table_rows(dtype)) for name, dtype in (DICTIONARY_TABLES | ROW_TABLES).items()
    }
    return Batch(
        source=draw(SOURCES),
        begin=begin,
        end=begin + draw(st.integers(0, 2**62 - 1)),
        end_line=draw(st.integers(0, 2**62)),
        is_last=draw(st.booleans()),
        observed_at_ns=draw(st.none() | INT64),
        strings=draw(st.lists(TEXTS, max_size=4).map(tuple)),
        communicators=draw(st.lists(EVENTS, max_size=2).map(tuple)),
        versions=draw(st.lists(VERSIONS, max_size=2).map(tuple)),
        captures=draw(st.lists(CAPTURES, max_size=2).map(tuple)),
        facts=draw(st.lists(FACTS, max_size=3).map(tuple)),
        topologies=draw(st.lists(BLOCKS, max_size=1).map(tuple)),
        tuning_tables=draw(st.lists(TUNING_TABLES, max_size=2).map(tuple)),
        gaps=draw(st.lists(GAPS, max_size=2).map(tuple)),
        counts=draw(COUNTS),
        **columns,
    )


def assert_equal_batches(left: Batch, right: Batch) -> None:
    """Equal in every field; tables byte for byte, so that NaN equals NaN."""
    for field in fields(Batch):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        if field.name in DICTIONARY_TABLES or field.name in ROW_TABLES:
            ours, theirs = cast(Columns, ours), cast(Columns, theirs)
            assert ours.dtype == theirs.dtype, field.name
            assert ours.tobytes() == theirs.tobytes(), field.name
        else:
            assert ours == theirs, field.name


def log_source(number: int = 1) -> Source:
    """A source of its own for each number."""
    return Source(kind=SourceKind.NCCL_LOG, name=f"rank{number}.log", key=f"0:{number}:abc")


def log_batch(
    begin: int,
    end: int,
    *,
    source: Source | None = None,
    strings: tuple[str, ...] = (),
    templates: int = 0,
    operations: tuple[tuple[int, int], ...] = (),
    is_last: bool = False,
) -> Batch:
    """A batch of a log: `templates` new ones on thread 0 and text 0, and operations as (template, line)."""
    new_templates = np.zeros(templates, tables.OPERATION_TEMPLATE)
    rows = np.zeros(len(operations), tables.OPERATION_ROW)
    for row, (template, line) in zip(rows, operations, strict=True):
        row["template"], row["line"], row["op_count"] = template, line, line
    return Batch(
        source=source or log_source(),
        begin=begin,
        end=end,
        end_line=end,
        is_last=is_last,
        strings=strings,
        threads=np.zeros(1 if strings else 0, tables.THREAD),
        operation_templates=new_templates,
        operations=rows,
    )
