"""TUNING lines find the operation that they speak of, or are counted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from service.log_batches import Line, Reading, Tuning, init, log_batch

from ncclscope_service.columns.table import Ids
from ncclscope_service.intake.tuning import Algorithms, TuningJoin
from ncclscope_service.store import rows
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import ALGORITHMS, NO_NUMBER, OPERATION_CODES, UNKNOWN_OPERATION

_KIB = 1024
_FLOAT32 = 4


class _Service:
    def __init__(self) -> None:
        self.reading = Reading()
        self.join = TuningJoin(self.reading.store)

    def feed(self, *what: Line | Tuning, pid: int = 10) -> Ids:
        lines = [each for each in what if isinstance(each, Line)]
        tunings = [each for each in what if isinstance(each, Tuning)]
        ids = self.reading.feed(log_batch(lines, pid=pid))
        process = self.reading.intake.process("j", "node1", pid, 0)
        self.join.ingest_lines(ids, _columns(process, tunings))
        return ids

    def channels(self, ids: Ids) -> list[int]:
        channels: NDArray[np.int16] = self.reading.store.operations.take(ids)["channels"]
        return [int(each) for each in channels]


def _columns(process: int, tunings: list[Tuning]) -> NDArray[np.void]:
    columns = np.zeros(len(tunings), rows.TUNING)
    for index, tuning in enumerate(tunings):
        code = UNKNOWN_OPERATION if tuning.op is None else OPERATION_CODES[tuning.op]
        columns[index] = (
            process, tuning.tid, tuning.line, code, tuning.algorithm, tuning.protocol, tuning.channels, tuning.bytes,
            np.nan,
        )  # fmt: skip
    return columns


def test_a_line_belongs_to_the_operation_before_it() -> None:
    service = _Service()
    ids = service.feed(
        Line(line=1, count=_KIB), Tuning(line=2, bytes=4 * _KIB, algorithm=1, protocol=2, channels=8),
        Line(line=3, count=_KIB), Tuning(line=4, bytes=4 * _KIB, algorithm=0, protocol=0, channels=2),
    )  # fmt: skip
    found = service.reading.store.operations.take(ids)
    assert found[["algorithm", "protocol", "channels"]].tolist() == [(1, 2, 8), (0, 0, 2)]
    assert service.join.unattached == 0


def test_bytes_tell_operations_of_one_group_apart() -> None:
    service = _Service()
    ids = service.feed(
        Line(line=1, count=100), Line(line=2, count=200), Line(line=3, count=300),
        Tuning(line=4, bytes=100 * _FLOAT32, channels=1), Tuning(line=5, bytes=300 * _FLOAT32, channels=3),
    )  # fmt: skip
    assert service.channels(ids) == [1, NO_NUMBER, 3]


def test_bytes_may_be_the_whole_message_or_one_ranks_share() -> None:
    service = _Service()
    ids = service.feed(
        Line(line=1, op="AllGather", count=_KIB, nranks=8),
        Tuning(line=2, op="AllGather", bytes=8 * _KIB * _FLOAT32, channels=4),
        Line(line=3, op="AllGather", count=_KIB, nranks=8),
        Tuning(line=4, op="AllGather", bytes=_KIB * _FLOAT32, channels=5),
    )
    assert service.channels(ids) == [4, 5]


def test_an_all_reduce_has_no_share() -> None:
    service = _Service()
    ids = service.feed(Line(line=1, count=_KIB, nranks=8), Tuning(line=2, bytes=_KIB * _FLOAT32 // 8))
    assert service.channels(ids) == [NO_NUMBER]
    assert service.join.unattached == 1


def test_a_line_without_a_name_belongs_to_any_operation_of_its_bytes() -> None:
    service = _Service()
    ids = service.feed(Line(line=1, op="Broadcast", count=9), Tuning(line=2, op=None, bytes=36, channels=6))
    assert service.channels(ids) == [6]


def test_another_operation_thread_or_size_does_not_fit_and_is_counted() -> None:
    service = _Service()
    ids = service.feed(
        Line(line=1, count=_KIB, tid=11),
        Tuning(line=2, op="Broadcast", bytes=4 * _KIB), Tuning(line=3, bytes=4 * _KIB, tid=12),
        Tuning(line=4, bytes=4),
    )  # fmt: skip
    assert service.channels(ids) == [NO_NUMBER]
    assert service.join.unattached == 3


def test_a_line_does_not_belong_to_an_operation_after_it() -> None:
    service = _Service()
    ids = service.feed(Tuning(line=1, bytes=4 * _KIB), Line(line=2, count=_KIB))
    assert service.channels(ids) == [NO_NUMBER]
    assert service.join.unattached == 1


def test_an_operation_takes_one_line_and_the_second_goes_to_the_one_before() -> None:
    service = _Service()
    ids = service.feed(
        Line(line=1, count=_KIB), Line(line=2, count=_KIB),
        Tuning(line=3, bytes=4 * _KIB, channels=1), Tuning(line=4, bytes=4 * _KIB, channels=2),
        Tuning(line=5, bytes=4 * _KIB, channels=3),
    )  # fmt: skip
    assert service.channels(ids) == [2, 1]
    assert service.join.unattached == 1


def test_the_border_of_a_batch_may_lie_between_an_operation_and_its_line() -> None:
    service = _Service()
    ids = service.feed(Line(line=1, count=_KIB))
    service.feed(Tuning(line=2, bytes=4 * _KIB, channels=7))
    assert service.channels(ids) == [7]


def test_processes_do_not_take_each_others_lines() -> None:
    service = _Service()
    ids = service.feed(Line(line=1, count=_KIB), pid=10)
    service.feed(Tuning(line=2, bytes=4 * _KIB, channels=7), pid=11)
    assert service.channels(ids) == [NO_NUMBER]
    assert service.join.unattached == 1


def test_what_was_forgotten_meanwhile_is_not_asked_for() -> None:
    service = _Service()
    service.feed(Line(line=1, count=_KIB))
    service.reading.store.operations.drop_before(1)
    service.feed(Tuning(line=2, bytes=4 * _KIB))
    assert service.join.unattached == 1


def test_far_back_nothing_is_looked_for() -> None:
    service = _Service()
    ids = service.feed(Line(line=1, count=1), *(Line(line=2 + index, count=2) for index in range(300)))
    service.feed(Tuning(line=400, bytes=_FLOAT32), Tuning(line=401, bytes=2 * _FLOAT32, channels=9))
    assert service.channels(ids[[0, -1]]) == [NO_NUMBER, 9]
    assert service.join.unattached == 1


_TREE, _RING = ALGORITHMS.index("TREE"), ALGORITHMS.index("RING")


def two_ranks(*lines: tuple[str, int, int | None]) -> Store:
    """Two ranks that call the same: (operation, count, algorithm that rank 0's line names)."""
    reading = Reading()
    for rank in (0, 1):
        events = [init(line=1, rank=rank, comm_id=0xC0, pid=10 + rank)]
        calls = [Line(line=2 + at, op=op, count=count) for at, (op, count, _) in enumerate(lines)]
        ids = reading.feed(log_batch(calls, pid=10 + rank, events=events))
        if rank == 0:
            for row, (_, _, algorithm) in zip(ids.tolist(), lines, strict=True):
                if algorithm is not None:
                    reading.store.operations.rows["algorithm"][row] = algorithm
    return reading.store


def found(store: Store) -> list[int]:
    rows = store.operations.rows
    return [int(each) for each in Algorithms(store, [rows]).algorithms_of(rows)]


def test_all_ranks_of_a_collective_run_what_rank_0_says() -> None:
    store = two_ranks(("AllReduce", 100, _TREE), ("AllReduce", 9000, _RING))
    assert found(store) == [_TREE, _RING, _TREE, _RING]


def test_a_lost_line_is_told_by_others_of_that_size_if_they_agree() -> None:
    store = two_ranks(("AllReduce", 100, _TREE), ("AllReduce", 100, None), ("AllGather", 100, None))
    assert found(store) == [_TREE, _TREE, -1] * 2
    store = two_ranks(("AllReduce", 100, _TREE), ("AllReduce", 100, _RING), ("AllReduce", 100, None))
    assert found(store) == [_TREE, _RING, -1] * 2


def test_up_to_2_16_gathering_has_only_the_ring() -> None:
    for version, expected in (("2.16.5", _RING), ("2.17.1", -1)):
        store = two_ranks(("AllGather", 100, None), ("AllReduce", 100, None))
        store.job_versions["j"].add(version)
        assert found(store) == [expected, -1] * 2
