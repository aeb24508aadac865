"""What to simulate: one dataclass with defaults and bounds, checked as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ncclscope_simulator.faults import Fault
from ncclscope_simulator.graphs import Stage
from ncclscope_simulator.version import Traits, traits

GRAPH_TRACES: Final = ("graph", "node")
"""How nsys can trace CUDA graphs."""

NSYS_VERSIONS: Final = ("2022.4", "2023.4", "2024.5", "2025.3", "2026.2")
"""The nsys versions whose export schema can be written."""

INSPECTOR_FORMATS: Final = ("v4.0", "v4.2", "v4.3")
"""The formats in which the Inspector plug-in's dumps can be written."""

ORDERS: Final = ("tp-dp-pp", "tp-pp-dp")
"""How ranks are laid out, fastest first: Megatron-LM's default, and its `--use-tp-pp-dp-mapping`."""

EXPERT_DISPATCHERS: Final = ("alltoall", "allgather")
"""How tokens reach their experts. Source: Megatron-LM `--moe-token-dispatcher-type`."""

CONTEXT_EXCHANGES: Final = ("ring", "allgather")
"""How attention gets the keys and values of other ranks. Source: Megatron-LM `--cp-comm-type` p2p and all_gather."""

DEFAULT_START_NS: Final = 1_772_449_200_000_000_000
"""2026-03-02T11:00:00Z: where a job that is written at once begins, so that equal seeds give equal bytes."""

