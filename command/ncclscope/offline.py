"""The pipeline over files: readers of the agent, machines of the service, and nothing between them."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ncclscope.discover import Discovery, FoundFile, discover
from ncclscope_agent.config import zone_offset_ns
from ncclscope_agent.files.recognise import FileKind
from ncclscope_agent.sources.inspector import InspectorReader
from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_agent.sources.nsys.export import ExportDescription, broken_export, describe_export, read_export
from ncclscope_agent.sources.nsys.report import export_report
from ncclscope_agent.sources.topology_xml import MAX_BYTES, read_topology_xml
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import ConfigError, FormatError, SourceError
from ncclscope_wire.records import Source, SourceKind

_BLOCK: Final = 4 << 20
_AGENT: Final = "offline"
_SESSION: Final = "offline"

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and the name of the file at hand."""


@dataclass(slots=True)
class OfflineRun:
    """A pipeline that has read everything, and what became of the files."""

    pipeline: Pipeline
    files_read: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Files by the reason for which they were left out."""


def run_offline(
    paths: list[Path],
    *,
    job: str,
    settings: PipelineSettings,
    log_timezone: str | None = None,
    progress: Progress | None = None,
) -> OfflineRun:
    """Reads everything under the paths and decides everything.

    Raises:
        ConfigError: the time zone does not exist.
    """
    discovery = discover(paths)
    run = OfflineRun(Pipeline(settings), skipped=discovery.skipped)
    with tempfile.TemporaryDirectory(prefix="ncclscope-") as work_directory:
        reading = _Reading(run, job, discovery, _zone(log_timezone), progress, Path(work_directory))
        reading.read_logs()
        reading.read_dumps()
        reading.read_topologies()
        reading.read_exports()
    if log_timezone is None:
        run.pipeline.shift_stamps()
    run.pipeline.store.skipped.update({f"file_{reason}": count for reason, count in run.skipped.items()})
    run.pipeline.finish(time.time_ns())
    return run


def _zone(log_timezone: str | None) -> int:
    if log_timezone is None:
        return 0
    try:
        return zone_offset_ns(log_timezone, now_ns=time.time_ns())
    except ValueError as error:
        raise ConfigError(f"--log-timezone: {error}") from error


def _changed_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


class _Reading:
    """One pass over the files: logs first, since the host of an export may have to come from them."""

    def __init__(
        self,
        run: OfflineRun,
        job: str,
        discovery: Discovery,
        zone_offset_ns: int,
        progress: Progress | None,
        work_directory: Path,
    ) -> None:
        self._run = run
        self._job = job
        self._logs = discovery.of_kind(FileKind.NCCL_LOG)
        self._dumps = discovery.of_kind(FileKind.INSPECTOR)
        self._topologies = discovery.of_kind(FileKind.NCCL_TOPOLOGY)
        self._exports = discovery.of_kind(FileKind.NSYS_SQLITE, FileKind.NSYS_REPORT)
        self._zone_offset_ns = zone_offset_ns
        self._progress = progress
        self._work_directory = work_directory
        self._total_bytes = sum(found.size_bytes for found in discovery.files)
        self._done_bytes = 0

    def read_logs(self) -> None:
        """Reads every log into the pipeline."""
        for found in self._logs:
            source = Source(kind=SourceKind.NCCL_LOG, name=found.name, key=str(found.path))
            near_ns = _changed_ns(found.path)
            reader = NcclLogReader(source, zone_offset_ns=self._zone_offset_ns, written_near_ns=near_ns)
            self._read_lines(found, reader)

    def read_dumps(self) -> None:
        """Reads every dump of NCCL Inspector into the pipeline."""
        for found in self._dumps:
            source = Source(kind=SourceKind.INSPECTOR, name=found.name, key=str(found.path))
            self._read_lines(found, InspectorReader(source))

    def _read_lines(self, found: FoundFile, reader: NcclLogReader | InspectorReader) -> None:
        try:
            for block in self._blocks(found):
                self._feed(reader.ingest_bytes(block, None))
        except OSError:
            self._run.skipped["unreadable"] += 1
        self._feed(reader.finish())
        self._run.files_read += 1

    def read_topologies(self) -> None:
        """Reads every topology file: its host is a folder or file named like a log's host, else the only log host."""
        hosts = {process.host for process in self._run.pipeline.store.processes}
        for found in self._topologies:
            try:
                data = found.path.read_bytes() if found.size_bytes <= MAX_BYTES else b""
                seen = read_topology_xml(data, _host_of_topology(found, hosts))
            except (OSError, FormatError):
                self._run.skipped["unreadable_topology"] += 1
            else:
                source = Source(kind=SourceKind.NCCL_TOPOLOGY, name=found.name, key=str(found.path))
                self._feed([Batch(source=source, begin=0, end=len(data), is_last=True, topologies=(seen,))])
                self._run.files_read += 1
                if seen.host is None:
                    self._run.skipped["topology_of_unknown_host"] += 1
            self._advance(found.size_bytes, found.name)

    def read_exports(self) -> None:
        """Reads every export into the pipeline; one that cannot be read is counted with its reason."""
        hosts_of_logs = _hosts_by_pid(self._run.pipeline)
        for found in self._exports:
            source = Source(kind=SourceKind.NSYS, name=found.name, key=str(found.path))
            try:
                path = self._export(found)
                host = _host_of(describe_export(path), found, hosts_of_logs)
                self._feed(read_export(path, source=source, host=host))
                self._run.files_read += 1
            except SourceError as error:
                self._run.skipped[error.reason] += 1
                self._feed([broken_export(source, error)])
            self._advance(found.size_bytes, found.name)

    def _export(self, found: FoundFile) -> Path:
        if found.kind is not FileKind.NSYS_REPORT:
            return found.path
        return export_report(found.path, work_directory=self._work_directory)

    def _blocks(self, found: FoundFile) -> Iterator[bytes]:
        with found.path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                yield block
                self._advance(len(block), found.name)

    def _feed(self, batches: Iterator[Batch] | list[Batch]) -> None:
        for batch in batches:
            self._run.pipeline.ingest_batch(batch, agent=_AGENT, session=_SESSION, job=self._job)

    def _advance(self, amount: int, name: str) -> None:
        self._done_bytes += amount
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes, name)


def _host_of_topology(found: FoundFile, hosts: Collection[str]) -> str | None:
    for name in (found.path.stem, *reversed(found.path.parent.parts)):
        if name in hosts:
            return name
    return next(iter(hosts)) if len(hosts) == 1 else None


def _hosts_by_pid(pipeline: Pipeline) -> dict[int, set[str]]:
    """The hosts whose logs name a pid."""
    hosts: dict[int, set[str]] = {}
    for process in pipeline.store.processes:
        hosts.setdefault(process.pid, set()).add(process.host)
    return hosts


def _host_of(described: ExportDescription, found: FoundFile, hosts: Mapping[int, set[str]]) -> str | None:
    """The host of an export: recorded, else a folder named like a log's host, else the only log host with its pids."""
    if described.host is not None:
        return described.host
    log_hosts = set().union(*hosts.values()) if hosts else set[str]()
    for folder in reversed(found.path.parent.parts):
        if folder in log_hosts:
            return folder
    sharing = [hosts[pid] for pid in described.pids if pid in hosts]
    candidates = set.intersection(*sharing) if sharing else set[str]()
    return next(iter(candidates)) if len(candidates) == 1 else None
