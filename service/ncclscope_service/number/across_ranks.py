"""Which calls of several ranks are the same collective, where lines of some of them were lost.

All ranks of a communicator call the same collectives in the same order. So their rows are one text of which each rank
lost other letters: what a rank calls (operation, count, type, root), when its kernel ended or its line was written,
and opCount say which. The rank that lost fewest is the first draft; all others are aligned with it at once (affine
gaps, cost carried along the path), and what it lacks is put in where they have it.

Times are compared by rhythm: an alignment costs where the difference of two ranks' times changes along it, not where it
is large. So clocks may be apart, drift and even step. Where nothing was recorded for a while they have drifted unseen,
and the first collective behind it may end as far apart as clocks can drift in that time. Ends of N-to-N kernels agree
within some ten us (all outputs need all inputs), and so they tell of a loss by themselves; stamps are written when a
rank happens to call, and only place the losses that calls show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

CALL: Final = np.dtype(
    [
        ("id", "<i8"),  # of the operation; opaque here
        ("symbol", "<i4"),  # number of (operation, count, type, root)
        ("kind", "<i4"),  # number of the operation; NO_NUMBER if nothing is known of the call
        ("is_sized", "?"),  # `symbol` counts; else only `kind` is known
        ("is_n_to_n", "?"),
        ("start_ns", "<i8"),  # of its kernel, on its host's clock; NO_TIME_NS
        ("end_ns", "<i8"),
        ("stamp_ns", "<i8"),  # of its line; NO_TIME_NS
        ("op_count", "<i8"),
        ("is_counted", "?"),  # it has a line, and `op_count` is of that
        ("step", "<i8"),  # training iteration; NO_NUMBER
    ]
)
"""One rank's call of a collective."""

Matrix = NDArray[np.int64]

OFFSET: Final = np.dtype([("ns", "<f8"), ("at_ns", "<f8")])
"""Clock of a rank minus the common one, as a collective showed it, and when that ended on it; both NaN if none did."""

OVERLAP: Final = "overlap"
"""Ends of kernels."""
OP_COUNT: Final = "op_count"
RANKS: Final = "ranks"
"""Calls of other ranks, and their times."""
STEPS: Final = "steps"
"""What its process called in other steps."""

_SLACK_NS: Final = 20_000.0
"""Ends of one N-to-N collective differ by 10 us between nodes; twice that is still one."""
_MOST_DRIFT: Final = 200e-6
"""Two clocks come apart no faster: crystals are good for 100 ppm each."""
_EQUAL: Final = -1.0
_LIKE: Final = -0.7
_UNKNOWN: Final = -0.5
_UNEQUAL: Final = 1.8
"""Less than two gaps: a rank that calls something else than the others has lost nothing."""
_OPEN: Final = 1.0
_EXTEND: Final = 0.03
"""Lines are lost one by one, or by the hundred."""
_OUT_OF_TIME: Final = 2.9
"""With that a pair of equal calls whose kernels end apart is hardly better than two gaps."""
_STAMP_OUT_OF_TIME: Final = 0.25
_OTHER_COUNT: Final = 0.8
_KERNEL_SCALE_NS: Final = 100_000.0
_LEAST_SCALE_NS: Final = 20_000.0
_INFINITE: Final = 1e9
_MOSTLY: Final = 0.5
_MOST_STEPS_OFF: Final = 2
"""Captures of one job begin at nearly one moment, in which no rank is more training steps ahead of another."""
_BEHIND: Final = -2
_SURE: Final = 4
"""Collectives in a row that all ranks have, before which an alignment may be cut."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """The first collectives of several ranks' calls."""

    places: Matrix
    """K x R: for each collective the place of its call among those of the rank; NO_NUMBER if its line was lost."""
    offsets: Columns
    """R: OFFSET of each rank at the last of them."""
    shown_by: str = RANKS
    """Evidence that placed the losses: kernels, OVERLAP, OP_COUNT or RANKS."""

    @property
    def lost(self) -> int:
        """Lines that were found to be lost."""
        last = len(self.places) - 1 - (self.places[::-1] >= 0).argmax(axis=0)
        known = (self.places >= 0).any(axis=0)
        before = np.arange(len(self.places))[:, None] < last
        return int(np.count_nonzero((self.places < 0) & before & known))


