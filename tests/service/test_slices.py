"""A pass over what came does a bounded amount of the heavy work; what is found does not depend on how much that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from service.simulated_batches import SECOND_NS, batches_by_job, fed, simulated_batches

from ncclscope_agent.sources.nsys.export import ExportLimits
from ncclscope_service.detect.context import Context
from ncclscope_service.detect.detection import Detectors
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.rows import Match
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import SimulationConfig
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_SLICE = PipelineSettings(aligned_at_once=1)
"""One process at a time."""
_CAPTURED_NOW_AND_THEN = SimulationConfig(
    iterations=40, nodes=2, gpus=2, tp=1, pp=2, dp=2, nvtx=False, capture="duty:0.4", chunk_seconds=2,
)  # fmt: skip
_JOBS = {
    "clean": SimulationConfig(iterations=6, nodes=2, gpus=2, tp=2, pp=1, dp=2),
    "chunks": _CAPTURED_NOW_AND_THEN,
}
_SAME_LIVE = ("op_count", "match", "start_ns", "end_ns", "ranks_seen")


@pytest.fixture(scope="module")
def batches_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Batch]]:
    """The batches of each job, simulated once."""
    return batches_by_job(_JOBS, tmp_path_factory)


def _worked_off(pipeline: Pipeline, now_ns: int) -> int:
    """How many slices what waits takes."""
    slices = 0
    while pipeline.has_backlog:
        slices += 1
        assert slices < 1000, "what waits grows less with no slice"
        pipeline.process_backlog(now_ns)
    return slices


@pytest.mark.slow
@pytest.mark.parametrize("timestamps", [True, False])
def test_exports_in_many_small_batches_decide_what_large_ones_do(*, timestamps: bool, tmp_path: Path) -> None:
    job = replace(_CAPTURED_NOW_AND_THEN, tp=2, pp=1, iterations=20, timestamps=timestamps)
    large, small = (
        simulated_batches(job, tmp_path / str(rows), portions=6, limits=ExportLimits(batch_rows=rows))
        for rows in (10_000, 30)
    )
    assert len(small) > 2 * len(large)
    whole, sliced, live = fed(Pipeline(), large), fed(Pipeline(_SLICE), small), Pipeline()
    for number, batch in enumerate(small):
        fed(live, [batch]).process_backlog(SECOND_NS + number * SECOND_NS // 10)
    for pipeline in (whole, sliced, live):
        pipeline.process_backlog(30 * SECOND_NS)
        _worked_off(pipeline, 30 * SECOND_NS)
        pipeline.finish(31 * SECOND_NS)
    expected = whole.store.operations.rows
    for name in (*_SAME_LIVE, "confidence"):
        np.testing.assert_array_equal(sliced.store.operations.rows[name], expected[name], err_msg=name)
    # How sure it is depends on what was known by then.
    for name in _SAME_LIVE:
        np.testing.assert_array_equal(live.store.operations.rows[name], expected[name], err_msg=name)


def test_what_hosts_sent_each_other_before_their_clocks_were_told_is_measured_when_they_are(
    batches_of: Callable[[str], list[Batch]],
) -> None:
    batches = batches_of("chunks")
    whole, sliced = fed(Pipeline(), batches), fed(Pipeline(_SLICE), batches)
    for pipeline in (whole, sliced):
        now_ns = SECOND_NS
        while pipeline.has_backlog or now_ns < 10 * SECOND_NS:
            pipeline.process_backlog(now_ns)
            now_ns += SECOND_NS // 4
    sent = [of.store.collectives.rows[of.store.collectives.rows["peer"] != NO_NUMBER] for of in (whole, sliced)]
    assert len(sent[0]) > 200
    for name in ("communicator", "rank", "peer", "message_bytes"):
        np.testing.assert_array_equal(np.sort(sent[1][name]), np.sort(sent[0][name]), err_msg=name)


def _begun(batches: list[Batch], pipeline: Pipeline) -> Pipeline:
    """The pipeline when it has aligned the first processes."""
    fed(pipeline, batches).process_backlog(SECOND_NS)
    return pipeline


def _measured(pipeline: Pipeline) -> None:
    """Goes on until the first collectives are measured."""
    for _ in range(10):
        if len(pipeline.store.collectives):
            return
        pipeline.process_backlog(SECOND_NS)
    pytest.fail("nothing was measured")


def test_lines_are_counted_at_once_while_captures_wait_to_be_aligned(batches_of: Callable[[str], list[Batch]]) -> None:
    pipeline = fed(Pipeline(_SLICE), batches_of("clean"))
    pipeline.process_backlog(SECOND_NS)
    known = pipeline.store
    assert pipeline.has_backlog
    assert known.series.rows["operations"].sum() == len(known.operations) > 0


def test_of_processes_that_were_captured_together_one_is_decided_at_a_time(
    batches_of: Callable[[str], list[Batch]],
) -> None:
    pipeline = _begun(batches_of("clean"), Pipeline(_SLICE))
    known = pipeline.store.operations
    assert 0 < np.count_nonzero(known.rows["match"] == Match.MATCHED) <= len(known) / 4
    assert _worked_off(pipeline, SECOND_NS) >= 3
    assert np.count_nonzero(known.rows["match"] == Match.MATCHED) > 0.9 * len(known)


class _Watching(Detectors):
    """Notes what detectors are fed."""

    def __init__(self, fed: list[Columns]) -> None:
        super().__init__()
        self._fed = fed

    def ingest_collectives(self, collectives: Columns, context: Context) -> None:
        self._fed.append(collectives)
        super().ingest_collectives(collectives, context)


def test_detectors_see_no_part_of_a_capture_before_the_rest_and_all_of_it_by_time(
    batches_of: Callable[[str], list[Batch]],
) -> None:
    fed: list[Columns] = []
    pipeline = _begun(batches_of("clean"), Pipeline(_SLICE, make_detectors=lambda: _Watching(fed)))
    _measured(pipeline)
    assert pipeline.has_backlog
    assert not fed
    _worked_off(pipeline, SECOND_NS)
    ends = np.concatenate([part["end_true_ns"] for part in fed])
    assert len(ends) == np.count_nonzero(pipeline.store.collectives.rows["end_true_ns"] != NO_TIME_NS) > 0
    assert (np.diff(ends) >= 0).all()


def test_where_captures_never_stop_waiting_detectors_see_what_is_measured_after_a_while(
    batches_of: Callable[[str], list[Batch]],
) -> None:
    fed: list[Columns] = []
    pipeline = _begun(batches_of("clean"), Pipeline(_SLICE, make_detectors=lambda: _Watching(fed)))
    _measured(pipeline)
    assert not fed
    pipeline.process_backlog(13 * SECOND_NS)
    assert pipeline.has_backlog
    assert fed


def test_what_waits_to_be_aligned_grows_less_and_is_kept(batches_of: Callable[[str], list[Batch]]) -> None:
    pipeline = fed(Pipeline(_SLICE), batches_of("clean"))
    rows = pipeline.unaligned_rows
    assert rows > 0
    pipeline.process_backlog(SECOND_NS)
    assert 0 < Pipeline.restore(pipeline.snapshot()).unaligned_rows < rows
