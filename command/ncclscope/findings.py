"""`ncclscope findings` and `ncclscope settings`: what a person tells a running service."""

from __future__ import annotations

import json
import re
import time
from typing import Any, Final

import click

from ncclscope.service_port import ask, service_options
from ncclscope_agent.credentials import Credentials
from ncclscope_service.detect.settings import parse_assignment
from ncclscope_wire.errors import ConfigError

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_CONTEXT: Final = {"help_option_names": ["-h", "--help"]}


def duration_seconds(text: str) -> float:
    """Seconds of a duration such as 90s, 30m, 2h or 7d.

    Raises:
        click.BadParameter: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is not a time such as 90s, 30m, 2h or 7d")
    return float(found[1]) * _SECONDS[found[2]]


def _seconds(_: click.Context, __: click.Parameter, text: str) -> float:
    return duration_seconds(text)


_by = click.option("--by", envvar="USER", help="Who it is, for others to see; default: $USER. A token's name wins.")
_note = click.option("--note", default="", help="Why, for others to see.")


@click.group(context_settings=_CONTEXT)
def findings() -> None:
    """List, acknowledge and mute the findings of a running service."""


@findings.command("list")
@click.option("--job", help="Only this job.")
@click.option("--all", "with_closed", is_flag=True, help="Also those that are over.")
@service_options
def list_findings(job: str | None, with_closed: bool, service: str, credentials: Credentials) -> None:
    """Print findings and mutes with their ids, the open ones first."""
    for each in json.loads(ask(service, "/api/findings", credentials=credentials)):
        if job in {None, each["job"]} and (with_closed or each["until_ns"] is None):
            click.echo("\n".join(_lines_of_finding(each)))
    for mute in json.loads(ask(service, "/api/findings/marks", credentials=credentials))["mutes"]:
        if mute["finding"] is None:
            click.echo(f"{mute['id']}  {_words_of_mute(mute)}")


@findings.command()
@click.argument("finding", metavar="ID")
@_note
@_by
@service_options
def ack(finding: str, note: str, by: str | None, service: str, credentials: Credentials) -> None:
    """Acknowledge the finding ID: somebody looks after it, until it is over."""
    body = {"action": "acknowledge", "finding": finding, "note": note, "by": by or ""}
    ask(service, "/api/findings/mark", method="POST", body=body, credentials=credentials)
    click.echo(f"{finding} acknowledged")


@findings.command()
@click.argument("finding", metavar="[ID]", required=False)
@click.option(
    "--for",
    "seconds",
    required=True,
    metavar="TIME",
    callback=_seconds,
    help="How long, for instance 90s, 30m, 2h or 7d.",
)
@click.option("--kind", default="", help="Instead of ID: findings of this kind, for instance late_rank.")
@click.option("--job", default="", help="Findings of jobs that this pattern fits.")
@click.option("--ranks", default="", metavar="N,N", help="Findings that name one of these ranks.")
@click.option("--hosts", default="", metavar="HOST,HOST", help="The same with hosts or patterns of them.")
@_note
@_by
@service_options
def mute(
    *,
    finding: str | None,
    seconds: float,
    kind: str,
    job: str,
    ranks: str,
    hosts: str,
    note: str,
    by: str | None,
    service: str,
    credentials: Credentials,
) -> None:
    """Mute the finding ID, or all that fit the options, for a time: they notify nobody and fire no alert."""
    if not re.fullmatch(r"(\d+(,\d+)*)?", ranks):
        raise click.UsageError(f"--ranks: {ranks!r} is not N,N")
    body = {
        "action": "mute",
        "finding": finding or "",
        "seconds": seconds,
        "kind": kind,
        "job": job,
        "ranks": [int(each) for each in ranks.split(",") if each],
        "hosts": [each for each in hosts.split(",") if each],
        "note": note,
        "by": by or "",
    }
    marks = json.loads(ask(service, "/api/findings/mark", method="POST", body=body, credentials=credentials))
    newest = marks["mutes"][-1]
    click.echo(f"{newest['id']}  {_words_of_mute(newest)}")


@findings.command()
@click.argument("id", metavar="ID")
@_by
@service_options
def clear(id: str, by: str | None, service: str, credentials: Credentials) -> None:  # noqa: A002
    """Take back what was said of the finding ID, or the mute ID."""
    body = {"action": "clear", "mute" if id.startswith("mute-") else "finding": id, "by": by or ""}
    ask(service, "/api/findings/mark", method="POST", body=body, credentials=credentials)
    click.echo(f"{id} cleared")


@click.command(context_settings=_CONTEXT)
@click.argument("assignments", nargs=-1, metavar="[NAME=NUMBER]...")
@click.option("--reset", multiple=True, metavar="NAME", help="As given at the start again. Repeatable.")
@_by
@service_options
def settings(
    assignments: tuple[str, ...], reset: tuple[str, ...], by: str | None, service: str, credentials: Credentials
) -> None:
    """Print the thresholds of a running service's detectors that are not as by default, or change some."""
    try:
        values: dict[str, object] = {**dict(map(parse_assignment, assignments)), **dict.fromkeys(reset)}
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    if values:
        body = {"values": values, "by": by or ""}
        answer = ask(service, "/api/settings/change", method="POST", body=body, credentials=credentials)
    else:
        answer = ask(service, "/api/settings", credentials=credentials)
    given = [line for each in json.loads(answer)["thresholds"] for line in _lines_of_threshold(each)]
    click.echo("\n".join(given) or "all thresholds are as by default")


def _lines_of_finding(finding: dict[str, Any]) -> list[str]:
    over = "" if finding["until_ns"] is None else f", over since {_moment(finding['until_ns'])}"
    lines = [
        f"{finding['id']}  {finding['severity']}, job {finding['job']}, since {_moment(finding['since_ns'])}{over}",
        f"    {finding['summary']}",
    ]
    if (mark := finding["acknowledged"]) is not None:
        lines.append(f"    acknowledged{_by_whom(mark)}")
    if (muted := finding["muted"]) is not None:
        lines.append(f"    muted until {_moment(muted['until_ns'])}{_by_whom(muted)}")
    return lines


def _words_of_mute(mute: dict[str, Any]) -> str:
    names = [f"{name} {mute[name]}" for name in ("finding", "kind", "job") if mute[name]]
    names += [f"{name} {','.join(map(str, mute[name]))}" for name in ("ranks", "hosts") if mute[name]]
    return f"{', '.join(names)} muted until {_moment(mute['until_ns'])}{_by_whom(mute)}"


def _by_whom(mark: dict[str, Any]) -> str:
    return (f" by {mark['by']}" if mark["by"] else "") + (f": {mark['note']}" if mark["note"] else "")


def _moment(at_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ns // 1_000_000_000))


def _lines_of_threshold(threshold: dict[str, Any]) -> list[str]:
    name, default = threshold["name"], threshold["default"]
    lines: list[str] = []
    if threshold["changed"] is not None:
        before = default if threshold["started"] is None else threshold["started"]
        lines.append(f"{name} = {threshold['changed']:g}  (changed; at the start {before:g}, default {default:g})")
    elif threshold["started"] is not None:
        lines.append(f"{name} = {threshold['started']:g}  (default {default:g})")
    return lines + [f'job."{pattern}".{name} = {value:g}' for pattern, value in threshold["jobs"].items()]
