"""Lines about channels: rings and trees.

*Source:* NCCL `src/init.cc` and `src/graph/connect.cc` .
"""

from __future__ import annotations

import re
from typing import Final

from ncclscope_agent.sources.nccl_log.line_form import RECORD_BYTES, Family, Fields, forms, numbers
from ncclscope_wire import facts

_TREE_NODE: Final = re.compile(r"(?:\[(\d+)\] )?(-?\d+(?:/-?\d+){2}|-?\d+)->(\d+)->(-?\d+(?:/-?\d+){2}|-?\d+)")
_LINE_LIMIT: Final = 1015
"""NCCL's buffer has 1,024 bytes (2.8 to 2.28), prefix and newline included."""
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
        pieces.pop()  # the place of the cut cannot be seen
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


FAMILIES: Final[tuple[Family, ...]] = (
    *forms(
        "ring_order",
        facts.RingOrder,
        r"(?:Channel|Ring) (?P<channel>\d+)(?:/\d+)? :(?P<padding>  )?(?P<order>(?: +\d+)+)(?P<dots>\s*\.\.\.)?",
        r"Channel (?P<channel>\d+)/\d+(?P<padding>  )(?P<order>(?: +\d+)+)",  # RCCL
        starts=("Channel ", "Ring "),
        finish=_ring_order,
    ),
    *forms("ring", facts.RingNeighbours, r"Ring (?P<channel>\d+) : -?\d+ -> (?P<rank>\d+) -> (?P<next>-?\d+)"),
    *forms(
        "tree",
        facts.TreeNeighbours,
        r"Tree (?P<channel>\d+) : (?P<up>-?\d+) -> (?P<rank>\d+) -> (?P<below>-?\d+(?:/-?\d+){2})",
        finish=_tree,
    ),
    *forms("tree", facts.TreeNeighbours, r"Trees (?P<trees>\[\d+\] [\[\]0-9/>| -]+)", finish=_tree_nodes),
    *forms(
        "tree",
        facts.TreeNeighbours,
        r"NVLS Trees : (?P<trees>\[\d+\] [\[\]0-9/>| -]+)",
        fixed={"is_nvls": True},
        finish=_tree_nodes,
    ),
)
"""Forms about channels, in the order in which they are tried."""
