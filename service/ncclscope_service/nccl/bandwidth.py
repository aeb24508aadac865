"""Message sizes and bandwidths as nccl-tests defines them, for columns of operations.

Source: nccl-tests `doc/PERFORMANCE.md` and `src/*.cu` (`GetCollByteCount`, `GetBw`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.terms import DATA_TYPES, NO_NUMBER, OPERATION_CODES, OPERATIONS

SIZE_CLASS_BOUNDS: Final = (4 * 1024, 64 * 1024, 1024**2, 16 * 1024**2, 256 * 1024**2)
"""Upper bounds (inclusive) of the first size classes in bytes; the last class has none. Six classes keep series few."""

SIZE_CLASSES: Final = ("4KiB", "64KiB", "1MiB", "16MiB", "256MiB", "inf")
"""Names: the upper bound of each class."""

UNKNOWN_SIZE_CLASS: Final = 255
"""The class of a message whose size is not known; it has no name and belongs to no series."""

_BOUNDS: Final = np.array(SIZE_CLASS_BOUNDS, dtype=np.int64)


def classify(message_bytes: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The size class of each message: an index into `SIZE_CLASSES`; bounds belong to the class they end.

    A size that is not known (negative) gets UNKNOWN_SIZE_CLASS.
    """
    sizes = np.asarray(message_bytes, dtype=np.int64)
    classes = np.searchsorted(_BOUNDS, sizes, side="left").astype(np.uint8)
    return np.where(sizes >= 0, classes, np.uint8(UNKNOWN_SIZE_CLASS))


Bytes = NDArray[np.int64]
"""Bytes; NO_NUMBER if unknown."""
BytesPerSecond = NDArray[np.float64]
"""NaN if unknown."""

_CODES: Final = 256
_LARGEST_BYTES: Final = float(2**62)
"""No message is larger; beyond it the line was garbled and the size is not known."""


def _by_code(numbers: Mapping[str, float]) -> NDArray[np.float64]:
    table = np.full(_CODES, np.nan)
    for name, number in numbers.items():
        table[OPERATION_CODES[name]] = number
    return table


_SIZES: Final = np.array([data_type.size_bytes for data_type in DATA_TYPES], dtype=np.int64)
_SCALES: Final = np.array(
    [code < len(OPERATIONS) and OPERATIONS[code].scales_with_ranks for code in range(_CODES)], dtype=np.bool_
)
_MOVES_BYTES: Final = np.array(
    [code < len(OPERATIONS) and OPERATIONS[code].name not in {"Signal", "WaitSignal"} for code in range(_CODES)],
    dtype=np.bool_,
)
# factor = (steps * n - steps) / n + constant: one formula for every row of nccl-tests' table
_STEPS: Final = _by_code(
    {"AllReduce": 2, "AllGather": 1, "ReduceScatter": 1, "AlltoAll": 1, "Gather": 1, "Scatter": 1}
    | {"Broadcast": 0, "Reduce": 0, "Send": 0, "Recv": 0, "PutSignal": 0}
)
_CONSTANT: Final = np.where(_STEPS == 0, 1.0, 0.0)


def message_bytes(
    operations: NDArray[np.uint8],
    counts: NDArray[np.uint64],
    data_types: NDArray[np.int16],
    nranks: NDArray[np.int32],
) -> Bytes:
    """nccl-tests' message size S of each operation, from what its log line says.

    S is the whole array: count x size for AllReduce, Broadcast, Reduce, Send and Recv; times nranks for AllGather,
    ReduceScatter, AlltoAll, Gather and Scatter. NO_NUMBER for unknown operations and data types, for Signal and
    WaitSignal, which carry none, and for an unknown `nranks` that S needs. AllGather and Broadcast up to
    NCCL 2.21.5 log bytes with data type 0 (int8), whose size is 1: the same formula holds.
    Source: nccl-tests `src/*.cu` GetCollByteCount; NCCL `src/enqueue.cc:ncclInfoSetDerived`.
    """
    types = np.asarray(data_types, dtype=np.int64)
    ranks = np.asarray(nranks, dtype=np.int64)
    type_is_known = (types >= 0) & (types < len(_SIZES))
    scales = _SCALES[operations]
    each = _SIZES[np.where(type_is_known, types, 0)] * np.where(scales, np.maximum(ranks, 1), 1)
    is_known = type_is_known & _MOVES_BYTES[operations] & (~scales | (ranks > 0))
    is_known &= np.asarray(counts, dtype=np.float64) * each < _LARGEST_BYTES
    safe_counts = np.where(is_known, counts, np.uint64(0)).astype(np.int64)
    return np.where(is_known, safe_counts * each, np.int64(NO_NUMBER))


