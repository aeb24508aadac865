"""Groups of collectives that nothing tells: no lines of calls, no stamps, an opCount that stands still."""

from __future__ import annotations

import numpy as np
import pytest
from align_samples import BFLOAT16, Call, Recorder, Sample, align_whole, f1, lose

from ncclscope_service.align.by_order.known_runs import divided, is_regular
from ncclscope_wire.terms import NO_NUMBER

_VERSION = "2.28.3"
_ROUNDS = 64


def _tensors(op: str, amount: int) -> list[Call]:
    return [Call(op, 0, 0xA0, count=1024 * (nth + 1)) for nth in range(amount)]


def _grouped(program: str, rounds: int = _ROUNDS) -> Sample:
    recorder, rng = Recorder(counts=False), np.random.default_rng(1)
    for _ in range(rounds):
        if program == "sharded":
            recorder.issue(101, *_tensors("ReduceScatter", 6))
            recorder.issue(101, *_tensors("AllGather", 6))
        elif program == "beside tensor parallelism":
            for _ in range(3):
                recorder.issue(101, Call("AllReduce", 1, 0xB0, data_type=BFLOAT16))
            recorder.issue(101, *_tensors("AllReduce", 6))
            recorder.issue(101, Call("Broadcast", 1, 0xB0))
        elif program == "groups of any size":
            recorder.issue(101, *_tensors("AllReduce", int(rng.integers(2, 7))))
            recorder.issue(101, Call("Broadcast", 0, 0xA0))
        else:
            recorder.issue(101, *_tensors("ReduceScatter", 6))
            recorder.issue(101, *_tensors("AllGather", 6))
            recorder.issue(101, *_tensors("AllGather", 6))
        recorder.wait(100_000)
    return recorder.sample(stamps=False, groups=False)


_PROGRAMS = ("sharded", "beside tensor parallelism", "groups of any size", "two groups in a row")


@pytest.mark.parametrize("rounds", [4, _ROUNDS])
@pytest.mark.parametrize("program", _PROGRAMS)
def test_large_groups_that_nothing_tells_are_paired_whole(program: str, rounds: int) -> None:
    sample = _grouped(program, rounds)
    matches = align_whole(_VERSION, sample)
    assert f1(sample, matches) == 1.0
    assert (matches["kernel"] != NO_NUMBER).all()


def test_a_lost_line_of_a_group_leaves_the_others_with_their_kernel() -> None:
    sample = lose(_grouped("sharded"), np.random.default_rng(3), lines=0.05)
    assert f1(sample, align_whole(_VERSION, sample)) > 0.99


def test_lost_kernels_of_lone_calls_are_not_taken_for_groups() -> None:
    recorder = Recorder(counts=False)
    for _ in range(_ROUNDS):
        for nth in range(6):
            recorder.issue(101, Call("ReduceScatter", 0, 0xA0, count=1024 * (nth + 1)))
        for nth in range(6):
            recorder.issue(101, Call("AllGather", 0, 0xA0, count=1024 * (nth + 1)))
    sample = lose(recorder.sample(stamps=False, groups=False), np.random.default_rng(4), kernels=0.1)
    matches = align_whole(_VERSION, sample)
    kernels = matches["kernel"][matches["kernel"] != NO_NUMBER]
    assert len(np.unique(kernels)) > 0.97 * len(kernels)


def test_runs_are_groups_only_where_equally_long_ones_have_as_many_kernels() -> None:
    items, symbols, all_of = np.arange(0, 30, 6), np.zeros(4, dtype=np.int32), np.ones(4, dtype=bool)
    assert is_regular(items, np.array([0, 1, 2, 3, 4]), symbols, all_of)
    assert is_regular(items, np.array([0, 2, 4, 6, 8]), symbols, all_of)
    assert not is_regular(items, np.array([0, 5, 10, 14, 19]), symbols, all_of)
    assert not is_regular(items, items, symbols, all_of)


def test_a_run_of_several_groups_is_cut_where_its_calls_repeat() -> None:
    assert divided((7, 8, 9, 7, 8, 9), 2)[0].tolist() == [0, 0, 0, 1, 1, 1]
    assert divided((7, 8, 7, 8, 9), 2)[0].tolist() == [0, 0, 1, 1, 1]
    sure, guess = divided((7, 8, 9, 7, 8, 9), 2)[1], divided((7, 7, 7, 7, 7), 2)[1]
    assert sure > 0.5 > guess
