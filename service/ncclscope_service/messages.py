"""Notifications as the bodies of webhooks: plain JSON, or as Slack (Mattermost, Rocket.Chat) takes them.

Source: Slack, "Sending messages using incoming webhooks" and "Reference: secondary message attachments".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from ncclscope_service.finding_news import FindingEvent, News

_COLOURS: Final = {"critical": "#cf3348", "warning": "#b86e00", "info": "#4a6cf0"}
_HEALED: Final = "#16956f"
_HEADINGS: Final = {News.OPENED: "", News.CHANGED: "changed: ", News.CLOSED: "ended: "}
_SECOND_NS: Final = 1_000_000_000


class Form(StrEnum):
    """What a receiver expects."""

    JSON = "json"
    SLACK = "slack"


def message(event: FindingEvent, form: Form, page: str) -> dict[str, object]:
    """The body for one piece of news; `page` is where people reach the live page, without a slash at its end."""
    return _MESSAGES[form](event, page)


def _plain(event: FindingEvent, page: str) -> dict[str, object]:
    return {
        "version": 1,
        "event": event.event,
        "id": event.id,
        "finding": event.finding,
        "runbook": _runbook(event, page),
        "page": page + "/",
    }


def _slack(event: FindingEvent, page: str) -> dict[str, object]:
    finding = event.finding
    is_over = event.event is News.CLOSED
    fields = (
        ("Job", finding.job),
        ("Severity", finding.severity),
        ("Ranks", ", ".join(str(rank) for rank in finding.ranks)),
        ("Hosts", ", ".join(finding.hosts)),
        ("Group", finding.communicator or ""),
        ("Lasted", _lasted(event)),
    )
    heading = f"{_HEADINGS[event.event]}{finding.kind.replace('_', ' ')} in job {finding.job}"
    return {
        "text": f"ncclscope, {heading}",
        "attachments": [
            {
                "color": _HEALED if is_over else _COLOURS.get(finding.severity, _COLOURS["info"]),
                "title": f"Runbook: {finding.kind}",
                "title_link": _runbook(event, page),
                "text": finding.summary,
                "fallback": f"{heading}: {finding.summary}",
                "fields": [{"title": name, "value": value, "short": True} for name, value in fields if value],
                "ts": (finding.since_ns if finding.until_ns is None else finding.until_ns) // _SECOND_NS,
            }
        ],
    }


def _runbook(event: FindingEvent, page: str) -> str:
    return f"{page}/runbooks#{event.finding.kind}"


def _lasted(event: FindingEvent) -> str:
    finding = event.finding
    if finding.until_ns is None:
        return ""
    seconds = max(0, finding.until_ns - finding.since_ns) // _SECOND_NS
    return f"{seconds // 60} min {seconds % 60} s" if seconds >= 60 else f"{seconds} s"


_MESSAGES: Final[Mapping[Form, Callable[[FindingEvent, str], dict[str, object]]]] = MappingProxyType(
    {Form.JSON: _plain, Form.SLACK: _slack}
)
