"""How many kernels NCCL needs for a group, and what each of them runs.

A kernel's plan may fill half of the work FIFO: NCCL_WORK_FIFO_DEPTH works (2.13 to 2.21), NCCL_WORK_FIFO_BYTES from
2.22 on, and what describes its batches must fit into the kernel's arguments. Up to 2.12 a group is one kernel.
Collectives are sorted by size, the largest first, and cut where a plan is full. Broadcasts of one group with several
roots become AllGatherV from 2.29 on, one of each root in a plan.

Source: NCCL src/enqueue.cc (ncclLaunchPrepare, testBudget, scheduleCollTasksToPlan), src/include/device.h (sizes, as
counted there), src/scheduler/allgatherv_sched.cc. Simplified: all operations of a group use as many channels as its
largest; NCCL spreads them over the channels by their traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ncclscope_simulator.version import Traits

_FIFO_WORKS = 65_536
_FIFO_BYTES = 1 << 20
_ELEMENTS_OF_WORK = {"collective": 9, "exchange": 16}
"""Of one channel: NCCL_MAX_WORK_ELEMENTS, NCCL_MAX_WORK_ELEMENTS_P2P."""
_BYTES_OF_WORK = {"collective": 96, "exchange": 64}
"""ncclDevWorkColl, ncclDevWorkP2p."""
_BATCHES = 254
"""ncclDevWorkBatch that fit into the arguments."""
_WORKS_OF_BATCH = {"collective": 10, "exchange": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One of several kernels of a launch."""

    kernel: str
    grid: int
    share: float
    """Of the time that the launch takes once all ranks are there."""


def capacity(traits: Traits, work_fifo: int | None, channels: int, kind: str) -> int | None:
    """Operations (`collective`, or `exchange`: a Send, a Recv or both with one peer) that one plan takes at most.

    None: as many as there are. `work_fifo`: NCCL's variable; None: its default.
    """
    minor = traits.version[1]
    if minor < 13:
        return None
    if minor < 22:
        works = (work_fifo or _FIFO_WORKS) // 2
        return max(1, works // channels * _ELEMENTS_OF_WORK[kind])
    by_bytes = (work_fifo or _FIFO_BYTES) // 2 // _BYTES_OF_WORK[kind]
    return max(1, min(by_bytes, _BATCHES * _WORKS_OF_BATCH[kind] - channels))


def cut(sizes: Sequence[int], most: int | None) -> list[int]:
    """Bytes that each plan of operations of these sizes moves, in order of launching."""
    ordered = sorted(sizes, reverse=True)
    step = len(ordered) if most is None else most
    return [sum(ordered[begin : begin + step]) for begin in range(0, len(ordered), max(1, step))]


def plans_of(moved: Sequence[int], kernel: str, grid: int) -> tuple[Plan, ...]:
    """The plans that move these numbers of bytes; none if there is only one."""
    total = sum(moved) or 1
    return tuple(Plan(kernel=kernel, grid=grid, share=each / total) for each in moved) if len(moved) > 1 else ()
