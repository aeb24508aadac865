from __future__ import annotations

import numpy as np
import pytest
from benchmarks.alignment.case import Case, Loss, pairs_of
from benchmarks.alignment.scenarios import LOSSES, MIXES, NAMES, STAMPS, TP_STREAMS, drawn_cases, equal_runs
from benchmarks.alignment.score import Score


def _score(case: Case, operations: list[int], kernels: list[int], confidence: float = 1.0) -> Score:
    score = Score()
    score.add(case, pairs_of(np.array(operations, np.int64), np.array(kernels, np.int64), confidence))
    return score


def _present(case: Case) -> tuple[list[int], list[int]]:
    truth = case.truth
    there = np.isin(truth["operation"], case.operations["id"]) & np.isin(truth["kernel"], case.kernels["id"])
    return truth["operation"][there].tolist(), truth["kernel"][there].tolist()


def test_the_truth_scores_one() -> None:
    for loss in LOSSES:
        case = drawn_cases(MIXES[0], TP_STREAMS, loss, ranks=1)[0]
        score = _score(case, *_present(case))
        assert score.exact.f1 == 1.0
        assert score.meaning.precision == 1.0


def test_an_equal_operation_of_the_same_run_is_right_in_meaning_only() -> None:
    case = equal_runs(Loss(lines=0.0, kernels=0.0))
    operations, kernels = _present(case)
    score = _score(case, [operations[2]], [kernels[1]], 0.25)
    assert (score.exact.right, score.meaning.right) == (0, 1)
    assert score.calibration_error == pytest.approx(0.25)


def test_a_wrong_kind_is_wrong_in_both() -> None:
    case = equal_runs(Loss(lines=0.0, kernels=0.0))
    operations, kernels = _present(case)
    score = _score(case, [operations[0]], [kernels[1]])
    assert (score.exact.right, score.meaning.right) == (0, 0)


def test_confidence_that_is_right_as_often_as_it_says_has_no_error() -> None:
    case = drawn_cases(MIXES[0], NAMES, LOSSES[0], ranks=1)[0]
    operations, kernels = _present(case)
    kernels = [kernels[1 - place] if place < 2 else kernel for place, kernel in enumerate(kernels[:20])]
    score = _score(case, operations[:20], kernels, 0.9)
    (only,) = score.reliability()
    assert (only.answers, only.right) == (20, 0.9)
    assert score.calibration_error == pytest.approx(0.0, abs=1e-6)


def test_an_operation_has_one_kernel_and_a_pair_names_what_is_there() -> None:
    case = drawn_cases(MIXES[0], NAMES, LOSSES[0], ranks=1)[0]
    with pytest.raises(ValueError, match="two kernels"):
        _score(case, [0, 0], [0, 1])
    with pytest.raises(ValueError, match="not among"):
        _score(case, [100_000], [0])


def test_ranks_issue_the_same_operations_and_lose_rows_of_their_own() -> None:
    one, other = drawn_cases(MIXES[1], STAMPS, LOSSES[3], ranks=2)
    assert one.truth["symbol"].tolist() == other.truth["symbol"].tolist()
    assert one.operations["id"].tolist() != other.operations["id"].tolist()
    assert 130 <= len(one.operations) <= 185


def test_only_a_stamped_scenario_tells_when_lines_were_printed() -> None:
    for known in (NAMES, TP_STREAMS):
        assert np.unique(drawn_cases(MIXES[0], known, LOSSES[0], ranks=1)[0].operations["logged_at_ns"]).size == 1
    assert np.unique(drawn_cases(MIXES[0], STAMPS, LOSSES[0], ranks=1)[0].operations["logged_at_ns"]).size == 200
