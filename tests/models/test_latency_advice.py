"""What would be faster than transfers that are bound by latency."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclscope_models.latency_advice import Alternative, alternatives
from ncclscope_models.transfer_estimate import GroupShape, MeasuredTransfers, TransferTimes

ALPHA, BANDWIDTH = 50e-6, 10e9


def times(shape: GroupShape) -> TransferTimes:
    """A machine on which a transfer of n bytes takes alpha + n / B, each size measured often."""
    found = [
        MeasuredTransfers(message_bytes=size, low=0.95 * ns, typical=ns, high=1.05 * ns, samples=40)
        for size in (1 << power for power in range(10, 25))
        for ns in [ALPHA + size / BANDWIDTH]
    ]
    return TransferTimes({shape: found})


def shape(op: str = "AllReduce", ranks: int = 8, nodes: int = 1, kind: str = "TP") -> GroupShape:
    return GroupShape(op, ranks, nodes, kind)


def test_a_tree_has_fewer_steps_than_a_ring_and_its_interval_is_as_wide_as_its_model() -> None:
    (tree,) = alternatives(times(shape()), shape(), 1 << 14, "RING")
    assert (tree.what, tree.replaces, tree.attempt) == ("a tree", 1, "NCCL_ALGO=Tree")
    # 14 steps of a ring become 6 of a tree, and 7/4 of the array's bytes become twice them.
    assert tree.typical == pytest.approx(ALPHA * 6 / 14 + (1 << 14) / BANDWIDTH * 8 / 7, rel=0.02)
    assert (tree.low, tree.high) == (tree.typical / 2, tree.typical * 2)


@pytest.mark.parametrize(
    ("of", "size", "algorithm"),
    [
        (shape(), 1 << 23, None),  # its bytes take most of its time
        (shape(), 512, None),  # control
        (shape(), 1 << 14, "TREE"),  # a tree it is
        (shape("AllGather"), 1 << 14, None),  # PAT is for one rank per node
        (shape("Send", ranks=2), 1 << 14, None),
    ],
    ids=["bytes", "control", "tree", "inside_a_node", "send"],
)
def test_nothing_is_said_where_nothing_would_be_faster(of: GroupShape, size: int, algorithm: str | None) -> None:
    assert alternatives(times(of), of, size, algorithm) == []


def test_gathers_between_nodes_with_one_rank_each_have_pat() -> None:
    of = shape("AllGather", ranks=8, nodes=8)
    (pat,) = alternatives(times(of), of, 1 << 14)
    assert pat.attempt.startswith("NCCL_PAT_ENABLE=1")
    assert pat.typical == pytest.approx(ALPHA * 3 / 7 + (1 << 14) / BANDWIDTH, rel=0.02)


FLAT = shape(ranks=16, nodes=2, kind="DP")


def in_three_steps(**changed: GroupShape) -> dict[str, GroupShape]:
    return {
        "scatter": shape("ReduceScatter", ranks=8, nodes=1),
        "between": shape("AllReduce", ranks=2, nodes=2, kind="DP"),
        "gather": shape("AllGather", ranks=8, nodes=1),
        **changed,
    }


def by_nodes(size: int, steps: dict[str, GroupShape], alpha: float = 5e-6) -> list[Alternative]:
    """On a machine on which each of these steps has a tenth of the latency."""
    measured = {FLAT: times(FLAT).measured[FLAT]}
    for each in steps.values():
        measured[each] = tuple(
            replace(one, **{name: getattr(one, name) - ALPHA + alpha for name in ("low", "typical", "high")})
            for one in times(each).measured[each]
        )
    return [each for each in alternatives(TransferTimes(measured), FLAT, size) if "in each node" in each.what]


def test_an_allreduce_over_nodes_has_the_three_steps_whose_sizes_were_measured() -> None:
    (found,) = by_nodes(1 << 16, in_three_steps())
    assert found.by == "measured sizes"
    assert found.typical == pytest.approx(3 * 5e-6 + (2 + 1 / 8) * (1 << 16) / BANDWIDTH, rel=0.02)
    assert found.low < found.typical < found.high
    assert found.attempt == "groups of the 8 ranks of a node, and of one rank of each node"


@pytest.mark.parametrize(
    ("size", "steps", "alpha"),
    [
        (1 << 23, in_three_steps(), 5e-6),
        (1 << 16, in_three_steps(), ALPHA),
        (1 << 16, in_three_steps(gather=shape("AllGather", ranks=4)), 5e-6),
        (1 << 16, in_three_steps(between=shape("AllReduce", ranks=2, nodes=2, kind="EMBEDDING")), 5e-6),
        (1 << 12, in_three_steps(), 5e-6),
    ],
    ids=["bound_by_bytes", "not_faster", "not_measured", "of_some_gpus_alone", "smaller_than_measured"],
)
def test_the_three_steps_are_silent_where_measured_sizes_do_not_say_it(
    size: int, steps: dict[str, GroupShape], alpha: float
) -> None:
    assert by_nodes(size, steps, alpha) == []


def test_buckets_of_gradients_that_are_larger_are_known_from_measured_sizes() -> None:
    of = shape(kind="DP")
    bucket = next(each for each in alternatives(times(of), of, 1 << 14) if each.replaces > 1)
    assert (bucket.replaces, bucket.by) == (8, "measured sizes")
    assert bucket.low < ALPHA + (1 << 17) / BANDWIDTH < bucket.high
