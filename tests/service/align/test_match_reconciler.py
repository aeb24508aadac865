"""Exact joins beside the aligner: which one wins, and what is counted."""

from __future__ import annotations

import numpy as np

from ncclscope_service.align.exact_join import EXACT_MATCH, MatchReconciler
from ncclscope_service.align.records import MATCH
from ncclscope_service.store.rows import Match
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_Row = tuple[int, int, Match]


def aligned(*rows: _Row) -> Columns:
    """Operation, kernel, match."""
    return np.array([(op, kernel, op if kernel >= 0 else NO_NUMBER, match, 0.6) for op, kernel, match in rows], MATCH)


def opinions(*rows: _Row) -> Columns:
    """Operation, kernel, match."""
    return np.array(
        [(op, kernel, op if kernel >= 0 else NO_NUMBER, match, 1.0) for op, kernel, match in rows], EXACT_MATCH
    )


def by_operation(rows: Columns) -> dict[int, tuple[int, int]]:
    """Kernel and match of each operation; each is given out once."""
    assert len(np.unique(rows["operation"])) == len(rows)
    return {int(row["operation"]): (int(row["kernel"]), int(row["match"])) for row in rows}


def test_the_exact_pair_wins_and_the_difference_is_counted() -> None:
    verdicts = MatchReconciler()
    settled = verdicts.merge(
        aligned((1, 10, Match.MATCHED), (2, 11, Match.MATCHED), (3, 12, Match.MATCHED)),
        opinions((1, 10, Match.MATCHED), (2, 12, Match.MATCHED), (3, 11, Match.MATCHED)),
        final=True,
    )
    assert {op: kernel for op, (kernel, _) in by_operation(settled).items()} == {1: 10, 2: 12, 3: 11}
    assert (verdicts.checked, verdicts.disagreements) == (3, 2)


def test_the_order_in_which_both_speak_makes_no_difference() -> None:
    said = aligned((1, 10, Match.MATCHED), (2, 11, Match.MATCHED), (3, NO_NUMBER, Match.NO_KERNEL))
    known = opinions(
        (1, 11, Match.MATCHED), (2, NO_NUMBER, Match.UNMATCHED), (3, NO_NUMBER, Match.UNMATCHED)
    )  # fmt: skip
    outcomes: list[tuple[dict[int, tuple[int, int]], int, int]] = []
    for first, second in (((said, known[:0]), (said[:0], known)), ((said[:0], known), (said, known[:0]))):
        verdicts = MatchReconciler()
        rows = np.concatenate([verdicts.merge(*first, final=False), verdicts.merge(*second, final=True)])
        outcomes.append((by_operation(rows), verdicts.checked, verdicts.disagreements))
    assert outcomes[0] == outcomes[1]
    wanted = {1: (11, Match.MATCHED), 2: (NO_NUMBER, Match.UNMATCHED), 3: (NO_NUMBER, Match.NO_KERNEL)}
    assert outcomes[0] == (wanted, 2, 2)


def test_what_exact_joins_do_not_know_is_the_aligners_and_not_counted() -> None:
    verdicts = MatchReconciler()
    settled = verdicts.merge(aligned((1, 10, Match.MATCHED)), opinions((1, NO_NUMBER, Match.PENDING)), final=False)
    assert by_operation(settled) == {1: (10, Match.MATCHED)}
    assert (verdicts.checked, verdicts.disagreements) == (0, 0)


def test_the_aligner_does_not_give_a_kernel_that_is_joined_to_another_operation() -> None:
    verdicts = MatchReconciler()
    settled = verdicts.merge(
        aligned((1, 10, Match.MATCHED), (2, 20, Match.MATCHED)),
        opinions((1, NO_NUMBER, Match.PENDING), (2, 10, Match.MATCHED)),
        final=True,
    )
    assert by_operation(settled) == {1: (NO_NUMBER, Match.UNMATCHED), 2: (10, Match.MATCHED)}


def test_operations_of_one_kernel_share_the_launch_of_the_first() -> None:
    verdicts = MatchReconciler()
    pairs = opinions((4, 10, Match.MATCHED), (5, 10, Match.MATCHED), (6, 11, Match.MATCHED))
    pairs["launch"] = (4, 5, 6)
    settled = np.sort(verdicts.merge(aligned(), pairs, final=True), order="operation")
    assert settled["launch"].tolist() == [4, 4, 6]


def test_what_only_one_side_speaks_of_comes_out_at_the_end() -> None:
    verdicts = MatchReconciler()
    held = verdicts.merge(
        aligned((1, 10, Match.MATCHED)), opinions((2, NO_NUMBER, Match.NOT_COVERED)), final=False
    )  # fmt: skip
    assert len(held) == 0
    assert by_operation(verdicts.merge(aligned(), opinions(), final=True)) == {
        1: (10, Match.MATCHED),
        2: (NO_NUMBER, Match.NOT_COVERED),
    }


def test_what_is_exactly_joined_is_remembered_while_its_kernel_is_in_the_store() -> None:
    verdicts = MatchReconciler()
    none = aligned()[:0], opinions()[:0]
    verdicts.merge(none[0], opinions((1, 10, Match.MATCHED), (2, 11, Match.MATCHED)), final=False)
    verdicts.merge(*none, final=False, first_kernel=11)
    rows = verdicts.merge(
        aligned((3, 10, Match.MATCHED), (4, 11, Match.MATCHED)),
        opinions((3, NO_NUMBER, Match.PENDING), (4, NO_NUMBER, Match.PENDING)),
        final=True,
        first_kernel=11,
    )
    assert by_operation(rows) == {3: (10, Match.MATCHED), 4: (NO_NUMBER, Match.UNMATCHED)}
