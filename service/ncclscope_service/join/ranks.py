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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.table import Ids, Table
from ncclscope_service.number.across_ranks import Matrix, first_violation
from ncclscope_service.number.calls import Calls
from ncclscope_service.number.healing import heal, window
from ncclscope_service.store.rows import BY_LAUNCH, SAME_HOST_SIGMA_NS, NumberState
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_UNREPORTED: Final = -2
_FIRST_CAPACITY: Final = 64
_SOON: Final = 16
"""Collectives of which a rank may lack so many and one more is about as many lines as are lost at once; if it lacks
more, it was not observed."""

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
    offsets_ns: NDArray[np.float64] = field(init=False)
    """By rank: its clock minus a common one, as the last collective showed it; NaN."""

    def __post_init__(self) -> None:
        self.operations = np.empty((0, self.size), np.int64)
        self.has_kernel = np.empty((0, self.size), np.bool_)
        self.shift = np.zeros(self.size, np.int64)
        self.offsets_ns = np.full(self.size, np.nan)

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

    def move(self, places: Matrix) -> None:
        """Forgets the operations in these rows, by rank and from the first one on; those behind them move up."""
        taken = places.max(axis=0, initial=NO_NUMBER) + 1
        last = np.where(places >= 0, np.arange(len(places))[:, None], NO_NUMBER).max(axis=0, initial=NO_NUMBER) + 1
        columns = [self.operations[begin : self.used, rank] for rank, begin in enumerate(taken.tolist())]
        is_left = [(column != _UNREPORTED).any() for column in columns]
        # Behind the last call of a rank nothing tells of losses: the rest may still come.
        self.shift += np.where(is_left, len(places), last) - taken
        used = max(0, *(len(column) for column in columns))
        moved = _Buffer(self.size)
        moved.reserve(used)
        reported_at_ns = np.full(used, np.iinfo(np.int64).max)
        for rank, (column, begin) in enumerate(zip(columns, taken.tolist(), strict=True)):
            moved.operations[: len(column), rank] = column
            moved.has_kernel[: len(column), rank] = self.has_kernel[begin : self.used, rank]
            times = np.where(column == _UNREPORTED, np.iinfo(np.int64).max, self.reported_at_ns[begin : self.used])
            reported_at_ns[: len(column)] = np.minimum(reported_at_ns[: len(column)], times)
        moved.reports[:used] = (moved.operations[:used] != _UNREPORTED).sum(axis=1)
        reported = np.flatnonzero(moved.reports[:used])
        used = int(reported[-1]) + 1 if len(reported) else 0
        moved.reported_at_ns[:used] = np.where(moved.reports[:used] > 0, reported_at_ns[:used], NO_TIME_NS)
        self.operations, self.has_kernel, self.reports = moved.operations, moved.has_kernel, moved.reports
        self.reported_at_ns, self.used = moved.reported_at_ns, used
        self.base += len(places)


