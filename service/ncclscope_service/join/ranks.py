"""The same operation across ranks: collectives by their number, Send and Recv by their number per pair.

Collectives of one communicator are numbered alike on all of its ranks (MPI semantics, which NCCL demands), so
the k-th of one rank is the k-th of every other while nothing of the log was lost. Sends and receives are
numbered per (communicator, sender, receiver), for the same reason.

The kernels of joined collectives become matrices: one row per collective, one column per rank. Collectives of all
communicators of a size are in one matrix.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct_values
from ncclscope_service.columns.table import Ids, Table
from ncclscope_service.number.across_ranks import (
    OFFSET,
    Matrix,
    apart_by_steps,
    drift_ns,
    first_violation,
    unknown_offsets,
)
from ncclscope_service.number.calls import Calls
from ncclscope_service.number.healing import heal, window
from ncclscope_service.store.rows import BY_LAUNCH, SAME_HOST_SIGMA_NS, NumberState
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_UNREPORTED: Final = -2
_FIRST_CAPACITY: Final = 8
_FEW: Final = 1024
"""Collectives that wait: what a rank enqueues ahead of one that stands still."""
SHOWN_AT_END: Final = 64
"""Collectives that were given: where ranks that stand still called different ones is among the last."""
PAIR_SIDE: Final = np.dtype(
    [
        ("communicator", "<i4"),
        ("sender", "<i4"),
        ("receiver", "<i4"),
        ("pair_seq", "<i8"),
        ("is_receiver", "?"),
        ("operation", "<i8"),
        ("reported_at_ns", "<i8"),
    ]
)
"""One Send or Recv that waits for its other side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedCollectives:
    """Collectives of communicators of one size, each seen on all ranks that could be waited for."""

    communicator: NDArray[np.int64]
    """K, by index; those of a communicator follow each other."""
    coll_seq: NDArray[np.int64]
    operations: Ids
    """K x R: operation row of each rank, by communicator rank; NO_NUMBER if a rank has no kernel for it."""

    def take(self, chosen: NDArray[np.intp]) -> JoinedCollectives:
        """These collectives only."""
        return JoinedCollectives(
            communicator=self.communicator[chosen],
            coll_seq=self.coll_seq[chosen],
            operations=self.operations[chosen],
        )


@dataclass(frozen=True, slots=True)
class NewestCollectives:
    """The last collectives of a communicator."""

    begin: int
    """Number of the first of them."""
    operations: Ids
    """K x R; negative where a rank called nothing, or its line was lost."""
    enqueued: NDArray[np.int64]
    """By rank: how many collectives it has called, lost lines included."""
    are_counted: bool = False
    """Whether programs count the lost lines of all ranks."""
    is_by_lines: bool = False
    """Whether nothing else tells: of the last lines a program may have taken one for that of another place."""


