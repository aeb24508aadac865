"""Launches and kernels of one thread that are not decided yet, and launches that take several kernels.

NCCL calls the kernels of one launch its plans. A group is cut into several if its work does not fit into one kernel's
arguments or into half of the work FIFO (2.13 on; 2.8 to 2.12 refuse such a group), and if its operations have no kernel
in common: Broadcasts of one group with several roots (2.29 on) run as AllGatherV, one of each root in a plan, behind
the group's other collectives. The log does not say where the cut lies. So operations name the first kernel of their
launch, and the others are kept beside it (records.PLAN): nothing about them is guessed.

*Source:* NCCL `src/enqueue.cc` (ncclLaunchPrepare, scheduleCollTasksToPlan, testBudget),
`src/scheduler/allgatherv_sched.cc`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_time import GROUP_GAP_NS, SPLIT_PRIOR, GroupVotes
from ncclscope_service.align.expected_launches import LAUNCH
from ncclscope_service.align.lost_calls import Filled
from ncclscope_service.align.records import PLAN
from ncclscope_service.columns import row_ops
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

THREAD_KERNEL: Final = np.dtype(
    [
        ("id", "<i8"),
        ("correlation_id", "<i8"),
        ("time_ns", "<i8"),  # of its launch call; its start if that is not known
        ("tid", "<i8"),  # of its launch call; NO_NUMBER if it does not matter or is not known
        ("lane", "<i4"),
        ("device", "<i4"),
        ("kernel_class", "<u1"),
        ("data_type", "<i2"),
        ("is_orphan", "?"),  # its launch call is in no export
        ("duration_ns", "<i8"),  # 0 if it is not known
        ("grid_x", "<i4"),  # likewise
    ]
)
"""One kernel of a thread, in order of launching."""


_MOST_BEHIND: Final = 256
"""Most further kernels of a group that the log does not show."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Decision on the launches from the front."""

    kernel: NDArray[np.int64]
    """Index of each launch's kernel; several launches may share one; NO_NUMBER: there is none."""
    confidence: NDArray[np.float32]
    is_hole: NDArray[np.bool_]
    """Launches in a stretch that no capture seems to hold."""
    kernels_used: int = 0

    @classmethod
    def without_kernels(cls, amount: int) -> Choice:
        """This many launches have no kernel."""
        return cls(np.full(amount, NO_NUMBER, np.int64), np.zeros(amount, np.float32), np.ones(amount, bool))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Launches that are decided, in order, with the position of their kernel in `kernels`."""

    launches: Columns
    """LAUNCH rows; begin and end point into `ids`."""
    ids: NDArray[np.int64]
    kernel: NDArray[np.int64]
    """Index into `kernels`; NO_NUMBER if none was found."""
    confidence: NDArray[np.float32]
    kernels: Columns
    is_hole: NDArray[np.bool_]
    """Launches in a stretch that no capture seems to hold."""
    plans: Columns = field(default_factory=lambda: np.empty(0, PLAN))
    """Further kernels of these launches (records.PLAN)."""


def spread(launches: Columns) -> Columns:
    """One row for each kernel that the launches (LAUNCH) are known to take; only the first has the operations."""
    if not (launches["plans"] > 1).any():
        return launches
    amounts = np.where(launches["plan"] == 0, np.maximum(launches["plans"], 1), 1)
    rows = row_ops.take(launches, np.repeat(np.arange(len(launches)), amounts))
    within = np.arange(len(rows)) - np.repeat(np.cumsum(amounts) - amounts, amounts)
    rows["plan"] = np.where(np.repeat(launches["plan"], amounts) == 0, within, rows["plan"])
    rows["begin"] = np.where(rows["plan"] > 0, rows["end"], rows["begin"])
    return rows


@dataclass(slots=True)
class ThreadBacklog:
    """Launches and kernels of one thread, in order, until they are decided."""

    launches: Columns = field(default_factory=lambda: np.empty(0, dtype=LAUNCH))
    ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The operations that the launches' begin and end point into."""
    kernels: Columns = field(default_factory=lambda: np.empty(0, dtype=THREAD_KERNEL))
    is_spread: bool = False
    """There is a row for each kernel that a launch is known to take."""
    filled: int = 0
    """Launches up to which those whose lines were lost were put in; they have no operations."""
    _last_correlation: int = -(2**63)

    def add_launches(self, launches: Columns, ids: NDArray[np.int64]) -> None:
        """Adds further launches; `ids` are the operations their begin and end point into."""
        self._append(spread(launches) if self.is_spread else launches, ids)

    def spread(self) -> None:
        """From now on there is a row for each kernel that a launch is known to take."""
        if not self.is_spread:
            self.is_spread, self.launches = True, spread(self.launches)

    def fill(self, filled: Filled) -> None:
        """Takes these launches in place of those behind the ones that are filled."""
        rows = filled.rows
        if filled.is_lost.any():
            for name, of in (("first_op", "first_op"), ("begin", "begin"), ("end", "begin")):
                rows[name][filled.is_lost] = rows[of][filled.following]
        before, behind = self.launches[: self.filled], self.launches[self.filled + filled.amount :]
        self.launches = row_ops.concat([before, rows, behind])
        self.filled += len(rows)

    def _append(self, launches: Columns, ids: NDArray[np.int64]) -> None:
        lengths = launches["end"] - launches["begin"]
        added = row_ops.copy(launches)
        added["end"] = np.cumsum(lengths) + len(self.ids)
        added["begin"] = added["end"] - lengths
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self.ids = np.concatenate([self.ids, ids[np.repeat(launches["begin"], lengths) + within]])
        is_ordered = len(self.launches) == 0 or added["first_op"][0] > self.launches["first_op"][-1]
        self.launches = row_ops.concat([self.launches, added])
        if not is_ordered:
            self._sort_launches()

    def _sort_launches(self) -> None:
        rows = row_ops.take(self.launches, np.argsort(self.launches["first_op"], kind="stable"))
        ids, self.launches, self.ids = self.ids, rows[:0], np.empty(0, dtype=np.int64)
        self._append(rows, ids)

    def add_kernels(self, kernels: Columns) -> None:
        """Ingests further kernels in any order; those before what is decided, and doubles, are left out."""
        is_new = kernels["correlation_id"] > self._last_correlation
        new = kernels if is_new.all() else row_ops.filter_rows(kernels, is_new)
        merged = row_ops.concat([self.kernels, new])
        if len(merged) > 1 and not np.all(merged["correlation_id"][1:] > merged["correlation_id"][:-1]):
            _, first = np.unique(merged["correlation_id"], return_index=True)
            merged = row_ops.take(merged, first)
        self.kernels = merged

    def withdraw(self, operations: NDArray[np.int64]) -> None:
        """Takes these operations out of the launches."""
        gone = np.isin(self.ids, operations)
        if not gone.any():
            return
        kept = np.concatenate([[0], np.cumsum(~gone)])
        self.ids = self.ids[~gone]
        launches = self.launches.copy()
        launches["begin"], launches["end"] = kept[launches["begin"]], kept[launches["end"]]
        has_any = (launches["begin"] < launches["end"]) | (launches["plan"] > 0)
        launches = launches[has_any & ~((launches["plan"] > 0) & np.isin(launches["first_op"], operations))]
        whole = launches["plan"] == 0
        launches["first_op"][whole] = self.ids[launches["begin"][whole]]
        self.launches = launches

    def drain_decided(self, choice: Choice) -> Outcome:
        """Takes out the launches and the kernels that are decided."""
        used, kernels_used = len(choice.kernel), choice.kernels_used
        cut = int(self.launches["end"][used - 1]) if used else 0
        outcome = Outcome(
            launches=self.launches[:used],
            ids=self.ids[:cut],
            kernel=choice.kernel,
            confidence=choice.confidence,
            kernels=self.kernels[:kernels_used],
            is_hole=choice.is_hole,
        )
        if used:
            self.launches = row_ops.copy(self.launches[used:])
            self.launches["begin"] -= cut
            self.launches["end"] -= cut
            self.ids = self.ids[cut:].copy()
            self.filled = max(0, self.filled - used)
        if kernels_used:
            self._last_correlation = int(self.kernels["correlation_id"][kernels_used - 1])
            self.kernels = row_ops.copy(self.kernels[kernels_used:])
        return outcome


