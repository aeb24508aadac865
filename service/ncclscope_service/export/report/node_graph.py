"""NCCL's graphs of nodes, rings and trees as pictures of the report (`job/node_graph.py` says what is where)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import islice
from typing import Final, TypeAlias

from ncclscope_service.export.report.tables import bytes_text
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.tables.traffic_file import THROUGH, Traffic
from ncclscope_service.job.node_graph import (
    MAX_GRAPHS,
    MAX_NAMES,
    ChannelEdges,
    GraphLink,
    NodeGraph,
    SeatedMachines,
    channel_edges,
    largest_with_channels,
    node_graph,
    seat_machines,
    sent_by_machine,
)
from ncclscope_service.nccl.traffic import Way
from ncclscope_wire.topology import LinkKind, NodeKind

_CELL: Final = 84
_ROW: Final = 74
_BOX: Final = (70, 30)
_COLORS: Final = {"GPU": "#0072b2", "NVS": "#009e73", "NIC": "#d55e00", "NET": "#d55e00", "CPU": "#7f7f7f"}
_WAYS: Final = {name: way for way, name in THROUGH.items()}

Picture: TypeAlias = tuple[str, str]
"""SVG and caption."""


def topology_pictures(selection: Selection, traffic: Traffic) -> list[Picture]:
    """The nodes of a run, and the rings and trees of its largest communicator that printed them."""
    return [*islice(_nodes(selection, traffic), MAX_GRAPHS), *_channels(selection)]


def _nodes(selection: Selection, traffic: Traffic) -> Iterator[Picture]:
    for job in selection.jobs:
        found = seat_machines(selection.store, job)
        sent = sent_by_machine(found.machines, _rows(traffic, job))
        for place, seated in enumerate(found.machines):
            graph = node_graph(seated, sent[place])
            is_last = place == len(found.machines) - 1
            yield _node_svg(graph), _node_caption(graph, traffic) + (_missing_text(found) if is_last else "")


def _rows(traffic: Traffic, job: str) -> Iterator[tuple[int, int | None, Way, int]]:
    """Bytes that the job sent from rank to rank; nothing where only nodes are known."""
    for row in traffic.rows:
        if row.sender.job == job and row.sender.rank is not None:
            yield row.sender.rank, None if row.receiver is None else row.receiver.rank, _WAYS[row.through], row.bytes


def _node_svg(graph: NodeGraph) -> str:
    width = (max(node.column for node in graph.nodes) + 1) * _CELL + 20
    center = [(10 + (node.column + 0.5) * _CELL, 52 + node.row * _ROW) for node in graph.nodes]
    most = max((max(link.bytes) for link in graph.links), default=0)
    # Arcs between GPUs pass below the ports.
    least = 112 if any(node.kind is NodeKind.NET for node in graph.nodes) else 20
    arcs = [
        center[link.ends[0]][1] + _BOX[1] / 2 + 0.75 * _dip(link, center, least)
        for link in graph.links
        if center[link.ends[0]][1] == center[link.ends[1]][1]
    ]
    height = max(max(y for _, y in center) + _BOX[1] / 2, *arcs, 0) + 16
    parts = [_link(graph, link, center, most, least) for link in graph.links]
    for node, (x, y) in zip(graph.nodes, center, strict=True):
        name = f"rank {', '.join(map(str, node.ranks))}" if node.ranks else node.kind.value
        color = _COLORS.get(node.kind.value, "#8c6d31")
        title = f"{node.name} of {node.host}" if node.host is not None else node.name
        parts.append(
            f'<g><title>{escape(title)}</title><rect x="{x - _BOX[0] / 2:g}" y="{y - _BOX[1] / 2:g}" '
            f'width="{_BOX[0]}" height="{_BOX[1]}" rx="6" fill="var(--paper)" stroke="{color}" stroke-width="1.6"/>'
            f'<text x="{x:g}" y="{y - 2:g}" text-anchor="middle" font-size="11" font-weight="600" fill="var(--ink)">'
            f'{escape(name)}</text><text x="{x:g}" y="{y + 10:g}" text-anchor="middle" font-size="9" '
            f'fill="var(--soft)">{escape(node.name)}</text></g>'
        )
    return _svg(width, height, parts, "Graph of a node")


def _dip(link: GraphLink, center: Sequence[tuple[float, float]], least: float) -> float:
    """How far a link between two nodes of a row bends down."""
    if link.kind is LinkKind.SYS:
        return -34
    return least + min(0.16 * abs(center[link.ends[0]][0] - center[link.ends[1]][0]), 70)


def _link(graph: NodeGraph, link: GraphLink, center: Sequence[tuple[float, float]], most: int, least: float) -> str:
    (x1, y1), (x2, y2) = center[link.ends[0]], center[link.ends[1]]
    share = max(link.bytes) / most if most else 0.0
    if y1 == y2:
        dip = _dip(link, center, least)
        edge = _BOX[1] / 2 * (-1 if link.kind is LinkKind.SYS else 1)
        way = f"M{x1:g} {y1 + edge:g}C{x1:g} {y1 + edge + dip:g} {x2:g} {y2 + edge + dip:g} {x2:g} {y2 + edge:g}"
        text_at = (x1 + x2) / 2, y1 + edge + 0.78 * dip
    else:
        way = f"M{x1:g} {y1:g}L{x2:g} {y2:g}"
        # Beside the GPU: ports stand between it and the NVSwitch.
        along = 0.5 if link.kind is not LinkKind.NVL else 0.28 if y1 < y2 else 0.72
        text_at = x1 + along * (x2 - x1), y1 + along * (y2 - y1)
    sent = f": {bytes_text(link.bytes[0])} one way, {bytes_text(link.bytes[1])} the other" if any(link.bytes) else ""
    names = " and ".join(graph.nodes[end].name for end in link.ends)
    rates = "/".join(dict.fromkeys(f"{rate / 1e9:.1f}" for rate in link.rates if rate is not None))
    color = "var(--accent)" if share else "var(--faint)"
    return (
        f'<path d="{way}" fill="none" stroke="{color}" stroke-width="{1 + 6 * share:.2f}" '
        f'data-link="{link.kind.value}">'
        f"<title>{escape(f'{link.kind.value} {rates} GB/s between {names}{sent}')}</title></path>"
        f'<text x="{text_at[0]:g}" y="{text_at[1]:g}" text-anchor="middle" font-size="9" fill="var(--soft)" '
        f'stroke="var(--paper)" stroke-width="3" paint-order="stroke">{rates.replace(".0", "")}</text>'
    )


def _named(hosts: Sequence[str], known: int) -> str:
    """So many hosts, of which some are named."""
    more = known - len(hosts)
    return f"{', '.join(map(escape, hosts))}{f' and {more} more' if more else ''}"


def _node_caption(graph: NodeGraph, traffic: Traffic) -> str:
    whose = _named(graph.hosts[:MAX_NAMES], len(graph.hosts))
    if len(graph.hosts) > 1:
        whose += ", which multi-node NVLink joins"
    kinds = sorted({(link.kind.value, rate) for link in graph.links for rate in link.rates if rate is not None})
    rates = ", ".join(f"{kind} {rate / 1e9:g}" for kind, rate in kinds)
    text = f"<b>NCCL's graph of {whose}</b>, with the rate of each link in GB/s per direction ({rates})."
    if graph.alike:
        text += f" Equal graphs: {_named(graph.alike, graph.alike_known)}."
    busiest = max((max(link.bytes) for link in graph.links), default=0)
    if busiest:
        text += (
            " Blue, the wider the more: bytes of the run on the ways that NCCL takes, "
            f"{bytes_text(busiest)} on the busiest link."
        )
    elif not traffic.is_by_rank:
        text += " No bytes are drawn: of so many ranks they are known by node only."
    if graph.ranks_without_gpu:
        ranks = _named([str(rank) for rank in graph.ranks_without_gpu[:MAX_NAMES]], len(graph.ranks_without_gpu))
        text += f" Left out, with their bytes: ranks of which no line says which of these GPUs is theirs ({ranks})."
    if graph.bytes_without_way:
        text += f" {bytes_text(graph.bytes_without_way)} more have no way in this graph."
    return text


def _missing_text(found: SeatedMachines) -> str:
    """Parts of a job that are not drawn."""
    more, without = found.kinds - len(found.machines), found.hosts_without
    text = f" {more} more kinds of nodes are not drawn." if more else ""
    if without:
        text += f" Not recorded: the graph of {_named(without[:MAX_NAMES], len(without))}."
    return text


def _channels(selection: Selection) -> Iterator[Picture]:
    """Rings above and trees below the ranks of the largest communicator that printed them, if it is not too large."""
    largest = largest_with_channels(selection.store, selection.communicators)
    if largest is None:
        return
    found = channel_edges(selection.store, largest)
    group = escape(selection.names[largest.job, largest.comm_id])
    yield (
        _channels_svg(found),
        f"<b>Rings and trees of {group}</b> ({largest.size} ranks), as NCCL printed them: above, whom each rank sends "
        f"to in its {found.channels} rings; below, the trees. Wider: in more channels.",
    )


def _channels_svg(found: ChannelEdges) -> str:
    names = [str(place if rank is None else rank) for place, rank in enumerate(found.ranks)]
    rings, trees = (
        round(34 + 9 * max((abs(edge.ends[1] - edge.ends[0]) for edge in edges), default=0))
        for edges in (found.rings, found.trees)
    )
    width, middle = len(names) * 62 + 20, rings
    parts: list[str] = []
    for edges, side, color in ((found.rings, -1, "#0072b2"), (found.trees, 1, "#009e73")):
        most = max((each.channels for each in edges), default=1)
        for each in edges:
            start, end = each.ends
            x1, x2 = 41 + 62 * start, 41 + 62 * end
            edge, dip = middle + 14 * side, side * (16 + 11.5 * abs(end - start))
            parts.append(
                f'<path d="M{x1} {edge}C{x1} {edge + dip:g} {x2} {edge + dip:g} {x2} {edge}" fill="none" '
                f'stroke="{color}" stroke-width="{0.8 + 2.4 * each.channels / most:.2f}" opacity="0.8">'
                f"<title>{escape(names[start])} to {escape(names[end])}: {each.channels} channels</title></path>"
            )
    for place, name in enumerate(names):
        parts.append(
            f'<rect x="{19 + 62 * place}" y="{middle - 14}" width="44" height="28" rx="6" fill="var(--paper)" '
            f'stroke="var(--ink)"/><text x="{41 + 62 * place}" y="{middle + 4}" text-anchor="middle" font-size="12" '
            f'font-weight="600" fill="var(--ink)">{escape(name)}</text>'
        )
    return _svg(width, rings + trees, parts, "Rings and trees")


def _svg(width: float, height: float, parts: Iterable[str], label: str) -> str:
    return (
        f'<div class="scroll"><svg width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(label)}" font-family="system-ui, sans-serif">{"".join(parts)}</svg></div>'
    )