@dataclass(slots=True)
class _Buffer:
    """The collectives of one communicator that are not complete yet; row 0 is number `base`."""

    size: int
    base: int = 0
    operations: Ids = field(init=False)
    """By rank: its operation; _UNREPORTED."""
    has_kernel: NDArray[np.bool_] = field(init=False)
    reports: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    reported_at_ns: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    used: int = 0
    """How many rows from `base` on may hold something."""
    shift: NDArray[np.int64] = field(init=False)
    """By rank: lines that it lost so far, as far as other ranks show it."""
    offsets: Columns = field(init=False)
    """By rank: across_ranks.OFFSET at the last collective."""
    recorded: NDArray[np.int64] = field(init=False)
    """By rank: number behind that of its last kernel that was given."""
    newest: Ids = field(init=False)
    """K x R: the operations of the last collectives that were given, up to `base`; negative where a rank has none."""
    enqueued: NDArray[np.int64] = field(init=False)
    """By rank: number behind that of its last operation that was given."""
    is_counted: NDArray[np.bool_] = field(init=False)
    """By rank: whether its numbers count the lines that it lost."""

    def __post_init__(self) -> None:
        self.newest = np.empty((0, self.size), np.int64)
        self.enqueued = np.zeros(self.size, np.int64)
        self.is_counted = np.zeros(self.size, np.bool_)
        self.operations = np.empty((0, self.size), np.int64)
        self.has_kernel = np.empty((0, self.size), np.bool_)
        self.shift = np.zeros(self.size, np.int64)
        self.recorded = np.full(self.size, NO_NUMBER, np.int64)
        self.offsets = unknown_offsets(self.size)

    def reserve(self, rows: int) -> None:
        if rows <= len(self.reports):
            return
        capacity = max(_FIRST_CAPACITY, 2 * rows)
        operations = np.full((capacity, self.size), _UNREPORTED, np.int64)
        has_kernel = np.zeros((capacity, self.size), np.bool_)
        has_kernel[: self.used] = self.has_kernel[: self.used]
        reports = np.zeros(capacity, np.int32)
        reported_at_ns = np.full(capacity, NO_TIME_NS, np.int64)
        operations[: self.used] = self.operations[: self.used]
        reports[: self.used] = self.reports[: self.used]
        reported_at_ns[: self.used] = self.reported_at_ns[: self.used]
        self.operations, self.reports, self.reported_at_ns = operations, reports, reported_at_ns
        self.has_kernel = has_kernel

    def ranks_in(self, rows: int) -> NDArray[np.intp]:
        """Ranks that have an operation in the first rows."""
        return np.flatnonzero((self.operations[:rows] != _UNREPORTED).any(axis=0))

    def drop(self, rows: int) -> None:
        """Forgets the first rows."""
        left = self.used - rows
        for array, empty in (
            (self.operations, _UNREPORTED),
            (self.has_kernel, False),
            (self.reports, 0),
            (self.reported_at_ns, NO_TIME_NS),
        ):
            array[:left] = array[rows : self.used].copy()
            array[left : self.used] = empty
        self.base += rows
        self.used = left

    def take(self, places: Matrix) -> tuple[Ids, NDArray[np.bool_]]:
        """Operations in these rows, by rank, and which of them have a kernel; NO_NUMBER where no place is given."""
        ranks = np.arange(self.size)
        operations = np.where(places >= 0, self.operations[places, ranks], NO_NUMBER)
        return operations, (places >= 0) & self.has_kernel[places, ranks]

    def left_out(self, places: Matrix) -> Ids:
        """Operations that are neither in these rows, by rank and ascending, nor behind the last of them."""
        is_left_out = np.arange(self.used)[:, None] <= places.max(axis=0, initial=NO_NUMBER)
        rows, ranks = np.nonzero(places >= 0)
        is_left_out[places[rows, ranks], ranks] = False
        left: Ids = self.operations[: self.used][is_left_out]
        return left[left >= 0]

    def note_kernels(self, has_kernel: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Takes which operations (K x R) up to `base` have a kernel; gives ranks recorded there or not long before."""
        numbers = self.base - len(has_kernel) + 1 + np.arange(len(has_kernel))
        behind = np.where(has_kernel, numbers[:, None], NO_NUMBER).max(axis=0, initial=NO_NUMBER)
        self.recorded = np.maximum(self.recorded, behind)
        is_recorded: NDArray[np.bool_] = (self.recorded > 0) & (self.base - self.recorded < _FEW + len(has_kernel))
        return is_recorded

    def remember(self, operations: Ids) -> None:
        """Keeps the last of these operations (K x R), which were given: those before `base`."""
        numbers = self.base - len(operations) + np.arange(len(operations))
        behind = np.where(operations >= 0, numbers[:, None] + 1, 0).max(axis=0, initial=0)
        self.enqueued = np.maximum(self.enqueued, behind)
        self.newest = np.concatenate([self.newest, operations[-SHOWN_AT_END:]])[-SHOWN_AT_END:]

    def move(self, places: Matrix) -> None:
        """Forgets the operations in these rows, by rank and from the first one on; those behind them move up."""
        taken = places.max(axis=0, initial=NO_NUMBER) + 1
        last = np.where(places >= 0, np.arange(len(places))[:, None], NO_NUMBER).max(axis=0, initial=NO_NUMBER) + 1
        is_left = [(self.operations[begin : self.used, rank] != _UNREPORTED).any() for rank, begin in enumerate(taken)]
        # Behind the last call of a rank nothing tells of losses: the rest may still come.
        self.shift += np.where(is_left, len(places), last) - taken
        self._rearrange(taken, np.zeros(self.size, np.int64))
        self.base += len(places)

    def delay(self, rows: NDArray[np.int64]) -> None:
        """Gives all that waits of each rank numbers that are so much higher."""
        self.shift += rows
        self._rearrange(np.zeros(self.size, np.int64), rows)

    def renumber(self, rank: int, numbers: NDArray[np.int64], until: int) -> None:
        """Gives the operations of a rank these numbers, and it has no others before `until`; those before `base` are
        late.
        """
        column, has_kernel = self.operations[: self.used, rank].copy(), self.has_kernel[: self.used, rank].copy()
        at = np.flatnonzero(column >= 0)
        self.reports[: self.used] -= column != _UNREPORTED
        self.operations[: self.used, rank], self.has_kernel[: self.used, rank] = _UNREPORTED, False
        self.shift[rank] = 0
        in_time = numbers >= self.base
        at, rows = at[in_time], numbers[in_time] - self.base
        times = self.reported_at_ns[at]
        end = max(until - self.base, int(rows.max(initial=NO_NUMBER)) + 1)
        if end <= 0:
            return
        self.reserve(end)
        self.used = max(self.used, end)
        self.operations[:end, rank] = NO_NUMBER
        self.operations[rows, rank], self.has_kernel[rows, rank] = column[at], has_kernel[at]
        self.reports[:end] += 1
        unseen = self.reported_at_ns[rows] == NO_TIME_NS
        self.reported_at_ns[rows[unseen]] = times[unseen]
        unseen = self.reported_at_ns[:end] == NO_TIME_NS
        self.reported_at_ns[:end][unseen] = self.reported_at_ns[:end].max(initial=0)

    def _rearrange(self, begins: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Moves what is in the rows of each rank from these on to those; what is before them is forgotten."""
        used = max(0, int((self.used - begins + rows).max()))
        moved = _Buffer(self.size)
        moved.reserve(used)
        reported_at_ns = np.full(used, np.iinfo(np.int64).max)
        for rank, (begin, row) in enumerate(zip(begins.tolist(), rows.tolist(), strict=True)):
            column = self.operations[begin : self.used, rank]
            there = slice(row, row + len(column))
            moved.operations[there, rank] = column
            moved.has_kernel[there, rank] = self.has_kernel[begin : self.used, rank]
            times = np.where(column == _UNREPORTED, np.iinfo(np.int64).max, self.reported_at_ns[begin : self.used])
            reported_at_ns[there] = np.minimum(reported_at_ns[there], times)
        moved.reports[:used] = (moved.operations[:used] != _UNREPORTED).sum(axis=1)
        reported = np.flatnonzero(moved.reports[:used])
        used = int(reported[-1]) + 1 if len(reported) else 0
        moved.reported_at_ns[:used] = np.where(moved.reports[:used] > 0, reported_at_ns[:used], NO_TIME_NS)
        self.operations, self.has_kernel, self.reports = moved.operations, moved.has_kernel, moved.reports
        self.reported_at_ns, self.used = moved.reported_at_ns, used


class CollectiveJoin:
    """Gathers the ranks of each collective; memory is bounded by how far ranks are apart, and by `patience_ns`."""

    def __init__(self, *, settle_ns: int, patience_ns: int, calls: Calls | None = None) -> None:
        """`settle_ns`: how long ranks that never spoke are waited for; `patience_ns`: how long any rank is; `calls`: by
        which numbers are checked, and healed where lines were lost.
        """
        self._settle_ns = settle_ns
        self._calls = calls
        self._renumbered: list[tuple[Ids, NDArray[np.int64]]] = []
        self._uncertain: list[Ids] = []
        self.healed: Counter[tuple[int, str]] = Counter()
        """Lost lines by communicator and what showed them, for whoever counts and clears them."""
        self.patience_ns = patience_ns
        """It may be changed at any time."""
        self._buffers: dict[int, _Buffer] = {}
        self.has_more = False
        """Whether the last call of `take_ready` left some."""
        self.is_healing = False
        """Whether it left some whose numbers slipped, to see what follows them."""
        self._next = 0
        """Place of the communicator that comes first the next time."""
        self.late = 0
        """Operations whose collective had been given already when they were reported."""

    def leave(self, communicators: Iterable[int]) -> None:
        """No rank of these communicators will call anything: those that wait are late."""
        for communicator in communicators:
            self._buffers.pop(communicator, None)

    def waiting(self, communicator: int, rank: int) -> Ids:
        """Operations of a rank that wait for others, in order."""
        buffer = self._buffers.get(communicator)
        column = np.empty(0, np.int64) if buffer is None else buffer.operations[: buffer.used, rank]
        waiting: Ids = column[column >= 0]
        return waiting

    def trust_numbers(self, communicator: int, rank: int, numbers: NDArray[np.int64], until: int) -> None:
        """Gives what waits of a rank these numbers, which count all lines that were lost; nothing else comes before the
        number `until`.
        """
        buffer = self._buffers.get(communicator)
        if buffer is not None:
            self._renumbered.append((self.waiting(communicator, rank), numbers))
            buffer.renumber(rank, numbers, until)
            buffer.is_counted[rank] = True

    def report(
        self,
        communicator: int,
        size: int,
        rank: int,
        *,
        coll_seq: NDArray[np.int64],
        operations: Ids,
        has_kernel: NDArray[np.bool_],
        now_ns: int,
    ) -> None:
        """One rank's collectives that are decided: with a kernel, or known to have none."""
        buffer = self._buffers.get(communicator)
        if buffer is None:
            buffer = self._buffers[communicator] = _Buffer(size)
        if buffer.shift[rank]:
            coll_seq = coll_seq + buffer.shift[rank]
        in_time = coll_seq >= buffer.base
        if buffer.shift[rank] and not in_time.all():
            self._renumbered.append((operations[~in_time], coll_seq[~in_time]))
        self.late += int(np.count_nonzero(~in_time))
        if not in_time.all():
            coll_seq, operations, has_kernel = coll_seq[in_time], operations[in_time], has_kernel[in_time]
        if not len(coll_seq):
            return
        at = coll_seq - buffer.base
        rows = int(at.max()) + 1
        buffer.reserve(rows)
        buffer.used = max(buffer.used, rows)
        first = buffer.operations[at, rank] == _UNREPORTED
        buffer.operations[at, rank] = operations
        buffer.has_kernel[at, rank] = has_kernel
        buffer.reports[at[first]] += 1
        unseen = at[buffer.reported_at_ns[at] == NO_TIME_NS]
        buffer.reported_at_ns[unseen] = now_ns

    def take_ready(
        self, *, members_seen: dict[int, int], now_ns: int, final: bool = False, most: int | None = None
    ) -> list[JoinedCollectives]:
        """The collectives that are complete, or that have been waited for long enough, of a communicator in order.

        A collective is given once, and never before the ones of its communicator with smaller numbers. As many as have
        `most` operations; `has_more` tells whether some are left, which come first the next time.
        """
        ready: defaultdict[int, list[tuple[int, NDArray[np.int64], Ids]]] = defaultdict(list)
        self.has_more = self.is_healing = False
        begin, self._next = self._next, 0
        for place, communicator in _from(begin, list(self._buffers)):
            buffer = self._buffers[communicator]
            if not buffer.used:
                continue
            rows = self._ready_rows(buffer, members_seen.get(communicator, 0), now_ns, final)
            if not rows:
                continue
            if most is not None and rows * buffer.size > most:
                if not self.has_more:
                    self.has_more, self._next = True, place
                rows = max(most // buffer.size, 0 if ready else 1)
                if not rows:
                    continue
            most = None if most is None else most - rows * buffer.size
            base = buffer.base
            operations, has_kernel = self._take_rows(communicator, buffer, rows, now_ns, final)
            self.is_healing |= len(operations) < rows
            operations[(operations == _UNREPORTED) | ~has_kernel] = NO_NUMBER
            seen = (operations != NO_NUMBER).any(axis=1)
            if seen.any():
                numbers = base + np.flatnonzero(seen)
                ready[buffer.size].append((communicator, numbers.astype(np.int64), operations[seen]))
        return [_joined(parts) for parts in ready.values()]

    def newest(self, communicator: int) -> NewestCollectives | None:
        """The last collectives of a communicator if nothing more comes; None if too many wait for other ranks."""
        buffer = self._buffers.get(communicator)
        if buffer is None or buffer.used > _FEW or self._calls is None:
            return None
        if buffer.used:
            buffer = deepcopy(buffer)  # more may come all the same
            places, _ = _healed(self._calls, communicator, buffer, 0, buffer.used, is_forced=True, final=True)
            operations, _ = buffer.take(places)
            buffer.move(places)
            buffer.remember(operations)
        return NewestCollectives(
            begin=buffer.base - len(buffer.newest),
            operations=buffer.newest,
            enqueued=buffer.enqueued,
        )

    def drain_renumbered(self) -> tuple[Ids, NDArray[np.int64]]:
        """Operations whose number proved to be another than the count of their lines, and that number."""
        operations = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in self._renumbered)])
        numbers = np.concatenate([np.empty(0, np.int64), *(numbers for _, numbers in self._renumbered)])
        self._renumbered = []
        return operations, numbers

    def drain_uncertain(self) -> Ids:
        """Operations of which other ranks show that their number is another one, and not which."""
        operations = np.concatenate([np.empty(0, np.int64), *self._uncertain])
        self._uncertain = []
        return operations

    def _take_rows(
        self, communicator: int, buffer: _Buffer, rows: int, now_ns: int, final: bool
    ) -> tuple[Ids, NDArray[np.bool_]]:
        """Takes these first rows, and more or fewer where numbers slipped: K x R operations, and whether each has a
        kernel.
        """
        base = buffer.base
        if self._calls is not None and self._calls.have_begun_amid(communicator):
            _bring_together(self._calls, communicator, buffer, rows)
            rows = buffer.used if final else rows
        count = rows if self._calls is None else self._count_agreeing(self._calls, communicator, buffer, rows)
        if self._calls is None or count == rows:
            operations, has_kernel = buffer.operations[:rows].copy(), buffer.has_kernel[:rows].copy()
            buffer.drop(rows)
        else:
            waited_ns = now_ns - int(buffer.reported_at_ns[count])
            is_forced = final or waited_ns > self._settle_ns
            places, lost = _healed(self._calls, communicator, buffer, count, rows, is_forced=is_forced, final=final)
            for reason, amount in lost.items():
                self.healed[communicator, reason] += amount
            operations, has_kernel = buffer.take(places)
            self._uncertain.append(buffer.left_out(places))
            buffer.move(places)
        is_recorded = buffer.note_kernels(has_kernel)
        if self._calls is not None and (count < rows or self._calls.have_losses(communicator)):
            # A rank that was recorded and whose kernel is not known may have been the last to arrive.
            has_kernel[~has_kernel[:, is_recorded].all(axis=1)] = False
        if self._calls is not None:
            # A rank whose kernel is not known may have been the last to arrive.
            has_kernel[self._calls.have_unknown_kernels(np.where(has_kernel, NO_NUMBER, operations)).any(axis=1)] = (
                False
            )
        buffer.remember(operations)
        if buffer.shift.any():
            known = operations >= 0
            self._renumbered.append((operations[known], (base + np.nonzero(known)[0]).astype(np.int64)))
        return operations, has_kernel

    def _count_agreeing(self, calls: Calls, communicator: int, buffer: _Buffer, rows: int) -> int:
        """How many of these rows agree, before the first that does not."""
        ranks = buffer.ranks_in(rows)
        if len(ranks) < 2:
            return rows
        matrix, hosts = _compared(calls, communicator, buffer, rows, ranks)
        count, offsets = first_violation(matrix, buffer.offsets[ranks], hosts)
        buffer.offsets[ranks] = offsets
        return count

    def _ready_rows(self, buffer: _Buffer, members_seen: int, now_ns: int, final: bool) -> int:
        if final:
            return buffer.used
        reports = buffer.reports[: buffer.used]
        waited_ns = np.where(
            buffer.reported_at_ns[: buffer.used] == NO_TIME_NS, 0, now_ns - buffer.reported_at_ns[: buffer.used]
        )
        complete = (
            (reports >= buffer.size)
            | ((reports >= members_seen) & (waited_ns > self._settle_ns))
            | ((reports > 0) & (waited_ns > self.patience_ns))
        )
        # A number that no rank reported is most likely decided later than those behind it, which wait a while for it.
        since_ns = np.where(reports > 0, buffer.reported_at_ns[: buffer.used], np.iinfo(np.int64).max)
        behind_ns = np.minimum.accumulate(since_ns[::-1])[::-1]
        is_awaited = (reports == 0) & (now_ns - behind_ns <= self._settle_ns)
        later_complete = np.flatnonzero(complete)
        if not len(later_complete):
            return 0
        blocked = np.flatnonzero(~complete & ((reports > 0) | is_awaited))
        return int(min(blocked[0], later_complete[-1] + 1)) if len(blocked) else int(later_complete[-1]) + 1


