"""Exact joins of log lines to kernels through NCCL's NVTX ranges: no guessing if a capture has them.

A line is a call of its thread, the call is a range, the range (of a group, its ncclGroupEnd) holds the launch, and the
launch has the kernel's correlation id. So only where the calls of a capture belong among the lines is to be found
(`nvtx_calls`); the rest is exact. Captures are taken whole, in order of time (one that comes after a later one
is left out); lines may come before or after them. An exact join wins over the aligner's match, and how often they
differ is counted (`MatchReconciler`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.lost_calls import LostCalls
from ncclscope_service.align.nvtx_calls import GUESSED, LINE, Place, Placed, ThreadCalls, find_place, thread_calls
from ncclscope_service.align.records import MATCH, PLAN
from ncclscope_service.align.thread_backlog import plans_of
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import accumulate, distinct_together, group_by
from ncclscope_service.nccl.launch_rules import operation_class
from ncclscope_service.store.rows import Match
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import DATA_TYPES, NO_NUMBER, NO_TIME_NS

EXACT_MATCH: Final = np.dtype(
    [
        ("operation", "<i8"),
        ("kernel", "<i8"),  # NO_NUMBER where it has none, or nothing is known
        ("launch", "<i8"),  # id of the first operation that shares the kernel
        ("match", "<u1"),  # rows.Match; PENDING: nothing is known, let others decide
        ("confidence", "<f4"),
    ]
)

HISTORY: Final = 16_384
"""Decided lines of a thread that are kept at most, to recognise how a program goes on: below 1 MB."""

PENDING_LINES: Final = 1_000_000
"""Lines of a thread that wait for captures; beyond, the older half is left to others."""

_TAIL: Final = 256
"""Lines before a capture whose kernels may still have run in it."""

_PERIODS_BACK: Final = 64
"""Periods before a line that are searched for a line of its kind that was placed."""

_SIZES: Final = np.array([of.size_bytes for of in DATA_TYPES], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Part of one capture that belongs to one thread."""

    thread: ThreadCalls
    kernels: Columns
    """Of all threads and without a thread (records.ALIGN_KERNEL), in order of launching."""
    end_ns: int


@dataclass(slots=True)
class _Thread:
    lines: Columns = field(default_factory=lambda: np.empty(0, LINE))
    """With those that were lost, as far as that is known."""
    unfilled: Columns = field(default_factory=lambda: np.empty(0, LINE))
    """Lines behind these."""
    lost: LostCalls = field(default_factory=lambda: LostCalls(("member", "kind", "bytes", "text")))
    frontier: int = 0
    """Lines before it are decided."""
    chunks: list[_Chunk] = field(default_factory=list[_Chunk])
    has_calls: bool = False
    is_broken: bool = False
    """A capture of it fitted nowhere: what lies between captures is not known."""
    units: int = 0
    placed: Placed | None = None
    period: int = 0
    """Lines after which the program repeats, by the last capture; 0 if unknown."""
    has_holes: bool = False
    """Lines were joined by others: what is a period back cannot be counted."""

    def fill(self, *, final: bool) -> None:
        """Puts in lines that were lost, where lines have no stamps, which tell it."""
        if not len(self.unfilled):
            return
        if (self.unfilled["logged_at_ns"] != NO_TIME_NS).any():
            filled, self.unfilled = self.unfilled, self.unfilled[:0]
        else:
            found = self.lost.fill(self.unfilled, final=final)
            filled, self.unfilled = found.rows, self.unfilled[found.amount :]
            if found.is_lost.any():
                filled["id"][found.is_lost], filled["is_lost"] = filled["id"][found.following], found.is_lost
        self.lines = row_ops.concat([self.lines, filled])


