"""Observations from which clocks are estimated: ends of N-to-N operations, and messages between two hosts.

Of the N-to-N operations of one set of hosts, one time per host is kept, of the short operations. Of the messages of one
host to another, the quickest are kept. Two hosts that only send to each other are tied by both directions of their
messages:

A Recv cannot end before its Send began. On the hosts' own clocks that bounds their difference from one side, messages
the other way from the other side; a pipeline has both, as activations go forward and gradients come back. With the
drift taken out, the quickest message of each way leaves a band that holds the truth; its middle is the estimate,
right where both ways take equally long, and half its width is what that assumption may be wrong by.

Source: two-way time transfer (NTP, RFC 5905 section 8), the line between two hulls of Duda et al. 1987.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.terms import NO_TIME_NS

MOST_DRIFT: Final = 400e-6
"""No two clocks of machines that work drift apart faster: crystals are good for 100 ppm each, and more when warm."""

_ROUNDS: Final = 12
_STEPS: Final = 33
_LEAST: Final = 3
"""Messages of each way without which nothing is said."""


@dataclass(frozen=True, slots=True)
class Band:
    """Where the second clock minus the first lies, as a line over the time of the first."""

    offset_ns: float
    """At x = 0."""
    rate: float
    half_width_ns: float
    rate_sigma: float


def two_way_band(
    forward_x: NDArray[np.float64],
    forward_ns: NDArray[np.float64],
    backward_x: NDArray[np.float64],
    backward_ns: NDArray[np.float64],
) -> Band | None:
    """The middle of the widest band between both ways' bounds; None with fewer than three messages of a way.

    `forward_ns`: end of the Recv on the second host minus begin of the Send on the first, each on its own clock: at
    least the offset. `backward_ns`: end of the Recv on the first minus begin of the Send on the second: at least minus
    the offset. `x`: when, ns on the first clock from any origin. A negative width means that the bounds contradict
    each other: a clock was set, or messages were joined wrongly.
    """
    if min(len(forward_x), len(backward_x)) < _LEAST:
        return None
    low, high, rate = -MOST_DRIFT, MOST_DRIFT, 0.0
    for _ in range(_ROUNDS):  # the width is concave in the rate: look around the best of each round more closely
        rates = np.linspace(low, high, _STEPS)
        widths = _closest(forward_x, forward_ns, rates) + _closest(backward_x, backward_ns, -rates)
        best = int(widths.argmax())
        low, high, rate = rates[max(0, best - 1)], rates[min(_STEPS - 1, best + 1)], rates[best]
    above = float(_closest(forward_x, forward_ns, np.array([rate]))[0])
    below = float(_closest(backward_x, backward_ns, np.array([-rate]))[0])
    span = float(max(forward_x.max(), backward_x.max()) - min(forward_x.min(), backward_x.min()))
    half = (above + below) / 2
    return Band((above - below) / 2, float(rate), half, abs(half) / span if span > 0 else MOST_DRIFT)


def _closest(x: NDArray[np.float64], bounds: NDArray[np.float64], rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """By rate: the tightest bound once that drift is taken out."""
    closest: NDArray[np.float64] = (bounds[None, :] - rates[:, None] * x[None, :]).min(axis=1)
    return closest


Times = NDArray[np.int64]

BINS: Final = 60
"""Parts of the window; of each a bounded number of operations is kept."""
_CELLS_PER_GROUP: Final = 2**17


@dataclass(slots=True)
class HostEnds:
    """K operations on H hosts, on the hosts' own clocks; NO_TIME_NS if a host was not seen whole."""

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


_PER_BIN: Final = 8


@dataclass(slots=True)
class HostMessages:
    """Messages, each on both hosts' own clocks."""

    sent: NDArray[np.int64]
    """Begin of the Send."""
    received: NDArray[np.int64]
    """End of the Recv."""

    def thin(self, window_ns: int) -> None:
        """Keeps, of each bin of the window, the quickest."""
        bins = self.received // max(1, window_ns // BINS)
        order = np.lexsort((self.received - self.sent, bins))
        place = np.arange(len(order)) - np.searchsorted(bins[order], bins[order], side="left")
        kept = np.sort(order[(place < _PER_BIN) & (bins[order] > bins.max() - BINS)])
        self.sent, self.received = self.sent[kept], self.received[kept]

    def keep_newest(self, span_ns: int) -> None:
        """Forgets messages older than so much before the newest."""
        kept = self.received > self.received.max() - span_ns
        self.sent, self.received = self.sent[kept], self.received[kept]

    def forget_before(self, when: int, *, is_sender: bool) -> bool:
        """Forgets messages from before this time of one of the hosts; gives whether any are left."""
        kept = (self.sent if is_sender else self.received) >= when
        self.sent, self.received = self.sent[kept], self.received[kept]
        return bool(kept.any())


def band(forward: HostMessages, backward: HostMessages, at_ns: int, window_ns: int) -> Band | None:
    """Where the second host's clock minus the first's lies at a time of the first; None if nothing can be said.

    Where both ways contradict each other a clock was set: all but the newest messages are forgotten.
    """
    found = _band(forward, backward, at_ns)
    if found is not None and found.half_width_ns < 0:
        forward.keep_newest(window_ns // BINS)
        backward.keep_newest(window_ns // BINS)
        found = _band(forward, backward, at_ns)
    return found if found is not None and found.half_width_ns >= 0 else None


def _band(forward: HostMessages, backward: HostMessages, at_ns: int) -> Band | None:
    return two_way_band(
        (forward.sent - at_ns).astype(np.float64),
        (forward.received - forward.sent).astype(np.float64),
        (backward.received - at_ns).astype(np.float64),
        (backward.received - backward.sent).astype(np.float64),
    )
