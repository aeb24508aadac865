"""Kernel names: which kernels of an export are NCCL's."""

from __future__ import annotations

import re
from enum import Enum
from typing import Final


class KernelKind(Enum):
    """Whose kernel it is."""

    NCCL = "kernel"
    """Runs operations that NCCL (or RCCL) logs."""
    OTHER_COMMUNICATION = "other_communication_kernel"
    """Moves data, but is none of NCCL's: MSCCL, NVSHMEM, or a newer NCCL's name. Neither measured nor computation."""
    COMPUTATION = "other_kernel"
    """Everything else."""


_NCCL: Final = re.compile(
    r"""
      nccl[A-Za-z0-9]*Kernel[A-Za-z]*_\w+   # see below
    | oneRankReduce(?!\w)                   # 2.19 on: a reduction by a single rank
    """,
    re.VERBOSE | re.ASCII,
)
"""Names from the first NCCL 2 to 2.30 and RCCL:

    ncclAllReduceRingLLKernel_sum_f32              up to 2.7
    ncclKernel_AllReduce_RING_LL_Sum_float         2.8 to 2.18
    ncclDevKernel_AllReduce_Sum_f32_RING_LL        2.19 on
    ncclDevKernel_Generic, ncclDevKernel_Generic_4 builds with ONLY_FUNCS; RCCL (ncclDevKernelDebug_Generic too)
    ncclSymDevKernel_AllReduce_AGxLL_R_sum_f32     2.27
    ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f32    2.28 on

*Source:* NCCL `src/device/generate.py`, `src/device/symmetric/generate.py`, `src/device/onerank.cu`;
before 2.19 `src/collectives/device/common.h`.
"""

_COMMUNICATION: Final = re.compile(r"nccl|msccl|nvshmem", re.IGNORECASE)

NAME_PATTERNS: Final = ("nccl%", "msccl%", "nvshmem%", "oneRankReduce%", "%::oneRankReduce%")
"""SQL LIKE patterns that every name which is not COMPUTATION fulfils; they may let others through."""


def kernel_kind(name: str) -> KernelKind:
    """Whose kernel has this short or demangled name."""
    base = base_name(name)
    if _NCCL.match(base):
        return KernelKind.NCCL
    return KernelKind.OTHER_COMMUNICATION if _COMMUNICATION.match(base) else KernelKind.COMPUTATION


def base_name(name: str) -> str:
    """The name without return type, namespace, template arguments and parameters, as nsys's shortName has it."""
    without_parameters = re.split(r"(?<=\w)[(<]", name, maxsplit=1)[0]
    return re.split(r"::|\s", without_parameters)[-1]
