from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from service.simulated_ends import ORIGIN_NS, Clocks, Cluster, simulate

from ncclscope_service.clock.estimator import ClockEstimator, to_true
from ncclscope_service.store.records import HostClock
from ncclscope_wire.terms import NO_TIME_NS

SECONDS = 60.0
STRAGGLING = Cluster(straggler_ns=2e6)


def estimated(
    cluster: Cluster, seed: int, seconds: float = SECONDS
) -> tuple[Clocks, ClockEstimator, dict[int, HostClock]]:
    random = np.random.default_rng(seed)
    clocks = Clocks(cluster, random)
    estimator = ClockEstimator()
    for group in simulate(cluster, clocks, seconds, random):
        for part in np.array_split(np.arange(len(group.starts_ns)), 6):
            estimator.add(list(group.hosts), group.starts_ns[part], group.ends_ns[part], group.transfer_ns[part])
    return clocks, estimator, estimator.estimate(0)


def errors(clocks: Clocks, found: dict[int, HostClock], begin_s: float, end_s: float) -> NDArray[np.int64]:
    asked = np.linspace(begin_s * 1e9, end_s * 1e9, 50).astype(np.int64)
    return np.concatenate(
        [to_true(clocks.read(host, asked), clock) - ORIGIN_NS - asked for host, clock in found.items() if host]
    )


def truth_at(clocks: Clocks, host: int, clock: HostClock) -> float:
    since = (clock.at_ns - ORIGIN_NS - int(clocks.offset[host])) / (1.0 + float(clocks.rate[host]))
    return float(clock.at_ns - ORIGIN_NS - round(since))


def test_clocks_are_right_to_a_microsecond_under_drift_and_a_straggler() -> None:
    runs = [estimated(STRAGGLING, seed) for seed in range(8)]
    off = np.abs(np.concatenate([errors(clocks, found, 0, SECONDS) for clocks, _, found in runs]))
    assert np.median(off) <= 1_000
    assert np.percentile(off, 99) <= 10_000


def test_two_in_a_hundred_misaligned_operations_do_no_harm() -> None:
    clocks, estimator, found = estimated(replace(STRAGGLING, misaligned=0.02), 1)
    assert np.abs(errors(clocks, found, 0, SECONDS)).max() <= 5_000
    check = estimator.check
    assert check.violations == 0
    assert 0.005 < check.misjoined / check.operations < 0.03
    assert check.is_trusted


@pytest.mark.parametrize("cluster", [STRAGGLING, Cluster(), Cluster(straggler_ns=2e6, tail_ns=16_667.0)])
def test_the_interval_holds_the_truth(cluster: Cluster) -> None:
    for seed in range(5):
        clocks, _, found = estimated(cluster, seed, 20.0)
        for host in range(1, cluster.hosts):
            clock = found[host]
            assert clock.interval_lo_ns is not None
            assert clock.interval_hi_ns is not None
            assert clock.interval_lo_ns <= truth_at(clocks, host, clock) <= clock.interval_hi_ns


def test_exact_ends_give_exact_offsets() -> None:
    quiet = Cluster(hosts=3, gpus=1, drift_ppm=0.0, in_node_skew_ns=0.0, between_nodes_skew_ns=0.0, straggler_ns=1e6)
    clocks, _, found = estimated(quiet, 0, 10.0)
    for host in (1, 2):
        assert abs(found[host].offset_ns - float(clocks.offset[host])) < 200
    assert np.abs(errors(clocks, found, 0, 10)).max() < 200


def test_a_healthy_cluster_violates_nothing() -> None:
    _, estimator, found = estimated(Cluster(), 2)
    assert estimator.check.operations > 500
    assert estimator.check.violations == 0
    assert estimator.check.suspects == ()
    assert found[0].offset_ns == 0.0
    assert found[1].sigma_ns >= 10_000


def test_a_host_is_reached_over_another_that_shares_its_group() -> None:
    cluster = Cluster(hosts=3, gpus=1)
    random = np.random.default_rng(5)
    clocks = Clocks(cluster, random)
    (group,) = simulate(cluster, clocks, SECONDS, random)
    estimator = ClockEstimator()
    for one, other in ((0, 1), (1, 2)):
        columns = [one, other]
        estimator.add(columns, group.starts_ns[:, columns], group.ends_ns[:, columns], group.transfer_ns)
    found = estimator.estimate(0)
    assert np.abs(errors(clocks, found, 0, SECONDS)).max() < 10_000


def test_a_host_without_a_tie_to_the_reference_is_left_out() -> None:
    cluster = Cluster(hosts=4, gpus=1)
    random = np.random.default_rng(6)
    (group,) = simulate(cluster, Clocks(cluster, random), 10.0, random)
    estimator = ClockEstimator()
    for columns in ([0, 1], [2, 3]):
        estimator.add(columns, group.starts_ns[:, columns], group.ends_ns[:, columns], group.transfer_ns)
    assert sorted(estimator.estimate(0)) == [0, 1]


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_clock_that_is_set_is_found_and_healed_within_ten_seconds(hosts: int) -> None:
    cluster = Cluster(hosts=hosts, straggler_ns=2e6, step_at_ns=30_000_000_000)
    clocks, estimator, found = estimated(cluster, 7, 40.0)
    assert [host for host, clock in found.items() if clock.steps] == [1]
    (step,) = found[1].steps
    assert abs(step - int(clocks.read(1, np.array([30_000_000_000]))[0])) < 1_000_000_000
    assert abs(found[1].step_sizes_ns[0] - cluster.step_ns) < 200_000
    assert np.abs(errors(clocks, found, 31, 40)).max() < 20_000
    assert estimator.check.violations == 0


