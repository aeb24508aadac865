"""Operations of stamped logs whose kernel is beyond doubt, found for a whole process in one pass over columns.

On one thread lines and launches alternate, so time cuts a thread into bursts: lines, then the launches that they led
to. A burst is *clean* if it leaves nothing to decide: lines of one lane, one kernel, which their kind, data type and
stream allow, launched as soon after them as usual, and opCount, known groups and NVTX ranges agree. A line and a
kernel that were lost at the same place can make a wrong burst look clean, but not without others around it that do not:
so only long stretches of clean bursts are certain, without their ends. Several lines whose group nothing tells do not
end a stretch, but are not certain either. What is not certain is left to the careful aligners, which learn of the rest
what they need (`CertainPairs`).

Source: NCCL `src/enqueue.cc:ncclEnqueueCheck` prints before it launches; `src/group.cc:groupLaunch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_time import GROUP_GAP_NS
from ncclscope_service.align.lanes import VOTES
from ncclscope_service.align.nvtx_calls import STAMP_NS, ThreadCalls
from ncclscope_service.columns.group_by import distinct
from ncclscope_service.intake.call_groups import ALONE
from ncclscope_service.nccl.launch_rules import Counting
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

Positions = NDArray[np.intp]
Flags = NDArray[np.bool_]
Stretches = dict[int, list[tuple[int, int]]]
"""By thread: the launch before the first, and the last launch, of each stretch of certain bursts, ascending."""
Integers = NDArray[np.int64]

MARGIN: Final = 16
"""Bursts at either end of a clean stretch that are left to the careful aligners: they see what is doubtful with this
much before and behind it, and learn from it how this process is to be paired."""

LEAST: Final = 32
"""Certain bursts of a stretch: fewer are not worth the cut."""

_FOREVER_NS: Final = 2**62

_LATE: Final = 6
_LATE_NS: Final = 20_000
"""A launch later than this many times the usual delay and this much more may be another line's."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Columns of a process's operations in log order."""

    tid: Integers
    time_ns: Integers
    lane: NDArray[np.int32]
    """Of the log; NO_NUMBER: it launches nothing."""
    signature: NDArray[np.int32]
    classes: NDArray[np.uint32]
    data_type: NDArray[np.int16]
    op_count: NDArray[np.uint64]
    group: Integers
    kind: NDArray[np.uint8]
    """Code in terms.OPERATIONS."""

    def take(self, chosen: Positions) -> Lines:
        """Those at these positions."""
        return Lines(
            self.tid[chosen], self.time_ns[chosen], self.lane[chosen], self.signature[chosen], self.classes[chosen],
            self.data_type[chosen], self.op_count[chosen], self.group[chosen], self.kind[chosen],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launched:
    """Columns of a process's kernels in launch order."""

    tid: Integers
    time_ns: Integers
    """Of the launch call; NO_TIME_NS if that is in no export."""
    lane: NDArray[np.int32]
    kernel_class: NDArray[np.uint8]
    data_type: NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Known:
    """Knowledge of a process before its rows are looked at."""

    kernel_lanes: NDArray[np.int32]
    """The kernel lane of each lane of the log; negative if it is not known."""
    counting: Counting
    begins_ns: Integers
    """Starts of its captures, ascending."""
    calls: dict[int, ThreadCalls] | None
    """NCCL's NVTX ranges, by thread; None if it has none."""
    is_whole: bool = False
    """Nothing of the process was seen before, and nothing more will come."""


@dataclass(frozen=True, slots=True)
class CertainPairs:
    """Lines whose kernels are certain, and what the careful aligners need of them."""

    lines: Positions
    """In order of thread and time."""
    kernels: Positions
    """The kernel of each."""
    is_first: Flags
    """It is the first line of its launch."""
    silent: Positions
    """Lines among them that launch nothing."""
    stretches: Stretches
    before: Positions
    """Lines within the stretches that are followed by another of their lane and thread: votes on what is one group."""
    after: Positions
    """The lines that follow."""
    together: Flags
    """Both are of one launch."""