def _joined(parts: list[tuple[int, NDArray[np.int64], Ids]]) -> JoinedCollectives:
    """Communicators of one size, with numbers and operations of their collectives."""
    communicators, numbers, operations = zip(*parts, strict=True)
    return JoinedCollectives(
        communicator=np.repeat(communicators, list(map(len, numbers))),
        coll_seq=np.concatenate(numbers),
        operations=np.concatenate(operations),
    )


def _compared(
    calls: Calls, communicator: int, buffer: _Buffer, rows: int, ranks: NDArray[np.intp]
) -> tuple[Columns, NDArray[np.int32]]:
    """The calls (K x R CALL) of these ranks in the first rows, and their hosts."""
    ids = np.ascontiguousarray(buffer.operations[:rows, ranks])
    return calls.of(ids.ravel()).reshape(ids.shape), calls.hosts(communicator, buffer.size)[ranks]


def _bring_together(calls: Calls, communicator: int, buffer: _Buffer, rows: int) -> None:
    """Gives ranks whose captures were laid beside different training steps common numbers, before any is joined."""
    ranks = buffer.ranks_in(rows)
    if len(ranks) < 2 or not np.isnan(buffer.offsets["ns"][ranks]).all():
        return
    buffer.offsets[ranks], later = apart_by_steps(*_compared(calls, communicator, buffer, rows, ranks))
    if later.any():
        delays = np.zeros(buffer.size, np.int64)
        delays[ranks] = later.max() - later
        buffer.delay(delays)


