"""A simulated job as a service sees it: what came in each second, a tick, and in the middle a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ncclscope_agent.sources.inspector import InspectorReader
from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_agent.sources.nsys.export import read_export
from ncclscope_service.intake.agents import Received
from ncclscope_service.intake.journal_entry import Ticked
from ncclscope_service.keep.service_state import ServiceState
from ncclscope_service.metrics.exposition import Scrapes
from ncclscope_service.metrics.scrape import gather
from ncclscope_service.show.health import ServiceHealth
from ncclscope_simulator import Player, SimulationConfig
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import Source, SourceKind

_SECOND_NS: Final = 1_000_000_000
_SCRAPED_EVERY: Final = 10


class Replay:
    """The files of a job, read as far as they are written, and a service's state without its ports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: dict[Path, tuple[NcclLogReader | InspectorReader, int]] = {}
        self._exports: set[Path] = set()
        self._batches: list[tuple[str, Batch]] = []
        self._state = ServiceState()

    def read_logs(self, now_ns: int) -> None:
        """Reads what was written to logs and Inspector's dumps since the last call."""
        for kind, name in ((SourceKind.NCCL_LOG, "logs"), (SourceKind.INSPECTOR, "inspector")):
            for path in sorted(path for path in (self._folder / name).rglob("*") if path.is_file()):
                self._read_lines(path, kind, now_ns)

    def read_exports(self) -> None:
        """Reads the exports that have come since the last call."""
        for path in sorted((self._folder / "nsys").rglob("*.sqlite")):
            if path not in self._exports:
                self._exports.add(path)
                source = self._source(path, SourceKind.NSYS)
                self._batches += [("exports", each) for each in read_export(path, source=source)]

    def ingest(self) -> None:
        """Gives the service what was read."""
        for agent, batch in self._batches:
            self._state.ingest_batch(Received(agent=agent, session="s", job="job", host="", batch=batch))
        self._batches = []

    def tick(self, now_ns: int) -> None:
        """Has the service work on what came."""
        self._state.tick(Ticked(at_ns=now_ns), lambda _store, _operations: True)

    def restart(self) -> None:
        """Goes on from a snapshot."""
        self._state = ServiceState.restore(b"".join(bytes(part) for part in self._state.parts()))

    def metrics(self, now_ns: int) -> str:
        """The text of `/metrics`."""
        state = self._state
        pipeline = state.pipeline
        state.tally.count_rows(pipeline.store)
        view = gather(
            pipeline.store,
            tally=state.tally,
            aliases=state.aliases,
            agents=(),
            health=ServiceHealth(version="golden"),
            now_ns=now_ns,
            budget=state.budget,
            sums=pipeline.recent,
            series=pipeline.expected_series(),
        )
        return Scrapes().answer(view, accept="", accept_encoding="").body.decode()

    def findings(self) -> str:
        """All findings, a line each."""
        return "\n".join(repr(each) for each in self._state.findings())

    def _read_lines(self, path: Path, kind: SourceKind, now_ns: int) -> None:
        if path not in self._readers:
            make = NcclLogReader if kind is SourceKind.NCCL_LOG else InspectorReader
            self._readers[path] = make(self._source(path, kind)), 0
        reader, begin = self._readers[path]
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read()
        self._readers[path] = reader, begin + len(data)
        if data:
            self._batches += [("logs", each) for each in reader.ingest_bytes(data, now_ns)]

    def _source(self, path: Path, kind: SourceKind) -> Source:
        name = str(path.relative_to(self._folder))
        return Source(kind=kind, name=name, key=name)


def scrapes(config: SimulationConfig, folder: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of `/metrics` every ten seconds and at the end, and of what was found by then."""
    player, replay = Player(config, folder), Replay(folder)
    now_ns, second = config.start_ns, 0
    is_restarted = False
    while not player.over or now_ns < player.next_ns:
        now_ns, second = now_ns + _SECOND_NS, second + 1
        player.advance(now_ns)
        _ingest(replay, now_ns)
        replay.tick(now_ns)
        if not is_restarted and second >= _SCRAPED_EVERY // 2:
            replay.restart()
            is_restarted = True
        if second % _SCRAPED_EVERY == 0:
            yield f"metrics_{second}", replay.metrics(now_ns)
    player.finish()
    _ingest(replay, now_ns)
    for _ in range(3):
        now_ns += _SECOND_NS
        replay.tick(now_ns)
    yield "metrics_end", replay.metrics(now_ns)
    yield "findings_end", replay.findings()


def _ingest(replay: Replay, now_ns: int) -> None:
    replay.read_logs(now_ns)
    replay.read_exports()
    replay.ingest()
