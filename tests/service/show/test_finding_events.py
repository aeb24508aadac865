"""What is told of findings: each opening, change and end once."""

from __future__ import annotations

from dataclasses import replace

from ncclscope_service.show.finding_events import FindingChange, FindingTracker
from ncclscope_service.show.overview import FindingView

SECOND = 1_000_000_000
LATE = FindingView(
    kind="late_rank", severity="warning", job="j", communicator="tp-0", comm_id="0x1", parallelism="TP", ranks=(5,),
    hosts=("node1",), since_ns=100 * SECOND, until_ns=None, confidence=0.9, summary="Rank 5 is late.", evidence={},
)  # fmt: skip


def told(news: FindingTracker, *findings: FindingView) -> list[tuple[FindingChange, tuple[int, ...]]]:
    return [(each.event, each.finding.ranks) for each in news.compare(findings, 0)]


def test_an_open_finding_is_told_once() -> None:
    news = FindingTracker()
    assert told(news, LATE) == [(FindingChange.OPENED, (5,))]
    assert told(news, replace(LATE, confidence=0.95, summary="Rank 5 is later.")) == []


def test_what_was_over_before_the_first_look_is_not_news() -> None:
    assert told(FindingTracker(), replace(LATE, until_ns=200 * SECOND)) == []


def test_one_that_gets_graver_or_accuses_one_more_has_changed_and_keeps_its_id() -> None:
    news = FindingTracker()
    (opened,) = news.compare([LATE], 0)
    (graver,) = news.compare([replace(LATE, severity="critical")], 0)
    (wider,) = news.compare([replace(LATE, severity="critical", ranks=(5, 6), since_ns=90 * SECOND)], 0)
    assert [graver.event, wider.event] == [FindingChange.CHANGED, FindingChange.CHANGED]
    assert {opened.id, graver.id, wider.id} == {opened.id}


def test_its_end_is_told_with_the_time_that_the_finding_has() -> None:
    news = FindingTracker()
    (opened,) = news.compare([LATE], 0)
    earlier = replace(LATE, since_ns=1, until_ns=2)
    (closed,) = news.compare([replace(LATE, until_ns=200 * SECOND), earlier], 0)
    assert (closed.event, closed.id, closed.finding.until_ns) == (FindingChange.CLOSED, opened.id, 200 * SECOND)
    assert told(news, replace(LATE, until_ns=200 * SECOND)) == []


def test_what_vanishes_without_an_end_has_ended_now() -> None:
    news = FindingTracker()
    news.compare([LATE], 0)
    (closed,) = news.compare([], 7)
    assert (closed.event, closed.finding.until_ns) == (FindingChange.CLOSED, 7)


def test_one_that_comes_back_is_told_again_under_its_id() -> None:
    news = FindingTracker()
    (first,) = news.compare([LATE], 0)
    news.compare([replace(LATE, until_ns=200 * SECOND)], 0)
    (again,) = news.compare([LATE], 0)
    assert (again.event, again.id) == (FindingChange.OPENED, first.id)


def test_findings_of_other_ranks_jobs_or_kinds_are_others() -> None:
    news = FindingTracker()
    others = [
        replace(LATE, ranks=(7,), hosts=("node2",), comm_id="0x2"),
        replace(LATE, job="k"),
        replace(LATE, kind="hang"),
    ]
    events = news.compare([LATE, *others], 0)
    assert [each.event for each in events] == [FindingChange.OPENED] * 4
    assert len({each.id for each in events}) == 4
    assert told(news, LATE, others[0]) == [(FindingChange.CLOSED, (5,)), (FindingChange.CLOSED, (5,))]


def test_one_that_stays_keeps_its_own_news_beside_one_that_replaces_another() -> None:
    """Two ranks of one group: the second is replaced, the first must not be taken for its predecessor."""
    news = FindingTracker()
    other = replace(LATE, ranks=(6,))
    news.compare([LATE, other], 0)
    assert told(news, replace(LATE, ranks=(6, 7)), LATE) == [(FindingChange.CHANGED, (6, 7))]
