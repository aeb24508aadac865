"""Who is told of findings, as the command line says it."""

from __future__ import annotations

from collections.abc import Sequence

import click
import pytest
from click.testing import CliRunner, Result

from ncclscope.notifications import Notifications, notification_options
from ncclscope_service.messages import Form
from ncclscope_service.rows import Severity

ASKED: list[Notifications] = []


@click.command()
@notification_options
def command(notifications: Notifications) -> None:
    """Keeps what it was given."""
    ASKED.append(notifications)


def asked(arguments: Sequence[str], variables: dict[str, str] | None = None) -> Notifications:
    result = run(arguments, variables)
    assert result.exit_code == 0, result.output
    return ASKED.pop()


def run(arguments: Sequence[str], variables: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(command, list(arguments), env=variables or {})


def test_nobody_is_told_unless_somebody_is_named() -> None:
    assert asked([]).for_service() == ()


def test_receivers_get_the_form_that_they_were_named_for() -> None:
    given = asked(
        ["--webhook", "http://a/x", "--slack-webhook", "https://b/y", "--webhook", "http://c",
         "--notify-from", "critical", "--webhook-timeout", "3", "--webhook-attempts", "2",
         "--public-url", "http://scope"]
    )  # fmt: skip
    receivers = given.for_service()
    assert [(each.url, each.form) for each in receivers] == [
        ("http://a/x", Form.JSON), ("http://c", Form.JSON), ("https://b/y", Form.SLACK),
    ]  # fmt: skip
    assert {(each.least, each.timeout_seconds, each.limits.attempts) for each in receivers} == {
        (Severity.CRITICAL, 3, 2)
    }
    assert given.public_url == "http://scope"


def test_addresses_with_secrets_may_come_from_variables() -> None:
    given = asked([], {"NCCLSCOPE_WEBHOOK": "http://a/1 http://a/2", "NCCLSCOPE_SLACK_WEBHOOK": "http://b/3"})
    assert [each.url for each in given.for_service()] == ["http://a/1", "http://a/2", "http://b/3"]


@pytest.mark.parametrize("option", ["--webhook", "--slack-webhook", "--public-url"])
def test_an_address_that_is_none_is_refused_without_being_repeated(option: str) -> None:
    result = run([option, "hooks.example/secret"])
    assert result.exit_code == 2
    assert "http://" in result.output
    assert "secret" not in result.output
