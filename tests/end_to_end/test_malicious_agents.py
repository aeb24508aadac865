"""What a malicious agent or reader can try over real sockets: the service stays up, and an honest agent loses nothing.

Each attack is one test against the same running service. Beside them an honest agent follows a log that grows all the
time; after each attack everything that was written so far has to have arrived, once.
"""

from __future__ import annotations

import contextlib
import json
import resource
import secrets
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from agent.log_samples import operation_line
from certificates import make_authority
from end_to_end.processes import PATIENCE_SECONDS, end, running, serving, wait_for
from wire.sample_batches import HELLO, log_batch

from ncclscope_wire import tables
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.frame import Deframer, encode_frame
from ncclscope_wire.messages import (
    BatchMessage,
    Hello,
    Message,
    Refused,
    Welcome,
)
from ncclscope_wire.records import Source, SourceKind

pytestmark = pytest.mark.slow

_HONEST, _EVIL, _READER = (f"{who}-token-{secrets.token_hex(8)}" for who in ("honest", "evil", "reader"))
_INIT = (
    "node1:10:10 [0] NCCL INFO comm 0x55d0c8b3e2a0 rank 0 nranks 1 cudaDev 0 busId 1000 commId 0x1 - Init COMPLETE\n"
)


@dataclass
class Scene:
    """A service, an honest agent of it, and the log that the agent follows."""

    agents: int
    web: int
    log: Path
    ca: Path
    folder: Path
    written: int = 0
    opened: list[socket.socket] = field(default_factory=list[socket.socket])
    """Closed after each attack."""

    def write(self, lines: int = 20) -> None:
        """More work of the honest job."""
        with self.log.open("a") as stream:
            for _ in range(lines):
                stream.write(operation_line(op_count=f"{self.written:x}") + "\n")
                self.written += 1

    def context(self) -> ssl.SSLContext:
        """Trusts the service."""
        return ssl.create_default_context(cafile=str(self.ca))

    def ask(self, path: str, *, token: str | None = _READER) -> Any:
        """A JSON answer."""
        return json.loads(self.fetch(path, token=token))

    def fetch(self, path: str, *, token: str | None = _READER) -> bytes:
        """An answer."""
        request = urllib.request.Request(f"https://localhost:{self.web}{path}")
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS, context=self.context()) as answer:
            return cast(bytes, answer.read())

    def operations(self) -> int:
        """Of the honest job, as the service has them."""
        jobs = self.ask("/api/overview")["jobs"]
        return sum(int(job["operations"]) for job in jobs if job["name"] == "honest")

    def refused(self) -> dict[str, int]:
        """Refusals of agents so far, by reason."""
        return cast("dict[str, int]", self.ask("/api/health")["sessions_refused"])

    def connect(self) -> ssl.SSLSocket:
        """A connection to the agents' port, in TLS."""
        plain = socket.create_connection(("127.0.0.1", self.agents), timeout=PATIENCE_SECONDS)
        secured = self.context().wrap_socket(plain, server_hostname="localhost")
        self.opened.append(secured)
        return secured


