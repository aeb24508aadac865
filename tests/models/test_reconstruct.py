"""Descriptions from one iteration of traffic: unique and right, ambiguous, or none; never wrong and unique."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from benchmarks.models import thesis
from benchmarks.models.shapes import ShapeOfJob, observed, reconstructed, truth
from emission_samples import small

from ncclscope_models.difference import Line, Seen, SeenGroup
from ncclscope_models.emission.megatron import Step
from ncclscope_models.emission.step import expected_operations
from ncclscope_models.job import Job
from ncclscope_models.rank_groups import Order, groups_of, stage_of
from ncclscope_models.reconstruct import Answer, Reconstruction, reconstruct

SHAPES = {
    "tensor and pipeline": small("micro_batch=2", tp=2, pp=2),
    "sequence parallel, rotary, untied": small("rms,gated,bias=0,learned=0,tied=0,mask", tp=2, zero1=True, dp=2),
    "chunks, bytes in the log": small(pp=2, interleave=2, layers=4, nccl="2.18.3"),
    "experts": small("experts=4,top_k=1,every=2", dp=2, ep=2, layers=4),
    "experts, gathered": small("experts=4", dp=2, ep=2, pp=2, ep_dispatch="allgather"),
}


def _is_right(found: Reconstruction, shape: ShapeOfJob) -> bool:
    known = truth(shape)
    return any(all(known[name] == value for name, value in each.items()) for each in found.known)


@pytest.mark.parametrize("name", SHAPES)
def test_a_simulated_job_is_reconstructed_but_for_what_is_not_visible(name: str) -> None:
    found = reconstructed(observed(SHAPES[name].config))
    assert found.answer is Answer.UNIQUE
    assert _is_right(found, SHAPES[name])
    assert "heads" in found.open


def test_layers_and_recomputation_that_send_the_same_are_ambiguous() -> None:
    shape = small("full_recompute", tp=2, sequence_parallel=False)
    found = reconstructed(observed(shape.config))
    assert found.answer is Answer.AMBIGUOUS
    assert found.differing == ("layers", "recompute")
    assert _is_right(found, shape)


def traffic(job: Job) -> dict[int, Seen]:
    """One iteration of every rank, as the rules have it."""
    found: dict[int, Seen] = {}
    for rank in range(job.layout.ranks):
        groups = groups_of(job.layout, job.framework, rank, Order.DATA_FIRST)
        own: dict[SeenGroup, dict[Line, int]] = {}
        for each in expected_operations(job, stage_of(job.layout, rank, Order.DATA_FIRST), Step()):
            ranks = groups[each.group]
            group = SeenGroup(f"{each.group} {ranks}", len(ranks), frozenset(ranks))
            split = len(ranks) if each.op == "AlltoAll" else 1
            dtype = "UINT8" if each.dtype == "BOOL" else each.dtype
            lines = own.setdefault(group, {})
            line = Line(each.op, dtype, (each.elements or 16) // split)
            lines[line] = lines.get(line, 0) + each.lines
        found[rank] = own
    return found


@pytest.mark.parametrize("run", thesis.RUNS, ids=lambda run: run.name)
def test_the_thesis_runs_from_their_counts_alone(run: thesis.Run) -> None:
    found = reconstruct(traffic(run.job))
    assert found.answer is not Answer.NONE
    layout, training = run.job.layout, run.job.training
    right: Mapping[str, object] = {
        "tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data, "expert": layout.expert,
        "chunks": layout.chunks, "sequence_parallel": layout.is_sequence_parallel,
        "micro_batches": run.job.micro_batches, "sequence": run.job.shape.sequence,
        "distributed_optimizer": training.has_distributed_optimizer, "hidden": run.job.shape.hidden,
        "layers": run.job.shape.layers,
    }  # fmt: skip
    assert any(all(each[name] == right[name] for name in right if name in each) for each in found.known)


def test_traffic_of_another_kind_is_no_job() -> None:
    group = SeenGroup("a", 2, frozenset({0, 1}))
    lines = {group: {Line("AllReduce", "FP32", 1000): 7}}
    assert reconstruct({0: lines, 1: lines}).answer is Answer.NONE
