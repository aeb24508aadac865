"""Expert layers by their all-to-alls: pairs, transposes and load, made up and of a simulated router with favourites."""

from __future__ import annotations

import numpy as np
import pytest
from emission_samples import small
from service.job.plan_samples import pattern_of

from ncclscope_models.exchanges import Matrix, exchanged, expected_exchanges, matrices

ROUTED = small("experts=4,uneven", dp=4, ep=4, layers=2, nccl="2.27.5", iterations=8)
LINES = (
    # Rank 0 sends 3 to itself and 1 to rank 1, then all to rank 1; rank 1 sends 2 and 2, then 4 to itself.
    ((0, "Send", 0, 3), (0, "Recv", 0, 3), (0, "Send", 1, 1), (0, "Recv", 1, 2), (0, "Send", 1, 4)),
    ((1, "Send", 0, 2), (1, "Recv", 0, 1), (1, "Send", 1, 2), (1, "Recv", 1, 2), (1, "Recv", 0, 4), (1, "Send", 1, 4),
     (1, "Recv", 1, 4)),
)  # fmt: skip


def found_in(lines: list[tuple[int, str, int, int]]) -> list[list[list[int]]]:
    ranks, ops, peers, counts = zip(*lines, strict=True)
    found = matrices(np.asarray(ranks), ops, np.asarray(peers), np.asarray(counts), 2)
    return [matrix.tolist() for matrix in found]


def test_exchanges_are_told_apart_by_the_order_of_peers() -> None:
    assert found_in([*LINES[0], *LINES[1]]) == [[[3, 1], [2, 2]], [[0, 4], [0, 4]]]


@pytest.mark.parametrize("lost", range(12))
def test_nothing_is_said_where_a_line_is_lost(lost: int) -> None:
    lines = [*LINES[0], *LINES[1]]
    assert found_in(lines[:lost] + lines[lost + 1 :]) == []


def test_an_alltoall_gives_each_as_much() -> None:
    found = found_in([(rank, "AlltoAll", -1, count) for count in (5, 7) for rank in (0, 1)])
    assert found == [[[5, 5], [5, 5]], [[7, 7], [7, 7]]]


def of_tokens(shape: list[list[int]]) -> Matrix:
    """Tokens as elements: the rank's 128 tokens go to two experts, hidden 256."""
    return np.asarray(shape, np.int64) * 256


OUT = [[100, 56, 60, 40], [90, 70, 48, 48], [64, 64, 64, 64], [200, 20, 20, 16]]


def test_each_matrix_comes_twice_and_so_does_its_transpose() -> None:
    job = ROUTED.described().job
    out = of_tokens(OUT)
    found = exchanged(job, 0, [out, out.T, out, out.T])
    assert (found.exchanges, found.transposed, found.repeated) == (4, 4, 4)
    assert found.imbalance == pytest.approx(454 / 256)
    assert not found.is_whole  # two layers and four micro-batches have more
    wrong = exchanged(job, 0, [out, out.T, out, out])
    assert (wrong.transposed, wrong.repeated) == (0, 0)


def test_a_simulated_router_with_favourites_is_found_out_and_exchanges_in_pairs() -> None:
    pattern = pattern_of(ROUTED)
    (group,) = pattern.experts
    assert group.ranks == (0, 1, 2, 3)
    assert group.expected == expected_exchanges(ROUTED.described().job, 0) == 2 * 4 * 4
    assert set(group.exchanges) == {group.expected}
    assert group.is_whole
    assert all(each is not None and 1.05 < each < 2 for each in group.imbalance)


def test_an_even_router_gives_everybody_the_mean() -> None:
    (group,) = pattern_of(small("experts=4", dp=2, ep=2, layers=2, iterations=8)).experts
    assert group.is_whole
    assert set(group.imbalance) == {1.0}