@dataclass(slots=True)
class ExactJoin:
    """Joins one process. `is_active` once a capture had calls of it."""

    is_active: bool = False
    _threads: dict[int, _Thread] = field(default_factory=dict[int, _Thread])
    _lanes: dict[int, set[tuple[int, int]]] = field(default_factory=dict[int, set[tuple[int, int]]])
    """(device, stream) on which each member was seen to run."""
    _hashes: dict[int, int] = field(default_factory=dict[int, int])
    """The member that a communicator hash stands for."""
    _out: list[Columns] = field(default_factory=list[Columns])
    _plans: list[Columns] = field(default_factory=list[Columns])

    def ingest_operations(self, rows: Columns) -> None:
        """Ingests operations (records.ALIGN_OPERATION) in log order."""
        lines = np.empty(len(rows), LINE)
        for name in ("id", "member", "logged_at_ns", "text"):
            lines[name] = rows[name]
        lines["kind"] = rows["op"]
        lines["bytes"] = _call_bytes(rows)
        lines["unit"], lines["is_lost"] = NO_NUMBER, False
        for tid, mine in group_by(rows["tid"]):
            thread = self._threads.setdefault(tid, _Thread())
            thread.unfilled = row_ops.concat([thread.unfilled, row_ops.take(lines, mine)])

    def ingest_capture(self, ranges: Columns, kernels: Columns, end_ns: int) -> None:
        """Ingests a whole capture: the ranges (rows.API_CALL) and kernels (records.ALIGN_KERNEL) of this process."""
        kernels = row_ops.filter_rows(kernels, kernels["graph_node_id"] == NO_NUMBER)
        kernels = row_ops.take(kernels, np.argsort(kernels["correlation_id"], kind="stable"))
        self.is_active |= len(ranges) > 0
        for tid, own in group_by(ranges["tid"]):
            thread = self._threads.setdefault(tid, _Thread())
            thread.has_calls = True
            calls = thread_calls(row_ops.take(ranges, own))
            thread.chunks.append(_Chunk(calls, kernels, end_ns))
            thread.chunks.sort(key=lambda chunk: chunk.end_ns)

    def observe_certain(self, threads: Iterable[int], lanes: Iterable[tuple[int, int, int]]) -> None:
        """Some lines of these threads, with their calls, were joined by others; `lanes`: (member, device, stream)."""
        for tid in threads:
            self._threads.setdefault(tid, _Thread()).has_holes = True
        for member, device, stream in lanes:
            self._lanes.setdefault(member, set()).add((device, stream))

    def join_ready(self, *, final: bool, begins_with_log: bool | None = True) -> Columns:
        """Joins that are known now (EXACT_MATCH), each operation once; with `final`, a row for every operation left.

        `begins_with_log`: whether the first capture began before anything was launched; None while that is not known.
        """
        for tid, thread in self._threads.items():
            thread.fill(final=final)
            while thread.chunks and self._join(
                tid, thread, thread.chunks[0], final=final, begins_with_log=begins_with_log
            ):
                del thread.chunks[0]
            if final:
                self._give_up_lines(thread, len(thread.lines), is_known=thread.has_calls and not thread.is_broken)
            elif len(thread.lines) - thread.frontier > PENDING_LINES:
                self._give_up_lines(thread, thread.frontier + PENDING_LINES // 2, is_known=False)
            _evict_lines(thread)
        decided = row_ops.concat([np.empty(0, EXACT_MATCH), *self._out])
        self._out = []
        return row_ops.filter_rows(decided, decided["operation"] != NO_NUMBER)

    def drain_plans(self) -> Columns:
        """Further kernels (records.PLAN) of the joins since the last call."""
        taken = row_ops.concat([np.empty(0, PLAN), *self._plans])
        self._plans = []
        return taken

    def _join(self, tid: int, thread: _Thread, chunk: _Chunk, *, final: bool, begins_with_log: bool | None) -> bool:
        """Joins a thread's part of a capture; False while lines must come first."""
        calls, kernels = chunk.thread.calls, chunk.kernels
        if len(calls) == 0 or _came_late(thread, calls):
            return True
        if not final and len(thread.lines) - thread.frontier < len(calls):
            return False
        mine = row_ops.filter_rows(kernels, kernels["launch_tid"] == tid)
        units = chunk.thread.units_at(mine["launch_start_ns"])
        mine, units = row_ops.filter_rows(mine, units != NO_NUMBER), units[units != NO_NUMBER]
        correlation_ids = _first_of_unit(mine["correlation_id"], units, len(chunk.thread.units))[calls["unit"]]
        place = find_place(
            thread.lines, thread.frontier, calls, correlation_ids, thread.placed,
            is_first=not thread.is_broken, begins_with_log=bool(begins_with_log),
        )  # fmt: skip
        if place is None or len(place.lines) == 0:
            thread.is_broken = final or thread.is_broken
            return final
        last = place.held.stop
        if not final and not _have_all_come(thread.lines, last, calls, place):
            return False
        if place.trust <= GUESSED:
            is_known = final or begins_with_log is not None
            thread.is_broken |= is_known  # a guess is no better than what others say
            return is_known
        place = _without_doubtful(thread, calls, self._without_strangers(thread, calls, place))
        self._record_place(thread, calls, correlation_ids, place)
        self._decide_gap(tid, thread, chunk, place)
        self._decide(thread, chunk, place, mine, units)
        thread.frontier, thread.is_broken, thread.period = last, False, place.period
        return True

    def _without_strangers(self, thread: _Thread, calls: Columns, place: Place) -> Place:
        """Takes out pairs of another communicator, if payloads name it."""
        hashes, members = calls["communicator"][place.calls], thread.lines["member"][place.lines]
        if not hashes.any():
            return place
        found, inverse = np.unique(hashes, return_inverse=True)
        for at, one in enumerate(found.tolist()):
            if one != 0 and one not in self._hashes:
                seen, amount = np.unique(members[inverse == at], return_counts=True)
                self._hashes[one] = int(seen[amount.argmax()])
        named = np.array([self._hashes.get(one, NO_NUMBER) for one in found.tolist()], dtype=np.int64)[inverse]
        fits = (hashes == 0) | (named == members)
        return replace(place, lines=place.lines[fits], calls=place.calls[fits])

    @staticmethod
    def _record_place(thread: _Thread, calls: Columns, correlation_ids: NDArray[np.int64], place: Place) -> None:
        thread.lines["unit"][place.lines] = calls["unit"][place.calls] + thread.units
        thread.units += int(calls["unit"].max()) + 1
        if len(place.lines):
            before = (0, 0) if thread.placed is None else thread.placed.seen
            lines, ranges = (int(ids[-1] - ids[0]) + 1 for ids in (place.lines, place.calls))
            thread.placed = Placed(
                calls,
                correlation_ids,
                int(place.calls[-1]),
                int(place.lines[-1]),
                min(place.trust, 0.99),
                place.paces,
                (before[0] + lines, before[1] + ranges),
            )

    def _decide_gap(self, tid: int, thread: _Thread, chunk: _Chunk, place: Place) -> None:
        """Lines before the first pair: not recorded, but for launches whose kernels ran when the capture began.

        On a stream to which other threads launch as well, it is not known whose these kernels are.
        """
        if len(place.lines) == 0:
            return
        first = place.held.start
        begin = thread.frontier
        exact = self._unmatched_rows(thread.lines[begin:first], thread.is_broken)
        self._out.append(exact)
        orphans = row_ops.filter_rows(chunk.kernels, chunk.kernels["launch_start_ns"] == NO_TIME_NS)
        if len(orphans) == 0:
            return
        tail = max(begin, first - _TAIL)
        exact["match"][tail - begin :] = Match.PENDING
        units = _units_of_tail(thread.lines["unit"], tail, first, 0 if thread.has_holes else place.period)
        if units is None:
            return
        elsewhere = chunk.kernels[(chunk.kernels["launch_tid"] != tid) & (chunk.kernels["launch_tid"] != NO_NUMBER)]
        others = set(zip(elsewhere["device_id"].tolist(), elsewhere["stream_id"].tolist(), strict=True))
        for member in np.unique(thread.lines["member"][tail:first]).tolist():
            lanes = self._lanes.get(member, set()) - others
            own = orphans[[(row["device_id"], row["stream_id"]) in lanes for row in orphans]]
            mine = np.flatnonzero(thread.lines["member"][tail:first] == member)
            launched = list(dict.fromkeys(units[mine].tolist()))[-len(own) :] if len(own) else []
            for unit, kernel in zip(reversed(launched), reversed(own["id"].tolist()), strict=False):
                of_unit = mine[units[mine] == unit] + tail - begin
                exact["kernel"][of_unit], exact["match"][of_unit] = kernel, Match.MATCHED
                exact["launch"][of_unit] = exact["operation"][of_unit[0]]
                exact["confidence"][of_unit] = min(0.9, place.trust)

    def _decide(self, thread: _Thread, chunk: _Chunk, place: Place, kernels: Columns, units: NDArray[np.int64]) -> None:
        begin, end = place.held.start, place.held.stop
        exact = self._unmatched_rows(thread.lines[begin:end], True)
        members = thread.lines["member"][place.lines]
        unit_of = chunk.thread.calls["unit"][place.calls]
        self._learn_lanes(members, unit_of, kernels, units)
        order = np.lexsort((place.lines, members, unit_of))
        lines, unit_of, members = place.lines[order], unit_of[order], members[order]
        starts = np.flatnonzero(_differs(unit_of) | _differs(members))
        kinds = thread.lines["kind"][lines]
        found = self._kernels_of(unit_of[starts], members[starts], (starts, kinds), kernels, units)
        queue = np.max(kernels["start_ns"] - kernels["launch_start_ns"], initial=0)
        is_late = chunk.thread.units["launch_until_ns"][unit_of[starts]] + queue >= chunk.end_ns
        lost = np.where(is_late, int(Match.PENDING), int(Match.UNMATCHED))
        first = np.where(found != NO_NUMBER, thread.lines["id"][lines[starts]], NO_NUMBER)
        sizes, at = np.diff(np.append(starts, len(lines))), lines - begin
        exact["kernel"][at] = np.repeat(found, sizes)
        exact["launch"][at] = np.repeat(first, sizes)
        exact["match"][at] = np.repeat(np.where(found != NO_NUMBER, int(Match.MATCHED), lost), sizes)
        exact["confidence"][at] = np.repeat(np.where(found != NO_NUMBER, 1.0, 0.9) * place.trust, sizes)
        self._out.append(exact)

    def _kernels_of(
        self,
        unit_of: NDArray[np.int64],
        members: NDArray[np.int32],
        operations: tuple[NDArray[np.intp], NDArray[np.int16]],
        kernels: Columns,
        units: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """The kernel of each member of each unit, NO_NUMBER without one: unit by unit, then member by member.

        `operations`: where those of each begin, and their kinds; `units`: that of each kernel.
        """
        order = np.argsort(units, kind="stable")
        kernels, units = row_ops.take(kernels, order), units[order]
        begins, ends = np.searchsorted(units, unit_of), np.searchsorted(units, unit_of, side="right")
        is_shared = np.bincount(unit_of)[unit_of] > 1
        found, (starts, kinds) = np.full(len(unit_of), NO_NUMBER, dtype=np.int64), operations
        is_only = (ends - begins == 1) & ~is_shared
        found[is_only] = kernels["id"][begins[is_only]]
        for at in np.flatnonzero((ends > begins) & ~is_only).tolist():
            own = kinds[starts[at] : (starts[at + 1] if at + 1 < len(starts) else None)]
            held = kernels[begins[at] : ends[at]]
            found[at] = self._first_fitting(held, int(members[at]), own)
            others = set(members[unit_of == unit_of[at]].tolist()) - {int(members[at])} if is_shared[at] else set[int]()
            self._record_further(held, int(found[at]), int(members[at]), others)
        return found

    def _record_further(self, held: Columns, first: int, member: int, others: set[int]) -> None:
        """Notes the other kernels of a unit as this member's, if no other member of it runs on the same stream."""
        if first == NO_NUMBER or len(held) < 2:
            return
        lanes = list(zip(held["device_id"].tolist(), held["stream_id"].tolist(), strict=True))
        own = lanes[int(np.flatnonzero(held["id"] == first)[0])]
        known = [self._lanes.get(other) for other in others]
        if any(other is None or own in other for other in known) or (others and own not in self._lanes.get(member, ())):
            return
        is_further = (held["id"] != first) & np.array([lane == own for lane in lanes])
        further = held["id"][is_further].astype(np.int64)
        self._plans.append(plans_of(further, np.full(len(further), first)))

    def _learn_lanes(
        self, members: NDArray[np.int32], unit_of: NDArray[np.int64], kernels: Columns, units: NDArray[np.int64]
    ) -> None:
        """Notes on which stream each communicator runs, from units that hold one communicator."""
        least = np.full(int(unit_of.max(initial=-1)) + 1, np.iinfo(np.int64).max)
        most = np.full(len(least), -1)
        accumulate(np.minimum, least, unit_of, members)
        accumulate(np.maximum, most, unit_of, members)
        inside = units < len(least)
        single = inside.copy()
        single[inside] = least[units[inside]] == most[units[inside]]
        columns = most[units[single]], kernels["device_id"][single], kernels["stream_id"][single]
        seen, _ = distinct_together(*columns)
        for member, device, stream in zip(*(each.tolist() for each in seen), strict=True):
            self._lanes.setdefault(member, set()).add((device, stream))

    def _first_fitting(self, held: Columns, member: int, kinds: NDArray[np.int16]) -> int:
        """The first kernel of a unit that a member's operations may have launched; NO_NUMBER without one."""
        lanes = self._lanes.get(member)
        if lanes is not None:
            on_lane = zip(held["device_id"].tolist(), held["stream_id"].tolist(), strict=True)
            held = held[[lane in lanes for lane in on_lane]]
        classes = {int(operation_class(kind)) for kind in kinds.tolist()}
        fitting = held[np.isin(held["kernel_class"], list(classes))]
        held = fitting if len(fitting) else held
        return int(held["id"][0]) if len(held) else NO_NUMBER

    @staticmethod
    def _unmatched_rows(lines: Columns, is_unknown: bool) -> Columns:
        exact = np.zeros(len(lines), EXACT_MATCH)
        exact["operation"] = np.where(lines["is_lost"], NO_NUMBER, lines["id"])
        exact["kernel"], exact["launch"] = NO_NUMBER, NO_NUMBER
        exact["match"] = Match.PENDING if is_unknown else Match.NOT_COVERED
        exact["confidence"] = 0.9
        return exact

    def give_up(self, before: int) -> None:
        """Leaves operations with an id below `before` to others: no capture came for too long after them."""
        for thread in self._threads.values():
            if len(thread.unfilled) and thread.unfilled["id"][0] < before:
                thread.lines, thread.unfilled = row_ops.concat([thread.lines, thread.unfilled]), thread.unfilled[:0]
                thread.lost.skip()
            until = int(np.searchsorted(thread.lines["id"], before))
            if until > thread.frontier:
                self._give_up_lines(thread, until, is_known=False)

    def _give_up_lines(self, thread: _Thread, until: int, *, is_known: bool) -> None:
        self._out.append(self._unmatched_rows(thread.lines[thread.frontier : until], not is_known))
        thread.frontier = max(thread.frontier, until)


def _without_doubtful(thread: _Thread, calls: Columns, place: Place) -> Place:
    """Takes out lines beside a lost one that was like them, and what was launched with them.

    Which of them was lost, lines of other threads tell.
    """
    lines = thread.lines[place.held.start : place.held.stop]
    if not lines["is_lost"].any():
        return place
    run = np.cumsum(np.logical_or.reduce([_differs(lines[name]) for name in ("member", "kind", "bytes", "text")]))
    is_doubtful = (np.isin(run, run[lines["is_lost"]]) & ~lines["is_lost"])[place.lines - place.held.start]
    units = calls["unit"][place.calls]
    is_sure = ~np.isin(units, units[is_doubtful])
    return replace(place, lines=place.lines[is_sure], calls=place.calls[is_sure])


def _call_bytes(rows: Columns) -> NDArray[np.int64]:
    known = (rows["data_type"] >= 0) & (rows["data_type"] < len(_SIZES))
    sizes = _SIZES[np.where(known, rows["data_type"], 0)]
    known &= rows["count"] < 2**58
    return np.where(known, rows["count"].astype(np.int64) * sizes, NO_NUMBER)


def _have_all_come(lines: Columns, last: int, calls: Columns, place: Place) -> bool:
    """Whether no line of these calls is still to come, nor any that could show them to belong elsewhere."""
    if place.is_timed:
        is_last = int(place.calls[-1]) == len(calls) - 1
        return is_last or bool(lines["logged_at_ns"][-1] > calls["start_ns"][-1])
    return len(lines) >= last + max(place.period, 1)


def _first_of_unit(values: NDArray[np.int64], units: NDArray[np.int64], amount: int) -> NDArray[np.int64]:
    first = np.full(amount, NO_NUMBER, dtype=np.int64)
    first[units[::-1]] = values[::-1]
    return first


def _came_late(thread: _Thread, calls: Columns) -> bool:
    """Whether a capture that was recorded later was joined already, which decided the lines of this one."""
    return thread.placed is not None and int(calls["start_ns"][0]) < int(thread.placed.calls["start_ns"][-1])


def _differs(values: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Which values are not those before them; the first one is not."""
    differs = np.ones(len(values), dtype=bool)
    differs[1:] = values[1:] != values[:-1]
    return differs


def _units_of_tail(known_units: NDArray[np.int64], begin: int, end: int, period: int) -> NDArray[np.int64] | None:
    """A number for each line that lines of one launch share, as their like a whole number of periods ago did."""
    if period == 0:
        return None
    periods = np.arange(1, _PERIODS_BACK)
    before = np.arange(begin, end)[:, None] - period * periods
    units: NDArray[np.int64] = np.where(before >= 0, known_units[np.maximum(before, 0)], NO_NUMBER)
    latest = (units != NO_NUMBER).argmax(axis=1)
    units = units[np.arange(end - begin), latest]
    units[units != NO_NUMBER] += periods[latest[units != NO_NUMBER]] * 2**40
    known = np.flatnonzero(units == NO_NUMBER)
    if len(known):
        units[: known[-1] + 1] = -2 - np.arange(known[-1] + 1)
    return units


def _evict_lines(thread: _Thread) -> None:
    """Decided lines are read again only where a capture placed some, and all behind them (`_units_of_tail`)."""
    is_read_again = thread.placed is not None and not thread.has_holes
    periods = _PERIODS_BACK * thread.period or HISTORY
    kept = min(HISTORY, _TAIL + periods) if is_read_again else _TAIL
    surplus = thread.frontier - kept
    if surplus > kept // 2:
        thread.lines = thread.lines[surplus:].copy()
        thread.frontier -= surplus
        if thread.placed is not None:
            thread.placed = replace(thread.placed, last_line=thread.placed.last_line - surplus)


@dataclass(slots=True)
class MatchReconciler:
    """Merges the aligner's matches of one process with its exact joins.

    Exact pairs are returned at once; everything else once both sides are known.
    """

    checked: int = 0
    """Operations whose kernel, or the lack of one, both sides know."""
    disagreements: int = 0
    _aligned: Columns = field(default_factory=lambda: np.empty(0, MATCH))
    _exact: Columns = field(default_factory=lambda: np.empty(0, EXACT_MATCH))
    _silent: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Operations that launch nothing and that no exact join has reported yet."""
    _claimed: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Kernels that are exactly joined, as long as they are in the store."""

    def merge(self, aligned: Columns, exact: Columns, *, final: bool, first_kernel: int = 0) -> Columns:
        """Resolved matches (records.MATCH), from new ones of both sides, each operation once.

        `first_kernel`: id of the oldest kernel in the store; claims on older ones are dropped.
        """
        if len(self._claimed) and self._claimed.min() < first_kernel:
            self._claimed = self._claimed[self._claimed >= first_kernel]
        out: list[Columns] = []
        is_silent = aligned["match"] == Match.NO_KERNEL
        if is_silent.any():
            out.append(self._merge_silent(row_ops.filter_rows(aligned, is_silent)))
            aligned = row_ops.filter_rows(aligned, ~is_silent)
        if len(self._silent):
            answered = np.isin(exact["operation"], self._silent)
            self._silent = self._silent[~np.isin(self._silent, exact["operation"])]
            exact = row_ops.filter_rows(exact, ~answered)
        pairs = row_ops.filter_rows(exact, exact["kernel"] != NO_NUMBER)
        out.append(_matches(pairs))
        if len(pairs):
            self._claimed = np.concatenate([self._claimed, np.unique(pairs["kernel"])])
        self._aligned = row_ops.concat([self._aligned, aligned])
        self._exact = row_ops.concat([self._exact, exact])
        out.append(self._reconcile())
        if final:
            left = row_ops.filter_rows(self._exact, self._exact["kernel"] == NO_NUMBER)
            left["match"][left["match"] == Match.PENDING] = Match.UNMATCHED
            out += [self._aligned, _matches(left)]
            self._aligned, self._exact = self._aligned[:0], self._exact[:0]
        return _with_launches(row_ops.concat(out))

    def _merge_silent(self, silent: Columns) -> Columns:
        """Of operations that launch nothing, those that were not returned before."""
        of_silent = np.isin(self._exact["operation"], silent["operation"])
        held = row_ops.filter_rows(self._exact, of_silent)
        self._exact = row_ops.filter_rows(self._exact, ~of_silent)
        returned = held["operation"][held["kernel"] != NO_NUMBER]
        unreported = silent["operation"][~np.isin(silent["operation"], held["operation"])]
        self._silent = np.concatenate([self._silent, unreported])
        left: Columns = silent[~np.isin(silent["operation"], returned)]
        return left

    def release(self, aligned: Columns) -> Columns:
        """All matches that were held back, and these: no exact join comes any more."""
        released: Columns = row_ops.concat([self._aligned, aligned])
        self._aligned = self._aligned[:0]
        returned = self._exact["operation"][self._exact["kernel"] != NO_NUMBER]
        left: Columns = released[~np.isin(released["operation"], returned)] if len(returned) else released
        return left

    def _reconcile(self) -> Columns:
        """Matches that both sides know and that were not returned yet."""
        _, at_aligned, at_exact = np.intersect1d(
            self._aligned["operation"], self._exact["operation"], assume_unique=True, return_indices=True
        )
        aligned, exact = row_ops.take(self._aligned, at_aligned), row_ops.take(self._exact, at_exact)
        self._aligned, self._exact = _without(self._aligned, at_aligned), _without(self._exact, at_exact)
        is_pair = exact["kernel"] != NO_NUMBER
        is_known = is_pair | (exact["match"] != Match.PENDING)
        self.checked += int(np.count_nonzero(is_known))
        self.disagreements += int(np.count_nonzero(is_known & (aligned["kernel"] != exact["kernel"])))
        settled = row_ops.filter_rows(aligned, ~is_pair)
        has_kernel = settled["kernel"] != NO_NUMBER
        if not has_kernel.any():
            return settled
        exact = row_ops.filter_rows(exact, ~is_pair)
        denied = has_kernel & (exact["match"] != Match.PENDING)
        settled["match"][denied] = exact["match"][denied]
        taken = has_kernel & ~denied & np.isin(settled["kernel"], self._claimed)
        settled["match"][taken] = Match.UNMATCHED
        for name in ("kernel", "launch"):
            settled[name][denied | taken] = NO_NUMBER
        settled["confidence"][denied | taken] = np.where(exact["match"] == Match.PENDING, 0.5, 0.9)[denied | taken]
        return settled


def _without(rows: Columns, positions: NDArray[np.intp]) -> Columns:
    left = np.ones(len(rows), bool)
    left[positions] = False
    return row_ops.filter_rows(rows, left)


def _matches(exact: Columns) -> Columns:
    rows = np.zeros(len(exact), MATCH)
    for name in MATCH.names or ():
        rows[name] = exact[name]
    return rows


def _with_launches(rows: Columns) -> Columns:
    """The same, with the launch named by the first operation that shares the kernel."""
    matched = np.flatnonzero(rows["kernel"] != NO_NUMBER)
    if not len(matched):
        return rows
    kernels, inverse = np.unique(rows["kernel"][matched], return_inverse=True)
    first = np.full(len(kernels), np.iinfo(np.int64).max)
    np.minimum.at(first, inverse, rows["operation"][matched])
    rows["launch"][matched] = first[inverse]
    return rows
