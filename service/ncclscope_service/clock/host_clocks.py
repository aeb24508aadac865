"""The clocks of a store's hosts: estimated from joined collectives, and used to put times on the reference clock.

Each job is estimated by itself: no operation ties hosts of two jobs, and what one job's logs say can spoil no other's
clocks. Its reference is the host of its global rank 0, else the first by name. Until operations tie a host to the
reference, its clock is taken from what its agent and its kernel report (`ClockPrior`).

Joined operations of hosts without an estimated clock wait for one. Processes are aligned one after the other, so the
collectives that tie two hosts together may be aligned after the messages between these hosts. If the messages were
measured first, their waiting would stay unknown, and so would their times on the reference clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.clock.causality import ClockCheck
from ncclscope_service.clock.estimator import ClockEstimator, to_true
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import first_positions, group_by
from ncclscope_service.columns.table import Ids, Table
from ncclscope_service.join.ranks import KernelMatrix
from ncclscope_service.store.records import HostClock, JobClocks
from ncclscope_service.store.retention import Retention
from ncclscope_service.store.rows import has_launch
from ncclscope_service.store.settings import CLOCKS_WITHIN_NS
from ncclscope_service.store.tables import Hosts, Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS, OPERATIONS

LEAST_SIGMA_NS: Final = 1_000_000.0
"""Nothing is believed to less than a millisecond that no operation has confirmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPrior:
    """Reports of one host about its own clock."""

    heartbeat_offset_ns: int | None
    """Agent's minus service's wall clock, less the shortest way of a heartbeat; None before one."""
    error_ns: int | None
    """How far it may be off UTC, by the kernel; None if no daemon keeps the clock."""


def clock_by_prior(host: ClockPrior, reference: ClockPrior, at_ns: int) -> HostClock | None:
    """The clock of a host against that of the reference; None if nothing ties them.

    Two clocks that daemons keep agree within both errors. Else the difference of two heartbeats' offsets is taken,
    in which what their ways have in common cancels; its error is not known, so a millisecond is the least it is given.
    """
    if host.error_ns is not None and reference.error_ns is not None:
        return _clock(0.0, float(host.error_ns + reference.error_ns), at_ns)
    if host.heartbeat_offset_ns is None or reference.heartbeat_offset_ns is None:
        return None
    return _clock(float(host.heartbeat_offset_ns - reference.heartbeat_offset_ns), 0.0, at_ns)


def clocks_by_prior(priors: Mapping[str, ClockPrior], reference: str, at_ns: int) -> dict[str, HostClock]:
    """The same for every host but the reference, by name."""
    own = priors.get(reference)
    if own is None:
        return {}
    found = {host: clock_by_prior(prior, own, at_ns) for host, prior in priors.items() if host != reference}
    return {host: clock for host, clock in found.items() if clock is not None}


def _clock(offset_ns: float, sigma_ns: float, at_ns: int) -> HostClock:
    return HostClock(
        offset_ns=offset_ns,
        drift_ppm=0.0,
        at_ns=at_ns,
        sigma_ns=max(sigma_ns, LEAST_SIGMA_NS),
        interval_lo_ns=None,
        interval_hi_ns=None,
        samples=0,
        told_by="prior",
    )


_ALL_TO_ALL: Final = np.array(
    [
        code < len(OPERATIONS) and OPERATIONS[code].is_collective and not OPERATIONS[code].is_rooted
        for code in range(256)
    ]
)
_NO_HOST: Final = np.iinfo(np.int32).max
_ESTIMATE_EVERY_NS: Final = 1_000_000_000
_HOSTS_A_SECOND: Final = 128
"""An estimate of more hosts takes longer, and is renewed as much less often."""


_YOUNG_SAMPLES: Final = 30
_YOUNG_SIGMA_NS: Final = 1_000_000.0
"""Until a line rests on this many operations, its own error bar counts as a millisecond at least."""
_MATURE_SAMPLES: Final = 300
"""... and until it rests on so many, where times are used to reject what was joined by number."""
_SIGMAS: Final = 4.0
_SURE_SIGMA_NS: Final = 20_000.0
"""Clocks that are less sure than this are waited for before Sends and Recvs are measured."""


