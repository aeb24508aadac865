"""Conclusions from opCount: frozen values, missing lines, and kernels that a group takes.

*Frozen.* While a CUDA graph with NCCL work is alive, or with CUDA_LAUNCH_BLOCKING, NCCL 2.13 to 2.23 does not
count plans without network work; from 2.27 on no version does. Seen from the log alone, one value is then shared by
more than one launch:

* more operations share it than a group holds, or it comes back after more calls than a group takes;
* the opCount of another communicator moved between two operations of one thread: a group ended there;
* operations of two threads share it: groups are of one thread;
* collectives of two kinds take turns, as layers do (AllGather, ReduceScatter, AllGather) and no framework's group does.

*Jumps.* If a communicator counts every launch, the value of a line is the number of launches before it: a step of one
says that nothing was lost since the line before, a larger one how many launches were. Either these have no line, or
one group took several kernels, which step the count as well.

*Kernels of a group.* If a communicator counts every kernel, the line behind a group shows how many the group took. If
lines were lost, the group's number is what its like was seen to take most often, the smaller one of two that are as
often.

*Source:* NCCL `src/enqueue.cc` (hostStreamPlanTask, ncclLaunchPrepare), `src/proxy.cc:ncclProxyStart` (called once per
kernel plan in 2.12 to 2.26, else per plan with network work), `src/scheduler/allgatherv_sched.cc` (2.29 on: a plan of
Broadcasts takes one of each root, behind other collectives).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

GROUP_SPAN: Final = 64
"""Operations of one thread within which a group must lie to be recognised by its opCount; the largest groups seen
in training are all-to-alls of 2 x 32 calls. A value that stays longer is not counting."""

POINT_TO_POINT: Final = -1
"""Kind of an operation that groups hold in any order."""

_KEPT: Final = 64
_MEMBER_SHIFT: Final = np.uint64(44)

_Ends = dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]
"""By thread: calls before which a group has ended, ascending, and for each place among them the latest call after
which one did."""

FARTHEST: Final = 64
"""A larger step is no loss: replays of a CUDA graph were counted, or the communicator is another one."""


@dataclass(slots=True)
class _Run:
    """The newest operations of one communicator and thread that share a value."""

    tid: int
    value: int
    is_known: bool
    """Their groups are known."""
    first: int
    """Id of the first."""
    first_call: int
    last_call: int
    length: int = 0
    last_kind: int = POINT_TO_POINT
    kinds: set[int] = field(default_factory=set[int])

    def extend(self, call: int, kind: int, ended_after: int) -> bool:
        """Appends the next operation; True if it cannot be of one group with those before it."""
        over = call - self.last_call > GROUP_SPAN or call - self.first_call > 2 * GROUP_SPAN
        over |= ended_after > self.last_call or self.length >= GROUP_SPAN
        over &= self.length > 0
        self.length += 1
        self.last_call = call
        if kind != POINT_TO_POINT:
            over |= kind != self.last_kind and kind in self.kinds
            self.last_kind = kind
            self.kinds.add(kind)
        return over


@dataclass(slots=True)
class FrozenOpCounts:
    """Values of opCount that stand still in one process, whatever the portions its operations come in."""

    _runs: dict[int, _Run] = field(default_factory=dict[int, _Run])
    _ended: dict[int, int] = field(default_factory=dict[int, int])
    """By thread, the latest call after which a group is known to have ended."""
    _since: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """By communicator and value that stands still: id of the first operation with it."""
    _seen_at: int | None = None
    """Id of the operation at which this was seen first."""

    def __bool__(self) -> bool:
        return self._seen_at is not None

    def ingest_operations(self, rows: Columns, kinds: NDArray[np.int64]) -> None:
        """Ingests further operations that launch, in log order: id, tid, member, op_count, group and call (their number
        among those of the thread). `kinds`: of which kind each is, or POINT_TO_POINT."""
        if len(rows) == 0 or (rows["group"] != NO_NUMBER).all():
            return
        still = self.are_frozen(rows)
        if still.all():
            self._record_newest(rows)
            return
        # 16 bits are sorted in linear time.
        order = np.argsort(rows["member"].astype(np.uint16), kind="stable")
        if rows["member"].max() > np.iinfo(np.uint16).max:
            order = np.argsort(rows["member"], kind="stable")
        rows, kinds = row_ops.take(rows, order), kinds[order]
        starts = np.flatnonzero(np.concatenate([[True], ~_goes_on(rows[:-1], rows[1:])]))
        ends = np.append(starts[1:], len(rows))
        is_first = np.concatenate([[True], np.diff(rows["member"][starts]) != 0])
        ended = self._ends(rows, starts, is_first)
        needed = _is_doubtful(rows, kinds, starts, ends)
        needed &= ~still[order][starts]
        is_border = is_first | np.append(is_first[1:], True)
        members, values = rows["member"][starts].tolist(), rows["op_count"][starts].tolist()
        # Other runs are over, short, without a gap and of one kind: a group may be just that.
        for at in np.flatnonzero(needed | is_border).tolist():
            if is_border[at] or (members[at], values[at]) not in self._since:
                self._ingest_run(rows[starts[at] : ends[at]], kinds[starts[at] : ends[at]], ended)
        for tid, (_, latest) in ended.items():
            self._ended[tid] = int(latest[-1])

    def observe_uncounted(self, members: Iterable[int], since: int) -> None:
        """Of these communicators several operations with opCount 0 were launched apart; `since`: id of the first."""
        for member in members:
            if (member, 0) not in self._since:
                self._record_frozen(member, 0, since, since)

    def are_frozen(self, rows: Columns) -> NDArray[np.bool_]:
        """Whether the opCount of each operation is known to stand still."""
        if not self._since:
            return np.zeros(len(rows), dtype=bool)
        members, values = zip(*self._since, strict=True)
        keys = _keys(np.array(members, np.int64), np.array(values, np.uint64))
        order = np.argsort(keys, kind="stable")
        since = np.array(list(self._since.values()), dtype=np.int64)[order]
        wanted = _keys(rows["member"], rows["op_count"])
        place = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
        still: NDArray[np.bool_] = (keys[order][place] == wanted) & (rows["id"] >= since[place])
        return still

    def frozen_before(self, operations: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether any opCount of the process was seen to stand still before these operations."""
        if self._seen_at is None:
            return np.zeros(len(operations), dtype=bool)
        return self._seen_at < operations

    def evict_values(self, pending: Columns) -> None:
        """Keeps what is known of values of pending operations and of those that may still come."""
        if len(self._since) <= _KEPT:
            return
        kept = set(zip(pending["member"].tolist(), pending["op_count"].tolist(), strict=True))
        kept |= {(member, run.value) for member, run in self._runs.items()}
        self._since = {key: call for key, call in self._since.items() if key in kept}

    def _record_newest(self, rows: Columns) -> None:
        """Records the newest operation of each communicator."""
        members, last = np.unique(rows["member"][::-1], return_index=True)
        for member, row in zip(members.tolist(), rows[len(rows) - 1 - last], strict=True):
            call = int(row["call"])
            self._runs[member] = _Run(int(row["tid"]), int(row["op_count"]), False, int(row["id"]), call, call)

    def _ends(self, rows: Columns, starts: NDArray[np.intp], is_first: NDArray[np.bool_]) -> _Ends:
        after = starts[~is_first]
        threads, values, calls = rows["tid"], rows["op_count"], rows["call"]
        after = after[(threads[after - 1] == threads[after]) & (values[after - 1] != values[after])]
        tids, begins, ends = threads[after], calls[after - 1], calls[after]
        firsts = row_ops.take(rows, starts[is_first])
        of_first = zip(*(firsts[name].tolist() for name in ("member", "tid", "op_count", "call")), strict=True)
        further: list[tuple[int, int, int]] = []
        for member, tid, value, call in of_first:
            run = self._runs.get(member)
            if run is not None and run.tid == tid and run.value != value:
                further.append((tid, run.last_call, call))
        if further:
            more = np.array(further, np.int64)
            tids, begins, ends = (np.append(one, more[:, at]) for at, one in enumerate((tids, begins, ends)))
        found: _Ends = {}
        for tid in np.unique(rows["tid"]).tolist():
            of_thread = np.flatnonzero(tids == tid)
            order = of_thread[np.argsort(ends[of_thread], kind="stable")]
            latest = np.maximum.accumulate(np.append(self._ended.get(tid, -1), begins[order]))
            found[tid] = ends[order], latest
        return found

    def _ingest_run(self, rows: Columns, kinds: NDArray[np.int64], ended: _Ends) -> None:
        member, tid, value = (int(rows[name][0]) for name in ("member", "tid", "op_count"))
        is_known = int(rows["group"][0]) != NO_NUMBER
        before = run = self._runs.get(member)
        if run is None or (run.tid, run.value, run.is_known) != (tid, value, is_known):
            first, call = int(rows["id"][0]), int(rows["call"][0])
            run = self._runs[member] = _Run(tid, value, is_known, first, call, call)
        if is_known or (member, value) in self._since:
            run.last_call = int(rows["call"][-1])
            return
        if before is not None and not before.is_known and before.value == value and before.tid != tid:
            self._record_frozen(member, value, before.first, run.first)
            return
        ends, latest = ended[tid]
        calls = rows["call"]
        ended_after = latest[np.searchsorted(ends, calls)]
        for at, (call, kind, after) in enumerate(
            zip(calls.tolist(), kinds.tolist(), ended_after.tolist(), strict=True)
        ):
            is_near = call - run.last_call <= GROUP_SPAN
            if run.extend(call, kind, after):
                seen_at = int(rows["id"][at])
                self._record_frozen(member, value, run.first if is_near else seen_at, seen_at)
                run.last_call = int(calls[-1])
                return

    def _record_frozen(self, member: int, value: int, since: int, seen_at: int) -> None:
        self._since[member, value] = since
        self._seen_at = seen_at if self._seen_at is None else min(self._seen_at, seen_at)


