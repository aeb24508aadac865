"""Numbered lines of live logs, what is left of them on disk, and file systems that can punch holes."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from agent.log_samples import operation_line

from ncclscope_agent.files.logs import LogFollower
from ncclscope_agent.files.release import ReleaseLimits, punch_hole
from ncclscope_wire.batch import Batch

SMALL = ReleaseLimits(keep_bytes=64 << 10, step_bytes=128 << 10, piece_bytes=96 << 10)
"""Below the defaults, so that files of some MB do for a test."""
SECOND = 1_000_000_000


def numbered(number: int) -> str:
    return operation_line(op_count=f"{number:x}")


def lines(first: int, count: int) -> bytes:
    return "".join(numbered(number) + "\n" for number in range(first, first + count)).encode()


def op_counts(batches: Sequence[Batch]) -> list[int]:
    return [int(value) for batch in batches for value in batch.operations["op_count"]]


def applied(batches: Sequence[Batch]) -> dict[str, int]:
    return {batch.source.key: batch.end for batch in batches}


def gaps(batches: Sequence[Batch]) -> list[tuple[str, int]]:
    return [(gap.reason, gap.amount) for batch in batches for gap in batch.gaps]


def disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def read_all(follower: LogFollower) -> list[Batch]:
    batches = follower.poll(SECOND)
    while follower.has_more:
        batches += follower.poll(SECOND)
    return batches


def punch_or_skip(path: Path, begin: int, end: int) -> None:
    """Punches a hole; where this file system cannot, checks that it says so, and skips."""
    refused: OSError | None = None
    handle = os.open(path, os.O_WRONLY)
    try:
        punch_hole(handle, begin, end)
    except OSError as error:
        refused = error
    finally:
        os.close(handle)
    if refused is not None:
        assert refused.errno in (errno.EOPNOTSUPP, errno.ENOSYS)
        pytest.skip(f"the file system of {path} cannot punch holes: {refused}; its refusal was checked")
