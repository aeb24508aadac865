"""python benchmarks/clock.py [RUNS]: the clock estimate against the truth, on simulated clusters.

Five tables, of RUNS (20) runs each; errors are in microseconds.

1. Offset and drift, beside the two usual methods. The median of starts is what trace mergers do that align first
   kernels; the constant median of ends is the best that published tools do. "bound" is the median error that least
   squares would have if it were told the scatter of the simulated ends: no unbiased line does better. "held" is the
   share of seconds and hosts, estimates being renewed live, in which the interval holds the truth.
2. A clock that is set by 5 ms in mid-run: seconds of data until it is found, and until it is below 10 us for good.
3. Hosts that only send to each other, by both ways of their messages.
4. What agents' heartbeats, and daemons that keep clocks (NTP, PTP, chrony), tell before any operation does.
5. Groups without drift on exact ends: offsets of 0, +50 and -30 ms.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # the simulated cluster is the tests' own

from service.simulated_ends import ORIGIN_NS, Clocks, Cluster, Simulated, Stages, simulate

from ncclscope_service.clock.estimator import ClockEstimator, to_true
from ncclscope_service.clock.host_clocks import ClockPrior, clock_by_prior
from ncclscope_service.intake.agents import KnownAgent
from ncclscope_service.store.records import HostClock
from ncclscope_wire.messages import AgentHealth, Heartbeat, Hello

Floats = NDArray[np.float64]

STRAGGLING = Cluster(straggler_ns=2e6)
SCENARIOS = {
    "4 nodes, 50 ppm, 80 ms, straggler 2 ms": STRAGGLING,
    "the same, balanced": Cluster(),
    "the same, 2 % misaligned": replace(STRAGGLING, misaligned=0.02),
    "the same, 10 ppm": replace(STRAGGLING, drift_ppm=10.0),
    "1 operation/s, 1 group": replace(STRAGGLING, operations_per_second=1.0, gpus=1),
    "16 nodes": replace(STRAGGLING, hosts=16),
    "one-sided 50 us tail (interval only)": replace(STRAGGLING, tail_ns=16_667.0),
}
STEPS = {
    "2 hosts": replace(STRAGGLING, hosts=2, step_at_ns=30_000_000_000),
    "4 hosts": replace(STRAGGLING, step_at_ns=30_000_000_000),
    "4 hosts, 1 operation/s, 1 group": replace(
        STRAGGLING, operations_per_second=1.0, gpus=1, step_at_ns=30_000_000_000
    ),
}
SECONDS = 60
HEALED_NS = 10_000


@dataclass(slots=True)
class Live:
    """A simulated run as it comes: a second of operations, then an estimate."""

    cluster: Cluster
    seed: int
    clocks: Clocks = field(init=False)
    groups: list[Simulated] = field(init=False)
    estimator: ClockEstimator = field(default_factory=ClockEstimator)
    estimate_s: float = 0.0
    """CPU seconds of the last estimate."""

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self.clocks = Clocks(self.cluster, random)
        self.groups = simulate(self.cluster, self.clocks, float(SECONDS), random)

    def estimates(self) -> Iterator[tuple[int, dict[int, HostClock]]]:
        """(second, clocks) for each second."""
        for second in range(1, SECONDS + 1):
            for group in self.groups:
                ends = group.ends_ns[:, 0] - ORIGIN_NS
                now = (ends >= (second - 1) * 10**9) & (ends < second * 10**9)
                self.estimator.add(list(group.hosts), group.starts_ns[now], group.ends_ns[now], group.transfer_ns[now])
            begin = time.process_time()
            found = self.estimator.estimate(0)
            self.estimate_s = time.process_time() - begin
            yield second, found

    def off_ns(self, host: int, clock: HostClock, asked: NDArray[np.int64]) -> Floats:
        """By how much corrected times are wrong."""
        wrong: Floats = (to_true(self.clocks.read(host, asked), clock) - ORIGIN_NS - asked).astype(np.float64)
        return wrong

    def is_held(self, host: int, clock: HostClock) -> bool:
        """Whether the interval holds the true offset at the instant for which it is told."""
        lo = -np.inf if clock.interval_lo_ns is None else clock.interval_lo_ns
        hi = np.inf if clock.interval_hi_ns is None else clock.interval_hi_ns
        since = clock.at_ns - ORIGIN_NS - int(self.clocks.offset[host])
        truth = clock.at_ns - ORIGIN_NS - round(since / (1.0 + float(self.clocks.rate[host])))
        return lo <= truth <= hi


@dataclass(slots=True)
class Shown:
    """Results of all runs of a scenario."""

    ours: list[Floats] = field(default_factory=list[Floats])
    ends: list[Floats] = field(default_factory=list[Floats])
    starts: list[Floats] = field(default_factory=list[Floats])
    held: list[bool] = field(default_factory=list[bool])
    widths_us: list[float] = field(default_factory=list[float])
    took_ms: list[float] = field(default_factory=list[float])

    def add(self, live: Live) -> None:
        """Runs one, and compares it with the truth."""
        estimated: dict[int, HostClock] = {}
        for _, estimated in live.estimates():
            self.held += [live.is_held(host, clock) for host, clock in estimated.items() if host]
        self.took_ms.append(1e3 * live.estimate_s)
        asked = np.linspace(0, SECONDS * 1e9, 200).astype(np.int64)
        for host in range(1, live.cluster.hosts):
            shown, clock = live.clocks.read(host, asked), estimated[host]
            self.ours.append(live.off_ns(host, clock, asked) / 1e3)
            self.ends.append((shown - _constant(live.groups, host, "ends_ns") - ORIGIN_NS - asked) / 1e3)
            self.starts.append((shown - _constant(live.groups, host, "starts_ns") - ORIGIN_NS - asked) / 1e3)
            if clock.interval_lo_ns is not None and clock.interval_hi_ns is not None:
                self.widths_us.append((clock.interval_hi_ns - clock.interval_lo_ns) / 1e3)


def _constant(groups: list[Simulated], host: int, column: str) -> int:
    differences = [getattr(group, column)[:, host] - getattr(group, column)[:, 0] for group in groups]
    return int(np.median(np.concatenate(differences)))


def bound_us(cluster: Cluster) -> float:
    """The median error of a least-squares line through so many differences of ends with the simulated scatter."""
    one = (1 - 2 / np.pi) * cluster.between_nodes_skew_ns**2 + cluster.in_node_skew_ns**2 / 12
    count = SECONDS * cluster.operations_per_second * cluster.gpus * (1 - cluster.misaligned)
    x = np.linspace(-0.5, 0.5, 200)
    sigma = np.sqrt(2 * one / count * (1 + 12 * x**2))
    return float(np.median(np.abs(np.random.default_rng(0).normal(0, sigma, (2000, 200)))) / 1e3)


def print_estimates(runs: int) -> None:
    """Table 1."""
    print("| clocks | ours: median / p99 | bound | median of ends | median of starts | held | width | CPU ms |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, cluster in SCENARIOS.items():
        shown = Shown()
        for seed in range(runs):
            shown.add(Live(cluster, seed))
        cells = [_median_and_p99(parts) for parts in (shown.ours, shown.ends, shown.starts)]
        bound = "biased" if cluster.tail_ns else f"{bound_us(cluster):.2f}"
        print(
            f"| {name} | {cells[0]} | {bound} | {cells[1]} | {cells[2]} "
            f"| {np.mean(shown.held):.2%} of {len(shown.held)} | {np.median(shown.widths_us):.0f} "
            f"| {np.median(shown.took_ms):.0f} |",
            flush=True,
        )


def _median_and_p99(parts: list[Floats]) -> str:
    absolute = np.abs(np.concatenate(parts))
    return f"{np.median(absolute):.2f} / {np.percentile(absolute, 99):.2f}"


def print_steps(runs: int) -> None:
    """Table 2."""
    print("\n| a clock is set by 5 ms | found after s: median / most | healed after s: median / most | error then |")
    print("|---|---:|---:|---:|")
    for name, cluster in STEPS.items():
        found, healed, after = list[int](), list[int](), list[float]()
        for seed in range(runs):
            live, at = Live(cluster, seed), 30
            first, last_wrong = SECONDS, at
            for second, clocks in live.estimates():
                if second <= at:
                    continue
                if 1 not in clocks:  # found, and all from before forgotten: nothing is claimed
                    last_wrong = second
                    continue
                if clocks[1].steps:
                    first = min(first, second)
                off = float(np.abs(live.off_ns(1, clocks[1], np.array([second * 10**9 - 1])))[0])
                if off > HEALED_NS:
                    last_wrong = second
                else:
                    after.append(off)
            found.append(first - at)
            healed.append(last_wrong + 1 - at)
        print(
            f"| {name} | {np.median(found):.0f} / {max(found)} | {np.median(healed):.0f} / {max(healed)} "
            f"| {np.median(after) / 1e3:.2f} |",
            flush=True,
        )


def print_two_way(runs: int) -> None:
    """Table 3."""
    print("\n| only sends and receives | median / p99 | half the band | within it | interval held |")
    print("|---|---:|---:|---:|---:|")
    ways = {"2 stages": (2, 0), "4 stages in a chain": (4, 0), "2 stages, one way 300 us longer": (2, 300_000)}
    for name, (hosts, asymmetry) in ways.items():
        off, sigmas, within, held = list[Floats](), list[float](), list[bool](), list[bool]()
        for seed in range(runs):
            stages, estimator = Stages(hosts, seed, asymmetry_ns=asymmetry), ClockEstimator()
            stages.feed(estimator)
            asked = np.linspace(0, stages.seconds * 1e9, 50).astype(np.int64)
            for host, clock in estimator.estimate(0).items():
                if not host:
                    continue
                wrong = (to_true(stages.read(host, asked), clock) - ORIGIN_NS - asked) / 1e3
                off.append(wrong)
                sigmas.append(clock.sigma_ns / 1e3)
                within.append(bool(np.abs(wrong).max() <= clock.sigma_ns / 1e3))
                truth = stages.offset[host] + stages.rate[host] * (clock.at_ns - ORIGIN_NS - int(stages.offset[host]))
                lo, hi = clock.interval_lo_ns, clock.interval_hi_ns
                held.append(lo is not None and hi is not None and lo <= truth <= hi)
        print(
            f"| {name} | {_median_and_p99(off)} | {np.median(sigmas):.0f} "
            f"| {np.mean(within):.1%} | {np.mean(held):.1%} |"
        )


def print_priors(runs: int) -> None:
    """Table 4: a heartbeat a second, ways of 50 us and an exponential 200 us; daemons within what they promise."""
    print("\n| told by | median / p99 | sigma | within it |")
    print("|---|---:|---:|---:|")
    for name, promised_ns in {
        "heartbeats, no daemon, 50 ppm": None,
        "PTP (1 us)": 1_000,
        "chrony (2 ms)": 2_000_000,
    }.items():
        off, sigmas = list[float](), list[float]()
        for seed in range(10 * runs):
            random = np.random.default_rng(seed)
            truth, clock = _by_prior(promised_ns, random)
            off.append((clock.offset_ns - truth) / 1e3)
            sigmas.append(clock.sigma_ns / 1e3)
        absolute = np.abs(off)
        print(
            f"| {name} | {np.median(absolute):.0f} / {np.percentile(absolute, 99):.0f} | {np.median(sigmas):.0f} "
            f"| {np.mean(absolute <= np.array(sigmas)):.1%} |"
        )


def _by_prior(promised_ns: int | None, random: np.random.Generator) -> tuple[float, HostClock]:
    """The true offset of the second of two hosts now, and what is told of it."""
    most = 80e6 if promised_ns is None else promised_ns
    offsets = random.uniform(-most, most, 2)
    rates = random.uniform(-50e-6, 50e-6, 2) if promised_ns is None else np.zeros(2)
    priors = [
        ClockPrior(heartbeat_offset_ns=_heard(offset, rate, random), error_ns=promised_ns)
        for offset, rate in zip(offsets.tolist(), rates.tolist(), strict=True)
    ]
    clock = clock_by_prior(priors[1], priors[0], ORIGIN_NS)
    assert clock is not None
    now = offsets + rates * 60e9
    return float(now[1] - now[0]), clock


def _heard(offset: float, rate: float, random: np.random.Generator) -> int | None:
    """Offset of an agent's clock, as the service knows it after a minute of heartbeats."""
    agent = KnownAgent(
        Hello(
            protocol_version=1, software_version="", agent_id="a", session_id="s", name="a", host="a", job="j", pid=1
        ),
        max_sources=1,
    )
    for second in range(61):
        sent = ORIGIN_NS + second * 10**9
        wall = sent + round(offset + rate * second * 1e9)
        way = round(50_000 + random.exponential(200_000))
        agent.on_heartbeat(Heartbeat(agent_wall_ns=wall, health=AgentHealth()), sent + way)
    return agent.record().clock_offset_ns


def print_exact() -> None:
    """Table 5."""
    offsets = np.array([0, 50_000_000, -30_000_000])
    random = np.random.default_rng(0)
    ends = ORIGIN_NS + np.sort(random.integers(0, 10 * 10**9, 100))[:, None] + offsets
    late = random.integers(0, 2_000_000, (100, 3))
    estimator = ClockEstimator()
    estimator.add([0, 1, 2], ends - 50_000 - late, ends, np.full(100, 50_000))
    found = estimator.estimate(0)
    print("\n| offset in ms, exact ends | 0 | +50 | -30 |\n|---|---:|---:|---:|")
    wrong = " | ".join(f"{found[host].offset_ns - float(offsets[host]):.1f}" for host in range(3))
    print(f"| error in ns | {wrong} |")


def main() -> None:
    """Prints the tables."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print(f"{runs} runs of {SECONDS} s each; errors in us\n")
    print_estimates(runs)
    print_steps(runs)
    print_two_way(runs)
    print_priors(runs)
    print_exact()


if __name__ == "__main__":
    main()
