"""Lines as NCCL Inspector writes them, by format version.

*Source:* NCCL `plugins/profiler/inspector/inspector_json.cc`.
"""

from __future__ import annotations

import json

DUMPED_US = 1_766_407_620_016_192


def header(*, rank: int = 0, comm_hash: int = 0xAA498EFB3B18BC, nranks: int = 4, name: str | None = None) -> str:
    named = "" if name is None else f'"comm_name":{json.dumps(name)},'
    return f'"header":{{"id":"{comm_hash:#x}",{named}"rank":{rank},"n_ranks":{nranks},"nnodes":1}}'


def metadata(*, version: str = "v4.0", at_us: int = DUMPED_US, host: str = "node1.cluster", pid: int = 41) -> str:
    return (
        f'"metadata":{{"inspector_output_format_version":"{version}","git_rev":"","rec_mechanism":'
        f'"nccl_profiler_interface","dump_timestamp_us":{at_us},"hostname":"{host}","pid":{pid}}}'
    )


def coll_perf(
    sequence: int, *, op: str = "AllReduce", size: int = 4096, us: int = 10, timing: str = "kernel_gpu", more: str = ""
) -> str:
    busbw = size / us / 1e3 * 1.5 if us else 0.0
    return (
        f'"coll_perf":{{"coll":"{op}","coll_sn":{sequence},"coll_msg_size_bytes":{size},"coll_exec_time_us":{us},'
        f'"coll_timing_source":"{timing}","coll_algobw_gbs":{busbw / 1.5:f},"coll_busbw_gbs":{busbw:f}{more}}}'
    )


def p2p_perf(sequence: int, *, op: str = "Send", peer: int = 1, size: int = 8192, us: int = 20) -> str:
    rate = size / us / 1e3
    return (
        f'"p2p_perf":{{"p2p":"{op}","p2p_sn":{sequence},"p2p_peer":{peer},"p2p_msg_size_bytes":{size},'
        f'"p2p_exec_time_us":{us},"p2p_timing_source":"kernel_gpu","p2p_algobw_gbs":{rate:f},"p2p_busbw_gbs":{rate:f}}}'
    )


def record(payload: str, *, rank: int = 0, version: str = "v4.0", **about: object) -> str:
    """A record that carries its header, as up to v4.2."""
    return f"{{{header(rank=rank)},{metadata(version=version, **about)},{payload}}}"  # type: ignore[arg-type]


def mark(
    coll: int, p2p: int = 0, *, proxy: int = 0, dropped: int = 0, rank: int = 0, comm_hash: int = 0xAA498EFB3B18BC
) -> str:
    """The line that begins a dump, as from v4.3 on."""
    about = f"{header(rank=rank, comm_hash=comm_hash, name='dp')},{metadata(version='v4.3')}"
    return (
        f'{{{about},"dump_stats":{{"coll_records":{coll},"coll_dropped_total":{dropped},'
        f'"coll_dropped_since_last_dump":{dropped},"p2p_records":{p2p},"p2p_dropped_total":0,'
        f'"p2p_dropped_since_last_dump":0,"proxy_records":{proxy}}}}}'
    )


def dump_v43(records: int = 3, *, first: int = 0, comm_hash: int = 0xAA498EFB3B18BC) -> list[str]:
    """One dump of a communicator: the mark, and records without headers."""
    payloads = [f"{{{coll_perf(first + number)}}}" for number in range(records)]
    return [mark(records, comm_hash=comm_hash), *payloads]


def text(*lines: str) -> bytes:
    return "".join(line + "\n" for line in lines).encode()
