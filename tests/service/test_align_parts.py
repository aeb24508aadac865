from __future__ import annotations

import numpy as np

from ncclscope_service.coverage import Coverage
from ncclscope_service.needleman_wunsch import FORBIDDEN, align
from ncclscope_service.segment import Divider, Kind
from ncclscope_service.sequence import pair_sequences
from ncclscope_service.signatures import Signatures
from ncclscope_service.streams import majority, votes_by_order
from ncclscope_wire.terms import OPERATION_CODES

SEND, RECV = OPERATION_CODES["Send"], OPERATION_CODES["Recv"]


def aligned(left: str, right: str, *, is_open_ended: bool = False) -> list[tuple[int, int]]:
    agrees = np.array([[a == b for b in right] for a in left])
    scores = np.where(agrees, 2, FORBIDDEN).astype(np.float32)
    gaps = np.full(len(left), -1, np.float32), np.full(len(right), -1, np.float32)
    rows, columns = align(scores, *gaps, is_open_ended=is_open_ended)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def test_a_missing_letter_is_a_gap() -> None:
    assert aligned("ABCDE", "ABDE") == [(0, 0), (1, 1), (3, 2), (4, 3)]


def test_letters_that_differ_are_never_paired() -> None:
    assert aligned("AB", "CD") == []


def test_empty_sequences_align_to_nothing() -> None:
    rows, columns = align(np.empty((0, 3), np.float32), np.empty(0, np.float32), np.zeros(3, np.float32))
    assert len(rows) == len(columns) == 0


def test_no_alignment_is_better_than_the_one_found() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        left, right = ("".join(rng.choice(list("ABC"), size)) for size in (7, 6))
        found = aligned(left, right)
        score = 3 * len(found)
        best = max(3 * length for length in range(8) if length <= _longest_common(left, right))
        assert score == best


def _longest_common(left: str, right: str) -> int:
    table = np.zeros((len(left) + 1, len(right) + 1), int)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            table[i + 1, j + 1] = table[i, j] + 1 if a == b else max(table[i, j + 1], table[i + 1, j])
    return int(table[-1, -1])


def test_sequences_that_agree_are_paired_but_for_the_newest() -> None:
    symbols = np.arange(100, dtype=np.int32) % 7
    decided = pair_sequences(symbols, symbols, np.eye(7, dtype=bool), final=False)
    assert 70 < decided.launches_used < 100
    assert pair_sequences(symbols, symbols, np.eye(7, dtype=bool), final=True).launches_used == 100


def test_a_long_hole_is_found_by_what_follows_it() -> None:
    rng = np.random.default_rng(0)
    left = rng.integers(0, 7, 5000).astype(np.int32)
    right = np.concatenate([left[:1000], left[3000:]])
    decided = pair_sequences(left, right, np.eye(7, dtype=bool), final=True)
    truth = np.concatenate([np.arange(1000), np.arange(3000, 5000)])
    pairs = np.concatenate(decided.launches)
    found = truth[np.concatenate(decided.kernels)] == pairs
    assert np.count_nonzero(found) > 2900
    assert decided.holes


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
    signatures = Signatures(("a", "b"))
    first = signatures.number(rows)
    assert first.tolist() == [0, 1, 0]
    assert signatures.number(rows[::-1]).tolist() == [0, 1, 0]
    assert len(signatures) == 2


def test_lanes_of_equal_kinds_are_told_apart_by_their_order() -> None:
    rng = np.random.default_rng(0)
    lanes = rng.choice([0, 1], 300, p=[0.7, 0.3]).astype(np.int32)
    kernel_lanes = (1 - lanes)[rng.random(300) > 0.1]
    agrees = np.ones((len(lanes), len(kernel_lanes)), dtype=bool)
    assert votes_by_order(lanes, kernel_lanes, agrees) == {0: 1, 1: 0}


def test_the_first_of_equals_wins_a_vote() -> None:
    assert majority(np.array([4, 2, 2, 4], dtype=np.int32)) == 4


def test_coverage_merges_what_touches() -> None:
    coverage = Coverage()
    for begin, end in ((50, 60), (0, 10), (10, 20), (5, 8), (70, 65)):
        coverage.add(begin, end)
    assert coverage.interval_of(np.array([0, 15, 21, 55, 61])).tolist() == [0, 0, -1, 1, -1]
    assert coverage.known_until_ns == 60
