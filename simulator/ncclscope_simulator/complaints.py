"""What is wrong with a configuration: each complaint a sentence that names the setting and what it may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ncclscope_simulator.choices import (
    CONTEXT_EXCHANGES,
    EXPERT_DISPATCHERS,
    GRAPH_TRACES,
    INSPECTOR_FORMATS,
    NSYS_VERSIONS,
    ORDERS,
    captured_share,
)
from ncclscope_simulator.version import traits

if TYPE_CHECKING:
    from ncclscope_simulator.config import SimulationConfig

_PARALLEL: Final = ("nodes", "gpus", "tp", "pp", "dp", "ep", "cp", "replicate")
_SIZES: Final = (*_PARALLEL, "layers", "interleave", "microbatches", "hidden", "sequence")
"""What other settings are divided by: at least 1."""

_LEAST: Final = (
    ("iterations", 1),
    ("graphs_per_step", 1),
    ("recapture_every", 1),
    ("work_fifo", 2),
    ("chunk_seconds", 0.1),
    ("cuda_graphs", 0),
    ("compute_cv", 0),
    ("bandwidth_cv", 0),
    ("imbalance", 0),
    ("launch_lead_us", 0),
    ("hang_seconds", 0),
    ("clock_offset_ms", 0),
)
"""The least that a setting may be; None is no number and stands for itself."""

_CHOICES: Final = (
    ("ep_dispatch", EXPERT_DISPATCHERS),
    ("cp_exchange", CONTEXT_EXCHANGES),
    ("order", ORDERS),
    ("nsys", NSYS_VERSIONS),
    ("cuda_graph_trace", GRAPH_TRACES),
    ("inspector", INSPECTOR_FORMATS),
)


def complaints(config: SimulationConfig) -> list[str]:
    """All that is wrong, none where all is well.

    Where a size is below 1, nothing that hangs on sizes is looked at; faults are, once all else is well.
    """
    found = [f"{name} must be at least 1, not {getattr(config, name)}" for name in _SIZES if getattr(config, name) < 1]
    if not found:
        parts = (_parallelism, _schemes, _choices, _capture, _numbers)
        found = [complaint for part in parts for complaint in part(config)] or list(_faults(config))
    return [*found, *_version(config)]


def _parallelism(config: SimulationConfig) -> Iterator[str]:
    ranks = config.tp * config.pp * config.replicas
    if config.gpus > 16:
        yield f"gpus per node must be at most 16, not {config.gpus}"
    if config.world != ranks:
        yield f"nodes x gpus = {config.world} ranks, but tp x pp x dp x cp = {ranks}; the two must be equal"
    if config.dp % config.ep:
        yield f"ep={config.ep} does not divide dp={config.dp}"
    if config.hidden % config.tp or config.sequence % (config.tp * config.cp):
        yield f"hidden must be a multiple of tp={config.tp}, and sequence of tp x cp"
    if config.interleave > 1 and (config.pp == 1 or config.layers % config.interleave):
        yield f"interleave={config.interleave} needs pp > 1 and must divide layers={config.layers}"
    if config.interleave > 1 and config.microbatches % config.pp:
        yield f"with interleave, microbatches={config.microbatches} must be a multiple of pp={config.pp}"


def _choices(config: SimulationConfig) -> Iterator[str]:
    for name, allowed in _CHOICES:
        value = getattr(config, name)
        if value is not None and value not in allowed:
            yield f"{name} {value!r} is none of {', '.join(allowed)}"


def _schemes(config: SimulationConfig) -> Iterator[str]:
    """How gradients and parameters are shared."""
    if config.deepspeed not in {None, 1, 2, 3}:
        yield f"deepspeed must be 1, 2 or 3, not {config.deepspeed}"
    if config.zero1 + config.zero2 + config.fsdp + (config.deepspeed is not None) > 1:
        yield "zero1, zero2, fsdp and deepspeed exclude each other"
    if config.broadcast_parameters and not ((config.zero1 or config.zero2) and config.cuda_graphs is None):
        yield "broadcast_parameters needs zero1 or zero2, and no cuda_graphs"
    if config.replicate > 1 and not (config.fsdp and config.replicas % config.replicate == 0):
        yield f"replicate={config.replicate} needs fsdp and must divide dp x cp = {config.replicas}"


def _capture(config: SimulationConfig) -> Iterator[str]:
    if captured_share(config.capture) is None:
        yield f"capture {config.capture!r} is not full, none or duty:F with F above 0 and at most 1"
    if config.nvtx_payload and not (config.nvtx and config.nsys >= "2025"):
        yield f"nvtx_payload needs nvtx and an nsys whose exports have binaryData (2025 on), not {config.nsys}"


def _numbers(config: SimulationConfig) -> Iterator[str]:
    for name, least in _LEAST:
        value = getattr(config, name)
        if value is not None and not value >= least:  # so that what is no number is refused too
            yield f"{name} must {f'be at least {least}' if least else 'not be negative'}, not {value}"
    if not 0 <= config.inspector_holes < 1:
        yield f"inspector_holes must lie in 0 to below 1, not {config.inspector_holes}"
    if not 0 <= config.noise_correlation < 1:
        yield f"noise_correlation must lie in 0 to below 1, not {config.noise_correlation}"
    if not config.step_seconds > 0:
        yield f"step_seconds must be above 0, not {config.step_seconds}"
    if not 0 <= config.clock_drift_ppm <= 10_000:
        yield f"clock_drift_ppm must lie in 0 to 10000, not {config.clock_drift_ppm}"


def _faults(config: SimulationConfig) -> Iterator[str]:
    for fault in config.faults:
        if fault.kind in {"late_rank", "hang", "mismatch"} and not 0 <= fault.rank < config.world:
            yield f"fault {fault.kind}: no rank {fault.rank} in {config.world} ranks"
        if fault.kind in {"slow_link", "slow_nic", "clock_step"} and not 0 <= fault.node < config.nodes:
            yield f"fault {fault.kind}: no node {fault.node} in {config.nodes} nodes"
        if fault.only is not None and not 0 <= fault.only < config.world:
            yield f"fault {fault.kind}: no rank {fault.only} in {config.world} ranks"
        if fault.kind == "slow_nic" and not 0 <= fault.gpu < fault.gpu + fault.gpus <= config.gpus:
            yield f"fault slow_nic: no GPUs {fault.gpu} to {fault.gpu + fault.gpus - 1} in a node"
        if fault.kind == "clock_step" and fault.node == 0:
            yield "fault clock_step: node 0 carries the reference clock; step another"


def _version(config: SimulationConfig) -> Iterator[str]:
    """What the NCCL version does not have."""
    try:
        known = traits(config.nccl)
    except ValueError as error:
        yield str(error)
        return
    if config.timestamps and not known.timestamps:
        yield f"NCCL {known.text} prints no time stamps: 2.26.2 is the first that does"
    if config.split and not known.splits:
        yield f"NCCL {known.text} has no ncclCommSplit: 2.18.1 is the first that has"
    if config.work_fifo is not None and known.version < (2, 13, 0):
        yield f"NCCL {known.text} has no work FIFO to set: 2.13 is the first that has"
    if config.inspector and known.version < (2, 28, 0):
        yield f"NCCL {known.text} has no Inspector plug-in: 2.28 is the first that has"
    if config.calls and not known.calls:
        yield f"NCCL {known.text} has no CALL lines: 2.13 is the first that has"
