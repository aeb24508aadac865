"""NCCL's lines about the machine when a communicator is made: system tree, paths, rings, transports.

The machine: two sockets, a PCI switch for each GPU with a network card beside it, all GPUs on NVSwitch.
Source: NCCL src/graph/topo.cc ncclTopoPrint and ncclTopoPrintRec, src/graph/paths.cc ncclTopoPrintPaths,
src/graph/search.cc ncclTopoPrintGraph, src/graph/connect.cc, src/transport/*.cc.
"""

from __future__ import annotations

from ncclscope_simulator.cluster import bus_id, stable_hash
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.groups import Group

_LOCAL_BW = 5000.0
_SOCKET_BW = 40.0


class _Names:
    """Spelling of topology ids by version: `GPU/1B000`, `GPU/0-1b000`."""

    def __init__(self, config: SimulationConfig) -> None:
        self._version = config.traits.version

    def header(self, kind: str, local: int) -> str:
        return f"{kind}/{self._full(local)}" if self._version >= (2, 21, 5) else f"{kind}/{local:X}"

    def target(self, kind: str, local: int) -> str:
        return f"{kind}/{self._full(local)}" if self._version >= (2, 23, 4) else f"{kind}/{local:X}"

    def bandwidth(self, value: float) -> str:
        return f"{value:.1f}" if self._version >= (2, 21, 5) else f"{value:f}"

    @staticmethod
    def _full(local: int) -> str:
        return f"0-{local:x}"