def _healed(
    calls: Calls, communicator: int, buffer: _Buffer, agreeing: int, rows: int, *, is_forced: bool, final: bool
) -> tuple[Matrix, Counter[str]]:
    """Rows of a buffer in which each rank's call of a collective is (K x R), of which the first ones agree; and lost
    lines by what showed them.
    """
    end = buffer.used if final else min(buffer.used, rows + 2 * window(buffer.size))
    is_end = is_forced and end == buffer.used
    lines = _lines(buffer, agreeing, end)
    own = {rank: calls.of(buffer.operations[at, rank]) for rank, at in lines.items()}
    ranks = np.asarray(list(own), np.int64)
    hosts = calls.hosts(communicator, buffer.size)[ranks]
    healed = heal(
        list(own.values()),
        buffer.offsets[ranks],
        hosts,
        is_forced=is_forced,
        is_end=is_end,
    )
    buffer.offsets[ranks] = healed.offsets
    places = np.full((agreeing + len(healed.places), buffer.size), NO_NUMBER, np.int64)
    places[:agreeing] = np.arange(agreeing)[:, None]
    for nth, at in enumerate(lines.values()):
        found = healed.places[:, nth]
        places[agreeing:, ranks[nth]] = np.where(found >= 0, at[found], NO_NUMBER)
    return _as_counted(calls, communicator, buffer, places), healed.lost


