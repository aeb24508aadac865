"""Drawn operations of which lines and kernels are lost: how many pairs are found, and whether confidences hold."""

from __future__ import annotations

from functools import cache

import numpy as np
from align_samples import Call, Recorder, Sample, align_whole, f1, lose, training
from numpy.typing import NDArray

from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

_OPERATIONS = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast")


def drawn(seed: int, *, streams: int, operations: int = 200, share: float | None = None) -> Sample:
    """Operations drawn one by one, each launched alone; `share` of them AllReduce."""
    rng = np.random.default_rng(seed)
    others = 0.25 if share is None else (1 - share) / 3
    shares = [1 - 3 * others, others, others, others]
    recorder = Recorder(counts=False)
    for op, stream in zip(rng.choice(4, operations, p=shares), rng.integers(0, streams, operations), strict=True):
        recorder.issue(1, Call(_OPERATIONS[op], int(stream), 0xA0 + int(stream)))
    return recorder.sample(stamps=False, groups=False)


@cache
def outcome(streams: int, lines: float, kernels: float) -> tuple[float, NDArray[np.bool_], NDArray[np.float64]]:
    """Mean F1 over jobs, and of every match whether it is right and how sure it is said to be."""
    scores, rights, confidences = [], [], []
    for seed in range(6):
        sample = lose(drawn(seed, streams=streams), np.random.default_rng(1000 + seed), lines=lines, kernels=kernels)
        matches = align_whole("2.28.3", sample)
        scores.append(f1(sample, matches))
        found = matches[matches["kernel"] != NO_NUMBER]
        rights.append(found["kernel"] == sample.truth[found["operation"]])
        confidences.append(found["confidence"].astype(np.float64))
    return float(np.mean(scores)), np.concatenate(rights), np.concatenate(confidences)


def test_streams_tell_kernels_apart_where_much_is_lost() -> None:
    assert outcome(3, 0.0, 0.0)[0] == 1.0
    assert outcome(3, 0.2, 0.0)[0] >= 0.96
    assert outcome(3, 0.0, 0.2)[0] >= 0.96
    assert outcome(3, 0.2, 0.2)[0] >= 0.93


def test_a_confidence_is_the_share_of_such_matches_that_are_right() -> None:
    parts = [outcome(streams, 0.2, 0.2) for streams in (1, 3)]
    right = np.concatenate([part[1] for part in parts])
    confidence = np.concatenate([part[2] for part in parts])
    for low, high in ((0.3, 0.5), (0.5, 0.7), (0.7, 0.9), (0.9, 0.98), (0.98, 1.01)):
        chosen = (confidence >= low) & (confidence < high)
        assert np.count_nonzero(chosen) > 30
        # Pairs of one run are right or wrong together, so that shares of a few hundred scatter.
        assert abs(right[chosen].mean() - confidence[chosen].mean()) < 0.15
    assert abs(right.mean() - confidence.mean()) < 0.04


def test_in_a_run_of_equal_operations_each_pair_is_called_a_guess() -> None:
    recorder = Recorder(counts=False)
    for _ in range(8):
        recorder.issue(1, Call("AllGather", 0, 0xA0))
        for _ in range(24):
            recorder.issue(1, Call("AllReduce", 0, 0xA0))
    clean = recorder.sample(stamps=False, groups=False)
    rights, confidences = [], []
    for seed in range(10):
        sample = lose(clean, np.random.default_rng(seed), lines=0.2, kernels=0.2)
        matches = align_whole("2.28.3", sample)
        found = matches[matches["kernel"] != NO_NUMBER]
        kinds = sample.operations["op"][np.searchsorted(sample.operations["id"], found["operation"])]
        classes = sample.kernels["kernel_class"][np.searchsorted(sample.kernels["id"], found["kernel"])]
        assert (kinds == classes).all()
        in_run = kinds == OPERATION_CODES["AllReduce"]
        rights.append(found["kernel"][in_run] == sample.truth[found["operation"][in_run]])
        confidences.append(found["confidence"][in_run])
    said, true = np.concatenate(confidences).mean(), np.concatenate(rights).mean()
    assert said < 0.6
    assert abs(said - true) < 0.1, f"{said:.2f} said, {true:.2f} true"


def test_a_run_that_is_as_long_on_both_sides_may_have_lost_as_many_of_each() -> None:
    recorder = Recorder(counts=False)
    for _ in range(100):
        recorder.issue(1, Call("AllGather", 0, 0xA0))
        for _ in range(24):
            recorder.issue(1, Call("AllReduce", 0, 0xA0))
    clean = recorder.sample(stamps=False, groups=False)
    for rate in (0.01, 0.03):
        sample = lose(clean, np.random.default_rng(1), lines=rate, kernels=rate)
        matches = align_whole("2.28.3", sample)
        found = matches[matches["kernel"] != NO_NUMBER]
        right = found["kernel"] == sample.truth[found["operation"]]
        sure = found["confidence"] >= 0.9
        assert abs(right[sure].mean() - found["confidence"][sure].mean()) < 0.08
        assert abs(right.mean() - found["confidence"].mean()) < 0.08


def test_a_programs_own_order_threads_and_counts_tell_what_is_lost() -> None:
    told, silent = (
        lose(
            training(np.random.default_rng(0), 20, counts=counts).sample(stamps=False, groups=False),
            np.random.default_rng(1),
            lines=0.2,
            kernels=0.2,
        )
        for counts in (True, False)
    )
    assert f1(told, align_whole("2.18.3", told)) >= 0.93
    one_thread = Sample(silent.operations, silent.kernels.copy(), silent.truth)
    one_thread.kernels["launch_tid"] = NO_NUMBER
    with_threads, without = (f1(each, align_whole("2.28.3", each)) for each in (silent, one_thread))
    assert with_threads > without + 0.05