def _goes_on(before: Columns, after: Columns) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = _shares_value(before, after) & (before["tid"] == after["tid"])
    same &= (before["group"] == NO_NUMBER) == (after["group"] == NO_NUMBER)
    return same


def _shares_value(before: Columns, after: Columns) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = (before["member"] == after["member"]) & (before["op_count"] == after["op_count"])
    return same


def _is_doubtful(
    rows: Columns, kinds: NDArray[np.int64], starts: NDArray[np.intp], ends: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Runs that are long, have calls of other communicators between, hold collectives of several kinds, or share
    their value with the run before or after."""
    length = ends - starts
    calls = rows["call"]
    doubtful: NDArray[np.bool_] = (length > GROUP_SPAN) | (calls[ends - 1] - calls[starts] > length - 1)
    if (length > 2).any():
        turns = np.concatenate([[False], kinds[1:] != kinds[:-1]]).astype(np.int64)
        turns[starts] = 0
        doubtful |= (np.add.reduceat(turns, starts) > 1) & (np.maximum.reduceat(kinds, starts) != POINT_TO_POINT)
    of_run = row_ops.take(rows, starts)
    shared = _shares_value(of_run[:-1], of_run[1:])
    doubtful |= np.append(shared, False) | np.append(False, shared)
    return doubtful


def _keys(members: NDArray[np.int64], values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One number per communicator and value; opCounts stay below 2^44."""
    return (members.astype(np.uint64) << _MEMBER_SHIFT) ^ values


@dataclass(slots=True)
class OpCountJumps:
    """The opCount of the newest line of each communicator of a process."""

    _newest: dict[int, int] = field(default_factory=dict[int, int])

    def ingest_lines(self, rows: Columns) -> NDArray[np.int32]:
        """For each operation that launches (member, op_count; in log order): launches since the line before it of its
        communicator that have no line; NO_NUMBER if the count did not move, or not by a loss."""
        if len(rows) == 0:
            return np.empty(0, np.int32)
        # 16 bits are sorted in linear time.
        keys = rows["member"].astype(np.uint16) if rows["member"].max() <= np.iinfo(np.uint16).max else rows["member"]
        order = np.argsort(keys, kind="stable")
        members, counts = rows["member"][order], rows["op_count"][order].astype(np.int64)
        is_first = np.concatenate([[True], members[1:] != members[:-1]])
        steps = np.diff(counts, prepend=counts[0])
        for at in np.flatnonzero(is_first).tolist():
            before = self._newest.get(int(members[at]))
            steps[at] = counts[at] - before if before is not None else 0
        for at in np.flatnonzero(np.append(is_first[1:], True)).tolist():
            self._newest[int(members[at])] = int(counts[at])
        lost = np.empty(len(rows), np.int32)
        lost[order] = np.where((steps >= 1) & (steps <= FARTHEST), steps - 1, NO_NUMBER)
        return lost


@dataclass(slots=True)
class PlanCounts:
    """Kernels that groups of one process took so far, by kind. Causal: of each kind in the order of the log."""

    _seen: dict[int, Counter[int]] = field(default_factory=dict[int, Counter[int]])

    def count_plans(
        self, keys: NDArray[np.int64], sizes: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """For each group how many kernels it takes.

        `keys`: its kind; `sizes`: the most it can take; `steps`: of opCount behind it, NO_NUMBER if that is
        not known.
        """
        plans = np.ones(len(keys), dtype=np.int64)
        known = np.fromiter(self._seen, np.int64, len(self._seen))
        several = np.isin(keys, np.concatenate([known, keys[(steps > 1) & (steps <= sizes)]]))
        for at in np.flatnonzero(several).tolist():
            step = int(steps[at])
            is_known = 1 <= step <= int(sizes[at])
            if int(keys[at]) not in self._seen and not (is_known and step > 1):
                continue
            seen = self._seen.setdefault(int(keys[at]), Counter())
            if is_known:
                seen[step] += 1
            plans[at] = min((-times, amount) for amount, times in seen.items())[1]
        return plans


def plans_of_roots(roots: list[int], *, others: bool) -> int:
    """Kernels of a group whose Broadcasts have these roots, of two or more; `others`: it has other collectives too."""
    return max(Counter(roots).values()) + others


def steps_of(
    counts: NDArray[np.uint64], next_counts: NDArray[np.uint64], is_known: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Steps from an opCount to the next of the same communicator; NO_NUMBER if it did not move, or is not known."""
    steps = next_counts.astype(np.int64) - counts.astype(np.int64)
    return np.where(is_known & (steps >= 1), steps, NO_NUMBER)
