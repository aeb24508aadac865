# ruff: noqa: E501  a pattern is as long as the line that it reads
"""Lines that say that something went wrong: NCCL's warnings, and beside them PyTorch's watchdog, Python's exceptions, and
what launchers and schedulers say of programs that ended.

A warning may also come as INFO, with file and line inside the message, if NCCL expected the failure.

*Source:* NCCL `src/include/checks.h`, `src/include/cudawrap.h` (CUDA), `src/misc/ibvwrap.cc` (verbs), `src/transport/net_ib.cc` and
`src/transport/net_ib/` (InfiniBand), `src/misc/socket.cc`, `src/proxy.cc`, `src/init.cc`, `src/include/alloc.h`; PyTorch
`torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`; aws-ofi-nccl `src/nccl_ofi_sendrecv`, `src/nccl_ofi_rdma` (`NET/OFI`).
"""

from __future__ import annotations

from typing import Final

from ncclscope_agent.sources.nccl_log.line_form import Family, Fields, forms
from ncclscope_wire import facts

_TEXT: Final = r"[\x20-\x7e]"
_HEX: Final = r"0x[0-9a-f]{1,16}"
_PEER: Final = r"(?P<peer>[\w.:%-]{1,200}<\d{1,5}>)"
_GIDS: Final = r"(?: localGid \S{0,80}?)?(?: ?remoteGids ?\S{0,80}?)?(?: hca (?P<nic>\S{1,64}))?"
_IB: Final = r"NET/IB ?: "
_PORT: Final = r"(?P<nic>[\w.+-]{1,64}):\d+ "
_NEEDED_CALLS: Final = (
    "modify_qp", "create_qp", "create_cq", "alloc_pd", "reg_mr", "reg_mr_iova2", "post_send", "post_recv", "poll_cq",
)  # fmt: skip
"""Verbs whose failure is NCCL's; others fail where it looks for devices and features, and goes on without."""
_EVENT: Final = rf"(?P<event>{_TEXT}{{1,120}})"


def _ranks(fields: Fields) -> Fields:
    fields["ranks"] = [int(str(fields.pop(name))) for name in ("one", "other") if name in fields]
    return fields


COMPLETIONS: Final[tuple[Family, ...]] = forms(
    "ib_completion",
    facts.IbCompletionError,
    _IB + rf"Got completion (?:from peer {_PEER} )?with (?:error|status=)(?: )?(?P<status>-?\d+),? opcode[ =]-?\d+,?"
    r" len[ =]-?\d+,? vendor err -?\d+(?: \(\w{1,32}\))?" + _GIDS,
    _IB + rf"Got completion (?:from peer {_PEER} )?with status=(?P<status_name>\w{{1,64}})\((?P<status>-?\d+)\)"
    r" opcode=\w{1,64}\(-?\d+\)(?: (?:reqSize|len)=-?\d+)? vendor_err=\d+(?: req_type=\w{1,32})? {0,2}" + _GIDS,
)
"""Failed work requests: 2.8 to 2.27 with numbers, from 2.28.7 on with names."""

VERBS: Final[tuple[Family, ...]] = forms(
    "verbs_failure",
    facts.VerbsFailure,
    rf"Call to (?P<call>ibv_(?:{'|'.join(_NEEDED_CALLS)})) failed(?! with {_TEXT}{{1,800}}, retrying )"
    r"(?: with (?:error |\d{1,5} )?(?P<error>[A-Z][\w '/()-]{1,100}?)(?: errno \d{1,5})?"
    rf"(?:, on dev (?P<nic>[\w.+-]{{1,64}}):\d+{_TEXT}{{0,800}})?)?",
)
"""Calls that failed and are not tried again. By version and call nothing follows, or the error's text, in newer ones with errno
behind it; behind `ibv_modify_qp` stand errno, text, device and the addresses of both sides. *Source:* NCCL `src/misc/ibvwrap.cc`.
"""

