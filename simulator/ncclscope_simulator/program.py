"""What each rank does in one training step: a list of actions, in the order in which its host goes through them.

A Megatron-LM-like job. Per layer and microbatch: within the tensor-parallel group an AllReduce after attention and
after the MLP, forward and backward, or with sequence parallelism an AllGather before and a ReduceScatter after
(Source: Megatron-LM core/tensor_parallel/mappings.py). Between pipeline stages 1F1B with batched Send and Recv
(core/pipeline_parallel/schedules.py, p2p_communication.py: a batch has both in the steady state, one alone at the
edges). Gradients go out in buckets while the last backward still runs (core/distributed). Experts exchange tokens
before and after the expert layer, both ways (core/transformer/moe/token_dispatcher.py). Ranks that share a sequence
pass keys and values around a ring, or gather them (TransformerEngine attention/dot_product_attention/
context_parallel.py). With fsdp, parameters are gathered before each layer, both ways, and gradients scattered after it
(torchtitan models/llama3/infra/parallelize.py, PyTorch distributed/fsdp/_fully_shard); with replicate each shard's
gradients are then reduced over its replicas (HSDP, foreach_reduce there). DeepSpeed divides gradients before it sums
them, in the type of the model, bucket by bucket from the same buffer; stages 1 and 2 by AllReduce although each rank
keeps a part only, stage 3 by ReduceScatter, and it gathers each tensor by itself (runtime/zero/stage_1_and_2.py
allreduce_bucket, runtime/comm/coalesced_collectives.py, runtime/zero/partitioned_param_coordinator.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum, auto

from ncclscope_simulator.cluster import Cluster
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.data_types import AVG, BFLOAT16, FLOAT16, FLOAT32, INT64, MAX, SUM, DataType
from ncclscope_simulator.groups import Endpoint, Group, coordinates
from ncclscope_simulator.interleaving import Exchange, Interleaving
from ncclscope_simulator.operations import Buffers, Builder, Launch, Meeting

_VOCABULARY = 32_000
_BROADCAST_TOKENS = 2
_TENSORS = {"qkv": 3, "projection": 1, "up": 4, "down": 4}
"""Matrices of a layer, in twelfths of its parameters."""


class Act(IntEnum):
    """What an action does."""

    COMPUTE = auto()
    """The compute stream is busy for `duration_ns`."""
    ISSUE = auto()
    """Operations are enqueued; with `blocking` the compute stream waits for their kernel."""
    WAIT = auto()
    """The compute stream waits for what the group's stream still has to do."""
    SYNCHRONISE = auto()
    """The host waits for the GPU."""
    LATE = auto()
    """A place at which a late rank loses time; `every` says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One step of a rank's host thread."""

    act: Act
    duration_ns: int = 0
    kernel: str = ""
    launch: Launch | None = None
    blocking: bool = True
    group: int = 0
    every: str = ""
    autograd: bool = False
    is_uneven: bool = False
    """Of a computation: how much there is to do differs each time."""
    sticks: bool = False
    """Of operations: their collective never ends."""


def build_programs(
    config: SimulationConfig, cluster: Cluster, groups: tuple[Group, ...], endpoints: list[dict[int, Endpoint]]
) -> list[list[Action]]:
    """For each rank the actions of one step; every step is the same."""
    return [
        _Program(config, cluster, groups, endpoints[worker.rank], worker.rank).build() for worker in cluster.workers
    ]


def wrong_programs(
    config: SimulationConfig, cluster: Cluster, groups: tuple[Group, ...], endpoints: list[dict[int, Endpoint]]
) -> dict[tuple[int, int], list[Action]]:
    """By rank and step, what ranks do that get stuck in a collective, or call another one than the others."""
    made: dict[tuple[int, int], list[Action]] = {}
    for fault in config.faults:
        if fault.kind == "mismatch" or (fault.kind == "hang" and fault.how == "inside"):
            program = _Program(config, cluster, groups, endpoints[fault.rank], fault.rank)
            made[fault.rank, fault.first] = program.build_wrong(
                fault.how if fault.kind == "hang" else fault.how or "count"
            )
    return made