def _as_counted(calls: Calls, communicator: int, buffer: _Buffer, places: Matrix) -> Matrix:
    """The same by the numbers of ranks whose lost lines are counted, if these ranks agree: what of other ranks was
    found to be of no number of theirs is left out.
    """
    counted = np.flatnonzero(buffer.is_counted & (places >= 0).any(axis=0))
    rows = int(places[:, counted].max(initial=NO_NUMBER)) + 1
    if not rows or len(counted) == buffer.size:
        return places
    matrix, hosts = _compared(calls, communicator, buffer, rows, counted)
    if len(counted) > 1 and first_violation(matrix, unknown_offsets(len(counted)), hosts)[0] < rows:
        return places
    numbers = np.where(places[:, counted] >= 0, places[:, counted], NO_NUMBER).max(axis=1)
    own = np.full((rows, buffer.size), NO_NUMBER, np.int64)
    own[:, counted] = np.arange(rows)[:, None]
    others = np.flatnonzero(~buffer.is_counted)
    known = np.flatnonzero(numbers >= 0)
    own[numbers[known][:, None], others] = places[known][:, others]
    return own


def _lines(buffer: _Buffer, begin: int, end: int) -> dict[int, Places]:
    """Rows among these of the calls that have a line or a kernel, by rank and without ranks that have none."""
    part = buffer.operations[begin:end]
    found = {rank: begin + np.flatnonzero(part[:, rank] >= 0) for rank in range(buffer.size)}
    return {rank: at for rank, at in found.items() if len(at)}


def _from(begin: int, communicators: list[int]) -> list[tuple[int, int]]:
    """(place, communicator) of all, those before `begin` at last."""
    placed = list(enumerate(communicators))
    return placed[begin:] + placed[:begin]


@dataclass(frozen=True, slots=True)
class PairCalls:
    """Sends and Recvs."""

    calls: Columns
    """number.across_ranks.CALL; those of one message have the same symbol."""
    hosts: NDArray[np.int32]
    """Where each ran."""

    def take(self, chosen: Places) -> PairCalls:
        """These only, in this order."""
        return PairCalls(self.calls[chosen], self.hosts[chosen])


@dataclass(frozen=True, slots=True)
class _PairTimes:
    """Kernels of Sends (row 0 of both matrices) and of Recvs (row 1), each on its host's clock."""

    starts_ns: NDArray[np.float64]
    """2 x K; NaN if not known, or cut."""
    ends_ns: NDArray[np.float64]
    is_one_host: NDArray[np.bool_]
    """K: both ran on one host, and so on one clock."""

    @classmethod
    def of(cls, calls: PairCalls) -> _PairTimes:
        """Those of these calls: Sends, then the Recv of each."""
        both = calls.calls.reshape(2, -1)
        hosts = calls.hosts.reshape(2, -1)
        is_known = both["end_ns"] != NO_TIME_NS
        starts, ends = (np.where(is_known, both[name].astype(np.float64), np.nan) for name in ("start_ns", "end_ns"))
        return cls(starts, ends, hosts[0] == hosts[1])

    def take(self, chosen: Places | NDArray[np.bool_]) -> _PairTimes:
        """These pairs only."""
        return _PairTimes(self.starts_ns[:, chosen], self.ends_ns[:, chosen], self.is_one_host[chosen])

    def offsets(self) -> Columns:
        """K: across_ranks.OFFSET of the Recv's clock against the Send's: how much later the Recv ended."""
        offsets = np.empty(len(self.is_one_host), OFFSET)
        offsets["ns"] = np.where(self.is_one_host, 0.0, self.ends_ns[1] - self.ends_ns[0])
        offsets["at_ns"] = self.ends_ns[1]
        return offsets

    def are_together(self, offsets: Columns) -> NDArray[np.bool_]:
        """K: both ran for most of the shorter one, or ended together, on clocks with these `offsets`, but for what they
        may have drifted since; true where that is not known.
        """
        shift = np.stack([np.zeros(len(offsets)), np.where(self.is_one_host, 0.0, offsets["ns"])])
        drift = np.where(self.is_one_host, 0.0, drift_ns(self.ends_ns[1] - offsets["at_ns"]))
        starts, ends = self.starts_ns - shift, self.ends_ns - shift
        both_ran = ends.min(axis=0) - starts.max(axis=0) + drift
        apart: NDArray[np.bool_] = both_ran < _TOGETHER * (ends - starts).min(axis=0)
        apart &= np.abs(ends[1] - ends[0]) - drift > _PAIR_SLACK_NS
        return ~apart


Places: TypeAlias = NDArray[np.intp]
CallsOf: TypeAlias = Callable[[Ids], PairCalls]
_PAIR_SLACK_NS: Final = 20_000.0
_TOGETHER: Final = 0.5
"""A message is sent and received at once, so its kernels run together but for what they wait for each other."""
_WAY: Final = ["communicator", "sender", "receiver"]
_ONE_SIDE: Final = [*_WAY, "is_receiver"]


