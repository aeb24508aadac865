"""Plays a simulated job into a pipeline as it would have come live, and notes what was found when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from ncclscope_agent.sources.nccl_log import NcclLogReader
from ncclscope_agent.sources.nsys_export import read_export
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.rows import Finding
from ncclscope_simulator import Player, SimulationConfig
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import Source, SourceKind

SECOND_NS: Final = 1_000_000_000


@dataclass(slots=True)
class Followed:
    """One log file, read as far as it is written."""

    reader: NcclLogReader
    read: int = 0


@dataclass(slots=True)
class Seen:
    """One finding, from when to when it was open, in seconds of the job."""

    first: Finding
    last: Finding
    opened: float
    closed: float | None = None
    culprits: set[tuple[tuple[int, ...], tuple[str, ...]]] = field(
        default_factory=set[tuple[tuple[int, ...], tuple[str, ...]]]
    )
    """All (ranks, hosts) that it ever named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of one job."""

    seen: tuple[Seen, ...]
    seconds: float
    """How long the job was."""
    steps: dict[int, float]
    """By step: when it began, in seconds of the job."""
    longest_step: float


def play(config: SimulationConfig, folder: Path) -> Played:
    """Simulates a job into a folder and follows it, a second at a time."""
    player, pipeline = Player(config, folder), Pipeline()
    logs: dict[Path, Followed] = {}
    exports: set[Path] = set()
    known: dict[tuple[object, ...], Seen] = {}
    now = config.start_ns
    while not player.over or now < player.next_ns:
        now += SECOND_NS
        player.advance(now)
        for host, batch in [*_log_batches(folder, logs, now), *_export_batches(folder, exports)]:
            pipeline.feed(batch, agent=host, session="s", job="job")
        pipeline.advance(now)
        _note(known, pipeline.store.findings, (now - config.start_ns) / SECOND_NS)
    player.finish()
    steps = {
        step["iteration"]: (step["begin_ns"] - config.start_ns) / SECOND_NS
        for step in json.loads((folder / "truth" / "job.json").read_text())["iterations"]
    }
    begins = sorted(steps.values())
    return Played(
        seen=tuple(known.values()),
        seconds=(now - config.start_ns) / SECOND_NS,
        steps=steps,
        longest_step=max((after - before for before, after in pairwise(begins)), default=0.0),
    )


def _log_batches(folder: Path, logs: dict[Path, Followed], now: int) -> Iterator[tuple[str, Batch]]:
    for path in sorted((folder / "logs").iterdir()):
        if path not in logs:
            name = f"logs/{path.name}"
            logs[path] = Followed(NcclLogReader(Source(kind=SourceKind.NCCL_LOG, name=name, key=name)))
        followed = logs[path]
        with path.open("rb") as file:
            file.seek(followed.read)
            data = file.read()
        followed.read += len(data)
        if data:
            for batch in followed.reader.feed(data, now):
                yield path.name.split(".")[1], batch


def _export_batches(folder: Path, known: set[Path]) -> Iterator[tuple[str, Batch]]:
    for path in sorted((folder / "nsys").rglob("*.sqlite")):
        if path not in known:
            known.add(path)
            name = str(path.relative_to(folder))
            for batch in read_export(path, source=Source(kind=SourceKind.NSYS, name=name, key=name)):
                yield path.parent.name, batch


def _note(known: dict[tuple[object, ...], Seen], findings: list[Finding], second: float) -> None:
    for finding in findings:
        key = (finding.kind, finding.since_ns, finding.comm_id) if not finding.ranks and not finding.hosts else (
            finding.kind, finding.ranks, finding.hosts
        )  # fmt: skip
        seen = known.setdefault(key, Seen(finding, finding, second))
        seen.last = finding
        seen.culprits.add((finding.ranks, finding.hosts))
        if finding.until_ns is not None and seen.closed is None:
            seen.closed = second
