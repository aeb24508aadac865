"""The name of the kernel that NCCL launches for an operation, by version.

Source: NCCL src/device/generate.py best_kernel (2.19 on), src/enqueue.cc ncclKerns (2.8 to 2.18): the redop is
always shown as Sum and the protocol as LL; Send, Recv and AlltoAll share one kernel.
"""

from __future__ import annotations

from ncclscope_simulator.data_types import DataType
from ncclscope_simulator.version import Traits

_TYPELESS = frozenset({"AllGather", "Broadcast"})
_POINT_TO_POINT = frozenset({"Send", "Recv", "AlltoAll", "Gather", "Scatter"})


def kernel_name(version: Traits, op: str, dtype: DataType, algorithm: str, protocol: str) -> str:
    """The kernel's base name, as nsys's `shortName` shows it.

    2.13.4 is the exception: all but LL runs under the SendRecv entry point (src/enqueue.cc of that tag).
    """
    if op in _POINT_TO_POINT or (version.version[:2] == (2, 13) and protocol != "LL"):
        return _send_recv(version)
    if version.kernel_names == "ncclKernel":
        return f"ncclKernel_{op}_{algorithm}_LL_Sum_{'int8_t' if op in _TYPELESS else dtype.c_name}"
    if op in _TYPELESS:
        return f"ncclDevKernel_{op}_RING_LL"
    return f"ncclDevKernel_{op}_Sum_{dtype.short_name}_{'TREE' if algorithm == 'TREE' else 'RING'}_LL"


def all_gather_v() -> str:
    """The kernel of Broadcasts of one group with several roots, from 2.29 on. Source: src/device/generate.py."""
    return "ncclDevKernel_AllGatherV_RING_LL"


def _send_recv(version: Traits) -> str:
    older = version.kernel_names == "ncclKernel"
    return "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t" if older else "ncclDevKernel_SendRecv"


def demangled_name(version: Traits, short_name: str) -> str:
    """The name with its argument list, as nsys's `demangledName` shows it (before 2.19 by the headers alone)."""
    minor = version.version[1]
    if minor >= 22:
        return f"{short_name}(ncclDevKernelArgsStorage<(unsigned long)4096>)"
    return f"{short_name}(ncclWorkElem)" if minor < 12 else f"{short_name}(ncclDevComm *, unsigned long, ncclWork *)"