_DUTY_PERIOD_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """A simulated job and how it is observed. Raises ValueError with every fault of the whole at once."""

    nccl: str = "2.28.3"
    """NCCL version, 2.8 to 2.30; `2.21` stands for 2.21.5."""
    nsys: str = "2025.3"
    """nsys version, one of `NSYS_VERSIONS`."""
    nodes: int = 2
    gpus: int = 4
    """GPUs, and ranks, per node."""
    tp: int = 2
    pp: int = 2
    dp: int = 2
    ep: int = 1
    """Ranks per expert-parallel group; divides dp; 1: a dense model."""
    ep_dispatch: str = EXPERT_DISPATCHERS[0]
    """How tokens reach their experts, one of `EXPERT_DISPATCHERS`."""
    cp: int = 1
    """Ranks that share a sequence; 1: none. Gradients are reduced over cp x dp ranks then, as in Megatron-LM."""
    cp_exchange: str = CONTEXT_EXCHANGES[0]
    """How attention gets the keys and values of other ranks, one of `CONTEXT_EXCHANGES`."""
    order: str = "tp-dp-pp"
    """Which ranks are neighbours, one of `ORDERS`."""
    sequence_parallel: bool | None = None
    """AllGather and ReduceScatter in place of AllReduce within a tensor-parallel group; None: on where tp > 1."""
    zero1: bool = False
    """Gradients by ReduceScatter and parameters by AllGather, in place of AllReduce."""
    zero2: bool = False
    """As zero1, with the gradients of every microbatch reduced at once."""
    fsdp: bool = False
    """Parameters gathered for every forward and backward, gradients scattered in every backward (ZeRO-3)."""
    replicate: int = 1
    """With fsdp: groups of shards that hold the same parameters, whose gradients they reduce (HSDP); 1: plain FSDP."""
    deepspeed: int | None = None
    """Stage of DeepSpeed's ZeRO, 1 to 3: gradients summed in 16 bits, bucket by bucket from one buffer; None: as
    Megatron-LM and PyTorch do it."""
    shared_world: bool = False
    """A dimension that spans the job uses the world's communicator, as PyTorch's DeviceMesh does."""
    iterations: int | None = 10
    """Training steps; None: until told to stop."""
    seed: int = 0
    layers: int = 2
    """Transformer layers per pipeline stage."""
    interleave: int = 1
    """Chunks of layers per pipeline stage (Megatron's virtual stages); 1: none. Divides layers; microbatches are a
    multiple of pp then."""
    microbatches: int = 4
    hidden: int = 2048
    sequence: int = 2048
    step_seconds: float = 0.4
    """How long a step would take if communication cost nothing."""
    compute_cv: float = 0.01
    """Spread of computation times, relative."""
    bandwidth_cv: float = 0.03
    """Spread of transfer times, relative."""
    noise_correlation: float = 0.0
    """Of both, from one step to the next, then with the heavy tails of Student's t; 0: independent and normal."""
    imbalance: float = 0.0
    """With ep > 1: spread of the logarithm of the experts' computation times, drawn for each anew; 0: no such time."""
    faults: tuple[Fault, ...] = ()
    capture: str = "full"
    """nsys: `full`, `none`, or `duty:F` with the share F of the time that is captured."""
    chunk_seconds: float | None = None
    """Length of one export and the gap after it; None: one export of the whole job (with duty: 5 s)."""
    clock_offset_ms: float = 50.0
    """Clocks of the nodes but the first are off by up to this much, either way."""
    clock_drift_ppm: float = 20.0
    """... and drift by up to this much, either way."""
    launch_lead_us: float = 400.0
    """How far the host enqueues ahead of its GPU."""
    timestamps: bool | None = None
    """Time stamps in front of log lines; None: where the version can."""
    calls: bool = False
    """CALL lines, which show group boundaries (2.13 on)."""
    stuck_op_count: bool = False
    """opCount stands still inside a node, as in 2.13 to 2.23 while a CUDA graph with NCCL work is alive."""
    coalesce: bool = False
    """The gradients of all layers go out in one group, and so do the parameters of zero1."""
    broadcast_parameters: bool = False
    """With zero1 or zero2: the parameters by a group of Broadcasts, of each rank its part, as PyTorch gathers tensors
    of unequal sizes (ProcessGroupNCCL.cpp:allgather)."""
    work_fifo: int | None = None
    """NCCL_WORK_FIFO_DEPTH (2.13 to 2.21) or NCCL_WORK_FIFO_BYTES (2.22 on), half of which one kernel may fill: groups
    that do not fit take several; None: NCCL's default, 65,536 works or 1 MiB."""
    split: bool | None = None
    """Groups are made by ncclCommSplit from the world; None: where the version can."""
    nvtx: bool = True
    """NCCL's own NVTX ranges and iteration ranges in the exports."""
    cuda_graphs: int | None = None
    """Steps before each rank captures its step into CUDA graphs and replays them from then on; None: no graphs."""
    graphs_per_step: int = 1
    """CUDA graphs that the captured part of a step is cut into."""
    recapture_every: int | None = None
    """Steps after which the graphs are destroyed and captured anew; None: never."""
    cuda_graph_trace: str = "graph"
    """nsys's option of that name: `graph` records a launch as a whole, which is nsys's default; `node` its kernels."""
    nvtx_payload: bool = False
    """NCCL's ranges carry their payload, as `nsys export --include-blobs=true` writes it (nsys from 2025 on)."""
    process_per_node: bool = False
    """One process drives all GPUs of a node, a thread for each, in place of one process per GPU."""
    inspector: str | None = None
    """Dumps of NCCL's Inspector plug-in in this format, one of `INSPECTOR_FORMATS`; None: it is not loaded."""
    inspector_holes: float = 0.0
    """Share of its records that it loses."""
    hang_seconds: float = 10.0
    """How long a job of limited length is still observed after it hangs."""
    start_ns: int = DEFAULT_START_NS
    """UTC on the reference clock when the job starts."""

    def __post_init__(self) -> None:
        complaints = _complaints(self)
        if complaints:
            raise ValueError("; ".join(complaints))

    @cached_property
    def traits(self) -> Traits:
        """How the NCCL version behaves."""
        return traits(self.nccl)

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.gpus

    @property
    def replicas(self) -> int:
        """Ranks that reduce one gradient: data-parallel replicas, and those that share their sequences."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Ranks over which the parameters are sharded, with fsdp."""
        return self.replicas // self.replicate

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are gathered for every forward and backward."""
        return self.fsdp or self.deepspeed == 3

    @property
    def sequence_parallelism(self) -> bool:
        """Whether sequence parallelism is on."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel and self.tp > 1

    @property
    def stamped(self) -> bool:
        """Whether log lines carry time stamps."""
        return self.traits.timestamps if self.timestamps is None else self.timestamps

    @property
    def splits(self) -> bool:
        """Whether groups are split from the world."""
        return self.traits.splits if self.split is None else self.split

    def stage(self, iteration: int) -> Stage:
        """Whether a step is enqueued launch by launch, is captured and replayed, or is replayed only."""
        if self.cuda_graphs is None or iteration < self.cuda_graphs:
            return Stage.EAGER
        since = iteration - self.cuda_graphs
        begins = since % self.recapture_every == 0 if self.recapture_every else since == 0
        return Stage.CAPTURED if begins else Stage.REPLAYED

    @property
    def duty(self) -> float:
        """Share of the time that is captured: 1 for `full`, 0 for `none`."""
        return {"full": 1.0, "none": 0.0}.get(self.capture) or _duty(self.capture) or 0.0

    @property
    def chunk_ns(self) -> int | None:
        """Period of exports in ns; None: one export."""
        if self.chunk_seconds is not None:
            return int(self.chunk_seconds * 1e9)
        return int(_DUTY_PERIOD_SECONDS * 1e9) if 0.0 < self.duty < 1.0 else None

    def of_kind(self, kind: str) -> list[Fault]:
        """The faults of one kind."""
        return [fault for fault in self.faults if fault.kind == kind]


