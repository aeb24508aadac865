"""A service that runs for weeks: what it holds stays as it is, while captures, logs and jobs come and go."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from types import FunctionType, MethodType, ModuleType

import numpy as np
import pytest
from service.log_batches import BASE_NS, PERIOD_NS, Kernel, Line, export_batch, init, log_batch
from wire.sample_batches import HELLO

from ncclscope_service.columns.buckets import LastingSums
from ncclscope_service.columns.table import Ids, Table
from ncclscope_service.export.selection import select
from ncclscope_service.export.summary import summary_document
from ncclscope_service.intake.journal_entry import Ticked
from ncclscope_service.intake.receive import Receiver
from ncclscope_service.keep.service_state import ServiceState
from ncclscope_service.store.rows import Match
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import encode_message
from ncclscope_wire.frame import encode_frame
from ncclscope_wire.messages import BatchMessage, Goodbye, Message
from ncclscope_wire.records import CommunicatorEvent, CommunicatorEventKind, SourceGap

_SECOND = 1_000_000_000
_HOUR = 3600 * _SECOND
_CALLS = 12

_LIMITED = {
    "_Remembered": "align.graph_replays.REMEMBERED_LINES",
    "JobHistory": "columns.buckets.MOST_BUCKETS",
    "TuningJoin._fresh": "tuning._FRESH",
    "Coverage": "align.coverage.INTERVALS_KEPT",
    "Anchors": "align.by_order.after_gap._KEPT",
    "GapHistory": "align.by_order.after_gap._HISTORY",
    "_Windows": "series._KEPT_WINDOWS",
    "_Grid": "detect.late_rank._MOST_REMEMBERED",
    "RecentCalls": "detect.recent_calls.WINDOW",
    "ScatterByKind._kinds": "one for each operation and size",
    "ChannelSilence._gaps": "detect.pauses._GAPS_KEPT",
    "SourceGaps._kept": "source_gaps.GAPS_KEPT",
    "KnownAgent._positions": "receive.ReceiveLimits.max_sources",
    "Dictionaries": "receive.ReceiveLimits.max_sources",
    "_Session": "receive.ReceiveLimits.max_sources",
    "Ledger": "detect.findings._CLOSED_KEPT",
    "Finding": "detect.findings._CLOSED_KEPT",
    "_Job.findings": "detect.findings._CLOSED_KEPT",
    "Store.findings": "detect.findings._CLOSED_KEPT",
}
"""What grows up to a limit that this test does not reach: by class or attribute, with the name of the limit."""


class _Service:
    """A service without its ports and its disk."""

    def __init__(self, settings: PipelineSettings | None = None) -> None:
        self.state = ServiceState(settings)
        self.receiver = Receiver(agents=self.state.agents)
        self.connections = 0
        self.now_ns = BASE_NS

    @property
    def store(self) -> Store:
        return self.state.pipeline.store

    def wait(self, seconds: float) -> None:
        """Works on what came, so much later."""
        self.now_ns += round(seconds * _SECOND)
        self.state.tick(Ticked(at_ns=self.now_ns, priors=(), silent=None, trouble=""), _archived)
        assert not self.state.pipeline.errors.counts

    def restart(self) -> None:
        self.state = ServiceState.restore(b"".join(self.state.parts()))
        self.state.mark_restarted(self.now_ns)
        self.receiver = Receiver(agents=self.state.agents)


def _archived(known: Store, operations: Ids) -> bool:
    del known, operations
    return True


class _Rank:
    """One rank of a job of two, each on a host of its own, with an agent of its own."""

    def __init__(self, service: _Service, job: str, rank: int, *, pid: int = 10) -> None:
        self.service, self.rank, self.host, self.pid = service, rank, f"node{rank}", pid + rank
        self._job, self._calls, self._line, self._end, self._sent = job, 0, 1, 0, 0
        self._logs, self._captures = 0, 0
        self.connect()

    def work(self, *, gaps: int = 0) -> None:
        """Calls AllReduce _CALLS times, and is captured meanwhile."""
        first, begins = self._calls, [self.service.now_ns + number * PERIOD_NS for number in range(_CALLS)]
        gap = SourceGap(reason="truncated", amount=3, unit="bytes", detail="cut")
        self.send(replace(self._log(begins), gaps=(gap,) * gaps))
        kernels = [
            Kernel(launch_ns=each + 10_000, start_ns=each + 20_000, end_ns=each + 200_000, correlation_id=first + at)
            for at, each in enumerate(begins, 1)
        ]
        captured_ns = begins[0] - PERIOD_NS // 2, begins[-1] + PERIOD_NS // 2
        self.send(
            export_batch(kernels, host=self.host, pid=self.pid, captured_ns=captured_ns, name=f"part{self._captures}")
        )
        self._captures += 1

    def rotate(self) -> None:
        """Its log is renamed, and another one begun."""
        self.send(replace(self._log([]), is_last=True))
        self._logs, self._end, self._line = self._logs + 1, 0, 1

    def send(self, batch: Batch) -> None:
        self._sent += 1
        self._say(BatchMessage(sequence=self._sent, batch=batch))

    def destroy(self) -> None:
        """It comes to its end in order."""
        event = self._event(CommunicatorEventKind.DESTROY)
        self.send(replace(self._log([]), communicators=(event,), is_last=True))
        self._say(Goodbye(reason="stopping"))
        self.kill()

    def kill(self) -> None:
        """Nothing is heard of it any more."""
        self.service.receiver.on_disconnected(self._connection)

    def _log(self, begins: list[int]) -> Batch:
        numbered = enumerate(begins)
        lines = [Line(line=self._line + 1 + at, op_count=self._calls + at, logged_at_ns=each) for at, each in numbered]
        is_first = self._end == 0
        events = [self._event(CommunicatorEventKind.INIT_COMPLETE)] if is_first and not self._logs else []
        whole = log_batch(lines or [Line(line=1)], host=self.host, pid=self.pid, events=events)
        operations = whole.operations[: len(lines)].copy()
        operations["template"] = 0  # all are of one call
        source = replace(whole.source, key=f"{whole.source.key}.{self._logs}")
        batch = replace(
            whole, source=source, operations=operations, operation_templates=whole.operation_templates[:1],
            begin=self._end, end=self._end + 100,
        )  # fmt: skip
        self._line, self._calls, self._end = self._line + len(lines) + 1, self._calls + len(lines), self._end + 100
        if is_first:
            return batch
        none = whole.operation_templates[:0]
        return replace(batch, strings=(), threads=whole.threads[:0], operation_templates=none)

    def _event(self, kind: CommunicatorEventKind) -> CommunicatorEvent:
        comm_id = 0xC000 + self.pid - self.rank
        return init(line=self._line, kind=kind, rank=self.rank, host=self.host, pid=self.pid, comm_id=comm_id)

    def connect(self) -> None:
        """It says Hello, for the first time or again."""
        name = f"{self._job}-{self.rank}"
        self.service.connections += 1
        self._connection = self.service.connections
        self.service.receiver.open(self._connection)
        hello = replace(HELLO, agent_id=name, session_id=f"s{self.pid}", name=name, host=self.host, job=self._job)
        self._say(hello)

    def _say(self, message: Message) -> None:
        data = encode_frame(encode_message(message))
        outcome = self.service.receiver.on_bytes(self._connection, data, self.service.now_ns)
        assert outcome.fault is None
        for received in outcome.received:
            self.service.state.ingest_batch(received)


def _held(root: object) -> Counter[str]:
    """How many elements (bytes of arrays) the containers below an object hold, by the attribute that has them."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen or isinstance(value, Enum | type | ModuleType | FunctionType | MethodType):
            continue
        seen.add(id(value))
        if isinstance(value, Table):
            found[name] += len(value)
        elif isinstance(value, np.ndarray):
            found[name] += value.nbytes
        elif isinstance(value, dict | list | tuple | set | frozenset | deque):
            found[name] += len(value)
            waiting += [(name, each) for each in value]
            waiting += [(name, each) for each in value.values()] if isinstance(value, dict) else []
        elif isinstance(value, LastingSums):
            found[name] += len(value.begins())
        elif type(value).__module__.startswith("ncclscope"):
            waiting += [(f"{type(value).__name__}.{each}", getattr(value, each)) for each in _attributes(value)]
    return found


