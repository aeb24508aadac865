"""What the store learns is handed to the detectors of its job, and their findings are the store's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime

import numpy as np
import pytest
from service.log_batches import BASE_NS, Line, Reading, init, log_batch

from ncclscope_service.clock.host_clocks import Clocks
from ncclscope_service.columns.table import Ids
from ncclscope_service.detect.blind import HostCounters
from ncclscope_service.detect.context import group_from_communicator
from ncclscope_service.detect.detection import Detection, Detectors, SilenceClock
from ncclscope_service.job.ranks import assign_ranks
from ncclscope_service.store import rows, state
from ncclscope_service.store.records import Ending, FindingKind, Process
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Hosts, Store
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.facts import MachineCondition, ProgramFailure
from ncclscope_wire.records import CommunicatorEventKind, Counts, Source, SourceGap, SourceKind
from ncclscope_wire.terms import NO_TIME_NS

_SECOND = 1_000_000_000


class _Service:
    """Two ranks (or more) of one communicator, one per host."""

    def __init__(self, *, size: int = 2, jobs: Sequence[str] = ("j",)) -> None:
        self.reading = Reading()
        self.store = self.reading.store
        self.detection = Detection(self.store)
        self.clocks = Clocks(self.store, Hosts(self.store))
        for job in jobs:
            for rank in range(size):
                event = init(line=0, rank=rank, nranks=size, comm_id=1, host=f"node{rank}")
                self.reading.feed(log_batch([], host=f"node{rank}", events=[event]), job=job)
        assign_ranks(self.store)

    def log(self, rank: int, *lines: Line, job: str = "j") -> Ids:
        return self.feed(log_batch(lines, host=f"node{rank}"), job=job)

    def feed(self, batch: Batch, *, job: str = "j") -> Ids:
        ids = self.reading.feed(batch, job=job)
        self.detection.ingest_operations(self.store.operations.take(ids))
        return ids

    def advance(
        self,
        seconds: float = 0.0,
        *,
        measured: Columns | None = None,
        silent_hosts: frozenset[str] = frozenset(),
        final: bool = False,
    ) -> None:
        self.detection.process_collectives(
            np.empty(0, rows.COLLECTIVE) if measured is None else measured,
            BASE_NS + round(seconds * _SECOND),
            self.clocks,
            steps_ns={},
            silent_hosts=silent_hosts,
            thresholds={},
            final=final,
        )

    def look_on(self, begin: int, end: int, *, silent_hosts: frozenset[str] = frozenset()) -> None:
        """Looks every four seconds while nothing comes."""
        for second in range(begin, end, 4):
            self.advance(second, silent_hosts=silent_hosts)

    def work(self, seconds: int) -> None:
        """Both ranks log ten collectives in each of these seconds, after which it looks."""
        for begin in range(0, 10 * seconds, 10):
            for rank in (0, 1):
                self.log(rank, *_calls(begin, begin + 10))
            self.advance(0.1 * (begin + 10))

    def stop(self) -> None:
        """After five seconds rank 0 goes on and rank 1 does not."""
        self.work(5)
        self.log(0, *_calls(50, 51))

    def kinds(self) -> list[FindingKind]:
        return [finding.kind for finding in self.store.findings]

    def named(self) -> list[tuple[FindingKind, tuple[int, ...]]]:
        return [(finding.kind, finding.ranks) for finding in self.store.findings]


def _calls(begin: int, end: int, *, count: int = 1024) -> list[Line]:
    """Ten collectives a second, each on the line after its number."""
    return [
        Line(line=1 + number, count=count, logged_at_ns=BASE_NS + number * _SECOND // 10)
        for number in range(begin, end)
    ]


@pytest.mark.parametrize("new", [each.name for each in fields(Detectors)])
def test_a_detector_that_the_build_of_a_state_had_not_begins_without_findings(
    new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared_by = state.declared_by

    def declared_before(kind: type) -> tuple[str, ...]:
        return tuple(name for name in declared_by(kind) if (kind, name) != (Detectors, new))

    with monkeypatch.context() as earlier:
        earlier.setattr(state, "declared_by", declared_before)
        data = state.snapshot(Detectors())
    restored = state.restore(data, Detectors)
    assert type(getattr(restored, new)) is type(getattr(Detectors(), new))
    assert restored.findings(0) == []


def test_a_healthy_job_has_no_finding() -> None:
    service = _Service()
    service.work(10)
    assert service.store.findings == []


@pytest.mark.parametrize("is_stamped", [True, False])
def test_ranks_that_call_different_collectives_are_a_mismatch(*, is_stamped: bool) -> None:
    service = _Service(size=3)
    for rank, count in ((0, 1024), (1, 99), (2, 1024)):
        lines = [*_calls(0, 4), *_calls(4, 5, count=count)]
        service.log(rank, *(line if is_stamped else replace(line, logged_at_ns=NO_TIME_NS) for line in lines))
    service.advance(8, final=not is_stamped)
    (finding,) = service.store.findings
    assert (finding.kind, finding.ranks, finding.hosts) == (FindingKind.MISMATCH, (1,), ("node1",))
    assert finding.evidence["coll_seq"] == 4


def test_what_was_lost_of_a_host_is_no_mismatch_but_blindness() -> None:
    service = _Service()
    gap = SourceGap(reason="truncated", amount=500, unit="bytes")
    service.log(0, *_calls(0, 5))
    service.feed(replace(log_batch([*_calls(0, 2), *_calls(3, 5, count=99)], host="node1"), gaps=(gap,)))
    service.advance()
    assert service.kinds() == [FindingKind.BLIND]
    assert service.store.findings[0].hosts == ("node1",)


def test_what_was_lost_of_a_log_that_its_process_began_later_is_blindness_too() -> None:
    service = _Service()
    service.log(0, *_calls(0, 5))
    service.log(1, *_calls(0, 5))
    later = log_batch(_calls(5, 6), host="node1")
    source = Source(kind=SourceKind.NCCL_LOG, name="later", key="later")
    gap = SourceGap(reason="truncated", amount=500, unit="bytes")
    service.feed(replace(later, source=source, begin=0, end=1, gaps=(gap, gap)))
    service.advance()
    (finding,) = service.store.findings
    assert (finding.kind, finding.hosts, finding.evidence["gaps"]) == (FindingKind.BLIND, ("node1",), 2)


@pytest.mark.parametrize(("size", "blind"), [(1, [("node0",)]), (2, [])])
def test_what_was_lost_of_a_source_that_told_of_no_host_is_that_of_its_agent_where_it_has_one(
    size: int, blind: list[tuple[str, ...]]
) -> None:
    service = _Service(size=size)
    for rank in range(size):
        service.log(rank, *_calls(0, 5))
    gap = SourceGap(reason="malformed", amount=1, unit="files")
    export = Source(kind=SourceKind.NSYS, name="export", key="export")
    service.feed(Batch(source=export, begin=0, end=1, gaps=(gap,)))
    service.advance()
    assert [finding.hosts for finding in service.store.findings if finding.kind is FindingKind.BLIND] == blind


def test_a_rank_that_stops_while_others_go_on_is_named_as_hanging() -> None:
    service = _Service()
    service.stop()
    service.advance(6)
    assert service.kinds() == []
    service.look_on(8, 120)
    assert service.named() == [(FindingKind.HANG, (1,))]


def test_a_silence_in_which_the_service_itself_stood_still_is_no_hang() -> None:
    service = _Service()
    service.stop()
    service.advance(6)
    service.look_on(40, 44)
    assert service.kinds() == []
    service.look_on(44, 60)
    assert service.kinds() == [FindingKind.HANG], "from then on it is watched again"


def test_a_rank_whose_agent_is_out_of_reach_is_not_said_to_hang() -> None:
    service = _Service()
    service.stop()
    service.look_on(8, 120, silent_hosts=frozenset({"node1"}))
    assert service.kinds() == []


def test_a_communicator_that_was_destroyed_does_not_hang() -> None:
    service = _Service()
    service.stop()
    destroyed = init(line=90, kind=CommunicatorEventKind.DESTROY, host="node0")
    service.reading.feed(log_batch([], host="node0", events=[destroyed]))
    service.look_on(8, 120)
    assert service.kinds() == []


def test_silence_at_the_end_of_what_was_recorded_is_no_hang() -> None:
    service = _Service()
    service.stop()
    service.advance(3600, final=True)
    assert service.kinds() == []


def test_the_end_of_a_job_that_hangs_is_judged_until_it_goes_on() -> None:
    service = _Service()
    service.stop()
    service.advance(6)
    assert service.store.verdicts == {}
    service.look_on(8, 60)
    verdict = service.store.verdicts["j"]
    assert (verdict.ending, verdict.ranks, verdict.is_provisional) == (Ending.HANG, (1,), True)
    assert [(each.rank, each.behind, each.waits_for) for each in verdict.standing] == [(1, 1, ()), (0, 0, (1,))]
    late = [replace(line, logged_at_ns=BASE_NS + 61 * _SECOND) for line in _calls(50, 51)]
    service.log(1, *late)
    service.advance(62)
    assert service.store.verdicts == {}


def test_the_end_of_a_job_is_judged_once_it_is_silent_for_a_minute_or_over() -> None:
    service = _Service()
    for rank in (0, 1):
        service.log(rank, *_calls(0, 50))
    service.look_on(6, 62)
    assert service.store.verdicts == {}
    service.look_on(62, 80)
    verdict = service.store.verdicts["j"]
    assert (verdict.ending, verdict.is_provisional) == (Ending.ENDED_TOGETHER, True)
    service.advance(90, final=True)
    assert not service.store.verdicts["j"].is_provisional


@pytest.mark.parametrize(("silent_until", "endings"), [(None, []), (80, [Ending.ENDED_TOGETHER])])
def test_a_service_that_stops_says_nothing_of_the_end_of_a_job_that_goes_on(
    silent_until: int | None, endings: list[Ending]
) -> None:
    service = _Service()
    for begin in range(0, 50, 10):
        for rank in (0, 1):
            ids = service.log(rank, *_calls(begin, begin + 10))
            service.store.stamp_offsets.learn(service.store.operations.take(ids), BASE_NS + begin * _SECOND // 10)
        service.advance(0.1 * (begin + 10))
    if silent_until is not None:
        service.look_on(6, silent_until)
    service.advance(silent_until or 6, final=True)
    assert [verdict.ending for verdict in service.store.verdicts.values()] == endings


@pytest.mark.parametrize(
    ("fact", "other_pid", "ranks"),
    [
        (ProgramFailure(line=9, what="out of memory", text="CUDA out of memory.", global_rank=1), 10, (1,)),
        (ProgramFailure(line=9, what="exited", text="Signal 6 (SIGABRT) received by PID 10", pid=10), 11, (1,)),
        (ProgramFailure(line=9, what="exited", text="Signal 6 (SIGABRT) received by PID 10", pid=10), 10, ()),
    ],
)
def test_a_line_that_names_a_rank_or_a_pid_alone_is_of_the_only_process_that_has_it(
    fact: ProgramFailure, other_pid: int, ranks: tuple[int, ...]
) -> None:
    service = _Service()
    for rank in (0, 1):
        service.log(rank, *_calls(0, 50))
    service.store.processes[0] = replace(service.store.processes[0], pid=other_pid)
    service.detection.ingest_facts([fact], job="j", source="out.log", observed_at_ns=None)
    service.advance(90, final=True)
    assert (service.store.verdicts["j"].ending, service.store.verdicts["j"].ranks) == (Ending.CRASHED, ranks)


def test_operations_without_a_stamp_count_when_they_were_seen() -> None:
    service = _Service()
    for second in range(5):
        for rank in (0, 1):
            lines = [Line(line=1 + 10 * second + k) for k in range(10)]
            batch = replace(log_batch(lines, host=f"node{rank}"), observed_at_ns=BASE_NS + second * _SECOND)
            service.feed(batch)
        service.advance(second)
    service.feed(replace(log_batch([Line(line=60)], host="node0"), observed_at_ns=BASE_NS + 5 * _SECOND))
    service.look_on(8, 120)
    assert service.named() == [(FindingKind.HANG, (1,))]


def test_sends_that_no_receive_answers_hang_too() -> None:
    service = _Service()

    def exchange(rank: int, begin: int, end: int) -> None:
        op = ("Send", "Recv")[rank]
        lines = [
            Line(line=1 + k, op=op, root=1 - rank, logged_at_ns=BASE_NS + k * _SECOND // 10) for k in range(begin, end)
        ]
        service.log(rank, *lines)

    for begin in range(0, 50, 10):
        for rank in (0, 1):
            exchange(rank, begin, begin + 10)
        service.advance(0.1 * (begin + 10))
    exchange(0, 50, 51)
    service.look_on(8, 120)
    assert service.named() == [(FindingKind.HANG, (1,))]


def test_jobs_with_one_comm_id_are_judged_each_by_itself() -> None:
    service = _Service(jobs=("one", "two"))
    for job, count in (("one", 1024), ("two", 2048)):
        for rank in (0, 1):
            service.log(rank, *_calls(0, 5, count=count), job=job)
    service.advance()
    assert service.store.findings == []
    service.log(0, *_calls(5, 6), job="two")
    service.log(1, *_calls(5, 6, count=99), job="two")
    service.advance(20)
    assert [(finding.kind, finding.job) for finding in service.store.findings] == [(FindingKind.MISMATCH, "two")]


def test_captured_operations_that_find_no_kernel_make_a_host_blind() -> None:
    service = _Service()
    decided = {rank: service.log(rank, *_calls(0, 1200)) for rank in (0, 1)}
    matches = service.store.operations.rows["match"]
    matches[decided[0]] = Match.MATCHED
    matches[decided[1]] = np.where(np.arange(1200) < 300, Match.MATCHED, Match.UNMATCHED)
    for ids in decided.values():
        service.detection.count_decided(ids)
    service.advance(120)
    (finding,) = service.store.findings
    assert (finding.kind, finding.hosts) == (FindingKind.BLIND, ("node1",))
    assert (finding.evidence["covered"], finding.evidence["matched"]) == (1200, 300)


def test_operations_outside_of_captures_make_nobody_blind() -> None:
    service = _Service()
    for rank in (0, 1):
        ids = service.log(rank, *_calls(0, 1200))
        service.store.operations.rows["match"][ids] = Match.NOT_COVERED
        service.detection.count_decided(ids)
    service.advance(120)
    assert service.store.findings == []


def test_torn_lines_make_a_host_blind() -> None:
    service = _Service()
    service.log(0, *_calls(0, 1200))
    torn = replace(log_batch(_calls(0, 1200), host="node1"), counts=Counts(skipped={"torn": 300}))
    service.feed(torn)
    service.advance(120)
    service.advance(160)
    assert [(finding.kind, finding.hosts) for finding in service.store.findings] == [(FindingKind.BLIND, ("node1",))]


def test_torn_lines_of_a_file_of_two_hosts_are_not_counted_twice() -> None:
    store = Store()
    store.processes += [Process(host="node1", pid=1), Process(host="node2", pid=2)]
    store.source_hosts[0] = {"node1", "node2"}
    store.torn_lines[0] = 40
    counters = HostCounters(store)
    counters.count_operations(np.repeat(np.array([0, 1], np.int32), [3000, 1000]))
    assert {each.host: each.torn_lines for each in counters.visibility(["node1", "node2"])} == {
        "node1": 30,
        "node2": 10,
    }


def _collectives(busbw: Sequence[float], *, last_rank: int = 0, blame_ns: int = 0) -> Columns:
    """One every 100 ms from BASE_NS on, 1 MiB each."""
    joined = np.zeros(len(busbw), rows.COLLECTIVE)
    joined["size_class"], joined["message_bytes"], joined["ranks_seen"] = 2, 1 << 20, 2
    joined["coll_seq"] = np.arange(len(busbw))
    joined["end_true_ns"] = BASE_NS + np.arange(len(busbw)) * _SECOND // 10
    joined["transfer_ns"] = (1 << 20) * 1e9 / np.asarray(busbw)
    joined["first_start_true_ns"] = joined["end_true_ns"] - joined["transfer_ns"] - blame_ns
    joined["spread_ns"] = joined["wait_ns"] = joined["blame_ns"] = blame_ns
    joined["busy_ns"] = 2 * joined["transfer_ns"] + blame_ns
    joined["last_rank"], joined["busbw"], joined["confidence"] = last_rank, busbw, 1.0
    return joined


def test_a_rank_that_is_always_late_is_named() -> None:
    service = _Service(size=2)
    for rank in (0, 1):
        service.log(rank, *_calls(0, 1))
    late = _collectives([50e9] * 3000, last_rank=1, blame_ns=20_000_000)
    service.advance(measured=late, final=True)
    assert service.named() == [(FindingKind.LATE_RANK, (1,))]


def test_hours_at_once_find_what_seconds_at_a_time_find() -> None:
    busbw = [50e9] * 1500 + [10e9] * 1500
    whole, live = _Service(), _Service()
    for service in (whole, live):
        for rank in (0, 1):
            service.log(rank, *_calls(0, 1))
    whole.advance(measured=_collectives(busbw), final=True)
    for second, part in enumerate(np.split(_collectives(busbw), 300)):
        live.advance(second + 1, measured=part)
    assert whole.kinds() == live.kinds() == [FindingKind.BANDWIDTH_DROP]
    assert abs(whole.store.findings[0].since_ns - live.store.findings[0].since_ns) <= 2 * _SECOND


def test_collectives_without_a_time_are_left_out() -> None:
    service = _Service()
    timeless = _collectives([50e9] * 10)
    timeless["end_true_ns"] = NO_TIME_NS
    service.advance(measured=timeless)
    service.advance(measured=timeless, final=True)
    assert service.store.findings == []


SECOND_NS = 1_000_000_000


def test_while_looks_are_frequent_the_clock_is_that_of_the_looks() -> None:
    watched = SilenceClock()
    assert [watched.time_at(now * SECOND_NS) // SECOND_NS for now in (100, 101, 104, 108, 113)] == [
        100,
        101,
        104,
        108,
        113,
    ]


def test_the_time_in_which_nobody_looked_is_no_silence() -> None:
    watched = SilenceClock()
    watched.time_at(100 * SECOND_NS)
    assert watched.time_at(130 * SECOND_NS) == 100 * SECOND_NS
    assert watched.time_at(133 * SECOND_NS) == 103 * SECOND_NS


def test_a_silence_that_lasts_is_told_after_a_minute_whoever_stood_still() -> None:
    watched = SilenceClock()
    watched.time_at(100 * SECOND_NS)
    nows = range(130, 200, 5)
    looks = {now: watched.time_at(now * SECOND_NS) // SECOND_NS for now in nows}
    assert looks[185] == 155
    assert looks[190] == 190


def test_sentences_say_what_pytorch_calls_a_group() -> None:
    store = _Service().store
    (communicator,) = store.communicators
    assert group_from_communicator(store, communicator).name == "communicator 0x1"
    communicator.name, communicator.parallelism = "TENSOR_MODEL_PARALLEL_GROUP", "TP"
    assert group_from_communicator(store, communicator).name == "TP group 0x1 (TENSOR_MODEL_PARALLEL_GROUP)"


def _counters(service: _Service, host: str, *conditions: MachineCondition) -> None:
    source = Source(kind=SourceKind.MACHINE, name=f"counters of {host}", key=f"machine:{host}")
    service.detection.ingest_facts(conditions, job="j", source=source.name, observed_at_ns=BASE_NS)


def _condition(host: str, text: str, **fields: object) -> MachineCondition:
    """Since the first second."""
    made = MachineCondition(line=1, host=host, logged_at_ns=BASE_NS, device="mlx5_2 port 1", what="width", text=text)
    return replace(made, **fields)  # type: ignore[arg-type]


def test_a_finding_quotes_the_counters_that_may_explain_it() -> None:
    service = _Service()
    _counters(service, "node1", _condition("node1", "runs at 1x instead of 4x"))
    _counters(service, "node9", _condition("node9", "runs at 2x instead of 4x"))
    service.stop()
    service.advance(6)
    service.look_on(8, 120)
    (finding,) = service.store.findings
    assert finding.kind is FindingKind.HANG
    at = datetime.fromtimestamp(BASE_NS // _SECOND, tz=UTC).strftime("%H:%M")
    assert finding.evidence["machine"] == [f"mlx5_2 port 1 of node1 runs at 1x instead of 4x since {at} UTC"]
    assert finding.summary.endswith(f"; mlx5_2 port 1 of node1 runs at 1x instead of 4x since {at} UTC")


def test_a_gpu_is_named_with_its_rank_and_explains_no_other_one() -> None:
    service = _Service()
    seats = {("node0", 0x1B000): 0, ("node1", 0x1B000): 1}
    for member in service.store.members:
        member.bus_id = 0x1B000
    for host, _ in seats:
        text = "throttles: power (1,200 of 1,980 MHz)"
        _counters(service, host, _condition(host, text, device="GPU 0", what="throttle", gpu_bus_id=0x1B000))
    service.stop()
    service.advance(6)
    service.look_on(8, 120)
    (finding,) = service.store.findings
    quoted = finding.evidence["machine"]
    assert isinstance(quoted, list)
    assert len(quoted) == 1
    assert str(quoted[0]).startswith("GPU 0 of node1 (rank 1) throttles: power (1,200 of 1,980 MHz) since")


def test_a_fault_of_a_machine_is_a_finding_until_it_is_over() -> None:
    service = _Service()
    fault = _condition("node1", "is DOWN", what="state", is_fault=True)
    _counters(service, "node1", fault)
    service.advance(1)
    (finding,) = service.store.findings
    assert (finding.kind, finding.hosts, finding.until_ns) == (FindingKind.REPORTED_FAILURE, ("node1",), None)
    assert finding.summary.startswith("the machine's counters say: mlx5_2 port 1 of node1 is DOWN since ")
    _counters(service, "node1", replace(fault, is_over=True, logged_at_ns=BASE_NS + 9 * _SECOND))
    service.advance(10)
    (finding,) = service.store.findings
    assert finding.until_ns == BASE_NS + 9 * _SECOND
