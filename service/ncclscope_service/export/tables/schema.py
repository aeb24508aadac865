"""The columns of the parquet files: names, types and order. `docs/outputs.md` explains each; a test compares."""

# pyright: reportUnknownParameterType=false
# (pyarrow carries no types)
from __future__ import annotations

from typing import Final

import pyarrow as pa

_TEXT: Final = pa.string()
_BOOL: Final = pa.bool_()
_INT32: Final = pa.int32()
_INT64: Final = pa.int64()
_FLOAT32: Final = pa.float32()
_FLOAT64: Final = pa.float64()


def _schema(*columns: tuple[pa.DataType, str]) -> pa.Schema:
    """Columns in order: neighbours of one type by that type and their names."""
    return pa.schema([(name, kind) for kind, names in columns for name in names.split()])


OPERATIONS: Final = _schema(
    (_TEXT, "job host"),
    (_INT64, "pid tid"),
    (_INT32, "rank"),
    (_BOOL, "rank_is_inferred"),
    (_INT32, "local_rank"),
    (_TEXT, "comm_id"),
    (_INT32, "comm_epoch"),
    (_TEXT, "comm_ptr"),
    (_INT32, "comm_rank comm_size"),
    (_TEXT, "parallelism"),
    (_INT32, "iteration"),
    (_TEXT, "nccl_version op"),
    (pa.uint64(), "op_count"),
    (_INT64, "seq coll_seq"),
    (_TEXT, "collective_id"),
    (pa.uint64(), "count"),
    (_TEXT, "dtype red_op"),
    (_INT32, "root peer"),
    (_TEXT, "send_buffer recv_buffer log_stream"),
    (_INT64, "message_bytes logged_bytes wire_bytes"),
    (_TEXT, "algorithm protocol"),
    (_INT32, "channels"),
    (_TEXT, "log_file kernel_file"),
    (_INT64, "log_line logged_at_ns observed_at_ns launch_id kernel_correlation_id stream_id start_ns end_ns"),
    (_INT64, "start_true_ns end_true_ns clock_uncertainty_ns"),
    (_TEXT, "match"),
    (_FLOAT32, "confidence"),
    (_TEXT, "timing_source"),
    (_FLOAT32, "timing_confidence"),
    (_INT64, "duration_ns wait_ns transfer_ns"),
    (_FLOAT64, "algbw_bytes_per_second busbw_bytes_per_second busbw_apparent_bytes_per_second"),
    (_FLOAT64, "limit_bytes_per_second"),
    (_TEXT, "limit_reference"),
    (_FLOAT64, "efficiency_ratio"),
    (_TEXT, "bottleneck"),
    (_INT32, "ranks_seen last_rank"),
)
"""`operations.parquet`: one row per logged operation."""

KERNELS: Final = _schema(
    (_TEXT, "host"),
    (_INT64, "pid"),
    (_TEXT, "kernel_file"),
    (_INT64, "correlation_id"),
    (_INT32, "device_id"),
    (_INT64, "stream_id"),
    (_TEXT, "library name op"),
    (_INT32, "grid_x block_x static_shared_bytes dynamic_shared_bytes registers"),
    (_INT64, "launch_start_ns launch_end_ns launch_tid start_ns end_ns start_true_ns end_true_ns"),
    (_BOOL, "censored"),
    (_INT64, "launch_id"),
    (_INT32, "plan replay"),
    (_INT64, "wait_ns transfer_ns"),
    (_FLOAT64, "busbw_bytes_per_second"),
    (_INT32, "ranks_seen"),
)
"""`kernels.parquet`: one row per record of a kernel that communicates."""

LIMITS: Final = pa.struct([(name, _FLOAT64) for name in ("topology", "nccl_model", "baseline")])
"""Limits by reference, in bytes per second."""

MIX: Final = pa.struct([("op", _TEXT), ("operations", _INT64), ("bytes", _INT64)])
"""One operation of a communicator's mix."""

