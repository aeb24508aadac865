"""Notifications that wait for a receiver: bounded, and none delivered twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from service.show.test_finding_events import LATE

from ncclscope_service.keep.service_state import Outbox
from ncclscope_service.show.finding_events import FindingChange, FindingEvent
from ncclscope_service.store.records import Severity

OPENED, CHANGED, CLOSED = FindingChange.OPENED, FindingChange.CHANGED, FindingChange.CLOSED


def event(name: str = "a", change: FindingChange = OPENED, severity: str = "warning") -> FindingEvent:
    return FindingEvent(event=change, id=name, finding=replace(LATE, severity=severity))


def drained(outbox: Outbox) -> list[tuple[FindingChange, str]]:
    found: list[tuple[FindingChange, str]] = []
    while (first := outbox.first()) is not None:
        found.append((first.event, first.id))
        outbox.settle(first.id, first.event, is_delivered=True)
    return found


def test_the_oldest_is_delivered_first_and_once() -> None:
    outbox = Outbox("hook")
    outbox.offer(event("a"))
    outbox.offer(event("b"))
    assert drained(outbox) == [(OPENED, "a"), (OPENED, "b")]
    assert (len(outbox), outbox.outcomes) == (0, {"delivered": 2, "failed": 0, "dropped": 0})


@pytest.mark.parametrize(
    ("changes", "delivered"),
    [
        ((OPENED, CHANGED), OPENED),
        ((OPENED, CLOSED), CLOSED),
        ((OPENED, CHANGED, CLOSED), CLOSED),
    ],
)
def test_newer_news_takes_the_place_of_news_that_waits(
    changes: tuple[FindingChange, ...], delivered: FindingChange
) -> None:
    outbox = Outbox("hook")
    for change in changes:
        outbox.offer(event(change=change, severity="critical" if change is CHANGED else "warning"))
    first = outbox.first()
    assert first is not None
    assert first == outbox.newest("a")
    assert first.finding.severity == ("critical" if changes[-1] is CHANGED else "warning")
    assert drained(outbox) == [(delivered, "a")]


def test_news_that_came_while_older_news_was_delivered_stays() -> None:
    outbox = Outbox("hook")
    outbox.offer(event())
    outbox.offer(event(change=CLOSED))
    outbox.settle("a", OPENED, is_delivered=True)
    assert drained(outbox) == [(CLOSED, "a")]


def test_what_is_less_severe_is_not_reported_but_an_end_always_is() -> None:
    outbox = Outbox("hook", least=Severity.CRITICAL)
    outbox.offer(event(severity="warning"))
    outbox.offer(event(change=CLOSED, severity="warning"))
    assert drained(outbox) == []
    outbox.offer(event(severity="critical"))
    outbox.offer(event(change=CHANGED, severity="warning"))
    assert drained(outbox) == [(OPENED, "a")]
    outbox.offer(event(change=CLOSED, severity="warning"))
    outbox.offer(event(change=CLOSED, severity="critical"))
    assert drained(outbox) == [(CLOSED, "a")]


def test_the_oldest_of_too_many_is_dropped_and_counted() -> None:
    outbox = Outbox("hook")
    for number in range(300):
        outbox.offer(event(str(number)))
    assert (len(outbox), outbox.outcomes["dropped"]) == (256, 44)
    first = outbox.first()
    assert first is not None
    assert first.id == "44"
    outbox.settle("44", OPENED, is_delivered=False)
    assert outbox.outcomes == {"delivered": 0, "failed": 1, "dropped": 44}
