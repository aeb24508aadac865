"""The handling of gradients: ranks reduce them while backward goes on, and finish the step with the optimiser.

Gradients go out in buckets while the last backward still runs (Megatron-LM core/distributed). With fsdp they are
scattered after each layer (PyTorch distributed/fsdp/_fully_shard); with replicate each shard's gradients are then
reduced over its replicas (HSDP, foreach_reduce there). DeepSpeed divides gradients before it sums them, in the type
of the model, bucket by bucket from the same buffer; stages 1 and 2 by AllReduce although each rank keeps a part only,
stage 3 by ReduceScatter (runtime/zero/stage_1_and_2.py allreduce_bucket, runtime/comm/coalesced_collectives.py).
"""

from __future__ import annotations

from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.data_types import AVG, FLOAT32, MAX, SUM
from ncclscope_simulator.operations import Launch
from ncclscope_simulator.script import Script

_VOCABULARY = 32_000


def layer_parameters(config: SimulationConfig) -> int:
    """Parameters of one layer on a rank: 12 x hidden², of which every replica can have an equal part."""
    return 12 * config.hidden**2 // config.tp // config.replicas * config.replicas


class Gradients:
    """Writes one rank's part of it."""

    def __init__(self, script: Script) -> None:
        self._script, self._config = script, script.config
        self._kind = "OPTIMIZER" if script.config.is_sharded else "DP"
        """The group that reduces the gradients."""
        self._parameters = layer_parameters(script.config)
        self._embedding = _VOCABULARY * script.config.hidden // script.config.tp
        self._waiting: list[Launch] = []
        """Gradients of layers that go out with the first layer's."""

    def reduce(self, layer: int, *, last: bool) -> None:
        """The gradients of one layer after its backward; `last`: of the step's last microbatch."""
        each_time = self._config.zero2 or self._config.fsdp or self._config.deepspeed in {2, 3}
        if not last and not each_time:
            return
        if self._config.deepspeed is not None:
            self._reduce_deepspeed_bucket(layer)
        else:
            self._reduce_bucket(layer)

    def _reduce_bucket(self, layer: int) -> None:
        """The bucket of one layer, on its own stream while backward goes on."""
        red = AVG if self._config.traits.average and self._config.replicas > 1 else SUM
        part = self._parameters // self._config.shards
        if self._config.zero1 or self._config.zero2 or self._config.fsdp:
            op, count = "ReduceScatter", part
        else:
            op, count = "AllReduce", self._parameters
        launch = self._script.collective(self._kind, op, f"g{layer}", count, FLOAT32, red, autograd=True)
        if self._config.coalesce:
            self._waiting.append(launch)
            if layer:
                return
            launch, self._waiting = self._script.builder.coalesced(self._waiting), []
        self._script.launch(launch, blocking=False)
        if self._config.replicate > 1:
            shard = self._script.collective("DP", "AllReduce", f"g{layer}.shard", part, FLOAT32, red, autograd=True)
            self._script.launch(shard, blocking=False)

    def _reduce_deepspeed_bucket(self, layer: int) -> None:
        """A layer's gradients, with those of the embedding for the first layer, in the buffer that all layers share."""
        count, replicas, half = self._parameters, self._config.replicas, self._script.half
        if layer == 0:
            count += self._embedding // replicas * replicas
        op, part = ("ReduceScatter", count // replicas) if self._config.deepspeed == 3 else ("AllReduce", count)
        launch = self._script.collective(self._kind, op, "bucket", part, half, SUM, autograd=True)
        self._script.launch(launch, blocking=False)

    def finish(self) -> None:
        """Waits for all gradients, exchanges what depends on them, and gathers the parameters that they changed."""
        script = self._script
        script.wait(self._kind)
        if self._config.replicate > 1:
            script.wait("DP")
        if self._config.deepspeed is not None:
            for name, red in (("overflow", MAX), ("norm", SUM)):
                script.launch(script.collective(self._kind, "AllReduce", name, 1, FLOAT32, red))
        if "EMBEDDING" in script.groups:
            script.launch(script.collective("EMBEDDING", "AllReduce", "embedding", self._embedding, FLOAT32, SUM))
        script.compute(script.block_ns, autograd=False)
        if self._config.deepspeed in {1, 2}:
            part = self._parameters * self._config.layers // self._config.replicas
            script.launch(script.collective("DP", "AllGather", "parameters", part, script.half))
        if self._config.zero1 or self._config.zero2:
            self._share_parameters()

    def _share_parameters(self) -> None:
        """Each rank's part of the parameters goes to all others."""
        script, part = self._script, self._parameters // self._config.replicas
        layers = range(self._config.layers)
        if self._config.broadcast_parameters:
            names = [f"DP.p{layer}" for layer in layers]
            for chosen in [names] if self._config.coalesce else [[name] for name in names]:
                group = script.groups["DP"]
                script.launch(script.builder.broadcasts(group, chosen, count=part, dtype=script.half))
            return
        gathers = [script.collective("DP", "AllGather", f"p{layer}", part, script.half) for layer in layers]
        for launch in [script.builder.coalesced(gathers)] if self._config.coalesce else gathers:
            script.launch(launch)
