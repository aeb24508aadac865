"""NCCL Inspector as a source of timing, through the pipeline: beside kernels, in portions, beside CUDA graphs."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
from service.simulated_batches import SECOND_NS, advanced, export_batches, log_batches

from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.rows import TimingSource, has_kernel, timing_sources
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_service.store.tables import Store
from ncclscope_simulator import SimulationConfig, write
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_JOB = SimulationConfig(iterations=6, nodes=1, gpus=4, tp=2, pp=1, dp=2, inspector="v4.2")
_MEASURES = ("wait_ns", "transfer_ns", "ranks_seen", "busbw", "busbw_apparent")


def _made(config: SimulationConfig, folder: Path) -> tuple[list[Batch], list[Batch]]:
    """Batches of logs and dumps, and of exports."""
    write(config, folder)
    return list(chain.from_iterable(log_batches(folder, portions=4))), list(chain.from_iterable(export_batches(folder)))


def _flushed(pipeline: Pipeline, seconds: int) -> Store:
    pipeline.finish(seconds * SECOND_NS)
    return pipeline.store


def _by_line(known: Store) -> Columns:
    """Operations in an order that portions do not change."""
    rows = known.operations.rows
    pids = np.asarray([process.pid for process in known.processes])[rows["process"]]
    return rows[np.lexsort((rows["line"], pids))]


def _assert_equal(one: Columns, other: Columns, *names: str) -> None:
    for name in names:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_kernels_that_come_later_win_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    lines, exports = _made(_JOB, tmp_path)
    late = advanced(Pipeline(PipelineSettings(idle_ns=600 * SECOND_NS)), lines)
    for second in range(len(lines), len(lines) + 5):
        late.process_backlog(second * SECOND_NS)
    before = late.store.operations.rows.copy()
    assert (timing_sources(before) == TimingSource.INSPECTOR).mean() > 0.9
    assert not has_kernel(before).any()
    assert (before["transfer_ns"] != NO_TIME_NS).any()
    counted = late.store.series.rows["collectives"].sum()
    assert counted == len(late.store.collectives) > 100
    after = _flushed(advanced(late, exports, since=len(lines) + 5), len(lines) + 15)
    whole = Pipeline()
    for batch in [*exports, *lines]:
        whole.ingest_batch(batch, agent="a", session="s", job="j")
    early = _flushed(whole, 1_000)
    with_kernel = has_kernel(_by_line(after))
    assert with_kernel.mean() > 0.99
    assert set(timing_sources(_by_line(after))[with_kernel].tolist()) == {TimingSource.KERNEL}
    _assert_equal(_by_line(after), _by_line(early), "match", "inspected_ns", *_MEASURES)
    told_by_inspector = after.collectives.rows["coll_seq"] != NO_NUMBER
    keys = after.collectives.rows[["communicator", "coll_seq"]][told_by_inspector]
    assert len(np.unique(keys)) == len(keys)


def test_beside_replays_of_graphs_kernels_measure_as_without_inspector(tmp_path: Path) -> None:
    config = SimulationConfig(
        iterations=6, nodes=1, gpus=2, tp=2, pp=1, dp=1, inspector="v4.2", cuda_graphs=2, cuda_graph_trace="node"
    )
    lines, exports = _made(config, tmp_path)
    of_logs = [batch for batch in lines if not len(batch.inspected)]
    assert len(of_logs) < len(lines)
    beside = _flushed(advanced(Pipeline(), [*lines, *exports]), 1_000)
    alone = _flushed(advanced(Pipeline(), [*of_logs, *exports]), 1_000)
    assert (beside.kernels.rows["replay"] > 0).any()
    _assert_equal(_by_line(beside), _by_line(alone), "match", "kernel", "start_ns", *_MEASURES)
    _assert_equal(beside.replays.rows.copy(), alone.replays.rows.copy(), "operation", "kernel", "replay", *_MEASURES)
