"""The rows that the aligner of a process takes and gives: operations, kernels, matches."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

ALIGN_OPERATION: Final = np.dtype(
    [
        ("id", "<i8"),  # opaque, increasing in log order
        ("tid", "<u4"),
        ("stream", "<u8"),  # pointer as logged
        ("member", "<i4"),  # the communicator as this process knows it
        ("nranks", "<i4"),
        ("device", "<i4"),  # CUDA ordinal of the communicator (Init line's cudaDev); NO_NUMBER
        ("op", "<u1"),  # code in terms.OPERATIONS
        ("data_type", "<i2"),
        ("reduction", "<i8"),  # as logged
        ("count", "<u8"),
        ("message_bytes", "<i8"),
        ("root", "<i4"),
        ("op_count", "<u8"),
        ("logged_at_ns", "<i8"),  # stamp in the line, host clock; NO_TIME_NS
        ("observed_at_ns", "<i8"),  # arrival at the agent; NO_TIME_NS
        ("channels", "<i2"),  # of its TUNING line; NO_NUMBER
        ("group", "<i8"),  # as rows.OPERATION
        ("one_rank", "?"),
        ("text", "<i4"),  # number of the line's text behind opCount, buffers included; NO_NUMBER
    ]
)
"""One logged operation, as the aligner needs it; `blank_operations` gives rows in which all is unknown."""

ALIGN_KERNEL: Final = np.dtype(
    [
        ("id", "<i8"),
        ("stream_id", "<i8"),
        ("device_id", "<i4"),
        ("correlation_id", "<i8"),
        ("launch_start_ns", "<i8"),  # host clock; NO_TIME_NS
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("launch_tid", "<i8"),  # NO_NUMBER
        ("kernel_class", "<u1"),  # kernel_name.KernelClass
        ("data_type", "<i2"),  # as kernel_name.merged_data_type; NO_NUMBER
        ("grid_x", "<i4"),
        ("block_x", "<i4"),
        ("graph_node_id", "<i8"),  # NO_NUMBER outside CUDA graphs
        ("censored", "?"),
    ]
)
"""One NCCL kernel, as the aligner needs it; class and type come from its name."""

MATCH: Final = np.dtype(
    [
        ("operation", "<i8"),
        ("kernel", "<i8"),  # of its launch; NO_NUMBER
        ("launch", "<i8"),  # equal for operations of one launch: the id of the first; NO_NUMBER where none is launched
        ("match", "<u1"),  # rows.Match
        ("confidence", "<f4"),
    ]
)
"""What became of one operation. Final: no later row speaks of the same operation."""

PLAN: Final = np.dtype([("kernel", "<i8"), ("first", "<i8")])
"""One more kernel of a launch that needed several, beside its first one, which the matches name: `plans` has why."""


def blank_operations(count: int) -> Columns:
    """Rows of ALIGN_OPERATION in which everything that may be unknown is."""
    rows = np.zeros(count, dtype=ALIGN_OPERATION)
    for name in ("device", "channels", "group", "text"):
        rows[name] = NO_NUMBER
    for name in ("logged_at_ns", "observed_at_ns"):
        rows[name] = NO_TIME_NS
    return rows


def blank_kernels(count: int) -> Columns:
    """Rows of ALIGN_KERNEL in which everything that may be unknown is."""
    rows = np.zeros(count, dtype=ALIGN_KERNEL)
    for name in ("launch_tid", "graph_node_id", "data_type"):
        rows[name] = NO_NUMBER
    rows["launch_start_ns"] = NO_TIME_NS
    return rows


def launch_times(kernels: Columns) -> NDArray[np.int64]:
    """When each kernel (ALIGN_KERNEL) was launched; its start, which is later, where that is not known."""
    times: NDArray[np.int64] = np.where(
        kernels["launch_start_ns"] == NO_TIME_NS, kernels["start_ns"], kernels["launch_start_ns"]
    )
    return times
