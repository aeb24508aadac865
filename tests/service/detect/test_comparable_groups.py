from __future__ import annotations

import numpy as np

from ncclscope_service.detect.comparable_groups import Level, Shape, SharedWires, Windows
from ncclscope_service.detect.context import Context, Group

SECOND = 1_000_000_000
CONTEXT = Context(
    job="job",
    groups={
        index: Group(comm_id=f"{index:x}", parallelism="DP", global_ranks=(0, 1), hosts=("node1", "node2"))
        for index in range(8)
    },
)


SHAPES = [Shape(index, 3, 160) for index in CONTEXT.groups]


def windows(communicators: range, seconds: range) -> Windows:
    numbers, times = np.tile(communicators, len(seconds)), np.repeat(seconds, len(communicators))
    return Windows(
        shape=numbers, at_ns=times * SECOND, level=23.0 + numbers, worst_seq=np.zeros(len(numbers), np.int64)
    )


def levels(shared: SharedWires, communicators: range, seconds: range) -> list[Level]:
    return list(shared.ingest_windows(windows(communicators, seconds), SHAPES, CONTEXT))


def test_windows_of_groups_that_share_wires_are_summed_up_where_most_of_them_are_there() -> None:
    shared = SharedWires()
    found = levels(shared, range(4), range(1, 11))
    assert [one.at_ns for one in found] == [second * SECOND for second in range(1, 11)]
    assert {one.level for one in found} == {25.25}
    assert levels(shared, range(2), range(11, 12)) == []


def test_groups_that_took_the_place_of_closed_ones_are_seen_again_after_ten_minutes() -> None:
    shared = SharedWires()
    levels(shared, range(4), range(1, 11))
    found = levels(shared, range(4, 8), range(20, 640))
    assert [one.at_ns // SECOND for one in found] == list(range(611, 640))
    assert shared.members(found[-1].wires) == {4, 5, 6, 7}
