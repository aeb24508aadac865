"""A rank's microbatches and its end of the step, operation by operation as Megatron-LM calls them.

Read from Megatron-LM core_r0.13.0 (73a28a1), apart from the emission rules of the models, which it checks:
megatron/core/tensor_parallel/{layers,mappings,cross_entropy}.py, models/common/embeddings, transformer/moe/
token_dispatcher.py, distributed/finalize_model_grads.py, optimizer/{optimizer,clip_grads}.py; megatron/training/
{training,utils}.py. Every step is logged; checkpoints and evaluation are left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from ncclscope_simulator.data_types import FLOAT32, INT32, INT64, MAX, MIN, SUM, UINT8, DataType
from ncclscope_simulator.gpu_speed import Pass, PassTimes, Sizes, pass_times
from ncclscope_simulator.megatron_model import MegatronModel, Parameter, Place, bucket_limit, buckets, parameters
from ncclscope_simulator.script import Script

_TIMERS = 16
"""Timers of a log interval."""


def place_of(script: Script, chunk: int) -> Place:
    """Layers of a chunk of the rank's stage; interleaved chunks go round the stages."""
    config, each = script.config, script.config.layers // script.config.interleave
    begin = (chunk * config.pp + script.stage) * each
    return Place(
        first=script.is_first_stage and chunk == 0,
        last=script.is_last_stage and chunk == config.interleave - 1,
        layers=range(begin, begin + each),
    )


def times_of(script: Script, model: MegatronModel) -> PassTimes:
    """How long the rank computes: on its GPU, or if none is given, equal blocks that fill the step."""
    config = script.config
    if config.gpu_speed is None:
        block = Pass(script.block_ns, 2 * script.block_ns)
        return PassTimes(block, block, block, Pass(0, 0), script.block_ns)
    tokens, ffn = model.micro_batch * config.sequence, model.ffn or 4 * config.hidden
    places = [place_of(script, chunk) for chunk in range(config.interleave)]
    own = [each for place in places for each in _parameters(script, model, place)]
    held = sum(each.elements / (script.groups[_group_of(each)].size if config.zero1 else 1) for each in own)
    sizes = Sizes(
        tokens=tokens,
        sequence=config.sequence,
        hidden=config.hidden,
        query=config.hidden // config.tp,
        kv=(model.kv or config.hidden) // config.tp,
        ffn=ffn // config.tp,
        expert_ffn=model.expert_ffn or ffn,
        top_k=model.top_k,
        fold=2 if model.gated else 1,
        vocabulary=model.vocabulary // config.tp,
        outside=tokens // (config.tp if config.sequence_parallelism else 1),
        held=held,
    )
    return pass_times(config.gpu_speed, sizes)


def _parameters(script: Script, model: MegatronModel, place: Place) -> list[Parameter]:
    config = script.config
    return parameters(model, config.hidden, config.sequence, config.tp, config.ep, place)


def _group_of(parameter: Parameter) -> str:
    return "EXPERT_DP" if parameter.expert else "DP"


