"""What can be asked for, what is refused and with which words; and the command in front of it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from ncclscope.simulate import simulate as command
from ncclscope_simulator import Fault, SimulationConfig, parse_faults
from ncclscope_simulator.version import traits


def test_all_faults_of_a_configuration_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="tp x pp x dp x cp = 6") as caught:
        SimulationConfig(tp=3, pp=1, dp=2, nsys="2021.1", capture="duty:7", nccl="2.7", order="dp")
    for part in ("nsys '2021.1'", "capture 'duty:7'", "NCCL version '2.7'", "order 'dp'", "multiple of tp=3"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"timestamps": True, "nccl": "2.21"}, "2.26.2 is the first"),
        ({"split": True, "nccl": "2.17"}, "2.18.1 is the first"),
        ({"calls": True, "nccl": "2.12"}, "2.13 is the first"),
        ({"ep": 3}, "ep=3 does not divide dp=2"),
        ({"nodes": 0}, "nodes must be at least 1"),
        ({"faults": (Fault("hang", rank=99),)}, "no rank 99 in 8 ranks"),
        ({"faults": (Fault("clock_step", node=0),)}, "carries the reference clock"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SimulationConfig(**given)  # type: ignore[arg-type]  # wrong on purpose


def test_every_option_is_a_setting_of_that_name_or_is_read_by_itself() -> None:
    settings = {field.name for field in fields(SimulationConfig)}
    assert {option.name for option in command.params} - settings == {"out", "live", "seconds", "emission", "fault"}


def test_short_versions_stand_for_a_release() -> None:
    assert [traits(text).text for text in ("2.18", "2.21", "2.28")] == ["2.18.3", "2.21.5", "2.28.3"]


def test_faults_are_read_with_their_keys() -> None:
    late, slow = parse_faults(["late_rank:rank=3,ms=2,from=20", "none", "slow_link:node=1,factor=0.5,until=9"])
    assert late == Fault("late_rank", rank=3, ms=2.0, first=20)
    assert not late.active(19)
    assert late.active(20)
    assert slow == Fault("slow_link", node=1, factor=0.5, until=9)
    assert not slow.active(9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("late:rank=3", "no kind 'late'"),
        ("late_rank:rank=3", "needs ms="),
        ("late_rank:rank=3,ms=x", "ms=x is not a number"),
        ("hang:rank=2,at=1,ms=3", "no key ms"),
        ("drop_lines:ratio=2", "0 to 1"),
        ("slow_link:node=1,factor=0", "above 0"),
        ("drop_lines:ratio", "not key=value"),
        ("late_rank:rank=1,ms=1,every=day", "every must be"),
        ("late_rank:rank=1,ms=1,from=5,until=5", "none"),
    ],
)
def test_a_fault_that_is_not_understood_says_why(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_faults([text])


def test_the_command_writes_a_job(tmp_path: Path) -> None:
    arguments = ["--nccl", "2.21", "--nodes", "1", "--gpus", "2", "--pp", "1", "--iterations", "1", "--layers", "1"]
    result = CliRunner().invoke(command, ["--out", str(tmp_path), *arguments])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "nsys", "truth"]
    again = CliRunner().invoke(command, ["--out", str(tmp_path), *arguments])
    assert again.exit_code == 1
    assert "already holds a simulated job" in again.output


def test_the_command_refuses_with_usage(tmp_path: Path) -> None:
    for arguments, words in (
        (["--tp", "3"], "must be equal"),
        (["--fault", "late_rank:rank=1"], "needs ms="),
        (["--for", "3"], "--for needs --live"),
    ):
        result = CliRunner().invoke(command, ["--out", str(tmp_path), *arguments])
        assert result.exit_code == 2
        assert words in result.output


@pytest.mark.slow
def test_a_live_job_ends_by_itself(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--out", str(tmp_path), "--live", "--for", "1.5", "--step-seconds", "0.1"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "truth" / "operations.parquet").exists()
