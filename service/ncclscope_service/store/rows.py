"""The service's own rows: what is known of each operation, kernel, communicator and rank.

Tables of these live in `tables.py`; every stage of the pipeline fills its own columns and leaves the
rest alone. Unknown is NO_TIME_NS, NO_NUMBER or NaN in a column, and null or None at every edge.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.table import AnyRows
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS


class Match(IntEnum):
    """Result of an operation's alignment."""

    PENDING = 0
    """Not decided yet: its capture may still come."""
    MATCHED = 1
    UNMATCHED = 2
    """Inside a capture, but no kernel was found for it."""
    NOT_COVERED = 3
    """No capture recorded its process at that time."""
    NO_KERNEL = 4
    """NCCL launches none: one rank, nothing to move, copy engine."""
    LINE_LOST = 5
    """A kernel whose line was lost: all that is known of the operation is from it."""


class NumberState(IntEnum):
    """How an operation's place among those of its communicator is known."""

    COUNTED = 0
    """By the lines before it."""
    HEALED = 1
    """Lines before it were lost, and kernels or other ranks show how many."""
    UNCERTAIN = 2
    """Lines around it were lost, and nothing shows on which side: it is joined with no other rank."""
    LAUNCHED = 3
    """By the kernels of its communicator's stream. Which of its lines is this one is a guess."""


class TimingSource(IntEnum):
    """Source of an operation's duration and measures; outputs print its lower-case name."""

    KERNEL = 0
    INSPECTOR = 1


class IterationBy(IntEnum):
    """Evidence for an operation's iteration; outputs print its lower-case name."""

    MARKS = 0
    """NVTX marks of its process."""
    PERIOD = 1
    """The period of what its rank calls."""


OPERATION: Final = np.dtype(
    [
        # who: filled by intake and communicators
        ("source", "<i4"),  # index into the store's sources
        ("process", "<i4"),  # index into the store's processes
        ("template", "<i4"),  # index into the store's operation templates
        ("member", "<i4"),  # index into the store's members: this communicator as this process knows it
        ("line", "<i8"),
        ("op_count", "<u8"),
        ("seq", "<i8"),  # k-th row of that member, from 0
        ("coll_seq", "<i8"),  # k-th collective of that member; NO_NUMBER for Send/Recv and one-sided
        ("pair_seq", "<i8"),  # k-th Send (or Recv) with that peer; NO_NUMBER for collectives
        ("kind_seq", "<i8"),  # k-th collective of its kind that NCCL launches, which is Inspector's coll_sn; NO_NUMBER
        ("number_state", "<u1"),  # NumberState
        ("message_bytes", "<i8"),  # nccl-tests' S; NO_NUMBER if the data type is not known
        ("logged_at_ns", "<i8"),
        ("observed_at_ns", "<i8"),
        ("group", "<i8"),  # operations of one ncclGroupStart/End share it; call_groups.ALONE; NO_NUMBER
        ("iteration", "<i4"),
        ("iteration_by", "<i1"),  # IterationBy; NO_NUMBER if the iteration is not known
        ("algorithm", "<i1"),
        ("protocol", "<i1"),
        ("channels", "<i2"),
        # kernel: filled by align
        ("match", "<u1"),  # Match
        ("launch", "<i8"),  # operations that share a kernel share it
        ("kernel", "<i8"),  # row id of the first kernel of its launch
        ("confidence", "<f4"),
        # NCCL Inspector: filled by inspection
        ("inspected_ns", "<i8"),  # duration of its kernel as Inspector prints it; NO_TIME_NS
        ("inspected_confidence", "<f4"),  # that the record is this operation's
        ("inspected", "?"),  # the measures of its collective were counted from Inspector's records
        # times: filled by align (host clock) and clock (reference clock)
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("censored", "?"),
        ("start_true_ns", "<i8"),
        ("end_true_ns", "<i8"),
        ("clock_uncertainty_ns", "<i8"),
        # measures: filled by join and measure
        ("ranks_seen", "<i4"),  # how many ranks' kernels of this collective were seen
        ("wait_ns", "<i8"),
        ("transfer_ns", "<i8"),
        ("algbw", "<f8"),  # bytes per second
        ("busbw", "<f8"),  # of the transfer
        ("busbw_apparent", "<f8"),  # of the whole kernel
        ("limit", "<f8"),  # comparable with busbw
        ("limit_reference", "<i1"),  # LimitReference; NO_NUMBER
        ("bottleneck", "<i4"),  # index into the store's strings: what the limit by topology is of; NO_NUMBER
        ("finished", "?"),  # nothing more will be learned about this row
    ]
)
"""One logged operation."""


