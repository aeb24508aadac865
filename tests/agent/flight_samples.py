"""Dumps of PyTorch's Flight Recorder, in the shape of FlightRecorder.hpp, as PyTorch and Python pickle them.

The only entry in public is that of PyTorch's tutorial (pytorch/tutorials, flight_recorder_tutorial); keys and order
follow it.
"""

from __future__ import annotations

import struct


def entry(sequence: int, state: str = "completed", **more: object) -> dict[str, object]:
    """One entry; a collective of the default group."""
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/opt/torch/distributed/distributed_c10d.py", "line": 2806},
            {"name": "train_step", "filename": "train.py", "line": 100 + sequence},
            {"name": "main", "filename": "train.py", "line": 7},
        ],
        "record_id": sequence,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_724_779_239_936_775_119 + sequence,
        "input_sizes": [[3, 4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[3, 4]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
        **more,
    }


def dump(*entries: dict[str, object], ranks: str = "[0, 1, 2, 3]") -> dict[str, object]:
    """A dump with these entries."""
    status = {"last_enqueued_collective": len(entries), "last_completed_collective": len(entries) - 1}
    return {
        "version": "2.10",
        "nccl_comm_state": {},
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {"0": status},
        "entries": list(entries),
    }


def as_pytorch_pickles(value: object) -> bytes:
    """As torch's jit pickler writes it: protocol 2, integers of eight bytes, every text remembered.

    *Source:* PyTorch `torch/csrc/jit/serialization/pickler.cpp`.
    """
    memo: dict[str, int] = {}
    return b"\x80\x02" + _pickled(value, memo) + b"."


def _pickled(value: object, memo: dict[str, int]) -> bytes:  # noqa: PLR0911 - one for each type
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return b"K" + bytes([value]) if 0 <= value < 256 else b"\x8a\x08" + struct.pack("<q", value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        if value in memo:
            return b"h" + bytes([memo[value]])
        text = b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        if len(memo) < 256:
            memo[value] = len(memo)
            text += b"q" + bytes([memo[value]])
        return text
    if isinstance(value, tuple):
        return b"(" + b"".join(_pickled(each, memo) for each in value) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(_pickled(each, memo) for each in value) + b"e"
    assert isinstance(value, dict), "a dump holds nothing else"
    members = b"".join(_pickled(key, memo) + _pickled(of, memo) for key, of in value.items())
    return b"}(" + members + b"u"
