from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.known_runs import Divider, Kind
from ncclscope_service.align.by_order.sequence import Pairing, PairingInput, PairingState
from ncclscope_service.align.coverage import Coverage
from ncclscope_service.align.expected_launches import LAUNCH
from ncclscope_service.align.lanes import lanes_by_order, majority
from ncclscope_service.align.thread_backlog import THREAD_KERNEL
from ncclscope_service.columns.group_by import CombinationIndex
from ncclscope_wire.terms import OPERATION_CODES

SEND, RECV = OPERATION_CODES["Send"], OPERATION_CODES["Recv"]


def paired(left: NDArray[np.int32], right: NDArray[np.int32], *, final: bool) -> Pairing:
    """Both sides as symbols, of which equal ones belong together."""
    launches, kernels = np.zeros(len(left), dtype=LAUNCH), np.zeros(len(right), dtype=THREAD_KERNEL)
    items, runs = np.arange(len(left) + 1), np.arange(len(right) + 1)
    sides = PairingInput(
        launches, kernels, left, right, items, runs, np.zeros(len(left), dtype=bool), np.zeros(1, np.int32)
    )
    pairing = Pairing(sides, PairingState())
    pairing.run(np.eye(7, dtype=bool), final=final)
    return pairing


def test_sequences_that_agree_are_paired_but_for_the_newest() -> None:
    symbols = np.arange(100, dtype=np.int32) % 7
    assert 70 < paired(symbols, symbols, final=False).launches_used < 100
    assert paired(symbols, symbols, final=True).launches_used == 100


def test_a_long_hole_is_found_by_what_follows_it() -> None:
    rng = np.random.default_rng(0)
    left = rng.integers(0, 7, 5000).astype(np.int32)
    right = np.concatenate([left[:1000], left[3000:]])
    decided = paired(left, right, final=True).decided
    truth = np.concatenate([np.arange(1000), np.arange(3000, 5000)])
    pairs = np.concatenate([each.launches for each in decided.pairs])
    found = truth[np.concatenate([each.kernels for each in decided.pairs])] == pairs
    assert np.count_nonzero(found) > 2900
    assert decided.holes


def test_a_front_that_agrees_before_a_foreign_stretch_is_no_hole_and_the_search_for_one_ends() -> None:
    rng = np.random.default_rng(0)
    left = rng.integers(0, 5, 600).astype(np.int32)
    right = np.concatenate([left[:40], rng.integers(0, 5, 560).astype(np.int32)])
    pairing = paired(left, right, final=True)
    assert max(pairing.launches_used, pairing.kernels_used) == 600
    assert all(begin < end for begin, end in pairing.decided.holes)


def test_a_run_with_as_many_kernels_is_launched_one_by_one() -> None:
    kinds: tuple[Kind, ...] = ((SEND, 1, True), (RECV, 1, True))
    assert Divider().divide(kinds, 2)[0].tolist() == [0, 1]
    assert Divider().divide(kinds, 1)[0].tolist() == [0, 0]


def test_a_send_and_a_receive_of_one_peer_go_together() -> None:
    kinds: tuple[Kind, ...] = ((SEND, 1, True), (SEND, 1, True), (RECV, 1, True), (RECV, 1, True))
    groups, confidence = Divider().divide(kinds, 3)
    assert groups.tolist() == [0, 1, 1, 2]
    assert confidence < 0.9


def test_a_known_group_is_not_joined_with_its_neighbours() -> None:
    kinds: tuple[Kind, ...] = ((SEND, 1, False), (RECV, 1, True), (SEND, 2, True))
    assert Divider().divide(kinds, 2)[0].tolist() == [0, 1, 1]


def test_combinations_keep_their_number() -> None:
    rows = np.array([(1, 2), (3, 4), (1, 2)], dtype=[("a", "<i8"), ("b", "<i4")])
    signatures = CombinationIndex(("a", "b"))
    first = signatures.number(rows)
    assert first.tolist() == [0, 1, 0]
    assert signatures.number(rows[::-1]).tolist() == [0, 1, 0]
    assert len(signatures) == 2


def test_lanes_of_equal_kinds_are_told_apart_by_their_order() -> None:
    rng = np.random.default_rng(0)
    lanes = rng.choice([0, 1], 300, p=[0.7, 0.3]).astype(np.int32)
    kernel_lanes = (1 - lanes)[rng.random(300) > 0.1]
    agrees = np.ones((len(lanes), len(kernel_lanes)), dtype=bool)
    assert lanes_by_order(lanes, kernel_lanes, agrees) == {0: 1, 1: 0}


def test_the_first_of_equals_wins_a_vote() -> None:
    assert majority(np.array([4, 2, 2, 4], dtype=np.int32)) == 4


def test_coverage_merges_what_touches() -> None:
    coverage = Coverage()
    for begin, end in ((50, 60), (0, 10), (10, 20), (5, 8), (70, 65)):
        coverage.add(begin, end)
    assert coverage.interval_of(np.array([0, 15, 21, 55, 61])).tolist() == [0, 0, -1, 1, -1]
    assert coverage.known_until_ns == 60