class _Program:
    def __init__(
        self,
        config: SimulationConfig,
        cluster: Cluster,
        groups: tuple[Group, ...],
        endpoints: dict[int, Endpoint],
        rank: int,
    ) -> None:
        self._config = config
        self._builder = Builder(config, cluster, rank, endpoints, Buffers(config.seed, rank))
        self._groups = {group.parallelism: group for group in groups if rank in group.members}
        self._gradients = "OPTIMIZER" if config.is_sharded else "DP"
        self._world = groups[0].parallelism
        self._rank = rank
        self._stage = coordinates(config, rank)[2]
        self._half: DataType = BFLOAT16 if config.traits.bfloat16 else FLOAT16
        self._actions: list[Action] = []
        self._waiting: list[Launch] = []
        """Gradients of layers that go out with the first layer's."""
        blocks = 6 * config.layers * (config.microbatches + config.pp - 1)
        self._block_ns = int(config.step_seconds * 0.9e9 / blocks)
        self._tokens = config.sequence * config.hidden // config.cp

    def build(self) -> list[Action]:
        self._add(Action(act=Act.LATE, every="step"))
        if self._config.interleave > 1:
            self._interleaved_pipeline()
        else:
            self._pipeline()
        self._finish_gradients()
        self._launch(self._collective(self._world, "AllReduce", "norm", 1, FLOAT32, MAX))
        self._add(Action(act=Act.SYNCHRONISE))
        return self._actions

    def build_wrong(self, how: str) -> list[Action]:
        """The same, with a collective in the middle that never ends: `inside`, else because it is another one here."""
        actions = self.build()
        at = next(at for at in range(len(actions) // 2, len(actions)) if _is_collective(actions[at]))
        launch = _launch_of(actions[at])
        if how == "order":
            other = self._next_other(at)
            actions[at], actions[other] = (
                replace(actions[at], launch=_launch_of(actions[other])),
                replace(actions[other], launch=launch),
            )
        elif how != "inside":
            actions[at] = replace(actions[at], launch=self._other_call(launch, how))
        actions[at] = replace(actions[at], sticks=True)
        return actions

    def _next_other(self, at: int) -> int:
        """The next collective of the same communicator that is another one."""
        launch = _launch_of(self._actions[at])
        for after in range(at + 1, len(self._actions)):
            if _is_collective(self._actions[after]):
                other = _launch_of(self._actions[after])
                if other.endpoint is launch.endpoint and _call_of(other) != _call_of(launch):
                    return after
        raise ValueError("fault mismatch: after the middle of a step no other collective follows to be swapped")

    def _other_call(self, launch: Launch, how: str) -> Launch:
        """The same launch with half the count, or of another operation."""
        operation = launch.operations[0]
        count = operation.count // (operation.dtype.bytes if operation.dtype_id != operation.dtype.id else 1)
        op = operation.op
        if how == "operation":
            op = "AllGather" if op != "AllGather" else "AllReduce"
        else:
            count //= 2
        return self._builder.collective(
            launch.endpoint.group, op, name="wrong", count=count, dtype=operation.dtype, autograd=launch.autograd
        )

    def _pipeline(self) -> None:
        """1F1B without interleaving. Source: forward_backward_pipelining_without_interleaving."""
        warm_up = min(self._config.pp - 1 - self._stage, self._config.microbatches)
        steady = self._config.microbatches - warm_up
        for _ in range(warm_up):
            self._transfer(receive_before=True)
            self._forward()
            self._transfer(send_after=True)
        if steady:
            self._transfer(receive_before=True)
        for nth in range(steady):
            last = nth == steady - 1
            self._forward()
            self._transfer(send_after=True, receive_after=True)
            self._backward(last=last and not warm_up)
            self._transfer(send_before=True, receive_before=not last)
        for nth in range(warm_up):
            self._transfer(receive_after=True)
            self._backward(last=nth == warm_up - 1)
            self._transfer(send_before=True)

    def _interleaved_pipeline(self) -> None:
        """1F1B with several chunks of layers on each rank."""
        config = self._config
        layers = config.layers // config.interleave
        for step in Interleaving(self._stage, config.pp, config.interleave, config.microbatches).steps():
            if isinstance(step, Exchange):
                self._exchange_with_neighbours(step)
                continue
            own = range(step.chunk * layers, (step.chunk + 1) * layers)
            if step.backward:
                self._backward(last=step.is_last, layers=own)
            else:
                self._forward(own, outer=step.chunk in {0, config.interleave - 1})

    def _exchange_with_neighbours(self, exchange: Exchange) -> None:
        before, after = (self._stage - 1) % self._config.pp, (self._stage + 1) % self._config.pp
        wanted = (
            (exchange.send_previous, "Send", before),
            (exchange.receive_previous, "Recv", before),
            (exchange.send_next, "Send", after),
            (exchange.receive_next, "Recv", after),
        )
        self._send_and_receive([(op, peer) for asked, op, peer in wanted if asked])

    def _transfer(
        self,
        *,
        send_before: bool = False,
        receive_before: bool = False,
        send_after: bool = False,
        receive_after: bool = False,
    ) -> None:
        """One batch of Sends and Recvs with the stages before and after this one."""
        first, last = self._stage == 0, self._stage == self._config.pp - 1
        pairs: list[tuple[str, int]] = []
        if send_before and not first:
            pairs.append(("Send", self._stage - 1))
        if receive_before and not first:
            pairs.append(("Recv", self._stage - 1))
        if send_after and not last:
            pairs.append(("Send", self._stage + 1))
        if receive_after and not last:
            pairs.append(("Recv", self._stage + 1))
        self._send_and_receive(pairs)

    def _send_and_receive(self, pairs: list[tuple[str, int]]) -> None:
        """One batch, of stages; Megatron synchronises after it."""
        if not pairs:
            return
        share = self._config.tp if self._config.sequence_parallelism else 1
        launch = self._builder.point_to_point(
            self._groups["PP"], pairs, name="pipeline", count=self._tokens // share, dtype=self._half
        )
        self._launch(launch)
        self._add(Action(act=Act.SYNCHRONISE))

    def _forward(self, layers: range | None = None, *, outer: bool = True) -> None:
        """One microbatch through layers (None: all of the stage); `outer`: those next to embedding or loss."""
        self._add(Action(act=Act.LATE, every="microbatch"))
        if outer and self._config.tp > 1 and self._stage in {0, self._config.pp - 1}:
            self._launch(
                self._collective("TP", "Broadcast", "batch", _BROADCAST_TOKENS * self._config.sequence, INT64, 0)
            )
        for layer in range(self._config.layers) if layers is None else layers:
            self._add(Action(act=Act.LATE, every="layer"))
            self._gather_parameters(f"f{layer}")
            self._context(f"f{layer}", backward=False)
            self._block(f"f{layer}a", backward=False)
            self._experts(f"f{layer}", backward=False)
            self._block(f"f{layer}m", backward=False)
        is_end = layers is None or layers.stop == self._config.layers
        if is_end and self._stage == self._config.pp - 1:
            self._loss()

    def _loss(self) -> None:
        """Vocabulary-parallel cross-entropy: a maximum and two sums. Source: core/tensor_parallel/cross_entropy.py."""
        if self._config.tp > 1:
            for name, red in (("max", MAX), ("predicted", SUM), ("sum", SUM)):
                self._launch(self._collective("TP", "AllReduce", f"loss.{name}", self._config.sequence, FLOAT32, red))

    def _backward(self, *, last: bool, layers: range | None = None) -> None:
        for layer in reversed(range(self._config.layers) if layers is None else layers):
            self._gather_parameters(f"b{layer}")
            self._block(f"b{layer}m", backward=True)
            self._experts(f"b{layer}", backward=True)
            self._block(f"b{layer}a", backward=True)
            self._context(f"b{layer}", backward=True)
            if last or self._config.zero2 or self._config.fsdp or self._config.deepspeed in {2, 3}:
                self._reduce_gradients(layer)

    def _block(self, name: str, *, backward: bool) -> None:
        """Attention or MLP of one layer: its computation and what its tensor-parallel group exchanges."""
        tp = self._config.tp
        gather = tp > 1 and self._config.sequence_parallelism
        if gather:
            part = self._tokens // tp
            self._launch(self._collective("TP", "AllGather", name, part, self._half, 0, autograd=backward))
        self._compute(self._block_ns * (2 if backward else 1), autograd=backward)
        if gather:
            part = self._tokens // tp
            self._launch(self._collective("TP", "ReduceScatter", name, part, self._half, SUM, autograd=backward))
        elif tp > 1:
            self._launch(self._collective("TP", "AllReduce", name, self._tokens, self._half, SUM, autograd=backward))

    def _experts(self, name: str, *, backward: bool) -> None:
        if self._config.ep == 1:
            return
        if self._config.ep_dispatch == "allgather":
            self._gathered_experts(name, backward=backward)
            return
        count = max(1, self._tokens // self._config.tp // self._config.ep)
        for step in ("dispatch", "combine"):
            if step == "combine":
                self._compute_experts(backward=backward)
            self._launch(
                self._builder.all_to_all(
                    self._groups["EP"], name=f"{name}.{step}", count=count, dtype=self._half, autograd=backward
                )
            )

    def _gathered_experts(self, name: str, *, backward: bool) -> None:
        """Every rank gets all tokens, forward with their routing, and keeps those of its experts."""
        count = max(1, self._tokens // self._config.tp)
        if not backward:
            probabilities = max(1, self._tokens // self._config.hidden // self._config.tp * self._config.ep)
            self._launch(self._collective("EP", "AllGather", f"{name}.routing", probabilities, FLOAT32, 0))
        self._launch(self._collective("EP", "AllGather", f"{name}.in", count, self._half, 0, autograd=backward))
        self._compute_experts(backward=backward)
        self._launch(self._collective("EP", "ReduceScatter", f"{name}.out", count, self._half, SUM, autograd=backward))

    def _compute_experts(self, *, backward: bool) -> None:
        """Experts get as many tokens as the router sends them: never the same number."""
        if self._config.imbalance:
            duration = self._block_ns * (2 if backward else 1) // 2
            kernel = "gemm_backward" if backward else "gemm_forward"
            action = Action(act=Act.COMPUTE, duration_ns=duration, kernel=kernel, autograd=backward, is_uneven=True)
            self._add(action)

    def _context(self, name: str, *, backward: bool) -> None:
        """Keys and values of the rest of the sequence, for attention; backward their gradients too."""
        size, count = self._config.cp, 2 * self._tokens // self._config.tp
        if size == 1:
            return
        group = self._groups["CP"]
        if self._config.cp_exchange == "ring":
            own = group.members.index(self._rank)
            pairs = [("Send", (own + 1) % size), ("Recv", (own - 1) % size)]
            for step in range(size if backward else size - 1):
                launch = self._builder.point_to_point(
                    group, pairs, name=f"{name}.{step}", count=count, dtype=self._half, autograd=backward
                )
                self._launch(launch)
            return
        for part in ("k", "v"):
            self._launch(self._collective("CP", "AllGather", f"{name}.{part}", count, self._half, 0, autograd=backward))
        for part in ("dk", "dv") if backward else ():
            self._launch(
                self._collective("CP", "ReduceScatter", f"{name}.{part}", count, self._half, SUM, autograd=backward)
            )

    def _gather_parameters(self, name: str) -> None:
        """The parameters of one layer, where each rank holds a shard of them only."""
        part = self._layer_parameters() // self._config.shards
        if self._config.fsdp:
            self._launch(self._collective("OPTIMIZER", "AllGather", f"p{name}", part, self._half, 0))
        if self._config.deepspeed == 3:
            for tensor, twelfths in _TENSORS.items():
                own = part * twelfths // 12
                self._launch(self._collective("OPTIMIZER", "AllGather", f"p{name}.{tensor}", own, self._half, 0))

    def _layer_parameters(self) -> int:
        return 12 * self._config.hidden**2 // self._config.tp // self._config.replicas * self._config.replicas

    def _reduce_gradients(self, layer: int) -> None:
        """The bucket of one layer, on its own stream while backward goes on."""
        if self._config.deepspeed is not None:
            self._reduce_bucket(layer)
            return
        count, ranks, kind = self._layer_parameters(), self._config.replicas, self._gradients
        red = AVG if self._config.traits.average and ranks > 1 else SUM
        if self._config.zero1 or self._config.zero2 or self._config.fsdp:
            part = count // self._config.shards
            launch = self._collective(kind, "ReduceScatter", f"g{layer}", part, FLOAT32, red, autograd=True)
        else:
            launch = self._collective(kind, "AllReduce", f"g{layer}", count, FLOAT32, red, autograd=True)
        if self._config.coalesce:
            self._waiting.append(launch)
            if layer:
                return
            launch, self._waiting = self._builder.coalesced(self._waiting), []
        self._add(Action(act=Act.ISSUE, launch=launch, blocking=False))
        if self._config.replicate > 1:
            part = count // self._config.shards
            launch = self._collective("DP", "AllReduce", f"g{layer}.shard", part, FLOAT32, red, autograd=True)
            self._add(Action(act=Act.ISSUE, launch=launch, blocking=False))

    def _reduce_bucket(self, layer: int) -> None:
        """DeepSpeed's: a layer's gradients, with those of the embedding for the first layer, in the shared buffer."""
        count, kind = self._layer_parameters(), self._gradients
        if layer == 0:
            embedding = _VOCABULARY * self._config.hidden // self._config.tp
            count += embedding // self._config.replicas * self._config.replicas
        if self._config.deepspeed == 3:
            part = count // self._config.replicas
            launch = self._collective(kind, "ReduceScatter", "bucket", part, self._half, SUM, autograd=True)
        else:
            launch = self._collective(kind, "AllReduce", "bucket", count, self._half, SUM, autograd=True)
        self._add(Action(act=Act.ISSUE, launch=launch, blocking=False))

    def _finish_gradients(self) -> None:
        for kind in (self._gradients, "DP") if self._config.replicate > 1 else (self._gradients,):
            self._add(Action(act=Act.WAIT, group=self._groups[kind].index))
        if self._config.deepspeed is not None:
            for name, red in (("overflow", MAX), ("norm", SUM)):
                self._launch(self._collective(self._gradients, "AllReduce", name, 1, FLOAT32, red))
        if "EMBEDDING" in self._groups:
            count = _VOCABULARY * self._config.hidden // self._config.tp
            self._launch(self._collective("EMBEDDING", "AllReduce", "embedding", count, FLOAT32, SUM))
        self._compute(self._block_ns, autograd=False)
        if self._config.deepspeed in {1, 2}:
            part = self._layer_parameters() * self._config.layers // self._config.replicas
            self._launch(self._collective("DP", "AllGather", "parameters", part, self._half, 0))
        if self._config.zero1 or self._config.zero2:
            part = self._layer_parameters() // self._config.replicas
            if self._config.broadcast_parameters:
                self._broadcast_parameters(part)
                return
            gathers = [
                self._collective("DP", "AllGather", f"p{layer}", part, self._half, 0)
                for layer in range(self._config.layers)
            ]
            for launch in [self._builder.coalesced(gathers)] if self._config.coalesce else gathers:
                self._launch(launch)

    def _broadcast_parameters(self, part: int) -> None:
        """Each rank's part of every layer's parameters, in a group for each layer or in one."""
        names = [f"DP.p{layer}" for layer in range(self._config.layers)]
        for chosen in [names] if self._config.coalesce else [[name] for name in names]:
            self._launch(self._builder.broadcasts(self._groups["DP"], chosen, count=part, dtype=self._half))

    def _collective(
        self, parallelism: str, op: str, name: str, count: int, dtype: DataType, red: int, *, autograd: bool = False
    ) -> Launch:
        # PyTorch's stream allocator reuses a freed activation, so that layers share addresses; names keep them apart.
        return self._builder.collective(
            self._groups[parallelism],
            op,
            name=f"{parallelism}.{name}",
            count=count,
            dtype=dtype,
            red=red,
            autograd=autograd,
        )

    def _compute(self, duration_ns: int, *, autograd: bool) -> None:
        kernel = "gemm_backward" if autograd else "gemm_forward"
        self._add(Action(act=Act.COMPUTE, duration_ns=duration_ns, kernel=kernel, autograd=autograd))

    def _launch(self, launch: Launch) -> None:
        self._add(Action(act=Act.ISSUE, launch=launch))

    def _add(self, action: Action) -> None:
        self._actions.append(action)


def _is_collective(action: Action) -> bool:
    return action.launch is not None and action.blocking and action.launch.meeting is Meeting.EVERYBODY


def _launch_of(action: Action) -> Launch:
    if action.launch is None:
        raise AssertionError("an ISSUE action carries a launch")
    return action.launch


def _call_of(launch: Launch) -> tuple[str, int]:
    return launch.operations[0].op, launch.size_bytes
