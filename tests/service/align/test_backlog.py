"""Operations wait for a capture of their process before they are aligned, and not for ever; processes wait in turn."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_service.align.backlog import AlignmentBacklog, Portion
from ncclscope_service.columns.table import Ids
from ncclscope_service.store.records import Process
from ncclscope_service.store.rows import API_CALL, empty_operations
from ncclscope_service.store.tables import Store
from ncclscope_wire.records import CaptureSeen

_SECOND = 1_000_000_000


def _store(processes: int = 2) -> Store:
    store = Store()
    store.processes += [Process(host="node1", pid=pid) for pid in range(processes)]
    return store


def _operations(store: Store, *processes: int) -> Ids:
    rows = empty_operations(len(processes))
    rows["process"] = processes
    return store.operations.append(rows)


def _capture(*pids: int) -> tuple[CaptureSeen, dict[int, int]]:
    seen = CaptureSeen(
        host="node1", host_is_recorded=True, start_ns=0, end_ns=1, pids=pids, product_version=None,
        schema_version=None, nccl_kernels=0, other_kernels=0, graph_launches=0,
    )  # fmt: skip
    return seen, {pid: pid for pid in pids}


def _kernels(arrivals: AlignmentBacklog, begin: int, amount: int, process: int) -> None:
    arrivals.append_kernels(np.arange(begin, begin + amount), np.full(amount, process, np.int32))


def _taken(arrivals: AlignmentBacklog, store: Store, now_ns: int, *, before: int = 0) -> list[int]:
    """Operations that are given."""
    arrivals.drain_new(store, now_ns)
    portions = arrivals.drain_portions(now_ns, before=before, most=None)
    return sorted(operation for portion in portions for operation in portion.operations.tolist())


def _given(portions: list[Portion]) -> list[tuple[int, int, int]]:
    """(process, kernels, captures) of each."""
    return [(each.process, len(each.kernels), len(each.captures)) for each in portions]


def test_operations_wait_until_something_of_their_process_was_captured() -> None:
    store, arrivals = _store(), AlignmentBacklog()
    arrivals.append_operations(_operations(store, 0, 1, 0))
    assert _taken(arrivals, store, 0) == []
    arrivals.append_operations(_operations(store, 1, 0))
    arrivals.append_capture(*_capture(0))
    assert _taken(arrivals, store, _SECOND) == [0, 2, 4]
    arrivals.append_capture(*_capture(0, 1))
    assert _taken(arrivals, store, 2 * _SECOND) == [1, 3]


def test_operations_of_a_process_that_ended_wait_no_longer() -> None:
    store, arrivals = _store(), AlignmentBacklog()
    arrivals.append_operations(_operations(store, 0, 1))
    arrivals.drain_new(store, 0)
    arrivals.end([1])
    (portion,) = arrivals.drain_portions(0, before=0, most=None)
    assert (portion.process, portion.operations.tolist(), portion.has_ended) == (1, [1], True)


def test_operations_of_which_nothing_was_captured_are_taken_in_the_end() -> None:
    store, arrivals = _store(), AlignmentBacklog()
    arrivals.append_operations(_operations(store, 0))
    assert _taken(arrivals, store, 0) == []
    assert _taken(arrivals, store, 31 * _SECOND) == [0]
    arrivals.append_operations(_operations(store, 0, 1))
    assert _taken(arrivals, store, 32 * _SECOND) == []
    assert _taken(arrivals, store, 33 * _SECOND, before=2) == [1, 2]


def test_each_operation_is_new_once() -> None:
    store, arrivals = _store(), AlignmentBacklog()
    arrivals.append_operations(_operations(store, 0, 1))
    arrivals.append_operations(np.empty(0, np.int64))
    assert [each.tolist() for each in arrivals.drain_new(store, 0)] == [[0, 1]]
    assert arrivals.drain_new(store, 0) == []


def test_processes_are_given_out_in_turn_a_bounded_amount_at_a_time() -> None:
    arrivals = AlignmentBacklog()
    for process in (2, 0, 1):
        _kernels(arrivals, 1000 * process, 500, process)
        arrivals.append_capture(*_capture(process))
    assert _given(arrivals.drain_portions(0, before=0, most=1000)) == [(2, 500, 1), (0, 500, 1)]
    assert (len(arrivals), arrivals.rows) == (1, 500)
    assert _given(arrivals.drain_portions(0, before=0, most=1000)) == [(1, 500, 1)]
    assert (len(arrivals), arrivals.rows) == (0, 0)


def test_a_process_with_more_than_a_turns_worth_has_another_turn_after_the_others_and_its_capture_comes_last() -> None:
    arrivals = AlignmentBacklog()
    for begin in (0, 600, 1200):
        _kernels(arrivals, begin, 600, 0)
    arrivals.append_capture(*_capture(0))
    arrivals.end([0])
    _kernels(arrivals, 5000, 10, 1)
    first, second, third = (arrivals.drain_portions(0, before=0, most=1000) for _ in range(3))
    assert [_given(each) for each in (first, second, third)] == [
        [(0, 1200, 0)],
        [(1, 10, 0), (0, 600, 1)],
        [],
    ]
    assert (first[0].has_ended, second[1].has_ended) == (False, True)
    assert np.concatenate([first[0].kernels, second[1].kernels]).tolist() == list(range(1800))


def test_a_capture_is_told_before_kernels_of_the_next_one() -> None:
    arrivals = AlignmentBacklog()
    for begin in (0, 600):
        _kernels(arrivals, begin, 600, 0)
        arrivals.append_capture(*_capture(0))
    arrivals.append_capture(*_capture(0))
    assert _given(arrivals.drain_portions(0, before=0, most=600)) == [(0, 600, 1)]
    assert _given(arrivals.drain_portions(0, before=0, most=600)) == [(0, 600, 2)]
    for begin in (1200, 1800):
        _kernels(arrivals, begin, 600, 0)
        arrivals.append_capture(*_capture(0))
    assert _given(arrivals.drain_portions(0, before=0, most=None)) == [(0, 1200, 2)]


def test_calls_and_waiting_operations_of_a_process_count_as_work_too() -> None:
    store, arrivals = _store(3), AlignmentBacklog()
    arrivals.append_operations(_operations(store, *[0] * 4000))
    arrivals.drain_new(store, 0)
    calls = np.zeros(4000, API_CALL)
    calls["process"] = 1
    arrivals.append_calls(calls)
    for process in range(3):
        arrivals.append_capture(*_capture(process))
    assert [each.process for each in arrivals.drain_portions(0, before=0, most=1000)] == [1]
    assert [each.process for each in arrivals.drain_portions(0, before=0, most=1000)] == [0]
    assert [each.process for each in arrivals.drain_portions(0, before=0, most=1000)] == [2]


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("operations"), st.lists(st.integers(0, 4), max_size=12)),
        st.tuples(st.just("capture"), st.lists(st.integers(0, 4), min_size=1, max_size=2)),
        st.tuples(st.just("wait"), st.lists(st.integers(0, 20), min_size=1, max_size=1)),
        st.tuples(st.just("take"), st.lists(st.integers(0, 800), max_size=1)),
    ),
    max_size=40,
)


@given(_STEPS)
def test_each_operation_is_given_once_with_its_process_in_the_order_of_the_log(
    steps: list[tuple[str, list[int]]],
) -> None:
    store, arrivals = _store(5), AlignmentBacklog()
    waiting: dict[int, list[int]] = {process: [] for process in range(5)}
    since: dict[int, int] = {}
    now_ns = 0
    for step, numbers in steps:
        if step == "operations":
            ids = _operations(store, *numbers)
            arrivals.append_operations(ids)
            arrivals.drain_new(store, now_ns)
            for operation, process in zip(ids.tolist(), numbers, strict=True):
                waiting[process].append(operation)
                since[operation] = now_ns
        elif step == "capture":
            arrivals.append_capture(*_capture(*numbers))
        elif step == "wait":
            now_ns += numbers[0] * _SECOND
        else:
            for portion in arrivals.drain_portions(now_ns, before=0, most=numbers[0] if numbers else None):
                assert portion.operations.tolist() == waiting[portion.process]
                waiting[portion.process] = []
            if not numbers:
                left = [operation for operations in waiting.values() for operation in operations]
                assert all(now_ns - since[operation] < 30 * _SECOND for operation in left)
    arrivals.drain_new(store, now_ns)
    for portion in arrivals.drain_portions(now_ns, before=store.operations.next_id, most=None):
        assert portion.operations.tolist() == waiting.pop(portion.process)
    assert not any(waiting.values())
