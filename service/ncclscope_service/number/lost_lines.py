"""Numbers of collectives where lines were lost, by their kernels: launches count, not lines.

The kernels of a stream that one communicator alone uses are its collectives, in this order. So collectives are numbered
by the union of both sides: by their kernels where they have one, and by their lines where they do not. A kernel that no
line is of, between kernels of two lines, is a collective of which only the line was lost: it gets a row
(`Match.LINE_LOST`) and a number. What is known of it comes from the kernel; its size from the other ranks once they are
joined. Where a communicator shares its stream its lines are counted.

Lines are numbered in their order, once no line before them can be given another kernel any more.

- With stamps a line without a kernel lost it: it counts, and kernels beside it are left alone: one may be its own.
- Without stamps names and order say which line is of which kernel, and in a run of equal calls that is a guess. But
  whichever it is, the kernel is the communicator's, and so the number holds (`NumberState.LAUNCHED`). A line without a
  kernel between others that have one is of a kernel that another line was given. Its place is not known
  (`NumberState.UNCERTAIN`), and it is joined with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import (
    CombinationIndex,
    accumulate,
    distinct,
    distinct_together,
    distinct_values,
    group_by,
)
from ncclscope_service.columns.table import Ids
from ncclscope_service.nccl.launch_rules import KernelClass, parse_kernel_name
from ncclscope_service.number.line_losses import COLLECTIVE, LineLosses, way_of
from ncclscope_service.store.rows import (
    BY_LAUNCH,
    OPERATION_TEMPLATE,
    Match,
    NumberState,
    empty_operations,
    has_kernel,
    has_launch,
)
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES, OPERATIONS

_OPERATION_OF: Final = {
    KernelClass.ALL_REDUCE: OPERATION_CODES["AllReduce"],
    KernelClass.ALL_GATHER: OPERATION_CODES["AllGather"],
    KernelClass.REDUCE_SCATTER: OPERATION_CODES["ReduceScatter"],
    KernelClass.BROADCAST: OPERATION_CODES["Broadcast"],
    KernelClass.REDUCE: OPERATION_CODES["Reduce"],
}
_DECIDED: Final = np.dtype(
    [
        ("member", "<i4"),
        ("coll_seq", "<i8"),  # count of its line
        ("lost", "<i8"),  # lines that its member lost before it, by the program of its process
        ("id", "<i8"),
        ("kernel", "<i8"),  # NO_NUMBER without one that tells its number
        ("lane", "<i4"),  # device and stream of its process
        ("correlation_id", "<i8"),
        ("is_guess", "?"),  # its kernel is another line's as likely
        ("is_stray", "?"),  # without a kernel, which another line of the same capture was given
        ("is_hole", "?"),  # without a kernel, and kernels beside it may be its own
    ]
)
_SHIFT: Final = 44
"""Correlation ids of one process are smaller than this many bits hold."""
_APART: Final = -2
"""Device of templates of lost lines, which come out of order: no period of a rank's calls is learnt from them."""
_BY_KERNEL: Final = "kernel"
_WHOLE: Final = np.iinfo(np.int64).max
_LOOKED_AT_ONCE: Final = 65_536


