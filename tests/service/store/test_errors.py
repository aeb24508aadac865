"""What our own code fails on in a pass over what came is left out, counted and told; all else goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from service.same_state import assert_same
from service.simulated_batches import SECOND_NS, fed, simulated_batches

from ncclscope_service.detect.detection import Detectors
from ncclscope_service.measure.stage import MeasurementStage
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.records import Finding, FindingKind
from ncclscope_service.store.rows import Match
from ncclscope_simulator import SimulationConfig
from ncclscope_wire.batch import Batch


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[Batch]:
    config = SimulationConfig(iterations=6, nodes=2, gpus=2, tp=2, pp=1, dp=2)
    return simulated_batches(config, tmp_path_factory.mktemp("job"), portions=6)


class _Failing(Detectors):
    """Fails while it is told to."""

    def __init__(self, fails: list[bool]) -> None:
        super().__init__()
        self._fails = fails

    def findings(self, now_ns: int, **others: Any) -> list[Finding]:
        if self._fails[0]:
            raise ZeroDivisionError
        return super().findings(now_ns, **others)


def _bearing(pipeline: Pipeline) -> Pipeline:
    pipeline.errors.are_isolated = True
    return pipeline


def test_a_job_whose_detectors_fail_is_told_to_be_unseen_and_all_else_goes_on(batches: list[Batch]) -> None:
    fails = [True]
    pipeline = fed(_bearing(Pipeline(make_detectors=lambda: _Failing(fails))), batches)
    for second in (1, 2, 3):
        pipeline.process_backlog(second * SECOND_NS)
    known = pipeline.store
    assert pipeline.errors.counts == {"detect": 3}
    assert [(each.where, "ZeroDivisionError" in each.trace) for each in pipeline.errors.drain()] == [
        ("detect", True)
    ] * 3
    assert [(each.kind, each.since_ns, each.until_ns) for each in known.findings] == [
        (FindingKind.BLIND, SECOND_NS, None)
    ]
    assert not pipeline.has_backlog  # nothing that would be tried again and again
    fails[0] = False
    pipeline.process_backlog(4 * SECOND_NS)
    assert known.findings == []
    assert pipeline.errors.counts == {"detect": 3}


def test_errors_that_are_not_isolated_are_raised(batches: list[Batch]) -> None:
    pipeline = fed(Pipeline(make_detectors=lambda: _Failing([True])), batches)
    with pytest.raises(ZeroDivisionError):
        pipeline.process_backlog(SECOND_NS)


def _with_damaged_kernels(batches: list[Batch]) -> tuple[Pipeline, int]:
    """A pipeline of which one process has kernels whose template is nowhere; and that process."""
    pipeline = fed(_bearing(Pipeline()), batches)
    pipeline.snapshot()  # numbers what was fed
    known = pipeline.store
    damaged = known.kernels.rows[:1].copy()
    damaged["template"] = 10**6
    pipeline._alignment.ingest_kernels(damaged)  # pyright: ignore[reportPrivateUsage]
    return pipeline, int(damaged["process"][0])


def test_a_process_that_cannot_be_aligned_is_lost_and_counted_and_the_others_are_not(batches: list[Batch]) -> None:
    pipeline, process = _with_damaged_kernels(batches)
    pipeline.process_backlog(SECOND_NS)
    pipeline.finish(200 * SECOND_NS)
    known = pipeline.store
    assert pipeline.errors.counts == {"align": 1}
    (error,) = pipeline.errors.drain()
    assert error.what == f"process {known.processes[process].pid} of {known.processes[process].host}"
    mine = known.operations.rows["process"] == process
    assert set(known.operations.rows["match"][mine].tolist()) == {Match.NOT_COVERED}
    assert (known.operations.rows["confidence"][mine] == 0).all()
    assert known.operations.rows["finished"].all()
    assert np.count_nonzero(known.operations.rows["match"][~mine] == Match.MATCHED) > 0.9 * np.count_nonzero(~mine)
    assert known.skipped["internal_error"] == np.count_nonzero(mine)
    gaps = known.gaps[known.process_source[process]]
    assert [(gap.reason, gap.amount) for gap in gaps] == [("internal_error", int(mine.sum()))]


def test_an_error_happens_again_when_the_same_is_worked_on_again(batches: list[Batch]) -> None:
    (one, _), (other, _) = _with_damaged_kernels(batches), _with_damaged_kernels(batches)
    for pipeline in (one, other):
        pipeline.process_backlog(SECOND_NS)
        pipeline.errors.drain()  # the trace names places in files, which are not of the state
    assert_same(one, other)


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def test_operations_that_cannot_be_reported_are_finished_all_the_same(
    batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MeasurementStage, "report_operations", _fail)
    pipeline = fed(_bearing(Pipeline()), batches)
    pipeline.finish(SECOND_NS)
    known = pipeline.store
    assert pipeline.errors.counts == {"report": 1}
    assert known.operations.rows["finished"].all()
    assert known.skipped["internal_error"] == len(known.operations)
