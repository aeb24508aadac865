"""Names of kernels: which kernels of an export are NCCL's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ncclscope_agent.sources.nsys import queries, schema
from ncclscope_agent.sources.nsys.open_export import OpenExport


class KernelKind(Enum):
    """Library that a kernel belongs to."""

    NCCL = "kernel"
    """Runs operations that NCCL (or RCCL) logs."""
    OTHER_COMMUNICATION = "other_communication_kernel"
    """Moves data, but is none of NCCL's: MSCCL, NVSHMEM, or a newer NCCL's name. Neither measured nor computation."""
    COMPUTATION = "other_kernel"
    """Any other kernel: computation."""


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
    """Kind of the kernel with this short or demangled name."""
    base = base_name(name)
    if _NCCL.match(base):
        return KernelKind.NCCL
    return KernelKind.OTHER_COMMUNICATION if _COMMUNICATION.match(base) else KernelKind.COMPUTATION


def base_name(name: str) -> str:
    """The name without return type, namespace, template arguments and parameters, as nsys's shortName has it."""
    without_parameters = re.split(r"(?<=\w)[(<]", name, maxsplit=1)[0]
    return re.split(r"::|\s", without_parameters)[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNames:
    """Strings that name kernels that communicate."""

    column: str
    """Column of the kernel table that points at them."""
    nccl: Mapping[int, str]
    """String id to name, for NCCL's kernels."""
    foreign: Mapping[int, str]
    """Likewise, for kernels that communicate and are not NCCL's."""

    @property
    def communication(self) -> list[int]:
        """String ids of all kernels that communicate, NCCL's and others."""
        return [*self.nccl, *self.foreign]


def communication_kernels(opened: OpenExport) -> KernelNames | None:
    """The names of kernels that communicate; None if kernels cannot be read.

    Only strings that may be such names are read: the table also holds environments and command lines.
    """
    column = queries.kernel_name_column(opened.layout)
    if column is None:
        return None
    where = " OR ".join(["value LIKE ?"] * len(NAME_PATTERNS))
    query = f"SELECT id, substr(value, 1, {queries.LONGEST_TEXT}) FROM main.{schema.STRINGS} WHERE {where}"
    kinds: dict[KernelKind, dict[int, str]] = {kind: {} for kind in KernelKind}
    for number, name in opened.connection.execute(query, NAME_PATTERNS):
        kinds[kernel_kind(name)][int(number)] = name
    return KernelNames(column=column, nccl=kinds[KernelKind.NCCL], foreign=kinds[KernelKind.OTHER_COMMUNICATION])