class CollectiveJoin:
    """Gathers the ranks of each collective; memory is bounded by how far ranks are apart, and by `patience_ns`."""

    def __init__(self, *, settle_ns: int, patience_ns: int, calls: Calls | None = None) -> None:
        """`settle_ns`: how long ranks that never spoke are waited for; `patience_ns`: how long any rank is; `calls`: by
        which numbers are checked, and healed where lines were lost.
        """
        self._settle_ns = settle_ns
        self._calls = calls
        self._renumbered: list[tuple[Ids, NDArray[np.int64]]] = []
        self.healed: Counter[tuple[int, str]] = Counter()
        """Lost lines by communicator and what showed them, for whoever counts and clears them."""
        self.patience_ns = patience_ns
        """It may be changed at any time."""
        self._buffers: dict[int, _Buffer] = {}
        self.has_more = False
        """Whether the last call of `take_ready` left some."""
        self._next = 0
        """Place of the communicator that comes first the next time."""
        self.late = 0
        """Operations whose collective had been given already when they were reported."""

    def leave(self, communicators: Iterable[int]) -> None:
        """No rank of these communicators will call anything: those that wait are late."""
        for communicator in communicators:
            self._buffers.pop(communicator, None)

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
        buffer = self._buffers.setdefault(communicator, _Buffer(size))
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
        self.has_more = False
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
            operations[(operations == _UNREPORTED) | ~has_kernel] = NO_NUMBER
            seen = (operations != NO_NUMBER).any(axis=1)
            if seen.any():
                numbers = base + np.flatnonzero(seen)
                ready[buffer.size].append((communicator, numbers.astype(np.int64), operations[seen]))
        return [_joined(parts) for parts in ready.values()]

    def drain_renumbered(self) -> tuple[Ids, NDArray[np.int64]]:
        """Operations whose number proved to be another than the count of their lines, and that number."""
        operations = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in self._renumbered)])
        numbers = np.concatenate([np.empty(0, np.int64), *(numbers for _, numbers in self._renumbered)])
        self._renumbered = []
        return operations, numbers

    def _take_rows(
        self, communicator: int, buffer: _Buffer, rows: int, now_ns: int, final: bool
    ) -> tuple[Ids, NDArray[np.bool_]]:
        """Takes these first rows, and more or fewer where numbers slipped: K x R operations, and whether each has a
        kernel.
        """
        base = buffer.base
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
            has_kernel[_lacks_some(places)] = False
            buffer.move(places)
        if self._calls is not None:
            # A rank whose kernel is not known may have been the last to arrive.
            has_kernel[self._calls.have_unknown_kernels(np.where(has_kernel, NO_NUMBER, operations)).any(axis=1)] = (
                False
            )
        if buffer.shift.any():
            known = operations >= 0
            self._renumbered.append((operations[known], (base + np.nonzero(known)[0]).astype(np.int64)))
        return operations, has_kernel

    def _count_agreeing(self, calls: Calls, communicator: int, buffer: _Buffer, rows: int) -> int:
        """How many of these rows agree, before the first that does not."""
        ranks = np.flatnonzero((buffer.operations[:rows] != _UNREPORTED).any(axis=0))
        if len(ranks) < 2:
            return rows
        ids = np.ascontiguousarray(buffer.operations[:rows, ranks])
        hosts = calls.hosts(communicator, buffer.size)[ranks]
        count, offsets = first_violation(calls.of(ids.ravel()).reshape(ids.shape), buffer.offsets_ns[ranks], hosts)
        buffer.offsets_ns[ranks] = offsets
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


def _lacks_some(places: Matrix) -> NDArray[np.bool_]:
    """K: a rank of which calls before and soon after are known has none: it may have been the last to arrive."""
    lacks = np.zeros(len(places), np.bool_)
    for rank in range(places.shape[1]):
        known = np.flatnonzero(places[:, rank] >= 0)
        for at in np.flatnonzero((np.diff(known) > 1) & (np.diff(known) <= _SOON)).tolist():
            lacks[known[at] + 1 : known[at + 1]] = True
    return lacks


def _healed(
    calls: Calls, communicator: int, buffer: _Buffer, agreeing: int, rows: int, *, is_forced: bool, final: bool
) -> tuple[Matrix, Counter[str]]:
    """Rows of a buffer in which each rank's call of a collective is (K x R), of which the first ones agree; and lost
    lines by what showed them.
    """
    end = buffer.used if final else min(buffer.used, rows + 2 * window(buffer.size))
    part = buffer.operations[agreeing:end]
    ranks = np.flatnonzero((part != _UNREPORTED).any(axis=0))
    lengths = len(part) - (part != _UNREPORTED)[::-1, ranks].argmax(axis=0)
    own = [calls.of(part[:length, rank].copy()) for rank, length in zip(ranks.tolist(), lengths.tolist(), strict=True)]
    hosts = calls.hosts(communicator, buffer.size)[ranks]
    healed = heal(own, buffer.offsets_ns[ranks], hosts, is_forced=is_forced, is_end=is_forced and end == buffer.used)
    buffer.offsets_ns[ranks] = healed.offsets_ns
    places = np.full((agreeing + len(healed.places), buffer.size), NO_NUMBER, np.int64)
    places[:agreeing] = np.arange(agreeing)[:, None]
    places[agreeing:, ranks] = np.where(healed.places >= 0, healed.places + agreeing, NO_NUMBER)
    return places, healed.lost


def _from(begin: int, communicators: list[int]) -> list[tuple[int, int]]:
    """(place, communicator) of all, those before `begin` at last."""
    placed = list(enumerate(communicators))
    return placed[begin:] + placed[:begin]


@dataclass(frozen=True, slots=True)
class PairTimes:
    """Kernels of Sends (row 0 of both matrices) and of Recvs (row 1), each on its host's clock."""

    starts_ns: NDArray[np.float64]
    """2 x K; NaN if not known, or cut."""
    ends_ns: NDArray[np.float64]
    hosts: NDArray[np.int32]
    """2 x K."""

    @property
    def is_one_host(self) -> NDArray[np.bool_]:
        """K: both ran on one host, and so on one clock."""
        same: NDArray[np.bool_] = self.hosts[0] == self.hosts[1]
        return same

    def apart_ns(self) -> NDArray[np.float64]:
        """K: how much later the Recv ended than its Send, as far as that is their hosts' clocks."""
        return np.where(self.is_one_host, 0.0, self.ends_ns[1] - self.ends_ns[0])

    def are_together(self, apart_ns: NDArray[np.float64]) -> NDArray[np.bool_]:
        """K: both ran for most of the shorter one, on clocks that are `apart_ns`; true where that is not known."""
        shift = np.stack([np.zeros(len(apart_ns)), np.where(self.is_one_host, 0.0, apart_ns)])
        starts, ends = self.starts_ns - shift, self.ends_ns - shift
        both_ran = ends.min(axis=0) - starts.max(axis=0) + _PAIR_SLACK_NS
        apart: NDArray[np.bool_] = both_ran < _TOGETHER * (ends - starts).min(axis=0)
        return ~apart


