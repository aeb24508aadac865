"""CUDA graphs of one process: the log lines each was captured from, and the operation that each of its kernels runs.

*Lines.* While a stream is captured NCCL prints its lines as always and launches nothing; the kernels come with every
replay, without a line. So the kernels of one graph, in the order of its nodes, are the launches of one stretch of the
log, and that stretch has no kernels of its own. Programs repeat: the steps before the capture look the same. They
differ in that their kernels were launched one by one.

Source: NCCL `src/enqueue.cc` (ncclLaunchPrepare: a captured plan is kept and launched by the graph).

*Kernels.* A graph is captured once and launched many times. All kernels of one launch carry its correlation id, and a
kernel's node is the same in every launch; so the nodes that share correlation ids are one graph, and once its nodes are
known, its lines are looked for. From then on each kernel of it is the k-th replay of a known launch.

Incremental: kernels may come in any portions. Results never change.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.known_runs import Divider, Kind
from ncclscope_service.align.expected_launches import Translator
from ncclscope_service.nccl.launch_rules import Counting, KernelClass, rules_of
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_SEND_RECV: Final = int(KernelClass.SEND_RECV)
_SURE: Final = 0.99
_LIKELY: Final = 0.9
_GUESS: Final = 0.5


@dataclass(frozen=True, slots=True)
class GraphContext:
    """Times and launches that bound where the lines of one graph may be."""

    first_launch_ns: int
    """When it was first seen launched; NO_TIME_NS if that call is not recorded."""
    first_correlation: int
    """Correlation id of its first launch that was seen."""
    launched: Columns
    """The NCCL kernels of the process that were launched one by one (records.ALIGN_KERNEL), in any order."""
    graph_launches_ns: NDArray[np.int64]
    """When graphs of the process were launched."""
    takes_last: bool
    """With nothing recorded that bounds where it was captured: the last stretch that fits, instead of none."""


@dataclass(frozen=True, slots=True)
class CapturedLaunch:
    """Operations that one node of a graph runs."""

    node: int
    operations: NDArray[np.int64]
    """Ids of the captured operations."""
    confidence: float


@dataclass(slots=True)
class GraphLines:
    """The lines of one process that may have been captured, as launches in the order of the log."""

    launches: Columns
    """expected_launches.LAUNCH rows: unknown groups are open, since opCount stands still while capturing."""
    ids: NDArray[np.int64]
    devices: NDArray[np.int32]
    """Device of each launch; NO_NUMBER if it is not known."""
    kinds: list[Kind]
    """Of each launch, for dividing runs of Send and Recv."""
    is_collapsing: bool
    """Whether SendRecv kernels are Sends and Recvs: in 2.13 collectives show that name too."""

    @classmethod
    def from_operations(cls, version: str | None, operations: Columns) -> GraphLines:
        """The launches that these operations (records.ALIGN_OPERATION, in log order) lead to."""
        translator = Translator(replace(rules_of(version), counting=Counting.NEVER))
        translator.ingest_operations(operations)
        launches, ids = translator.drain_launches(final=True)
        devices = translator.lane_devices[launches["lane"]] if len(launches) else np.empty(0, np.int32)
        kinds: list[Kind] = []
        if len(launches):
            signatures = translator.signatures.rows
            kinds = [
                (int(signatures["op"][number]), int(signatures["root"][number]), bool(is_open))
                for number, is_open in zip(launches["signature"].tolist(), launches["is_open"].tolist(), strict=True)
            ]
        return cls(launches, ids, devices, kinds, not translator.rules.shows_send_recv)

    def find(self, nodes: Columns, taken: NDArray[np.int64], context: GraphContext) -> list[CapturedLaunch]:
        """Operations of each node of a graph; empty if no stretch of the lines fits them.

        `nodes`: one kernel (records.ALIGN_KERNEL) of each node, in the order of capture; `taken`: operations that
        are known to be of another graph, or to have a kernel of their own.
        """
        device = int(nodes["device_id"][0])
        mine = np.flatnonzero((self.devices == device) | (self.devices == NO_NUMBER))
        if len(mine) == 0:
            return []
        lines, kernels = self._line_items(mine), self._kernel_items(nodes)
        launches = self.launches[mine]
        length = len(kernels) - 1
        taken_before = self._taken_before(mine, lines, taken)
        found = _stretches(launches, lines, nodes, kernels)
        found = found[taken_before[found + length] == taken_before[found]]
        if len(found) == 0:
            return []
        context = replace(context, launched=context.launched[context.launched["device_id"] == device])
        chosen, confidence = self._choose(found, launches, lines, length, taken_before, context)
        if chosen == NO_NUMBER:
            return []
        return self._pair(mine, lines[chosen:], nodes, kernels, confidence)

    def _line_items(self, mine: NDArray[np.intp]) -> NDArray[np.intp]:
        """Where each item begins, with the end appended: a launch, or a run of Sends and Recvs with open groups."""
        launches = self.launches[mine]
        is_run = launches["is_open"] if self.is_collapsing else np.zeros(len(launches), bool)
        return _items(is_run)

    def _kernel_items(self, nodes: Columns) -> NDArray[np.intp]:
        return _items((nodes["kernel_class"] == _SEND_RECV) & self.is_collapsing)

    def _taken_before(
        self, mine: NDArray[np.intp], lines: NDArray[np.intp], taken: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """How many items before each, and before the end, hold operations that are taken."""
        launches = self.launches[mine]
        of_ids = np.concatenate([[0], np.cumsum(np.isin(self.ids, taken))])
        of_launches = np.concatenate([[0], np.cumsum(of_ids[launches["end"]] - of_ids[launches["begin"]])])
        of_items = of_launches[lines[1:]] - of_launches[lines[:-1]]
        return np.concatenate([[0], np.cumsum(of_items > 0)])

    def _choose(
        self,
        found: NDArray[np.intp],
        launches: Columns,
        lines: NDArray[np.intp],
        length: int,
        taken_before: NDArray[np.int64],
        context: GraphContext,
    ) -> tuple[int, float]:
        """The stretch that was captured, and how sure that is; NO_NUMBER if unknown."""
        stamps = launches["logged_at_ns"]
        if (stamps != NO_TIME_NS).all() and context.first_launch_ns != NO_TIME_NS:
            found = found[stamps[lines[found + length] - 1] <= context.first_launch_ns]
            following = np.append(stamps, context.first_launch_ns)[lines[found + length]]
            times = _StretchTimes(stamps[lines[found]], stamps[lines[found + length] - 1], following)
            return _choose_by_time(found, times, context)
        before = _items_before(context, self.is_collapsing)
        return _choose_by_order(found, found - taken_before[found], length, before, context)

    def _pair(
        self,
        mine: NDArray[np.intp],
        lines: NDArray[np.intp],
        nodes: Columns,
        kernels: NDArray[np.intp],
        confidence: float,
    ) -> list[CapturedLaunch]:
        divider, paired = Divider(), list[CapturedLaunch]()
        for item in range(len(kernels) - 1):
            first, last = int(lines[item]), int(lines[item + 1])
            node, amount = int(kernels[item]), int(kernels[item + 1] - kernels[item])
            groups, sure = np.zeros(1, np.int64), 1.0
            if last - first > 1 or amount > 1:
                kinds = tuple(self._kind(int(at)) for at in mine[first:last])
                groups, sure = divider.divide(kinds, amount)
            for nth in range(amount):
                own = mine[first + np.flatnonzero(groups == nth)]
                operations = [self.ids[row["begin"] : row["end"]] for row in self.launches[own]]
                ids = np.concatenate([np.empty(0, np.int64), *operations])
                paired.append(CapturedLaunch(int(nodes["graph_node_id"][node + nth]), ids, confidence * sure))
        return paired

    def _kind(self, launch: int) -> Kind:
        """Peers of different communicators are different peers."""
        op, peer, is_open = self.kinds[launch]
        return op, int(self.launches["lane"][launch]) << 20 | (peer & 0xFFFFF), is_open


def _items(is_run: NDArray[np.bool_]) -> NDArray[np.intp]:
    goes_on = is_run[1:] & is_run[:-1]
    return np.concatenate([[0], np.flatnonzero(~goes_on) + 1, [len(is_run)]]).astype(np.intp)


def _stretches(
    launches: Columns, lines: NDArray[np.intp], nodes: Columns, kernels: NDArray[np.intp]
) -> NDArray[np.intp]:
    """The items at which a stretch begins whose launches may be these kernels, one by one."""
    left, right = launches[lines[:-1]], nodes[kernels[:-1]]
    sizes, amounts = np.diff(lines), np.diff(kernels)
    found = np.arange(max(0, len(left) - len(right) + 1))
    for place in range(len(right)):
        at = found + place
        kernel = right[place]
        fits = (left["classes"][at] >> np.uint32(kernel["kernel_class"])) & 1 == 1
        known = (left["data_type"][at] != NO_NUMBER) & (kernel["data_type"] != NO_NUMBER)
        fits &= ~known | (left["data_type"][at] == kernel["data_type"])
        found = found[fits & (sizes[at] >= amounts[place])]
        if len(found) == 0:
            break
    return found


@dataclass(frozen=True, slots=True)
class _StretchTimes:
    """Stamps of the first and the last line of stretches, and of the line after each."""

    first_ns: NDArray[np.int64]
    last_ns: NDArray[np.int64]
    following_ns: NDArray[np.int64]


def _choose_by_time(found: NDArray[np.intp], times: _StretchTimes, context: GraphContext) -> tuple[int, float]:
    """The first stretch since the last launch that was recorded before, of anything: graphs are captured one by one.

    A stretch in which something was launched, or whose last line was launched before the next was written, was not
    captured.
    """
    launched = context.launched["launch_start_ns"]
    alone = np.sort(launched[launched != NO_TIME_NS])
    everything = np.sort(np.concatenate([alone, context.graph_launches_ns]))
    before = np.searchsorted(everything, times.first_ns, side="right")
    until_ns = np.minimum(times.following_ns, context.first_launch_ns)
    is_silent = before == np.searchsorted(everything, times.last_ns, side="right")
    is_silent &= np.searchsorted(alone, times.last_ns) == np.searchsorted(alone, until_ns)
    found, before = found[is_silent], before[is_silent]
    if len(found) == 0:
        return NO_NUMBER, 0.0
    if before[-1] > 0:
        return int(found[before == before[-1]][0]), _SURE
    if context.takes_last:
        return int(found[-1]), _SURE if len(found) == 1 else _LIKELY
    return NO_NUMBER, 0.0


def _choose_by_order(
    found: NDArray[np.intp], launched: NDArray[np.int64], length: int, before: int, context: GraphContext
) -> tuple[int, float]:
    """The stretch before which as many launches were logged as were launched before the graph; else the last.

    If everything was recorded from the start the numbers agree but for losses. If the recording began later, the last
    stretch in the log is the likeliest: once a graph replays nothing more is logged.
    """
    off = np.abs(launched - before)
    nearest = int(off.argmin())
    if off[nearest] == 0:
        return int(found[nearest]), _SURE
    if before >= length and off[nearest] <= length // 8:
        return int(found[nearest]), _LIKELY
    if context.takes_last:
        return int(found[-1]), _LIKELY if len(found) == 1 else _GUESS
    return NO_NUMBER, 0.0


def _items_before(context: GraphContext, is_collapsing: bool) -> int:
    rows = context.launched[context.launched["correlation_id"] < context.first_correlation]
    rows = rows[np.argsort(rows["correlation_id"], kind="stable")]
    if len(rows) == 0:
        return 0
    return len(_items((rows["kernel_class"] == _SEND_RECV) & is_collapsing)) - 1


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
"""Launches of one graph whose kernels may still come: captures end in the middle of them."""

_ENOUGH_WHOLE_LAUNCHES: Final = 2
"""After this many launches with all nodes that were ever seen, these are all nodes of the graph."""

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
    """Nodes whose kernel was returned."""
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
    """The graphs of one process. `version` is NCCL's, None if it is not known."""

    version: str | None
    _graphs: list[_Graph] = field(default_factory=list[_Graph])
    _graph_of: dict[int, _Graph] = field(default_factory=dict[int, _Graph])
    """By node."""
    _taken: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])

    @property
    def waits(self) -> bool:
        """Whether kernels wait for their graph to be known."""
        return any(graph.waiting for graph in self._graphs)

    def ingest_kernels(self, kernels: Columns) -> None:
        """Ingests further kernels of graphs (records.ALIGN_KERNEL), in any order."""
        order = np.lexsort((kernels["graph_node_id"], kernels["correlation_id"]))
        kernels = kernels[order]
        borders = np.flatnonzero(np.diff(kernels["correlation_id"])) + 1
        for launch in np.split(kernels, borders):
            if len(launch):
                self._ingest_launch(launch)

    def wants_lines(self, operations: int, *, final: bool) -> bool:
        """Whether to search the process's operations, of which there are this many, for lines of a graph."""
        return any(self._is_ready(graph, operations, final=final) for graph in self._graphs)

    def look_for_lines(
        self, operations: Columns, matched: NDArray[np.int64], launched: Columns, *, final: bool
    ) -> list[CapturedLaunch]:
        """Finds the lines of the graphs whose nodes are known; gives what each node of these runs.

        `operations`: records.ALIGN_OPERATION in log order; `matched`: ids of those that have a kernel of their own;
        `launched`: the process's kernels outside graphs (records.ALIGN_KERNEL). With `final` incomplete graphs too.
        """
        lines = GraphLines.from_operations(self.version, operations)
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

    def drain_replays(self, *, final: bool) -> Columns:
        """Replays (REPLAY) that were decided since the last call; with `final` those of unknown graphs too."""
        taken = [np.empty(0, REPLAY)]
        for graph in self._graphs:
            if graph.waiting and (graph.captured is not None or final or graph.is_crowded()):
                rows = np.concatenate(graph.waiting)
                graph.waiting = []
                taken.append(self._replays(graph, rows))
        return np.concatenate(taken)

    def _ingest_launch(self, kernels: Columns) -> None:
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
        """The graph of this launch and these nodes; graphs whose parts were seen apart become one."""
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
        self, lines: GraphLines, graph: _Graph, taken: NDArray[np.int64], launched: Columns, *, takes_last: bool
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
        context = GraphContext(
            graph.first_launch_ns, graph.first_correlation, launched, np.array(times, np.int64), takes_last
        )
        by_id = np.array([graph.nodes[node] for node in sorted(graph.nodes)])
        by_start = by_id[np.argsort(by_id["start_ns"], kind="stable")]
        found = lines.find(by_id, taken, context) or lines.find(by_start, taken, context)
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
    """When a graph was launched; if that call is not recorded, the start of its first kernel, which is later."""
    known = kernels["launch_start_ns"].max()
    return int(kernels["start_ns"].min() if known == NO_TIME_NS else known)