def _duty(text: str) -> float | None:
    try:
        share = float(text.removeprefix("duty:")) if text.startswith("duty:") else None
    except ValueError:
        return None
    return share if share is not None and 0.0 < share <= 1.0 else None


def _complaints(config: SimulationConfig) -> list[str]:
    complaints = _shape_complaints(config)
    if not complaints:
        complaints += _fault_complaints(config)
    try:
        known = traits(config.nccl)
    except ValueError as error:
        return [*complaints, str(error)]
    if config.timestamps and not known.timestamps:
        complaints.append(f"NCCL {known.text} prints no time stamps: 2.26.2 is the first that does")
    if config.split and not known.splits:
        complaints.append(f"NCCL {known.text} has no ncclCommSplit: 2.18.1 is the first that has")
    if config.work_fifo is not None and known.version < (2, 13, 0):
        complaints.append(f"NCCL {known.text} has no work FIFO to set: 2.13 is the first that has")
    if config.inspector and known.version < (2, 28, 0):
        complaints.append(f"NCCL {known.text} has no Inspector plug-in: 2.28 is the first that has")
    if config.calls and not known.calls:
        complaints.append(f"NCCL {known.text} has no CALL lines: 2.13 is the first that has")
    return complaints


def _shape_complaints(config: SimulationConfig) -> list[str]:
    sizes = ("nodes", "gpus", "tp", "pp", "dp", "ep", "cp")
    small = (*sizes, "replicate", "layers", "interleave", "microbatches", "hidden", "sequence")
    complaints = [
        f"{name} must be at least 1, not {getattr(config, name)}" for name in small if getattr(config, name) < 1
    ]
    if complaints:
        return complaints
    ranks = config.tp * config.pp * config.replicas
    duty = config.capture in {"full", "none"} or _duty(config.capture) is not None
    checks = (
        (config.gpus <= 16, f"gpus per node must be at most 16, not {config.gpus}"),
        (
            config.iterations is None or config.iterations >= 1,
            f"iterations must be at least 1, not {config.iterations}",
        ),
        (
            config.world == ranks,
            f"nodes x gpus = {config.world} ranks, but tp x pp x dp x cp = {ranks}; the two must be equal",
        ),
        (config.dp % config.ep == 0, f"ep={config.ep} does not divide dp={config.dp}"),
        (
            config.hidden % config.tp == 0 and config.sequence % (config.tp * config.cp) == 0,
            f"hidden must be a multiple of tp={config.tp}, and sequence of tp x cp",
        ),
        (
            config.interleave == 1 or (config.pp > 1 and config.layers % config.interleave == 0),
            f"interleave={config.interleave} needs pp > 1 and must divide layers={config.layers}",
        ),
        (
            config.interleave == 1 or config.microbatches % config.pp == 0,
            f"with interleave, microbatches={config.microbatches} must be a multiple of pp={config.pp}",
        ),
        (
            config.ep_dispatch in EXPERT_DISPATCHERS,
            f"ep_dispatch {config.ep_dispatch!r} is none of {', '.join(EXPERT_DISPATCHERS)}",
        ),
        (
            config.cp_exchange in CONTEXT_EXCHANGES,
            f"cp_exchange {config.cp_exchange!r} is none of {', '.join(CONTEXT_EXCHANGES)}",
        ),
        (
            config.zero1 + config.zero2 + config.fsdp + (config.deepspeed is not None) <= 1,
            "zero1, zero2, fsdp and deepspeed exclude each other",
        ),
        (
            not config.broadcast_parameters or ((config.zero1 or config.zero2) and config.cuda_graphs is None),
            "broadcast_parameters needs zero1 or zero2, and no cuda_graphs",
        ),
        (
            config.work_fifo is None or config.work_fifo >= 2,
            f"work_fifo must be at least 2, not {config.work_fifo}",
        ),
        (config.deepspeed in {None, 1, 2, 3}, f"deepspeed must be 1, 2 or 3, not {config.deepspeed}"),
        (
            config.replicate == 1 or (config.fsdp and config.replicas % config.replicate == 0),
            f"replicate={config.replicate} needs fsdp and must divide dp x cp = {config.replicas}",
        ),
        (config.order in ORDERS, f"order {config.order!r} is none of {', '.join(ORDERS)}"),
        (config.nsys in NSYS_VERSIONS, f"nsys {config.nsys!r} is none of {', '.join(NSYS_VERSIONS)}"),
        (
            not config.nvtx_payload or (config.nvtx and config.nsys >= "2025"),
            f"nvtx_payload needs nvtx and an nsys whose exports have binaryData (2025 on), not {config.nsys}",
        ),
        (duty, f"capture {config.capture!r} is not full, none or duty:F with F above 0 and at most 1"),
        (
            config.chunk_seconds is None or config.chunk_seconds >= 0.1,
            f"chunk_seconds must be at least 0.1, not {config.chunk_seconds}",
        ),
        (
            config.cuda_graphs is None or config.cuda_graphs >= 0,
            f"cuda_graphs must not be negative, not {config.cuda_graphs}",
        ),
        (config.graphs_per_step >= 1, f"graphs_per_step must be at least 1, not {config.graphs_per_step}"),
        (
            config.recapture_every is None or config.recapture_every >= 1,
            f"recapture_every must be at least 1, not {config.recapture_every}",
        ),
        (
            config.cuda_graph_trace in GRAPH_TRACES,
            f"cuda_graph_trace {config.cuda_graph_trace!r} is none of {', '.join(GRAPH_TRACES)}",
        ),
        (
            config.inspector in {None, *INSPECTOR_FORMATS},
            f"inspector {config.inspector!r} is none of {', '.join(INSPECTOR_FORMATS)}",
        ),
        (0 <= config.inspector_holes < 1, f"inspector_holes must lie in 0 to 1, not {config.inspector_holes}"),
        (
            config.compute_cv >= 0 and config.bandwidth_cv >= 0 and config.imbalance >= 0,
            "compute_cv, bandwidth_cv and imbalance must not be negative",
        ),
        (
            0 <= config.noise_correlation < 1,
            f"noise_correlation must lie in 0 to below 1, not {config.noise_correlation}",
        ),
        (config.step_seconds > 0, f"step_seconds must be above 0, not {config.step_seconds}"),
        (config.launch_lead_us >= 0, f"launch_lead_us must not be negative, not {config.launch_lead_us}"),
        (config.hang_seconds >= 0, f"hang_seconds must not be negative, not {config.hang_seconds}"),
        (config.clock_offset_ms >= 0, f"clock_offset_ms must not be negative, not {config.clock_offset_ms}"),
        (
            0 <= config.clock_drift_ppm <= 10_000,
            f"clock_drift_ppm must lie in 0 to 10000, not {config.clock_drift_ppm}",
        ),
    )
    return [complaint for holds, complaint in checks if not holds]


def _fault_complaints(config: SimulationConfig) -> list[str]:
    complaints: list[str] = []
    for fault in config.faults:
        if fault.kind in {"late_rank", "hang", "mismatch"} and not 0 <= fault.rank < config.world:
            complaints.append(f"fault {fault.kind}: no rank {fault.rank} in {config.world} ranks")
        if fault.kind in {"slow_link", "slow_nic", "clock_step"} and not 0 <= fault.node < config.nodes:
            complaints.append(f"fault {fault.kind}: no node {fault.node} in {config.nodes} nodes")
        if fault.only is not None and not 0 <= fault.only < config.world:
            complaints.append(f"fault {fault.kind}: no rank {fault.only} in {config.world} ranks")
        if fault.kind == "slow_nic" and not 0 <= fault.gpu < fault.gpu + fault.gpus <= config.gpus:
            complaints.append(f"fault slow_nic: no GPUs {fault.gpu} to {fault.gpu + fault.gpus - 1} in a node")
        if fault.kind == "clock_step" and fault.node == 0:
            complaints.append("fault clock_step: node 0 carries the reference clock; step another")
    return complaints