TimesOf: TypeAlias = Callable[[Ids, Ids], PairTimes]
_PAIR_SLACK_NS: Final = 20_000.0
_TOGETHER: Final = 0.5
"""A message is sent and received at once, so its kernels run together but for what they wait for each other."""
_WAY: Final = ["communicator", "sender", "receiver"]
_ONE_SIDE: Final = [*_WAY, "is_receiver"]
_FARTHEST: Final = 128
"""Lines in a row that may be lost."""
_FIRST: Final = 4
_ALIKE_NS: Final = 2_000_000.0
"""First pairs of each way that show how far clocks are apart, and how much what they show differs."""
_TRIED: Final = 4
"""Pairs that do not fit at which it is looked for who lost a line."""
_BEHIND: Final = 4
"""Pairs that must fit behind them, if so many are there."""


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
        self._apart_ns: dict[tuple[int, ...], float] = {}
        """By communicator, sender and receiver: the clock of the one minus the other's, as the last pair showed it."""
        self._renumbered: list[tuple[Ids, NDArray[np.int64]]] = []
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

    def take_ready(self, times_of: TimesOf, *, now_ns: int, final: bool = False) -> tuple[Ids, Ids]:
        """(sends, receives): operation rows of the pairs that are complete. Sides that waited too long are dropped."""
        if not len(self._waiting):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        ordered, sends = _pairs_by_number(self._waiting)
        self._learn_clocks(ordered, sends, times_of)
        fits = self._fit(ordered, sends, times_of)
        if not fits.all():
            for way in np.unique(ordered[_WAY][sends[~fits]]):
                self._heal(ordered, np.flatnonzero(ordered[_WAY] == way), times_of)
            ordered, sends = _pairs_by_number(ordered)
            fits = self._fit(ordered, sends, times_of)
        # One that does not fit may be the next one's, of which a side has not come yet.
        done = sends[fits | final | (now_ns - ordered["reported_at_ns"][sends] > self._settle_ns)]
        self._remember(ordered, done, times_of)
        left = np.ones(len(ordered), bool)
        left[done] = False
        left[done + 1] = False
        left &= now_ns - ordered["reported_at_ns"] <= self.patience_ns
        self._waiting = np.empty(0, PAIR_SIDE) if final else row_ops.filter_rows(ordered, left)
        return ordered["operation"][done], ordered["operation"][done + 1]

    def drain_renumbered(self) -> tuple[Ids, NDArray[np.int64]]:
        """Operations whose number proved to be another than the count of their lines, and that number."""
        operations = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in self._renumbered)])
        numbers = np.concatenate([np.empty(0, np.int64), *(numbers for _, numbers in self._renumbered)])
        self._renumbered = []
        return operations, numbers

    def _renumber(self, sides: Columns) -> None:
        self._renumbered.append((sides["operation"].copy(), sides["pair_seq"].copy()))

    def _learn_clocks(self, ordered: Columns, sends: NDArray[np.intp], times_of: TimesOf) -> None:
        """Of new ways: how far the clocks of their hosts are apart, as most of their first pairs show it."""
        ways = ordered[_WAY][sends]
        begins = np.flatnonzero(np.append(True, ways[1:] != ways[:-1])[: len(ways)])
        new = [begin for begin in begins.tolist() if ways[begin].item() not in self._apart_ns]
        if not new:
            return
        ends = np.append(begins, len(ways))[np.searchsorted(begins, new) + 1]
        firsts = sends[np.concatenate([np.arange(a, min(b, a + _FIRST)) for a, b in zip(new, ends, strict=True)])]
        times = times_of(ordered["operation"][firsts], ordered["operation"][firsts + 1])
        apart, hosts = times.apart_ns(), times.hosts[0].astype(np.int64) << 32 | times.hosts[1]
        known = ~np.isnan(apart)
        ways = ordered[_WAY][firsts]
        for both in np.unique(hosts[known]).tolist():
            mine = known & (hosts == both)
            steps, amounts = np.unique(np.round(apart[mine] / _ALIKE_NS), return_counts=True)
            near = mine & (np.abs(apart - steps[amounts.argmax()] * _ALIKE_NS) <= _ALIKE_NS)
            for way in np.unique(ways[mine]).tolist():
                self._apart_ns[way] = float(np.median(apart[near]))

    def _fit(self, ordered: Columns, sends: NDArray[np.intp], times_of: TimesOf) -> NDArray[np.bool_]:
        """Which pairs run together, on clocks as the pair before had them."""
        times = times_of(ordered["operation"][sends], ordered["operation"][sends + 1])
        ways = ordered[_WAY][sends]
        apart = times.apart_ns()
        before = np.append(np.nan, apart[:-1])[: len(apart)]
        for first in np.flatnonzero(np.append(True, ways[1:] != ways[:-1])[: len(ways)]).tolist():
            before[first] = self._apart_ns.get(ways[first].item(), apart[first])
        return times.are_together(before)

    def _remember(self, ordered: Columns, sends: NDArray[np.intp], times_of: TimesOf) -> None:
        apart = times_of(ordered["operation"][sends], ordered["operation"][sends + 1]).apart_ns()
        known = ~np.isnan(apart)
        self._apart_ns.update(zip(ordered[_WAY][sends][known].tolist(), apart[known].tolist(), strict=True))

    def _heal(self, ordered: Columns, at: NDArray[np.intp], times_of: TimesOf) -> None:
        """Moves the numbers of a sender or its receiver (rows `at`, in order) on where lines of it were lost."""
        sides = at[~ordered["is_receiver"][at]], at[ordered["is_receiver"][at]]
        known_ns = self._apart_ns.get(ordered[_WAY][at[:1]].tolist()[0])
        while True:
            slip = _first_slip(ordered, *sides, times_of, known_ns)
            if slip is None:
                return
            side, place, amount = slip
            moved = sides[side][place:]
            key: tuple[int, ...] = ordered[_ONE_SIDE][moved[:1]].tolist()[0]
            lost = self._lost.setdefault(key, [])
            lost += [int(ordered["pair_seq"][moved[0]]) - len(lost)] * amount
            ordered["pair_seq"][moved] += amount
            self.healed[key[0]] += amount
            self._renumber(ordered[moved])