EVENTS: Final[tuple[Family, ...]] = (
    *forms(
        "ib_event",
        facts.IbEvent,
        _IB + rf"(?:{_PORT})?Got async event : {_EVENT}",
        _IB + _PORT + r"(?P<event>unknown event type) \(\d+\)",
        fixed={"severity": "unknown"},
    ),
    *forms(
        "ib_event",
        facts.IbEvent,
        _IB + _PORT + rf"async fatal event(?: on (?:CQ|QP|SRQ)[\w ()#]{{0,60}})?: {_EVENT}",
        fixed={"severity": "fatal"},
    ),
    *forms("ib_event", facts.IbEvent, _IB + _PORT + rf"Got async error event: {_EVENT}", fixed={"severity": "error"}),
    *forms(
        "ib_event",
        facts.IbEvent,
        _IB + _PORT + r"Got non-fatal async event: (?P<event>[\w /-]{1,100})\(\d+\)",
        _IB + _PORT + r"(?P<event>GID table changed)",
        _IB + r"(?P<nic>[\w.+-]{1,64})(?::\d+)? (?P<event>speed change detected: -?\d+ -> [\w.]{1,20} Mbps)",
        fixed={"severity": "non-fatal"},
    ),
    *forms(
        "port_failover",
        facts.PortFailover,
        _IB + rf"{_TEXT}{{0,120}}?Device (?P<device>\d+) (?:is )?marked as failed{_TEXT}{{0,200}}",
        fixed={"is_failed": True},
    ),
    *forms(
        "port_failover",
        facts.PortFailover,
        _IB + rf"{_TEXT}{{0,120}}?Device (?P<device>\d+) has been recovered{_TEXT}{{0,200}}",
        fixed={"is_failed": False},
    ),
)

FAILURES: Final[tuple[Family, ...]] = (
    *forms(
        "cuda_failure",
        facts.CudaFailure,
        r"(?:Cuda|CUDA) failure (?:-?\d+ )?'(?P<error>[^']{1,300})'",
        rf"Cuda failure {_TEXT}{{0,80}}?:\d+ '(?P<error>[^']{{1,300}})'",
        starts=("Cuda failure", "CUDA failure"),
    ),
    *forms(
        "connection",
        facts.ConnectionTrouble,
        rf"(?:Net : |socketProgress\w{{0,10}}: )?Connection closed by remote peer ?{_PEER}?",
        starts=("Net : Connection", "socketProgress", "Connection closed"),
        fixed={"what": "closed"},
    ),
    *forms(
        "connection",
        facts.ConnectionTrouble,
        rf"socket(?:Start|Poll)Connect: (?:exceeded (?:retries|timeouts|error retry count) ?\(\d+\)|Connect to {_PEER} failed{_TEXT}{{0,80}})",
        rf"socket\w{{1,40}}: connect to {_PEER} returned {_TEXT}{{1,80}}?, exceeded error retry count after \d+ attempts",
        fixed={"what": "retries"},
    ),
    *forms(
        "proxy_failure",
        facts.ProxyTrouble,
        r"\[Proxy Service(?: UDS)? \d+\] (?P<text>(?P<what>Failed to execute operation) (?P<operation>\w{1,40})"
        r" from rank -?\d+, retcode -?\d+)",
        rf"\[Service thread\] (?P<text>(?P<what>Error encountered progressing operation)"
        rf"(?:[ =:]{{1,3}}(?P<operation>[A-Z]\w{{1,20}})(?=[ ,]))?{_TEXT}{{0,400}})",
        rf"\[Service thread\] (?P<text>(?P<what>Accept failed|Could not receive type from localRank){_TEXT}{{0,400}})",
    ),
    *forms(
        "comm_failure",
        facts.CommunicatorTrouble,
        rf"Comm {_HEX} is in (?P<what>abort) state",
        rf"ncclCommSetAsyncError: (?P<what>error) comm {_HEX} sets state \d+",
        r"communicator encountered a (?P<what>fatal error) \(detected in \w{1,80}\)",
    ),
    *forms(
        "misuse",
        facts.Misuse,
        r"(?P<what>Duplicate GPU) detected : rank (?P<one>\d+) and rank (?P<other>\d+) both on CUDA device [0-9a-f]{1,16}"
        r"(?: \(continuing\.\.\.\))?",
        r"(?P<what>Multiple [Rr]anks) (?:detected using the same GPU on this node|are using the same GPU/Partition)\."
        r" Set NCCL_MULTI_RANK_GPU_ENABLE=1 [\x20-\x7e]{1,160}",
        r"(?P<what>Mismatched NCCL version) detected : rank (?P<one>\d+) version \d+ rank (?P<other>\d+) version \d+",
        r"(?P<what>No transport found) for rank (?P<one>\d+)\[[0-9a-f]+\] -> rank (?P<other>\d+)\[[0-9a-f]+\]",
        r"(?P<what>ncclTopoRankToIndex) could not find rank (?P<one>\d+)",
        finish=_ranks,
    ),
    *forms(
        "misuse",
        facts.Misuse,
        rf"\w{{1,40}} : (?P<what>invalid (?:root|peer|type|op|reduction operation|datatype|count)) -?\d+{_TEXT}{{0,160}}",
        starts=("AllReduce ", "Broadcast ", "Reduce ", "Send ", "Recv ", "Gather ", "Scatter ", "AllGather "),
    ),
    *forms(
        "misuse",
        facts.Misuse,
        r"(?P<what>(?:Error : no|No) algorithm/protocol available)(?: for function \w{1,40})?[\x20-\x7e]{0,200}",
        starts=("Error : no", "No algorithm"),
    ),
    *forms(
        "ofi_failure",
        facts.OfiFailure,
        rf"NET/OFI Unable to register memory \(type = \d+\) for device \d+\. RC: (?P<code>-?\d+), Error: (?P<error>{_TEXT}{{1,300}})",
        fixed={"what": "register memory"},
    ),
    *forms(
        "ofi_failure",
        facts.OfiFailure,
        r"NET/OFI Request (?:0x)?[0-9a-f]{1,16}(?: seq \d+)? completed with error\."
        rf"(?: RC: (?P<code>-?\d+)\.?(?: Flags: \d+\.)?(?: Error: (?P<error>{_TEXT}{{1,600}}?)(?:\. Completed length: {_TEXT}{{1,400}})?)?)?",
        fixed={"what": "complete a request"},
    ),
    *forms(
        "memory_failure",
        facts.MemoryFailure,
        r"Failed to (?P<what>CUDA malloc|CUDA calloc|CUDA calloc async|CUDA host alloc|host alloc|malloc|calloc|CUDA malloc async) (?P<size_bytes>\d+) bytes",
    ),
)

