from __future__ import annotations

import numpy as np

from ncclscope_service import causality


def bounds_of(errors: list[float], spread: float, operations: int, seed: int = 0) -> causality.Bounds:
    """Operations of hosts whose clocks are off by `errors`, with arrivals spread and a transfer of 50."""
    random = np.random.default_rng(seed)
    hosts = len(errors)
    bounds = causality.no_bounds(hosts)
    starts = random.uniform(0, spread, (operations, hosts))
    ends = np.repeat(starts.max(axis=1, keepdims=True) + 50, hosts, axis=1)
    clock = np.array(errors)
    causality.tighten(bounds, np.arange(hosts), starts + clock, ends + clock, np.zeros(operations))
    return bounds


def test_the_interval_holds_the_error_and_is_as_wide_as_the_transfers() -> None:
    interval = causality.solve(bounds_of([0.0, 30.0, -400.0], spread=100.0, operations=500), 0)
    assert interval.inconsistent == ()
    for host, error in enumerate([0.0, 30.0, -400.0]):
        assert interval.lo_ns[host] <= error <= interval.hi_ns[host]
        assert interval.hi_ns[host] - interval.lo_ns[host] < 130


def test_bounds_travel_over_hosts_that_share_no_operation() -> None:
    bounds = causality.no_bounds(3)
    for members, errors in (((0, 1), (0.0, 70.0)), ((1, 2), (70.0, 20.0))):
        starts = np.array([errors])
        causality.tighten(bounds, np.array(members), starts, starts + 10.0, np.zeros(1))
    interval = causality.solve(bounds, 0)
    assert (interval.lo_ns[2], interval.hi_ns[2]) == (0.0, 40.0)


def test_a_host_nothing_is_known_of_has_no_bounds() -> None:
    interval = causality.solve(causality.no_bounds(2), 0)
    assert (interval.lo_ns[1], interval.hi_ns[1]) == (-np.inf, np.inf)


def test_an_unseen_rank_binds_nobody() -> None:
    bounds = causality.no_bounds(2)
    times = np.array([[0.0, np.nan]])
    causality.tighten(bounds, np.arange(2), times, times, np.zeros(1))
    assert np.isinf(bounds[0, 1])


def test_a_clock_that_stepped_contradicts_itself_and_is_named() -> None:
    bounds = bounds_of([0.0, 0.0, 0.0], spread=10.0, operations=50)
    after = bounds_of([0.0, 5_000.0, 0.0], spread=10.0, operations=50)
    interval = causality.solve(np.minimum(bounds, after), 0)
    assert interval.inconsistent[0] == 1
    assert np.isinf(interval.hi_ns).all()
