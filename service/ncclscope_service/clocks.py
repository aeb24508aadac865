"""The clocks of a store's hosts: learns from joined collectives, and puts times on the reference clock.

The reference is the host of global rank 0, else the first by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.clock import ClockEstimator, to_true
from ncclscope_service.clock_check import SAME_HOST_SIGMA_NS, ClockCheck
from ncclscope_service.clock_prior import ClockPrior, clocks_by_prior
from ncclscope_service.distinct import firsts, groups
from ncclscope_service.hosts import Hosts
from ncclscope_service.kernel_matrix import KernelMatrix
from ncclscope_service.rows import HostClock, Match
from ncclscope_service.store import Ids, Store, Table
from ncclscope_wire.terms import NO_TIME_NS, OPERATIONS

_ALL_TO_ALL: Final = np.array(
    [
        code < len(OPERATIONS) and OPERATIONS[code].is_collective and not OPERATIONS[code].is_rooted
        for code in range(256)
    ]
)
_ESTIMATE_EVERY_NS: Final = 1_000_000_000
_HOSTS_A_SECOND: Final = 128
"""An estimate of more hosts takes longer, and is renewed as much less often."""


_YOUNG_SAMPLES: Final = 30
_YOUNG_SIGMA_NS: Final = 1_000_000.0
"""Until a line rests on so many operations, its own error bar is not believed below a millisecond."""
_MATURE_SAMPLES: Final = 300
_SIGMAS: Final = 4.0


def _with_doubt(clock: HostClock) -> HostClock:
    """The clock with an uncertainty that few samples deserve; the reference's is exact by definition."""
    is_reference = clock.interval_lo_ns == 0.0 and clock.interval_hi_ns == 0.0
    if is_reference or clock.samples >= _YOUNG_SAMPLES:
        return clock
    return replace(clock, sigma_ns=max(clock.sigma_ns, _YOUNG_SIGMA_NS))