COMMUNICATORS: Final = _schema(
    (_TEXT, "job comm_id communicator group_name"),
    (_INT32, "size"),
    (_TEXT, "parallelism"),
    (_FLOAT32, "parallelism_confidence"),
    (pa.list_(_INT32), "ranks"),
    (_BOOL, "ranks_are_inferred"),
    (pa.list_(_TEXT), "hosts"),
    (_TEXT, "parent_comm_id"),
    (_INT64, "split_count color"),
    (_TEXT, "identity"),
    (_FLOAT64, "identity_confidence"),
    (_INT64, "operations bytes first_ns last_ns"),
    (LIMITS, "limits"),
    (_TEXT, "bottleneck"),
    (pa.list_(MIX), "operation_mix"),
    (_INT64, "message_sizes message_bytes_low message_bytes_median message_bytes_high message_bytes_largest"),
    (_FLOAT64, "operations_per_iteration bytes_per_iteration burstiness period_ns active_ratio"),
    (_FLOAT64, "bursts_per_iteration burst_ns pause_ns"),
)
"""`communicators.parquet`: one row per communicator."""

LAST_OPERATIONS: Final = _schema(
    (_TEXT, "job comm_id parallelism"),
    (_INT32, "sender receiver comm_rank rank"),
    (_TEXT, "host"),
    (_INT64, "pid operations behind"),
    (_TEXT, "op collective_id"),
    (_INT64, "logged_at_ns finished"),
    (_TEXT, "stopped_at"),
    (pa.list_(_INT32), "waits_for blamed"),
    (_TEXT, "last_words"),
)
"""`last_operations.parquet`: one row per rank of a communicator; of Send and Recv, per ordered pair and side."""

ITERATIONS: Final = _schema(
    (_TEXT, "job host"),
    (_INT64, "pid"),
    (_INT32, "rank iteration"),
    (_TEXT, "iteration_by"),
    (_FLOAT64, "iteration_confidence"),
    (_INT64, "begin_ns duration_ns operations bytes matched communication_ns outside_ns exposed_ns"),
    (_FLOAT64, "communication_ratio exposed_ratio"),
)
"""`iterations.parquet`: one row per rank and iteration."""

STEP_BUDGET: Final = _schema(
    (_TEXT, "job host"),
    (_INT64, "pid"),
    (_INT32, "rank iteration"),
    (_INT64, "begin_ns duration_ns"),
    (_TEXT, "part parallelism"),
    (_INT64, "part_ns"),
)
"""`step_budget.parquet`: one row per part of a step of a rank."""

EXPECTED_TIMES: Final = _schema(
    (_TEXT, "job comm_id parallelism op"),
    (_INT64, "message_bytes transfers"),
    (_FLOAT64, "transfer_low_ns transfer_ns transfer_high_ns expected_low_ns expected_ns expected_high_ns"),
    (_TEXT, "basis source"),
    (_INT64, "samples"),
    (_FLOAT64, "distance_ratio over_expected_ratio latency_ratio"),
)
"""`expected_times.parquet`: one row per communicator, operation and size whose transfer was measured."""

EXPECTED: Final = _schema(
    (_TEXT, "job comm_id parallelism"),
    (_INT32, "comm_size rank iteration"),
    (_TEXT, "op dtype"),
    (_INT64, "count expected observed logged_bytes message_bytes wire_bytes"),
    (_TEXT, "reason rules"),
    (_BOOL, "is_control"),
)
"""`expected.parquet`: one row per rank, iteration, communicator and line, of jobs whose description is known."""

EFFICIENCY: Final = _schema(
    (_TEXT, "job collective_id comm_id op reference"),
    (_FLOAT64, "limit_bytes_per_second efficiency_ratio"),
)
"""`efficiency.parquet`: one row per measured collective and reference."""

TRAFFIC: Final = _schema(
    (_TEXT, "job"),
    (_INT32, "from_rank to_rank"),
    (_TEXT, "from_host to_host through op parallelism"),
    (_INT64, "bytes assumed_bytes assumed_order_bytes"),
)
"""`traffic.parquet`: one row per sender, receiver, operation and parallelism."""