_UNKNOWN_NUMBERS: Final = (
    "process",
    "template",
    "member",
    "seq",
    "coll_seq",
    "pair_seq",
    "kind_seq",
    "message_bytes",
    "iteration",
    "iteration_by",
    "algorithm",
    "protocol",
    "channels",
    "launch",
    "kernel",
    "limit_reference",
    "bottleneck",
    "group",
)


def _unknown_operation() -> Columns:
    operation = np.zeros(1, OPERATION)
    for name in OPERATION.names or ():
        if name.endswith("_ns"):
            operation[name] = NO_TIME_NS
        elif name in _UNKNOWN_NUMBERS:
            operation[name] = NO_NUMBER
        elif OPERATION[name] == np.float64:
            operation[name] = np.nan
    return operation


UNKNOWN_OPERATION: Final = _unknown_operation()
"""An operation of which nothing is known yet."""


PACKED: Final = ("line", "op_count", "seq", "coll_seq", "pair_seq", "kind_seq", "message_bytes", "group")
"""Columns of operations whose values are seldom beyond four bytes."""


def empty_operations(amount: int) -> Columns:
    """Operation rows of which nothing is known yet."""
    return np.repeat(UNKNOWN_OPERATION, amount)


REPLAYED: Final = np.dtype(
    [
        *((name, OPERATION[name]) for name in OPERATION.names or ()),
        ("operation", "<i8"),  # row id of the captured operation
        ("captured_launch", "<i8"),  # launch id of the captured operation
        ("replay", "<i4"),  # k-th launch of its graph that was recorded, from 0
        ("is_first", "?"),  # the captured operation's row names this kernel
    ]
)
"""One replay of a captured operation: its line's columns, with kernel, times and measures of its own. `launch` is one
of its own too: the kernel's row id."""


LOGGED: Final = np.dtype(
    [
        (name, OPERATION[name])
        for name in ("source", "template", "line", "op_count", "logged_at_ns", "observed_at_ns", "group")
    ]
)
"""Columns of an operation that come from the log: a fifth of what its row takes once it is worked on."""

PLACED: Final = np.dtype(
    [
        *((name, LOGGED[name]) for name in LOGGED.names or ()),
        *(
            (name, OPERATION[name])
            for name in ("process", "member", "seq", "coll_seq", "pair_seq", "kind_seq", "message_bytes")
        ),
    ]
)
"""The same with its place in its communicator: all that is known of an operation until it is aligned."""


class LimitReference(IntEnum):
    """Origin of a limit; outputs print its lower-case name."""

    TOPOLOGY = 0
    NCCL_MODEL = 1
    BASELINE = 2


