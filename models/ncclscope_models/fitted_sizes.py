"""Sizes of the embedding and the MLP that give each pipeline stage's gradients the elements that were observed.

Of what a hypothesis leaves open they make one job that can be held against the traffic: an example, not an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from ncclscope_models.difference import Line, Seen, SeenGroup, compare
from ncclscope_models.emission.operations import Group
from ncclscope_models.job import Framework, Job, Layout, ModelError, Precision, Recompute, Shape, Training
from ncclscope_models.parameters import rank_tensors, stage_tensors
from ncclscope_models.rank_groups import Order, groups_of, stage_of

_MOST_ROWS: Final = 1 << 21
_SCALARS: Final = 2


def lines_of(seen: Seen) -> Iterator[tuple[SeenGroup, Line, int]]:
    """Every line of a rank's iteration, with its communicator and how often it came."""
    for group, lines in seen.items():
        for line, count in lines.items():
            yield group, line, count


@dataclass(frozen=True, slots=True)
class Frame:
    """What sizes and counts say at once."""

    layout: Layout
    micro_batches: int
    tokens: int
    precision: Precision | None
    """None: no activation is seen."""
    gradient_type: str
    has_distributed_optimizer: bool
    hidden: int | None
    sequence: int | None
    """Where the attention mask shows it."""
    has_mask: bool