def certain_pairs(every: Lines, kernels: Launched, known: Known) -> CertainPairs:
    """Pairs that are beyond doubt, among lines and kernels that no aligner has seen."""
    launching = np.flatnonzero(every.lane >= 0)
    if not len(launching) or not len(kernels.tid):
        none, no = np.empty(0, np.intp), np.empty(0, bool)
        return CertainPairs(none, none, no, none, {}, none, none, no)
    lines = every if len(launching) == len(every.tid) else every.take(launching)
    bursts = _Bursts.cut(lines, kernels, is_whole=known.is_whole)
    is_clean = bursts.is_simple.copy()
    _clear(is_clean, bursts.of_line, ~_fits(lines, kernels, bursts, known))
    _clear(is_clean, bursts.of_line, _launched_apart(lines, bursts, known.counting))
    is_clean &= ~_is_late(lines, kernels, bursts, is_clean)
    home = _home_lanes(lines, kernels, bursts, is_clean, known.kernel_lanes)
    is_clean &= home[lines.lane[bursts.last]] == kernels.lane[bursts.kernel]
    if known.calls is not None:
        _clear(is_clean, bursts.of_line, ~_in_one_call(lines, kernels, bursts, known.calls))
    is_certain, bounds = _stretches(is_clean, lines, kernels, bursts, known)
    within = is_certain[bursts.of_line]
    if known.calls is None:
        is_certain &= (lines.group[bursts.last] >= 0) | (np.bincount(bursts.of_line, minlength=len(is_clean)) == 1)
    chosen = np.flatnonzero(is_certain[bursts.of_line])
    burst = bursts.of_line[chosen]
    order = np.argsort(burst, kind="stable")
    chosen, burst = chosen[order], burst[order]
    is_first = np.ones(len(chosen), bool)
    is_first[1:] = burst[1:] != burst[:-1]
    before, after = _neighbours(home[lines.lane], lines.tid)
    votes = np.flatnonzero(within[before] & within[after])
    before, after = before[votes], after[votes]
    return CertainPairs(
        launching[chosen],
        bursts.kernel[burst],
        is_first,
        _silent_within(every, bounds),
        bounds,
        launching[before],
        launching[after],
        bursts.of_line[before] == bursts.of_line[after],
    )


@dataclass(frozen=True, slots=True)
class _Bursts:
    """Bursts by thread and time."""

    of_line: Integers
    """The burst of each line."""
    last: Positions
    """The last line of each, NO_NUMBER without one."""
    kernel: Positions
    """Its last kernel, NO_NUMBER without one."""
    tid: Integers
    is_simple: Flags
    """One or more lines, then one kernel, then the thread's next line, or the end of it all."""

    @classmethod
    def cut(cls, lines: Lines, kernels: Launched, *, is_whole: bool) -> _Bursts:
        """Lines and kernels cut into bursts; those of threads whose times do not ascend are not simple."""
        amount = len(lines.tid)
        tids = np.concatenate([lines.tid, kernels.tid])
        # Both sides ascend nearly: a stable sort merges them in linear time. A line comes before a launch of its time.
        times = np.concatenate([lines.time_ns, kernels.time_ns])
        keys = np.maximum(times, 0) * 2
        keys[amount:] += 1
        order = np.argsort(keys, kind="stable")
        _, thread = distinct(tids)
        order = order[np.argsort(thread[order].astype(np.uint16), kind="stable")]
        is_kernel, thread = order >= amount, thread[order]
        is_new = np.ones(len(order), bool)
        is_new[1:] = thread[1:] != thread[:-1]
        begins = is_new.copy()
        begins[1:] |= ~is_kernel[1:] & is_kernel[:-1]
        starts = np.flatnonzero(begins)
        burst = np.cumsum(begins) - 1
        sizes = np.diff(np.append(starts, len(order)))
        launched = np.bincount(burst[is_kernel], minlength=len(starts)) if len(order) else sizes
        of_line = np.empty(amount, np.int64)
        of_line[order[~is_kernel]] = burst[~is_kernel]
        ends = starts + sizes - 1
        last_line = np.where(launched < sizes, order[np.maximum(ends - launched, 0)], NO_NUMBER)
        kernel = np.where(launched > 0, order[ends] - amount, NO_NUMBER)
        is_simple = (launched == 1) & (sizes > 1)
        if not is_whole:
            is_simple[:-1] &= thread[starts[1:]] == thread[ends[:-1]]
            is_simple[-1:] = False
        untimed = np.unique(thread[_disordered(order, is_kernel, thread) | (times[order] < 0)])
        if len(untimed):
            is_simple &= ~np.isin(thread[starts], untimed)
        return cls(of_line, last_line, kernel, tids[order[starts]], is_simple)


def _disordered(order: Positions, is_kernel: Flags, thread: Positions) -> Flags:
    """Rows that were logged, or launched, after ones of a later time of their thread."""
    wrong = np.zeros(len(order), bool)
    for side in (~is_kernel, is_kernel):
        at = np.flatnonzero(side)
        wrong[at[1:]] = (order[at[1:]] < order[at[:-1]]) & (thread[at[1:]] == thread[at[:-1]])
    return wrong


