"""An agent with a spool as a real process over logs of numbered operations, and a service that counts them."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
from benchmarks.ports import free_port
from end_to_end.processes import PATIENCE_SECONDS, running
from service.loopback import Service

from ncclscope_agent.spool.database import DATABASE_NAME
from ncclscope_service.serve.listen import ListenSettings

_LINE = (
    "node17:41822:41903 [2] NCCL INFO AllReduce: opCount {number:x} sendbuff {buffer:#x} recvbuff {buffer:#x} "
    "count 1048576 datatype 9 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=8] stream 0x55d0c7f01b10\n"
)


class Logs:
    """Logs that grow by numbered operations."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written = 0
        self.bytes = 0
        folder.mkdir()

    def write(self, lines: int, name: str = "nccl.log") -> None:
        """Appends the next lines to a log."""
        with (self.folder / name).open("ab") as stream:
            for _ in range(lines):
                self.written += 1
                line = _LINE.format(number=self.written, buffer=0x7F2A40000000 + self.written % 97 * 512)
                self.bytes += stream.write(line.encode())


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
        """Bytes of batches in the spools."""
        return sum(spooled_bytes(path.parent) for path in self.spool.rglob(DATABASE_NAME))

    def spooled_of_logs(self) -> int:
        """Bytes of logs whose batches are in the spools."""
        query = 'SELECT total("end" - "begin") FROM frame'
        return sum(_from_copy(path.parent, query) for path in self.spool.rglob(DATABASE_NAME))

    def spooled_to(self) -> int:
        """The furthest position of a log that a batch in the spools reaches."""
        return max((spooled_to(path.parent) for path in self.spool.rglob(DATABASE_NAME)), default=0)

    async def wait_for_all(self) -> None:
        """Until the service has all operations that were written; each once."""
        await until(lambda: len(self.operations()) >= self.logs.written, "all operations")
        assert set(self.operations()) == set(range(1, self.logs.written + 1))
        assert set(self.operations().values()) == {1}

    async def wait_until_spooled(self, more_than: int) -> None:
        """Until the spool has grown."""
        await until(lambda: self.spooled() > more_than, f"more than {more_than} bytes in the spool")

    async def wait_until_all_is_spooled(self) -> None:
        """Until the spool has all that was written to logs, of which the service has nothing."""
        await until(lambda: self.spooled_of_logs() >= self.logs.bytes, "all of the logs in the spool")

    async def wait_until_said(self, words: str) -> None:
        """Until an agent has logged this."""
        await until(lambda: words in self.said.read_text(), f"an agent to say: {words}")


def spooled_bytes(folder: Path) -> int:
    """Bytes of batches in the spool of an agent that runs and has locked it: those in a copy."""
    return _from_copy(folder, "SELECT total(length(payload)) FROM frame")


def spooled_to(folder: Path) -> int:
    """The furthest position of a file that a batch in such a spool reaches."""
    return _from_copy(folder, "SELECT max(end) FROM frame")


def _from_copy(folder: Path, query: str) -> int:
    with TemporaryDirectory() as copy:
        for path in folder.glob(f"{DATABASE_NAME}*"):
            with suppress(FileNotFoundError):  # moved to the file meanwhile
                (Path(copy) / path.name).write_bytes(path.read_bytes())
        with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(Path(copy) / DATABASE_NAME)) as database:
            return int(database.execute(query).fetchone()[0] or 0)
    return 0


def change_spools(folder: Path, statement: str) -> None:
    """Executes a statement on all databases of spools, which no agent has open."""
    for path in folder.rglob(DATABASE_NAME):
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute(statement)


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
