"""Configuration of a simulated job: one dataclass with defaults, choices and bounds, checked as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ncclscope_simulator.contention import Contention
from ncclscope_simulator.faults import Fault
from ncclscope_simulator.gpu_speed import GpuSpeed
from ncclscope_simulator.graphs import Stage
from ncclscope_simulator.megatron_model import MegatronModel
from ncclscope_simulator.version import Traits, traits

DEFAULT_START_NS: Final = 1_772_449_200_000_000_000
"""2026-03-02T11:00:00Z: where a job that is written at once begins, so that equal seeds give equal bytes."""

_DUTY_PERIOD_SECONDS: Final = 5.0

GRAPH_TRACES: Final = ("graph", "node")
"""How nsys can trace CUDA graphs."""

NSYS_VERSIONS: Final = ("2022.4", "2023.4", "2024.5", "2025.3", "2026.2")
"""The nsys versions whose export schema can be written."""

INSPECTOR_FORMATS: Final = ("v4.0", "v4.2", "v4.3")
"""The formats in which the Inspector plug-in's dumps can be written."""

ORDERS: Final = ("tp-dp-pp", "tp-pp-dp")
"""How ranks are laid out, fastest first: Megatron-LM's default, and its `--use-tp-pp-dp-mapping`."""

EXPERT_DISPATCHERS: Final = ("alltoall", "allgather", "deepep")
"""How tokens reach their experts. Source: Megatron-LM `--moe-token-dispatcher-type`; flex with DeepEP, which is not
NCCL's."""

CONTEXT_EXCHANGES: Final = ("ring", "allgather")
"""How attention gets the keys and values of other ranks. Source: Megatron-LM `--cp-comm-type` p2p and all_gather."""

_PARALLEL: Final = ("nodes", "gpus", "tp", "pp", "dp", "ep", "cp", "replicate")
_SIZES: Final = (*_PARALLEL, "layers", "interleave", "microbatches", "hidden", "sequence")
"""Settings that others are divided by: at least 1."""

