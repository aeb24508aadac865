"""What an aligner is given, what it answers, and the truth: the stable interface of this benchmark.

An aligner is a function `align(nccl_version, operations, kernels) -> pairs` over numpy structured arrays: OPERATION
rows in log order, KERNEL rows in order of their starts, PAIR rows in any order. An operation has at most one kernel;
a kernel may have several operations (a group). What is not known is `NOT_KNOWN` (-1), times `NO_TIME_NS`.
`document.py` has the same as JSON, for aligners in other languages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.nccl.launch_rules import KernelClass
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES, OPERATIONS

NOT_KNOWN: Final = NO_NUMBER

OPERATION: Final = np.dtype(
    [
        ("id", "<i8"),  # any number, ascending in log order
        ("thread", "<i8"),
        ("communicator", "<i4"),  # which of the process's communicators, by pointer
        ("ranks", "<i4"),
        ("device", "<i4"),
        ("stream", "<u8"),  # pointer as logged
        ("operation", "<u1"),  # index into OPERATION_NAMES
        ("data_type", "<i2"),  # NCCL's number as logged
        ("count", "<u8"),
        ("peer", "<i4"),  # the line's `root`
        ("op_count", "<u8"),
        ("logged_at_ns", "<i8"),  # stamp in the line, host clock; NO_TIME_NS
        ("group", "<i8"),  # operations with one number are known to be of one ncclGroup; NOT_KNOWN
    ]
)
"""One operation line of one process's NCCL log."""

KERNEL: Final = np.dtype(
    [
        ("id", "<i8"),
        ("kind", "<u1"),  # what the kernel is named after: a KernelClass
        ("data_type", "<i2"),  # as the name tells it, signedness removed; NOT_KNOWN
        ("device", "<i4"),
        ("stream", "<i8"),  # CUPTI's stream id: no pointer
        ("correlation", "<i8"),  # ascending in launch order
        ("thread", "<i8"),  # that called the launch; NOT_KNOWN
        ("launched_at_ns", "<i8"),  # host clock; NO_TIME_NS
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)
"""One NCCL kernel of one process's nsys exports."""

PAIR: Final = np.dtype([("operation", "<i8"), ("kernel", "<i8"), ("confidence", "<f4")])
"""One answer: this kernel ran this operation, right with that probability (1 from aligners that state none)."""

TRUTH: Final = np.dtype([("operation", "<i8"), ("kernel", "<i8"), ("meaning", "<i8"), ("symbol", "<i4")])
"""One pair as it was, also where its line, its kernel or both were lost.

Pairs of one `meaning` have one communicator, kind and size. `symbol` is all that order and names can tell of the
kernel: its stream, kind and type."""

Ids = Columns | NDArray[np.int64]

Aligner = Callable[[str, Columns, Columns], Columns]

OPERATION_NAMES: Final = tuple(operation.name for operation in OPERATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Shares of rows that are lost, each by itself."""

    lines: float
    kernels: float

    @property
    def name(self) -> str:
        """As tables print it."""
        if not self.lines and not self.kernels:
            return "clean"
        parts = ((self.kernels, "kernels"), (self.lines, "lines"))
        return ", ".join(f"{share:.0%} {what} lost" for share, what in parts if share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One process: what an aligner is given, and what only the score and the bound may know."""

    name: str
    nccl_version: str
    operations: Columns
    kernels: Columns
    truth: Columns
    """TRUTH rows in call order."""
    loss: Loss
    shares: tuple[float, ...]
    """How often each symbol was drawn; empty where operations were not drawn one by one."""

    def operation_symbols(self) -> NDArray[np.int64]:
        """The symbol of each line in the log, as far as names and streams tell it; -1 for those that launch nothing."""
        return _looked_up(self.operations["id"], self.truth["operation"], self.truth["symbol"])

    def kernel_symbols(self) -> NDArray[np.int64]:
        """The symbol of each kernel, in launch order (that of `launched`)."""
        return _looked_up(self.launched()["id"], self.truth["kernel"], self.truth["symbol"])

    def launched(self) -> Columns:
        """The kernels in the order of their launches."""
        return self.kernels[np.argsort(self.kernels["correlation"], kind="stable")]


def kernel_kind(operation: str) -> KernelClass:
    """The kind of the kernel that runs an operation on its own."""
    code = OPERATION_CODES[operation]
    return KernelClass.SEND_RECV if operation in _POINT_TO_POINT else KernelClass(code)


def kernel_data_type(operation: str, data_type: int) -> int:
    """The type that the kernel's name tells: only reductions are named after one."""
    return data_type if operation in {"AllReduce", "Reduce", "ReduceScatter"} else NOT_KNOWN


def no_operations(count: int) -> Columns:
    """OPERATION rows in which nothing is known yet."""
    rows = np.zeros(count, dtype=OPERATION)
    rows["logged_at_ns"], rows["group"] = NO_TIME_NS, NOT_KNOWN
    return rows


def no_kernels(count: int) -> Columns:
    """KERNEL rows in which nothing is known yet."""
    rows = np.zeros(count, dtype=KERNEL)
    rows["launched_at_ns"], rows["thread"], rows["data_type"] = NO_TIME_NS, NOT_KNOWN, NOT_KNOWN
    return rows


def pairs_of(operations: Ids, kernels: Ids, confidence: Columns | NDArray[np.float64] | float = 1.0) -> Columns:
    """PAIR rows of equally long columns of ids."""
    pairs = np.empty(len(operations), dtype=PAIR)
    pairs["operation"], pairs["kernel"], pairs["confidence"] = operations, kernels, confidence
    return pairs


def _looked_up(ids: Ids, keys: Ids, values: Ids) -> NDArray[np.int64]:
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys[order], ids), len(keys) - 1)
    found = order[at]
    return np.where(keys[found] == ids, values[found], -1)


_POINT_TO_POINT: Final = frozenset({"Send", "Recv", "AlltoAll", "Gather", "Scatter"})
