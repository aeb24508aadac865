"""Files to batches by the readers of the agent: in this process, or in worker processes, with equal results.

A worker reads one file after the other and sends what comes out of each through a pipe of its own. The largest files
are begun first; what is read of a file before its turn waits here, as columns.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, TypeAlias

from ncclscope.discover import FoundFile
from ncclscope.nsys_folders import as_sqlite
from ncclscope_agent.files.recognise import FileKind
from ncclscope_agent.sources.flight_recorder.dump import MOST_BYTES, dump_batch, unreadable_dump
from ncclscope_agent.sources.inspector import InspectorReader
from ncclscope_agent.sources.kineto.batches import read_trace
from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_agent.sources.nsys.export import FOREIGN, broken_export, describe_export, read_export
from ncclscope_agent.sources.nsys.report import export_report
from ncclscope_agent.sources.topology_xml import MAX_BYTES, read_topology_xml
from ncclscope_service.nccl.nccl_tests import HEADER_WORD, Benchmark, NcclTests
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import FormatError, SourceError
from ncclscope_wire.records import Source, SourceKind

_BLOCK: Final = 4 << 20
_NO_ROWS: Final = "not_read_nccl_tests"

HostsByPid: TypeAlias = Mapping[int, Collection[str]]
"""The hosts whose logs name a pid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTask:
    """One file to read."""

    found: FoundFile
    zone_offset_ns: int
    """Of the stamps in a log that name no zone."""
    work_directory: Path
    """Where reports of nsys are exported to."""
    hosts: HostsByPid | None = None
    """None while the logs are not read: an export that records no host then waits for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEnd:
    """The end of a file: whether it was read, and why not; the last part of it."""

    is_read: bool = True
    skipped: str | None = None
    """The reason for which some or all of it was left out."""
    benchmarks: Sequence[Benchmark] = ()
    """Tables of nccl-tests that it holds."""
    waits_for_hosts: bool = False
    """Nothing was read: it is to be read again with the hosts of the logs."""


Part: TypeAlias = Batch | int | FileEnd
"""A batch of a file, a number of its bytes that are done, or its end."""


def read_files(tasks: Sequence[FileTask], *, jobs: int) -> Iterator[tuple[int, Part]]:
    """The parts of each file, with its number, file after file; numbers of bytes come as soon as they are done.

    Raises:
        SourceError: a worker died, by an error in its reader (which it has printed) or for want of memory.
    """
    if min(jobs, len(tasks)) > 1:
        yield from _Workers(tasks, min(jobs, len(tasks))).parts()
        return
    for number, task in enumerate(tasks):
        for part in read_file(task):
            yield number, part


def read_file(task: FileTask) -> Iterator[Part]:
    """The parts of one file of any kind that is read."""
    found = task.found
    if found.kind is FileKind.NCCL_LOG:
        source = Source(kind=SourceKind.NCCL_LOG, name=found.name, key=str(found.path))
        near_ns = _changed_ns(found.path)
        reader = NcclLogReader(source, zone_offset_ns=task.zone_offset_ns, written_near_ns=near_ns)
        yield from _read_lines(found, reader)
    elif found.kind is FileKind.INSPECTOR:
        source = Source(kind=SourceKind.INSPECTOR, name=found.name, key=str(found.path))
        yield from _read_lines(found, InspectorReader(source))
    elif found.kind is FileKind.KINETO:
        yield from _read_trace(task)
    elif found.kind is FileKind.FLIGHT_RECORDER:
        yield from _read_dump(found)
    elif found.kind is FileKind.NCCL_TESTS:
        yield from _read_tables(found)
    elif found.kind is FileKind.NCCL_TOPOLOGY:
        yield from _read_topology(found, set().union(*(task.hosts or {}).values()))
    else:
        yield from _read_export(task)


def _read_lines(found: FoundFile, reader: NcclLogReader | InspectorReader) -> Iterator[Part]:
    skipped, has_tables, last = None, False, b""
    benchmarks: list[Benchmark] = []
    try:
        with found.path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                yield from reader.ingest_bytes(block, None)
                has_tables = has_tables or HEADER_WORD in last + block
                last = block[-len(HEADER_WORD) :]
                yield len(block)
        if has_tables:
            benchmarks = _benchmarks(found)
    except OSError:
        skipped = "unreadable"
    yield from reader.finish()
    yield FileEnd(skipped=skipped, benchmarks=benchmarks)


def _read_trace(task: FileTask) -> Iterator[Part]:
    """A trace of a process that a log names is read as an export is: its calls are in the log."""
    found, end = task.found, FileEnd()
    if task.hosts is None:
        yield FileEnd(waits_for_hosts=True)
        return
    source = Source(kind=SourceKind.KINETO, name=found.name, key=str(found.path))
    try:
        yield from read_trace(found.path, source=source, logged=task.hosts)
    except SourceError as error:
        end = FileEnd(is_read=False, skipped=error.reason)
    yield found.size_bytes
    yield end


def _read_dump(found: FoundFile) -> Iterator[Part]:
    source = Source(kind=SourceKind.FLIGHT_RECORDER, name=found.name, key=str(found.path))
    end = FileEnd()
    try:
        yield dump_batch(found.path.read_bytes() if found.size_bytes <= MOST_BYTES else b"", source)
    except (OSError, FormatError) as error:
        yield unreadable_dump(source, str(error))
        end = FileEnd(is_read=False, skipped="unreadable_dump")
    yield found.size_bytes
    yield end


def _read_tables(found: FoundFile) -> Iterator[Part]:
    try:
        benchmarks = _benchmarks(found)
        end = FileEnd(is_read=bool(benchmarks), skipped=None if benchmarks else _NO_ROWS, benchmarks=benchmarks)
    except OSError:
        end = FileEnd(is_read=False, skipped="unreadable")
    yield found.size_bytes
    yield end


def _benchmarks(found: FoundFile) -> list[Benchmark]:
    """The tables of nccl-tests in a file that was opened before."""
    with found.path.open(encoding="utf-8", errors="replace") as lines:
        return NcclTests(found.name).benchmarks(lines)


def _read_topology(found: FoundFile, hosts: Collection[str]) -> Iterator[Part]:
    try:
        data = found.path.read_bytes() if found.size_bytes <= MAX_BYTES else b""
        seen = read_topology_xml(data, _host_of_topology(found, hosts))
    except (OSError, FormatError):
        end = FileEnd(is_read=False, skipped="unreadable_topology")
    else:
        source = Source(kind=SourceKind.NCCL_TOPOLOGY, name=found.name, key=str(found.path))
        yield Batch(source=source, begin=0, end=len(data), is_last=True, topologies=(seen,))
        end = FileEnd(skipped="topology_of_unknown_host" if seen.host is None else None)
    yield found.size_bytes
    yield end


def _read_export(task: FileTask) -> Iterator[Part]:
    found, end = task.found, FileEnd()
    source = Source(kind=SourceKind.NSYS, name=found.name, key=str(found.path))
    try:
        path = found.path
        if found.kind is FileKind.NSYS_REPORT:
            path = export_report(path, work_directory=task.work_directory)
        elif found.kind is FileKind.NSYS_TABLES:
            path = as_sqlite(path, task.work_directory)
        described = describe_export(path)
        host = described.host
        if (host is None or described.has_payloads) and task.hosts is None:
            yield FileEnd(waits_for_hosts=True)
            return
        hosts = task.hosts or {}
        host = host or _host_of_export(described.pids, found, hosts)
        logged = frozenset(pid for pid, of in hosts.items() if host in of)
        yield from read_export(path, source=source, host=host, logged=logged)
    except SourceError as error:
        if error.reason != FOREIGN:
            yield broken_export(source, error)
        end = FileEnd(is_read=False, skipped=error.reason)
    yield found.size_bytes
    yield end


def _changed_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _host_of_topology(found: FoundFile, hosts: Collection[str]) -> str | None:
    """The host that a folder or the file is named like, else the only one of the logs."""
    for name in (found.path.stem, *reversed(found.path.parent.parts)):
        if name in hosts:
            return name
    return next(iter(hosts)) if len(hosts) == 1 else None


def _host_of_export(pids: Collection[int], found: FoundFile, hosts: HostsByPid) -> str | None:
    """The host of an export that records none: a folder named like a log's host, else the only one with its pids."""
    log_hosts = set().union(*hosts.values()) if hosts else set[str]()
    for folder in reversed(found.path.parent.parts):
        if folder in log_hosts:
            return folder
    sharing = [set(hosts[pid]) for pid in pids if pid in hosts]
    candidates = set.intersection(*sharing) if sharing else set[str]()
    return next(iter(candidates)) if len(candidates) == 1 else None


