"""docs/internals/findings-benchmark.md shows what the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.findings import job_days, tables
from benchmarks.findings.scenarios import scenarios

DOCUMENT = Path(__file__).parents[2] / "docs" / "internals" / "findings-benchmark.md"


def rows_under(header: str) -> list[list[str]]:
    """The rows of the table with this header, cell by cell."""
    after = DOCUMENT.read_text().split(header + "\n")[1].splitlines()
    end = next((at for at, line in enumerate(after) if not line.startswith("|")), len(after))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in after[:end]]


@pytest.mark.parametrize("header", [tables.HEADER, job_days.ALARMS_HEADER, job_days.DELAYS_HEADER])
def test_every_table_has_the_columns_that_the_command_prints(header: str) -> None:
    rows = rows_under(header)
    assert rows
    assert {len(row) for row in rows} == {header.splitlines()[0].count("|") - 1}


def test_every_family_of_jobs_has_its_row_in_order_or_is_said_to_have_none() -> None:
    families = dict.fromkeys(scenario.family for scenario in scenarios(seeds=1, short=False))
    not_played = DOCUMENT.read_text().split("Not played for this table: ")[1].split(".\n")[0].split("; ")
    played = [family for family in families if family not in not_played]
    assert [row[0] for row in rows_under(tables.HEADER)] == [*played, "all"]


def test_no_row_names_others_than_the_culprits_or_tells_so_below() -> None:
    wrong = [row[0] for row in rows_under(tables.HEADER)[:-1] if row[3] != "0"]
    told = DOCUMENT.read_text().split("## What is not met")[1]
    assert all(family in told for family in wrong)
