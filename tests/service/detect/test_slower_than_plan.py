"""Steps against what the description and the calibration of another run foretell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from emission_samples import small
from service import fake_service as fake
from service.detect.test_sight_and_clock import FINDING
from service.simulated_batches import SECOND_NS, advanced, simulated_batches

from ncclscope.offline import run_offline
from ncclscope_models.calibration import calibrations_of
from ncclscope_models.expected_step import ExpectedPart, ExpectedStep, expected_step
from ncclscope_service.detect.context import Context
from ncclscope_service.detect.slower_than_plan import SlowerThanPlan
from ncclscope_service.export.directory import write_run
from ncclscope_service.job.step_budget import MeanStep, PartShare
from ncclscope_service.job.step_times import STEP
from ncclscope_service.job.utilization import gpu_of
from ncclscope_service.keep.service_state import ServiceState
from ncclscope_service.store.plan_records import PlanEdit, PlanRecord
from ncclscope_service.store.records import Finding, FindingKind
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import write
from ncclscope_wire.batch import Columns

EXPECTED = ExpectedStep(low=0.384, typical=0.4, high=0.416, run="before", is_same=True)
ON_PLAN = replace(fake.plan("j"), unexplained_operations=0, edits=())
EDIT = PlanEdit(field="layers", described=3, observed=2, sentence="the description says 3, the traffic says 2")


def steps(*milliseconds: float) -> Columns:
    made = np.zeros(len(milliseconds), STEP)
    made["duration_ns"] = np.asarray(milliseconds) * 1e6
    made["started_ns"] = 1_000_000_000 + np.cumsum(made["duration_ns"]) - made["duration_ns"]
    return made


def judged(
    *milliseconds: float,
    expected: ExpectedStep | None = EXPECTED,
    plan: PlanRecord | None = ON_PLAN,
    others: tuple[Finding, ...] = (),
    slow_step: MeanStep | None = None,
) -> list[Finding]:
    detector = SlowerThanPlan()
    for each in milliseconds:  # a look after each step
        detector.ingest_steps(steps(each))
        detector.compare(expected, plan, lambda _: slow_step, Context(job="j"), 0)
    return detector.findings(others)


def test_twenty_steps_beyond_the_limit_are_found_with_what_was_expected() -> None:
    assert judged(*[440.0] * 19) == []
    (found,) = judged(*[440.0] * 20)
    assert found.kind is FindingKind.SLOWER_THAN_PLAN
    assert found.until_ns is None
    assert "steps take 440.0 ms, 10.0% longer than the 400.0 ms" in found.summary
    assert found.evidence["limit_ns"] == pytest.approx(400e6 * 1.04**2, abs=1)


def mean_step(**parts: tuple[str | None, float]) -> MeanStep:
    """Of parts with their parallelism and milliseconds."""
    whole = sum(milliseconds for _, milliseconds in parts.values())
    shares = tuple(
        PartShare(part=part, parallelism=kind, mean_ns=milliseconds * 1e6, share=milliseconds / whole)
        for part, (kind, milliseconds) in parts.items()
    )
    return MeanStep(job="j", steps=20, mean_ns=whole * 1e6, parts=shares)


WITH_PARTS = replace(
    EXPECTED,
    parts=(
        ExpectedPart(part="computation", parallelism=None, seconds=0.2),
        ExpectedPart(part="hidden", parallelism="DP", seconds=0.06),
        ExpectedPart(part="exposed_transfer", parallelism="TP", seconds=0.1),
        ExpectedPart(part="bubble", parallelism="PP", seconds=0.04),
    ),
)


@pytest.mark.parametrize(
    ("changed", "says", "first"),
    [
        (
            {"computation": (None, 230.0), "hidden": ("DP", 70.0)},
            "; most of it is computation, 300.0 ms of a step instead of 260.0 ms",
            ("computation", None, 300, 260),
        ),
        (
            {"exposed_transfer": ("TP", 145.0), "bubble": ("PP", 35.0)},
            "; most of it is exposed transfer of TP, 145.0 ms of a step instead of 100.0 ms",
            ("exposed_transfer", "TP", 145, 100),
        ),
        (
            {"computation": (None, 275.0), "exposed_transfer": ("TP", 118.0), "idle": (None, 17.0)},
            "; it is spread over several parts, the largest is exposed transfer of TP, 118.0 ms of a step instead of",
            ("exposed_transfer", "TP", 118, 100),
        ),
        (
            {"late": ("TP", 40.0)},
            "; most of it is waiting for a late rank of TP, 40.0 ms of a step instead of none",
            ("late", "TP", 40, 0),
        ),
    ],
    ids=["computation", "transfer", "spread", "late"],
)
def test_the_part_that_grew_is_named_with_both_its_lengths(
    changed: dict[str, tuple[str | None, float]], says: str, first: tuple[str, str | None, int, int]
) -> None:
    usual = {"computation": (None, 260.0), "exposed_transfer": ("TP", 100.0), "bubble": ("PP", 40.0)}
    (found,) = judged(*[440.0] * 20, expected=WITH_PARTS, slow_step=mean_step(**{**usual, **changed}))
    assert says in found.summary
    part, parallelism, now_ms, expected_ms = first
    parts = found.evidence["parts"]
    assert isinstance(parts, list)
    assert parts[0] == {
        "part": part, "parallelism": parallelism, "ns": now_ms * 10**6, "expected_ns": expected_ms * 10**6,
    }  # fmt: skip


def test_where_slow_steps_are_not_recorded_or_the_layout_was_another_no_part_is_named() -> None:
    seen = mean_step(computation=(None, 300.0))
    for found in (
        *judged(*[440.0] * 20, expected=WITH_PARTS),
        *judged(*[440.0] * 20, expected=replace(EXPECTED, is_same=False), slow_step=seen),
    ):
        assert found.summary.endswith("no other finding says why")
        assert found.evidence["parts"] == []


def test_within_the_limit_or_with_some_steps_as_expected_nothing_is_said() -> None:
    assert judged(*[430.0] * 100) == []
    assert judged(*[440.0] * 19, 400.0, *[440.0] * 19) == []


def test_it_closes_when_half_of_the_steps_are_as_expected() -> None:
    (found,) = judged(*[440.0] * 30, *[400.0] * 11)
    assert found.until_ns is not None


@pytest.mark.parametrize(
    "plan",
    [
        None,
        replace(ON_PLAN, may_raise=False),
        replace(ON_PLAN, edits=(EDIT,)),
        replace(ON_PLAN, unexplained_operations=1),
    ],
    ids=["none", "assumed_rules", "another_field", "unexplained"],
)
def test_without_a_sure_plan_it_is_silent(plan: PlanRecord | None) -> None:
    assert judged(*[900.0] * 50, plan=plan) == []
    assert judged(*[900.0] * 50, expected=None) == []


def test_another_finding_explains_it() -> None:
    assert judged(*[440.0] * 20, others=(FINDING,)) == []


RUN = small(tp=2, dp=2, iterations=26)


def recorded(folder: Path, *, seed: int, slower: float = 1.0, expected: ExpectedStep | None = None) -> list[Finding]:
    """Findings of a job that was recorded in full; its outputs stay in the folder."""
    config = replace(RUN.config, seed=seed, capture="full", step_seconds=RUN.config.step_seconds * slower)
    write(config, folder / "job")
    settings = PipelineSettings(description=RUN.described(), expected_step=expected)
    run = run_offline([folder / "job" / "logs", folder / "job" / "nsys"], job="j", settings=settings)
    write_run(run.pipeline.store, folder / "out")
    return run.pipeline.store.findings


def test_a_healthy_job_that_runs_again_is_never_accused_and_a_slower_one_is(tmp_path: Path) -> None:
    recorded(tmp_path / "first", seed=1)
    document = orjson.loads((tmp_path / "first" / "out" / "calibration.json").read_bytes())
    expected = expected_step(RUN.described().job, calibrations_of(document, "calibration.json"))
    assert expected.is_same
    assert expected.low < document["jobs"][0]["step"]["mean_ns"] / 1e9 < expected.high
    again = recorded(tmp_path / "again", seed=2, expected=expected)
    assert FindingKind.SLOWER_THAN_PLAN not in [each.kind for each in again]
    slower = recorded(tmp_path / "slower", seed=3, slower=1.2, expected=expected)
    (found,) = [each for each in slower if each.kind is FindingKind.SLOWER_THAN_PLAN]
    assert "; most of it is computation, " in found.summary
    parts = found.evidence["parts"]
    assert isinstance(parts, list)
    assert sum(each["expected_ns"] for each in parts) == pytest.approx(expected.typical * 1e9, rel=1e-6)


@pytest.mark.parametrize(("share", "is_open"), [(0.6, False), (0.98, True)])
def test_a_service_that_starts_again_from_its_state_expects_and_finds_the_same(
    tmp_path: Path, share: float, is_open: bool
) -> None:
    """A restart while steps are too long, before the finding is raised and after it; settings are loaded again."""

    def settings() -> PipelineSettings:
        expected = ExpectedStep(low=0.29, typical=0.3, high=0.31, run="before", is_same=True, gpu="A100")
        return PipelineSettings(description=RUN.described(), expected_step=expected)

    longer = replace(RUN.config, iterations=32)
    batches = simulated_batches(longer, tmp_path, portions=8)
    cut = round(share * len(batches))
    before, whole = ServiceState(settings()), ServiceState(settings())
    advanced(before.pipeline, batches[:cut])
    assert (FindingKind.SLOWER_THAN_PLAN in [each.kind for each in before.pipeline.store.findings]) == is_open
    again = ServiceState.restore(b"".join(before.parts()), settings())
    advanced(again.pipeline, batches[cut:], since=cut)
    advanced(whole.pipeline, batches)
    for each in (again, whole):
        each.pipeline.finish((len(batches) + 1) * SECOND_NS)
    assert again.pipeline.store.expected_step_of("j") == settings().expected_step
    assert again.pipeline.store.findings == whole.pipeline.store.findings
    assert FindingKind.SLOWER_THAN_PLAN in [found.kind for found in again.pipeline.store.findings]
    assert gpu_of(again.pipeline.store, "j") == "A100"
