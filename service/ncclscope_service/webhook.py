"""Delivers notifications to webhooks: one task per receiver, one attempt at a time, nothing else waits for it."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import Message
from typing import IO, Final

import anyio
import orjson
import structlog
from anyio import to_thread

from ncclscope_service.finding_news import FindingEvent
from ncclscope_service.health import ReceiverView
from ncclscope_service.messages import Form, message
from ncclscope_service.outbox import Answer, Outbox, OutboxLimits
from ncclscope_service.rows import Severity

_log = structlog.get_logger(__name__)

_TRY_AGAIN: Final = frozenset({408, 425, 429})
_LAST_SECONDS: Final = 5.0
"""For what still waits when the service is stopped; what stops services kills them after 10 s (Docker) or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """One receiver. The address may hold a secret: it is neither logged nor a label."""

    url: str
    form: Form = Form.JSON
    least: Severity = Severity.WARNING
    timeout_seconds: float = 10.0
    limits: OutboxLimits = field(default_factory=OutboxLimits)


class Notifier:
    """Tells the receivers of findings; what it could not tell is counted."""

    def __init__(
        self,
        receivers: Sequence[WebhookSettings],
        page: str,
        on_settled: Callable[[str, FindingEvent, bool], None] | None = None,
    ) -> None:
        """`page`: where people reach the live page. `on_settled` is told which receiver needs no longer be told of
        which event, and whether it took it."""
        names = _names(receivers)
        self._receivers = [
            _Receiver(settings, Outbox(name, settings.least, settings.limits), page.rstrip("/"), on_settled)
            for settings, name in zip(receivers, names, strict=True)
        ]

    def offer(self, events: Iterable[FindingEvent]) -> None:
        """Returns at once; the events are delivered by `run`."""
        for event in events:
            for receiver in self._receivers:
                receiver.outbox.offer(event)
        self.wake()

    def wake(self) -> None:
        """There may be something in the outboxes."""
        for receiver in self._receivers:
            receiver.wake()

    def outboxes(self) -> dict[str, Outbox]:
        """What waits for each receiver, by its name."""
        return {receiver.outbox.name: receiver.outbox for receiver in self._receivers}

    def adopt(self, outboxes: Mapping[str, Outbox]) -> None:
        """Goes on with these, by name, in the place of its own."""
        for receiver in self._receivers:
            receiver.outbox = outboxes[receiver.outbox.name]

    def views(self) -> tuple[ReceiverView, ...]:
        """How the deliveries went so far."""
        return tuple(receiver.outbox.view() for receiver in self._receivers)

    async def run(self) -> None:
        """Delivers until it is cancelled; what then waits is tried once more for five seconds, or counted as lost."""
        try:
            async with anyio.create_task_group() as tasks:
                for receiver in self._receivers:
                    tasks.start_soon(receiver.run)
        finally:
            with anyio.move_on_after(_LAST_SECONDS, shield=True):
                async with anyio.create_task_group() as tasks:
                    for receiver in self._receivers:
                        tasks.start_soon(receiver.try_all_once)
            for receiver in self._receivers:
                receiver.give_up()


class _Receiver:
    def __init__(
        self,
        settings: WebhookSettings,
        outbox: Outbox,
        page: str,
        on_settled: Callable[[str, FindingEvent, bool], None] | None,
    ) -> None:
        self.outbox = outbox
        self._on_settled = on_settled
        self._settings = settings
        self._page = page
        self._news = anyio.Event()

    def wake(self) -> None:
        self._news.set()

    async def run(self) -> None:
        while True:
            self._news = anyio.Event()
            while (event := self.outbox.due(time.monotonic_ns())) is not None:
                await self._attempt(event)
            pause_ns = self.outbox.pause_ns(time.monotonic_ns())
            with anyio.move_on_after(None if pause_ns is None else pause_ns * 1e-9):
                await self._news.wait()

    async def try_all_once(self) -> None:
        """Delivers what waits, oldest first, up to the first that is not taken: a receiver that is away stays so."""
        while (event := self.outbox.first()) is not None and await self._attempt(event) is not Answer.LATER:
            pass

    def give_up(self) -> None:
        """Counts what still waits as dropped, and says so: nobody will deliver it."""
        if lost := self.outbox.drop_all():
            _log.warning("notifications_lost", receiver=self.outbox.name, notifications=lost)

    async def _attempt(self, event: FindingEvent) -> Answer:
        body = orjson.dumps(
            message(event, self._settings.form, self._page), option=orjson.OPT_NON_STR_KEYS, default=str
        )
        answer, why = await to_thread.run_sync(
            lambda: _post(self._settings.url, body, self._settings.timeout_seconds), abandon_on_cancel=True
        )
        self.outbox.answered(event, answer, time.monotonic_ns())
        if self._on_settled is not None and not self.outbox.is_waiting(event.id):
            self._on_settled(self.outbox.name, event, answer is Answer.TAKEN)
        if answer is not Answer.TAKEN:
            _log.warning(
                "notification_failed", receiver=self.outbox.name, finding=event.id, answer=answer.name, reason=why
            )
        return answer


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive as a GET without its body."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        """None: the redirect is an error."""
        del req, fp, code, msg, headers, newurl
        return None


def _post(url: str, body: bytes, timeout_seconds: float) -> tuple[Answer, str]:
    """Sends the body; blocks. Gives what the receiver made of it, and why."""
    headers = {"Content-Type": "application/json", "User-Agent": "ncclscope"}
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout_seconds) as answer:
            return Answer.TAKEN, str(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            is_temporary = error.code in _TRY_AGAIN or error.code >= 500
            return (Answer.LATER if is_temporary else Answer.NEVER), f"HTTP {error.code}"
    except (OSError, http.client.HTTPException) as error:
        return Answer.LATER, str(error) or type(error).__name__


def _names(receivers: Sequence[WebhookSettings]) -> list[str]:
    """The host of each receiver's address, with a number where several have the same."""
    seen: Counter[str] = Counter()
    names: list[str] = []
    for each in receivers:
        host = urllib.parse.urlsplit(each.url).hostname or "unknown"
        seen[host] += 1
        names.append(host if seen[host] == 1 else f"{host}#{seen[host]}")
    return names
