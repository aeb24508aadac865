"""One thread's expected launches beside the kernels it launched, and how they are paired: by time or by order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.coverage import Coverage
from ncclscope_service.kernel_name import KernelClass
from ncclscope_service.landmarks import Landmarks, between
from ncclscope_service.resumption import ENOUGH_BEHIND, Behind, Resumed, Resumption
from ncclscope_service.segment import Divider, Kind
from ncclscope_service.sequence import CERTAIN, FIRST_STRAIGHT, Decided, Experience, Pairing, Sides
from ncclscope_service.signatures import Signatures
from ncclscope_service.streams import (
    FREE,
    PATIENCE_NS,
    UNBOUND,
    VOTES,
    LanePairs,
    lanes_by_order,
    majority,
    votes_by_time,
)
from ncclscope_service.timed import TIMED_KERNEL, TIMED_LAUNCH, GroupVotes, TimedTrack
from ncclscope_service.translate import LAUNCH
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

TRACK_KERNEL: Final = np.dtype(
    [
        ("id", "<i8"),
        ("correlation_id", "<i8"),
        ("time_ns", "<i8"),  # of its launch call; its start where that is not known
        ("lane", "<i4"),
        ("device", "<i4"),
        ("kernel_class", "<u1"),
        ("data_type", "<i2"),
        ("is_orphan", "?"),  # its launch call is in no export
        ("duration_ns", "<i8"),  # 0 where it is not known
    ]
)
"""One kernel of a thread, in order of launching."""

_LANE_WINDOW: Final = 512
"""Launches and kernels that are aligned to see which stream is which."""

_LANE_SAMPLE: Final = 256
"""Those of them that are tried with each answer."""

UNANCHORED: Final = 0.5
"""What is believed of pairs that may be off by whole periods."""

_AHEAD: Final = 2 * 65536
"""How far launches ahead of their kernels are looked at, in items beyond four per kernel."""


@dataclass(slots=True)
class Lanes:
    """What all threads of a process share: lanes and their pairing."""

    pairs: LanePairs = field(default_factory=LanePairs)
    devices: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Device of each lane of the log."""
    launch_symbols: Signatures = field(default_factory=lambda: Signatures(("lane", "classes", "data_type")))
    kernel_symbols: Signatures = field(
        default_factory=lambda: Signatures(("lane", "device", "kernel_class", "data_type"))
    )

    def grow(self, devices: NDArray[np.int32]) -> None:
        """Takes in lanes of the log that appeared."""
        self.devices = devices
        self.pairs.grow(len(devices))

    def compatible(self) -> NDArray[np.bool_]:
        """Which launch symbol may be which kernel symbol, by lane, device, class and type."""
        if len(self.launch_symbols) == 0 or len(self.kernel_symbols) == 0:
            return np.zeros((len(self.launch_symbols), len(self.kernel_symbols)), dtype=bool)
        launches, kernels = self.launch_symbols.rows, self.kernel_symbols.rows
        lanes = self.pairs.kernel_lanes[launches["lane"]]
        # The log's [dev] is the current device of the calling thread: a hint only where there are several.
        several = len(np.unique(self.devices)) > 1 and len(np.unique(kernels["device"])) > 1
        devices = self.devices[launches["lane"]] if several else np.full(len(launches), NO_NUMBER)
        at_home = devices[:, None] == kernels["device"][None, :]
        at_home |= (devices == NO_NUMBER)[:, None]
        fits = np.where((lanes < 0)[:, None], at_home, lanes[:, None] == kernels["lane"][None, :])
        compatible: NDArray[np.bool_] = fits & self._same_kind(launches, kernels)
        return compatible

    def fits(self, launches: Columns, kernels: Columns) -> NDArray[np.bool_]:
        """fits[i, j]: launch i may be kernel j, by lane, device, class and type."""
        left, right = self.launch_symbols.number(launches), self.kernel_symbols.number(kernels)
        table: NDArray[np.bool_] = self.compatible()[left][:, right]
        return table

    @staticmethod
    def _same_kind(launches: Columns, kernels: Columns) -> NDArray[np.bool_]:
        bits = launches["classes"][:, None] >> kernels["kernel_class"][None, :].astype(np.uint32)
        types = launches["data_type"][:, None] == kernels["data_type"][None, :]
        types |= (kernels["data_type"] == NO_NUMBER)[None, :] | (launches["data_type"] == NO_NUMBER)[:, None]
        kinds: NDArray[np.bool_] = (bits & 1 == 1) & types
        return kinds


