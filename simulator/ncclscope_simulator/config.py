"""What to simulate: one dataclass with defaults and bounds, checked as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ncclscope_simulator.choices import CONTEXT_EXCHANGES, EXPERT_DISPATCHERS, captured_share
from ncclscope_simulator.complaints import complaints
from ncclscope_simulator.faults import Fault
from ncclscope_simulator.graphs import Stage
from ncclscope_simulator.version import Traits, traits

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
        wrong = complaints(self)
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
