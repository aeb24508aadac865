"""Thresholds: names, bounds, which hold for a job, and that the detectors and the documentation have them."""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from service.detect.simulated_job import Job, Simulation

from ncclscope_service.detect.late_rank import LateRank
from ncclscope_service.detect.settings import DEFAULTS, THRESHOLDS, check, flattened, parse_assignment, settings_of
from ncclscope_service.store.records import Severity
from ncclscope_wire.errors import ConfigError

_SHARE = "late_rank.least_share"


def test_what_is_given_for_some_jobs_wins_over_what_is_given_for_all() -> None:
    given = check({_SHARE: 0.02, 'job."llama-*".late_rank.least_share': 0.05, "job.llama-70b.hang.rest_seconds": 600})
    assert list(given) == [_SHARE, 'job."llama-*".late_rank.least_share', 'job."llama-70b".hang.rest_seconds']
    assert settings_of(given, "other") == replace(DEFAULTS, late_rank=replace(DEFAULTS.late_rank, least_share=0.02))
    llama = settings_of(given, "llama-70b")
    assert (llama.late_rank.least_share, llama.hang.rest_seconds) == (0.05, 600)
    assert settings_of({}, "llama-70b") is DEFAULTS


def test_a_threshold_that_is_gone_is_left_out_of_what_was_kept() -> None:
    assert settings_of({"late_rank.gone": 1.0, 'job."*".late_rank.gone': 1.0}, "j") is DEFAULTS


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("late_rank.least_shar", 0.1, "no threshold 'late_rank.least_shar': did you mean late_rank.least_share?"),
        ("detect.hang.zzzz", 1, "there is no threshold 'hang.zzzz': known are hang.least_silence_seconds, hang.inside"),
        ("zzzz", 1, "there is no threshold 'zzzz': known are late_rank...., bandwidth...."),
        (_SHARE, 1.5, "late_rank.least_share: 1.5 is not between 0 and 1"),
        (_SHARE, float("nan"), "late_rank.least_share: nan is not between 0 and 1"),
        (_SHARE, "much", "late_rank.least_share is a number, not 'much'"),
        (_SHARE, True, "late_rank.least_share is a number, not True"),
        ("siblings.least_groups", 2.5, "siblings.least_groups is a whole number, not 2.5"),
        ("below_limit.healed_ratio", 0.4, "below_limit.least_ratio (0.5) must not be above below_limit.healed_ratio"),
        ('job."a".below_limit.healed_ratio', 0.4, "must not be above below_limit.healed_ratio (0.4)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_a_sentence(name: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check({name: value})
    assert said in str(caught.value)


def test_a_table_of_a_file_and_the_flag_give_the_same() -> None:
    text = """
        [detect]
        late_rank.least_share = 0.02
        [detect.hang]
        rest_seconds = 300
        [detect.job."llama-*".siblings]
        least_groups = 4
    """
    flags = [
        "detect.late_rank.least_share=0.02",
        "hang.rest_seconds=300",
        "detect.job.'llama-*'.siblings.least_groups=4",
    ]
    of_file = check(flattened(tomllib.loads(text)["detect"]))
    assert of_file == check(dict(map(parse_assignment, flags)))
    assert of_file == {_SHARE: 0.02, "hang.rest_seconds": 300, 'job."llama-*".siblings.least_groups': 4}


@pytest.mark.parametrize(
    "table", [{"late_rank": 3}, {"job": 3}, {"job": {"a": 3}}, {"job": {"a": {"hang": 3}}}, {"a": 1}]
)
def test_a_value_where_a_table_should_be_is_refused(table: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        check(flattened(table))


def test_every_default_is_within_its_bounds() -> None:
    assert check({name: each.default for name, each in THRESHOLDS.items()})
    assert settings_of({name: each.default for name, each in THRESHOLDS.items()}, "j") == DEFAULTS


def check_documented(page: Path, name: str, table: str) -> None:
    """That a page has this table between the marks of that name."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, _, rest = page.read_text().partition(begin)
    documented, _, after = rest.partition(end)
    if os.environ.get("NCCLSCOPE_UPDATE_GOLDEN"):
        page.write_text(before + begin + table + end + after)
        return
    assert documented == table, "run this test once with NCCLSCOPE_UPDATE_GOLDEN=1"


def test_the_documentation_has_every_threshold_with_its_default_and_bounds(repository: Path) -> None:
    rows = (
        f"| `{name}` | {each.default:.12g} | {each.low:.12g} to {each.high:.12g} | {each.about} |\n"
        for name, each in THRESHOLDS.items()
    )
    table = "".join(("| threshold | default | bounds | what it is |\n|---|---|---|---|\n", *rows))
    check_documented(repository / "docs" / "settings.md", "thresholds", table)


def test_a_detector_goes_by_the_settings_of_the_context_that_comes_with_its_input() -> None:
    simulation, detector = Simulation(Job(late_rank=5, late_ns=2e6), 0), LateRank()
    tolerant = settings_of({"late_rank.least_share": 0.5, "late_rank.enough_us": 1e6}, "j")
    grave = settings_of({"late_rank.critical_share": 0.01}, "j")
    seen: list[list[Severity]] = []
    for number, collectives in enumerate(simulation.seconds(40)):
        settings = tolerant if number < 20 else grave
        detector.ingest_collectives(collectives, replace(simulation.context, settings=settings))
        seen.append([finding.severity for finding in detector.findings()])
    assert not any(seen[:20]), "2 ms are no matter for who wants to hear of half a step only"
    assert seen[-1] == [Severity.CRITICAL], "and critical for who says so, from the next input on"