def plans_of(kernels: NDArray[np.int64], firsts: NDArray[np.int64]) -> Columns:
    """Rows of records.PLAN."""
    rows = np.empty(len(kernels), PLAN)
    rows["kernel"], rows["first"] = kernels, firsts
    return rows


@dataclass(slots=True)
class PlanGatherer:
    """Puts rows of one launch of a thread together again, even if they were decided one after the other.

    What the log does not show follows from what is left over: kernels right behind a group's, on its stream and of its
    kind, which no launch explains. Whether they are the group's is voted on, since a lost line looks alike.
    """

    _held: Outcome | None = None
    """The last launch, while more of its kernels may come."""
    _splits: GroupVotes = field(default_factory=GroupVotes)

    def gather(self, outcome: Outcome, *, final: bool = False) -> Outcome:
        """The same with one row for each launch, and its further kernels in `plans`."""
        if self._held is not None:
            outcome, self._held = _joined(self._held, outcome), None
        whole, since = (len(outcome.launches), len(outcome.kernels)) if final else _cut_between(outcome)
        if whole < len(outcome.launches):
            self._held, outcome = _cut(outcome, whole, since), _cut(outcome, 0, 0, whole, since)
        return self._with_left_over(_gathered(outcome))

    def _with_left_over(self, outcome: Outcome) -> Outcome:
        """The same with kernels that nothing explains but the group whose kernel is beside them."""
        launches, ids = outcome.launches, outcome.kernels["id"]
        anchors = np.flatnonzero(launches["may_split"] & (outcome.kernel != NO_NUMBER))
        if len(anchors) == 0:
            return outcome
        is_used = np.isin(ids, outcome.plans["kernel"])
        is_used[outcome.kernel[outcome.kernel != NO_NUMBER]] = True
        found = _beside(outcome, anchors, self._last_kernels(outcome, anchors), is_used)
        is_split = np.zeros(len(anchors), dtype=bool)
        is_split[list(found)] = True
        signatures = launches["signature"][anchors].astype(np.int64)
        is_split &= self._splits.share(signatures, is_split, np.full(len(signatures), SPLIT_PRIOR)) > 0.5
        if not is_split.any():
            return outcome
        plans, kernel = [outcome.plans], outcome.kernel.copy()
        for nth in np.flatnonzero(is_split).tolist():
            known = int(kernel[anchors[nth]])
            own = np.array(sorted({*found[nth], known}), dtype=np.int64)
            kernel[anchors[nth]] = own[0]
            plans[0]["first"][plans[0]["first"] == ids[known]] = ids[own[0]]
            plans.append(plans_of(ids[own[1:]], np.full(len(own) - 1, ids[own[0]])))
        return replace(outcome, kernel=kernel, plans=np.concatenate(plans))

    @staticmethod
    def _last_kernels(outcome: Outcome, anchors: NDArray[np.intp]) -> NDArray[np.int64]:
        """Index of the last known kernel of each of these launches."""
        last = outcome.kernel[anchors].copy()
        ids = outcome.kernels["id"]
        for plan in outcome.plans:
            mine = ids[outcome.kernel[anchors]] == plan["first"]
            last[mine] = np.maximum(last[mine], int(np.flatnonzero(ids == plan["kernel"])[0]))
        return last


