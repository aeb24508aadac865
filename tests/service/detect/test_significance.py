from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.detect.settings import LateRankSettings
from ncclscope_service.detect.statistics import (
    Firmness,
    PooledScatter,
    firmness,
    log_evidence,
    margins_over_others,
    posterior,
)
from ncclscope_service.detect.step_blame import Blames

STEPS, RANKS, GROUPS = 18, 4, 8


def blames(random: np.random.Generator, phi: float, late_ns: float = 0.0, groups: int = GROUPS) -> Blames:
    """By group, rank and step: groups whose ranks jitter by a millisecond; rank 1 of group 0 is late."""
    jitter = np.zeros((60 + STEPS, groups, RANKS))
    for step in range(1, len(jitter)):
        jitter[step] = phi * jitter[step - 1] + np.sqrt(1 - phi**2) * random.normal(0, 1e6, (groups, RANKS))
    arrived = jitter[-STEPS:]
    arrived[:, 0, 1] += late_ns
    ordered = np.sort(arrived, axis=2)
    ahead = (ordered[..., -1] - ordered[..., -2])[..., None]
    of = np.where(np.arange(RANKS) == arrived.argmax(axis=2)[..., None], ahead, 0.0)
    found: Blames = np.moveaxis(of, 0, 2)
    return found


def after_looks(pooled: PooledScatter, phi: float, late_ns: float, groups: int = GROUPS) -> list[Firmness]:
    random = np.random.default_rng(4)
    for look in range(40):
        pooled.firmness([blames(random, phi, groups=groups)], look + 1)
    return pooled.firmness([blames(random, phi, late_ns, groups=groups)], 41)


def test_a_rank_that_is_late_by_four_times_its_jitter_is_firm_against_all_groups_but_not_by_its_own_steps() -> None:
    (firm,) = after_looks(PooledScatter(), 0.0, 4e6)
    assert firm[0, 1] >= LateRankSettings().firmness
    assert firm[1:].max() < 5
    alone = margins_over_others(blames(np.random.default_rng(4), 0.0, 4e6)[0])[1]
    assert firmness(alone) < LateRankSettings().firmness


@pytest.mark.parametrize(("phi", "groups"), [(0.6, GROUPS), (0.9, GROUPS), (0.0, 1)])
def test_where_scatter_lasts_or_of_few_ranks_it_says_nothing(phi: float, groups: int) -> None:
    assert after_looks(PooledScatter(), phi, 3e6, groups) == []


def test_at_first_it_says_nothing() -> None:
    assert PooledScatter().firmness([blames(np.random.default_rng(0), 0.0, 9e6)], 1) == []
    assert PooledScatter().firmness([], 1) == []


def test_to_be_asked_again_of_the_same_steps_teaches_nothing() -> None:
    pooled, same = PooledScatter(), blames(np.random.default_rng(4), 0.0, 9e6)
    assert all(pooled.firmness([same], 1) == [] for _ in range(100))


def test_healthy_ranks_are_never_firm() -> None:
    pooled, random = PooledScatter(), np.random.default_rng(7)
    highest = [
        max((float(each.max()) for each in pooled.firmness([blames(random, 0.0)], look)), default=0.0)
        for look in range(1, 301)
    ]
    assert 1 < max(highest) < 5.5


def test_evidence_keeps_its_error_rate_however_often_one_looks() -> None:
    """Of 4,000 healthy groups of two, each looked at after every step from the fourth on, 1 in e^5 may look late."""
    random = np.random.default_rng(3)
    margins = np.zeros((4000, 60))
    for step in range(60):
        margins[:, step] = 0.5 * margins[:, step - 1] + np.sqrt(0.75) * random.standard_t(4, 4000) / np.sqrt(2)
    highest = np.max([log_evidence(1e6 * margins[:, :step], np.full(4000, 1e6)) for step in range(4, 61)], axis=0)
    assert np.mean(highest >= 5) <= np.exp(-5)


def test_a_few_steps_that_are_alike_by_chance_are_no_evidence_and_a_clear_case_is() -> None:
    step = np.array([1.0, 1.01, 0.99, 1.0]) * 1e6
    assert log_evidence(step, np.array(1e6)) < 1
    assert log_evidence(40 * step, np.array(1e6)) > 9
    assert log_evidence(-step, np.array(1e6)) == 0
    assert posterior(float(log_evidence(40 * step, np.array(1e6)))) > 0.9
    assert posterior(0.0) < 0.01
