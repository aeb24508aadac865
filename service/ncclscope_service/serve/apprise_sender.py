"""Notifications by Slack, mail, Teams, PagerDuty and a hundred others, with Apprise (the extra `notify`).

*Source:* https://github.com/caronc/apprise/wiki
"""

from __future__ import annotations

import logging
from typing import Final

import apprise

from ncclscope_service.serve.notify import Answer, Send, page_of, runbook_of
from ncclscope_service.show.finding_events import FindingChange, FindingEvent
from ncclscope_wire.errors import ConfigError

_TYPES: Final = {
    "critical": apprise.NotifyType.FAILURE,
    "warning": apprise.NotifyType.WARNING,
    "info": apprise.NotifyType.INFO,
}
_HEADINGS: Final = {FindingChange.OPENED: "", FindingChange.CHANGED: "changed: ", FindingChange.CLOSED: "ended: "}


def apprise_sender(url: str) -> Send:
    """Sends to an address of Apprise's.

    Raises:
        ConfigError: Apprise does not know it; the address is not repeated, since it may hold a secret.
    """
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # what it logs may hold addresses
    target = apprise.Apprise.instantiate(url)
    if target is None:
        raise ConfigError(
            "NCCLSCOPE_NOTIFY: Apprise does not know this address (https://github.com/caronc/apprise/wiki)"
        )

    def send(event: FindingEvent, page: str) -> tuple[Answer, str]:
        is_over = event.event is FindingChange.CLOSED
        kind = apprise.NotifyType.SUCCESS if is_over else _TYPES[event.finding.severity]
        # Declared to be text, it stays text: Slack's <!channel> and the HTML of mails are names in somebody's log here.
        is_taken = target.notify(
            title=_title(event), body=_body(event, page), notify_type=kind, body_format=apprise.NotifyFormat.TEXT
        )
        return (Answer.TAKEN, "taken") if is_taken else (Answer.LATER, "Apprise could not deliver it")

    return send


def _title(event: FindingEvent) -> str:
    finding = event.finding
    return f"{_HEADINGS[event.event]}{finding.kind.replace('_', ' ')} in job {finding.job}"


def _body(event: FindingEvent, page: str) -> str:
    finding = event.finding
    facts = (
        ("severity", finding.severity),
        ("ranks", ", ".join(str(rank) for rank in finding.ranks)),
        ("hosts", ", ".join(finding.hosts)),
        ("group", finding.communicator or ""),
        ("proof", page_of(event, page)),
        ("what to do", runbook_of(event, page)),
    )
    return "\n".join([finding.summary, *(f"{name}: {value}" for name, value in facts if value)])
