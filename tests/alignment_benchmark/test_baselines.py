from __future__ import annotations

import pytest
from benchmarks.alignment import needleman_wunsch
from benchmarks.alignment.case import Loss
from benchmarks.alignment.methods import NEEDLEMAN_WUNSCH, SLIDING_WINDOW
from benchmarks.alignment.scenarios import LOSSES, MIXES, NAMES, drawn_cases
from benchmarks.alignment.tables import TESTS, AlgorithmTest


@pytest.mark.parametrize("test", TESTS, ids=lambda test: str(test.name))
def test_the_baseline_passes_each_test_that_its_author_prints(test: AlgorithmTest) -> None:
    found = needleman_wunsch.align_names(list(test.kernels), list(test.lines))
    assert test.is_met(list(found.pairs))
    assert found.mismatches == 0


def test_the_first_test_leaves_two_gaps_and_the_fifth_none_longer_than_two() -> None:
    gaps = [needleman_wunsch.align_names(list(test.kernels), list(test.lines)) for test in TESTS]
    assert gaps[0].gaps == 2
    assert gaps[2].gaps == 5
    assert gaps[4].longest_gap <= 2


def test_both_baselines_are_exact_on_names_alone_if_nothing_is_lost() -> None:
    for mix in MIXES:
        cases = drawn_cases(mix, NAMES, LOSSES[0], ranks=1)
        assert SLIDING_WINDOW.score(cases).exact.f1 == 1.0
        assert NEEDLEMAN_WUNSCH.score(cases).exact.f1 == 1.0


def test_the_sliding_window_loses_its_way_when_lines_are_missing() -> None:
    cases = drawn_cases(MIXES[0], NAMES, Loss(lines=0.2, kernels=0.0), ranks=2)
    assert SLIDING_WINDOW.score(cases).exact.f1 < 0.3
    assert NEEDLEMAN_WUNSCH.score(cases).exact.f1 > 0.8
