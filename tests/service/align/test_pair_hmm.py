from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from ncclscope_service.align.by_order.pair_hmm import (
    CLOSED,
    Ends,
    Posterior,
    Turns,
    Weights,
    log_likelihood,
    most_accurate,
    posterior,
)


@dataclass(slots=True)
class Path:
    """One alignment: its weight and what it says."""

    weight: float = 1.0
    fresh: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    joined: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    lost_kernels: int = 0
    lost_lines: int = 0
    last: str = "launch"
    """The side of the last step; what comes first is as if after a launch."""


def step(path: Path, weight: float, **more: object) -> Path:
    """The path with one more step."""
    changed = replace(path, weight=path.weight * weight)
    for name, value in more.items():
        setattr(changed, name, value)
    return changed


def every_path(weights: Weights, *, is_open: bool) -> Iterator[Path]:
    """All alignments, one by one."""
    launches, kernels, _ = weights.pair.shape

    def turned(i: int, j: int, path: Path, side: str) -> float:
        if weights.turns is None or path.last == side:
            return 1.0
        table = weights.turns.to_launch if side == "launch" else weights.turns.to_kernel
        return float(table[i, j, 0])

    def walk(i: int, j: int, path: Path, *, is_paired: bool) -> Iterator[Path]:
        is_over = i == launches or j == kernels if is_open else i == launches and j == kernels
        if is_over:
            yield path
        if i < launches and is_paired:
            joins = step(path, float(weights.joins[i, 0]), joined=[*path.joined, (i, j - 1)])
            yield from walk(i + 1, j, joins, is_paired=True)
        if is_over and is_open:
            return
        if i < launches and j < kernels:
            worth = float(weights.pair[i, j, 0]) * turned(i, j, path, "launch")
            pairs = step(path, worth, fresh=[*path.fresh, (i, j)], last="launch")
            yield from walk(i + 1, j + 1, pairs, is_paired=True)
        if i < launches:
            worth = float(weights.lost_kernel[i, 0]) * (1.0 if weights.after is None else float(weights.after[j, 0]))
            worth *= turned(i, j, path, "launch")
            lost = step(path, worth, lost_kernels=path.lost_kernels + 1, last="launch")
            yield from walk(i + 1, j, lost, is_paired=False)
        if j < kernels:
            worth = float(weights.lost_line[i, j, 0]) * turned(i, j, path, "kernel")
            lost = step(path, worth, lost_lines=path.lost_lines + 1, last="kernel")
            yield from walk(i, j + 1, lost, is_paired=False)

    yield from walk(0, 0, Path(), is_paired=False)


def some_weights(launches: int, kernels: int, *, batch: int = 1) -> Weights:
    rng = np.random.default_rng(launches)
    return Weights(
        rng.random((launches, kernels, batch)),
        rng.random((launches, batch)),
        rng.random((launches + 1, kernels, batch)),
        rng.random((launches, batch)),
    )


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 3), (2, 2), (3, 4), (4, 3)])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("turns", [False, True])
def test_probabilities_are_those_of_all_alignments_counted_one_by_one(
    shape: tuple[int, int], is_open: bool, varies: bool, turns: bool
) -> None:
    weights = some_weights(*shape)
    if turns:
        rng = np.random.default_rng(1)
        to_launch, to_kernel = rng.random((shape[0], shape[1] + 1, 1)), rng.random((shape[0] + 1, shape[1], 1))
        weights = replace(weights, turns=Turns(to_launch, to_kernel))
    if varies:
        weights = replace(weights, after=np.random.default_rng(0).random((shape[1] + 1, 1)))
    fresh, joined = np.zeros(shape), np.zeros(shape)
    whole = lost_kernels = lost_lines = 0.0
    for path in every_path(weights, is_open=is_open):
        whole += path.weight
        lost_kernels += path.weight * path.lost_kernels
        lost_lines += path.weight * path.lost_lines
        for table, pairs in ((fresh, path.fresh), (joined, path.joined)):
            for pair in pairs:
                table[pair] += path.weight
    found = posterior(weights, Ends(is_open=is_open))
    assert np.allclose(found.fresh[:, :, 0], fresh / whole)
    assert np.allclose(found.joined[:, :, 0], joined / whole)
    assert np.isclose(found.log_likelihood[0], np.log(whole))
    if not is_open:
        assert np.isclose(found.lost_kernels[0], lost_kernels / whole)
        assert np.isclose(found.lost_lines[0], lost_lines / whole)


