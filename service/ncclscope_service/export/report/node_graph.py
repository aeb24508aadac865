"""NCCL's graph of a node as a picture: GPUs, switches and network cards, and the traffic on their links.

The tree of PCI hangs below the CPUs, NVLinks are drawn below the GPUs. Traffic goes the ways that NCCL would take: the
best path between two GPUs of the node, or to the network port of a GPU.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Final, TypeAlias

from ncclscope_service.export.report.tables import bytes_text
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.tables.traffic_file import Traffic
from ncclscope_service.nccl.topology import Channels, Machine
from ncclscope_wire.topology import LinkKind, NodeKind, TopologyOrigin, TopologySeen

MAX_NODES: Final = 4
"""Kinds of nodes that are drawn; hosts with equal graphs and equal GPUs in use are one kind."""
MAX_RANKS: Final = 32
"""Of a communicator whose rings and trees are drawn."""
_CELL: Final = 84
_ROW: Final = 74
_BOX: Final = (70, 30)
_BUS_ID_BITS: Final = (1 << 40) - 1
_BELOW: Final = frozenset({LinkKind.PCI, LinkKind.C2C, LinkKind.LOC, LinkKind.NET})
_LEAVES: Final = frozenset({NodeKind.GPU, NodeKind.NIC})
_COLORS: Final = {"GPU": "#0072b2", "NVS": "#009e73", "NIC": "#d55e00", "NET": "#d55e00", "CPU": "#7f7f7f"}

Links: TypeAlias = Counter[tuple[int, int]]
"""Bytes, or channels, by (from, to)."""
Picture: TypeAlias = tuple[str, str]
"""SVG and caption."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One node to draw."""

    machine: Machine
    hosts: tuple[str, ...]
    gpus: Mapping[int, int]
    """Global rank to the node of its GPU, of the first host."""
    traffic: Links


def topology_pictures(selection: Selection, traffic: Traffic) -> list[Picture]:
    """The nodes of a run, and the rings and trees of its largest communicator that printed them."""
    found = [(_node_svg(each), _node_caption(each)) for each in _nodes(selection, traffic)]
    return [*found, *_channels(selection)]


def link_bytes(machine: Machine, gpus: Mapping[int, int], sent: Mapping[tuple[int, int], int]) -> Links:
    """Bytes on each link; `sent`: by global ranks of sender and receiver, at least one of them on this node."""
    found: Links = Counter()
    inside = list(gpus.values())
    ports = machine.ports_of(inside)
    for (sender, receiver), amount in sent.items():
        if sender in gpus and receiver in gpus:
            ways = machine.best_paths(gpus[sender], through=inside)
            way = ways[gpus[receiver]].nodes if gpus[receiver] in ways else ()
        else:
            gpu = gpus.get(sender, gpus.get(receiver, -1))
            port = ports.get(gpu)
            way = machine.best_paths(gpu)[port].nodes if port is not None else ()
            way = way if sender in gpus else way[::-1]
        for link in pairwise(way):
            found[link] += amount
    return found


def _nodes(selection: Selection, traffic: Traffic) -> Iterator[Drawn]:
    """Hosts by name; those whose graph is like an earlier one's are named there."""
    known: dict[object, list[str]] = defaultdict(list)
    first: dict[object, tuple[TopologySeen, str, str]] = {}
    for (job, host), seen in sorted(
        selection.store.topologies.items(), key=lambda each: (each[0][0], each[0][1] or "")
    ):
        if host is None or job not in selection.jobs:
            continue
        block = min(seen, key=lambda each: (each.origin is not TopologyOrigin.LOG, -len(each.nodes)))
        content = job, tuple((node.kind, node.system, node.local) for node in block.nodes), block.links
        known[content].append(host)
        first.setdefault(content, (block, job, host))
    for key, (block, job, host) in list(first.items())[:MAX_NODES]:
        machine = Machine(block)
        gpus = _gpus(selection, machine, job, host)
        sent: Counter[tuple[int, int]] = Counter()
        for row in traffic.rows:
            ends = row.sender.rank, None if row.receiver is None else row.receiver.rank
            if row.sender.job == job and ends[0] is not None and ends[1] is not None and gpus.keys() & {*ends}:
                sent[ends[0], ends[1]] += row.bytes
        yield Drawn(machine, tuple(known[key]), gpus, link_bytes(machine, gpus, sent))


def _gpus(selection: Selection, machine: Machine, job: str, host: str) -> dict[int, int]:
    """By global rank, where the bus id says which GPU it is."""
    known = selection.store
    by_bus = {machine.nodes[gpu].local & _BUS_ID_BITS: gpu for gpu in machine.of_kind(NodeKind.GPU)}
    return {
        member.global_rank: by_bus[member.bus_id]
        for member in known.members
        if member.global_rank is not None and member.bus_id in by_bus and known.process_job[member.process] == job
        and known.processes[member.process].host == host
    }  # fmt: skip


