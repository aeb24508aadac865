"""The one field of a description whose change makes observed and expected agree.

Every field is tried with the values that it could have: multiples and divisors, switches, and numbers for which a
buffer of gradients has the elements that were observed (its size is linear in them). What follows from a changed field
(padded vocabulary, data parallel of the same ranks) follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ncclscope_models.description import FIELDS, Completed, Description, Given, Value, completed
from ncclscope_models.difference import Seen, compare
from ncclscope_models.emission.megatron import Step
from ncclscope_models.emission.operations import Group
from ncclscope_models.emission.step import expected_operations
from ncclscope_models.job import ELEMENT_BYTES, Dispatcher, Job, ModelError, Norm, Precision, Recompute
from ncclscope_models.rank_groups import Order

_FACTORS: Final = (2, 3, 4, 5, 6, 8, 10, 12, 16)
_STEPS: Final = (1, 2, 3, 4)
_DEGREES: Final = ("tensor", "pipeline", "context", "expert")
_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "norm": tuple(Norm),
    "precision": tuple(Precision),
    "recompute": tuple(Recompute),
    "dispatcher": tuple(Dispatcher),
}
_MULTIPLES: Final = (
    *("layers", "hidden", "sequence", "micro_batch", "global_batch", "chunks", "experts", "experts_top_k"),
    *("expert_layer_frequency", "expert_ffn", "kv_heads", "ffn", *_DEGREES),
)
_BY_GRADIENTS: Final = ("vocabulary", "ffn", "kv_heads", "positions_learned", "expert_ffn")
"""Fields in which the elements of gradients are linear, and the smallest step of each is tried."""
_LARGEST: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of a description."""

    field: str
    before: Value
    after: Value
    control: int
    """Control operations that differ."""


def minimal_edits(described: Completed, order: Order, sample: Mapping[int, Seen]) -> list[Edit]:
    """Changes of one field after which no operation of these ranks' iterations is unexplained, the best first.

    Several are equally good where the traffic does not tell them apart: among those with the fewest differing control
    operations all are given. Empty if no single field explains it.
    """
    found: dict[tuple[str, Value], Edit | None] = {}
    for name, value in _candidates(described, sample):
        if (name, value) in found:
            continue
        job = edited(described, name, value)
        if job is None or job == described.job:
            continue
        control = _control_left(job, order, sample)
        found[name, value] = None if control is None else Edit(name, described.fields[name].value, value, control)
    whole = [edit for edit in found.values() if edit is not None]
    least = min((edit.control for edit in whole), default=0)
    return sorted((edit for edit in whole if edit.control == least), key=_distance)


def edited(described: Completed, name: str, value: Value) -> Job | None:
    """The job with one field changed and what follows from it; None if it cannot be."""
    changed = {
        key: given
        for key, given in described.fields.items()
        if not given.source.startswith("derived") and not given.is_assumed
    }
    changed[name] = Given(value, "edit")
    if name in _DEGREES:
        changed.pop("data", None)
        changed["ranks"] = Given(described.job.layout.ranks, "as observed")
        if name == "tensor":
            changed.pop("expert_tensor", None)
    try:
        return completed(Description(changed)).job
    except ModelError:
        return None


def _control_left(job: Job, order: Order, sample: Mapping[int, Seen]) -> int | None:
    """Control operations that differ where a job explains all of the sample's tensor operations; None: it does not."""
    orders = [order] if job.layout.pipeline == 1 or job.layout.data == 1 else [order, *set(Order) - {order}]
    for each in orders:
        control = 0
        for rank, seen in sample.items():
            try:
                difference = compare(job, rank, each, seen)
            except ModelError:
                return None
            if difference.unexplained:
                break
            control += difference.control_difference
        else:
            return control
    return None