_LEAST: Final = (
    ("iterations", 1),
    ("graphs_per_step", 1),
    ("recapture_every", 1),
    ("evaluate_every", 1),
    ("evaluate_steps", 1),
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
    """AllGather and ReduceScatter in place of AllReduce within a tensor-parallel group; None: on if tp > 1."""
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
    megatron: MegatronModel | None = None
    """Operations as Megatron-LM core 0.13 calls them, of this model; None: the simpler ones."""
    iterations: int | None = 10
    """Training steps; None: until the job is stopped."""
    evaluate_every: int | None = None
    """Steps after which the model is evaluated: forward only, as a part of the last of them; None: never."""
    evaluate_steps: int = 10
    """How often the microbatches of a step go forward then, each time with an AllReduce of the loss."""
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
    gpu_speed: GpuSpeed | None = None
    """With megatron: computation takes as long as this GPU needs for the model in its layout; None: `step_seconds`
    whatever the layout is."""
    compute_cv: float = 0.01
    """Spread of computation times, relative."""
    bandwidth_cv: float = 0.03
    """Spread of transfer times, relative."""
    contention: Contention | None = None
    """What groups and computation share; None: nothing."""
    noise_correlation: float = 0.0
    """Of both, from one step to the next, then with the heavy tails of Student's t; 0: independent and normal."""
    imbalance: float = 0.0
    """With ep > 1: spread of the logarithm of the experts' computation times, drawn again for each; 0: no such time."""
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
    """Time stamps in front of log lines; None: if the version can."""
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
    """Groups are made by ncclCommSplit from the world; None: if the version can."""
    nvtx: bool = True
    """NCCL's own NVTX ranges and iteration ranges in the exports."""
    cuda_graphs: int | None = None
    """Steps before each rank captures its step into CUDA graphs and replays them from then on; None: no graphs."""
    graphs_per_step: int = 1
    """CUDA graphs that the captured part of a step is cut into."""
    recapture_every: int | None = None
    """Steps after which the graphs are destroyed and captured again; None: never."""
    cuda_graph_trace: str = "graph"
    """nsys's option of that name: `graph` records a launch as a whole, which is nsys's default; `node` its kernels."""
    nvtx_payload: bool = False
    """NCCL's ranges carry their payload, as `nsys export --include-blobs=true` writes it (nsys from 2025 on)."""
    process_per_node: bool = False
    """One process drives all GPUs of a node, a thread for each, in place of one process per GPU."""
    inspector: str | None = None
    """Dumps of NCCL's Inspector plug-in in this format, one of `INSPECTOR_FORMATS`; None: it is not loaded."""
    inspector_verbose: bool = False
    """They say when each channel began and ended (NCCL_INSPECTOR_DUMP_VERBOSE)."""
    inspector_holes: float = 0.0
    """Share of its records that it loses."""
    profiled: tuple[int, int] | None = None
    """First and last iteration that the PyTorch profiler of each rank records; None: it is not used."""
    hang_seconds: float = 10.0
    """How long a job of limited length is still observed after it hangs."""
    start_ns: int = DEFAULT_START_NS
    """UTC on the reference clock when the job starts."""

    def __post_init__(self) -> None:
        wrong = _mistakes(self)
        if wrong:
            raise ValueError("; ".join(wrong))

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
        return captured_share(self.capture) or 0.0

    @property
    def chunk_ns(self) -> int | None:
        """Period of exports in ns; None: one export."""
        if self.chunk_seconds is not None:
            return int(self.chunk_seconds * 1e9)
        return int(_DUTY_PERIOD_SECONDS * 1e9) if 0.0 < self.duty < 1.0 else None

    def of_kind(self, kind: str) -> list[Fault]:
        """The faults of one kind."""
        return [fault for fault in self.faults if fault.kind == kind]


def captured_share(text: str) -> float | None:
    """The share of the time that `full`, `none` or `duty:F` captures; None if the text is none of these."""
    if text in {"full", "none"}:
        return 1.0 if text == "full" else 0.0
    try:
        share = float(text.removeprefix("duty:")) if text.startswith("duty:") else None
    except ValueError:
        return None
    return share if share is not None and 0.0 < share <= 1.0 else None


def _mistakes(config: SimulationConfig) -> list[str]:
    """A sentence for each wrong setting, which names the setting and what it may be.

    If a size is below 1, nothing that depends on sizes is checked. Faults are checked if all else is right.
    """
    found = [f"{name} must be at least 1, not {getattr(config, name)}" for name in _SIZES if getattr(config, name) < 1]
    if not found:
        parts = (_parallelism, _schemes, _megatron, _evaluation, _choices, _capture, _numbers)
        found = [complaint for part in parts for complaint in part(config)] or list(_impossible_faults(config))
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


def _evaluation(config: SimulationConfig) -> Iterator[str]:
    if config.evaluate_every is not None and (
        config.interleave > 1 or config.megatron is not None or config.cuda_graphs is not None
    ):
        yield "evaluate_every needs a plain schedule: no interleave, no emission megatron, no cuda_graphs"


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


def _megatron(config: SimulationConfig) -> Iterator[str]:
    model = config.megatron
    if model is None:
        if config.gpu_speed is not None:
            yield "gpu_speed needs emission megatron, which says what is computed"
        return
    others = (config.zero2, config.fsdp, config.deepspeed is not None, config.broadcast_parameters, config.coalesce)
    if any(others) or config.cp > 1 or config.shared_world:
        yield "emission megatron has no cp, zero2, fsdp, deepspeed, broadcast_parameters, coalesce or shared_world"
    if model.vocabulary % config.tp or (model.ffn or 4 * config.hidden) % config.tp:
        yield f"emission megatron: vocabulary and ffn must be multiples of tp={config.tp}"
    if bool(model.experts) != (config.ep > 1) or (model.experts and (model.experts % config.ep or config.tp > 1)):
        yield f"emission megatron: ep={config.ep} above 1 needs experts that it divides, and tp 1"
    if config.ep_dispatch == "deepep" or min(model.micro_batch, model.top_k, model.every) < 1:
        yield "emission megatron has no deepep; micro_batch, top_k and every must be at least 1"
    if not model.fp16 and not config.traits.bfloat16:
        yield f"NCCL {config.nccl} has no BF16: emission megatron needs fp16"


def _capture(config: SimulationConfig) -> Iterator[str]:
    if captured_share(config.capture) is None:
        yield f"capture {config.capture!r} is not full, none or duty:F with F above 0 and at most 1"
    if config.profiled is not None:
        first, last = config.profiled
        if not 0 <= first <= last:
            yield f"profiled must name two iterations in order, not {first} and {last}"
        if config.cuda_graphs is not None or config.process_per_node:
            yield "profiled needs a process per GPU, and no cuda_graphs"
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


def _impossible_faults(config: SimulationConfig) -> Iterator[str]:
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
    """A sentence for each setting that the NCCL version does not support."""
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
