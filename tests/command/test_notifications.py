"""Who gets notifications, as the command line says it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
import pytest
from click.testing import CliRunner, Result

from ncclscope.notifications import Notifications, notification_options
from ncclscope_service.store.records import Severity
from ncclscope_wire.errors import ConfigError

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


def test_nobody_gets_any_unless_somebody_is_named() -> None:
    assert asked([]).for_service() == ()


def test_receivers_are_webhooks_or_what_apprise_knows() -> None:
    given = asked(
        ["--notify-from", "critical", "--public-url", "http://scope"],
        {"NCCLSCOPE_WEBHOOK": "http://a/x http://c", "NCCLSCOPE_NOTIFY": "json://b/y"},
    )
    receivers = given.for_service()
    assert [(each.url, each.send is None) for each in receivers] == [
        ("http://a/x", True), ("http://c", True), ("json://b/y", False),
    ]  # fmt: skip
    assert {each.least for each in receivers} == {Severity.CRITICAL}
    assert given.public_url == "http://scope"


def test_addresses_with_secrets_may_come_from_variables() -> None:
    given = asked([], {"NCCLSCOPE_WEBHOOK": "http://a/1 http://a/2", "NCCLSCOPE_NOTIFY": "json://b/3"})
    assert given.webhooks == ("http://a/1", "http://a/2")
    assert given.apprise_urls == ("json://b/3",)


def test_an_address_that_is_none_is_refused_without_being_repeated() -> None:
    for result in (
        run(["--public-url", "hooks.example/secret"]),
        run([], {"NCCLSCOPE_WEBHOOK": "hooks.example/secret"}),
    ):
        assert result.exit_code == 2
        assert "http://" in result.output
        assert "secret" not in result.output


@pytest.mark.parametrize(("option", "variable"), [("--webhook", "NCCLSCOPE_WEBHOOK"), ("--notify", "NCCLSCOPE_NOTIFY")])
def test_an_address_on_the_command_line_is_refused_with_where_to_put_it(option: str, variable: str) -> None:
    result = run([option, "https://hooks.example/token"])
    assert result.exit_code == 2
    assert variable in result.output
    assert "token" not in result.output


def test_an_address_that_apprise_does_not_know_is_refused_without_being_repeated() -> None:
    with pytest.raises(ConfigError, match="Apprise does not know") as caught:
        asked([], {"NCCLSCOPE_NOTIFY": "nosuch://secret"}).for_service()
    assert "secret" not in str(caught.value)


def test_without_the_package_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)  # as Python marks a module that cannot be imported
    with pytest.raises(click.ClickException, match=r"pip install 'ncclscope\[notify\]'"):
        asked([], {"NCCLSCOPE_NOTIFY": "json://b"}).for_service()
