"""A writer of logs, an agent, a service, and what became of every operation."""

from __future__ import annotations

import os
import random
import re
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow.parquet as pq
from benchmarks.faults.processes import Hooks, Running
from benchmarks.faults.proxy import Proxy
from benchmarks.faults.wire import Wire
from benchmarks.ports import free_port

LINE: Final = (
    "node17:{pid}:{pid} [2] NCCL INFO AllReduce: opCount {number:x} sendbuff {buffer:#x} recvbuff {buffer:#x} "
    "count 1048576 datatype 9 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=8] stream 0x55d0c7f01b10\n"
)
_FILES: Final = 4
_GAPS: Final = re.compile(rb'^ncclscope_gaps_total\{[^}]*reason="(\w+)"[^}]*\} ([0-9.e+]+)$', re.MULTILINE)
JOB: Final = "default"
"""Of the writer; other jobs are those of who does it harm."""
_OPERATIONS: Final = re.compile(rb'^ncclscope_operations_total\{[^}]*job="default"[^}]*\} ([0-9.e+]+)$', re.MULTILINE)


class Writer:
    """Appends operations to logs, each with a number of its own, until `stop`."""

    def __init__(self, folder: Path, rate: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.rate = rate
        self.written = 0
        self.lock = threading.RLock()
        """Held while lines are written: who has it sees whole files."""
        self._files: list[BinaryIO] = [self._open(number) for number in range(_FILES)]
        self._is_running = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Writes no more."""
        self._is_running = False
        self._thread.join()
        for file in self._files:
            file.close()

    def rotate(self, number: int) -> None:
        """Renames a log and begins a new one, as logrotate does with `create`."""
        with self.lock:
            path = self._path(number)
            path.rename(path.with_name(f"{path.name}.{time.time_ns()}"))
            self._files[number].close()
            self._files[number] = self._open(number)

    def rotated(self) -> list[Path]:
        """Logs that were renamed."""
        return sorted(self.folder.glob("nccl.*.log.*"))

    def copy_and_truncate(self, number: int) -> None:
        """Copies a log and empties it, as logrotate does with `copytruncate`; the writer is quiet for two seconds.

        The copy's name fits no pattern of the agent's: what was not read when the log is emptied is gone.
        """
        with self.lock:
            path = self._path(number)
            (self.folder / f"copy.{number}.{time.time_ns()}").write_bytes(path.read_bytes())
            time.sleep(2)
            os.truncate(path, 0)

    def empty(self, number: int) -> None:
        """Empties a log. To be called with `lock`."""
        os.truncate(self._path(number), 0)

    def begin_again(self, number: int) -> None:
        """Opens a log with mode "w", as a job does that starts again. To be called with `lock`."""
        self._files[number].close()
        self._files[number] = self._path(number).open("wb", buffering=0)

    def numbers(self, number: int, begin: int) -> range:
        """The operations that were written to a log after the one numbered `begin`."""
        return range(begin + 1 + (number - begin - 1) % _FILES, self.written + 1, _FILES)

    def _path(self, number: int) -> Path:
        return self.folder / f"nccl.{number}.log"

    def _open(self, number: int) -> BinaryIO:
        return self._path(number).open("ab", buffering=0)

    def _run(self) -> None:
        began = time.monotonic()
        while self._is_running:
            due = int((time.monotonic() - began) * self.rate) - self.written
            if due > 0:
                with self.lock:
                    self._write(due)
            time.sleep(0.02)

    def _write(self, amount: int) -> None:
        lines: list[list[str]] = [[] for _ in range(_FILES)]
        for _ in range(amount):
            self.written += 1
            place = self.written % _FILES
            buffer = 0x7F2A40000000 + self.written % 64 * 512
            lines[place].append(LINE.format(pid=41822 + place, number=self.written, buffer=buffer))
        for file, own in zip(self._files, lines, strict=True):
            file.write("".join(own).encode())


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table."""

    times: int
    sent: int
    stored: int
    duplicates: int
    lost: int
    recovery: tuple[float, ...]
    gaps: dict[str, int]
    """The gaps that the service has counted, by reason."""
    has_reported_all: bool
    """Lost is only what could not be read any more, and there is a gap for each log that lost something."""
    note: str = ""


class World:
    """All that one fault happens to."""

    def __init__(
        self,
        folder: Path,
        *,
        rate: int = 2000,
        data: Path | None = None,
        with_proxy: bool = False,
        wire: Wire | None = None,
        service_hooks: Hooks | None = None,
        agent_hooks: Hooks | None = None,
        serve: tuple[str, ...] = ("--state-every", "0.1"),
        agent: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.data = data or folder / "data"
        self.random = random.Random(folder.name)
        self.recovery: list[float] = []
        self.times = 0
        self.note = ""
        self._missed: list[range] = []
        self._host = "127.0.0.1"
        if wire is not None:
            self._host = wire.address
            agent_hooks = replace(agent_hooks or Hooks(), namespace=wire.namespace)
            serve, agent = (*serve, "--insecure"), (*agent, "--insecure")
        self._hooks = service_hooks, agent_hooks
        self._extra = serve, agent
        self.agents_port, self._http_port = free_port(), free_port()
        self.proxy = Proxy(self.agents_port) if with_proxy else None
        self.writer = Writer(folder / "logs", rate)
        self.service = self.start_service()
        self.agent = self.start_agent()

    def start_service(self) -> Running:
        """One more service on the same folder and ports."""
        return Running(
            ["serve", "--listen", f"{self._host}:{self.agents_port}", "--http", f"127.0.0.1:{self._http_port}",
             "--data", str(self.data), *self._extra[0]],
            self.folder / "service.out", self._hooks[0],
        )  # fmt: skip

    def start_agent(self) -> Running:
        """One more agent of the same name on the same logs."""
        port = self.agents_port if self.proxy is None else self.proxy.port
        return Running(
            ["agent", "--logs", str(self.writer.folder / "nccl.*.log*"), "--exports", str(self.folder / "exports"),
             "--connect", f"{self._host}:{port}", *self._extra[1]],
            self.folder / "agent.out", self._hooks[1],
        )  # fmt: skip

    def restart_service(self) -> None:
        """kill -9, and a new one."""
        self.service.kill()
        self.service = self.start_service()

    def restart_agent(self) -> None:
        """kill -9, and a new one."""
        self.agent.kill()
        self.agent = self.start_agent()

    def pause(self, least: float, most: float) -> None:
        """A random while, in seconds."""
        time.sleep(self.random.uniform(least, most))

    def expect_loss(self, numbers: range) -> None:
        """These operations of a log are gone, and nobody has read them."""
        self._missed.append(numbers)

    def has_shown_all(self) -> bool:
        """Whether the service shows all that was written and could be read."""
        return self.shown() >= self.writer.written - sum(map(len, self._missed))

    def shown(self) -> int:
        """Operations that the service shows now; -1 where it does not answer."""
        return sum(int(float(value)) for value in _OPERATIONS.findall(self.get("/metrics") or b"")) or -1

    def gaps(self) -> dict[str, int]:
        """The gaps that the service has counted, by reason."""
        return {reason.decode(): int(float(number)) for reason, number in _GAPS.findall(self.get("/metrics") or b"")}

    def get(self, path: str) -> bytes | None:
        """The answer of the service; None where it gives none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}{path}", timeout=5) as answer:
                body: bytes = answer.read()
                return body
        except OSError:
            return None

    def recovered(self, within: float = 300) -> None:
        """Notes how long it takes from now until all that is written now is shown."""
        began, written = time.monotonic(), self.writer.written - sum(map(len, self._missed))
        if self.wait_for(lambda: self._has_shown(written), within):
            self.recovery.append(time.monotonic() - began)
        else:
            self.note += f" not recovered within {within:g} s;"

    def _has_shown(self, written: int) -> bool:
        """Whether the service shows so much; one that ended by itself (somebody has its port) is started again."""
        if not self.service.is_running:
            self.note += f" a service ended by itself with {self.service.status};"
            self.service = self.start_service()
        return self.shown() >= written

    def wait_for(self, condition: Callable[[], bool], within: float) -> bool:
        """Whether it came true in time."""
        until = time.monotonic() + within
        while not condition():
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def finish(self) -> Result:
        """Stops all, and counts."""
        gaps: dict[str, int] = {}
        try:
            self.writer.stop()
            self.recovered(within=600)
            # That a log is gone is said half a minute after its agent began.
            self.wait_for(lambda: sum(self.gaps().values()) >= len(self._missed), 120)
            gaps = self.gaps()
        finally:
            self.end()
        if self._hooks[0] is not None and self._hooks[0].sync_seconds:
            self._finish_elsewhere()
        stored = self.stored()
        found = len(stored)
        lost = set(range(1, self.writer.written + 1)) - stored.keys()
        return Result(
            times=self.times,
            sent=self.writer.written,
            stored=sum(stored.values()),
            duplicates=sum(stored.values()) - found,
            lost=len(lost),
            recovery=tuple(self.recovery),
            gaps=gaps,
            has_reported_all=lost == {one for each in self._missed for one in each}
            and sum(gaps.values()) >= len(self._missed),
            note=self.note.strip(" ;"),
        )

    def _finish_elsewhere(self) -> None:
        """Has a service without hooks write what the one before left to the next start: it has a time to end."""
        self._hooks = None, None
        self.service = self.start_service()
        self.wait_for(self.has_shown_all, 240)
        self.service.end()

    def end(self) -> None:
        """Ends every process and thread."""
        self.writer.stop()
        self.agent.end(60)
        status = self.service.end()
        if status != 0:
            self.note += f" the service ended with {status};"
        if self.proxy is not None:
            self.proxy.close()

    def stored(self) -> Counter[int]:
        """How often each operation is in the service's parquet files."""
        stored = Counter[int]()
        for path in sorted((self.data / "operations").glob("*/*.parquet")):
            table = pq.read_table(path, columns=["job", "op_count"])
            rows = zip(table["job"].to_pylist(), table["op_count"].to_pylist(), strict=True)
            stored.update(number for job, number in rows if job == JOB)
        return stored


def repeated(world: World, times: int, fault: Callable[[World], None], least: float, most: float) -> Result:
    """Lets a fault happen so often, after pauses of `least` to `most` seconds, and counts what came through."""
    try:
        world.wait_for(lambda: world.shown() > 0, 240)
        for turn in range(times):
            world.pause(least, most)
            fault(world)
            world.times += 1
            if turn % max(1, times // 10) == 0:
                world.recovered()
        return world.finish()
    finally:
        world.end()


class Faults(dict[str, tuple[Callable[[Path, int], Result], int]]):
    """Faults by name, each with how often it is done: a function of a folder and a number of times."""

    def alone(self, times: int) -> Callable[[Callable[[Path, int], Result]], Callable[[Path, int], Result]]:
        """Adds a fault that makes its world, and repeats what it does, itself."""

        def add(fault: Callable[[Path, int], Result]) -> Callable[[Path, int], Result]:
            self[fault.__name__] = fault, times
            return fault

        return add

    def add(
        self, times: int, least: float, most: float, make: Callable[..., World] = World, **options: object
    ) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
        """Adds what is done once to a world, which is made with these options, after pauses of `least` to `most` s."""

        def add(fault: Callable[[World], None]) -> Callable[[World], None]:
            def done(folder: Path, often: int) -> Result:
                folder.mkdir(parents=True, exist_ok=True)
                return repeated(make(folder, **options), often, fault, least, most)

            done.__doc__ = fault.__doc__
            self[fault.__name__] = done, times
            return fault

        return add


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Generator[Path]:
    """A file system of that size. Needs root."""
    path = folder / "disk"
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
