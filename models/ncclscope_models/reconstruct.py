"""The description of a job from one iteration of its traffic: the emission rules of Megatron-LM, solved backwards.

Sizes and counts say what they can: the cross-entropy's three AllReduces a micro-batch give micro-batches and tokens,
the groups' sizes the degrees, activations the hidden size, counts of a stage its layers, types the precision. Every
hypothesis must then explain every tensor operation, with some vocabulary and MLP that give the gradients their size.
What does not show in the traffic (heads, how tokens split into samples and sequence, vocabulary against MLP) stays
open, and is named: a description that only seems to be known would be worse than none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from math import isqrt
from typing import Final, TypeAlias

from ncclscope_models.difference import Line, Seen
from ncclscope_models.fitted_sizes import Frame, SizeSolver, lines_of
from ncclscope_models.job import (
    Dispatcher,
    Experts,
    Job,
    Layout,
    Norm,
    Precision,
    Recompute,
    Shape,
)
from ncclscope_models.rank_groups import Order

Fact: TypeAlias = int | bool | str

_STAGES: Final = 3
"""Ranks of different traffic that a hypothesis is held against."""
_LEAST_HIDDEN, _MOST_LAYERS = 64, 4
_SWITCHES: Final = tuple(product((True, False), (True, False), (True, False), (True, False)))
_KV: Final = (1, 2, 4, 8, 3, 6, 5, 7, 12, 16)
"""Heads for one head of keys and values."""


class Answer(StrEnum):
    """How much the traffic says."""

    UNIQUE = "unique"
    """One hypothesis explains everything, but for what is open."""
    AMBIGUOUS = "ambiguous"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Reconstruction:
    """What one iteration says of its job."""

    answer: Answer
    known: tuple[Mapping[str, Fact], ...]
    """Fields of each hypothesis that explains everything, by the names of a description; besides `micro_batches` and
    `tokens` of a micro-batch."""
    job: Job | None
    """One that explains everything; its open fields are examples."""
    open: tuple[str, ...]
    """Fields that the traffic does not show."""

    @property
    def differing(self) -> tuple[str, ...]:
        """Fields in which hypotheses differ: any of them would tell them apart."""
        names = {name for each in self.known for name in each}
        return tuple(sorted(name for name in names if len({each.get(name) for each in self.known}) > 1))


def reconstruct(seen: Mapping[int, Seen]) -> Reconstruction:
    """The description that one iteration of these ranks says; all ranks should be among them.

    None if it is no job of Megatron-LM, or one that the rules do not describe.
    """
    nothing = Reconstruction(Answer.NONE, (), None, ())
    try:
        frame = _frame(seen)
    except _NotFoundError:
        return nothing
    sample = _sample(seen)
    found: list[tuple[dict[str, Fact], Job]] = []
    for hypothesis in _hypotheses(frame, seen):
        job = _witness(frame, hypothesis, sample)
        if job is not None:
            found.append((_facts(frame, hypothesis, job), job))
    if not found:
        return nothing
    distinct = list({tuple(sorted(facts.items())): facts for facts, _ in found}.values())
    answer = Answer.UNIQUE if len(distinct) == 1 else Answer.AMBIGUOUS
    return Reconstruction(answer, tuple(distinct), found[0][1], _open(distinct[0]))


class _NotFoundError(Exception):
    """The traffic lacks what every job of Megatron-LM sends."""


def _frame(seen: Mapping[int, Seen]) -> Frame:
    losses = {rank: loss for rank, own in seen.items() if (loss := _loss(own)) is not None}
    if len(set(losses.values())) != 1:
        raise _NotFoundError
    tensor, micro_batches, tokens = next(iter(losses.values()))
    world = max(group.size for own in seen.values() for group in own)
    stages = {group.size for own in seen.values() for group, lines in own.items() if _is_pipeline(lines)}
    if len(stages) > 1:
        raise _NotFoundError
    pipeline = next(iter(stages), 1)
    data, rest = divmod(world, tensor * pipeline)
    experts = {
        group.size
        for own in seen.values()
        for group, lines in own.items()
        if tensor == 1 and _is_expert(lines, micro_batches)
    }
    if rest or len(experts) > 1:
        raise _NotFoundError
    some = [each for own in seen.values() for each in lines_of(own)]
    gathers = any(
        group.size == tensor and line.op == "ReduceScatter" and count >= micro_batches and tensor > 1
        for group, line, count in some
    )
    chunks = 1
    if pipeline > 1:
        sends = min(
            sum(count for line, count in lines.items() if line.op == "Send")
            for own in seen.values()
            for lines in own.values()
            if _is_pipeline(lines)
        )
        chunks, odd = divmod(sends // micro_batches + 1, 2)
        if odd or sends % micro_batches:
            raise _NotFoundError
    layout = Layout(
        tensor=tensor, pipeline=pipeline, data=data, expert=next(iter(experts), 1), chunks=chunks,
        is_sequence_parallel=gathers,
    )  # fmt: skip
    return _with_sizes(seen, layout, micro_batches, tokens)


def _loss(own: Seen) -> tuple[int, int, int] | None:
    """(Tensor-parallel ranks, micro-batches, tokens) of a rank that computes the loss: 3 AllReduces, a Broadcast."""
    for group, line, count in lines_of(own):
        if line.op == "AllReduce" and line.dtype == "FP32" and count % 3 == 0 and count:
            for other, times in own[group].items():
                is_mask = other.op == "Broadcast" and (
                    (other.dtype == "FP32" and other.elements == line.elements)
                    or (other.dtype == "INT8" and other.elements == 4 * line.elements)
                )
                if is_mask and times % (count // 3) == 0:
                    return group.size, count // 3, line.elements
    return None


def _is_pipeline(lines: Mapping[Line, int]) -> bool:
    return bool(lines) and all(line.op in ("Send", "Recv") for line in lines)


def _is_expert(lines: Mapping[Line, int], micro_batches: int) -> bool:
    """An exchange beside its counts, or more AllGathers than buckets of parameters."""
    often = [line for line, count in lines.items() if count >= micro_batches and line.op != "AllReduce"]
    ops = {line.op for line in often}
    has_batch = "Broadcast" in ops
    return not has_batch and "AllGather" in ops and bool(ops & {"Send", "AlltoAll", "ReduceScatter"})


def _with_sizes(seen: Mapping[int, Seen], layout: Layout, micro_batches: int, tokens: int) -> Frame:
    halves: Counter[str] = Counter()
    hidden: set[int] = set()
    mask: set[int] = set()
    gradients: set[tuple[str, str]] = set()
    for own in seen.values():
        for group, line, count in lines_of(own):
            cut = layout.tensor if layout.is_sequence_parallel else 1
            is_often = count >= micro_batches
            if _is_pipeline(own[group]) or (is_often and line.dtype in ("BF16", "FP16")):
                halves[line.dtype] += 1
            if _is_pipeline(own[group]) or (is_often and line.op == "ReduceScatter" and layout.is_sequence_parallel):
                hidden.add(line.elements * cut // tokens)
            elif is_often and line.op == "AllReduce" and line.dtype in ("BF16", "FP16") and group.size > 1:
                hidden.add(line.elements // tokens)
            elif line.op == "Broadcast" and line.elements > 8 * tokens:
                mask.add(line.elements)
            if line.op in ("AllReduce", "ReduceScatter") and count < micro_batches and line.elements > tokens:
                gradients.add((line.op, line.dtype))
            if layout.expert > 1 and group.size == layout.expert and line.op == "ReduceScatter" and is_often:
                hidden.add(line.elements // tokens)
    if len(mask) > 1 or (mask and next(iter(mask)) % tokens) or not gradients:
        raise _NotFoundError
    hidden = {max(hidden)} if hidden else hidden
    reduced = {dtype for _, dtype in gradients}
    if len(reduced) > 1:
        raise _NotFoundError
    gradient = next(iter(reduced))
    precision = Precision(halves.most_common(1)[0][0]) if halves else None
    if precision is None and gradient in ("FP16", "BF16"):
        precision = Precision(gradient)
    return Frame(
        layout=layout, micro_batches=micro_batches, tokens=tokens, precision=precision, gradient_type=gradient,
        has_distributed_optimizer=any(op == "ReduceScatter" for op, _ in gradients),
        hidden=next(iter(hidden), None), sequence=next(iter(mask)) // tokens if mask else None, has_mask=bool(mask),
    )  # fmt: skip


def _sample(seen: Mapping[int, Seen]) -> dict[int, Seen]:
    """One rank for each kind of traffic."""
    kinds: dict[tuple[object, ...], int] = {}
    for rank, own in sorted(seen.items()):
        kind = tuple(sorted((group.size, line, count) for group, line, count in lines_of(own)))
        kinds.setdefault(kind, rank)
    ranks = list(kinds.values())
    chosen = dict.fromkeys([*ranks[: _STAGES - 1], ranks[-1]])
    return {rank: seen[rank] for rank in chosen}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hypothesis:
    """What counts allow; None: not seen."""

    recompute: Recompute
    layers: int | None = None
    """Of a stage."""
    hidden: int | None = None
    expert_layers: int = 0
    """Of a stage."""
    experts: Experts | None = None


def _hypotheses(frame: Frame, seen: Mapping[int, Seen]) -> Iterator[_Hypothesis]:
    layout, m = frame.layout, frame.micro_batches
    if layout.expert > 1:
        yield from _mixtures(frame, next(iter(seen.values())))
        return
    if layout.tensor == 1:
        yield _Hypothesis(recompute=Recompute.NONE, hidden=frame.hidden)
        return
    own = next(own for own in seen.values() if _loss(own) is not None)
    is_first = layout.pipeline == 1
    group = next(group for group, line, _ in lines_of(own) if line.op == "Broadcast")
    counts: Counter[str] = Counter()
    for line, count in own[group].items():
        if count >= m and (line.dtype == frame.precision or (line.dtype == "INT8" and line.op == "AllGather")):
            counts[line.op] += count
    for recompute in (Recompute.NONE, Recompute.FULL):
        again = recompute is Recompute.FULL
        if layout.is_sequence_parallel:
            layers, rest = divmod(counts["AllGather"] // m - 2 - is_first, 8 if again else 6)
        else:
            layers, rest = divmod(counts["AllReduce"] // m - 1 - is_first, 6 if again else 4)
        if not rest and layers >= 1 and layers % layout.chunks == 0:
            yield _Hypothesis(recompute=recompute, layers=layers, hidden=frame.hidden)


def _mixtures(frame: Frame, own: Seen) -> Iterator[_Hypothesis]:
    m, tokens = frame.micro_batches, frame.tokens
    group = next(each for each, lines in own.items() if each.size == frame.layout.expert and _is_expert(lines, m))
    lines = own[group]
    exchanged = {line: count for line, count in lines.items() if line.op in ("Send", "AlltoAll")}
    for recompute, forwards in ((Recompute.NONE, 1), (Recompute.FULL, 2)):
        if exchanged:
            line, count = min(
                ((line, count) for line, count in lines.items() if line.op == "AllGather" and count >= m),
                key=lambda each: each[0].elements,
            )
            amount = line.elements // (8 if line.dtype == "INT8" else 1)
            layers, rest = divmod(count, m * forwards)
            sent = sum(
                line.elements * n * (group.size if line.op == "AlltoAll" else 1) for line, n in exchanged.items()
            )
            for top_k in range(1, amount + 1) if layers and not rest else ():
                # 2 h + 1 elements of each token and choice, in each pass: tokens there and back, probabilities once.
                each, rest = divmod(sent, top_k * tokens * (forwards + 1) * layers * m)
                if not rest and each % 64 == 1:
                    experts = _experts(amount, top_k, Dispatcher.ALLTOALL)
                    yield _Hypothesis(
                        recompute=recompute, hidden=each // 2, expert_layers=layers, experts=experts
                    )  # fmt: skip
            continue
        scatters = {line: count for line, count in lines.items() if line.op == "ReduceScatter" and count >= m}
        layers, rest = divmod(sum(scatters.values()), m * (forwards + 2))
        gathers = sum(count for line, count in lines.items() if line.op == "AllGather" and count >= m)
        rest = rest or gathers - layers * m * (3 * forwards + 1)
        routed = min((line.elements for line in scatters), default=1)
        if layers and not rest and routed % tokens == 0:
            experts = _experts(routed // tokens, 1, Dispatcher.ALLGATHER)
            yield _Hypothesis(recompute=recompute, hidden=frame.hidden, expert_layers=layers, experts=experts)


def _experts(amount: int, top_k: int, dispatcher: Dispatcher) -> Experts:
    return Experts(experts=amount, top_k=top_k, layer_frequency=1, expert_ffn=1, dispatcher=dispatcher)


def _witness(frame: Frame, hypothesis: _Hypothesis, sample: Mapping[int, Seen]) -> Job | None:
    """A job of this hypothesis that leaves no tensor operation of the sample unexplained."""
    widths = [hypothesis.hidden] if hypothesis.hidden else _widths(frame, sample)
    if hypothesis.layers is not None:
        many = [(hypothesis.layers, 1)]
    elif hypothesis.expert_layers:
        many = [(hypothesis.expert_layers * every, every) for every in (1, 2, 3, 4)]
    else:
        many = [(frame.layout.chunks * each, 1) for each in range(1, _MOST_LAYERS + 1)]
    orders = list(Order) if frame.layout.pipeline > 1 and frame.layout.data > 1 else [Order.DATA_FIRST]
    solvers = [SizeSolver(frame, hypothesis.recompute, sample, order) for order in orders]
    for hidden in widths:
        for (layers, every), kv in product(many, _KV):
            if hidden % (32 * kv) or frame.layout.tensor > hidden // 32 // kv:
                continue
            experts = None if hypothesis.experts is None else replace(hypothesis.experts, layer_frequency=every)
            for norm, (bias, tied, is_plain, is_learned) in product(Norm, _SWITCHES):
                shape = Shape(
                    layers=layers * frame.layout.pipeline, hidden=hidden, ffn=4 * hidden, heads=hidden // 32,
                    kv_heads=hidden // 32 // kv, head_size=32, sequence=frame.sequence or frame.tokens,
                    positions_learned=1 if is_learned else 0, vocabulary=frame.layout.tensor,
                    is_gated=not is_plain, norm=norm, has_bias=bias, has_qkv_bias=bias, is_tied=tied,
                    has_attention_sink=False, experts=experts,
                )  # fmt: skip
                for solver in solvers:
                    for job in solver.solve(shape):
                        return job
    return None


def _widths(frame: Frame, sample: Mapping[int, Seen]) -> Iterator[int]:
    """Hidden sizes to try where no activation shows one: those that divide the gradients, but for their padding."""
    own = next(iter(sample.values()))
    most = max(
        line.elements * (group.size if line.op == "ReduceScatter" else 1)
        for group, line, _ in lines_of(own)
        if line.op in ("AllReduce", "ReduceScatter")
    )
    slack = 128 * frame.layout.data if frame.has_distributed_optimizer else 0
    yield from (width for width in range(_LEAST_HIDDEN, isqrt(most) + 1, 64) if most % width <= slack)


def _facts(frame: Frame, hypothesis: _Hypothesis, job: Job) -> dict[str, Fact]:
    """What the hypothesis says; nothing that is open."""
    layout = frame.layout
    facts: dict[str, Fact] = {
        "tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data, "expert": layout.expert,
        "chunks": layout.chunks, "sequence_parallel": layout.is_sequence_parallel,
        "micro_batches": frame.micro_batches, "tokens": frame.tokens,
        "gradients_fp32": frame.gradient_type == "FP32", "distributed_optimizer": frame.has_distributed_optimizer,
        "attention_mask": frame.has_mask,
    }  # fmt: skip
    if frame.precision is not None:
        facts["precision"] = str(frame.precision)
    if hypothesis.hidden is not None:
        facts["hidden"] = hypothesis.hidden
    if hypothesis.layers is not None:
        facts["layers"] = hypothesis.layers * layout.pipeline
    if layout.tensor > 1 or layout.expert > 1:
        facts["recompute"] = "full" if hypothesis.recompute is Recompute.FULL else "none"
    if layout.pipeline > 1:
        facts["tied"] = job.shape.is_tied
    if frame.sequence is not None:
        facts["sequence"] = frame.sequence
    if hypothesis.experts is not None:
        facts["experts"] = hypothesis.experts.experts
        facts["dispatcher"] = str(hypothesis.experts.dispatcher)
        if hypothesis.experts.dispatcher is Dispatcher.ALLTOALL:
            facts["experts_top_k"] = hypothesis.experts.top_k
    return facts


_ALL: Final = (
    *("layers", "hidden", "sequence", "micro_batch", "global_batch", "precision", "recompute", "tied", "heads"),
    *("kv_heads", "ffn", "vocabulary", "positions_learned", "gated", "norm", "bias"),
)
"""Fields that may stay open."""


def _open(known: Mapping[str, Fact]) -> tuple[str, ...]:
    return tuple(name for name in _ALL if name not in known)
