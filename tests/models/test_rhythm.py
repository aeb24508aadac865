"""Blocks of a step: two for each micro-batch, on every stage, of simulated jobs."""

from __future__ import annotations

import numpy as np
import pytest
from emission_samples import small
from service.job.plan_samples import pattern_of

from ncclscope_models.rhythm import Beat, Part, blocks_of, rhythm

SHAPES = {
    "one stage": small(tp=2, dp=2, sequence_parallel=False),
    "sequence parallel": small("rms,learned=0", tp=2, pp=2),
    "three stages": small("mask", tp=2, pp=3, sequence_parallel=False, microbatches=5),
    "computed again": small("full_recompute", tp=2, pp=2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_stage_has_as_many_blocks_as_the_description_says(name: str) -> None:
    job = SHAPES[name].described().job
    found = pattern_of(SHAPES[name]).rhythm
    assert [each.stage for each in found] == list(range(job.layout.pipeline))
    for each in found:
        assert each.expected == 2 * job.micro_batches
        assert set(each.blocks) == {each.expected}
        assert each.beat == Beat.COUNTED


def test_kernels_give_the_lengths_of_blocks() -> None:
    found = pattern_of(small(tp=2, dp=2, capture="full", iterations=8), exports=True).rhythm
    assert [each.beat for each in found] == [Beat.PERIODIC]
    assert all(each.spread is not None and each.spread < 0.1 for each in found)


def test_another_number_of_micro_batches_is_another_number_of_blocks() -> None:
    found = pattern_of(SHAPES["one stage"], "micro_batch=2").rhythm
    assert [each.beat for each in found] == [Beat.OTHER_BLOCKS]


NONE = {
    "no tensor parallel": small(pp=2),
    "experts": small("experts=4", dp=2, ep=2),
    "chunks": small(tp=2, pp=2, interleave=2, layers=4, microbatches=4),
}


@pytest.mark.parametrize("name", NONE)
def test_where_blocks_cannot_be_told_no_rhythm_is_expected(name: str) -> None:
    assert pattern_of(NONE[name]).rhythm == ()


def test_a_block_ends_where_something_else_comes() -> None:
    within, between, other = Part.WITHIN, Part.BETWEEN, Part.OTHER
    parts = np.asarray([between, within, other, within, between, between, within, other])
    assert blocks_of(parts).tolist() == [-1, 0, -1, 0, -1, -1, 1, -1]


def test_blocks_that_change_their_length_are_uneven() -> None:
    job = small(tp=2, dp=2).described().job
    even = [np.full(8, 1e6 + 1e3 * number) for number in range(4)]
    assert rhythm(job, even).beat is Beat.PERIODIC
    assert rhythm(job, [each * (1 + number) for number, each in enumerate(even)]).beat is Beat.UNEVEN
    assert rhythm(job, [each[:7] for each in even]).beat is Beat.OTHER_BLOCKS
