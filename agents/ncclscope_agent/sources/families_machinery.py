# ruff: noqa: E501  a pattern is as long as the line that it reads
"""Lines of NCCL's machinery inside a process: its proxies and its memory.

*Source:* NCCL `src/proxy.cc`, `src/include/alloc.h`, `src/misc/utils.cc`, `src/register/*.cc`.
"""

from __future__ import annotations

from typing import Final

from ncclscope_agent.sources.log_family import FILE_AND_LINE, POINTER, Family, form
from ncclscope_wire import facts

_HEX: Final = r"0x[0-9a-f]{1,16}"

PROXY: Final[tuple[Family, ...]] = (
    form(
        "proxy",
        facts.ProxyStep,
        "[Proxy ",
        r"\[(?P<step>Proxy Service|Proxy Service UDS|Proxy Progress)\] Device (?P<device>\d+) CPU core (?P<cpu_core>\d+)",
    ),
    form(
        "proxy",
        facts.ProxyStep,
        "[Proxy ",
        r"\[(?P<step>Proxy Service UDS|Proxy Service)\] exit: stop (?P<number>\d+) abortFlag (?P<result>\d+)",
    ),
    form(
        "proxy",
        facts.ProxyStep,
        "[Service thread]",
        r"\[Service thread\] Connection closed by localRank (?P<local_rank>\d+)",
        fixed={"step": "connection closed"},
    ),
    form(
        "proxy",
        facts.ProxyStep,
        ("Connection to proxy", "Connected to proxy"),
        rf"Connect(?:ion|ed) to proxy localRank (?P<local_rank>\d+) -> connection (?P<connection_hex>{_HEX})",
        fixed={"step": "connected"},
        travels=False,
    ),
    form(
        "proxy",
        facts.ProxyStep,
        "New proxy",
        r"New proxy (?P<step>send|recv) connection (?P<number>\d+) from local rank (?P<local_rank>\d+), transport (?P<transport>\d+)",
        travels=False,
    ),
    form(
        "proxy",
        facts.ProxyStep,
        "proxyProgressAsync",
        rf"(?P<step>proxyProgressAsync) opId=(?P<operation_id_hex>{_HEX}) op\.type=(?P<operation>\d+)"
        rf" op\.reqBuff=(?P<pointer_hex>{POINTER}) op\.respSize=(?P<answer_bytes>\d+)(?P<is_done_is> done)",
        travels=False,
    ),
    form(
        "proxy",
        facts.ProxyStep,
        "ncclPollProxyResponse",
        rf"ncclPollProxyResponse (?P<step>Received new|Dequeued cached) opId=(?P<operation_id_hex>{_HEX})",
        travels=False,
    ),
    form(
        "proxy",
        facts.ProxyStep,
        ("resp.opId", "recvOpId"),
        rf"(?P<step>resp\.opId|recvOpId)=(?P<operation_id_hex>{_HEX}) matches expected opId=(?P<other_operation_id_hex>{_HEX})",
        travels=False,
    ),
    form(
        "proxy",
        facts.ProxyStep,
        ("sendConnect", "recvConnect"),
        rf"(?P<step>(?:send|recv)Connect nccl\w{{1,40}}) opId=(?P<operation_id_hex>{_HEX})"
        rf"(?: &recv->proxyConn=(?P<connection_hex>{_HEX}) connectInfo=(?P<pointer_hex>{_HEX}))?",
        travels=False,
    ),
    form(
        "proxy",
        facts.ProxyStep,
        "Queuing opId",
        rf"(?P<step>Queuing) opId=(?P<operation_id_hex>{_HEX}) respBuff=(?P<pointer_hex>{POINTER}) respSize=(?P<answer_bytes>\d+)",
        travels=False,
    ),
    form(
        "proxy",
        facts.ProxyStep,
        "Received and initiated",
        r"Received and initiated operation=(?P<operation>\w{1,40}) res=(?P<result>-?\d+)",
        fixed={"step": "initiated"},
        travels=False,
    ),
    form(
        "proxy",
        facts.ProxyStep,
        "ProxyCall UDS",
        rf"(?P<step>ProxyCall UDS) comm (?P<communicator_hex>{_HEX}) rank (?P<rank>\d+) tpRank (?P<peer>\d+)\((?P<peer_hash_hex>[0-9a-f]{{1,16}})\)"
        rf" reqSize (?P<size_bytes>\d+) respSize (?P<answer_bytes>\d+) respFd (?:(?P<pointer_hex>{POINTER})|(?P<number>\d{{1,9}}))"
        rf" opId (?P<operation_id_hex>{_HEX})(?P<is_done_is> - DONE)?",
        travels=False,
    ),
    form(
        "proxy",
        facts.ProxyStep,
        "UDS: Creating",
        rf"UDS: (?P<step>Creating service thread) comm (?P<communicator_hex>{_HEX}) rank (?P<rank>\d+)",
        travels=False,
    ),
    form(
        "proxy",
        facts.ProxyStep,
        "UDS: ClientGetFd",
        rf"UDS: (?P<step>ClientGetFd) handle (?P<pointer_hex>{_HEX}) tpRank (?P<peer>\d+) returned fd (?P<number>\d+)"
        r" sameProcess (?P<result>\d)",
        travels=False,
    ),
    form(
        "proxy",
        facts.ProxyStep,
        "UDS converted",
        rf"UDS (?P<step>converted) handle (?P<pointer_hex>{_HEX}) to fd (?P<number>\d+) on remote peer (?P<peer>\d+)",
        travels=False,
    ),
    form(
        "proxy",
        facts.ProxyStep,
        "UDS proxyGetFd",
        rf"UDS (?P<step>proxyGetFd) received handle (?P<pointer_hex>{_HEX}) peer (?P<peer>\d+) opId (?P<operation_id_hex>[0-9a-f]{{1,16}})",
        travels=False,
    ),
    form(
        "proxy",
        facts.ProxyStep,
        "proxyUDSRecvReq",
        rf"proxyUDSRecvReq::(?P<step>\w{{1,40}}) rank (?P<rank>\d+) opId (?P<operation_id_hex>{_HEX}) handle=(?P<pointer_hex>{_HEX})",
        travels=False,
    ),
)

