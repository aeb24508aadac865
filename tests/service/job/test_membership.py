"""Which members form one communicator where nothing names it: content, times and layout decide, or nobody does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.unnamed_members import ALL_GATHER, ALL_REDUCE, BROADCAST, Job

from ncclscope_service.job.identification import (
    AT_STARTUP,
    BY_LAYOUT,
    BY_TIMES,
    ONLY_ONE,
    SURE,
    Candidate,
    Exchange,
    infer_groups,
    scatter_ns,
)


@pytest.mark.parametrize("amount", [2, 3, 4])
def test_neighbours_that_do_the_same_form_groups_by_layout(amount: int) -> None:
    job = Job()
    for group in range(amount):
        job.group([2 * group, 2 * group + 1])
    assert job.found() == job.groups
    assert {group.confidence for group in job.infer()} == {BY_LAYOUT}


@pytest.mark.parametrize("amount", [2, 3, 4])
def test_groups_across_nodes_are_strided_and_found_by_layout(amount: int) -> None:
    job = Job()
    for group in range(amount):
        job.group([group, group + amount, group + 2 * amount])
    assert job.found() == job.groups


@pytest.mark.parametrize("amount", [2, 3, 4])
def test_times_confirm_a_layout_whatever_the_clocks_say(amount: int) -> None:
    job = Job()
    for group in range(amount):
        job.group([2 * group, 2 * group + 1], timed=True, offsets_ns=[0, 50_000_000], drift_ppm=50)
    assert job.found() == job.groups
    assert {group.confidence for group in job.infer()} == {SURE}


@pytest.mark.parametrize("amount", [2, 3, 4])
def test_times_decide_where_groups_have_no_regular_layout(amount: int) -> None:
    job = Job()
    seats = np.random.default_rng(amount).permutation(3 * amount).tolist()
    for group in range(amount):
        job.group(seats[3 * group : 3 * group + 3], timed=True, offsets_ns=[0, -30_000_000, 7])
    assert job.found() == sorted(job.groups)
    assert {group.confidence for group in job.infer()} <= {BY_TIMES, SURE}


def test_a_regular_layout_that_times_contradict_is_not_believed() -> None:
    job = Job()
    job.group([0, 3], timed=True)
    job.group([2, 1], timed=True)
    assert job.found() == job.groups
    assert {group.confidence for group in job.infer()} == {BY_TIMES}


def test_without_times_and_without_a_regular_layout_nothing_is_said() -> None:
    job = Job()
    job.group([0, 3])
    job.group([1, 4])
    job.group([2, 7])
    assert job.found() == []


def test_sizes_tell_groups_apart() -> None:
    job = Job()
    job.group([0, 1, 2, 3])
    job.group([0, 1])
    job.group([2, 3])
    assert job.found() == sorted(job.groups)


def test_what_was_called_tells_groups_apart() -> None:
    job = Job()
    job.group([0, 1], content=Counter({ALL_REDUCE: 50}))
    job.group([2, 3], content=Counter({ALL_REDUCE: 50}))
    job.group([0, 2], content=Counter({ALL_GATHER: 50}))
    job.group([1, 3], content=Counter({ALL_GATHER: 50}))
    assert job.found() == sorted(job.groups)


def test_a_rank_whose_log_lags_behind_still_belongs() -> None:
    job = Job()
    job.group([0, 1], content=Counter({ALL_REDUCE: 50, BROADCAST: 1}))
    job.candidates[1].content[ALL_REDUCE] = 30
    assert job.found() == job.groups


def test_the_first_communicator_of_a_seat_goes_with_the_first_of_others() -> None:
    job = Job()
    job.group([0, 1])
    job.group([0, 1])
    assert job.found() == job.groups


def test_the_communicator_of_all_is_surer_than_one_group_of_a_few() -> None:
    everybody, few = Job(), Job()
    everybody.group([0, 1, 2, 3])
    few.group([1, 5])
    assert everybody.infer()[0].confidence == BY_LAYOUT
    assert few.infer()[0].confidence == ONLY_ONE


def test_a_rank_that_never_spoke_leaves_its_group_open() -> None:
    job = Job()
    job.group([0, 1])
    job.group([2, 3])
    job.candidates.pop()
    assert (2, 3) not in job.found()
    assert all(set(group) <= {0, 1} for group in job.found())


def test_with_a_rank_missing_times_still_find_the_others() -> None:
    job = Job()
    job.group([0, 1], timed=True)
    job.group([2, 3], timed=True)
    job.candidates.pop()
    assert job.found() == [(0, 1)]


def test_without_init_lines_times_tell_the_groups_and_seats_the_ranks() -> None:
    job = Job()
    job.group([0, 2], timed=True, ranked=False)
    job.group([1, 3], timed=True, ranked=False)
    assert job.found() == job.groups
    assert all(group.confidence < BY_TIMES for group in job.infer())


def test_without_init_lines_and_times_equal_groups_stay_apart() -> None:
    job = Job()
    job.group([0, 1], ranked=False)
    job.group([2, 3], ranked=False)
    assert job.found() == []


def test_a_pipeline_is_found_by_what_its_stages_send_each_other() -> None:
    job = Job()
    sent: list[Counter[Exchange]] = [Counter({(0, 1, 99): 40}), Counter({(0, 1, 99): 40})]
    for first in (0, 1):
        job.group([first, first + 2], content=Counter(), exchanges=sent)
    assert job.found() == job.groups


def test_stages_that_received_what_the_other_never_sent_are_not_one_pipeline() -> None:
    job = Job()
    job.group([0, 1], content=Counter(), exchanges=[Counter({(0, 1, 99): 40}), Counter({(0, 1, 7): 40})])
    assert job.found() == []


def _silent(job: Job, *groups: Sequence[int]) -> None:
    for seats in groups:
        job.group(seats, content=Counter())


def test_members_that_called_nothing_are_one_if_each_rank_is_printed_once() -> None:
    job = Job()
    _silent(job, range(8))
    assert [(found.members, found.confidence) for found in infer_groups(job.candidates)] == [
        (tuple(range(8)), AT_STARTUP)
    ]


def test_of_several_silent_communicators_the_layout_and_the_order_of_births_decide() -> None:
    job = Job()
    _silent(job, range(8), [0, 1, 2, 3], [4, 5, 6, 7], range(8))
    assert job.found() == sorted(job.groups)
    strided = Job()
    _silent(strided, [0, 2, 4, 6], [1, 3, 5, 7])
    assert strided.found() == sorted(strided.groups)
    assert {found.confidence for found in infer_groups(strided.candidates)} == {BY_LAYOUT}


def test_silent_members_stay_apart_if_a_rank_is_missing_or_the_order_is_not_the_same() -> None:
    torn = Job()
    _silent(torn, range(4), range(4))
    del torn.candidates[2]
    assert torn.found() == []
    chain = (
        Job()
    )  # each stage shares a pair with the next one: which of two a process had first is not the same for all
    _silent(chain, [0, 1], [1, 2], [2, 3])
    assert chain.found() == []


def test_scatter_is_not_known_from_a_few_operations() -> None:
    job = Job()
    job.group([0, 1], timed=True)
    one, other = job.candidates
    assert scatter_ns(one, other) is not None
    few = Candidate(
        member=1, seat=1, size=2, rank=1, birth=0, content=Counter(), exchanges=Counter(),
        ends_ns=other.ends_ns[:7], numbers=other.numbers[:7],
    )  # fmt: skip
    assert scatter_ns(one, few) is None


@given(
    amount=st.integers(2, 5),
    size=st.integers(2, 4),
    seed=st.integers(0, 2**16),
    missing=st.integers(0, 3),
)
@settings(max_examples=60)
def test_no_group_is_ever_wrong_when_times_are_known(amount: int, size: int, seed: int, missing: int) -> None:
    job = Job(seed)
    seats = np.random.default_rng(seed).permutation(amount * size).tolist()
    for group in range(amount):
        job.group(seats[group * size : (group + 1) * size], timed=True)
    for _ in range(missing):
        job.candidates.pop(seed % len(job.candidates))
    assert set(job.found()) <= set(job.groups)