def _attributes(value: object) -> Iterator[str]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    yield from (name for name in (*slots, *getattr(value, "__dict__", ())) if hasattr(value, name))


def _grown(before: Counter[str], after: Counter[str]) -> dict[str, tuple[int, int]]:
    """What holds more than before, but for what has a limit that is not reached."""
    return {
        name: (before[name], amount)
        for name, amount in sorted(after.items())
        if amount > before[name] and not name.startswith(tuple(_LIMITED))
    }


def _rounds(service: _Service, ranks: list[_Rank], rounds: range) -> None:
    """A job works for a minute every two hours."""
    for number in rounds:
        for rank in ranks:
            rank.work(gaps=number % 3 == 1)
            if number % 2:
                rank.rotate()
        for seconds in (2, 10, 40, 700, 950, 7200 - 1702):
            service.wait(seconds)


@pytest.mark.slow
def test_captures_and_rotated_logs_and_gaps_of_weeks_take_no_more_than_those_of_a_day() -> None:
    service = _Service()
    ranks = [_Rank(service, "train", rank) for rank in (0, 1)]
    _rounds(service, ranks, range(12))
    day = _held(service.state)
    _rounds(service, ranks, range(12, 48))
    assert not _grown(day, _held(service.state))
    calls = 48 * 2 * _CALLS
    assert sum(service.store.finished.values()) == calls
    assert service.store.finished["train", Match.MATCHED] == calls
    summary = summary_document(select(service.store))
    assert summary["level"] == "logs and nsys"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ended", "killed", "restarted"])