def _cut_between(outcome: Outcome) -> tuple[int, int]:
    """The first launch that is held, and the first kernel that is held with it: no launch before it has one of those.

    One kernel may be that of several launches, which are one group's: they stay together.
    """
    whole = _first_open(outcome)
    begins = np.flatnonzero(outcome.launches["plan"] == 0)
    while True:
        held, before = outcome.kernel[whole:], outcome.kernel[:whole]
        since = int(held[held != NO_NUMBER].min(initial=len(outcome.kernels)))
        sharing = np.flatnonzero(before >= since)
        if len(sharing) == 0:
            return whole, since
        whole = int(begins[begins <= sharing[0]][-1])


def _first_open(outcome: Outcome) -> int:
    """The first launch whose further kernels may still come: the last one, if nothing behind it has a kernel."""
    launches = outcome.launches
    if len(launches) == 0:
        return 0
    matched = np.flatnonzero(outcome.kernel != NO_NUMBER)
    begins = np.flatnonzero(launches["plan"] == 0)
    whole = len(launches)
    if launches["plan"][-1] < launches["plans"][-1] - 1:
        whole = int(begins[-1])
    if len(matched) and launches["may_split"][matched[-1]]:
        whole = min(whole, int(begins[begins <= matched[-1]][-1]))
    return whole


def _next_on_lane(lanes: NDArray[np.int32]) -> NDArray[np.intp]:
    """The next kernel on the lane of each; their number if there is none."""
    order = np.argsort(lanes, kind="stable")
    behind = np.full(len(lanes), len(lanes), dtype=np.intp)
    same = lanes[order[1:]] == lanes[order[:-1]]
    behind[order[:-1][same]] = order[1:][same]
    return behind


