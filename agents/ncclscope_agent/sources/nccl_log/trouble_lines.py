# ruff: noqa: E501  a pattern is as long as the line that it reads
"""Lines that say that something went wrong: NCCL's warnings, and PyTorch's watchdog beside them.

A warning may also come as INFO, with file and line inside the message, if NCCL expected the failure.

*Source:* NCCL `src/include/checks.h`, `src/include/cudawrap.h` (CUDA), `src/misc/ibvwrap.cc` (verbs), `src/transport/net_ib.cc` and
`src/transport/net_ib/` (InfiniBand), `src/misc/socket.cc`, `src/proxy.cc`, `src/init.cc`, `src/include/alloc.h`; PyTorch
`torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`.
"""

from __future__ import annotations

from typing import Final

from ncclscope_agent.sources.nccl_log.line_form import Family, Fields, form
from ncclscope_wire import facts

_TEXT: Final = r"[\x20-\x7e]"
_HEX: Final = r"0x[0-9a-f]{1,16}"
_PEER: Final = r"(?P<peer>[\w.:%-]{1,200}<\d{1,5}>)"
_GIDS: Final = (
    r"(?: localGid (?P<local_gid>\S{0,80}?))?(?: ?remoteGids ?(?P<remote_gid>\S{0,80}?))?(?: hca (?P<nic>\S{1,64}))?"
)
_IB: Final = r"NET/IB ?: "


def _ranks(fields: Fields) -> Fields:
    fields["ranks"] = [int(str(fields.pop(name))) for name in ("one", "other") if name in fields]
    fields["versions"] = [int(str(fields.pop(name))) for name in ("version", "other_version") if name in fields]
    return fields


def _event(severity: str) -> dict[str, object]:
    return {"severity": severity}


COMPLETIONS: Final[tuple[Family, ...]] = (
    form(
        "ib_completion",
        facts.IbCompletionError,
        "NET/",
        _IB
        + rf"Got completion (?:from peer {_PEER} )?with (?:error|status=)(?: )?(?P<status>-?\d+),? opcode[ =](?P<opcode>-?\d+),?"
        rf" len[ =](?P<size_bytes>-?\d+),? vendor err (?P<vendor_error>-?\d+)(?: \((?P<request>\w{{1,32}})\))?" + _GIDS,
    ),
    form(
        "ib_completion",
        facts.IbCompletionError,
        "NET/",
        _IB + rf"Got completion (?:from peer {_PEER} )?with status=(?P<status_name>\w{{1,64}})\((?P<status>-?\d+)\)"
        r" opcode=(?P<opcode_name>\w{1,64})\((?P<opcode>-?\d+)\)(?: (?:reqSize|len)=(?P<size_bytes>-?\d+))?"
        r" vendor_err=(?P<vendor_error>\d+)(?: req_type=(?P<request>\w{1,32}))? {0,2}" + _GIDS,
    ),
)
"""Failed work requests: 2.8 to 2.27 with numbers, from 2.28.7 on with names."""

