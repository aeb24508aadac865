"""A rank's work for one microbatch: its layers forward and backward, with all that they exchange.

Within the tensor-parallel group an AllReduce after attention and after the MLP, forward and backward, or with
sequence parallelism an AllGather before and a ReduceScatter after (Megatron-LM core/tensor_parallel/mappings.py).
Experts exchange tokens before and after the expert layer, both ways (core/transformer/moe/token_dispatcher.py). Ranks
that share a sequence pass keys and values around a ring, or gather them (TransformerEngine attention/
dot_product_attention/context_parallel.py). With fsdp, parameters are gathered before each layer, both ways (torchtitan
models/llama3/infra/parallelize.py, PyTorch distributed/fsdp/_fully_shard); DeepSpeed's stage 3 gathers each tensor by
itself (runtime/zero/partitioned_param_coordinator.py).
"""

from __future__ import annotations

from ncclscope_simulator.data_types import FLOAT32, INT64, MAX, SUM, DataType
from ncclscope_simulator.gradients import Gradients, layer_parameters
from ncclscope_simulator.script import Script

_BROADCAST_TOKENS = 2
_TENSORS = {"qkv": 3, "projection": 1, "up": 4, "down": 4}
"""Matrices of a layer, in twelfths of its parameters."""


class Layers:
    """Writes the microbatches of one rank, one after the other."""

    def __init__(self, script: Script, gradients: Gradients) -> None:
        self._script, self._config, self._gradients = script, script.config, gradients
        self._all = range(script.config.layers)

    def forward(self, layers: range | None = None, *, outer: bool = True) -> None:
        """One microbatch through layers (None: all of the stage); `outer`: those next to embedding or loss."""
        script, config = self._script, self._config
        script.late("microbatch")
        if outer and config.tp > 1 and (script.is_first_stage or script.is_last_stage):
            self._collective("TP", "Broadcast", "batch", _BROADCAST_TOKENS * config.sequence, INT64)
        layers = self._all if layers is None else layers
        for layer in layers:
            script.late("layer")
            self._gather_parameters(f"f{layer}")
            self._exchange_context(f"f{layer}", backward=False)
            self._block(f"f{layer}a", backward=False)
            self._experts(f"f{layer}", backward=False)
            self._block(f"f{layer}m", backward=False)
        if layers.stop == config.layers and script.is_last_stage:
            self._loss()

    def backward(self, layers: range | None = None, *, last: bool) -> None:
        """The way back; `last`: of the step's last microbatch through these layers."""
        for layer in reversed(self._all if layers is None else layers):
            self._gather_parameters(f"b{layer}")
            self._block(f"b{layer}m", backward=True)
            self._experts(f"b{layer}", backward=True)
            self._block(f"b{layer}a", backward=True)
            self._exchange_context(f"b{layer}", backward=True)
            self._gradients.reduce(layer, last=last)

    def _collective(
        self,
        parallelism: str,
        op: str,
        name: str,
        count: int,
        dtype: DataType | None = None,
        red: int = 0,
        *,
        autograd: bool = False,
    ) -> None:
        """Launches a collective; dtype None: of activations."""
        kind = self._script.half if dtype is None else dtype
        self._script.launch(self._script.collective(parallelism, op, name, count, kind, red, autograd=autograd))

    def _loss(self) -> None:
        """Vocabulary-parallel cross-entropy: a maximum and two sums. Source: core/tensor_parallel/cross_entropy.py."""
        if self._config.tp > 1:
            for name, red in (("max", MAX), ("predicted", SUM), ("sum", SUM)):
                self._collective("TP", "AllReduce", f"loss.{name}", self._config.sequence, FLOAT32, red)

    def _gather_parameters(self, name: str) -> None:
        """The parameters of one layer, if each rank holds a shard of them only."""
        part = layer_parameters(self._config) // self._config.shards
        if self._config.fsdp:
            self._collective("OPTIMIZER", "AllGather", f"p{name}", part)
        if self._config.deepspeed == 3:
            for tensor, twelfths in _TENSORS.items():
                self._collective("OPTIMIZER", "AllGather", f"p{name}.{tensor}", part * twelfths // 12)

    def _block(self, name: str, *, backward: bool) -> None:
        """Attention or MLP of one layer: its computation and what its tensor-parallel group exchanges."""
        tp, tokens = self._config.tp, self._script.tokens
        scattered = self._config.sequence_parallelism
        if scattered:
            self._collective("TP", "AllGather", name, tokens // tp, autograd=backward)
        self._script.compute(self._script.block_ns * (2 if backward else 1), autograd=backward)
        if scattered:
            self._collective("TP", "ReduceScatter", name, tokens // tp, red=SUM, autograd=backward)
        elif tp > 1:
            self._collective("TP", "AllReduce", name, tokens, red=SUM, autograd=backward)

    def _experts(self, name: str, *, backward: bool) -> None:
        if self._config.ep == 1:
            return
        if self._config.ep_dispatch == "allgather":
            self._gathered_experts(name, backward=backward)
            return
        exchange = self._outside if self._config.ep_dispatch == "deepep" else self._all_to_all
        exchange(f"{name}.dispatch", backward=backward)
        self._compute_experts(backward=backward)
        exchange(f"{name}.combine", backward=backward)

    def _all_to_all(self, name: str, *, backward: bool) -> None:
        script, count = self._script, max(1, self._script.tokens // self._config.tp // self._config.ep)
        script.launch(
            script.builder.all_to_all(script.groups["EP"], name=name, count=count, dtype=script.half, autograd=backward)
        )

    def _outside(self, name: str, *, backward: bool) -> None:
        """DeepEP's kernels: what goes where, which all ranks wait for, then the tokens."""
        script, group, step = self._script, self._script.groups["EP"], name.rsplit(".", 1)[-1]
        where = "internode" if group.spans_nodes else "intranode"
        notify = "cached_notify_combine" if step == "combine" else "notify_dispatch"
        tokens = max(1, script.tokens // self._config.tp // self._config.ep)
        for kernel, count in ((notify, 64), (step, tokens)):
            script.launch(
                script.builder.outside(
                    group,
                    kernel=f"deep_ep::{where}::{kernel}",
                    name=f"{name}.{kernel}",
                    count=count,
                    dtype=script.half,
                    autograd=backward,
                )
            )

    def _gathered_experts(self, name: str, *, backward: bool) -> None:
        """Every rank gets all tokens, forward with their routing, and keeps those of its experts."""
        config, tokens = self._config, self._script.tokens
        count = max(1, tokens // config.tp)
        if not backward:
            probabilities = max(1, tokens // config.hidden // config.tp * config.ep)
            self._collective("EP", "AllGather", f"{name}.routing", probabilities, FLOAT32)
        self._collective("EP", "AllGather", f"{name}.in", count, autograd=backward)
        self._compute_experts(backward=backward)
        self._collective("EP", "ReduceScatter", f"{name}.out", count, red=SUM, autograd=backward)

    def _compute_experts(self, *, backward: bool) -> None:
        """Experts get as many tokens as the router sends them: never the same number."""
        if self._config.imbalance:
            duration = self._script.block_ns * (2 if backward else 1) // 2
            self._script.compute(duration, autograd=backward, is_uneven=True)

    def _exchange_context(self, name: str, *, backward: bool) -> None:
        """Keys and values of the rest of the sequence, for attention; backward their gradients too."""
        if self._config.cp == 1:
            return
        count = 2 * self._script.tokens // self._config.tp
        if self._config.cp_exchange == "ring":
            self._pass_around(name, count, backward=backward)
            return
        for part in ("k", "v"):
            self._collective("CP", "AllGather", f"{name}.{part}", count, autograd=backward)
        for part in ("dk", "dv") if backward else ():
            self._collective("CP", "ReduceScatter", f"{name}.{part}", count, red=SUM, autograd=backward)

    def _pass_around(self, name: str, count: int, *, backward: bool) -> None:
        """Around the ring of a group: to all others forward, and backward once more, for their owners."""
        script, size = self._script, self._config.cp
        group = script.groups["CP"]
        own = group.members.index(script.rank)
        pairs = [("Send", (own + 1) % size), ("Recv", (own - 1) % size)]
        for nth in range(size if backward else size - 1):
            launch = script.builder.point_to_point(
                group, pairs, name=f"{name}.{nth}", count=count, dtype=script.half, autograd=backward
            )
            script.launch(launch)
