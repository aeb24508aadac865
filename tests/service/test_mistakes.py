"""What our own code fails on in a pass over what came is left out, counted and told; all else goes on."""

from __future__ import annotations

import numpy as np
import pytest
from service.simulated_batches import SECOND_NS, fed, simulated_batches

from ncclscope_service.detect.detectors import Detectors
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.rows import Finding, FindingKind, Match
from ncclscope_service.store import Ids
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

    def findings(self, now_ns: int, *, watched_ns: int | None = None) -> list[Finding]:
        if self._fails[0]:
            raise ZeroDivisionError
        return super().findings(now_ns, watched_ns=watched_ns)


def _bearing(pipeline: Pipeline) -> Pipeline:
    pipeline.mistakes.are_borne = True
    return pipeline


def test_a_job_whose_detectors_fail_is_told_to_be_unseen_and_all_else_goes_on(batches: list[Batch]) -> None:
    fails = [True]
    pipeline = fed(_bearing(Pipeline(make_detectors=lambda: _Failing(fails))), batches)
    for second in (1, 2, 3):
        pipeline.advance(second * SECOND_NS)
    known = pipeline.store
    assert pipeline.mistakes.counted == {"detect": 3}
    assert [(each.where, "ZeroDivisionError" in each.trace) for each in pipeline.mistakes.take()] == [
        ("detect", True)
    ] * 3
    assert [(each.kind, each.since_ns, each.until_ns) for each in known.findings] == [
        (FindingKind.BLIND, SECOND_NS, None)
    ]
    assert not pipeline.has_backlog  # nothing that would be tried again and again
    fails[0] = False
    pipeline.advance(4 * SECOND_NS)
    assert known.findings == []
    assert pipeline.mistakes.counted == {"detect": 3}


def test_where_mistakes_are_not_borne_they_are_raised(batches: list[Batch]) -> None:
    pipeline = fed(Pipeline(make_detectors=lambda: _Failing([True])), batches)
    with pytest.raises(ZeroDivisionError):
        pipeline.advance(SECOND_NS)


def _with_damaged_kernels(batches: list[Batch]) -> tuple[Pipeline, int]:
    """A pipeline of which one process has kernels whose template is nowhere; and that process."""
    pipeline = fed(_bearing(Pipeline()), batches)
    pipeline.snapshot()  # numbers what was fed
    known = pipeline.store
    damaged = known.kernels.rows[:1].copy()
    damaged["template"] = 10**6
    ids = known.kernels.append(damaged)
    pipeline._arrivals.append_kernels(ids, damaged["process"])  # pyright: ignore[reportPrivateUsage]
    return pipeline, int(damaged["process"][0])


def test_a_process_that_cannot_be_aligned_is_lost_and_counted_and_the_others_are_not(batches: list[Batch]) -> None:
    pipeline, process = _with_damaged_kernels(batches)
    pipeline.advance(SECOND_NS)
    pipeline.flush(200 * SECOND_NS)
    known = pipeline.store
    assert pipeline.mistakes.counted == {"align": 1}
    (mistake,) = pipeline.mistakes.take()
    assert mistake.what == f"process {known.processes[process].pid} of {known.processes[process].host}"
    mine = known.operations.rows["process"] == process
    assert set(known.operations.rows["match"][mine].tolist()) == {Match.NOT_COVERED}
    assert (known.operations.rows["confidence"][mine] == 0).all()
    assert known.operations.rows["finished"].all()
    assert np.count_nonzero(known.operations.rows["match"][~mine] == Match.MATCHED) > 0.9 * np.count_nonzero(~mine)
    assert known.skipped["internal_error"] == np.count_nonzero(mine)
    gaps = known.gaps[known.process_source[process]]
    assert [(gap.reason, gap.amount) for gap in gaps] == [("internal_error", int(mine.sum()))]


def test_a_mistake_is_made_again_where_the_same_is_worked_on_again(batches: list[Batch]) -> None:
    snapshots: list[bytes] = []
    for _ in range(2):
        pipeline, _ = _with_damaged_kernels(batches)
        pipeline.advance(SECOND_NS)
        pipeline.mistakes.take()  # the trace names places in files, which are not of the state
        snapshots.append(pipeline.snapshot())
    assert snapshots[0] == snapshots[1]


class _Unreporting(Pipeline):
    """Fails at each report."""

    def _report(self, decided: Ids, now_ns: int) -> None:
        raise ZeroDivisionError


def test_operations_that_cannot_be_reported_are_finished_all_the_same(batches: list[Batch]) -> None:
    pipeline = fed(_bearing(_Unreporting()), batches)
    pipeline.flush(SECOND_NS)
    known = pipeline.store
    assert pipeline.mistakes.counted == {"report": 1}
    assert known.operations.rows["finished"].all()
    assert known.skipped["internal_error"] == len(known.operations)
