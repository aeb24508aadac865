"""Clocks, or matches, that contradict causality: nothing that compares ranks may be believed until they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ncclscope_service.clock_check import ClockCheck
from ncclscope_service.detect.context import Context
from ncclscope_service.detect.findings import Ledger, names_of_hosts
from ncclscope_service.rows import Finding, FindingKind, HostClock, Severity

_LASTS_NS: Final = 10_000_000_000
"""A first estimate from few operations may be contradicted by the next ones."""
_MATURE_SAMPLES: Final = 100


class ClockFault:
    """Feeds on the estimator's own check."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._since_ns: int | None = None
        self._told: set[tuple[str, int]] = set()
        self._samples: dict[str, int] = {}

    def tell_steps(self, clocks: Mapping[str, HostClock], context: Context) -> None:
        """Tells of clocks of this job's hosts that were set, each once and closed: the estimate heals by itself.

        Where there are two hosts, nothing tells whose clock it was: both are named. What a clock that rested on few
        operations took for a step is not told.
        """
        for host, clock in clocks.items():
            new = [at_ns for at_ns in clock.steps if (host, at_ns) not in self._told]
            self._told.update((host, at_ns) for at_ns in new)
            if self._samples.get(host, 0) >= _MATURE_SAMPLES:
                for at_ns in new:
                    self._tell_step(tuple(sorted(clocks)) if len(clocks) == 2 else (host,), at_ns, clock, context)
            self._samples[host] = max(self._samples.get(host, 0), clock.samples)

    def _tell_step(self, hosts: tuple[str, ...], host_time_ns: int, clock: HostClock, context: Context) -> None:
        since_ns = host_time_ns - round(clock.offset_ns)
        whose = f"the clock of {hosts[0]}" if len(hosts) == 1 else f"the clock of {hosts[0]} or {hosts[1]}"
        finding = Finding(
            kind=FindingKind.CLOCK_FAULT,
            severity=Severity.INFO,
            job=context.job,
            comm_id=None,
            parallelism=None,
            ranks=(),
            hosts=hosts,
            since_ns=since_ns,
            until_ns=None,
            confidence=0.9 if len(hosts) == 1 else 0.5,
            summary=f"{whose} was set, by more than 1 ms; times before and after are put right apart",
            evidence={"host_time_ns": host_time_ns, "steps_of_host": len(clock.steps)},
        )
        self._ledger.update((hosts, host_time_ns), finding)
        self._ledger.close((hosts, host_time_ns), since_ns)

    def feed(self, check: ClockCheck, hosts: Sequence[str], context: Context, at_ns: int) -> None:
        """Takes the check of the last estimate; `hosts` gives the name of each host number."""
        names = tuple(sorted(hosts[host] for host in check.suspects))
        if check.is_trusted:
            self._since_ns = None
            self._ledger.close("clock", at_ns)
            return
        self._since_ns = at_ns if self._since_ns is None else self._since_ns
        if at_ns - self._since_ns < _LASTS_NS and not context.is_over:
            return
        ratio = check.violation_ratio or 0.0
        what = (
            f"causality bounds of {names_of_hosts(names)} contradict each other"
            if names
            else f"{100 * ratio:.2g} % of collectives end on one rank before another has started"
        )
        self._ledger.update(
            "clock",
            Finding(
                kind=FindingKind.CLOCK_FAULT,
                severity=Severity.WARNING,
                job=context.job,
                comm_id=None,
                parallelism=None,
                ranks=(),
                hosts=names,
                since_ns=self._since_ns,
                until_ns=None,
                confidence=0.9 if names else 0.7,
                summary=f"{what}: a clock was set, or log lines were matched with wrong kernels; no rank is named",
                evidence={
                    "violations": check.violations,
                    "operations": check.operations,
                    "violation_ratio": round(ratio, 6),
                },
            ),
        )

    def findings(self, now_ns: int) -> list[Finding]:
        """All findings so far."""
        del now_ns
        return self._ledger.findings()
