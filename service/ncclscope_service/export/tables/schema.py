"""The columns of the parquet files: names, types and order. `docs/outputs.md` explains each; a test compares."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

_TEXT: Final = pa.string()
_NS: Final = pa.int64()
_RATE: Final = pa.float64()

OPERATIONS: Final = pa.schema(
    [
        ("job", _TEXT),
        ("host", _TEXT),
        ("pid", pa.int64()),
        ("tid", pa.int64()),
        ("rank", pa.int32()),
        ("rank_is_inferred", pa.bool_()),
        ("local_rank", pa.int32()),
        ("comm_id", _TEXT),
        ("comm_epoch", pa.int32()),
        ("comm_ptr", _TEXT),
        ("comm_rank", pa.int32()),
        ("comm_size", pa.int32()),
        ("parallelism", _TEXT),
        ("iteration", pa.int32()),
        ("nccl_version", _TEXT),
        ("op", _TEXT),
        ("op_count", pa.uint64()),
        ("seq", pa.int64()),
        ("coll_seq", pa.int64()),
        ("collective_id", _TEXT),
        ("count", pa.uint64()),
        ("dtype", _TEXT),
        ("red_op", _TEXT),
        ("root", pa.int32()),
        ("peer", pa.int32()),
        ("send_buffer", _TEXT),
        ("recv_buffer", _TEXT),
        ("log_stream", _TEXT),
        ("message_bytes", pa.int64()),
        ("logged_bytes", pa.int64()),
        ("wire_bytes", pa.int64()),
        ("algorithm", _TEXT),
        ("protocol", _TEXT),
        ("channels", pa.int32()),
        ("log_file", _TEXT),
        ("kernel_file", _TEXT),
        ("log_line", pa.int64()),
        ("logged_at_ns", _NS),
        ("observed_at_ns", _NS),
        ("launch_id", pa.int64()),
        ("kernel_correlation_id", pa.int64()),
        ("stream_id", pa.int64()),
        ("start_ns", _NS),
        ("end_ns", _NS),
        ("start_true_ns", _NS),
        ("end_true_ns", _NS),
        ("clock_uncertainty_ns", _NS),
        ("match", _TEXT),
        ("confidence", pa.float32()),
        ("timing_source", _TEXT),
        ("timing_confidence", pa.float32()),
        ("duration_ns", _NS),
        ("wait_ns", _NS),
        ("transfer_ns", _NS),
        ("algbw_bytes_per_second", _RATE),
        ("busbw_bytes_per_second", _RATE),
        ("busbw_apparent_bytes_per_second", _RATE),
        ("limit_bytes_per_second", _RATE),
        ("limit_reference", _TEXT),
        ("efficiency_ratio", _RATE),
        ("bottleneck", _TEXT),
        ("ranks_seen", pa.int32()),
        ("last_rank", pa.int32()),
    ]
)
"""`operations.parquet`: one row per logged operation."""

KERNELS: Final = pa.schema(
    [
        ("host", _TEXT),
        ("pid", pa.int64()),
        ("kernel_file", _TEXT),
        ("correlation_id", pa.int64()),
        ("device_id", pa.int32()),
        ("stream_id", pa.int64()),
        ("library", _TEXT),
        ("name", _TEXT),
        ("op", _TEXT),
        ("grid_x", pa.int32()),
        ("block_x", pa.int32()),
        ("static_shared_bytes", pa.int32()),
        ("dynamic_shared_bytes", pa.int32()),
        ("registers", pa.int32()),
        ("launch_start_ns", _NS),
        ("launch_end_ns", _NS),
        ("launch_tid", pa.int64()),
        ("start_ns", _NS),
        ("end_ns", _NS),
        ("start_true_ns", _NS),
        ("end_true_ns", _NS),
        ("censored", pa.bool_()),
        ("launch_id", pa.int64()),
        ("plan", pa.int32()),
        ("replay", pa.int32()),
        ("wait_ns", _NS),
        ("transfer_ns", _NS),
        ("busbw_bytes_per_second", _RATE),
        ("ranks_seen", pa.int32()),
    ]
)
"""`kernels.parquet`: one row per record of a kernel that communicates."""

LIMITS: Final = pa.struct([("topology", _RATE), ("nccl_model", _RATE), ("baseline", _RATE)])
"""Limits by reference, in bytes per second."""

MIX: Final = pa.struct([("op", _TEXT), ("operations", pa.int64()), ("bytes", pa.int64())])
"""One operation of a communicator's mix."""

COMMUNICATORS: Final = pa.schema(
    [
        ("job", _TEXT),
        ("comm_id", _TEXT),
        ("communicator", _TEXT),
        ("group_name", _TEXT),
        ("size", pa.int32()),
        ("parallelism", _TEXT),
        ("parallelism_confidence", pa.float32()),
        ("ranks", pa.list_(pa.int32())),
        ("ranks_are_inferred", pa.bool_()),
        ("hosts", pa.list_(_TEXT)),
        ("parent_comm_id", _TEXT),
        ("split_count", pa.int64()),
        ("color", pa.int64()),
        ("identity", _TEXT),
        ("identity_confidence", pa.float64()),
        ("operations", pa.int64()),
        ("bytes", pa.int64()),
        ("first_ns", _NS),
        ("last_ns", _NS),
        ("limits", LIMITS),
        ("bottleneck", _TEXT),
        ("operation_mix", pa.list_(MIX)),
        ("message_sizes", pa.int64()),
        ("message_bytes_low", pa.int64()),
        ("message_bytes_median", pa.int64()),
        ("message_bytes_high", pa.int64()),
        ("message_bytes_largest", pa.int64()),
        ("operations_per_iteration", pa.float64()),
        ("bytes_per_iteration", pa.float64()),
        ("burstiness", pa.float64()),
        ("period_ns", pa.float64()),
        ("active_ratio", pa.float64()),
        ("bursts_per_iteration", pa.float64()),
        ("burst_ns", pa.float64()),
        ("pause_ns", pa.float64()),
    ]
)
"""`communicators.parquet`: one row per communicator."""

