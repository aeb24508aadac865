"""Puts the lines of a system block together: the tree from `=== System` to `====`, then the path lines.

The tree is drawn with blanks: a line's children begin in the column where the text of its own node begins.
Only PCI links are followed by NCCL, so only nodes behind PCI links have children. A block that lost a line
would give wrong links, so a block is dropped, and its lines are counted, if anything in it does not fit.

*Source:* NCCL `src/graph/topo.cc:ncclTopoPrint, ncclTopoPrintRec`, `src/graph/paths.cc:ncclTopoPrintPaths`;
what the versions print is in `docs/internals/topology.md`.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Final

from ncclscope_agent.sources.nccl_log.prefix import Writer
from ncclscope_wire.topology import (
    LinkKind,
    NodeKind,
    TopologyLink,
    TopologyNode,
    TopologyOrigin,
    TopologyPath,
    TopologySeen,
)

MAX_OPEN_BLOCKS: Final = 256
"""Threads whose blocks may be open at once in one log; beyond it the oldest is dropped."""
MAX_BLOCK_LINES: Final = 4096
"""A block of 72 GPUs on 18 machines has about 800 lines."""
MAX_REMEMBERED: Final = 1024
"""Blocks that are known, so that each rank's and each communicator's equal block is sent once."""

_SYSTEM: Final = re.compile(
    rb"=== System : max(?:Width|Bw) \d+(?:\.\d+)?(?: (?:totalWidth|totalBw|maxSpeed) \d+(?:\.\d+)?)? ===\s*"
)
_END: Final = re.compile(rb"={30,}\s*")
_NODE: Final = (
    rb"(?P<kind>GPU|PCI|NVS|CPU|NIC|NET|GIN|RMA|DEV|CXB)/(?P<id>[0-9A-Fa-f]{1,16})(?:-(?P<local>[0-9a-f]{1,16}))?"
)
_TREE: Final = re.compile(
    rb"(?P<indent> *)(?:\+ (?P<link>LOC|NVL|C2C|PCI|SYS|NET)\[(?P<rate>\d+(?:\.\d+)?)\] - )?"
    + _NODE
    + rb"(?: \((?P<text>[^()]*)\))?(?: \[MLOPart \d+\])?\s*"
)
_TREE_LIKE: Final = re.compile(rb" *(?:\+ (?:LOC|NVL|C2C|PCI|SYS|NET)\[|CPU/[0-9A-Fa-f-]+ \(|CPU/[0-9A-Fa-f-]+\s*$)")
_PATHS_OF: Final = re.compile(rb"(?P<node>" + _NODE + rb") :")
_PATH: Final = re.compile(
    _NODE + rb" \((?P<hops>\d{1,4})/(?P<rate>\d+(?:\.\d+)?)/(?P<type>LOC|NVL|NVB|C2C|PIX|PXB|P2C|PXN|PHB|SYS|NET|DIS)\)"
)

_SYSTEM_BITS: Final = 56
_LOCAL_MASK: Final = (1 << _SYSTEM_BITS) - 1
_HIGHEST_RATE: Final = 10**9
"""GB/s. NCCL's own highest is 5,000, for what stays inside one node."""

_Key = tuple[NodeKind, int, int]


@dataclass(slots=True)
class _Block:
    """A block of which lines still come."""

    writer: Writer
    line: int
    lines: int = 1
    is_closed: bool = False
    nodes: list[TopologyNode] = field(default_factory=list[TopologyNode])
    index: dict[_Key, int] = field(default_factory=dict[_Key, int])
    described: set[int] = field(default_factory=set[int])
    """Nodes that have a line of their own; the others were only named as the end of a link."""
    links: dict[tuple[int, int, LinkKind], int] = field(default_factory=dict[tuple[int, int, LinkKind], int])
    parents: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """(column of the line, column of its node's text, node), outermost first."""
    paths: list[TopologyPath] = field(default_factory=list[TopologyPath])
    waiting: set[int] = field(default_factory=set[int])
    """Nodes whose path line has not come."""


