"""Which captured operation each kernel of a CUDA graph runs, for one process.

A graph is captured once and launched many times. All kernels of one launch carry its correlation id, and a kernel's
node is the same in every launch; so the nodes that share correlation ids are one graph, and once its nodes are known,
its lines are looked for (`graph_lines`). From then on each kernel of it is the k-th replay of a known launch.

Incremental: kernels may come in any portions. What is given out never changes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.graph_lines import CapturedLaunch, Evidence, Lines
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

REPLAY: Final = np.dtype(
    [
        ("kernel", "<i8"),  # id
        ("node", "<i8"),  # graph_node_id
        ("launch", "<i8"),  # id of the first captured operation; NO_NUMBER where the capture is not known
        ("replay", "<i4"),  # k-th launch of its graph that was recorded, from 0
        ("is_first", "?"),  # the first kernel of its node that was recorded: the one that its operations name
    ]
)
"""One kernel that a graph launched."""

WAITING_LIMIT: Final = 50_000
"""Kernels of one graph that wait until it is known; beyond, it is decided by what there is."""

_LAUNCHES_REMEMBERED: Final = 4096
"""Launches of one graph of which further kernels may still come: captures end in the middle of them."""

_ENOUGH_WHOLE_LAUNCHES: Final = 2
"""So many launches with all nodes that were ever seen, and the nodes are all there are."""

_GROWN: Final = 1.25
"""A graph whose lines were not found is looked for again when the log has grown by this."""


@dataclass(slots=True)
class _Graph:
    nodes: dict[int, np.void] = field(default_factory=dict[int, np.void])
    """One kernel of each node, the first that was seen."""
    launches: dict[int, int] = field(default_factory=dict[int, int])
    """Number of each launch (k-th that was seen), by correlation id."""
    seen: dict[int, int] = field(default_factory=dict[int, int])
    """Nodes that were seen of each launch, until the graph is known."""
    waiting: list[Columns] = field(default_factory=list[Columns])
    captured: dict[int, CapturedLaunch] | None = None
    """By node; None until its lines are found."""
    used: set[int] = field(default_factory=set[int])
    """Nodes of which a kernel was given out."""
    launched_ns: deque[int] = field(default_factory=lambda: deque[int](maxlen=_LAUNCHES_REMEMBERED))
    """When it was launched, as far as that is recorded."""
    launched: int = 0
    first_launch_ns: int = NO_TIME_NS
    """When it was first seen launched, or not later than then."""
    first_correlation: int = 0
    second_correlation: int | None = None
    looked_at: int = -1
    """How many operations were known when its lines were looked for in vain."""

    def is_whole(self) -> bool:
        """Whether its nodes are surely all known."""
        whole = sum(count == len(self.nodes) for count in self.seen.values())
        return whole >= _ENOUGH_WHOLE_LAUNCHES

    def is_crowded(self) -> bool:
        """Whether no more kernels may wait."""
        return sum(map(len, self.waiting)) > WAITING_LIMIT

    def number(self, correlation: int) -> int:
        """The number of a launch, a new one the first time."""
        if correlation not in self.launches:
            self.launches[correlation] = self.launched
            self.launched += 1
            if len(self.launches) > _LAUNCHES_REMEMBERED:
                del self.launches[next(iter(self.launches))]
        return self.launches[correlation]


@dataclass(slots=True)
class ProcessGraphs:
    """The graphs of one process. `version` is NCCL's, None where it is not known."""

    version: str | None
    unknown_replays: int = 0
    """Kernels of graphs whose capture was not found in the log, or that no line fits."""
    _graphs: list[_Graph] = field(default_factory=list[_Graph])
    _graph_of: dict[int, _Graph] = field(default_factory=dict[int, _Graph])
    """By node."""
    _taken: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])

    @property
    def waits(self) -> bool:
        """Whether kernels wait for their graph to be known."""
        return any(graph.waiting for graph in self._graphs)

    def feed(self, kernels: Columns) -> None:
        """Takes further kernels of graphs (align_rows.ALIGN_KERNEL), in any order."""
        order = np.lexsort((kernels["graph_node_id"], kernels["correlation_id"]))
        kernels = kernels[order]
        borders = np.flatnonzero(np.diff(kernels["correlation_id"])) + 1
        for launch in np.split(kernels, borders):
            if len(launch):
                self._feed_launch(launch)

    def wants_lines(self, operations: int, *, final: bool) -> bool:
        """Whether the process's operations, so many by now, should be looked through for lines of a graph."""
        return any(self._is_ready(graph, operations, final=final) for graph in self._graphs)

    def look_for_lines(
        self, operations: Columns, matched: NDArray[np.int64], launched: Columns, *, final: bool
    ) -> list[CapturedLaunch]:
        """Finds the lines of the graphs whose nodes are known; gives what each node of these runs.

        `operations`: align_rows.ALIGN_OPERATION in log order; `matched`: ids of those that have a kernel of their own;
        `launched`: the process's kernels outside graphs (align_rows.ALIGN_KERNEL). With `final` incomplete graphs too.
        """
        lines = Lines.of(self.version, operations)
        found: list[CapturedLaunch] = []
        ready = [graph for graph in self._graphs if self._is_ready(graph, len(operations), final=final)]
        ready.sort(key=lambda graph: graph.first_correlation)
        # What is bounded by something recorded, in the order of capture; then the rest, from the end of the log.
        for graph, takes_last in [*((each, False) for each in ready), *((each, True) for each in reversed(ready))]:
            graph.looked_at = len(operations)
            if graph.captured is None:
                taken = np.concatenate([matched, *self._taken])
                found += self._find(lines, graph, taken, launched, takes_last=takes_last)
        return found

    def take(self, *, final: bool) -> Columns:
        """Replays (REPLAY) that were decided since the last call; with `final` those of unknown graphs too."""
        taken = [np.empty(0, REPLAY)]
        for graph in self._graphs:
            if graph.waiting and (graph.captured is not None or final or graph.is_crowded()):
                rows = np.concatenate(graph.waiting)
                graph.waiting = []
                taken.append(self._replays(graph, rows))
        replays = np.concatenate(taken)
        self.unknown_replays += int(np.count_nonzero(replays["launch"] == NO_NUMBER))
        return replays

    def _feed_launch(self, kernels: Columns) -> None:
        """Kernels of one launch, by node."""
        correlation, nodes = int(kernels["correlation_id"][0]), kernels["graph_node_id"].tolist()
        graph = self._graph(correlation, nodes)
        is_new = correlation not in graph.launches
        if graph.number(correlation) == 0 and is_new:
            graph.first_correlation = correlation
            graph.first_launch_ns = _launched_at(kernels)
        elif is_new and graph.second_correlation is None:
            graph.second_correlation = correlation
        if is_new:
            graph.launched_ns.append(_launched_at(kernels))
        for node, kernel in zip(nodes, kernels, strict=True):
            if node not in graph.nodes:
                graph.nodes[node] = kernel
                self._graph_of[node] = graph
        if graph.captured is None:
            graph.seen[correlation] = graph.seen.get(correlation, 0) + len(nodes)
            if len(graph.seen) > _LAUNCHES_REMEMBERED:
                del graph.seen[next(iter(graph.seen))]
        graph.waiting.append(kernels)

    def _graph(self, correlation: int, nodes: list[int]) -> _Graph:
        """The graph of this launch and these nodes; graphs of which parts were seen apart become one."""
        same = [graph for graph in self._graphs if correlation in graph.launches]
        same += [graph for node in nodes if (graph := self._graph_of.get(node)) is not None]
        known = list({id(graph): graph for graph in same}.values())
        if not known:
            self._graphs.append(_Graph())
            return self._graphs[-1]
        graph = known[0]
        for other in known[1:]:
            self._merge(graph, other)
        return graph

    def _merge(self, graph: _Graph, other: _Graph) -> None:
        rows = [each for part in (graph, other) for each in part.waiting]
        launches = sorted({*graph.launches, *other.launches})
        graph.launches = {correlation: number for number, correlation in enumerate(launches)}
        graph.launched = len(launches)
        if other.first_correlation < graph.first_correlation:
            graph.first_correlation, graph.first_launch_ns = other.first_correlation, other.first_launch_ns
        graph.second_correlation = launches[1] if len(launches) > 1 else None
        graph.launched_ns.extend(other.launched_ns)
        graph.nodes |= other.nodes
        for correlation, count in other.seen.items():
            graph.seen[correlation] = graph.seen.get(correlation, 0) + count
        if graph.captured is not None or other.captured is not None:
            graph.captured = (graph.captured or {}) | (other.captured or {})
        graph.used |= other.used
        graph.waiting = rows
        self._graph_of |= dict.fromkeys(other.nodes, graph)
        self._graphs = [each for each in self._graphs if each is not other]

    def _is_ready(self, graph: _Graph, operations: int, *, final: bool) -> bool:
        if graph.captured is not None or not graph.nodes:
            return False
        if not (final or graph.is_crowded() or self._is_known(graph)):
            return False
        return final or operations > _GROWN * graph.looked_at

    def _is_known(self, graph: _Graph) -> bool:
        """Whether its nodes are surely all known, and those of what was captured with it, which may look like it."""
        return graph.is_whole() and all(
            each.captured is not None or each.is_whole()
            for each in self._graphs
            if graph.second_correlation is None or each.first_correlation < graph.second_correlation
        )

    def _find(
        self, lines: Lines, graph: _Graph, taken: NDArray[np.int64], launched: Columns, *, takes_last: bool
    ) -> list[CapturedLaunch]:
        """By the order of node ids, which count as they are captured; else by that of the starts."""
        device = int(next(iter(graph.nodes.values()))["device_id"])
        times = [
            at_ns
            for each in self._graphs
            if int(next(iter(each.nodes.values()))["device_id"]) == device
            for at_ns in each.launched_ns
            if at_ns < graph.first_launch_ns
        ]
        evidence = Evidence(
            graph.first_launch_ns, graph.first_correlation, launched, np.array(times, np.int64), takes_last
        )
        by_id = np.array([graph.nodes[node] for node in sorted(graph.nodes)])
        by_start = by_id[np.argsort(by_id["start_ns"], kind="stable")]
        found = lines.find(by_id, taken, evidence) or lines.find(by_start, taken, evidence)
        if found:
            graph.captured = {each.node: each for each in found}
            graph.seen.clear()
            self._taken.append(np.concatenate([each.operations for each in found]))
        return found

    def _replays(self, graph: _Graph, kernels: Columns) -> Columns:
        rows = np.empty(len(kernels), REPLAY)
        rows["kernel"], rows["node"] = kernels["id"], kernels["graph_node_id"]
        rows["replay"] = [graph.launches.get(each, NO_NUMBER) for each in kernels["correlation_id"].tolist()]
        rows["launch"] = NO_NUMBER
        rows["is_first"] = False
        rows = rows[np.argsort(rows["replay"], kind="stable")]
        for at, node in enumerate(rows["node"].tolist()):
            captured = None if graph.captured is None else graph.captured.get(node)
            if captured is None or len(captured.operations) == 0:
                continue
            rows["launch"][at] = captured.operations[0]
            rows["is_first"][at] = node not in graph.used
            graph.used.add(node)
        return rows


def _launched_at(kernels: Columns) -> int:
    """When a graph was launched; where that call is not recorded, the start of its first kernel, which is later."""
    known = kernels["launch_start_ns"].max()
    return int(kernels["start_ns"].min() if known == NO_TIME_NS else known)
