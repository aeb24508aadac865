"""When each pass of a pipeline runs: 1F1B and its interleaved form, event by event, and what a stage waits.

A stage runs its passes in the order of Megatron-LM, each as soon as the stage is free and what the pass needs has come.
What a pass gives to another stage keeps its own stage busy, unless the pipeline overlaps it. Integers in nanoseconds.
Nothing else is overlapped with a pass but what its duration already says.
Source: Narayanan et al. 2021; Megatron-LM core_r0.13.0 `megatron/core/pipeline_parallel/schedules.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class StagePasses:
    """Durations of one micro-batch on one model chunk of a stage, ns."""

    forward_ns: int
    backward_ns: int
    """Recompute included."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a micro-batch over a model chunk."""

    is_forward: bool
    micro_batch: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a pipeline came through a step, ns from its begin, by stage."""

    first_start_ns: tuple[int, ...]
    last_end_ns: tuple[int, ...]
    busy_ns: tuple[int, ...]

    @property
    def duration_ns(self) -> int:
        """From the first pass of any stage to the last."""
        return max(self.last_end_ns)

    @property
    def bubble_ns(self) -> tuple[int, ...]:
        """What each stage waits within the step."""
        return tuple(self.duration_ns - busy for busy in self.busy_ns)


def passes(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[Pass]:
    """The passes of a stage in its order. Interleaved chunks need a multiple of `stages` micro-batches.

    Raises:
        ValueError: Interleaved, and the micro-batches are no multiple of the stages.
    """
    if chunks > 1 and micro_batches % stages:
        raise ValueError(f"{micro_batches} micro-batches are not a multiple of {stages} interleaved stages")
    total = micro_batches * chunks
    forward = [_place(number, stages, chunks) for number in range(total)]
    warm_up = stages - 1 - stage if chunks == 1 else 2 * (stages - 1 - stage) + (chunks - 1) * stages
    warm_up = min(warm_up, total)
    found = [Pass(is_forward=True, micro_batch=each[0], chunk=each[1]) for each in forward[:warm_up]]
    backward = [Pass(is_forward=False, micro_batch=each[0], chunk=chunks - 1 - each[1]) for each in forward]
    for number in range(warm_up, total):
        found.append(Pass(is_forward=True, micro_batch=forward[number][0], chunk=forward[number][1]))
        found.append(backward[number - warm_up])
    return [*found, *backward[total - warm_up :]]


def _place(number: int, stages: int, chunks: int) -> tuple[int, int]:
    """Micro-batch and chunk of the pass of this number: `stages` micro-batches go through a chunk, then the next."""
    if chunks == 1:
        return number, 0
    round_, within = divmod(number, stages * chunks)
    chunk, place = divmod(within, stages)
    return round_ * stages + place, chunk


def schedule(
    durations: Sequence[StagePasses],
    micro_batches: int,
    *,
    chunks: int = 1,
    boundary_ns: int = 0,
    is_overlapped: bool = False,
) -> Schedule:
    """Runs a step; `durations` by stage, `boundary_ns` from the end of a pass to when the next stage can begin.

    Without `is_overlapped` the stage that sends can go on only then.

    Raises:
        ValueError: See `passes`.
    """
    stages = len(durations)
    orders = [passes(stage, stages, micro_batches, chunks) for stage in range(stages)]
    places = stages * chunks
    forward_end = [[-1] * micro_batches for _ in range(places)]
    backward_end = [[-1] * micro_batches for _ in range(places)]
    at, free_ns = [0] * stages, [0] * stages
    first, last = [-1] * stages, [0] * stages
    remaining = sum(map(len, orders))
    while remaining:
        for stage in range(stages):
            order = orders[stage]
            while at[stage] < len(order):
                step = order[at[stage]]
                place = step.chunk * stages + stage
                if step.is_forward:
                    ready = 0 if place == 0 else forward_end[place - 1][step.micro_batch]
                elif place == places - 1:
                    ready = forward_end[place][step.micro_batch]
                else:
                    ready = backward_end[place + 1][step.micro_batch]
                if ready < 0:
                    break
                crosses = place > 0 if step.is_forward else place < places - 1
                gives = place < places - 1 if step.is_forward else place > 0
                begin = max(free_ns[stage], ready + (boundary_ns if crosses else 0))
                lasts = durations[stage].forward_ns if step.is_forward else durations[stage].backward_ns
                ends = forward_end if step.is_forward else backward_end
                ends[place][step.micro_batch] = last[stage] = begin + lasts
                free_ns[stage] = begin + lasts + (boundary_ns if gives and not is_overlapped else 0)
                first[stage] = begin if first[stage] < 0 else first[stage]
                at[stage] += 1
                remaining -= 1
    busy = [micro_batches * chunks * (each.forward_ns + each.backward_ns) for each in durations]
    return Schedule(tuple(first), tuple(last), tuple(busy))


def long_schedule(
    durations: Sequence[StagePasses],
    micro_batches: int,
    *,
    chunks: int = 1,
    boundary_ns: int = 0,
    is_overlapped: bool = False,
) -> Schedule:
    """As `schedule`, in a time that does not grow with the micro-batches: a pipeline settles into a rhythm.

    Of more than five rounds of as many micro-batches as stages, what the fifth adds is taken for each that follows.
    """
    stages = len(durations)
    more, rest = divmod(micro_batches, stages)
    if more <= _SETTLED + 1:
        return schedule(durations, micro_batches, chunks=chunks, boundary_ns=boundary_ns, is_overlapped=is_overlapped)
    before, after = (
        schedule(
            durations,
            rounds * stages + rest,
            chunks=chunks,
            boundary_ns=boundary_ns,
            is_overlapped=is_overlapped,
        )
        for rounds in (_SETTLED, _SETTLED + 1)
    )
    left = more - _SETTLED - 1
    ends = [end + left * (end - start) for start, end in zip(before.last_end_ns, after.last_end_ns, strict=True)]
    busy = tuple(micro_batches * chunks * (each.forward_ns + each.backward_ns) for each in durations)
    # A stage that is slower by little rules the rhythm late only: nothing ends before its own passes are done.
    arrives = back = 0
    for stage, each in enumerate(durations):
        ends[stage] = max(ends[stage], arrives + busy[stage])
        ends[0] = max(ends[0], arrives + busy[stage] + back)
        arrives += each.forward_ns + boundary_ns
        back += each.backward_ns + boundary_ns
    return Schedule(after.first_start_ns, tuple(ends), busy)


_SETTLED: Final = 4
