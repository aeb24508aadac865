"""Time that others lose to a rank: per step, over what is usual, and not for what it was held up itself."""

from __future__ import annotations

import time

import numpy as np
import pytest
from service import fake_service as fake

from ncclscope_service.columns.buckets import BUCKET_NS
from ncclscope_service.detect.lost_time_history import LostTimeHistory
from ncclscope_service.job.step_times import STEP
from ncclscope_service.serve.routes import to_json
from ncclscope_service.show.details import JobQuery
from ncclscope_service.show.lost_time import MAX_COLUMNS, MAX_ROWS, LostTimeView, lost_time_view
from ncclscope_service.store.job_history import LOST, STEPS
from ncclscope_service.store.records import Communicator, Identity, Member, Process
from ncclscope_service.store.rows import COLLECTIVE
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

_STEP_NS = 400_000_000
_STEPS = 60
_MS = 1_000_000


class _Job:
    """Four ranks on two hosts: tp-0 (0, 1), tp-1 (2, 3), dp-0 (0, 2), dp-1 (1, 3), a world and perhaps a pipeline."""

    def __init__(self, *others: tuple[str, tuple[int, ...]]) -> None:
        self.store = Store()
        for rank in range(4):
            self.store.processes.append(Process(host=f"node{rank // 2 + 1}", pid=rank + 1))
            self.store.process_job.append("job")
        groups = [("TP", (0, 1)), ("TP", (2, 3)), ("DP", (0, 2)), ("DP", (1, 3)), ("WORLD", (0, 1, 2, 3)), *others]
        for index, (parallelism, ranks) in enumerate(groups):
            members = {rank: len(self.store.members) + rank for rank in range(len(ranks))}
            for rank, global_rank in enumerate(ranks):
                self.store.members.append(
                    Member(index=members[rank], communicator=index, process=global_rank, pointer=1, epoch=0, rank=rank,
                           cuda_device=0, bus_id=None, global_rank=global_rank, local_rank=0))  # fmt: skip
            self.store.communicators.append(
                Communicator(index=index, job="job", comm_id=f"0x{index}", size=len(ranks), identity=Identity.COMM_ID,
                             parallelism=parallelism, members=members))  # fmt: skip
        steps = np.zeros(_STEPS, STEP)
        steps["iteration"], steps["duration_ns"] = np.arange(_STEPS), _STEP_NS
        steps["started_ns"] = np.arange(_STEPS) * _STEP_NS
        self.store.step_histories["job"].add(steps)

    def add(self, communicator: int, last_rank: int, blame_ms: float, *, op: str = "AllReduce", steps: range = range(_STEPS)) -> _Job:  # fmt: skip # noqa: E501
        """A collective in each of these steps to which that rank of the communicator comes so late."""
        rows = np.zeros(len(steps), COLLECTIVE)
        rows["communicator"], rows["op"], rows["last_rank"] = communicator, OPERATION_CODES[op], last_rank
        rows["blame_ns"], rows["rank"] = blame_ms * _MS, NO_NUMBER
        rows["end_true_ns"] = np.array(steps) * _STEP_NS + 1000
        self.store.collectives.append(rows)
        return self

    def exchange(self, communicator: int, rank: int, wait_ms: float) -> _Job:
        """A receive in each step in which that rank waits so long."""
        rows = np.zeros(_STEPS, COLLECTIVE)
        rows["communicator"], rows["rank"], rows["wait_ns"] = communicator, rank, wait_ms * _MS
        rows["last_rank"] = rows["blame_ns"] = NO_NUMBER
        rows["end_true_ns"] = np.arange(_STEPS) * _STEP_NS + 1000
        self.store.collectives.append(rows)
        return self

    def asked(self, after_steps: int = _STEPS) -> JobQuery:
        return fake.asked_of(self.store, "job", after_steps * _STEP_NS)

    def view(self, only: str | None = None) -> LostTimeView:
        asked = self.asked()
        return lost_time_view(asked, None if only is None else asked.communicator(only))

    def rows(self) -> Columns:
        table = self.store.collectives
        return table.rows.take(np.arange(len(table)))

    def kept(self, of: int) -> list[float]:
        """By rank, what the history of the job has of the steps."""
        history = self.store.job_histories["job"]
        whole = history.lost_time.whole(history.window("job", 0, _STEPS * _STEP_NS), np.arange(4))
        return [float(each) for each in whole[of]]

    def now_ms(self) -> dict[int, float]:
        return {row.worst_rank: (row.now_ns or 0) / _MS for row in self.view().rows}


