"""Jobs against their descriptions: healthy ones are never accused, those off their plan are, with the field."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.models.shapes import ShapeOfJob
from emission_samples import small
from service.simulated_batches import SECOND_NS, advanced, simulated_batches

from ncclscope_models.description import Completed, completed
from ncclscope_service.keep.service_state import ServiceState
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store import state
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_wire.batch import Batch

HEALTHY = {
    "tensor and pipeline": small("micro_batch=2", tp=2, pp=2, iterations=10),
    "FP16 that overflows": small("fp16,mask,skipped", tp=2, sequence_parallel=False, iterations=10),
    "lines lost": small(tp=2, dp=2, lost=0.01, iterations=16),
    "experts": small("experts=4", dp=2, ep=2, nccl="2.27.5", layers=4, iterations=10),
}
_MADE: dict[ShapeOfJob, list[Batch]] = {}
WRONG = {"micro_batch": "4", "layers": "8", "sequence_parallel": "false", "precision": "FP16"}


def _live(shape: ShapeOfJob, described: Completed, folder: Path, *, seconds: float = 1.0) -> Pipeline:
    """A job whose log came in 12 portions, a second each, with a look every `seconds`."""
    settings = PipelineSettings(description=described, thresholds={"off_plan.look_seconds": seconds})
    batches = _batches(shape, folder)
    return advanced(Pipeline(settings), batches)


def _batches(shape: ShapeOfJob, folder: Path) -> list[Batch]:
    """Simulated once."""
    if shape not in _MADE:
        _MADE[shape] = simulated_batches(shape.config, folder / "job", portions=12)
    return _MADE[shape]


def _off_plan(pipeline: Pipeline) -> list[Finding]:
    return [each for each in pipeline.store.findings if each.kind is FindingKind.OFF_PLAN]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_job_that_does_what_its_description_says_is_never_accused(name: str, tmp_path: Path) -> None:
    shape = HEALTHY[name]
    pipeline = _live(shape, shape.described(), tmp_path)
    assert not _off_plan(pipeline)
    plan = pipeline.store.plans["j"]
    assert plan.unexplained_operations == 0
    assert len(plan.iterations) >= 3
    assert plan.verdict == "every operation is explained"


@pytest.mark.parametrize("field", WRONG)
def test_a_job_off_its_plan_is_one_finding_that_names_the_field(field: str, tmp_path: Path) -> None:
    shape = HEALTHY["tensor and pipeline"]
    described = completed(shape.description([f"{field}={WRONG[field]}"]))
    (finding,) = _off_plan(_live(shape, described, tmp_path))
    assert finding.severity is Severity.WARNING
    assert finding.until_ns is None
    assert not finding.ranks
    assert not finding.hosts
    fields = finding.evidence["fields"]
    assert isinstance(fields, Iterable)
    assert field in {each["field"] for each in fields}
    assert f"the description says {field} {WRONG[field]}, the traffic says" in finding.summary


def test_one_look_is_not_enough_while_the_job_runs(tmp_path: Path) -> None:
    shape = HEALTHY["tensor and pipeline"]
    described = completed(shape.description(["layers=8"]))
    pipeline = _live(shape, described, tmp_path, seconds=3600)
    assert not _off_plan(pipeline)
    pipeline.finish(10_000 * SECOND_NS)
    assert len(_off_plan(pipeline)) == 1


@pytest.mark.parametrize("change", ["version=0.12", "framework=ddp", "ranks=8"])
def test_no_rules_of_that_version_or_a_description_of_another_job_accuse_nobody(change: str, tmp_path: Path) -> None:
    shape = HEALTHY["tensor and pipeline"]
    given = ["layers=8", change] + (["global_batch=64"] if change == "ranks=8" else [])
    described = completed(shape.description([*given, "tensor=1", "pipeline=1", "chunks=1", "sequence_parallel=false"]))
    pipeline = _live(shape, described, tmp_path)
    assert not _off_plan(pipeline)
    assert ("j" in pipeline.store.plans) is (change != "ranks=8")


def test_it_closes_when_the_description_is_mended_and_goes_on_from_a_state(tmp_path: Path) -> None:
    shape = HEALTHY["tensor and pipeline"]
    wrong = completed(shape.description(["layers=8"]))
    batches = _batches(shape, tmp_path)
    settings = PipelineSettings(description=wrong, thresholds={"off_plan.look_seconds": 1.0})
    cut = len(batches) - 8
    kept = ServiceState()
    kept.pipeline = advanced(Pipeline(settings), batches[:cut])
    assert len(_off_plan(kept.pipeline)) == 1
    right = replace(settings, description=shape.described(), gpu="H200")
    restored = ServiceState.restore(state.snapshot(kept), right).pipeline
    assert restored.store.plans["j"].verdict.startswith("the description says layers 8")
    assert restored.store.gpu == "H200"
    (finding,) = _off_plan(advanced(restored, batches[cut:], since=cut))
    assert finding.until_ns is not None
