# ruff: noqa: E501  a pattern is as long as the line that it reads
"""Lines about communicators, their channels, rings, trees and transports.

*Source:* NCCL `src/init.cc` (life, shape, timings, rings, trees), `src/bootstrap.cc`, `src/graph/paths.cc` and
`src/init.cc` (channel counts), `src/graph/connect.cc` (Ring, Tree), `src/transport/*.cc` (links), `src/graph/tuning.cc`
(threadThresholds), `src/enqueue.cc` (capture).
"""

from __future__ import annotations

import re
from typing import Final

from ncclscope_agent.sources.log_family import POINTER, RECORD_BYTES, Family, Fields, form, numbers
from ncclscope_wire import facts

_S: Final = r"\d{1,9}\.\d{1,6}"
_TREE_NODE: Final = re.compile(r"(?:\[(\d+)\] )?(-?\d+(?:/-?\d+){2}|-?\d+)->(\d+)->(-?\d+(?:/-?\d+){2}|-?\d+)")
_LINE_LIMIT: Final = 1015
"""NCCL's buffer has 1,024 bytes (2.8 to 2.28), prefix and newline included."""
_NET: Final = re.compile(
    r"(?P<network>[^/]+(?:/[^/\d][^/]*)*)/(?P<network_device>\d+)(?:\((?P<proxy_rank>\d+)\))?"
    r"(?P<direct>/GDRDMA(?:\(\w+\))?)?(?:/Shared)?(?:/[A-Z]\w*)*"
)
_OLD_RANKS: Final = 20
"""Up to 2.22 a ring line holds 20 ranks at most, and does not say that it was cut."""


def _ring_order(fields: Fields) -> Fields:
    ranks = numbers(str(fields.pop("order")))
    padded = fields.pop("padding", None) is not None
    fields["ranks"] = ranks
    fields["is_cut"] = bool(fields.pop("dots", None)) or (padded and len(ranks) == _OLD_RANKS)
    return fields


def _tree_nodes(fields: Fields) -> Fields | None:
    """`[0] 1/-1/-1->0->-1 [1] ...`; up to 2.7 a second node follows behind `|`, up to 2.4 the order is turned."""
    pieces = re.split(r" (?=\[)|\|", str(fields.pop("trees")).rstrip())
    is_cut = int(str(fields.pop(RECORD_BYTES, 0))) >= _LINE_LIMIT
    if is_cut:
        pieces.pop()  # where it was cut cannot be seen
    nodes: list[Fields] = []
    channel = ""
    for piece in pieces:
        found = _TREE_NODE.fullmatch(piece)
        if found is None:
            return None
        channel = found[1] or channel
        nodes.append(_tree_node(channel, found[2], found[3], found[4]))
    return {**fields, "nodes": nodes, "is_cut": is_cut} if nodes else None


def _tree_node(channel: str, left: str, rank: str, right: str) -> Fields:
    down, up = (left, right) if "/" in left else (right, left)
    return {"channel": int(channel), "rank": int(rank), "up": int(up.split("/")[0]), "down": numbers(down)}


def _tree(fields: Fields) -> Fields:
    """`Tree 0 : -1 -> 0 -> 1/-1/-1`: up, rank, down."""
    node = {key: fields.pop(key) for key in ("channel", "up", "rank")}
    fields["nodes"] = [{**node, "down": numbers(str(fields.pop("below")))}]
    return fields


def _link(fields: Fields) -> Fields | None:
    """Reads what stands behind `via`, and tells what the brackets hold."""
    transport, _, how = str(fields.pop("via")).partition("/")
    if transport == "direct shared memory":
        transport, how = "SHM", "direct"
    if transport not in {"P2P", "SHM", "NET", "COLLNET"} or not how:
        return None
    fields.update(transport=transport, how=how)
    if transport in {"NET", "COLLNET"}:
        found = _NET.fullmatch(how)
        if found is None:
            return None
        fields.update({name: found[name] for name in ("network", "network_device", "proxy_rank") if found[name]})
        fields["gpu_direct"] = found["direct"] is not None
    brackets = [text for name in ("from_bracket", "to_bracket") if (text := fields.pop(name, None)) is not None]
    if len(brackets) == 2:
        fields.update(_devices(str(brackets[0]), str(brackets[1])))
    return fields


