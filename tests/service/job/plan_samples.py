"""Who talks to whom in simulated jobs, by their descriptions and in their logs."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from benchmarks.models.shapes import ShapeOfJob

from ncclscope.offline import run_offline
from ncclscope_models.description import completed
from ncclscope_service.job.plan import make_plan
from ncclscope_service.job.plan_pattern import patterns_of
from ncclscope_service.job.step_lines import step_lines
from ncclscope_service.store.plan_records import PlanPattern
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import write


@cache
def pattern_of(shape: ShapeOfJob, *changed: str, exports: bool = False) -> PlanPattern:
    """Of a simulated job; `changed`: assignments of its description that are wrong."""
    with tempfile.TemporaryDirectory() as folder:
        write(shape.config, Path(folder) / "job")
        read = Path(folder) / "job" if exports else Path(folder) / "job" / "logs"
        known = run_offline([read], job="job", settings=PipelineSettings()).pipeline.store
        plan = make_plan("job", completed(shape.description(changed)), step_lines(known, "job", known.operations.rows))
        return patterns_of(known, {"job": plan})["job"]