class SizeSolver:
    """Sizes of the embedding and of the MLP that give each stage's gradients the elements that were observed."""

    def __init__(self, frame: Frame, recompute: Recompute, sample: Mapping[int, Seen], order: Order) -> None:
        self._frame, self._recompute, self._sample, self._order = frame, recompute, sample, order
        samples = _by_stage(frame.layout, sample, order)
        self._first = samples.get(0)
        self._last = samples.get(frame.layout.pipeline - 1)
        self._middle = next((seen for stage, seen in samples.items() if 0 < stage < frame.layout.pipeline - 1), None)

    def solve(self, shape: Shape) -> Iterator[Job]:
        """Jobs of this shape, with other sizes of embedding and MLP, that explain the sample."""
        if self._first is None or self._last is None:
            return
        layout = self._frame.layout
        fitted: Shape | None = shape
        if shape.experts is not None:
            fitted = self._fit(fitted, "expert_ffn", 0, self._first, is_expert=True)
        rows = self._embedding_rows(shape)
        if rows is not None and fitted is not None:
            fitted = replace(fitted, vocabulary=rows)
        if self._middle is not None:
            fitted = self._fit(fitted, "ffn", 1, self._middle)
        elif layout.chunks > 1:
            fitted = self._fit(fitted, "ffn", layout.pipeline - 1, self._last, of_first_chunk=True)
        elif rows is not None:
            fitted = self._fit(fitted, "ffn", layout.pipeline - 1, self._last)
        elif fitted is not None:
            fitted = self._with_ffn(fitted, layout.pipeline - 1, self._last)
        if rows is None:
            fitted = self._fit(fitted, "vocabulary", layout.pipeline - 1, self._last)
        if layout.pipeline > 1 and fitted is not None and fitted.positions_learned:
            fitted = self._fit(fitted, "positions_learned", 0, self._first)
        job = None if fitted is None else self._job(fitted)
        if job is not None and self._explains(job):
            yield job

    def _embedding_rows(self, shape: Shape) -> int | None:
        """Rows of a tied embedding, where its gradients are summed over two stages."""
        if self._frame.layout.pipeline == 1 or not shape.is_tied or self._first is None:
            return None
        rank = next(rank for rank, own in self._sample.items() if own is self._first)
        ends = frozenset(groups_of(self._frame.layout, Framework.MEGATRON, rank, self._order)[Group.EMBEDDING])
        for group, line, _ in lines_of(self._first):
            if group.size == 2 and line.op == "AllReduce" and group.ranks == ends:
                rows, rest = divmod(line.elements, shape.hidden)
                return None if rest else rows * self._frame.layout.tensor
        return None

    def _with_ffn(self, shape: Shape, stage: int, seen: Seen) -> Shape:
        """An MLP with which some vocabulary gives the gradients their size: of four hidden sizes, or near."""
        unit = self._frame.layout.tensor
        wanted = sum(self._buckets(seen, is_expert=False))
        sizes = [
            self._elements(each, stage, is_expert=False)
            for each in (shape, _with(shape, "vocabulary", 2 * unit), _with(shape, "ffn", shape.ffn + unit))
        ]
        if None in sizes:
            return shape
        plain, more_rows, wider = (size or 0 for size in sizes)
        row, width = more_rows - plain, wider - plain
        slack = 128 * self._frame.layout.data if self._frame.has_distributed_optimizer else 0
        steps = sorted(range(-shape.ffn // unit + 1, 2 * shape.ffn // unit), key=abs) if width else [0]
        for step in steps:
            left = wanted - plain - step * width
            if left >= 0 and left % row <= slack:
                return _with(shape, "ffn", shape.ffn + step * unit)
        return shape

    def _fit(
        self,
        shape: Shape | None,
        name: str,
        stage: int,
        seen: Seen,
        *,
        is_expert: bool = False,
        of_first_chunk: bool = False,
    ) -> Shape | None:
        """With the value of one size that gives the stage the elements that were reduced."""
        if shape is None:
            return None
        unit = 1 if name == "positions_learned" else self._frame.layout.tensor
        value = 1 if name == "expert_ffn" else int(getattr(shape, name))
        sizes = self._buckets(seen, is_expert=is_expert)
        wanted = min(sizes, default=0) if of_first_chunk else sum(sizes)
        chunk = 0 if of_first_chunk else None
        before, after = (
            self._elements(_with(shape, name, value + step), stage, chunk, is_expert=is_expert) for step in (0, unit)
        )
        if before is None or after is None:
            return None
        if after <= before:
            return shape  # whatever its size is, nothing of it is in this stage
        fitted = value + (wanted - before) // (after - before) * unit
        smallest = 0 if name == "positions_learned" else unit
        return _with(shape, name, fitted) if smallest <= fitted <= _MOST_ROWS else None

    def _elements(self, shape: Shape, stage: int, chunk: int | None = None, *, is_expert: bool) -> int | None:
        """Parameters of a rank, or of one of its chunks, without padding: what is reduced, or a little less."""
        job = self._job(shape)
        if job is None:
            return None
        tensors = stage_tensors(job, stage) if chunk is None else rank_tensors(job, stage, chunk)
        return sum(tensor.elements for tensor in tensors if tensor.is_expert is is_expert)

    def _buckets(self, seen: Seen, *, is_expert: bool) -> list[int]:
        """Whole arrays of gradients that a rank reduces."""
        layout, m = self._frame.layout, self._frame.micro_batches
        if is_expert and layout.expert_data == layout.data:
            return []
        return [
            line.elements * (group.size if line.op == "ReduceScatter" else 1)
            for group, line, count in lines_of(seen)
            if line.op in ("AllReduce", "ReduceScatter") and line.dtype == self._frame.gradient_type
            and count < m and line.elements > _SCALARS and self._is_data(group, is_expert=is_expert)
            for _ in range(count)
        ]  # fmt: skip

    def _is_data(self, group: SeenGroup, *, is_expert: bool) -> bool:
        kind = Group.EXPERT_DATA if is_expert else Group.DATA
        own = groups_of(self._frame.layout, Framework.MEGATRON, min(group.ranks), self._order)[kind]
        return group.ranks == frozenset(own)

    def _job(self, shape: Shape) -> Job | None:
        frame = self._frame
        precision = frame.precision or (Precision.BF16 if frame.gradient_type == "FP32" else Precision.FP16)
        samples = max(1, frame.tokens // shape.sequence)
        try:
            return Job(
                shape=shape, layout=frame.layout,
                training=Training(
                    micro_batch=samples, global_batch=samples * frame.micro_batches * frame.layout.data,
                    precision=precision, are_gradients_fp32=frame.gradient_type == "FP32", recompute=self._recompute,
                    has_distributed_optimizer=frame.has_distributed_optimizer, makes_attention_mask=frame.has_mask,
                ),
                framework=Framework.MEGATRON, version="",
            )  # fmt: skip
        except ModelError:
            return None

    def _explains(self, job: Job) -> bool:
        return all(not compare(job, rank, self._order, seen).unexplained for rank, seen in self._sample.items())


def _with(shape: Shape, name: str, value: int) -> Shape:
    if name == "expert_ffn":
        assert shape.experts is not None
        return replace(shape, experts=replace(shape.experts, expert_ffn=value))
    if name == "vocabulary":
        return replace(shape, vocabulary=value)
    return replace(shape, ffn=value) if name == "ffn" else replace(shape, positions_learned=value)


def _by_stage(layout: Layout, sample: Mapping[int, Seen], order: Order) -> dict[int, Seen]:
    """A rank's lines by pipeline stage."""
    found: dict[int, Seen] = {}
    for rank, seen in sample.items():
        found.setdefault(stage_of(layout, rank, order), seen)
    return found