def scaled_bytes(operations: NDArray[np.uint8], each: Bytes, nranks: NDArray[np.int32]) -> Bytes:
    """S of operations of which count x type size of one rank is known, as NCCL Inspector prints it.

    Source: NCCL `plugins/profiler/inspector/inspector.cc:inspectorComputeOpBw`, the same factors as nccl-tests'.
    """
    ranks = np.where(_SCALES[operations], np.maximum(np.asarray(nranks, dtype=np.int64), 1), 1)
    amounts = np.asarray(each, dtype=np.int64)
    is_known = (amounts >= 0) & (amounts.astype(np.float64) * ranks < _LARGEST_BYTES) & (operations < len(OPERATIONS))
    return np.where(is_known, np.where(is_known, amounts, 0) * ranks, np.int64(NO_NUMBER))


def logged_bytes(counts: NDArray[np.uint64], data_types: NDArray[np.int16]) -> Bytes:
    """Count x type size of each line, whatever the operation does with it; NO_NUMBER if the type is not known."""
    types = np.asarray(data_types, dtype=np.int64)
    is_known = (types >= 0) & (types < len(_SIZES))
    sizes = _SIZES[np.where(is_known, types, 0)]
    is_known &= np.asarray(counts, dtype=np.float64) * sizes < _LARGEST_BYTES
    return np.where(is_known, np.where(is_known, counts, np.uint64(0)).astype(np.int64) * sizes, np.int64(NO_NUMBER))


def wire_bytes(operations: NDArray[np.uint8], moved: Bytes, nranks: NDArray[np.int32]) -> Bytes:
    """Bytes that each rank puts on links: S x `factor`, rounded down, 0 with one rank; NO_NUMBER if that is unknown.

    For Broadcast and Reduce, of which nccl-tests counts all of S, the rank at the end of the chain sends none of it.
    """
    ranks, steps = np.asarray(nranks, dtype=np.int64), _STEPS[operations]
    is_known = (np.asarray(moved) >= 0) & (ranks >= 1) & np.isfinite(steps)
    whole, size = np.where(is_known, steps, 0.0).astype(np.int64) * (ranks - 1), np.where(is_known, moved, 0)
    ranks = np.maximum(ranks, 1)
    shared = size // ranks * whole + size % ranks * whole // ranks  # S times the number of ranks may be too large
    sent = np.where(_CONSTANT[operations] > 0, size, shared)
    return np.where(is_known, np.where(ranks > 1, sent, 0), np.int64(NO_NUMBER))


def factor(operations: NDArray[np.uint8], nranks: NDArray[np.int32]) -> NDArray[np.float64]:
    """busbw / algbw: 2(n-1)/n for AllReduce, (n-1)/n if every rank keeps a part, 1 for Broadcast, Reduce, Send.

    NaN for unknown operations, for signals without a payload, and for an `nranks` below 1.
    The table is nccl-tests' for every algorithm, tree and NVLS too. Source: nccl-tests `doc/PERFORMANCE.md`.
    """
    ranks = np.asarray(nranks, dtype=np.float64)
    ranks = np.where(ranks >= 1, ranks, np.nan)
    return _STEPS[operations] * (ranks - 1) / ranks + _CONSTANT[operations]


def algbw(moved: Bytes, duration_ns: NDArray[np.int64]) -> BytesPerSecond:
    """Algorithm bandwidth S / t in bytes per second; NaN if either is not known or no time passed."""
    return _rate(np.where(np.asarray(moved) >= 0, moved, np.nan).astype(np.float64), duration_ns)


def busbw(moved: Bytes, duration_ns: NDArray[np.int64], factors: NDArray[np.float64]) -> BytesPerSecond:
    """Bus bandwidth, algbw times the factor, in bytes per second. Source: nccl-tests `doc/PERFORMANCE.md`."""
    return algbw(moved, duration_ns) * factors


def rate(weighted_bytes: NDArray[np.float64], duration_ns: NDArray[np.int64]) -> BytesPerSecond:
    """Bus bandwidth of a launch: the sum of S x factor over its operations, by its duration, in bytes per second."""
    return _rate(np.asarray(weighted_bytes, dtype=np.float64), duration_ns)


def _rate(amount: NDArray[np.float64], duration_ns: NDArray[np.int64]) -> BytesPerSecond:
    durations = np.asarray(duration_ns, dtype=np.float64)
    is_known = durations > 0
    result: BytesPerSecond = np.where(is_known, amount * 1e9 / np.where(is_known, durations, 1.0), np.nan)
    return result