class PairJoin:
    """Finds the Recv of each Send: by their numbers, and by their times where lines of one side were lost."""

    def __init__(self, *, settle_ns: int, patience_ns: int) -> None:
        """`settle_ns`: how long later ones are waited for that show which side lost a line."""
        self._settle_ns = settle_ns
        self.patience_ns = patience_ns
        """How long a side is waited for; it may be changed at any time."""
        self._waiting: Columns = np.empty(0, PAIR_SIDE)
        self._lost: dict[tuple[int, ...], list[int]] = {}
        """By communicator, sender, receiver and side: counts of lines, each once for each lost one in front of it."""
        self._offsets: dict[tuple[int, ...], tuple[float, float]] = {}
        """By communicator, sender and receiver: across_ranks.OFFSET at the last pair."""
        self._renumbered: list[tuple[Ids, NDArray[np.int64]]] = []
        self._alone: list[Columns] = []
        self.healed: Counter[int] = Counter()
        """Lost lines by communicator, for whoever counts and clears them."""

    def report(self, sides: Columns) -> None:
        """Sends and receives (PAIR_SIDE) that have a kernel."""
        if self._lost:
            counts = zip(sides[_ONE_SIDE].tolist(), sides["pair_seq"].tolist(), strict=True)
            shift = np.asarray([bisect_right(self._lost.get(key, ()), count) for key, count in counts], np.int64)
            sides["pair_seq"] += shift
            self._renumber(sides[shift > 0])
        self._waiting = row_ops.concat([self._waiting, sides])

    def take_ready(self, calls_of: CallsOf, *, now_ns: int, final: bool = False) -> tuple[Ids, Ids]:
        """(sends, receives): operation rows of the pairs that are complete.

        Sides that waited too long are dropped, and so are those that are of no pair where lines were lost.
        """
        if not len(self._waiting):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        ordered, sends = _pairs_by_number(self._waiting)
        times = _PairTimes.of(calls_of(ordered["operation"][np.concatenate([sends, sends + 1])]))
        fits = self._fit(ordered[_WAY][sends], times)
        way_of = np.cumsum(_begins(ordered[_WAY])) - 1
        slipped = distinct_values(way_of[sends[~fits]])
        is_good = ~np.isin(way_of[sends], slipped)
        self._remember_clocks(ordered[sends[is_good]], times.take(is_good))
        given, is_left = [np.stack([sends[is_good], sends[is_good] + 1])], np.ones(len(ordered), bool)
        for way in slipped:
            at = np.flatnonzero(way_of == way)
            unfit = int(sends[(way_of[sends] == way) & ~fits][0])
            pairs, settled = self._heal(ordered, at, unfit - int(at[0]), calls_of, now_ns, final=final)
            given.append(at[pairs])
            is_left[at[settled]] = False
        pairs = np.concatenate(given, axis=1)
        is_left &= (now_ns - ordered["reported_at_ns"] <= self.patience_ns) & (not final)
        is_alone = ~is_left
        is_left[pairs] = is_alone[pairs] = False
        self._alone.append(row_ops.filter_rows(ordered, is_alone))
        self._waiting = row_ops.filter_rows(ordered, is_left)
        return ordered["operation"][pairs[0]], ordered["operation"][pairs[1]]

    def drain_alone(self) -> Columns:
        """Sides (PAIR_SIDE) that were dropped, since they are of no pair."""
        alone, self._alone = row_ops.concat([np.empty(0, PAIR_SIDE), *self._alone]), []
        return alone

    def drain_renumbered(self) -> tuple[Ids, NDArray[np.int64]]:
        """Operations whose number proved to be another than the count of their lines, and that number."""
        operations = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in self._renumbered)])
        numbers = np.concatenate([np.empty(0, np.int64), *(numbers for _, numbers in self._renumbered)])
        self._renumbered = []
        return operations, numbers

    def _renumber(self, sides: Columns) -> None:
        self._renumbered.append((sides["operation"].copy(), sides["pair_seq"].copy()))

    def _fit(self, ways: Columns, times: _PairTimes) -> NDArray[np.bool_]:
        """Which pairs run together, on clocks as the pair before had them."""
        own = times.offsets()
        before = np.roll(own, 1)
        for first in np.flatnonzero(_begins(ways)).tolist():
            before[first] = self._offsets.get(ways[first].item(), own[first].item())
        return times.are_together(before)

    def _remember_clocks(self, sends: Columns, times: _PairTimes) -> None:
        own = times.offsets()
        known = ~np.isnan(own["ns"])
        self._offsets.update(zip(sends[_WAY][known].tolist(), own[known].tolist(), strict=True))

    def _heal(
        self, ordered: Columns, at: Places, unfit: int, calls_of: CallsOf, now_ns: int, *, final: bool
    ) -> tuple[NDArray[np.intp], Places]:
        """Pairs (2 x K) of one way (rows `at`, in order), of which that at `unfit` is the first that cannot be one; and
        what of it is settled: places in `at`. Numbers move on where lines were lost.
        """
        sides, of = ordered[at], calls_of(ordered["operation"][at])
        known = self._offsets.get(sides[_WAY][0].item())
        agreeing = np.flatnonzero(_are_pairs(sides)[:unfit])
        if of.hosts[unfit] == of.hosts[unfit + 1]:
            known = 0.0, np.nan
        elif known is None:  # nothing tells that even the first of them is one
            agreeing = agreeing[:0]
        elif len(agreeing):
            last = agreeing[-1:]
            pair = np.concatenate([last, last + 1])
            known = _PairTimes.of(of.take(pair)).offsets()[0].item()
        begin = unfit if known is not None else 0
        places = tuple(begin + np.flatnonzero(sides["is_receiver"][begin:] == side) for side in (False, True))
        waited_ns = now_ns - int(sides["reported_at_ns"][unfit : unfit + 2].max())
        is_forced = final or waited_ns > self._settle_ns
        healed = heal(
            [of.calls[side] for side in places],
            np.array([(0.0, np.nan), known or (np.nan, np.nan)], OFFSET),
            of.hosts[unfit : unfit + 2],
            is_forced=is_forced,
            is_end=is_forced,
        ).places
        healed = _fitting(healed, places, of, known)
        for side, numbers in zip(places, _numbers([sides["pair_seq"][side] for side in places], healed), strict=True):
            self._move(ordered, at[side], numbers)
        pairs = _pairs_of(healed, places)
        pairs = np.concatenate([np.stack([agreeing, agreeing + 1]), pairs], axis=1)
        if pairs.size:
            last = pairs[:, -1]
            self._remember_clocks(sides[last[:1]], _PairTimes.of(of.take(last)))
        placed = [side[: int(healed[:, nth].max(initial=NO_NUMBER)) + 1] for nth, side in enumerate(places)]
        return pairs, np.concatenate(placed)

    def _move(self, ordered: Columns, side: Places, numbers: NDArray[np.int64]) -> None:
        """Gives one side of a way these numbers, and counts the lost lines that they show."""
        moved = numbers - ordered["pair_seq"][side]
        places = np.flatnonzero(np.diff(moved, prepend=0))
        if not len(places):
            return
        key: tuple[int, ...] = ordered[_ONE_SIDE][side[:1]].tolist()[0]
        lost = self._lost.setdefault(key, [])
        before = len(lost)
        for place in places.tolist():
            amount = int(moved[place] - (moved[place - 1] if place else 0))
            lost += [int(ordered["pair_seq"][side[place]]) - before] * amount
        self.healed[key[0]] += int(moved[-1])
        ordered["pair_seq"][side] = numbers
        self._renumber(ordered[side[moved > 0]])


