"""All hosts on one clock: offset and drift of each, from operations that end together.

Ends of N-to-N collectives coincide within microseconds, whoever came late; starts do not (a rank that is always
late would look like a clock that is off by its lateness), so ends alone make the estimate:

1. per group of hosts, end differences against one host of the group, short operations preferred;
2. a clock that was set is found as a jump of those differences that stays, and times before it are forgotten;
3. robust lines through the differences (Huber weights, nothing beyond 6 MAD), all hosts of a group at once;
4. weighted least squares over the graph of groups, as a host may share no group with the reference; hosts that only
   send to each other are tied by both directions of their messages (`two_way.py`);
5. the interval that causality allows after the drift is removed (`causality.py`), and the share of operations that
   contradict it: the certificate of everything that compares ranks.

Model: a host's clock reads `t = true + offset + rate * (true - at)`; the reference's offset and rate are 0.
Times are int64 ns; floats are differences from a local origin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import causality, robust_line, two_way
from ncclscope_service.rows import HostClock
from ncclscope_wire.terms import NO_TIME_NS

Times = NDArray[np.int64]

SAME_HOST_SIGMA_NS: Final = 2_000.0
"""GPUs of one host end a collective 1 to 3 us apart: no averaging removes what is systematic of it."""
OTHER_HOST_SIGMA_NS: Final = 10_000.0
"""The same between hosts."""
VIOLATION_LIMIT: Final = 0.001
"""Share of operations that contradict causality beyond which nothing that compares ranks should be believed."""

_STEP_NS: Final = 1_000_000.0
_STEP_PERSISTS: Final = 3
_BINS: Final = 60
_OUTLIER_MADS: Final = 8.0
_MISALIGNED_FLOOR_NS: Final = 20_000.0
_GROUPS: Final = 4096
_CELLS_PER_GROUP: Final = 2**17
_WAYS: Final = 8192
_MESSAGES_PER_BIN: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockCheck:
    """How well the last estimate explains the operations it was checked on."""

    operations: int = 0
    violations: int = 0
    """Operations in which, on the corrected clocks, a rank ends before another has started, beyond 3 sigma."""
    suspects: tuple[int, ...] = ()
    """Hosts whose causality bounds contradict each other, worst first."""

    @property
    def violation_ratio(self) -> float | None:
        """Violations per operation; None where none could be checked."""
        return self.violations / self.operations if self.operations else None


@dataclass(slots=True)
class _Group:
    """Operations of one set of hosts; per host the median end, the earliest end and the latest start of its ranks."""

    hosts: tuple[int, ...]
    end: Times
    earliest_end: Times
    latest_start: Times
    transfer: NDArray[np.int64]
    last_used: int = 0

    def keep(self, mask: NDArray[np.bool_] | NDArray[np.intp]) -> None:
        self.end, self.earliest_end = self.end[mask], self.earliest_end[mask]
        self.latest_start, self.transfer = self.latest_start[mask], self.transfer[mask]


@dataclass(slots=True)
class _Way:
    """Messages of one host to another, each on both hosts' own clocks."""

    sent: Times
    """Begin of the Send."""
    received: Times
    """End of the Recv."""

    def thin(self, window_ns: int) -> None:
        """Keeps, of each bin of the window, the quickest."""
        bins = self.received // max(1, window_ns // _BINS)
        order = np.lexsort((self.received - self.sent, bins))
        place = np.arange(len(order)) - np.searchsorted(bins[order], bins[order], side="left")
        kept = np.sort(order[(place < _MESSAGES_PER_BIN) & (bins[order] > bins.max() - _BINS)])
        self.sent, self.received = self.sent[kept], self.received[kept]

    def keep_newest(self, span_ns: int) -> None:
        """Forgets messages older than so much before the newest."""
        kept = self.received > self.received.max() - span_ns
        self.sent, self.received = self.sent[kept], self.received[kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edges:
    """Lines of host against host at one instant, ready for least squares."""

    first: NDArray[np.intp]
    second: NDArray[np.intp]
    at_ns: Times
    """On the first host's clock."""
    lines: robust_line.Lines


@dataclass(slots=True)
class _Solution:
    offset: NDArray[np.float64]
    rate: NDArray[np.float64]
    offset_sigma: NDArray[np.float64]
    rate_sigma: NDArray[np.float64]
    known: NDArray[np.bool_]


@dataclass(slots=True, kw_only=True)
class ClockEstimator:
    """Learns the clocks of hosts from N-to-N collectives, within bounded memory."""

    window_ns: int = 60_000_000_000
    """How far back operations count: a line is good for about a minute of a drifting clock."""
    per_bin: int = 16
    """Operations kept per group and sixtieth of the window, the shortest first."""
    check: ClockCheck = field(default_factory=ClockCheck)
    """Of the last estimate."""
    _groups: dict[tuple[int, ...], _Group] = field(default_factory=dict[tuple[int, ...], _Group])
    _ways: dict[tuple[int, int], _Way] = field(default_factory=dict[tuple[int, int], _Way])
    """By (sending host, receiving host)."""
    _steps: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    _feeds: int = 0

    def add(self, hosts: Sequence[int], starts_ns: Times, ends_ns: Times, transfer_ns: NDArray[np.int64]) -> None:
        """Takes K operations of one communicator.

        `hosts` names the host of each of R ranks; `starts_ns` and `ends_ns` are K x R on the hosts' own clocks,
        NO_TIME_NS where a kernel was not seen whole; `transfer_ns` is K. Only N-to-N collectives belong here.
        Operations of one host say nothing about clocks and are dropped.
        """
        names = tuple(sorted(set(hosts)))
        if len(names) < 2 or len(starts_ns) == 0:
            return
        self._feeds += 1
        group = self._groups.get(names)
        added = _by_host(names, np.asarray(hosts), starts_ns, ends_ns, transfer_ns)
        if not len(added.end):
            return
        if group is None:
            self._make_room()
            group = self._groups[names] = added
        else:
            group.end = np.concatenate([group.end, added.end])
            group.earliest_end = np.concatenate([group.earliest_end, added.earliest_end])
            group.latest_start = np.concatenate([group.latest_start, added.latest_start])
            group.transfer = np.concatenate([group.transfer, added.transfer])
        group.last_used = self._feeds
        self._thin(group)

    def add_messages(self, sender: int, receiver: int, sent_ns: Times, received_ns: Times) -> None:
        """Takes messages between two hosts: begin of the Send's kernel and end of the Recv's, each on its own clock.

        They tie hosts that share no N-to-N collective, and count for no others.
        """
        if sender == receiver or not len(sent_ns):
            return
        known = self._ways.get((sender, receiver))
        if known is None and len(self._ways) >= _WAYS:
            return
        way = _Way(sent_ns, received_ns)
        if known is not None:
            way = _Way(np.concatenate([known.sent, sent_ns]), np.concatenate([known.received, received_ns]))
        way.thin(self.window_ns)
        self._ways[sender, receiver] = way

    def estimate(self, reference: int) -> dict[int, HostClock]:
        """The clock of every host that operations tie to `reference`, and `check` renewed.

        Hosts that no chain of groups ties to the reference are left out: nothing is known about them.
        """
        tied = {host for group in self._groups.values() for host in group.hosts}
        hosts = sorted(tied | {host for way in self._ways for host in way} | {reference})
        index = {host: position for position, host in enumerate(hosts)}
        self._forget_before_steps(reference)
        edges = [*self._edges(index), *self._two_way_edges(index)]
        origin = self._newest(reference)
        solution = _solve(edges, len(hosts), index[reference], origin)
        interval = self._certify(index, solution, origin, index[reference])
        samples = self._samples(hosts)
        return {
            host: self._host_clock(host, position, solution, interval, origin, samples[host], host == reference)
            for host, position in index.items()
            if solution.known[position]
        }

    def _host_clock(
        self,
        host: int,
        position: int,
        solution: _Solution,
        interval: causality.Interval,
        origin: int,
        samples: int,
        is_reference: bool,
    ) -> HostClock:
        steps = tuple(self._steps.get(host, ()))
        if is_reference:
            return HostClock(
                offset_ns=0.0, drift_ppm=0.0, at_ns=origin, sigma_ns=SAME_HOST_SIGMA_NS,
                interval_lo_ns=0.0, interval_hi_ns=0.0, samples=samples, steps=steps,
            )  # fmt: skip
        offset, rate = float(solution.offset[position]), float(solution.rate[position])
        lo, hi = float(interval.lo_ns[position]), float(interval.hi_ns[position])
        certified = min(max(0.0, lo), hi)  # the estimate, clipped to what causality allows
        return HostClock(
            offset_ns=offset + certified,
            # the line is over true time, the contract's over the host's own
            drift_ppm=1e6 * rate / (1.0 + rate),
            at_ns=origin + round(offset),
            sigma_ns=max(float(solution.offset_sigma[position]), OTHER_HOST_SIGMA_NS),
            interval_lo_ns=offset + lo if np.isfinite(lo) else None,
            interval_hi_ns=offset + hi if np.isfinite(hi) else None,
            samples=samples,
            steps=steps,
        )

    def _make_room(self) -> None:
        if len(self._groups) >= _GROUPS:
            del self._groups[min(self._groups, key=lambda names: self._groups[names].last_used)]

    def _thin(self, group: _Group) -> None:
        """Keeps the shortest operations of each bin of the window."""
        when = group.end.max(axis=1)
        newest = int(when.max())
        group.keep(when > newest - self.window_ns)
        per_bin = max(1, min(self.per_bin, _CELLS_PER_GROUP // (len(group.hosts) * _BINS)))
        # half again as much is let in before sorting, so that a steady stream is not sorted at each batch
        if len(group.end) <= 1.5 * per_bin * _BINS:
            return
        bins = group.end.max(axis=1) // max(1, self.window_ns // _BINS)
        order = np.lexsort((_length_class(group.transfer), bins))
        place = np.arange(len(order)) - np.searchsorted(bins[order], bins[order], side="left")
        group.keep(np.sort(order[place < per_bin]))

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
        """Finds clocks that were set, names the host by vote of its groups, and forgets its times before."""
        votes: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        for group in self._groups.values():
            for host, when in _find_steps(group, reference):
                votes.setdefault(host, []).append((when, group.hosts))
        for host in self._guilty(votes, reference):
            when = max(time for time, _ in votes[host])
            known = self._steps.setdefault(host, [])
            if not known or abs(known[-1] - when) > 1_000_000_000:
                known.append(when)
            for group in self._groups.values():
                if host in group.hosts:
                    _forget(group, group.hosts.index(host), when)

    def _guilty(self, votes: dict[int, list[tuple[int, tuple[int, ...]]]], reference: int) -> list[int]:
        """Hosts of which most groups saw the step; in a group of two the one that other groups accuse too."""
        groups_of = Counter(host for group in self._groups.values() for host in group.hosts)
        share = {host: len(seen) / groups_of[host] for host, seen in votes.items()}
        return [
            host for host in votes if share[host] > 0.5 or (host != reference and share[host] == max(share.values()))
        ]

    def _edges(self, index: dict[int, int]) -> list[_Edges]:
        edges: list[_Edges] = []
        for group in self._groups.values():
            seen = group.end != NO_TIME_NS
            anchor = int(seen.sum(axis=0).argmax())
            usable = seen[:, anchor]
            if usable.sum() < 2:
                continue
            at = int(group.end[usable, anchor].max())
            x = np.where(usable, group.end[:, anchor] - at, 0).astype(np.float64)
            together = seen & usable[:, None]
            y = np.where(together, group.end - group.end[:, [anchor]], 0)
            origins = np.array([_typical(y[:, host], together[:, host]) for host in range(y.shape[1])], dtype=np.int64)
            lines = robust_line.fit(
                x, np.where(together, y - origins, 0).astype(np.float64), together, _short_first(group.transfer)
            )
            others = np.flatnonzero((np.arange(len(group.hosts)) != anchor) & lines.known)
            lines = replace(lines, at_zero=lines.at_zero + origins).take(others)
            edges.append(
                _Edges(
                    first=np.full(len(others), index[group.hosts[anchor]], dtype=np.intp),
                    second=np.array([index[group.hosts[other]] for other in others], dtype=np.intp),
                    at_ns=np.full(len(others), at, dtype=np.int64),
                    lines=lines,
                )
            )
        return edges

    def _two_way_edges(self, index: dict[int, int]) -> list[_Edges]:
        """Lines between hosts that only send to each other."""
        together = {(one, other) for group in self._groups.values() for one in group.hosts for other in group.hosts}
        edges: list[_Edges] = []
        for (first, second), forward in self._ways.items():
            backward = self._ways.get((second, first))
            if first > second or backward is None or (first, second) in together:
                continue
            at = int(max(forward.sent.max(), backward.received.max()))
            found = _band(forward, backward, at)
            if found is not None and found.half_width_ns < 0:  # bounds that contradict each other: a clock was set
                forward.keep_newest(self.window_ns // _BINS)
                backward.keep_newest(self.window_ns // _BINS)
                found = _band(forward, backward, at)
            if found is not None and found.half_width_ns >= 0:
                edges.append(_two_way_edge(index[first], index[second], at, found))
        return edges

    def _certify(self, index: dict[int, int], solution: _Solution, origin: int, reference: int) -> causality.Interval:
        """Checks every kept operation on the corrected clocks, and bounds what is left of each clock's error."""
        bounds = causality.no_bounds(len(index))
        sigma = np.maximum(solution.offset_sigma, OTHER_HOST_SIGMA_NS)
        sigma[reference] = SAME_HOST_SIGMA_NS
        operations = violations = 0
        for group in self._groups.values():
            members = np.array([index[host] for host in group.hosts], dtype=np.intp)
            if not solution.known[members].all():
                continue
            true_end, since = _corrected(group.end, members, solution, origin)
            earliest, _ = _corrected(group.earliest_end, members, solution, origin)
            latest, _ = _corrected(group.latest_start, members, solution, origin)
            checkable = (~np.isnan(earliest)).sum(axis=1) >= 2
            with_ends, with_starts = np.nan_to_num(earliest, nan=np.inf), np.nan_to_num(latest, nan=-np.inf)
            margin = with_ends.min(axis=1) - with_starts.max(axis=1)
            tolerance = 3 * np.hypot(
                sigma[members[with_ends.argmin(axis=1)]], sigma[members[with_starts.argmax(axis=1)]]
            )
            operations += int(checkable.sum())
            violations += int((checkable & (margin < -tolerance)).sum())
            sound = checkable & _is_aligned(true_end)
            slack = 3 * float(solution.rate_sigma[members].max()) * since
            causality.tighten(bounds, members, latest[sound], earliest[sound], slack[sound])
        for (sender, receiver), way in self._ways.items():
            _bound_messages(bounds, np.array([index[sender], index[receiver]], np.intp), way, solution, origin)
        interval = causality.solve(bounds, reference)
        hosts = list(index)
        self.check = ClockCheck(
            operations=operations,
            violations=violations,
            suspects=tuple(hosts[position] for position in interval.inconsistent),
        )
        return interval


def _bound_messages(
    bounds: causality.Bounds, members: NDArray[np.intp], way: _Way, solution: _Solution, origin: int
) -> None:
    """No Recv ends before its Send began: a bound in one direction."""
    if not solution.known[members].all():
        return
    never = np.full(len(way.sent), NO_TIME_NS, np.int64)
    starts, since = _corrected(np.stack([way.sent, never], axis=1), members, solution, origin)
    ends, _ = _corrected(np.stack([never, way.received], axis=1), members, solution, origin)
    slack = 3 * float(solution.rate_sigma[members].max()) * since
    causality.tighten(bounds, members, starts, ends, slack)


def _band(forward: _Way, backward: _Way, at_ns: int) -> two_way.Band | None:
    return two_way.band(
        (forward.sent - at_ns).astype(np.float64),
        (forward.received - forward.sent).astype(np.float64),
        (backward.received - at_ns).astype(np.float64),
        (backward.received - backward.sent).astype(np.float64),
    )


def _two_way_edge(first: int, second: int, at_ns: int, found: two_way.Band) -> _Edges:
    lines = robust_line.Lines(
        at_zero=np.array([found.offset_ns]),
        slope=np.array([found.rate]),
        at_zero_sigma=np.array([max(found.half_width_ns, 1.0)]),
        slope_sigma=np.array([max(found.rate_sigma, 1e-12)]),
        known=np.ones(1, np.bool_),
    )
    return _Edges(
        first=np.array([first], np.intp), second=np.array([second], np.intp), at_ns=np.array([at_ns]), lines=lines
    )


def to_true(times_ns: Times, clock: HostClock) -> Times:
    """Times of a host on the reference clock; NO_TIME_NS stays. Exact to 1 ns within 100 days of `at_ns`."""
    whole = round(clock.offset_ns)
    known = times_ns != NO_TIME_NS
    since = np.where(known, times_ns, clock.at_ns) - clock.at_ns
    rest = (clock.offset_ns - whole) + clock.drift_ppm * 1e-6 * since.astype(np.float64)
    return np.where(known, np.where(known, times_ns, 0) - whole - np.rint(rest).astype(np.int64), times_ns)


def _by_host(
    names: tuple[int, ...], hosts: NDArray[np.int_], starts: Times, ends: Times, transfer: NDArray[np.int64]
) -> _Group:
    seen = (starts != NO_TIME_NS) & (ends != NO_TIME_NS)
    shape = (len(starts), len(names))
    end, earliest, latest = (np.full(shape, NO_TIME_NS, dtype=np.int64) for _ in range(3))
    for column, name in enumerate(names):
        own = hosts == name
        any_seen = seen[:, own].any(axis=1)
        sorted_ends = np.sort(np.where(seen[:, own], ends[:, own], np.iinfo(np.int64).max), axis=1)
        middle = np.maximum(seen[:, own].sum(axis=1) - 1, 0) // 2
        end[:, column] = np.where(any_seen, sorted_ends[np.arange(len(ends)), middle], NO_TIME_NS)
        earliest[:, column] = np.where(any_seen, sorted_ends[:, 0], NO_TIME_NS)
        latest[:, column] = np.where(seen[:, own], starts[:, own], NO_TIME_NS).max(axis=1)
    useful = (end != NO_TIME_NS).sum(axis=1) >= 2
    return _Group(names, end[useful], earliest[useful], latest[useful], np.asarray(transfer, np.int64)[useful])


def _typical(values: NDArray[np.int64], seen: NDArray[np.bool_]) -> int:
    chosen = np.sort(values[seen])
    return int(chosen[len(chosen) // 2]) if len(chosen) else 0


def _length_class(transfer: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 for the short operations of a group, 1 for those 4 times as long, and so on.

    Coarse on purpose: the transfer is the duration on the rank that is late, so choosing by it more finely would
    choose by that rank's own noise, which biases the clock of a persistent straggler by microseconds.
    """
    known = transfer > 0
    if not known.any():
        return np.zeros(len(transfer), dtype=np.int64)
    short = float(np.percentile(transfer[known], 5))
    relative = np.where(known, transfer, short) / short
    return np.maximum(np.floor(np.log2(relative / 4.0) / 2.0) + 1.0, 0.0).astype(np.int64)


def _short_first(transfer: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weights: ends spread with the length of the operation, so long ones count less."""
    weights: NDArray[np.float64] = 1.0 / (0.25 + np.exp2(2.0 * _length_class(transfer)))
    return weights


def _corrected(
    times: Times, members: NDArray[np.intp], solution: _Solution, origin: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times from `origin` on the reference clock (NaN unseen), and how far each operation lies from it."""
    offset = np.rint(solution.offset[members])
    known = times != NO_TIME_NS
    local = np.where(known, times - origin - offset.astype(np.int64), 0).astype(np.float64)
    true = (local + (offset - solution.offset[members])) / (1.0 + solution.rate[members])
    corrected = np.where(known, true, np.nan)
    return corrected, np.abs(np.where(known, true, 0.0)).max(axis=1, initial=0.0)


def _is_aligned(true_end: NDArray[np.float64]) -> NDArray[np.bool_]:
    """False for operations whose ends do not coincide: they were matched wrongly, and their bounds are worthless."""
    count = (~np.isnan(true_end)).sum(axis=1)
    filled = np.sort(np.where(np.isnan(true_end), np.inf, true_end), axis=1)
    middle = filled[np.arange(len(filled)), np.maximum(count - 1, 0) // 2]
    with np.errstate(invalid="ignore"):
        off = np.nan_to_num(np.abs(true_end - middle[:, None]), nan=0.0, posinf=0.0).max(axis=1, initial=0.0)
    if not len(off):
        return np.zeros(0, dtype=np.bool_)
    limit = _OUTLIER_MADS * 1.4826 * float(np.median(off)) + _MISALIGNED_FLOOR_NS
    aligned: NDArray[np.bool_] = off <= limit
    return aligned


def _forget(group: _Group, column: int, before: int) -> None:
    old = (group.end[:, column] != NO_TIME_NS) & (group.end[:, column] < before)
    for times in (group.end, group.earliest_end, group.latest_start):
        times[old, column] = NO_TIME_NS
    group.keep((group.end != NO_TIME_NS).sum(axis=1) >= 2)


def _find_steps(group: _Group, reference: int) -> list[tuple[int, int]]:
    """(host, its time just before the first operation after) for each clock of the group that was set.

    Differences are taken against the median host of the group, or the reference where there are two, so that the
    host that moved is the one that stands out.
    """
    if len(group.end) < 2 * _STEP_PERSISTS or (group.end == NO_TIME_NS).any():
        group_rows = (group.end != NO_TIME_NS).all(axis=1)
        if group_rows.sum() < 2 * _STEP_PERSISTS:
            return []
        end = group.end[group_rows]
    else:
        end = group.end
    order = np.argsort(end.max(axis=1), kind="stable")
    end = end[order]
    relative = (end - end[:, [0]]) - (end[0] - end[0, 0])
    detrended = relative - _trend(end[:, 0] - end[0, 0], relative)
    if len(group.hosts) == 2:
        anchor = group.hosts.index(reference) if reference in group.hosts else 0
        detrended = detrended - detrended[:, [anchor]]
    else:
        detrended = detrended - np.median(detrended, axis=1, keepdims=True)
    found: list[tuple[int, int]] = []
    for column, host in enumerate(group.hosts):
        at = _jump(detrended[:, column])
        if at is not None:
            found.append((host, int(end[at, column])))
    return found


def _trend(x: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.float64]:
    """The median slope over a quarter of the window, times x: one step touches only a quarter of the pairs."""
    lag = max(1, len(x) // 4)
    run = np.maximum(x[lag:] - x[:-lag], 1).astype(np.float64)
    slope = np.median((y[lag:] - y[:-lag]) / run[:, None], axis=0)
    result: NDArray[np.float64] = x.astype(np.float64)[:, None] * slope
    return result


def _jump(values: NDArray[np.float64]) -> int | None:
    """Where the level of `values` changes for good by more than 1 ms and by far more than their noise."""
    count, keep = len(values), _STEP_PERSISTS
    if count < 2 * keep:
        return None
    windows = np.median(np.lib.stride_tricks.sliding_window_view(values, keep), axis=1)
    change = np.abs(windows[keep:] - windows[:-keep])
    noise = 1.4826 * float(np.median(np.abs(np.diff(values))))
    if not len(change) or change.max() <= _STEP_NS + 10 * noise:
        return None
    at = int(change.argmax()) + keep
    before, after = float(np.median(values[:at])), float(np.median(values[at:]))
    return at if abs(after - before) > _STEP_NS + 10 * noise else None


def _solve(edges: list[_Edges], hosts: int, reference: int, origin: int) -> _Solution:
    """Offsets at `origin` of the reference clock and rates of all hosts: weighted least squares over the edges."""
    solution = _Solution(
        offset=np.zeros(hosts), rate=np.zeros(hosts), offset_sigma=np.zeros(hosts), rate_sigma=np.zeros(hosts),
        known=np.arange(hosts) == reference,
    )  # fmt: skip
    if not edges:
        return solution
    first = np.concatenate([edge.first for edge in edges])
    second = np.concatenate([edge.second for edge in edges])
    at = np.concatenate([edge.at_ns for edge in edges])
    lines = robust_line.Lines.joined([edge.lines for edge in edges])
    solution.known = _reached(first, second, hosts, reference)
    usable = solution.known[first]
    first, second, at, lines = first[usable], second[usable], at[usable], lines.take(np.flatnonzero(usable))
    solution.rate, solution.rate_sigma = _least_squares(
        first, second, lines.slope, lines.slope_sigma, hosts, reference, solution.known
    )
    for _ in range(3):  # an edge's line is placed on its first host's clock, whose own offset is being solved for
        behind = (origin - at).astype(np.float64) + solution.offset[first]
        level = lines.at_zero + lines.slope * behind
        spread = np.hypot(lines.at_zero_sigma, lines.slope_sigma * behind)
        solution.offset, solution.offset_sigma = _least_squares(
            first, second, level, spread, hosts, reference, solution.known
        )
    return solution


def _reached(first: NDArray[np.intp], second: NDArray[np.intp], hosts: int, reference: int) -> NDArray[np.bool_]:
    reached: NDArray[np.bool_] = np.arange(hosts) == reference
    while True:
        wider = reached.copy()
        wider[second[reached[first]]] = True
        wider[first[reached[second]]] = True
        if (wider == reached).all():
            return reached
        reached = wider


def _least_squares(
    first: NDArray[np.intp],
    second: NDArray[np.intp],
    values: NDArray[np.float64],
    sigmas: NDArray[np.float64],
    hosts: int,
    reference: int,
    known: NDArray[np.bool_],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """v[second] - v[first] = values, v[reference] = 0: the solution and its sigma."""
    weights = 1.0 / np.maximum(sigmas, 1e-12) ** 2
    weights /= weights.max(initial=1e-300)
    laplacian = np.zeros((hosts, hosts))
    np.add.at(laplacian, (first, first), weights)
    np.add.at(laplacian, (second, second), weights)
    np.add.at(laplacian, (first, second), -weights)
    np.add.at(laplacian, (second, first), -weights)
    right = np.zeros(hosts)
    np.add.at(right, second, weights * values)
    np.add.at(right, first, -weights * values)
    free = np.flatnonzero(known & (np.arange(hosts) != reference))
    result, sigma = np.zeros(hosts), np.zeros(hosts)
    if len(free):
        inverse = np.linalg.inv(laplacian[np.ix_(free, free)])
        result[free] = inverse @ right[free]
        scale = float((np.maximum(sigmas, 1e-12) ** 2).min())
        sigma[free] = np.sqrt(np.maximum(np.diag(inverse), 0.0) * scale)
    return result, sigma
