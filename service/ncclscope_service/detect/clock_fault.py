"""Clocks that were stepped, and clocks or matches that contradict causality: then no comparison of ranks is valid.

Lines without stamps get their kernels by order: there a contradiction is most likely a capture that was placed at
another step on one rank than on another, and is said of ncclscope (`blind`), not of a clock. What changes amid a
capture, or by a small part of a step, is no placement of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ncclscope_service.clock.causality import ClockCheck
from ncclscope_service.detect.context import Context, Ledger, names_of_hosts
from ncclscope_service.store.records import Finding, FindingKind, HostClock, Severity
from ncclscope_service.store.settings import SECOND_NS

_MOVES_TOGETHER_NS: Final = 60_000_000_000


class ClockFault:
    """Faults of a job's clocks, from the check of the clock estimate."""

    _moved_hosts: tuple[str, ...] = ()
    """Those of the last event of moved stamps."""
    _moved_at_ns = 0

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._since_ns: int | None = None
        self._reported: set[tuple[str, int]] = set()

    def report_steps(self, clocks: Mapping[str, HostClock], context: Context) -> None:
        """Reports steps of the clocks of this job's hosts, each once and closed: the estimate recovers by itself.

        With two hosts it is not known whose clock it was: both are named. Where lines have no stamps, `clocks` should
        have only those steps that no capture placed elsewhere explains.
        """
        for host, clock in clocks.items():
            for at_ns, by_ns in zip(clock.steps, clock.step_sizes_ns, strict=True):
                if (host, at_ns) not in self._reported:
                    self._reported.add((host, at_ns))
                    hosts = tuple(sorted(clocks)) if len(clocks) == 2 else (host,)
                    self._report_step(hosts, at_ns, by_ns, clock, context)

    def _report_step(
        self, hosts: tuple[str, ...], host_time_ns: int, by_ns: int, clock: HostClock, context: Context
    ) -> None:
        since_ns = host_time_ns - round(clock.offset_ns)
        whose = f"the clock of {hosts[0]}" if len(hosts) == 1 else f"the clock of {hosts[0]} or {hosts[1]}"
        how_far = f"{abs(by_ns) / 1e6:.1f} ms" if by_ns else "more than 1 ms"
        finding = Finding(
            kind=FindingKind.CLOCK_FAULT,
            severity=Severity.INFO,
            job=context.job,
            hosts=hosts,
            since_ns=since_ns,
            confidence=0.9 if len(hosts) == 1 else 0.5,
            summary=f"{whose} was stepped by {how_far}; times before and after the step are corrected separately",
            evidence={"host_time_ns": host_time_ns, "stepped_ns": by_ns or None, "steps_of_host": len(clock.steps)},
        )
        self._ledger.update((hosts, host_time_ns), finding)
        self._ledger.close((hosts, host_time_ns), since_ns)

    def report_moved_stamps(self, moved: Mapping[str, int], context: Context, at_ns: int) -> None:
        """Reports that stamps of logs have another offset to their arrival since: by host, how much later they are.

        Nothing rests on that offset, so it is information, closed at once. What moves within a minute is one event.
        """
        if not moved:
            return
        hosts = tuple(sorted({*moved, *(self._moved_hosts if at_ns - self._moved_at_ns < _MOVES_TOGETHER_NS else ())}))
        self._moved_hosts, self._moved_at_ns = hosts, at_ns
        change_ns = max(moved.values(), key=abs)
        finding = Finding(
            kind=FindingKind.CLOCK_FAULT,
            severity=Severity.INFO,
            job=context.job,
            hosts=hosts,
            since_ns=at_ns,
            confidence=0.9,
            summary=(
                f"the stamps in the logs of {names_of_hosts(hosts)} moved by {change_ns / 1e9:+.0f} s against their "
                "arrival: summer time, a clock that was set, or lines that came late; no other finding rests on it"
            ),
            evidence={"moved_ns": change_ns},
        )
        self._ledger.update("stamps", finding)
        self._ledger.close("stamps", at_ns)

    def ingest_check(self, check: ClockCheck, hosts: Sequence[str], context: Context, at_ns: int) -> None:
        """Takes the check of the last estimate; `hosts` gives the name of each host number."""
        names = tuple(sorted(hosts[host] for host in check.suspects))
        if check.is_trusted:
            self._since_ns = None
            self._ledger.close("clock", at_ns)
            return
        self._since_ns = at_ns if self._since_ns is None else self._since_ns
        lasts_ns = context.settings.other.clock_fault_seconds * SECOND_NS
        if at_ns - self._since_ns < lasts_ns and not context.is_over:
            return  # a first estimate from few operations may be contradicted by the next ones
        ratio = check.violation_ratio or 0.0
        kind, confidence = FindingKind.CLOCK_FAULT, 0.7
        what = f"{100 * ratio:.2g} % of collectives end on one rank before they start on another"
        cause = "a clock was stepped, or log lines were matched to wrong kernels"
        if check.is_misjoined:
            kind, confidence = FindingKind.BLIND, 0.9
            what = f"{check.misjoined / check.operations:.0%} of collectives between hosts do not end together"
            cause = "log lines were lost, and what their ranks called was joined wrongly"
        elif names:
            confidence = 0.9
            what = f"causality bounds of {names_of_hosts(names)} contradict each other"
        if context.has_lines_without_stamps and not check.is_misjoined:
            kind, cause = FindingKind.BLIND, "lines without stamps were matched to kernels of other steps"
        self._ledger.update(
            "clock",
            Finding(
                kind=kind,
                severity=Severity.WARNING,
                job=context.job,
                hosts=names,
                since_ns=self._since_ns,
                confidence=confidence,
                summary=f"{what}: {cause}; no rank is named",
                evidence={
                    "violations": check.violations,
                    "misjoined": check.misjoined,
                    "operations": check.operations,
                    "violation_ratio": round(ratio, 6),
                },
            ),
        )

    def findings(self) -> list[Finding]:
        """All findings so far."""
        return self._ledger.findings()
