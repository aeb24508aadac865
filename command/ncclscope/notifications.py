"""The options that say who is told of findings, for `serve`."""

from __future__ import annotations

import functools
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

if TYPE_CHECKING:
    from ncclscope_service.webhook import WebhookSettings

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notifications:
    """Receivers as given."""

    webhooks: tuple[str, ...]
    slack_webhooks: tuple[str, ...]
    least: str
    timeout_seconds: float
    attempts: int
    public_url: str | None

    def for_service(self) -> tuple[WebhookSettings, ...]:
        """As the service takes them."""
        from ncclscope_service.messages import Form  # noqa: PLC0415  (needs [service])
        from ncclscope_service.outbox import OutboxLimits  # noqa: PLC0415
        from ncclscope_service.rows import Severity  # noqa: PLC0415
        from ncclscope_service.webhook import WebhookSettings  # noqa: PLC0415

        return tuple(
            WebhookSettings(
                url=url,
                form=form,
                least=Severity(self.least),
                timeout_seconds=self.timeout_seconds,
                limits=OutboxLimits(attempts=self.attempts),
            )
            for form, urls in ((Form.JSON, self.webhooks), (Form.SLACK, self.slack_webhooks))
            for url in urls
        )


def notification_options(command: Callable[P, R]) -> Callable[P, R]:
    """Adds the options; the command gets them as `notifications`."""

    @functools.wraps(command)
    def with_notifications(*args: P.args, **kwargs: P.kwargs) -> R:
        names = ("webhooks", "slack_webhooks", "least", "timeout_seconds", "attempts", "public_url")
        given = {name: kwargs.pop(name) for name in names}
        kwargs["notifications"] = Notifications(**given)  # type: ignore[arg-type]  # click has checked the types
        return command(*args, **kwargs)

    decorated: Callable[P, R] = with_notifications
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def _checked(_: click.Context, option: click.Parameter, given: str | tuple[str, ...] | None) -> object:
    for url in (given,) if isinstance(given, str) else given or ():
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            # The address is not repeated: it may hold a secret.
            raise click.BadParameter("an address begins with http:// or https:// and has a host", param=option)
    return given


def _limit(
    flag: str, name: str, bounds: click.IntRange | click.FloatRange, default: float, unit: str, text: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    return click.option(flag, name, type=bounds, default=default, show_default=True, metavar=unit, help=text)


_OPTIONS = (
    click.option(
        "--webhook",
        "webhooks",
        multiple=True,
        metavar="URL",
        envvar="NCCLSCOPE_WEBHOOK",
        callback=_checked,
        help="Gets a POST with JSON when a finding opens, changes or closes; may be repeated.",
    ),
    click.option(
        "--slack-webhook",
        "slack_webhooks",
        multiple=True,
        metavar="URL",
        envvar="NCCLSCOPE_SLACK_WEBHOOK",
        callback=_checked,
        help="The same in the form that Slack, Mattermost and Rocket.Chat take.",
    ),
    click.option(
        "--notify-from",
        "least",
        type=click.Choice(["info", "warning", "critical"]),
        default="warning",
        show_default=True,
        help="Findings that hurry less are not told.",
    ),
    _limit(
        "--webhook-timeout",
        "timeout_seconds",
        click.FloatRange(min=0.1, max=300),
        10.0,
        "SECONDS",
        "Patience with one attempt to deliver.",
    ),
    _limit(
        "--webhook-attempts",
        "attempts",
        click.IntRange(min=1, max=100),
        8,
        "N",
        "Attempts before a notification is given up, with doubling pauses from 1 s to 60 s.",
    ),
    click.option(
        "--public-url",
        metavar="URL",
        callback=_checked,
        help="Where people reach the live page, for links in notifications; default: the address of --http.",
    ),
)
