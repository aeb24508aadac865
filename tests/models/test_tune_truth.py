"""The simulated scenarios that `tune` is held against: both sides are of the same job."""

from __future__ import annotations

from itertools import islice

import pytest
from benchmarks.models.tune_truth import held_against_truth, scenarios

from ncclscope_models.memory import Fit


def test_scenarios_are_of_jobs_that_can_be_simulated_and_fit() -> None:
    found = list(scenarios())
    assert len(found) == 50
    for each in found:
        assert each.now not in each.others
        for job in (each.now, *each.others):
            assert each.need.fit(job) is not Fit.DOES_NOT
            simulated = each.simulated(job)
            assert simulated.world == job.layout.ranks == each.fabric.nodes * each.fabric.gpus
            assert simulated.microbatches == job.micro_batches


@pytest.mark.timeout(120)
def test_a_run_foretells_layouts_that_it_is_not() -> None:
    scenario = next(islice(scenarios(), 2, None))  # one node, a small model
    ours, plain = held_against_truth(scenario)
    assert ours.tau > plain.tau
    assert len(ours.inside) == len(ours.errors) == len(scenario.others)