def _beside(
    outcome: Outcome, anchors: NDArray[np.intp], last: NDArray[np.int64], is_used: NDArray[np.bool_]
) -> dict[int, list[int]]:
    """Kernels that nothing uses right behind the last one of each launch and right before its first, if there are any.

    They were launched on its lane without delay, and may be its by class and type.
    """
    kernels, found = outcome.kernels, dict[int, list[int]]()
    behind, ahead = _next_on_lane(kernels["lane"]), len(kernels) - 1 - _next_on_lane(kernels["lane"][::-1])[::-1]
    is_free = np.append(~is_used, False)
    first = outcome.kernel[anchors]
    for nth in np.flatnonzero(is_free[behind[last]] | is_free[ahead[first]]).tolist():
        launch: np.void = outcome.launches[int(anchors[nth])]
        own = _run(kernels, int(last[nth]), is_free, behind, launch)
        own += _run(kernels, int(first[nth]), is_free, ahead, launch)
        if own:
            is_free[own] = False
            found[nth] = own
    return found


def _run(
    kernels: Columns, before: int, is_free: NDArray[np.bool_], following: NDArray[np.intp], launch: np.void
) -> list[int]:
    found: list[int] = []
    at = int(following[before])
    while at >= 0 and is_free[at] and len(found) < _MOST_BEHIND:
        fits = bool(int(launch["classes"]) >> int(kernels["kernel_class"][at]) & 1)
        types = {int(kernels["data_type"][at]), int(launch["data_type"])} - {NO_NUMBER}
        near = abs(int(kernels["time_ns"][at]) - int(kernels["time_ns"][before])) <= GROUP_GAP_NS
        if not (fits and near and len(types) < 2):
            break
        found.append(at)
        before, at = at, int(following[at])
    return found


def _gathered(outcome: Outcome) -> Outcome:
    """One row for each launch, with the first kernel that any of its rows has."""
    launches, kernel = outcome.launches, outcome.kernel
    begins = np.flatnonzero(launches["plan"] == 0)
    if len(begins) == len(launches):
        return outcome
    launch_of = np.cumsum(launches["plan"] == 0) - 1
    matched = np.flatnonzero(kernel != NO_NUMBER)
    of, first = np.unique(launch_of[matched], return_index=True)
    chosen = begins.copy()
    chosen[of] = matched[first]
    first_of = np.full(len(begins), NO_NUMBER, dtype=np.int64)
    first_of[of] = kernel[matched[first]]
    others = matched[kernel[matched] != first_of[launch_of[matched]]]
    ids = outcome.kernels["id"]
    return replace(
        outcome,
        launches=row_ops.take(launches, begins),
        kernel=first_of,
        confidence=outcome.confidence[chosen],
        is_hole=outcome.is_hole[begins],
        plans=plans_of(ids[kernel[others]], ids[first_of[launch_of[others]]]),
    )


def _cut(outcome: Outcome, begin: int, since: int, end: int | None = None, until: int | None = None) -> Outcome:
    """The launches from `begin` to `end` with their operations, and the kernels from `since` to `until`."""
    kernel, launches = outcome.kernel[begin:end], outcome.launches[begin:end].copy()
    first, last = (int(launches["begin"][0]), int(launches["end"][-1])) if len(launches) else (0, 0)
    launches["begin"] -= first
    launches["end"] -= first
    return replace(
        outcome,
        launches=launches,
        ids=outcome.ids[first:last],
        kernel=np.where(kernel == NO_NUMBER, NO_NUMBER, kernel - since),
        confidence=outcome.confidence[begin:end],
        is_hole=outcome.is_hole[begin:end],
        kernels=outcome.kernels[since:until],
    )


def _joined(before: Outcome, after: Outcome) -> Outcome:
    later = after.launches.copy()
    later["begin"] += len(before.ids)
    later["end"] += len(before.ids)
    kernel = np.where(after.kernel == NO_NUMBER, NO_NUMBER, after.kernel + len(before.kernels))
    return Outcome(
        launches=np.concatenate([before.launches, later]),
        ids=np.concatenate([before.ids, after.ids]),
        kernel=np.concatenate([before.kernel, kernel]),
        confidence=np.concatenate([before.confidence, after.confidence]),
        kernels=np.concatenate([before.kernels, after.kernels]),
        is_hole=np.concatenate([before.is_hole, after.is_hole]),
    )
