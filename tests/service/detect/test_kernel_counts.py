"""How far Sends and Recvs have come although lines were lost, and whose last lines were."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from service.log_batches import Line, Reading, init, log_batch

from ncclscope_service.detect.kernel_counts import shown_by_kernels
from ncclscope_service.job.ranks import assign_ranks
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store


def _store(sends: int, receives: int) -> Store:
    """Rank 0 sends to rank 1."""
    reading = Reading()
    for rank, (op, amount) in enumerate((("Send", sends), ("Recv", receives))):
        event = init(line=0, rank=rank, nranks=2, comm_id=1, host=f"node{rank}")
        lines = [Line(op=op, root=1 - rank, line=1 + each) for each in range(amount)]
        reading.feed(log_batch(lines, host=f"node{rank}", events=[event]), job="j")
    assign_ranks(reading.store)
    return reading.store


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
    _decide(store, match=[1, Match.LINE_LOST, 1, 1], start_ns=[10, 20, 10, 20], line=[1, -1, 1, 2])
    assert shown_by_kernels(store, "j").unheard == {0}
    _decide(store, match=[Match.LINE_LOST, Match.UNMATCHED, 1, 1], line=[-1, 2, 1, 2])
    assert shown_by_kernels(store, "j").unheard == frozenset()
    assert not len(shown_by_kernels(store, "another job").exchanged)
