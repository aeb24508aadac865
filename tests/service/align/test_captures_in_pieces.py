"""By order alone, captures with holes between: one thread's place is told by another's."""

from __future__ import annotations

import numpy as np
import pytest
from align_samples import BFLOAT16, Call, Recorder, Sample

from ncclscope_service.align.process_aligner import ProcessAligner
from ncclscope_service.store.rows import Match
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

FORWARD, BACKWARD = 101, 202
VERSION = "2.21.5"


def job(iterations: int) -> Sample:
    """Forward differs from layer to layer; backward is one operation over and over. Some work takes longer."""
    rng = np.random.default_rng(7)
    recorder = Recorder(counts=True)
    equal = Call("AllReduce", 0, 0xA0, data_type=BFLOAT16)
    for _ in range(iterations):
        for op in ("AllGather", "ReduceScatter", "AllGather", "Broadcast"):
            for _layer in range(int(rng.integers(2, 5))):
                recorder.wait(int(rng.integers(500_000, 2_000_000)))
                recorder.issue(FORWARD, Call(op, 2, 0xC0))
        for _layer in range(8):
            recorder.wait(int(rng.integers(500_000, 2_000_000)))
            recorder.issue(BACKWARD, equal)
    sample = recorder.sample(stamps=False, groups=False)
    # Other calls between the launches use up correlation ids, now more and now fewer.
    sample.kernels["correlation_id"] = np.cumsum(rng.geometric(1 / 20, len(sample.kernels)))
    return sample


def in_pieces(sample: Sample, kept_ns: int, period_ns: int) -> tuple[Sample, list[tuple[int, int]]]:
    """What captures of `kept_ns` in every `period_ns` record."""
    times = sample.kernels["launch_start_ns"]
    begin, end = int(times.min()) - 1_000_000, int(times.max())
    spans = [(at, at + kept_ns) for at in range(begin, end, period_ns)]
    kept = np.zeros(len(times), dtype=bool)
    for first, last in spans:
        kept |= (times >= first) & (sample.kernels["end_ns"] <= last)
    truth = sample.truth.copy()
    truth[(truth >= 0) & ~kept[np.maximum(truth, 0)]] = NO_NUMBER
    return Sample(sample.operations, sample.kernels[kept], truth), spans


def fed(sample: Sample, spans: list[tuple[int, int]], portions: int, seed: int) -> Columns:
    """Each capture's kernels at once, lines in so many portions in between."""
    rng = np.random.default_rng(seed)
    aligner = ProcessAligner(VERSION)
    cuts = np.sort(rng.integers(0, len(sample.operations), portions - 1)).tolist()
    waiting = np.split(sample.operations, cuts)
    found: list[Columns] = []
    for begin, end in spans:
        own = sample.kernels[(sample.kernels["start_ns"] >= begin) & (sample.kernels["start_ns"] <= end)]
        aligner.ingest_kernels(own)
        aligner.ingest_coverage(begin, end)
        for _ in range(int(rng.integers(0, 3))):
            if waiting:
                aligner.ingest_operations(waiting.pop(0))
            found.append(aligner.align_ready(final=False))
    for rest in waiting:
        aligner.ingest_operations(rest)
    found.append(aligner.align_ready(final=True))
    return np.sort(np.concatenate(found), order="operation")


@pytest.fixture(scope="module")
def captured() -> tuple[Sample, list[tuple[int, int]]]:
    return in_pieces(job(160), 1_600_000_000, 4_000_000_000)


def test_a_thread_of_equal_operations_is_placed_by_another_threads_kernels(
    captured: tuple[Sample, list[tuple[int, int]]],
) -> None:
    sample, spans = captured
    matches = fed(sample, spans, 1, 0)
    is_backward = sample.operations["tid"][matches["operation"]] == BACKWARD
    found = is_backward & (matches["match"] == Match.MATCHED)
    right = matches["kernel"][found] == sample.truth[matches["operation"][found]]
    assert np.count_nonzero(found) == np.count_nonzero(sample.truth[sample.operations["tid"] == BACKWARD] >= 0)
    assert np.count_nonzero(right) > 0.98 * len(right)


def test_what_was_not_captured_is_not_covered(captured: tuple[Sample, list[tuple[int, int]]]) -> None:
    sample, spans = captured
    matches = fed(sample, spans, 1, 0)
    unseen = sample.truth[matches["operation"]] == NO_NUMBER
    assert np.count_nonzero(matches["match"][unseen] == Match.NOT_COVERED) > 0.98 * np.count_nonzero(unseen)


def test_captures_of_a_few_kernels_with_holes_as_long_between_are_guesses() -> None:
    sample, spans = in_pieces(job(80), 20_000_000, 50_000_000)
    matches = fed(sample, spans, 1, 0)
    found = matches[matches["match"] == Match.MATCHED]
    sure = found[found["confidence"] > 0.5]
    right = np.count_nonzero(sure["kernel"] == sample.truth[sure["operation"]])
    assert len(found) > 500
    assert right >= float(sure["confidence"].sum()) - 0.05 * len(found)