def system_lines(config: SimulationConfig, group: Group, node: int) -> list[str]:
    """The `=== System` block and the paths, as a member on a node sees them: only GPUs of the communicator."""
    locals_ = [(rank % config.gpus, group.members.index(rank)) for rank in group.members if rank // config.gpus == node]
    names, nics = _Names(config), group.spans_nodes
    pci, nic = _rates(config)
    nvlink = config.traits.nvlink_switch
    alone = len(locals_) == 1
    fastest = min(pci, nic) if nics else _LOCAL_BW if alone else nvlink
    total = _LOCAL_BW if alone and not nics else nvlink if not alone else max(pci, nic)
    words = ("maxWidth", "totalWidth") if config.traits.version < (2, 14, 0) else ("maxBw", "totalBw")
    lines = [f"=== System : {words[0]} {fastest:2.1f} {words[1]} {total:2.1f} ==="]
    for socket in (0, 1):
        # NCCL prints every CPU, also one without a GPU of the communicator: others name it as a neighbour.
        own = [each for each in locals_ if _socket(config, each[0]) == socket]
        lines += _socket_lines(config, names, socket, own, nics=nics, linked=not alone)
    lines.append("==========================================")
    return lines + _path_lines(config, names, locals_, nics=nics)


def _rates(config: SimulationConfig) -> tuple[float, float]:
    """(PCI, network card) in GB/s: generation 5 and 400 Gb/s, or generation 4 and 200 Gb/s."""
    return (48.0, 50.0) if config.traits.nvlink_switch > 300 else (24.0, 25.0)


def _socket(config: SimulationConfig, local_rank: int) -> int:
    return 0 if local_rank < max(1, config.gpus // 2) else 1


def _socket_lines(
    config: SimulationConfig, names: _Names, socket: int, own: list[tuple[int, int]], *, nics: bool, linked: bool
) -> list[str]:
    pci, nic = _rates(config)
    link = f"+ PCI[{pci:2.1f}] - "
    deep, deeper = " " * len(link), " " * (2 * len(link))
    lines = [f"{names.header('CPU', socket)} (1/1/2)"]
    for local, rank in own:
        bus = bus_id(local)
        lines.append(f"{link}{names.header('PCI', bus - 0x3000)} (1000c0301000100b)")
        lines.append(f"{deep}{link}{names.header('GPU', bus)} ({rank})")
        if linked:
            lines.append(f"{deeper}+ NVL[{config.traits.nvlink_switch:2.1f}] - {names.target('NVS', 0)}")
        if nics:
            lines.append(f"{deep}{link}{names.header('NIC', bus - 0x1000)}")
            asic = stable_hash("card", local)
            support = "0/" if config.traits.version >= (2, 24, 0) else ""
            net = names.target("NET", local)
            lines.append(f"{deeper}+ NET[{nic:2.1f}] - {net} ({support}{asic:x}/1/{nic:f})")
    lines.append(f"+ SYS[{_SOCKET_BW:2.1f}] - {names.target('CPU', 1 - socket)}")
    return lines


def _path_lines(config: SimulationConfig, names: _Names, locals_: list[tuple[int, int]], *, nics: bool) -> list[str]:
    pci, nic = _rates(config)
    lines: list[str] = []
    for local, _ in locals_:
        own = names.header("GPU", bus_id(local))
        text = f"{own} :"
        for other, _ in locals_:
            there = names.header("GPU", bus_id(other))
            near = other == local
            bandwidth = _LOCAL_BW if near else config.traits.nvlink_switch
            text += f"{there} ({0 if near else 2}/{names.bandwidth(bandwidth)}/{'LOC' if near else 'NVL'}) "
        cpu = _socket(config, local)
        text += f"{names.header('CPU', cpu)} (2/{names.bandwidth(pci)}/PHB) "
        if nics:
            for other, _ in locals_:
                near = other == local
                rate = min(pci, nic) if near else min(pci, nic, _SOCKET_BW)
                kind = "PIX" if near else "PXN" if config.traits.version >= (2, 12, 0) else "SYS"
                text += f"{names.header('NET', other)} ({3 if near else 5}/{names.bandwidth(rate)}/{kind}) "
        lines.append(text[:1000])
    return lines


def graph_lines(config: SimulationConfig, group: Group, node: int, channels: int) -> list[str]:
    """The ring search's result, of which one channel line is shown for each channel."""
    word = "speed" if config.traits.version < (2, 14, 0) else "bw"
    rate = (_rates(config)[1] if group.spans_nodes else config.traits.nvlink_switch) / max(1, channels)
    kind = "NVL/PIX" if group.size > 1 else "LOC/PIX"
    lines = [f"Pattern 4, crossNic 0, nChannels {channels}, {word} {rate:f}/{rate:f}, type {kind}, sameChannels 1"]
    v = config.traits.version
    local = [rank for rank in group.members if rank // config.gpus == node]
    for channel in range(min(channels, 2)):
        gpus = [
            f"GPU/0-{bus_id(rank % config.gpus):x}" if v >= (2, 27, 5) else f"GPU/{group.members.index(rank)}"
            for rank in local
        ]
        if group.spans_nodes:
            card = local[channel % len(local)] % config.gpus
            net = f"NET/{card}" if v < (2, 21, 5) else f"NET/{card:x}" if v < (2, 23, 4) else f"NET/0-{card:x}"
            gpus = [net, *gpus, net]
        lines.append(f"{channel:2d} : {' '.join(gpus)}")
    return lines


def ring_lines(config: SimulationConfig, group: Group, comm_rank: int, channels: int) -> list[str]:
    """Ring order (rank 0 alone), this rank's place in ring 0, and the trees."""
    size, v = group.size, config.traits.version
    lines: list[str] = []
    if comm_rank == 0:
        for channel in range(min(channels, 2)):
            order = "".join(f" {rank:3d}" for rank in range(min(size, 20)))
            if v >= (2, 23, 4):
                order = " " + " ".join(map(str, range(size)))
                order = order if len(order) <= 110 else order[:110].rsplit(" ", 1)[0] + "..."
            lines.append(f"Channel {channel:02d}/{channels:02d} :{order}")
    if v >= (2, 10, 3):
        lines.append(f"Ring 00 : {(comm_rank - 1) % size} -> {comm_rank} -> {(comm_rank + 1) % size}")
    down = comm_rank + 1 if comm_rank + 1 < size else -1
    lines.append(f"Trees [0] {down}/-1/-1->{comm_rank}->{comm_rank - 1} [1] {down}/-1/-1->{comm_rank}->{comm_rank - 1}")
    return lines


def transport_lines(config: SimulationConfig, group: Group, comm_rank: int) -> list[str]:
    """How this rank reaches its neighbour in ring 0, and that rings and trees are connected."""
    if group.size == 1:
        return []
    v = config.traits.version
    rank = group.members[comm_rank]
    lines: list[str] = []
    neighbour = (comm_rank + 1) % group.size
    to = group.members[neighbour]
    ends = f"{comm_rank}[{_bracket(config, rank)}] -> {neighbour}[{_bracket(config, to)}]"
    if rank // config.gpus == to // config.gpus:
        number = "00" if v < (2, 14, 0) else "00/0"
        via = "P2P/IPC/read" if v < (2, 18, 0) else "P2P/CUMEM/read"
        lines.append(f"Channel {number} : {ends} via {via}")
    else:
        number = "00" if v < (2, 12, 0) else "00/0"
        lines.append(f"Channel {number} : {ends} [send] via NET/IB/{rank % config.gpus}/GDRDMA")
    previous = group.members[(comm_rank - 1) % group.size]
    if rank // config.gpus != previous // config.gpus:
        number = "00" if v < (2, 12, 0) else "00/0"
        start = f"{(comm_rank - 1) % group.size}[{_bracket(config, previous)}] -> {comm_rank}[{_bracket(config, rank)}]"
        lines.append(f"Channel {number} : {start} [receive] via NET/IB/{rank % config.gpus}/GDRDMA")
    gdr = int(group.spans_nodes)
    lines.append("Connected all rings" if v < (2, 24, 3) else f"Connected all rings, use ring PXN 0 GDR {gdr}")
    lines.append("Connected all trees")
    return lines


def _bracket(config: SimulationConfig, rank: int) -> str:
    """Bus id up to 2.18.1, NVML device from 2.18.3."""
    local = rank % config.gpus
    return f"{bus_id(local):x}" if config.traits.version < (2, 18, 3) else str(local)