KERNEL: Final = np.dtype(
    [
        ("source", "<i4"),
        ("process", "<i4"),
        ("template", "<i4"),  # index into the store's kernel templates
        ("correlation_id", "<i8"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("launch_start_ns", "<i8"),
        ("launch_end_ns", "<i8"),
        ("launch_tid", "<i8"),
        ("graph_node_id", "<i8"),
        ("censored", "?"),
        ("launch", "<i8"),  # launch id; NO_NUMBER as long as it has no operation
        ("replay", "<i4"),  # k-th recorded launch of its graph, 0 outside graphs; NO_NUMBER if it has no launch
    ]
)
"""One NCCL kernel record."""


COLLECTIVE: Final = np.dtype(
    [
        ("communicator", "<i4"),
        ("coll_seq", "<i8"),  # of the launch's first collective
        ("op", "<u1"),
        ("size_class", "<u1"),
        ("message_bytes", "<i8"),  # summed over the collectives of the launch
        ("ranks_seen", "<i4"),
        ("first_start_true_ns", "<i8"),  # reference clock
        ("end_true_ns", "<i8"),  # reference clock, of the last arriver's kernel
        ("transfer_ns", "<i8"),
        ("spread_ns", "<i8"),  # the longest wait of any rank
        ("wait_ns", "<i8"),  # summed over the ranks
        ("busy_ns", "<i8"),  # kernel durations summed over the ranks
        ("last_rank", "<i4"),  # communicator rank that arrived last (shortest kernel)
        ("blame_ns", "<i8"),  # how much later than the second last it arrived
        ("busbw", "<f8"),  # bytes per second, of the transfer
        ("confidence", "<f4"),  # smallest of the matches it rests on
        ("rank", "<i4"),  # of sends and receives: communicator rank whose launch it is; else NO_NUMBER
        ("peer", "<i4"),  # and the rank it exchanged with; NO_NUMBER if there were several
    ]
)
"""One launch of collectives that was seen on two ranks or more, joined across the ranks of its communicator; or one
rank's launch of sends and receives, of which every other side was seen: it has no `coll_seq` and no `last_rank`."""

INSPECTED: Final = np.dtype(
    [
        ("source", "<i4"),
        ("process", "<i4"),
        ("line", "<i8"),
        ("comm_hash", "<u8"),
        ("name", "<i4"),  # ncclConfig_t.commName, index into Store.strings; "" if none was given
        ("communicator", "<i4"),  # NO_NUMBER until it is known
        ("rank", "<i4"),  # communicator rank
        ("nranks", "<i4"),
        ("op", "<u1"),
        ("timing", "<u1"),
        ("algorithm", "<i1"),
        ("protocol", "<i1"),
        ("peer", "<i4"),
        ("sequence", "<i8"),
        ("message_bytes", "<i8"),  # nccl-tests' S; NO_NUMBER
        ("duration_ns", "<i8"),  # whole us; NO_TIME_NS
        ("dumped_at_ns", "<i8"),  # host clock
        ("started_at_ns", "<i8"),  # host clock; NO_TIME_NS
        ("start_ns", "<i8"),  # of its kernel, as the plug-in saw it, on the host clock (verbose dumps); NO_TIME_NS
        ("end_ns", "<i8"),
        ("busbw", "<f8"),  # as printed
        ("arrived_at_ns", "<i8"),  # service's clock
        ("operation", "<i8"),  # row id of the operation that it is of; NO_NUMBER
        # measures: filled when the ranks of its collective were joined
        ("ranks_seen", "<i4"),
        ("wait_ns", "<i8"),
        ("transfer_ns", "<i8"),
    ]
)
"""One record of NCCL Inspector: an operation of one rank that has completed."""

SERIES: Final = np.dtype(
    [
        ("communicator", "<i4"),
        ("op", "<u1"),
        ("size_class", "<u1"),
        # from the log, counted as they are read, over all ranks
        ("operations", "<i8"),
        ("bytes", "<i8"),
        # from kernels, over all ranks
        ("matched", "<i8"),  # operations with a kernel
        ("duration_ns", "<i8"),
        ("wait_ns", "<i8"),
        ("waiting_duration_ns", "<i8"),  # kernel time of those operations whose wait is known
        # from joined collectives
        ("collectives", "<i8"),
        ("transfer_ns", "<i8"),
        ("busbw", "<f8"),  # median over the last minute with data; NaN before
        ("baseline", "<f8"),  # the best that this series has shown (90th percentile of its windows); NaN
        ("limit", "<f8"),  # by topology; NaN
        # from NCCL Inspector, over all ranks
        ("inspected", "<i8"),  # records
        ("inspected_ns", "<i8"),  # their durations
        ("compared", "<i8"),  # operations whose kernel is known as well
        ("compared_kernel_ns", "<i8"),
        ("compared_inspected_ns", "<i8"),
    ]
)
"""Series of a (communicator, operation, size class): counters since the start, and recent busbw."""

OPERATION_TEMPLATE: Final = np.dtype(
    [
        ("process", "<i4"),
        ("tid", "<u4"),
        ("device", "<i2"),
        ("op", "<u1"),
        ("op_name", "<i4"),  # index into Store.strings
        ("data_type", "<i2"),
        ("reduction", "<i8"),
        ("root", "<i4"),
        ("nranks", "<i4"),
        ("count", "<u8"),
        ("send_buffer", "<u8"),
        ("recv_buffer", "<u8"),
        ("communicator", "<u8"),
        ("stream", "<u8"),
        ("global_rank", "<i4"),
    ]
)
"""As on the wire, with process and thread resolved."""

OF_DUMPS: Final = -3
"""The device of templates of rows that are made of NCCL Inspector's records, which name none."""

KERNEL_TEMPLATE: Final = np.dtype(
    [
        ("process", "<i4"),
        ("device_id", "<i4"),
        ("stream_id", "<i8"),
        ("name", "<i4"),  # index into Store.strings
        ("grid_x", "<i4"),
        ("grid_y", "<i4"),
        ("grid_z", "<i4"),
        ("block_x", "<i4"),
        ("block_y", "<i4"),
        ("block_z", "<i4"),
        ("static_shared_bytes", "<i4"),
        ("dynamic_shared_bytes", "<i4"),
        ("registers", "<i4"),
    ]
)
"""As on the wire, with the process resolved."""

RANGE: Final = np.dtype(
    [
        ("process", "<i4"),
        ("tid", "<u4"),
        ("domain", "<i4"),  # index into Store.strings
        ("text", "<i4"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)
"""One NVTX range, on the host's own clock."""

API_CALL: Final = np.dtype(
    [
        ("process", "<i4"),
        ("tid", "<u4"),
        ("kind", "<i2"),  # code in terms.OPERATIONS, GROUP_START or GROUP_END
        ("communicator", "<u8"),  # hash; 0 if unknown
        ("bytes", "<i8"),  # count x size of the call; NO_NUMBER if unknown
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),  # NO_TIME_NS if the capture ended first
    ]
)
"""One call of NCCL's API that enqueues, or begins or ends a group: an NVTX range of NCCL's, on the host's own clock."""

GROUP_START: Final = 1000

GROUP_END: Final = 1001

BUSY: Final = np.dtype(
    [("process", "<i4"), ("device_id", "<i4"), ("start_ns", "<i8"), ("end_ns", "<i8"), ("kernels", "<u4")]
)
"""A stretch in which kernels other than NCCL's ran, on the host's own clock."""

TUNING: Final = np.dtype(
    [
        ("process", "<i4"),
        ("tid", "<u4"),
        ("line", "<i8"),
        ("op", "<u1"),
        ("algorithm", "<i1"),
        ("protocol", "<i1"),
        ("channels", "<i2"),
        ("bytes", "<u8"),
        ("expected_us", "<f8"),
    ]
)
"""One TUNING line, with process and thread resolved."""

SAME_HOST_SIGMA_NS: Final = 2_000.0
"""GPUs of one host end a collective 1 to 3 us apart: no averaging removes what is systematic of it."""
A_GUESS: Final = 0.5
"""Confidence up to which a match is called a guess: it is shown, and nothing is measured by it."""

BY_LAUNCH: Final = 0.95
"""Confidence at least that a kernel is of its communicator, whichever line is its own (`NumberState.LAUNCHED`)."""


def has_launch(match: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether a kernel was found (`Match`), with a line or without."""
    launched: NDArray[np.bool_] = (match == Match.MATCHED) | (match == Match.LINE_LOST)
    return launched


def has_kernel(operations: AnyRows) -> NDArray[np.bool_]:
    """Which operations (rows.OPERATION) have a kernel by which they are measured."""
    is_sure = (operations["confidence"] > A_GUESS) | (operations["number_state"] == NumberState.LAUNCHED)
    certain: NDArray[np.bool_] = has_launch(operations["match"]) & is_sure
    return certain


def timing_sources(operations: AnyRows) -> NDArray[np.int8]:
    """The TimingSource of each; NO_NUMBER if none is known. A kernel that is a guess gives way to Inspector."""
    sources = np.where(has_launch(operations["match"]), np.int8(TimingSource.KERNEL), np.int8(NO_NUMBER))
    inspected = (operations["inspected_ns"] != NO_TIME_NS) & ~has_kernel(operations)
    return np.where(inspected, np.int8(TimingSource.INSPECTOR), sources)


def durations_ns(operations: AnyRows) -> NDArray[np.int64]:
    """Duration by that source; NO_TIME_NS if it is not known, as of a kernel that the capture cut."""
    start, end = operations["start_ns"], operations["end_ns"]
    is_whole = (start != NO_TIME_NS) & (end != NO_TIME_NS) & ~operations["censored"]
    of_kernel = np.where(is_whole, np.where(is_whole, end, 0) - np.where(is_whole, start, 0), np.int64(NO_TIME_NS))
    is_inspected = timing_sources(operations) == TimingSource.INSPECTOR
    return np.where(is_inspected, operations["inspected_ns"], of_kernel)


def timing_confidences(operations: AnyRows) -> NDArray[np.float32]:
    """How sure it is that the duration is this operation's; NaN if there is none."""
    sources = timing_sources(operations)
    known = np.where(sources == TimingSource.KERNEL, operations["confidence"], operations["inspected_confidence"])
    return np.where(sources == NO_NUMBER, np.float32(np.nan), known.astype(np.float32))
