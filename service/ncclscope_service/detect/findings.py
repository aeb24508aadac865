"""A ledger of findings: each opened once, updated while it lasts, closed when it heals; and their order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Final

from ncclscope_service.rows import Finding, FindingKind, Severity

_REOPENS_WITHIN_NS: Final = 60_000_000_000
"""A fault that comes back within a minute is the same fault."""
_CLOSED_KEPT: Final = 256

_URGENCY: Final = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
_KINDS: Final = {
    kind: place
    for place, kind in enumerate(
        (
            FindingKind.MISMATCH,
            FindingKind.HANG,
            FindingKind.REPORTED_FAILURE,
            FindingKind.STOPPED_LOGGING,
            FindingKind.SLOW_LINK,
            FindingKind.LATE_RANK,
            FindingKind.BANDWIDTH_DROP,
            FindingKind.BELOW_LIMIT,
            FindingKind.SLOW_DRIFT,
            FindingKind.CLOCK_FAULT,
            FindingKind.BLIND,
        )
    )
}


class Ledger:
    """Findings of one detector by key; a key is one fault (a rank, a set of hosts, a communicator)."""

    def __init__(self) -> None:
        self._open: dict[Hashable, Finding] = {}
        self._closed: dict[Hashable, Finding] = {}
        self._history: list[Finding] = []

    def is_open(self, key: Hashable) -> bool:
        """Whether this fault is open."""
        return key in self._open

    def open_keys(self) -> tuple[Hashable, ...]:
        """The faults that are open, oldest first."""
        return tuple(self._open)

    def update(self, key: Hashable, finding: Finding, *, keeps_since: bool = True) -> None:
        """Opens a fault, or renews what is said of one that is open; its first `since_ns` stays, if that is kept."""
        known = self._open.get(key)
        if known is None:
            known = self._reopened(key, finding)
        if known is not None and keeps_since:
            finding = replace(finding, since_ns=min(known.since_ns, finding.since_ns))
        self._open[key] = replace(finding, until_ns=None)

    def close(self, key: Hashable, until_ns: int) -> None:
        """Closes a fault; nothing happens where it is not open."""
        finding = self._open.pop(key, None)
        if finding is None:
            return
        previous = self._closed.pop(key, None)
        if previous is not None:
            self._history.append(previous)
        self._closed[key] = replace(finding, until_ns=max(until_ns, finding.since_ns))
        while len(self._closed) > _CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]
        del self._history[: max(0, len(self._history) - _CLOSED_KEPT)]

    def findings(self) -> list[Finding]:
        """All of them, open and closed, in the order of `ordered`."""
        return ordered([*self._open.values(), *self._closed.values(), *self._history])

    def _reopened(self, key: Hashable, finding: Finding) -> Finding | None:
        previous = self._closed.get(key)
        if previous is None or previous.until_ns is None:
            return None
        if finding.since_ns - previous.until_ns > _REOPENS_WITHIN_NS:
            return None
        return self._closed.pop(key)


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Open before closed, then by severity, by how much the kind hurries, by confidence and by age."""
    return sorted(
        findings,
        key=lambda finding: (
            finding.until_ns is not None,
            _URGENCY[finding.severity],
            _KINDS[finding.kind],
            -finding.confidence,
            finding.since_ns,
            finding.ranks,
        ),
    )


def names_of_ranks(ranks: Iterable[int]) -> str:
    """ "rank 5", "ranks 5 and 7", "ranks 5, 6, 7 and 12 more"."""
    return _names("rank", "ranks", [str(rank) for rank in ranks])


def names_of_hosts(hosts: Iterable[str]) -> str:
    """ "host node2", "hosts node2 and node3"."""
    return _names("host", "hosts", list(hosts))


def _names(one: str, many: str, names: list[str]) -> str:
    if len(names) == 1:
        return f"{one} {names[0]}"
    if len(names) > 4:
        return f"{many} {', '.join(names[:3])} and {len(names) - 3} more"
    return f"{many} {', '.join(names[:-1])} and {names[-1]}" if names else f"no {one}"


def duration_text(duration_ns: float) -> str:
    """A duration for a sentence: "2.0 ms"."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(duration_ns) >= size:
            return f"{duration_ns / size:.1f} {unit}"
    return f"{duration_ns:.0f} ns"