def test_windows_worked_on_together_are_independent() -> None:
    several = some_weights(5, 6, batch=3)
    together = posterior(several)
    for index in range(3):
        one = Weights(
            several.pair[:, :, index : index + 1],
            several.lost_kernel[:, index : index + 1],
            several.lost_line[:, :, index : index + 1],
            several.joins[:, index : index + 1],
        )
        assert np.allclose(posterior(one).fresh[:, :, 0], together.fresh[:, :, index])


def test_long_windows_neither_vanish_nor_overflow() -> None:
    size = 400
    weights = Weights(
        np.full((size, size, 1), 1e-9),
        np.full((size, 1), 1e-9),
        np.full((size + 1, size, 1), 1e-9),
        np.zeros((size, 1)),
    )
    found = posterior(weights)
    assert np.isfinite(found.log_likelihood).all()
    assert found.log_likelihood[0] < -2000
    assert np.allclose(found.fresh.sum(axis=1).max(), 1.0, atol=0.01)


def of_letters(left: str, right: str, *, lost: float = 0.1) -> Weights:
    """Equal letters belong together."""
    same = np.array([[a == b for b in right] for a in left], dtype=np.float64)
    odds = same / np.maximum(same.mean(axis=1, keepdims=True), 0.1)
    return Weights(
        (odds * (1 - lost) ** 2)[:, :, None],
        np.full((len(left), 1), lost),
        np.full((len(left) + 1, len(right), 1), lost),
        np.zeros((len(left), 1)),
    )


def pairs_of(found: Posterior, price: float = 0.3) -> list[tuple[int, int]]:
    _, launches, kernels = most_accurate(found, price)
    return list(zip(launches.tolist(), kernels.tolist(), strict=True))


def test_a_letter_without_a_partner_is_left_out() -> None:
    assert pairs_of(posterior(of_letters("ABCDE", "ABDE"))) == [(0, 0), (1, 1), (3, 2), (4, 3)]


def test_letters_that_differ_are_never_paired() -> None:
    assert pairs_of(posterior(of_letters("AB", "CD"))) == []


def test_where_kernels_are_seen_to_be_missing_tells_which_of_equal_letters_is() -> None:
    weights = of_letters("XAAAAY", "XAAAY")
    seen = replace(weights, after=np.array([0.01, 0.01, 1.0, 0.01, 0.01, 0.01])[:, None])
    assert pairs_of(posterior(seen)) == [(0, 0), (1, 1), (3, 2), (4, 3), (5, 4)]


def test_which_of_equal_letters_is_missing_is_said_to_be_unknown() -> None:
    found = posterior(of_letters("XAAAAY", "XAAAY"))
    assert np.allclose([found.fresh[k, k, 0] for k in range(1, 4)], [0.25 * (4 - k) for k in range(1, 4)], atol=0.02)
    assert found.fresh[0, 0, 0] > 0.99


def test_what_is_less_probable_than_its_price_stays_out() -> None:
    found = posterior(of_letters("XAAY", "XAAAAAY"))
    assert len(pairs_of(found, price=0.2)) == 4
    assert len(pairs_of(found, price=0.4)) == 2


def test_a_kernel_that_surely_has_its_line_gets_one_though_it_is_a_guess() -> None:
    found = posterior(of_letters("XAAAAY", "XAY"))
    assert len(pairs_of(found, price=0.5)) == 3
    assert found.fresh[1:5, 1, 0].max() < 0.5


def test_an_open_end_is_no_loss() -> None:
    weights = of_letters("ABCDEFGH", "ABC")
    assert posterior(weights, Ends(is_open=True)).lost_kernels[0] < 0.1
    assert posterior(weights, CLOSED).lost_kernels[0] > 4.9


def test_a_capture_that_began_later_is_seen_to_have() -> None:
    late = posterior(of_letters("QRSTUVABCDEF", "ABCDEF", lost=0.01), Ends(starts_late=1e-3))
    assert late.starts[0] < 0.01
    assert posterior(of_letters("ABCDEF", "ABCDEF", lost=0.01), Ends(starts_late=1e-3)).starts[0] > 0.99


def test_the_likelihood_alone_is_that_of_the_probabilities() -> None:
    weights, ends = some_weights(5, 4), Ends(stops_early=0.01, starts_late=0.02)
    assert np.allclose(log_likelihood(weights, ends), posterior(weights, ends).log_likelihood)


def test_a_launch_that_joins_its_neighbour_shares_its_kernel() -> None:
    weights = of_letters("XSRY", "XSY", lost=0.01)
    weights.joins[2, 0] = 0.9
    assert pairs_of(posterior(weights)) == [(0, 0), (1, 1), (2, 1), (3, 2)]
