"""Finds the log lines that a CUDA graph was captured from.

While a stream is captured NCCL prints its lines as always and launches nothing; the kernels come with every replay,
without a line. So the kernels of one graph, in the order of its nodes, are the launches of one stretch of the log, and
that stretch has no kernels of its own. Programs repeat: the steps before the capture look the same. They differ in that
their kernels were launched one by one.

Source: NCCL `src/enqueue.cc` (ncclLaunchPrepare: a captured plan is kept and launched by the graph).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.kernel_name import KernelClass
from ncclscope_service.launch_rules import Counting, rules_of
from ncclscope_service.segment import Divider, Kind
from ncclscope_service.translate import Translator
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_SEND_RECV: Final = int(KernelClass.SEND_RECV)
_SURE: Final = 0.99
_LIKELY: Final = 0.9
_GUESS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Evidence:
    """What else is known of one graph when its lines are looked for."""

    first_launch_ns: int
    """When it was first seen launched; NO_TIME_NS where that call is not recorded."""
    first_correlation: int
    """Correlation id of its first launch that was seen."""
    launched: Columns
    """The NCCL kernels of the process that were launched one by one (align_rows.ALIGN_KERNEL), in any order."""
    graph_launches_ns: NDArray[np.int64]
    """When graphs of the process were launched."""
    takes_last: bool
    """With nothing recorded that bounds where it was captured: the last stretch that fits, instead of none."""


@dataclass(frozen=True, slots=True)
class CapturedLaunch:
    """What one node of a graph runs."""

    node: int
    operations: NDArray[np.int64]
    """Ids of the captured operations."""
    confidence: float


@dataclass(slots=True)
class Lines:
    """The lines of one process that may have been captured, as launches in the order of the log."""

    launches: Columns
    """translate.LAUNCH rows: groups that nothing tells are open, since opCount stands still while capturing."""
    ids: NDArray[np.int64]
    devices: NDArray[np.int32]
    """Device of each launch; NO_NUMBER where it is not known."""
    kinds: list[Kind]
    """Of each launch, for dividing runs of Send and Recv."""
    is_collapsing: bool
    """Whether SendRecv kernels are Sends and Recvs: in 2.13 collectives show that name too."""

    @classmethod
    def of(cls, version: str | None, operations: Columns) -> Lines:
        """The launches that these operations (align_rows.ALIGN_OPERATION, in log order) lead to."""
        translator = Translator(replace(rules_of(version), counting=Counting.NEVER))
        translator.feed(operations)
        launches, ids = translator.launches(final=True)
        devices = translator.lane_devices[launches["lane"]] if len(launches) else np.empty(0, np.int32)
        kinds: list[Kind] = []
        if len(launches):
            signatures = translator.signatures.rows
            kinds = [
                (int(signatures["op"][number]), int(signatures["root"][number]), bool(is_open))
                for number, is_open in zip(launches["signature"].tolist(), launches["is_open"].tolist(), strict=True)
            ]
        return cls(launches, ids, devices, kinds, not translator.rules.shows_send_recv)

    def find(self, nodes: Columns, taken: NDArray[np.int64], evidence: Evidence) -> list[CapturedLaunch]:
        """What each node of a graph runs; empty where no stretch of the lines fits them.

        `nodes`: one kernel (align_rows.ALIGN_KERNEL) of each node, in the order of capture; `taken`: operations that
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
        evidence = replace(evidence, launched=evidence.launched[evidence.launched["device_id"] == device])
        chosen, confidence = self._choose(found, launches, lines, length, taken_before, evidence)
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
        evidence: Evidence,
    ) -> tuple[int, float]:
        """The stretch that was captured, and how sure that is; NO_NUMBER where nothing tells."""
        stamps = launches["logged_at_ns"]
        if (stamps != NO_TIME_NS).all() and evidence.first_launch_ns != NO_TIME_NS:
            found = found[stamps[lines[found + length] - 1] <= evidence.first_launch_ns]
            following = np.append(stamps, evidence.first_launch_ns)[lines[found + length]]
            times = _StretchTimes(stamps[lines[found]], stamps[lines[found + length] - 1], following)
            return _choose_by_time(found, times, evidence)
        before = _items_before(evidence, self.is_collapsing)
        return _choose_by_order(found, found - taken_before[found], length, before, evidence)

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


def _choose_by_time(found: NDArray[np.intp], times: _StretchTimes, evidence: Evidence) -> tuple[int, float]:
    """The first stretch since the last launch that was recorded before, of anything: graphs are captured one by one.

    A stretch in which something was launched, or whose last line was launched before the next was written, was not
    captured.
    """
    launched = evidence.launched["launch_start_ns"]
    alone = np.sort(launched[launched != NO_TIME_NS])
    everything = np.sort(np.concatenate([alone, evidence.graph_launches_ns]))
    before = np.searchsorted(everything, times.first_ns, side="right")
    until_ns = np.minimum(times.following_ns, evidence.first_launch_ns)
    is_silent = before == np.searchsorted(everything, times.last_ns, side="right")
    is_silent &= np.searchsorted(alone, times.last_ns) == np.searchsorted(alone, until_ns)
    found, before = found[is_silent], before[is_silent]
    if len(found) == 0:
        return NO_NUMBER, 0.0
    if before[-1] > 0:
        return int(found[before == before[-1]][0]), _SURE
    if evidence.takes_last:
        return int(found[-1]), _SURE if len(found) == 1 else _LIKELY
    return NO_NUMBER, 0.0


def _choose_by_order(
    found: NDArray[np.intp], launched: NDArray[np.int64], length: int, before: int, evidence: Evidence
) -> tuple[int, float]:
    """The stretch before which as many launches were logged as were launched before the graph; else the last.

    Where everything was recorded from the start the numbers agree but for what was lost. Where the recording began
    later nothing tells, and what comes last in the log is the likeliest: once a graph replays nothing more is logged.
    """
    off = np.abs(launched - before)
    nearest = int(off.argmin())
    if off[nearest] == 0:
        return int(found[nearest]), _SURE
    if before >= length and off[nearest] <= length // 8:
        return int(found[nearest]), _LIKELY
    if evidence.takes_last:
        return int(found[-1]), _LIKELY if len(found) == 1 else _GUESS
    return NO_NUMBER, 0.0


def _items_before(evidence: Evidence, is_collapsing: bool) -> int:
    rows = evidence.launched[evidence.launched["correlation_id"] < evidence.first_correlation]
    rows = rows[np.argsort(rows["correlation_id"], kind="stable")]
    if len(rows) == 0:
        return 0
    return len(_items((rows["kernel_class"] == _SEND_RECV) & is_collapsing)) - 1
