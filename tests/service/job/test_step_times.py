"""Durations of steps from numbered operations."""

from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.job.step_times import StepTimes, inspected_steps_ns
from ncclscope_service.store.records import Process
from ncclscope_service.store.rows import INSPECTED, OPERATION
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

_STEP_NS = 1000


def operations(process: int, numbers: range, *, late_ns: int = 0) -> Columns:
    """Two operations a step."""
    rows = np.zeros(2 * len(numbers), OPERATION)
    rows["process"] = process
    rows["iteration"] = np.repeat(np.asarray(numbers), 2)
    rows["logged_at_ns"] = 50 + late_ns + rows["iteration"] * _STEP_NS + np.tile([0, 300], len(numbers))
    rows["observed_at_ns"] = NO_TIME_NS
    rows["message_bytes"] = 8
    return rows


def a_store() -> Store:
    store = Store()
    for pid in range(2):
        store.processes.append(Process(host="node01", pid=pid))
        store.process_job.append("job")
    return store


def drained(store: Store, times: StepTimes) -> list[tuple[int, int]]:
    steps = times.drain(store.operations.next_id)
    return [(number, took) for each in steps.values() for number, _, took, _, _ in each.tolist()]


def test_a_step_lasts_until_the_next_one_begins_on_each_rank() -> None:
    store = a_store()
    times = StepTimes(store)
    store.operations.append(operations(0, range(5)))
    store.operations.append(operations(1, range(5), late_ns=77))
    steps = times.drain(store.operations.next_id)["job"]
    assert steps["iteration"].tolist() == [0, 1, 2, 3]
    assert set(steps["duration_ns"].tolist()) == {_STEP_NS}
    assert set(steps["operations"].tolist()) == {2.0}
    assert set(steps["bytes"].tolist()) == {16.0}


def test_a_rank_that_lags_is_waited_for_and_one_that_stopped_is_not() -> None:
    store = a_store()
    times = StepTimes(store)
    store.operations.append(operations(0, range(8)))
    store.operations.append(operations(1, range(3)))
    assert [number for number, _ in drained(store, times)] == [0, 1]
    store.operations.append(operations(0, range(8, 20)))
    assert [number for number, _ in drained(store, times)] == list(range(2, 19))


@pytest.mark.parametrize("hours", [-8, 0, 5])
@pytest.mark.parametrize("has_stamps", [True, False])
def test_a_step_began_by_the_clock_of_the_service_whatever_zone_stamps_are_of(hours: int, has_stamps: bool) -> None:
    store = a_store()
    rows = operations(0, range(5))
    came_ns = int(rows["logged_at_ns"].max())
    rows["logged_at_ns"] += hours * 3_600_000_000_000
    if not has_stamps:
        rows["logged_at_ns"], rows["observed_at_ns"] = NO_TIME_NS, rows["logged_at_ns"].copy()
    store.operations.append(rows)
    store.stamp_offsets.learn(rows, came_ns)
    steps = StepTimes(store).drain(store.operations.next_id)["job"]
    assert steps["started_ns"].tolist() == [50 + number * _STEP_NS for number in range(4)]
    assert set(steps["duration_ns"].tolist()) == {_STEP_NS}


def test_lines_without_any_time_give_no_steps() -> None:
    store = a_store()
    rows = operations(0, range(5))
    rows["logged_at_ns"] = NO_TIME_NS
    store.operations.append(rows)
    assert not drained(store, StepTimes(store))


def records_of_steps(steps: int, *, step_ns: int, microbatches: int) -> Columns:
    """What NCCL Inspector dumps of one rank, ten times a second: microbatches of gradients and a norm for each step."""
    kinds = [("ReduceScatter", 1 << 22), ("AllGather", 1 << 22)] * microbatches + [("AllReduce", 16)]
    records = np.zeros(steps * len(kinds), INSPECTED)
    ended_ns = np.arange(len(records)) * step_ns // len(kinds)
    records["dumped_at_ns"] = -(-ended_ns // 100_000_000) * 100_000_000
    records["line"], records["peer"] = np.arange(len(records)), NO_NUMBER
    records["op"] = [OPERATION_CODES[op] for op, _ in kinds] * steps
    records["message_bytes"] = [size for _, size in kinds] * steps
    return records


def test_records_of_inspector_alone_tell_how_long_a_step_is() -> None:
    store = Store(processes=[Process(host="node1", pid=10)], process_job=["j"])
    assert inspected_steps_ns(store) == {}
    store.inspected.append(records_of_steps(20, step_ns=900_000_000, microbatches=4))
    assert inspected_steps_ns(store) == {"j": 900_000_000}
