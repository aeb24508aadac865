"""Our own blindness: input that was lost, agents that fell silent, operations that found no kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ncclscope_service.detect.context import Context
from ncclscope_service.detect.findings import Ledger, duration_text, names_of_hosts
from ncclscope_service.rows import Finding, FindingKind, Severity

_LEAST_OPERATIONS: Final = 1000
_ALIGNED_ENOUGH: Final = 0.9
_ALIGNED_CRITICAL: Final = 0.5
_SKIPPED_TOO_MANY: Final = 0.001
_LOSS_REMEMBERED_NS: Final = 300_000_000_000
_SILENT_AFTER_NS: Final = 30_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSight:
    """What reached us from one host."""

    host: str
    operations: int = 0
    """Log lines of operations that were understood."""
    torn_lines: int = 0
    """Lines of NCCL that were not understood."""
    gaps: int = 0
    """Places at which input was lost (`SourceGap`)."""
    covered: int = 0
    """Operations that ran inside a capture, decided: matched or unmatched. Those outside prove nothing."""
    matched: int = 0
    last_heard_ns: int | None = None
    """When its agent last said anything; None offline."""
    said_goodbye: bool = False


@dataclass(slots=True)
class _Loss:
    gaps: int = 0
    at_ns: int = 0


class Blind:
    """Feeds on counters since the start, per host."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._losses: dict[str, _Loss] = {}

    def feed(self, sight: HostSight, context: Context, now_ns: int) -> None:
        """Takes the present counters of one host."""
        self._judge("gap", self._gap(sight, now_ns), sight, context, now_ns)
        self._judge("align", _alignment(sight), sight, context, now_ns)
        self._judge("silent", _silence(sight, now_ns), sight, context, now_ns)

    def findings(self, now_ns: int) -> list[Finding]:
        """All findings so far."""
        del now_ns
        return self._ledger.findings()

    def _gap(self, sight: HostSight, now_ns: int) -> tuple[str, Severity] | None:
        loss = self._losses.setdefault(sight.host, _Loss())
        if sight.gaps > loss.gaps:
            loss.gaps, loss.at_ns = sight.gaps, now_ns
        lines = sight.operations + sight.torn_lines
        if lines >= _LEAST_OPERATIONS and sight.torn_lines > _SKIPPED_TOO_MANY * lines:
            torn = 100 * sight.torn_lines / lines
            return f"{torn:.2g} % of the operation lines of {sight.host} are torn", Severity.WARNING
        if loss.gaps and now_ns - loss.at_ns <= _LOSS_REMEMBERED_NS:
            return f"input of {sight.host} was lost in {loss.gaps} places", Severity.WARNING
        return None

    def _judge(
        self, what: str, fault: tuple[str, Severity] | None, sight: HostSight, context: Context, now_ns: int
    ) -> None:
        key = (what, sight.host)
        if fault is None:
            self._ledger.close(key, now_ns)
            return
        text, severity = fault
        self._ledger.update(
            key,
            Finding(
                kind=FindingKind.BLIND,
                severity=severity,
                job=context.job,
                comm_id=None,
                parallelism=None,
                ranks=(),
                hosts=(sight.host,),
                since_ns=now_ns,
                until_ns=None,
                confidence=1.0,
                summary=f"{text}: what is said of {names_of_hosts([sight.host])} is less certain",
                evidence={
                    "operations": sight.operations,
                    "torn_lines": sight.torn_lines,
                    "gaps": sight.gaps,
                    "covered": sight.covered,
                    "matched": sight.matched,
                },
            ),
        )


def _alignment(sight: HostSight) -> tuple[str, Severity] | None:
    if sight.covered < _LEAST_OPERATIONS or sight.matched >= _ALIGNED_ENOUGH * sight.covered:
        return None
    share = sight.matched / sight.covered
    severity = Severity.CRITICAL if share < _ALIGNED_CRITICAL else Severity.WARNING
    return f"only {100 * share:.0f} % of the captured operations of {sight.host} found their kernel", severity


def _silence(sight: HostSight, now_ns: int) -> tuple[str, Severity] | None:
    if sight.last_heard_ns is None or sight.said_goodbye or now_ns - sight.last_heard_ns <= _SILENT_AFTER_NS:
        return None
    return (
        f"the agent of {sight.host} has been silent for {duration_text(now_ns - sight.last_heard_ns)}",
        Severity.CRITICAL,
    )


def service_is_blind(job: str, since_ns: int, *, reason: str, summary: str) -> Finding:
    """That the service itself, and no agent, is why a job is not seen whole."""
    return Finding(
        kind=FindingKind.BLIND,
        severity=Severity.WARNING,
        job=job,
        comm_id=None,
        parallelism=None,
        ranks=(),
        hosts=(),
        since_ns=since_ns,
        until_ns=None,
        confidence=1.0,
        summary=summary,
        evidence={"reason": reason},
    )
