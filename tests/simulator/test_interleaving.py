"""The interleaved schedule: every chunk's work is done, and each Send meets its Recv."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from simulator.jobs import Simulate, truth

from ncclscope_simulator import SimulationConfig
from ncclscope_simulator.pipeline import Exchange, Interleaving, Work

_SHAPES = [(2, 2, 4), (4, 2, 8), (4, 2, 4), (3, 3, 6), (4, 4, 16)]


def _steps(stages: int, chunks: int, microbatches: int) -> list[list[Work | Exchange]]:
    return [list(Interleaving(stage, stages, chunks, microbatches).steps()) for stage in range(stages)]


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), _SHAPES)
def test_every_stage_does_every_microbatch_through_every_chunk_both_ways(
    stages: int, chunks: int, microbatches: int
) -> None:
    for steps in _steps(stages, chunks, microbatches):
        done = Counter((step.chunk, step.backward) for step in steps if isinstance(step, Work))
        assert done == {(chunk, way): microbatches for chunk in range(chunks) for way in (False, True)}
        assert sum(step.is_last for step in steps if isinstance(step, Work)) == chunks


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), _SHAPES)
def test_every_input_has_come_before_it_is_worked_on(stages: int, chunks: int, microbatches: int) -> None:
    """Played as a network of queues: forward to the next stage, backward to the one before."""
    forward: list[deque[int]] = [deque() for _ in range(stages)]
    backward: list[deque[int]] = [deque() for _ in range(stages)]
    plans = [deque(steps) for steps in _steps(stages, chunks, microbatches)]
    received = [Counter[str]() for _ in range(stages)]
    sent: set[int] = set()
    while any(plans):
        moved = False
        for stage, plan in enumerate(plans):
            while plan:
                step = plan[0]
                if isinstance(step, Exchange):
                    if stage not in sent:
                        sent.add(stage)
                        moved = True
                        if step.send_next:
                            forward[(stage + 1) % stages].append(1)
                        if step.send_previous:
                            backward[(stage - 1) % stages].append(1)
                    waits = (step.receive_previous and not forward[stage]) or (
                        step.receive_next and not backward[stage]
                    )
                    if waits:
                        break
                    sent.discard(stage)
                    if step.receive_previous:
                        received[stage]["forward"] += forward[stage].popleft()
                    if step.receive_next:
                        received[stage]["backward"] += backward[stage].popleft()
                elif not step.backward and not (stage == 0 and step.chunk == 0):
                    assert received[stage]["forward"] > 0
                    received[stage]["forward"] -= 1
                elif step.backward and not (stage == stages - 1 and step.chunk == chunks - 1):
                    assert received[stage]["backward"] > 0
                    received[stage]["backward"] -= 1
                plan.popleft()
                moved = True
        assert moved, "the stages wait for each other"
    assert not any(forward)
    assert not any(backward)
    assert all(sum(own.values()) == 0 for own in received)


def test_an_interleaved_job_comes_to_its_end_with_four_operations_in_a_batch(simulate: Simulate) -> None:
    job = simulate(nodes=1, gpus=4, tp=1, pp=4, dp=1, interleave=2, layers=2, microbatches=8)
    rows = [row for row in truth(job) if row["op"] in {"Send", "Recv"}]
    assert all(row["end_true_ns"] is not None for row in rows)
    assert max(Counter(row["launch_id"] for row in rows).values()) == 4


def test_interleaving_needs_chunks_that_fit() -> None:
    with pytest.raises(ValueError, match="must divide layers"):
        SimulationConfig(interleave=3)
    with pytest.raises(ValueError, match="multiple of pp"):
        SimulationConfig(interleave=2, microbatches=3)
