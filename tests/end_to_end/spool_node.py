"""An agent with a spool as a real process over logs of numbered operations, and a service that counts them."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import anyio
from benchmarks.ports import free_port
from end_to_end.processes import PATIENCE_SECONDS, running
from service.loopback import Service

from ncclscope_service.listen import ListenSettings

_LINE = (
    "node17:41822:41903 [2] NCCL INFO AllReduce: opCount {number:x} sendbuff {buffer:#x} recvbuff {buffer:#x} "
    "count 1048576 datatype 9 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=8] stream 0x55d0c7f01b10\n"
)


class Logs:
    """Logs that grow by numbered operations."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written = 0
        folder.mkdir()

    def write(self, lines: int, name: str = "nccl.log") -> None:
        """Appends the next lines to a log."""
        with (self.folder / name).open("ab") as stream:
            for _ in range(lines):
                self.written += 1
                line = _LINE.format(number=self.written, buffer=0x7F2A40000000 + self.written % 97 * 512)
                stream.write(line.encode())


class Node:
    """One agent after the other over the same logs and spool."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.logs = Logs(folder / "logs")
        self.spool = folder / "spool"
        self.said = folder / "agent.log"
        self.service = Service()

    @property
    def listen(self) -> ListenSettings:
        """Where the service is, when it is there."""
        return ListenSettings(port=self.port)

    def arguments(self, *more: str) -> list[str]:
        """Of the command."""
        return [
            *("agent", "--connect", f"127.0.0.1:{self.port}", "--logs", str(self.logs.folder / "*.log")),
            *("--spool", str(self.spool), "--name", "one", "--retry-seconds", "0.25", "--tick-max-seconds", "0.05"),
            *more,
        ]

    def agent(self, stack: ExitStack, *more: str) -> subprocess.Popen[bytes]:
        """Starts it."""
        return stack.enter_context(running(self.said, *self.arguments(*more)))

    def send_spools(self, *more: str) -> list[str]:
        """Of the command that sends what agents have left."""
        where = ("--connect", f"127.0.0.1:{self.port}", "--spool", str(self.spool), "--connect-seconds", "60")
        return ["agent", "--send-spools", *where, *more]

    def sender(self, stack: ExitStack, *more: str) -> subprocess.Popen[bytes]:
        """Starts it."""
        return stack.enter_context(running(self.said, *self.send_spools(*more)))

    def spools(self) -> list[str]:
        """The directories of agents in the spool."""
        return sorted(path.name for path in self.spool.iterdir())

    def operations(self) -> Counter[int]:
        """How often the service was given each operation."""
        seen = Counter[int]()
        for received in self.service.received:
            seen.update(received.batch.operations["op_count"].tolist())
        return seen

    def spooled(self) -> int:
        """Bytes in the spool's files."""
        return sum(path.stat().st_size for path in self.spool.rglob("frames-*"))

    async def wait_for_all(self) -> None:
        """Until the service has all operations that were written; each once."""
        await until(lambda: len(self.operations()) >= self.logs.written, "all operations")
        assert set(self.operations()) == set(range(1, self.logs.written + 1))
        assert set(self.operations().values()) == {1}

    async def wait_until_spooled(self, more_than: int) -> None:
        """Until the spool has grown."""
        await until(lambda: self.spooled() > more_than, f"more than {more_than} bytes in the spool")

    async def wait_until_said(self, words: str) -> None:
        """Until an agent has logged this."""
        await until(lambda: words in self.said.read_text(), f"an agent to say: {words}")


async def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition; fails with what was waited for."""
    with anyio.move_on_after(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  (files and other processes offer no event)
            await anyio.sleep(0.02)
        return
    raise AssertionError(f"waited in vain for {what}")


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)
