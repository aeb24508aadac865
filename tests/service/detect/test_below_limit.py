from __future__ import annotations

from dataclasses import replace

import numpy as np

from ncclscope_service.detect.bandwidth import BelowLimit
from ncclscope_service.detect.comparable_groups import Sample, Shape
from ncclscope_service.detect.context import Context, Group

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


def samples(communicator: int, busbw: float, windows: int, bucket: int = LARGE) -> list[Sample]:
    shape = Shape(communicator, 0, bucket)
    return [Sample(shape, at * SECOND, float(np.log(busbw)), 3, at) for at in range(windows)]


def test_a_group_far_below_its_limit_from_the_first_step_is_told_within_twenty_seconds() -> None:
    detector = BelowLimit()
    detector.ingest_samples(samples(0, 20e9, 20), CONTEXT)
    (finding,) = detector.findings(frozenset())
    assert (
        finding.summary == "DP group dp0 reaches 20 GB/s of bus bandwidth, 40 % of the 50 GB/s that the NIC can carry"
    )
    assert finding.comm_id == "dp0"
    assert finding.evidence["collectives"] == [f"dp0:{at}" for at in range(12, 20)]


def test_groups_of_one_parallelism_are_one_finding_and_it_heals() -> None:
    detector = BelowLimit()
    for index in GROUPS:
        detector.ingest_samples(samples(index, 20e9, 20), CONTEXT)
    (finding,) = detector.findings(frozenset())
    assert finding.evidence["groups"] == ["dp0", "dp1"]
    for index in GROUPS:
        detector.ingest_samples(
            [replace(each, at_ns=each.at_ns + 30 * SECOND) for each in samples(index, 45e9, 20)], CONTEXT
        )
    assert [each.until_ns is None for each in detector.findings(frozenset())] == [False]


def test_good_groups_small_messages_and_what_another_finding_explains_are_quiet() -> None:
    detector = BelowLimit()
    detector.ingest_samples(samples(0, 30e9, 20), CONTEXT)
    detector.ingest_samples(samples(1, 5e9, 20, bucket=8 * 20), CONTEXT)
    assert detector.findings(frozenset()) == []
    detector.ingest_samples([replace(each, at_ns=each.at_ns + 30 * SECOND) for each in samples(0, 10e9, 20)], CONTEXT)
    assert detector.findings(frozenset({0})) == []
