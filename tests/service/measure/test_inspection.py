"""NCCL Inspector as a source of timing, through the pipeline: beside kernels, in portions, beside CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from service.simulated_batches import SECOND_NS, advanced, export_batches, fed, log_batches

from ncclscope_service.export.tables.operations_file import operations_table
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.rows import TimingSource, has_kernel, timing_sources
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_service.store.tables import Store
from ncclscope_simulator import SimulationConfig, write
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.records import SourceKind
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


_VERBOSE = SimulationConfig(iterations=4, nodes=2, gpus=2, tp=2, pp=1, dp=2, inspector="v4.2", inspector_verbose=True)
_SEEN_LATE_NS = 5_000
"""Up to 4 us that the simulated plug-in is late, and whole us."""


def _truth(folder: Path) -> dict[tuple[int, str, int], list[dict[str, Any]]]:
    """Operations that have a record, by pid, operation and size, in the order in which they began."""
    rows = pq.read_table(folder / "truth" / "operations.parquet").to_pylist()
    return _sorted([(row["pid"], row["op"], row["message_bytes"]), row] for row in rows if row["inspected"])


def _sorted(rows: Iterable[list[Any]]) -> dict[tuple[int, str, int], list[dict[str, Any]]]:
    found: dict[tuple[int, str, int], list[dict[str, Any]]] = {}
    for key, row in rows:
        found.setdefault(key, []).append(row)
    return {key: sorted(own, key=lambda row: row["start_ns"]) for key, own in found.items()}


def _dumps(folder: Path, config: SimulationConfig) -> list[Batch]:
    write(config, folder)
    batches = chain.from_iterable(zip_longest(*log_batches(folder, portions=4)))
    return [each for each in batches if each is not None and each.source.kind is SourceKind.INSPECTOR]


def _table(known: Store) -> list[dict[str, Any]]:
    table = operations_table(known, np.arange(known.operations.first, known.operations.next_id, dtype=np.int64))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def test_without_a_log_records_become_operations_with_starts_ends_and_clocks(tmp_path: Path) -> None:
    known = _flushed(advanced(Pipeline(), _dumps(tmp_path, _VERBOSE)), 1_000)
    rows = _table(known)
    truth = _truth(tmp_path)
    ours = _sorted([(row["pid"], row["op"], row["message_bytes"]), row] for row in rows)
    assert {key: len(own) for key, own in ours.items()} == {key: len(own) for key, own in truth.items()}
    pairs = [pair for key, own in truth.items() for pair in zip(own, ours[key], strict=True)]
    assert len(pairs) > 500
    offsets = {row["host"] for row in rows if row["start_true_ns"] != row["start_ns"]}
    assert len(offsets) == 1  # of the other host nothing but records tells the clock
    for true, own in pairs:
        assert own["timing_source"] == "inspector"
        assert 0 <= own["end_ns"] - true["end_ns"] + 1_000 <= _SEEN_LATE_NS + 1_000
        assert abs(own["start_true_ns"] - true["start_true_ns"]) <= 2 * _SEEN_LATE_NS
        assert true["duration_ns"] - 1_000 < own["duration_ns"] <= true["duration_ns"]
    row = next(row for row in rows if row["op"] == "AllReduce")
    sides = [each["comm_rank"] for each in rows if each["collective_id"] == f"{row['comm_id']}:AllReduce:1"]
    assert sorted(sides) == list(range(row["comm_size"]))
    unknown = ("count", "dtype", "red_op", "op_count", "seq", "coll_seq", "send_buffer", "comm_ptr", "iteration")
    assert {name: row[name] for name in unknown} == dict.fromkeys(unknown)
    assert {each.name for each in known.listed_communicators()} == {"TP", "DP"}


def test_beside_logs_verbose_records_say_when_the_operations_between_captures_began(tmp_path: Path) -> None:
    config = replace(_VERBOSE, capture="none")
    lines, _ = _made(config, tmp_path)
    known = _flushed(fed(Pipeline(), lines), 1_000)
    truth = {(row["pid"], row["log_line"]): row for own in _truth(tmp_path).values() for row in own}
    timed = [(truth[row["pid"], row["log_line"]], row) for row in _table(known) if row["timing_source"] == "inspector"]
    assert len(timed) == len(truth) > 500
    for true, own in timed:
        assert abs(own["start_ns"] - true["start_ns"]) <= _SEEN_LATE_NS
        assert abs(own["end_true_ns"] - true["end_true_ns"]) <= 2 * _SEEN_LATE_NS
    measured = known.collectives.rows
    assert (measured["first_start_true_ns"] != NO_TIME_NS).all()


def test_a_restart_in_the_middle_of_dumps_changes_no_row(tmp_path: Path) -> None:
    batches = _dumps(tmp_path, _VERBOSE)
    cut = len(batches) // 2
    whole = advanced(Pipeline(), batches)
    restored = Pipeline.restore(advanced(Pipeline(), batches[:cut]).snapshot())
    again = advanced(restored, batches[cut:], since=cut)
    rows = [_flushed(each, 1_000).operations.rows.copy() for each in (whole, again)]
    _assert_equal(rows[0], rows[1], *(rows[0].dtype.names or ()))
