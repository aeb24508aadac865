from __future__ import annotations

import numpy as np

from ncclscope_service.detect.bandwidth import BelowLimit
from ncclscope_service.detect.comparable_groups import RecentWindows, Shape, Windows
from ncclscope_service.detect.context import Context, Group
from ncclscope_service.store.records import Finding

SECOND = 1_000_000_000
GROUPS = {
    index: Group(
        comm_id=f"dp{index}", parallelism="DP", global_ranks=(index, index + 4), hosts=("a", "b"), limit=50e9,
        limit_name="the NIC",
    )
    for index in range(2)
}  # fmt: skip
CONTEXT = Context(job="job", groups=GROUPS)
LARGE = 8 * 26
"""64 MiB, in eighths of an octave."""


SHAPES = [Shape(0, 0, LARGE), Shape(1, 0, LARGE), Shape(1, 0, 8 * 20)]


class Played:
    """Windows of some shapes, and the detector that looks at them."""

    def __init__(self) -> None:
        self.recent = RecentWindows()
        self.detector = BelowLimit()

    def play(self, shape: int, busbw: float, from_second: int = 0) -> None:
        seconds = np.arange(20)
        windows = Windows(
            shape=np.full(20, shape),
            at_ns=(from_second + seconds) * SECOND,
            level=np.full(20, np.log(busbw)),
            worst_seq=seconds,
        )
        self.recent.ingest_windows(windows, len(SHAPES))

    def findings(self, explained: frozenset[int] = frozenset()) -> list[Finding]:
        return self.detector.findings(self.recent, SHAPES, CONTEXT, explained)


def test_a_group_far_below_its_limit_from_the_first_step_is_told_within_twenty_seconds() -> None:
    played = Played()
    played.play(0, 20e9)
    (finding,) = played.findings()
    assert (
        finding.summary == "DP group dp0 reaches 20 GB/s of bus bandwidth, 40 % of the 50 GB/s that the NIC can carry"
    )
    assert finding.comm_id == "dp0"
    assert finding.evidence["collectives"] == [f"dp0:{at}" for at in range(12, 20)]


def test_groups_of_one_parallelism_are_one_finding_and_it_heals() -> None:
    played = Played()
    for index in GROUPS:
        played.play(index, 20e9)
    (finding,) = played.findings()
    assert finding.evidence["groups"] == ["dp0", "dp1"]
    for index in GROUPS:
        played.play(index, 45e9, from_second=30)
    assert [each.until_ns is None for each in played.findings()] == [False]


def test_good_groups_small_messages_and_what_another_finding_explains_are_quiet() -> None:
    played = Played()
    played.play(0, 30e9)
    played.play(2, 5e9)
    assert played.findings() == []
    played.play(0, 10e9, from_second=30)
    assert played.findings(frozenset({0})) == []
