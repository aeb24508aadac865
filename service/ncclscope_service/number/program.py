"""Which collective of its step each call is, by the steps before: a communicator's program, as each rank writes it.

Training repeats itself, down to the buffers of its calls: a rank's lines of one step are those of the others, without
the ones that were lost. What most of its steps have in common is a rank's program, and the lines of every step lie in
it in order (each at the first place that fits behind the one before). That tells how many were lost and where, on each
rank by itself, and for calls that all look alike to the other ranks.

Steps are training iterations, numbered rank by rank from all that its process calls (`job.iteration_numbering`). A rank
that lost a whole step counts on too early; where lines have stamps its rhythm shows that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.common_text import common_text, first_places
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_REMEMBERED: Final = 64
"""Steps of a rank that are compared."""
_LOST_BY_ALL: Final = 1
"""Calls of a step that all ranks may have lost; of which more are missing, they were not called."""
_MOSTLY: Final = 0.5
_FAR: Final = 4
"""Steps may be parted so much of a step too early or too late."""
_LEAST_STAMPED: Final = 2


@dataclass(slots=True)
class Program:
    """What one communicator is called for in each step, learnt from the calls (across_ranks.CALL) of its ranks."""

    _steps: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict[int, dict[int, tuple[int, ...]]])
    """By rank its last whole steps: the templates of their lines."""
    _found: dict[int, NDArray[np.int64]] = field(default_factory=dict[int, NDArray[np.int64]])
    """By rank what most of these have in common."""
    _of_rank: dict[int, NDArray[np.int64]] = field(default_factory=dict[int, NDArray[np.int64]])
    """By rank its program, if it is known."""
    _length: int = 0
    """Calls of a step; 0 if that is not known."""
    _last: int = NO_NUMBER
    """The last step of which collectives were given."""
    _placed: int = NO_NUMBER
    """The last step that was placed."""
    _stamps_ns: tuple[int, NDArray[np.float64]] | None = None
    """The last step that was placed, and stamps of its collectives by rank; NaN if not known."""
    _lost_steps: Counter[int] = field(default_factory=Counter[int])
    """By rank: steps that it lost as a whole."""
    waits: bool = False
    """Whether `place` gave nothing because a rank has not come to the end of the step."""

    @property
    def is_known(self) -> bool:
        """Whether a step is."""
        return self._length > 0

    def steps(self, rank: int, calls: Columns) -> NDArray[np.int64]:
        """Steps of a rank's calls, with those that it lost; NO_NUMBER if not known."""
        steps: NDArray[np.int64] = np.where(
            calls["step"] == NO_NUMBER, NO_NUMBER, calls["step"] + self._lost_steps[rank]
        )
        return steps

    def learn(self, calls: Mapping[int, Columns]) -> bool:
        """Looks at the next calls of each rank, by rank; gives whether one proves to have lost some of a whole step."""
        for rank, own in calls.items():
            known = self._steps.setdefault(rank, {})
            before = known.copy()
            begins = np.flatnonzero(np.diff(own["step"], prepend=NO_NUMBER - 1))
            for begin, end in zip(begins[1:-1].tolist(), begins[2:].tolist(), strict=True):
                step = int(own["step"][begin])
                if step != NO_NUMBER and own["is_counted"][begin:end].all():
                    known[step] = tuple(own["template"][begin:end].tolist())
            for step in sorted(known)[:-_REMEMBERED]:
                del known[step]
            if known != before:
                self._found[rank] = common_text(list(known.values()))
        self._length = max(map(len, self._found.values()), default=0)
        self._of_rank = {rank: own for rank, own in self._found.items() if len(own) == self._length > 0}
        return any(self._lacks_some(rank, step) for rank, steps in self._steps.items() for step in steps)

    def _lacks_some(self, rank: int, step: int) -> bool:
        """Whether a rank wrote less of a step than of its program, and another one wrote all."""
        own = self._steps[rank][step]
        if rank not in self._of_rank or len(own) == self._length:
            return False
        is_whole = any(len(steps.get(step, ())) == self._length for steps in self._steps.values())
        return is_whole and len(first_places(np.asarray(own, np.int64), self._of_rank[rank])) == len(own)

    def note(self, calls: Mapping[int, Columns]) -> None:
        """Remembers in which step the last of these collectives was: calls that were given, by rank."""
        for rank, own in calls.items():
            if len(own):
                self._last = max(self._last, int(self.steps(rank, own)[-1]))

    def place(self, calls: Mapping[int, Columns], *, is_end: bool) -> dict[int, NDArray[np.int64]] | None:
        """The next step's collectives: by rank the place among these of each of its first calls.

        None if the program is not known or these calls do not fit, or if a rank has not come to the end of the step
        (`waits`). `is_end`: these are all calls.
        """
        self.waits = False
        calls = {rank: own for rank, own in calls.items() if len(own)}
        if not self._length or not calls or any((own["step"] == NO_NUMBER).any() for own in calls.values()):
            return None
        while True:
            steps = {rank: np.maximum(self.steps(rank, own), self._placed + 1) for rank, own in calls.items()}
            step = min(int(own[0]) for own in steps.values())
            amounts = {rank: int(np.searchsorted(own, step, side="right")) for rank, own in steps.items()}
            if any(
                np.count_nonzero(own["end_ns"][: amounts[rank]] != NO_TIME_NS) > _MOSTLY * amounts[rank]
                for rank, own in calls.items()
            ):
                return None
            is_partial = any(amounts[rank] + self._length // _FAR > len(own) for rank, own in calls.items())
            self.waits = is_partial and not is_end
            if self.waits:
                return None
            found = {
                rank: self._embedded(rank, own["template"], amounts[rank], is_begun=step == self._last)
                for rank, own in calls.items()
            }
            places = {rank: own for rank, own in found.items() if own is not None}
            if len(places) < len(found) or not any(len(own) for own in places.values()):
                return None
            if not self._lose_steps(calls, places, step):
                break
        self._placed = step
        is_partial = any(amounts[rank] == len(own) for rank, own in calls.items())
        return self._closed(places, is_begun=step == self._last, is_partial=is_partial)

    def _embedded(
        self, rank: int, templates: NDArray[np.int32], amount: int, *, is_begun: bool
    ) -> NDArray[np.int64] | None:
        """Places in the program of the lines of one step, in order: about so many. None if they do not fit.

        `is_begun`: some before them were given.
        """
        if amount == self._length and rank not in self._of_rank:
            return np.arange(self._length)
        own = self._of_rank.get(rank)
        if own is None or not amount:
            return None if amount else np.empty(0, np.int64)
        if is_begun:
            places = first_places(templates[:amount][::-1], own[::-1])
            return self._length - 1 - places[::-1] if len(places) == amount else None
        # Where the last lines of a step were lost, or the first ones of the next, steps were parted elsewhere.
        places = first_places(templates[: amount + self._length // _FAR], own)
        if len(places) < amount and templates[len(places)] not in own:
            return None
        if len(places) > amount:
            ahead = places[amount:]
            is_next = first_places(templates[amount:][: len(ahead)], own)
            return places[:amount] if len(is_next) == len(ahead) else places
        return places

    def _closed(
        self, found: dict[int, NDArray[np.int64]], *, is_begun: bool, is_partial: bool
    ) -> dict[int, NDArray[np.int64]]:
        """The same without places that were given before, or that no rank called."""
        called = np.unique(np.concatenate(list(found.values())))
        first = int(called[0]) if is_begun else 0
        end = int(called[-1]) + 1 if is_partial else self._length
        if end - first - len(called) <= _LOST_BY_ALL:
            called = np.arange(first, end)
        return {rank: np.searchsorted(called, places) for rank, places in found.items()}

    def _lose_steps(self, calls: Mapping[int, Columns], places: Mapping[int, NDArray[np.int64]], step: int) -> bool:
        """Whether a rank proves to have lost whole steps, as its lines are a step or more behind those of others."""
        stamps = np.full((max(calls) + 1, self._length), np.nan)
        for rank, own in places.items():
            at_ns = calls[rank]["stamp_ns"][: len(own)]
            stamps[rank, own[at_ns != NO_TIME_NS]] = at_ns[at_ns != NO_TIME_NS]
        before, self._stamps_ns = self._stamps_ns, (step, stamps)
        if before is None or before[0] >= step or before[1].shape != stamps.shape:
            return False
        passed = stamps - before[1]
        known = np.flatnonzero(~np.isnan(passed).all(axis=1))
        if len(known) < _LEAST_STAMPED:
            return False
        own_ns = np.nanmedian(passed[known], axis=1)
        step_ns = np.sort(own_ns)[(len(own_ns) - 1) // 2] / (step - before[0])
        lost = np.rint((own_ns - own_ns.min()) / step_ns).astype(np.int64) if step_ns > 0 else np.zeros(0, np.int64)
        if not lost.any():
            return False
        self._stamps_ns = before
        self._lost_steps.update({int(rank): int(amount) for rank, amount in zip(known, lost, strict=True) if amount})
        return True
