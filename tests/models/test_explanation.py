"""Expected against observed: rules and a simulated Megatron-LM that was read from its source apart from them."""

from __future__ import annotations

import pytest
from emission_samples import logged, small

from ncclscope_models.description import completed
from ncclscope_models.difference import Line, Reason, SeenGroup, compare
from ncclscope_models.explanation import explain
from ncclscope_models.rank_groups import Order, groups_of, stage_of
from ncclscope_service.job.plan import make_plan, verdict

SHAPES = {
    "tensor and pipeline, sequence parallel": small("micro_batch=2", tp=2, pp=2),
    "tensor, FP16 that overflows, mask": small("fp16,mask,skipped,tensorboard", tp=2, sequence_parallel=False),
    "data, distributed optimizer, one rank of everything else": small("rms,gated,bias=0,tied=0", dp=4, zero1=True),
    "chunks of a pipeline, NCCL that logs bytes": small(pp=2, interleave=2, layers=4, nccl="2.18.3"),
    "experts, all-to-all as Sends": small("experts=4,every=2", dp=2, ep=2, nccl="2.27.5", layers=4),
    "experts, AlltoAll": small("experts=4", dp=4, ep=2, zero1=True),
    "experts, gathered": small("experts=4,full_recompute", dp=2, ep=2, ep_dispatch="allgather"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_two_readings_of_the_source_agree_to_the_operation(name: str) -> None:
    described, lines = logged(SHAPES[name])
    explanation = explain(described.job, lines.seen, lines.gaps)
    assert len(explanation.iterations()) >= 3
    assert len(explanation.differences) == described.job.layout.ranks * len(explanation.iterations())
    wrong = [row for each in explanation.differences.values() for row in each.rows if row.difference]
    assert not wrong
    assert explanation.unexplained == 0
    assert all(each.step.is_skipped is ("skipped" in SHAPES[name].name) for each in explanation.differences.values())


def test_lost_lines_are_no_difference_and_an_operation_too_many_is() -> None:
    described, lines = logged(small(tp=2, dp=2, lost=0.01, iterations=12))
    explanation = explain(described.job, lines.seen, lines.gaps)
    assert explanation.lossy
    assert explanation.unexplained == 0
    assert any(row.reason is Reason.LOST for each in explanation.differences.values() for row in each.rows)
    more = Line("AllReduce", "BF16", 12_345)
    group = next(group for group in lines.seen[0, 3] if group.size == 2)
    lines.seen[0, 3][group][more] = 2
    again = explain(described.job, lines.seen, lines.gaps)
    assert again.unexplained == 2
    assert again.unexplained_bytes == 2 * 12_345 * 2


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("micro_batch=4", "micro_batch 4, the traffic says 2"),
        ("layers=8", "layers 8, the traffic says 4"),
        ("vocabulary=50688", "vocabulary 50688, the traffic says 32768"),
        ("tied=false", "tied false, the traffic says true"),
        ("sequence_parallel=false", "sequence_parallel false, the traffic says true"),
        ("tensor=1", "tensor 1, the traffic says 2"),
        ("precision=FP16", "precision FP16, the traffic says BF16"),
        ("ffn=1536", "ffn 1536, the traffic says 1024"),
    ],
)
def test_the_field_that_is_wrong_is_named(field: str, says: str) -> None:
    shape = small("micro_batch=2", tp=2, pp=2)
    _, lines = logged(shape)
    described = completed(shape.description([field]))
    sentence = verdict(make_plan("job", described, lines))
    assert f"the description says {says} (0 unexplained" in sentence


def test_an_iteration_of_one_rank_alone_is_compared_by_sizes() -> None:
    """Of the others no log is there: groups of two cannot be told apart, and everything is explained yet."""
    described, lines = logged(small(tp=2, pp=2))
    alone = {
        SeenGroup(group.name, group.size, frozenset({1})): own for group, own in lines.seen[1, 2].items()
    }  # fmt: skip
    assert compare(described.job, 1, Order.DATA_FIRST, alone).unexplained == 0


def test_groups_are_laid_out_as_megatron_does() -> None:
    layout = small(tp=2, pp=2, dp=2).described().job.layout
    framework = small(tp=2, pp=2, dp=2).described().job.framework
    own = groups_of(layout, framework, 5, Order.DATA_FIRST)
    assert {group.value: ranks for group, ranks in own.items() if len(ranks) > 1} == {
        "tp": (4, 5), "dp": (5, 7), "pp": (1, 5), "mp": (0, 1, 4, 5), "embedding": (1, 5), "world": tuple(range(8)),
        "optimizer": tuple(range(8)), "expert dp": (4, 5, 6, 7), "expert mp": (1, 5),
    }  # fmt: skip
    assert stage_of(layout, 5, Order.DATA_FIRST) == 1
    assert stage_of(layout, 5, Order.PIPELINE_FIRST) == 0
    assert groups_of(layout, framework, 5, Order.PIPELINE_FIRST)[next(iter(own))] == (4, 5)


def test_a_router_with_favourites_is_routing_and_not_a_difference() -> None:
    described, lines = logged(small("experts=4,uneven", dp=4, ep=4, layers=2, nccl="2.27.5", iterations=8))
    explanation = explain(described.job, lines.seen, lines.gaps)
    assert len(explanation.iterations()) >= 3
    assert explanation.unexplained == 0
    routed = {
        row.logged_bytes for each in explanation.differences.values() for row in each.rows
        if row.op == "Send" and row.reason is Reason.ROUTING
    }  # fmt: skip
    assert len(routed) > 3, "each rank sends back as many as it was given"
    assert len(explanation.classes()) == 1


def test_an_even_spread_of_more_tokens_than_described_is_a_difference() -> None:
    shape = small("experts=4", dp=2, ep=2, layers=2, nccl="2.27.5")
    _, lines = logged(shape)
    described = completed(shape.description(["experts_top_k=1"]))
    plan = make_plan("job", described, lines)
    assert plan.explanation.unexplained > 0
    assert "experts_top_k 1, the traffic says 2" in verdict(plan)
