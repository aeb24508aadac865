"""Probes are answered while the service's loop is kept busy: whoever may send may not get the service restarted."""

from __future__ import annotations

import http.client
import threading

import anyio
import pytest

from ncclscope_service.app import Service, ServiceSettings
from ncclscope_service.serve.listen import ListenSettings

pytestmark = pytest.mark.anyio


def _asked(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        with connection.getresponse() as answer:
            return answer.status
    finally:
        connection.close()


@pytest.fixture
def service() -> Service:
    settings = ServiceSettings(version="0", agents=ListenSettings(port=0), http_port=0, probes=("127.0.0.1", 0))
    return Service(settings)


async def test_probes_are_answered_while_a_pass_lasts(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: dict[str, int] = {}
    is_over = anyio.Event()

    def ask(path: str) -> None:
        assert service.probes_port is not None
        statuses[path] = _asked(service.probes_port, path)

    def long_pass(_: int) -> None:
        # The loop stands still in here: the answers come from elsewhere, or not at all.
        for path in ("/healthz", "/readyz"):
            asking = threading.Thread(target=ask, args=(path,))
            asking.start()
            asking.join(timeout=60)
        is_over.set()

    monkeypatch.setattr(service, "tick", long_pass)
    async with anyio.create_task_group() as tasks:
        await tasks.start(service.run)
        await is_over.wait()
        tasks.cancel_scope.cancel()
    assert statuses == {"/healthz": 200, "/readyz": 200}


async def test_the_probes_port_shows_nothing_else(service: Service) -> None:
    async with anyio.create_task_group() as tasks:
        await tasks.start(service.run)
        assert service.probes_port is not None
        for path in ("/", "/metrics", "/api/overview", "/static/app.js"):
            assert (await anyio.to_thread.run_sync(_asked, service.probes_port, path)) == 404
        tasks.cancel_scope.cancel()
