"""The pipeline over files: readers of the agent, machines of the service, and nothing between them."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from ncclscope.discover import Discovery, FoundFile, discover
from ncclscope.file_readers import FileTask, Part, read_file, read_files
from ncclscope.job_split import jobs_of_files
from ncclscope_agent.config import zone_offset_ns
from ncclscope_agent.files.recognise import FileKind
from ncclscope_service.nccl.nccl_tests import Benchmark
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import ConfigError

_AGENT: Final = "offline"
_SESSION: Final = "offline"

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and the name of the file at hand."""


@dataclass(slots=True)
class OfflineRun:
    """A pipeline that has read everything, and what became of the files."""

    pipeline: Pipeline
    files_read: int = 0
    skipped: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict[str, list[str]](list))
    """Names of files by the reason for which they were left out."""
    benchmarks: list[Benchmark] = field(default_factory=list[Benchmark])
    """Tables of nccl-tests, in order of the files' names."""


def run_offline(
    paths: list[Path],
    *,
    job: str,
    settings: PipelineSettings,
    log_timezone: str | None = None,
    progress: Progress | None = None,
    jobs: int = 1,
) -> OfflineRun:
    """Reads everything under the paths, in so many processes, and decides everything.

    Raises:
        ConfigError: the time zone does not exist.
        SourceError: a process that read died.
    """
    discovery = discover(paths)
    run = OfflineRun(Pipeline(settings), skipped=discovery.skipped)
    with tempfile.TemporaryDirectory(prefix="ncclscope-") as work_directory:
        make_task = partial(_task, zone_offset_ns=_zone(log_timezone), work_directory=Path(work_directory))
        _Reading(run, job, discovery, make_task, progress).read(jobs)
    if log_timezone is None:
        run.pipeline.shift_stamps()
    run.pipeline.store.skipped.update({f"file_{reason}": len(names) for reason, names in run.skipped.items()})
    run.pipeline.finish(time.time_ns())
    return run


def _task(found: FoundFile, *, zone_offset_ns: int, work_directory: Path) -> FileTask:
    return FileTask(found=found, zone_offset_ns=zone_offset_ns, work_directory=work_directory)


def _zone(log_timezone: str | None) -> int:
    if log_timezone is None:
        return 0
    try:
        return zone_offset_ns(log_timezone, now_ns=time.time_ns())
    except ValueError as error:
        raise ConfigError(f"--log-timezone: {error}") from error


class _Reading:
    """One pass over the files: logs first, since the host of an export may have to come from them."""

    def __init__(
        self,
        run: OfflineRun,
        job: str,
        discovery: Discovery,
        make_task: Callable[[FoundFile], FileTask],
        progress: Progress | None,
    ) -> None:
        self._run = run
        self._job = job
        self._strings: dict[Path, list[str]] = {}
        """Of each export whose job is not known yet."""
        self._make_task = make_task
        if not discovery.of_kind(FileKind.NCCL_LOG, FileKind.INSPECTOR):
            # No log that could name the host of a file, or have its calls: nothing waits for one.
            def task_without_hosts(found: FoundFile) -> FileTask:
                return replace(make_task(found), hosts={})

            self._make_task = task_without_hosts
        self._lines = discovery.of_kind(FileKind.NCCL_LOG) + discovery.of_kind(FileKind.INSPECTOR)
        self._jobs = jobs_of_files(self._lines, job=job)
        self._tables = discovery.of_kind(FileKind.NCCL_TESTS)
        self._topologies = discovery.of_kind(FileKind.NCCL_TOPOLOGY)
        self._exports = discovery.of_kind(FileKind.NSYS_SQLITE, FileKind.NSYS_REPORT, FileKind.NSYS_TABLES)
        self._exports += discovery.of_kind(FileKind.KINETO)
        self._exports += discovery.of_kind(FileKind.FLIGHT_RECORDER)
        self._progress = progress
        self._total_bytes = sum(found.size_bytes for found in discovery.files)
        self._done_bytes = 0

    def read(self, jobs: int) -> None:
        """Reads everything into the pipeline, in the order of the kinds and names of files."""
        for table in self._tables:
            for part in read_file(self._make_task(table)):
                self._ingest(self._make_task(table), part, [])
        tasks = [self._make_task(found) for found in (*self._lines, *self._exports)]
        later: list[FileTask] = []
        has_topologies = False
        for number, part in read_files(tasks, jobs=jobs):
            if number >= len(self._lines) and not isinstance(part, int) and not has_topologies:
                has_topologies = True
                self._read_with_hosts([self._make_task(found) for found in self._topologies], jobs=1)
            self._ingest(tasks[number], part, later)
        if not has_topologies:
            self._read_with_hosts([self._make_task(found) for found in self._topologies], jobs=1)
        self._read_with_hosts(later, jobs=jobs)

    def _job_of(self, task: FileTask, batch: Batch) -> str:
        """The job of a log or dump by its traces, of an export by the first of its processes that a log names."""
        path = task.found.path
        job = self._jobs.get(path, self._job if len(set(self._jobs.values())) < 2 else None)
        if job is not None:
            return job
        strings = self._strings.setdefault(path, [])
        strings += batch.strings
        store = self._run.pipeline.store
        jobs = {(of.host, of.pid): name for of, name in zip(store.processes, store.process_job, strict=True)}
        for table in (batch.kernel_templates, batch.range_templates):
            for host, pid in zip(table["host"].tolist(), table["pid"].tolist(), strict=True):
                if (strings[host], pid) in jobs:
                    self._jobs[path] = jobs[strings[host], pid]
                    return self._jobs[path]
        return self._job

    def _read_with_hosts(self, tasks: Sequence[FileTask], *, jobs: int) -> None:
        """Files whose host may have to come from the logs, which are read."""
        hosts: dict[int, set[str]] = {}
        for process in self._run.pipeline.store.processes:
            hosts.setdefault(process.pid, set()).add(process.host)
        for number, part in read_files([replace(task, hosts=hosts) for task in tasks], jobs=jobs):
            self._ingest(tasks[number], part, [])

    def _ingest(self, task: FileTask, part: Part, later: list[FileTask]) -> None:
        if isinstance(part, Batch):
            self._run.pipeline.ingest_batch(part, agent=_AGENT, session=_SESSION, job=self._job_of(task, part))
        elif isinstance(part, int):
            self._done_bytes += part
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes, task.found.name)
        elif part.waits_for_hosts:
            later.append(task)
        else:
            self._run.files_read += part.is_read
            self._run.benchmarks += part.benchmarks
            if part.skipped is not None:
                self._run.skipped[part.skipped].append(task.found.name)