class MegatronGradients:
    """Gradients by bucket, and everything that follows them in a step."""

    def __init__(self, script: Script, model: MegatronModel) -> None:
        self._script, self._config, self._model = script, script.config, model
        config = script.config
        self._times = times_of(script, model)
        self._chunks = [_parameters(script, model, place_of(script, chunk)) for chunk in range(config.interleave)]
        self._kind = script.half if model.fp16 else FLOAT32
        """Type of gradients."""

    def reduce(self, layer: int, *, last: bool) -> None:
        """With overlap, after a layer in the step's last backward through its chunk: the buckets that are whole now."""
        if not last or not self._model.overlap:
            return
        chunk, local = divmod(layer, self._config.layers // self._config.interleave)
        ready = self._ready(chunk)
        for group, nth, count in self._buckets(chunk):
            if ready.get((group, nth), 0) == local:
                self._sum(group, f"g{chunk}.{nth}", count)

    def _sum(self, group: str, name: str, count: int) -> None:
        """Of a bucket; with overlap the backward pass goes on beside it."""
        op, part = ("ReduceScatter", count // self._ranks(group)) if self._config.zero1 else ("AllReduce", count)
        self._launch(group, op, name, part, self._kind, blocking=not self._model.overlap)

    def _ready(self, chunk: int) -> dict[tuple[str, int], int]:
        """After which layer of the chunk a bucket is whole; those that are not named, after the first."""
        place = place_of(self._script, chunk)
        sizes = [(nth, count) for group, nth, count in self._buckets(chunk) if group == "DP"]
        own = sum(each.elements for each in self._chunks[chunk] if not each.expert)
        found: dict[tuple[str, int], int] = {}
        ends = nth = 0
        for local in range(len(place.layers) - 1, 0, -1):
            left = _parameters(self._script, self._model, replace(place, last=False, layers=place.layers[:local]))
            summed = own - sum(each.elements for each in left if not each.expert)
            while nth < len(sizes) - 1 and ends + sizes[nth][1] <= summed:
                ends += sizes[nth][1]
                found["DP", nth] = local
                nth += 1
        return found

    def _buckets(self, chunk: int) -> list[tuple[str, int, int]]:
        """(Group, which, elements) of a chunk's buckets, those of experts in buffers of their own."""
        bucketed = self._model.overlap and self._script.is_first_stage and chunk == 0
        limit = bucket_limit(self._config.replicas) if bucketed else None
        found: list[tuple[str, int, int]] = []
        for group, expert in (("DP", False), ("EXPERT_DP", True)):
            own = [each for each in self._chunks[chunk] if each.expert is expert]
            if own:
                sizes = buckets(own, self._ranks(group), limit=limit, distributed=self._config.zero1)
                found += [(group, nth, size) for nth, size in enumerate(sizes)]
        return found

    def finish(self) -> None:
        """Shared gradients, the optimizer's scalars, parameters, and what a step reports."""
        script, model, config = self._script, self._model, self._config
        for chunk in () if model.overlap else range(config.interleave):
            for group, nth, count in self._buckets(chunk):
                self._sum(group, f"g{chunk}.{nth}", count)
        for group in ("DP", *(("EXPERT_DP",) if "EXPERT_DP" in script.groups else ())):
            script.wait(group)
        own = [parameter for chunk in self._chunks for parameter in chunk]
        if config.sequence_parallelism:
            self._launch("TP", "AllReduce", "whole", _elements(own, whole=True), self._kind)
        if "EMBEDDING" in script.groups and model.tied:
            shared = next(parameter.elements for parameter in own if parameter.shared)
            self._launch("EMBEDDING", "AllReduce", "shared", shared, self._kind)
        script.compute(int(self._times.optimizer), autograd=False)
        statistics = ["OPTIMIZER"] if config.zero1 else ["MP", *(["EXPERT_MP"] if model.experts else [])]
        for group in statistics:
            if model.fp16:
                self._launch(group, "AllReduce", "found_inf", 1, FLOAT32, MAX)
            if model.clip and not (model.fp16 and model.skipped):
                self._launch(group, "AllReduce", "norm", 1, FLOAT32)
        if config.zero1 and not (model.fp16 and model.skipped):
            self._gather_parameters()
        self._report()

    def _gather_parameters(self) -> None:
        for chunk in range(self._config.interleave):
            for group, nth, count in self._buckets(chunk):
                self._launch(group, "AllGather", f"p{chunk}.{nth}", count // self._ranks(group), self._script.half)

    def _report(self) -> None:
        """Scalars that all steps end with, and the timers of a log interval."""
        script = self._script
        self._launch("MP", "AllReduce", "success", 1, INT32, MIN)
        for name in ("norm.max", "rate.max"):
            self._launch("MP", "AllReduce", name, 1, FLOAT32, MAX)
        if script.is_last_stage:
            self._launch("DP", "AllReduce", "loss", 2, FLOAT32)
        self._launch(script.world, "AllReduce", "rerun", 1, INT32)
        for nth in range(2):
            self._launch(script.world, "AllReduce", f"barrier{nth}", 1, FLOAT32)
        for nth in range(1 + self._model.tensorboard):
            self._launch(script.world, "AllGather", f"timers{nth}", _TIMERS, FLOAT32)

    def _ranks(self, group: str) -> int:
        return self._script.groups[group].size

    def _launch(
        self, group: str, op: str, name: str, count: int, kind: DataType, red: int = SUM, *, blocking: bool = True
    ) -> None:
        self._script.launch(self._script.collective(group, op, name, count, kind, red), blocking=blocking)


def routes(tokens: int, ranks: int, seed: str) -> list[list[int]]:
    """Tokens by sender and receiver, as an uneven router spreads those of each rank: the same on all ranks."""
    random = Random(seed)
    liked = [random.uniform(0.4, 1.6) for _ in range(ranks)]
    found: list[list[int]] = []
    for _ in range(ranks):
        weights = [each * random.uniform(0.8, 1.2) for each in liked]
        row = [int(tokens * weight / sum(weights)) for weight in weights]
        row[random.randrange(ranks)] += tokens - sum(row)
        found.append(row)
    return found


def _elements(own: list[Parameter], *, whole: bool) -> int:
    return sum(parameter.elements for parameter in own if parameter.whole is whole)


class MegatronLayers:
    """Writes the microbatches of one rank, one after the other."""

    def __init__(self, script: Script, model: MegatronModel, gradients: MegatronGradients) -> None:
        self._script, self._config, self._model, self._gradients = script, script.config, model, gradients
        self._times = times_of(script, model)
        self._all = range(script.config.layers)
        self._samples = model.micro_batch * script.config.sequence
        self._passes = ""
        """Chunk and microbatch that are computed now."""
        self._begun: Counter[tuple[bool, int]] = Counter()

    def _pass(self, layers: range, *, back: bool) -> None:
        self._passes = f"{layers.start} {self._begun[back, layers.start] % self._config.microbatches}"
        self._begun[back, layers.start] += 1

    def forward(self, layers: range | None = None, *, outer: bool = True) -> None:
        """One microbatch through layers (None: all of the stage); every chunk of an outer stage gets the batch."""
        layers = self._all if layers is None else layers
        script, place = self._script, self._place(layers)
        self._pass(layers, back=False)
        script.late("microbatch")
        self._batch()
        if place.first:
            self._embed()
        for layer, local in zip(place.layers, layers, strict=True):
            script.late("layer")
            self._layer(layer, f"f{local}", again=False)
        if place.last:
            if self._config.sequence_parallelism:
                self._gather("head")
            script.compute_pass(self._times.head, back=False, autograd=False)
            for name, red in (("max", MAX), ("predicted", SUM), ("sum", SUM)):
                self._collective("TP", "AllReduce", f"loss.{name}", self._samples, FLOAT32, red)

    def backward(self, layers: range | None = None, *, last: bool) -> None:
        """The way back; `last`: of the step's last microbatch through these layers."""
        layers = self._all if layers is None else layers
        place, scattered = self._place(layers), self._config.sequence_parallelism
        self._pass(layers, back=True)
        if place.last:
            self._script.compute_pass(self._times.head, back=True, autograd=True)
        if place.last and self._config.tp > 1:
            if scattered:
                self._gather("head.input", back=True)
                self._scatter("head.back", back=True)
            else:
                self._sum("head.back", back=True)
        for layer, local in reversed(list(zip(place.layers, layers, strict=True))):
            if self._model.full_recompute:
                self._layer(layer, f"r{local}", again=True)
            self._layer_back(layer, f"b{local}")
            if local != layers.start:
                self._gradients.reduce(local, last=last)
        if place.first and scattered:
            self._gather("embedding.back", back=True)
        self._gradients.reduce(layers.start, last=last)

    def _place(self, layers: range) -> Place:
        return place_of(self._script, layers.start // (self._config.layers // self._config.interleave))

    def _batch(self) -> None:
        """Tokens and positions on the first stage, labels and their mask on the last, from the group's first rank."""
        first, last = self._script.is_first_stage, self._script.is_last_stage
        if not first and not last:
            return
        named = [("tokens", first), ("labels", last), ("positions", first)]
        for name in (name for name, wanted in named if wanted):
            self._collective("TP", "Broadcast", name, self._samples, INT64)
        if last:
            self._collective("TP", "Broadcast", "loss_mask", self._samples, FLOAT32)
        if self._model.mask:
            self._collective("TP", "Broadcast", "mask", self._samples * self._config.sequence, UINT8)

    def _embed(self) -> None:
        if self._config.tp == 1:
            return
        # Positions are added to the whole, which is cut afterwards, without communication.
        if self._config.sequence_parallelism and not self._model.learned:
            self._scatter("embedding")
        else:
            self._sum("embedding")

    def _layer(self, layer: int, name: str, *, again: bool) -> None:
        """Forward, or once more in the backward pass."""
        self._block(f"{name}a", self._times.attention, back=again)
        if self._model.experts and layer % self._model.every == 0:
            self._experts(name, back=again)
        else:
            self._block(f"{name}m", self._times.mlp, back=again)

    def _block(self, name: str, part: Pass, *, back: bool) -> None:
        """Attention or MLP: a column-parallel and a row-parallel matrix."""
        scattered = self._config.sequence_parallelism
        if scattered:
            self._gather(name, back=back)
        self._script.compute_pass(part, back=False, autograd=back)
        if scattered:
            self._scatter(name, back=back)
        elif self._config.tp > 1:
            self._sum(name, back=back)

    def _layer_back(self, layer: int, name: str) -> None:
        if self._model.experts and layer % self._model.every == 0:
            self._experts_back(name)
        else:
            self._block_back(f"{name}m", self._times.mlp)
        self._block_back(f"{name}a", self._times.attention)

    def _block_back(self, name: str, part: Pass) -> None:
        """The row-parallel matrix gathers the gradient, the column-parallel one its input for its weight."""
        scattered = self._config.sequence_parallelism
        if scattered:
            self._gather(f"{name}.gradient", back=True)
        self._script.compute_pass(part, back=True, autograd=True)
        if scattered:
            self._gather(f"{name}.input", back=True)
            self._scatter(name, back=True)
        elif self._config.tp > 1:
            self._sum(name, back=True)

    def _experts(self, name: str, *, back: bool) -> None:
        if self._config.ep == 1:
            return
        model, routed = self._model, self._samples * self._model.experts
        if self._config.ep_dispatch == "allgather":
            self._collective("EP", "AllGather", f"{name}.map", routed, UINT8, back=back)
            self._collective("EP", "AllGather", f"{name}.probabilities", routed, back=back)
            self._collective("EP", "AllGather", f"{name}.in", self._script.tokens, back=back)
            self._script.compute_pass(self._times.experts, back=False, autograd=back)
            self._collective("EP", "ReduceScatter", f"{name}.out", self._script.tokens, back=back)
            return
        self._collective("EP", "AllGather", f"{name}.counts", model.experts, INT64, back=back)
        self._exchange(f"{name}.out", self._script.tokens, back=back)
        self._exchange(f"{name}.probabilities", self._samples, back=back)
        self._script.compute_pass(self._times.experts, back=False, autograd=back)
        self._exchange(f"{name}.back", self._script.tokens, back=back)

    def _experts_back(self, name: str) -> None:
        if self._config.ep == 1:
            return
        self._script.compute_pass(self._times.experts, back=True, autograd=True)
        if self._config.ep_dispatch == "allgather":
            self._collective("EP", "AllGather", f"{name}.out", self._script.tokens, back=True)
            self._collective("EP", "ReduceScatter", f"{name}.in", self._script.tokens, back=True)
            self._collective(
                "EP", "ReduceScatter", f"{name}.probabilities", self._samples * self._model.experts, back=True
            )
            return
        self._exchange(f"{name}.back", self._script.tokens, back=True)
        self._exchange(f"{name}.probabilities", self._samples, back=True)
        self._exchange(f"{name}.out", self._script.tokens, back=True)

    def _exchange(self, name: str, count: int, *, back: bool) -> None:
        """An all-to-all of what each token's experts get."""
        script, group = self._script, self._script.groups["EP"]
        if not self._model.uneven:
            each = count * self._model.top_k // self._config.ep
            script.launch(script.builder.all_to_all(group, name=name, count=each, dtype=script.half, autograd=back))
            return
        layer, _, what = name.partition(".")
        routed = routes(self._samples * self._model.top_k, group.size, f"{group.index} {self._passes} {layer[1:]}")
        own, elements = group.members.index(script.rank), count // self._samples
        # Results and their gradients go the other way than what they are of.
        is_return = (what == "back") is not name.startswith("b")
        counts: dict[tuple[str, int], int] = {}
        for peer in range(group.size):
            out, into = routed[own][peer] * elements, routed[peer][own] * elements
            counts["Send", peer], counts["Recv", peer] = (into, out) if is_return else (out, into)
        script.launch(script.builder.uneven_all_to_all(group, counts, name=name, dtype=script.half, autograd=back))

    def _gather(self, name: str, *, back: bool = False) -> None:
        self._collective("TP", "AllGather", name, self._script.tokens // self._config.tp, back=back)

    def _scatter(self, name: str, *, back: bool = False) -> None:
        self._collective("TP", "ReduceScatter", name, self._script.tokens // self._config.tp, back=back)

    def _sum(self, name: str, *, back: bool = False) -> None:
        self._collective("TP", "AllReduce", name, self._script.tokens, back=back)

    def _collective(
        self, group: str, op: str, name: str, count: int, dtype: DataType | None = None, red: int = SUM, *,
        back: bool = False,
    ) -> None:  # fmt: skip
        """Launches a collective; dtype None: of activations."""
        kind = self._script.half if dtype is None else dtype
        self._script.launch(self._script.collective(group, op, name, count, kind, red, autograd=back))
