"""Real dumps of NCCL Inspector: every record is read, and says what we would compute of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncclscope_agent.files.recognise import FileKind, recognise
from ncclscope_agent.sources.inspector import InspectorReader
from ncclscope_service.nccl import bandwidth
from ncclscope_service.pipeline import Pipeline
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.records import Source, SourceKind

pytestmark = pytest.mark.corpus

_HALF_STEP = 0.5e-6 * 1e9 * 1.001
"""Half of the last printed digit (GB/s with six), in bytes per second."""


def dumps(corpus: Path) -> list[Path]:
    found = [path for path in sorted((corpus / "inspector").rglob("*")) if path.is_file()]
    return [path for path in found if recognise(path.read_bytes(), path.name) is FileKind.INSPECTOR]


def read(path: Path) -> list[Batch]:
    reader = InspectorReader(Source(kind=SourceKind.INSPECTOR, name=path.name, key=str(path)))
    return [*reader.ingest_bytes(path.read_bytes()), *reader.finish()]


def printed(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def columns(batches: list[Batch]) -> tuple[Columns, Columns]:
    ranks = np.concatenate([batch.inspected_ranks for batch in batches])
    rows = np.concatenate([batch.inspected for batch in batches])
    return rows, ranks[rows["inspected_rank"]]


def test_dumps_are_told_from_what_lies_beside_them(corpus: Path) -> None:
    assert len(dumps(corpus)) == 10
    assert all("-pid" in path.name for path in dumps(corpus))


def test_every_record_is_read_and_none_is_lost(corpus: Path) -> None:
    for path in dumps(corpus):
        batches = read(path)
        lines = path.read_bytes().count(b"\n")
        rows, _ = columns(batches)
        assert sum((sum(batch.counts.skipped.values()) for batch in batches), 0) == 0, path.name
        assert len(rows) == lines == batches[-1].end_line
        assert rows["line"].tolist() == list(range(1, lines + 1))
        assert batches[-1].end == path.stat().st_size


def test_our_bandwidths_are_the_printed_ones(corpus: Path) -> None:
    compared = 0
    for path in dumps(corpus):
        rows, ranks = columns(read(path))
        told = [record["coll_perf"] for record in printed(path)]
        sizes = bandwidth.scaled_bytes(rows["op"], rows["bytes"], ranks["nranks"])
        algbw = bandwidth.algbw(sizes, rows["duration_ns"])
        busbw = algbw * bandwidth.factor(rows["op"], ranks["nranks"])
        assert np.abs(algbw - [each["coll_algobw_gbs"] * 1e9 for each in told]).max() <= _HALF_STEP, path.name
        assert np.abs(busbw - [each["coll_busbw_gbs"] * 1e9 for each in told]).max() <= _HALF_STEP, path.name
        compared += len(rows)
    assert compared == 17_230


def test_numbers_count_from_zero_per_kind_and_mean_one_collective_on_all_ranks(corpus: Path) -> None:
    by_number: dict[tuple[int, int, int], set[int]] = {}
    for path in dumps(corpus):
        rows, ranks = columns(read(path))
        assert (np.diff(rows["sequence"].astype(np.int64)) > 0).all(), path.name
        for row, of in zip(rows, ranks, strict=True):
            key = int(of["comm_hash"]), int(row["op"]), int(row["sequence"])
            by_number.setdefault(key, set()).add(int(row["bytes"]))
    assert all(len(sizes) == 1 for sizes in by_number.values())
    assert min(number for _, _, number in by_number) == 0


def test_without_any_log_the_communicators_have_their_measures(corpus: Path) -> None:
    pipeline = Pipeline()
    for path in dumps(corpus):
        for batch in read(path):
            pipeline.ingest_batch(batch, agent="a", session="s", job=path.parent.name)
    pipeline.finish(0)
    store = pipeline.store
    assert {communicator.comm_id for communicator in store.communicators} == {
        "0xaa498efb3b18bc", "0x67d108e83c90ee", "0xec4ad54506d878",
    }  # fmt: skip
    assert store.skipped.total() == 0
    assert int(store.series.rows["inspected"].sum()) == 17_230
    collectives = store.collectives.rows
    large = collectives[collectives["message_bytes"] >= 2**28]
    # Four GPUs on PCIe: the tables of the same runs end at 10 to 13 GB/s.
    assert 8e9 < np.median(large["busbw"]) < 14e9
    assert np.isfinite(collectives["busbw"]).all()
    assert len(collectives) > 2_000
