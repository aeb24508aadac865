"""Estimates of transfers: which basis answers, what is refused, and calibrations there and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from ncclscope_models.calibration import Calibration, ObservedStep, added_up, calibrations_of, document_of
from ncclscope_models.job import ModelError
from ncclscope_models.transfer_estimate import WIDTHS, Basis, GroupShape, MeasuredTransfers, TransferTimes

FOUR = GroupShape("AllReduce", 4, 1)
ALPHA, RATE = 20e-6, 1e11


def seconds(message_bytes: float, ranks: int = 4) -> float:
    return ALPHA + 2 * (ranks - 1) / ranks * message_bytes / RATE


def measured(message_bytes: int, *, samples: int = 100, ranks: int = 4) -> MeasuredTransfers:
    typical = seconds(message_bytes, ranks)
    return MeasuredTransfers(
        message_bytes=message_bytes, low=typical * 0.97, typical=typical, high=typical * 1.05, samples=samples
    )


def times(
    shapes: Mapping[GroupShape, Sequence[MeasuredTransfers]] | None = None, *, has_switch: bool = True
) -> TransferTimes:
    default = {FOUR: [measured(2**power) for power in (26, 20, 24, 22)]}
    return TransferTimes(default if shapes is None else shapes, has_switch=has_switch)


def test_a_size_that_was_measured_often_answers_with_its_own_percentiles() -> None:
    found = times().estimate(FOUR, 2**22)
    assert found is not None
    assert (found.basis, found.samples, found.distance) == (Basis.HISTORY, 100, 1.0)
    assert (found.low, found.typical, found.high) == (
        measured(2**22).low,
        measured(2**22).typical,
        measured(2**22).high,
    )


def test_a_size_between_others_comes_from_the_curve_and_is_less_sure() -> None:
    found = times().estimate(FOUR, 2**23)
    assert found is not None
    assert found.basis is Basis.SIZES
    assert found.distance == pytest.approx(2)
    assert found.typical == pytest.approx(seconds(2**23), rel=0.05)
    assert found.high / found.typical > 1 + WIDTHS[Basis.SIZES]
    assert found.low < found.typical * 0.95


def test_beyond_the_largest_size_a_line_answers_three_doublings_far() -> None:
    found = times().estimate(FOUR, 2**29)
    assert found is not None
    assert found.basis is Basis.BEYOND_SIZES
    assert found.typical == pytest.approx(seconds(2**29), rel=0.001)
    assert times().estimate(FOUR, 2**30) is None
    assert times().estimate(FOUR, 2**19) is None, "below the smallest size nothing was tried"


def test_few_samples_of_a_size_are_no_history() -> None:
    few = times({FOUR: [measured(2**power, samples=19) for power in (20, 22, 24, 26)]})
    found = few.estimate(FOUR, 2**22)
    assert found is not None
    assert found.basis is Basis.SIZES


def neighbours(nodes: int = 1, op: str = "AllReduce") -> dict[GroupShape, list[MeasuredTransfers]]:
    sizes = (18, 22, 26, 30)
    return {GroupShape(op, ranks, nodes): [measured(2**each, ranks=ranks) for each in sizes] for ranks in (3, 5)}


def test_other_ranks_answer_only_inside_a_node_with_a_switch() -> None:
    found = times(neighbours()).estimate(FOUR, 2**24)
    assert found is not None
    assert found.basis is Basis.RANKS
    assert found.typical == pytest.approx(seconds(2**24), rel=0.1)
    assert times(neighbours(), has_switch=False).estimate(FOUR, 2**24) is None, "as on V100: up to 110 % wrong"
    assert times(neighbours(nodes=2)).estimate(GroupShape("AllReduce", 4, 2), 2**24) is None
    assert times(neighbours(op="Broadcast")).estimate(GroupShape("Broadcast", 4, 1), 2**24) is None


def test_what_does_not_come_from_bytes_is_the_share_of_latency() -> None:
    shape = times({FOUR: [measured(2**power) for power in range(10, 31)]})
    for size in (2**12, 2**20, 2**28):
        assert shape.latency_share(FOUR, size) == pytest.approx(ALPHA / seconds(size), abs=0.05)
    assert shape.latency_share(FOUR, 2**9) is None


def calibration(of: TransferTimes, job: str = "train") -> Calibration:
    step = ObservedStep(steps=12, mean_ns=1000, parts={("computation", None): 700, ("exposed_transfer", "TP"): 300})
    return Calibration(job=job, ranks=8, ranks_per_node=None, times=of, step=step, median_step_ns=990)


def test_a_calibration_comes_back_from_json_as_it_was() -> None:
    written = json.loads(json.dumps(document_of([calibration(times()), calibration(times({}), "other")])))
    first, other = calibrations_of(written, "calibration.json")
    assert document_of([first, other]) == written
    assert first.step == calibration(times()).step
    assert first.step is not None
    assert first.step.part_ns("computation", "exposed_transfer") == 1000
    estimate = first.times.estimate(FOUR, 2**22)
    assert estimate is not None
    assert estimate.typical == pytest.approx(seconds(2**22), abs=1e-9)


@pytest.mark.parametrize("damage", [[], {"format": 2}, {"format": 1, "jobs": [{}]}, "text", None])
def test_what_is_no_calibration_is_refused_by_its_name(damage: object) -> None:
    with pytest.raises(ModelError, match=r"run/calibration\.json"):
        calibrations_of(damage, "run/calibration.json")


def test_a_calibration_whose_percentiles_cross_is_refused() -> None:
    written = json.loads(json.dumps(document_of([calibration(times())])))
    written["jobs"][0]["transfers"][0]["low_ns"] = 10**12
    with pytest.raises(ModelError):
        calibrations_of(written, "f")


def test_runs_add_up_by_how_many_transfers_they_hold() -> None:
    slow = MeasuredTransfers(message_bytes=2**20, low=2.0, typical=2.0, high=2.0, samples=300)
    fast = MeasuredTransfers(message_bytes=2**20, low=1.0, typical=1.0, high=1.0, samples=100)
    both = added_up([calibration(times({FOUR: [slow]})), calibration(times({FOUR: [fast]}, has_switch=False))])
    (found,) = both.measured[FOUR]
    assert (found.typical, found.samples) == (1.75, 400)
    assert not both.has_switch
