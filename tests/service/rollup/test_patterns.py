"""Who sends to whom, and what follows what, is told from the operations as they were logged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from service.log_batches import Line, Reading, log_batch

from ncclscope_service.rollup.usage import Pattern, Patterns
from ncclscope_service.store.records import Communicator, Identity, Member
from ncclscope_wire.terms import OPERATION_CODES

Peers = dict[int, Sequence[tuple[str, int]]]


def _member(rank: int) -> Member:
    return Member(index=rank, communicator=0, process=rank, pointer=0, epoch=0, rank=rank, cuda_device=0, bus_id=None)


def _pattern(size: int, exchanges: Peers) -> Pattern:
    store = Reading().store
    store.members.extend(_member(rank) for rank in range(size))
    patterns = Patterns(store)
    for rank, pairs in exchanges.items():
        codes = np.array([OPERATION_CODES[op] for op, _ in pairs], np.uint8)
        patterns.count_logged(np.full(len(pairs), rank), codes, np.array([peer for _, peer in pairs]))
    members = {rank: rank for rank in exchanges}
    communicator = Communicator(index=0, job="j", comm_id="0x1", size=size, identity=Identity.COMM_ID, members=members)
    return patterns.patterns_of([communicator])[0]


def _ring(size: int, step: int = 1) -> Peers:
    return {rank: [("Send", (rank + step) % size), ("Recv", (rank - step) % size)] for rank in range(size)}


def _both_ways(size: int, *, wraps: bool) -> Peers:
    found: Peers = {}
    for rank in range(size):
        peers = {(rank + step) % size for step in (1, -1) if wraps or 0 <= rank + step < size}
        found[rank] = [(op, peer) for op in ("Send", "Recv") for peer in sorted(peers)]
    return found


def _everybody(size: int, *, itself: bool) -> Peers:
    return {
        rank: [(op, peer) for op in ("Send", "Recv") for peer in range(size) if itself or peer != rank]
        for rank in range(size)
    }


@pytest.mark.parametrize("step", [1, -1])
def test_one_way_around_is_a_ring(step: int) -> None:
    assert _pattern(4, _ring(4, step)).is_ring


@pytest.mark.parametrize("wraps", [False, True])
def test_a_pipeline_goes_both_ways_and_is_no_ring(wraps: bool) -> None:
    found = _pattern(4, _both_ways(4, wraps=wraps))
    assert not found.is_ring
    assert not found.sends_to_everybody


def test_a_pipeline_that_only_goes_forward_does_not_close() -> None:
    open_ended: Peers = {0: [("Send", 1)], 1: [("Recv", 0), ("Send", 2)], 2: [("Recv", 1)]}
    assert not _pattern(3, open_ended).is_ring


def test_an_all_to_all_sends_to_everybody() -> None:
    assert _pattern(4, _everybody(4, itself=False)).sends_to_everybody
    assert _pattern(2, _everybody(2, itself=True)).sends_to_everybody


def test_three_stages_in_a_ring_are_neighbours_of_each_other_and_no_all_to_all() -> None:
    assert not _pattern(3, _both_ways(3, wraps=True)).sends_to_everybody
    assert _pattern(3, _everybody(3, itself=True)).sends_to_everybody


def _logged(*ops: str) -> Pattern:
    reading = Reading()
    ids = reading.feed(log_batch([Line(line=1 + index, op=op) for index, op in enumerate(ops)]))
    member = int(reading.store.operations.take(ids)["member"][0])
    communicator = reading.store.communicators[reading.store.members[member].communicator]
    communicator.members = {0: member}
    return Patterns(reading.store).patterns_of([communicator])[communicator.index]


def test_sends_and_receives_come_together_or_not() -> None:
    assert _logged("Send", "Recv", "Recv", "Send").paired == 1.0
    assert _logged("Send", "Send", "Recv", "Recv").paired == 0.0
    assert _logged("AllReduce").paired is None


def test_gathers_and_scatters_take_turns_or_not() -> None:
    assert _logged("AllGather", "ReduceScatter", "AllReduce", "AllGather", "ReduceScatter").run == 1.0
    assert _logged("AllGather", "AllGather", "ReduceScatter", "ReduceScatter").run == 2.0
    assert _logged("AllReduce").run is None
