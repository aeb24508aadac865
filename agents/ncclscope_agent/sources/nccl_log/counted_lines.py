# ruff: noqa: E501  a pattern is as long as the line that it reads
"""Lines that are recognised and counted by family, and of which nothing is sent.

Each row is the line as NCCL prints it: a regular expression in which `<n>` is an integer, `<u>` one that is not below 0,
`<device>` a NIC behind its number, `<link>` a transport, `<hex>` an address or a hash, `<id>` one without 0x, `<plain>` and
`<s>` a number with a fraction, `<word>` a name, `<path>` text without blanks, `<address>` an address with its port,
`<text>` the rest, and `<at>` the source file and line that NCCL puts in front of some messages. A row that ends in fixed
text cannot have been cut, so it is also recognised in front of another record on its line.

*Source:* NCCL `src/init.cc`, `src/bootstrap.cc`, `src/graph/*.cc` (communicators and graphs), `src/transport/*.cc`
(NVLS, queue pairs), `src/proxy.cc`, `src/misc/*.cc`, `src/include/alloc.h`, `src/register/*.cc` (memory), `src/ras/*.cc`,
`src/include/checks.h` (call stacks), `src/misc/argcheck.cc` and `src/collectives.cc` (calls), `src/debug.cc` (TRACE).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ncclscope_agent.sources.nccl_log.line_form import Family, forms

_PLACEHOLDERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "<n>": r"-?\d{1,20}",
        "<u>": r"\d{1,10}",
        "<id>": r"[0-9a-f]{1,16}",
        "<plain>": r"[\w.+-]{1,64}",
        "<device>": r"\[\d+\](?:=\{[^{}]{1,400}\}|\S+(?: (?!\[)\S+:\d+<\d+>)?)",
        "<link>": (
            r"(?:(?:P2P|SHM)/[\x20-\x7e]{1,116}|direct shared memory|(?:NET|COLLNET)/[^/]+(?:/[^/\d][^/]*)*/\d+(?:\(\d+\))?"
            r"(?:/GDRDMA(?:\(\w+\))?)?(?:/Shared)?(?:/[A-Z]\w*)*)"
        ),
        "<hex>": r"(?:\(nil\)|(?:0x)?[0-9a-f]{1,16})",
        "<s>": r"\d[\d.e+]{0,20}",
        "<word>": r"[\w.:-]{1,100}",
        "<path>": r"\S{1,400}",
        "<address>": r"[\w.:%-]{1,100}<\d{1,5}>",
        "<text>": r"[\x20-\x7e]{1,900}",
        "<at>": r"[\w/.-]{1,100}\.(?:cc|h|cu|c):\d{1,6}",
    }
)

_ROWS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "network_devices": (
            r"NET/<plain> : Using (?:\[RO\])? ?; OOB \S{1,200}",
            r"NET/IB : Using <device>(?: <device>)*",
            r"NET/<plain> : No device found\.",
        ),
        "bootstrap": (r"Bootstrap ?: Using (?:<device>(?: <device>)*|[^\[\s]\S{0,399})",),
        "channel_link": (
            r"(?:Channel|Ring) <u>(?:/<u>)? : <u>(?:\[<id>\])? -> <u>(?:\[<id>\])?(?: \[(?:send|receive)\])? via <link>",
            r"CollNet <u>(?:/<u>)? : <u>(?:\[<id>\])? \[(?:send|receive)\] via <link>",
        ),
        "comm_config": (
            r"Comm config \w{1,64} (?:set to )?<n>",
            r"Check P2P Type (?:is)?[A-Za-z]\w{1,40} <u> directMode <u>(?: \w{1,40} \d+)?",
            r"CC (?:Off|On)(?:, Multi-GPU CC (?:Off|On))?, workFifoBytes <u>",
            r"Symmetric VA size=<u>GB",
            r"P2P Chunksize set to <u>",
            r"Using <u> threads, Min Comp Cap <u>, Trees (?:enabled|disabled)[\x20-\x7e]{0,60}",
            r"\w{1,40}: tuner chunk size <u> exceeds buffer max <u>, clamping",
        ),
        "launch_mode": (r"Launch mode (?:Parallel|Group/CGMD|Group)",),
        "mnnvl": (
            r"MNNVL <u> cliqueId <hex> cliqueSize <u> cliqueRank <n>(?: nvlDomainSize <u>)?",
            r"MNNVL busId <hex> fabric UUID <id>\.<id> cliqueId <hex> state <u> healthMask <hex>",
        ),
        "affinity": (
            r"Setting affinity for GPU <u> to [0-9a-f,-]{1,1000}",
            r"ncclTopoGetCpuAffinity: Affinity for GPU <u> is (?:[0-9,-]{1,1000}|empty, ignoring)\. \(GPU affinity = [0-9,-]{0,1000} ; CPU affinity = [0-9,-]{0,1000}\)\.",
        ),
        "library_missing": (
            r"Failed to open [\w./\[\]-]{1,200}",
            r"dlvsym failed on \w{1,100} - [\w./-]{1,200}: [\x20-\x7e]{1,300}",
        ),
        "comm_shape": (r"comm <hex> rank <n> nRanks <n> nNodes <n> localRanks <n> localRank <n> MNNVL <n>",),
        "channel_counts": (
            r"<n> coll channels, (?:<n> collnet channels, )?(?:<n> nvls channels, )?<n> p2p channels, <n> p2p channels per peer",
        ),
        "split": (
            r"bootstrapSplit: (?:comm <hex> parent <hex> )?rank <n> nranks <n> color <n> key <n> prev <n> next <n> - DONE",
            r"Rank <n> has color with NCCL_SPLIT_NOCOLOR, not creating a new communicator",
        ),
        "revoke": (
            r"comm <hex> rank <n> n[rR]anks <n> cudaDev <n>(?: nvmlDev <n>)?(?: busId <hex>)? - Revoke (?:START|COMPLETE)(?:, result <n>)?",
            r"CommRevokeAsync (?:START|END) comm <hex>(?: result <n>)?",
        ),
        "grow": (r"Rank <n>: Generated commHash <hex> from baseMagic <hex> and newNRanks <n>",),
        "comm_ranks": (r"nranks <n>",),
        "init_timings": (
            r"Init timings(?: - <word>)?: rank <n> nranks <n> total <s> \((?:kernels <s>, )?(?:alloc <s>, )?bootstrap <s>, allgathers <s>, topo <s>, graphs <s>, connections <s>, rest <s>\)",
            r"Bootstrap timings total <s> \(create <s>, send <s>, recv <s>, ring <s>, delay <s>\)",
        ),
        "connected": (
            r"Connected (?:all rings|all trees|NVLS tree|binomial trees|Collnet Chains)(?: [A-Z]\w{0,20})?(?:, use ring PXN \d GDR \d)?",
        ),
        "thresholds": (
            r"threadThresholds <n>(?:/<n>)*(?: \| <n>(?:/<n>)*)*",
            r"Threads per block : <n>(?:/<n>)*(?: \| <n>(?:/<n>)*)*",
        ),
        "nvls": (
            r"NVLS multicast support is (?:not )?available on dev <u>(?: \(NVLS_NCHANNELS <u>\))?",
            r"NVLS comm <hex> headRank <n> nHeads <n> (?:nvlsRanks <n> )?buffSize <n> nvlsPerRankSize <n> nvlsTotalSize <n>",
            r"NVLS Creat(?:ing|ed) Multicast group (?:<hex> )?nranks <n> size <n> on rank <n>",
            r"NVLS rank <n> \(dev <n>\) alloc done, ucptr <hex> ucgran <n> mcptr <hex> mcgran <n> ucsize <n> mcsize <n> \(inputsize <n>\)",
        ),
        "capture": (r"stream is being captured by a new graph, id <n>",),
        "symmetric_model": (r"ReduceScatter_RailA2A_Lsa(?:LD|LDMC) : satblocks=<n> bufsize=<n> effbw=<s>",),
        "symmetric_buffer": (
            r"SymCheck: coll <word> size <n> rank <n> bigOffset <hex> userOffset <hex> info->(?:send|recv)buff <hex> (?:send|recv)Win->userPtr <hex>",
        ),
        "rma": (
            r"scheduleRmaTasksToPlan: rank=<n> ctx=<n> func=<n> nRmaTasks=<n> nRmaTasksProxy=<n> nRmaTasksCe=<n>",
            r"scheduleRmaTasksToPlan: rank=<n> ctx=<n> func=<n> nRmaTasks=<n> nRmaTasksProxy=<n> \(CE excluded\)",
            r"ncclRmaPutProxy enqueued Desc: rank=<n> peer=<n> ctx=<n> size=<n> signalMode=<n> readySeq=<n> doneSeq=<n>",
        ),
        "search": (
            r"Pattern <n>, crossNic <n>, nChannels <n>, (?:bw|speed) <s>/<s>, type [A-Z0-9]{2,4}/[A-Z0-9]{2,4}, sameChannels \d",
            r" ?\d+ :(?: (?:NET|GPU|GIN|RMA)/[0-9A-Fa-f]{1,16}(?:-[0-9A-Fa-f]{1,16})?)+",
        ),
        "queue_pair": (
            r"NET/IB ?: (?:NCCL Dev <n> IbDev <n>|Dev <n>) Port <n> qpn <n> mtu <n>"
            r" (?:LID <n>(?: subnet-prefix <n>)?(?:  ?FLID <n>)?|(?:query_ece=\{[^{}]{0,200}\} )?GID <n> \([0-9A-F/]{1,40}\))(?: fifoRkey=<hex> fifoLkey=<hex>)?",
        ),
        "collnet": (
            r"Communicator has <n> nodes which is less than CollNet node threshold <n>, disabling CollNet",
            r"Sharp rank <n>/<n> initialized on <text>",
        ),
        "nic": (
            r"NET/IB ?: Made virtual device \[<u>\] name=<path> speed=<u> ndevs=<u>",
            r"NET/IB ?: \[<u>\] [\w.-]{1,64}(?::\w{1,64})?:<u>/\w{1,20} provider=\w{1,40} speed=<u> context=<hex> pciPath=<path>(?: ar=\d)?",
            r"NET/IB ?: Unable to open device <word>",
            r"ncclTopoPopulateNics : Filled <path> in topo with pciPath=<path> keep=\d(?: coll=\S{1,20})?",
        ),
        "machine": (
            r"Loading topology file <path>",
            r"Loading \w{1,64} topology",
            r"TOPO/NET ?: Importing network plugins to topology",
            r"TOPO/NET ?: Made vNic <n>",
            r"TOPO/NET ?: Changing \w{1,20} dev index from <n> to <n>",
            r"KV Convert to int : could not find value of '[^']{0,100}' in dictionary, falling back to <n>",
            r"Attribute \w{1,64} of node \w{1,64} not found",
            r"CUDA Dev <n>\[<n>\], \w{1,20} NIC distance : (?: (?:LOC|PIX|PXB|PHB|NODE|SYS|SOC))+",
            r"Intel CPU \(PCI <n>, InterCpu <n>\)",
            r"AMD CPU \(PCI <n>, InterCpu <n>\)",
            r"IBM CPU \(PCI <n>, InterCpu <n>\)",
            r"/sys/[\w/.:-]{1,400} -> <n>(?:/<n>){1,8}",
        ),
        "call_failure": (r"Call to \w{1,80} failed[\x20-\x7e]{0,400}",),
        "proxy": (
            r"\[Proxy (?:Service|Service UDS|Progress)\] Device <n> CPU core <n>",
            r"\[Proxy Service(?: UDS)?\] exit: stop <n> abortFlag <n>",
            r"\[Service thread\] Connection closed by localRank <n>",
            r"Connect(?:ion|ed) to proxy localRank <n> -> connection <hex>",
            r"New proxy (?:send|recv) connection <n> from local rank <n>, transport <n>",
            r"proxyProgressAsync opId=<hex> op\.type=<n> op\.reqBuff=<hex> op\.respSize=<n> done",
            r"ncclPollProxyResponse (?:Received new|Dequeued cached) opId=<hex>",
            r"resp\.opId=<hex> matches expected opId=<hex>",
            r"recvOpId=<hex> matches expected opId=<hex>",
            r"sendConnect nccl\w{1,40} opId=<hex>",
            r"recvConnect nccl\w{1,40} opId=<hex>(?: &recv->proxyConn=<hex> connectInfo=<hex>)?",
            r"Queuing opId=<hex> respBuff=<hex> respSize=<n>",
            r"Received and initiated operation=\w{1,40} res=<n>",
            r"ProxyCall UDS comm <hex> rank <n> tpRank <n>\(<hex>\) reqSize <n> respSize <n> respFd <hex> opId <hex>(?: - DONE)?",
            r"socketProgressOpt: abort called",
            r"PXN Disabled as plugin is v<n>",
            r"UDS: Creating service thread comm <hex> rank <n>",
            r"UDS: ClientGetFd handle <hex> tpRank <n> returned fd <n> sameProcess \d",
            r"UDS converted handle <hex> to fd <n> on remote peer <n>",
            r"UDS proxyGetFd received handle <hex> peer <n> opId <hex>",
            r"proxyUDSRecvReq::\w{1,40} rank <n> opId <hex> handle=<hex>",
        ),
        "memory": (
            r"<at> (?:Cuda Alloc|Cuda Host Alloc|Mem Alloc|Cuda CallocAsync|Cuda Calloc) Size <n> pointer <hex>(?: memType <n>)?",
            r"<at> memory stack hunk malloc\(<n>\)",
            r"Mem Realloc old size <n>, new size <n> pointer <hex>",
            r"Allocated shareable buffer <hex> size <n> ipcDesc <hex>",
            r"Allocated <n> bytes of shared memory in /<path>",
            r"Imported shareable buffer device <n> size <n> ptr <hex>",
            r"MMAP allocated shareable host buffer /<path> size <n> ptr <hex>",
            r"register comm <hex> buffer <hex> size <n>",
            r"deregister comm <hex> buffer <hex> size <n>",
            r"MemManager: Initialized for device <n>",
        ),
        "ras": (
            r"RAS thread (?:started|terminating)",
            r"RAS handling local termination request",
            r"RAS (?:client|network) listening socket at <address>",
            r"RAS handling local addRanks request \(old nRasPeers <n>\)",
            r"RAS finished local processing of addRanks request \(new nRasPeers <n>, nRankPeers <n>\)",
            r"RAS peer <n>: socket <address>, pid <n>, GPUs? <n>(?:,<n>)*(?: \[this process\])?",
            r"RAS peersHash <hex>",
            r"RAS link <n>: (?:opening new|calculated deferred) (?:primary|fallback) connection with <address>",
            r"RAS new incoming socket connection from <address>",
            r"RAS handling connInit from <address> \(version <n>, listeningAddr <address>, peersHash <hex>, deadPeersHash <hex>\)",
            r"RAS handling connInitAck from <address> \(nack <n>\)",
            r"RAS established connection with <address> \(sendQ (?:not )?empty, experiencingDelays \d, startRetryTime <s>s\)",
            r"RAS current socket connection with <address> closed by peer on (?:receive|send); terminating it",
            r"RAS terminating a connection with <address>",
        ),
        "ras_dead": (r"RAS declaring peer <address> as DEAD; rasDeadPeersHash <hex>",),
        "ras_timeout": (
            r"RAS [a-z-]{1,20}(?: [a-z-]{1,20}){0,3}? timeout(?: warning| error)? \(<s>s\) on socket connection with <address>",
            r"RAS trying to reconnect with <address> \(experiencingDelays \d, startRetryTime <s>s\)",
        ),
        "call_stack": (r"<at> (?:\([\w:~]{1,80}\) )?-> <n>(?: \[[\w ]{1,40}\])?",),
        "rccl": (
            r"\[node_id = <n>; gpu_id = <n>; unique_id = <n>; location_id = <n>; bdf = <n>; domain = <n>; partition = <n>\],?",
            r"initialized internal alternative rsmi functionality",
            r"(?:Kernel version: |ROCr version |HIP version ?: |ROCm version ?: |Hostname ?: |Librccl path ?: )<text>",
            r"Enabled GDRCopy equivalent memory allocation on <word>",
            r"Dmabuf feature disabled without NCCL_DMABUF_ENABLE=1",
            r"MSCCL\+\+: (?:Cannot enable MSCCL\+\+|Feature not enabled)<text>",
        ),
        "fork_msccl": (
            r"Link <n>: ID = <n>, Bandwidth = <s>",
            r"Node Type: [A-Z]{2,4}, ID: [0-9a-f:.]{1,32}",
            r"  -> Dest Type: [A-Z]{2,4}",
            r"     Total Paths: <n>, BW: <s> GB/s, Type: PATH_\w{2,4}",
            r"     Hop <n>: Type=PATH_\w{2,4}, BW=<s> GB/s, RemNodeType=[A-Z]{2,4}, id [0-9a-f:.]{1,32}",
            r"  Channel <n>:",
            r"Int(?:ra|er)-node paths \(nChannels=<n>\):",
            r"\d{1,6}",
            r"MSCCL: (?:No external scheduler found|Initialization finished|Teardown finished)(?:, using internal implementation)?",
            r"MSCCL: Internal Scheduler will use <path> as algorithm directory and <text>",
            r"Using MSCCL Algo files from <path>",
        ),
    }
)
"""By family, in the order in which they are tried; builds of 2.23 with MSCCL print the last, among them a bare number."""

_CALL: Final = r"p?nccl[A-Z]\w{1,60}\((?:-?<hex>(?:, ?-?<hex>){0,15})?\)"
"""The part behind `NCCL CALL `: function and arguments."""


def _counted(name: str, *rows: str) -> tuple[Family, ...]:
    return forms(name, None, *map(_pattern, rows))


def _pattern(row: str) -> str:
    for placeholder, expression in _PLACEHOLDERS.items():
        row = row.replace(placeholder, expression)
    return row


COUNTED: Final[tuple[Family, ...]] = tuple(family for name, rows in _ROWS.items() for family in _counted(name, *rows))
REMARKS: Final[tuple[Family, ...]] = _counted(
    "remark",
    r"(?:NET|COLLNET|TUNER|PROFILER|ENV|GIN|RMA)/<word>(?: ?: ?| )<text>",
    r"(?:RCCL|MSCCL|MSCCL\+\+|mscclpp|rsmi|ROCr)(?: ?: ?| )<text>",
    r"(?:NVLS|MNNVL|CollNet|SHARP|Sharp|PXN|DMA-BUF|GDRCOPY|P2P|SHM|CE|PAT|TOPO|Topology|Bootstrap|bootstrap|CollTrace)\b[ :]<text>",
)
"""Remarks that a part of NCCL or a plug-in makes under its name, in forms of which nothing is used.

Plug-ins have forms of their own in every version. Only what is printed as INFO is a remark: a warning in a form that
is not known is passed on.
"""
MATRIX_HEADER: Final = re.compile(rb"     Function \|(?: +[A-Za-z0-9]+)+ *\|(?: +[A-Za-z0-9]+)+ *\|?\s*")
"""The first continuation line of the matrix of functions, protocols and algorithms (2.24 on)."""
MATRIX_ROW: Final = _counted("function_matrix", r" *[A-Z]\w{1,30} \|(?: +\d){1,8} *\|(?: +\d){1,16} *\|?")[0]
"""The other continuation lines."""
CALLS: Final[tuple[Family, ...]] = _counted("call", _CALL)
TRACE: Final = _counted("trace", "")[0]
"""Lines of builds with TRACE=1: `NCCL TRACE` and any text."""
