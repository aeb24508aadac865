"""Our bus bandwidth against the busbw column of real nccl-tests output, row by row."""

from __future__ import annotations

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
