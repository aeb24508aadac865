"""Operations wait for a capture of their process before they are aligned, and not for ever."""

from __future__ import annotations

import numpy as np

from ncclscope_service.arrivals import Arrivals
from ncclscope_service.intake import empty_operations
from ncclscope_service.rows import Process
from ncclscope_service.store import Ids, Store
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


def _taken(arrivals: Arrivals, store: Store, now_ns: int, *, ended: tuple[int, ...] = (), before: int = 0) -> list[int]:
    arrivals.take_new(now_ns)
    taken: list[int] = arrivals.take_operations(store, now_ns, ended=ended, before=before).tolist()
    arrivals.take_captured()
    return taken


def test_operations_wait_until_something_of_their_process_was_captured() -> None:
    store, arrivals = _store(), Arrivals()
    arrivals.append_operations(_operations(store, 0, 1, 0))
    assert _taken(arrivals, store, 0) == []
    arrivals.append_operations(_operations(store, 1, 0))
    arrivals.captures.append(_capture(0))
    assert _taken(arrivals, store, _SECOND) == [0, 2, 4]
    arrivals.captures.append(_capture(0, 1))
    assert _taken(arrivals, store, 2 * _SECOND) == [1, 3]


def test_operations_of_a_process_that_ended_wait_no_longer() -> None:
    store, arrivals = _store(), Arrivals()
    arrivals.append_operations(_operations(store, 0, 1))
    assert _taken(arrivals, store, 0, ended=(1,)) == [1]


def test_operations_of_which_nothing_was_captured_are_taken_in_the_end() -> None:
    store, arrivals = _store(), Arrivals()
    arrivals.append_operations(_operations(store, 0))
    assert _taken(arrivals, store, 0) == []
    arrivals.append_operations(_operations(store, 0))
    assert _taken(arrivals, store, 31 * _SECOND) == [0]
    assert _taken(arrivals, store, 32 * _SECOND, before=2) == [1]


def test_each_operation_is_new_once() -> None:
    store, arrivals = _store(), Arrivals()
    arrivals.append_operations(_operations(store, 0, 1))
    arrivals.append_operations(np.empty(0, np.int64))
    assert [each.tolist() for each in arrivals.take_new(0)] == [[0, 1]]
    assert arrivals.take_new(0) == []
