"""Notifications over real HTTP on the loopback: delivered, tried again, refused, given up."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import orjson
import pytest
from anyio import to_thread
from service.show.test_finding_events import LATE

from ncclscope_service.serve import notify
from ncclscope_service.serve.notify import Notifier, ReceiverSettings
from ncclscope_service.show.finding_events import FindingChange, FindingEvent

pytestmark = pytest.mark.asyncio

CLOSED = FindingEvent(event=FindingChange.CLOSED, id="a", finding=LATE)
OPENED = FindingEvent(event=FindingChange.OPENED, id="a", finding=LATE)


@dataclass
class Receiver:
    """A webhook that answers with the given statuses, the last one for ever."""

    statuses: list[int]
    bodies: list[Any] = field(default_factory=list[Any])
    url: str = ""
    release: threading.Event = field(default_factory=threading.Event)
    """Status 0 waits for this before it answers."""
    asked: threading.Event = field(default_factory=threading.Event)
    """Set by the first request that is read."""

    def status(self) -> int:
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]


@contextmanager
def receiving(*statuses: int) -> Generator[Receiver]:
    receiver = Receiver(list(statuses))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            status = receiver.status()
            if status == 0:
                receiver.release.wait(60)
                return
            receiver.bodies.append(orjson.loads(content))
            receiver.asked.set()
            self.send_response(status)
            if status == 302:
                self.send_header("Location", receiver.url)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.release.set()
        server.shutdown()
        thread.join()
        server.server_close()


class Delivery:
    """A notifier with these receivers, and what was settled."""

    def __init__(self, *receivers: ReceiverSettings) -> None:
        self.settled: list[tuple[str, str, bool]] = []
        self.changed = anyio.Event()
        self.notifier = Notifier(receivers, self._settle)
        self.notifier.page = "http://scope"

    def _settle(self, receiver: str, event: FindingEvent, is_delivered: bool) -> None:
        self.settled.append((receiver, event.event, is_delivered))
        self.changed.set()

    def offer(self, *events: FindingEvent) -> None:
        for event in events:
            for outbox in self.notifier.outboxes().values():
                outbox.offer(event)
        self.notifier.wake()

    async def wait_for(self, settled: int) -> None:
        while len(self.settled) < settled:
            self.changed = anyio.Event()
            await self.changed.wait()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.notifier.run)
                yield
                tasks.cancel_scope.cancel()


async def delivered(*receivers: ReceiverSettings, settled: int = 1) -> Delivery:
    """What became of the opening of a finding."""
    delivery = Delivery(*receivers)
    async with delivery.running():
        delivery.offer(OPENED)
        await delivery.wait_for(settled)
    return delivery


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_PAUSES_SECONDS", (0, 0))


async def test_every_receiver_gets_the_finding_and_where_to_look() -> None:
    with receiving(200) as one, receiving(204) as two:
        delivery = await delivered(ReceiverSettings(url=one.url), ReceiverSettings(url=two.url), settled=2)
    for receiver in (one, two):
        (body,) = receiver.bodies
        assert (body["version"], body["event"], body["id"]) == (1, "opened", "a")
        assert body["finding"]["ranks"] == [5]
        assert body["runbook"] == "http://scope/runbooks#late_rank"
        assert body["page"] == "http://scope/#/job/j/finding/late_rank/5"
    views = delivery.notifier.views()
    assert [view.name for view in views] == ["127.0.0.1", "127.0.0.1#2"], "never the address: it is a secret"
    assert [(view.outcomes["delivered"], view.queued) for view in views] == [(1, 0), (1, 0)]


async def test_apprise_delivers_to_what_it_knows() -> None:
    from ncclscope_service.serve.apprise_sender import apprise_sender  # noqa: PLC0415

    with receiving(200) as receiver:
        url = receiver.url.replace("http://", "json://")
        delivery = await delivered(ReceiverSettings(url=url, send=apprise_sender(url)))
    (body,) = receiver.bodies
    assert body["title"] == "late rank in job j"
    assert body["type"] == "warning"
    assert "ranks: 5" in body["message"]
    assert "http://scope/runbooks#late_rank" in body["message"]
    assert [view.name for view in delivery.notifier.views()] == ["json"]


async def test_what_a_finding_quotes_is_no_markup_for_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    import requests  # noqa: PLC0415  (apprise brings it)

    from ncclscope_service.serve.apprise_sender import apprise_sender  # noqa: PLC0415

    sent: list[str] = []

    def request(_: str, url: str, *, data: str, **__: object) -> None:
        sent.append(data)
        raise requests.RequestException(url)

    monkeypatch.setattr(requests, "request", request)
    finding = replace(LATE, job="<!here>", summary="<!channel> & <http://evil.example|the runbook>")
    event = FindingEvent(event=FindingChange.OPENED, id="a", finding=finding)
    apprise_sender("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/#ops")(event, "http://scope")
    assert sent
    for forged in ("<!channel>", "<!here>", "<http://evil"):
        assert forged not in "".join(sent)
    assert "&lt;!channel&gt; &amp; &lt;http://evil.example|the runbook&gt;" in "".join(sent)


@pytest.mark.usefixtures("no_pauses")
async def test_what_apprise_cannot_deliver_is_given_up() -> None:
    from ncclscope_service.serve.apprise_sender import apprise_sender  # noqa: PLC0415

    with receiving(500) as receiver:
        url = receiver.url.replace("http://", "json://")
        delivery = await delivered(ReceiverSettings(url=url, send=apprise_sender(url)))
    assert delivery.settled == [("json", "opened", False)]
    assert len(receiver.bodies) == 3


@pytest.mark.usefixtures("no_pauses")
async def test_a_receiver_that_is_out_of_order_is_tried_again() -> None:
    with receiving(503, 200) as receiver:
        delivery = await delivered(ReceiverSettings(url=receiver.url))
    assert len(receiver.bodies) == 2
    (view,) = delivery.notifier.views()
    assert (view.retries, view.queued, delivery.settled) == (1, 0, [("127.0.0.1", "opened", True)])


@pytest.mark.usefixtures("no_pauses")
async def test_one_that_stays_out_of_order_is_given_up() -> None:
    with receiving(503) as receiver:
        delivery = await delivered(ReceiverSettings(url=receiver.url))
    assert len(receiver.bodies) == 3
    assert delivery.notifier.views()[0].outcomes == {"delivered": 0, "failed": 1, "dropped": 0}


@pytest.mark.parametrize("status", [400, 404, 302])
async def test_a_receiver_that_refuses_or_leads_elsewhere_is_not_tried_again(status: int) -> None:
    with receiving(status) as receiver:
        delivery = await delivered(ReceiverSettings(url=receiver.url))
    assert len(receiver.bodies) == 1
    assert delivery.settled == [("127.0.0.1", "opened", False)]


@pytest.mark.usefixtures("no_pauses")
async def test_one_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_TIMEOUT_SECONDS", 0.1)
    with receiving(0) as silent:
        delivery = await delivered(ReceiverSettings(url=silent.url))
    assert delivery.settled == [("127.0.0.1", "opened", False)]


@pytest.mark.usefixtures("no_pauses")
async def test_nobody_listens_there() -> None:
    with receiving(200) as receiver:
        pass
    delivery = await delivered(ReceiverSettings(url=receiver.url))
    assert delivery.settled == [("127.0.0.1", "opened", False)]


async def test_one_that_does_not_answer_does_not_hold_up_the_others() -> None:
    with receiving(0) as silent, receiving(200) as other:
        delivery = await delivered(ReceiverSettings(url=silent.url), ReceiverSettings(url=other.url))
        silent.release.set()
    assert delivery.settled == [("127.0.0.1#2", "opened", True)]
    assert [view.queued for view in delivery.notifier.views()] == [1, 0]


async def test_news_wakes_a_receiver_that_has_nothing_to_do() -> None:
    with receiving(200) as receiver:
        delivery = Delivery(ReceiverSettings(url=receiver.url))
        async with delivery.running():
            for number, event in enumerate((OPENED, CLOSED), 1):
                delivery.offer(event)
                await delivery.wait_for(number)
    assert [each["event"] for each in receiver.bodies] == ["opened", "closed"]


async def test_newer_news_takes_the_place_of_what_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_PAUSES_SECONDS", (0.2,))
    with receiving(503, 200) as receiver:
        delivery = Delivery(ReceiverSettings(url=receiver.url))
        async with delivery.running():
            delivery.offer(OPENED)
            await to_thread.run_sync(receiver.asked.wait, 60)
            delivery.offer(CLOSED)
            await delivery.wait_for(1)
    assert [each["event"] for each in receiver.bodies] == ["opened", "closed"]
    assert delivery.settled == [("127.0.0.1", "closed", True)]
