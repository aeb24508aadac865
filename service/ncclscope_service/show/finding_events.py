"""Changes of findings from one pass to the next: opened, changed, closed.

Detectors renew their findings at every pass; each change must be reported once. A finding is the same one as long as it
is open and names the same ranks and hosts of the same communicator, or if it replaces a closed one of the same kind
that it overlaps (it names one more rank, or has become more severe).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from types import MappingProxyType

from ncclscope_service.show.overview import FindingView
from ncclscope_service.store.records import Finding

_Key = tuple[str, str, str | None, tuple[int, ...], tuple[str, ...]]


class FindingChange(StrEnum):
    """A change of a finding."""

    OPENED = "opened"
    CHANGED = "changed"
    """Another severity, or other ranks or hosts; its id stays."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingEvent:
    """One change; also what the event stream carries as JSON."""

    event: FindingChange
    id: str
    """Of the fault: equal in all of its events, and after a restart of the service."""
    finding: FindingView


@dataclass(frozen=True, slots=True)
class _Known:
    id: str
    finding: FindingView


class FindingTracker:
    """Compares the findings of each pass with those of the one before, and gives them ids. Memory: these findings."""

    _ended: Mapping[tuple[_Key, int], str] = MappingProxyType({})
    """Ids of closed findings, by key and beginning."""

    def __init__(self) -> None:
        self._open: dict[_Key, _Known] = {}

    def compare(self, findings: Sequence[FindingView], now_ns: int) -> list[FindingEvent]:
        """The changes, in the order of the findings, closed ones last. `findings` must hold all that are open.

        One that has vanished without having been closed counts as closed at `now_ns`.
        """
        gone = dict(self._open)
        found: dict[_Key, _Known] = {}
        events: list[FindingEvent] = []
        open_ones = [each for each in findings if each.until_ns is None]
        for each in sorted(open_ones, key=lambda each: _key(each) not in gone):
            known = _take(gone, each)
            identity = each.id or (_identity(each) if known is None else known.id)
            finding = replace(each, id=identity)
            found[_key(finding)] = _Known(identity, finding)
            if known is None:
                events.append(FindingEvent(event=FindingChange.OPENED, id=identity, finding=finding))
            elif _shown(known.finding) != _shown(finding):
                events.append(FindingEvent(event=FindingChange.CHANGED, id=identity, finding=finding))
        over = [each for each in findings if each.until_ns is not None]
        ended = {_key(each): each for each in sorted(over, key=attrgetter("until_ns"))}
        for key, known in gone.items():
            closed = replace(ended.get(key) or replace(known.finding, until_ns=now_ns), id=known.id)
            events.append(FindingEvent(event=FindingChange.CLOSED, id=known.id, finding=closed))
        was_open = {key: known.id for key, known in gone.items() if key in ended}
        self._ended = {
            (key, each.since_ns): self._ended.get((key, each.since_ns))
            or (was_open.get(key) if ended[key] is each else None)
            or _identity(each)
            for each in over
            for key in (_key(each),)
        }
        self._open = found
        return events

    def identified(self, findings: Iterable[Finding]) -> list[Finding]:
        """The same findings, which `compare` has seen last, with their ids."""
        return [replace(each, id=self._id_of(each)) for each in findings]

    def _id_of(self, finding: Finding) -> str:
        key = _key(finding)
        if finding.until_ns is not None:
            return self._ended.get((key, finding.since_ns), "")
        known = self._open.get(key)
        return "" if known is None else known.id


def _key(finding: FindingView | Finding) -> _Key:
    return (finding.job, str(finding.kind), finding.comm_id, finding.ranks, finding.hosts)


def _take(gone: dict[_Key, _Known], finding: FindingView) -> _Known | None:
    """The finding that this one continues, taken out of `gone`."""
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


def _shown(finding: FindingView) -> tuple[object, ...]:
    """A finding has changed if this has."""
    return finding.severity, finding.ranks, finding.hosts


def _identity(finding: FindingView) -> str:
    parts: Iterable[object] = (*_key(finding), finding.since_ns)
    return f"{finding.kind}-{hashlib.blake2s(repr(tuple(parts)).encode(), digest_size=6).hexdigest()}"
