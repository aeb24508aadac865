"""The rules for Prometheus and Alertmanager: valid, tested, documented, and about metrics that exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ncclscope_service.metrics.table import METRICS, Kind, Metric
from ncclscope_service.serve.http_server import WEB
from ncclscope_service.store.records import FindingKind

_PROMETHEUS = Path("deploy") / "prometheus"
_RULES = ("ncclscope_recording.yml", "ncclscope_alerts.yml")


@dataclass(frozen=True)
class Rule:
    """One rule as its file has it."""

    name: str
    expr: str
    is_alert: bool
    annotations: dict[str, str]
    labels: dict[str, str]
    held: str


@pytest.fixture(scope="module")
def rules(repository: Path) -> list[Rule]:
    return [
        Rule(
            name=each.get("alert") or each["record"],
            expr=" ".join(each["expr"].split()),
            is_alert="alert" in each,
            annotations=each.get("annotations", {}),
            labels=each.get("labels", {}),
            held=each.get("for", "0s"),
        )
        for file in _RULES
        for group in loaded(repository / _PROMETHEUS / file)["groups"]
        for each in group["rules"]
    ]


def loaded(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]} (Debian: apt install prometheus prometheus-alertmanager)")
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)


def exposed() -> dict[str, Metric]:
    """Every name of a series, and its metric."""
    suffixes = {Kind.HISTOGRAM: ("_bucket", "_count", "_sum"), Kind.COUNTER: ("_total",), Kind.GAUGE: ("",)}
    return {metric.name + suffix: metric for metric in METRICS for suffix in suffixes[metric.kind]}


def test_promtool_accepts_configuration_and_rules(repository: Path) -> None:
    done = run(repository / _PROMETHEUS, "promtool", "check", "config", "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_case_of_the_rules_holds(repository: Path) -> None:
    done = run(repository / _PROMETHEUS / "tests", "promtool", "test", "rules", "ncclscope_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(
    repository: Path, rules: list[Rule]
) -> None:
    fires: dict[str, set[bool]] = {}
    for case in loaded(repository / _PROMETHEUS / "tests" / "ncclscope_test.yml")["tests"]:
        for question in case.get("promql_expr_test", ()):
            asked = re.search(r'alertname="(\w+)"', question["expr"])
            if asked:
                fires.setdefault(asked[1], set()).add(bool(question["exp_samples"]))
    assert fires == {rule.name: {True, False} for rule in rules if rule.is_alert}


def test_every_metric_of_a_rule_is_in_the_table_or_recorded_with_the_labels_it_is_asked_for(rules: list[Rule]) -> None:
    known, recorded = exposed(), {rule.name for rule in rules if not rule.is_alert}
    for rule in rules:
        for name, matchers in re.findall(r"([a-z_:]*ncclscope[a-z0-9_:]+)(?:\{([^}]*)\})?", rule.expr):
            assert name in known or name in recorded, f"{rule.name} asks for {name}"
            if name in known:
                asked = set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", matchers))
                assert asked <= set(known[name].labels), f"{rule.name} asks {name} for {asked}"
        for names in re.findall(r"\bby \(([^)]*)\)", rule.expr):
            labels = {label for metric in METRICS for label in metric.labels} | {"le"}
            assert {each.strip() for each in names.split(",")} <= labels, rule.name


def test_every_kind_of_finding_has_one_alert(rules: list[Rule]) -> None:
    alerted = {
        kind for rule in rules for kind in re.findall(r'ncclscope_finding_confidence_ratio\{kind="(\w+)"\}', rule.expr)
    }
    (rest,) = (rule for rule in rules if rule.name == "NcclscopeFinding")
    excluded = re.search(r'kind!~"([^"]*)"', rest.expr)
    assert excluded is not None
    assert set(excluded[1].split("|")) == alerted, "the alert for all other kinds leaves out exactly these"


def test_every_alert_says_who_or_what_and_leads_to_a_runbook_that_exists(rules: list[Rule]) -> None:
    anchors = set(re.findall(r'id="([^"]+)"', (WEB / "runbooks.html").read_text()))
    for rule in rules:
        if not rule.is_alert:
            continue
        is_finding = "ncclscope_finding_confidence_ratio" in rule.expr
        assert set(rule.annotations) == {"summary", "description", "runbook_url"} | (
            {"finding_url"} if is_finding else set()
        ), rule.name
        assert not is_finding or "$value | humanizePercentage }} sure)" in rule.annotations["summary"], rule.name
        page, _, anchor = rule.annotations["runbook_url"].partition("#")
        assert page == "http://localhost:9798/runbooks"
        kind = re.search(r'kind="(\w+)"', rule.expr)
        if kind is None or kind[1] in set(FindingKind):  # rules may know kinds before the service does
            assert anchor in anchors, f"{rule.name} leads to {anchor}"
        assert ("severity" in rule.labels) is not is_finding, "a finding has its own"
        if rule.name != "NcclscopeDown":
            assert re.search(r"\$labels|\$value", rule.annotations["summary"]), f"{rule.name} names nobody"


def test_amtool_accepts_the_configuration_and_routes_by_severity(repository: Path) -> None:
    folder = repository / "deploy" / "alertmanager"
    done = run(folder, "amtool", "check-config", "alertmanager.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    for severity, receiver in (("critical", "pager"), ("warning", "chat"), ("info", "nobody")):
        done = run(
            folder, "amtool", "config", "routes", "test", "--config.file=alertmanager.yml", f"severity={severity}"
        )
        assert done.stdout.strip() == receiver


def test_alertmanager_names_alerts_that_exist(repository: Path, rules: list[Rule]) -> None:
    text = (repository / "deploy" / "alertmanager" / "alertmanager.yml").read_text()
    names = [rule.name for rule in rules if rule.is_alert]
    for pattern in re.findall(r"Ncclscope[\w.*]+", text):
        assert any(re.fullmatch(pattern, name) for name in names), pattern


def test_every_alert_and_recording_rule_is_documented(repository: Path, rules: list[Rule]) -> None:
    page = repository / "docs" / "alerts.md"
    text = page.read_text()
    expected = replaced(text, "alerts", alert_table([rule for rule in rules if rule.is_alert]))
    expected = replaced(expected, "recording", recording_table([rule for rule in rules if not rule.is_alert]))
    if os.environ.get("NCCLSCOPE_UPDATE_GOLDEN"):
        page.write_text(expected)
    assert page.read_text() == expected, "run this test once with NCCLSCOPE_UPDATE_GOLDEN=1"


def replaced(text: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, _, rest = text.partition(begin)
    return before + begin + table + end + rest.partition(end)[2]


def alert_table(alerts: list[Rule]) -> str:
    head = "| alert | severity | fires when | for | runbook |\n|---|---|---|---|---|\n"
    return head + "".join(_alert_row(rule) for rule in alerts)


def _alert_row(rule: Rule) -> str:
    anchor = rule.annotations["runbook_url"].partition("#")[2]
    expr = rule.expr.replace("|", "\\|")
    severity = rule.labels.get("severity", "the finding's")
    return f"| `{rule.name}` | {severity} | `{expr}` | {rule.held} | [{anchor}](findings.md#{anchor}) |\n"


def recording_table(recorded: list[Rule]) -> str:
    rows = (f"| `{rule.name}` | `{rule.expr.replace('|', chr(92) + '|')}` |\n" for rule in recorded)
    return "| series | is |\n|---|---|\n" + "".join(rows)