def healthy(*others: tuple[str, tuple[int, ...]]) -> _Job:
    """Each group loses 0.2 ms to each of its ranks, as groups do."""
    job = _Job(*others)
    for communicator in range(4):
        job.add(communicator, 0, 0.2)
        job.add(communicator, 1, 0.2)
    return job


def test_of_a_healthy_job_nobody_loses_anything_to_anybody() -> None:
    view = healthy().view()
    assert (view.per, view.step_ns, view.by, view.rows_known) == ("step", _STEP_NS, "rank", 4)
    assert [(row.ranks, row.host, row.now_ns) for row in view.rows] == [
        ((0,), "node1", 0), ((1,), "node1", 0), ((2,), "node2", 0), ((3,), "node2", 0)
    ]  # fmt: skip
    assert all(lost == 0 for row in view.rows for lost in row.lost_us)
    assert view.holdups == ()


def test_what_is_lost_to_a_late_rank_is_its_lateness_over_what_is_usual() -> None:
    view = healthy().add(0, 1, 4.0).view()
    assert [row.now_ns for row in view.rows] == [0, 4 * _MS, 0, 0]
    assert set(view.rows[1].lost_us) == {4000}
    (holdup,) = view.holdups
    assert (holdup.rank, holdup.host, holdup.communicator, holdup.parallelism) == (1, "node1", "tp-0", "TP")
    assert (holdup.ranks, holdup.lost_ns, holdup.because_of) == ((0,), 4 * _MS, None)


def test_a_rank_that_was_held_up_itself_is_not_to_blame_but_shows_in_the_chain() -> None:
    job = healthy().add(0, 1, 4.0).add(2, 0, 4.0)
    assert job.now_ms() == {0: 0, 1: 4, 2: 0, 3: 0}
    first, second = job.view().holdups
    assert (first.rank, first.ranks, first.because_of) == (1, (0,), None)
    assert (second.rank, second.communicator, second.ranks, second.because_of) == (0, "dp-0", (2,), 1)


def test_a_rank_that_waited_in_its_pipeline_is_not_to_blame() -> None:
    job = healthy(("PP", (0, 2))).add(2, 0, 5.0)
    assert job.now_ms()[0] == pytest.approx(4.8)
    assert job.exchange(5, 0, 5.0).now_ms()[0] == 0


def test_in_outer_groups_a_delay_counts_once_and_not_in_each_operation_until_the_next_step() -> None:
    job = healthy().add(2, 0, 5.0).add(2, 0, 5.0).add(2, 0, 5.0)
    assert job.now_ms()[0] == pytest.approx(5, abs=0.5)


def test_rooted_operations_and_worlds_beside_a_pipeline_accuse_nobody() -> None:
    assert healthy().add(0, 1, 9.0, op="Broadcast").now_ms()[1] == 0
    assert max(_Job(("PP", (0, 2))).add(4, 3, 9.0).now_ms().values(), default=0) == 0
    world = _Job().add(4, 3, 9.0).add(4, 0, 0.1)
    assert world.now_ms()[3] == pytest.approx(9, abs=0.1)


def test_now_is_the_last_steps_and_the_map_says_since_when() -> None:
    view = healthy().add(0, 1, 4.0, steps=range(10, _STEPS)).view()
    lost = [0 if each is None else each for each in view.rows[1].lost_us]
    assert view.begin_ns is not None
    began = view.begin_ns + lost.index(4000) * view.column_ns
    assert began == 10 * _STEP_NS
    healed = healthy().add(0, 1, 4.0, steps=range(10)).view()
    assert [row.now_ns for row in healed.rows] == [0, 0, 0, 0]
    assert max(each or 0 for each in healed.rows[1].lost_us) == 4000


