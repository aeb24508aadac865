"""Marks of people on findings: acknowledged, until the fault is over, and muted, for a time.

An acknowledgement is of one finding. A mute is of one finding, or of all that fit a kind, a job, ranks and hosts, those
that open later included. A muted finding is shown and counted as ever; it notifies nobody and fires no alert. When its
mute ends and it is still open, it is reported again.

Marks change by journal entries alone, and end by the time of the tick: a restart gives the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Final

from ncclscope_service.intake.journal_entry import FindingMarked, MarkAction
from ncclscope_service.store.records import Acknowledgement, Finding, FindingKind, Mute
from ncclscope_service.store.settings import SECOND_NS
from ncclscope_wire.errors import ConfigError

MOST_MARKS: Final = 1000
"""Of each kind; more are refused."""
LONGEST_MUTE_SECONDS: Final = 90 * 86_400
MOST_CHARACTERS: Final = 500
"""Of a note, a name or a pattern."""
MOST_NAMES: Final = 1024
"""Ranks or hosts of a mute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingMarks:
    """All marks that hold."""

    acknowledged: dict[str, Acknowledgement] = field(default_factory=dict[str, Acknowledgement])
    """By id of the finding."""
    mutes: dict[str, Mute] = field(default_factory=dict[str, Mute])
    """By id, oldest first."""
    made: int = 0
    """Mutes so far."""

    def applied(self, entry: FindingMarked) -> FindingMarks:
        """The marks after an entry that `check` has found right."""
        if entry.action is MarkAction.ACKNOWLEDGE:
            mark = Acknowledgement(by=entry.by, note=entry.note, at_ns=entry.at_ns)
            return replace(self, acknowledged={**self.acknowledged, entry.finding: mark})
        if entry.action is MarkAction.MUTE:
            mute = _mute_of_entry(f"mute-{self.made + 1}", entry)
            return replace(self, mutes={**self.mutes, mute.id: mute}, made=self.made + 1)
        return replace(
            self,
            acknowledged={each: mark for each, mark in self.acknowledged.items() if each != entry.finding},
            mutes={
                each: mute
                for each, mute in self.mutes.items()
                if each != entry.mute and (not entry.finding or mute.finding != entry.finding)
            },
        )

    def at(self, findings: Iterable[str], now_ns: int) -> FindingMarks:
        """The marks that hold at this time: mutes end, and acknowledgements go with their findings, by id."""
        if not self.mutes and not self.acknowledged:
            return self
        known = set(findings)
        return replace(
            self,
            acknowledged={each: mark for each, mark in self.acknowledged.items() if each in known},
            mutes={each: mute for each, mute in self.mutes.items() if mute.until_ns > now_ns},
        )

    def marked(self, findings: Sequence[Finding]) -> list[Finding]:
        """The same findings with what was said of them."""
        return [
            replace(each, acknowledged=self.acknowledged.get(each.id), muted=self._mute_of(each)) for each in findings
        ]

    def check(self, entry: FindingMarked, findings: Sequence[Finding]) -> None:
        """Refuses an entry that is of no use; `findings`: all that there are.

        Raises:
            ConfigError: says what is wrong.
        """
        if entry.finding and all(entry.finding != each.id for each in findings):
            known = [each.id for each in findings if each.until_ns is None]
            raise ConfigError(f"there is no finding {entry.finding[:80]!r}; open are: {', '.join(known) or 'none'}")
        for text in (entry.by, entry.note, entry.kind, entry.job, *entry.hosts):
            if len(text) > MOST_CHARACTERS:
                raise ConfigError(f"{text[:40]!r}... has over {MOST_CHARACTERS} characters")
        if max(len(entry.ranks), len(entry.hosts)) > MOST_NAMES:
            raise ConfigError(f"these are over {MOST_NAMES} ranks or hosts: name a job or a kind instead")
        match entry.action:
            case MarkAction.ACKNOWLEDGE:
                if not entry.finding:
                    raise ConfigError("name the finding that is acknowledged by its id")
                if len(self.acknowledged) >= MOST_MARKS:
                    raise ConfigError(f"{MOST_MARKS} findings are acknowledged already")
            case MarkAction.MUTE:
                self._check_mute(entry)
            case MarkAction.CLEAR:
                self._check_cleared(entry)

    def _mute_of(self, finding: Finding) -> Mute | None:
        """The mute of this finding that lasts longest; None if it is not muted, or over."""
        if finding.until_ns is not None:
            return None
        return max(
            (each for each in self.mutes.values() if _fits(each, finding)), key=attrgetter("until_ns"), default=None
        )

    def _check_mute(self, entry: FindingMarked) -> None:
        seconds = (entry.until_ns - entry.at_ns) / SECOND_NS
        if bool(entry.finding) == any((entry.kind, entry.job, entry.ranks, entry.hosts)):
            raise ConfigError("name what is muted: a finding by its id, or a kind, a job, ranks or hosts")
        if entry.kind and entry.kind not in set(FindingKind):
            raise ConfigError(f"there is no kind {entry.kind[:80]!r}; known are {', '.join(FindingKind)}")
        if not 1 <= seconds <= LONGEST_MUTE_SECONDS:
            raise ConfigError(f"a mute lasts from 1 to {LONGEST_MUTE_SECONDS} seconds, not {seconds:g}")
        if len(self.mutes) >= MOST_MARKS:
            raise ConfigError(f"there are {MOST_MARKS} mutes already: clear some, or mute by kind, job or host")

    def _check_cleared(self, entry: FindingMarked) -> None:
        marked = {*self.acknowledged, *(mute.finding for mute in self.mutes.values())}
        if entry.mute and entry.mute not in self.mutes:
            raise ConfigError(f"there is no mute {entry.mute[:80]!r}; known are: {', '.join(self.mutes) or 'none'}")
        if not entry.mute and entry.finding not in marked:
            raise ConfigError("name what is cleared: a finding that is acknowledged or muted by its id, or a mute")


def _mute_of_entry(number: str, entry: FindingMarked) -> Mute:
    return Mute(
        id=number,
        by=entry.by,
        note=entry.note,
        at_ns=entry.at_ns,
        until_ns=entry.until_ns,
        finding=entry.finding or None,
        kind=entry.kind or None,
        job=entry.job or None,
        ranks=entry.ranks,
        hosts=entry.hosts,
    )


def _fits(mute: Mute, finding: Finding) -> bool:
    """Whether a mute is about this finding."""
    if mute.finding is not None:
        return mute.finding == finding.id
    return (
        mute.kind in {None, finding.kind}
        and (mute.job is None or fnmatchcase(finding.job, mute.job))
        and (not mute.ranks or not set(mute.ranks).isdisjoint(finding.ranks))
        and (not mute.hosts or any(fnmatchcase(host, each) for host in finding.hosts for each in mute.hosts))
    )