class TopologyLines:
    """Assembles blocks per (pid, tid) from messages (what stands behind `NCCL INFO `). Nothing raises.

    A block is complete with its path lines, or when its thread prints anything else. Equal blocks of one host
    are given once.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[str, int, int], _Block] = OrderedDict()
        self._done: list[TopologySeen] = []
        self._dropped: Counter[str] = Counter()
        self._known: OrderedDict[int, None] = OrderedDict()

    def ingest_line(self, writer: Writer, line: int, message: bytes, *, is_whole: bool = True) -> bool:
        """Takes one message; True if it belongs to a block or is a path line (then it is understood).

        Messages that belong to no block may be fed as well, and should: they say that a block has ended.
        `is_whole` is False if the message may have been cut.
        """
        key = (writer.host, writer.pid, writer.tid)
        block = self._blocks.get(key)
        if message.startswith(b"=== System ") and _SYSTEM.fullmatch(message):
            self._begin(key, _Block(writer, line), is_whole=is_whole)
            return True
        if block is None:
            return self._count_stray(message)
        if block.is_closed:
            return self._feed_path(key, block, message, is_whole=is_whole)
        return self._feed_tree(key, block, message, is_whole=is_whole)

    def tear(self) -> None:
        """A line of the log was torn. Its writer is unknown, so every open block may have lost it."""
        for key, block in list(self._blocks.items()):
            if not block.is_closed:
                self._drop(key, block)

    def finish(self) -> None:
        """The log is at its end: what is open is dropped and counted, what is closed can be taken."""
        for key, block in list(self._blocks.items()):
            if block.is_closed:
                self._complete(key, block)
            else:
                self._drop(key, block)

    def drain_blocks(self) -> tuple[TopologySeen, ...]:
        """Blocks that were completed since the last call."""
        done, self._done = self._done, []
        return tuple(done)

    def drain_dropped(self) -> Counter[str]:
        """Lines of blocks that were dropped since the last call, by reason ("torn_block")."""
        dropped = self._dropped
        if dropped:
            self._dropped = Counter()
        return dropped

    def _begin(self, key: tuple[str, int, int], block: _Block, *, is_whole: bool) -> None:
        before = self._blocks.get(key)
        if before is not None:
            self._end(key, before)
        if not is_whole:
            self._dropped["torn_block"] += 1
            return
        self._blocks[key] = block
        if len(self._blocks) > MAX_OPEN_BLOCKS:
            self._end(*next(iter(self._blocks.items())))

    def _end(self, key: tuple[str, int, int], block: _Block) -> None:
        if block.is_closed:
            self._complete(key, block)
        else:
            self._drop(key, block)

    def _count_stray(self, message: bytes) -> bool:
        """Counts lines of a block whose begin was lost or that was dropped."""
        if not (_TREE_LIKE.match(message) or _END.fullmatch(message) or _PATHS_OF.match(message)):
            return False
        self._dropped["torn_block"] += 1
        return True

    def _feed_tree(self, key: tuple[str, int, int], block: _Block, message: bytes, *, is_whole: bool) -> bool:
        found = _TREE.fullmatch(message)
        if found is not None:
            block.lines += 1
            if not is_whole or block.lines > MAX_BLOCK_LINES or not _add_tree_line(block, found):
                self._drop(key, block)
            return True
        if _END.fullmatch(message):
            block.lines += 1
            if is_whole and _close(block):
                block.is_closed = True
                if not block.waiting:
                    self._complete(key, block)
            else:
                self._drop(key, block)
            return True
        self._drop(key, block)
        return self._count_stray(message)

    def _feed_path(self, key: tuple[str, int, int], block: _Block, message: bytes, *, is_whole: bool) -> bool:
        found = _PATHS_OF.match(message)
        start = None if found is None else block.index.get(_node_key(found))
        if found is None or start is None or start not in block.waiting:
            self._complete(key, block)
            return self._count_stray(message)
        block.lines += 1
        if is_whole and not _add_paths(block, start, message[found.end() :]):
            self._drop(key, block)
            return True
        block.waiting.discard(start)
        if not block.waiting:
            self._complete(key, block)
        return True

    def _drop(self, key: tuple[str, int, int], block: _Block) -> None:
        del self._blocks[key]
        self._dropped["torn_block"] += block.lines

    def _complete(self, key: tuple[str, int, int], block: _Block) -> None:
        del self._blocks[key]
        seen = TopologySeen(
            origin=TopologyOrigin.LOG,
            host=block.writer.host,
            pid=block.writer.pid,
            tid=block.writer.tid,
            line=block.line,
            nodes=tuple(block.nodes),
            links=tuple(
                TopologyLink(start=start, end=end, kind=kind, bytes_per_second=rate)
                for (start, end, kind), rate in block.links.items()
            ),
            paths=tuple(block.paths),
        )
        content = hash((seen.host, seen.nodes, seen.links, seen.paths))
        if content in self._known:
            self._known.move_to_end(content)
            return
        self._known[content] = None
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        self._done.append(seen)


def _node_key(found: re.Match[bytes]) -> _Key:
    """Name of a node: `TYPE/<system>-<local>`, or one number with the system in its highest byte (to 2.22)."""
    first, local = int(found["id"], 16), found["local"]
    if local is None:
        return NodeKind(found["kind"].decode()), first >> _SYSTEM_BITS, first & _LOCAL_MASK
    return NodeKind(found["kind"].decode()), first & 0xFF, int(local, 16) & _LOCAL_MASK


def _rate(text: bytes) -> int | None:
    """Bytes per second of a printed number of GB/s; None for one that is no bandwidth."""
    rate = float(text)
    return round(rate * 1e9) if rate <= _HIGHEST_RATE else None


def _add_tree_line(block: _Block, found: re.Match[bytes]) -> bool:
    """Adds a line of the tree; False if it does not fit what was there before."""
    column, is_root = len(found["indent"]), found["link"] is None
    node = _node_of(block, found, is_described=is_root or found["link"] == b"PCI")
    if node is None:
        return False
    if is_root:
        block.parents = [(-1, 0, node)]
        return column == 0 and found["kind"] == b"CPU"
    while block.parents and block.parents[-1][0] >= column:
        block.parents.pop()
    # Listings that people shorten are indented by less than NCCL does, never by more: more is a lost line.
    if not block.parents or column > block.parents[-1][1]:
        return False
    rate, kind = _rate(found["rate"]), LinkKind(found["link"].decode())
    link = (block.parents[-1][2], node, kind)
    if rate is None or link in block.links or link[0] == node or not _can_be(block, link):
        return False
    block.links[link] = rate
    if kind is LinkKind.PCI:
        block.parents.append((column, found.start("kind"), node))
    return True


def _can_be(block: _Block, link: tuple[int, int, LinkKind]) -> bool:
    """Whether NCCL makes links of this kind between such nodes; if not, a line between them was lost."""
    start, end, kind = link
    ends = {block.nodes[start].kind, block.nodes[end].kind}
    match kind:
        case LinkKind.NET:
            return ends in ({NodeKind.NIC, each} for each in (NodeKind.NET, NodeKind.GIN, NodeKind.RMA))
        case LinkKind.SYS:
            return ends == {NodeKind.CPU}
        case LinkKind.PCI:
            return ends.isdisjoint({NodeKind.NET, NodeKind.NVS}) and block.nodes[end].kind is not NodeKind.CPU
        case LinkKind.NVL | LinkKind.C2C:
            return not ends.isdisjoint({NodeKind.GPU, NodeKind.DEV, NodeKind.CXB}) and NodeKind.NIC not in ends
        case LinkKind.LOC:
            return NodeKind.NIC not in ends and NodeKind.NET not in ends


def _node_of(block: _Block, found: re.Match[bytes], *, is_described: bool) -> int | None:
    """The node that a line ends with; None if a second line describes it."""
    key = _node_key(found)
    index = block.index.get(key)
    if is_described and index in block.described:
        return None
    node = _node(key, found["text"], is_described=is_described)
    if node is None:
        return None
    if index is None:
        index = block.index[key] = len(block.nodes)
        block.nodes.append(node)
    elif is_described:
        block.nodes[index] = node
    if is_described:
        block.described.add(index)
    return index


def _node(key: _Key, text: bytes | None, *, is_described: bool) -> TopologyNode | None:
    kind, system, local = key
    printed = "" if text is None else text.decode("ascii", "replace")
    rank = speed = None
    if kind is NodeKind.GPU and is_described:
        if not printed.removeprefix("-").isdigit():
            return None
        rank = int(printed) if 0 <= int(printed) < 2**31 else None
    elif kind is NodeKind.NET and printed:
        try:
            speed = _rate(printed.rsplit("/", 1)[-1].encode())
        except ValueError:
            return None
    return TopologyNode(
        kind=kind, system=system, local=local, rank=rank, bytes_per_second=speed, text=printed if rank is None else ""
    )


def _close(block: _Block) -> bool:
    """Adds the directions that NCCL does not print; False if the block cannot be whole.

    Every link is kept by NCCL in both directions. Up a PCI tree, and from what has no lines of its own (NVSwitch,
    network ports, GPUs below a DEV), it is not printed, and as fast; all others must have been printed both ways.
    """
    for (start, end, kind), rate in list(block.links.items()):
        back = (end, start, kind)
        if back in block.links:
            continue
        if kind is not LinkKind.PCI and end in block.described:
            return False
        block.links[back] = rate
    # A network port, a switch or a GPU below a DEV is named by links alone; anything else has lost its lines.
    named_only = {NodeKind.NVS, NodeKind.NET, NodeKind.GPU, NodeKind.GIN, NodeKind.RMA, NodeKind.CXB}
    is_whole = all(index in block.described or node.kind in named_only for index, node in enumerate(block.nodes))
    lost_gpus = any(
        node.kind is NodeKind.GPU and index not in block.described and not _hangs_on_device(block, index)
        for index, node in enumerate(block.nodes)
    )
    gpus = [node for node in block.nodes if node.kind is NodeKind.GPU]
    ranks = [node.rank for node in gpus if node.rank is not None]
    block.waiting = {index for index, node in enumerate(block.nodes) if node.kind in (NodeKind.GPU, NodeKind.NET)}
    return is_whole and not lost_gpus and bool(gpus) and len(set(ranks)) == len(ranks)


def _hangs_on_device(block: _Block, gpu: int) -> bool:
    """2.30 puts a GPU that may be partitioned below a DEV node, and names it by a LOC link."""
    return any(start == gpu and kind is LinkKind.LOC for start, _, kind in block.links)


def _add_paths(block: _Block, start: int, text: bytes) -> bool:
    """Adds the cells of a path line that are whole: the line is cut at NCCL's limit of 1,024 characters.

    False if it names a node that the tree has not: then the tree has lost lines.
    """
    if block.nodes[start].kind is not NodeKind.GPU:
        return True  # the other way round it is in the GPUs' own lines
    for found in _PATH.finditer(text):
        end, rate = block.index.get(_node_key(found)), _rate(found["rate"])
        if end is None or rate is None:
            return False
        block.paths.append(
            TopologyPath(
                start=start, end=end, hops=int(found["hops"]), bytes_per_second=rate, kind=found["type"].decode()
            )
        )
    return True
