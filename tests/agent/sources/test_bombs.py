"""Small files that unfold into large ones, or nest without end, are refused or counted, in bounded memory."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections import Counter
from pathlib import Path

import pytest

from ncclscope_agent.sources.flight_recorder.dump import read_dump
from ncclscope_agent.sources.inspector import InspectorReader
from ncclscope_agent.sources.kineto.batches import read_trace
from ncclscope_agent.sources.ras import read_answer
from ncclscope_agent.sources.topology_xml import read_topology_xml
from ncclscope_wire.errors import FormatError
from ncclscope_wire.records import Source, SourceKind

DEEP = 100_000
UNFOLDED = 64 << 20
MOST_BYTES = 40 << 20
"""Of memory, whatever a trace unfolds to: some blocks of it."""

TRACE = b'{"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": ['
EVENT = b'{"ph":"X","cat":"kernel","name":"ncclDevKernel_AllReduce","ts":1,"dur":1,"pid":0,"tid":7,"args":{}},'
ABOUT = (
    b'{"header":{"id":"0x1","rank":0,"n_ranks":4},"metadata":{"inspector_output_format_version":"v4.2",'
    b'"dump_timestamp_us":1,"hostname":"h","pid":1},'
)


@pytest.mark.parametrize(
    "line",
    [
        ABOUT + b'"proxy_trace":' + b"[" * DEEP + b"]" * DEEP + b"}",
        ABOUT + b'"proxy_trace":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001,
        b'{"x":' * 40_000 + b"1" + b"}" * 40_000,
    ],
    ids=["lists", "maps", "maps that no version has"],
)
def test_records_that_nest_without_end_are_counted_and_the_next_is_read(line: bytes) -> None:
    reader = InspectorReader(Source(kind=SourceKind.INSPECTOR, name="n", key="k"))
    batches = [*reader.ingest_bytes(line + b"\n" + ABOUT + b'"proxy_trace":{}}\n'), *reader.finish()]
    skipped, understood = Counter[str](), Counter[str]()
    for batch in batches:
        skipped.update(batch.counts.skipped)
        understood.update(batch.counts.understood)
    assert (dict(skipped), dict(understood)) == ({"inspector_field": 1}, {"inspector_proxy": 1})


def packed(begin: bytes, again: bytes) -> bytes:
    """A gzip file that unfolds to UNFOLDED bytes."""
    packer = zlib.compressobj(9, wbits=31)
    block = again * (1 << 20 // len(again))
    parts = [packer.compress(begin), *(packer.compress(block) for _ in range(UNFOLDED // len(block))), packer.flush()]
    return b"".join(parts)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(packed(TRACE, b" "), id="blanks"),
        pytest.param(packed(TRACE + b'{"name":"', b"a"), id="a text"),
        pytest.param(packed(b'{"schemaVersion": 1, "x": "', b"a"), id="a text in front of the events"),
        pytest.param(packed(TRACE, b"["), id="lists within lists"),
        pytest.param(gzip.compress(TRACE + EVENT)[:-30], id="cut off"),
        pytest.param(gzip.compress(TRACE) + b"garbage" * 100, id="something behind it"),
    ],
)
def test_a_trace_that_unfolds_without_end_is_a_gap_in_bounded_memory(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "t.pt.trace.json.gz"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        batches = list(read_trace(path, source=Source(kind=SourceKind.KINETO, name="t", key="k")))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [gap.reason for batch in batches for gap in batch.gaps] == ["trace_torn"]
    assert peak < MOST_BYTES


@pytest.mark.parametrize("inside", [b'{"communicators":' + b"[" * DEEP, b'{"communicators":[],"x":' + b"[" * DEEP])
def test_an_answer_of_ras_that_nests_without_end_is_refused(inside: bytes) -> None:
    with pytest.raises(FormatError):
        read_answer(inside)


@pytest.mark.parametrize(
    "data",
    [
        b'{"entries":' + b"[" * DEEP,
        b'{"entries":[' + b"9" * DEEP + b"]}",
        b"\x80\x02" + b"(" * DEEP,
        b"\x80\x02" + b"]" * DEEP + b"a" * (DEEP - 1) + b".",
    ],
    ids=["lists", "a number", "marks", "a pickle of lists"],
)
def test_a_dump_that_nests_without_end_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        read_dump(data, "rank_1")


@pytest.mark.parametrize(
    "text",
    [
        b'<system version="1">' + b'<cpu numaid="0">' * DEEP,
        b'<!DOCTYPE s [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><system version="1">&b;</system>',
    ],
    ids=["elements", "entities"],
)
def test_a_topology_that_nests_without_end_is_refused(text: bytes) -> None:
    with pytest.raises(FormatError):
        read_topology_xml(text, "host")
