"""Hosts that only send to each other: both ways of their messages tell offset and drift."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from service.simulated_ends import ORIGIN_NS, Stages

from ncclscope_service.clock.estimator import ClockEstimator, to_true
from ncclscope_service.clock.observations import two_way_band
from ncclscope_service.store.records import HostClock


def errors_ns(pipeline: Stages, clocks: dict[int, HostClock]) -> NDArray[np.int64]:
    asked = np.linspace(0, pipeline.seconds * 1e9, 50).astype(np.int64)
    return np.concatenate(
        [to_true(pipeline.read(host, asked), clocks[host]) - ORIGIN_NS - asked for host in range(1, pipeline.hosts)]
    )


@pytest.mark.parametrize("seed", range(4))
def test_two_stages_are_put_on_one_clock_within_their_error_bar(seed: int) -> None:
    pipeline, estimator = Stages(2, seed), ClockEstimator()
    pipeline.feed(estimator)
    clocks = estimator.estimate(0)
    off = np.abs(errors_ns(pipeline, clocks))
    assert off.max() <= clocks[1].sigma_ns
    assert np.median(off) <= 100_000


def test_a_chain_of_stages_is_tied_through_its_neighbours() -> None:
    pipeline, estimator = Stages(4, 7), ClockEstimator()
    pipeline.feed(estimator)
    clocks = estimator.estimate(0)
    assert sorted(clocks) == [0, 1, 2, 3]
    assert np.abs(errors_ns(pipeline, clocks)).max() <= 400_000
    assert clocks[3].sigma_ns > clocks[1].sigma_ns


def test_ways_of_unequal_length_stay_within_the_error_bar_and_the_interval() -> None:
    pipeline, estimator = Stages(2, 3, asymmetry_ns=300_000), ClockEstimator()
    pipeline.feed(estimator)
    clock = estimator.estimate(0)[1]
    off = errors_ns(pipeline, {1: clock})
    assert 100_000 < np.abs(off).max() <= clock.sigma_ns
    assert clock.interval_lo_ns is not None
    assert clock.interval_hi_ns is not None
    since = clock.at_ns - ORIGIN_NS - int(pipeline.offset[1])
    truth = pipeline.offset[1] + pipeline.rate[1] * since
    assert clock.interval_lo_ns <= truth <= clock.interval_hi_ns


def test_messages_of_one_way_alone_tell_nothing() -> None:
    pipeline, estimator = Stages(2, 1), ClockEstimator()
    sent, received = pipeline.messages(0, 1)
    estimator.add_messages(0, 1, sent, received)
    assert sorted(estimator.estimate(0)) == [0]


def test_where_collectives_tie_two_hosts_messages_do_not_move_their_clocks() -> None:
    estimator, both = ClockEstimator(), ClockEstimator()
    pipeline = Stages(2, 5)
    ends = np.sort(pipeline.random.integers(0, 60 * 10**9, 300))
    times = np.stack([pipeline.read(host, ends) for host in (0, 1)], axis=1)
    for one in (estimator, both):
        one.add([0, 1], times - 100_000, times, np.full(300, 100_000))
    pipeline.feed(both)
    asked = np.linspace(ORIGIN_NS, ORIGIN_NS + 60 * 10**9, 20).astype(np.int64)
    with_messages, without = both.estimate(0)[1], estimator.estimate(0)[1]
    assert np.abs(to_true(asked, with_messages) - to_true(asked, without)).max() <= 1


def test_a_clock_that_was_set_is_followed_within_seconds() -> None:
    pipeline, estimator = Stages(2, 9), ClockEstimator()
    step_at, step = 40 * 10**9, 5_000_000
    for sender, receiver in ((0, 1), (1, 0)):
        sent, received = pipeline.messages(sender, receiver)
        stepped = received if receiver == 1 else sent
        stepped += np.where(stepped - ORIGIN_NS - int(pipeline.offset[1]) > step_at, step, 0)
        estimator.add_messages(sender, receiver, sent, received)
    estimator.estimate(0)
    clock = estimator.estimate(0)[1]
    asked = np.linspace(50e9, 60e9, 20).astype(np.int64)
    off = to_true(pipeline.read(1, asked) + step, clock) - ORIGIN_NS - asked
    assert np.abs(off).max() <= 1_000_000


def test_bounds_that_contradict_each_other_have_a_negative_width() -> None:
    x = np.linspace(0, 1e9, 10)
    found = two_way_band(x, np.full(10, -1e6), x, np.full(10, -1e6))
    assert found is not None
    assert found.half_width_ns < 0