def _with_doubt(clock: HostClock) -> HostClock:
    """The clock with an uncertainty that few samples deserve; the reference's is exact by definition."""
    is_reference = clock.interval_lo_ns == 0.0 and clock.interval_hi_ns == 0.0
    if is_reference or clock.samples >= _YOUNG_SAMPLES:
        return clock
    return replace(clock, sigma_ns=max(clock.sigma_ns, _YOUNG_SIGMA_NS))


class Clocks:
    """Estimates, and what follows from them."""

    def __init__(
        self,
        known: Store,
        hosts: Hosts,
        make_estimator: Callable[[], ClockEstimator] = ClockEstimator,
        retention: Retention | None = None,
    ) -> None:
        """Jobs of `retention` are not estimated."""
        self._store = known
        self._hosts = hosts
        self._retention = Retention() if retention is None else retention
        self._estimators = defaultdict[str, ClockEstimator](make_estimator)
        """By job."""
        self._estimated_at_ns: int | None = None
        self._by_host: dict[int, HostClock] = {}
        self._told: dict[str, dict[int, HostClock]] = {}
        """By job: clocks by the last estimate from operations, by host."""
        self._solved: dict[str, tuple[int, int]] = {}
        """By job: the reference of that estimate, and the number of changes before it."""
        self._priors: Mapping[str, ClockPrior] = {}

    def believe(self, priors: Mapping[str, ClockPrior]) -> None:
        """Sets the hosts' own reports, by name: they are used for hosts that no operation ties to the reference."""
        self._priors = priors

    def learn(self, kernels: KernelMatrix) -> None:
        """Takes the N-to-N collectives of these that were seen whole on two hosts or more."""
        known = kernels.hosts >= 0
        spans = np.where(known, kernels.hosts, -1).max(axis=1) != np.where(known, kernels.hosts, _NO_HOST).min(axis=1)
        spans &= known.any(axis=1)
        if not spans.any():
            return
        first_of_launch = np.zeros(len(kernels.launch), bool)
        first_of_launch[first_positions(kernels.launch)] = True
        sound = kernels.agrees & kernels.overlap_on_each_host()
        chosen = np.flatnonzero(_ALL_TO_ALL[kernels.op] & first_of_launch & sound & spans[kernels.group])
        whole = kernels.present[chosen] & ~kernels.censored[chosen]
        starts = np.where(whole, kernels.start_ns[chosen], NO_TIME_NS)
        ends = np.where(whole, kernels.end_ns[chosen], NO_TIME_NS)
        durations = np.where(whole, ends - np.where(whole, starts, 0), np.iinfo(np.int64).max).min(axis=1)
        for group, mine in group_by(kernels.group[chosen]):
            ranks = np.flatnonzero(known[group])
            cells = np.ix_(mine, ranks)
            hosts = kernels.hosts[group, ranks].tolist()
            self._of_host(hosts[0]).add(hosts, starts[cells], ends[cells], durations[mine])

    def learn_times(
        self,
        hosts: Sequence[int],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        durations: NDArray[np.int64],
    ) -> None:
        """Takes N-to-N collectives whose times nobody's kernels tell; arguments as `ClockEstimator.add` has them."""
        self._of_host(hosts[0]).add(hosts, starts, ends, durations)

    def on_reference(self, times: NDArray[np.int64], hosts: NDArray[np.integer]) -> NDArray[np.int64]:
        """Times of hosts, by number, on the reference clock; NO_TIME_NS where either is unknown."""
        found = np.full(times.shape, NO_TIME_NS, np.int64)
        for host, clock in self._by_host.items():
            own = hosts == host
            found[own] = to_true(times[own], clock)
        return found

    def learn_messages(self, sends: Ids, receives: Ids) -> None:
        """Takes messages between hosts: operations of each Send, and of its Recv."""
        sent = self._store.operations.take(sends, "process", "start_ns", "end_ns", "censored")
        received = self._store.operations.take(receives, "process", "start_ns", "end_ns", "censored")
        hosts = self._hosts.of_processes()
        ways = np.stack([hosts[sent["process"]], hosts[received["process"]]])
        whole = ~sent["censored"] & ~received["censored"] & (sent["start_ns"] != NO_TIME_NS)
        whole &= (received["end_ns"] != NO_TIME_NS) & (ways[0] != ways[1])
        at = np.flatnonzero(whole)
        for way, mine in group_by(ways[0][at].astype(np.int64) << 32 | ways[1][at]):
            chosen = at[mine]
            sender, receiver = way >> 32, way & 0xFFFFFFFF
            self._of_host(sender).add_messages(sender, receiver, sent["start_ns"][chosen], received["end_ns"][chosen])

    def evict(self, jobs: Set[str]) -> None:
        """Forgets jobs that are gone."""
        for job in jobs:
            for of_jobs in (self._estimators, self._told, self._solved, self._store.clocks):
                of_jobs.pop(job, None)

    def _of_host(self, host: int) -> ClockEstimator:
        return self._estimators[self._hosts.jobs[host]]

    def estimate(self, now_ns: int, *, final: bool = False) -> None:
        """Renews `Store.clocks`, at most once a second, and less often with more than 128 hosts."""
        pause_ns = _ESTIMATE_EVERY_NS * max(1, len(self._hosts.names) // _HOSTS_A_SECOND)
        recent = self._estimated_at_ns is not None and now_ns - self._estimated_at_ns < pause_ns
        if (recent and not final) or not self._store.processes:
            return
        self._estimated_at_ns = now_ns
        self._hosts.of_processes()
        self._by_host = {}
        ranks_0 = self._hosts_of_ranks_0()
        for job, names in self._hosts_by_job().items():
            reference = ranks_0.get(job, min(names, key=lambda host: names[host]))
            self._solve(job, reference)
            priors = {name: self._priors[name] for name in names.values() if name in self._priors}
            believed = clocks_by_prior(priors, names[reference], now_ns)
            clocks = {host: believed[name] for host, name in names.items() if name in believed} | self._told[job]
            self._by_host |= clocks
            check = self._estimators[job].check
            self._store.clocks[job] = JobClocks(
                reference=names[reference],
                hosts={names[host]: clock for host, clock in clocks.items()},
                violation_ratio=check.violation_ratio,
                are_trusted=check.is_trusted,
            )

    def are_told(self, most_sigma_ns: float = np.inf) -> NDArray[np.bool_]:
        """By host number, whether operations tell the clock so surely, as it was estimated last."""
        told = np.zeros(max(1, len(self._hosts.names)), np.bool_)
        for clocks in self._told.values():
            told[[host for host, clock in clocks.items() if clock.sigma_ns <= most_sigma_ns]] = True
        return told

    def is_current(self) -> bool:
        """Whether the last estimates rest on all that was learned."""
        changes = {job: estimator.changes for job, estimator in self._estimators.items()}
        return changes == {job: solved for job, (_, solved) in self._solved.items()}

    def _solve(self, job: str, reference: int) -> None:
        """Estimates the clocks of a job from operations again if the reference or the operations have changed."""
        estimator = self._estimators[job]
        solved = reference, estimator.changes
        if solved == self._solved.get(job):
            return
        self._told[job] = {host: _with_doubt(clock) for host, clock in estimator.estimate(reference).items()}
        self._solved[job] = solved

    def correct(self, operations: Ids, table: Table | None = None) -> None:
        """Sets the times on the reference clock of these operations if they have a kernel and a clock.

        `table`: what the ids are of, with the columns of rows.OPERATION; operations where it is None.
        """
        table = self._store.operations if table is None else table
        at = table.at(operations)
        at = at[has_launch(table.rows.values("match", at))]
        for host, mine in group_by(self._hosts.of_processes()[table.rows["process"][at]]):
            clock = self._by_host.get(host)
            if clock is None:
                continue
            own = at[mine]
            for source, target in (("start_ns", "start_true_ns"), ("end_ns", "end_true_ns")):
                table.rows.put(target, own, to_true(table.rows.values(source, own), clock))
            table.rows.put("clock_uncertainty_ns", own, round(clock.sigma_ns))

    def sigma_ns(self) -> NDArray[np.float64]:
        """Uncertainty of each host's clock, to measure by.

        Infinite if no operation tells it, only what the host says of itself, and in all of a job while its operations
        contradict causality.

        Ranks of one host share its clock and need none of these.
        """
        sigma = np.full(max(1, len(self._hosts.names)), np.inf)
        for host, clock in self._by_host.items():
            if clock.told_by != "prior" and self.is_trusted(self._hosts.jobs[host]):
                sigma[host] = clock.sigma_ns
        return sigma

    def joining_slack_ns(self) -> NDArray[np.float64]:
        """By host number: how far its clock may be off when times are used to reject what was joined by number.

        A young estimate may be off by more than it knows: by milliseconds, but not by a step of the job. Infinite where
        no operation tells the clock, or those that do contradict each other.
        """
        slack = np.full(max(1, len(self._hosts.names)), np.inf)
        known = Counter(self._hosts.jobs[host] for host in self._by_host)
        for host, clock in self._by_host.items():
            is_reference = clock.samples == 0 and clock.told_by == "collectives"
            if clock.samples >= _MATURE_SAMPLES or is_reference or known[self._hosts.jobs[host]] == 1:
                slack[host] = _SIGMAS * clock.sigma_ns
            elif clock.told_by != "prior" and self.is_trusted(self._hosts.jobs[host]):
                slack[host] = _SIGMAS * max(clock.sigma_ns, _YOUNG_SIGMA_NS)
        return slack

    def is_trusted(self, job: str) -> bool:
        """False while operations of the job contradict causality on the corrected clocks."""
        return job not in self._estimators or self._estimators[job].check.is_trusted

    def check(self, job: str) -> ClockCheck | None:
        """How well the last estimate explains what was seen of a job; None before the first."""
        return self._estimators[job].check if job in self._solved else None

    def host_names(self) -> list[str]:
        """The name of each host number in `check`."""
        return self._hosts.names

    def _hosts_by_job(self) -> dict[str, dict[int, str]]:
        """Number and name of the hosts of each job that is not gone, in the order in which they came."""
        found: defaultdict[str, dict[int, str]] = defaultdict(dict[int, str])
        for host, (job, name) in enumerate(zip(self._hosts.jobs, self._hosts.names, strict=True)):
            if job not in self._retention.jobs:
                found[job][host] = name
        return found

    def _hosts_of_ranks_0(self) -> dict[str, int]:
        """By job: the host of its rank 0, where a line says that it is."""
        hosts = self._hosts.of_processes()
        found: dict[str, int] = {}
        for member in self._store.members:
            if member.global_rank == 0 and not member.global_rank_is_inferred:
                found.setdefault(self._store.process_job[member.process], int(hosts[member.process]))
        return found


_PAIR: Final = np.dtype(
    [
        ("send", "<i8"),
        ("receive", "<i8"),
        ("sender", "<i4"),
        ("receiver", "<i4"),
        ("since_ns", "<i8"),
    ]
)
"""A Send and its Recv, the number of the host of each, and when they were joined."""


@dataclass(frozen=True, slots=True)
class Clocked:
    """Joined operations that can be measured, on the reference clock as far as that is known."""

    collectives: list[KernelMatrix]
    sends: Ids
    receives: Ids
    """The other side of each of `sends`."""


@dataclass(slots=True)
class Unclocked:
    """Keeps joined operations until the clocks of their hosts are estimated, for `CLOCKS_WITHIN_NS` at most."""

    clocks: Clocks
    hosts: Hosts
    table: Table
    """Whose rows were joined, with the columns of rows.OPERATION."""
    _collectives: list[tuple[int, KernelMatrix]] = field(default_factory=list[tuple[int, KernelMatrix]])
    """(when joined, its kernels)."""
    _pairs: Columns = field(default_factory=lambda: np.empty(0, _PAIR))

    def admit(
        self,
        collectives: Sequence[KernelMatrix],
        sends: Ids,
        receives: Ids,
        now_ns: int,
        *,
        is_whole: bool,
        final: bool,
    ) -> Clocked:
        """Takes what was joined now, and gives what can be measured now, in the order in which it was joined.

        `is_whole`: nothing is left to align that might tell a clock; it is waited for an estimate from all of it. What
        has left memory meanwhile is not given.
        """
        self._collectives += [(now_ns, each) for each in collectives]
        if len(sends):
            self._pairs = row_ops.concat([self._pairs, self._paired(sends, receives, now_ns)])
        given = self._take(now_ns, is_whole=is_whole and self.clocks.is_current(), final=final)
        self._correct(given)
        return given

    def waiting(self) -> Ids:
        """Rows that were joined, and that nothing was given of."""
        collectives = [each.joined.operations[each.present] for _, each in self._collectives]
        return np.concatenate([self._pairs["send"], self._pairs["receive"], *collectives])

    def _paired(self, sends: Ids, receives: Ids, now_ns: int) -> Columns:
        pairs = np.empty(len(sends), _PAIR)
        hosts = self.hosts.of_processes()
        pairs["send"], pairs["receive"], pairs["since_ns"] = sends, receives, now_ns
        for name, rows in (("sender", sends), ("receiver", receives)):
            pairs[name] = hosts[self.table.take(rows, "process")["process"]]
        return pairs

    def _take(self, now_ns: int, *, is_whole: bool, final: bool) -> Clocked:
        is_told, first, is_over = self.clocks.are_told(), self.table.first, is_whole or final
        given: list[KernelMatrix] = []
        left: list[tuple[int, KernelMatrix]] = []
        for since_ns, each in self._collectives:
            are_told = np.logical_and.reduce(is_told[each.hosts] | (each.hosts < 0), axis=1)
            is_given = are_told[each.group] | is_over | (now_ns - since_ns >= CLOCKS_WITHIN_NS)
            if is_given.any():
                given.append(_known(each.take(np.flatnonzero(is_given)), first))
            if not is_given.all():
                left.append((since_ns, each.take(np.flatnonzero(~is_given))))
        # Messages alone tell a clock no better than to what one takes, which is what is to be measured.
        is_awaited = ~self.clocks.are_told(_SURE_SIGMA_NS)
        if is_whole:  # a young clock may become surer by what comes next
            is_awaited &= is_told & ~self.clocks.are_told(_YOUNG_SIGMA_NS - 1)
        pairs = self._pairs
        is_given = ~(is_awaited[pairs["sender"]] | is_awaited[pairs["receiver"]])
        is_given |= final | (now_ns - pairs["since_ns"] >= CLOCKS_WITHIN_NS)
        self._collectives, self._pairs = left, row_ops.filter_rows(pairs, ~is_given)
        pairs = row_ops.filter_rows(pairs, is_given & (pairs["send"] >= first) & (pairs["receive"] >= first))
        return Clocked([each for each in given if len(each.present)], pairs["send"], pairs["receive"])

    def _correct(self, given: Clocked) -> None:
        """Puts operations on the reference clock as it is known now: they waited since they were aligned."""
        collectives = [each.joined.operations[each.present] for each in given.collectives]
        rows = np.concatenate([given.sends, given.receives, *collectives])
        self.clocks.correct(rows, self.table)
        for each in given.collectives:
            each.refresh(self.table)


def _known(kernels: KernelMatrix, first: int) -> KernelMatrix:
    """The collectives of which every row is in memory, from `first` on."""
    is_known = (~kernels.present | (kernels.joined.operations >= first)).all(axis=1)
    return kernels.take(np.flatnonzero(is_known))
