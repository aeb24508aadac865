"""Reads an export in a process of its own, which may use so much processor, memory and time, and no more.

Anybody who may write exports can write one that SQLite reads for ever, or that takes all memory. So nothing but the
first bytes of an export is read in the agent's own process. The kernel ends a process that takes too much
(setrlimit(2)), and so does the agent if nothing comes of it. Within its limits it keeps to the agent's share of a
core: it rests by itself, so that a large export holds up nothing else.

The process is this module (`python -m`). It gets what it reads on its command line, and sends messages on a pipe: a
batch as it is sent to the service, or its end, with the reason if that is an error.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec

from ncclscope_agent.budget import Budget, BudgetLimits
from ncclscope_agent.sources.kineto.batches import read_trace
from ncclscope_agent.sources.nsys.export import ExportLimits, read_export
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.errors import ProtocolError, SourceError
from ncclscope_wire.frame import MAX_FRAME_BYTES
from ncclscope_wire.messages import BatchMessage
from ncclscope_wire.records import Source, SourceKind

KILLED: Final = "killed_reader"
"""Reason of a SourceError: the process that read the export was ended before it was done."""

_BATCH, _FAULT, _END = b"B", b"F", b"E"
_NO_BUDGET: Final = BudgetLimits(cpu_share=0, seconds=1, memory_bytes=0)
_TEMPORARY_TIMES: Final = 4
_DIES_WITHIN_S: Final = 5.0
"""A killed process is gone at once, unless the kernel itself hangs in reading a disk: then it is left behind."""
_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLimits:
    """What the process that reads one export may use, and the share of a core that all of them keep to."""

    cpu_seconds: float = 20.0
    """Processor time for any export: it begins in 0.2 s, and reads a million rows of kernels in 5 s."""
    bytes_per_cpu_second: float = 2e6
    """As much more for each byte on its disk: less than a tenth of the usual rate (benchmarks/read_export.py)."""
    most_cpu_seconds: float = 600.0
    memory_bytes: int = 256 << 20
    """Beside the program itself: twice what two million kernels take."""
    temporary_bytes: int = 256 << 20
    """Of a temporary file of SQLite's, and four times the export itself: what it sorts and joins."""
    silent_seconds: float = 60.0
    """Without a message, beside the time that so much processor time takes: a hung disk, a pipe in a file's place."""
    budget: BudgetLimits = _NO_BUDGET


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is to do; the fields are those of `read_export` and of `ReaderLimits`."""

    path: str
    source: Source
    host: str | None
    begin: int
    limits: ExportLimits
    with_calls: bool
    cpu_seconds: int
    memory_bytes: int
    temporary_bytes: int
    cpu_share: float
    credit_seconds: float


class ExportReader:
    """Reads exports, one after the other, each in a process of its own. Used by one thread; `stop` by any."""

    def __init__(self, limits: ReaderLimits | None = None) -> None:
        self._limits = limits or ReaderLimits()
        self._budget = Budget(self._limits.budget, now_ns=time.monotonic_ns(), cpu_ns=0)
        self._used_ns = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def read(
        self, path: Path, *, source: Source, host: str, begin: int, limits: ExportLimits, with_calls: bool = True
    ) -> Iterator[Batch]:
        """The batches of an export or trace, as `read_export` or `read_trace` gives them; the process ends with these.

        Raises:
            SourceError: as `read_export` does; "killed_reader" if the process was ended before it was done.
        """
        task = self._task(path, source, host, begin, limits, with_calls=with_calls)
        share = task.cpu_share or 1.0
        patience_s = self._limits.silent_seconds + 2 * task.cpu_seconds / share
        ours, theirs = os.pipe()
        used_before = _used_by_children_ns()
        with Connection(ours, writable=False) as received:
            try:
                self._process = _start(task, theirs)
            finally:
                os.close(theirs)
            try:
                yield from self._batches(received, path, patience_s)
            finally:
                _end(self._process)
                self._process = None
                self._used_ns += _used_by_children_ns() - used_before

    @property
    def process_id(self) -> int | None:
        """The process that reads now."""
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """Ends the process that reads now, and reads nothing more: for the end of the agent."""
        self._is_stopped = True
        if (process := self._process) is not None:
            process.kill()

    def _task(
        self, path: Path, source: Source, host: str, begin: int, limits: ExportLimits, *, with_calls: bool
    ) -> _Task:
        known = self._limits
        self._budget.look(now_ns=time.monotonic_ns(), cpu_ns=self._used_ns, memory_bytes=0)
        size = _bytes_on_disk(path)
        seconds = known.cpu_seconds + size / known.bytes_per_cpu_second
        return _Task(
            path=os.path.abspath(path),
            source=source,
            host=host,
            begin=begin,
            limits=limits,
            with_calls=with_calls,
            cpu_seconds=int(min(seconds, known.most_cpu_seconds)),
            memory_bytes=known.memory_bytes,
            temporary_bytes=known.temporary_bytes + _TEMPORARY_TIMES * size,
            cpu_share=known.budget.cpu_share,
            credit_seconds=self._budget.credit_ns / 1e9,
        )

    def _batches(self, received: Connection, path: Path, patience_s: float) -> Iterator[Batch]:
        while (message := self._message(received, path, patience_s))[:1] != _END:
            if message[:1] == _FAULT:
                reason, _, said = message[1:].decode(errors="replace").partition("\0")
                raise SourceError(reason, said)
            try:
                sent = decode_message(message[1:])
            except ProtocolError as error:
                raise _killed(path, f"it sent what is no batch: {error}") from error
            assert isinstance(sent, BatchMessage), "a reader sends batches only"
            yield sent.batch

    def _message(self, received: Connection, path: Path, patience_s: float) -> bytes:
        """The next message of the process, which is waited for so long."""
        until = time.monotonic() + patience_s
        try:
            while not received.poll(_LOOK_S):
                if self._is_stopped or time.monotonic() > until:
                    raise _killed(path, f"nothing came of it for {patience_s:.0f} s")
            return received.recv_bytes(MAX_FRAME_BYTES + 1)
        except (EOFError, OSError) as error:
            raise _killed(path, self._why_it_ended()) from error

    def _why_it_ended(self) -> str:
        assert self._process is not None
        try:
            status = self._process.wait(_DIES_WITHIN_S)
        except subprocess.TimeoutExpired:
            return "it sent half a message"
        return f"exit status {status}" if status >= 0 else f"signal {-status}"


def _killed(path: Path, why: str) -> SourceError:
    too_much = "the process that read it took too much processor time, memory or disk, or hung"
    return SourceError(KILLED, f"{path} was not read: {too_much} ({why})")


def _bytes_on_disk(path: Path) -> int:
    """Of the export and the file with its payloads; holes do not count."""
    total = 0
    for each in (path, path.with_suffix(".json")):
        try:
            total += os.stat(each).st_blocks * 512
        except OSError:
            continue
    return total


def _used_by_children_ns() -> int:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return int((used.ru_utime + used.ru_stime) * 1e9)


def _start(task: _Task, theirs: int) -> subprocess.Popen[bytes]:
    # Not of this process by fork: it has threads. And no module of the folder that the agent was started in.
    command = [sys.executable, "-P", "-m", __name__, str(theirs), msgspec.json.encode(task).decode()]
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(theirs,))
    except OSError as error:
        raise SourceError("unreadable", f"{task.path} was not read: no process for it ({error.strerror})") from error


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    try:
        process.wait(_DIES_WITHIN_S)
    except subprocess.TimeoutExpired:
        return


def _pace(task: _Task, parent: int) -> Callable[[], None]:
    """What rests until the processor time used is within the credit and the share; ends an orphan."""
    began = time.monotonic()

    def rest() -> None:
        if os.getppid() != parent:
            os._exit(1)
        owed = time.process_time() - task.credit_seconds - task.cpu_share * (time.monotonic() - began)
        if task.cpu_share and owed > 0:
            time.sleep(owed / task.cpu_share)

    return rest


def set_limits(memory_bytes: int, others: Mapping[int, int]) -> None:
    """Limits this process to so much memory beside what it has by now, and to these values (`resource.RLIMIT_*`)."""
    with open("/proc/self/statm", "rb") as statm:
        own_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    for kind, value in {resource.RLIMIT_AS: own_bytes + memory_bytes, **others}.items():
        _, hard = resource.getrlimit(kind)
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (lowest, lowest))


def _limit(task: _Task) -> None:
    """Has the kernel end this process if it takes more."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    set_limits(
        task.memory_bytes,
        {
            resource.RLIMIT_CPU: task.cpu_seconds,
            resource.RLIMIT_FSIZE: task.temporary_bytes,
            resource.RLIMIT_CORE: 0,
        },
    )
    # Where memory runs out nevertheless, this process goes, and not the agent or the job.
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb") as score:
        score.write(b"1000")


def _batches(task: _Task, rest: Callable[[], None]) -> Iterator[Batch]:
    path = Path(task.path)
    if task.source.kind is SourceKind.KINETO:
        return read_trace(
            path,
            source=task.source,
            host=task.host,
            begin=task.begin,
            with_calls=task.with_calls,
            is_finished=False,
            on_progress=rest,
        )
    return read_export(
        path,
        source=task.source,
        host=task.host,
        begin=task.begin,
        limits=task.limits,
        logged=frozenset() if task.with_calls else None,
        on_progress=rest,
    )


def main(pipe: int, text: str) -> None:
    """Reads the export of a task and sends what comes of it; any other error ends the process."""
    parent = os.getppid()
    task = msgspec.json.decode(text, type=_Task)
    _limit(task)
    rest = _pace(task, parent)
    with Connection(pipe, readable=False) as sent:
        try:
            for number, batch in enumerate(_batches(task, rest), 1):
                sent.send_bytes(_BATCH + encode_message(BatchMessage(sequence=number, batch=batch)))
                rest()
        except SourceError as error:
            sent.send_bytes(_FAULT + f"{error.reason}\0{error}".encode(errors="replace"))
        else:
            sent.send_bytes(_END)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