_GROUP: Final = (
    r"\[PG (?:ID )?(?P<group_id>[\w.:-]{1,64})(?: PG GUID (?P<group_uid>[\w.:-]{1,64}))?"
    r"(?: ?\((?P<group>[^()]{1,100})\))? Rank (?P<rank>\d+)\]"
)
"""2.2: the group's number; 2.3: its name for all ranks and its description; 2.4 on: number, name and description."""
_WORK: Final = (
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<operation>\w{1,40}),"
    r" (?:NumelIn=\d+, NumelOut=\d+|TensorShape=\[[\d, ]{0,200}\]), Timeout\(ms\)=(?P<timeout_ms>\d+)\)"
    r" ran for \d+ milliseconds before timing out\."
)

_SAID: Final = r"[\x20-\x7e]{0,900}"
_KILLING: Final = frozenset({"9", "15", "SIGKILL", "SIGTERM", "Killed", "CANCELLED"})


def _ended(fields: Fields) -> Fields:
    """The end of a program, by its signal or in words: signals that kill it come from outside."""
    status = str(fields.pop("status", ""))
    return {**fields, "what": "killed" if status.removeprefix("-") in _KILLING else "exited"}


PROGRAMS: Final[tuple[Family, ...]] = (
    *forms(
        "program_failure",
        facts.ProgramFailure,
        rf"(?P<text>(?:[\w.]{{1,80}}\.)?\w{{0,40}}Error: CUDA out of memory\.{_SAID})",
        starts=(),
        fixed={"what": "out of memory"},
    ),
    *forms(
        "program_failure",
        facts.ProgramFailure,
        rf"(?P<text>(?:[\w.]{{1,80}}\.)?[A-Z]\w{{0,40}}Error: {_SAID})",
        starts=(),
        fixed={"what": "exception"},
    ),
    *forms(
        "program_failure",
        facts.ProgramFailure,
        rf"(?P<text>process \d{{1,6}} terminated with signal (?P<status>SIG\w{{1,8}}){_SAID})",
        r"error: \*\*\* (?P<text>(?:JOB|STEP) [\d._+]{1,40} ON [\w.-]{1,80} (?P<status>CANCELLED) AT [\dT:-]{1,30}"
        r"(?: DUE TO (?!TASK FAILURE)[A-Z ]{1,40})?) \*\*\*",
        r"error: \*\*\* (?P<text>(?:JOB|STEP) [\d._+]{1,40} ON [\w.-]{1,80} CANCELLED AT [\dT:-]{1,30} DUE TO TASK FAILURE) \*\*\*",
        rf"error: (?P<text>[\w.-]{{1,80}}: tasks? [\d,-]{{1,200}}: (?P<status>Killed|[A-Z][\w ]{{1,20}}){_SAID})",
        rf"(?P<text>rank (?P<global_rank>\d{{1,9}}) died from signal (?P<status>\d{{1,2}}){_SAID})",
        rf"(?P<text>failed \(exitcode: (?P<status>-?\d{{1,3}})\) local_rank: \d{{1,6}} \(pid: (?P<pid>\d{{1,9}})\) of binary: {_SAID})",
        rf"(?P<text>Signal (?P<status>\d{{1,2}}) \(SIG\w{{1,8}}\) received by PID (?P<pid>\d{{1,9}})){_SAID}",
        r"(?P<text>Terminating process (?P<pid>\d{1,9}) via signal SIG\w{1,8})",
        starts=(),
        finish=_ended,
    ),
)
"""Forms of the text behind what `line_families.read_program` finds.

*Source:* PyTorch `c10/cuda/CUDACachingAllocator.cpp`, `torch/distributed/__init__.py` (rank in front of an exception),
`torch/distributed/elastic/multiprocessing/api.py`, `torch/multiprocessing/spawn.py`; Slurm `srun`, `slurmstepd`; PALS.
"""

