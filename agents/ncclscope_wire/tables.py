"""The columns that travel: numpy dtypes of the templates and rows in a batch.

Training repeats itself: the text of an operation line after `opCount` recurs every iteration, because
the allocator reuses buffers. So each source keeps dictionaries (strings, threads, templates) and a row
holds only what changes. Indices point into the dictionaries *of that source*, which only grow.

Columns that may be unknown hold `NO_TIME_NS` (times) or `NO_NUMBER` (-1); both become null at the edges.
All dtypes are little-endian and packed, so that a column's bytes mean the same on every machine.
"""

from __future__ import annotations

from typing import Final

import numpy as np

THREAD: Final = np.dtype(
    [
        ("host", "<u4"),  # string: gethostname() cut at the first dot, as the log prints it
        ("pid", "<u4"),
        ("tid", "<u4"),  # thread that logged; Linux gettid
    ]
)
"""Thread that wrote a log line."""

OPERATION_TEMPLATE: Final = np.dtype(
    [
        ("thread", "<u4"),  # index into THREAD
        ("device", "<i2"),  # [dev] of the prefix: cudaGetDevice() of that thread, not the rank; NO_NUMBER
        ("op", "<u1"),  # code in terms.OPERATIONS, or UNKNOWN_OPERATION
        ("op_name", "<u4"),  # string, as printed
        ("data_type", "<i2"),  # number as printed
        ("reduction", "<i8"),  # number as printed
        ("root", "<i4"),  # as printed: root, or peer for Send/Recv and one-sided
        ("nranks", "<i4"),
        ("count", "<u8"),  # as printed
        ("send_buffer", "<u8"),  # 0 = (nil)
        ("recv_buffer", "<u8"),
        ("communicator", "<u8"),  # pointer, of this process only
        ("stream", "<u8"),  # 0 = (nil), the legacy default stream; NO_POINTER if it was cut off
        ("global_rank", "<i4"),  # RCCL's suffix; NO_NUMBER with NCCL
    ]
)
"""All of a COLL line except opCount, time and line number."""

OPERATION_ROW: Final = np.dtype(
    [
        ("template", "<u4"),
        ("line", "<u4"),  # from 1, physical lines of the file
        ("op_count", "<u8"),  # decoded from hexadecimal
        ("logged_at_ns", "<i8"),  # stamp in the line as UTC ns, read with the source's zone; NO_TIME_NS
    ]
)
"""One COLL line: 24 bytes."""

TUNING_ROW: Final = np.dtype(
    [
        ("thread", "<u4"),
        ("line", "<u4"),
        ("op", "<u1"),  # code; UNKNOWN_OPERATION if the line has no name (2.20 to 2.22)
        ("algorithm", "<i1"),  # index in terms.ALGORITHMS; NO_NUMBER if it is a symmetric kernel or CE
        ("protocol", "<i1"),  # index in terms.PROTOCOLS; NO_NUMBER likewise
        ("channels", "<i2"),  # number of channels (Hi - Lo + 1, or nchannels); NO_NUMBER
        ("bytes", "<u8"),  # as printed: per rank or x nranks, by version (nccl.md section 4)
        ("expected_us", "<f8"),  # NCCL's own estimate (2.20 to 2.23), else NaN
    ]
)
"""One TUNING line `N Bytes -> ...`."""

CALL_MARK: Final = np.dtype(
    [
        ("thread", "<u4"),  # index into THREAD; any if the kind is CALLS_TORN
        ("line", "<u4"),
        ("kind", "<u1"),  # CALLS_BEGIN, GROUP_START, GROUP_END or CALLS_TORN
    ]
)
"""Beginnings and ends of groups by CALL lines: 9 bytes each, and none if the log has no CALL lines."""

CALLS_BEGIN: Final = 0
"""The first CALL line of a process: from here on its groups are known."""
GROUP_START: Final = 1
GROUP_END: Final = 2
CALLS_TORN: Final = 3
"""A line was torn or left out here, which may have been a CALL line of any thread of this source."""
CALL_MARK_KINDS: Final = 4

