"""What hosts did together is measured when their clocks are told, or when it is clear that they will not be."""

from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.join import JoinedCollectives
from ncclscope_service.kernel_matrix import KernelMatrix
from ncclscope_service.unclocked import PAIR, Unclocked
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_SECOND = 1_000_000_000
_NOBODY = np.array([False, False, False])
_TOLD = np.array([True, True, False])
"""By host."""


def _collectives(hosts: list[int], *operations: list[int]) -> KernelMatrix:
    """As many as there are lists of operations, one of each rank."""
    of = np.array(operations, np.int64)
    none = np.zeros(of.shape, np.int64)
    every = np.zeros(len(of), np.int64)
    return KernelMatrix(
        joined=JoinedCollectives(communicator=0, coll_seq=every, operations=of),
        hosts=np.array(hosts, np.int32), present=of != NO_NUMBER, start_ns=none, end_ns=none, start_true_ns=none,
        end_true_ns=none, censored=none != 0, confidence=none.astype(np.float32), op=every.astype(np.uint8),
        root=every.astype(np.int32), launch=every, message_bytes=every, agrees=every == 0,
    )  # fmt: skip


def _pair(send: int, receive: int, *hosts: int, since_ns: int = 0) -> Columns:
    return np.array([(send, receive, *hosts, since_ns)], PAIR)


def _taken(
    unclocked: Unclocked, is_told: np.ndarray[tuple[int], np.dtype[np.bool_]], now_ns: int, *, first: int = 0,
    is_over: bool = False,
) -> tuple[list[list[list[int]]], list[int], list[int]]:  # fmt: skip
    collectives, sends, receives = unclocked.take(is_told, now_ns, first=first, is_over=is_over)
    return [each.joined.operations.tolist() for each in collectives], sends.tolist(), receives.tolist()


def test_what_was_joined_waits_until_the_clock_of_each_of_its_hosts_is_told() -> None:
    unclocked = Unclocked()
    unclocked.add([_collectives([0, 1], [1, 2]), _collectives([NO_NUMBER, 2], [NO_NUMBER, 3])], _pair(4, 5, 0, 1), 0)
    unclocked.add([], _pair(6, 7, 0, 2), 0)
    assert _taken(unclocked, _NOBODY, 0) == ([], [], [])
    assert _taken(unclocked, _TOLD, _SECOND) == ([[[1, 2]]], [4], [5])
    assert _taken(unclocked, _TOLD, _SECOND) == ([], [], [])
    assert _taken(unclocked, np.array([True, True, True]), 2 * _SECOND) == ([[[NO_NUMBER, 3]]], [6], [7])


@pytest.mark.parametrize(("now_ns", "is_over"), [(0, True), (10 * _SECOND, False)])
def test_it_waits_no_longer_when_nothing_more_is_told_and_never_for_long(now_ns: int, *, is_over: bool) -> None:
    unclocked = Unclocked()
    unclocked.add([_collectives([0, 1], [1, 2])], _pair(4, 5, 0, 1), 0)
    assert _taken(unclocked, _NOBODY, now_ns, is_over=is_over) == ([[[1, 2]]], [4], [5])


def test_what_has_left_memory_meanwhile_is_not_given() -> None:
    unclocked = Unclocked()
    unclocked.add([_collectives([0, 1], [1, 2], [4, NO_NUMBER])], _pair(1, 5, 0, 1), 0)
    unclocked.add([_collectives([0, 1], [2, 3])], _pair(6, 7, 0, 1), 0)
    assert _taken(unclocked, _TOLD, 0, first=4) == ([[[4, NO_NUMBER]]], [6], [7])
