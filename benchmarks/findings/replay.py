"""Plays a simulated job into a pipeline as it would have come live, and notes what was found when.

Or plays into new detectors what those of the job were fed, which a file can keep: the same findings, without the job.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from benchmarks.findings import peers
from benchmarks.findings.peers import PeerNames

from ncclscope_agent.sources.inspector import InspectorReader
from ncclscope_agent.sources.kineto.batches import read_trace
from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_agent.sources.nsys.export import read_export
from ncclscope_service.clock.causality import ClockCheck
from ncclscope_service.detect.blind import HostVisibility
from ncclscope_service.detect.context import Context
from ncclscope_service.detect.detection import Detectors
from ncclscope_service.detect.lossy_calls import NumberedCalls
from ncclscope_service.detect.reported import LoggedFact
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.records import Finding, HostClock
from ncclscope_simulator import Player, SimulationConfig
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.records import Source, SourceKind


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a method of `Detectors`."""

    method: str
    given: tuple[object, ...]


@dataclass(slots=True, kw_only=True)
class Kept:
    """One job as its detectors saw it."""

    calls: list[_Call] = field(default_factory=list[_Call])
    start_ns: int
    seconds: float = 0.0
    steps: dict[int, float] = field(default_factory=dict[int, float])
    """By step: when it began, in seconds of the job."""
    by_peers: PeerNames = field(default_factory=PeerNames)

    def play(self, note: Callable[[list[Finding], float], None]) -> None:
        """Feeds new detectors; `note` gets their findings and the second of the job, each time they were asked."""
        detectors = Detectors()
        for call in self.calls:
            answer = getattr(detectors, call.method)(*call.given)
            if call.method == "findings" and isinstance(call.given[0], int):
                note(answer, (call.given[0] - self.start_ns) * 1e-9)

    def write(self, file: Path) -> None:
        """Writes it, to be read by `read_kept` of the same version."""
        file.write_bytes(pickle.dumps(self, protocol=5))


def read_kept(file: Path) -> Kept:
    """What `write` wrote. Only for files of one's own: pickle runs what it is told."""
    kept = pickle.loads(file.read_bytes())
    if not isinstance(kept, Kept):
        raise TypeError(f"{file} holds no feeds of detectors: remove it")
    return kept


class KeepingDetectors(Detectors):
    """Detectors that note what they are fed."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept

    def _note(self, method: str, *given: object) -> None:
        self._kept.calls.append(_Call(method, given))

    def ingest_collectives(self, collectives: Columns, context: Context) -> None:
        """As `Detectors`."""
        self._note("ingest_collectives", collectives.copy(), context)
        super().ingest_collectives(collectives, context)

    def ingest_progress(self, progress: Columns, context: Context) -> None:
        """As `Detectors`."""
        self._note("ingest_progress", progress.copy(), context)
        super().ingest_progress(progress, context)

    def ingest_calls(self, calls: Columns, context: Context) -> None:
        """As `Detectors`."""
        self._note("ingest_calls", calls.copy(), context)
        super().ingest_calls(calls, context)

    def ingest_facts(self, logged: Sequence[LoggedFact], context: Context) -> None:
        """As `Detectors`."""
        self._note("ingest_facts", logged, context)
        super().ingest_facts(logged, context)

    def ingest_clock_check(self, check: ClockCheck, hosts: Sequence[str], context: Context, at_ns: int) -> None:
        """As `Detectors`."""
        self._note("ingest_clock_check", check, tuple(hosts), context, at_ns)
        super().ingest_clock_check(check, hosts, context, at_ns)

    def ingest_clock_steps(self, clocks: Mapping[str, HostClock], context: Context) -> None:
        """As `Detectors`."""
        self._note("ingest_clock_steps", dict(clocks), context)
        super().ingest_clock_steps(clocks, context)

    def ingest_visibility(self, seen: Sequence[HostVisibility], context: Context, now_ns: int) -> None:
        """As `Detectors`."""
        self._note("ingest_visibility", seen, context, now_ns)
        super().ingest_visibility(seen, context, now_ns)

    def findings(
        self,
        now_ns: int,
        *,
        silence_at_ns: int | None = None,
        numbered: Callable[[int], NumberedCalls | None] = lambda _: None,
    ) -> list[Finding]:
        """As `Detectors`; what was numbered in the end is not kept."""
        self._note("findings", now_ns)
        return super().findings(now_ns, silence_at_ns=silence_at_ns, numbered=numbered)


SECOND_NS: Final = 1_000_000_000


@dataclass(slots=True)
class Followed:
    """One file of lines, read as far as it is written."""

    reader: NcclLogReader | InspectorReader
    read: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A batch of a host, as an agent sends it."""

    host: str
    batch: Batch
    begins_ns: int
    """When the capture of an export began; else when it came."""


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
    by_peers: PeerNames = field(default_factory=PeerNames)

    @property
    def longest_step(self) -> float:
        """In seconds."""
        begins = sorted(self.steps.values())
        return max((after - before for before, after in pairwise(begins)), default=0.0)


