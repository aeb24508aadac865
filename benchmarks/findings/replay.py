"""Plays a simulated job into a pipeline as it would have come live, and notes what was found when.

Or plays into new detectors what those of the job were fed (`feeds.py`): the same findings, without the job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from benchmarks.findings import peers
from benchmarks.findings.feeds import KeepingDetectors, Kept
from benchmarks.findings.peers import PeerNames

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
    by_peers: PeerNames

    @property
    def longest_step(self) -> float:
        """In seconds."""
        begins = sorted(self.steps.values())
        return max((after - before for before, after in pairwise(begins)), default=0.0)


def play(config: SimulationConfig, folder: Path, lagging: Mapping[str, float] | None = None) -> tuple[Played, Kept]:
    """Simulates a job into a folder and follows it, a second at a time; gives what its detectors were fed, too.

    `lagging`: by host, seconds by which its exports come later than they are finished.
    """
    player, kept = Player(config, folder), Kept(start_ns=config.start_ns)
    pipeline = Pipeline(make_detectors=lambda: KeepingDetectors(kept))
    logs: dict[Path, Followed] = {}
    exports: dict[Path, int] = {}
    lags = {host: int(seconds * SECOND_NS) for host, seconds in (lagging or {}).items()}
    known: dict[tuple[object, ...], Seen] = {}
    now = config.start_ns
    while not player.over or now < player.next_ns or any(when > now for when in exports.values()):
        now += SECOND_NS
        player.advance(now)
        for host, batch in [*_log_batches(folder, logs, now), *_export_batches(folder, exports, lags, now)]:
            pipeline.feed(batch, agent=host, session="s", job="job")
        pipeline.advance(now)
        _note(known, pipeline.store.findings, (now - config.start_ns) / SECOND_NS)
    player.finish()
    kept.steps = {
        step["iteration"]: (step["begin_ns"] - config.start_ns) / SECOND_NS
        for step in json.loads((folder / "truth" / "job.json").read_text())["iterations"]
    }
    kept.seconds = (now - config.start_ns) / SECOND_NS
    kept.by_peers = peers.names(folder)
    return _played(kept, known), kept


def play_again(kept: Kept) -> Played:
    """The same from what the detectors of a job were fed."""
    known: dict[tuple[object, ...], Seen] = {}
    kept.play(lambda findings, second: _note(known, findings, second))
    return _played(kept, known)


def _played(kept: Kept, known: dict[tuple[object, ...], Seen]) -> Played:
    return Played(seen=tuple(known.values()), seconds=kept.seconds, steps=kept.steps, by_peers=kept.by_peers)


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


def _export_batches(
    folder: Path, known: dict[Path, int], lags: Mapping[str, int], now: int
) -> Iterator[tuple[str, Batch]]:
    """`known`: by export, when it comes."""
    for path in sorted((folder / "nsys").rglob("*.sqlite")):
        if 0 <= now - known.setdefault(path, now + lags.get(path.parent.name, 0)) < SECOND_NS:
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
