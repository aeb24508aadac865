"""python -m benchmarks.job_history [--minutes 60]: what charts over the whole time of a job cost the service.

A job of so many ranks does everything that its groups do in each five seconds, and its history takes it bucket by
bucket: memory of the history then, its state as it is written, and CPU time for each five seconds, which is beside the
work of ten ticks.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from benchmarks.large_job import JOB, NOW_NS, large_job

from ncclscope_service.columns.buckets import BUCKET_NS
from ncclscope_service.rollup.recent_sums import RecentSums
from ncclscope_service.store import state
from ncclscope_service.store.job_history import JobHistory
from ncclscope_service.store.tables import Store


def aged(store: Store, minutes: int) -> float:
    """Lets the job run for so long; gives the CPU seconds per bucket that its history took."""
    sums = RecentSums(store)
    series = store.series.rows
    members, communicators = np.arange(len(store.members)), np.arange(len(store.communicators))
    keys = (series["communicator"].astype(np.int64) << 16) | (series["op"].astype(np.int64) << 8) | series["size_class"]
    ranks = np.arange(len(store.processes))
    history = store.job_histories[JOB]
    buckets, spent = minutes * 12, 0.0
    for number in range(buckets):
        at_ns = NOW_NS + number * BUCKET_NS
        times, ones = np.full(len(members), at_ns), np.ones(len(members))
        sums.waits.add(times, members, ones, 2 * ones)
        sums.bytes.add(times[: len(communicators)], communicators, ones[: len(communicators)])
        began = time.process_time()
        history.bandwidths.add(np.full(len(keys), at_ns), keys, np.ones(len(keys)), np.ones(len(keys)))
        history.lost_time.add(times[: len(ranks)], ranks, ones[: len(ranks)], ones[: len(ranks)])
        sums.process_window(at_ns)
        spent += time.process_time() - began
    return spent / buckets


def held_bytes(history: JobHistory) -> int:
    """Memory of its sums."""
    return sum(
        sums.nbytes
        for each in (history.bytes, history.waits, history.bandwidths, history.lost_time)
        for sums in each.begins().values()
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 4096])
    asked = parser.parse_args()
    print(f"{'ranks':>6} {'members':>8} {'memory':>11} {'state':>11} {'CPU of 5 s':>11}")
    for ranks in asked.ranks:
        job = large_job(ranks)
        job.store.collectives.drop_before(job.store.collectives.next_id)
        seconds = aged(job.store, asked.minutes)
        history = job.store.job_histories[JOB]
        held, written = held_bytes(history) / 2**20, len(state.snapshot(history)) / 2**20
        print(f"{ranks:6} {len(job.store.members):8} {held:7.1f} MiB {written:7.1f} MiB {1e3 * seconds:8.2f} ms")


if __name__ == "__main__":
    main()
