"""One thread's expected launches beside the kernels it launched, and how they are paired: by time or by order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.coverage import Coverage
from ncclscope_service.items import items_of
from ncclscope_service.landmarks import Landmarks, between
from ncclscope_service.lanes import LANE_WINDOW, Lanes
from ncclscope_service.ordered import OrderedTrack
from ncclscope_service.pending import Choice, Outcome, Pending, spread
from ncclscope_service.plans import Plans, plans_of
from ncclscope_service.resumption import ENOUGH_BEHIND, Behind, Resumed, Resumption
from ncclscope_service.streams import PATIENCE_NS, UNBOUND, VOTES, majority, votes_by_time
from ncclscope_service.timed import TIMED_KERNEL, TIMED_LAUNCH, TimedTrack
from ncclscope_wire.batch import Columns

_AHEAD: Final = 2 * 65536
"""How far launches ahead of their kernels are looked at, in items beyond four per kernel."""


@dataclass(slots=True)
class Track:
    """Pending launches and kernels of one thread."""

    lanes: Lanes
    knows_groups: bool = False
    """What is launched together is known."""
    is_at_border: bool = False
    """The next pending kernel is behind a hole in what was recorded, and can be placed now."""
    has_moved: bool = False
    """Something was decided since it was last set back."""
    in_doubt: Behind | None = None
    """Kernels behind a hole of which it is not sure where they go on."""
    _guess: Resumed | None = None
    _pending: Pending = field(default_factory=Pending)
    _resumes: Resumption = field(default_factory=Resumption)
    _plans: Plans = field(default_factory=Plans)
    _used: int = 0
    """Launches decided so far."""
    _timed: TimedTrack = field(init=False)
    _ordered: OrderedTrack = field(init=False)

    def __post_init__(self) -> None:
        self._timed = TimedTrack(knows_groups=self.knows_groups)
        self._ordered = OrderedTrack(self.lanes)

    @property
    def launches(self) -> Columns:
        """The launches (LAUNCH) that are not decided yet, in call order."""
        return self._pending.launches

    @property
    def ids(self) -> NDArray[np.int64]:
        """The operations that those point into."""
        return self._pending.ids

    @property
    def kernels(self) -> Columns:
        """The kernels (TRACK_KERNEL) that are not decided yet, in launch order."""
        return self._pending.kernels

    @property
    def late_kernels(self) -> int:
        """Kernels that came after what follows them was decided, or twice."""
        return self._pending.late_kernels

    def begin_with_log(self) -> None:
        """The first kernel recorded is the first that was launched."""
        self._ordered.begin_with_log()

    def add_launches(self, launches: Columns, ids: NDArray[np.int64]) -> None:
        """Takes further launches in call order; `ids` are the operations their begin and end point into."""
        self._pending.add_launches(launches, ids)

    def add_kernels(self, kernels: Columns) -> None:
        """Takes further kernels in any order; those before what is decided, and doubles, are counted and left out."""
        self._pending.add_kernels(kernels)

    def withdraw(self, operations: NDArray[np.int64]) -> None:
        """Takes these operations out of the pending launches."""
        self._pending.withdraw(operations)

    def give_up(self, amount: int) -> Outcome:
        """Takes the oldest launches out without a kernel."""
        self._ordered.skip(amount)
        outcome = self._take(Choice.of_none(amount))
        return self._plans.gather(outcome) if self._pending.is_spread else outcome

    def finish(self) -> Outcome:
        """What was held because more of its kernels might have come."""
        return self._plans.gather(self._nothing(), final=True)

    def _nothing(self) -> Outcome:
        return self._take(Choice.of_none(0))

    def _take(self, choice: Choice) -> Outcome:
        outcome = self._pending.take(choice)
        self._resumes.remember(outcome.kernels, choice.kernel, outcome.launches["first_op"], self._used)
        self._used += len(choice.kernel)
        self.has_moved |= len(choice.kernel) + choice.kernels_used > 0
        return outcome

    # by time

    def pair_by_time(self, *, until_ns: int, final: bool) -> Outcome:
        """Decides what is over before `until_ns`; all of it with `final`."""
        launches = self._timed_launches()
        kernels = self._timed_kernels()
        blocked_at = self._bind_by_time(launches, kernels, until_ns=until_ns, final=final)
        launches["lane"] = self.lanes.pairs.kernel_lanes[self.launches["lane"]]
        if blocked_at is not None:
            before = whole_rows.kept(launches, launches["time_ns"] < blocked_at)
            launched = whole_rows.kept(kernels, kernels["time_ns"] < blocked_at)
            until_ns = min(until_ns, blocked_at - 1)
            pairs = self._timed.advance(before, launched, until_ns=until_ns, final=False)
        else:
            pairs = self._timed.advance(launches, kernels, until_ns=until_ns, final=final)
        no_hole = np.zeros(pairs.launches_used, dtype=bool)
        ids = self.kernels["id"]
        plans = plans_of(ids[pairs.further], ids[pairs.first_of_further])
        outcome = self._take(Choice(pairs.kernels, pairs.confidence, no_hole, pairs.kernels_used))
        return replace(outcome, plans=plans)

    def launched_together(self, since_ns: int, until_ns: int, kernels: Columns) -> tuple[Columns, NDArray[np.bool_]]:
        """Pending launches logged between two times, and which are launched with the next one of their lane.

        `kernels`: those of this thread whose launch time is known.
        """
        rows = self._timed_launches()
        rows["lane"] = self.lanes.pairs.kernel_lanes[rows["lane"]]
        near = (rows["time_ns"] > since_ns) & (rows["time_ns"] < until_ns)
        return self.launches[near], self._timed.joins_next(rows[near], kernels)

    def _timed_launches(self) -> Columns:
        rows = np.empty(len(self.launches), dtype=TIMED_LAUNCH)
        rows["position"] = np.arange(len(rows))
        rows["time_ns"] = np.maximum.accumulate(self.launches["logged_at_ns"]) if len(rows) else 0
        for name in ("lane", "signature", "classes", "data_type", "is_open", "may_split"):
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
        left, right = self._symbols(self.launches, self.kernels)
        return votes_by_time(launches, kernels, self.lanes.compatible()[left, right[next_one]])

    # by order

    def pair_by_order(
        self,
        *,
        before_op: int,
        collapse: bool,
        may_coalesce: bool,
        kinds: Columns,
        coverage: Coverage,
        may_ask: bool,
        final: bool,
    ) -> Outcome:
        """Decides what order alone settles, among launches that begin before an operation.

        Kernels up to a hole in what was recorded are decided on their own; `is_at_border` then says that there is
        more to decide. With `may_ask` there are other threads: kernels behind a hole whose place is not sure are
        left `in_doubt`. `collapse`, `may_coalesce`, `kinds`: as `OrderedTrack.pair` has them.
        """
        self._pending.spread()
        rows = self.launches[: np.searchsorted(self.launches["first_op"], before_op)]
        rows = rows if final else rows[: 4 * len(self.kernels) + _AHEAD]
        amount, is_border = self._resumes.next_border(self.kernels, coverage, final=final)
        self.is_at_border, self.in_doubt = False, None
        if is_border and amount == 0 and len(rows):
            return self._resume(rows, collapse=collapse, coverage=coverage, may_ask=may_ask, final=final)
        if amount == 0 and not final:
            return self._nothing()
        kernels = self.kernels[:amount]
        if is_border and not final and len(rows) < amount + LANE_WINDOW:
            return self._nothing()
        self.lanes.kernel_symbols.number(self.kernels)
        choice = self._ordered.pair(
            rows,
            kernels,
            collapse=collapse,
            may_coalesce=may_coalesce,
            kinds=kinds,
            is_closed=is_border,
            final=final or is_border,
        )
        self.is_at_border = is_border and amount > 0
        return self._plans.gather(self._take(choice))

    def _resume(self, rows: Columns, *, collapse: bool, coverage: Coverage, may_ask: bool, final: bool) -> Outcome:
        """Skips the launches of a hole in what was recorded; none while more must come first."""
        behind, is_over = self._resumes.next_border(self.kernels, coverage, final=True, is_behind=True)
        items, runs = self._ordered.items(rows, self.kernels[:behind], collapse=collapse, final=final)
        self.lanes.kernel_symbols.number(self.kernels)
        left, right = self._symbols(rows[items[:-1]], self.kernels[runs[:-1]])
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
        return self._go_on(Resumed(found.skipped, min(self._ordered.trust, found.trust)))

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
            return self._go_on(Resumed(guess.skipped, min(self._ordered.trust, guess.trust)))
        return self._go_on(Resumed(found.skipped, found.trust * min(other.trust for other in others)))

    def _go_on(self, found: Resumed) -> Outcome:
        self._resumes.go_on(self.kernels)
        self._ordered.trust = found.trust
        self.is_at_border, self.in_doubt = True, None
        return self.give_up(found.skipped)

    @property
    def trust(self) -> float:
        """How sure it is that pairs are not off by whole periods, after the last hole."""
        return self._ordered.trust

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
        launches = spread(self.launches)
        items, runs = items_of(launches, kernels, collapse=collapse, final=False)
        left, right = launches[items[:-1]], kernels[runs[:-1]]
        if len(left) < len(right) and not enough:
            return None
        amount = min(len(left), len(right))
        symbols, kernel_symbols = self._symbols(left[:amount], right[:amount])
        return bool(self.lanes.compatible()[symbols, kernel_symbols].all())

    def _symbols(self, launches: Columns, kernels: Columns) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Numbers by which `Lanes.compatible` tells which of these may be which."""
        return self.lanes.launch_symbols.number(launches), self.lanes.kernel_symbols.number(kernels)