def _clear(is_clean: Flags, of_line: Integers, wrong: Flags | Positions) -> None:
    """Bursts with a wrong line are not clean."""
    is_clean[of_line[wrong]] = False


def _fits(lines: Lines, kernels: Launched, bursts: _Bursts, known: Known) -> Flags:
    """Whether each line may have launched the kernel of its burst, and is of one launch with its burst's last line."""
    kernel, last = bursts.kernel[bursts.of_line], bursts.last[bursts.of_line]
    kernel_class, data_type = kernels.kernel_class[kernel], kernels.data_type[kernel]
    fits: Flags = (lines.classes >> kernel_class.astype(np.uint32)) & 1 == 1
    fits &= (data_type == lines.data_type) | (data_type == NO_NUMBER) | (lines.data_type == NO_NUMBER)
    joined = np.flatnonzero(last != np.arange(len(last)))
    if len(joined):
        end = last[joined]
        same = (lines.lane[joined] == lines.lane[end]) & (lines.data_type[joined] == lines.data_type[end])
        same &= lines.time_ns[end] - lines.time_ns[joined] <= GROUP_GAP_NS
        same &= (lines.group[joined] == lines.group[end]) & (lines.group[joined] != ALONE)
        own, other = lines.op_count[joined], lines.op_count[end]
        if known.counting is Counting.PER_PLAN:
            same &= own == other
        elif known.counting is Counting.WITH_PROXY:
            same &= (own == other) | (own == 0) | (other == 0)
        fits[joined] &= same
    return fits


def _launched_apart(lines: Lines, bursts: _Bursts, counting: Counting) -> Positions:
    """Lines that were launched apart from the next of their lane, though groups or opCount join them."""
    if counting is Counting.PER_PLAN:
        is_told = np.arange(len(lines.lane))
    elif counting is Counting.WITH_PROXY:
        is_told = np.flatnonzero((lines.op_count > 0) | (lines.group >= 0))
    else:
        is_told = np.flatnonzero(lines.group >= 0)
    if not len(is_told):
        return is_told
    before, after = _neighbours(lines.lane[is_told], lines.tid[is_told])
    before, after = is_told[before], is_told[after]
    joined = (lines.group[before] >= 0) & (lines.group[before] == lines.group[after])
    if counting is not Counting.NEVER:
        joined |= (lines.op_count[before] == lines.op_count[after]) & (lines.group[before] == NO_NUMBER)
    joined &= bursts.of_line[before] != bursts.of_line[after]
    return np.concatenate([before[joined], after[joined]])


def _neighbours(lanes: NDArray[np.integer], tids: Integers) -> tuple[Positions, Positions]:
    """Pairs of lines that follow each other on one lane and thread."""
    _, keys = distinct(lanes)
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    before, after = order[:-1], order[1:]
    same = (lanes[before] == lanes[after]) & (tids[before] == tids[after])
    return before[same], after[same]


def _is_late(lines: Lines, kernels: Launched, bursts: _Bursts, is_clean: Flags) -> Flags:
    """Whether the launch of each burst came much later than usual."""
    delays = np.where(is_clean, kernels.time_ns[bursts.kernel] - lines.time_ns[bursts.last], 0)
    usual = int(np.median(delays[is_clean])) if is_clean.any() else 0
    late: Flags = delays > _LATE * usual + _LATE_NS
    return late


def _home_lanes(
    lines: Lines, kernels: Launched, bursts: _Bursts, is_clean: Flags, known: NDArray[np.int32]
) -> NDArray[np.int64]:
    """The kernel lane of each lane of the log; NO_NUMBER where too few show it, or it is not the one that is known."""
    amount = int(kernels.lane.max()) + 1
    pairs = lines.lane[bursts.last[is_clean]].astype(np.int64) * amount + kernels.lane[bursts.kernel[is_clean]]
    seen = np.bincount(pairs, minlength=len(known) * amount).reshape(len(known), amount)
    most, home = seen.max(axis=1), seen.argmax(axis=1)
    is_sure = (most >= VOTES) & (most * 2 > seen.sum(axis=1)) & ((known < 0) | (known == home))
    return np.where(is_sure, home, NO_NUMBER)


