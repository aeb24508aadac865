"""The text of NCCL's log lines, by version. Every function gives the message without the prefix.

Source: NCCL src/debug.cc ncclDebugLog (prefix), src/enqueue.cc ncclEnqueueCheck (operation lines) and getAlgoInfo,
scheduleCollTasksToPlan (TUNING), src/init.cc (Init, split, Destroy).
"""

from __future__ import annotations

from datetime import UTC, datetime

from ncclscope_simulator.version import Traits

NIL = "(nil)"


def stamp(host_ns: int) -> str:
    """The time stamp of NCCL_DEBUG_TIMESTAMP_FORMAT="[%F %T.%6f] ", in UTC."""
    seconds, rest = divmod(host_ns, 10**9)
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"[{moment:%Y-%m-%d %H:%M:%S}.{rest // 1000:06d}] "


def operation_parts(
    *, op: str, send: str, recv: str, count: int, dtype: int, red: int, root: int, comm: str, ranks: int, stream: str
) -> tuple[str, str]:
    """The text before and the text after the hexadecimal opCount of an operation line."""
    return (
        f"{op}: opCount ",
        f" sendbuff {send} recvbuff {recv} count {count} datatype {dtype} op {red} root {root}"
        f" comm {comm} [nranks={ranks}] stream {stream}",
    )


def call(*, op: str, send: str, recv: str, count: int, dtype: int, red: int, root: int, comm: str, stream: str) -> str:
    """The CALL line's text for an operation: buffers in hexadecimal without 0x."""
    return f"nccl{op}({_bare(send)},{_bare(recv)},{count},{dtype},{red},{root},{comm},{stream})"


def _bare(pointer: str) -> str:
    return "0" if pointer == NIL else pointer.removeprefix("0x")


_ALGORITHMS = {"TREE": 0, "RING": 1}
_PROTOCOLS = {"LL": 0, "LL128": 1, "SIMPLE": 2}


def tuning(
    version: Traits,
    *,
    op: str,
    bytes_per_rank: int,
    total_bytes: int,
    algorithm: str,
    protocol: str,
    time_us: float,
    channels: int,
) -> str | None:
    """The TUNING line's text; None if the version prints none at INFO.

    Bytes: of all ranks up to 2.23, count x size from 2.24, which is per rank for AllGather and ReduceScatter.
    """
    if version.tuning == "none":
        return None
    if version.tuning == "channels":
        return (
            f"{op}: {bytes_per_rank} Bytes -> Algo {algorithm} proto {protocol} channel{{Lo..Hi}}={{0..{channels - 1}}}"
        )
    name = "" if version.tuning == "bare" else f"{op}: "
    numbers = f"Algo {_ALGORITHMS[algorithm]} proto {_PROTOCOLS[protocol]} time {time_us:f}"
    return f"{name}{total_bytes} Bytes -> {numbers}"


def init_text(
    version: Traits,
    event: str,
    *,
    comm: str,
    rank: int,
    ranks: int,
    device: int,
    bus_id: int,
    comm_hash: int | None,
    parent: str | None,
    split_count: int | None,
    color: int | None,
    key: int,
) -> str | None:
    """The text of `Init START` or `Init COMPLETE` (event); None if the version prints none."""
    v = version.version
    if event == "START" and v < (2, 18, 3):
        return None
    ids = f"comm {comm} rank {rank} nranks {ranks} cudaDev {device}"
    ids += f" nvmlDev {device} busId {bus_id:x}" if v >= (2, 18, 3) else f" busId {bus_id:x}"
    known = f" commId 0x{comm_hash:x}" if comm_hash is not None and v >= (2, 16, 0) else ""
    if v < (2, 21, 5):
        return f"{ids}{known} - Init {event}"
    if parent is None:
        api = "ncclCommInitRank" if v < (2, 23, 4) else "ncclCommInitRankConfig"
        before = f"[Rank {rank}] " if v >= (2, 29, 2) and event == "START" else ""
        return f"{before}{api} {ids}{known} - Init {event}"
    counted = "" if v < (2, 24, 3) else f" {'split' if v < (2, 29, 2) else 'child'}Count {split_count}"
    split = f"ncclCommSplit {ids} parent {parent}{counted} color {color} key {key}"
    # NCCL's own format string lacks the blank before the dash of START from 2.23 on.
    glued = v >= (2, 23, 4) and event == "START"
    return f"{split}{known}{'' if glued else ' '}- Init {event}"


def bootstrap_split_text(
    version: Traits, *, comm: str, parent: str, rank: int, ranks: int, color: int, key: int
) -> str | None:
    """The bootstrapSplit line of 2.18.1 to 2.22.3; None elsewhere."""
    v = version.version
    if not (2, 18, 1) <= v <= (2, 22, 99):
        return None
    pointers = f"comm {comm} parent {parent} " if v >= (2, 20, 3) else ""
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    return (
        f"bootstrapSplit: {pointers}rank {rank} nranks {ranks} color {color} key {key}"
        f" prev {before} next {after} - DONE"
    )


def ranks_and_nodes_text(
    version: Traits, *, comm: str, rank: int, ranks: int, nodes: int, local_ranks: int, local_rank: int
) -> str | None:
    """The line that tells how a communicator lies over nodes (2.20.3 on)."""
    if version.version < (2, 20, 3):
        return None
    return (
        f"comm {comm} rank {rank} nRanks {ranks} nNodes {nodes} localRanks {local_ranks} localRank {local_rank} MNNVL 0"
    )


def channel_count_text(version: Traits, *, channels: int, nvls: int, peer: int) -> str:
    """The line with the number of channels, in the layout of the version."""
    v = version.version
    nvls_part = f"{nvls} nvls channels, " if v >= (2, 17, 1) else ""
    collnet_part = "0 collnet channels, " if v >= (2, 20, 3) else ""
    point_to_point = f"{max(channels, 2)} p2p channels, {peer} p2p channels per peer"
    return f"{channels} coll channels, {collnet_part}{nvls_part}{point_to_point}"


def init_timings_text(version: Traits, *, api: str, rank: int, ranks: int, seconds: float) -> str | None:
    """The start-up breakdown of 2.23.4 on."""
    if version.version < (2, 23, 4):
        return None
    return (
        f"Init timings - {api}: rank {rank} nranks {ranks} total {seconds:.2f} (kernels {seconds * 0.3:.2f},"
        f" alloc {seconds * 0.2:.2f}, bootstrap {seconds * 0.1:.2f}, allgathers 0.00, topo {seconds * 0.2:.2f},"
        f" graphs 0.00, connections {seconds * 0.1:.2f}, rest {seconds * 0.1:.2f})"
    )


def destroy_text(version: Traits, *, comm: str, rank: int, ranks: int, device: int, bus_id: int) -> str | None:
    """The line at a communicator's end (2.12.7 on; from 2.30.3 of subsystem DESTROY)."""
    if not version.destroys:
        return None
    return f"comm {comm} rank {rank} nranks {ranks} cudaDev {device} busId {bus_id:x} - Destroy COMPLETE"
