"""python benchmarks/clock.py [RUNS]: error of the clock estimate beside the two usual methods, on simulated clusters.

Each run draws clocks, trains for a window, estimates, and asks for the reference time of instants within the window.
The median of starts is what trace mergers do that align first kernels; the constant median of ends is the best that
published tools do. Errors are in microseconds; "held" is the share of clocks whose interval holds the truth.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # the simulated cluster is the tests' own

from service.simulated_ends import ORIGIN_NS, Clocks, Cluster, Simulated, simulate

from ncclscope_service.clock import ClockEstimator, to_true

SCENARIOS = {
    "4 nodes, 50 ppm, 80 ms, straggler 2 ms": Cluster(straggler_ns=2e6),
    "the same, balanced": Cluster(),
    "the same, 2 % misaligned": Cluster(straggler_ns=2e6, misaligned=0.02),
    "the same, 10 ppm": Cluster(straggler_ns=2e6, drift_ppm=10.0),
    "1 operation/s, 1 group": Cluster(straggler_ns=2e6, operations_per_second=1.0, gpus=1),
    "16 nodes": Cluster(hosts=16, straggler_ns=2e6),
    "one-sided 50 us tail (interval only)": Cluster(straggler_ns=2e6, tail_ns=16_667.0),
}
SECONDS = 60.0


def errors(cluster: Cluster, seed: int) -> tuple[dict[str, NDArray[np.float64]], float, float, float]:
    """Errors in us by method, share of intervals that hold the truth, their median width in us, seconds it took."""
    random = np.random.default_rng(seed)
    clocks = Clocks(cluster, random)
    groups = simulate(cluster, clocks, SECONDS, random)
    estimator = ClockEstimator()
    for group in groups:
        for part in np.array_split(np.arange(len(group.starts_ns)), 12):
            estimator.add(list(group.hosts), group.starts_ns[part], group.ends_ns[part], group.transfer_ns[part])
    begin = time.perf_counter()
    estimated = estimator.estimate(0)
    took = time.perf_counter() - begin
    asked = np.linspace(0, SECONDS * 1e9, 200).astype(np.int64)
    found: dict[str, list[NDArray[np.float64]]] = {"ours": [], "median of ends": [], "median of starts": []}
    held: list[bool] = []
    widths: list[float] = []
    for host in range(1, cluster.hosts):
        shown = clocks.read(host, asked)
        clock = estimated[host]
        found["ours"].append((to_true(shown, clock) - ORIGIN_NS - asked) / 1e3)
        found["median of ends"].append((shown - _constant(groups, host, "ends_ns") - ORIGIN_NS - asked) / 1e3)
        found["median of starts"].append((shown - _constant(groups, host, "starts_ns") - ORIGIN_NS - asked) / 1e3)
        truth = float(clock.at_ns - _invert(clocks, host, clock.at_ns))
        lo = clock.interval_lo_ns if clock.interval_lo_ns is not None else -np.inf
        hi = clock.interval_hi_ns if clock.interval_hi_ns is not None else np.inf
        held.append(lo <= truth <= hi)
        widths.append((hi - lo) / 1e3)
    return (
        {method: np.concatenate(parts) for method, parts in found.items()},
        float(np.mean(held)),
        float(np.median(widths)),
        took,
    )


def _constant(groups: list[Simulated], host: int, column: str) -> int:
    differences = [getattr(group, column)[:, host] - getattr(group, column)[:, 0] for group in groups]
    return int(np.median(np.concatenate(differences)))


def _invert(clocks: Clocks, host: int, shown: int) -> int:
    since = shown - ORIGIN_NS - int(clocks.offset[host])
    return ORIGIN_NS + round(since / (1.0 + float(clocks.rate[host])))


def main() -> None:
    """Prints the table."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print(f"{runs} runs of {SECONDS:.0f} s each; errors in us: median / p99 of |error|")
    print(
        f"{'scenario':40} {'ours':>15} {'median of ends':>18} {'median of starts':>18} "
        f"{'held':>7} {'width':>7} {'ms':>5}"
    )
    for name, cluster in SCENARIOS.items():
        results = [errors(cluster, seed) for seed in range(runs)]
        cells = []
        for method in ("ours", "median of ends", "median of starts"):
            absolute = np.abs(np.concatenate([found[method] for found, _, _, _ in results]))
            cells.append(f"{np.median(absolute):.2f} / {np.percentile(absolute, 99):.2f}")
        held = np.mean([share for _, share, _, _ in results])
        width = np.median([size for _, _, size, _ in results])
        took = 1e3 * np.median([seconds for _, _, _, seconds in results])
        print(f"{name:40} {cells[0]:>15} {cells[1]:>18} {cells[2]:>18} {held:7.1%} {width:7.0f} {took:5.0f}")


if __name__ == "__main__":
    main()
