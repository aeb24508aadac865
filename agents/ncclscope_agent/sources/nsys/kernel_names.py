"""Names of kernels: which are NCCL's, which communicate without it, and which compute."""

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
    OUTSIDE = "communication_outside_nccl"
    """Moves data between GPUs without NCCL: DeepEP, NVSHMEM, custom all-reduces. Communication, of no known size."""
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

UNKNOWN_LIBRARY: Final = "other NCCL"
"""Of kernels that are called after NCCL and are none of the names above: a newer NCCL's, or a fork's."""

_LIBRARIES: Final[tuple[tuple[str, re.Pattern[str]], ...]] = tuple(
    (library, re.compile(pattern, re.ASCII))
    for library, pattern in (
        # csrc/kernels/{intranode,internode,internode_ll}.cu; `layout` only counts what this rank will send.
        # The branch hybrid-ep: csrc/hybrid_ep/backend/hybrid_ep_backend.cuh.
        ("DeepEP", r"(?:.*::)?deep_ep::(?!layout::)|(?:.*::)?hybrid_ep::\w*(?:dispatch|combine|sync)\w*$"),
        # NCCL contrib/nccl_ep/device: namespace nccl_ep, and entries of its compiler at run time; scan only counts.
        ("NCCL-EP", r"nccl_ep::.*(?:dispatch|combine|barrier)|(?:.*::)?nccl_ep_jit_\w*(?:dispatch|combine)"),
        # src/host/stream, src/host/coll and src/host/proxy: behind nvshmem*_on_stream, and of the library itself.
        ("NVSHMEM", r"(?:.*::)?nvshmem"),
        # src/core/include/execution_kernel.hpp and src/ext/collectives; MSCCL's interpreter in RCCL and its own NCCL.
        ("MSCCL++", r"(?:.*::)?msccl"),
        # vLLM csrc/custom_all_reduce.cuh; the same kernels in SGLang and AITER.
        ("custom all-reduce", r"(?:.*::)?cross_device_reduce_[12]stage"),
        # TensorRT-LLM cpp/tensorrt_llm/kernels/customAllReduceKernels.cu and
        # communicationKernels/allReduceFusionKernels.cu; the latter in FlashInfer too.
        (
            "TensorRT-LLM",
            r"(?:.*::)?(?:(?:one|two)ShotAllReduceKernel|lamport_style_one_shot_all_reduce_norm_kernel"
            r"|\w*allreduce_fusion_kernel_(?:oneshot_lamport|twoshot_sync))",
        ),
        # torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu
        (
            "symmetric memory",
            r"(?:.*::)?(?:(?:multimem_)?(?:one|two)_shot_(?:all_)?reduce_kernel|multimem_all_(?:reduce|gather)_kernel)",
        ),
        (UNKNOWN_LIBRARY, r"nccl(?!_ep)"),
    )
)
"""Libraries that communicate without NCCL, by the qualified names of their kernels. *Source:* the files named, in the
projects' public repositories. `dispatch` alone may be anybody's kernel: where a namespace decides, a short name says
nothing."""

NAME_PATTERNS: Final = (
    "%nccl%",
    "%msccl%",
    "%nvshmem%",
    "%oneRankReduce%",
    "%deep_ep::%",
    "%hybrid_ep::%",
    "%cross_device_reduce_%",
    "%ShotAllReduceKernel%",
    "%_shot_%reduce_%kernel%",
    "%allreduce_fusion_kernel_%",
    "%multimem_all_%_kernel%",
)
"""SQL LIKE patterns one of which every name that is not COMPUTATION fulfils; they may let others through."""


def kernel_kind(name: str) -> KernelKind:
    """Kind of the kernel with this short or demangled name."""
    if _NCCL.match(base_name(name)):
        return KernelKind.NCCL
    return KernelKind.COMPUTATION if outside_library(name) is None else KernelKind.OUTSIDE


def outside_library(name: str) -> str | None:
    """The library of a kernel that communicates without NCCL, such as "DeepEP"; None for all others."""
    qualified = _qualified_name(name)
    return next((library for library, pattern in _LIBRARIES if pattern.match(qualified)), None)


def kernel_label(name: str) -> str:
    """As a kernel travels: its base name, with the library and a slash before it if it is none of NCCL's."""
    kind, base = kernel_kind(name), base_name(name)
    return f"{outside_library(name)}/{base}" if kind is KernelKind.OUTSIDE else base


def base_name(name: str) -> str:
    """The name without return type, namespace, template arguments and parameters, as nsys's shortName has it."""
    return _qualified_name(name).rsplit("::", 1)[-1]


def _qualified_name(name: str) -> str:
    """The name with its namespaces, without return type, template arguments and parameters."""
    return re.split(r"(?<=\w)[(<]", name, maxsplit=1)[0].split(" ")[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNames:
    """Strings that name kernels that communicate."""

    column: str
    """Column of the kernel table that points at short names, or at demangled ones if there are no others."""
    long_column: str | None
    """The one that points at demangled names, if there are two."""
    nccl: Mapping[int, str]
    """String id to label, for NCCL's kernels."""
    outside: Mapping[int, str]
    """Likewise, for kernels that communicate without NCCL. Short and demangled names may be among them."""


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
        kinds[kernel_kind(name)][int(number)] = kernel_label(name)
    return KernelNames(
        column=column,
        long_column=queries.long_name_column(opened.layout, column),
        nccl=kinds[KernelKind.NCCL],
        outside=kinds[KernelKind.OUTSIDE],
    )
