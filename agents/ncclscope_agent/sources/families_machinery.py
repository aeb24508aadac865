# ruff: noqa: E501  a pattern is as long as the line that it reads
"""Lines of NCCL's machinery: proxies, memory, the RAS watcher, call stacks, trace builds; and of one fork.

*Source:* NCCL `src/proxy.cc`, `src/include/alloc.h`, `src/misc/utils.cc`, `src/register/*.cc`, `src/ras/*.cc`,
`src/include/checks.h` (call stacks), `src/debug.cc` (TRACE).
"""

from __future__ import annotations

import re
from typing import Final

from ncclscope_agent.sources.log_family import POINTER, Family, Fields, form, numbers
from ncclscope_wire import facts

_HEX: Final = r"0x[0-9a-f]{1,16}"
_ADDRESS: Final = r"[\w.:%-]{1,100}<\d{1,5}>"
_AT: Final = r"(?P<file>[\w/.-]{1,100}\.(?:cc|h|cu|c)):(?P<file_line>\d{1,6})"

FRAME: Final = re.compile(rb"[\w/.-]{1,100}\.(?:cc|h|cu|c):\d{1,6} ")
"""What calls, allocations and downgraded warnings put in front of their message."""


def _ras_peer(fields: Fields) -> Fields:
    fields["gpus"] = numbers(str(fields.pop("gpu_names")))
    return fields


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
        _AT + rf" (?P<step>Cuda Alloc|Cuda Host Alloc|Mem Alloc|Cuda CallocAsync|Cuda Calloc) Size (?P<size_bytes>\d+)"
        rf" pointer (?P<pointer_hex>{POINTER})(?: memType (?P<memory_type>\d+))?",
        travels=False,
    ),
    form(
        "memory",
        facts.MemorySeen,
        "",
        _AT + r" (?P<step>memory stack hunk malloc)\((?P<size_bytes>\d+)\)",
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

RAS: Final[tuple[Family, ...]] = (
    form("ras", facts.RasEvent, "RAS thread", r"RAS (?P<event>thread started|thread terminating)", is_closed=True),
    form("ras", facts.RasEvent, "RAS handling", r"RAS (?P<event>handling local termination request)", is_closed=True),
    form(
        "ras",
        facts.RasEvent,
        "RAS ",
        rf"RAS (?P<event>client listening socket|network listening socket) at (?P<address>{_ADDRESS})",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS handling",
        r"RAS (?P<event>handling local addRanks request) \(old nRasPeers (?P<peers>\d+)\)",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS finished",
        r"RAS (?P<event>finished local processing of addRanks request) \(new nRasPeers (?P<peers>\d+), nRankPeers (?P<ranks>\d+)\)",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS peer ",
        rf"RAS (?P<event>peer) (?P<peer>\d+): socket (?P<address>{_ADDRESS}), pid (?P<peer_pid>\d+), GPUs? (?P<gpu_names>\d+(?:,\d+)*)"
        r"(?P<is_self_is> \[this process\])?",
        finish=_ras_peer,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS peersHash",
        rf"RAS (?P<event>peersHash) (?P<hash_hex>{_HEX})",
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS link",
        rf"RAS link (?P<peer>-?\d+): (?P<event>opening new (?:primary|fallback) connection|calculated deferred (?:primary|fallback) connection)"
        rf" with (?P<address>{_ADDRESS})",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS new",
        rf"RAS (?P<event>new incoming socket connection) from (?P<address>{_ADDRESS})",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS handling",
        rf"RAS (?P<event>handling connInit) from (?P<address>{_ADDRESS}) \(version (?P<version>\d+), listeningAddr {_ADDRESS},"
        rf" peersHash (?P<hash_hex>{_HEX}), deadPeersHash (?P<dead_hash_hex>{_HEX})\)",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS handling",
        rf"RAS (?P<event>handling connInitAck) from (?P<address>{_ADDRESS}) \(nack (?P<number>\d+)\)",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS established",
        rf"RAS (?P<event>established connection) with (?P<address>{_ADDRESS}) \(sendQ (?:not )?empty, experiencingDelays (?P<number>\d),"
        r" startRetryTime (?P<seconds>\d+\.\d+)s\)",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS current",
        rf"RAS current socket connection with (?P<address>{_ADDRESS}) (?P<event>closed by peer on (?:receive|send)); terminating it",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS terminating",
        rf"RAS (?P<event>terminating a connection) with (?P<address>{_ADDRESS})",
        is_closed=True,
    ),
    form(
        "ras_dead",
        facts.RasEvent,
        "RAS declaring",
        rf"RAS declaring peer (?P<address>{_ADDRESS}) as (?P<event>DEAD); rasDeadPeersHash (?P<dead_hash_hex>{_HEX})",
    ),
    form(
        "ras_timeout",
        facts.RasEvent,
        "RAS ",
        r"RAS (?P<event>[a-z-]{1,20}(?: [a-z-]{1,20}){0,3}? timeout(?: warning| error)?) \((?P<seconds>[\d.e+]{1,20})s\)"
        rf" on socket connection with (?P<address>{_ADDRESS})",
        is_closed=True,
    ),
    form(
        "ras_timeout",
        facts.RasEvent,
        "RAS trying",
        rf"RAS (?P<event>trying to reconnect) with (?P<address>{_ADDRESS}) \(experiencingDelays (?P<number>\d),"
        r" startRetryTime (?P<seconds>\d+\.\d+)s\)",
        is_closed=True,
    ),
)

STACK: Final[tuple[Family, ...]] = (
    form(
        "call_stack",
        facts.CallFrame,
        "",
        _AT + r" (?:\((?P<function>[\w:~]{1,80})\) )?-> (?P<result>-?\d{1,5})(?: \[(?P<thread>[\w ]{1,40})\])?",
    ),
)

FORK: Final[tuple[Family, ...]] = (
    form(
        "fork_msccl",
        facts.ForkLine,
        "Link ",
        r"(?P<step>Link) (?P<number>\d+): ID = (?P<second_number>-?\d+), Bandwidth = (?P<bandwidth>\d+\.\d+)",
        fixed={"fork": "msccl"},
    ),
    form(
        "fork_msccl",
        facts.ForkLine,
        "Node Type",
        r"(?P<step>Node Type): (?P<name>[A-Z]{2,4}), ID: (?P<address>[0-9a-f:.]{1,32})",
        fixed={"fork": "msccl"},
    ),
    form(
        "fork_msccl",
        facts.ForkLine,
        "  -> Dest",
        r"  -> (?P<step>Dest Type): (?P<name>[A-Z]{2,4})",
        fixed={"fork": "msccl"},
    ),
    form(
        "fork_msccl",
        facts.ForkLine,
        "     Total",
        r"     (?P<step>Total Paths): (?P<number>\d+), BW: (?P<bandwidth>\d+\.\d+) GB/s, Type: (?P<path>PATH_\w{2,4})",
        fixed={"fork": "msccl"},
    ),
    form(
        "fork_msccl",
        facts.ForkLine,
        "     Hop",
        r"     (?P<step>Hop) (?P<number>\d+): Type=(?P<path>PATH_\w{2,4}), BW=(?P<bandwidth>\d+\.\d+) GB/s, RemNodeType=(?P<name>[A-Z]{2,4}), id (?P<address>[0-9a-f:.]{1,32})",
        fixed={"fork": "msccl"},
    ),
    form("fork_msccl", facts.ForkLine, "  Channel", r"  (?P<step>Channel) (?P<number>\d+):", fixed={"fork": "msccl"}),
    form(
        "fork_msccl",
        facts.ForkLine,
        "Intra-node",
        r"(?P<step>Intra-node paths|Inter-node paths) \(nChannels=(?P<number>\d+)\):",
        fixed={"fork": "msccl"},
    ),
    form("fork_msccl", facts.ForkLine, "", r"(?P<number>\d{1,6})", fixed={"fork": "msccl", "step": "rank"}),
    form(
        "fork_msccl",
        facts.ForkLine,
        "MSCCL",
        r"MSCCL: (?P<step>No external scheduler found|Initialization finished|Teardown finished)(?:, using internal implementation)?",
        fixed={"fork": "msccl"},
    ),
    form(
        "fork_msccl",
        facts.ForkLine,
        "MSCCL",
        r"MSCCL: (?P<step>Internal Scheduler) will use (?P<name>\S{1,400}) as algorithm directory and [\x20-\x7e]{1,900}",
        fixed={"fork": "msccl"},
    ),
    form(
        "fork_msccl",
        facts.ForkLine,
        "Using MSCCL",
        r"Using (?P<step>MSCCL Algo files) from (?P<name>\S{1,400})",
        fixed={"fork": "msccl"},
    ),
)
"""msccl-like builds of 2.23: they print the paths that they compute. One line of it is a bare number."""

_ARGUMENT: Final = r"(?:0x[0-9a-f]{1,16}|[0-9a-f]{1,16}|\(nil\))"


def _arguments(fields: Fields) -> Fields:
    texts = [text.strip() for text in str(fields.pop("list") or "").split(",") if text.strip()]
    return {**fields, "arguments": [0 if text == "(nil)" else int(text, 16) for text in texts]}


CALLS: Final[tuple[Family, ...]] = (
    form("call", facts.ApiCall, "", r"(?P<function>ncclGroupStart|ncclGroupEnd)\(\)", is_closed=True, travels=False),
    form(
        "call",
        facts.ApiCall,
        "",
        r"(?P<function>nccl[A-Z]\w{1,40})\((?P<send_buffer_hex>(?:0x)?[0-9a-f]{1,16}),(?P<recv_buffer_hex>(?:0x)?[0-9a-f]{1,16}),"
        r"(?P<count>\d{1,20}),(?P<data_type>\d+),(?P<reduction>\d+),(?P<root>-?\d+),"
        rf"(?P<communicator_hex>{POINTER}),(?P<stream_hex>{POINTER})\)",
        is_closed=True,
        travels=False,
    ),
    form(
        "call",
        facts.ApiCall,
        "",
        r"(?P<function>ncclCommInitRank\w{0,20})\((?P<communicator_hex>0x[0-9a-f]{1,16}), (?P<nranks>\d+), (?P<comm_id_hex>0x[0-9a-f]{1,16}),"
        r" (?P<rank>\d+), (?P<cuda_device>\d+)\)",
        is_closed=True,
        travels=False,
    ),
    form(
        "call",
        facts.ApiCall,
        "",
        rf"(?P<function>ncclCommSplit)\((?P<parent_hex>{POINTER}), (?P<color>-?\d+), (?P<key>-?\d+), (?P<communicator_hex>{POINTER}),"
        r" (?P<rank>-?\d+), (?P<nranks>\d+)\)",
        is_closed=True,
        travels=False,
    ),
    form(
        "call",
        facts.ApiCall,
        "",
        rf"(?P<function>(?:p?nccl)[A-Z]\w{{1,60}})\((?P<list>(?:{_ARGUMENT}(?:, ?{_ARGUMENT}){{0,15}})?)\)",
        finish=_arguments,
        is_closed=True,
        travels=False,
    ),
)
"""What stands behind `NCCL CALL `. *Source:* NCCL `src/misc/argcheck.cc`, `src/collectives.cc`, `src/init.cc`."""

TRACE: Final = re.compile(rb"(\d{1,15}\.\d{6}) ([\w:~]{1,80}):\d{1,6} ?")
"""What stands between `[dev]` and `NCCL TRACE`: milliseconds since start, function, line."""

FAMILIES: Final[tuple[Family, ...]] = (*PROXY, *MEMORY, *RAS, *STACK, *FORK)
"""Forms of the machinery, in the order in which they are tried."""
