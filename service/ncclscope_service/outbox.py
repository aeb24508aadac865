"""What one receiver of notifications still has to be told, when it is tried next, and what became of the rest.

Bounded: beyond the limit the oldest notification is dropped and counted. News of a finding that still waits replaces
the older news of it, so that a receiver that was away learns how things stand and not every step on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from ncclscope_service.finding_news import FindingEvent, News
from ncclscope_service.health import ReceiverView
from ncclscope_service.rows import Severity

_FIRST_PAUSE_NS: Final = 1_000_000_000
_LONGEST_PAUSE_NS: Final = 60_000_000_000
_GRAVITY: Final = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}

DELIVERED: Final = "delivered"
FAILED: Final = "failed"
DROPPED: Final = "dropped"


class Answer(Enum):
    """What a receiver made of an attempt."""

    TAKEN = auto()
    LATER = auto()
    """It did not answer, or asks to be tried again."""
    NEVER = auto()
    """It refuses this message: the same again would be refused again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxLimits:
    """How much waits, and how long it is tried."""

    notifications: int = 256
    attempts: int = 8
    """With doubling pauses of 1 s to 60 s: two minutes."""


@dataclass(slots=True)
class _Waiting:
    event: FindingEvent
    attempts: int = 0
    due_ns: int = 0


@dataclass(slots=True)
class Outbox:
    """The notifications of one receiver, oldest first. Times are of any one clock that does not jump."""

    name: str
    least: Severity = Severity.WARNING
    """Findings below are not told."""
    limits: OutboxLimits = field(default_factory=OutboxLimits)
    _waiting: dict[str, _Waiting] = field(default_factory=dict[str, _Waiting])
    _told: set[str] = field(default_factory=set[str])
    """Findings of which the opening was offered: their end is told too, however grave they are by then."""
    _outcomes: dict[str, int] = field(default_factory=lambda: {DELIVERED: 0, FAILED: 0, DROPPED: 0})
    _retries: int = 0

    def offer(self, event: FindingEvent) -> None:
        """One more piece of news."""
        if event.id not in self._told and not self._is_grave(event):
            return
        if event.event is News.CLOSED:
            if event.id not in self._told:
                return
            self._told.discard(event.id)
        else:
            self._told.add(event.id)
        self._put(event)

    def due(self, now_ns: int) -> FindingEvent | None:
        """The notification to be tried now; None where none is due. Answer with `answered` before asking again."""
        pause_ns = self.pause_ns(now_ns)
        return None if pause_ns is None or pause_ns > 0 else self.first()

    def first(self) -> FindingEvent | None:
        """The notification that waits longest, due or not; None where none waits."""
        return next((waiting.event for waiting in self._waiting.values()), None)

    def drop_all(self) -> int:
        """Drops and counts what waits, and says how much that was: nobody will try it any more."""
        dropped = len(self._waiting)
        self._outcomes[DROPPED] += dropped
        self._waiting.clear()
        return dropped

    def pause_ns(self, now_ns: int) -> int | None:
        """How long until one is due; None where none waits."""
        first = next(iter(self._waiting.values()), None)
        return None if first is None else max(0, first.due_ns - now_ns)

    def answered(self, event: FindingEvent, answer: Answer, now_ns: int) -> None:
        """What came of the attempt to deliver the notification that `due` gave."""
        waiting = self._waiting.get(event.id)
        if answer is Answer.TAKEN:
            self._outcomes[DELIVERED] += 1
        elif waiting is None:
            return  # dropped, and counted, while it was tried
        elif answer is Answer.LATER and waiting.attempts + 1 < self.limits.attempts:
            waiting.attempts += 1
            waiting.due_ns = now_ns + min(_FIRST_PAUSE_NS << (waiting.attempts - 1), _LONGEST_PAUSE_NS)
            self._retries += 1
            return
        else:
            self._outcomes[FAILED] += 1
        if waiting is not None and waiting.event is event:
            del self._waiting[event.id]
        elif waiting is not None:  # newer news of it came meanwhile
            waiting.attempts, waiting.due_ns = 0, now_ns

    def settle(self, finding: str, news: str, *, is_taken: bool) -> None:
        """After a restart: what waits of this finding was answered before it."""
        waiting = self._waiting.get(finding)
        if waiting is not None and waiting.event.event == news:
            self.answered(waiting.event, Answer.TAKEN if is_taken else Answer.NEVER, 0)

    def is_waiting(self, finding: str) -> bool:
        """Whether news of this finding still waits."""
        return finding in self._waiting

    def reopened(self) -> None:
        """The clock of before the restart is no more: what waits is due."""
        for waiting in self._waiting.values():
            waiting.due_ns = 0

    def view(self) -> ReceiverView:
        """How the deliveries went so far."""
        return ReceiverView(
            name=self.name, outcomes=dict(self._outcomes), retries=self._retries, queued=len(self._waiting)
        )

    def _is_grave(self, event: FindingEvent) -> bool:
        return _GRAVITY[Severity(event.finding.severity)] >= _GRAVITY[self.least]

    def _put(self, event: FindingEvent) -> None:
        waiting = self._waiting.get(event.id)
        if waiting is None:
            while len(self._waiting) >= self.limits.notifications:
                del self._waiting[next(iter(self._waiting))]
                self._outcomes[DROPPED] += 1
            self._waiting[event.id] = _Waiting(event)
        elif waiting.event.event is News.OPENED and event.event is News.CHANGED:
            waiting.event = FindingEvent(event=News.OPENED, id=event.id, finding=event.finding)
        else:
            waiting.event = event