def _pairs_by_number(waiting: Columns) -> tuple[Columns, NDArray[np.intp]]:
    """The sides in order, and where the Send of each pair is: its Recv is behind it."""
    order = np.lexsort(
        (waiting["is_receiver"], waiting["pair_seq"], waiting["receiver"], waiting["sender"], waiting["communicator"])
    )
    ordered = row_ops.take(waiting, order)
    same = np.ones(len(ordered) - 1, bool)
    for name in ("communicator", "sender", "receiver", "pair_seq"):
        same &= ordered[name][1:] == ordered[name][:-1]
    return ordered, np.flatnonzero(same & ~ordered["is_receiver"][:-1] & ordered["is_receiver"][1:])


def _first_slip(
    ordered: Columns,
    sends: NDArray[np.intp],
    receives: NDArray[np.intp],
    times_of: TimesOf,
    known_ns: float | None,
) -> tuple[int, int, int] | None:
    """(side, place in it, lines): the first pair by number that does not fit, and that side lost lines before it.

    None if all fit, or nothing shows who lost some.
    """
    numbers, ids = ordered["pair_seq"], ordered["operation"]
    _, one, other = np.intersect1d(numbers[sends], numbers[receives], return_indices=True)
    times = times_of(ids[sends[one]], ids[receives[other]])
    apart = times.apart_ns()
    before = np.append(apart[:1] if known_ns is None else known_ns, apart[:-1])
    for first in np.flatnonzero(~times.are_together(before))[:_TRIED].tolist():
        heads = int(one[first]), int(other[first])
        found: list[tuple[int, int, int]] = []
        for side, (own, others) in enumerate(((sends, receives), (receives, sends))):
            mine, candidates = own[heads[side] :][:_BEHIND], others[heads[1 - side] + 1 :]
            candidates = candidates[numbers[candidates] - numbers[mine[0]] <= _FARTHEST]
            for amount in (numbers[candidates] - numbers[mine[0]]).tolist():
                _, a, b = np.intersect1d(numbers[mine] + amount, numbers[candidates], return_indices=True)
                left, right = (mine[a], candidates[b]) if side == 0 else (candidates[b], mine[a])
                if times_of(ids[left], ids[right]).are_together(np.full(len(left), before[first])).all():
                    found.append((amount, side, heads[side]))
                    break
        if found:
            amount, side, place = min(found)
            return side, place, amount
    return None


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
