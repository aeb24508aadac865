"""Offset and drift of each host's clock against the reference, and the hosts whose clock was set.

Ends of N-to-N collectives coincide within microseconds, whoever came late; starts do not (a rank that is always
late would look like a clock that is off by its lateness), so ends alone make the estimate:

1. per group of hosts, end differences against one host of the group, short operations preferred (`observations`);
2. a clock that was set is found as a jump of those differences that stays, and times before it are forgotten;
3. robust lines through the differences (Huber weights, nothing beyond 6 MAD), all hosts of a group at once;
4. weighted least squares over the graph of groups, as a host may share no group with the reference (`host_graph`);
   hosts that only send to each other are tied by both directions of their messages (`observations`);
5. the interval that causality allows after the drift is removed, and the share of operations that contradict it: the
   certificate of everything that compares ranks (`causality`).

Model: a host's clock reads `t = true + offset + rate * (true - at)`; the reference's offset and rate are 0.
Times are int64 ns; floats are differences from a local origin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.clock.causality import OTHER_HOST_SIGMA_NS, ClockCheck, Interval, certify
from ncclscope_service.clock.host_graph import Edges, Solution, edges_of, solve, two_way_edge
from ncclscope_service.clock.observations import HostEnds, HostMessages, Times, band, by_host
from ncclscope_service.store.records import HostClock
from ncclscope_service.store.rows import SAME_HOST_SIGMA_NS
from ncclscope_wire.terms import NO_TIME_NS

Step = tuple[int, int]
"""(the host's time just before the first operation after its clock was set, by how much it was set, in ns)."""
Vote = tuple[Step, tuple[int, ...]]
"""(a step, the hosts of the group that saw it)."""

_STEP_NS: Final = 1_000_000.0
_PERSISTS: Final = 3
_LEAST_RUN: Final = 0.1
_PLACES: Final = 8
"""At which a clock may have been set that are looked at, the largest changes first."""
_NEAR: Final = 64
"""Operations on either side by which it is decided."""
_ALIGNED_NS: Final = 20_000.0
_OF_LEVEL: Final = 0.9
_MATURE: Final = 8
"""Operations before a step of a clock without which it is the first correction of its estimate, and no step."""


def find_steps(groups: Sequence[HostEnds], reference: int) -> dict[int, Step]:
    """The hosts whose clock was set, with the newest step of it, by vote of the groups that they are in."""
    votes: dict[int, list[Vote]] = {}
    for group in groups:
        for host, step in _steps_of(group, reference):
            votes.setdefault(host, []).append((step, group.hosts))
    return {host: max(when for when, _ in votes[host]) for host in _guilty(votes, groups, reference)}


def _guilty(votes: Mapping[int, list[Vote]], groups: Sequence[HostEnds], reference: int) -> list[int]:
    """Hosts of which most groups saw the step; in a group of two the one that other groups accuse too."""
    groups_of = Counter(host for group in groups for host in group.hosts)
    share = {host: len(seen) / groups_of[host] for host, seen in votes.items()}
    return [host for host in votes if share[host] > 0.5 or (host != reference and share[host] == max(share.values()))]


def _steps_of(group: HostEnds, reference: int) -> list[tuple[int, Step]]:
    """(host, step) for each clock of the group that was set.

    Differences are taken against the median host of the group, or the reference where there are two, so that the
    host that moved is the one that stands out.
    """
    end = group.end[(group.end != NO_TIME_NS).all(axis=1)]
    if len(end) < 2 * _PERSISTS:
        return []
    end = end[np.argsort(end.max(axis=1), kind="stable")]
    relative = (end - end[:, [0]]) - (end[0] - end[0, 0])
    detrended = relative - _trend(end[:, 0] - end[0, 0], relative)
    if len(group.hosts) == 2:
        anchor = group.hosts.index(reference) if reference in group.hosts else 0
        detrended = detrended - detrended[:, [anchor]]
    else:
        detrended = detrended - np.median(detrended, axis=1, keepdims=True)
    jumps = _jumps(detrended)
    return [(group.hosts[column], (int(end[at, column]), round(by_ns))) for column, at, by_ns in jumps]


def _trend(x: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.float64]:
    """The median slope over a quarter of the window, times x: one step touches only a quarter of the pairs.

    Pairs of one burst of operations lie too near each other to tell a slope.
    """
    lag = max(1, len(x) // 4)
    run = (x[lag:] - x[:-lag]).astype(np.float64)
    apart = run >= max(1.0, _LEAST_RUN * float(x.max() - x.min()))
    if not apart.any():
        return np.zeros(y.shape)
    slope = np.median((y[lag:] - y[:-lag])[apart] / run[apart, None], axis=0)
    result: NDArray[np.float64] = x.astype(np.float64)[:, None] * slope
    return result


def _jumps(values: NDArray[np.float64]) -> list[tuple[int, int, float]]:
    """(column, row, by how much) where a level changes for good by more than 1 ms and by far more than its noise."""
    windows = np.median(np.lib.stride_tricks.sliding_window_view(values, _PERSISTS, axis=0), axis=-1)
    change = np.abs(windows[_PERSISTS:] - windows[:-_PERSISTS])
    if not len(change):
        return []
    least = _STEP_NS + 10 * 1.4826 * np.median(np.abs(np.diff(values, axis=0)), axis=0)
    found: list[tuple[int, int, float]] = []
    for column in np.flatnonzero(change.max(axis=0) > least).tolist():
        largest = np.argsort(-change[:, column], kind="stable")[:_PLACES]
        places = (int(at) + _PERSISTS for at in largest if change[at, column] > least[column])
        at = next((at for at in places if _is_set(values[:, column], at, float(least[column]))), None)
        if at is not None:
            found.append((column, at, _change_at(values[:, column], at)))
    return found


def _is_set(values: NDArray[np.float64], at: int, least_ns: float) -> bool:
    """Whether a column has one level before this row and another one from there on.

    A clock that was set is off by as much in each operation. Collectives whose numbers slipped (a log line was lost)
    are off by the time from one to the next, which differs from one to the next.
    """
    before, after = values[:at], values[at:]
    step = _change_at(values, at)
    before, after = before[-_NEAR:], after[:_NEAR]
    off = np.abs(before - np.median(before))
    tolerance = _ALIGNED_NS + 8 * 1.4826 * float(np.median(off))
    holds = (np.abs(after - np.median(after)) <= tolerance).mean()
    return abs(step) > max(least_ns, 2 * tolerance) and min(holds, (off <= tolerance).mean()) >= _OF_LEVEL


def _change_at(values: NDArray[np.float64], at: int) -> float:
    """By how much the level changes at a row."""
    return float(np.median(values[at:])) - float(np.median(values[:at]))


_GROUPS: Final = 4096
_WAYS: Final = 8192
_SAME_STEP_NS: Final = 1_000_000_000
_SURE_RATE: Final = 2e-6
"""Drifts that are less sure are not kept when a clock is set: the first seconds of a job tell hardly any."""


@dataclass(slots=True, kw_only=True)
class ClockEstimator:
    """Learns the clocks of hosts from N-to-N collectives, within bounded memory."""

    window_ns: int = 60_000_000_000
    """How far back operations count: a line is good for about a minute of a drifting clock."""
    per_bin: int = 16
    """Operations kept per group and sixtieth of the window, the shortest first."""
    check: ClockCheck = field(default_factory=ClockCheck)
    """Of the last estimate."""
    _groups: dict[tuple[int, ...], HostEnds] = field(default_factory=dict[tuple[int, ...], HostEnds])
    _ways: dict[tuple[int, int], HostMessages] = field(default_factory=dict[tuple[int, int], HostMessages])
    """By (sending host, receiving host)."""
    _steps: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    _sizes_ns: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """By host and step: by how much it was set."""
    _rates: dict[int, float] = field(default_factory=dict[int, float])
    """Of the last estimate, those that are sure."""
    _kept: dict[int, tuple[int, dict[int, float]]] = field(default_factory=dict[int, tuple[int, dict[int, float]]])
    """By host whose clock was set: when, and the rates that all had before."""
    _feeds: int = 0
    changes: int = 0
    """How often something was added or forgotten: between two estimates of one number, nothing changes."""

    def add(self, hosts: Sequence[int], starts_ns: Times, ends_ns: Times, transfer_ns: NDArray[np.int64]) -> None:
        """Takes K operations of one communicator.

        `hosts` names the host of each of R ranks; `starts_ns` and `ends_ns` are K x R on the hosts' own clocks,
        NO_TIME_NS if a kernel was not seen whole; `transfer_ns` is K. Only N-to-N collectives belong here.
        Operations of one host say nothing about clocks and are dropped.
        """
        if len(set(hosts)) < 2 or len(starts_ns) == 0:
            return
        self._feeds += 1
        added = by_host(hosts, starts_ns, ends_ns, transfer_ns)
        if not len(added.end):
            return
        group = self._groups.get(added.hosts)
        if group is None:
            self._make_room()
            group = self._groups[added.hosts] = added
        else:
            group.add(added)
        self.changes += 1
        group.last_used = self._feeds
        group.thin(self.window_ns, self.per_bin)

    def add_messages(self, sender: int, receiver: int, sent_ns: Times, received_ns: Times) -> None:
        """Takes messages between two hosts: begin of the Send's kernel and end of the Recv's, each on its own clock.

        They tie hosts that share no N-to-N collective, and count for no others.
        """
        if sender == receiver or not len(sent_ns):
            return
        known = self._ways.get((sender, receiver))
        if known is None and len(self._ways) >= _WAYS:
            return
        way = HostMessages(sent_ns, received_ns)
        if known is not None:
            way = HostMessages(np.concatenate([known.sent, sent_ns]), np.concatenate([known.received, received_ns]))
        way.thin(self.window_ns)
        self._ways[sender, receiver] = way
        self.changes += 1

    def estimate(self, reference: int) -> dict[int, HostClock]:
        """The clock of every host that operations tie to `reference`, and `check` renewed.

        Hosts that no chain of groups ties to the reference are left out: nothing is known about them.
        """
        tied = {host for group in self._groups.values() for host in group.hosts}
        hosts = sorted(tied | {host for way in self._ways for host in way} | {reference})
        index = {host: position for position, host in enumerate(hosts)}
        self._forget_before_steps(reference)
        origin = self._newest(reference)
        solution = self.solve(index, reference, origin)
        is_sure = solution.known & (solution.rate_sigma < _SURE_RATE)
        self._rates = {host: float(solution.rate[at]) for host, at in index.items() if is_sure[at]}
        interval, self.check = certify(
            self._groups.values(), self._ways, index, solution, origin=origin, reference=index[reference]
        )
        samples = self._samples(hosts)
        return {
            host: self._host_clock(host, position, solution, interval, origin, samples[host], host == reference)
            for host, position in index.items()
            if solution.known[position]
        }

    def solve(self, index: dict[int, int], reference: int, origin: int) -> Solution:
        """The clocks that fit what was seen best, before causality is asked; by position in `index`."""
        lines = [edges_of(group, index, self._rates_kept(group)) for group in self._groups.values()]
        edges = [each for each in lines if each is not None] + self._two_way_edges(index)
        return solve(edges, len(index), index[reference], origin)

    def _host_clock(
        self,
        host: int,
        position: int,
        solution: Solution,
        interval: Interval,
        origin: int,
        samples: int,
        is_reference: bool,
    ) -> HostClock:
        steps = tuple(self._steps.get(host, ()))
        sizes_ns = tuple(self._sizes_ns.get((host, when), 0) for when in steps)
        if is_reference:
            return HostClock(
                offset_ns=0.0, drift_ppm=0.0, at_ns=origin, sigma_ns=SAME_HOST_SIGMA_NS,
                interval_lo_ns=0.0, interval_hi_ns=0.0, samples=samples, steps=steps, step_sizes_ns=sizes_ns,
            )  # fmt: skip
        offset, rate = float(solution.offset[position]), float(solution.rate[position])
        lo, hi = float(interval.lo_ns[position]), float(interval.hi_ns[position])
        certified = min(max(0.0, lo), hi)  # the estimate, clipped to what causality allows
        # an estimate that causality contradicts is not known better than causality knows it
        sigma = max(float(solution.offset_sigma[position]), OTHER_HOST_SIGMA_NS)
        sigma = max(sigma, abs(certified), min(hi - lo, abs(certified) + sigma)) if certified else sigma
        return HostClock(
            offset_ns=offset + certified,
            # the line is over true time, the contract's over the host's own
            drift_ppm=1e6 * rate / (1.0 + rate),
            at_ns=origin + round(offset),
            sigma_ns=sigma,
            interval_lo_ns=offset + lo if np.isfinite(lo) else None,
            interval_hi_ns=offset + hi if np.isfinite(hi) else None,
            samples=samples,
            steps=steps,
            step_sizes_ns=sizes_ns,
        )

    def _make_room(self) -> None:
        if len(self._groups) >= _GROUPS:
            del self._groups[min(self._groups, key=lambda names: self._groups[names].last_used)]

    def _newest(self, reference: int) -> int:
        """The newest time of the reference clock, else of any: lines are evaluated there."""
        own = [
            int(group.end[:, group.hosts.index(reference)].max())
            for group in self._groups.values()
            if reference in group.hosts
        ]
        own += [int(way.sent.max()) for (sender, _), way in self._ways.items() if sender == reference]
        own += [int(way.received.max()) for (_, receiver), way in self._ways.items() if receiver == reference]
        return max([time for time in own if time != NO_TIME_NS] or [0])

    def _samples(self, hosts: Sequence[int]) -> dict[int, int]:
        counted: Counter[int] = Counter(dict.fromkeys(hosts, 0))
        for group in self._groups.values():
            seen = (group.end != NO_TIME_NS).sum(axis=0)
            for host, count in zip(group.hosts, seen, strict=True):
                counted[host] += int(count)
        for way, messages in self._ways.items():
            for host in way:
                counted[host] += len(messages.sent)
        return counted

    def _forget_before_steps(self, reference: int) -> None:
        for host, (when, by_ns) in find_steps(list(self._groups.values()), reference).items():
            self.changes += 1
            known = self._steps.setdefault(host, [])
            # Operations from before the last one, which come late, show the same step again.
            if self._seen_before(host, when) >= _MATURE and (not known or when > known[-1] + _SAME_STEP_NS):
                known.append(when)
                self._sizes_ns[host, when] = by_ns
                self._kept[host] = when, self._rates
            for group in self._groups.values():
                if host in group.hosts:
                    group.forget(group.hosts.index(host), when)
            self._forget_messages(host, when)

    def _forget_messages(self, host: int, when: int) -> None:
        """Forgets messages from before the clock of a host was set."""
        for (sender, receiver), way in list(self._ways.items()):
            if host in {sender, receiver} and not way.forget_before(when, is_sender=host == sender):
                del self._ways[sender, receiver]

    def _seen_before(self, host: int, when: int) -> int:
        """Operations of a host before a time of its clock."""
        ends = (group.end[:, group.hosts.index(host)] for group in self._groups.values() if host in group.hosts)
        return sum(int(np.count_nonzero((end != NO_TIME_NS) & (end < when))) for end in ends)

    def _rates_kept(self, group: HostEnds) -> dict[int, float]:
        """The rates from before a clock of the group was set; none once it was set longer ago than the window."""
        for host in group.hosts:
            when, rates = self._kept.get(host, (NO_TIME_NS, {}))
            if rates and int(group.end[:, group.hosts.index(host)].max()) < when + self.window_ns:
                return rates
        return {}

    def _two_way_edges(self, index: dict[int, int]) -> list[Edges]:
        """Lines between hosts that only send to each other."""
        edges: list[Edges] = []
        together = [frozenset(group.hosts) for group in self._groups.values()] if self._ways else []
        for (first, second), forward in self._ways.items():
            backward = self._ways.get((second, first))
            if first > second or backward is None or any({first, second} <= hosts for hosts in together):
                continue
            at = int(max(forward.sent.max(), backward.received.max()))
            found = band(forward, backward, at, self.window_ns)
            if found is not None:
                edges.append(two_way_edge(index[first], index[second], at, found))
        return edges


def to_true(times_ns: Times, clock: HostClock) -> Times:
    """Times of a host on the reference clock; NO_TIME_NS stays. Exact to 1 ns within 100 days of `at_ns`."""
    whole = round(clock.offset_ns)
    known = times_ns != NO_TIME_NS
    since = np.where(known, times_ns, clock.at_ns) - clock.at_ns
    rest = (clock.offset_ns - whole) + clock.drift_ppm * 1e-6 * since.astype(np.float64)
    return np.where(known, np.where(known, times_ns, 0) - whole - np.rint(rest).astype(np.int64), times_ns)