MEMORY: Final[tuple[Family, ...]] = (
    form(
        "memory",
        facts.MemorySeen,
        "",
        FILE_AND_LINE
        + rf" (?P<step>Cuda Alloc|Cuda Host Alloc|Mem Alloc|Cuda CallocAsync|Cuda Calloc) Size (?P<size_bytes>\d+)"
        rf" pointer (?P<pointer_hex>{POINTER})(?: memType (?P<memory_type>\d+))?",
        travels=False,
    ),
    form(
        "memory",
        facts.MemorySeen,
        "",
        FILE_AND_LINE + r" (?P<step>memory stack hunk malloc)\((?P<size_bytes>\d+)\)",
        travels=False,
        is_closed=True,
    ),
    form(
        "memory",
        facts.MemorySeen,
        "Mem Realloc",
        rf"(?P<step>Mem Realloc) old size (?P<old_size_bytes>\d+), new size (?P<size_bytes>\d+) pointer (?P<pointer_hex>{POINTER})",
        travels=False,
    ),
    form(
        "memory",
        facts.MemorySeen,
        "Allocated ",
        rf"(?P<step>Allocated shareable buffer) (?P<pointer_hex>{_HEX}) size (?P<size_bytes>\d+) ipcDesc (?P<descriptor_hex>{POINTER})",
        travels=False,
    ),
    form(
        "memory",
        facts.MemorySeen,
        "Allocated ",
        r"Allocated (?P<size_bytes>\d+) bytes of (?P<step>shared memory) in (?P<path>/[\w./-]{1,200})",
        travels=False,
    ),
    form(
        "memory",
        facts.MemorySeen,
        "Imported ",
        rf"(?P<step>Imported shareable buffer) device (?P<device>\d+) size (?P<size_bytes>\d+) ptr (?P<pointer_hex>{_HEX})",
        travels=False,
    ),
    form(
        "memory",
        facts.MemorySeen,
        "MMAP ",
        rf"(?P<step>MMAP allocated shareable host buffer) (?P<path>/[\w./-]{{1,200}}) size (?P<size_bytes>\d+)"
        rf" ptr (?P<pointer_hex>{_HEX})",
        travels=False,
    ),
    form(
        "memory",
        facts.MemorySeen,
        ("register ", "deregister "),
        rf"(?P<step>register|deregister) comm (?P<communicator_hex>{_HEX}) buffer (?P<pointer_hex>{_HEX}) size (?P<size_bytes>\d+)",
    ),
    form(
        "memory",
        facts.MemorySeen,
        "MemManager",
        r"MemManager: (?P<step>Initialized) for device (?P<device>\d+)",
        fixed={"size_bytes": 0},
        travels=False,
    ),
)

FAMILIES: Final[tuple[Family, ...]] = (*PROXY, *MEMORY)
"""Forms of the machinery, in the order in which they are tried."""