LAST_OPERATIONS: Final = pa.schema(
    [
        ("job", _TEXT),
        ("comm_id", _TEXT),
        ("parallelism", _TEXT),
        ("sender", pa.int32()),
        ("receiver", pa.int32()),
        ("comm_rank", pa.int32()),
        ("rank", pa.int32()),
        ("host", _TEXT),
        ("pid", pa.int64()),
        ("operations", pa.int64()),
        ("behind", pa.int64()),
        ("op", _TEXT),
        ("collective_id", _TEXT),
        ("logged_at_ns", _NS),
        ("finished", pa.int64()),
        ("stopped_at", _TEXT),
        ("waits_for", pa.list_(pa.int32())),
        ("blamed", pa.list_(pa.int32())),
        ("last_words", _TEXT),
    ]
)
"""`last_operations.parquet`: one row per rank of a communicator; of Send and Recv, per ordered pair and side."""

ITERATIONS: Final = pa.schema(
    [
        ("job", _TEXT),
        ("host", _TEXT),
        ("pid", pa.int64()),
        ("rank", pa.int32()),
        ("iteration", pa.int32()),
        ("iteration_by", _TEXT),
        ("iteration_confidence", pa.float64()),
        ("begin_ns", _NS),
        ("duration_ns", _NS),
        ("operations", pa.int64()),
        ("bytes", pa.int64()),
        ("matched", pa.int64()),
        ("communication_ns", _NS),
        ("outside_ns", _NS),
        ("exposed_ns", _NS),
        ("communication_ratio", pa.float64()),
        ("exposed_ratio", pa.float64()),
    ]
)
"""`iterations.parquet`: one row per rank and iteration."""

STEP_BUDGET: Final = pa.schema(
    [
        ("job", _TEXT),
        ("host", _TEXT),
        ("pid", pa.int64()),
        ("rank", pa.int32()),
        ("iteration", pa.int32()),
        ("begin_ns", _NS),
        ("duration_ns", _NS),
        ("part", _TEXT),
        ("parallelism", _TEXT),
        ("part_ns", _NS),
    ]
)
"""`step_budget.parquet`: one row per part of a step of a rank."""

EXPECTED_TIMES: Final = pa.schema(
    [
        ("job", _TEXT),
        ("comm_id", _TEXT),
        ("parallelism", _TEXT),
        ("op", _TEXT),
        ("message_bytes", pa.int64()),
        ("transfers", pa.int64()),
        ("transfer_low_ns", pa.float64()),
        ("transfer_ns", pa.float64()),
        ("transfer_high_ns", pa.float64()),
        ("expected_low_ns", pa.float64()),
        ("expected_ns", pa.float64()),
        ("expected_high_ns", pa.float64()),
        ("basis", _TEXT),
        ("source", _TEXT),
        ("samples", pa.int64()),
        ("distance_ratio", pa.float64()),
        ("over_expected_ratio", pa.float64()),
        ("latency_ratio", pa.float64()),
    ]
)
"""`expected_times.parquet`: one row per communicator, operation and size whose transfer was measured."""

EXPECTED: Final = pa.schema(
    [
        ("job", _TEXT),
        ("comm_id", _TEXT),
        ("parallelism", _TEXT),
        ("comm_size", pa.int32()),
        ("rank", pa.int32()),
        ("iteration", pa.int32()),
        ("op", _TEXT),
        ("dtype", _TEXT),
        ("count", pa.int64()),
        ("expected", pa.int64()),
        ("observed", pa.int64()),
        ("logged_bytes", pa.int64()),
        ("message_bytes", pa.int64()),
        ("wire_bytes", pa.int64()),
        ("reason", _TEXT),
        ("rules", _TEXT),
        ("is_control", pa.bool_()),
    ]
)
"""`expected.parquet`: one row per rank, iteration, communicator and line, of jobs whose description is known."""

EFFICIENCY: Final = pa.schema(
    [
        ("job", _TEXT),
        ("collective_id", _TEXT),
        ("comm_id", _TEXT),
        ("op", _TEXT),
        ("reference", _TEXT),
        ("limit_bytes_per_second", _RATE),
        ("efficiency_ratio", _RATE),
    ]
)
"""`efficiency.parquet`: one row per measured collective and reference."""

TRAFFIC: Final = pa.schema(
    [
        ("job", _TEXT),
        ("from_rank", pa.int32()),
        ("to_rank", pa.int32()),
        ("from_host", _TEXT),
        ("to_host", _TEXT),
        ("through", _TEXT),
        ("op", _TEXT),
        ("parallelism", _TEXT),
        ("bytes", pa.int64()),
        ("assumed_bytes", pa.int64()),
        ("assumed_order_bytes", pa.int64()),
    ]
)
"""`traffic.parquet`: one row per sender, receiver, operation and parallelism."""
