"""NVTX marks of iterations number the operations that were enqueued in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from service.log_batches import Kernel, Line, Mark, Reading, export_batch, log_batch

from ncclscope_service.columns.group_by import OperationsByProcess
from ncclscope_service.columns.table import Ids
from ncclscope_service.job.iterations import Iterations, Numbered, iteration_times, summarise
from ncclscope_service.store.rows import BUSY, Match, empty_operations
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_SECOND = 1_000_000_000


class _Service:
    def __init__(self) -> None:
        self.reading = Reading()
        self.iterations = Iterations(self.reading.store)

    def mark(self, *marks: Mark, pid: int = 10) -> None:
        self.reading.feed(export_batch([], pid=pid, marks=marks))

    def numbers(self, *logged_at_ns: int, pid: int = 10) -> list[int]:
        lines = [Line(line=1 + index, logged_at_ns=time_ns) for index, time_ns in enumerate(logged_at_ns)]
        ids = self.reading.feed(log_batch(lines, pid=pid))
        self.iterations.assign(ids)
        return [int(number) for number in self.reading.store.operations.take(ids)["iteration"]]


def _steps(numbers: Sequence[int], *, begin: int = 0, length: int = 100) -> list[Mark]:
    return [
        Mark(text=f"iteration {number}", start_ns=begin + index * length, end_ns=begin + (index + 1) * length - 10)
        for index, number in enumerate(numbers)
    ]


def test_an_operation_belongs_to_the_iteration_in_which_it_was_enqueued() -> None:
    service = _Service()
    service.mark(*_steps([7, 8, 9], begin=1000))
    assert service.numbers(1000, 1050, 1100, 1289) == [7, 7, 8, 9]


def test_outside_of_all_iterations_the_number_is_unknown() -> None:
    service = _Service()
    service.mark(*_steps([7, 8], begin=1000))
    assert service.numbers(999, 1095, 1200) == [NO_NUMBER] * 3


@pytest.mark.parametrize(
    "text",
    ["iteration 12", "Iteration: 12", "iter12", "step_12", "train_step #12", "training step 12", "batch=12", "STEP 12"],
)
def test_frameworks_write_marks_in_many_ways(text: str) -> None:
    service = _Service()
    service.mark(Mark(text=text, start_ns=10, end_ns=20))
    assert service.numbers(15) == [12]


@pytest.mark.parametrize("text", ["forward 12", "iteration", "iteration 12 backward", "substep 12", "step 1234567890"])
def test_other_ranges_are_no_marks(text: str) -> None:
    service = _Service()
    service.mark(Mark(text=text, start_ns=10, end_ns=20))
    assert service.numbers(15) == [NO_NUMBER]
    assert service.iterations.steps_ns() == {}


def test_marks_without_an_end_last_until_the_next() -> None:
    service = _Service()
    service.mark(*(Mark(text=f"step {number}", start_ns=100 * number) for number in range(1, 6)))
    assert service.numbers(150, 201, 599) == [1, 2, 5]


def test_the_last_mark_without_an_end_lasts_half_as_long_again_as_usual() -> None:
    service = _Service()
    service.mark(*(Mark(text=f"step {number}", start_ns=100 * number) for number in range(1, 4)))
    assert service.numbers(450, 451) == [3, NO_NUMBER]


def test_a_lone_mark_without_an_end_lasts_a_minute() -> None:
    service = _Service()
    service.mark(Mark(text="step 4", start_ns=_SECOND))
    assert service.numbers(61 * _SECOND, 61 * _SECOND + 1) == [4, NO_NUMBER]


def test_the_duration_of_a_step_is_not_taken_across_gaps_in_the_numbering() -> None:
    service = _Service()
    service.mark(*_steps([1, 2], begin=1000), *_steps([50, 51], begin=9000))
    assert service.iterations.steps_ns() == {}  # nothing was assigned, so nothing was read
    assert service.numbers(1150, 5000, 9050) == [2, NO_NUMBER, 50]
    assert service.iterations.steps_ns() == {"j": 100}


def test_iterations_captured_in_parts_come_in_any_order() -> None:
    service = _Service()
    service.mark(*_steps([50, 51], begin=9000))
    assert service.numbers(1050, 9050) == [NO_NUMBER, 50]
    service.mark(*_steps([1, 2], begin=1000))
    assert service.numbers(1050, 1150, 9150) == [1, 2, 51]


def test_processes_have_marks_of_their_own() -> None:
    service = _Service()
    service.mark(*_steps([7], begin=1000), pid=10)
    service.mark(*_steps([9], begin=1000), pid=11)
    assert service.numbers(1050, pid=11) == [9]
    assert service.numbers(1050, pid=10) == [7]
    assert service.numbers(1050, pid=12) == [NO_NUMBER]


def test_the_launch_call_counts_before_the_stamp_of_the_line() -> None:
    service = _Service()
    service.mark(*_steps([7, 8], begin=1000))
    service.reading.feed(export_batch([Kernel(start_ns=1500, end_ns=1600, launch_ns=1110)], name="kernels"))
    ids = service.reading.feed(log_batch([Line(line=1, logged_at_ns=1050), Line(line=2)]))
    service.reading.store.operations.rows["kernel"] = 0
    service.iterations.assign(ids)
    assert service.reading.store.operations.rows["iteration"].tolist() == [8, 8]


def test_a_kernel_whose_launch_was_not_recorded_leaves_the_stamp() -> None:
    service = _Service()
    service.mark(*_steps([7, 8], begin=1000))
    service.reading.feed(export_batch([Kernel(start_ns=1500, end_ns=1600)], name="kernels"))
    ids = service.reading.feed(log_batch([Line(line=1, logged_at_ns=1050)]))
    service.reading.store.operations.rows["kernel"] = 0
    service.iterations.assign(ids)
    assert service.reading.store.operations.rows["iteration"].tolist() == [7]


def test_an_operation_without_any_time_has_no_iteration() -> None:
    service = _Service()
    service.mark(*_steps([7], begin=1000))
    assert service.numbers(NO_TIME_NS) == [NO_NUMBER]


def test_marks_are_kept_when_the_store_forgets_its_ranges() -> None:
    service = _Service()
    service.mark(*_steps([7], begin=1000))
    assert service.numbers(1050) == [7]
    service.reading.store.ranges.drop_before(1)
    service.mark(*_steps([8], begin=1100))
    assert service.numbers(1050, 1150) == [7, 8]


def _run(
    spans: list[tuple[int, int]],
    iterations: list[int],
    *,
    busy: list[tuple[int, int]] | None = None,
    matched: bool = True,
) -> Columns:
    """Operations that are enqueued when their kernels start; one process with rank 3."""
    reading = Reading()
    if matched:
        kernels = [Kernel(start_ns=start, end_ns=end, launch_ns=start) for start, end in spans]
        reading.feed(export_batch(kernels, name="kernels"))
    ids = reading.feed(log_batch([Line(line=1 + index, logged_at_ns=start) for index, (start, _) in enumerate(spans)]))
    store = reading.store
    for member in store.members:
        member.global_rank = 3
    rows = store.operations.rows
    rows["iteration"] = iterations
    rows["match"] = Match.MATCHED if matched else Match.NOT_COVERED
    rows["kernel"] = np.arange(len(ids)) if matched else NO_NUMBER
    if busy is not None:
        device = int(store.kernel_templates.rows["device_id"][0])
        process = int(rows["process"][0])
        store.busy.append(np.array([(process, device, start, end, 1) for start, end in busy], BUSY))
    return iteration_times(store, rows)


def test_an_iteration_lasts_until_the_next_begins() -> None:
    found = _run([(100, 120), (150, 160), (300, 310), (600, 610)], [4, 4, 5, 6])
    assert found["iteration"].tolist() == [4, 5, 6]
    assert found["rank"].tolist() == [3, 3, 3]
    assert found["duration_ns"].tolist() == [200, 300, NO_TIME_NS]
    assert found["operations"].tolist() == [2, 1, 1]


def test_a_missing_iteration_leaves_the_length_of_the_one_before_unknown() -> None:
    found = _run([(100, 120), (300, 310), (600, 610)], [4, 6, 7])
    assert found["duration_ns"].tolist() == [NO_TIME_NS, 300, NO_TIME_NS]


def test_communication_counts_each_moment_once_and_computation_hides_it() -> None:
    found = _run([(100, 140), (120, 160), (300, 310)], [0, 0, 1], busy=[(90, 110), (150, 200), (305, 306)])
    assert found["communication_ns"].tolist() == [60, 10]
    assert found["exposed_ns"].tolist() == [40, 9]
    of = summarise(found)
    assert (of.communication_ratio, of.exposed_ratio) == (60 / 200, 40 / 200)


def test_without_other_kernels_nobody_knows_what_was_exposed() -> None:
    found = _run([(100, 140), (300, 310)], [0, 1])
    assert found["communication_ns"].tolist() == [40, 10]
    assert found["exposed_ns"].tolist() == [NO_TIME_NS] * 2
    assert summarise(found).exposed_ratio is None


def test_logs_alone_tell_durations_only() -> None:
    found = _run([(100, 140), (300, 310)], [0, 1], matched=False)
    assert found["duration_ns"].tolist() == [200, NO_TIME_NS]
    assert found["communication_ns"].tolist() == [NO_TIME_NS] * 2
    of = summarise(found)
    assert (of.median_ns, of.p90_ns, of.communication_ratio) == (200, 200, None)


def test_operations_without_an_iteration_are_left_out() -> None:
    found = _run([(100, 140), (300, 310)], [NO_NUMBER, NO_NUMBER])
    assert len(found) == 0
    assert summarise(found).iterations == 0


def _operations(store: Store, *processes: int) -> Ids:
    rows = empty_operations(len(processes))
    rows["process"] = processes
    return store.operations.append(rows)


def test_operations_of_the_processes_asked_for_are_given_in_their_order() -> None:
    store, numbered = Store(), Numbered()
    numbered.add(_operations(store, 3, 0, 3), 0)
    numbered.add(_operations(store, 1, 3, 0), _SECOND)
    assert numbered.of([3], store).tolist() == [0, 2, 4]
    assert numbered.of({1, 7}, store).tolist() == [3]
    assert sorted(numbered.of([0, 1, 3], store).tolist()) == list(range(6))
    assert numbered.of([], store).tolist() == []


def test_what_is_too_old_or_has_left_the_store_is_not_given() -> None:
    store, numbered = Store(), Numbered()
    for second in range(4):
        numbered.add(_operations(store, 0, 0), second * _SECOND)
    numbered.forget_before(_SECOND)
    store.operations.drop_before(3)
    assert numbered.of([0], store).tolist() == [3, 4, 5, 6, 7]
    store.operations.drop_before(6)
    assert numbered.of([0], store).tolist() == [6, 7]


@given(st.lists(st.integers(0, 5), max_size=30), st.sets(st.integers(0, 6)))
def test_places_are_those_of_the_processes_that_are_there(processes: list[int], asked: set[int]) -> None:
    operations = np.arange(100, 100 + len(processes))
    rows = OperationsByProcess.from_operations(operations, np.asarray(processes, np.int32))
    places = rows.places(np.asarray(sorted(asked), np.int64))
    assert rows.processes[places].tolist() == sorted(asked & set(processes))
    for place in places.tolist():
        mine = [100 + at for at, process in enumerate(processes) if process == rows.processes[place]]
        assert rows.at(place).tolist() == mine
    only = rows.select(places)
    assert [only.at(place).tolist() for place in range(len(places))] == [rows.at(place).tolist() for place in places]
