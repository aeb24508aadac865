"""`ncclscope explain`: what it prints and writes of a simulated job, and its exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from emission_samples import small
from service.fake_service import plan

from ncclscope.cli import main
from ncclscope_service.store.plan_records import PlanEdit
from ncclscope_simulator import write

SHAPE = small("fp16,skipped", tp=2, sequence_parallel=False)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of two ranks."""
    folder = tmp_path_factory.mktemp("job") / "job"
    write(SHAPE.config, folder)
    return folder / "logs"


def _run(logs: Path, *arguments: str, changed: str = "") -> tuple[int, str]:
    names = changed.partition("=")[0]
    fields = [each for each in SHAPE.fields() if each.partition("=")[0] != names] + ([changed] if changed else [])
    flags = [word for each in fields for word in ("--set", each)]
    result = CliRunner().invoke(main, ["explain", str(logs), *arguments, *flags])
    return result.exit_code, result.output


def test_a_run_that_does_what_its_description_says(logs: Path, tmp_path: Path) -> None:
    status, output = _run(logs, "--strict", "--out", str(tmp_path))
    assert status == 0, output
    assert "unexplained: none" in output
    assert "SKIPPED (overflow)" in output
    assert "layers 32, embedding 4, head 4" in output  # 4 AllReduces of 2 layers in 4 micro-batches
    assert "dp (1)" in output
    assert "one rank: logged, moves nothing" in output
    (plan,) = json.loads((tmp_path / "plan.json").read_text())
    assert plan["unexplained_operations"] == 0
    assert plan["may_raise"] is True
    rows = pq.read_table(tmp_path / "expected.parquet").to_pylist()
    assert {row["reason"] for row in rows} == {"rule"}
    assert {row["rank"] for row in rows} == {0, 1}
    ours = [row for row in rows if row["rank"] == 0 and row["iteration"] == 2 and row["rules"] == "cross-entropy"]
    assert [(row["op"], row["dtype"], row["count"], row["expected"], row["observed"]) for row in ours] == [
        ("AllReduce", "fp32", 128, 12, 12)
    ]
    assert ours[0]["logged_bytes"] == ours[0]["message_bytes"] == ours[0]["wire_bytes"] == 12 * 128 * 4


def test_a_wrong_description_is_named_and_strict_fails(logs: Path) -> None:
    status, output = _run(logs, "--strict", changed="layers=3")
    assert status == 4
    assert "UNEXPLAINED" in output
    assert "the description says layers 3, the traffic says 2" in output
    assert _run(logs, changed="layers=3")[0] == 0


def test_analyze_with_a_description_finds_it_and_has_the_plan_in_its_report(logs: Path, tmp_path: Path) -> None:
    fields = [each for each in SHAPE.fields() if not each.startswith("layers=")]
    words = [word for each in [*fields, "layers=3"] for word in ("--set", each)]
    made = CliRunner().invoke(main, ["model", "--toml", *words])
    (tmp_path / "model.toml").write_text(made.output)
    arguments = ["analyze", str(logs), "--out", str(tmp_path / "out"), "--model", str(tmp_path / "model.toml")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "the description says layers 3, the traffic says 2" in result.output
    assert json.loads((tmp_path / "out" / "plan.json").read_text())[0]["edits"][0]["observed"] == 2
    report = (tmp_path / "out" / "report.html").read_text()
    section = report.partition("</span>Plan</h2>")[2].partition("<h2")[0]
    assert "the description says layers 3, the traffic says 2" in section
    assert "UNEXPLAINED" in section


def test_a_running_service_is_asked_for_its_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "the description says layers 5, the traffic says 4"
    edit = PlanEdit(field="layers", described=5, observed=4, sentence=said)
    answers = {
        "/api/overview": {"jobs": [{"name": "a b"}, {"name": "other"}]},
        "/api/jobs/a%20b/plan": msgspec.to_builtins(replace(plan(), verdict=said, edits=(edit,))),
        "/api/jobs/a%20b/plan/pattern": None,
        "/api/jobs/other/plan": None,
    }

    def ask(service: str, path: str, **_: object) -> bytes:
        assert service == "http://127.0.0.1:9999"
        return json.dumps(answers[path]).encode()

    monkeypatch.setattr("ncclscope.explain.ask", ask)
    result = CliRunner().invoke(main, ["explain", "--service", "http://127.0.0.1:9999", "--strict"])
    assert result.exit_code == 4
    assert "job a b\nmodel   5 layers" in result.output
    assert "tp (8)  AllReduce BF16" in result.output
    assert f"unexplained: 48 operations\n{said}" in result.output
    assert "job other: no plan" in result.output
    assert CliRunner().invoke(main, ["explain", "--model", __file__]).exit_code == 2


def test_without_a_description_the_traffic_says_what_it_can(logs: Path) -> None:
    result = CliRunner().invoke(main, ["explain", str(logs)])
    assert result.exit_code == 0
    said = dict(line.split() for line in result.output.splitlines() if line.startswith("  "))
    assert said["tensor"] == said["layers"] == "2"
    assert (said["micro_batches"], said["tokens"], said["hidden"], said["precision"]) == ("4", "128", "256", "fp16")
    assert "not shown by the traffic: sequence, micro_batch, global_batch" in result.output
