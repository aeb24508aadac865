"""Which training iteration an operation belongs to, from the NVTX marks of its process.

Frameworks mark iterations with ranges or marks such as "iteration 12", "step_12" or "train_step #12"; the
operation belongs to the last one that began before the operation was enqueued. Without such marks `periods` tells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.distinct import groups
from ncclscope_service.rows import IterationBy
from ncclscope_service.store import Ids, Store
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_MARK: Final = re.compile(r"^(?:train(?:ing)?[ _]?)?(?:iteration|iter|step|batch)[ _#:=]*(\d{1,9})$", re.IGNORECASE)

_RECENT_MARKS: Final = 20
_A_LONG_STEP_NS: Final = 60_000_000_000
"""What an iteration may last of which only the beginning is known."""


@dataclass(slots=True)
class _Marks:
    """Iteration marks of one process, by start."""

    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    numbers: NDArray[np.int32]

    def step_ns(self) -> int | None:
        """The duration of a recent iteration, from marks of consecutive iterations; None where there are none."""
        consecutive = np.diff(self.numbers) == 1
        steps = np.diff(self.starts_ns)[consecutive][-_RECENT_MARKS:]
        return int(np.median(steps)) if len(steps) else None

    def is_sure(self) -> NDArray[np.bool_]:
        """Whether the end of each iteration was recorded, or the beginning of the next."""
        sure: NDArray[np.bool_] = self.ends_ns != NO_TIME_NS
        sure[:-1] |= np.diff(self.numbers) == 1
        return sure

    def valid_until_ns(self) -> NDArray[np.int64]:
        """The end of each iteration. One that was not recorded lasts as long as usual, and a half more."""
        step = self.step_ns()
        usual = self.starts_ns + (_A_LONG_STEP_NS if step is None else step * 3 // 2)
        return np.where(self.ends_ns == NO_TIME_NS, usual, self.ends_ns)


class Iterations:
    """Follows the iteration marks in a store's ranges and numbers operations by them."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._read_upto = 0
        self._number_of_text: dict[int, int | None] = {}
        self._marks: dict[int, _Marks] = {}
        self._steps_ns: dict[int, int] = {}
        """By process, where its marks tell it."""

    def assign(self, operations: Ids) -> None:
        """Sets `iteration` of these operations where a mark tells it."""
        self.read_marks()
        if not self._marks or not len(operations):
            return
        rows = self._store.operations.take(operations, "process", "logged_at_ns", "kernel")
        enqueued_at = self._enqueued_at(rows)
        for process, mine in groups(rows["process"]):
            marks = self._marks.get(process)
            if marks is None:
                continue
            chosen = mine[enqueued_at[mine] != NO_TIME_NS]
            times = enqueued_at[chosen]
            at = np.searchsorted(marks.starts_ns, times, side="right") - 1
            inside = (at >= 0) & (times <= marks.valid_until_ns()[np.maximum(at, 0)])
            at = at[inside]
            self._write(self._store.operations.at(operations[chosen[inside]]), marks.numbers[at], marks.is_sure()[at])

    def _write(self, positions: NDArray[np.intp], numbers: NDArray[np.int32], sure: NDArray[np.bool_]) -> None:
        """Where only the length of an iteration tells that it still lasts, the period knows better."""
        rows = self._store.operations.rows
        rows["iteration_by"][positions[sure]] = IterationBy.MARKS
        telling = sure | (rows["iteration_by"][positions] != IterationBy.PERIOD)
        rows["iteration"][positions[telling]] = numbers[telling]

    def step_ns(self) -> int | None:
        """The duration of a recent iteration: the median over processes; None without marks, where `periods` tells."""
        return int(np.median(list(self._steps_ns.values()))) if self._steps_ns else None

    def _enqueued_at(self, rows: NDArray[np.void]) -> NDArray[np.int64]:
        """Host time of the launch call, else of the log line."""
        times: NDArray[np.int64] = rows["logged_at_ns"].copy()
        with_kernel = np.flatnonzero(rows["kernel"] >= self._store.kernels.first)
        launched = self._store.kernels.take(rows["kernel"][with_kernel], "launch_start_ns")["launch_start_ns"]
        times[with_kernel] = np.where(launched != NO_TIME_NS, launched, times[with_kernel])
        return times

    def read_marks(self) -> set[int]:
        """Reads the ranges that came since the last call; gives the processes of which marks are among them."""
        ranges = self._store.ranges
        new = ranges.rows[max(0, self._read_upto - ranges.first) :]
        self._read_upto = ranges.next_id
        if not len(new):
            return set()
        texts, inverse = np.unique(new["text"], return_inverse=True)
        numbers = np.asarray([self._number(text) for text in texts.tolist()], np.int64)[inverse]
        marked = new[numbers != NO_NUMBER]
        numbers = numbers[numbers != NO_NUMBER]
        for process, mine in groups(marked["process"]):
            self._add(process, marked[mine], numbers[mine])
        return set(marked["process"].tolist())

    def _number(self, text: int) -> int:
        if text not in self._number_of_text:
            found = _MARK.match(self._store.strings[text])
            self._number_of_text[text] = int(found[1]) if found else None
        number = self._number_of_text[text]
        return NO_NUMBER if number is None else number

    def _add(self, process: int, new: NDArray[np.void], numbers: NDArray[np.int64]) -> None:
        ends = new["end_ns"].copy()
        ends[ends == new["start_ns"]] = NO_TIME_NS  # a mark has no end
        old = self._marks.get(process)
        starts, all_ends, all_numbers = new["start_ns"], ends, numbers.astype(np.int32)
        if old is not None:
            starts = np.concatenate([old.starts_ns, starts])
            all_ends = np.concatenate([old.ends_ns, all_ends])
            all_numbers = np.concatenate([old.numbers, all_numbers])
        order = np.argsort(starts, kind="stable")
        marks = self._marks[process] = _Marks(starts[order], all_ends[order], all_numbers[order])
        step_ns = marks.step_ns()
        if step_ns is None:
            self._steps_ns.pop(process, None)
        else:
            self._steps_ns[process] = step_ns
