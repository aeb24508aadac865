"""The settings of `ncclscope capture`: one table, from which flags, help and documentation come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_GIB = 1024**3


def _about(text: str, metavar: str, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    return {"help": text, "metavar": metavar, "low": low, "high": high}


@dataclass(frozen=True, kw_only=True)
class CaptureSettings:
    """All settings, in the order of the documentation."""

    out: str = field(default="", metadata=_about("Directory for finished exports: the agent's --exports.", "DIR"))
    chunk_seconds: float = field(
        default=10.0, metadata=_about("Length of one recording.", "SECONDS", low=0.5, high=300)
    )
    budget_percent: float = field(
        default=1.0,
        metadata=_about("Share of the job's time that recording may cost.", "PERCENT", low=0.001, high=100),
    )
    overhead_percent: float = field(
        default=10.0,
        metadata=_about(
            "Slow-down of the job while it is recorded; an assumption until you measure it.",
            "PERCENT",
            low=0.001,
            high=1000,
        ),
    )
    keep_bytes: int = field(
        default=2 * _GIB,
        metadata=_about("Limit on finished exports; the oldest are deleted.", "BYTES", low=1, high=2**60),
    )
    least_free_bytes: int = field(
        default=_GIB,
        metadata=_about("Do not record while less disk space is free.", "BYTES", low=0, high=2**60),
    )
    trace: str = field(default="cuda,nvtx", metadata=_about("What nsys records (its --trace).", "LIST"))
    cuda_graph_trace: str = field(
        default="graph",
        metadata=_about("graph, or node: record the kernels in CUDA graphs too, at a cost.", "graph|node"),
    )
    tables: str = field(default="", metadata=_about("Export only these tables (nsys's --tables).", "LIST"))
    nsys: str = field(default="nsys", metadata=_about("The nsys command.", "COMMAND"))
    session: str = field(default="", metadata=_about("Record this existing session of nsys; start no job.", "NAME"))
    launch_seconds: float = field(
        default=60.0,
        metadata=_about(
            "Time for nsys to start the job; then the job is started without it.", "SECONDS", low=1, high=600
        ),
    )
    finish_seconds: float = field(
        default=30.0,
        metadata=_about("Time for the last export after the job ends.", "SECONDS", low=0, high=600),
    )


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def settings_table() -> list[tuple[str, Any, dict[str, Any]]]:
    """Name, default and description of every setting."""
    return [(known.name, known.default, dict(known.metadata)) for known in fields(CaptureSettings)]


def load(given: Mapping[str, object]) -> CaptureSettings:
    """The settings from what was given; None stands for the default.

    Raises:
        ValueError: names every setting that is wrong, and what is allowed.
    """
    values: dict[str, Any] = {}
    faults: list[str] = []
    for name, default, about in settings_table():
        try:
            values[name] = _value(default, about, given.get(name))
        except ValueError as fault:
            faults.append(f"{flag_of(name)}: {fault}")
    if not faults and not values["out"]:
        faults.append("--out is needed: the directory that the agent follows with --exports")
    if not faults and values["cuda_graph_trace"] not in ("graph", "node"):
        faults.append(f"--cuda-graph-trace: {values['cuda_graph_trace']!r} is neither graph nor node")
    if faults:
        raise ValueError("\n".join(faults))
    return CaptureSettings(**values)


def _value(default: object, about: dict[str, Any], given: object) -> object:
    if given is None:
        return default
    if isinstance(default, str):
        return str(given)
    try:
        number = int(str(given)) if isinstance(default, int) else float(str(given))
    except ValueError:
        raise ValueError(f"{str(given)[:40]!r} is not a number") from None
    if not about["low"] <= number <= about["high"]:
        raise ValueError(f"{number} is not between {about['low']:.10g} and {about['high']:.10g}")
    return number
