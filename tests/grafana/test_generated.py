"""The dashboards, alert rules and provisioning files in the repository: made anew, valid, and in good order."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana.asked import DASHBOARDS, dashboards, panels, rule_group
from grafana.sdk_schema import contact_point_schema, dashboard_schema, rule_group_schema
from jsonschema import Draft202012Validator

from ncclscope_dashboards import alerts
from ncclscope_dashboards.files import generated, plain
from ncclscope_service.metrics.table import METRICS_BY_NAME, Kind
from ncclscope_service.serve.http_server import WEB

BOARDS = list(dashboards().values())
SCHEMA = Draft202012Validator(dashboard_schema())

each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])


def provisioned(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DASHBOARDS / "provisioning" / name).read_text())
    return loaded


def test_the_files_are_what_the_generator_writes() -> None:
    kept = {str(path.relative_to(DASHBOARDS)) for part in ("grafana", "provisioning") for path in _files(part)}
    assert kept == set(generated())
    for name, text in generated().items():
        assert (DASHBOARDS / name).read_text() == text, f"run `python dashboards/generate`: {name} differs"


def _files(part: str) -> list[Path]:
    return [path for path in (DASHBOARDS / part).rglob("*") if path.is_file()]


@each_board
def test_a_dashboard_is_valid_by_the_types_of_the_sdk(board: dict[str, Any]) -> None:
    assert [error.message for error in SCHEMA.iter_errors(board)] == []


def _unknown_key(board: dict[str, Any]) -> None:
    panels(board)[0]["colour"] = "red"


def _bad_enumeration(board: dict[str, Any]) -> None:
    board["templating"]["list"][0]["type"] = "list"


def _number_as_text(board: dict[str, Any]) -> None:
    panels(board)[0]["gridPos"]["w"] = "12"


def _unknown_option(board: dict[str, Any]) -> None:
    panels(board)[0]["options"]["graphmode"] = "area"


def _unknown_panel(board: dict[str, Any]) -> None:
    panels(board)[0]["type"] = "pie"


def _no_expression(board: dict[str, Any]) -> None:
    del panels(board)[0]["targets"][0]["expr"]


@pytest.mark.parametrize(
    "spoil", [_unknown_key, _bad_enumeration, _number_as_text, _unknown_option, _unknown_panel, _no_expression]
)
def test_the_schema_refuses_what_is_wrong(spoil: Callable[[dict[str, Any]], None]) -> None:
    board = copy.deepcopy(BOARDS[0])
    spoil(board)
    assert list(SCHEMA.iter_errors(board)) != []


def test_uids_and_titles_are_unique_and_short_enough() -> None:
    assert len({board["title"] for board in BOARDS}) == len(BOARDS)
    rules = rule_group()["rules"]
    uids = [*(board["uid"] for board in BOARDS), *(rule["uid"] for rule in rules)]
    assert len(set(uids)) == len(uids)
    assert all(re.fullmatch(r"[a-z0-9-]{1,40}", uid) for uid in uids), "Grafana takes 40 characters at most"


@each_board
def test_panels_have_ids_of_their_own_and_do_not_overlap(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert min(ids) > 0
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@each_board
def test_a_dashboard_keeps_the_rules_of_grafanas_linter(board: dict[str, Any]) -> None:
    """*Source:* grafana/dashboard-linter, docs/rules; `template-instance` does not fit: jobs span services."""
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert board["editable"] is False
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for variable in variables.values():
        assert variable["label"]
        if variable["type"] == "query":
            assert variable["multi"]
            assert variable["allValue"] == ".+"
            assert variable["refresh"] == 2, "asked again when the time range changes"
            assert variable["datasource"]["uid"] == "${datasource}"
    for panel in panels(board):
        assert panel["title"], "a title"
        assert panel["description"].endswith("."), f"{panel['title']}: the description is a sentence"
        assert panel["fieldConfig"]["defaults"]["unit"], f"{panel['title']}: a unit"
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
        for target in panel["targets"]:
            _check_target(panel["title"], target["expr"])
    _check_variables_are_used(board, variables)


def _check_target(title: str, expr: str) -> None:
    for counter in (metric.exposed_name for metric in METRICS_BY_NAME.values() if metric.kind is Kind.COUNTER):
        for found in re.finditer(rf"\b{counter}\b", expr):
            is_ratio_of_counts = "alignment_checked" in expr
            before = expr[: found.start()]
            assert before.endswith(("rate(", "increase(")) or is_ratio_of_counts, f"{title}: {counter} without a rate"
    for span in re.findall(r"\[([^\]]*)\]", expr):
        assert span == "$__rate_interval", f"{title}: a range of {span}"
    for name, matchers in re.findall(r"\b(ncclscope_\w+)(\{[^}]*\})?", expr):
        family = METRICS_BY_NAME[re.sub(r"_(total|bucket|sum|count)$", "", name)]
        if "job" in family.labels:
            assert 'job=~"$job"' in matchers, f"{title}: {name} of which job"


def _check_variables_are_used(board: dict[str, Any], variables: dict[str, Any]) -> None:
    text = json.dumps([board["panels"], board["links"], board["annotations"]])
    for name in set(variables) - {"datasource"}:
        assert f"${name}" in text or f"${{{name}" in text, f"nothing depends on {name}"
    for used in re.findall(r"\$\{?(\w+)", text):
        assert used in variables or used.startswith("__"), f"{used} is not a variable"


@each_board
def test_links_between_dashboards_lead_somewhere(board: dict[str, Any]) -> None:
    uids = {each["uid"] for each in BOARDS}
    for uid in re.findall(r"/d/([a-z-]+)", json.dumps(board)):
        assert uid in uids


def test_the_rule_group_is_valid_by_the_types_of_the_sdk() -> None:
    validator = Draft202012Validator(rule_group_schema())
    group = rule_group()
    assert [error.message for error in validator.iter_errors(group)] == []
    for key, value in (("noDataState", "Nothing"), ("colour", "red"), ("for", 10)):
        spoilt = copy.deepcopy(group)
        spoilt["rules"][0][key] = value
        assert list(validator.iter_errors(spoilt)) != []


def test_the_contact_point_is_valid_by_the_types_of_the_sdk() -> None:
    validator = Draft202012Validator(contact_point_schema())
    point: Any = plain(alerts.contact_point())
    assert [error.message for error in validator.iter_errors(point)] == []
    assert list(validator.iter_errors({**point, "type": "carrier-pigeon"})) != []


def test_grafanas_rules_are_those_for_prometheus(repository: Path) -> None:
    file = repository / "deploy" / "prometheus" / "ncclscope_alerts.yml"
    known = {rule["alert"]: rule for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]}
    rules = {rule["title"]: rule for rule in rule_group()["rules"]}
    assert set(rules) == set(known)
    for name, rule in rules.items():
        assert rule["for"] == known[name].get("for", "0s")
        assert known[name].get("labels", {}).items() <= rule["labels"].items()


def test_what_a_recording_rule_gives_is_asked_in_full() -> None:
    recorded = {"job:x:sum": 'sum by (job) (ncclscope_x{a="b"})', "job:x:sum2": "sum(ncclscope_x)"}
    assert alerts.in_full("job:x:sum < 1", recorded) == '(sum by (job) (ncclscope_x{a="b"})) < 1'
    assert alerts.in_full('job:x:sum{c="d"} < 1', recorded) == '(sum by (job) (ncclscope_x{a="b", c="d"})) < 1'
    assert alerts.in_full('job:x:sum2{c="d"}', recorded) == '(sum(ncclscope_x{c="d"}))'


def test_every_alert_leads_to_its_runbook_and_to_a_panel() -> None:
    anchors = set(re.findall(r'id="([^"]+)"', (WEB / "runbooks.html").read_text()))
    uids = {board["uid"] for board in BOARDS}
    for rule in rule_group()["rules"]:
        notes = rule["annotations"]
        assert rule["condition"] in {step["refId"] for step in rule["data"]}
        assert notes["runbook_url"].partition("#")[2] in anchors
        assert "$" not in "".join(notes.values()), "Grafana would look for it in its environment"
        assert notes["__dashboardUid__"] in uids
        assert notes["__panelId__"] in {str(panel["id"]) for panel in panels(dashboards()[notes["__dashboardUid__"]])}


def test_provisioning_files_hang_together() -> None:
    sources = provisioned("datasources/ncclscope.yaml")["datasources"]
    providers = provisioned("dashboards/ncclscope.yaml")["providers"]
    groups = provisioned("alerting/ncclscope-rules.yaml")["groups"]
    points = provisioned("alerting/ncclscope-contact-point.yaml")["contactPoints"]
    for name in ("datasources/ncclscope.yaml", "dashboards/ncclscope.yaml", "alerting/ncclscope-rules.yaml"):
        assert provisioned(name)["apiVersion"] == 1
    assert {group["folder"] for group in groups} == {provider["folder"] for provider in providers}
    asked = {step["datasourceUid"] for group in groups for rule in group["rules"] for step in rule["data"]}
    assert asked == {sources[0]["uid"], "__expr__"}
    of_api = {rule["uid"]: rule for rule in rule_group()["rules"]}
    for rule in groups[0]["rules"]:
        assert rule.items() <= of_api[rule["uid"]].items(), "a file says what the API would"
    assert points[0]["receivers"][0]["type"] == "webhook"


def test_a_dollar_sign_in_an_alerting_file_is_always_an_environment_variable() -> None:
    for path in (DASHBOARDS / "provisioning" / "alerting").iterdir():
        assert set(re.findall(r"\$\{?\w+", path.read_text())) <= {"$NCCLSCOPE_WEBHOOK_URL"}, path.name
