"""NVTX marks of iterations number the operations that were enqueued in them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from service.log_batches import Kernel, Line, Mark, Reading, export_batch, log_batch

from ncclscope_service.job.iterations import Iterations
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
