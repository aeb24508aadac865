"""Delivers notifications of findings: one task per receiver, one attempt at a time; nothing else waits for it.

A receiver is a webhook, which gets a POST with JSON, or anything that Apprise knows (`apprise_sender`).
"""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from enum import Enum, auto
from functools import partial
from typing import IO, Final

import anyio
import orjson
import structlog
from anyio import to_thread

from ncclscope_service.keep.service_state import Outbox
from ncclscope_service.metrics.scrape import NAMED_RANKS, culprits_label
from ncclscope_service.show.finding_events import FindingEvent
from ncclscope_service.show.health import ReceiverView
from ncclscope_service.store.records import Severity

_log = structlog.get_logger(__name__)

_PAUSES_SECONDS: Final = (1, 2, 4, 8, 16, 32, 60)
"""Before each further attempt: two minutes in all."""
_TIMEOUT_SECONDS: Final = 10.0
_TRY_AGAIN: Final = frozenset({408, 425, 429})


class Answer(Enum):
    """Result of an attempt to deliver."""

    TAKEN = auto()
    LATER = auto()
    """No answer, or a request to try again."""
    NEVER = auto()
    """This message is refused: the same again would be refused again."""


Send = Callable[[FindingEvent, str], tuple[Answer, str]]
"""Delivers an event, with the address of the live page; blocks. Gives the answer and its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSettings:
    """One receiver. The address may hold a secret: it is neither logged nor a label."""

    url: str
    least: Severity = Severity.WARNING
    send: Send | None = None
    """None: a POST of JSON to the address."""


class Notifier:
    """Reports findings to the receivers, and counts what could not be delivered."""

    def __init__(
        self, receivers: Sequence[ReceiverSettings], on_settled: Callable[[str, FindingEvent, bool], None]
    ) -> None:
        """`on_settled` is called with the receiver, the event and whether it was delivered, when it waits no more."""
        self.page = ""
        """Address of the live page, without a slash at its end."""
        self._on_settled = on_settled
        self._receivers = [
            _Receiver(Outbox(name, settings.least), settings.send or partial(_post, settings.url))
            for settings, name in zip(receivers, _names(receivers), strict=True)
        ]

    def wake(self) -> None:
        """Delivers what is in the outboxes now."""
        for receiver in self._receivers:
            receiver.has_news.set()

    def outboxes(self) -> dict[str, Outbox]:
        """The outbox of each receiver, by its name."""
        return {receiver.outbox.name: receiver.outbox for receiver in self._receivers}

    def adopt(self, outboxes: Mapping[str, Outbox]) -> None:
        """Goes on with these, by name, in the place of its own."""
        for receiver in self._receivers:
            receiver.outbox = outboxes[receiver.outbox.name]

    def views(self) -> tuple[ReceiverView, ...]:
        """How the deliveries went so far."""
        return tuple(receiver.view() for receiver in self._receivers)

    async def run(self) -> None:
        """Delivers until it is cancelled; what then waits is in the state, and delivered after a restart."""
        async with anyio.create_task_group() as tasks:
            for receiver in self._receivers:
                tasks.start_soon(self._deliver_for_ever, receiver)

    async def _deliver_for_ever(self, receiver: _Receiver) -> None:
        while True:
            await receiver.has_news.wait()
            receiver.has_news.clear()
            while (event := receiver.outbox.first()) is not None:
                await self._deliver(receiver, event)

    async def _deliver(self, receiver: _Receiver, event: FindingEvent) -> None:
        """Tries until it is delivered, refused or given up; newer news of the finding takes its place meanwhile."""
        answer = Answer.LATER
        for pause in (*_PAUSES_SECONDS, None):
            send = partial(receiver.send, event, self.page)
            answer, reason = await to_thread.run_sync(send, abandon_on_cancel=True)
            if answer is not Answer.TAKEN:
                _log.warning(
                    "notification_failed",
                    receiver=receiver.outbox.name,
                    finding=event.id,
                    answer=answer.name,
                    reason=reason,
                )
            if answer is not Answer.LATER or pause is None:
                break
            receiver.retries += 1
            await anyio.sleep(pause)
            event = receiver.outbox.newest(event.id) or event
        is_newest = receiver.outbox.newest(event.id) in (None, event)
        receiver.outbox.settle(event.id, event.event if is_newest else "", is_delivered=answer is Answer.TAKEN)
        if is_newest:
            self._on_settled(receiver.outbox.name, event, answer is Answer.TAKEN)


class _Receiver:
    def __init__(self, outbox: Outbox, send: Send) -> None:
        self.outbox = outbox
        self.send = send
        self.has_news = asyncio.Event()
        self.retries = 0

    def view(self) -> ReceiverView:
        outcomes = dict(self.outbox.outcomes)
        return ReceiverView(name=self.outbox.name, outcomes=outcomes, retries=self.retries, queued=len(self.outbox))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive as a GET without its body."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        """None: the redirect is an error."""
        del req, fp, code, msg, headers, newurl
        return None


def _post(url: str, event: FindingEvent, page: str) -> tuple[Answer, str]:
    """Sends an event as JSON."""
    body = {
        "version": 1,
        "event": event.event,
        "id": event.id,
        "finding": event.finding,
        "runbook": runbook_of(event, page),
        "page": page_of(event, page),
    }
    data = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS, default=str)
    headers = {"Content-Type": "application/json", "User-Agent": "ncclscope"}
    request = urllib.request.Request(url, data=data, headers=headers, method="POST")
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT_SECONDS) as answer:
            return Answer.TAKEN, str(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            is_temporary = error.code in _TRY_AGAIN or error.code >= 500
            return (Answer.LATER if is_temporary else Answer.NEVER), f"HTTP {error.code}"
    except (OSError, http.client.HTTPException) as error:
        return Answer.LATER, str(error) or type(error).__name__


def runbook_of(event: FindingEvent, page: str) -> str:
    """The part of the runbooks that says what to do."""
    return f"{page}/runbooks#{event.finding.kind}"


def page_of(event: FindingEvent, page: str) -> str:
    """The address at which the live page shows the finding."""
    finding = event.finding
    ranks = culprits_label([str(rank) for rank in finding.ranks], NAMED_RANKS)
    return f"{page}/#/job/{urllib.parse.quote(finding.job, safe='')}/finding/{finding.kind}/{ranks}"


def _names(receivers: Sequence[ReceiverSettings]) -> list[str]:
    """The host of each webhook and the scheme of each other address, with a number if several have the same."""
    seen: Counter[str] = Counter()
    names: list[str] = []
    for each in receivers:
        address = urllib.parse.urlsplit(each.url)
        name = (address.hostname if each.send is None else address.scheme) or "unknown"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names
