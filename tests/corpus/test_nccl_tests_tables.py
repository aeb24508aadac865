"""Our bus bandwidth against the busbw column of real nccl-tests output, row by row."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from corpus.printed_tables import differing, files, measurements

from ncclscope_service.nccl.nccl_tests import NcclTests


@pytest.mark.corpus
def test_busbw_equals_the_printed_column_of_every_row(corpus: Path) -> None:
    skipped: Counter[str] = Counter()
    printed = [one for path in files(corpus) for one in measurements(path, skipped)]
    assert len(printed) > 1000, "the corpus holds far more rows than that"
    assert differing(printed) == []


@pytest.mark.corpus
def test_the_reader_of_baselines_takes_the_same_rows(corpus: Path) -> None:
    for path in sorted(path for path in (corpus / "nccl_tests").rglob("*.txt") if path.name != "SOURCE.txt"):
        apart: Counter[str] = Counter()
        ours = list(NcclTests(path.name).read(path.read_text(errors="replace").splitlines(), Counter()))
        theirs = list(measurements(path, apart))
        assert [(each.message_bytes, round(each.busbw / 1e9, 2)) for each in ours] == [
            (each.size, round(float(each.busbw), 2)) for each in theirs
        ], path.name


_ROW_ANYWHERE = re.compile(
    r"(?m)^\s*(?:\S+:\s+)?\d+ +\d+ +(?:u?int\w+|half|float|double|bfloat16|f8e\S+) .*?\d\.\d\d +\d+\.\d\d\b"
)


@pytest.mark.corpus
def test_every_whole_row_of_the_corpus_stands_in_a_benchmark(corpus: Path) -> None:
    counted = {
        path: (sum(len(table.rows) for table in NcclTests(path.name).benchmarks(text.split("\n"))), len(found))
        for path in files(corpus)
        for text in [path.read_text(errors="replace")]
        for found in [_ROW_ANYWHERE.findall(text)]
    }
    assert sum(rows for rows, _ in counted.values()) > 1000, "the corpus holds far more rows than that"
    assert [path.name for path, (ours, theirs) in counted.items() if ours != theirs] == []
