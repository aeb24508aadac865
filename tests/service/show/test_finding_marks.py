"""What people say of findings: of which, until when, and what is refused; time is an argument."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ncclscope_service.intake.journal_entry import FindingMarked, MarkAction
from ncclscope_service.show.finding_marks import LONGEST_MUTE_SECONDS, MOST_MARKS, FindingMarks
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_wire.errors import ConfigError

SECOND = 1_000_000_000
LATE = Finding(
    kind=FindingKind.LATE_RANK, severity=Severity.WARNING, job="llama-70b", ranks=(5,), hosts=("node1",), since_ns=1,
    confidence=0.9, summary="Rank 5 is late.", evidence={}, id="late_rank-1",
)  # fmt: skip
HANG = replace(LATE, kind=FindingKind.HANG, ranks=(), hosts=("node1", "node2"), id="hang-1")


def mute(seconds: float = 60, **of: Any) -> FindingMarked:
    return FindingMarked(action=MarkAction.MUTE, at_ns=0, until_ns=round(seconds * SECOND), by="ann", **of)


def acknowledge(finding: str = LATE.id, note: str = "is looked at") -> FindingMarked:
    return FindingMarked(action=MarkAction.ACKNOWLEDGE, at_ns=7, by="ann", note=note, finding=finding)


def after(*entries: FindingMarked) -> FindingMarks:
    marks = FindingMarks()
    for entry in entries:
        marks.check(entry, (LATE, HANG))
        marks = marks.applied(entry)
    return marks


def muted(marks: FindingMarks, *findings: Finding) -> list[str]:
    return [each.id for each in marks.marked(findings or (LATE, HANG)) if each.muted is not None]


def test_an_acknowledgement_stays_until_the_finding_is_known_no_more_or_it_is_taken_back() -> None:
    marks = after(acknowledge())
    late, hang = marks.at([LATE.id], 10**18).marked([LATE, HANG])
    assert late.acknowledged is not None
    assert (late.acknowledged.by, late.acknowledged.note, late.acknowledged.at_ns) == ("ann", "is looked at", 7)
    assert hang.acknowledged is None
    assert muted(marks) == []
    assert marks.at([HANG.id], 8).acknowledged == {}
    assert after(acknowledge(), FindingMarked(action=MarkAction.CLEAR, at_ns=9, finding=LATE.id)).acknowledged == {}


@pytest.mark.parametrize(
    ("of", "fit"),
    [
        ({"finding": LATE.id}, [LATE.id]),
        ({"kind": "late_rank"}, [LATE.id]),
        ({"job": "llama-*"}, [LATE.id, HANG.id]),
        ({"job": "gpt-*"}, []),
        ({"ranks": (4, 5)}, [LATE.id]),
        ({"hosts": ("node2",)}, [HANG.id]),
        ({"hosts": ("node*",)}, [LATE.id, HANG.id]),
        ({"kind": "hang", "hosts": ("node1",), "job": "llama-70b"}, [HANG.id]),
        ({"kind": "hang", "ranks": (5,)}, []),
    ],
)
def test_a_mute_is_about_one_finding_or_about_all_that_fit(of: dict[str, Any], fit: list[str]) -> None:
    assert muted(after(mute(**of))) == fit
    assert muted(after(mute(**of)), replace(LATE, until_ns=5), replace(HANG, until_ns=5)) == [], (
        "what is over needs none"
    )


def test_a_mute_ends_with_its_time_and_a_longer_one_goes_on() -> None:
    marks = after(mute(60, finding=LATE.id), mute(90, kind="late_rank"))
    (late,) = marks.marked([LATE])
    assert late.muted is not None
    assert (late.muted.id, late.muted.until_ns, late.muted.by) == ("mute-2", 90 * SECOND, "ann")
    assert muted(marks.at([LATE.id], 60 * SECOND), LATE) == [LATE.id]
    assert list(marks.at([LATE.id], 60 * SECOND).mutes) == ["mute-2"]
    assert muted(marks.at([LATE.id], 90 * SECOND), LATE) == []
    assert list(marks.applied(mute(finding=HANG.id)).mutes)[-1] == "mute-3", "no id is given twice"


def test_a_mute_of_a_kind_holds_for_findings_that_open_later_and_a_finding_is_cleared_with_all_its_marks() -> None:
    marks = after(mute(kind="late_rank"), mute(finding=LATE.id), acknowledge())
    later = replace(LATE, id="late_rank-2", ranks=(9,))
    assert muted(marks.at([later.id], SECOND), later) == [later.id]
    cleared = marks.applied(FindingMarked(action=MarkAction.CLEAR, at_ns=9, finding=LATE.id))
    assert (list(cleared.mutes), cleared.acknowledged) == (["mute-1"], {})
    assert cleared.applied(FindingMarked(action=MarkAction.CLEAR, at_ns=9, mute="mute-1")).mutes == {}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (acknowledge("late_rank-9"), "there is no finding 'late_rank-9'; open are: late_rank-1, hang-1"),
        (acknowledge(""), "name the finding that is acknowledged by its id"),
        (acknowledge(note="x" * 501), "has over 500 characters"),
        (mute(), "name what is muted: a finding by its id, or a kind, a job, ranks or hosts"),
        (mute(finding=LATE.id, kind="hang"), "name what is muted"),
        (mute(kind="late"), "there is no kind 'late'; known are mismatch, hang"),
        (mute(0, kind="hang"), f"a mute lasts from 1 to {LONGEST_MUTE_SECONDS} seconds, not 0"),
        (mute(1e9, kind="hang"), "a mute lasts from 1 to"),
        (mute(ranks=tuple(range(1025))), "these are over 1024 ranks or hosts"),
        (FindingMarked(action=MarkAction.CLEAR, at_ns=1), "name what is cleared"),
        (FindingMarked(action=MarkAction.CLEAR, at_ns=1, finding=LATE.id), "name what is cleared"),
        (FindingMarked(action=MarkAction.CLEAR, at_ns=1, mute="mute-7"), "no mute 'mute-7'; known are: none"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(entry: FindingMarked, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        after(entry)
    assert said in str(caught.value)


def test_marks_are_bounded() -> None:
    marks = FindingMarks()
    for _ in range(MOST_MARKS):
        marks = marks.applied(mute(kind="hang"))
    with pytest.raises(ConfigError, match=f"there are {MOST_MARKS} mutes already"):
        marks.check(mute(kind="hang"), [])
