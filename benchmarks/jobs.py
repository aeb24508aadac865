"""A job on disk as the batches that agents would send of it."""

from __future__ import annotations

from pathlib import Path

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_agent.sources.nsys.export import read_export
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import Source, SourceKind


def read(folder: Path) -> list[Batch]:
    """All batches of a job: its logs, then its exports."""
    return [batch for of in (read_logs(folder), read_exports(folder)) for batches in of.values() for batch in batches]


def read_logs(folder: Path) -> dict[str, list[Batch]]:
    """The batches of each log, by its name."""
    found: dict[str, list[Batch]] = {}
    for log in sorted((folder / "logs").iterdir()):
        reader = NcclLogReader(Source(kind=SourceKind.NCCL_LOG, name=log.name, key=log.name))
        found[log.name] = [*reader.ingest_bytes(log.read_bytes(), None), *reader.finish()]
    return found


def read_exports(folder: Path) -> dict[str, list[Batch]]:
    """The batches of each folder of exports, by its name: that of the host, in a simulated job."""
    found: dict[str, list[Batch]] = {}
    for export in sorted((folder / "nsys").rglob("*.sqlite")):
        key = str(export.relative_to(folder))
        batches = read_export(export, source=Source(kind=SourceKind.NSYS, name=key, key=key))
        found.setdefault(export.parent.name, []).extend(batches)
    return found
