"""Iterations last from first operation to first operation, and only what nothing hides is exposed."""

from __future__ import annotations

import numpy as np
from service.log_batches import Kernel, Line, Reading, export_batch, log_batch

from ncclscope_service.job.iterations import iteration_times, summarise
from ncclscope_service.store.rows import BUSY, Match
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS


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
