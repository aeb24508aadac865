from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.clock import causality


def bounds_of(
    errors: list[float], spread: float, operations: int, bounds: causality.Bounds | None = None
) -> causality.Bounds:
    """Operations of hosts whose clocks are off by `errors`, with arrivals spread and a transfer of 50."""
    random = np.random.default_rng(0)
    hosts = len(errors)
    bounds = bounds or causality.Bounds(hosts)
    starts = random.uniform(0, spread, (operations, hosts))
    ends = np.repeat(starts.max(axis=1, keepdims=True) + 50, hosts, axis=1)
    clock = np.array(errors)
    bounds.add_collectives(np.arange(hosts), starts + clock, ends + clock, np.zeros(operations))
    return bounds


def test_the_interval_holds_the_error_and_is_as_wide_as_the_transfers() -> None:
    interval = bounds_of([0.0, 30.0, -400.0], spread=100.0, operations=500).solve(0)
    assert interval.inconsistent == ()
    for host, error in enumerate([0.0, 30.0, -400.0]):
        assert interval.lo_ns[host] <= error <= interval.hi_ns[host]
        assert interval.hi_ns[host] - interval.lo_ns[host] < 130


def test_bounds_travel_over_hosts_that_share_no_operation() -> None:
    bounds = causality.Bounds(3)
    for members, errors in (((0, 1), (0.0, 70.0)), ((1, 2), (70.0, 20.0))):
        starts = np.array([errors])
        bounds.add_collectives(np.array(members), starts, starts + 10.0, np.zeros(1))
    interval = bounds.solve(0)
    assert (interval.lo_ns[2], interval.hi_ns[2]) == (0.0, 40.0)


def test_a_host_nothing_is_known_of_has_no_bounds() -> None:
    interval = causality.Bounds(2).solve(0)
    assert (interval.lo_ns[1], interval.hi_ns[1]) == (-np.inf, np.inf)


def test_an_unseen_rank_binds_nobody() -> None:
    bounds = causality.Bounds(2)
    times = np.array([[0.0, np.nan]])
    bounds.add_collectives(np.arange(2), times, times, np.zeros(1))
    assert np.isinf(bounds.solve(0).hi_ns[1])


def test_a_message_binds_one_direction() -> None:
    bounds = causality.Bounds(2)
    bounds.add_messages(0, 1, np.array([0.0, 5.0]), np.array([40.0, 35.0]))
    interval = bounds.solve(0)
    assert (interval.lo_ns[1], interval.hi_ns[1]) == (-np.inf, 30.0)


def test_a_clock_that_stepped_contradicts_itself_and_is_named() -> None:
    bounds = bounds_of([0.0, 0.0, 0.0], spread=10.0, operations=50)
    interval = bounds_of([0.0, 5_000.0, 0.0], spread=10.0, operations=50, bounds=bounds).solve(0)
    assert interval.inconsistent[0] == 1
    assert np.isinf(interval.hi_ns).all()


@pytest.mark.parametrize("seed", range(5))
def test_stars_give_the_same_interval_as_all_pairs_of_hosts(seed: int) -> None:
    random = np.random.default_rng(seed)
    hosts, operations = 7, 40
    clock = random.uniform(-1e5, 1e5, hosts)
    bounds, pairs = causality.Bounds(hosts), np.full((hosts, hosts), np.inf)
    for members in (np.array([0, 1, 2]), np.array([2, 3, 4, 5]), np.array([5, 6])):
        starts = random.uniform(0, 300.0, (operations, len(members)))
        ends = np.repeat(starts.max(axis=1, keepdims=True) + 50, len(members), axis=1) + clock[members]
        starts = starts + clock[members]
        unseen = random.random(starts.shape) < 0.1
        starts[unseen], ends[unseen] = np.nan, np.nan
        slack = random.uniform(0, 5.0, operations)
        bounds.add_collectives(members, starts, ends, slack)
        gaps = np.nanmin(ends[:, None, :] - starts[:, :, None] + slack[:, None, None], axis=0)
        index = np.ix_(members, members)
        pairs[index] = np.fmin(pairs[index], gaps)
    np.fill_diagonal(pairs, 0.0)
    for middle in range(hosts):
        pairs = np.minimum(pairs, pairs[:, [middle]] + pairs[[middle], :])
    interval = bounds.solve(0)
    assert interval.hi_ns == pytest.approx(pairs[0])
    assert interval.lo_ns == pytest.approx(-pairs[:, 0])
