"""Corrections learned from measured times: right inside of them, refused by name outside, not used if no better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import exp, log, sin

import pytest

from ncclscope_models.residual import Features, MeasuredTime, NotLearnedError, OutsideError, Residual, learned

WIDTHS = (1024, 2048)
DEPTHS = (4, 8, 12, 16, 24, 32)
TENSORS = (1, 2, 4, 8)
BATCHES = (1, 2, 4)


def features(width: int, depth: float, tensor: float, batch: float) -> Features:
    return Features(
        kinds={"hidden": width},
        numbers={"layers": depth, "tensor": tensor, "micro_batch": batch},
        products={"work": depth * batch},
    )


def off(width: int, depth: float, tensor: float, batch: float) -> float:
    """How many times longer than predicted: rises with tensor ranks, falls with micro-batches, unlike by width."""
    return exp(0.3 * log(tensor) - 0.2 * log(batch) * (width / 1024) + 0.05 * log(depth))


def scattered(width: int, depth: float, tensor: float, batch: float) -> float:
    """What no feature tells: it jumps from each time to the next."""
    return exp(0.2 * sin(1e4 * (width + 3 * depth + 7 * tensor + 11 * batch)))


def one_factor(_width: int, _depth: float, _tensor: float, _batch: float) -> float:
    return 1.3


def measured(
    truth: Callable[[int, float, float, float], float] = off, depths: Iterable[int] = DEPTHS
) -> Iterator[MeasuredTime]:
    for at in product(WIDTHS, depths, TENSORS, BATCHES):
        yield MeasuredTime(run=at, features=features(*at), predicted=1.0, observed=truth(*at))


@pytest.fixture(scope="module")
def residual() -> Residual:
    return learned(list(measured()))


def test_a_time_between_measured_ones_is_corrected_and_the_interval_holds_it(residual: Residual) -> None:
    asked = (1024, 14, 2, 2)
    found = residual.correction(features(*asked))
    assert found.typical == pytest.approx(off(*asked), rel=0.05)
    assert found.low < found.typical < found.high
    assert residual.times == 144
    assert residual.error < 0.5 * residual.plain_error


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((4096, 8, 2, 2), "hidden 4096 is not among those of the runs (1024, 2048)"),
        ((1024, 48, 2, 2), "layers 48 lies outside of the runs' 4 to 32"),
        ((1024, 8, 16, 2), "tensor 16 lies outside of the runs' 1 to 8"),
    ],
)
def test_outside_of_the_runs_the_feature_its_value_and_the_range_are_named(
    residual: Residual, asked: tuple[int, int, int, int], says: str
) -> None:
    with pytest.raises(OutsideError) as caught:
        residual.correction(features(*asked))
    assert str(caught.value) == says


def test_a_product_has_a_range_of_its_own() -> None:
    """Each number lies in its range, and yet no run had so much of both."""
    few = [each for each in measured() if each.features.products["work"] <= 64]
    with pytest.raises(OutsideError, match="work 128 lies outside of the runs' 4 to 64"):
        learned(few).correction(features(1024, 32, 2, 4))


def test_in_a_hole_of_the_runs_nothing_is_said() -> None:
    with pytest.raises(OutsideError, match=r"no run is near: the nearest is .* away, runs from each other"):
        learned(list(measured(depths=(4, 5, 6, 28, 30, 32)))).correction(features(1024, 14, 2, 2))


def test_kinds_that_never_came_together_are_refused() -> None:
    def of_two(at: MeasuredTime) -> MeasuredTime:
        width = at.features.kinds["hidden"]
        kinds: dict[str, str | int] = {"hidden": width, "recompute": "full" if width == 1024 else "none"}
        return replace(at, features=replace(at.features, kinds=kinds))

    found = learned([of_two(each) for each in measured()])
    asked = replace(features(1024, 8, 2, 2), kinds={"hidden": 1024, "recompute": "none"})
    with pytest.raises(OutsideError, match="no run has hidden 1024, recompute none together"):
        found.correction(asked)


def test_fewer_than_a_hundred_times_teach_nothing() -> None:
    with pytest.raises(NotLearnedError, match="from 100 measured times on, not from 99"):
        learned(list(measured())[:99])


@pytest.mark.parametrize("truth", [scattered, one_factor])
def test_what_foretells_left_out_runs_no_better_is_not_used(truth: Callable[[int, float, float, float], float]) -> None:
    """Of noise trees learn the noise; of one factor nothing more than the factor."""
    with pytest.raises(NotLearnedError, match=r"a learned correction is off by .* it is not used"):
        learned(list(measured(truth)))


def test_times_of_one_run_do_not_foretell_each_other() -> None:
    """Each run has its own offset, which its other times would tell: left out together, they do not."""
    one_offset = {depth: 0.3 * sin(1e4 * depth) for depth in DEPTHS}

    def of_runs(by: str) -> list[MeasuredTime]:
        return [
            replace(
                each,
                run=each.features.numbers["layers"] if by == "layers" else each.run,
                observed=exp(one_offset[int(each.features.numbers["layers"])]),
            )
            for each in measured()
        ]

    assert learned(of_runs("each")).error < 0.01
    with pytest.raises(NotLearnedError, match="it is not used"):
        learned(of_runs("layers"))


def test_the_same_times_teach_the_same(residual: Residual) -> None:
    again = learned(list(measured()))
    asked = features(2048, 10, 4, 2)
    assert again.correction(asked) == residual.correction(asked)
