"""Notifications over real HTTP on the loopback: delivered, tried again, refused, timed out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import orjson
import pytest
from benchmarks.ports import free_port
from service.test_finding_news import LATE

from ncclscope_service.finding_news import FindingEvent, News
from ncclscope_service.messages import Form
from ncclscope_service.outbox import OutboxLimits
from ncclscope_service.webhook import Notifier, WebhookSettings

pytestmark = pytest.mark.asyncio

OPENED = FindingEvent(event=News.OPENED, id="a", finding=LATE)


@dataclass
class Receiver:
    """A webhook that answers with the given statuses, the last one for ever."""

    statuses: list[int]
    bodies: list[Any] = field(default_factory=list[Any])
    url: str = ""
    release: threading.Event = field(default_factory=threading.Event)
    """Status 0 waits for this before it answers."""

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


async def notified(notifier: Notifier, events: list[FindingEvent], until: Callable[[], bool]) -> None:
    """Runs the notifier until something is true."""
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(notifier.run)
            notifier.offer(events)
            while not until():  # noqa: ASYNC110  (what is waited for happens in other threads)
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()


def outcome(notifier: Notifier, name: str) -> int:
    return sum(view.outcomes[name] for view in notifier.views())


async def test_every_receiver_is_told_in_its_own_form() -> None:
    with receiving(200) as plain, receiving(204) as slack:
        notifier = Notifier(
            [WebhookSettings(url=plain.url), WebhookSettings(url=slack.url, form=Form.SLACK)], "http://scope/"
        )
        await notified(notifier, [OPENED], lambda: outcome(notifier, "delivered") == 2)
    assert plain.bodies[0]["finding"]["ranks"] == [5]
    assert plain.bodies[0]["runbook"] == "http://scope/runbooks#late_rank"
    assert slack.bodies[0]["text"] == "ncclscope, late rank in job j"
    assert [view.name for view in notifier.views()] == ["127.0.0.1", "127.0.0.1#2"], "never the address: it is a secret"


async def test_a_receiver_that_is_out_of_order_is_tried_again_and_told_once() -> None:
    with receiving(503, 200) as receiver:
        notifier = Notifier([WebhookSettings(url=receiver.url)], "http://scope")
        await notified(notifier, [OPENED], lambda: outcome(notifier, "delivered") == 1)
    assert len(receiver.bodies) == 2
    assert (notifier.views()[0].retries, notifier.views()[0].queued) == (1, 0)


@pytest.mark.parametrize("status", [400, 404, 302])
async def test_a_receiver_that_refuses_or_leads_elsewhere_is_not_tried_again(status: int) -> None:
    with receiving(status) as receiver:
        notifier = Notifier([WebhookSettings(url=receiver.url)], "http://scope")
        await notified(notifier, [OPENED], lambda: outcome(notifier, "failed") == 1)
    assert len(receiver.bodies) == 1


async def test_one_that_never_answers_is_left() -> None:
    with receiving(0) as silent:
        once = OutboxLimits(attempts=1)
        notifier = Notifier([WebhookSettings(url=silent.url, timeout_seconds=0.3, limits=once)], "http://s")
        await notified(notifier, [OPENED], lambda: outcome(notifier, "failed") == 1)


async def test_one_that_does_not_answer_does_not_hold_up_the_others() -> None:
    with receiving(0) as silent, receiving(200) as other:
        notifier = Notifier(
            [WebhookSettings(url=silent.url, timeout_seconds=60), WebhookSettings(url=other.url)], "http://s"
        )

        def is_delivered() -> bool:
            if outcome(notifier, "delivered") == 0:
                return False
            assert notifier.views()[0].queued == 1, "the silent one is still waited for"
            silent.release.set()
            return True

        await notified(notifier, [OPENED], is_delivered)


async def test_nobody_listens_there() -> None:
    url = f"http://127.0.0.1:{free_port()}/hook"
    notifier = Notifier([WebhookSettings(url=url, limits=OutboxLimits(attempts=1))], "http://scope")
    await notified(notifier, [OPENED], lambda: outcome(notifier, "failed") == 1)


async def test_news_wakes_a_receiver_that_has_nothing_to_do() -> None:
    with receiving(200) as receiver:
        notifier = Notifier([WebhookSettings(url=receiver.url)], "http://scope")
        closed = FindingEvent(event=News.CLOSED, id="a", finding=replace(LATE, until_ns=1))
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(notifier.run)
                for number, event in enumerate((OPENED, closed), 1):
                    notifier.offer([event])
                    while outcome(notifier, "delivered") < number:  # noqa: ASYNC110  (as above)
                        await anyio.sleep(0.01)
                tasks.cancel_scope.cancel()
    assert [each["event"] for each in receiver.bodies] == ["opened", "closed"]


async def test_what_waits_when_the_service_is_stopped_is_tried_once_more() -> None:
    second = replace(OPENED, id="b")
    with receiving(503, 200) as receiver:
        notifier = Notifier([WebhookSettings(url=receiver.url)], "http://scope")
        await notified(notifier, [OPENED, second], lambda: notifier.views()[0].retries == 1)
    assert [outcome(notifier, name) for name in ("delivered", "failed", "dropped")] == [2, 0, 0]


async def test_what_a_receiver_that_is_away_does_not_take_at_the_end_is_counted_as_dropped() -> None:
    second = replace(OPENED, id="b")
    with receiving(503) as receiver:
        notifier = Notifier([WebhookSettings(url=receiver.url)], "http://scope")
        await notified(notifier, [OPENED, second], lambda: notifier.views()[0].retries == 1)
    assert len(receiver.bodies) == 2, "one attempt before the end, one at the end"
    assert [outcome(notifier, name) for name in ("delivered", "failed", "dropped")] == [0, 0, 2]
    assert notifier.views()[0].queued == 0