class _Workers:
    """Reads files in worker processes, which are forked: they need no imports and nothing of this process later."""

    def __init__(self, tasks: Sequence[FileTask], jobs: int) -> None:
        self._tasks = tasks
        self._waiting = deque(sorted(range(len(tasks)), key=lambda number: -tasks[number].found.size_bytes))
        self._parts: list[deque[Batch | FileEnd]] = [deque() for _ in tasks]
        self._reading: dict[Connection, int] = {}
        context = get_context("fork")
        pipes = [context.Pipe() for _ in range(jobs)]
        self._ours = [ours for ours, _ in pipes]
        self._processes: list[BaseProcess] = []
        for _, theirs in pipes:
            others = [*self._ours, *(each for _, each in pipes if each is not theirs)]
            process = context.Process(target=_work, args=(theirs, others), daemon=True)
            process.start()
            self._processes.append(process)
        for _, theirs in pipes:
            theirs.close()

    def parts(self) -> Iterator[tuple[int, Part]]:
        try:
            for connection in self._ours:
                self._begin_next(connection)
            for number in range(len(self._tasks)):
                yield from self._parts_of(number)
        finally:
            for connection in self._ours:
                connection.close()
            for process in self._processes:
                process.terminate()
                process.join()

    def _parts_of(self, number: int) -> Iterator[tuple[int, Part]]:
        while True:
            while self._parts[number]:
                yield number, (part := self._parts[number].popleft())
                if isinstance(part, FileEnd):
                    return
            for ready in wait(list(self._reading)):
                assert isinstance(ready, Connection)
                yield from self._receive(ready)

    def _receive(self, connection: Connection) -> Iterator[tuple[int, Part]]:
        number = self._reading[connection]
        try:
            part: Part = connection.recv()
        except EOFError as error:
            name = self._tasks[number].found.name
            raise SourceError("reader_lost", f"{name}: the process that read it died; try --jobs 1") from error
        if isinstance(part, int):
            yield number, part
            return
        self._parts[number].append(part)
        if isinstance(part, FileEnd):
            self._begin_next(connection)

    def _begin_next(self, connection: Connection) -> None:
        self._reading.pop(connection, None)
        if self._waiting:
            number = self._reading[connection] = self._waiting.popleft()
            connection.send(self._tasks[number])


def _work(connection: Connection, others: Sequence[Connection]) -> None:
    """Reads the files that are asked for until the pipe closes; Ctrl-C is for the process that asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:  # or the pipes of a process that was killed would stay open in its siblings
        other.close()
    try:
        while True:
            for part in read_file(connection.recv()):
                connection.send(part)
    except (EOFError, BrokenPipeError):
        return