class Clocks:
    """Estimates, and what follows from them."""

    def __init__(self, known: Store, hosts: Hosts, estimator: ClockEstimator | None = None) -> None:
        self._store = known
        self._hosts = hosts
        self._estimator = estimator or ClockEstimator()
        self._estimated_at_ns: int | None = None
        self._by_host: dict[int, HostClock] = {}
        self._told: dict[int, HostClock] = {}
        """What operations told of the clocks when they were last asked."""
        self._solved: tuple[int, int] | None = None
        """Of which reference that was, and after how many changes."""
        self._priors: Mapping[str, ClockPrior] = {}

    def believe(self, priors: Mapping[str, ClockPrior]) -> None:
        """What hosts say of their clocks, by name: it stands for those that no operation ties to the reference."""
        self._priors = priors

    def learn(self, kernels: KernelMatrix) -> None:
        """Takes the N-to-N collectives of these that were seen whole on two hosts or more."""
        ranks = np.flatnonzero(kernels.hosts >= 0)
        if (kernels.hosts[ranks] == kernels.hosts[ranks[:1]]).all():
            return
        first_of_launch = np.zeros(len(kernels.launch), bool)
        first_of_launch[firsts(kernels.launch)] = True
        sound = kernels.agrees & kernels.overlap_on_each_host()
        chosen = np.flatnonzero(_ALL_TO_ALL[kernels.op] & first_of_launch & sound)
        if not len(chosen):
            return
        cells = np.ix_(chosen, ranks)
        whole = kernels.present[cells] & ~kernels.censored[cells]
        starts = np.where(whole, kernels.start_ns[cells], NO_TIME_NS)
        ends = np.where(whole, kernels.end_ns[cells], NO_TIME_NS)
        durations = np.where(whole, ends - np.where(whole, starts, 0), np.iinfo(np.int64).max)
        self._estimator.add(kernels.hosts[ranks].tolist(), starts, ends, durations.min(axis=1))

    def learn_messages(self, sends: Ids, receives: Ids) -> None:
        """Takes messages between hosts: operations of each Send, and of its Recv."""
        sent = self._store.operations.take(sends, "process", "start_ns", "end_ns", "censored")
        received = self._store.operations.take(receives, "process", "start_ns", "end_ns", "censored")
        hosts = self._hosts.of_processes()
        ways = np.stack([hosts[sent["process"]], hosts[received["process"]]])
        whole = ~sent["censored"] & ~received["censored"] & (sent["start_ns"] != NO_TIME_NS)
        whole &= (received["end_ns"] != NO_TIME_NS) & (ways[0] != ways[1])
        at = np.flatnonzero(whole)
        for way, mine in groups(ways[0][at].astype(np.int64) << 32 | ways[1][at]):
            chosen = at[mine]
            self._estimator.add_messages(
                way >> 32, way & 0xFFFFFFFF, sent["start_ns"][chosen], received["end_ns"][chosen]
            )

    def estimate(self, now_ns: int, *, final: bool = False) -> None:
        """Renews `Store.clocks`, at most once a second, and less often with more than 128 hosts."""
        pause_ns = _ESTIMATE_EVERY_NS * max(1, len(self._hosts.names) // _HOSTS_A_SECOND)
        recent = self._estimated_at_ns is not None and now_ns - self._estimated_at_ns < pause_ns
        if (recent and not final) or not self._store.processes:
            return
        self._estimated_at_ns = now_ns
        self._hosts.of_processes()
        reference = self._reference()
        self._solve(reference)
        believed = clocks_by_prior(self._priors, self._hosts.names[reference], now_ns)
        self._by_host = {
            self._hosts.names.index(name): believed[name] for name in self._hosts.names if name in believed
        }
        self._by_host |= self._told
        self._store.clock_reference = self._hosts.names[reference]
        self._store.clocks = {self._hosts.names[host]: clock for host, clock in self._by_host.items()}
        self._store.clock_violation_ratio = self._estimator.check.violation_ratio
        self._store.clocks_are_trusted = self.is_trusted()

    def are_told(self) -> NDArray[np.bool_]:
        """By host number, whether operations tell the clock, as it was estimated last."""
        told = np.zeros(max(1, len(self._hosts.names)), np.bool_)
        told[list(self._told)] = True
        return told

    def is_current(self) -> bool:
        """Whether the last estimate rests on all that was learned."""
        return self._solved is not None and self._solved[1] == self._estimator.changes

    def _solve(self, reference: int) -> None:
        """What operations tell of the clocks, where that is not what they told the last time."""
        solved = reference, self._estimator.changes
        if solved == self._solved:
            return
        self._told = {host: _with_doubt(clock) for host, clock in self._estimator.estimate(reference).items()}
        self._solved = solved

    def correct(self, operations: Ids, table: Table | None = None) -> None:
        """Sets the times on the reference clock of these operations, where they have a kernel and a clock.

        `table`: what the ids are of, with the columns of rows.OPERATION; operations where it is None.
        """
        table = self._store.operations if table is None else table
        at = table.at(operations)
        at = at[table.rows["match"][at] == Match.MATCHED]
        for host, mine in groups(self._hosts.of_processes()[table.rows["process"][at]]):
            clock = self._by_host.get(host)
            if clock is None:
                continue
            own = at[mine]
            for source, target in (("start_ns", "start_true_ns"), ("end_ns", "end_true_ns")):
                table.rows[target][own] = to_true(table.rows[source][own], clock)
            table.rows["clock_uncertainty_ns"][own] = round(clock.sigma_ns)

    def sigma_ns(self) -> NDArray[np.float64]:
        """Uncertainty of each host's clock, to measure by.

        Infinite where no operation tells it, only what the host says of itself, and everywhere while operations
        contradict causality.

        Ranks of one host share its clock and need none of these.
        """
        sigma = np.full(max(1, len(self._hosts.names)), np.inf)
        if not self.is_trusted():
            return sigma
        for host, clock in self._by_host.items():
            if clock.told_by != "prior":
                sigma[host] = clock.sigma_ns
        return sigma

    def joining_slack_ns(self) -> NDArray[np.float64]:
        """By host number: how far its clock may be off when times are used to reject what was joined by number.

        Infinite before the clock rests on many operations: a young estimate may be off by more than it knows.
        """
        slack = np.full(max(1, len(self._hosts.names)), np.inf)
        for host, clock in self._by_host.items():
            is_reference = clock.samples == 0 and clock.told_by == "collectives"
            if clock.samples >= _MATURE_SAMPLES or is_reference or len(self._by_host) == 1:
                slack[host] = _SIGMAS * clock.sigma_ns
        return slack

    def worst_sigma_ns(self) -> float:
        """The largest uncertainty of any known clock."""
        return max((clock.sigma_ns for clock in self._by_host.values()), default=SAME_HOST_SIGMA_NS)

    def is_trusted(self) -> bool:
        """False while operations contradict causality on the corrected clocks."""
        return self._estimator.check.is_trusted

    def check(self) -> ClockCheck | None:
        """How well the last estimate explains what was seen; None before the first."""
        return None if self._estimated_at_ns is None else self._estimator.check

    def host_names(self) -> list[str]:
        """The name of each host number in `check`."""
        return self._hosts.names

    def _reference(self) -> int:
        for member in self._store.members:
            if member.global_rank == 0 and not member.global_rank_is_inferred:
                return self._hosts.names.index(self._store.processes[member.process].host)
        return self._hosts.names.index(min(self._hosts.names))