EVENTS: Final[tuple[Family, ...]] = (
    form(
        "ib_event",
        facts.IbEvent,
        "NET/",
        _IB + rf"Got async event : (?P<event>{_TEXT}{{1,120}})",
        fixed=_event("unknown"),
    ),
    form(
        "ib_event",
        facts.IbEvent,
        "NET/",
        _IB + rf"(?P<nic>[\w.+-]{{1,64}}):(?P<port>\d+) Got async event : (?P<event>{_TEXT}{{1,120}})",
        fixed=_event("unknown"),
    ),
    form(
        "ib_event",
        facts.IbEvent,
        "NET/",
        _IB
        + rf"(?P<nic>[\w.+-]{{1,64}}):(?P<port>\d+) async fatal event(?: on (?P<on>CQ|QP|SRQ)[\w ()#]{{0,60}})?: (?P<event>{_TEXT}{{1,120}})",
        fixed=_event("fatal"),
    ),
    form(
        "ib_event",
        facts.IbEvent,
        "NET/",
        _IB + rf"(?P<nic>[\w.+-]{{1,64}}):(?P<port>\d+) Got async error event: (?P<event>{_TEXT}{{1,120}})",
        fixed=_event("error"),
    ),
    form(
        "ib_event",
        facts.IbEvent,
        "NET/",
        _IB
        + r"(?P<nic>[\w.+-]{1,64}):(?P<port>\d+) Got non-fatal async event: (?P<event>[\w /-]{1,100})\((?P<code>\d+)\)",
        fixed=_event("non-fatal"),
        is_closed=True,
    ),
    form(
        "ib_event",
        facts.IbEvent,
        "NET/",
        _IB + r"(?P<nic>[\w.+-]{1,64}):(?P<port>\d+) (?P<event>GID table changed)",
        fixed=_event("non-fatal"),
        is_closed=True,
    ),
    form(
        "ib_event",
        facts.IbEvent,
        "NET/",
        _IB + r"(?P<nic>[\w.+-]{1,64}):(?P<port>\d+) (?P<event>unknown event type) \((?P<code>\d+)\)",
        fixed=_event("unknown"),
        is_closed=True,
    ),
    form(
        "ib_event",
        facts.IbEvent,
        "NET/",
        _IB + r"(?P<nic>[\w.+-]{1,64})(?::(?P<port>\d+))? (?P<event>speed change detected: -?\d+ -> [\w.]{1,20} Mbps)",
        fixed=_event("non-fatal"),
        is_closed=True,
    ),
    form(
        "port_failover",
        facts.PortFailover,
        "NET/",
        _IB + rf"{_TEXT}{{0,120}}?Device (?P<device>\d+) (?:is )?marked as failed{_TEXT}{{0,200}}",
        fixed={"is_failed": True},
    ),
    form(
        "port_failover",
        facts.PortFailover,
        "NET/",
        _IB + rf"{_TEXT}{{0,120}}?Device (?P<device>\d+) has been recovered{_TEXT}{{0,200}}",
        fixed={"is_failed": False},
    ),
)

