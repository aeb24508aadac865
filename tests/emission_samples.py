"""Small simulated jobs that call what Megatron-LM calls, and what their logs show."""

from __future__ import annotations

from benchmarks.models.shapes import ShapeOfJob, observed

from ncclscope_models.description import Completed
from ncclscope_service.job.step_lines import StepLines
from ncclscope_simulator import SimulationConfig, parse_faults, parse_model


def small(option: str = "", *, lost: float = 0.0, iterations: int = 6, **given: object) -> ShapeOfJob:
    """A job of four ranks, or as many as `given` says."""
    settings: dict[str, object] = {"tp": 1, "pp": 1, "dp": 1, "hidden": 256, "sequence": 128, "capture": "none"}
    settings |= given
    world = int(str(settings["tp"])) * int(str(settings["pp"])) * int(str(settings["dp"]))
    faults = parse_faults([f"drop_lines:ratio={lost}"]) if lost else ()
    config = SimulationConfig(
        nodes=1, gpus=world, iterations=iterations, megatron=parse_model(option), faults=faults,
        **settings,  # type: ignore[arg-type]  # settings of a simulated job by name
    )  # fmt: skip
    return ShapeOfJob(option, config)


def logged(shape: ShapeOfJob) -> tuple[Completed, StepLines]:
    """Its description, and its lines."""
    return shape.described(), observed(shape.config)