def test_of_jobs_that_came_and_went_only_names_and_sums_stay(way: str) -> None:
    service = _Service()
    sizes: list[int] = []
    for number in range(24):
        job = "train" if way == "restarted" else f"job{number}"
        ranks = [_Rank(service, job, rank, pid=100 + 2 * number) for rank in (0, 1)]
        for rank in ranks:
            rank.work()
        service.wait(30)
        for rank in ranks:
            rank.work()
        service.wait(10)
        for rank in ranks:
            (rank.destroy if way == "ended" else rank.kill)()
        for seconds in (60, 700, 950, 4 * 3600 - 1750):
            service.wait(seconds)
        sizes.append(sum(map(len, service.state.parts())))
    assert service.store.finished.total() == 24 * 4 * _CALLS
    assert len(service.store.operations) == len(service.store.kernels) == 0
    assert (sizes[-1] - sizes[11]) / 12 < 8_000  # of each job, of two processes


def test_a_job_that_speaks_again_after_days_is_judged_and_measured_again() -> None:
    service = _Service(PipelineSettings(gone_ns=_HOUR))
    ranks = [_Rank(service, "train", rank) for rank in (0, 1)]
    _rounds(service, ranks, range(2))
    assert not _jobs_judged(service)
    for rank in ranks:
        rank.work()
    for seconds in (2, 700, 950):
        service.wait(seconds)
    assert _jobs_judged(service) == {"train"}
    assert service.store.finished == {("train", Match.MATCHED): 3 * 2 * _CALLS}


def test_a_service_that_was_restarted_forgets_the_same() -> None:
    whole, restarted = _Service(PipelineSettings(gone_ns=_HOUR)), _Service(PipelineSettings(gone_ns=_HOUR))
    for service in (whole, restarted):
        ranks = [_Rank(service, "train", rank) for rank in (0, 1)]
        for number in range(4):
            _rounds(service, ranks, range(number, number + 1))
            if service is restarted:
                service.restart()
                for rank in ranks:
                    rank.connect()
    for table in ("sources", "captures", "gaps", "retired", "finished", "source_hosts", "process_source"):
        assert getattr(whole.store, table) == getattr(restarted.store, table)


def test_the_place_of_a_source_goes_to_another_only_when_none_of_its_rows_is_left() -> None:
    service = _Service()
    ranks = [_Rank(service, "train", rank) for rank in (0, 1)]
    for _ in range(10):
        for rank in ranks:
            rank.work(gaps=1)
            rank.rotate()
        service.wait(60)
        names = [service.store.sources[source].source.name for source in service.store.kernels.rows["source"].tolist()]
        processes = service.store.kernels.rows["process"].tolist()
        assert all(name.startswith("part") for name in names)
        assert len({*zip(names, processes, strict=True)}) == len({*names}) * 2
    before = len(service.store.sources)
    _rounds(service, ranks, range(8))
    known = service.store
    assert len(known.sources) <= before + 4  # of 24 more
    assert known.retired.kinds.total() >= 20
    gaps = sum(known.retired.gaps.values()) + sum(map(len, known.gaps.values()))
    assert gaps == 20 + 6  # two ranks in ten rounds, and in three of the eight behind them


def _jobs_judged(service: _Service) -> set[str]:
    return set(service.state.pipeline._detection._jobs)  # pyright: ignore[reportPrivateUsage]