def _devices(first: str, second: str) -> Fields:
    """A bus id has a device in its last two digits and is printed in hexadecimal; an NVML number has two digits."""
    is_bus = [not text.isdigit() or len(text) > 2 for text in (first, second)]
    are_bus: bool | None = any(is_bus)
    if not are_bus and max(len(first), len(second)) == 2 and first[-1] == second[-1] == "0":
        are_bus = None  # 10 and 20 may be either
    base = 16 if are_bus else 10
    fields: Fields = {} if are_bus is None else {"devices_are_bus_ids": are_bus}
    if are_bus is not None:
        fields.update(from_device=int(first, base), to_device=int(second, base))
    return fields


def _thresholds(fields: Fields) -> Fields:
    fields["rows"] = [numbers(part) for part in str(fields.pop("table")).split("|")]
    return fields


_ENDS: Final = (
    r"(?P<from_rank>\d+)(?:\[(?P<from_bracket>[0-9a-f]+)\])? -> (?P<to_rank>\d+)(?:\[(?P<to_bracket>[0-9a-f]+)\])?"
    r"(?: \[(?P<direction>send|receive)\])? via (?P<via>[\x20-\x7e]{1,120})"
)

FAMILIES: Final[tuple[Family, ...]] = (
    form(
        "comm_shape",
        facts.CommunicatorShape,
        "comm ",
        r"comm (?P<communicator_hex>0x[0-9a-f]{1,16}) rank (?P<rank>\d+) nRanks (?P<nranks>\d+) nNodes (?P<nodes>\d+)"
        r" localRanks (?P<local_ranks>\d+) localRank (?P<local_rank>\d+) MNNVL (?P<mnnvl>\d+)",
    ),
    form(
        "channel_counts",
        facts.ChannelCounts,
        "",
        r"(?P<collective>\d+) coll channels, (?:(?P<collnet>\d+) collnet channels, )?(?:(?P<nvls>\d+) nvls channels, )?"
        r"(?P<p2p>\d+) p2p channels, (?P<p2p_per_peer>\d+) p2p channels per peer",
        is_closed=True,
    ),
    form(
        "split",
        facts.CommunicatorSplit,
        "bootstrapSplit",
        r"bootstrapSplit: (?:comm (?P<communicator_hex>0x[0-9a-f]{1,16}) parent (?P<parent_hex>0x[0-9a-f]{1,16}) )?"
        r"rank (?P<rank>\d+) nranks (?P<nranks>\d+) color (?P<color>-?\d+) key (?P<key>-?\d+)"
        r" prev (?P<previous>-?\d+) next (?P<next>-?\d+) - DONE",
        is_closed=True,
    ),
    form(
        "split",
        facts.SplitRefused,
        "Rank ",
        r"Rank (?P<rank>\d+) has color with NCCL_SPLIT_NOCOLOR, not creating a new communicator",
        is_closed=True,
    ),
    form(
        "revoke",
        facts.CommunicatorRevoked,
        "comm ",
        r"comm (?P<communicator_hex>0x[0-9a-f]{1,16}) rank (?P<rank>-?\d+) n[rR]anks (?P<nranks>-?\d+) cudaDev -?\d+"
        r"(?: nvmlDev -?\d+)?(?: busId [0-9a-f]+)? - Revoke (?P<stage>START|COMPLETE)(?:, result (?P<result>-?\d+))?",
    ),
    form(
        "revoke",
        facts.CommunicatorRevoked,
        "CommRevokeAsync",
        r"Comm(?P<stage>RevokeAsync START|RevokeAsync END) comm (?P<communicator_hex>0x[0-9a-f]{1,16})"
        r"(?: result (?P<result>-?\d+))?",
    ),
    form(
        "grow",
        facts.CommunicatorGrown,
        "Rank ",
        r"Rank (?P<rank>\d+): Generated commHash (?P<comm_hash_hex>0x[0-9a-f]{1,16}) from baseMagic"
        r" (?P<base_magic_hex>0x[0-9a-f]{1,16}) and newNRanks (?P<nranks>\d+)",
    ),
    form("comm_ranks", facts.CommunicatorRanks, "nranks ", r"nranks (?P<nranks>\d+)"),
    form(
        "comm_config",
        facts.CommunicatorSetting,
        "Comm config",
        r"Comm config (?P<name>\w{1,64}) set to (?P<value>-?\d+)",
    ),
    form("comm_config", facts.CommunicatorSetting, "Comm config", r"Comm config (?P<name>\w{1,64}) (?P<value>-?\d+)"),
    form(
        "comm_config",
        facts.CommunicatorSetting,
        "Check P2P",
        r"Check P2P Type is(?P<name>AllDirectP2p) (?P<value>\d+) directMode (?P<second_value>\d+)"
        r"(?: isAllCudaP2p \d+)?",
    ),
    form(
        "comm_config",
        facts.CommunicatorSetting,
        "CC O",
        r"CC (?P<state>Off|On)(?:, Multi-GPU CC (?:Off|On))?, (?P<name>workFifoBytes) (?P<value>\d+)",
        finish=lambda fields: {**fields, "second_value": int(fields.pop("state") == "On")},
    ),
    form(
        "comm_config",
        facts.CommunicatorSetting,
        "Symmetric VA",
        r"Symmetric VA size=(?P<value>\d+)GB",
        fixed={"name": "symmetric_va_gigabytes"},
        is_closed=True,
    ),
    form(
        "comm_config",
        facts.CommunicatorSetting,
        "P2P Chunksize",
        r"P2P Chunksize set to (?P<value>\d+)",
        fixed={"name": "p2p_chunk_bytes"},
    ),
    form(
        "launch_mode",
        facts.CommunicatorSetting,
        "Launch mode",
        r"Launch mode (?P<mode>Parallel|Group/CGMD|Group)",
        finish=lambda fields: {
            **fields,
            "name": f"launch_mode_{str(fields.pop('mode')).lower().replace('/', '_')}",
            "value": 1,
        },
    ),
    form(
        "comm_config",
        facts.CommunicatorSetting,
        "Using ",
        r"Using (?P<value>\d+) threads, Min Comp Cap (?P<second_value>\d+), Trees (?:enabled|disabled)[\x20-\x7e]{0,60}",
        fixed={"name": "threads"},
    ),
    form(
        "init_timings",
        facts.StartTimes,
        "Init timings",
        rf"Init timings(?: - (?P<api>ncclComm\w{{1,64}}))?: rank (?P<rank>\d+) nranks (?P<nranks>\d+) total (?P<total_s>{_S})"
        rf" \((?:kernels (?P<kernels_s>{_S}), )?(?:alloc (?P<alloc_s>{_S}), )?bootstrap (?P<bootstrap_s>{_S}),"
        rf" allgathers (?P<allgathers_s>{_S}), topo (?P<topo_s>{_S}), graphs (?P<graphs_s>{_S}),"
        rf" connections (?P<connections_s>{_S}), rest (?P<rest_s>{_S})\)",
        is_closed=True,
    ),
    form(
        "init_timings",
        facts.BootstrapTimes,
        "Bootstrap timings",
        rf"Bootstrap timings total (?P<total_s>{_S}) \(create (?P<create_s>{_S}), send (?P<send_s>{_S}),"
        rf" recv (?P<recv_s>{_S}), ring (?P<ring_s>{_S}), delay (?P<delay_s>{_S})\)",
        is_closed=True,
    ),
    form(
        "mnnvl",
        facts.MultiNodeNvlink,
        "MNNVL ",
        r"MNNVL (?P<mnnvl>\d+) cliqueId (?P<clique_id_hex>(?:0x)?[0-9a-f]{1,16}) cliqueSize (?P<clique_size>\d+)"
        r" cliqueRank (?P<clique_rank>-?\d+)(?: nvlDomainSize (?P<nvl_domain_size>\d+))?",
    ),
    form(
        "mnnvl",
        facts.MultiNodeNvlink,
        "MNNVL ",
        r"MNNVL busId (?P<bus_id_hex>0x[0-9a-f]{1,16}) fabric UUID (?P<fabric>[0-9a-f]{1,16}\.[0-9a-f]{1,16})"
        r" cliqueId (?P<clique_id_hex>0x[0-9a-f]{1,16}) state (?P<state>\d+) healthMask (?P<health_mask_hex>0x[0-9a-f]{1,16})",
    ),
    form(
        "ring_order",
        facts.RingOrder,
        "Channel ",
        r"Channel (?P<channel>\d+)/(?P<channels>\d+) :(?P<padding>  )?(?P<order>(?: +\d+)+)(?P<dots>\s*\.\.\.)?",
        finish=_ring_order,
    ),
    form(
        "ring_order",
        facts.RingOrder,
        ("Channel ", "Ring "),
        r"(?:Channel|Ring) (?P<channel>\d+) :(?P<padding>  )?(?P<order>(?: +\d+)+)(?P<dots>\s*\.\.\.)?",
        finish=_ring_order,
    ),
    form(
        "ring",
        facts.RingNeighbours,
        "Ring ",
        r"Ring (?P<channel>\d+) : (?P<previous>-?\d+) -> (?P<rank>\d+) -> (?P<next>-?\d+)",
    ),
    form(
        "tree",
        facts.TreeNeighbours,
        "Tree ",
        r"Tree (?P<channel>\d+) : (?P<up>-?\d+) -> (?P<rank>\d+) -> (?P<below>-?\d+(?:/-?\d+){2})",
        finish=_tree,
    ),
    form("tree", facts.TreeNeighbours, "Trees", r"Trees (?P<trees>\[\d+\] [\[\]0-9/>| -]+)", finish=_tree_nodes),
    form(
        "tree",
        facts.TreeNeighbours,
        "NVLS Trees",
        r"NVLS Trees : (?P<trees>\[\d+\] [\[\]0-9/>| -]+)",
        fixed={"is_nvls": True},
        finish=_tree_nodes,
    ),
    form(
        "channel_link",
        facts.ChannelLink,
        ("Channel ", "Ring "),
        r"(?:Channel|Ring) (?P<channel>\d+)(?:/(?P<connection>\d+))? : " + _ENDS,
        finish=_link,
    ),
    form(
        "channel_link",
        facts.ChannelLink,
        "CollNet ",
        r"CollNet (?P<channel>\d+)(?:/(?P<connection>\d+))? : (?P<from_rank>\d+)(?:\[(?P<from_bracket>[0-9a-f]+)\])?"
        r" \[(?P<direction>send|receive)\] via (?P<via>[\x20-\x7e]{1,120})",
        finish=lambda fields: _link({name: value for name, value in fields.items() if name != "from_bracket"}),
    ),
    form(
        "connected",
        facts.Connected,
        "Connected ",
        r"Connected (?P<what>all rings|all trees|NVLS tree|binomial trees|Collnet Chains)(?: [A-Z]\w{0,20})?"
        r"(?:, use ring PXN (?P<pxn>\d) GDR (?P<gdr>\d))?",
    ),
    form(
        "thresholds",
        facts.ThreadThresholds,
        "threadThresholds",
        r"threadThresholds (?P<table>-?\d+(?:/-?\d+)*(?: \| -?\d+(?:/-?\d+)*)*)",
        finish=_thresholds,
    ),
    form(
        "thresholds",
        facts.ThreadThresholds,
        "Threads per block",
        r"Threads per block : (?P<table>\d+(?:/\d+)*(?: \| \d+(?:/\d+)*)*)",
        finish=_thresholds,
    ),
    form(
        "nvls",
        facts.NvlsSupport,
        "NVLS multicast",
        r"NVLS multicast support is (?P<no>not )?available on dev (?P<device>\d+)(?: \(NVLS_NCHANNELS (?P<channels>\d+)\))?",
        finish=lambda fields: {**fields, "is_available": fields.pop("no", None) is None},
    ),
    form(
        "nvls",
        facts.NvlsBuffers,
        "NVLS comm",
        r"NVLS comm (?P<communicator_hex>0x[0-9a-f]{1,16}) headRank (?P<rank>-?\d+) nHeads (?P<heads>\d+)"
        r" nvlsRanks (?P<nranks>\d+) buffSize (?P<size_bytes>\d+) nvlsPerRankSize (?P<per_rank_bytes>\d+)"
        r" nvlsTotalSize (?P<total_bytes>\d+)",
        fixed={"step": "buffers"},
    ),
    form(
        "nvls",
        facts.NvlsBuffers,
        "NVLS Creat",
        rf"NVLS (?P<step>Creating|Created) Multicast group (?:{POINTER} )?nranks (?P<nranks>\d+) size (?P<size_bytes>\d+)"
        r" on rank (?P<rank>\d+)",
    ),
    form(
        "nvls",
        facts.NvlsBuffers,
        "NVLS rank",
        rf"NVLS rank (?P<rank>\d+) \(dev (?P<device>\d+)\) alloc done, ucptr {POINTER} ucgran \d+ mcptr {POINTER}"
        r" mcgran \d+ ucsize (?P<per_rank_bytes>\d+) mcsize (?P<total_bytes>\d+) \(inputsize (?P<size_bytes>\d+)\)",
        fixed={"step": "alloc"},
        is_closed=True,
    ),
    form(
        "capture",
        facts.CaptureMarker,
        "stream is being captured",
        r"stream is being captured by a new graph, id (?P<graph>\d+)",
    ),
    form(
        "comm_config",
        facts.CommunicatorSetting,
        "",
        r"(?P<function>\w{1,40}): (?P<name>tuner chunk size) (?P<value>\d+) exceeds buffer max (?P<second_value>\d+), clamping",
        is_closed=True,
    ),
    form(
        "symmetric_model",
        facts.SymmetricModel,
        "ReduceScatter_RailA2A",
        r"(?P<kernel>ReduceScatter_RailA2A_Lsa(?:LD|LDMC)) : satblocks=(?P<blocks>\d+) bufsize=(?P<buffer_bytes>-?\d+)"
        r" effbw=(?P<gb_per_s>[\d.e+]{1,20})",
    ),
    form(
        "symmetric_buffer",
        facts.SymmetricBuffer,
        "SymCheck",
        r"SymCheck: coll (?P<operation>\w{1,40}) size (?P<size_bytes>\d+) rank (?P<rank>\d+) bigOffset (?P<big_offset_hex>[0-9a-f]{1,16})"
        r" userOffset (?P<user_offset_hex>[0-9a-f]{1,16}) info->(?P<buffer>sendbuff|recvbuff) (?P<pointer_hex>0x[0-9a-f]{1,16})"
        r" (?:send|recv)Win->userPtr (?P<window_hex>0x[0-9a-f]{1,16})",
        travels=False,
    ),
    form(
        "rma",
        facts.RmaPlan,
        "scheduleRmaTasksToPlan",
        r"scheduleRmaTasksToPlan: rank=(?P<rank>\d+) ctx=(?P<context>\d+) func=(?P<function>\d+) nRmaTasks=(?P<tasks>\d+)"
        r" nRmaTasksProxy=(?P<proxy_tasks>\d+)(?: nRmaTasksCe=(?P<copy_engine_tasks>\d+)| \(CE excluded\))",
        travels=False,
    ),
    form(
        "rma",
        facts.RmaStep,
        "ncclRmaPutProxy",
        r"ncclRmaPutProxy (?P<step>enqueued) Desc: rank=(?P<rank>\d+) peer=(?P<peer>\d+) ctx=(?P<context>\d+)"
        r" size=(?P<size_bytes>\d+) signalMode=(?P<signal_mode>\d+) readySeq=(?P<ready>\d+) doneSeq=(?P<done>\d+)",
        travels=False,
    ),
)
"""Forms about communicators, in the order in which they are tried."""