TORCH: Final[tuple[Family, ...]] = (
    *forms(
        "program_failure",
        facts.ProgramFailure,
        rf"(?P<text>(?:NCCL error in|CUDA error): {_SAID})",
        r"\[Rank \d+\] Collective WorkNCCL\([^()]{1,200}Timeout\(ms\)=\d+\) raised the following async exception: "
        rf"(?P<text>NCCL error: {_SAID})",
        starts=(),
        fixed={"what": "exception"},
    ),
    *forms(
        "torch_group",
        facts.TorchGroup,
        _GROUP
        + rf" ProcessGroupNCCL initialization options: (?:NCCL version: [\w.+-]{{1,40}}, )?size: \d+, global rank: (?P<global_rank>\d+),{_TEXT}{{0,1000}}",
    ),
    *forms(
        "torch_group",
        facts.TorchCommunicator,
        # Up to 2.4 the device is printed as one byte of that value.
        _GROUP
        + rf" ProcessGroupNCCL created ncclComm_ (?P<communicator_hex>{_HEX}) on CUDA device:(?: (?P<device>\d{{1,4}})|[\x00-\x20]{{0,3}})",
    ),
    *forms(
        "torch_timeout",
        facts.TorchTimeout,
        r"\[Rank (?P<rank>\d+)\] " + _WORK,
        rf"{_GROUP} Process group watchdog thread terminated with exception: \[Rank \d+\] " + _WORK,
    ),
    *forms(
        "torch_progress",
        facts.TorchProgress,
        _GROUP + r"  ?failure detected by watchdog at work sequence id: (?P<failed_at>-?\d+)"
        r" PG status: last enqueued work: (?P<last_enqueued>-?\d+), last completed work: (?P<last_completed>-?\d+)",
        _GROUP + r" Timeout at NCCL work: (?P<failed_at>\d+), last enqueued NCCL work: (?P<last_enqueued>-?\d+),"
        r" last completed NCCL work: (?P<last_completed>-?\d+)\.",
        fixed={"what": "failure"},
    ),
    *forms(
        "torch_progress",
        None,
        _GROUP + r" Received a dump signal due to a collective timeout from (?:this local rank| ?rank \d+)"
        rf" and we will try our best to dump the debug info\. Last enqueued NCCL work: -?\d+,"
        rf" last completed NCCL work: -?\d+\.{_TEXT}{{0,800}}",
    ),
)
"""Forms of the text behind `ProcessGroupNCCL.cpp:N] ` or `what():  `."""

FAMILIES: Final[tuple[Family, ...]] = (*COMPLETIONS, *VERBS, *EVENTS, *FAILURES)
"""Forms of trouble, in the order in which they are tried."""