class LostLines:
    """Numbers the collectives of one store, and finds those whose line was lost."""

    def __init__(self, known: Store, *, settle_ns: int = 0) -> None:
        """`settle_ns`: how long lines are waited for that would tell more of the last ones."""
        self._store = known
        self._losses = LineLosses(known, settle_ns=settle_ns)
        self._lanes = CombinationIndex(("process", "device_id", "stream_id"))
        self._members_of_lane: dict[int, set[int]] = {}
        self.begun_amid: set[int] = set()
        """Processes of which it is not known at which step of their logs the capture began."""
        self._processes: set[int] = set()
        """With a line that has a kernel."""
        self._held: Columns = np.empty(0, _DECIDED)
        """Decided collectives that wait for lines before them."""
        self._last: Columns = np.empty(0, _DECIDED)
        """Of each member the collective with the last kernel that was numbered."""
        self._is_counted: NDArray[np.bool_] = np.empty(0, np.bool_)
        """By member: `is_counted`."""
        self._has_hole: NDArray[np.bool_] = np.empty(0, np.bool_)
        """By member: whether a collective since then, or since the first one, is a hole."""
        self._shift: NDArray[np.int64] = np.empty(0, np.int64)
        """By member: number of its last collective minus the count of its line."""
        self._free: Ids = np.empty(0, np.int64)
        """Kernels that no line is of, so far."""
        self._next_kernel = 0
        self._decided_before = 0
        """All operations before this one are decided."""
        self._unsized: set[int] = set()
        self._templates: dict[tuple[int, ...], int] = {}

    def recover(
        self,
        decided: Ids,
        has_ended: Callable[[int], bool] = lambda _: False,
        knows_beginning: Callable[[int], bool] = lambda _: True,
        *,
        now_ns: int = 0,
    ) -> Ids:
        """Numbers operations that were aligned, and adds those between them whose line was lost.

        `has_ended`: whether a process will log nothing more; then kernels behind its last line are of lost ones, too.
        `knows_beginning`: whether it is known which lines its first kernels are of; then those before them are, too.
        `now_ns`: when lines without a stamp came. Gives those whose number is known by now, with the ones added. The
        rest waits for lines before it.
        """
        self._losses.process_lines(has_ended, now_ns)
        new, others = self._collectives(decided)
        self._number_pairs(others)
        held = row_ops.filter_rows(self._held, self._held["id"] >= self._store.operations.first)
        new = row_ops.concat([held, new])
        first_pending = self._first_pending(new["member"])
        is_ready = new["coll_seq"] < first_pending[new["member"]]
        is_ready &= new["id"] < self._losses.known_until(new["member"])
        new, self._held = row_ops.filter_rows(new, is_ready), row_ops.filter_rows(new, ~is_ready)
        if not len(new):
            return others
        self._place_on_lanes(new)
        placed = {self._store.members[member].process for member in distinct_values(new["member"])}
        self.begun_amid |= {process for process in placed if not knows_beginning(process)}
        new["lost"] = self._losses.before(new["id"], new["member"], np.full(len(new), COLLECTIVE))
        rows = row_ops.concat([self._last[np.isin(self._last["member"], new["member"])], new])
        rows = row_ops.take(rows, np.lexsort((rows["coll_seq"], rows["member"])))
        with_kernel = row_ops.filter_rows(rows, rows["kernel"] != NO_NUMBER)
        free, keys = self._free_kernels()
        self._grow()
        self._count_anew(new["member"])
        table = self._store.operations
        at = table.at(new["id"])
        shift = self._shift[new["member"]] + new["lost"]
        if shift.any():
            table.rows.put("coll_seq", at, new["coll_seq"] + shift)
            table.rows.put("number_state", at[shift != 0], NumberState.HEALED)
        behind = self._with_kernels_behind(with_kernel, keys)
        doubtful = self._doubtful(with_kernel, keys, rows["member"][rows["is_stray"]])
        over = {
            member
            for member in {*behind, *doubtful}
            if first_pending[member] == _WHOLE and has_ended(self._store.members[member].process)
        }
        lost = [
            self._number(rows[rows["member"] == member], free, keys, is_over=member in over)
            for member in sorted({*doubtful, *over})
        ]
        self._remember(with_kernel, row_ops.filter_rows(rows, rows["is_hole"]))
        return np.concatenate([others, new["id"], *lost])

    def evict_processes(self, processes: Iterable[int]) -> None:
        """Forgets the programs of these processes, which are gone."""
        self._losses.evict(set(processes))

    def is_counted(self, member: int) -> bool:
        """Whether its last numbers count all lines that it lost, by the program of its process."""
        return member < len(self._is_counted) and bool(self._is_counted[member])

    def have_programs(self, members: Iterable[int]) -> bool:
        """Whether programs count the lost lines of all of these, from their next numbers on."""
        return all(
            self.is_counted(member) or self._losses.are_counted(self._store.members[member].process)
            for member in members
        )

    def count_back(self, member: int, waiting: Ids, behind: int) -> NDArray[np.int64]:
        """Numbers of collectives of a member, in order, by that of a later one and the program of their process."""
        table = self._store.operations
        since = int(min(waiting.min(initial=behind), behind))
        ids = np.arange(max(since, table.first), behind + 1)
        rows = table.take(ids, "member", "line", "coll_seq")
        lines = ids[(rows["member"] == member) & (rows["line"] != NO_NUMBER) & (rows["coll_seq"] != NO_NUMBER)]
        lost = self._losses.before(lines, np.full(len(lines), member, np.int32), np.full(len(lines), COLLECTIVE))
        counts = np.arange(len(lines)) + lost
        counts += int(table.take(lines[-1:], "coll_seq")["coll_seq"][0]) - counts[-1]
        known = np.isin(waiting, lines)
        numbers = np.zeros(len(waiting), np.int64)
        numbers[known] = counts[np.searchsorted(lines, waiting[known])]
        # What has no line has the number before what follows it.
        places = np.append(np.flatnonzero(known), len(waiting))
        following = np.append(numbers[known], counts[-1])
        next_of = np.searchsorted(places, np.flatnonzero(~known))
        numbers[~known] = following[next_of] - (places[next_of] - np.flatnonzero(~known))
        return numbers

    def last_lines(self, members: Iterable[int], amount: int) -> dict[int, tuple[Ids, NDArray[np.int64]]]:
        """By member its last collectives that have a line, and their numbers by the program of its process, whether
        they are decided or not: at most so many, and of the last `_LOOKED_AT_ONCE` operations.
        """
        table = self._store.operations
        ids = np.arange(max(table.first, table.next_id - _LOOKED_AT_ONCE), table.next_id)
        ids = ids[np.isin(table.rows["member"][table.at(ids)], list(members))]
        rows = table.take(ids, "member", "line", "coll_seq", "match")
        is_line = (rows["line"] != NO_NUMBER) & (rows["coll_seq"] != NO_NUMBER)
        ids, rows = ids[is_line], row_ops.filter_rows(rows, is_line)
        # Numbers of those that wait are counts of lines.
        waits = (rows["match"] == Match.PENDING) | np.isin(ids, self._held["id"])
        lost = self._losses.before(ids, rows["member"], np.full(len(ids), COLLECTIVE))
        found: dict[int, tuple[Ids, NDArray[np.int64]]] = {}
        for member, mine in group_by(rows["member"]):
            last = mine[-amount:]
            shift = int(self._shift[member]) if self.is_counted(member) else 0
            found[member] = ids[last], rows["coll_seq"][last] + np.where(waits[last], lost[last] + shift, 0)
        return found

    def _number_pairs(self, operations: Ids) -> None:
        """Gives Sends and Recvs numbers that count those whose line was lost."""
        table = self._store.operations
        rows = table.take(operations, "member", "pair_seq", "template")
        ways = way_of(self._store.templates_of(rows, "op", "root"))
        pairs = np.flatnonzero((rows["pair_seq"] != NO_NUMBER) & (ways != COLLECTIVE))
        if not len(pairs):
            return
        lost = self._losses.before(operations[pairs], rows["member"][pairs], ways[pairs])
        moved = pairs[lost > 0]
        at = table.at(operations[moved])
        table.rows.put("pair_seq", at, rows["pair_seq"][moved] + lost[lost > 0])
        table.rows.put("number_state", at, NumberState.HEALED)

    @property
    def has_waiting(self) -> bool:
        """Whether operations that were aligned wait for lines before them to be numbered."""
        return len(self._held) > 0

    def are_decided(self, members: Iterable[int]) -> bool:
        """Whether no operation of these members waits to be aligned or numbered."""
        own = np.fromiter(members, np.int32)
        return not np.isin(self._held["member"], own).any() and bool((self._first_pending(own)[own] == _WHOLE).all())

    def _collectives(self, decided: Ids) -> tuple[Columns, Ids]:
        """Those of these operations that are collectives, and the others."""
        table = self._store.operations
        rows = table.take(
            decided, "member", "coll_seq", "match", "confidence", "kernel", "logged_at_ns", "number_state"
        )
        is_collective = rows["coll_seq"] != NO_NUMBER
        rows, chosen = row_ops.filter_rows(rows, is_collective), decided[is_collective]
        new = np.zeros(len(chosen), _DECIDED)
        new["id"] = chosen
        for name in ("member", "coll_seq"):
            new[name] = rows[name]
        is_stamped = rows["logged_at_ns"] != NO_TIME_NS
        tells = has_kernel(rows) | (has_launch(rows["match"]) & ~is_stamped)
        new["kernel"] = np.where(tells & (rows["kernel"] >= self._store.kernels.first), rows["kernel"], NO_NUMBER)
        new["is_guess"] = (new["kernel"] != NO_NUMBER) & ~has_kernel(rows)
        new["is_stray"] = (rows["match"] == Match.UNMATCHED) & ~is_stamped
        new["is_hole"] = (new["kernel"] == NO_NUMBER) & (rows["match"] != Match.NO_KERNEL) & ~new["is_stray"]
        return new, decided[~is_collective]

    def _first_pending(self, members: NDArray[np.int32]) -> NDArray[np.int64]:
        """By member: the count of its first line that is not decided; a larger one than any if all are.

        True of `members`. Found from the oldest line on: millions may wait for a capture behind those that tell it.
        """
        table = self._store.operations
        match, first = table.rows["match"], np.full(len(self._store.members), _WHOLE)
        is_sought = np.zeros(len(first), np.bool_)
        is_sought[members] = True
        begin = max(0, self._decided_before - table.first)
        while begin < len(match) and is_sought.any():
            end = min(len(match), begin + _LOOKED_AT_ONCE)
            pending = begin + np.flatnonzero(match[begin:end] == Match.PENDING)
            if not len(pending) and begin + table.first <= self._decided_before:
                self._decided_before = table.first + end
            numbers, own = table.rows.values("coll_seq", pending), table.rows["member"][pending]
            chosen = np.flatnonzero((numbers != NO_NUMBER) & (first[own] == _WHOLE))[::-1]
            # Of several that are written to one place the last stays, which is the first of the member.
            first[own[chosen]] = numbers[chosen]
            is_sought[own[chosen]] = False
            begin = end
        return first

    def _grow(self) -> None:
        missing = len(self._store.members) - len(self._shift)
        if missing > 0:
            self._shift = np.append(self._shift, np.zeros(missing, np.int64))
            self._has_hole = np.append(self._has_hole, np.zeros(missing, np.bool_))
            self._is_counted = np.append(self._is_counted, np.zeros(missing, np.bool_))

    def _count_anew(self, members: NDArray[np.int32]) -> None:
        """Numbers of these members rest on programs that are known since: kernels have shown what these count again."""
        for member in distinct_values(members):
            if not self._is_counted[member] and self._losses.are_counted(self._store.members[member].process):
                self._is_counted[member], self._shift[member] = True, 0

    def _remember(self, rows: Columns, holes: Columns) -> None:
        """Keeps of each member the collective with the last kernel; `rows`: those with one, by member and count."""
        last_launched = np.full(len(self._shift), NO_NUMBER, np.int64)
        accumulate(np.maximum, last_launched, rows["member"], rows["correlation_id"])
        at = np.flatnonzero(rows["correlation_id"] == last_launched[rows["member"]])
        last = row_ops.take(rows, at[np.diff(rows["member"][at], append=NO_NUMBER) != 0])
        last_hole = np.full(len(self._shift), NO_NUMBER, np.int64)
        last_hole[holes["member"]] = holes["coll_seq"]
        is_new = ~np.isin(last["id"], self._last["id"])
        self._has_hole[holes["member"]] = True
        self._has_hole[last["member"][is_new]] = (last_hole[last["member"]] > last["coll_seq"])[is_new]
        others = self._last[~np.isin(self._last["member"], last["member"])]
        self._last = row_ops.concat([others, last])

    def _doubtful(self, with_kernel: Columns, keys: NDArray[np.int64], with_strays: NDArray[np.int32]) -> Sequence[int]:
        """Members of which a line was lost, or has no kernel (`with_strays`), or is not where its kernel is."""
        member = with_kernel["member"]
        follows = (member[1:] == member[:-1]) & (with_kernel["lane"][1:] == with_kernel["lane"][:-1])
        own = with_kernel["lane"].astype(np.int64) << _SHIFT | with_kernel["correlation_id"]
        at = np.searchsorted(keys, own)
        is_doubtful = follows & ((at[1:] > at[:-1]) | (own[1:] < own[:-1]))
        is_first = np.append(True, ~follows) & ~np.isin(with_kernel["id"], self._last["id"])
        starts = np.searchsorted(keys, with_kernel["lane"].astype(np.int64) << _SHIFT) < at
        members = np.concatenate([member[1:][is_doubtful], member[is_first & starts], with_strays])
        return distinct_values(members) if len(members) else []

    def _with_kernels_behind(self, rows: Columns, keys: NDArray[np.int64]) -> Sequence[int]:
        """Members on whose stream kernels without a line are behind all that have one; `rows`: those with a kernel."""
        end = (rows["lane"].astype(np.int64) + 1) << _SHIFT
        own = rows["lane"].astype(np.int64) << _SHIFT | rows["correlation_id"]
        is_behind = np.searchsorted(keys, end) > np.searchsorted(keys, own)
        return distinct_values(rows["member"][is_behind]) if is_behind.any() else []

    def _number(self, rows: Columns, free: Ids, keys: NDArray[np.int64], *, is_over: bool) -> Ids:
        """Numbers the collectives of one member by kernels and lines, and adds those whose line was lost; gives these.

        `rows`: in order of their lines, from the last one with a kernel that has a number already.
        """
        member = int(rows["member"][0])
        is_old = np.isin(rows["id"], self._last["id"])
        has_own = rows["kernel"] != NO_NUMBER
        if not has_own.any() or not self._is_alone(int(rows["lane"][has_own][-1]), member):
            return np.empty(0, np.int64)
        has_own &= rows["lane"] == rows["lane"][has_own][-1]
        own = np.where(has_own, rows["correlation_id"], NO_NUMBER)
        is_last = is_over & (np.arange(len(rows)) > np.flatnonzero(has_own)[-1]) & rows["is_stray"]
        rows["is_stray"] &= ~is_last  # their kernels did not end, and so were not recorded
        if is_old.any():
            # What was launched before has its number already, as a line that was lost.
            is_late = has_own & ~is_old & (own < own[is_old][0])
            rows["is_stray"] |= is_late
            has_own &= ~is_late
        behind = np.maximum.accumulate(np.where(has_own, own, NO_NUMBER))
        lost, correlations, beside = self._between(rows, has_own, own, behind, free, keys, is_over=is_over)
        place = np.where(is_last, _WHOLE, np.where(has_own, own, behind))
        counted = np.flatnonzero(~is_old & ~rows["is_stray"])
        every = np.concatenate([place[counted], correlations])
        is_behind = np.concatenate([~has_own[counted], np.zeros(len(lost), bool)])
        order = np.lexsort((np.concatenate([rows["coll_seq"][counted], correlations]), is_behind, every))
        by_line = rows["coll_seq"] + rows["lost"]
        # Those that were lost since the last one may have kernels.
        begin = int(rows["coll_seq"][~is_old][0] + rows["lost"][is_old][-1:].sum() + self._shift[member])
        in_order = _numbers_of(order < len(counted), np.sort(by_line[counted]) + self._shift[member], begin)
        numbers = np.empty(len(order), np.int64)
        numbers[order] = in_order
        self._shift[member] = int(in_order[-1]) - int(by_line[~is_old][-1])
        strays = np.flatnonzero(rows["is_stray"])
        between = np.append(in_order, in_order[-1] + 1)[np.searchsorted(every[order], place[strays], side="right")]
        table = self._store.operations
        at = table.at(np.concatenate([rows["id"][counted], rows["id"][strays]]))
        own_numbers = np.concatenate([numbers[: len(counted)], between])
        is_healed = own_numbers != np.concatenate([rows["coll_seq"][counted], rows["coll_seq"][strays]])
        is_healed[: len(counted)] &= ~rows["is_guess"][counted]
        table.rows.put("coll_seq", at, own_numbers)
        table.rows.put("number_state", at[is_healed], NumberState.HEALED)
        table.rows.put("number_state", at[len(counted) :], NumberState.UNCERTAIN)
        if len(strays):
            job = self._store.process_job[self._store.members[member].process]
            self._store.numbers_uncertain[job] += len(strays)
        return self._add(row_ops.take(rows, beside), lost, numbers[len(counted) :]) if len(lost) else lost

    def _between(
        self,
        rows: Columns,
        has_own: NDArray[np.bool_],
        own: NDArray[np.int64],
        behind: NDArray[np.int64],
        free: Ids,
        keys: NDArray[np.int64],
        *,
        is_over: bool,
    ) -> tuple[Ids, NDArray[np.int64], NDArray[np.intp]]:
        """Kernels that no line is of, between those of two lines; their correlation ids, and a line beside each."""
        lane = int(rows["lane"][has_own][-1]) << _SHIFT
        in_order = np.flatnonzero(has_own)[np.argsort(own[has_own], kind="stable")]
        # All before the first line is of lost ones too, unless lines before it have no kernel. Of a capture that may
        # have begun amid a program, they are of the step before the one that it was laid beside.
        is_begun = bool(np.isin(rows["id"], self._last["id"]).any())
        begun_amid = self._store.members[rows["member"][0]].process in self.begun_amid
        first = int(own[in_order[0]]) if is_begun or begun_amid else 0
        last = (1 << _SHIFT) - 1 if is_over else int(own[in_order[-1]])
        begin, end = np.searchsorted(keys, (lane | first, lane | last))
        lost, correlations = free[begin:end], keys[begin:end] - lane
        following = np.searchsorted(own[in_order], correlations)
        # One of those beside a line without a kernel may be its own.
        since = [first if is_begun else NO_NUMBER] if self._has_hole[rows["member"][0]] else []
        holes = np.searchsorted(own[in_order], np.append(behind[rows["is_hole"]], since), side="right")
        beside = in_order[np.minimum(following, len(in_order) - 1)]
        is_usable = ~np.isin(following, holes) & (rows["id"][beside] >= self._store.operations.first)
        chosen = np.flatnonzero(is_usable & self._are_known(rows[in_order], lost))
        return lost[chosen], correlations[chosen], beside[chosen]

    def _are_known(self, rows: Columns, kernels: Ids) -> NDArray[np.bool_]:
        """Which of these kernels run an operation that their name tells, or that alone ran in such kernels here."""
        classes = self._classes(kernels)
        known = np.isin(classes, list(_OPERATION_OF))
        if known.all():
            return known
        others = self._classes(rows["kernel"])
        ops = self._store.templates_of(self._store.operations.take(rows["id"], "template"), "op")["op"]
        for kernel_class in distinct_values(classes[~known]):
            known[classes == kernel_class] = len(distinct_values(ops[others == kernel_class])) == 1
        return known

    def _classes(self, kernels: Ids) -> NDArray[np.int64]:
        names = self._store.kernel_templates_of(self._store.kernels.take(kernels, "template"), "name")["name"]
        found, inverse = distinct(names)
        parsed = [int(parse_kernel_name(self._store.strings[name]).kernel_class) for name in found.tolist()]
        return np.asarray(parsed, np.int64)[inverse]

    def _add(self, beside: Columns, kernels: Ids, numbers: NDArray[np.int64]) -> Ids:
        """Adds a collective for each of these kernels, like the line beside it; gives their ids."""
        known = self._store
        rows = known.kernels.take(kernels)
        names = known.kernel_templates_of(rows, "name")["name"]
        self._free = self._free[~np.isin(self._free, kernels)]
        like = known.operations.take(beside["id"])
        added = empty_operations(len(kernels))
        for name in ("source", "process", "member", "iteration", "iteration_by"):
            added[name] = like[name]
        (templates, kernel_names), of = distinct_together(like["template"], names)
        added["template"] = np.asarray(
            [self._template(*pair) for pair in zip(templates.tolist(), kernel_names.tolist(), strict=True)], np.int64
        )[of]
        added["line"] = NO_NUMBER
        added["match"] = Match.LINE_LOST
        added["number_state"] = NumberState.HEALED
        # A line without a stamp may be another one's, but its kernel is the communicator's.
        is_stamped = like["logged_at_ns"] != NO_TIME_NS
        added["confidence"] = np.where(is_stamped, like["confidence"], np.maximum(like["confidence"], BY_LAUNCH))
        added["kernel"] = kernels
        added["launch"] = known.new_launches(len(kernels))
        for name in ("start_ns", "end_ns", "censored"):
            added[name] = rows[name]
        added["coll_seq"] = numbers
        ids = known.operations.append(added)
        at = known.kernels.at(kernels)
        known.kernels.rows.put("launch", at, added["launch"])
        known.kernels.rows.put("replay", at, 0)
        known.kernel_references.record(ids, kernels)
        known.numbers_healed[known.process_job[int(like["process"][0])], _BY_KERNEL] += len(kernels)
        self._unsized.update(ids.tolist())
        return ids

    def _free_kernels(self) -> tuple[Ids, NDArray[np.int64]]:
        """Kernels that have no line, in order of their keys (lane and correlation id), and these."""
        table = self._store.kernels
        begin = max(self._next_kernel, table.first)
        self._next_kernel = table.next_id
        waiting = np.concatenate([self._free[self._free >= table.first], np.arange(begin, table.next_id)])
        rows = table.take(waiting, "launch", "graph_node_id", "process")
        is_free = (rows["launch"] == NO_NUMBER) & (rows["graph_node_id"] == NO_NUMBER)
        self._free = waiting[is_free]
        # Of a process without a line that has a kernel nothing is known, and its kernels may be past knowing.
        waiting = waiting[is_free & np.isin(rows["process"], sorted(self._processes))]
        lanes, correlations = self._lanes_of(waiting)
        keys = lanes.astype(np.int64) << _SHIFT | correlations
        order = np.argsort(keys, kind="stable")
        return waiting[order], keys[order]

    def _lanes_of(self, kernels: Ids) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        rows = self._store.kernels.take(kernels, "template", "correlation_id")
        found, inverse = distinct(rows["template"])
        lanes = self._lanes.number(self._store.kernel_templates.take(found.astype(np.int64)))
        return lanes[inverse], rows["correlation_id"].astype(np.int64)

    def _place_on_lanes(self, new: Columns) -> None:
        timed = np.flatnonzero(new["kernel"] != NO_NUMBER)
        kernels = self._store.kernels.take(new["kernel"][timed], "process")
        self._processes.update(distinct_values(kernels["process"]))
        new["lane"] = NO_NUMBER
        new["lane"][timed], new["correlation_id"][timed] = self._lanes_of(new["kernel"][timed])
        sure = timed[~new["is_guess"][timed]]
        both = new["lane"][sure].astype(np.int64) << 32 | new["member"][sure]
        for lane, member in (divmod(each, 1 << 32) for each in distinct(both)[0].tolist()):
            self._members_of_lane.setdefault(lane, set()).add(member)
        guesses = np.flatnonzero(new["is_guess"])
        if not len(guesses):
            return
        both = new["lane"][guesses].astype(np.int64) << 32 | new["member"][guesses]
        found, inverse = distinct(both)
        alone = np.asarray([self._is_alone(*divmod(each, 1 << 32)) for each in found.tolist()])[inverse]
        self._store.operations.rows.put(
            "number_state", self._store.operations.at(new["id"][guesses[alone]]), NumberState.LAUNCHED
        )
        new["is_hole"][guesses[~alone]] = True
        for name in ("kernel", "lane"):
            new[name][guesses[~alone]] = NO_NUMBER

    def _is_alone(self, lane: int, member: int) -> bool:
        """Whether no other communicator uses the lane of one, as far as is known."""
        others = self._members_of_lane.get(lane, set()) - {member}
        return not any(self._store.members[other].is_alive for other in others)

    def size(self, operations: Ids) -> None:
        """Gives operations whose line was lost the size that their siblings have: K x R, as they were joined."""
        if not self._unsized:
            return
        table = self._store.operations
        lost = np.isin(operations, np.fromiter(self._unsized, np.int64, len(self._unsized)))
        known = (operations != NO_NUMBER) & ~lost
        rows, ranks = np.nonzero(lost & known.any(axis=1)[:, None])
        if not len(rows):
            return
        ids, siblings = operations[rows, ranks], operations[rows, known.argmax(axis=1)[rows]]
        own, like = table.take(ids, "template")["template"], table.take(siblings, "template", "message_bytes")
        ops = self._store.operation_templates.rows["op"]
        alike = np.flatnonzero(ops[own] == ops[like["template"]])
        (owns, others), of = distinct_together(own[alike], like["template"][alike])
        sized = [self._sized_template(*pair) for pair in zip(owns.tolist(), others.tolist(), strict=True)]
        at = table.at(ids[alike])
        table.rows.put("template", at, np.asarray(sized, np.int64)[of])
        table.rows.put("message_bytes", at, like["message_bytes"][alike])
        self._unsized.difference_update(ids[alike].tolist())

    def _template(self, beside: int, name_of_kernel: int) -> int:
        """A template of the communicator of another one, with what a kernel's name tells of its operation."""
        kernel = parse_kernel_name(self._store.strings[name_of_kernel])
        op = _OPERATION_OF.get(kernel.kernel_class)
        template = self._store.operation_templates.take(np.asarray([beside]))
        if op is not None:
            template["op"], template["data_type"] = op, kernel.data_type
            template["op_name"] = self._store.strings.index_of(OPERATIONS[op].name)
        for name in ("reduction", "root"):
            template[name] = NO_NUMBER
        template["device"] = _APART
        for name in ("count", "send_buffer", "recv_buffer"):
            template[name] = 0
        return self._interned(template)

    def _sized_template(self, own: int, other: int) -> int:
        templates = self._store.operation_templates.take(np.asarray([own, other]))
        template = templates[:1]
        for name in ("count", "data_type", "reduction", "root"):
            template[name] = templates[name][1]
        return self._interned(template)

    def _interned(self, template: Columns) -> int:
        key = tuple(int(template[name][0]) for name in OPERATION_TEMPLATE.names or ())
        if key not in self._templates:
            self._templates[key] = int(self._store.operation_templates.append(template)[0])
        return self._templates[key]


def _numbers_of(is_line: NDArray[np.bool_], by_line: NDArray[np.int64], begin: int) -> NDArray[np.int64]:
    """Numbers of lines and of kernels without a line, in their order: a line has at least the number that lines tell.

    A kernel has the number before what follows it: where more lines were lost than there are kernels, capture began
    between them. `by_line`: of the lines, ascending; `begin`: the least number.
    """
    places = np.arange(len(is_line))
    least = np.full(len(is_line), np.iinfo(np.int64).min // 2)
    least[is_line] = by_line - places[is_line]
    least[0] = max(int(least[0]), begin)
    numbers: NDArray[np.int64] = np.maximum.accumulate(least) + places
    lines = np.flatnonzero(is_line)
    if len(lines):
        behind = lines[np.minimum(np.searchsorted(lines, places), len(lines) - 1)]
        is_before = ~is_line & (behind > places)
        numbers[is_before] = (numbers[behind] - (behind - places))[is_before]
    return numbers