def _fit_beside(times: _PairTimes, known: tuple[float, float] | None) -> NDArray[np.bool_]:
    """Which of these pairs of one way run together, on clocks as the pair before or behind had them.

    `known`: across_ranks.OFFSET before the first of them.
    """
    own = times.offsets()
    if not len(own):
        return np.zeros(0, np.bool_)
    before, behind = np.roll(own, 1), np.roll(own, -1)
    before[0] = own[0] if known is None else known
    behind[-1] = own[-1]
    fits_behind = times.are_together(behind)
    fits_behind[-1] = known is None and len(own) == 1
    return times.are_together(before) | fits_behind


def _fitting(healed: Matrix, places: tuple[Places, ...], of: PairCalls, known: tuple[float, float] | None) -> Matrix:
    """The same rows (K x 2: which of `places` of each side), in which those of both sides run together.

    Where they do not, a line of each side was lost, and they are two messages. Behind a lost line a side may have gone
    on with the next message of a burst: then it is of the row beside it, which the alignment left to the other side.
    """
    found = np.flatnonzero((healed >= 0).all(axis=1))
    times = _PairTimes.of(of.take(_pairs_of(healed, places).ravel()))
    fits = _fit_beside(times, known)
    if fits.all():
        return healed
    later = times.ends_ns[1] - times.ends_ns[0]
    clocks = float(np.median(later[fits])) if fits.any() else np.nan
    clocks = 0.0 if times.is_one_host.all() else clocks
    healed = _split(healed, found[~fits], ~(later > clocks)[~fits])
    alone = healed < 0
    crossing = np.flatnonzero((alone[:-1] == ~alone[1:]).all(axis=1) & alone[:-1].any(axis=1))
    if not len(crossing) or np.isnan(clocks):
        return healed
    both = np.maximum(healed[crossing], healed[crossing + 1])
    times = _PairTimes.of(of.take(_pairs_of(both, places).ravel()))
    offsets = times.offsets()
    offsets["ns"] = clocks
    merged = times.are_together(offsets)
    merged[1:] &= ~(merged[:-1] & (np.diff(crossing) == 1))
    healed[crossing[merged]] = both[merged]
    return np.delete(healed, crossing[merged] + 1, axis=0)


def _pairs_of(healed: Matrix, places: tuple[Places, ...]) -> Places:
    """2 x K: the places of both sides, of the rows that have both."""
    found = healed[(healed >= 0).all(axis=1)]
    return np.stack([side[found[:, nth]] for nth, side in enumerate(places)])


def _split(places: Matrix, rows: Places, second_first: NDArray[np.bool_]) -> Matrix:
    """The same (K x 2), with two rows of one side each in place of each of these; `second_first`: in which order."""
    alone = places[np.repeat(rows, 2)]
    alone[np.arange(len(alone)), np.stack([~second_first, second_first], axis=1).ravel().astype(np.intp)] = NO_NUMBER
    return np.insert(np.delete(places, rows, axis=0), np.repeat(rows - np.arange(len(rows)), 2), alone, axis=0)


def _pairs_by_number(waiting: Columns) -> tuple[Columns, Places]:
    """The sides in order, and where the Send of each pair is: its Recv is behind it."""
    order = np.lexsort(
        (waiting["is_receiver"], waiting["pair_seq"], waiting["receiver"], waiting["sender"], waiting["communicator"])
    )
    ordered = row_ops.take(waiting, order)
    return ordered, np.flatnonzero(_are_pairs(ordered))


def _are_pairs(ordered: Columns) -> NDArray[np.bool_]:
    """Which of these sides are Sends with their Recv behind them."""
    same = ~_begins(ordered[[*_WAY, "pair_seq"]])[1:]
    return np.append(same & ~ordered["is_receiver"][:-1] & ordered["is_receiver"][1:], False)


def _begins(rows: Columns) -> NDArray[np.bool_]:
    """Which rows differ from the one before."""
    differs = np.zeros(len(rows), np.bool_)
    differs[:1] = True
    for name in rows.dtype.names or ():
        differs[1:] |= rows[name][1:] != rows[name][:-1]
    return differs


def _numbers(counts: Sequence[NDArray[np.int64]], places: Matrix) -> list[NDArray[np.int64]]:
    """Numbers of two sides, of which these are the counts so far and the places in their pairs (K x 2): those of a pair
    are equal, and all ascend as they are placed. Those that are not placed go on with the last ones.
    """
    numbers = [of.copy() for of in counts]
    moved, last = [0, 0], NO_NUMBER
    for both in places.tolist():
        present = [side for side, place in enumerate(both) if place >= 0]
        last = max(last + 1, *(int(counts[side][both[side]]) + moved[side] for side in present))
        for side in present:
            numbers[side][both[side]] = last
            moved[side] = last - int(counts[side][both[side]])
    for side, of in enumerate(numbers):
        of[int(places[:, side].max(initial=NO_NUMBER)) + 1 :] += moved[side]
    return numbers


