"""A trace of the PyTorch profiler: one rank, two calls, events of every kind that is read."""

from __future__ import annotations

import json
from typing import Any

BASE_NS = 1_700_000_000_000_000_000


def note(number: int, at_us: float, **arguments: object) -> dict[str, Any]:
    told = {
        "External id": number,
        "Collective name": "allreduce",
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "Group size": 2,
        "dtype": "BFloat16",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1]",
        **arguments,
    }
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": "record_param_comms",
        "pid": 42,
        "tid": 43,
        "ts": at_us,
        "dur": 9.5,
        "args": told,
    }


def launch(correlation: int, at_us: float) -> dict[str, Any]:
    arguments = {"External id": 1, "correlation": correlation}
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernelExC",
        "pid": 42,
        "tid": 43,
        "ts": at_us,
        "dur": 3,
        "args": arguments,
    }


def kernel(
    number: int, correlation: int, at_us: float, name: str = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(int)"
) -> dict[str, Any]:
    arguments = {
        "External id": number,
        "device": 0,
        "stream": 20,
        "correlation": correlation,
        "grid": [8, 1, 1],
        "block": [544, 1, 1],
        "registers per thread": 96,
        "shared memory": 87568,
    }
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": 20,
        "ts": at_us,
        "dur": 20.125,
        "args": arguments,
    }


EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 42, "tid": 0, "args": {"name": "python"}},
    note(1, 10.5),
    launch(77, 14.25),
    kernel(1, 77, 30.001),
    note(2, 60, **{"Collective name": "_allgather_base", "Out msg nelems": 2000}),
    launch(78, 61),
    kernel(2, 78, 70),
    kernel(0, 99, 20, "void at::native::vectorized_elementwise_kernel<4>(int)"),
    kernel(0, 100, 35, "nvshmem_put"),
    {
        "ph": "X",
        "cat": "user_annotation",
        "name": "ProfilerStep#7",
        "pid": 42,
        "tid": 42,
        "ts": 5,
        "dur": 90,
        "args": {},
    },
    {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 1, "dur": 120},
]


def trace(events: list[Any] = EVENTS, **members: object) -> bytes:
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}]
    head = {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": {"rank": 1, "world_size": 2, "pg_config": groups, "nccl_version": "2.27.5"},
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": events,
        "traceName": "t.json",
        **members,
    }
    return json.dumps(head, indent=2).encode()
