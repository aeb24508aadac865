"""A simulated job as the batches that agents would send: logs in portions and exports as they finish, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, zip_longest
from pathlib import Path

import pytest

from ncclscope_agent.sources.inspector import InspectorReader
from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_agent.sources.nsys.export import ExportLimits, read_export
from ncclscope_service.pipeline import Pipeline
from ncclscope_simulator import SimulationConfig, write
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import Source, SourceKind

SECOND_NS = 1_000_000_000


def simulated_batches(
    config: SimulationConfig, folder: Path, *, portions: int, limits: ExportLimits | None = None
) -> list[Batch]:
    """Batches of all sources in turns; logs are cut into so many portions, exports as `limits` say."""
    write(config, folder)
    turns = zip_longest(*log_batches(folder, portions=portions), *export_batches(folder, limits))
    return [batch for batch in chain.from_iterable(turns) if batch is not None]


def log_batches(folder: Path, *, portions: int) -> list[Iterator[Batch]]:
    """By log and dump of NCCL Inspector, its batches in order."""
    logs = [
        _line_batches(
            log.read_bytes(), NcclLogReader(Source(kind=SourceKind.NCCL_LOG, name=log.name, key=log.name)), portions
        )
        for log in sorted((folder / "logs").iterdir())
    ]
    dumps = [
        _line_batches(
            dump.read_bytes(),
            InspectorReader(Source(kind=SourceKind.INSPECTOR, name=dump.name, key=dump.name)),
            portions,
        )
        for dump in sorted((folder / "inspector").glob("*"))
    ]
    return [*logs, *dumps]


def export_batches(folder: Path, limits: ExportLimits | None = None) -> list[Iterator[Batch]]:
    """By host, the batches of its exports in order."""
    hosts = folder / "nsys"
    return [_export_batches(host, limits) for host in sorted(hosts.iterdir())] if hosts.is_dir() else []


def _line_batches(data: bytes, reader: NcclLogReader | InspectorReader, portions: int) -> Iterator[Batch]:
    length = len(data) // portions + 1
    for begin in range(0, len(data), length):
        yield from reader.ingest_bytes(data[begin : begin + length], None)
    yield from reader.finish()


def _export_batches(host: Path, limits: ExportLimits | None) -> Iterator[Batch]:
    for export in sorted(host.rglob("*.sqlite")):
        key = f"{host.name}/{export.name}"
        yield from read_export(export, source=Source(kind=SourceKind.NSYS, name=key, key=key), limits=limits)


def advanced(pipeline: Pipeline, batches: list[Batch], *, since: int = 0) -> Pipeline:
    """The pipeline after these batches, a second of the service's clock each; `since`: how many came before."""
    for number, batch in enumerate(batches, start=since + 1):
        pipeline.ingest_batch(batch, agent="a", session="s", job="j")
        pipeline.process_backlog(number * SECOND_NS)
    return pipeline


def batches_by_job(
    jobs: Mapping[str, SimulationConfig], folders: pytest.TempPathFactory
) -> Callable[[str], list[Batch]]:
    """The batches of each of these jobs, simulated once, when they are asked for."""
    made: dict[str, list[Batch]] = {}

    def batches(job: str) -> list[Batch]:
        if job not in made:
            made[job] = simulated_batches(jobs[job], folders.mktemp("job"), portions=6)
        return made[job]

    return batches


def fed(pipeline: Pipeline, batches: list[Batch]) -> Pipeline:
    """The pipeline after these batches, of which nothing was worked on yet."""
    for batch in batches:
        pipeline.ingest_batch(batch, agent="a", session="s", job="j")
    return pipeline