def test_steps_that_were_captured_in_part_or_not_at_all_are_holes() -> None:
    job = _Job()
    for communicator in range(4):
        for _ in range(4):
            job.add(communicator, 0, 0.1, steps=range(20))
            job.add(communicator, 0, 0.1, steps=range(40, _STEPS))
        job.add(communicator, 0, 0.1, steps=range(20, 21))
    (row, *_) = job.view().rows
    assert row.lost_us[19] is not None
    assert set(row.lost_us[20:40]) == {None}
    assert row.lost_us[40] is not None


def test_of_one_communicator_the_map_is_of_its_ranks() -> None:
    view = healthy().add(0, 1, 4.0).view("tp-0")
    assert [row.ranks for row in view.rows] == [(0,), (1,)]
    assert [row.now_ns for row in view.rows] == [0, 4 * _MS]
    assert healthy().view("world-0").rows == ()


def test_what_was_measured_while_the_clock_of_a_host_was_unknown_has_no_place_on_the_map() -> None:
    job, begin_ns = healthy(), healthy().view("tp-0").begin_ns
    rows = job.store.collectives.rows.take(np.arange(3))
    rows["end_true_ns"] = NO_TIME_NS
    job.store.collectives.append(rows)
    assert job.view("tp-0").begin_ns == job.view().begin_ns == begin_ns


def test_without_kernels_nothing_is_made_up() -> None:
    view = _Job().view()
    assert (view.begin_ns, view.rows, view.holdups) == (None, (), ())


def test_while_steps_are_not_known_times_are_per_second() -> None:
    job = healthy().add(0, 1, 4.0)
    job.store.step_histories.clear()
    view = job.view()
    assert (view.per, view.step_ns) == ("second", 1_000_000_000)
    assert view.rows[1].now_ns == pytest.approx(4 * _MS * 2.5, rel=0.3)


def test_many_ranks_are_shown_by_host_with_the_worst_of_each() -> None:
    shape = fake.Shape(nodes=16, per_node=8, late_rank=37, noise=0.0)
    store = fake.StoreMaker(shape, now_ns=fake.NOW_NS).make()
    view = lost_time_view(fake.asked_of(store))
    assert (view.by, view.rows_known, len(view.rows)) == ("host", 16, 16)
    worst = max(view.rows, key=lambda row: row.now_ns or 0)
    assert (worst.host, worst.worst_rank, len(worst.ranks)) == ("gpu-node04", 37, 8)
    assert view.holdups[0].rank == 37


@pytest.mark.slow
def test_four_thousand_ranks_are_a_small_map_soon() -> None:
    """Prints what one answer costs; its size is what is tested."""
    store = fake.StoreMaker(fake.Shape(nodes=512, per_node=8), now_ns=fake.NOW_NS).make()
    asked = fake.asked_of(store)
    began = time.process_time()
    view = lost_time_view(asked)
    took, body = time.process_time() - began, to_json(view)
    print(f"{len(store.collectives):,} collectives: {took * 1e3:.0f} ms, {len(body) / 1e3:.0f} kB")  # noqa: T201
    assert (len(view.rows), view.rows_known) == (MAX_ROWS, 512)
    assert all(len(row.lost_us) <= MAX_COLUMNS for row in view.rows)
    assert len(body) < 100_000


def _whole(job: _Job, *, after_steps: int = _STEPS) -> LostTimeView:
    return lost_time_view(job.asked(after_steps).over_the_whole_job())


def _mean_us(view: LostTimeView, rank: int) -> list[int | None]:
    (row,) = (row for row in view.rows if row.ranks == (rank,))
    return list(row.lost_us)


