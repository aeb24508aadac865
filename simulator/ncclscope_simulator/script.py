"""The actions of one rank while they are written down, in the order in which its host goes through them."""

from __future__ import annotations

from ncclscope_simulator.actions import Act, Action
from ncclscope_simulator.builder import Buffers, Builder
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.data_types import BFLOAT16, FLOAT16, DataType
from ncclscope_simulator.gpu_speed import Pass
from ncclscope_simulator.groups import Endpoint, Group, coordinates
from ncclscope_simulator.operations import Launch


class Script:
    """A rank's actions so far, and what their writers need to know of the rank."""

    def __init__(
        self,
        config: SimulationConfig,
        groups: tuple[Group, ...],
        endpoints: dict[int, Endpoint],
        rank: int,
    ) -> None:
        self.config, self.rank = config, rank
        self.stage = coordinates(config, rank)[2]
        """Its pipeline stage."""
        self.builder = Builder(config, rank, endpoints, Buffers(config.seed, rank))
        self.groups = {group.parallelism: group for group in groups if rank in group.members}
        """Those that it belongs to, by parallelism."""
        self.world = groups[0].parallelism
        """The name of the group of all ranks."""
        model = config.megatron
        has_half = config.traits.bfloat16 and not (model is not None and model.fp16)
        self.half: DataType = BFLOAT16 if has_half else FLOAT16
        """The type of activations."""
        samples = 1 if model is None else model.micro_batch
        self.tokens = samples * config.sequence * config.hidden // config.cp
        """Elements of one microbatch's activations."""
        blocks = 6 * config.layers * (config.microbatches + config.pp - 1)
        self.block_ns = int(config.step_seconds * 0.9e9 / blocks)
        """How long the forward computation of an attention or MLP block takes."""
        self.actions: list[Action] = []
        self._made: dict[tuple[str, str, str, int, DataType, int, bool], Launch] = {}
        """Collectives, which recur with every microbatch."""

    @property
    def is_first_stage(self) -> bool:
        """Whether the rank is in the first pipeline stage, which reads the batch."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the rank is in the last pipeline stage, which computes the loss."""
        return self.stage == self.config.pp - 1

    def add(self, action: Action) -> None:
        """Appends an action to the script."""
        self.actions.append(action)

    def compute(self, duration_ns: int, *, autograd: bool, is_uneven: bool = False) -> None:
        """A computation: of backward with `autograd`, of an amount that differs each time with `is_uneven`."""
        kernel = "gemm_backward" if autograd else "gemm_forward"
        self.add(
            Action(act=Act.COMPUTE, duration_ns=duration_ns, kernel=kernel, autograd=autograd, is_uneven=is_uneven)
        )

    def compute_pass(self, part: Pass, *, back: bool, autograd: bool) -> None:
        """One way through a part of a layer, if it takes any time."""
        duration = int(part.backward if back else part.forward)
        if duration:
            self.compute(duration, autograd=autograd)

    def launch(self, launch: Launch, *, blocking: bool = True) -> None:
        """Operations; without `blocking` the compute stream goes on beside them."""
        self.add(Action(act=Act.ISSUE, launch=launch, blocking=blocking))

    def late(self, every: str) -> None:
        """A place at which a late rank loses time."""
        self.add(Action(act=Act.LATE, every=every))

    def synchronise(self) -> None:
        """Appends a synchronisation: the host waits for the GPU."""
        self.add(Action(act=Act.SYNCHRONISE))

    def wait(self, parallelism: str) -> None:
        """The compute stream waits for what a group still has to do."""
        self.add(Action(act=Act.WAIT, group=self.groups[parallelism].index))

    def collective(
        self, parallelism: str, op: str, name: str, count: int, dtype: DataType, red: int = 0, *, autograd: bool = False
    ) -> Launch:
        """A collective of one of its groups, which is not written down yet."""
        # PyTorch's stream allocator reuses a freed activation, so that layers share addresses; names keep them apart.
        key = (parallelism, op, name, count, dtype, red, autograd)
        if key not in self._made:
            self._made[key] = self.builder.collective(
                self.groups[parallelism],
                op,
                name=f"{parallelism}.{name}",
                count=count,
                dtype=dtype,
                red=red,
                autograd=autograd,
            )
        return self._made[key]
