"""What is new among the findings from one look to the next: opened, changed, closed.

The detectors renew their findings at every pass; who is to be told must be told once. A finding is the same one as long
as it is open and accuses the same culprits of the same communicator, or has replaced one of the same kind that is open
no more and overlaps it (it names one more rank, or has become graver).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ncclscope_service.overview import FindingView

_Key = tuple[str, str, str | None, tuple[int, ...], tuple[str, ...]]


class News(StrEnum):
    """What has become of a finding."""

    OPENED = "opened"
    CHANGED = "changed"
    """Graver or less so, or other culprits; its id stays."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingEvent:
    """One piece of news; also what the event stream carries as JSON."""

    event: News
    id: str
    """Of the fault: equal in all of its events, and after a restart of the service."""
    finding: FindingView


@dataclass(frozen=True, slots=True)
class _Known:
    id: str
    finding: FindingView


class FindingNews:
    """Compares each look with the one before. Memory: the findings that are open."""

    def __init__(self) -> None:
        self._open: dict[_Key, _Known] = {}

    def look(self, findings: Sequence[FindingView], now_ns: int) -> list[FindingEvent]:
        """The news, in the order of the findings, what has closed last. `findings` must hold all that are open.

        What has vanished without having been closed counts as closed at `now_ns`.
        """
        gone = dict(self._open)
        found: dict[_Key, _Known] = {}
        events: list[FindingEvent] = []
        open_ones = [each for each in findings if each.until_ns is None]
        for finding in sorted(open_ones, key=lambda each: _key(each) not in gone):
            known = _take(gone, finding)
            identity = _identity(finding) if known is None else known.id
            found[_key(finding)] = _Known(identity, finding)
            if known is None:
                events.append(FindingEvent(event=News.OPENED, id=identity, finding=finding))
            elif _is_changed(known.finding, finding):
                events.append(FindingEvent(event=News.CHANGED, id=identity, finding=finding))
        ended = {_key(each): each for each in sorted(findings, key=_end) if each.until_ns is not None}
        for key, known in gone.items():
            closed = ended.get(key) or _ended_at(known.finding, now_ns)
            events.append(FindingEvent(event=News.CLOSED, id=known.id, finding=closed))
        self._open = found
        return events


def _key(finding: FindingView) -> _Key:
    return (finding.job, finding.kind, finding.comm_id, finding.ranks, finding.hosts)


def _end(finding: FindingView) -> int:
    return finding.until_ns or 0


def _take(gone: dict[_Key, _Known], finding: FindingView) -> _Known | None:
    """The finding that this one goes on from, taken out of `gone`."""
    if (same := gone.pop(_key(finding), None)) is not None:
        return same
    for key, known in gone.items():
        if _replaces(finding, known.finding):
            return gone.pop(key)
    return None


def _replaces(finding: FindingView, known: FindingView) -> bool:
    if (finding.job, finding.kind) != (known.job, known.kind):
        return False
    overlaps = set(finding.ranks) & set(known.ranks) or set(finding.hosts) & set(known.hosts)
    return bool(overlaps) or (finding.comm_id is not None and finding.comm_id == known.comm_id)


def _is_changed(before: FindingView, now: FindingView) -> bool:
    return (before.severity, before.ranks, before.hosts) != (now.severity, now.ranks, now.hosts)


def _identity(finding: FindingView) -> str:
    parts: Iterable[object] = (*_key(finding), finding.since_ns)
    return f"{finding.kind}-{hashlib.blake2s(repr(tuple(parts)).encode(), digest_size=6).hexdigest()}"


def _ended_at(finding: FindingView, now_ns: int) -> FindingView:
    return replace(finding, until_ns=now_ns)
