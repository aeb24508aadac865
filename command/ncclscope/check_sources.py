"""The sources that a node could have: whether each is there, what it would give, and what it would cost the job.

Costs are those of docs/switch-on.md and docs/cost.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from ncclscope_agent.nccl_settings.advice import NcclVersion

THERE: Final = "there"
POSSIBLE: Final = "possible"
ABSENT: Final = "not here"
UNSEEN: Final = "not looked at"

_INSPECTOR: Final = NcclVersion(2, 28, 0)
"""The first version with the plug-in. *Source:* NCCL `ext-profiler/inspector`."""
_PAYLOADS: Final = NcclVersion(2, 25, 0)
"""The first version whose NVTX payloads have the communicator. *Source:* NCCL `src/include/nvtx_payload_schemas.h`."""
_RAS: Final = NcclVersion(2, 24, 0)
"""*Source:* NCCL User Guide, "RAS"."""


@dataclass(slots=True, kw_only=True)
class SourceFacts:
    """Facts of a node that tell which sources it has; None: nobody asked."""

    logs: int | None = None
    logs_with_operations: int = 0
    exports: int | None = None
    """nsys exports and reports in the directories that were named."""
    traces: int | None = None
    """Traces of the PyTorch profiler there."""
    dumps: int | None = None
    """Dumps of NCCL Inspector."""
    flight_dumps: int | None = None
    has_nsys: bool = False
    ras: str | None = None
    """The state of the port: answered, or why it was not (`ras_port.RasError`)."""
    ras_address: str = ""
    ports: int = 0
    """RDMA ports in sysfs."""
    has_nvml: bool = False
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the environment: NCCL_* and TORCH_*."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """One source on a node."""

    name: str
    state: str
    """THERE, POSSIBLE, ABSENT or UNSEEN."""
    found: str
    gives: str
    costs: str
    how: str
    """Advice on how to have it; empty if it is there."""


def source_states(facts: SourceFacts, version: NcclVersion | None) -> list[SourceState]:
    """The sources in the order of docs/switch-on.md."""
    return list(_states(facts, version))


def _states(facts: SourceFacts, version: NcclVersion | None) -> Iterator[SourceState]:
    yield _counted(
        "NCCL's log",
        facts.logs_with_operations if facts.logs is not None else None,
        f"operations are in {facts.logs_with_operations} logs",
        "no log is there" if not facts.logs else "no operation in the logs",
        gives="operations, bytes, order, communicators; hangs, mismatches, failures",
        costs="150 to 250 bytes of log per operation and rank, 1 to 4 us of the host",
        how="ncclscope env; check and agent --logs 'GLOB'",
    )
    has_payloads = version is not None and version >= _PAYLOADS
    yield _counted(
        "nsys exports",
        facts.exports,
        f"{facts.exports} exports",
        "nsys is here, and no export yet" if facts.has_nsys else "no nsys, no exports",
        gives="kernels, waiting and transfer, slow links, clocks"
        + ("; without logs too, exported with --include-blobs=true" if has_payloads else ""),
        costs="what nsys takes while it records, nothing between",
        how="ncclscope capture; agent --exports DIR",
        is_possible=facts.has_nsys,
    )
    yield _counted(
        "PyTorch profiler traces",
        facts.traces,
        f"{facts.traces} traces",
        "no *.pt.trace.json there",
        gives="operations and kernels of the steps that they hold, without logs",
        costs="what the profiler takes in these steps",
        how="torch.profiler with tensorboard_trace_handler(DIR); agent --exports DIR",
    )
    yield _inspector(facts, version)
    yield _flight_recorder(facts)
    yield _ras(facts, version)
    yield _counters(facts)


def _counted(
    name: str,
    amount: int | None,
    found: str,
    none: str,
    *,
    gives: str,
    costs: str,
    how: str,
    is_possible: bool = True,
) -> SourceState:
    state = UNSEEN if amount is None else THERE if amount else POSSIBLE if is_possible else ABSENT
    text = "" if amount is None else found if amount else none
    return SourceState(name=name, state=state, found=text, gives=gives, costs=costs, how="" if amount else how)


def _inspector(facts: SourceFacts, version: NcclVersion | None) -> SourceState:
    is_loaded = "inspector" in facts.variables.get("NCCL_PROFILER_PLUGIN", "")
    is_loaded &= facts.variables.get("NCCL_INSPECTOR_ENABLE") == "1"
    is_too_old = version is not None and version < _INSPECTOR
    none = f"NCCL {version} has no such plug-in, 2.28 is the first" if is_too_old else "no dump there"
    if facts.dumps is None and (is_too_old or is_loaded):
        none = none if is_too_old else "the environment loads the plug-in: name its dumps with --inspector"
        facts_dumps: int | None = 0
    else:
        facts_dumps = facts.dumps
    return _counted(
        "NCCL Inspector",
        facts_dumps,
        f"{facts.dumps} dumps",
        none,
        gives="durations of every operation in whole us, late ranks; verbose, when each began, and clocks",
        costs="a plug-in in the job; 200 to 500 bytes per operation, verbose 250 more per channel",
        how="NCCL_PROFILER_PLUGIN=.../libnccl-profiler-inspector.so NCCL_INSPECTOR_ENABLE=1 "
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS=1000000 NCCL_INSPECTOR_DUMP_DIR=DIR; "
        "agent --inspector 'DIR/*'",
        is_possible=not is_too_old,
    )


def _flight_recorder(facts: SourceFacts) -> SourceState:
    has_buffer = any(
        facts.variables.get(name, "0") not in ("", "0")
        for name in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
    )
    amount = facts.flight_dumps
    if amount is None and has_buffer:
        amount = 0
    return _counted(
        "PyTorch's Flight Recorder",
        amount,
        f"{facts.flight_dumps} dumps: something took too long, read them with ncclscope analyze",
        "the environment switches it on, and no dump is there" if has_buffer else "no dump there",
        gives="after a hang: which rank misses which collective, with the stacks",
        costs="a ring buffer in the job, 0.15 MB per 1,000 entries when it is written",
        how="TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 "
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE=DIR/nccl_trace_rank_; agent --flight-recorder 'DIR/nccl_trace_rank_*'",
    )


def _ras(facts: SourceFacts, version: NcclVersion | None) -> SourceState:
    is_there = facts.ras == "answered"
    is_too_old = version is not None and version < _RAS
    reasons = {
        None: "",
        "answered": f"a job answers at {facts.ras_address}",
        "refused": f"nobody listens at {facts.ras_address}: no job of NCCL 2.24 or newer runs here now",
        "silent": f"nobody answers at {facts.ras_address} in time",
    }
    found = reasons.get(facts.ras, f"another program, or half an answer, at {facts.ras_address}")
    state = THERE if is_there else ABSENT if is_too_old else UNSEEN if facts.ras is None else POSSIBLE
    return SourceState(
        name="NCCL's RAS",
        state=state,
        found=f"NCCL {version} has none, 2.24 is the first" if is_too_old and not is_there else found,
        gives="ranks that are dead, silent, gone or behind, for the whole job from any node, while it runs",
        costs="nothing: it runs in every job, unless NCCL_RAS_ENABLE=0",
        how="agent --ras localhost:28028",
    )


def _counters(facts: SourceFacts) -> SourceState:
    parts = [f"{facts.ports} RDMA ports"] if facts.ports else []
    parts += ["nvidia-ml-py for GPUs"] if facts.has_nvml else []
    return SourceState(
        name="the machine's counters",
        state=THERE if parts else ABSENT,
        found=" and ".join(parts) or "no RDMA port in /sys/class/infiniband, and no nvidia-ml-py",
        gives="why a link or a GPU is slow: lost lanes, errors, throttling, Xids; as evidence in findings",
        costs="nothing; the agent 0.1 % of a core at most",
        how="agent --counters" if facts.has_nvml else 'pip install "ncclscope[gpu]" for GPUs; agent --counters',
    )
