"""ncclscope's own aligner behind the interface of the benchmark."""

from __future__ import annotations

from benchmarks.alignment.case import pairs_of

from ncclscope_service.align import ProcessAligner
from ncclscope_service.align_rows import blank_kernels, blank_operations
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_OPERATION_FIELDS = {
    "id": "id",
    "tid": "thread",
    "stream": "stream",
    "member": "communicator",
    "nranks": "ranks",
    "device": "device",
    "op": "operation",
    "data_type": "data_type",
    "count": "count",
    "root": "peer",
    "op_count": "op_count",
    "logged_at_ns": "logged_at_ns",
    "group": "group",
}
_KERNEL_FIELDS = {
    "id": "id",
    "stream_id": "stream",
    "device_id": "device",
    "correlation_id": "correlation",
    "launch_start_ns": "launched_at_ns",
    "start_ns": "start_ns",
    "end_ns": "end_ns",
    "launch_tid": "thread",
    "kernel_class": "kind",
    "data_type": "data_type",
}


def align(nccl_version: str, operations: Columns, kernels: Columns) -> Columns:
    """One process, all at once; the confidence is the aligner's own."""
    aligner = ProcessAligner(nccl_version)
    aligner.feed_operations(as_operations(operations))
    aligner.feed_kernels(as_kernels(kernels))
    matches = aligner.advance(final=True)
    matches = matches[matches["kernel"] != NO_NUMBER]
    return pairs_of(matches["operation"], matches["kernel"], matches["confidence"])


def as_operations(operations: Columns) -> Columns:
    """The rows as the aligner takes them."""
    rows = blank_operations(len(operations))
    for own, name in _OPERATION_FIELDS.items():
        rows[own] = operations[name]
    rows["one_rank"] = operations["ranks"] == 1
    return rows


def as_kernels(kernels: Columns) -> Columns:
    """The rows as the aligner takes them."""
    rows = blank_kernels(len(kernels))
    for own, name in _KERNEL_FIELDS.items():
        rows[own] = kernels[name]
    return rows
