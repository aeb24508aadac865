"""What an agent said is overheard, without TLS, and said again from elsewhere: nothing is lost or stored twice."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from agent.log_samples import operation_line
from end_to_end.processes import PATIENCE_SECONDS, end, fetch_json, running, serving, wait_for

from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.frame import Deframer, encode_frame
from ncclscope_wire.messages import BatchMessage, Hello, Message, Refused, Welcome

pytestmark = pytest.mark.slow

_HONEST, _EVIL = "honest-token-0123456789", "evil-token-0123456789"
_ELSEWHERE = "127.0.0.9"
_INIT = (
    "node1:10:10 [0] NCCL INFO comm 0x55d0c8b3e2a0 rank 0 nranks 1 cudaDev 0 busId 1000 commId 0x1 - Init COMPLETE\n"
)


class Wiretap:
    """A relay to the service that keeps what agents say, connection by connection."""

    def __init__(self, port: int) -> None:
        self.heard: list[bytearray] = []
        self._service = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends = list[socket.socket]()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._ends:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
        for each in self._ends:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                agent, _ = self._listener.accept()
            except OSError:
                return
            service = socket.create_connection(("127.0.0.1", self._service))
            self.heard.append(bytearray())
            self._ends += [agent, service]
            for one, other, kept in ((agent, service, self.heard[-1]), (service, agent, bytearray())):
                self._threads.append(threading.Thread(target=_relay, args=(one, other, kept), daemon=True))
                self._threads[-1].start()


def _relay(one: socket.socket, other: socket.socket, kept: bytearray) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            kept += data
            other.sendall(data)
    with suppress(OSError):
        other.shutdown(socket.SHUT_WR)


@dataclass
class Scene:
    """A service, an agent whose words are overheard, and the log that it follows."""

    folder: Path
    agents: int
    web: int
    tap: Wiretap
    written: int = 0
    opened: list[socket.socket] = field(default_factory=list[socket.socket])

    def write(self, lines: int = 20) -> None:
        with (self.folder / "nccl.log").open("a") as stream:
            for _ in range(lines):
                self.written += 1
                stream.write(operation_line(op_count=f"{self.written:x}") + "\n")

    def operations(self) -> int:
        overview: Any = fetch_json(f"http://127.0.0.1:{self.web}/api/overview")
        return sum(int(job["operations"]) for job in overview["jobs"] if job["name"] == "honest")

    def jobs(self) -> set[str]:
        overview: Any = fetch_json(f"http://127.0.0.1:{self.web}/api/overview")
        return {job["name"] for job in overview["jobs"]}

    def overheard(self) -> list[Message]:
        """What the agent said on its first connection, Hello and numbered batches."""
        messages = [decode_message(payload) for payload in Deframer().ingest_bytes(bytes(self.tap.heard[0]))]
        return [message for message in messages if isinstance(message, Hello | BatchMessage)]

    def say(self, *messages: Message) -> list[Message]:
        """Says this from another address, and gives what is answered until there is nothing more for half a second."""
        connection = socket.create_connection(("127.0.0.1", self.agents), 30, source_address=(_ELSEWHERE, 0))
        self.opened.append(connection)
        connection.settimeout(0.5)
        answers, deframer = list[Message](), Deframer()
        with suppress(OSError):
            connection.sendall(b"".join(encode_frame(encode_message(message)) for message in messages))
            while data := connection.recv(65536):
                answers += [decode_message(payload) for payload in deframer.ingest_bytes(data)]
        return answers

    def goes_on(self) -> None:
        """What the honest agent reads from now on arrives, too."""
        self.write()
        wait_for(lambda: self.operations() >= self.written, "what the honest agent has read")
        assert self.operations() == self.written


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    (tmp_path / "tokens").write_text(f"{_HONEST} name=honest job=honest\n{_EVIL} name=evil job=evil\n")
    (tmp_path / "token").write_text(_HONEST)
    (tmp_path / "nccl.log").write_text(_INIT)
    options = ("--data", str(tmp_path / "data"), "--agent-tokens", str(tmp_path / "tokens"))
    with serving(tmp_path / "service.log", *options) as service:
        tap = Wiretap(service.agents)
        scene = Scene(tmp_path, service.agents, service.web, tap)
        try:
            with started_agent(scene) as agent:
                scene.goes_on()
                scene.goes_on()
                yield scene
                scene.goes_on()
                assert end(agent) == 0
        finally:
            tap.close()
            for connection in scene.opened:
                connection.close()
        assert end(service.process) == 0
    stored = Counter[int]()
    for path in (tmp_path / "data" / "operations").glob("*/*.parquet"):
        table = pq.read_table(path, columns=["job", "op_count"])
        stored.update(
            n for job, n in zip(table["job"].to_pylist(), table["op_count"].to_pylist(), strict=True) if job == "honest"
        )
    assert stored == Counter(range(1, scene.written + 1))


def started_agent(scene: Scene) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return running(
        scene.folder / "agent.log",
        *("agent", "--connect", f"127.0.0.1:{scene.tap.port}", "--logs", str(scene.folder / "nccl.log")),
        *("--job", "honest", "--name", "honest", "--token-file", str(scene.folder / "token")),
    )


def test_a_hello_that_was_overheard_takes_nothing_from_its_agent(scene: Scene) -> None:
    said, *_ = scene.overheard()
    for _ in range(5):
        (welcome, *_) = scene.say(said)
        assert isinstance(welcome, Welcome)
        scene.goes_on()


def test_a_conversation_that_is_said_again_is_stored_once(scene: Scene) -> None:
    for _ in range(3):
        assert isinstance(scene.say(*scene.overheard())[0], Welcome)
        scene.goes_on()


def test_batches_in_any_order_are_stored_once(scene: Scene) -> None:
    said, *batches = scene.overheard()
    assert len(batches) >= 2
    for order in (batches[::-1], batches[1:], batches[-1:] * 3, [*batches, *batches]):
        scene.say(said, *order)
        scene.goes_on()


def test_numbers_that_come_next_are_stored_once_when_the_agent_says_them_itself(scene: Scene) -> None:
    """Whoever has the token can speak for its agent: what it makes up in its name must not cost what the agent says."""
    said, *batches = scene.overheard()
    last = batches[-1]
    assert isinstance(last, BatchMessage)
    scene.say(said, *(replace(last, sequence=last.sequence + more) for more in range(1, 4)))
    scene.goes_on()


def test_the_session_of_an_agent_that_began_again_is_over(scene: Scene) -> None:
    before = scene.overheard()
    with started_agent(scene) as second:
        wait_for(lambda: len(scene.tap.heard) > 1 and scene.tap.heard[-1].count(b"session") > 0, "the second agent")
        scene.goes_on()
        scene.say(*before)
        scene.goes_on()
        assert end(second) == 0


@pytest.mark.parametrize("token", ["", _EVIL, "x" * 32])
def test_without_its_token_a_hello_opens_nothing(scene: Scene, token: str) -> None:
    said, *batches = scene.overheard()
    assert isinstance(said, Hello)
    (refusal,) = scene.say(replace(said, token=token), *batches)
    assert isinstance(refusal, Refused)
    assert refusal.reason == ("foreign_job" if token == _EVIL else "unauthorized")


def test_under_another_token_s_name_the_same_ids_are_another_agent(scene: Scene) -> None:
    said, *batches = scene.overheard()
    assert isinstance(said, Hello)
    (welcome, *_) = scene.say(replace(said, token=_EVIL, job="evil"), *batches)
    assert isinstance(welcome, Welcome)
    assert not welcome.session_known
    assert welcome.positions == {}
    wait_for(lambda: scene.jobs() == {"honest", "evil"}, "a job of its own")
