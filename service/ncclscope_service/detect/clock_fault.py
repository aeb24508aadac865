"""Clocks, or matches, that contradict causality: nothing that compares ranks may be believed until they agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ncclscope_service.clock_check import ClockCheck
from ncclscope_service.detect.context import Context
from ncclscope_service.detect.findings import Ledger, names_of_hosts
from ncclscope_service.rows import Finding, FindingKind, Severity

_LASTS_NS: Final = 10_000_000_000
"""A first estimate from few operations may be contradicted by the next ones."""


class ClockFault:
    """Feeds on the estimator's own check."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._since_ns: int | None = None

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
