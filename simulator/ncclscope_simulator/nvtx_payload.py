"""The payload that NCCL attaches to its NVTX ranges, as nsys exports it in NVTX_EVENTS.binaryData.

32 bytes of nsys in front (domain, schema, payload size, offset; 64 bits each), then NCCL's struct.
Source: NCCL src/include/nvtx_payload_schemas.h (from 2.25 on with the communicator's hash in front), src/init_nvtx.cc
and src/collectives.cc before; Nsight Systems user guide, "NVTX payload".
"""

from __future__ import annotations

import struct
from typing import Final

from ncclscope_simulator.cluster import stable_hash
from ncclscope_simulator.groups import Endpoint, Group
from ncclscope_simulator.operations import Operation
from ncclscope_simulator.version import Version

_STATIC_SCHEMA: Final = 1 << 24
_SCHEMAS: Final = {
    "AllGather": 4,
    "AllReduce": 5,
    "Broadcast": 6,
    "ReduceScatter": 7,
    "Reduce": 8,
    "Send": 9,
    "Recv": 10,
    "AlltoAll": 16,
}
_MEMBER_SCHEMAS: Final = {"ncclCommInitRankConfig": 11, "ncclCommSplit": 13, "ncclCommDestroy": 2}
_SINCE: Final[Version] = (2, 16, 2)
WITH_HASH: Final[Version] = (2, 25, 1)
"""From here on payloads name the communicator."""


def nccl_domain(pid: int) -> int:
    """NVTX numbers domains per process in the order of creation: NCCL's is not always the first."""
    return 1 + pid // 2 % 2


def communicator_hash(seed: int, group: Group) -> int:
    """The "NCCL communicator ID" of NVTX: the printed commId; splits have one that is printed nowhere."""
    return group.comm_hash if group.comm_hash is not None else stable_hash(seed, "commHash", group.comm_id)


def payload(operation: Operation, group: Group, *, version: Version, seed: int, domain: int) -> bytes | None:
    """The blob of one call; None before 2.16.2."""
    if version < _SINCE:
        return None
    content = struct.pack("<Q", _call_bytes(operation, group))
    if operation.op in {"AllReduce", "ReduceScatter"}:
        content += struct.pack("<ii", operation.red, 0)
    elif operation.op in {"Broadcast", "Send", "Recv"}:
        content += struct.pack("<ii", operation.root, 0)
    elif operation.op == "Reduce":
        content += struct.pack("<ii", operation.root, operation.red)
    if version >= WITH_HASH:
        content = struct.pack("<Q", communicator_hash(seed, group)) + content
    return struct.pack("<4Q", domain, _STATIC_SCHEMA + _SCHEMAS[operation.op], len(content), 32) + content


def member_payload(
    function: str, group: Group, comm_rank: int, parent: Endpoint | None, device: int, **of: int
) -> bytes:
    """The blob of a call that makes, splits or destroys a communicator, from 2.25 on; `of`: seed and domain.

    A split's tells size and rank of the parent. Source: NCCL src/init.cc ncclCommSplit.
    """
    content = struct.pack("<Q", communicator_hash(of["seed"], group))
    if function == "ncclCommSplit" and parent is not None:
        content += struct.pack("<Q", communicator_hash(of["seed"], parent.group))
        content += struct.pack("<iii", parent.group.size, parent.comm_rank, device)
        content += struct.pack("<iii", group.color or 0, parent.comm_rank, 0)
    else:
        content += struct.pack("<iiii", group.size, comm_rank, device, 0)
    return struct.pack("<4Q", of["domain"], _STATIC_SCHEMA + _MEMBER_SCHEMAS[function], len(content), 32) + content


def _call_bytes(operation: Operation, group: Group) -> int:
    """count x size of the call: one rank's share of AllGather, ReduceScatter and AlltoAll."""
    shares = operation.op in {"AllGather", "ReduceScatter", "AlltoAll"}
    return operation.message_bytes // (group.size if shares else 1)
