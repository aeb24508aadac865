"""Launches that take several kernels, which NCCL calls plans: known by the log where it tells, and put together.

A group is cut into several plans where its work does not fit into one kernel's arguments or into half of the work
FIFO (2.13 on; 2.8 to 2.12 refuse such a group), and where its operations have no kernel in common: Broadcasts of one
group with several roots (2.29 on) run as AllGatherV, one of each root in a plan, behind the group's other collectives.
Where the cut lies is printed nowhere. So operations name the first kernel of their launch, and the others are kept
beside it (align_rows.PLAN): nothing about them is guessed.

*Source:* NCCL `src/enqueue.cc` (ncclLaunchPrepare, scheduleCollTasksToPlan, testBudget),
`src/scheduler/allgatherv_sched.cc`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.align_rows import PLAN
from ncclscope_service.pending import Outcome
from ncclscope_service.timed import GROUP_GAP_NS, SPLIT_PRIOR, GroupVotes
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_NONE: Final = np.empty(0, PLAN)

_MOST_BEHIND: Final = 256
"""Kernels of a group that the log does not tell of, at most."""


def plans_of(kernels: NDArray[np.int64], firsts: NDArray[np.int64]) -> Columns:
    """Rows of align_rows.PLAN."""
    rows = np.empty(len(kernels), PLAN)
    rows["kernel"], rows["first"] = kernels, firsts
    return rows


@dataclass(slots=True)
class Plans:
    """Puts rows of one launch together again, of one thread, also where they were decided one after the other.

    What the log does not tell is seen in what is left over: kernels right behind a group's, on its stream and of its
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
        since = 0 if self._splits.is_used else int(is_split.argmax()) if found else len(anchors)
        signatures = launches["signature"][anchors[since:]].astype(np.int64)
        prior = np.full(len(signatures), SPLIT_PRIOR)
        is_split[since:] &= self._splits.share(signatures, is_split[since:], prior) > 0.5
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
    """The first launch of which further kernels may still come: the last one, if nothing behind it has a kernel."""
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
    """The next kernel on the lane of each; their number where there is none."""
    order = np.argsort(lanes, kind="stable")
    behind = np.full(len(lanes), len(lanes), dtype=np.intp)
    same = lanes[order[1:]] == lanes[order[:-1]]
    behind[order[:-1][same]] = order[1:][same]
    return behind


def _beside(
    outcome: Outcome, anchors: NDArray[np.intp], last: NDArray[np.int64], is_used: NDArray[np.bool_]
) -> dict[int, list[int]]:
    """Kernels that nothing uses right behind the last one of each launch and right before its first, where any are.

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
        launches=whole_rows.taken(launches, begins),
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