@dataclass(frozen=True, slots=True)
class Outcome:
    """Launches that are decided, in order, with the position of their kernel in `kernels`."""

    launches: Columns
    """LAUNCH rows; begin and end point into `ids`."""
    ids: NDArray[np.int64]
    kernel: NDArray[np.int64]
    """Index into `kernels`; NO_NUMBER where none was found."""
    confidence: NDArray[np.float32]
    kernels: Columns
    is_hole: NDArray[np.bool_]
    """Launches in a stretch that no capture seems to hold."""


@dataclass(slots=True)
class Track:
    """Pending launches and kernels of one thread."""

    lanes: Lanes
    launches: Columns = field(default_factory=lambda: np.empty(0, dtype=LAUNCH))
    ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    kernels: Columns = field(default_factory=lambda: np.empty(0, dtype=TRACK_KERNEL))
    late_kernels: int = 0
    """Kernels that came after what follows them was decided, or twice."""
    _last_correlation: int = -(2**63)
    trust: float = 1.0
    """How sure it is that pairs are not off by whole periods, after the last hole."""
    is_at_border: bool = False
    """The next pending kernel is behind a hole in what was recorded, and can be placed now."""
    in_doubt: Behind | None = None
    """Kernels behind a hole of which it is not sure where they go on."""
    _guess: Resumed | None = None
    _resumes: Resumption = field(default_factory=Resumption)
    knows_groups: bool = False
    """What is launched together is known."""
    may_coalesce: bool = False
    """Whether collectives may have been launched together without the log telling."""
    _used: int = 0
    """Launches decided so far."""
    _votes_of_order: GroupVotes = field(default_factory=GroupVotes)
    _timed: TimedTrack = field(default_factory=TimedTrack)
    _experience: Experience = field(default_factory=Experience)
    _divider: Divider = field(default_factory=Divider)
    _kinds: dict[int, Kind] = field(default_factory=dict[int, Kind])

    def __post_init__(self) -> None:
        self._timed.knows_groups = self.knows_groups

    def add_launches(self, launches: Columns, ids: NDArray[np.int64]) -> None:
        """Takes further launches in call order; `ids` are the operations their begin and end point into."""
        lengths = launches["end"] - launches["begin"]
        added = launches.copy()
        added["end"] = np.cumsum(lengths) + len(self.ids)
        added["begin"] = added["end"] - lengths
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self.ids = np.concatenate([self.ids, ids[np.repeat(launches["begin"], lengths) + within]])
        is_ordered = len(self.launches) == 0 or added["first_op"][0] > self.launches["first_op"][-1]
        self.launches = np.concatenate([self.launches, added])
        if not is_ordered:
            self._sort_launches()

    def _sort_launches(self) -> None:
        rows = self.launches[np.argsort(self.launches["first_op"], kind="stable")]
        ids, self.launches, self.ids = self.ids, rows[:0], np.empty(0, dtype=np.int64)
        self.add_launches(rows, ids)

    def add_kernels(self, kernels: Columns) -> None:
        """Takes further kernels in any order; those before what is decided, and doubles, are counted and left out."""
        new = kernels[kernels["correlation_id"] > self._last_correlation]
        merged = np.concatenate([self.kernels, new])
        if len(merged) > 1 and not np.all(merged["correlation_id"][1:] > merged["correlation_id"][:-1]):
            _, first = np.unique(merged["correlation_id"], return_index=True)
            merged = merged[first]
        self.late_kernels += len(kernels) - (len(merged) - len(self.kernels))
        self.kernels = merged

    def pair_by_time(self, *, until_ns: int, final: bool) -> Outcome:
        """Decides what is over before `until_ns`; all of it with `final`."""
        launches = self._timed_launches()
        kernels = self._timed_kernels()
        blocked_at = self._bind_by_time(launches, kernels, until_ns=until_ns, final=final)
        launches["lane"] = self.lanes.pairs.kernel_lanes[self.launches["lane"]]
        if blocked_at is not None:
            before = launches[launches["time_ns"] < blocked_at]
            until_ns = min(until_ns, blocked_at - 1)
            pairs = self._timed.advance(
                before, kernels[kernels["time_ns"] < blocked_at], until_ns=until_ns, final=False
            )
        else:
            pairs = self._timed.advance(launches, kernels, until_ns=until_ns, final=final)
        hole = np.zeros(pairs.launches_used, dtype=bool)
        return self._take(pairs.launches_used, pairs.kernels_used, pairs.kernels, pairs.confidence, hole)

    def launched_together(self, since_ns: int, until_ns: int, kernels: Columns) -> tuple[Columns, NDArray[np.bool_]]:
        """Pending launches logged between two times, and which are launched with the next one of their lane.

        `kernels`: those of this thread whose launch time is known.
        """
        rows = self._timed_launches()
        rows["lane"] = self.lanes.pairs.kernel_lanes[rows["lane"]]
        near = (rows["time_ns"] > since_ns) & (rows["time_ns"] < until_ns)
        return self.launches[near], self._timed.joins_next(rows[near], kernels)

    def pair_by_order(
        self, *, before_op: int, collapse: bool, kinds: Columns, coverage: Coverage, may_ask: bool, final: bool
    ) -> Outcome:
        """Decides what order alone settles, among launches that begin before an operation.

        `kinds` are the operations' signatures, for runs of Send and Recv. Kernels up to a hole in what was recorded
        are decided on their own; `is_at_border` then says that there is more to decide. With `may_ask` there are
        other threads: kernels behind a hole whose place is not sure are left `in_doubt`.
        """
        rows = self.launches[: np.searchsorted(self.launches["first_op"], before_op)]
        rows = rows if final else rows[: 4 * len(self.kernels) + _AHEAD]
        amount, is_border = self._resumes.next_border(self.kernels, coverage, final=final)
        self.is_at_border, self.in_doubt = False, None
        if is_border and amount == 0 and len(rows):
            return self._resume(rows, collapse=collapse, coverage=coverage, may_ask=may_ask, final=final)
        if amount == 0 and not final:
            return self._nothing()
        kernels = self.kernels[:amount]
        if is_border and not final and len(rows) < amount + _LANE_WINDOW:
            return self._nothing()
        items, runs = self._items(rows, kernels, collapse=collapse, final=final or is_border)
        decided = self._paired(rows, kernels, (items, runs), is_closed=is_border, final=final or is_border)
        outcome = self._spread(rows, decided, kinds)
        self.is_at_border = is_border and amount > 0
        return outcome

    def _nothing(self) -> Outcome:
        return self._take(0, 0, np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, bool))

    def _resume(self, rows: Columns, *, collapse: bool, coverage: Coverage, may_ask: bool, final: bool) -> Outcome:
        """Skips the launches of a hole in what was recorded; none while more must come first."""
        behind, is_over = self._resumes.next_border(self.kernels, coverage, final=True, is_behind=True)
        items, runs = self._items(rows, self.kernels[:behind], collapse=collapse, final=final)
        left, right = self._launch_symbols(rows[items[:-1]]), self._kernel_symbols(self.kernels[runs[:-1]])
        operations, kernels = rows["first_op"][items[:-1]], self.kernels[runs[:-1]]
        given = Behind(items, operations, left, kernels, right, self.lanes.compatible())
        if not (final or is_over or len(kernels) >= ENOUGH_BEHIND):
            return self._nothing()
        found = self._resumes.find(given, self._used, final=final)
        if found is None:
            return self._nothing()
        if may_ask and not found.is_sure:
            self.in_doubt, self._guess = given, found
            return self._nothing()
        return self._go_on(Resumed(found.skipped, min(self.trust, found.trust)))

    @property
    def doubt(self) -> float:
        """How unsure the place of the kernels in doubt is, between 0 and 1."""
        return 1.0 - self._guess.trust if self._guess is not None else 0.0

    def resume_between(self, others: Sequence[Track], *, final: bool) -> Outcome:
        """Places the kernels in doubt by what other threads launched meanwhile; nothing while more must come first."""
        assert self.in_doubt is not None, "only a thread in doubt asks"
        assert self._guess is not None, "a thread in doubt has a guess"
        given, guess = self.in_doubt, self._guess
        told = between([other.landmarks for other in others], given.ids)
        found = self._resumes.find_between(given, told, self._used, guess, final=final)
        if found is None:
            return self._nothing()
        if found is guess:
            return self._go_on(Resumed(guess.skipped, min(self.trust, guess.trust)))
        return self._go_on(Resumed(found.skipped, found.trust * min(other.trust for other in others)))

    def _go_on(self, found: Resumed) -> Outcome:
        self._resumes.go_on(self.kernels)
        self.trust = found.trust
        self.is_at_border, self.in_doubt = True, None
        return self.give_up(found.skipped)

    @property
    def landmarks(self) -> Landmarks:
        """The pairs behind the last hole."""
        return self._resumes.landmarks

    def stretch(self, coverage: Coverage) -> int | None:
        """Number of the recorded stretch that the next kernel is in; None without one."""
        return self._resumes.stretch_of_next(self.kernels, coverage) if len(self.kernels) else None

    def has_passed(self, correlation_id: int) -> bool:
        """Whether all kernels up to a correlation id are decided."""
        return len(self.kernels) == 0 or int(self.kernels["correlation_id"][0]) > correlation_id

    def agrees_with(self, kernels: Columns, *, collapse: bool, enough: bool) -> bool | None:
        """Whether the first pending launches may be these kernels, one by one; None if `enough` is yet to come."""
        items, runs = self._items(self.launches, kernels, collapse=collapse, final=False)
        left = self.launches[items[:-1]]
        right = kernels[runs[:-1]]
        if len(left) < len(right) and not enough:
            return None
        amount = min(len(left), len(right))
        symbols, kernel_symbols = self._launch_symbols(left[:amount]), self._kernel_symbols(right[:amount])
        return bool(self.lanes.compatible()[symbols, kernel_symbols].all())

    def give_up(self, amount: int) -> Outcome:
        """Takes the oldest launches out without a kernel."""
        nothing = np.full(amount, NO_NUMBER, dtype=np.int64)
        return self._take(amount, 0, nothing, np.zeros(amount, np.float32), np.ones(amount, bool))

    def withdraw(self, operations: NDArray[np.int64]) -> None:
        """Takes these operations out of the pending launches."""
        gone = np.isin(self.ids, operations)
        if not gone.any():
            return
        kept = np.concatenate([[0], np.cumsum(~gone)])
        self.ids = self.ids[~gone]
        launches = self.launches.copy()
        launches["begin"], launches["end"] = kept[launches["begin"]], kept[launches["end"]]
        launches = launches[launches["begin"] < launches["end"]]
        launches["first_op"] = self.ids[launches["begin"]]
        self.launches = launches

    # by time

    def _timed_launches(self) -> Columns:
        rows = np.empty(len(self.launches), dtype=TIMED_LAUNCH)
        rows["position"] = np.arange(len(rows))
        rows["time_ns"] = np.maximum.accumulate(self.launches["logged_at_ns"]) if len(rows) else 0
        for name in ("lane", "signature", "classes", "data_type", "is_open"):
            rows[name] = self.launches[name]
        return rows

    def _timed_kernels(self) -> Columns:
        rows = np.empty(len(self.kernels), dtype=TIMED_KERNEL)
        rows["position"] = np.arange(len(rows))
        rows["time_ns"] = np.maximum.accumulate(self.kernels["time_ns"]) if len(rows) else 0
        for name in ("lane", "kernel_class", "data_type"):
            rows[name] = self.kernels[name]
        return rows

    def _bind_by_time(self, launches: Columns, kernels: Columns, *, until_ns: int, final: bool) -> int | None:
        """Pairs lanes that appeared; gives the time from which on nothing can be decided because one is open."""
        pairs = self.lanes.pairs
        unbound = pairs.kernel_lanes[launches["lane"]] == UNBOUND
        if not unbound.any():
            return None
        votes = self._votes(launches, kernels)
        blocked_at: int | None = None
        for lane in np.unique(launches["lane"][unbound]).tolist():
            of_lane = launches["lane"] == lane
            begin = int(launches["time_ns"][of_lane][0])
            chosen = votes[of_lane & (votes != UNBOUND) & (launches["time_ns"] <= begin + PATIENCE_NS)][:VOTES]
            is_over = final or until_ns > begin + PATIENCE_NS
            if len(chosen) == VOTES or (is_over and len(chosen)):
                pairs.bind(lane, majority(chosen))
            elif not is_over:
                blocked_at = begin if blocked_at is None else min(begin, blocked_at)
        return blocked_at

    def _votes(self, launches: Columns, kernels: Columns) -> NDArray[np.int32]:
        if len(kernels) == 0:
            return np.full(len(launches), UNBOUND, dtype=np.int32)
        next_one = np.minimum(np.searchsorted(kernels["time_ns"], launches["time_ns"], side="left"), len(kernels) - 1)
        left, right = self._launch_symbols(self.launches), self._kernel_symbols(self.kernels)
        fits = self.lanes.compatible()[left, right[next_one]]
        return votes_by_time(launches, kernels, fits)

    # by order

    def _launch_symbols(self, rows: Columns) -> NDArray[np.int32]:
        self.lanes.launch_symbols.number(rows)
        self.lanes.kernel_symbols.number(self.kernels)
        return self.lanes.launch_symbols.number(rows)

    def _kernel_symbols(self, rows: Columns) -> NDArray[np.int32]:
        return self.lanes.kernel_symbols.number(rows)

    def _items(
        self, launches: Columns, kernels: Columns, *, collapse: bool, final: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each item begins, on both sides, with the end appended: one launch, or a run of Send and Recv."""
        if not collapse:
            return np.arange(len(launches) + 1), np.arange(len(kernels) + 1)
        is_p2p = launches["classes"] & (1 << int(KernelClass.SEND_RECV)) != 0
        is_kernel_p2p = kernels["kernel_class"] == KernelClass.SEND_RECV
        return (
            _runs(launches["lane"], is_p2p, final=final),
            _runs(kernels["lane"], is_kernel_p2p, final=final),
        )

    def _paired(
        self,
        rows: Columns,
        kernels: Columns,
        ends: tuple[NDArray[np.int64], NDArray[np.int64]],
        *,
        is_closed: bool,
        final: bool,
    ) -> Decided:
        """With `is_closed` the kernels are all there are before a hole, though there are more launches."""
        items, runs = ends
        rows, kernels = rows[: int(items[-1])], kernels[: int(runs[-1])]
        joinable = np.zeros(len(rows), dtype=bool)
        joinable[1:] = rows["is_open"][1:] & rows["is_open"][:-1] & (rows["lane"][1:] == rows["lane"][:-1])
        sides = Sides(rows, kernels, self._launch_symbols(rows), self._kernel_symbols(kernels), items, runs, joinable)
        pairing = Pairing(sides, self._experience)
        while True:
            used = pairing.launches_used
            unbound = self.lanes.pairs.kernel_lanes[rows["lane"][used:]] == UNBOUND
            limit = used + int(unbound.argmax()) if unbound.any() else None
            if limit == used:
                waiting, free = pairing.waiting(_LANE_WINDOW)
                if self._bind_by_order(rows[waiting], kernels[free], final=final):
                    continue
                break
            pairing.run(self.lanes.compatible(), final=final, is_closed=is_closed, limit=limit)
            if limit is None or pairing.launches_used == used:
                break
        decided = pairing.decided
        decided.launches_used, decided.kernels_used = pairing.launches_used, pairing.kernels_used
        if is_closed:
            decided.kernels_used = len(kernels)
        elif final:
            decided.launches_used, decided.kernels_used = len(rows), len(kernels)
        return decided

    def _bind_by_order(self, launches: Columns, kernels: Columns, *, final: bool) -> bool:
        """Pairs the lane of the first launch, and others beside it; False if more data must come first."""
        left, right = self._launch_symbols(launches[:_LANE_WINDOW]), self._kernel_symbols(kernels[:_LANE_WINDOW])
        shorter = min(len(left), len(right))
        table = self.lanes.compatible()
        agreeing = table[left[:shorter], right[:shorter]]
        straight = int((~agreeing).argmax()) if not agreeing.all() else shorter
        lane = int(launches["lane"][0])
        if straight >= FIRST_STRAIGHT or (final and straight == shorter and shorter):
            of_lane = launches["lane"][: min(straight, FIRST_STRAIGHT)] == lane
            seen = kernels["lane"][: len(of_lane)][of_lane]
            if np.all(seen == seen[0]):
                self.lanes.pairs.bind(lane, int(seen[0]))
                return True
        if not final and (len(left) < _LANE_WINDOW or len(right) < _LANE_WINDOW):
            return False
        left, right = left[:_LANE_SAMPLE], right[:_LANE_SAMPLE]
        found = lanes_by_order(launches["lane"][: len(left)], kernels["lane"][: len(right)], table[left][:, right])
        for one, kernel_lane in found.items():
            if not self.lanes.pairs.is_bound(one):
                self.lanes.pairs.bind(one, kernel_lane)
        if not self.lanes.pairs.is_bound(lane):
            self.lanes.pairs.bind(lane, FREE)
        return True

    def _spread(self, rows: Columns, decided: Decided, signatures: Columns) -> Outcome:
        """From pairs to launches: those of a run are divided among its kernels."""
        used = decided.launches_used
        kernel = np.full(used, NO_NUMBER, dtype=np.int64)
        confidence = np.full(used, 0.9, dtype=np.float32)
        is_hole = np.zeros(used, dtype=bool)
        for begin, end in decided.holes:
            is_hole[begin:end] = True
        for found in decided.pairs:
            single = (found.launch_counts == 1) & (found.kernel_counts == 1)
            kernel[found.launches[single]] = found.kernels[single]
            confidence[found.launches[single]] = found.confidence[single]
            for index in np.flatnonzero(~single).tolist():
                begin, first = int(found.launches[index]), int(found.kernels[index])
                kinds = self._kinds_of(rows[begin : begin + int(found.launch_counts[index])], signatures)
                groups, how_sure = self._divider.divide(kinds, int(found.kernel_counts[index]))
                kernel[begin : begin + len(groups)] = first + groups
                confidence[begin : begin + len(groups)] = how_sure * found.confidence[index] / CERTAIN
        self._doubt(confidence, decided.holes[0][0] if decided.holes else used)
        if self.may_coalesce:
            self._coalesce(rows[:used], kernel, confidence)
        return self._take(used, decided.kernels_used, kernel, confidence, is_hole)

    def _doubt(self, confidence: NDArray[np.float32], hole: int) -> None:
        """Lowers what order says where it may be off by whole periods: a program that repeats fits anywhere."""
        confidence[:hole] *= self.trust * (UNANCHORED + (1 - UNANCHORED) * self._experience.starts)
        if hole < len(confidence):
            self.trust = min(self.trust, UNANCHORED)
            confidence[hole:] *= self.trust * (UNANCHORED + (1 - UNANCHORED) * self._experience.starts)

    def _coalesce(self, rows: Columns, kernel: NDArray[np.int64], confidence: NDArray[np.float32]) -> None:
        """Gives collectives whose neighbour has a kernel, time and again, while they have none, that same kernel.

        Equal collectives of one group are one launch, which nothing in the log tells where opCount does not count.
        """
        before, after = np.arange(len(rows) - 1), np.arange(1, len(rows))
        matched = kernel != NO_NUMBER
        same = (rows["lane"][before] == rows["lane"][after]) & (rows["classes"][before] == rows["classes"][after])
        same &= (matched[before]) & ~rows["is_open"][before]
        before, after = before[same], after[same]
        if len(before) == 0:
            return
        keys = rows["signature"][before].astype(np.int64) << 32 | rows["signature"][after]
        together = ~matched[after]
        # Frameworks coalesce different tensors; a run of one and the same call is rather one that lost a kernel.
        prior = np.where(rows["signature"][before] != rows["signature"][after], 0.6, 0.1)
        share = self._votes_of_order.share(keys, together, prior)
        joined = together & (share > 0.5)
        kernel[after[joined]] = kernel[before[joined]]
        confidence[after[joined]] = share[joined]
        confidence[before[joined]] = np.maximum(confidence[before[joined]], share[joined])

    def _kinds_of(self, rows: Columns, signatures: Columns) -> tuple[Kind, ...]:
        return tuple(
            (int(signatures["op"][number]), int(signatures["root"][number]), bool(is_open))
            for number, is_open in zip(rows["signature"].tolist(), rows["is_open"].tolist(), strict=True)
        )

    # both

    def _take(
        self,
        used: int,
        kernels_used: int,
        kernel: NDArray[np.int64],
        confidence: NDArray[np.float32],
        is_hole: NDArray[np.bool_],
    ) -> Outcome:
        cut = int(self.launches["end"][used - 1]) if used else 0
        outcome = Outcome(
            launches=self.launches[:used],
            ids=self.ids[:cut],
            kernel=kernel,
            confidence=confidence,
            kernels=self.kernels[:kernels_used],
            is_hole=is_hole,
        )
        self._resumes.remember(self.kernels, kernel, outcome.launches["first_op"], kernels_used, self._used)
        self._used += used
        if used:
            self.launches = self.launches[used:].copy()
            self.launches["begin"] -= cut
            self.launches["end"] -= cut
            self.ids = self.ids[cut:].copy()
        if kernels_used:
            self._last_correlation = int(self.kernels["correlation_id"][kernels_used - 1])
            self.kernels = self.kernels[kernels_used:].copy()
        return outcome


def _runs(lanes: NDArray[np.int32], is_p2p: NDArray[np.bool_], *, final: bool) -> NDArray[np.int64]:
    """Where each item begins, with the end appended; a run at the end is left out while it may still grow."""
    if len(lanes) == 0:
        return np.zeros(1, dtype=np.int64)
    goes_on = is_p2p[1:] & is_p2p[:-1] & (lanes[1:] == lanes[:-1])
    begins = np.concatenate([[0], np.flatnonzero(~goes_on) + 1])
    if is_p2p[-1] and not final:
        return begins.astype(np.int64)
    return np.append(begins, len(lanes)).astype(np.int64)
