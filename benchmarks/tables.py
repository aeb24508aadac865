"""python -m benchmarks.tables [--rows 4000000]: what it costs that tables of operations grow, and are forgotten.

Operations (rows.OPERATION) are appended in batches of 30,000, each way in a process of its own, whose memory is new:
all of them kept; all but a window forgotten, after each batch; and all kept, then all but a window forgotten after each
batch of as many more. *Doubling* is the way of before: twice the memory that is needed, and everything moved there.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from ncclscope_service import rows, whole_rows
from ncclscope_service.store import Table

_BATCH = 30_000
_WINDOW = 1_000_000
_FIRST = 1024


class Doubling(Table):
    """A table that has no room for more than twice what it needs."""

    def _make_room(self, amount: int) -> None:
        if self._end + amount <= len(self._rows):
            return
        kept, capacity = len(self), len(self._rows)
        needed = kept + amount
        if capacity < 1.5 * needed or capacity > max(_FIRST, 8 * needed):
            moved = np.empty(max(_FIRST, 2 * needed), dtype=self.dtype)
        else:
            moved = self._rows
        whole_rows.put(moved, 0, self.rows)
        self._rows, self._begin, self._end = moved, 0, kept


WAYS: dict[str, Callable[[], Table]] = {
    "doubling": lambda: Doubling(rows.OPERATION),
    "now": lambda: Table(rows.OPERATION),
}
LIVES = ("all are kept", "a window is kept", "all are kept, then a window")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one way took."""

    longest_ms: float
    seconds: float
    cpu_seconds: float
    most_mib: float
    last_mib: float
    """Resident at last, beside what Python and numpy take."""


def measure(way: str, life: str, amount: int) -> Cost:
    """Appends `amount` rows."""
    batch, table = np.zeros(_BATCH, rows.OPERATION), WAYS[way]()
    before_mib = _resident_mib()
    longest, began, cpu = 0.0, time.perf_counter(), time.process_time()
    for appended in range(_BATCH, (2 if life == LIVES[2] else 1) * amount + 1, _BATCH):
        since = time.perf_counter()
        table.append(batch)
        longest = max(longest, time.perf_counter() - since)
        if life == LIVES[1] or (life == LIVES[2] and appended > amount):
            table.drop_before(table.next_id - _WINDOW)
    return Cost(
        longest_ms=1e3 * longest,
        seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - cpu,
        most_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before_mib,
        last_mib=_resident_mib() - before_mib,
    )


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    given = parser.parse_args()
    print("| rows | way | longest append, ms | all, s | CPU s | most resident, MiB | resident at last, MiB |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for life in LIVES:
        costs: dict[str, Cost] = {}
        for way in WAYS:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as one:
                cost = costs[way] = one.submit(measure, way, life, given.rows).result()
            print(
                f"| {life} | {way} | {cost.longest_ms:.0f} | {cost.seconds:.1f} | {cost.cpu_seconds:.2f} "
                f"| {cost.most_mib:,.0f} | {cost.last_mib:,.0f} |"
            )
        now, before = costs["now"], costs["doubling"]
        print(
            f"| | now of before | {now.longest_ms / before.longest_ms:.2f} | {now.seconds / before.seconds:.2f} "
            f"| {now.cpu_seconds / before.cpu_seconds:.2f} | {now.most_mib / before.most_mib:.2f} "
            f"| {now.last_mib / before.last_mib:.2f} |"
        )


if __name__ == "__main__":
    main()