FAILURES: Final[tuple[Family, ...]] = (
    form(
        "cuda_failure",
        facts.CudaFailure,
        ("Cuda failure", "CUDA failure"),
        r"(?:Cuda|CUDA) failure (?:(?P<code>-?\d+) )?'(?P<error>[^']{1,300})'",
        is_closed=True,
    ),
    form(
        "cuda_failure",
        facts.CudaFailure,
        "Cuda failure",
        rf"Cuda failure {_TEXT}{{0,80}}?:\d+ '(?P<error>[^']{{1,300}})'",
        is_closed=True,
    ),
    form(
        "connection",
        facts.ConnectionTrouble,
        ("Net : Connection", "socketProgress", "Connection closed"),
        rf"(?:Net : |socketProgress\w{{0,10}}: )?Connection closed by remote peer ?{_PEER}?",
        fixed={"what": "closed"},
    ),
    form(
        "connection",
        facts.ConnectionTrouble,
        ("socketStartConnect", "socketPollConnect"),
        rf"socket(?:Start|Poll)Connect: (?:Connect to {_PEER} failed{_TEXT}{{0,80}}|exceeded (?:retries|timeouts|error retry count) ?\((?P<attempts>\d+)\))",
        fixed={"what": "retries"},
    ),
    form(
        "connection",
        facts.ConnectionTrouble,
        "socket",
        rf"socket\w{{1,40}}: connect to {_PEER} returned (?P<error>{_TEXT}{{1,80}}?), exceeded error retry count after (?P<attempts>\d+) attempts",
        fixed={"what": "retries"},
        is_closed=True,
    ),
    form(
        "proxy_failure",
        facts.ProxyTrouble,
        "[Proxy Service",
        r"\[Proxy Service(?: UDS)? (?P<device>\d+)\] (?P<text>(?P<what>Failed to execute operation) (?P<operation>\w{1,40})"
        r" from rank (?P<rank>-?\d+), retcode (?P<result>-?\d+))",
    ),
    form(
        "proxy_failure",
        facts.ProxyTrouble,
        "[Service thread]",
        rf"\[Service thread\] (?P<text>(?P<what>Accept failed|Error encountered progressing operation|Could not receive type from localRank)"
        rf"(?:[ =:]{{1,3}}(?P<operation>[A-Z]\w{{1,20}})(?=[ ,]))?{_TEXT}{{0,400}})",
        finish=lambda fields: (
            fields
            if fields.get("what") == "Error encountered progressing operation"
            else {name: value for name, value in fields.items() if name != "operation"}
        ),
    ),
    form(
        "comm_failure",
        facts.CommunicatorTrouble,
        "Comm ",
        rf"Comm (?P<communicator_hex>{_HEX}) is in (?P<what>abort) state",
        is_closed=True,
    ),
    form(
        "comm_failure",
        facts.CommunicatorTrouble,
        "ncclCommSetAsyncError",
        rf"ncclCommSetAsyncError: (?P<what>error) comm (?P<communicator_hex>{_HEX}) sets state (?P<result>\d+)",
    ),
    form(
        "comm_failure",
        facts.CommunicatorTrouble,
        "communicator encountered",
        r"communicator encountered a (?P<what>fatal error) \(detected in (?P<detected_in>\w{1,80})\)",
        is_closed=True,
    ),
    form(
        "misuse",
        facts.Misuse,
        "Duplicate GPU",
        r"(?P<what>Duplicate GPU) detected : rank (?P<one>\d+) and rank (?P<other>\d+) both on CUDA device (?P<bus_id_hex>[0-9a-f]{1,16})"
        r"(?: \(continuing\.\.\.\))?",
        finish=_ranks,
    ),
    form(
        "misuse",
        facts.Misuse,
        "Multiple ",
        r"(?P<what>Multiple [Rr]anks) (?:detected using the same GPU on this node|are using the same GPU/Partition)\."
        r" Set NCCL_MULTI_RANK_GPU_ENABLE=1 [\x20-\x7e]{1,160}",
    ),
    form(
        "misuse",
        facts.Misuse,
        "Mismatched NCCL",
        r"(?P<what>Mismatched NCCL version) detected : rank (?P<one>\d+) version (?P<version>\d+) rank (?P<other>\d+)"
        r" version (?P<other_version>\d+)",
        finish=_ranks,
    ),
    form(
        "misuse",
        facts.Misuse,
        (
            "AllReduce ",
            "Broadcast ",
            "Reduce ",
            "Send ",
            "Recv ",
            "Gather ",
            "Scatter ",
            "AllGather ",
            "ReduceScatter ",
        ),
        rf"(?P<function>\w{{1,40}}) : (?P<what>invalid (?:root|peer|type|op|reduction operation|datatype|count)) (?P<value>-?\d+)(?P<detail>{_TEXT}{{0,160}})",
    ),
    form(
        "misuse",
        facts.Misuse,
        ("Error : no", "No algorithm"),
        r"(?P<what>(?:Error : no|No) algorithm/protocol available)(?: for function (?P<function>\w{1,40}))?(?P<detail>[\x20-\x7e]{0,200})",
    ),
    form(
        "misuse",
        facts.Misuse,
        "No transport",
        r"(?P<what>No transport found) for rank (?P<one>\d+)\[[0-9a-f]+\] -> rank (?P<other>\d+)\[[0-9a-f]+\]",
        finish=_ranks,
        is_closed=True,
    ),
    form(
        "misuse",
        facts.Misuse,
        "ncclTopoRankToIndex",
        r"(?P<what>ncclTopoRankToIndex) could not find rank (?P<one>\d+)",
        finish=_ranks,
    ),
    form(
        "memory_failure",
        facts.MemoryFailure,
        "Failed to ",
        r"Failed to (?P<what>CUDA malloc|CUDA calloc|CUDA calloc async|CUDA host alloc|host alloc|malloc|calloc|CUDA malloc async) (?P<size_bytes>\d+) bytes",
        is_closed=True,
    ),
)

