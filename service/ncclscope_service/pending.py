"""Launches and kernels of one thread that are not decided yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.align_rows import PLAN
from ncclscope_service.translate import LAUNCH
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

TRACK_KERNEL: Final = np.dtype(
    [
        ("id", "<i8"),
        ("correlation_id", "<i8"),
        ("time_ns", "<i8"),  # of its launch call; its start where that is not known
        ("tid", "<i8"),  # of its launch call; NO_NUMBER where it does not matter or is not known
        ("lane", "<i4"),
        ("device", "<i4"),
        ("kernel_class", "<u1"),
        ("data_type", "<i2"),
        ("is_orphan", "?"),  # its launch call is in no export
        ("duration_ns", "<i8"),  # 0 where it is not known
        ("grid_x", "<i4"),  # likewise
    ]
)
"""One kernel of a thread, in order of launching."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is decided of the launches from the front."""

    kernel: NDArray[np.int64]
    """Index of each launch's kernel; several launches may share one; NO_NUMBER: there is none."""
    confidence: NDArray[np.float32]
    is_hole: NDArray[np.bool_]
    """Launches in a stretch that no capture seems to hold."""
    kernels_used: int = 0

    @classmethod
    def of_none(cls, amount: int) -> Choice:
        """So many launches have no kernel."""
        return cls(np.full(amount, NO_NUMBER, np.int64), np.zeros(amount, np.float32), np.ones(amount, bool))


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
    plans: Columns = field(default_factory=lambda: np.empty(0, PLAN))
    """Further kernels of these launches (align_rows.PLAN)."""


def spread(launches: Columns) -> Columns:
    """One row for each kernel that the launches (LAUNCH) are known to take; only the first has the operations."""
    if not (launches["plans"] > 1).any():
        return launches
    amounts = np.where(launches["plan"] == 0, np.maximum(launches["plans"], 1), 1)
    rows = whole_rows.taken(launches, np.repeat(np.arange(len(launches)), amounts))
    within = np.arange(len(rows)) - np.repeat(np.cumsum(amounts) - amounts, amounts)
    rows["plan"] = np.where(np.repeat(launches["plan"], amounts) == 0, within, rows["plan"])
    rows["begin"] = np.where(rows["plan"] > 0, rows["end"], rows["begin"])
    return rows


@dataclass(slots=True)
class Pending:
    """What one thread has logged and launched, in order, until it is taken."""

    launches: Columns = field(default_factory=lambda: np.empty(0, dtype=LAUNCH))
    ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The operations that the launches' begin and end point into."""
    kernels: Columns = field(default_factory=lambda: np.empty(0, dtype=TRACK_KERNEL))
    late_kernels: int = 0
    """Kernels that came after what follows them was decided, or twice."""
    is_spread: bool = False
    """There is a row for each kernel that a launch is known to take."""
    _last_correlation: int = -(2**63)

    def add_launches(self, launches: Columns, ids: NDArray[np.int64]) -> None:
        """Takes further launches; `ids` are the operations their begin and end point into."""
        self._append(spread(launches) if self.is_spread else launches, ids)

    def spread(self) -> None:
        """From now on there is a row for each kernel that a launch is known to take."""
        if not self.is_spread:
            self.is_spread, self.launches = True, spread(self.launches)

    def _append(self, launches: Columns, ids: NDArray[np.int64]) -> None:
        lengths = launches["end"] - launches["begin"]
        added = whole_rows.copied(launches)
        added["end"] = np.cumsum(lengths) + len(self.ids)
        added["begin"] = added["end"] - lengths
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self.ids = np.concatenate([self.ids, ids[np.repeat(launches["begin"], lengths) + within]])
        is_ordered = len(self.launches) == 0 or added["first_op"][0] > self.launches["first_op"][-1]
        self.launches = whole_rows.joined([self.launches, added])
        if not is_ordered:
            self._sort_launches()

    def _sort_launches(self) -> None:
        rows = whole_rows.taken(self.launches, np.argsort(self.launches["first_op"], kind="stable"))
        ids, self.launches, self.ids = self.ids, rows[:0], np.empty(0, dtype=np.int64)
        self._append(rows, ids)

    def add_kernels(self, kernels: Columns) -> None:
        """Takes further kernels in any order; those before what is decided, and doubles, are counted and left out."""
        is_new = kernels["correlation_id"] > self._last_correlation
        new = kernels if is_new.all() else whole_rows.kept(kernels, is_new)
        merged = whole_rows.joined([self.kernels, new])
        if len(merged) > 1 and not np.all(merged["correlation_id"][1:] > merged["correlation_id"][:-1]):
            _, first = np.unique(merged["correlation_id"], return_index=True)
            merged = whole_rows.taken(merged, first)
        self.late_kernels += len(kernels) - (len(merged) - len(self.kernels))
        self.kernels = merged

    def withdraw(self, operations: NDArray[np.int64]) -> None:
        """Takes these operations out of the launches."""
        gone = np.isin(self.ids, operations)
        if not gone.any():
            return
        kept = np.concatenate([[0], np.cumsum(~gone)])
        self.ids = self.ids[~gone]
        launches = self.launches.copy()
        launches["begin"], launches["end"] = kept[launches["begin"]], kept[launches["end"]]
        has_any = (launches["begin"] < launches["end"]) | (launches["plan"] > 0)
        launches = launches[has_any & ~((launches["plan"] > 0) & np.isin(launches["first_op"], operations))]
        whole = launches["plan"] == 0
        launches["first_op"][whole] = self.ids[launches["begin"][whole]]
        self.launches = launches

    def take(self, choice: Choice) -> Outcome:
        """Takes out the launches and the kernels that are decided."""
        used, kernels_used = len(choice.kernel), choice.kernels_used
        cut = int(self.launches["end"][used - 1]) if used else 0
        outcome = Outcome(
            launches=self.launches[:used],
            ids=self.ids[:cut],
            kernel=choice.kernel,
            confidence=choice.confidence,
            kernels=self.kernels[:kernels_used],
            is_hole=choice.is_hole,
        )
        if used:
            self.launches = whole_rows.copied(self.launches[used:])
            self.launches["begin"] -= cut
            self.launches["end"] -= cut
            self.ids = self.ids[cut:].copy()
        if kernels_used:
            self._last_correlation = int(self.kernels["correlation_id"][kernels_used - 1])
            self.kernels = whole_rows.copied(self.kernels[kernels_used:])
        return outcome
