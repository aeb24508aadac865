"""How far Sends and Recvs have come although lines were lost, and whose last lines were."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from service.log_batches import Line, Reading, init, log_batch

from ncclscope_service.detect.kernel_counts import shown_by_kernels
from ncclscope_service.job.ranks import assign_ranks
from ncclscope_service.store.rows import KERNEL, RANGE, Match
from ncclscope_service.store.tables import Store


def _store(sends: int, receives: int) -> Store:
    """Rank 0 sends to rank 1."""
    reading = Reading()
    for rank, (op, amount) in enumerate((("Send", sends), ("Recv", receives))):
        event = init(line=0, rank=rank, nranks=2, comm_id=1, host=f"node{rank}")
        lines = [Line(op=op, root=1 - rank, line=1 + each) for each in range(amount)]
        reading.feed(log_batch(lines, host=f"node{rank}", events=[event]), job="j")
    store = reading.store
    assign_ranks(store)
    kernels = np.zeros(len(store.operations), KERNEL)
    kernels["process"] = store.operations.rows["process"]
    kernels["launch_start_ns"] = np.arange(len(kernels))
    store.kernels.append(kernels)
    store.operations.rows.put("kernel", np.arange(len(kernels)), np.arange(len(kernels)))
    return store


def _decide(store: Store, **columns: Sequence[int]) -> None:
    """Gives all operations these values, those of rank 0 first."""
    for name, values in columns.items():
        store.operations.rows.put(name, np.arange(len(values)), np.asarray(values))


def _exchanged(store: Store) -> list[int]:
    """By rank."""
    counts = shown_by_kernels(store, "j").exchanged
    found: list[int] = counts["operations"][np.argsort(counts["rank"])].tolist()
    return found


def test_a_kernel_that_ended_counts_on_both_sides_and_lines_behind_the_last_one_on_their_own() -> None:
    ended, waits = Match.MATCHED, Match.UNMATCHED
    store = _store(2, 3)  # of each a line was lost: that of the second Send, and that of the third Recv
    _decide(store, match=[ended, ended, ended, ended, waits], pair_seq=[0, 2, 0, 1, 2])
    assert _exchanged(store) == [3, 4]
    _decide(store, match=[ended, ended, ended, ended, Match.NOT_COVERED])
    assert _exchanged(store) == [], "no capture tells of the last line"


def test_without_kernels_steps_that_are_all_alike_tell_what_earlier_ones_lost() -> None:
    store = _store(6, 5)
    _decide(store, match=[Match.NOT_COVERED] * 11, iteration=[0, 0, 1, 1, 2, 2, 0, 1, 1, 2, 2])
    assert _exchanged(store) == [6, 6], "a Recv of the first step was lost"
    _decide(store, iteration=[0, 0, 1, 1, 2, 2, 0, 1, 1, 1, 2])
    assert _exchanged(store) == [], "a step has more than most"


def test_a_rank_whose_last_kernel_has_no_line_is_not_heard_unless_a_line_is_behind_it() -> None:
    store = _store(2, 2)
    _decide(store, match=[1, Match.LINE_LOST, 1, 1], line=[1, -1, 1, 2])
    assert shown_by_kernels(store, "j").lacking == {0: np.inf}
    _decide(store, match=[Match.LINE_LOST, Match.UNMATCHED, 1, 1], line=[-1, 2, 1, 2])
    assert not shown_by_kernels(store, "j").lacking
    assert not len(shown_by_kernels(store, "another job").exchanged)


def test_nvtx_ranges_behind_the_last_kernel_tell_how_many_lines_are_lost_there() -> None:
    store = _store(4, 2)
    _decide(store, match=[1, 1, 1, Match.UNMATCHED, 1, Match.LINE_LOST], line=[1, 2, 3, 4, 1, -1])
    store.kernels.rows["launch_start_ns"] = [1, 2, 5, 0, 5, 15]
    calls = np.zeros(5, RANGE)
    calls["process"], calls["start_ns"] = [0, 0, 1, 1, 0], [4, 6, 4, 14, 20]
    calls["text"] = [store.strings.index_of(name) for name in ("ncclSend", "ncclSend", "ncclRecv", "ncclRecv", "step")]
    store.ranges.append(calls)
    shown = shown_by_kernels(store, "j")
    assert (shown.lacking, shown.are_ends_known) == ({}, True)
    calls["process"], calls["start_ns"] = 1, 20
    store.ranges.append(calls[:2])
    shown = shown_by_kernels(store, "j")
    assert (shown.lacking, shown.are_ends_known) == ({1: 2}, True)
    calls["process"] = 0
    store.ranges.append(calls[:1])
    assert shown_by_kernels(store, "j").lacking == {0: 1, 1: 2}
    _decide(store, coll_seq=[0, 1, 2, 4, 0, 1])
    assert shown_by_kernels(store, "j").lacking == {1: 2}, "the number of its last line counts the lost one"


def test_collectives_in_a_step_are_those_of_the_busiest_communicator() -> None:
    store = _store(2, 3)
    _decide(store, coll_seq=[0, 1, 0, 1, 2], iteration=[0, 0, 0, -1, 1])
    assert shown_by_kernels(store, "j").in_a_step == {0: 2, 1: 1}


def test_a_rank_with_a_hole_in_its_log_may_have_called_anything_meanwhile() -> None:
    store = _store(4, 4)
    _decide(store, match=[Match.NOT_COVERED] * 8, coll_seq=[0, 1, 2, 3, 0, 1, 2, 6])
    assert shown_by_kernels(store, "j").lacking == {1: np.inf}
