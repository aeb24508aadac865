"""The bound where nothing is lost and nothing tells groups: which Sends and Recvs share a kernel.

Lines and launches of one thread are then known one by one, but for stretches of r Sends and Recvs of one communicator
that were launched as k kernels, with nothing between. Where k is 1 or r, the order decides; else there are
(r-1 over k-1) ways to cut them. An exact method that knows how often two neighbours of these kinds and peers are
launched together (from the truth, which no method has) gets the posterior of "operation i belongs to kernel g" by
forward and backward sums over all cuts, and expects to be right where it is highest. Where opCount moves with every
launch, it tells the cuts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from benchmarks.alignment.jobs import Row
from numpy.typing import NDArray

_IN_GROUPS = {"Send", "Recv", "AlltoAll", "Gather", "Scatter"}


@dataclass(frozen=True, slots=True)
class OpenGroups:
    """What an exact method expects."""

    operations: int
    """That launch a kernel."""
    expected: float
    """Of these, how many it expects to get right."""

    @property
    def f1(self) -> float:
        """Each operation is answered once and has one kernel: F1 is the share that is right."""
        return self.expected / self.operations if self.operations else 1.0


def bound_of_groups(rows: Sequence[Row]) -> OpenGroups:
    """The bound for a job's truth (rows of truth/operations.parquet, in call order of each thread)."""
    stretches = _stretches(rows, _counted(rows))
    together: Counter[Hashable] = Counter()
    neighbours: Counter[Hashable] = Counter()
    for before, after in chain.from_iterable(map(pairwise, stretches)):
        neighbours[_kinds(before, after)] += 1
        together[_kinds(before, after)] += before["launch_id"] == after["launch_id"]
    operations = sum(row["launch_id"] is not None for row in rows)
    expected = float(operations - sum(map(len, stretches)))
    for stretch in stretches:
        pairs = [_kinds(before, after) for before, after in pairwise(stretch)]
        chances = np.array([together[kinds] / neighbours[kinds] for kinds in pairs])
        expected += float(membership(chances, len({row["launch_id"] for row in stretch})).max(axis=1).sum())
    return OpenGroups(operations, expected)


def membership(together: NDArray[np.float64], kernels: int) -> NDArray[np.float64]:
    """Probability of (operation, kernel) for a stretch cut into so many kernels.

    `together`: for each operation but the first, the chance that it is launched with the one before it.
    """
    amount = len(together) + 1
    forward, backward = np.zeros((amount, kernels)), np.zeros((amount, kernels))
    forward[0, 0] = backward[-1, -1] = 1.0
    # Certain neighbours would forbid cuts that the count demands.
    together = np.clip(together, 1e-9, 1 - 1e-9)
    for nth, chance in enumerate(together, 1):
        forward[nth] = forward[nth - 1] * chance
        forward[nth, 1:] += forward[nth - 1, :-1] * (1 - chance)
        forward[nth] /= forward[nth].max()
    for nth in range(amount - 2, -1, -1):
        chance = together[nth]
        backward[nth] = backward[nth + 1] * chance
        backward[nth, :-1] += backward[nth + 1, 1:] * (1 - chance)
        backward[nth] /= backward[nth].max()
    both = forward * backward
    posterior: NDArray[np.float64] = both / both.sum(axis=1, keepdims=True)
    return posterior


def _kinds(before: Row, after: Row) -> Hashable:
    return before["op"], before["peer"], after["op"], after["peer"]


def _counted(rows: Sequence[Row]) -> set[Hashable]:
    """Communicators, as processes know them, whose opCount moved with every launch."""
    launches: dict[Hashable, set[int]] = {}
    counts: dict[Hashable, set[int]] = {}
    for row in rows:
        if row["launch_id"] is not None:
            launches.setdefault(_member(row), set()).add(row["launch_id"])
            counts.setdefault(_member(row), set()).add(row["op_count"])
    return {member for member, own in launches.items() if len(own) == len(counts[member])}


def _member(row: Row) -> Hashable:
    return row["host"], row["pid"], row["comm_ptr"]


def _stretches(rows: Sequence[Row], counted: set[Hashable]) -> list[list[Row]]:
    """Sends and Recvs of one thread and communicator with no other launch of the thread between."""
    stretches: list[list[Row]] = []
    last: dict[Hashable, Row] = {}
    current: dict[Hashable, list[Row]] = {}
    for row in rows:
        if row["launch_id"] is None:
            continue
        thread = (row["host"], row["pid"], row["tid"])
        before, last[thread] = last.get(thread), row
        if row["op"] not in _IN_GROUPS or _member(row) in counted:
            continue
        if before is not None and before["op"] in _IN_GROUPS and before["comm_ptr"] == row["comm_ptr"]:
            current[thread].append(row)
        else:
            current[thread] = [row]
            stretches.append(current[thread])
    return stretches
