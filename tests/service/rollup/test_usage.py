"""Traffic of a communicator: by content, as a signature, and who sent to whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from service.log_batches import Line, Reading, log_batch

from ncclscope_service.rollup.usage import Pattern, Patterns, Traffic, UsageCounts, signature_of
from ncclscope_service.store.records import Communicator, Identity, Member
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES


def _table(*portions: list[Line]) -> list[tuple[int, int, int, int]]:
    reading = Reading()
    contents = UsageCounts(reading.store)
    for lines in portions:
        contents.count_logged(reading.store.operations.take(reading.feed(log_batch(lines))))
    names = ["op", "message_bytes", "operations", "templates"]
    return sorted(contents.table()[names].tolist())


def test_operations_of_one_content_are_counted_together_and_their_buffers_apart() -> None:
    lines = [Line(line=1 + index, op="AllReduce", count=100, stream=0x50 + index % 2) for index in range(6)]
    lines.append(Line(line=7, op="AllReduce", count=200))
    code = OPERATION_CODES["AllReduce"]
    whole = _table(lines)
    assert [(op, amount, templates) for op, _, amount, templates in whole] == [(code, 6, 2), (code, 1, 1)]
    assert _table(lines[:2], lines[2:]) == whole


def test_nothing_counted_is_an_empty_table() -> None:
    assert len(UsageCounts(Reading().store).table()) == 0


_MS = 1_000_000
_STEP = 100 * _MS
_REDUCE, _GATHER = OPERATION_CODES["AllReduce"], OPERATION_CODES["AllGather"]


def _traffic(starts: list[int], *, length: int | None = _MS, ranks: int = 2, sizes: list[int] | None = None) -> Traffic:
    """One operation at each time of a step, in four steps, on each rank."""
    one = np.array([step * _STEP + start for step in range(4) for start in starts], np.int64)
    start: NDArray[np.int64] = np.tile(one, ranks)
    amount = len(start)
    return Traffic(
        rank=np.repeat(np.arange(ranks), len(one)),
        op=np.full(amount, _REDUCE, np.int64),
        message_bytes=np.tile(np.array(sizes or [8] * len(starts), np.int64), 4 * ranks),
        iteration=np.tile(np.repeat(np.arange(4), len(starts)), ranks),
        start_ns=start,
        end_ns=np.full(amount, NO_TIME_NS) if length is None else start + length,
    )


def test_a_burst_at_the_end_of_each_step_is_bursty_and_mostly_silent() -> None:
    found = signature_of(_traffic([80 * _MS, 81 * _MS, 83 * _MS, 86 * _MS]))
    assert found.period_ns == _STEP
    assert found.bursts_per_iteration == 1
    assert found.burst_ns == 7 * _MS
    assert found.pause_ns == 93 * _MS
    assert found.burstiness is not None
    assert found.burstiness > 0.2
    assert found.operations_per_iteration == 4
    assert found.active_ratio == pytest.approx(16 / 307)


def test_even_steps_are_a_clock() -> None:
    found = signature_of(_traffic([0, 25 * _MS, 50 * _MS, 75 * _MS]))
    assert found.burstiness == -1
    assert found.bursts_per_iteration == 4
    assert found.active_ratio == pytest.approx(16 / 376)


def test_sizes_and_operations_are_counted() -> None:
    traffic = _traffic([0, 1, 2, 3], sizes=[100, 100, 5000, NO_NUMBER])
    traffic.op[::4] = _GATHER
    found = signature_of(traffic)
    assert found.mix == ((_REDUCE, 24, 8 * 5100), (_GATHER, 8, 800))
    assert (found.sizes, found.p10_bytes, found.median_bytes, found.largest_bytes) == (2, 100, 100, 5000)
    assert found.bytes_per_iteration == 5200


def test_stamps_alone_tell_bursts_and_period_but_not_activity() -> None:
    found = signature_of(_traffic([80 * _MS, 81 * _MS], length=None))
    assert (found.period_ns, found.bursts_per_iteration, found.pause_ns) == (_STEP, 1, 99 * _MS)
    assert found.active_ratio is None


def test_without_times_and_iterations_only_the_mix_is_known() -> None:
    traffic = _traffic([0, 1])
    for column, unknown in (
        (traffic.start_ns, NO_TIME_NS),
        (traffic.end_ns, NO_TIME_NS),
        (traffic.iteration, NO_NUMBER),
    ):
        column[:] = unknown
    found = signature_of(traffic)
    assert found.mix == ((_REDUCE, 16, 128),)
    unknown_ones = (found.period_ns, found.burstiness, found.active_ratio, found.bursts_per_iteration, found.burst_ns)
    assert unknown_ones == (None,) * 5
    assert found.operations_per_iteration is None


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
