"""The algorithm that rank 0 prints is that of all ranks of the collective."""

from __future__ import annotations

from service.log_batches import Line, Reading, init, log_batch

from ncclscope_service.intake.tuning import Algorithms
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import ALGORITHMS

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