class Peer:
    """Says what it likes on one connection."""

    def __init__(self, scene: Scene, who: Hello | None = None) -> None:
        self.socket = scene.connect()
        self._deframer = Deframer()
        self._heard: list[Message] = []
        if who is not None:
            self.say(who)

    def say(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the service may have hung up
            self.socket.sendall(encode_frame(encode_message(message)))

    def hear(self) -> Message | None:
        """The next message; None at the end."""
        while not self._heard:
            try:
                data = self.socket.recv(65536)
            except OSError:
                return None
            if not data:
                return None
            self._heard += [decode_message(payload) for payload in self._deframer.ingest_bytes(data)]
        return self._heard.pop(0)

    def reason(self) -> str | None:
        """Why the service has hung up; None where it did so without a word."""
        while (message := self.hear()) is not None:
            if isinstance(message, Refused):
                return message.reason
        return None

    def close(self) -> None:
        self.socket.close()


def hello(token: str = _EVIL, *, agent_id: str = "evil", host: str = "node9", job: str = "evil") -> Hello:
    return replace(
        HELLO, agent_id=agent_id, session_id=secrets.token_hex(8), name="evil", host=host, job=job, token=token
    )


def source(name: str) -> Source:
    return Source(kind=SourceKind.NCCL_LOG, name=name, key=name)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("scene")
    authority = make_authority(folder / "ca")
    cert, key = authority.sign("service")
    (folder / "agent-tokens").write_text(f"{_HONEST} name=honest job=honest\n{_EVIL} name=evil job=evil*\n")
    (folder / "http-tokens").write_text(f"{_READER} role=read\n")
    (folder / "honest.token").write_text(_HONEST)
    log = folder / "nccl.log"
    log.write_text(_INIT)
    with (
        serving(
            folder / "service.log",
            *("--data", str(folder / "data")),
            *("--tls-cert", str(cert), "--tls-key", str(key), "--agent-tokens", str(folder / "agent-tokens")),
            *("--http-tokens", str(folder / "http-tokens")),
        ) as service,
        running(
            folder / "agent.log",
            *("agent", "--connect", f"localhost:{service.agents}", "--logs", str(log)),
            *("--job", "honest", "--name", "honest"),
            *("--tls-ca", str(authority.path), "--token-file", str(folder / "honest.token"), "--retry-seconds", "1"),
        ) as agent,
    ):
        scene = Scene(agents=service.agents, web=service.web, log=log, ca=authority.path, folder=folder)
        scene.write()
        wait_for(lambda: scene.operations() == scene.written, "the honest agent")
        yield scene
        assert end(agent) == 0
        assert end(service.process) == 0
    assert _EVIL not in (folder / "service.log").read_text()
    assert _HONEST not in (folder / "service.log").read_text() + (folder / "agent.log").read_text()


@pytest.fixture(autouse=True)
def honest_work_goes_on(scene: Scene) -> Iterator[None]:
    scene.write()
    yield
    while scene.opened:
        scene.opened.pop().close()
    scene.write()
    wait_for(lambda: scene.operations() >= scene.written, "what the honest agent has read")
    assert scene.operations() == scene.written
    assert scene.fetch("/healthz", token=None)


def evil_batch(sequence: int, batch: Batch) -> BatchMessage:
    return BatchMessage(sequence=sequence, batch=batch)


def test_numbers_that_no_column_holds_are_refused_and_those_at_its_edge_do_no_harm(scene: Scene) -> None:
    rows = np.zeros(3, tables.OPERATION_ROW)
    for name in rows.dtype.names or ():
        info = np.iinfo(rows.dtype[name])
        rows[name] = (info.max, info.min, 0)
    rows["template"] = 0
    batch = replace(log_batch(0, 5, source=source("e"), strings=("AllReduce",), templates=1), operations=rows)
    peer = Peer(scene, hello(agent_id="edges"))
    peer.hear()
    peer.say(evil_batch(1, batch))
    assert peer.hear() is not None


def test_a_flood_of_hellos_of_one_token_does_not_push_out_others_agents(scene: Scene) -> None:
    for number in range(400):
        peer = Peer(scene, hello(agent_id=f"flood{number}"))
        assert isinstance(peer.hear(), Welcome)
        peer.close()
    names = [agent["name"] for agent in scene.ask("/api/overview")["agents"]]
    assert "honest" in names


def test_ten_thousand_connections_that_say_nothing_keep_nobody_out(scene: Scene) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    before = sum(scene.refused().values())
    opened: list[socket.socket] = []
    try:
        for _ in range(10_000):
            with contextlib.suppress(OSError):
                opened.append(socket.create_connection(("127.0.0.1", scene.agents), timeout=5))
        scene.write()
        wait_for(lambda: scene.operations() >= scene.written, "the honest agent amid the flood")
    finally:
        for each in opened:
            each.close()
    wait_for(lambda: sum(scene.refused().values()) > before + 5_000, "the service to count whom it refused")


def _has_hung_up_on(peer: socket.socket, drop: bytes) -> bool:
    """Sends one more drop; whether nobody takes it any more."""
    try:
        peer.sendall(drop)
        return peer.recv(100) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_who_drips_a_hello_is_given_up(scene: Scene) -> None:
    with socket.create_connection(("127.0.0.1", scene.agents), timeout=1) as plain:
        wait_for(lambda: _has_hung_up_on(plain, b"\x16"), "the service to hang up")


def test_who_drips_a_request_keeps_nobody_from_an_answer(scene: Scene) -> None:
    drips: list[ssl.SSLSocket] = []
    for _ in range(50):
        plain = socket.create_connection(("127.0.0.1", scene.web), timeout=PATIENCE_SECONDS)
        drips.append(scene.context().wrap_socket(plain, server_hostname="localhost"))
        drips[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
    assert scene.ask("/api/health")
    for each in drips:
        each.close()


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2f..%2f..%2fetc/passwd",
        "/static//etc/passwd",
        "/static/%00",
        "/api/snapshot?job=../../etc",
        "/api/jobs/../../etc/passwd/ranks/0",
        "/api/jobs/honest/communicators/..%2f..%2fx",
        "/api/jobs/honest/timeline?seconds=1e999",
        "/api/jobs/honest/timeline?seconds=nan",
        "/api/jobs/honest/timeline?rank=99999999999999999999999",
        "/api/jobs/honest/ranks/99999999999999999999999",
        "/api/events?events=" + "x" * 10_000,
        "/api/jobs/%ff%fe/ranks/0",
    ],
)
def test_no_path_leads_to_a_file_or_an_error_of_ours(scene: Scene, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        scene.fetch(path)
    assert 400 <= caught.value.code < 500
    assert b"root:" not in caught.value.read()


def test_a_request_whose_head_is_too_long_is_refused(scene: Scene) -> None:
    plain = socket.create_connection(("127.0.0.1", scene.web), timeout=PATIENCE_SECONDS)
    with scene.context().wrap_socket(plain, server_hostname="localhost") as secured:
        with contextlib.suppress(OSError):
            secured.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000)
        answer = b""
        with contextlib.suppress(OSError):
            answer = secured.recv(1000)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