def play(config: SimulationConfig, folder: Path, lagging: Mapping[str, float] | None = None) -> tuple[Played, Kept]:
    """Simulates a job into a folder and follows it, a second at a time; gives what its detectors were fed, too.

    `lagging`: by host, seconds by which its exports come later than they are finished.
    """
    kept, known = Kept(start_ns=config.start_ns), dict[tuple[object, ...], Seen]()
    pipeline = Pipeline(make_detectors=lambda: KeepingDetectors(kept))
    now = config.start_ns
    for arrived in arrivals(config, folder, lagging):
        now += SECOND_NS
        for each in arrived:
            pipeline.ingest_batch(each.batch, agent=each.host, session="s", job="job")
        pipeline.process_backlog(now)
        note(known, pipeline.store.findings, (now - config.start_ns) / SECOND_NS)
    kept.steps = steps_of(config, folder)
    kept.seconds = (now - config.start_ns) / SECOND_NS
    kept.by_peers = peers.names(folder)
    return _played(kept, known), kept


def arrivals(
    config: SimulationConfig, folder: Path, lagging: Mapping[str, float] | None = None
) -> Iterator[list[Arrival]]:
    """Simulates a job into a folder; gives what comes of it in each second, and traces of PyTorch's profiler last.

    Exports whose ranges have payloads give operations too, as where no log names their processes.
    """
    player, now = Player(config, folder), config.start_ns
    followed: dict[Path, Followed] = {}
    exports: dict[Path, int] = {}
    lags = {host: int(seconds * SECOND_NS) for host, seconds in (lagging or {}).items()}
    while not player.over or now < player.next_ns or any(when > now for when in exports.values()):
        now += SECOND_NS
        player.advance(now)
        logged = frozenset[int]() if config.nvtx_payload else None
        yield [*_lines(folder, followed, now), *_exports(folder, exports, lags, now, logged)]
    player.finish()
    traces = list(_traces(folder, now))
    if traces:
        yield traces


def steps_of(config: SimulationConfig, folder: Path) -> dict[int, float]:
    """By step of a simulated job: when it began, in seconds of the job."""
    steps = json.loads((folder / "truth" / "job.json").read_text())["iterations"]
    return {step["iteration"]: (step["begin_ns"] - config.start_ns) / SECOND_NS for step in steps}


def play_again(kept: Kept) -> Played:
    """The same from what the detectors of a job were fed."""
    known: dict[tuple[object, ...], Seen] = {}
    kept.play(lambda findings, second: note(known, findings, second))
    return _played(kept, known)


def _played(kept: Kept, known: dict[tuple[object, ...], Seen]) -> Played:
    return Played(seen=tuple(known.values()), seconds=kept.seconds, steps=kept.steps, by_peers=kept.by_peers)


def _lines(folder: Path, known: dict[Path, Followed], now: int) -> Iterator[Arrival]:
    for path in sorted(each for name in ("logs", "inspector") for each in (folder / name).glob("*")):
        if path not in known:
            is_log, name = path.parent.name == "logs", f"{path.parent.name}/{path.name}"
            source = Source(kind=SourceKind.NCCL_LOG if is_log else SourceKind.INSPECTOR, name=name, key=name)
            known[path] = Followed(NcclLogReader(source) if is_log else InspectorReader(source))
        followed = known[path]
        with path.open("rb") as file:
            file.seek(followed.read)
            data = file.read()
        followed.read += len(data)
        host = path.name.split(".")[1] if path.parent.name == "logs" else path.name.split("-pid")[0]
        for batch in followed.reader.ingest_bytes(data, now) if data else ():
            yield Arrival(host, batch, now)


def _traces(folder: Path, now: int) -> Iterator[Arrival]:
    for path in sorted((folder / "kineto").glob("*")):
        name = str(path.relative_to(folder))
        for batch in read_trace(path, source=Source(kind=SourceKind.KINETO, name=name, key=name)):
            yield Arrival(path.name.split("_")[0], batch, now)


def _exports(
    folder: Path, known: dict[Path, int], lags: Mapping[str, int], now: int, logged: frozenset[int] | None
) -> Iterator[Arrival]:
    """`known`: by export, when it comes; `logged`: as `read_export`."""
    for path in sorted((folder / "nsys").rglob("*.sqlite")):
        if 0 <= now - known.setdefault(path, now + lags.get(path.parent.name, 0)) < SECOND_NS:
            name = str(path.relative_to(folder))
            batches = list(read_export(path, source=Source(kind=SourceKind.NSYS, name=name, key=name), logged=logged))
            begins_ns = min(capture.start_ns for batch in batches for capture in batch.captures)
            for batch in batches:
                yield Arrival(path.parent.name, batch, begins_ns)


def note(known: dict[tuple[object, ...], Seen], findings: list[Finding], second: float) -> None:
    """Notes what was found at that second of the job."""
    for finding in findings:
        key = (finding.kind, finding.since_ns, finding.comm_id) if not finding.ranks and not finding.hosts else (
            finding.kind, finding.ranks, finding.hosts
        )  # fmt: skip
        seen = known.setdefault(key, Seen(finding, finding, second))
        seen.last = finding
        seen.culprits.add((finding.ranks, finding.hosts))
        if finding.until_ns is not None and seen.closed is None:
            seen.closed = second