Times = NDArray[np.int64]
_EARLIEST: Final = np.iinfo(np.int64).min // 2
_LATEST: Final = np.iinfo(np.int64).max // 2
_Number = TypeVar("_Number", bound=np.generic)
_GATHERED: Final = (
    "template", "message_bytes", "start_ns", "end_ns", "start_true_ns", "end_true_ns", "censored", "confidence",
    "launch", "number_state",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMatrix:
    """Kernels of K collectives on the R ranks of their communicators."""

    joined: JoinedCollectives
    group: NDArray[np.intp]
    """K: the row of its communicator in `hosts`."""
    hosts: NDArray[np.int32]
    """C x R: index of each rank's host, by communicator; NO_NUMBER if the rank was never seen."""
    present: NDArray[np.bool_]
    """K x R: the rank has a kernel for it."""
    start_ns: Times
    """K x R, on the host's own clock; NO_TIME_NS if there is no kernel, as in all times."""
    end_ns: Times
    start_true_ns: Times
    """K x R, on the reference clock."""
    end_true_ns: Times
    censored: NDArray[np.bool_]
    """K x R: the capture ended before the kernel did."""
    confidence: NDArray[np.float32]
    """K x R, of the match; 1 if there is no kernel."""
    op: NDArray[np.uint8]
    """K, as all of the following: of the first rank that has a kernel for it."""
    root: NDArray[np.int32]
    launch: NDArray[np.int64]
    message_bytes: NDArray[np.int64]
    agrees: NDArray[np.bool_]
    """K: all ranks that were seen did the same operation with as many bytes.

    Where they differ, lines were lost and the numbers have slipped, or the job itself is wrong.
    """

    def refresh(self, table: Table) -> None:
        """Reads the times on the reference clock again from the table of its rows, after clocks were estimated."""
        at = table.at(self.joined.operations[self.present])
        for name, times in (("start_true_ns", self.start_true_ns), ("end_true_ns", self.end_true_ns)):
            times[self.present] = table.rows[name][at]

    def overlap_on_each_host(self) -> NDArray[np.bool_]:
        """K: kernels that share a host's clock overlap, which needs no other clock. Cut ends say nothing."""
        ranks = np.argsort(self.hosts, axis=1, kind="stable")
        hosts = np.take_along_axis(self.hosts, ranks, axis=1)
        is_first = np.diff(hosts, axis=1, prepend=np.int32(NO_NUMBER - 1)) != 0
        begins = np.flatnonzero(is_first[self.group])
        starts = np.take_along_axis(self.start_ns, ranks[self.group], axis=1).ravel()
        ends = np.take_along_axis(np.where(self.censored, NO_TIME_NS, self.end_ns), ranks[self.group], axis=1).ravel()
        known = (starts != NO_TIME_NS) & (ends != NO_TIME_NS) & (hosts >= 0)[self.group].ravel()
        latest = np.maximum.reduceat(np.where(known, starts, _EARLIEST), begins)
        earliest = np.minimum.reduceat(np.where(known, ends, _LATEST), begins)
        apart = (np.add.reduceat(known, begins, dtype=np.int64) > 1) & (latest - earliest > SAME_HOST_SIGMA_NS)
        overlap = np.ones(len(self.present), np.bool_)
        overlap[begins[apart] // self.hosts.shape[1]] = False
        return overlap

    def take(self, chosen: NDArray[np.intp]) -> KernelMatrix:
        """These collectives only."""
        if len(chosen) == len(self.present):
            return self
        return KernelMatrix(
            joined=self.joined.take(chosen),
            group=self.group[chosen],
            hosts=self.hosts,
            present=self.present[chosen],
            start_ns=self.start_ns[chosen],
            end_ns=self.end_ns[chosen],
            start_true_ns=self.start_true_ns[chosen],
            end_true_ns=self.end_true_ns[chosen],
            censored=self.censored[chosen],
            confidence=self.confidence[chosen],
            op=self.op[chosen],
            root=self.root[chosen],
            launch=self.launch[chosen],
            message_bytes=self.message_bytes[chosen],
            agrees=self.agrees[chosen],
        )


def gather(
    known: Store, joined: JoinedCollectives, group: NDArray[np.intp], hosts: NDArray[np.int32], table: Table
) -> KernelMatrix:
    """The kernels of joined collectives. `group`, `hosts`: as in `KernelMatrix`; `table`: what their ids are of."""
    present = joined.operations != NO_NUMBER
    rows = table.take(joined.operations[present], *_GATHERED)
    templates = known.operation_templates.take(rows["template"], "op", "root")
    op = _matrix(present, templates["op"], np.uint8(0))
    message_bytes = _matrix(present, rows["message_bytes"], np.int64(NO_NUMBER))
    is_launched = rows["number_state"] == NumberState.LAUNCHED
    confidence = np.where(is_launched, np.maximum(rows["confidence"], np.float32(BY_LAUNCH)), rows["confidence"])
    every = np.arange(len(present))
    first = present.argmax(axis=1)
    agree = (op == op[every, first][:, None]) & (message_bytes == message_bytes[every, first][:, None])
    return KernelMatrix(
        joined=joined,
        group=group,
        hosts=hosts,
        present=present,
        start_ns=_matrix(present, rows["start_ns"], np.int64(NO_TIME_NS)),
        end_ns=_matrix(present, rows["end_ns"], np.int64(NO_TIME_NS)),
        start_true_ns=_matrix(present, rows["start_true_ns"], np.int64(NO_TIME_NS)),
        end_true_ns=_matrix(present, rows["end_true_ns"], np.int64(NO_TIME_NS)),
        censored=_matrix(present, rows["censored"], np.bool_(False)),
        confidence=_matrix(present, confidence, np.float32(1)),
        op=op[every, first],
        root=_matrix(present, templates["root"], np.int32(NO_NUMBER))[every, first],
        launch=_matrix(present, rows["launch"], np.int64(NO_NUMBER))[every, first],
        message_bytes=message_bytes[every, first],
        agrees=(agree | ~present).all(axis=1),
    )


def overlaps(starts_ns: Times, ends_ns: Times, slack_ns: NDArray[np.float64]) -> NDArray[np.bool_]:
    """K: no rank ended before another started, within `slack_ns` (K); true if fewer than two times are known.

    In an N-to-N collective every output needs every input, so kernels that do not overlap are not of one.
    """
    known = (starts_ns != NO_TIME_NS) & (ends_ns != NO_TIME_NS)
    latest = np.where(known, starts_ns, _EARLIEST).max(axis=1)
    earliest = np.where(known, ends_ns, _LATEST).min(axis=1)
    overlap: NDArray[np.bool_] = (known.sum(axis=1) < 2) | (latest - earliest <= slack_ns)
    return overlap


def _matrix(present: NDArray[np.bool_], values: NDArray[_Number], absent: _Number) -> NDArray[_Number]:
    """Values of the cells that are present, row by row, as a matrix."""
    if len(values) == present.size:
        return values.reshape(present.shape)
    matrix = np.full(present.shape, absent, values.dtype)
    matrix[present] = values
    return matrix
