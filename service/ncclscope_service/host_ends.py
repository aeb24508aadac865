"""N-to-N operations of one set of hosts, as the clocks learn from them: one time per host, the short ones kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.terms import NO_TIME_NS

Times = NDArray[np.int64]

BINS: Final = 60
"""Parts of the window; of each a bounded number of operations is kept."""
_CELLS_PER_GROUP: Final = 2**17


@dataclass(slots=True)
class HostEnds:
    """K operations on H hosts, on the hosts' own clocks; NO_TIME_NS where a host was not seen whole."""

    hosts: tuple[int, ...]
    end: Times
    """K x H: the median end of the host's ranks."""
    earliest_end: Times
    latest_start: Times
    transfer: NDArray[np.int64]
    """K."""
    last_used: int = 0

    def keep(self, mask: NDArray[np.bool_] | NDArray[np.intp]) -> None:
        """Forgets all other operations."""
        self.end, self.earliest_end = self.end[mask], self.earliest_end[mask]
        self.latest_start, self.transfer = self.latest_start[mask], self.transfer[mask]

    def add(self, others: HostEnds) -> None:
        """Takes further operations of the same hosts."""
        self.end = np.concatenate([self.end, others.end])
        self.earliest_end = np.concatenate([self.earliest_end, others.earliest_end])
        self.latest_start = np.concatenate([self.latest_start, others.latest_start])
        self.transfer = np.concatenate([self.transfer, others.transfer])

    def thin(self, window_ns: int, per_bin: int) -> None:
        """Keeps the shortest operations of each bin of the window."""
        when = self.end.max(axis=1)
        self.keep(when > int(when.max()) - window_ns)
        per_bin = max(1, min(per_bin, _CELLS_PER_GROUP // (len(self.hosts) * BINS)))
        # half again as much is let in before sorting, so that a steady stream is not sorted at each batch
        if len(self.end) <= 1.5 * per_bin * BINS:
            return
        bins = self.end.max(axis=1) // max(1, window_ns // BINS)
        order = np.lexsort((self.length_class(), bins))
        place = np.arange(len(order)) - np.searchsorted(bins[order], bins[order], side="left")
        self.keep(np.sort(order[place < per_bin]))

    def forget(self, column: int, before: int) -> None:
        """Forgets the times of one host, by its column, that lie before its clock was set."""
        old = (self.end[:, column] != NO_TIME_NS) & (self.end[:, column] < before)
        for times in (self.end, self.earliest_end, self.latest_start):
            times[old, column] = NO_TIME_NS
        self.keep((self.end != NO_TIME_NS).sum(axis=1) >= 2)

    def length_class(self) -> NDArray[np.int64]:
        """0 for the short operations of the group, 1 for those 4 times as long, and so on.

        Coarse on purpose: the transfer is the duration on the rank that is late, so choosing by it more finely would
        choose by that rank's own noise, which biases the clock of a persistent straggler by microseconds.
        """
        known = self.transfer > 0
        if not known.any():
            return np.zeros(len(self.transfer), dtype=np.int64)
        short = float(np.percentile(self.transfer[known], 5))
        relative = np.where(known, self.transfer, short) / short
        return np.maximum(np.floor(np.log2(relative / 4.0) / 2.0) + 1.0, 0.0).astype(np.int64)


def by_host(hosts: Sequence[int], starts: Times, ends: Times, transfer: NDArray[np.int64]) -> HostEnds:
    """Operations as their hosts saw them, from K x R times of ranks; those that two hosts did not see are dropped."""
    names, host_of = np.unique(np.asarray(hosts, np.int64), return_inverse=True)
    ranks = _ranks_by_host(host_of, len(names))
    seen = (starts != NO_TIME_NS) & (ends != NO_TIME_NS)
    latest = _by_rank(np.where(seen, starts, NO_TIME_NS), ranks, NO_TIME_NS).max(axis=2)
    never = np.iinfo(np.int64).max
    sorted_ends = np.sort(_by_rank(np.where(seen, ends, never), ranks, never), axis=2)
    count = (sorted_ends != never).sum(axis=2)
    middle = np.take_along_axis(sorted_ends, (np.maximum(count - 1, 0) // 2)[:, :, None], axis=2)[:, :, 0]
    end = np.where(count > 0, middle, NO_TIME_NS)
    earliest = np.where(count > 0, sorted_ends[:, :, 0], NO_TIME_NS)
    useful = (count > 0).sum(axis=1) >= 2
    lengths = np.asarray(transfer, np.int64)[useful]
    return HostEnds(tuple(names.tolist()), end[useful], earliest[useful], latest[useful], lengths)


def _ranks_by_host(host_of: NDArray[np.intp], hosts: int) -> NDArray[np.intp]:
    """H x (most ranks of a host): the columns of each host's ranks; one past the last where it has fewer."""
    order = np.argsort(host_of, kind="stable")
    counts = np.bincount(host_of, minlength=hosts)
    ranks = np.full((hosts, int(counts.max(initial=1))), len(host_of), np.intp)
    within = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    ranks[host_of[order], within] = order
    return ranks


def _by_rank(times: Times, ranks: NDArray[np.intp], absent: int) -> Times:
    """K x H x (most ranks of a host)."""
    nobody = np.full((len(times), 1), absent, np.int64)
    return np.concatenate([times, nobody], axis=1)[:, ranks]
