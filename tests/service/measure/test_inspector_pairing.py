"""Records of NCCL Inspector to lines of one rank and kind: holes, lost lines, groups, and what nobody can know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ncclscope_service.measure.inspector_pairing import Lines, Pairing
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

SECOND = 10**9
SIZES = [1024 * (1 + number % 7) for number in range(200)]


def lines(sizes: Sequence[int], *, logged_ns: int = NO_TIME_NS, taken: NDArray[np.bool_] | None = None) -> Lines:
    return Lines(
        base=0,
        operations=1000 + np.arange(len(sizes)),
        message_bytes=np.asarray(sizes, np.int64),
        logged_at_ns=np.full(len(sizes), logged_ns),
        is_taken=np.zeros(len(sizes), bool) if taken is None else taken[: len(sizes)],
    )


def add(pairing: Pairing, sequences: Sequence[int], sizes: Sequence[int], *, dumped_ns: int = SECOND) -> None:
    pairing.waiting.add(
        np.asarray(sequences, np.int64),
        np.asarray(sequences, np.int64),
        np.asarray(sizes, np.int64),
        np.full(len(sequences), dumped_ns),
    )


def paired(
    sequences: Sequence[int], sizes: Sequence[int], logged: Sequence[int], *, logged_ns: int = NO_TIME_NS
) -> list[int]:
    """Place of the line of each record; NO_NUMBER where it has none."""
    pairing = Pairing()
    add(pairing, sequences, sizes)
    found = pairing.decide(lines(logged, logged_ns=logged_ns), final=True).operations
    return [NO_NUMBER if line == NO_NUMBER else line - 1000 for line in found.tolist()]


def test_records_find_the_line_of_their_number() -> None:
    assert paired(range(200), SIZES, SIZES) == list(range(200))


def test_holes_in_the_records_change_nothing() -> None:
    kept = [number for number in range(200) if number % 5 and number not in range(60, 90)]
    assert paired(kept, [SIZES[number] for number in kept], SIZES) == kept


def test_lost_lines_shift_the_rest() -> None:
    lost = {40, 41, 42, 120}
    logged = [number for number in range(200) if number not in lost]
    expected = [logged.index(number) if number not in lost else NO_NUMBER for number in range(200)]
    assert paired(range(200), SIZES, [SIZES[number] for number in logged]) == expected


def test_launches_that_nccl_did_not_count_shift_the_rest() -> None:
    # Captured into a graph: they are in the log, and have no number.
    logged = [*SIZES[:50], 77, 78, 79, *SIZES[50:]]
    assert paired(range(200), SIZES, logged) == [*range(50), *range(53, 203)]


def test_a_group_that_nccl_sorted_by_size_is_put_in_order() -> None:
    told = [*SIZES[:10], 5000, 4000, 3000, *SIZES[10:50]]
    logged = [*SIZES[:10], 3000, 5000, 4000, *SIZES[10:50]]
    assert paired(range(53), told, logged) == [*range(10), 11, 12, 10, *range(13, 53)]


def test_lost_lines_of_sizes_that_alternate_are_found_where_the_log_is_known_to_lose_lines() -> None:
    pairing = Pairing()
    add(pairing, range(100), [16, 8] * 50)
    logged = [16, 8] * 50
    del logged[31]
    found = pairing.decide(lines(logged), final=True, is_lossy=True).operations - 1000
    assert found[:31].tolist() == list(range(31))
    assert found[40:].tolist() == list(range(39, 99))


def test_a_record_of_another_size_alone_has_no_line() -> None:
    told = [*SIZES[:20], 999, *SIZES[21:60]]
    assert paired(range(60), told, SIZES) == [*range(20), NO_NUMBER, *range(21, 60)]


def test_a_line_younger_than_the_dump_is_not_its_operation() -> None:
    assert set(paired(range(10), [8] * 10, [8] * 10, logged_ns=SECOND * 100)) == {NO_NUMBER}


def test_lost_lines_of_equal_sizes_are_found_when_a_line_is_too_young() -> None:
    # Ten operations a second, dumped each second; line 3 is lost, which shows with the tenth record.
    pairing = Pairing()
    numbers = np.arange(100)
    pairing.waiting.add(numbers, numbers, np.full(100, 8), (numbers // 10 + 1) * SECOND)
    kept = np.delete(numbers, 3)
    logged = Lines(
        base=0,
        operations=kept,
        message_bytes=np.full(99, 8),
        logged_at_ns=kept // 10 * SECOND + (1 + kept % 10) * 2_000_000,
        is_taken=np.zeros(99, bool),
    )
    found = pairing.decide(logged, final=True).operations
    assert found[10:].tolist() == list(range(10, 100))
    assert pairing.has_slipped


def test_a_log_in_another_zone_is_paired_all_the_same() -> None:
    assert paired(range(10), [8] * 10, [8] * 10, logged_ns=SECOND * 7200) == list(range(10))


def test_records_beyond_the_last_line_take_no_line_of_others() -> None:
    assert paired(range(12), [8] * 12, [8] * 10) == [*range(10), NO_NUMBER, NO_NUMBER]


def test_of_several_records_with_one_number_the_first_counts() -> None:
    assert paired([0, 1, 1, 1, 2], [8] * 5, [8] * 3) == [0, 1, NO_NUMBER, NO_NUMBER, 2]


def test_what_could_have_slipped_unseen_is_not_sure() -> None:
    pairing = Pairing()
    add(pairing, range(40), [8] * 20 + [16] * 20)
    sure = pairing.decide(lines([8] * 20 + [16] * 20), final=True).is_sure.tolist()
    assert (sure[0], sure[19], sure[20], sure[39]) == (False, True, True, False)


def test_what_comes_later_makes_earlier_records_sure() -> None:
    sizes = [8] * 20 + [16] * 20
    whole = Pairing()
    add(whole, range(40), sizes)
    expected = whole.decide(lines(sizes), final=True).is_sure.tolist()
    pairing, taken = Pairing(), np.zeros(40, bool)
    sure: dict[int, bool] = {}
    for begin in range(0, 40, 5):
        add(pairing, range(begin, begin + 5), sizes[begin : begin + 5])
        pairs = pairing.decide(lines(sizes, taken=taken), final=False)
        sure.update(zip((pairs.operations - 1000).tolist(), pairs.is_sure.tolist(), strict=True))
        sure.update(dict.fromkeys((pairs.now_sure - 1000).tolist(), True))
    assert [sure[number] for number in range(40)] == expected


def test_a_record_that_is_left_without_a_line_shows_that_one_of_equal_size_was_lost() -> None:
    for lines_left, slipped in ((40, False), (39, True)):
        pairing = Pairing()
        add(pairing, range(40), [8] * 40)
        pairing.decide(lines([8] * lines_left), final=True)
        assert pairing.has_slipped == slipped


@pytest.mark.parametrize("length", [1, 300])
def test_where_nothing_agrees_nothing_is_paired(length: int) -> None:
    assert set(paired(range(length), [5] * length, [6] * length)) == {NO_NUMBER}


@given(
    lost=st.sets(st.integers(0, 199), max_size=20),
    missing=st.sets(st.integers(0, 199), max_size=60),
    cuts=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=6),
)
@settings(max_examples=60)
def test_portions_give_what_one_pass_gives(lost: set[int], missing: set[int], cuts: list[tuple[int, int]]) -> None:
    logged = [SIZES[number] for number in range(200) if number not in lost]
    told = [number for number in range(200) if number not in missing]
    whole = paired(told, [SIZES[number] for number in told], logged)
    pairing, taken = Pairing(), np.zeros(len(logged), bool)
    found: dict[int, int] = {}
    seen = fed = 0
    for at_line, at_record in [*cuts, (200, 200)]:
        seen, end = max(seen, min(at_line, len(logged))), max(fed, min(at_record, len(told)))
        add(pairing, told[fed:end], [SIZES[number] for number in told[fed:end]])
        fed = end
        part = pairing.decide(lines(logged[:seen], taken=taken), final=False)
        found.update(zip(part.records.tolist(), part.operations.tolist(), strict=True))
    rest = pairing.decide(lines(logged, taken=taken), final=True)
    found.update(zip(rest.records.tolist(), rest.operations.tolist(), strict=True))
    assert [NO_NUMBER if found[number] == NO_NUMBER else found[number] - 1000 for number in told] == whole
