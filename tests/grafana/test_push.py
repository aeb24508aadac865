"""`ncclscope grafana push` over HTTP against a Grafana made from its contract."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from grafana.asked import dashboards, rule_group
from grafana.fake_grafana import TOKEN, FakeGrafana, serving

from ncclscope.cli import main
from ncclscope.grafana_port import HttpGrafana


@pytest.fixture
def server() -> FakeGrafana:
    return FakeGrafana()


@pytest.fixture
def url(server: FakeGrafana) -> Iterator[str]:
    with serving(server) as address:
        yield address


def push(url: str, *options: str, token: str = TOKEN) -> Result:
    return CliRunner().invoke(main, ["grafana", "push", "--url", url, "--token", token, *options])


PROMETHEUS = ("--prometheus", "http://prometheus:9090")


def test_everything_arrives(server: FakeGrafana, url: str) -> None:
    result = push(url, *PROMETHEUS)
    assert result.exit_code == 0, result.output
    assert set(server.folders) == {"ncclscope"}
    assert server.datasources["ncclscope-prometheus"]["url"] == "http://prometheus:9090"
    assert set(server.dashboards) == set(dashboards())
    assert {each["meta"]["folderUid"] for each in server.dashboards.values()} == {"ncclscope"}
    assert set(server.rules) == {rule["uid"] for rule in rule_group()["rules"]}
    assert server.intervals == {"ncclscope": 10}
    assert all(server.disabled_provenance), "what is pushed stays editable"
    assert "unchanged" not in result.output


def test_a_second_push_changes_nothing(server: FakeGrafana, url: str) -> None:
    push(url, *PROMETHEUS, "--webhook", "http://hook")
    server.calls.clear()
    result = push(url, *PROMETHEUS, "--webhook", "http://hook")
    assert result.exit_code == 0, result.output
    assert server.writes == []
    assert all(line.startswith("unchanged") for line in result.output.splitlines())


def test_what_somebody_changed_is_put_right_and_nothing_else(server: FakeGrafana, url: str) -> None:
    push(url, *PROMETHEUS)
    server.dashboards["ncclscope-job"]["dashboard"]["title"] = "mine"
    server.rules["ncclscope-hang"]["for"] = "1h"
    server.calls.clear()
    result = push(url, *PROMETHEUS)
    assert server.writes == [
        ("POST", "/dashboards/db"),
        ("PUT", "/v1/provisioning/folder/ncclscope/rule-groups/ncclscope"),
    ]
    assert server.dashboards["ncclscope-job"]["dashboard"]["title"] == "ncclscope / Job"
    assert server.rules["ncclscope-hang"]["for"] == "0s"
    assert [line for line in result.output.splitlines() if line.startswith("updated")] == [
        "updated    dashboard ncclscope-job",
        "updated    alert rules ncclscope",
    ]


def test_a_rule_that_was_deleted_comes_back_and_one_of_an_older_version_goes(server: FakeGrafana, url: str) -> None:
    push(url, *PROMETHEUS)
    gone = server.rules.pop("ncclscope-hang")
    server.rules["ncclscope-old"] = {**gone, "uid": "ncclscope-old"}
    assert push(url, *PROMETHEUS).exit_code == 0
    assert set(server.rules) == {rule["uid"] for rule in rule_group()["rules"]}


def test_a_dashboard_that_was_moved_comes_back_to_its_folder(server: FakeGrafana, url: str) -> None:
    push(url, *PROMETHEUS)
    server.dashboards["ncclscope-job"]["meta"]["folderUid"] = "elsewhere"
    push(url, *PROMETHEUS)
    assert server.dashboards["ncclscope-job"]["meta"]["folderUid"] == "ncclscope"


def test_alerts_follow_grafanas_own_policies_unless_a_webhook_is_named(server: FakeGrafana, url: str) -> None:
    push(url, *PROMETHEUS)
    assert server.contact_points == {}
    assert all("notification_settings" not in rule for rule in server.rules.values())
    push(url, *PROMETHEUS, "--webhook", "http://hook")
    assert server.contact_points["ncclscope-webhook"]["settings"]["url"] == "http://hook"
    assert {rule["notification_settings"]["receiver"] for rule in server.rules.values()} == {"ncclscope-webhook"}
    push(url, *PROMETHEUS, "--webhook", "http://other")
    assert server.contact_points["ncclscope-webhook"]["settings"]["url"] == "http://other"


def test_an_existing_data_source_is_used_and_left_alone(server: FakeGrafana, url: str) -> None:
    server.datasources["mimir"] = {"uid": "mimir", "name": "Mimir", "type": "prometheus", "url": "http://mimir"}
    result = push(url, "--datasource", "mimir")
    assert result.exit_code == 0, result.output
    assert list(server.datasources) == ["mimir"]
    steps = [step for rule in server.rules.values() for step in rule["data"]]
    assert {step["datasourceUid"] for step in steps} == {"mimir", "__expr__"}
    chosen = server.dashboards["ncclscope-job"]["dashboard"]["templating"]["list"][0]["current"]
    assert chosen["value"] == "mimir"


def test_the_address_of_the_live_page_reaches_links_and_runbooks(server: FakeGrafana, url: str) -> None:
    push(url, *PROMETHEUS, "--live-page", "https://nccl.example/")
    text = json.dumps([server.dashboards, server.rules])
    assert "localhost:9798" not in text
    assert "https://nccl.example/runbooks#hang" in text


def test_a_grafana_below_a_path_is_reached(server: FakeGrafana) -> None:
    with serving(server, prefix="/grafana") as address:
        assert push(f"{address}/", *PROMETHEUS).exit_code == 0
    assert server.dashboards


def test_the_token_may_come_from_a_file(url: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    command = ["grafana", "push", "--url", url, "--token-file", str(file), *PROMETHEUS]
    assert CliRunner().invoke(main, command).exit_code == 0


def refusal(result: Result) -> str:
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    return result.output


def test_a_wrong_token_is_said(url: str) -> None:
    assert "The token needs the role Admin" in refusal(push(url, *PROMETHEUS, token="wrong"))


def test_a_missing_data_source_is_said_with_what_to_do(server: FakeGrafana, url: str) -> None:
    assert "--prometheus URL" in refusal(push(url))
    assert server.dashboards == {}


def test_a_taken_name_is_said(server: FakeGrafana, url: str) -> None:
    server.folders["other"] = {"uid": "other", "title": "ncclscope"}
    assert "rename it" in refusal(push(url, *PROMETHEUS))
    server.folders.clear()
    server.dashboards["mine"] = {"dashboard": {"title": "ncclscope / Job"}, "meta": {}}
    assert "another one of that title" in refusal(push(url, *PROMETHEUS))
    server.datasources = {"mine": {"uid": "mine", "name": "ncclscope"}}
    assert "--datasource UID" in refusal(push(url, *PROMETHEUS))


def test_a_server_that_is_none_is_said(server: FakeGrafana, url: str) -> None:
    assert "no Grafana answers" in refusal(push("http://127.0.0.1:9", *PROMETHEUS))
    assert "not an address" in refusal(push("ftp://grafana", *PROMETHEUS))
    server.answers_html = True
    assert "login page" in refusal(push(url, *PROMETHEUS))
    server.answers_html = False
    server.is_well = False
    assert "database is not there" in refusal(push(url, *PROMETHEUS))


def test_both_ways_to_name_a_data_source_are_refused(url: str) -> None:
    assert push(url, *PROMETHEUS, "--datasource", "mimir").exit_code == 2


def test_no_token_is_a_usage_error(url: str) -> None:
    assert CliRunner().invoke(main, ["grafana", "push", "--url", url]).exit_code == 2


def test_an_answer_without_a_body_is_a_success(server: FakeGrafana, url: str) -> None:
    """Deleting answers 204 without a body, which the transport takes for broken JSON."""
    server.answer = lambda method, path, body: (204, None)  # type: ignore[method-assign]
    answer = HttpGrafana(url, TOKEN).call("DELETE", "/v1/provisioning/alert-rules/x")
    assert (answer.status, answer.body) == (200, None)