def _candidates(described: Completed, sample: Mapping[int, Seen]) -> Iterator[tuple[str, Value]]:
    fields = {name: given.value for name, given in described.fields.items()}
    for name, value in fields.items():
        if name in ("tokens", "vocabulary_divisible_by", "version", "framework", "ranks", "accumulation"):
            continue
        if FIELDS[name][0] is bool:
            yield name, not value
        elif name in _WORDS:
            yield from ((name, str(word)) for word in _WORDS[name])
        elif name == "positions_learned":
            yield name, 0
            yield name, fields["sequence"]
        elif name in _MULTIPLES and isinstance(value, int):
            yield from ((name, value * factor) for factor in _FACTORS)
            yield from ((name, value // factor) for factor in _FACTORS if value % factor == 0)
            yield from ((name, value + step) for step in _STEPS)
            yield from ((name, value - step) for step in _STEPS if value > step)
    yield from _measured(described, sample)
    for name in _BY_GRADIENTS:
        if isinstance(fields.get(name), int):
            yield from ((name, value) for value in _by_gradients(described, name, sample))


def _measured(described: Completed, sample: Mapping[int, Seen]) -> Iterator[tuple[str, Value]]:
    """Values that sizes of single lines say: tokens of a micro-batch, width of activations."""
    training, shape = described.job.training, described.job.shape
    for seen in sample.values():
        lines = {line: count for counts in seen.values() for line, count in counts.items()}
        tokens = {line.elements for line in lines if line.op == "AllReduce" and line.dtype == "FP32"}
        tokens |= {line.elements // 8 for line in lines if (line.op, line.dtype) == ("Broadcast", "INT8")}
        tokens |= {line.elements for line in lines if (line.op, line.dtype) == ("Broadcast", "INT64")}
        for each in tokens:
            if each % shape.sequence == 0:
                yield "micro_batch", each // shape.sequence
            if each % training.micro_batch == 0:
                yield "sequence", each // training.micro_batch
        for line in lines:
            for times in (1, described.job.layout.tensor):
                whole, rest = divmod(line.elements * times, training.micro_batch * shape.sequence)
                if not rest and 0 < whole <= _LARGEST and line.op in ("AllReduce", "AllGather", "Send", "Recv"):
                    yield "hidden", whole


def _by_gradients(described: Completed, name: str, sample: Mapping[int, Seen]) -> Iterator[int]:
    """Values for which a rank's gradients have as many elements as one of its observed operations."""
    job = described.job
    value = int(described.fields[name].value)
    unit = job.layout.tensor if name != "positions_learned" else 1
    more = edited(described, name, value + unit)
    if more is None:
        return
    last = job.layout.pipeline - 1
    for stage in dict.fromkeys((0, last)):
        before, after = (_gradient_elements(each, stage) for each in (job, more))
        for at in range(min(len(before), len(after))):
            slope = (after[at] - before[at]) / unit
            for seen in sample.values() if slope else ():
                for elements in _observed_elements(seen, job):
                    found = value + (elements - before[at]) / slope
                    # Padding of buckets hides a few elements.
                    for each in {round(found / unit) * unit, int(found // unit) * unit}:
                        if 0 < each <= _LARGEST:
                            yield each


def _gradient_elements(job: Job, stage: int) -> list[int]:
    """Whole arrays that are reduced as gradients, one after the other."""
    groups = (Group.DATA, Group.EXPERT_DATA, Group.SHARD)
    return [
        (operation.elements or 0) * (operation.ranks if operation.op == "ReduceScatter" else 1)
        for operation in expected_operations(job, stage, Step())
        if operation.group in groups and operation.op in ("AllReduce", "ReduceScatter") and not operation.is_control
    ]


def _observed_elements(seen: Seen, job: Job) -> set[int]:
    types = {job.training.gradient_type, "FP32", job.training.precision.value} & set(ELEMENT_BYTES)
    return {
        line.elements * (group.size if line.op == "ReduceScatter" else 1)
        for group, lines in seen.items()
        for line, count in lines.items()
        if line.op in ("AllReduce", "ReduceScatter") and line.dtype in types and count <= job.layout.chunks * 8
    }


def _distance(edit: Edit) -> tuple[float, str]:
    """How large a change is: switches and small factors first."""
    if isinstance(edit.before, bool) or not isinstance(edit.before, int) or not isinstance(edit.after, int):
        return 0.0, edit.field
    low, high = sorted((max(edit.before, 1), max(edit.after, 1)))
    return high / low, edit.field
