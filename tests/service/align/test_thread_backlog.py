"""Groups that take several kernels."""

from __future__ import annotations

import numpy as np
import pytest
from align_samples import Call, Recorder, Sample, align_whole, f1, feed_portions

from ncclscope_service.align.op_count import PlanCounts, plans_of_roots
from ncclscope_service.align.process_aligner import ProcessAligner
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

TENSOR, SHARD, GATHER = Call("AllReduce", 0, 0xA0), Call("ReduceScatter", 2, 0xC0), Call("AllGather", 2, 0xC0, count=77)
SEND, RECEIVE = Call("Send", 1, 0xB0, peer=1), Call("Recv", 1, 0xB0, peer=1)


def job(*, counts: bool, iterations: int = 12, plans: tuple[int, int] = (3, 2)) -> Recorder:
    """A step has two groups of collectives that take several kernels, and Sends with Receives that take one."""
    rng, recorder = np.random.default_rng(5), Recorder(counts=counts)
    for _ in range(iterations):
        for micro_batch in range(4):
            recorder.issue(101, SEND, RECEIVE)
            for _layer in range(3 + micro_batch % 2):
                recorder.wait(int(rng.integers(150_000, 400_000)))
                recorder.issue(101, TENSOR)
        recorder.issue(101, *[SHARD] * 6, plans=plans[0])
        recorder.wait(200_000)
        recorder.issue(101, *[GATHER] * 4, plans=plans[1])
        recorder.wait(200_000)
    recorder.issue(101, TENSOR)
    return recorder


def aligned(version: str, sample: Sample, seed: int | None = None) -> tuple[Columns, dict[int, int]]:
    """Matches by operation, and the first kernel of each further one; with a seed in random portions."""
    aligner = ProcessAligner(version)
    matches, plans = [], []
    if seed is None:
        aligner.ingest_operations(sample.operations)
        aligner.ingest_kernels(sample.kernels)
    else:
        for _ in feed_portions(aligner, sample, np.random.default_rng(seed), most_rows=150):
            matches.append(aligner.align_ready(final=False))
            plans.append(aligner.drain_plans())
    matches.append(aligner.align_ready(final=True))
    plans.append(aligner.drain_plans())
    every = np.concatenate(plans)
    assert len(np.unique(every["kernel"])) == len(every)
    found = np.sort(np.concatenate(matches), order="operation")
    return found, dict(zip(every["kernel"].tolist(), every["first"].tolist(), strict=True))


def true_plans(sample: Sample) -> dict[int, int]:
    """The first kernel of each that no operation names: the one before it that some does."""
    named = np.unique(sample.truth[sample.truth != NO_NUMBER])
    others = np.setdiff1d(sample.kernels["id"], named)
    return {int(kernel): int(named[np.searchsorted(named, kernel) - 1]) for kernel in others}


TOLD = {"opCount": (True, False, False), "CALL lines": (False, True, False), "stamps": (False, False, True)}


VERSIONS = ["2.13.4", "2.21.5", "2.26.2", "2.28.3", "2.30.7"]
STANDING = ["2.28.3", "2.30.7"]
"""Versions whose opCount stands still."""


@pytest.mark.parametrize(
    ("version", "told"),
    [(version, told) for version in VERSIONS for told in TOLD if told != "opCount" or version not in STANDING],
)
def test_all_kernels_of_a_group_are_its_launch(version: str, told: str) -> None:
    counts, groups, stamps = TOLD[told]
    sample = job(counts=counts).sample(stamps=stamps, groups=groups)
    matches, plans = aligned(version, sample)
    assert f1(sample, matches) == 1.0
    assert plans == true_plans(sample)


def test_a_lost_line_behind_a_group_does_not_make_its_kernel_the_groups() -> None:
    recorder = Recorder(counts=True)
    for _ in range(40):
        for _layer in range(5):
            recorder.wait(300_000)
            recorder.issue(101, TENSOR)
        recorder.issue(101, SHARD, SHARD)
        recorder.issue(101, SHARD)
    sample = recorder.sample(stamps=False, groups=False)
    lone = np.flatnonzero(np.diff(sample.truth, prepend=-1) == 1)
    lone = lone[sample.operations["member"][lone] == 2][::2][3::10]
    damaged = Sample(np.delete(sample.operations, lone), sample.kernels, sample.truth)
    _, plans = aligned("2.21.5", damaged)
    assert len(plans) <= 1


def test_where_nothing_tells_groups_their_kernels_go_to_operations_of_them_as_a_guess() -> None:
    sample = job(counts=False, plans=(5, 3)).sample(stamps=False, groups=False)
    matches = align_whole("2.28.3", sample)
    assert np.isin(sample.kernels["id"], matches["kernel"]).all()
    group_of = np.cumsum(np.diff(sample.operations["op"].astype(int), prepend=-1) != 0)
    true_group = dict(zip(sample.truth.tolist(), group_of.tolist(), strict=True))
    paired = matches[(matches["kernel"] != NO_NUMBER) & (sample.operations["member"] == SHARD.member)]
    plans = true_plans(sample)
    named = [true_group[plans.get(kernel, kernel)] for kernel in paired["kernel"].tolist()]
    assert np.mean(np.array(named) == group_of[paired["operation"]]) > 0.98


def test_steps_of_a_kind_are_voted_on_and_no_more_kernels_than_operations_believed() -> None:
    counts = PlanCounts()
    keys, sizes = np.array([7, 7, 7, 8]), np.array([4, 4, 4, 1])
    assert counts.count_plans(keys, sizes, np.array([2, 3, 2, 2])).tolist() == [2, 2, 2, 1]
    assert counts.count_plans(keys[:2], sizes[:2], np.array([NO_NUMBER, 9])).tolist() == [2, 2]


def test_broadcasts_of_a_group_take_a_kernel_for_each_round_of_roots() -> None:
    assert plans_of_roots([0, 1, 2, 0, 1, 0], others=False) == 3
    assert plans_of_roots([0, 1], others=True) == 2
