"""What the detectors of a simulated job are fed, kept in a file: so that they can be tried anew without the job."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.findings.peers import PeerNames

from ncclscope_service.clock_check import ClockCheck
from ncclscope_service.detect.blind import HostSight
from ncclscope_service.detect.context import Context
from ncclscope_service.detect.detectors import Detectors
from ncclscope_service.detect.reported import Said
from ncclscope_service.rows import Finding, HostClock
from ncclscope_wire.batch import Columns


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
        """Writes it, to be read by `read` of the same version."""
        file.write_bytes(pickle.dumps(self, protocol=5))


def read(file: Path) -> Kept:
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

    def feed_collectives(self, collectives: Columns, context: Context) -> None:
        """As `Detectors`."""
        self._note("feed_collectives", collectives.copy(), context)
        super().feed_collectives(collectives, context)

    def feed_progress(self, progress: Columns, context: Context) -> None:
        """As `Detectors`."""
        self._note("feed_progress", progress.copy(), context)
        super().feed_progress(progress, context)

    def feed_calls(self, calls: Columns, context: Context) -> None:
        """As `Detectors`."""
        self._note("feed_calls", calls.copy(), context)
        super().feed_calls(calls, context)

    def feed_facts(self, said: Iterable[Said], context: Context) -> None:
        """As `Detectors`."""
        told = list(said)
        self._note("feed_facts", told, context)
        super().feed_facts(told, context)

    def feed_clock(self, check: ClockCheck, hosts: Sequence[str], context: Context, at_ns: int) -> None:
        """As `Detectors`."""
        self._note("feed_clock", check, tuple(hosts), context, at_ns)
        super().feed_clock(check, hosts, context, at_ns)

    def feed_clock_steps(self, clocks: Mapping[str, HostClock], context: Context) -> None:
        """As `Detectors`."""
        self._note("feed_clock_steps", dict(clocks), context)
        super().feed_clock_steps(clocks, context)

    def feed_sight(self, sight: HostSight, context: Context, now_ns: int) -> None:
        """As `Detectors`."""
        self._note("feed_sight", sight, context, now_ns)
        super().feed_sight(sight, context, now_ns)

    def findings(self, now_ns: int, *, watched_ns: int | None = None) -> list[Finding]:
        """As `Detectors`."""
        self._note("findings", now_ns)
        return super().findings(now_ns, watched_ns=watched_ns)
