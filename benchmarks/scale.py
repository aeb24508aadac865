"""python benchmarks/scale.py [--ranks 64,512,4096]: what joining, clocks and measuring cost as ranks grow.

Eight ranks a host, in groups of eight across as many hosts (data parallel) and one group of all. CPU seconds for each
operation of each rank, of the join alone, of measuring alone, and of taking operations into the clocks; and for each
estimate of the clocks, which is made once a second (512 hosts: every four): all of it, and what causality takes of it.
The window of 60 s is full.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.clock.causality import Bounds
from ncclscope_service.clock.estimator import ClockEstimator
from ncclscope_service.join.ranks import CollectiveJoin
from ncclscope_service.measure.transfer import measure_all_to_all

ORIGIN_NS = 1_750_000_000_000_000_000
PER_HOST = 8
GROUP = 8
SECONDS = 60
RATE = 4
"""Operations of each group per second."""


@dataclass(slots=True)
class Group:
    """One communicator: the host of each rank, and K x R times on their clocks."""

    hosts: NDArray[np.int64]
    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]


def groups_of(ranks: int, random: np.random.Generator) -> list[Group]:
    """Data-parallel groups over eight hosts each, and the world."""
    hosts = ranks // PER_HOST
    offset, rate = random.integers(-80_000_000, 80_000_000, hosts), random.uniform(-50e-6, 50e-6, hosts)
    offset[0], rate[0] = 0, 0.0
    found = [np.repeat(np.arange(hosts), PER_HOST)]
    for begin in range(0, hosts, GROUP):
        found += [np.arange(begin, min(begin + GROUP, hosts))] * PER_HOST
    # neighbouring groups share a host, so that every host is tied to the reference twice
    found += [np.array([begin - 1, begin]) for begin in range(GROUP, hosts, GROUP)]
    return [_group(of, offset, rate, random) for of in found if len(np.unique(of)) > 1]


def _group(
    hosts: NDArray[np.int64], offset: NDArray[np.int64], rate: NDArray[np.float64], random: np.random.Generator
) -> Group:
    count = SECONDS * RATE
    begin = np.sort(random.integers(0, SECONDS * 10**9, count))[:, None]
    arrival = begin + np.abs(random.normal(0, 200_000, (count, len(hosts)))).astype(np.int64)
    ends = arrival.max(axis=1)[:, None] + 50_000 + random.integers(0, 8_000, (count, len(hosts)))
    read = [
        ORIGIN_NS + times + offset[hosts] + np.rint(rate[hosts] * times).astype(np.int64) for times in (arrival, ends)
    ]
    return Group(hosts, *read)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="64,512,4096")
    given = parser.parse_args()
    print("| ranks | operations | join | measure | into clocks | estimate, s | of it causality | sigma | RSS |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for ranks in (int(each) for each in given.ranks.split(",")):
        groups = groups_of(ranks, np.random.default_rng(ranks))
        operations = sum(group.ends_ns.size for group in groups)
        joining, measuring = _join(groups), _measure(groups)
        estimator = ClockEstimator()
        began = time.process_time()
        for group in groups:
            for part in np.array_split(np.arange(len(group.ends_ns)), SECONDS):
                duration = (group.ends_ns[part] - group.starts_ns[part]).min(axis=1)
                estimator.add(group.hosts.tolist(), group.starts_ns[part], group.ends_ns[part], duration)
        learning = time.process_time() - began
        began = time.process_time()
        clocks = estimator.estimate(0)
        estimating = time.process_time() - began
        bounding = _causality(groups, ranks // PER_HOST)
        sigma = max(clock.sigma_ns for clock in clocks.values()) / 1e3
        each = " | ".join(f"{1e6 * seconds / operations:.2f} us" for seconds in (joining, measuring, learning))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"| {ranks} | {operations} | {each} | {estimating:.3f} | {bounding:.3f} | "
            f"{sigma:.0f} us | {peak:.0f} MiB |",
            flush=True,
        )


def _join(groups: list[Group]) -> float:
    join = CollectiveJoin(settle_ns=0, patience_ns=10**12)
    began, taken = time.process_time(), 0
    for part in np.array_split(np.arange(SECONDS * RATE), SECONDS):
        for number, group in enumerate(groups):
            size = len(group.hosts)
            for rank in range(size):
                ids = part * size + rank
                join.report(
                    number, size, rank, coll_seq=part, operations=ids, has_kernel=np.ones(len(part), bool), now_ns=0
                )
        sizes = {number: len(group.hosts) for number, group in enumerate(groups)}
        taken += sum(len(each.coll_seq) for each in join.take_ready(members_seen=sizes, now_ns=0))
    assert taken == SECONDS * RATE * len(groups)
    return time.process_time() - began


def _measure(groups: list[Group]) -> float:
    began = time.process_time()
    for group in groups:
        for part in np.array_split(np.arange(SECONDS * RATE), SECONDS):
            starts, ends = group.starts_ns[part], group.ends_ns[part]
            moved = np.full(len(part), 1 << 20, np.int64)
            measure_all_to_all(starts, ends, np.zeros(starts.shape, bool), moved, (moved * 1.5).astype(np.float64))
    return time.process_time() - began


def _causality(groups: list[Group], hosts: int) -> float:
    """CPU seconds of the bounds of one estimate."""
    bounds, tables = Bounds(hosts), list[tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.float64]]]()
    for group in groups:
        members, first = np.unique(group.hosts, return_index=True)
        offset = np.median(group.ends_ns[:, first] - group.ends_ns[:, [first[0]]], axis=0)
        starts, ends = (
            (each[:, first] - ORIGIN_NS - offset).astype(np.float64) for each in (group.starts_ns, group.ends_ns)
        )
        tables.append((members, starts, ends))
    began = time.process_time()
    for members, starts, ends in tables:
        bounds.add_collectives(members, starts, ends, np.full(len(starts), 1e7))
    bounds.solve(0)
    return time.process_time() - began


if __name__ == "__main__":
    main()
