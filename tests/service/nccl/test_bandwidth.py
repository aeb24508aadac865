from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.nccl import bandwidth
from ncclscope_wire.terms import DATA_TYPES, NO_NUMBER, OPERATION_CODES, UNKNOWN_OPERATION

FLOAT32 = [data_type.name for data_type in DATA_TYPES].index("float32")


def size_of(op: str, count: int, data_type: int, nranks: int) -> int:
    code = OPERATION_CODES[op]
    sizes = bandwidth.message_bytes(
        np.array([code], np.uint8), np.array([count], np.uint64), np.array([data_type], np.int16),
        np.array([nranks], np.int32),
    )  # fmt: skip
    return int(sizes[0])


def factor_of(op: str, nranks: int) -> float:
    return float(bandwidth.factor(np.array([OPERATION_CODES[op]], np.uint8), np.array([nranks], np.int32))[0])


def wire_of(op: str, moved: int, nranks: int) -> int:
    codes, sizes = np.array([OPERATION_CODES[op]], np.uint8), np.array([moved], np.int64)
    return int(bandwidth.wire_bytes(codes, sizes, np.array([nranks], np.int32))[0])


def test_bytes_on_the_wire_are_what_busbw_is_the_rate_of() -> None:
    assert [wire_of(op, 8_000, 8) for op in ("AllReduce", "AllGather", "Broadcast", "Send")] == [
        14000,
        7000,
        8000,
        8000,
    ]
    assert wire_of("AllReduce", 2**61, 4096) == 2**62 - 2**50
    assert wire_of("AllReduce", 7, 3) == 9


def test_one_rank_puts_nothing_on_the_wire_and_what_is_not_known_stays_so() -> None:
    assert [wire_of(op, 8_000, 1) for op in ("AllReduce", "Broadcast", "Send")] == [0, 0, 0]
    assert [wire_of("AllReduce", NO_NUMBER, 8), wire_of("Signal", 8, 8), wire_of("AllReduce", 8, 0)] == [NO_NUMBER] * 3


def test_logged_bytes_are_those_of_the_line() -> None:
    counts, types = np.array([1000, 1000, 2**63], np.uint64), np.array([FLOAT32, 99, 0], np.int16)
    assert bandwidth.logged_bytes(counts, types).tolist() == [4000, NO_NUMBER, NO_NUMBER]


@pytest.mark.parametrize("op", ["AllReduce", "Broadcast", "Reduce", "Send", "Recv"])
def test_size_is_the_whole_message_where_count_is(op: str) -> None:
    assert size_of(op, 1000, FLOAT32, 8) == 4000


@pytest.mark.parametrize("op", ["AllGather", "ReduceScatter", "AlltoAll", "Gather", "Scatter"])
def test_size_is_the_whole_array_where_count_is_one_ranks_part(op: str) -> None:
    assert size_of(op, 1000, FLOAT32, 8) == 32_000


def test_bytes_logged_with_data_type_0_are_bytes() -> None:
    assert size_of("AllGather", 4000, 0, 8) == 32_000


def test_what_is_not_known_has_no_size() -> None:
    assert size_of("AllReduce", 1000, 99, 8) == NO_NUMBER
    assert size_of("AllReduce", 1000, NO_NUMBER, 8) == NO_NUMBER
    assert size_of("AllGather", 1000, FLOAT32, NO_NUMBER) == NO_NUMBER
    assert size_of("AllReduce", 1000, FLOAT32, NO_NUMBER) == 4000
    assert size_of("AllReduce", 2**64 - 1, FLOAT32, 8) == NO_NUMBER
    assert size_of("WaitSignal", 0, 0, 8) == NO_NUMBER
    unknown = np.array([UNKNOWN_OPERATION], np.uint8)
    one = np.array([1], np.int32)
    sizes = bandwidth.message_bytes(unknown, one.astype(np.uint64), one.astype(np.int16), one)
    assert sizes.tolist() == [NO_NUMBER]
    assert np.isnan(bandwidth.factor(unknown, one))[0]


@pytest.mark.parametrize(
    ("op", "expected"),
    [("AllReduce", 1.75), ("AllGather", 0.875), ("ReduceScatter", 0.875), ("AlltoAll", 0.875), ("Gather", 0.875),
     ("Scatter", 0.875), ("Broadcast", 1.0), ("Reduce", 1.0), ("Send", 1.0), ("Recv", 1.0)],
)  # fmt: skip
def test_factor_is_nccl_tests_own(op: str, expected: float) -> None:
    assert factor_of(op, 8) == expected


def test_bandwidth_needs_a_duration_and_a_size() -> None:
    moved, durations = np.array([1000, 1000, NO_NUMBER], np.int64), np.array([500, 0, 500], np.int64)
    assert bandwidth.algbw(moved, durations).tolist()[0] == 2e9
    assert np.isnan(bandwidth.algbw(moved, durations)[1:]).all()
    assert bandwidth.busbw(moved, durations, np.full(3, 1.75)).tolist()[0] == 3.5e9


def test_size_classes_end_at_their_bounds() -> None:
    sizes = np.array([0, 4096, 4097, 65_536, 2**20, 2**20 + 1, 2**28, 2**28 + 1, NO_NUMBER], np.int64)
    assert bandwidth.classify(sizes).tolist() == [0, 0, 1, 1, 2, 3, 4, 5, bandwidth.UNKNOWN_SIZE_CLASS]
