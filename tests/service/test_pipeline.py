"""The stages together: what comes in portions is decided as what comes at once, and what is finished may leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from service.log_batches import (
    BASE_NS,
    PERIOD_NS,
    Kernel,
    Line,
    Mark,
    Tuning,
    export_batch,
    init,
    log_batch,
    rank_batches,
)

from ncclscope_service.columns.table import Ids
from ncclscope_service.nccl.topology import Bottleneck
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.rows import LimitReference, Match
from ncclscope_service.store.settings import PipelineSettings, Sizes
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

_SECOND = 1_000_000_000
_HOSTS = ("node1", "node2")


class _Service:
    def __init__(self, settings: PipelineSettings | None = None) -> None:
        self.pipeline = Pipeline(settings)
        self.store = self.pipeline.store
        self._sessions = 0

    def feed(self, *batches: Batch, job: str = "j") -> None:
        for batch in batches:
            self._sessions += 1
            self.pipeline.ingest_batch(batch, agent="a", session=str(self._sessions), job=job)

    def flushed(self, *batches: Batch) -> Columns:
        """The operations after everything was decided."""
        self.feed(*batches)
        self.pipeline.finish(0)
        return self.store.operations.rows.copy()


def _part(numbers: range, *, size: int = 4) -> list[Batch]:
    """That part of a job of four ranks on two hosts, of which each is late in turn."""
    batches: list[Batch] = []
    for rank in range(size):
        host = _HOSTS[rank // 2]
        late_ns = 10_000 * ((numbers.start + rank) % size)
        batches += rank_batches(rank, numbers, host=host, pid=10 + rank, size=size, late_ns=late_ns)
    return batches


def _rank_of(rows: Columns, rank: int) -> Columns:
    found: Columns = rows[rows["member"] == rank]
    return found


def test_what_came_is_told_by_series_also_where_a_communicator_took_the_place_of_another() -> None:
    service = _Service()

    def log(begin: int, *, comm_id: int | None = None, name: str = "s") -> None:
        events = [] if comm_id is None else [init(line=begin, comm_id=comm_id, nranks=2)]
        lines = [Line(line=begin + number, nranks=2) for number in (1, 2, 3)]
        batch = log_batch(lines, events=events, begin=100 * begin)
        service.pipeline.ingest_batch(batch, agent="a", session=name, job="j")

    def expected() -> list[tuple[int, int]]:
        rows = service.pipeline.expected_series()
        found: list[tuple[int, int]] = rows[["operations", "bytes"]].tolist()
        return found

    for number, comm_id in enumerate((0xC0, 0xC1)):
        log(10 * number, comm_id=comm_id, name=f"begins {number}")
    service.pipeline.process_backlog(_SECOND)
    assert expected() == [(3, 3 * 4096)] * 2, "nothing is left to be counted"
    log(20, name="of the second")
    log(30, comm_id=0xC2, name="begins 2")
    log(40, name="of the third")
    assert expected() == [(3, 3 * 4096), (6, 6 * 4096)], "those of a series that is new come with the next pass"
    service.pipeline.process_backlog(2 * _SECOND)
    assert expected() == [(3, 3 * 4096), (6, 6 * 4096), (6, 6 * 4096)]


def test_a_collective_is_measured_over_its_ranks() -> None:
    service = _Service()
    batches = [
        batch for rank in (0, 1) for batch in rank_batches(rank, range(40), pid=10 + rank, late_ns=50_000 * rank)
    ]
    found = service.flushed(*batches)
    assert _rank_of(found, 0)["wait_ns"].tolist() == [50_000] * 40
    assert _rank_of(found, 1)["wait_ns"].tolist() == [0] * 40
    assert set(found["transfer_ns"].tolist()) == {130_000}
    assert set(found["busbw"].tolist()) == {4096e9 / 130_000}  # two ranks: the factor of AllReduce is 1
    collectives = service.store.collectives.rows
    assert collectives["last_rank"].tolist() == [1] * 40
    assert collectives["blame_ns"].tolist() == [50_000] * 40
    assert (found["limit_reference"] == LimitReference.BASELINE).all()


def test_operations_are_held_against_the_best_that_their_series_has_shown() -> None:
    service = _Service()
    for rank in (0, 1):
        service.feed(*rank_batches(rank, range(100), pid=10 + rank))
    service.pipeline.process_backlog(0)
    shown = float(service.store.series.rows["baseline"][0])
    assert shown == 4096e9 / 180_000
    for rank in (0, 1):
        service.feed(*rank_batches(rank, range(100, 140), pid=10 + rank))
    service.pipeline.finish(_SECOND)
    found = service.store.operations.rows
    later = found[found["coll_seq"] >= 100]
    assert (later["limit_reference"] == LimitReference.BASELINE).all()
    assert set(later["limit"].tolist()) == {shown}


def test_logs_alone_are_counted_and_finished_without_a_kernel() -> None:
    service = _Service()
    found = service.flushed(*(batch for batch in _part(range(10)) if len(batch.operations)))
    assert found["finished"].all()
    assert (found["match"] == Match.NOT_COVERED).all()
    assert np.isnan(found["busbw"]).all()
    assert (found["limit_reference"] == NO_NUMBER).all()
    assert service.store.series.rows[["operations", "matched", "collectives"]].tolist() == [(40, 0, 0)]


def test_operations_of_uncaptured_processes_are_given_up_after_a_while() -> None:
    service = _Service(PipelineSettings(hold_ns=5 * _SECOND))
    service.feed(rank_batches(0, range(10))[0])
    service.pipeline.process_backlog(0)
    service.feed(rank_batches(0, range(10, 15))[0])
    service.pipeline.process_backlog(3 * _SECOND)
    assert set(service.store.operations.rows["match"].tolist()) == {Match.PENDING}
    service.pipeline.process_backlog(5 * _SECOND)
    assert service.store.operations.rows["match"].tolist() == [Match.NOT_COVERED] * 10 + [Match.PENDING] * 5
    assert service.store.operations.rows["finished"].tolist() == [True] * 10 + [False] * 5
    assert service.store.skipped["held_too_many"] == 0
    service.pipeline.process_backlog(8 * _SECOND)
    assert service.store.operations.rows["finished"].all()


def test_of_operations_that_wait_for_a_capture_the_oldest_are_given_up_where_there_are_too_many() -> None:
    service = _Service(PipelineSettings(held_operations=60))
    for second in range(10):
        service.feed(rank_batches(0, range(10 * second, 10 * second + 10))[0])
        service.pipeline.process_backlog(10 * second * _SECOND)
    matches = service.store.operations.rows["match"].tolist()
    assert matches == [Match.NOT_COVERED] * 30 + [Match.PENDING] * 70  # a quarter more may wait
    assert service.store.skipped["held_too_many"] == 0  # nothing was ever captured: nothing was lost


def test_operations_that_waited_for_a_further_capture_are_counted_where_there_are_too_many() -> None:
    service = _Service(PipelineSettings(held_operations=60))
    service.feed(*rank_batches(0, range(20)))
    for second in range(2, 10):
        service.feed(rank_batches(0, range(10 * second, 10 * second + 10))[0])
        service.pipeline.process_backlog(10 * second * _SECOND)
    assert 0 < service.store.skipped["held_too_many"] <= 30


def test_operations_after_the_last_capture_are_given_up_too_and_leave_memory() -> None:
    service = _Service(PipelineSettings(hold_ns=5 * _SECOND, patience_ns=_SECOND, window_ns=5 * _SECOND))
    service.feed(*rank_batches(0, range(100)))
    for second in range(60):
        service.feed(rank_batches(0, range(100 + 100 * second, 200 + 100 * second))[0])
        service.pipeline.process_backlog(second * _SECOND)
        service.pipeline.evict(service.pipeline.evictable(second * _SECOND), second * _SECOND)
    assert len(service.store.operations) < 2_500


def test_the_last_lines_before_a_long_silence_get_their_kernels_and_keep_nothing_in_memory() -> None:
    settings = PipelineSettings(hold_ns=5 * _SECOND, patience_ns=_SECOND, settle_ns=_SECOND, window_ns=20 * _SECOND)
    service = _Service(settings)
    service.feed(*_part(range(30)))  # all of them are killed: no line tells that their communicators ended
    for second in range(10):
        service.feed(rank_batches(0, range(50 * second, 50 * second + 50), pid=99)[0], job="another")
        service.pipeline.process_backlog(second * _SECOND)
    rows = service.store.operations.rows
    assert (rows["match"][:120] == Match.MATCHED).all()
    assert rows["finished"][:120].all()
    for second in range(10, 60):
        service.feed(rank_batches(0, range(50 * second, 50 * second + 50), pid=99)[0], job="another")
        service.pipeline.process_backlog(second * _SECOND)
        service.pipeline.evict(service.pipeline.evictable(second * _SECOND), second * _SECOND)
    assert service.store.operations.first > 1000
    assert len(service.store.operations) < 50 * 25


def test_a_job_goes_on_as_before_after_a_silence_longer_than_the_window() -> None:
    settings = PipelineSettings(hold_ns=5 * _SECOND, patience_ns=_SECOND, settle_ns=_SECOND, window_ns=20 * _SECOND)
    service = _Service(settings)
    second = 0
    for numbers in (range(30), range(30, 60), range(60, 90)):
        service.feed(*_part(numbers))
        for _ in range(40):
            service.pipeline.process_backlog(second * _SECOND)
            service.pipeline.evict(service.pipeline.evictable(second * _SECOND), second * _SECOND)
            second += 1
    assert service.store.finished == {("j", Match.MATCHED): 360}
    assert service.store.skipped["line_came_after_its_kernel_was_forgotten"] == 0


def test_lines_that_come_after_their_kernels_have_left_are_without_them_and_counted() -> None:
    settings = PipelineSettings(hold_ns=5 * _SECOND, window_ns=20 * _SECOND)
    service = _Service(settings)
    log, export = rank_batches(0, range(30))
    service.feed(export)
    for second in range(60):
        service.pipeline.process_backlog(second * _SECOND)
        service.pipeline.evict(service.pipeline.evictable(second * _SECOND), second * _SECOND)
    service.feed(log)
    for second in range(60, 80):
        service.pipeline.process_backlog(second * _SECOND)
    assert service.store.operations.rows["match"].tolist() == [Match.UNMATCHED] * 30
    assert service.store.skipped["line_came_after_its_kernel_was_forgotten"] == 30


def test_a_collective_waits_for_a_rank_that_is_slow_to_report() -> None:
    service = _Service(PipelineSettings(patience_ns=100 * _SECOND))
    first, second = (rank_batches(rank, range(40), pid=10 + rank) for rank in (0, 1))
    service.feed(*first, second[0])
    service.pipeline.process_backlog(0)
    assert len(service.store.collectives) == 0
    service.feed(second[1])
    service.pipeline.process_backlog(50 * _SECOND)
    assert len(service.store.collectives) > 20
    assert not service.store.operations.rows["finished"].all()  # the newest may still turn out otherwise
    service.pipeline.finish(51 * _SECOND)
    assert len(service.store.collectives) == 40


def test_after_patience_a_collective_is_finished_without_the_rank_that_is_missing() -> None:
    service = _Service(PipelineSettings(patience_ns=100 * _SECOND))
    service.feed(*rank_batches(0, range(40)), rank_batches(1, range(40), pid=11)[0])
    service.pipeline.process_backlog(0)
    service.pipeline.process_backlog(101 * _SECOND)
    finished = service.store.operations.rows["finished"]
    assert np.count_nonzero(finished) > 20
    assert len(service.store.collectives) == 0
    assert (service.store.operations.rows["transfer_ns"] == NO_TIME_NS).all()
    assert int(service.store.series.rows["matched"][0]) == np.count_nonzero(finished)


def test_ranks_are_waited_for_less_long_where_a_window_of_operations_comes_sooner() -> None:
    service = _Service(PipelineSettings(patience_ns=100 * _SECOND, window_operations=100))
    service.feed(*rank_batches(0, range(40)), rank_batches(1, range(40), pid=11)[0])
    service.pipeline.process_backlog(0)
    for second in range(1, 13):
        service.feed(rank_batches(2, range(20 * second, 20 * second + 20), pid=12)[0])
        service.pipeline.process_backlog(second * _SECOND)
        is_finished = service.store.operations.rows["finished"][:40].any()
        assert is_finished == (second > 10)  # a window came after the first by then, and so they had `settle_ns`


def test_lines_that_come_long_behind_their_captures_are_not_given_up_for_others_in_the_queue() -> None:
    service = _Service(PipelineSettings(held_operations=320, aligned_at_once=1, hold_ns=1000 * _SECOND))
    ranks = [[rank_batches(rank, range(40 * part, 40 * part + 40), pid=10 + rank, size=4) for part in range(12)]
             for rank in range(4)]  # fmt: skip
    for parts in ranks:
        service.feed(parts[0][0], *(export for _, export in parts))
    now_ns = 0
    service.pipeline.process_backlog(now_ns)
    while service.pipeline.has_backlog:
        service.pipeline.process_backlog(now_ns)
    for part in range(1, 12):
        for parts in ranks:
            while service.pipeline.is_full:
                now_ns += _SECOND
                service.pipeline.process_backlog(now_ns)
            service.feed(parts[part][0])
        now_ns += _SECOND
        service.pipeline.process_backlog(now_ns)
    service.pipeline.finish(now_ns)
    assert service.store.skipped["held_too_many"] == 0
    rows = service.store.operations.rows
    assert (rows["match"] == Match.MATCHED).all()
    assert (rows["start_ns"] - rows["logged_at_ns"] == 20_000).all()


def test_memory_is_full_only_while_something_can_be_let_go() -> None:
    settings = PipelineSettings(held_operations=80, window_operations=5, aligned_at_once=1, hold_ns=1000 * _SECOND)
    service = _Service(settings)
    for rank in range(4):
        service.feed(rank_batches(rank, range(30), pid=10 + rank)[0])
    looks = [service.pipeline.is_full]
    service.pipeline.process_backlog(40 * _SECOND)
    looks.append(service.pipeline.is_full)
    assert looks == [False, True]  # only then one process of four was asked to give up
    gone = 0
    while service.pipeline.has_backlog:
        service.pipeline.process_backlog(41 * _SECOND)
        expired = service.pipeline.evictable(41 * _SECOND)
        service.pipeline.evict(expired, 41 * _SECOND)
        gone += len(expired)
    assert gone == 120 - 80
    assert len(service.store.operations) == 80


def test_finished_operations_may_leave_and_counters_stay() -> None:
    service = _Service(PipelineSettings(window_ns=10 * _SECOND))
    parts = [_part(range(begin, begin + 25)) for begin in range(0, 100, 25)]
    gone = 0
    for second, part in zip(range(0, 100, 25), parts, strict=True):
        service.feed(*part)
        service.pipeline.process_backlog(second * _SECOND)
        expired = service.pipeline.evictable(second * _SECOND)
        assert service.store.operations.take(expired)["finished"].all()
        service.pipeline.evict(expired, second * _SECOND)
        gone += len(expired)
    assert gone > 0
    assert service.store.operations.first == gone
    assert service.store.kernels.first > 0
    assert service.store.collectives.first > 0
    service.pipeline.finish(100 * _SECOND)
    assert service.store.operations.rows["finished"].all()
    found = service.store.series.rows[["operations", "matched", "collectives"]].tolist()
    assert found == [(400, 400, 100)]


def test_everything_leaves_once_it_is_finished_and_out_of_the_window() -> None:
    service = _Service(PipelineSettings(window_ns=10 * _SECOND))
    service.feed(*_part(range(50)))
    service.pipeline.process_backlog(0)
    service.pipeline.finish(_SECOND)
    assert service.pipeline.evictable(5 * _SECOND).tolist() == []
    expired = service.pipeline.evictable(10 * _SECOND)
    assert expired.tolist() == list(range(200))
    service.pipeline.evict(expired, 10 * _SECOND)
    assert (len(service.store.operations), len(service.store.kernels)) == (0, 0)


def test_more_operations_than_the_window_holds_may_leave_early() -> None:
    service = _Service(PipelineSettings(window_operations=30))
    service.feed(*(batch for batch in _part(range(10)) if len(batch.operations)))
    service.pipeline.finish(0)
    assert service.pipeline.evictable(0).tolist() == list(range(10))


def test_an_operation_that_is_still_open_keeps_those_after_it() -> None:
    service = _Service(PipelineSettings(window_operations=0))
    service.feed(rank_batches(0, range(5))[0], log_batch([Line(line=1, nranks=1)], pid=11))
    service.pipeline.process_backlog(0)
    service.store.operations.rows["finished"][5] = True
    assert service.pipeline.evictable(0).tolist() == []


def test_collectives_whose_ranks_disagree_stay_unmeasured_and_are_counted() -> None:
    service = _Service()
    sizes: Sequence[dict[int, int] | None] = (None, {5: 2048, 9: 77})
    batches = [batch for rank in (0, 1) for batch in rank_batches(rank, range(40), pid=10 + rank, counts=sizes[rank])]
    found = service.flushed(*batches)
    assert service.store.skipped["unjoinable_collective"] == 2
    unmeasured = found[found["transfer_ns"] == NO_TIME_NS]
    assert sorted(unmeasured["coll_seq"].tolist()) == [5, 5, 9, 9]
    assert np.isnan(unmeasured["busbw"]).all()
    assert found["finished"].all()
    assert sorted(set(range(40)) - set(service.store.collectives.rows["coll_seq"].tolist())) == [5, 9]


def test_ranks_that_call_another_operation_under_one_number_stay_unmeasured() -> None:
    service = _Service()
    first, second = (rank_batches(rank, range(40), pid=10 + rank) for rank in (0, 1))
    templates = second[0].operation_templates.copy()
    templates["op"][7] = OPERATION_CODES["Reduce"]
    names = list(second[1].strings)
    names[int(second[1].kernel_templates["name"][7])] = "ncclDevKernel_Reduce_Sum_f32_RING_LL"
    found = service.flushed(
        *first, replace(second[0], operation_templates=templates), replace(second[1], strings=tuple(names))
    )
    assert (found["match"] == Match.MATCHED).all()
    assert service.store.skipped["unjoinable_collective"] == 1
    assert 7 not in service.store.collectives.rows["coll_seq"].tolist()


def test_what_is_faster_than_its_wires_stays_unmeasured_and_is_a_guess() -> None:
    service = _Service()
    service.feed(*(batch for rank in (0, 1) for batch in rank_batches(rank, range(20), pid=10 + rank)))
    service.pipeline.process_backlog(0)
    service.store.communicators[0].bottleneck = Bottleneck(bytes_per_second=10e9, name="NVL")
    sizes = {25: 1_000_000}
    found = service.flushed(
        *(batch for rank in (0, 1) for batch in rank_batches(rank, range(20, 40), pid=10 + rank, counts=sizes))
    )
    assert service.store.skipped["faster_than_wires"] == 2
    unmeasured = found[found["transfer_ns"] == NO_TIME_NS]
    assert unmeasured["coll_seq"].tolist() == [25, 25]
    assert np.isnan(unmeasured["busbw"]).all()
    assert (unmeasured["confidence"] <= 0.5).all()
    assert np.nanmax(found["busbw"]) < 10e9
    assert found["finished"].all()


def test_kernels_of_one_host_that_do_not_overlap_are_no_collective() -> None:
    service = _Service()
    first = rank_batches(0, range(40))
    second = rank_batches(1, range(40), pid=11, offset_ns=400_000)
    found = service.flushed(*first, *second)
    assert (found["match"] == Match.MATCHED).all()
    assert service.store.skipped["unjoinable_collective"] == 40
    assert (found["wait_ns"] == NO_TIME_NS).all()
    assert len(service.store.collectives) == 0


def test_a_capture_without_a_session_start_gives_no_coverage() -> None:
    log, export = rank_batches(0, range(10))
    (capture,) = export.captures
    recorded = (capture.start_ns, capture.end_ns)
    known, unknown = _Service(), _Service()
    found = known.flushed(log, export_batch([], captured_ns=recorded))
    assert set(found["match"].tolist()) == {Match.UNMATCHED}
    nameless = export_batch([], captured_ns=recorded, missing=("TARGET_INFO_SESSION_START_TIME",))
    found = unknown.flushed(log, nameless)
    assert set(found["match"].tolist()) == {Match.NOT_COVERED}


def _pair(*, size: int = 2) -> Iterable[Batch]:
    """Rank 0 sends to rank 1 forty times; rank 1 is 100 us late."""
    for rank, op in enumerate(("Send", "Recv")):
        lines = [
            Line(line=2 + k, op=op, op_count=k, root=1 - rank, nranks=size, logged_at_ns=BASE_NS + k * PERIOD_NS)
            for k in range(40)
        ]
        kernels = [
            Kernel(
                name="ncclDevKernel_SendRecv", launch_ns=line.logged_at_ns + 5_000, correlation_id=1 + k,
                start_ns=line.logged_at_ns + 10_000 + 100_000 * rank, end_ns=line.logged_at_ns + 400_000,
            )
            for k, line in enumerate(lines)
        ]  # fmt: skip
        yield log_batch(lines, pid=10 + rank, events=[init(line=1, pid=10 + rank, rank=rank, nranks=size, comm_id=1)])
        yield export_batch(kernels, pid=10 + rank, captured_ns=(BASE_NS - PERIOD_NS, BASE_NS + 41 * PERIOD_NS))


def test_a_send_and_its_receive_are_measured_together() -> None:
    service = _Service()
    found = service.flushed(*_pair())
    assert _rank_of(found, 0)["wait_ns"].tolist() == [100_000] * 40
    assert _rank_of(found, 1)["wait_ns"].tolist() == [0] * 40
    assert set(found["transfer_ns"].tolist()) == {290_000}
    assert set(found["busbw"].tolist()) == {4096e9 / 290_000}
    assert set(found["ranks_seen"].tolist()) == {2}
    assert service.store.communicators[0].parallelism is None, "one group that calls one thing may be a benchmark"
    assert (service.store.collectives.rows["coll_seq"] == NO_NUMBER).all()


def test_a_send_whose_receive_never_comes_is_finished_without_a_transfer() -> None:
    service = _Service(PipelineSettings(patience_ns=10 * _SECOND))
    sends = list(_pair())[:2]
    service.feed(*sends)
    service.pipeline.process_backlog(0)
    service.pipeline.process_backlog(11 * _SECOND)
    service.pipeline.finish(12 * _SECOND)
    found = service.store.operations.rows
    assert found["finished"].all()
    assert (found["match"] == Match.MATCHED).all()
    assert (found["transfer_ns"] == NO_TIME_NS).all()


def test_one_rank_alone_needs_no_kernel_and_waits_for_nobody() -> None:
    service = _Service()
    service.feed(
        log_batch([Line(line=2, nranks=1)], events=[init(line=1, nranks=1, comm_id=1)]),
        export_batch([], captured_ns=(BASE_NS, BASE_NS + PERIOD_NS)),
    )
    service.pipeline.process_backlog(0)
    (row,) = service.store.operations.rows
    assert int(row["match"]) == Match.NO_KERNEL
    assert bool(row["finished"])


def test_bytes_tuning_lines_and_iterations_are_noted_on_the_way() -> None:
    service = _Service()
    log, export = rank_batches(0, range(40))
    tuned = log_batch(
        [Line(line=2, count=7, logged_at_ns=BASE_NS)], events=[init(line=1, pid=12, comm_id=2, nranks=1)], pid=12,
        tunings=[Tuning(line=3, bytes=28, channels=4), Tuning(line=4, bytes=1)],
    )  # fmt: skip
    marks = [Mark(text="iteration 5", start_ns=BASE_NS, end_ns=BASE_NS + 20 * PERIOD_NS)]
    service.feed(tuned)
    found = service.flushed(log, export_batch([], marks=marks, name="marks"), export)
    assert (int(found["message_bytes"][0]), int(found["channels"][0])) == (28, 4)
    assert service.pipeline.unattached_tunings == 1
    assert found["iteration"][1:].tolist() == [5] * 20 + [NO_NUMBER] * 20


def test_stamps_in_another_zone_are_moved_process_by_process() -> None:
    service = _Service()
    hour_ns = 3600 * _SECOND
    log, export = rank_batches(0, range(40))
    operations = log.operations.copy()
    operations["logged_at_ns"] += hour_ns
    service.feed(replace(log, operations=operations), export, rank_batches(1, range(40), pid=11)[0])
    asked: list[tuple[int, int]] = []

    def fit(stamps: Ids, launches: Ids) -> int | None:
        asked.append((len(stamps), len(launches)))
        return hour_ns

    assert service.pipeline.shift_stamps(fit) == {0: hour_ns}
    assert asked == [(40, 40)]
    times = service.store.operations.rows["logged_at_ns"].tolist()
    assert times == [BASE_NS + k * PERIOD_NS for k in range(40)] * 2
    assert service.pipeline.shift_stamps(lambda stamps, launches: None) == {}


def test_ranks_and_parallelism_are_told_as_soon_as_members_are_known() -> None:
    service = _Service(PipelineSettings(sizes=Sizes(dp=4)))
    service.feed(*_part(range(30)))
    service.pipeline.process_backlog(0)
    assert [member.global_rank for member in service.store.members] == [0, 1, 2, 3]
    assert [member.local_rank for member in service.store.members] == [0, 1, 0, 1]
    assert service.store.communicators[0].parallelism == "DP"


def test_of_many_ranks_names_are_told_soon_and_not_at_each_change() -> None:
    service = _Service()

    def start(pid: int) -> None:
        events = [
            init(line=line, pointer=line, rank=pid, nranks=2, comm_id=line, pid=pid, cuda_device=pid)
            for line in range(1, 2_001)
        ]
        service.feed(log_batch([], pid=pid, events=events))

    def told() -> list[bool]:
        members = service.store.members
        return [member.global_rank is not None for member in (members[0], members[-1])]

    start(0)
    service.pipeline.process_backlog(0)
    assert told() == [True, True]
    start(1)
    service.pipeline.process_backlog(_SECOND // 4)
    assert told() == [True, False]
    service.pipeline.process_backlog(_SECOND // 2)
    assert told() == [True, True]
    start(2)
    service.pipeline.finish(_SECOND)
    assert told() == [True, True]


def test_jobs_do_not_meet() -> None:
    service = _Service()
    for job in ("one", "two"):
        for rank in (0, 1):
            service.feed(*rank_batches(rank, range(40), pid=10 + rank, host=job), job=job)
    service.pipeline.finish(0)
    assert [(each.job, each.comm_id) for each in service.store.communicators] == [("one", "0xc0"), ("two", "0xc0")]
    assert len(service.store.collectives) == 80


def test_an_empty_pipeline_can_be_advanced_and_flushed() -> None:
    service = _Service()
    service.pipeline.process_backlog(0)
    expired = service.pipeline.evictable(0)
    service.pipeline.evict(expired, 0)
    service.pipeline.finish(1)
    assert expired.tolist() == []
    assert service.store.findings == []
