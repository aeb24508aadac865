"""What waits for a receiver: tried again with pauses, bounded, and never told twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from service.test_finding_news import LATE

from ncclscope_service.finding_news import FindingEvent, News
from ncclscope_service.outbox import Answer, Outbox, OutboxLimits
from ncclscope_service.rows import Severity

SECOND = 1_000_000_000


def event(name: str = "a", news: News = News.OPENED, severity: str = "warning") -> FindingEvent:
    return FindingEvent(event=news, id=name, finding=replace(LATE, severity=severity))


def waiting(outbox: Outbox, now_ns: int = 0) -> tuple[News, str] | None:
    due = outbox.due(now_ns)
    return None if due is None else (due.event, due.id)


def answered(outbox: Outbox, answer: Answer, now_ns: int = 0) -> None:
    due = outbox.due(now_ns)
    assert due is not None
    outbox.answered(due, answer, now_ns)


def outcomes(outbox: Outbox) -> tuple[int, int, int]:
    counts = outbox.view().outcomes
    return counts["delivered"], counts["failed"], counts["dropped"]


def test_news_is_delivered_in_order() -> None:
    outbox = Outbox("hook")
    outbox.offer(event("a"))
    outbox.offer(event("b"))
    assert waiting(outbox) == (News.OPENED, "a")
    answered(outbox, Answer.TAKEN)
    assert waiting(outbox) == (News.OPENED, "b")
    answered(outbox, Answer.TAKEN)
    assert (waiting(outbox), outbox.pause_ns(0), outcomes(outbox)) == (None, None, (2, 0, 0))


def test_a_receiver_that_is_away_is_tried_again_with_doubling_pauses_and_then_given_up() -> None:
    outbox = Outbox("hook", limits=OutboxLimits(attempts=9))
    outbox.offer(event())
    now, pauses = 0, list[int]()
    while (pause := outbox.pause_ns(now)) is not None:
        pauses.append(pause // SECOND)
        assert pause == 0 or outbox.due(now) is None
        now += pause
        answered(outbox, Answer.LATER, now)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert outcomes(outbox) == (0, 1, 0)
    assert outbox.view().retries == 8


def test_what_is_refused_is_not_tried_again() -> None:
    outbox = Outbox("hook")
    outbox.offer(event())
    answered(outbox, Answer.NEVER)
    assert (waiting(outbox), outcomes(outbox)) == (None, (0, 1, 0))


def test_a_full_outbox_drops_the_oldest_and_counts_it() -> None:
    outbox = Outbox("hook", limits=OutboxLimits(notifications=2))
    for name in "abc":
        outbox.offer(event(name))
    assert waiting(outbox) == (News.OPENED, "b")
    assert (outcomes(outbox), outbox.view().queued) == ((0, 0, 1), 2)


@pytest.mark.parametrize(
    ("news", "left"), [(News.CHANGED, News.OPENED), (News.CLOSED, News.CLOSED)], ids=["changed", "closed"]
)
def test_newer_news_of_a_finding_replaces_what_still_waits(news: News, left: News) -> None:
    outbox = Outbox("hook")
    outbox.offer(event())
    outbox.offer(event(news=news, severity="critical"))
    due = outbox.due(0)
    assert due is not None
    assert (due.event, due.finding.severity, outbox.view().queued) == (left, "critical", 1)


@pytest.mark.parametrize("answer", list(Answer))
def test_news_that_comes_during_an_attempt_is_told_after_it(answer: Answer) -> None:
    outbox = Outbox("hook")
    outbox.offer(event())
    tried = outbox.due(0)
    assert tried is not None
    outbox.offer(event(news=News.CLOSED))
    outbox.answered(tried, answer, 0)
    pause = outbox.pause_ns(0)
    assert pause is not None
    assert waiting(outbox, pause) == (News.CLOSED, "a")


def test_what_was_dropped_during_its_attempt_is_counted_once() -> None:
    outbox = Outbox("hook", limits=OutboxLimits(notifications=1))
    outbox.offer(event("a"))
    tried = outbox.due(0)
    assert tried is not None
    outbox.offer(event("b"))
    outbox.answered(tried, Answer.LATER, 0)
    assert (outcomes(outbox), waiting(outbox)) == ((0, 0, 1), (News.OPENED, "b"))


def test_findings_that_hurry_less_are_not_told_until_they_do_and_then_to_their_end() -> None:
    outbox = Outbox("hook", least=Severity.CRITICAL)
    outbox.offer(event(severity="warning"))
    outbox.offer(event("other", news=News.CLOSED, severity="critical"))
    assert waiting(outbox) is None, "nobody was told that it was there"
    outbox.offer(event(news=News.CHANGED, severity="critical"))
    answered(outbox, Answer.TAKEN)
    outbox.offer(event(news=News.CLOSED, severity="info"))
    assert waiting(outbox) == (News.CLOSED, "a")
