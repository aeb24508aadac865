"""The conformance table and a snapshot per log of the corpus; NCCLSCOPE_UPDATE_GOLDEN=1 rewrites both."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from corpus.conformance import (
    GROUPS,
    ReadFile,
    document,
    document_of_files,
    read_corpora,
    read_file,
    sample_counts,
    shapes_of,
)

from ncclscope_agent.sources.nccl_log.counted_lines import CALLS, MATRIX_ROW, TRACE
from ncclscope_agent.sources.nccl_log.line_families import FAMILIES
from ncclscope_agent.sources.nccl_log.trouble_lines import TORCH

_UPDATES = os.environ.get("NCCLSCOPE_UPDATE_GOLDEN") == "1"
_SNAPSHOTS = Path(__file__).with_name("snapshots")


@pytest.fixture(scope="module")
def files(corpora: list[Path]) -> list[ReadFile]:
    return read_corpora(corpora)


@pytest.mark.corpus
def test_the_table_says_what_the_reader_reads(files: list[ReadFile], repository: Path) -> None:
    first_sight = json.loads(Path(__file__).with_name("first_sight.json").read_text())
    folder = repository / "docs" / "internals"
    for name, made in (
        ("conformance.md", document(files)),
        ("conformance-files.md", document_of_files(files, first_sight)),
    ):
        if _UPDATES:
            (folder / name).write_text(made)
        assert (folder / name).read_text() == made


@pytest.mark.corpus
def test_every_operation_whose_fields_are_whole_has_a_row(files: list[ReadFile]) -> None:
    """Held against a count of its own, file by file; what is torn elsewhere gives no rows beside these."""
    differ = {
        read.name: (read.understood["operation"], read.lines.whole_operations)
        for read in files
        if read.understood["operation"] != read.lines.whole_operations
    }
    assert not differ
    assert sum(read.lines.whole_operations for read in files) > 23_000


def test_every_family_has_a_written_sample() -> None:
    names = {family.name for family in (*FAMILIES, MATRIX_ROW, *CALLS, TRACE, *TORCH)}
    assert names - set(sample_counts()) <= {"comm_ranks", "library_missing"}


@pytest.mark.corpus
def test_each_log_gives_what_its_snapshot_says(files: list[ReadFile]) -> None:
    """Counts by family and reason only: nothing of a log's content stands in the repository."""
    made = {_snapshot_name(read): _counts(read) for read in files}
    if _UPDATES:
        for path in _SNAPSHOTS.glob("*.json"):
            path.unlink()
        for name, counts in made.items():
            (_SNAPSHOTS / name).write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")
    kept = {path.name: json.loads(path.read_text()) for path in _SNAPSHOTS.glob("*.json")}
    differ = [read.name for read in files if kept.get(_snapshot_name(read)) != _counts(read)]
    assert not differ
    assert kept.keys() == made.keys()


def _snapshot_name(read: ReadFile) -> str:
    return f"{read.key}.json"


def _counts(read: ReadFile) -> dict[str, dict[str, int]]:
    return {"understood": dict(read.understood), "skipped": {name: n for name, n in read.skipped.items() if n}}


@pytest.mark.corpus
@pytest.mark.parametrize(("name", "least"), [("corpus", 80_000), ("corpus2", 40_000)])
def test_less_than_half_a_percent_of_nccls_lines_has_no_family(files: list[ReadFile], name: str, least: int) -> None:
    some = [read for read in files if read.corpus == name]
    good = sum(read.understood.total() for read in some)
    bad = sum(read.lines_not_understood for read in some)
    assert good > least
    assert bad / (good + bad) < 0.005


@pytest.mark.corpus
@pytest.mark.parametrize("group", [group for group in GROUPS if group != "pages"])
def test_the_same_holds_for_forks_and_logs_of_all_subsystems_by_themselves(files: list[ReadFile], group: str) -> None:
    some = [read for read in files if read.group == group]
    bad = sum(read.lines_not_understood for read in some)
    assert some
    assert bad / (bad + sum(read.understood.total() for read in some)) < 0.005


def test_lines_without_a_family_are_listed_by_shape() -> None:
    line = "node17:1:2 [0] NCCL INFO a later form of 0x7f00 with {} things in /data/x\n"
    data = "".join(line.format(number) for number in range(3)).encode()
    assert shapes_of(data) == {"INFO a later form of P with N things in /PATH": 3}
    assert read_file("x", data).lines_not_understood == 3
