"""The signature of a group says in numbers what its timeline shows."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclscope_service.rollup.usage import Traffic, signature_of
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

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