def _in_one_call(lines: Lines, kernels: Launched, bursts: _Bursts, calls: dict[int, ThreadCalls]) -> Flags:
    """Whether each line was printed during a call of its kind, and its kernel launched alone by the unit of that call,
    which holds the calls of its burst and no others."""
    unit = np.full(len(lines.tid), NO_NUMBER, np.int64)
    launched_by = np.full(len(kernels.tid), NO_NUMBER, np.int64)
    is_alone = np.zeros(len(kernels.tid), bool)
    sizes = np.bincount(bursts.of_line, minlength=len(bursts.last))
    calls_of = np.zeros(len(lines.tid), np.int64)
    for tid, thread in calls.items():
        if not len(thread.calls):
            continue
        mine = np.flatnonzero(lines.tid == tid)
        stamps = lines.time_ns[mine]
        at = np.searchsorted(thread.calls["start_ns"], stamps + STAMP_NS, side="right") - 1
        fits = (at >= 0) & (stamps <= thread.calls["end_ns"][at]) & (thread.calls["kind"][at] == lines.kind[mine])
        fits[1:] &= at[1:] > at[:-1]
        units = thread.calls["unit"][at]
        unit[mine[fits]] = units[fits]
        per_unit = np.bincount(thread.calls["unit"], minlength=len(thread.units))
        calls_of[mine] = per_unit[units]
        own = np.flatnonzero(kernels.tid == tid)
        units = thread.units_at(kernels.time_ns[own])
        launched_by[own] = units
        held = np.bincount(units[units >= 0], minlength=max(1, len(thread.units)))
        is_alone[own] = held[units] == 1
    kernel = bursts.kernel[bursts.of_line]
    agrees: Flags = (unit >= 0) & (unit == launched_by[kernel]) & is_alone[kernel]
    agrees &= calls_of == sizes[bursts.of_line]
    return agrees


def _stretches(
    is_clean: Flags, lines: Lines, kernels: Launched, bursts: _Bursts, known: Known
) -> tuple[Flags, Stretches]:
    """Which bursts are within long clean stretches of a thread and capture, without their ends; and where these lie.

    A whole thread that is clean has no ends that anything could be wrong behind.
    """
    capture = np.searchsorted(known.begins_ns, lines.time_ns[bursts.last], side="right")
    is_other = np.ones(len(is_clean) + 1, bool)
    is_other[1:-1] = bursts.tid[1:] != bursts.tid[:-1]
    breaks = is_other.copy()
    breaks[1:-1] |= ~(is_clean[1:] & is_clean[:-1]) | (capture[1:] != capture[:-1])
    edges = np.flatnonzero(breaks)
    margins = np.where(
        known.is_whole & is_other[edges[:-1]] & is_other[edges[1:]] & (capture[edges[:-1]] > 0), 0, MARGIN
    )
    begins, ends = edges[:-1] + margins, edges[1:] - margins
    long = (edges[1:] - edges[:-1] >= LEAST + 2 * MARGIN) & is_clean[edges[:-1]]
    step = np.zeros(len(is_clean) + 1, np.int64)
    bounds: Stretches = {}
    for begin, end, margin in zip(begins[long].tolist(), ends[long].tolist(), margins[long].tolist(), strict=True):
        step[begin] += 1
        step[end] -= 1
        since = int(kernels.time_ns[bursts.kernel[begin - 1]]) if margin else 0
        until = int(kernels.time_ns[bursts.kernel[end - 1]]) if margin else _FOREVER_NS
        bounds.setdefault(int(bursts.tid[begin]), []).append((since, until))
    certain: Flags = np.cumsum(step[:-1]) > 0
    return certain, bounds


def _silent_within(lines: Lines, stretches: Stretches) -> Positions:
    """Lines that launch nothing within these stretches."""
    silent = np.flatnonzero(lines.lane < 0)
    return silent[_are_within(lines.tid[silent], lines.time_ns[silent], stretches)]


def is_call_within(calls: Columns, stretches: Stretches) -> Flags:
    """Which calls (rows.API_CALL) belong to lines within these stretches."""
    return _are_within(calls["tid"], calls["start_ns"], stretches)


def _are_within(tids: NDArray[np.integer], times_ns: Integers, stretches: Stretches) -> Flags:
    within = np.zeros(len(tids), bool)
    for tid, bounds in stretches.items():
        since, until = np.array(bounds, np.int64).T
        mine = np.flatnonzero(tids == tid)
        at = np.searchsorted(since, times_ns[mine], side="left") - 1
        within[mine] = (at >= 0) & (times_ns[mine] <= until[at])
    return within
