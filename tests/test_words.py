"""One word for one thing: the glossary's names are in the code, and its retired names are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_CODE = ("agents", "service", "command", "simulator", "models", "dashboards", "benchmarks", "tests", "tools")
_WORD = re.compile(r"\w+")


@pytest.fixture(scope="module")
def words(repository: Path) -> frozenset[str]:
    """Every word of the code and of its file names."""
    found: set[str] = set()
    for folder in _CODE:
        for file in (repository / folder).rglob("*.py"):
            if file.name != Path(__file__).name:
                found.update(_WORD.findall(file.stem), _WORD.findall(file.read_text(encoding="utf-8")))
    return frozenset(found)


def _rows(repository: Path, page: str) -> list[list[str]]:
    lines = (repository / "docs" / "internals" / page).read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0] not in ("term", "old")]


def test_the_names_of_the_glossary_are_in_the_code(repository: Path, words: frozenset[str]) -> None:
    named = {name for row in _rows(repository, "glossary.md") for name in re.findall(r"`(\w+)`", row[2])}
    assert named
    assert named <= words


def test_a_term_has_one_row(repository: Path) -> None:
    terms = [row[0] for row in _rows(repository, "glossary.md")]
    assert len(terms) == len(set(terms))


def test_retired_names_do_not_come_back(repository: Path, words: frozenset[str]) -> None:
    retired = {name for row in _rows(repository, "retired-names.md") for name in re.findall(r"`(\w+)`", row[0])}
    assert retired
    assert not retired & words, "docs/internals/retired-names.md says what they are called now"
