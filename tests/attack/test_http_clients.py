"""Who can reach a port takes all of its connections, drips, or tries tokens: probes, readers and agents get answers."""

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
from wire.sample_batches import HELLO

from ncclscope_service.app import Service, ServiceSettings
from ncclscope_service.auth.credentials import CredentialFiles
from ncclscope_service.serve import http_connections
from ncclscope_service.serve.listen import ListenSettings
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.frame import Deframer, encode_frame
from ncclscope_wire.messages import Welcome

pytestmark = pytest.mark.asyncio

_READER = "reader-token-0123456789"
_WRITER = "writer-token-0123456789"
_ROOM = 20
_DRIP = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """A closed service with room for few connections."""
    monkeypatch.setattr(http_connections, "MAX_CONNECTIONS", _ROOM)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{_READER} name=r\n{_WRITER} name=w role=write\n")
    files = CredentialFiles(tokens=tokens)
    return Service(ServiceSettings(version="0", agents=ListenSettings(port=0), http_port=0, http_files=files))


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Connections that are closed at the end."""
    with ExitStack() as stack:
        yield stack


def _client(port: int, token: str = _READER) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {token}"}
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


_FORGED = {
    "X-Forwarded-For": "127.0.0.1",
    "X-Real-IP": "127.0.0.1",
    "Forwarded": "for=127.0.0.1;host=localhost;proto=https",
    "X-Forwarded-Host": "localhost",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-User": "r",
}


@pytest.mark.parametrize("header", _FORGED)
@pytest.mark.parametrize("is_closed", [True, False])
async def test_what_a_proxy_could_say_of_a_client_changes_nothing(tmp_path: Path, header: str, is_closed: bool) -> None:
    """Not even from loopback, where a proxy would be: nothing that is decided depends on an address."""
    (tmp_path / "tokens").write_text(f"{_READER} name=r\n")
    files = CredentialFiles(tokens=tmp_path / "tokens") if is_closed else CredentialFiles()
    service = Service(ServiceSettings(version="0", agents=ListenSettings(port=0), http_port=0, http_files=files))
    forged = {header: _FORGED[header]}
    async with anyio.create_task_group() as tasks:
        _, port = await tasks.start(service.run)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            asked = [
                ("GET", "/metrics", {}),
                ("GET", "/metrics", {"Authorization": "Bearer " + "x" * 32}),
                ("GET", "/metrics", {"Host": "evil.example"}),
                ("POST", "/api/findings/mark", {"Origin": "http://evil.example"}),
                ("POST", "/api/findings/mark", {"Authorization": f"Bearer {_READER}"}),
            ]
            for method, path, headers in asked:
                plain = await client.request(method, path, headers=headers)
                with_it = await client.request(method, path, headers={**headers, **forged})
                assert with_it.status_code == plain.status_code, (path, headers)
        tasks.cancel_scope.cancel()


async def test_dripping_clients_of_the_probes_port_keep_no_probe_from_an_answer(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "MAX_CONNECTIONS", _ROOM)
    settings = ServiceSettings(version="0", agents=ListenSettings(port=0), http_port=0, probes=("127.0.0.1", 0))
    service = Service(settings)
    async with anyio.create_task_group() as tasks:
        await tasks.start(service.run)
        port = service.probes_port
        assert port is not None
        probe = HTTPConnection("127.0.0.1", port, timeout=60)
        opened.callback(probe.close)
        for _ in range(3 * _ROOM):
            await _drip(port, opened)
        for path in ("/healthz", "/readyz"):
            assert await anyio.to_thread.run_sync(_ask, probe, path, {}) == 200
        tasks.cancel_scope.cancel()


async def test_dripping_clients_of_the_agents_port_keep_no_agent_out(opened: ExitStack) -> None:
    settings = ListenSettings(port=0, max_strangers=_ROOM, max_connections=5 * _ROOM)
    service = Service(ServiceSettings(version="0", agents=settings, http_port=0))
    async with anyio.create_task_group() as tasks:
        port, _ = await tasks.start(service.run)
        for _ in range(3 * _ROOM):
            plain = await anyio.to_thread.run_sync(socket.create_connection, ("127.0.0.1", port))
            opened.callback(plain.close)
            plain.sendall(b"\0\0")
        async with await anyio.connect_tcp("127.0.0.1", port) as agent:
            await agent.send(encode_frame(encode_message(HELLO)))
            (answer,) = Deframer().ingest_bytes(await agent.receive())
            assert isinstance(decode_message(answer), Welcome)
        tasks.cancel_scope.cancel()


async def test_a_body_that_nests_is_not_understood(service: Service) -> None:
    async with anyio.create_task_group() as tasks:
        _, port = await tasks.start(service.run)
        async with _client(port, _WRITER) as writer:
            with anyio.fail_after(60):
                while (await writer.get("/readyz")).status_code != 200:
                    await anyio.lowlevel.checkpoint()
            for body in (b'{"action":' * 1_500, b"[" * 5_000, b'{"x":' * 3_000 + b"1" + b"}" * 3_000):
                for method, path in (("POST", "/api/findings/mark"), ("POST", "/api/settings/change")):
                    answer = await writer.request(method, path, content=body)
                    assert answer.status_code in (400, 413), answer.text
        tasks.cancel_scope.cancel()
