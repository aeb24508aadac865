"""Operations that were decided lately are found by process, as long as they are in the store."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_service.columns.group_by import OperationsByProcess
from ncclscope_service.columns.table import Ids
from ncclscope_service.job.iterations import Numbered
from ncclscope_service.store.rows import empty_operations
from ncclscope_service.store.tables import Store

_SECOND = 1_000_000_000


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
