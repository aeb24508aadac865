"""docs/internals/findings-benchmark.md shows what the command prints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.findings import job_days, kills, modes, reliability, tables
from benchmarks.findings.scenarios import scenarios

DOCUMENT = Path(__file__).parents[2] / "docs" / "internals" / "findings-benchmark.md"


def rows_under(header: str) -> list[list[str]]:
    """The rows of the table with this header, cell by cell."""
    after = DOCUMENT.read_text().split(header + "\n")[1].splitlines()
    end = next((at for at, line in enumerate(after) if not line.startswith("|")), len(after))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in after[:end]]


@pytest.mark.parametrize(
    "header", [tables.HEADER, modes.HEADER, job_days.ALARMS_HEADER, job_days.DELAYS_HEADER, kills.HEADER]
)
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


def test_every_mode_has_its_rows_and_what_misses_a_bar_is_told_below() -> None:
    rows = rows_under(modes.HEADER)
    assert list(dict.fromkeys(row[0] for row in rows)) == list(modes.MODES)
    told = DOCUMENT.read_text().split("What misses its bar")[1].split("\n## ")[0].lower()
    assert all(row[1].split(",")[0] in told for row in rows if row[-1] != "met")


def test_a_mode_shows_of_a_job_only_what_people_have_of_it() -> None:
    scenario = dict(next(modes.scenarios(1, most_ranks=8))[1])["usual"]
    assert scenario.config.world == 8
    full, dumps = modes.MODES["full: stamped logs and nsys, live"], modes.MODES["Inspector only"]
    assert modes.is_due(full, "slow link, 20 %")
    assert modes.is_due(full, "hang")
    assert not modes.is_due(dumps, "hang")


def test_the_error_of_a_confidence_is_its_distance_from_the_share_that_is_right() -> None:
    honest = np.array([(0.9, right) for right in [1.0] * 9 + [0.0]])
    boasting = np.array([(1.0, right) for right in (1.0, 0.0)])
    assert reliability.calibration_error(honest) < 1e-9
    assert reliability.calibration_error(boasting) == 0.5
