"""The expected traffic matrix beside the observed one, of simulated jobs that call what Megatron-LM calls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emission_samples import small
from service.job.plan_samples import pattern_of

from ncclscope_models.expected_calls import expected_calls
from ncclscope_models.job import Layout
from ncclscope_models.rank_groups import Order

SHAPES = {
    "tensor and pipeline, sequence parallel": small("micro_batch=2", tp=2, pp=2),
    "data, distributed optimizer": small("rms,gated,bias=0,tied=0", dp=4, zero1=True),
    "a pipeline of chunks": small(pp=2, interleave=2, layers=4, nccl="2.18.3"),
    "three stages": small("mask", pp=3, microbatches=5),
    "all three": small(tp=2, pp=2, dp=2),
    "experts, gathered": small("experts=4", dp=2, ep=2, ep_dispatch="allgather"),
    "experts, AlltoAll": small("experts=4", dp=4, ep=2, zero1=True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_each_pair_gets_what_the_description_says(name: str) -> None:
    traffic = pattern_of(SHAPES[name]).traffic
    assert traffic.by == "rank"
    assert traffic.observed is not None
    assert len(traffic.iterations) >= 3
    expected, observed = np.asarray(traffic.expected), np.asarray(traffic.observed)
    assert expected.sum() > 0
    assert (expected.diagonal() == 0).all()
    np.testing.assert_allclose(observed, expected, rtol=0.001, atol=2_000)
    assert traffic.differing == ()
    assert traffic.differing_known == 0


def test_a_wrong_description_shows_between_whom() -> None:
    traffic = pattern_of(SHAPES["all three"], "layers=8").traffic
    assert traffic.differing_known >= 8
    job = SHAPES["all three"].described().job
    tensor = {tuple(sorted(each.ranks)) for rank in range(8) for each in expected_calls(job, rank, Order.DATA_FIRST)
              if len(each.ranks) == 2 and each.ranks[1] == each.ranks[0] + 1}  # fmt: skip
    pairs = {tuple(sorted((int(cell.sender), int(cell.receiver)))) for cell in traffic.differing}
    assert tensor <= pairs
    assert all(cell.expected > 1.05 * cell.observed for cell in traffic.differing)


def test_what_a_router_spreads_is_no_difference() -> None:
    option = "experts=4,uneven,vocabulary=512,ffn=256"
    traffic = pattern_of(small(option, dp=4, ep=4, layers=1, microbatches=1, nccl="2.27.5", iterations=8)).traffic
    assert traffic.observed is not None
    expected, observed = np.asarray(traffic.expected), np.asarray(traffic.observed)
    assert (np.abs(observed - expected) > 0.01 * expected.sum(axis=1)[:, None]).any()
    assert traffic.differing == ()


def test_four_stages_on_four_nodes_talk_to_their_neighbours_only() -> None:
    """Li et al., figure 4: p 4, t 2, d 4 on nodes of eight; one stage a node."""
    job = replace(SHAPES["all three"].described().job, layout=Layout(tensor=2, pipeline=4, data=4))
    pairs: dict[str, set[tuple[int, int]]] = {}
    for rank in range(job.layout.ranks):
        for each in expected_calls(job, rank, Order.DATA_FIRST):
            if each.op == "Send":
                assert each.peer is not None
                pairs.setdefault("pipeline", set()).add((rank, each.peer))
            elif len(each.ranks) == 2 and each.message_bytes > 1024:
                name = "tensor" if each.ranks[1] - each.ranks[0] == 1 else "embedding"
                pairs.setdefault(name, set()).add((each.ranks[0], each.ranks[1]))
            elif len(each.ranks) == 4 and each.message_bytes > 1024:
                assert {one // 8 for one in each.ranks} == {rank // 8}
    assert all(abs(a - b) == 8 for a, b in pairs["pipeline"])
    assert all(a // 8 == b // 8 for a, b in pairs["tensor"])
    assert pairs["embedding"] == {(rank, rank + 24) for rank in range(8)}


def test_interleaved_stages_send_in_a_ring() -> None:
    job = small(pp=4, interleave=2, layers=4, microbatches=4).described().job
    sends = {(rank, each.peer): each.lines for rank in range(4) for each in expected_calls(job, rank, Order.DATA_FIRST)
             if each.op == "Send"}  # fmt: skip
    assert sends[0, 3] == sends[3, 0] == job.micro_batches
    assert sends[1, 2] == sends[2, 1] == 2 * job.micro_batches
