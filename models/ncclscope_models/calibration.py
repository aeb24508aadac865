"""`calibration.json`: what a run has shown of its machine, to foretell others by. Written by `analyze` and `snapshot`.

Transfers by operation, ranks, nodes and size, what a node has, and where the mean step went. Several runs add
up. A document is what JSON holds; times in it are whole nanoseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from ncclscope_models.flops import PEAK_FLOPS
from ncclscope_models.job import ModelError
from ncclscope_models.transfer_estimate import GroupShape, MeasuredTransfers, TransferTimes

FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """The mean step of a rank, in ns."""

    steps: int
    """Each is of one rank."""
    mean_ns: int
    parts: Mapping[tuple[str, str | None], int]
    """By part and parallelism, as in `step_budget.parquet`; they sum up to the mean within a nanosecond each."""

    def part_ns(self, *parts: str) -> int:
        """Of these parts, of all kinds of parallelism."""
        return sum(ns for (part, _), ns in self.parts.items() if part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One job of a run."""

    job: str
    ranks: int
    ranks_per_node: int | None
    """None where nodes differ, or were not seen."""
    times: TransferTimes
    step: ObservedStep | None
    """None where kernels or computation were not recorded."""
    median_step_ns: int | None
    """Of all iterations with a known duration."""
    description: Mapping[str, int | bool | str] | None = None
    """Fields of the job that was recorded, if it was described and sent what its description says."""
    gpu: str | None = None
    """Of all nodes, one of `flops.PEAK_FLOPS`; None where it is not known."""
    network_cards: int | None = None
    """Of a node, as NCCL counts them; None where nodes differ, or their logs do not say it."""


def document_of(calibrations: Sequence[Calibration]) -> dict[str, object]:
    """What `calibration.json` holds."""
    return {"format": FORMAT, "jobs": [_job_document(each) for each in calibrations]}


def _job_document(of: Calibration) -> dict[str, object]:
    step = of.step
    return {
        "job": of.job,
        "ranks": of.ranks,
        "ranks_per_node": of.ranks_per_node,
        "gpu": of.gpu,
        "network_cards": of.network_cards,
        "has_switch": of.times.has_switch,
        "median_step_ns": of.median_step_ns,
        "description": of.description,
        "step": None
        if step is None
        else {
            "steps": step.steps,
            "mean_ns": step.mean_ns,
            "parts": [{"part": part, "parallelism": kind, "ns": ns} for (part, kind), ns in step.parts.items()],
        },
        "transfers": [
            {
                "op": shape.op,
                "ranks": shape.ranks,
                "nodes": shape.nodes,
                "parallelism": shape.parallelism or None,
                "message_bytes": each.message_bytes,
                "low_ns": round(each.low * 1e9),
                "typical_ns": round(each.typical * 1e9),
                "high_ns": round(each.high * 1e9),
                "samples": each.samples,
            }
            for shape, found in of.times.measured.items()
            for each in found
        ],
    }


def calibrations_of(document: object, name: str) -> list[Calibration]:
    """The jobs of a document; `name` is where it came from.

    Raises:
        ModelError: It is no calibration, or of another format.
    """
    try:
        whole = cast("dict[str, Any]", document)
        if whole["format"] != FORMAT:
            raise ModelError(f"{name} has format {whole['format']!r}, not {FORMAT}")
        return [_calibration(job) for job in whole["jobs"]]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{name} is no calibration.json of ncclscope ({type(error).__name__}: {error})") from error


def _calibration(job: dict[str, Any]) -> Calibration:
    measured: defaultdict[GroupShape, list[MeasuredTransfers]] = defaultdict(list)
    for each in job["transfers"]:
        low, typical, high = (int(each[name]) / 1e9 for name in ("low_ns", "typical_ns", "high_ns"))
        size, samples = int(each["message_bytes"]), int(each["samples"])
        if not 0 < low <= typical <= high or min(size, samples) < 1:
            raise ValueError(f"transfers of {size} bytes: {low} <= {typical} <= {high}")
        kind = str(each["parallelism"] or "")
        shape = GroupShape(str(each["op"]), int(each["ranks"]), int(each["nodes"]), kind)
        measured[shape].append(
            MeasuredTransfers(message_bytes=size, low=low, typical=typical, high=high, samples=samples)
        )
    step = job["step"]
    return Calibration(
        job=str(job["job"]),
        ranks=int(job["ranks"]),
        ranks_per_node=None if job["ranks_per_node"] is None else int(job["ranks_per_node"]),
        times=TransferTimes(measured, has_switch=job["has_switch"] is True),
        step=None
        if step is None
        else ObservedStep(
            steps=int(step["steps"]),
            mean_ns=int(step["mean_ns"]),
            parts={(str(each["part"]), each["parallelism"]): int(each["ns"]) for each in step["parts"]},
        ),
        median_step_ns=None if job["median_step_ns"] is None else int(job["median_step_ns"]),
        description=None if job.get("description") is None else dict(job["description"]),
        gpu=job["gpu"] if job.get("gpu") in PEAK_FLOPS else None,  # of a later build it may be one that is not known
        network_cards=None if job.get("network_cards") is None else max(1, int(job["network_cards"])),
    )


def added_up(calibrations: Sequence[Calibration]) -> TransferTimes:
    """Transfers of several runs; of a size that several have, percentiles are weighed by how many transfers they hold.

    A switch counts only where all have one.
    """
    together: defaultdict[tuple[GroupShape, int], list[MeasuredTransfers]] = defaultdict(list)
    for of in calibrations:
        for shape, found in of.times.measured.items():
            for each in found:
                together[shape, each.message_bytes].append(each)
    measured: defaultdict[GroupShape, list[MeasuredTransfers]] = defaultdict(list)
    for (shape, size), several in together.items():
        samples = sum(each.samples for each in several)
        low, typical, high = (
            sum(getattr(each, name) * each.samples for each in several) / samples for name in ("low", "typical", "high")
        )
        measured[shape].append(
            MeasuredTransfers(message_bytes=size, low=low, typical=typical, high=high, samples=samples)
        )
    return TransferTimes(measured, has_switch=all(of.times.has_switch for of in calibrations))
