"""Counters of series grow by each operation once, and busbw is a median of recent windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from service.log_batches import Line, Reading, init, log_batch

from ncclscope_service.columns.table import Ids
from ncclscope_service.nccl.bandwidth import SIZE_CLASSES
from ncclscope_service.rollup.series import SeriesBook
from ncclscope_service.store import rows
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS, OPERATION_CODES

_SECOND = 1_000_000_000
_CLASS = SIZE_CLASSES.index("4KiB")


class _Service:
    """Two ranks of one communicator."""

    def __init__(self) -> None:
        self.reading = Reading()
        self.store = self.reading.store
        self.book = SeriesBook(self.store)
        for rank in (0, 1):
            self.reading.feed(log_batch([], pid=10 + rank, events=[init(line=0, pid=10 + rank, rank=rank, comm_id=1)]))

    def log(self, *lines: Line, rank: int = 0) -> Ids:
        return self.reading.feed(log_batch(lines, pid=10 + rank))

    def count_logged(self, ids: Ids) -> None:
        self.book.count_run(self.store.operations.take(ids))

    def run(self, ids: Ids, *, kernel_ns: int, wait_ns: int) -> None:
        at = self.store.operations.at(ids)
        table = self.store.operations.rows
        table["start_ns"][at], table["end_ns"][at], table["wait_ns"][at] = 50, 50 + kernel_ns, wait_ns


def _collectives(ends_ns: Sequence[int], busbw: Sequence[float]) -> Columns:
    joined = np.zeros(len(busbw), rows.COLLECTIVE)
    joined["op"], joined["size_class"] = OPERATION_CODES["AllReduce"], _CLASS
    joined["end_true_ns"], joined["busbw"], joined["transfer_ns"] = ends_ns, busbw, 10
    return joined


def test_operations_of_all_ranks_are_counted_in_one_series_by_size_class() -> None:
    service = _Service()
    for rank in (0, 1):
        ids = service.log(Line(line=1, count=1024), Line(line=2, count=1025), Line(line=3, count=1), rank=rank)
        service.count_logged(ids)
    found = service.store.series.rows[["op", "size_class", "operations", "bytes"]].tolist()
    code = OPERATION_CODES["AllReduce"]
    assert found == [(code, 0, 4, 2 * (4096 + 4)), (code, 1, 2, 2 * 4100)]


def test_operations_and_communicators_are_kept_apart() -> None:
    service = _Service()
    ids = service.log(Line(line=1), Line(line=2, op="Broadcast"), Line(line=3, communicator=0xB0))
    service.count_logged(ids)
    assert len(service.store.series) == 3
    assert service.store.series.rows["operations"].tolist() == [1, 1, 1]


def test_what_is_to_be_counted_can_be_told_beforehand_but_for_new_series() -> None:
    service = _Service()
    service.count_logged(service.log(Line(line=1, count=1024)))
    before = service.store.series.rows.copy()
    rows = service.store.operations.take(service.log(Line(line=2, count=1), Line(line=3, op="Broadcast")))
    expected = service.book.expected(rows, np.array([3, 5]))
    assert expected[["operations", "bytes"]].tolist() == [(1 + 3, 4096 + 3 * 4)]
    assert service.store.series.rows.copy().tobytes() == before.tobytes(), "nothing was counted by that"


def test_a_message_of_unknown_size_is_counted_without_bytes() -> None:
    service = _Service()
    service.count_logged(service.log(Line(line=1, data_type=99)))
    assert service.store.series.rows[["operations", "bytes"]].tolist() == [(1, 0)]
    assert int(service.store.series.rows["size_class"][0]) not in range(len(SIZE_CLASSES))


def test_kernel_time_is_summed_and_waiting_only_where_it_is_known() -> None:
    service = _Service()
    ids = service.log(Line(line=1), Line(line=2))
    service.run(ids[:1], kernel_ns=100, wait_ns=30)
    service.run(ids[1:], kernel_ns=40, wait_ns=NO_TIME_NS)
    service.book.count_measured(ids)
    (row,) = service.store.series.rows
    assert [int(row[name]) for name in ("matched", "duration_ns", "wait_ns", "waiting_duration_ns")] == [
        2,
        140,
        30,
        100,
    ]


def test_counters_stay_when_the_operations_are_forgotten() -> None:
    service = _Service()
    ids = service.log(Line(line=1), Line(line=2))
    service.count_logged(ids)
    service.store.operations.drop_before(2)
    service.count_logged(service.log(Line(line=3)))
    assert service.store.series.rows["operations"].tolist() == [3]


def test_busbw_is_the_median_over_windows_and_a_window_is_the_median_of_its_collectives() -> None:
    service = _Service()
    service.log(Line(line=1))
    ends = [1 * _SECOND, 1 * _SECOND + 1, 1 * _SECOND + 2, 2 * _SECOND, 3 * _SECOND]
    service.book.count_joined(_collectives(ends, [1e9, 5e9, 90e9, 7e9, 6e9]))
    (row,) = service.store.series.rows
    assert float(row["busbw"]) == 6e9
    assert (int(row["collectives"]), int(row["transfer_ns"])) == (5, 50)


def test_busbw_forgets_what_is_older_than_a_minute_and_the_baseline_does_not() -> None:
    service = _Service()
    service.log(Line(line=1))
    seconds = np.arange(1, 101)
    service.book.count_joined(_collectives((seconds * _SECOND).tolist(), [9e9] * 100))
    later = 200 * _SECOND
    service.book.count_joined(_collectives([later, later + _SECOND], [2e9, 4e9]))
    (row,) = service.store.series.rows
    assert float(row["busbw"]) == 3e9
    assert float(row["baseline"]) == 9e9


def test_the_baseline_is_nearly_the_best_and_no_single_outlier() -> None:
    service = _Service()
    service.log(Line(line=1))
    busbw = [*np.linspace(1e9, 2e9, 99), 80e9]
    service.book.count_joined(_collectives([second * _SECOND for second in range(100)], busbw))
    assert float(service.store.series.rows["baseline"][0]) == pytest.approx(1.9e9, rel=0.02)


def test_a_collective_without_bandwidth_or_time_is_counted_and_changes_no_median() -> None:
    service = _Service()
    service.log(Line(line=1))
    unknown = _collectives([_SECOND, NO_TIME_NS], [np.nan, 5e9])
    unknown["first_start_true_ns"] = NO_TIME_NS
    service.book.count_joined(unknown)
    (row,) = service.store.series.rows
    assert int(row["collectives"]) == 2
    assert np.isnan([row["busbw"], row["baseline"], row["limit"]]).all()


def test_operations_are_told_the_baseline_of_their_series() -> None:
    service = _Service()
    ids = service.log(Line(line=1), Line(line=2, op="Broadcast"))
    service.count_logged(ids)
    service.book.count_joined(_collectives([_SECOND], [5e9]))
    baselines = service.book.baseline_of(service.store.operations.take(ids))
    assert baselines[0] == 5e9
    assert np.isnan(baselines[1])


def test_nothing_counted_makes_no_series() -> None:
    service = _Service()
    nothing = np.empty(0, np.int64)
    service.count_logged(nothing)
    service.book.count_measured(nothing)
    service.book.count_joined(_collectives([], []))
    assert len(service.store.series) == 0


def test_limits_are_set_of_new_series_and_of_communicators_that_changed() -> None:
    service = _Service()
    service.count_logged(service.log(Line(line=1), Line(line=2, communicator=0xB0)))
    service.book.set_limits(lambda communicator, op: 10.0 + communicator, set())
    assert service.store.series.rows["limit"].tolist() == [10.0, 11.0]
    service.count_logged(service.log(Line(line=3, communicator=0xC0)))
    service.book.set_limits(lambda communicator, op: 20.0 + communicator, {1})
    assert service.store.series.rows["limit"].tolist() == [10.0, 21.0, 22.0]