def positions(machine: Machine) -> dict[int, tuple[float, int]]:
    """Column and row of each node: a tree below the CPUs, GPUs and network cards in one row, switches below it."""
    children: dict[int, list[int]] = defaultdict(list)
    depth: dict[int, int] = {}
    cpus = machine.of_kind(NodeKind.CPU)
    border = cpus or list(range(len(machine.nodes)))[:1]
    depth.update(dict.fromkeys(border, 0))
    links = {(link.start, link.end) for link in machine.seen.links if link.kind in _BELOW}
    while border:
        following: list[int] = []
        for node in border:
            for end in sorted(end for start, end in links if start == node and end not in depth):
                depth[end] = depth[node] + 1
                children[node].append(end)
                following.append(end)
        border = following
    inner = [row for node, row in depth.items() if machine.nodes[node].kind not in {*_LEAVES, NodeKind.NET}]
    leaf_row = max(inner, default=0) + 1
    columns: dict[int, float] = {}
    free = 0

    def place(node: int) -> float:
        nonlocal free
        below = [place(child) for child in children[node]]
        if below:
            columns[node] = sum(below) / len(below)
        else:
            columns[node], free = float(free), free + 1
        return columns[node]

    for root in [node for node, row in depth.items() if row == 0]:
        place(root)
    found: dict[int, tuple[float, int]] = {}
    switches = [node for node in range(len(machine.nodes)) if node not in depth]
    for node, row in depth.items():
        kind = machine.nodes[node].kind
        found[node] = columns[node], leaf_row if kind in _LEAVES else leaf_row + 1 if kind is NodeKind.NET else row
    for at, node in enumerate(switches):
        found[node] = (free - 1) / 2 + (at - (len(switches) - 1) / 2) * 1.2, leaf_row + 2
    return found


def _node_svg(drawn: Drawn) -> str:
    machine = drawn.machine
    at = positions(machine)
    columns, rows = max(column for column, _ in at.values()) + 1, max(row for _, row in at.values()) + 1
    width, height = columns * _CELL + 20, rows * _ROW + 30
    center = {node: (10 + (column + 0.5) * _CELL, 44 + row * _ROW) for node, (column, row) in at.items()}
    most = max(drawn.traffic.values(), default=0)
    parts: list[str] = []
    rates: dict[tuple[int, int], tuple[LinkKind, int]] = {}
    for link in machine.seen.links:
        key = min(link.start, link.end), max(link.start, link.end)
        if key not in rates or rates[key][1] < link.bytes_per_second:
            rates[key] = link.kind, link.bytes_per_second
    for (start, end), (kind, rate) in sorted(rates.items()):
        parts.append(_link(machine, center, (start, end), kind, rate, drawn.traffic, most))
    ranks = {gpu: rank for rank, gpu in drawn.gpus.items()}
    for node, (x, y) in sorted(center.items()):
        of = machine.nodes[node]
        name = f"rank {ranks[node]}" if node in ranks else of.kind.value
        color = _COLORS.get(of.kind.value, "#8c6d31")
        parts.append(
            f'<g><title>{escape(machine.label(node))}</title><rect x="{x - _BOX[0] / 2:g}" y="{y - _BOX[1] / 2:g}" '
            f'width="{_BOX[0]}" height="{_BOX[1]}" rx="6" fill="var(--paper)" stroke="{color}" stroke-width="1.6"/>'
            f'<text x="{x:g}" y="{y - 2:g}" text-anchor="middle" font-size="11" font-weight="600" fill="var(--ink)">'
            f'{escape(name)}</text><text x="{x:g}" y="{y + 10:g}" text-anchor="middle" font-size="9" '
            f'fill="var(--soft)">{escape(f"{of.kind.value} {of.system:x}-{of.local:x}")}</text></g>'
        )
    return _svg(width, height, parts, "Graph of a node")


