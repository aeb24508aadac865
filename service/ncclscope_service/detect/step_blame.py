"""Who was last, and how long ranks were in sends and receives, step by step: the memory of the late-rank detector.

Operations of one step are not independent (a rank that computes slowly in it is late for all of them), so a step, not
an operation, is the unit that is counted. Each has, by rank and kind of operation, how often the rank was last and the
sum of how much later it came than the second last (blame), and by rank its largest blames: a rank that is slow all over
shows in the sum over all kinds, one that is late to one kind of operation in that one, whatever the jitter of the
others, and one that loses time at a few places of a step in the largest.

All groups of a job are in the same arrays. A *lane* is one rank of a group, and the ranks of a group are neighbours. A
*slot* holds one step of a group; the newest step takes the slot of the oldest.

A rank that waits in a receive, or whose transfer takes long, comes late to what follows through no fault of its own.
Kernels of sends and receives are known rank by rank; the time in them is compared between ranks of one group, which do
the same work: what one spends there beyond the others was caused by another rank or a link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import Integers, accumulate, distinct, distinct_together, first_positions
from ncclscope_service.detect.context import Context
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

Blames: TypeAlias = NDArray[np.float64]
"""By rank and step (or by group, rank and step, ...), in ns."""

DEFAULT_STEP_NS: Final = 500_000_000
"""Length of a step while the job's own is not known."""
WINDOW_NS: Final = 4_000_000_000
"""The newest steps are cut into WINDOWS windows, each of so long at most, and a rank must be late in most of them: one
stall is no late rank."""
WINDOWS: Final = 4
WINDOWS_BAD: Final = 3
_LEAST_STEPS_PER_WINDOW: Final = 3
"""Of long steps, and"""
MORE_STEPS: Final = 12
"""how many of them if so few do not tell."""
LARGEST: Final = 4
"""Blames of a rank in a step that are kept one by one."""
_EARLY: Final = 3
"""First steps of a group: lazy connections and warm-up."""
_WHOLE: Final = 0.75
"""Share of the operations that a step usually has; one with fewer was captured in part."""
ROOTED: Final = np.array([OPERATION_CODES[name] for name in ("Broadcast", "Reduce", "Gather", "Scatter")])
"""Operations that wait for their root by design."""
ALL_OPS: Final = -1
_FIRST_SLOTS: Final = 16
_NO_LANES: Final = np.empty(0, np.int64)
_UNUSED: Final = np.iinfo(np.int64).max
_MOST_MEMBERS: Final = 65_536
"""Ranks of communicators whose sends and receives are followed: 16 for each of 4,096 ranks."""


