"""Who can reach the HTTP port takes all of its connections, or tries tokens: probes and readers get answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import anyio
import httpx
import pytest

from ncclscope_service.app import Service, ServiceSettings
from ncclscope_service.auth.credentials import CredentialFiles
from ncclscope_service.serve import http_connections
from ncclscope_service.serve.listen import ListenSettings

pytestmark = pytest.mark.asyncio

_READER = "reader-token-0123456789"
_ROOM = 20
_DRIP = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """A closed service with room for few connections."""
    monkeypatch.setattr(http_connections, "MAX_CONNECTIONS", _ROOM)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{_READER} name=r\n")
    files = CredentialFiles(tokens=tokens)
    return Service(ServiceSettings(version="0", agents=ListenSettings(port=0), http_port=0, http_files=files))


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Connections that are closed at the end."""
    with ExitStack() as stack:
        yield stack


def _client(port: int) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {_READER}"}
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=headers)


async def _drip(port: int, stack: ExitStack) -> socket.socket:
    """A connection whose request never ends."""
    plain = await anyio.to_thread.run_sync(socket.create_connection, ("127.0.0.1", port))
    stack.callback(plain.close)
    plain.sendall(_DRIP)
    return plain


def _ask(connection: HTTPConnection, path: str, headers: dict[str, str]) -> int:
    """The status of an answer on this very connection: one that was ended is an error."""
    connection.request("GET", path, headers=headers)
    with connection.getresponse() as answer:
        answer.read()
        return answer.status


async def test_dripping_clients_keep_no_probe_and_no_reader_from_an_answer(service: Service, opened: ExitStack) -> None:
    token = {"Authorization": f"Bearer {_READER}"}
    async with anyio.create_task_group() as tasks:
        _, port = await tasks.start(service.run)
        reader, probe = (HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(2))
        opened.callback(reader.close)
        opened.callback(probe.close)
        assert await anyio.to_thread.run_sync(_ask, reader, "/metrics", token) == 200
        for _ in range(3 * _ROOM):
            await _drip(port, opened)
        for path in ("/healthz", "/readyz"):
            assert await anyio.to_thread.run_sync(_ask, probe, path, {}) == 200
        # It was there first, and has shown its token.
        assert await anyio.to_thread.run_sync(_ask, reader, "/metrics", token) == 200
        service.tick(time.time_ns())
        assert service.views.metrics().samples["ncclscope_http_refused"].values.sum() >= 2 * _ROOM
        tasks.cancel_scope.cancel()


async def test_a_request_that_is_not_whole_in_time_ends_its_connection(
    service: Service, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "REQUEST_SECONDS", 0.05)
    async with anyio.create_task_group() as tasks:
        _, port = await tasks.start(service.run)
        plain = await _drip(port, opened)
        assert await anyio.to_thread.run_sync(plain.recv, 1) == b""
        tasks.cancel_scope.cancel()


async def test_wrong_tokens_and_invented_addresses_lock_nobody_out(service: Service) -> None:
    async with anyio.create_task_group() as tasks:
        _, port = await tasks.start(service.run)
        async with _client(port) as reader:
            forged = {"Authorization": "Bearer " + "x" * 32, "X-Forwarded-For": "10.1.2.3"}
            for _ in range(30):
                assert (await reader.get("/metrics", headers=forged)).status_code == 401
            for address in ("127.0.0.1", "10.1.2.3"):
                assert (await reader.get("/metrics", headers={"X-Forwarded-For": address})).status_code == 200
        tasks.cancel_scope.cancel()