def _link(
    machine: Machine, center: Mapping[int, tuple[float, float]], ends: tuple[int, int], kind: LinkKind, rate: int,
    traffic: Links, most: int,
) -> str:  # fmt: skip
    (x1, y1), (x2, y2) = center[ends[0]], center[ends[1]]
    forth, back = traffic[ends], traffic[ends[1], ends[0]]
    share = max(forth, back) / most if most else 0.0
    if y1 == y2:
        dip = min(20 + 0.16 * abs(x2 - x1), 90) if kind is not LinkKind.SYS else -34
        edge = _BOX[1] / 2 * (-1 if kind is LinkKind.SYS else 1)
        way = f"M{x1:g} {y1 + edge:g}C{x1:g} {y1 + edge + dip:g} {x2:g} {y2 + edge + dip:g} {x2:g} {y2 + edge:g}"
        text_at = (x1 + x2) / 2, y1 + edge + 0.78 * dip
    else:
        way = f"M{x1:g} {y1:g}L{x2:g} {y2:g}"
        text_at = x1 + 0.5 * (x2 - x1), y1 + 0.5 * (y2 - y1)
    sent = f": {bytes_text(forth)} one way, {bytes_text(back)} the other" if forth or back else ""
    said = f"{kind.value} {rate / 1e9:.1f} GB/s between {machine.label(ends[0])} and {machine.label(ends[1])}{sent}"
    color = "var(--accent)" if share else "var(--faint)"
    return (
        f'<path d="{way}" fill="none" stroke="{color}" stroke-width="{1 + 6 * share:.2f}" data-link="{kind.value}">'
        f"<title>{escape(said)}</title></path>"
        f'<text x="{text_at[0]:g}" y="{text_at[1]:g}" text-anchor="middle" font-size="9" fill="var(--soft)" '
        f'stroke="var(--paper)" stroke-width="3" paint-order="stroke">{rate / 1e9:g}</text>'
    )


def _node_caption(drawn: Drawn) -> str:
    hosts = drawn.hosts
    named = f"{', '.join(map(escape, hosts[:3]))}{f' and {len(hosts) - 3} more like it' if len(hosts) > 3 else ''}"
    kinds = sorted({(link.kind.value, link.bytes_per_second) for link in drawn.machine.seen.links})
    rates = ", ".join(f"{kind} {rate / 1e9:g}" for kind, rate in kinds)
    text = f"<b>NCCL's graph of {named}</b>, with the rate of each link in GB/s per direction ({rates})."
    if drawn.traffic:
        text += (
            f" Blue, the wider the more: bytes of the run on the ways that NCCL takes, of {escape(drawn.hosts[0])} "
            f"{bytes_text(max(drawn.traffic.values()))} on the busiest link."
        )
    return text


def _channels(selection: Selection) -> Iterator[Picture]:
    """Rings above and trees below the ranks of the largest communicator that printed them, if it is not too large."""
    known = selection.store
    fitting = [
        each for each in selection.communicators
        if each.index in known.channels and 1 < each.size <= MAX_RANKS and len(known.channels[each.index].following)
    ]  # fmt: skip
    if not fitting:
        return
    largest = max(fitting, key=lambda each: (each.size, -each.index))
    channels = known.channels[largest.index]
    members = largest.members or {}
    names: list[str] = []
    for rank in range(largest.size):
        place = known.members[members[rank]].global_rank if rank in members else None
        names.append(str(rank) if place is None else str(place))
    group = escape(selection.names[largest.job, largest.comm_id])
    yield (
        _channels_svg(channels, names),
        f"<b>Rings and trees of {group}</b> ({largest.size} ranks), as NCCL printed them: above, whom each rank sends "
        f"to in its {len(channels.following)} rings; below, the trees. Wider: in more channels.",
    )


def _channels_svg(channels: Channels, names: Sequence[str]) -> str:
    rings: Links = Counter((rank, to) for rank in range(channels.size) for to in channels.next_of(rank).tolist())
    trees: Links = Counter((up, rank) for row in channels.above.tolist() for rank, up in enumerate(row) if up >= 0)
    reach = max((abs(end - start) for start, end in [*rings, *trees]), default=0)
    width, middle = len(names) * 62 + 20, round(34 + 9 * reach)
    parts: list[str] = []
    for edges, side, color in ((rings, -1, "#0072b2"), (trees, 1, "#009e73")):
        most = max(edges.values(), default=1)
        for (start, end), times in sorted(edges.items()):
            x1, x2 = 41 + 62 * start, 41 + 62 * end
            edge, dip = middle + 14 * side, side * (16 + 11.5 * abs(end - start))
            parts.append(
                f'<path d="M{x1} {edge}C{x1} {edge + dip:g} {x2} {edge + dip:g} {x2} {edge}" fill="none" '
                f'stroke="{color}" stroke-width="{0.8 + 2.4 * times / most:.2f}" opacity="0.8">'
                f"<title>{escape(names[start])} to {escape(names[end])}: {times} channels</title></path>"
            )
    for place, name in enumerate(names):
        parts.append(
            f'<rect x="{19 + 62 * place}" y="{middle - 14}" width="44" height="28" rx="6" fill="var(--paper)" '
            f'stroke="var(--ink)"/><text x="{41 + 62 * place}" y="{middle + 4}" text-anchor="middle" font-size="12" '
            f'font-weight="600" fill="var(--ink)">{escape(name)}</text>'
        )
    return _svg(width, 2 * middle, parts, "Rings and trees")


def _svg(width: float, height: float, parts: Iterable[str], label: str) -> str:
    return (
        f'<div class="scroll"><svg width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(label)}" font-family="system-ui, sans-serif">{"".join(parts)}</svg></div>'
    )