class _Grid:
    """Columns with a value, or some, for each row and slot."""

    def __init__(self, **empty: np.generic | NDArray[Any]) -> None:
        """`empty`: by column, what stands in slots that are not used yet."""
        self._empty = empty
        self._columns = {name: np.empty((0, 0, *value.shape), value.dtype) for name, value in empty.items()}
        self._rows = 0

    @property
    def rows(self) -> int:
        """Rows in use."""
        return self._rows

    @property
    def slots(self) -> int:
        """Slots of each row."""
        slots: int = next(iter(self._columns.values())).shape[1]
        return slots

    def __getitem__(self, name: str) -> NDArray[Any]:
        """All values of a column: row by slot. There may be more rows than are in use."""
        return self._columns[name]

    def resize(self, rows: int, slots: int) -> None:
        """Uses so many rows with so many slots, not fewer of either than before."""
        self._rows = rows
        for name, values in self._columns.items():
            if rows > len(values) or slots > values.shape[1]:
                room = len(values) if rows <= len(values) else max(rows, 2 * len(values))
                grown = np.full((room, slots, *values.shape[2:]), self._empty[name], values.dtype)
                grown[: len(values), : values.shape[1]] = values
                self._columns[name] = grown

    def reset(self, rows: Integers, slots: Integers) -> None:
        """Empties one slot of each of these rows."""
        for name, values in self._columns.items():
            values[rows, slots] = self._empty[name]

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Drops all rows but these."""
        self._columns = {name: values[rows] for name, values in self._columns.items()}
        self._rows = len(rows)


class StepBlames:
    """The last steps of all groups of a job; a late batch is added to the step that it belongs to."""

    def __init__(self) -> None:
        self._group_of: dict[int, int] = {}
        """Row of each communicator."""
        self._sizes: list[int] = []
        """Ranks, by group."""
        self._begins: list[int] = []
        """The lane of its rank 0, by group."""
        self._made: NDArray[np.int64] = np.empty(0, np.int64)
        """Number of its steps so far."""
        self._op_begins: list[dict[int, int]] = []
        """By group: the lane of its rank 0 for each kind of operation."""
        self._steps = _Grid(
            at_ns=np.int64(NO_TIME_NS),
            operations=np.int64(0),
            transfer_ns=np.int64(0),
            confidence=np.float64(1.0),
            is_early=np.bool_(False),
        )
        """By group: of all its ranks and operations."""
        self._ops = _Grid(hits=np.int32(0), blame_ns=np.int64(0))
        """By lane of a group and operation."""
        self._largest = _Grid(
            sum_ns=np.int64(0), blame_ns=np.zeros(LARGEST, np.int64), coll_seq=np.full(LARGEST, NO_NUMBER, np.int64)
        )
        """By lane of a group: its largest blames, the largest first, their collectives, and their sum."""

    def ingest_collectives(self, collectives: Columns, step_ns: int, context: Context, most: int) -> None:
        """Takes joined collectives (`rows.COLLECTIVE`) of groups of the job that name a last rank, in any order; `most`
        steps of each group are remembered.
        """
        known, inverse = distinct(collectives["communicator"])
        rows = [self._group(each, len(context.groups[each].global_ranks)) for each in known.tolist()]
        group = np.asarray(rows, np.int64)[inverse]
        rank = collectives["last_rank"].astype(np.int64)
        if not (fits := rank < np.asarray(self._sizes, np.int64)[group]).all():
            collectives, group, rank = row_ops.filter_rows(collectives, fits), group[fits], rank[fits]
        if not len(collectives):
            return
        steps = collectives["end_true_ns"] // step_ns
        (groups, numbers), step = distinct_together(group, steps)
        slots = self._slots(groups, numbers * step_ns, most)
        if (slots < 0).any():
            stays = slots[step] >= 0
            self.ingest_collectives(row_ops.filter_rows(collectives, stays), step_ns, context, most)
            return
        self._add_steps(groups, slots, step, collectives)
        self._add_blames(group, rank, slots[step], collectives)
        self._add_largest(group, rank, step, slots, collectives)

    def evict_communicators(self, communicators: Set[int]) -> None:
        """Forgets these communicators."""
        gone = {group for communicator in communicators if (group := self._group_of.get(communicator)) is not None}
        if not gone:
            return
        stays = [group for group in range(len(self._sizes)) if group not in gone]
        new = {group: place for place, group in enumerate(stays)}
        self._steps.keep(np.asarray(stays, np.int64))
        self._largest.keep(np.concatenate([_NO_LANES, *(self._lanes(self._begins[group], group) for group in stays)]))
        of_ops = [self._lanes(begin, group) for group in stays for begin in self._op_begins[group].values()]
        self._ops.keep(np.concatenate([_NO_LANES, *of_ops]))
        op_begins = iter(np.cumsum([0, *map(len, of_ops)]).tolist())
        self._op_begins = [{op: next(op_begins) for op in self._op_begins[group]} for group in stays]
        self._group_of = {each: new[group] for each, group in self._group_of.items() if group in new}
        self._sizes = [self._sizes[group] for group in stays]
        self._made = self._made[stays]
        self._begins = (np.cumsum(self._sizes) - self._sizes).tolist()

    def clear(self) -> None:
        """Forgets all: steps have another length from now on."""
        self.evict_communicators(self._group_of.keys())

    def communicators(self) -> list[int]:
        """Those of which steps are remembered."""
        return list(self._group_of)

    def last_whole_ns(self, communicators: Iterable[int], count: int) -> int:
        """When the newest whole step of any of these began; 0 if there is none. `count`: as in `history`."""
        groups = np.asarray([self._group_of[each] for each in communicators], np.int64)
        order, chosen = self._newest(groups, count)
        return int(self._steps["at_ns"][groups[:, None], order][chosen].max(initial=0))

    def newest_ns(self, communicator: int) -> int | None:
        """When its newest step begins; None if it has none."""
        group = self._group_of.get(communicator)
        return None if group is None else int(self._steps["at_ns"][group].max())

    def history(self, communicator: int, count: int | None = None) -> History:
        """The last `count` whole steps of a group; None: all that are remembered."""
        group = self._group_of[communicator]
        order, chosen = self._newest(np.array([group]), self._steps.slots if count is None else count)
        return self._history(group, order[chosen])

    def steps_at(self, communicator: int, at_ns: NDArray[np.int64]) -> History:
        """The steps of a group that began at these times; they are remembered."""
        group = self._group_of[communicator]
        return self._history(group, (self._steps["at_ns"][group] == at_ns[:, None]).argmax(axis=1))

    def _history(self, group: int, slots: NDArray[np.intp]) -> History:
        ops = np.array([self._lanes(begin, group) for begin in self._op_begins[group].values()])[:, :, None]
        lanes = self._lanes(self._begins[group], group)[:, None]
        return History(
            at_ns=self._steps["at_ns"][group, slots],
            transfer_ns=self._steps["transfer_ns"][group, slots],
            confidence=self._steps["confidence"][group, slots],
            blame_ns=self._ops["blame_ns"][ops, slots].sum(axis=0),
            hits=self._ops["hits"][ops, slots].sum(axis=0),
            ops=tuple(self._op_begins[group]),
            blame_by_op_ns=self._ops["blame_ns"][ops, slots],
            hits_by_op=self._ops["hits"][ops, slots],
            largest_ns=self._largest["blame_ns"][lanes, slots],
            largest_seq=self._largest["coll_seq"][lanes, slots],
        )

    def judged(self, communicators: Iterable[int], window: int) -> list[JudgedGroups]:
        """The newest steps of these communicators that make WINDOWS equal windows, of `window` steps at most; groups
        with fewer steps than windows are left out. Groups with as many ranks and steps are together.
        """
        wanted = [each for each in communicators if each in self._group_of]
        groups = np.asarray([self._group_of[each] for each in wanted], np.int64)
        if not len(groups):
            return []
        order, chosen = self._newest(groups, WINDOWS * window)
        steps = chosen.sum(axis=1) // WINDOWS * WINDOWS
        chosen &= chosen[:, ::-1].cumsum(axis=1)[:, ::-1] <= steps[:, None]
        sizes = np.asarray(self._sizes, np.int64)[groups]
        judged: list[JudgedGroups] = []
        for size, amount in sorted(set(zip(sizes.tolist(), steps.tolist(), strict=True))):
            if amount:
                mine = np.flatnonzero((sizes == size) & (steps == amount))
                slots = order[mine][chosen[mine]].reshape(-1, amount)
                judged.append(self._judged([wanted[each] for each in mine.tolist()], groups[mine], slots, size))
        return judged

    def _judged(
        self, communicators: list[int], groups: NDArray[np.int64], slots: NDArray[np.intp], size: int
    ) -> JudgedGroups:
        ranks = np.arange(size)
        of_ops = [(place, *of) for place, group in enumerate(groups.tolist()) for of in self._op_begins[group].items()]
        places, ops, begins = np.asarray(of_ops, np.int64).T
        cells = (begins[:, None] + ranks)[:, :, None], slots[places][:, None, :]
        by_op = self._ops["blame_ns"][cells].astype(np.float64)
        total = np.add.reduceat(by_op, np.searchsorted(places, np.arange(len(groups))), axis=0)
        is_kind = self._ops["hits"][cells].any(axis=(1, 2))
        is_kind &= np.bincount(places[is_kind], minlength=len(groups))[places] > 1
        operations = self._steps["operations"][groups[:, None], slots]
        lanes = np.asarray(self._begins, np.int64)[groups][:, None] + ranks
        largest = self._largest["sum_ns"][lanes[:, :, None], slots[:, None, :]]
        largest = largest / np.minimum(np.maximum(operations, 1), LARGEST)[:, None, :]
        all_groups = np.arange(len(groups))
        return JudgedGroups(
            communicators=communicators,
            at_ns=self._steps["at_ns"][groups[:, None], slots],
            operations=operations,
            blames=np.concatenate([total, largest, by_op[is_kind]]),
            group=np.concatenate([all_groups, all_groups, places[is_kind]]),
            op=np.concatenate([np.full(2 * len(groups), ALL_OPS), ops[is_kind]]),
        )

    def _newest(self, groups: NDArray[np.int64], count: int) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """The slots of each group, oldest first, without the newest step, which may still grow; and which of them are
        among the last `count` that count.

        Left out are early ones, and those of which a capture saw but a part: a rank that is late all the step through
        is late in them by less, which would read as a lateness that comes and goes.
        """
        at_ns = self._steps["at_ns"][groups]
        order = np.argsort(at_ns, axis=1, kind="stable")[:, :-1]
        rows = np.arange(len(groups))
        is_used = at_ns[rows[:, None], order] != NO_TIME_NS
        cells = groups[:, None], order
        operations = self._steps["operations"][cells]
        last = np.sort(np.where(is_used, operations, _UNUSED)[:, -count:], axis=1)
        usual = last[rows, is_used[:, -count:].sum(axis=1) // 2] if last.shape[1] else np.zeros(len(rows))
        chosen = is_used & (operations >= _WHOLE * usual[:, None])
        chosen &= chosen[:, ::-1].cumsum(axis=1)[:, ::-1] <= count
        return order, chosen & ~self._steps["is_early"][cells]

    def _group(self, communicator: int, size: int) -> int:
        """The row of a communicator, a new one if need be."""
        group = self._group_of.get(communicator)
        if group is not None and self._sizes[group] != size:
            self.evict_communicators({communicator})
            group = None
        if group is None:
            group = self._group_of[communicator] = len(self._sizes)
            self._sizes.append(size)
            self._begins.append(self._largest.rows)
            self._op_begins.append({})
            self._made = np.append(self._made, 0)
            self._steps.resize(group + 1, self._steps.slots)
            self._largest.resize(self._largest.rows + size, self._steps.slots)
        return group

    def _op_begin(self, group: int, op: int) -> int:
        """The lane of rank 0 of a group for an operation, a new one if need be."""
        begin = self._op_begins[group].get(op)
        if begin is None:
            begin = self._op_begins[group][op] = self._ops.rows
            self._ops.resize(begin + self._sizes[group], self._steps.slots)
        return begin

    def _lanes(self, begin: int, group: int) -> NDArray[np.int64]:
        return np.arange(begin, begin + self._sizes[group])

    def _make_slots(self, slots: int) -> None:
        for grid in (self._steps, self._ops, self._largest):
            grid.resize(grid.rows, slots)

    def _slots(self, groups: Integers, at_ns: Integers, most: int) -> NDArray[np.int64]:
        """The slots of these steps, each there once, the oldest first; -1 for those older than all remembered."""
        if not self._steps.slots:
            self._make_slots(_FIRST_SLOTS)
        same = self._steps["at_ns"][groups] == at_ns[:, None]
        slots: NDArray[np.int64] = same.argmax(axis=1)
        missing = np.flatnonzero(~same[np.arange(len(slots)), slots])
        while len(missing):  # of each group one after the other
            first = first_positions(groups[missing])
            now = missing[first]
            slots[now] = self._new_slots(groups[now], at_ns[now], most)
            missing = np.delete(missing, first)
        slots[self._steps["at_ns"][groups, slots] != at_ns] = -1
        return slots

    def _new_slots(self, groups: Integers, at_ns: Integers, most: int) -> NDArray[np.intp]:
        """Makes a step of each of these groups, each of which is there once, unless it is older than all remembered."""
        times = self._steps["at_ns"][groups]
        slots: NDArray[np.intp] = times.argmin(axis=1)  # unused ones are older than all
        oldest = times[np.arange(len(slots)), slots]
        is_full = oldest != NO_TIME_NS
        if is_full.any() and self._steps.slots < most:
            self._make_slots(min(most, 2 * self._steps.slots))
            return self._new_slots(groups, at_ns, most)
        is_made = oldest <= at_ns
        self._empty(groups[is_made & is_full], slots[is_made & is_full])
        made = groups[is_made], slots[is_made]
        self._steps["at_ns"][made] = at_ns[is_made]
        self._steps["is_early"][made] = self._made[groups[is_made]] < _EARLY
        self._made[groups[is_made]] += 1
        return slots

    def _empty(self, groups: Integers, slots: NDArray[np.intp]) -> None:
        """Forgets one step of each of these groups."""
        if not len(groups):
            return
        own, of_ops = [], []
        for group, slot in zip(groups.tolist(), slots.tolist(), strict=True):
            own.append((self._begins[group], self._sizes[group], slot))
            of_ops += [(begin, self._sizes[group], slot) for begin in self._op_begins[group].values()]
        self._steps.reset(groups, slots)
        for grid, lanes in ((self._largest, own), (self._ops, of_ops)):
            begins, sizes, at = np.asarray(lanes, np.int64).T
            grid.reset(
                np.repeat(begins - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum()), np.repeat(at, sizes)
            )

    def _add_steps(
        self, groups: Integers, slots: NDArray[np.int64], step: NDArray[np.intp], collectives: Columns
    ) -> None:
        """Adds collectives to their steps, of which each is there once."""
        cells, place = groups * self._steps.slots + slots, step
        self._steps["operations"].reshape(-1)[cells] += np.bincount(place)
        accumulate(np.add, self._steps["transfer_ns"].reshape(-1), cells[place], collectives["transfer_ns"])
        accumulate(np.minimum, self._steps["confidence"].reshape(-1), cells[place], collectives["confidence"])

    def _add_blames(
        self, group: NDArray[np.int64], rank: NDArray[np.int64], slot: NDArray[np.int64], collectives: Columns
    ) -> None:
        (groups, ops), place = distinct_together(group, collectives["op"])
        begins = [self._op_begin(*key) for key in zip(groups.tolist(), ops.tolist(), strict=True)]
        cells = (np.asarray(begins, np.int64)[place] + rank) * self._ops.slots + slot
        np.add.at(self._ops["hits"].reshape(-1), cells, np.int32(1))
        accumulate(np.add, self._ops["blame_ns"].reshape(-1), cells, collectives["blame_ns"])

    def _add_largest(
        self,
        group: NDArray[np.int64],
        rank: NDArray[np.int64],
        step: NDArray[np.intp],
        slots: NDArray[np.int64],
        collectives: Columns,
    ) -> None:
        """Merges the largest blames of each rank of each step with those that were the largest so far."""
        key = step * (int(rank.max()) + 1) + rank
        blame_ns = collectives["blame_ns"]
        order = np.lexsort((-blame_ns, key))
        begins = np.flatnonzero(np.diff(key[order], prepend=-1))
        run = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(order)))
        nth = np.arange(len(order)) - begins[run]
        order, run, nth = (each[nth < LARGEST] for each in (order, run, nth))
        firsts = order[nth == 0]
        lanes = np.asarray(self._begins, np.int64)[group[firsts]] + rank[firsts]
        cells = lanes, slots[step[firsts]]
        both, seqs = (np.empty((len(firsts), 2 * LARGEST), np.int64) for _ in range(2))
        both[:, :LARGEST], seqs[:, :LARGEST] = self._largest["blame_ns"][cells], self._largest["coll_seq"][cells]
        both[:, LARGEST:], seqs[:, LARGEST:] = 0, NO_NUMBER
        both[run, LARGEST + nth], seqs[run, LARGEST + nth] = blame_ns[order], collectives["coll_seq"][order]
        largest = np.lexsort((seqs, both), axis=1)[:, : -LARGEST - 1 : -1]
        both = np.take_along_axis(both, largest, axis=1)
        self._largest["blame_ns"][cells], self._largest["sum_ns"][cells] = both, both.sum(axis=1)
        self._largest["coll_seq"][cells] = np.take_along_axis(seqs, largest, axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Some steps of one group, oldest first: step by step, or rank by step."""

    at_ns: NDArray[np.int64]
    transfer_ns: NDArray[np.int64]
    """Time that the operations of a step took once all ranks had come."""
    confidence: NDArray[np.float64]
    blame_ns: NDArray[np.int64]
    """Rank by step."""
    hits: NDArray[np.int64]
    """Rank by step: operations in which it was last."""
    ops: tuple[int, ...]
    """The kinds of its operations."""
    blame_by_op_ns: NDArray[np.int64]
    """Kind by rank by step."""
    hits_by_op: NDArray[np.int32]
    """Kind by rank by step: the sum over ranks is the number of operations."""
    largest_ns: NDArray[np.int64]
    """Rank by step: its largest blames."""
    largest_seq: NDArray[np.int64]
    """Their collectives; NO_NUMBER where there are fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroups:
    """Groups with equally many ranks and steps, and the blames by which these are judged.

    A *view* is one way to look at the blames of a group: over all operations of a step (one view of each group, in
    their order), the usual largest of a step (likewise; places of a step at which a rank was not last count as 0), and
    over each kind of operation, for groups with several.
    """

    communicators: list[int]
    at_ns: NDArray[np.int64]
    """Group by step."""
    operations: NDArray[np.int64]
    """Group by step."""
    blames: Blames
    """View by rank by step."""
    group: NDArray[np.int64]
    """The group of each view."""
    op: NDArray[np.int64]
    """The operation of each view; ALL_OPS of the first ones."""

    def is_largest(self, view: int) -> bool:
        """Whether a view is the one by the largest blames."""
        return len(self.communicators) <= view < 2 * len(self.communicators)


@dataclass(frozen=True, slots=True)
class MemberSteps:
    """Steps of members in which these had sends and receives, and those of some launches."""

    keys: list[tuple[int, int, int]]
    """Communicator, its rank, and when the step began."""
    place: NDArray[np.intp]
    """By launch: which of these it is of."""

    @classmethod
    def of_exchanges(cls, exchanges: Columns, step_ns: int) -> MemberSteps:
        """Of launches of sends and receives (`rows.COLLECTIVE` with a rank)."""
        numbers = exchanges["end_true_ns"] // step_ns
        (communicators, ranks, steps), place = distinct_together(exchanges["communicator"], exchanges["rank"], numbers)
        columns = communicators.tolist(), ranks.tolist(), (steps * step_ns).tolist()
        return cls([*zip(*columns, strict=True)], place)


@dataclass(slots=True)
class ExchangeTimes:
    """Time in sends and receives, by communicator, its rank and step."""

    _by_member: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict[tuple[int, int], "dict[int, int]"])
    _launches: dict[tuple[int, int], Counter[int]] = field(default_factory=dict[tuple[int, int], "Counter[int]"])
    """How many were seen, likewise."""
    _most_launches: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    """By communicator and rank: in any step so far."""

    def ingest_exchanges(self, steps: MemberSteps, times_ns: NDArray[np.int64], keep: int) -> None:
        """Takes how long launches took, or waited; `keep` steps of each member stay."""
        sums = np.zeros(len(steps.keys), np.int64)
        accumulate(np.add, sums, steps.place, times_ns)
        columns = steps.keys, sums.tolist(), np.bincount(steps.place).tolist()
        for (communicator, rank, at_ns), busy_ns, amount in zip(*columns, strict=True):
            member = communicator, rank
            mine, launches = self._by_member.get(member), self._launches.get(member)
            if mine is None or launches is None:
                if len(self._by_member) >= _MOST_MEMBERS:
                    continue
                mine = self._by_member[member] = {}
                launches = self._launches[member] = Counter()
            mine[at_ns] = mine.get(at_ns, 0) + busy_ns
            launches[at_ns] += amount
            self._most_launches[member] = max(self._most_launches[member], launches[at_ns])
            if len(mine) > 2 * keep:
                for old in sorted(mine)[:-keep]:
                    del mine[old], launches[old]

    def times_of(self, communicator: int, rank: int) -> dict[int, int]:
        """By step: ns in sends and receives of this rank; empty if none was seen."""
        return self._by_member.get((communicator, rank), {})

    def whole_steps_of(self, communicator: int, rank: int) -> set[int]:
        """The steps of which more than half of the sends and receives of this rank were seen, by what others have."""
        most = self._most_launches[communicator, rank]
        launches = self._launches.get((communicator, rank), Counter())
        return {at_ns for at_ns, amount in launches.items() if 2 * amount > most}

    def clear(self) -> None:
        """Forgets all: steps have another length from now on."""
        self._by_member.clear()
        self._launches.clear()
        self._most_launches.clear()


def steps_per_window(context: Context) -> int:
    """Steps in WINDOW_NS, at least three."""
    return max(_LEAST_STEPS_PER_WINDOW, round(WINDOW_NS / (context.step_ns or DEFAULT_STEP_NS)))