def unknown_offsets(ranks: int) -> Columns:
    """OFFSET of ranks of which nothing was seen."""
    return np.full(ranks, np.nan, OFFSET)


def drift_ns(since_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """By how much clocks may have come apart in so long; 0 where it is not known, as nothing was seen before."""
    drift: NDArray[np.float64] = _MOST_DRIFT * np.abs(np.nan_to_num(since_ns, nan=0.0))
    return drift


def first_violation(calls: Columns, offsets: Columns, hosts: NDArray[np.int32]) -> tuple[int, Columns]:
    """How many collectives (K x R CALL, all ranks of each) agree before the first that cannot be one.

    They call the same, and their N-to-N kernels overlap on the clocks that the collective before it had, but for what
    these may have drifted since. `offsets` as in `Aligned`; `hosts`: of each rank. Gives the offsets at the last of
    them, too.
    """
    symbols, kinds = calls["symbol"], calls["kind"]
    same = symbols == symbols[:, :1]
    if not calls["is_sized"].all():
        sized = calls["is_sized"]
        every = np.arange(len(calls))
        like = sized.argmax(axis=1), (kinds != NO_NUMBER).argmax(axis=1)
        same = np.where(sized, symbols == symbols[every, like[0]][:, None], kinds == kinds[every, like[1]][:, None])
        same |= kinds == NO_NUMBER
    agrees = same.all(axis=1)
    timed = (calls["end_ns"] != NO_TIME_NS) & calls["is_n_to_n"]
    if not timed.any():
        return _until_false(agrees), offsets
    ends = np.where(timed, calls["end_ns"], 0).astype(np.float64)
    starts = np.where(timed, calls["start_ns"], 0).astype(np.float64)
    before = _offsets_before(ends, timed, offsets, hosts)
    drift = np.where(hosts == hosts[0], 0.0, drift_ns(ends - before["at_ns"][:-1]))
    latest = np.where(timed, starts - before["ns"][:-1] - drift, -np.inf).max(axis=1)
    earliest = np.where(timed, ends - before["ns"][:-1] + drift, np.inf).min(axis=1)
    count = _until_false(agrees & (latest - earliest <= _SLACK_NS))
    return count, before[count]


def apart_by_steps(calls: Columns, hosts: NDArray[np.int32]) -> tuple[Columns, NDArray[np.int64]]:
    """Of ranks whose numbers may be off by training steps (K x R CALL): OFFSET of each at the first step that tells,
    and how many calls later than the rank that is first each of them has the same collective (R).

    Clocks of hosts are nearer to each other than steps are long: of the numbers of steps by which the ranks of a
    host may be off, the one is taken with which they end at nearly the same times. Nothing is said where
    calls are not as many between all steps.
    """
    offsets, later = unknown_offsets(len(hosts)), np.zeros(len(hosts), np.int64)
    of = [_by_step(calls[:, rank]) for rank in range(len(hosts))]
    for host in dict.fromkeys(hosts.tolist()):
        mine = np.flatnonzero(hosts == host).tolist()
        apart: list[tuple[float, int]] = []
        for off in range(-_MOST_STEPS_OFF, _MOST_STEPS_OFF + 1):
            shown = [own[1] - of[0][step][1] for step, own in _common(of, mine[0], off)]
            apart += [(abs(float(np.median(shown))), off)] if shown else []
        for rank in mine if apart else ():
            common = _common(of, rank, min(apart)[1])
            behind = {own[0] - of[0][step][0] for step, own in common}
            if len(behind) > 1:  # lines were lost between them, which is seen where they are joined
                return unknown_offsets(len(hosts)), np.zeros(len(hosts), np.int64)
            later[rank] = behind.pop() if behind else 0
            offsets[rank] = next(((own[1] - of[0][step][1], own[1]) for step, own in common), (np.nan, np.nan))
    return offsets, later - later.min()


def _common(of: Sequence[dict[int, tuple[int, int]]], rank: int, off: int) -> list[tuple[int, tuple[int, int]]]:
    """Steps of the first rank, with what another rank has so many steps later (`_by_step`)."""
    return [(step, of[rank][step + off]) for step in of[0] if step + off in of[rank]]


def _by_step(calls: Columns) -> dict[int, tuple[int, int]]:
    """The place of the first N-to-N kernel of each training step, and when it ended."""
    at = np.flatnonzero((calls["end_ns"] != NO_TIME_NS) & calls["is_n_to_n"] & (calls["step"] != NO_NUMBER))
    steps, first = np.unique(calls["step"][at], return_index=True)
    return dict(
        zip(steps.tolist(), zip(at[first].tolist(), calls["end_ns"][at[first]].tolist(), strict=True), strict=True)
    )


def _offsets_before(
    ends: NDArray[np.float64], timed: NDArray[np.bool_], offsets: Columns, hosts: NDArray[np.int32]
) -> Columns:
    """K+1 x R OFFSET: what the collectives before each row show, against the first rank; ranks of one host share its
    clock.
    """
    _, first, of_host = np.unique(hosts, return_index=True, return_inverse=True)
    axis = int(first[of_host[0]])
    known = timed[:, first] & timed[:, [axis]]
    shown = np.empty((len(ends) + 1, len(first)), OFFSET)
    shown["ns"][1:] = np.where(known, ends[:, first] - ends[:, [axis]], 0.0)
    shown["at_ns"][1:] = ends[:, first]
    shown["ns"][0] = offsets["ns"][first] - offsets["ns"][axis]
    shown["at_ns"][0] = offsets["at_ns"][first]
    unknown = np.isnan(shown["ns"][0])
    if unknown.any():  # the first of them begins it
        begin = shown[1 + known.argmax(axis=0), np.arange(len(first))]
        shown[0] = np.where(unknown, begin, shown[0])
    last = np.maximum.accumulate(
        np.vstack([np.zeros(len(first), np.intp), np.where(known, np.arange(1, len(shown))[:, None], 0)]), axis=0
    )
    return np.take_along_axis(shown, last, axis=0)[:, of_host]


def _until_false(flags: NDArray[np.bool_]) -> int:
    return len(flags) if flags.all() else int(flags.argmin())


def align_ranks(calls: Sequence[Columns], offsets: Columns, *, is_end: bool) -> Aligned:
    """Aligns the next calls (CALL, in order) of all ranks; a rank of which nothing came has none.

    `is_end`: these are all, and all are placed. Else only those are of which what follows cannot change the place.
    """
    present = [rank for rank, of in enumerate(calls) if len(of)]
    draft = _draft(calls, present)
    others = [rank for rank in present if rank != draft]
    offset_ns = float(np.nan_to_num(offsets["ns"][draft]))
    pairs, matched = _best_pairs(calls, draft, others, offset_ns, offsets["ns"])
    places = np.full((len(calls[draft]), len(calls)), NO_NUMBER, np.int64)
    places[:, draft] = np.arange(len(places))
    if pairs.is_by_kernels:
        matched = _without_outliers(matched, pairs.offsets_of(matched))
    places[:, others] = matched.T
    merged = _with_inserted(places, calls, draft, pairs.common_times(draft, others, matched), is_end=is_end)
    if not is_end:
        merged = merged[: _sure_until(merged, others)]
    merged[merged < 0] = NO_NUMBER
    until = int(merged[:, draft].max(initial=NO_NUMBER)) + 1
    shown = offsets.copy()
    shown[draft] = offset_ns, pairs.draft_at(until, shown["at_ns"][draft])
    found = pairs.offsets_at(matched, until)
    shown[others] = np.where(np.isnan(found["ns"]), shown[others], found)
    return Aligned(merged, shown, OVERLAP if pairs.is_by_kernels else OP_COUNT if _moves(calls[draft]) else RANKS)


def _best_pairs(
    calls: Sequence[Columns], draft: int, others: list[int], offset_ns: float, offsets_ns: NDArray[np.float64]
) -> tuple[_Paths, Matrix]:
    """R x N: place in each other rank of the calls of the draft (`_Paths.best`)."""
    beside = [calls[rank] for rank in others]
    pairs = _Paths(calls[draft], beside, offset_ns, offsets_ns[others])
    matched = pairs.best()
    found = (matched >= 0).sum(axis=1)
    fewest = np.minimum([len(of) for of in beside], len(calls[draft]))
    if (2 * found >= fewest).all():
        return pairs, matched
    # The clocks were not as far apart as the first collectives made them, since these were not of one number.
    again = _Paths(calls[draft], beside, offset_ns, np.full(len(others), np.nan))
    other = again.best()
    return (again, other) if (other >= 0).sum() > found.sum() else (pairs, matched)


def _draft(calls: Sequence[Columns], present: list[int]) -> int:
    """The rank that lost fewest: whose calls take the least time, or count the least."""
    shortest = min(len(calls[rank]) for rank in present)
    spans: list[tuple[float, int]] = []
    for rank in present:
        of = calls[rank][:shortest]
        times = of["end_ns"] if (of["end_ns"] != NO_TIME_NS).mean() > 0.5 else of["stamp_ns"]
        times = times[times != NO_TIME_NS]
        spans.append((float(times[-1] - times[0]) if len(times) > 1 else float(of["op_count"][-1]), rank))
    longest = max(len(calls[rank]) for rank in present)
    return min((span, rank) for span, rank in spans if 2 * len(calls[rank]) >= longest)[1]


class _Paths:
    """Best alignments of several ranks' calls with those of one, the draft."""

    def __init__(
        self, draft: Columns, others: list[Columns], offset_ns: float, offsets_ns: NDArray[np.float64]
    ) -> None:
        self._lengths = np.asarray([len(of) for of in others], np.intp)
        calls = np.zeros((len(others), max([1, *self._lengths.tolist()])), CALL)
        for row, of in enumerate(others):
            calls[row, : len(of)] = of
        is_by_kernels = bool((draft["end_ns"] != NO_TIME_NS).mean() > _MOSTLY)
        name = "end_ns" if is_by_kernels else "stamp_ns"
        self._own_ns = _times(draft, name)
        self._draft_ns = self._own_ns - offset_ns
        self._ns = _times(calls, name)
        self._begin_ns = offsets_ns if is_by_kernels else np.full(len(others), np.nan)
        self._penalty = _OUT_OF_TIME if is_by_kernels else _STAMP_OUT_OF_TIME
        self.is_by_kernels: Final = is_by_kernels
        spacing = np.diff(self._draft_ns[~np.isnan(self._draft_ns)])
        typical_ns = float(np.median(spacing)) if len(spacing) else 0.0
        self._scale_ns = _KERNEL_SCALE_NS if is_by_kernels else max(typical_ns, _LEAST_SCALE_NS)
        self._costs = _costs(draft, calls)

    def draft_at(self, until: int, else_ns: float) -> float:
        """When the last of the first `until` calls of the draft ended whose end is known, on its own clock."""
        ends = self._own_ns[:until][~np.isnan(self._own_ns[:until])]
        return float(ends[-1]) if self.is_by_kernels and len(ends) else else_ns

    def offsets_at(self, matched: Matrix, until: int) -> Columns:
        """R: OFFSET of each rank at its last call that is paired with one of the first `until` of the draft."""
        part = matched[:, :until]
        known = part >= 0
        found = unknown_offsets(len(matched))
        if not self.is_by_kernels or not part.size:
            return found
        own = self.offsets_of(matched)[:, :until]
        known &= ~np.isnan(own)
        rows = np.flatnonzero(known.any(axis=1))
        last = until - 1 - known[rows, ::-1].argmax(axis=1)
        found["ns"][rows], found["at_ns"][rows] = own[rows, last], self._ns[rows, part[rows, last]]
        return found

    def offsets_of(self, matched: Matrix) -> NDArray[np.float64]:
        """R x N: offset of each rank at each call of the draft; NaN if it is not known."""
        own = np.take_along_axis(self._ns, np.maximum(matched, 0), axis=1) - self._draft_ns
        return np.where(matched >= 0, own, np.nan)

    def common_times(self, draft: int, others: list[int], matched: Matrix) -> dict[int, NDArray[np.float64]]:
        """By rank the time of each call on the draft's clock; NaN if it is not known."""
        times = {draft: self._draft_ns}
        for row, rank in enumerate(others):
            own = self._ns[row, : self._lengths[row]]
            found = np.flatnonzero(matched[row] >= 0)
            apart = own[matched[row, found]] - self._draft_ns[found]
            found, apart = found[~np.isnan(apart)], apart[~np.isnan(apart)]
            if not self.is_by_kernels or not len(found):
                times[rank] = np.full(len(own), np.nan)
                continue
            before = np.searchsorted(matched[row, found], np.arange(len(own)), side="right") - 1
            times[rank] = own - apart[np.maximum(before, 0)]
        return times

    def best(self) -> Matrix:
        """R x N: for each call of the draft the place of the same in each rank; NO_NUMBER if it has none, and -2 behind
        its last one.
        """
        rows, n, m = self._costs.shape
        if not rows:
            return np.full((rows, n), NO_NUMBER, np.int64)
        paths = _Traceback.of(rows, n, m, self._lengths)
        columns = np.arange(m + 1)
        pair = np.full((rows, m + 1), _INFINITE)
        pair[:, 0] = 0.0
        skip = np.full((rows, m + 1), _INFINITE)
        more = np.full((rows, m + 1), _INFINITE)
        more[:, 1:] = _OPEN + _EXTEND * np.arange(m)
        pair_ns = skip_ns = more_ns = np.repeat(self._begin_ns[:, None], m + 1, axis=1)
        paths.is_from_pair[0, :, 0] = True
        for i in range(1, n + 1):
            # Of the three ways to come here: paired, the rank lost the draft's call, the draft lost the rank's. What
            # the times of this pair cost depends on it: the cheapest so far may be out of step with all to come.
            apart = self._ns - self._draft_ns[i - 1]
            behind, behind_ns = self._behind(apart, pair, pair_ns), pair_ns[:, :-1]
            by_skip, by_more = self._behind(apart, skip, skip_ns), self._behind(apart, more, more_ns)
            is_skip = by_skip < behind
            behind, behind_ns = np.where(is_skip, by_skip, behind), np.where(is_skip, skip_ns[:, :-1], behind_ns)
            is_more = by_more < behind
            behind, behind_ns = np.where(is_more, by_more, behind), np.where(is_more, more_ns[:, :-1], behind_ns)
            new_pair = np.full((rows, m + 1), _INFINITE)
            new_pair[:, 1:] = behind + self._costs[:, i - 1]
            new_pair_ns = np.full((rows, m + 1), np.nan)
            new_pair_ns[:, 1:] = np.where(np.isnan(apart), behind_ns, apart)
            paths.pair_from[i, :, 1:] = np.where(is_more, _MORE, is_skip)
            is_more = more < pair
            opened, opened_ns = np.where(is_more, more, pair) + _OPEN, np.where(is_more, more_ns, pair_ns)
            goes_on = skip + _EXTEND <= opened
            paths.skip_from[i] = np.where(goes_on, _SKIP, np.where(is_more, _MORE, _PAIR))
            pair, pair_ns = new_pair, new_pair_ns
            skip, skip_ns = np.where(goes_on, skip + _EXTEND, opened), np.where(goes_on, skip_ns, opened_ns)
            paths.is_from_pair[i] = is_pair = pair <= skip
            slanted = np.where(is_pair, pair, skip) - _EXTEND * columns
            lowest = np.minimum.accumulate(slanted, axis=1)
            origin = np.maximum.accumulate(np.where(slanted <= lowest, columns, 0), axis=1)
            more = np.full((rows, m + 1), _INFINITE)
            more[:, 1:] = lowest[:, :-1] + _OPEN + _EXTEND * columns[:-1]
            more_ns = np.full((rows, m + 1), np.nan)
            more_ns[:, 1:] = np.take_along_axis(np.where(is_pair, pair_ns, skip_ns), origin, axis=1)[:, :-1]
            paths.more_from[i, :, 1:] = origin[:, :-1]
            paths.note_end(i, pair, skip, more)
        return paths.follow(pair, skip, more)

    def _behind(
        self, apart_ns: NDArray[np.float64], costs: NDArray[np.float64], costs_ns: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """R x M: costs of these paths with what a pair behind their ends costs for its times."""
        late = np.nan_to_num(np.abs(apart_ns - costs_ns[:, :-1]), nan=0.0)
        behind: NDArray[np.float64] = costs[:, :-1] + self._penalty * np.minimum(late / self._scale_ns, 1.0)
        return behind


_PAIR: Final = 0
_SKIP: Final = 1
_MORE: Final = 2


@dataclass(slots=True)
class _Traceback:
    """The step that led to each cell; paths may end where either text does."""

    lengths: NDArray[np.intp]
    pair_from: NDArray[np.int8]
    skip_from: NDArray[np.int8]
    more_from: NDArray[np.int16]
    """Column where a run of calls that the draft lost began."""
    is_from_pair: NDArray[np.bool_]
    """Whether a run that begins here does so behind a pair."""
    ends: NDArray[np.float64]
    end_states: NDArray[np.intp]

    @classmethod
    def of(cls, rows: int, n: int, m: int, lengths: NDArray[np.intp]) -> _Traceback:
        """An empty one."""
        shape = n + 1, rows, m + 1
        return cls(
            lengths,
            np.zeros(shape, np.int8),
            np.zeros(shape, np.int8),
            np.zeros(shape, np.int16),
            np.zeros(shape, np.bool_),
            np.full((n + 1, rows), _INFINITE),
            np.zeros((n + 1, rows), np.intp),
        )

    def note_end(self, i: int, *states: NDArray[np.float64]) -> None:
        """Costs of all paths that end here with the last call of a rank."""
        at_end = np.stack([costs[np.arange(len(self.lengths)), self.lengths] for costs in states])
        self.ends[i], self.end_states[i] = at_end.min(axis=0), at_end.argmin(axis=0)

    def follow(self, *states: NDArray[np.float64]) -> Matrix:
        """The best paths, back from their ends."""
        n = len(self.ends) - 1
        final = np.stack(states)
        final[:, np.arange(final.shape[2]) > self.lengths[:, None]] = _INFINITE
        places = np.full((len(self.lengths), n), NO_NUMBER, np.int64)
        for row in range(len(self.lengths)):
            i, j = n, int(final[:, row].min(axis=0).argmin())
            state = int(final[:, row, j].argmin())
            earliest = int(self.ends[:, row].argmin())
            if self.ends[earliest, row] < final[state, row, j]:
                i, j, state = earliest, int(self.lengths[row]), int(self.end_states[earliest, row])
                places[row, i:] = _BEHIND
            self._follow_one(row, i, j, state, places[row])
        return places

    def _follow_one(self, row: int, i: int, j: int, state: int, places: Matrix) -> None:
        while i > 0:
            if state == _PAIR:
                places[i - 1] = j - 1
                state = int(self.pair_from[i, row, j])
                i, j = i - 1, j - 1
            elif state == _SKIP:
                state = int(self.skip_from[i, row, j])
                i -= 1
            else:
                j = int(self.more_from[i, row, j])
                state = _PAIR if self.is_from_pair[i, row, j] else _SKIP


def _times(calls: Columns, name: str) -> NDArray[np.float64]:
    times = calls[name]
    is_known = times != NO_TIME_NS
    if name == "end_ns":
        is_known &= calls["is_n_to_n"]
    return np.where(is_known, times.astype(np.float64), np.nan)


def _costs(draft: Columns, calls: Columns) -> NDArray[np.float32]:
    """R x N x M: what it costs to take a call of a rank for one of the draft's, but for their times."""
    ours, theirs = draft[None, :, None], calls[:, None, :]
    same = ours["symbol"] == theirs["symbol"]
    unsized = ~(ours["is_sized"] & theirs["is_sized"])
    if unsized.any():
        same |= unsized & (ours["kind"] == theirs["kind"])
    costs = np.where(same, np.float32(_EQUAL), np.float32(_UNEQUAL))
    # Kernels that end together are of one collective, whatever the lines say that were taken for theirs.
    timed = (ours["end_ns"] != NO_TIME_NS) & (theirs["end_ns"] != NO_TIME_NS)
    costs[timed & ~same & (ours["kind"] == theirs["kind"])] = _LIKE
    costs[np.broadcast_to((ours["kind"] == NO_NUMBER) | (theirs["kind"] == NO_NUMBER), costs.shape)] = _UNKNOWN
    if _moves(draft):
        other = (ours["op_count"] != theirs["op_count"]) & ours["is_counted"] & theirs["is_counted"]
        costs += np.float32(_OTHER_COUNT) * other
    return costs


def _moves(calls: Columns) -> bool:
    """Whether opCount counts calls here."""
    counts = calls["op_count"][calls["is_counted"]]
    return len(counts) > 1 and bool(np.mean(np.diff(counts) > 0) > _MOSTLY)


def _without_outliers(matched: Matrix, offsets_ns: NDArray[np.float64]) -> Matrix:
    """The same without pairs that end apart, if those before and behind them end together: the draft lost one line, and
    the other rank the next one.
    """
    left = matched.copy()
    for row, own in enumerate(offsets_ns):
        known = np.flatnonzero(~np.isnan(own))
        steps = np.diff(own[known])
        is_out = (np.abs(steps[:-1]) > _KERNEL_SCALE_NS / 2) & (np.abs(steps[1:] + steps[:-1]) < _KERNEL_SCALE_NS / 2)
        left[row, known[1:-1][is_out]] = NO_NUMBER
    return left


@dataclass(slots=True)
class _Missing:
    """A collective that the draft lost."""

    call: np.void
    time_ns: float
    places: NDArray[np.int64]

    def is_call(self, call: np.void, time_ns: float) -> bool:
        """Whether another rank's call is of this one."""
        by_symbol = call["is_sized"] and self.call["is_sized"]
        name = "symbol" if by_symbol else "kind"
        return bool(call[name] == self.call[name]) and not abs(time_ns - self.time_ns) > _KERNEL_SCALE_NS / 2


def _with_inserted(
    places: Matrix, calls: Sequence[Columns], draft: int, times_ns: dict[int, NDArray[np.float64]], *, is_end: bool
) -> Matrix:
    """The same with the calls that the draft lost, each behind the one before it. `times_ns`: of all calls, on the
    draft's clock.
    """
    slots: dict[int, list[_Missing]] = {}
    gaps: list[tuple[int, int, range, range]] = []
    for rank in range(places.shape[1]):
        if rank == draft or not len(calls[rank]):
            continue
        found = np.flatnonzero(places[:, rank] >= 0)
        end = len(calls[rank]) if is_end else int(places[:, rank].max(initial=NO_NUMBER)) + 1
        own = np.concatenate([[NO_NUMBER], places[found, rank], [end]]).tolist()
        slot = np.concatenate([[0], found + 1, [len(places) + 1]]).tolist()
        for at in np.flatnonzero(np.diff(own) > 1).tolist():
            within = range(slot[at], slot[at + 1])
            gaps.append((len(within), rank, within, range(own[at] + 1, own[at + 1])))
    for _, rank, within, missed in sorted(gaps, key=lambda gap: gap[:2]):  # those first that leave no choice
        lost = times_ns[draft][within.start : within.stop - 1]
        begin, last, least = 0, NO_NUMBER, within.start
        for place in missed:
            time_ns = float(times_ns[rank][place])
            near = np.flatnonzero(np.abs(lost - time_ns) < _KERNEL_SCALE_NS / 2) + within.start
            near = near[(places[near, rank] < 0) & (calls[draft]["kind"][near] == calls[rank]["kind"][place])]
            if len(near):
                places[near[0], rank] = place
                continue
            if np.isnan(time_ns):
                if _join_run(slots, within.start, calls, draft, places, rank, place):
                    continue
                into = least = _slot_of(slots, range(least, within.stop), calls[rank][place], rank)
            else:
                into = within.start + int(np.count_nonzero(lost < time_ns))
            begin, last = (begin if into == last else 0), into
            begin = _insert(slots.setdefault(into, []), begin, calls[rank][place], time_ns, rank, place, len(calls))
    before = [slot for slot, missing in sorted(slots.items()) for _ in missing]
    inserted = [each.places for _, missing in sorted(slots.items()) for each in missing]
    return np.insert(places, before, np.asarray(inserted), axis=0) if inserted else places


def _slot_of(slots: dict[int, list[_Missing]], within: range, call: np.void, rank: int) -> int:
    """The first of these slots in which other ranks have this call; else the first one."""
    for slot in within:
        if any(each.places[rank] < 0 and each.is_call(call, np.nan) for each in slots.get(slot, ())):
            return slot
    return within.start


def _join_run(
    slots: dict[int, list[_Missing]],
    into: int,
    calls: Sequence[Columns],
    draft: int,
    places: Matrix,
    rank: int,
    place: int,
) -> bool:
    """Takes a rank's call in slot `into` for what other ranks put elsewhere in the same run of equal calls.

    The draft lost one call of the run, and which one nothing tells: for all ranks it is the same.
    """
    symbol = calls[rank]["symbol"][place]
    for other in sorted(slots, key=lambda slot: abs(slot - into)):
        first, last = min(into, other), max(into, other)
        if (
            other == into
            or (calls[draft]["symbol"][first:last] != symbol).any()
            or (places[first:last, rank] < 0).any()
        ):
            continue
        for each in slots[other]:
            if each.places[rank] < 0 and each.call["symbol"] == symbol:
                own = places[first:last, rank].tolist()
                own.insert(0 if into < other else len(own), place)
                if own != list(range(own[0], own[0] + len(own))):
                    continue
                each.places[rank] = own.pop(-1 if into < other else 0)
                places[first:last, rank] = own
                return True
    return False


def _insert(
    missing: list[_Missing], begin: int, call: np.void, time_ns: float, rank: int, place: int, ranks: int
) -> int:
    """Puts a call to where other ranks have it, not before place `begin`; gives the place behind it."""
    at = begin
    while at < len(missing) and not missing[at].is_call(call, time_ns):
        if missing[at].time_ns > time_ns:
            break
        at += 1
    if at == len(missing) and np.isnan(time_ns):
        at = begin
    if at == len(missing) or missing[at].places[rank] >= 0 or not missing[at].is_call(call, time_ns):
        missing.insert(at, _Missing(call, time_ns, np.full(ranks, NO_NUMBER, np.int64)))
    missing[at].places[rank] = place
    return at + 1


def _sure_until(places: Matrix, others: list[int]) -> int:
    """How many collectives are placed for good: what follows them fits on all ranks, and is long enough."""
    if not others:
        return len(places)
    last = len(places) - (places[::-1][:, others] >= 0).argmax(axis=0)
    limit = max(1, int(last.min()) * 2 // 3)
    is_whole = (places[:, others] >= 0).all(axis=1)
    run = np.convolve(is_whole, np.ones(_SURE, np.int64))[_SURE - 1 :] == _SURE
    cuts = np.flatnonzero(run[: limit + 1])
    return int(cuts[-1]) if len(cuts) and cuts[-1] > 0 else max(1, limit // 2)