KERNEL_TEMPLATE: Final = np.dtype(
    [
        ("host", "<u4"),  # string
        ("pid", "<u4"),
        ("device_id", "<i4"),  # CUDA ordinal inside the process
        ("stream_id", "<i8"),  # nsys's stream number; not the log's stream pointer
        ("name", "<u4"),  # string: short name
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
"""All of a kernel record except its times and identifiers; NO_NUMBER if the export lacks a column."""

KERNEL_ROW: Final = np.dtype(
    [
        ("template", "<u4"),
        ("correlation_id", "<i8"),
        ("start_ns", "<i8"),  # UTC ns on the host's own clock
        ("end_ns", "<i8"),
        ("launch_start_ns", "<i8"),  # of the launch API record; NO_TIME_NS if there is none
        ("launch_end_ns", "<i8"),
        ("launch_tid", "<i8"),  # NO_NUMBER if there is no launch record
        ("graph_node_id", "<i8"),  # NO_NUMBER outside CUDA graphs
        ("flags", "<u1"),  # KERNEL_CENSORED
    ]
)
"""One NCCL kernel record of an export. Rows of one export are sorted by (start_ns, correlation_id)."""

KERNEL_CENSORED: Final = 1
"""The kernel's end is the end of the capture: its real end is not known."""

RANGE_TEMPLATE: Final = np.dtype(
    [
        ("host", "<u4"),  # string
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("domain", "<u4"),  # string; "" = the default domain
        ("text", "<u4"),  # string
        ("communicator", "<u8"),  # hash in the payload of NCCL's ranges (2.25 on); 0 if there is none
        ("bytes", "<i8"),  # of the call, in that payload (2.16 on); NO_NUMBER
    ]
)
"""All of an NVTX range except its times."""

RANGE_ROW: Final = np.dtype(
    [
        ("template", "<u4"),
        ("start_ns", "<i8"),  # UTC ns on the host's own clock
        ("end_ns", "<i8"),  # equal to the start for marks; NO_TIME_NS if it never ended
    ]
)
"""One NVTX push/pop or start/end range, or a mark."""

BUSY_ROW: Final = np.dtype(
    [
        ("host", "<u4"),  # string
        ("pid", "<u4"),
        ("device_id", "<i4"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("kernels", "<u4"),  # how many kernels that are not NCCL's were merged into this interval
    ]
)
"""A stretch in which kernels other than NCCL's ran on a device without a gap (their union)."""

INSPECTED_RANK: Final = np.dtype(
    [
        ("host", "<u4"),  # string: gethostname() cut at the first dot, as the log prints it
        ("pid", "<u4"),
        ("comm_hash", "<u8"),  # comm->commHash: what Init lines print as commId
        ("name", "<u4"),  # string: ncclConfig_t.commName (format v4.2 on); "" if none was given
        ("rank", "<i4"),  # communicator rank
        ("nranks", "<i4"),
        ("nnodes", "<i4"),  # NO_NUMBER if not given
    ]
)
"""One rank of a communicator, as the header of NCCL Inspector's records names it."""

INSPECTED_ROW: Final = np.dtype(
    [
        ("inspected_rank", "<u4"),
        ("line", "<u4"),  # from 1
        ("op", "<u1"),  # code in terms.OPERATIONS, or UNKNOWN_OPERATION
        ("timing", "<u1"),  # code in terms.INSPECTOR_TIMINGS, or UNKNOWN_TIMING
        ("algorithm", "<i1"),  # index in terms.ALGORITHMS (v4.2 on); NO_NUMBER
        ("protocol", "<i1"),  # index in terms.PROTOCOLS (v4.2 on); NO_NUMBER
        ("peer", "<i4"),  # of Send and Recv; NO_NUMBER for collectives
        ("sequence", "<u8"),  # coll_sn: per communicator and operation, from 0; p2p_sn: the plug-in's own, from 1
        ("bytes", "<i8"),  # as printed: count x size of one rank; NO_NUMBER if the plug-in does not know the type
        ("duration_ns", "<i8"),  # printed in whole us, rounded down; NO_TIME_NS if it is 0: nothing was measured
        ("dumped_at_ns", "<i8"),  # UTC ns on the host's own clock when it was written: the operation ended before
        ("started_at_ns", "<i8"),  # when NCCL enqueued it, on the same clock (verbose dumps); NO_TIME_NS
        ("busbw", "<f8"),  # as printed, bytes per second; NaN if nothing was measured
        ("start_ns", "<i8"),  # when the plug-in saw the first channel begin, in whole us of the host's own clock
        ("end_ns", "<i8"),  # when it saw the last channel end (both: verbose dumps); NO_TIME_NS
    ]
)
"""One record of NCCL Inspector, of an operation that has completed: 80 bytes."""

EARLIER_LAYOUTS: Final = {"inspected": np.dtype(INSPECTED_ROW.descr[:-2])}
"""Tables as earlier builds sent them, which journals and spools hold: the columns that lack are NO_TIME_NS."""