def test_the_whole_job_is_shown_when_its_collectives_have_left_memory() -> None:
    job = healthy().add(0, 1, 4.0)
    history, table = LostTimeHistory(), job.store.collectives
    history.ingest(job.rows(), 0)
    history.process(job.store, "job", 0, _STEP_NS, final=True)
    table.drop_before(table.next_id)
    view = _whole(job, after_steps=3 * _STEPS)
    assert view.begin_ns == 0
    assert view.column_ns == BUCKET_NS
    filled = -(-_STEPS * _STEP_NS // BUCKET_NS)
    assert _mean_us(view, 1) == [4000] * filled + [None] * (len(_mean_us(view, 1)) - filled)
    assert set(_mean_us(view, 0)[:filled]) == {0}
    assert [row.now_ns for row in view.rows] == [None] * 4
    assert view.holdups == ()
    assert job.view().rows == (), "memory holds nothing"


@pytest.mark.parametrize("at_once", [1, 3, 7, _STEPS])
def test_what_is_kept_and_what_is_in_memory_make_one_map_in_whatever_portions_it_came(at_once: int) -> None:
    job = healthy().add(0, 1, 4.0, steps=range(20, _STEPS))
    expected = [_mean_us(_whole(job), rank) for rank in range(4)]
    assert expected[1][:4] == [0, 1667, 4000, 4000], "5 of the 12 steps of the second five seconds"
    history, rows = LostTimeHistory(), job.rows()
    steps = rows["end_true_ns"] // _STEP_NS
    for step in range(0, _STEPS, at_once):
        history.ingest(rows[(steps >= step) & (steps < step + at_once)], step * _STEP_NS)
        history.process(job.store, "job", (step + at_once) * _STEP_NS, _STEP_NS, final=False)
    kept = job.store.job_histories["job"]
    assert 0 < kept.lost_until_ns < (_STEPS - 1) * _STEP_NS, "the last steps may still grow"
    assert min(job.kept(STEPS)) > 0
    assert [_mean_us(_whole(job), rank) for rank in range(4)] == expected
    history.process(job.store, "job", (_STEPS + 1000) * _STEP_NS, _STEP_NS, final=False)
    assert job.kept(STEPS) == [_STEPS] * 4, "nothing came for a minute: the last steps have ended"
    assert job.kept(LOST) == [0, 40 * 4 * _MS, 0, 0]


def test_steps_that_come_late_are_added_and_parts_of_steps_are_not() -> None:
    job = healthy()
    history, rows = LostTimeHistory(), job.rows()
    steps = rows["end_true_ns"] // _STEP_NS
    late = (steps >= 10) & (steps < 14)
    part = (steps == 30) & (rows["last_rank"] == 0)
    for given in (rows[~late & ~part], np.concatenate([rows[late], rows[part]])):
        history.ingest(given, 0)
        history.process(job.store, "job", 0, _STEP_NS, final=True)
    assert set(job.kept(STEPS)) == {_STEPS - 1}


def test_without_the_length_of_a_step_it_is_per_second_until_that_is_known() -> None:
    job = healthy().add(0, 1, 4.0)
    history, rows = LostTimeHistory(), job.rows()
    is_first = rows["end_true_ns"] < 10 * 10**9
    history.ingest(rows[is_first], 0)
    history.process(job.store, "job", 0, None, final=True)
    kept = job.store.job_histories["job"]
    flags = [kept.is_lost_per_step]
    assert 0 < min(job.kept(STEPS)) <= 10
    history.ingest(rows[~is_first], 0)
    history.process(job.store, "job", 0, _STEP_NS, final=True)
    flags.append(kept.is_lost_per_step)
    assert flags == [False, True]
    assert job.kept(STEPS) == [_STEPS - 25] * 4


def test_of_one_communicator_the_map_reaches_as_far_as_memory() -> None:
    job = healthy().add(0, 1, 4.0)
    asked = job.asked()
    assert lost_time_view(asked.over_the_whole_job(), asked.communicator("tp-0")) == job.view("tp-0")
