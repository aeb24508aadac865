"""Kernel launches that the logged operations of one process lead to.

A log line is printed when an operation is enqueued; what is launched follows from NCCL's version and path:
nothing (one rank, nothing to move, one-sided), one kernel, or one kernel for a whole group. `Translator`
forms launches as operations arrive and says which of them are still open: Send and Recv whose group cannot
be known from the log are launched alone or fused with their neighbours, which only the kernels show.

Source: NCCL `src/enqueue.cc` (taskAppend, ncclLaunchPrepare, hostStreamPlanTask), `src/proxy.cc:ncclProxyStart`,
`src/group.cc`, `src/device/onerank.cu`; docs/internals/alignment.md has the table in words.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.op_count import (
    GROUP_SPAN,
    POINT_TO_POINT,
    FrozenOpCounts,
    OpCountJumps,
    PlanCounts,
    plans_of_roots,
    steps_of,
)
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import CombinationIndex, distinct, distinct_values, group_by
from ncclscope_service.intake.call_groups import ALONE
from ncclscope_service.intake.tuning import NO_CHANNELS
from ncclscope_service.nccl.launch_rules import (
    SENDS_AND_RECVS,
    Counting,
    KernelClass,
    LaunchRules,
    merged_data_type,
    operation_class,
)
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_POINTER, OPERATION_CODES

Positions = NDArray[np.intp]

_LATE: Final = 2**62

_GROUP_LIMIT: Final = 65_536
"""Operations of one thread within which a known group must end."""

_MOST_LOWERED: Final = 64
"""Kernels that one operation which is lowered to Sends and Recvs takes at most."""

_LOWERED: Final = frozenset(OPERATION_CODES[name] for name in ("AlltoAll", "Gather", "Scatter"))


_BROADCAST: Final = OPERATION_CODES["Broadcast"]

SIGNATURE_FIELDS: Final = (
    "tid",
    "stream",
    "member",
    "nranks",
    "op",
    "data_type",
    "reduction",
    "count",
    "root",
    "one_rank",
    "device",
)
"""Columns that recur every iteration: decisions about launches are made once per combination."""

LAUNCH: Final = np.dtype(
    [
        ("tid", "<i8"),
        ("first_op", "<i8"),  # id of its first operation
        ("lane", "<i4"),  # index of (stream, member), in order of appearance
        ("signature", "<i4"),  # of its last operation
        ("classes", "<u4"),  # bit set of the kernel classes it may show
        ("data_type", "<i2"),  # as merged_data_type; NO_NUMBER where unknown or mixed
        ("logged_at_ns", "<i8"),  # of its last operation; NO_TIME_NS
        ("is_open", "?"),  # a Send or Recv that may be fused with its neighbours
        ("message_bytes", "<i8"),  # of all its operations
        ("member", "<i4"),
        ("text", "<i4"),  # of its first operation; NO_NUMBER
        ("channels", "<i2"),  # that its TUNING line tells, of a lone operation; NO_NUMBER
        ("lines_lost", "<i4"),  # launches of its communicator before it that no line tells of; NO_NUMBER: not known
        ("may_split", "?"),  # it may take several kernels: a group, or an operation that is lowered to Sends and Recvs
        ("plans", "<i4"),  # kernels that it is known to take
        ("plan", "<i4"),  # which of them this row expects, where each has one (thread_backlog.spread)
        ("begin", "<i8"),  # its operations: ids[begin:end]
        ("end", "<i8"),
    ]
)
"""One expected launch."""

_DECISION: Final = np.dtype(
    [
        ("lane", "<i4"),
        ("classes", "<u4"),
        ("data_type", "<i2"),
        ("kind", "<i8"),  # its operation; POINT_TO_POINT
        ("is_p2p", "?"),
        ("is_lowered", "?"),
        ("launches", "?"),
    ]
)

_BEHIND: Final = np.dtype([("id", "<i8"), ("step", "<i8")])
"""The operation behind a launch on its communicator, and the step of opCount to it; NO_NUMBER if that is unknown."""

_PENDING: Final = np.dtype(
    [
        ("id", "<i8"),
        ("tid", "<i8"),
        ("member", "<i4"),
        ("op_count", "<u8"),
        ("group", "<i8"),
        ("logged_at_ns", "<i8"),
        ("signature", "<i4"),
        ("call", "<i8"),  # its number among the operations of its thread that launch
        ("message_bytes", "<i8"),
        ("text", "<i4"),
        ("channels", "<i2"),
        ("lines_lost", "<i4"),
    ]
)


@dataclass(slots=True)
class Translator:
    """Forms the expected launches of one process.

    A launch is returned once its operations are known to be complete: after the next operation of its
    communicator, after `GROUP_SPAN` more operations of its thread, or at the end.
    """

    rules: LaunchRules
    signatures: CombinationIndex = field(init=False)
    _decisions: Columns = field(init=False)
    _lanes: dict[tuple[int, int], int] = field(init=False, default_factory=dict[tuple[int, int], int])
    _lane_devices: list[int] = field(init=False, default_factory=list[int])
    _pending: Columns = field(init=False)
    _calls: dict[int, int] = field(init=False, default_factory=dict[int, int])
    _newest_groups: dict[int, int] = field(init=False, default_factory=dict[int, int])
    """The group of the last operation of each thread."""
    _frozen: FrozenOpCounts = field(init=False, default_factory=FrozenOpCounts)
    _jumps: OpCountJumps = field(init=False, default_factory=OpCountJumps)
    _plans: PlanCounts = field(init=False, default_factory=PlanCounts)
    _stepped: dict[int, int] = field(init=False, default_factory=dict[int, int])
    """By the id of the operation behind a group: how many of its kernels opCount counted beyond the first."""

    def __post_init__(self) -> None:
        self.signatures = CombinationIndex(SIGNATURE_FIELDS)
        self._decisions = np.empty(0, dtype=_DECISION)
        self._pending = np.empty(0, dtype=_PENDING)

    @property
    def tells_groups(self) -> bool:
        """Whether opCount has shown, for every operation so far, what is launched together."""
        return self.rules.counting is Counting.PER_PLAN and not self._frozen

    @property
    def lane_devices(self) -> NDArray[np.int32]:
        """The device of each lane, in order of appearance; NO_NUMBER if it is not known."""
        return np.array(self._lane_devices, dtype=np.int32)

    def first_pending(self) -> tuple[int, int] | None:
        """Id and stamp of the oldest operation whose launch was not returned yet; None without one."""
        if len(self._pending) == 0:
            return None
        return int(self._pending["id"].min()), int(self._pending["logged_at_ns"].min())

    def decisions_of(self, operations: Columns) -> tuple[NDArray[np.int32], Columns]:
        """The signature of operations (records.ALIGN_OPERATION), and what is decided of each (DECISION)."""
        known = len(self.signatures)
        signature = self.signatures.number(operations)
        if len(self.signatures) > known:
            self._decide(self.signatures.rows[known:])
        return signature, row_ops.take(self._decisions, signature)

    def observe_certain(self, lanes: NDArray[np.int32], op_counts: NDArray[np.uint64], since: int) -> None:
        """Lines from an operation `since` on, launched one by one by others: shows whose opCount stands still."""
        if self.rules.counting is Counting.WITH_PROXY:
            amounts = np.bincount(lanes[op_counts == 0], minlength=1)
            self._frozen.observe_uncounted(
                [self.member_of(lane) for lane in np.flatnonzero(amounts > 1).tolist()], since
            )

    def member_of(self, lane: int) -> int:
        """The communicator of a lane."""
        return list(self._lanes)[lane][1]

    def ingest_operations(self, operations: Columns, skipped: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Ingests operations (columns of records.ALIGN_OPERATION) in log order; gives the ids that launch nothing.

        `skipped`: how many of its thread that launch were decided by others between each and the one before it.
        """
        if len(operations) == 0:
            return np.empty(0, dtype=np.int64)
        signature, decisions = self.decisions_of(operations)
        rows = np.empty(len(operations), dtype=_PENDING)
        for name in ("id", "tid", "member", "op_count", "group", "logged_at_ns", "message_bytes", "text", "channels"):
            rows[name] = operations[name]
        rows["signature"] = signature
        launches = decisions["launches"] & (operations["channels"] != NO_CHANNELS)
        for tid, mine in group_by(rows["tid"]):
            self._newest_groups[tid] = int(rows["group"][mine[-1]])
        new = rows if launches.all() else row_ops.filter_rows(rows, launches)
        new["call"] = self._count_calls(new["tid"], None if skipped is None else skipped[launches])
        new["lines_lost"] = NO_NUMBER
        if self.rules.counting is not Counting.NEVER:
            self._frozen.ingest_operations(new, self._decisions["kind"][new["signature"]])
            new["lines_lost"] = self._jumps.ingest_lines(new)
        self._pending = new if len(self._pending) == 0 else row_ops.concat([self._pending, new])
        silent: NDArray[np.int64] = operations["id"][~launches].astype(np.int64)
        return silent

    def drain_launches(self, *, final: bool, before: int = 0) -> tuple[Columns, NDArray[np.int64]]:
        """The launches that are complete by now (LAUNCH rows), and the operation ids they point into.

        Those of operations with an id below `before` count as complete.
        """
        pending = self._pending
        if len(pending) == 0:
            return np.empty(0, dtype=LAUNCH), np.empty(0, dtype=np.int64)
        unit, is_closed, is_joined, behind = self._units(pending, final=final, before=before)
        ready = np.ones(len(pending), dtype=bool) if final else _before_first_open(pending["tid"], is_closed)
        self._pending = row_ops.filter_rows(pending, ~ready)
        self._frozen.evict_values(self._pending)
        if not ready.any():
            return np.empty(0, dtype=LAUNCH), np.empty(0, dtype=np.int64)
        return self._form(row_ops.filter_rows(pending, ready), unit[ready], is_joined[ready], behind[ready])

    def withdraw(self, operations: NDArray[np.int64]) -> None:
        """Takes out pending operations that were captured into a CUDA graph, and believes opCount no more.

        *Source:* NCCL `src/enqueue.cc`: a captured plan does not count but its replays may, and in 2.13 to 2.23
        other plans do not count while a graph is alive.
        """
        self.rules = replace(self.rules, counting=Counting.NEVER)
        self._pending = self._pending[~np.isin(self._pending["id"], operations)]

    def _decide(self, new: Columns) -> None:
        decisions = np.empty(len(new), dtype=_DECISION)
        for index, row in enumerate(new):
            decisions[index] = self._decision(row)
        self._decisions = np.concatenate([self._decisions, decisions])

    def _decision(self, row: np.void) -> tuple[int, int, int, int, bool, bool, bool]:
        op = int(row["op"])
        kernel_class = operation_class(op)
        classes = self.rules.classes_of(row)
        data_type = merged_data_type(int(row["data_type"]))
        if kernel_class not in {KernelClass.ALL_REDUCE, KernelClass.REDUCE, KernelClass.REDUCE_SCATTER}:
            data_type = NO_NUMBER
        if not classes:
            return NO_NUMBER, 0, data_type, op, False, False, False
        stream, member = 0 if self.rules.internal_stream else int(row["stream"]), int(row["member"])
        if stream == NO_POINTER:  # the newest of its communicator
            stream = next((known for known, of in reversed(self._lanes) if of == member), stream)
        lane = self._lanes.setdefault((stream, member), len(self._lanes))
        if lane == len(self._lane_devices):
            self._lane_devices.append(int(row["device"]))
        is_p2p = op in SENDS_AND_RECVS or op in _LOWERED
        return lane, _bits(classes), data_type, POINT_TO_POINT if is_p2p else op, is_p2p, op in _LOWERED, True

    def _count_calls(self, tids: NDArray[np.int64], skipped: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """The running number of each operation among those of its thread that launch."""
        calls = np.empty(len(tids), dtype=np.int64)
        for tid, of_thread in group_by(tids):
            first = self._calls.get(tid, 0)
            calls[of_thread] = np.arange(first, first + len(of_thread))
            if skipped is not None:
                calls[of_thread] += np.cumsum(skipped[of_thread])
            self._calls[tid] = int(calls[of_thread[-1]]) + 1
        return calls

    def _units(
        self, pending: Columns, *, final: bool, before: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_], Columns]:
        """For each pending operation: a number that operations of one launch share, whether that launch is complete,
        whether its extent is known (so that a lone Send is not open), and what comes behind it (_BEHIND)."""
        order = np.argsort(pending["member"], kind="stable")
        rows = row_ops.take(pending, order)
        may_count = self._may_count(rows)
        starts = np.flatnonzero(np.concatenate([[True], ~self._continues(rows[:-1], rows[1:], may_count[1:])]))
        run = np.cumsum(np.bincount(starts, minlength=len(rows))) - 1
        lengths = np.diff(np.append(starts, len(rows)))
        begun, last = row_ops.take(rows, starts), row_ops.take(rows, starts + lengths - 1)
        ends_by_successor = np.append(rows["member"][starts[1:]] == last["member"][:-1], False)
        may_count = may_count[starts]
        newest, newest_groups = _of_threads(last["tid"], self._calls, self._newest_groups)
        far_behind = newest - 1 - last["call"] > GROUP_SPAN
        known = begun["group"] != NO_NUMBER
        moves_on = ends_by_successor & (last["op_count"] != np.append(rows["op_count"][starts[1:]], 0))
        counts = ~known & self._counts(pending, begun, last, moves_on, may_count)
        closed = final | ends_by_successor | (far_behind & ~known) | (newest - 1 - last["call"] > _GROUP_LIMIT)
        # How many kernels a group took, the next line of its communicator may tell.
        waits = (lengths > 1) & may_count & (begun["op_count"] > 0)
        closed |= known & ((last["group"] == ALONE) | ((last["group"] != newest_groups) & ~(waits & ~far_behind)))
        closed |= (~known & ~may_count) | (last["id"] < before)
        joined = known | counts
        unit = np.where(joined[run], starts[run], np.arange(len(rows)))
        back = np.empty(len(rows), dtype=np.intp)
        back[order] = np.arange(len(rows))
        behind = np.empty(len(starts), dtype=_BEHIND)
        behind["id"], behind["step"] = NO_NUMBER, NO_NUMBER
        chosen = np.flatnonzero(ends_by_successor & joined & self._may_split(rows, starts, lengths))
        if len(chosen):
            after = row_ops.take(rows, starts[chosen + 1])
            behind[chosen] = self._behind(pending, may_count[chosen], row_ops.take(last, chosen), after)
        return order[unit][back], closed[run][back], joined[run][back], behind[run][back]

    @staticmethod
    def _behind(pending: Columns, may_count: NDArray[np.bool_], last: Columns, behind: Columns) -> Columns:
        """Operations behind runs (_BEHIND), by whether opCount may count, their last operations, and those behind."""
        is_step_known = may_count & (behind["op_count"] != last["op_count"])
        chosen = np.flatnonzero(is_step_known)
        is_step_known[chosen] = _calls_until(pending, last[chosen], behind[chosen]) <= GROUP_SPAN
        found = np.empty(len(last), dtype=_BEHIND)
        found["id"], found["step"] = behind["id"], steps_of(last["op_count"], behind["op_count"], is_step_known)
        return found

    def _may_split(self, rows: Columns, starts: NDArray[np.intp], lengths: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which runs may take several kernels."""
        of_first = self._decisions["is_lowered"][rows["signature"][starts]]
        may_split: NDArray[np.bool_] = (lengths > 1) | of_first
        return may_split

    def _continues(self, before: Columns, after: Columns, may_count: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether an operation may be of the same launch as the one before it on the same member.

        `may_count`: whether the opCount of the later one is trusted.
        """
        same: NDArray[np.bool_] = (before["member"] == after["member"]) & (before["tid"] == after["tid"])
        same &= before["group"] == after["group"]
        # All of a group are enqueued before any of it is launched: where opCount moved, a group's end was lost.
        in_group = (after["group"] >= 0) & (before["op_count"] == after["op_count"])
        if self.rules.counting is Counting.NEVER:
            same &= in_group
            return same
        near = after["call"] - before["call"] <= GROUP_SPAN
        counted = (before["op_count"] == after["op_count"]) & near & may_count
        counted &= after["group"] == NO_NUMBER
        same &= in_group | counted
        return same

    def _may_count(self, rows: Columns) -> NDArray[np.bool_]:
        if self.rules.counting is Counting.NEVER:
            return np.zeros(len(rows), dtype=bool)
        return ~self._frozen.are_frozen(rows)

    def _counts(
        self,
        pending: Columns,
        first: Columns,
        last: Columns,
        moves_on: NDArray[np.bool_],
        may_count: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Whether the opCount of each run, from its first to its last operation, bounds one launch."""
        trusted = may_count.copy()
        if self.rules.counting is Counting.WITH_PROXY:
            # A value above zero has moved before; zero is believed only if it is seen to move on.
            trusted &= (first["op_count"] > 0) | moves_on
        elif self._frozen:
            trusted &= moves_on | ~self._frozen.frozen_before(_returned_at(pending, last))
        return trusted

    def _form(
        self, rows: Columns, unit: NDArray[np.int64], is_joined: NDArray[np.bool_], behind: Columns
    ) -> tuple[Columns, NDArray[np.int64]]:
        order = np.argsort(unit, kind="stable")
        starts = np.flatnonzero(np.concatenate([[True], np.diff(unit[order]) != 0]))
        ends = np.append(starts[1:], len(order))
        last = row_ops.take(rows, order[ends - 1])
        decisions = row_ops.take(self._decisions, rows["signature"][order])
        of_last = row_ops.take(decisions, ends - 1)
        launches = np.empty(len(starts), dtype=LAUNCH)
        launches["tid"] = last["tid"]
        launches["first_op"] = rows["id"][order[starts]]
        for name in ("member", "text", "lines_lost"):
            launches[name] = rows[name][order[starts]]
        launches["channels"] = np.where(ends - starts == 1, rows["channels"][order[starts]], NO_NUMBER)
        launches["lane"] = of_last["lane"]
        launches["signature"] = last["signature"]
        launches["classes"] = np.bitwise_or.reduceat(decisions["classes"], starts)
        launches["classes"] &= ~self._not_gathered(rows, order, decisions["classes"], starts)
        launches["data_type"] = _common(decisions["data_type"], starts, ends)
        launches["logged_at_ns"] = last["logged_at_ns"]
        launches["is_open"] = of_last["is_p2p"] & ~is_joined[order[starts]]
        launches["message_bytes"] = np.add.reduceat(rows["message_bytes"][order], starts)
        launches["begin"], launches["end"] = starts, ends
        launches["may_split"] = (ends - starts > 1) | of_last["is_lowered"]
        launches["plans"], launches["plan"] = 1, 0
        self._count_plans(launches, rows, order, behind[order[starts]], of_last["is_lowered"])
        ids: NDArray[np.int64] = rows["id"][order]
        in_call_order = np.argsort(launches["first_op"], kind="stable")
        return row_ops.take(launches, in_call_order), ids

    def _count_plans(
        self, launches: Columns, rows: Columns, order: Positions, behind: Columns, is_lowered: NDArray[np.bool_]
    ) -> None:
        """Fills in how many kernels each launch is known to take, and takes them from the lines that seem lost."""
        if len(self._stepped) or launches["may_split"].any():
            sizes = (launches["end"] - launches["begin"]).astype(np.int64)
            chosen = np.flatnonzero(launches["may_split"])
            keys = launches["signature"][chosen].astype(np.int64) << 24 | np.minimum(sizes[chosen], (1 << 24) - 1)
            most = np.where(is_lowered[chosen], np.maximum(sizes[chosen], _MOST_LOWERED), sizes[chosen])
            launches["plans"][chosen] = self._plans.count_plans(keys, most, behind["step"][chosen])
            self._count_gathered(launches, rows, order, behind["step"])
            for at in np.flatnonzero((launches["plans"] > 1) & (behind["step"] > 1)).tolist():
                self._stepped[int(behind["id"][at])] = int(min(launches["plans"][at], behind["step"][at])) - 1
            for at in np.flatnonzero(np.isin(launches["first_op"], list(self._stepped))).tolist():
                counted = self._stepped.pop(int(launches["first_op"][at]))
                if launches["lines_lost"][at] != NO_NUMBER:
                    launches["lines_lost"][at] = max(0, int(launches["lines_lost"][at]) - counted)

    def _count_gathered(self, launches: Columns, rows: Columns, order: Positions, steps: NDArray[np.int64]) -> None:
        """The same for groups whose Broadcasts become AllGatherV, if opCount does not show it."""
        gathered = np.uint32(1 << int(KernelClass.ALL_GATHER_V))
        is_known = (rows["group"][order[launches["begin"]]] >= 0) & (launches["classes"] & gathered != 0)
        for at in np.flatnonzero(is_known & (steps == NO_NUMBER)).tolist():
            own = self.signatures.rows[rows["signature"][order[launches["begin"][at] : launches["end"][at]]]]
            is_broadcast = own["op"] == _BROADCAST
            others = ~is_broadcast & ~np.isin(own["op"], list(SENDS_AND_RECVS | _LOWERED))
            launches["plans"][at] = plans_of_roots(own["root"][is_broadcast].tolist(), others=bool(others.any()))

    def _not_gathered(
        self, rows: Columns, order: Positions, classes: NDArray[np.uint32], starts: Positions
    ) -> NDArray[np.uint32]:
        """The class of AllGatherV for launches of known extent whose Broadcasts have one root, else no class.

        *Source:* NCCL `src/enqueue.cc` (2.29 on): Broadcasts of one group and two or more roots become one.
        """
        gathered = np.uint32(1 << int(KernelClass.ALL_GATHER_V))
        if not (classes & gathered).any():
            return np.zeros(len(starts), np.uint32)
        rows = row_ops.take(rows, order)
        roots = self.signatures.rows["root"][rows["signature"]].astype(np.int64)
        is_broadcast = classes & gathered != 0
        low = np.minimum.reduceat(np.where(is_broadcast, roots, 2**32), starts)
        high = np.maximum.reduceat(np.where(is_broadcast, roots, -(2**32)), starts)
        is_known = rows["group"][starts] != NO_NUMBER
        return np.where(is_known & (low >= high), gathered, np.uint32(0)).astype(np.uint32)


def _bits(classes: set[KernelClass]) -> int:
    return sum(1 << int(kernel_class) for kernel_class in classes)


def _common(values: NDArray[np.int16], starts: NDArray[np.intp], ends: NDArray[np.intp]) -> NDArray[np.int16]:
    """The value that all of a stretch share, else NO_NUMBER."""
    same = np.minimum.reduceat(values, starts) == np.maximum.reduceat(values, starts)
    return np.where(same, values[ends - 1], NO_NUMBER).astype(np.int16)


def _of_threads(tids: NDArray[np.int64], *values: dict[int, int]) -> list[NDArray[np.int64]]:
    """The values of each row's thread."""
    found, inverse = distinct(tids)
    return [np.array([each[tid] for tid in found.tolist()], dtype=np.int64)[inverse] for each in values]


def _calls_until(pending: Columns, last: Columns, behind: Columns) -> NDArray[np.int64]:
    """How many calls the thread of each of `last` made from it until another operation, of any thread, was logged."""
    calls: NDArray[np.int64] = behind["call"] - last["call"]
    for at in np.flatnonzero(behind["tid"] != last["tid"]).tolist():
        own = pending[pending["tid"] == last["tid"][at]]
        before = int(np.searchsorted(own["id"], behind["id"][at]))
        calls[at] = (int(own["call"][before - 1]) if before else 0) - int(last["call"][at])
    return calls


def _returned_at(pending: Columns, last: Columns) -> NDArray[np.int64]:
    """The operation of its thread that closes each run, if the run is not gone on with; a late id if none has come."""
    operations = np.full(len(last), _LATE, dtype=np.int64)
    for tid, mine in group_by(last["tid"]):
        of_thread = row_ops.filter_rows(pending, pending["tid"] == tid)
        places = np.searchsorted(of_thread["call"], last["call"][mine] + GROUP_SPAN + 1)
        operations[mine] = np.append(of_thread["id"], _LATE)[places]
    return operations


def _before_first_open(tids: NDArray[np.int64], is_closed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which operations come before the first one of their thread whose launch is not complete."""
    ready = np.ones(len(tids), dtype=bool)
    for tid in distinct_values(tids[~is_closed]):
        of_thread = np.flatnonzero(tids == tid)
        first_open = of_thread[np.flatnonzero(~is_closed[of_thread])[0]]
        ready[of_thread[of_thread >= first_open]] = False
    return ready
