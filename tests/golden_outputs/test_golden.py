"""Outputs are those of the last commit, unless a commit says otherwise and shows the difference (tools/golden)."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden_outputs.run import EXPECTED, corpora, digests


def _assert_as_expected(lines: list[str]) -> None:
    expected = set(EXPECTED.read_text().splitlines())
    different = [line for line in lines if line not in expected]
    assert not different, "not as expected (see tools/golden):\n" + "\n".join(different)


def test_a_few_jobs_give_what_they_gave(tmp_path: Path) -> None:
    _assert_as_expected(list(digests(tmp_path, short=True)))


@pytest.mark.slow
def test_every_job_and_the_corpus_give_what_they_gave(tmp_path: Path) -> None:
    lines = list(digests(tmp_path, corpora=corpora()))
    _assert_as_expected(lines)
    if len(corpora()) > 1:
        assert len(lines) == len(EXPECTED.read_text().splitlines())