def test_a_step_in_the_first_operations_of_a_host_corrects_its_estimate_and_is_not_told() -> None:
    cluster = Cluster(hosts=4, gpus=1, step_at_ns=400_000_000)
    clocks, _, found = estimated(cluster, 7, 10.0)
    assert all(clock.steps == () for clock in found.values())
    assert np.abs(errors(clocks, found, 3, 10)).max() < 50_000


@pytest.mark.parametrize("groups", [2, 4])
def test_numbers_that_slip_after_a_lost_line_set_no_clock(groups: int) -> None:
    """From the middle on, each end of host 1 is that of the call after: five buckets a step, then the next step."""
    random, estimator = np.random.default_rng(3), ClockEstimator()
    for nth in range(groups):
        begin = np.arange(60)[:, None] * 1e9 * (1 + random.normal(0, 0.002, (60, 1)))
        end = ORIGIN_NS + (begin + np.arange(5) * 4e6 * (1 + random.normal(0, 0.01, (60, 5)))).ravel().astype(np.int64)
        ends = np.stack([end, end + 40_000_000], axis=1) + random.integers(0, 5_000, (300, 2))
        if nth == 0:
            ends[150:-1, 1] = ends[151:, 1]
        estimator.add([0, 1], ends - 100_000, ends, np.full(300, 100_000))
    found = estimator.estimate(0)
    assert found[1].steps == ()
    assert abs(found[1].offset_ns - 40_000_000) < 20_000
    assert estimator.check.violations == 0
    assert estimator.check.misjoined == 149
    assert estimator.check.is_trusted


def test_memory_is_bounded_however_much_is_fed() -> None:
    cluster = Cluster(hosts=2, gpus=1, operations_per_second=2000.0)
    random = np.random.default_rng(8)
    (group,) = simulate(cluster, Clocks(cluster, random), 20.0, random)
    estimator = ClockEstimator()
    for part in np.array_split(np.arange(len(group.starts_ns)), 20):
        estimator.add([0, 1], group.starts_ns[part], group.ends_ns[part], group.transfer_ns[part])
    assert estimator.estimate(0)[1].samples <= 1.5 * 16 * 60 + 2000


def test_unseen_ranks_and_single_hosts_are_harmless() -> None:
    estimator = ClockEstimator()
    unseen = np.full((3, 2), NO_TIME_NS)
    estimator.add([0, 1], unseen, unseen, np.full(3, -1, np.int64))
    estimator.add([0, 0], unseen, unseen, np.full(3, -1, np.int64))
    assert list(estimator.estimate(0)) == [0]


def test_long_operations_tell_clocks_where_short_ones_are_too_few() -> None:
    """Two captures of short times: a short operation and four long ones a step, whose ends scatter alike."""
    off = list[float]()
    for seed in range(40):
        random = np.random.default_rng(seed)
        steps = np.array([0.9, 4.7, 5.7]) * 1e9
        true = np.repeat(steps, 5) + np.tile(np.arange(5) * 5e6, len(steps))
        length = np.tile([35e3, 3e6, 3e6, 3e6, 3e6], len(steps)).astype(np.int64)
        ends = (ORIGIN_NS + true[:, None] + random.uniform(0, 7_000, (len(true), 2))).astype(np.int64)
        ends[:, 1] += (40_000_000 - 20e-6 * true).astype(np.int64)
        estimator = ClockEstimator()
        estimator.add([0, 1], ends - length[:, None], ends, length)
        at = np.array([ORIGIN_NS + 5_700_000_000 + 40_000_000 - 114_000])
        off.append(float(to_true(at, estimator.estimate(0)[1])[0] - ORIGIN_NS - 5_700_000_000))
    assert np.percentile(np.abs(off), 90) <= 2_500


def test_correction_is_exact_and_keeps_what_is_unknown() -> None:
    clock = HostClock(
        offset_ns=80_000_000.25, drift_ppm=50.0, at_ns=ORIGIN_NS, sigma_ns=1.0, interval_lo_ns=None,
        interval_hi_ns=None, samples=1,
    )  # fmt: skip
    times = np.array([ORIGIN_NS, ORIGIN_NS + 10_000_000_000, NO_TIME_NS])
    expected = [ORIGIN_NS - 80_000_000, ORIGIN_NS + 10_000_000_000 - 80_500_000, NO_TIME_NS]
    assert to_true(times, clock).tolist() == expected


@pytest.mark.parametrize("per_burst", [2, 3, 4, 8])
def test_the_first_bursts_of_operations_tell_no_false_drift_and_no_false_step(per_burst: int) -> None:
    """A step's gradients end within a fraction of a millisecond: between them there is no slope to be had."""
    offsets, rates = (0, 44_000_000, -26_000_000), (0.0, 20e-6, -18e-6)
    for seed in range(6):
        random, estimator = np.random.default_rng(seed), ClockEstimator()
        found: dict[int, HostClock] = {}
        for step in range(1, 9):
            end = step * 900_000_000 + np.arange(per_burst) * 20_000
            clocks = [
                ORIGIN_NS + end + offset + np.rint(rate * end).astype(np.int64)
                for offset, rate in zip(offsets, rates, strict=True)
            ]
            ends = np.stack(clocks, axis=1) + random.integers(0, 10_000, (per_burst, 3))
            estimator.add([0, 1, 2], ends - 100_000, ends, np.full(per_burst, 100_000))
            found = estimator.estimate(0)
        assert all(clock.steps == () for clock in found.values())
        assert [round(found[host].drift_ppm, -1) for host in (1, 2)] == [20, -20]