_GROUP: Final = (
    r"\[PG (?:ID )?(?P<group_id>[\w.:-]{1,64})(?: PG GUID (?P<group_uid>[\w.:-]{1,64}))?"
    r"(?: ?\((?P<group>[^()]{1,100})\))? Rank (?P<rank>\d+)\]"
)
"""2.2: the group's number; 2.3: its name for all ranks and its description; 2.4 on: number, name and description."""
_WORK: Final = (
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<operation>\w{1,40}),"
    r" (?:NumelIn=(?P<elements_in>\d+), NumelOut=(?P<elements_out>\d+)|TensorShape=\[[\d, ]{0,200}\]), Timeout\(ms\)=(?P<timeout_ms>\d+)\)"
    r" ran for (?P<ran_ms>\d+) milliseconds before timing out\."
)

TORCH: Final[tuple[Family, ...]] = (
    form(
        "torch_group",
        facts.TorchGroup,
        "",
        _GROUP
        + rf" ProcessGroupNCCL initialization options: (?:NCCL version: [\w.+-]{{1,40}}, )?size: (?P<size>\d+), global rank: (?P<global_rank>\d+),{_TEXT}{{0,1000}}",
    ),
    form(
        "torch_group",
        facts.TorchCommunicator,
        "",
        # Up to 2.4 the device is printed as one byte of that value.
        _GROUP
        + rf" ProcessGroupNCCL created ncclComm_ (?P<communicator_hex>{_HEX}) on CUDA device:(?: (?P<device>\d{{1,4}})|[\x00-\x20]{{0,3}})",
        is_closed=True,
    ),
    form("torch_timeout", facts.TorchTimeout, "", r"\[Rank (?P<rank>\d+)\] " + _WORK),
    form(
        "torch_timeout",
        facts.TorchTimeout,
        "",
        rf"{_GROUP} Process group watchdog thread terminated with exception: \[Rank \d+\] " + _WORK,
    ),
    form(
        "torch_progress",
        facts.TorchProgress,
        "",
        _GROUP + r"  ?(?P<what>failure) detected by watchdog at work sequence id: (?P<failed_at>-?\d+)"
        r" PG status: last enqueued work: (?P<last_enqueued>-?\d+), last completed work: (?P<last_completed>-?\d+)",
    ),
    form(
        "torch_progress",
        facts.TorchProgress,
        "",
        _GROUP + r" Timeout at NCCL work: (?P<failed_at>\d+), last enqueued NCCL work: (?P<last_enqueued>-?\d+),"
        r" last completed NCCL work: (?P<last_completed>-?\d+)\.",
        fixed={"what": "failure"},
        is_closed=True,
    ),
    form(
        "torch_progress",
        facts.TorchProgress,
        "",
        _GROUP
        + r" Received a (?P<what>dump signal) due to a collective timeout from (?:this local rank| ?rank (?P<from_rank>\d+))"
        rf" and we will try our best to dump the debug info\. Last enqueued NCCL work: (?P<last_enqueued>-?\d+),"
        rf" last completed NCCL work: (?P<last_completed>-?\d+)\.{_TEXT}{{0,800}}",
    ),
)
"""Forms of the text behind `ProcessGroupNCCL.cpp:N] ` or `what():  `."""

FAMILIES: Final[tuple[Family, ...]] = (*COMPLETIONS, *EVENTS, *FAILURES)
"""Forms of trouble, in the order in which they are tried."""
