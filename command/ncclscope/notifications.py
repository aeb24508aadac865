"""The options that say who gets notifications of findings, for `serve`."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from ncclscope.extras import require_notify, require_otlp
from ncclscope.options import gathered

if TYPE_CHECKING:
    from ncclscope_service.serve.notify import ReceiverSettings
    from ncclscope_service.serve.otlp import Push


@dataclass(frozen=True, slots=True, kw_only=True)
class Notifications:
    """Receivers as given."""

    webhooks: tuple[str, ...]
    apprise_urls: tuple[str, ...]
    otlp_url: str | None
    least: str
    public_url: str | None

    def for_service(self) -> tuple[ReceiverSettings, ...]:
        """As the service takes them.

        Raises:
            click.ClickException: the package for addresses of Apprise's or --otlp is not installed.
            ConfigError: an address of Apprise's is none.
        """
        from ncclscope_service.serve.notify import ReceiverSettings  # noqa: PLC0415  (needs [service])
        from ncclscope_service.store.records import Severity  # noqa: PLC0415

        least = Severity(self.least)
        receivers = [ReceiverSettings(url=url, least=least) for url in self.webhooks]
        if self.apprise_urls:
            require_notify()
            from ncclscope_service.serve.apprise_sender import apprise_sender  # noqa: PLC0415  (needs [notify])

            receivers += [ReceiverSettings(url=url, least=least, send=apprise_sender(url)) for url in self.apprise_urls]
        if self.otlp_url is not None:
            require_otlp()
            from ncclscope_service.serve.otlp import otlp_sender  # noqa: PLC0415  (needs [otlp])

            receivers.append(ReceiverSettings(url=self.otlp_url, least=Severity.INFO, send=otlp_sender(self.otlp_url)))
        return tuple(receivers)

    def pushers(self) -> tuple[Push, ...]:
        """Exporters of metrics; call `for_service` first, which checks that the package is there."""
        if self.otlp_url is None:
            return ()
        from ncclscope_service.serve.otlp import otlp_metrics  # noqa: PLC0415  (needs [otlp])

        return (otlp_metrics(self.otlp_url),)


def _checked(_: click.Context, option: click.Parameter, given: str | tuple[str, ...] | None) -> object:
    for url in (given,) if isinstance(given, str) else given or ():
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            # The address is not repeated: it may hold a secret.
            raise click.BadParameter("an address begins with http:// or https:// and has a host", param=option)
    return given


def _secret(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> object:
    """Refuses what the list of processes would show to everybody on the machine."""
    if context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
        raise click.BadParameter(
            "an address may hold a secret, and everybody on this machine sees command lines: put it into the variable "
            f"{option.envvar} or into the configuration file",
            param=option,
        )
    return given if option.name == "apprise_urls" else _checked(context, option, given)


notification_options = gathered(
    "notifications",
    Notifications,
    click.option(
        "--webhook",
        "webhooks",
        multiple=True,
        metavar="URL",
        envvar="NCCLSCOPE_WEBHOOK",
        callback=_secret,
        help="Gets a POST with JSON when a finding opens, changes or closes. Only in NCCLSCOPE_WEBHOOK or the file of "
        "settings: an address may hold a secret.",
    ),
    click.option(
        "--notify",
        "apprise_urls",
        multiple=True,
        metavar="URL",
        envvar="NCCLSCOPE_NOTIFY",
        callback=_secret,
        help="The same by Slack, mail and many others: an address of Apprise's, for instance slack://... Only in "
        "NCCLSCOPE_NOTIFY or the configuration file (needs ncclscope[notify]).",
    ),
    click.option(
        "--otlp",
        "otlp_url",
        metavar="URL",
        envvar="NCCLSCOPE_OTLP",
        callback=_checked,
        help="A collector of OpenTelemetry that gets metrics, under the names of /metrics, and findings as log "
        "records; OTLP over HTTP, for instance http://collector:4318 (needs ncclscope[otlp]).",
    ),
    click.option(
        "--notify-from",
        "least",
        type=click.Choice(["info", "warning", "critical"]),
        default="warning",
        show_default=True,
        help="Findings that are less severe are not reported.",
    ),
    click.option(
        "--public-url",
        metavar="URL",
        callback=_checked,
        help="Address of the live page in links of notifications; default: --http.",
    ),
)
"""Adds the options; the command gets them as `notifications`."""
