"""Two sequences paired by order alone: the expected launches of one thread and its kernels.

While both agree they are paired by comparing arrays. If they do not, and losses are few, a small gap is looked for
that makes them agree again (`resync`); what lies between two places where nothing is in doubt is a closed window
(`closed_windows`). If losses are many, windows are as long as can be afforded, and end where the probability says that
all alignments pass (`open_window`). Every window is decided by a pair hidden Markov model. Beyond a hole in the capture
the next stretch that fits is searched.

Every decision needs a fixed amount of what follows, never "what happens to be there", so the result does not depend on
how the data were cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.closed_windows import ClosedWindow, Items, decide_closed
from ncclscope_service.align.by_order.known_runs import Doubts, EqualRuns
from ncclscope_service.align.by_order.loss_model import LossModel
from ncclscope_service.align.by_order.open_window import (
    LONG,
    SHORT_WINDOW,
    WINDOW,
    OpenWindow,
    Pairs,
    decide_open,
    repetition_of,
)
from ncclscope_service.align.by_order.pair_hmm import Floats
from ncclscope_service.align.by_order.resync import (
    AHEAD,
    FIRST_STRAIGHT,
    STRETCH,
    STRETCH_REACH,
    Compatible,
    Symbols,
    agreeing_items,
    changes,
    far_resync,
    find_stretch,
    look_ahead,
    resync,
)
from ncclscope_wire.batch import Columns

LOOKAHEAD: Final = 16
"""Pairs after one that must agree before it is final."""

LONGEST_WAIT: Final = 128
"""Items of one symbol after which a run is paired although its end, which would show a loss, is not seen."""

CERTAIN: Final = 0.99
"""Confidence of a pair in a stretch that agrees."""

_MARGIN: Final = 8
"""Items that agree on either side of the place where a window is closed."""

_LONGEST_SMALL: Final = 256


@dataclass(slots=True)
class PairingState:
    """State of pairing one thread by order."""

    loss_model: LossModel = field(default_factory=LossModel)
    straight: int = 0
    """Items that agreed since anything was learnt."""
    runs: EqualRuns = field(default_factory=EqualRuns)
    starts: float = 1.0
    """How sure it is that the first pending launch and kernel began together."""
    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class PairingInput:
    """Pending launches and kernels of one thread, and the items in which they are compared.

    An item is one launch or kernel, or a run of Sends and Receives whose groups are not known.
    """

    launches: Columns
    kernels: Columns
    launch_symbols: Symbols
    kernel_symbols: Symbols
    items: NDArray[np.int64]
    """Where each item of the launches begins, with the end appended."""
    runs: NDArray[np.int64]
    """The same of the kernels."""
    joinable: NDArray[np.bool_]
    """Launches that may run in the kernel of the launch before them."""
    kernel_lanes: NDArray[np.int32]
    """The lane of the kernels that each lane of the launches is, as far as known; negative if unknown."""


@dataclass(slots=True)
class Decided:
    """Decisions of one step, as indices from the front of the backlog."""

    pairs: list[Pairs] = field(default_factory=list[Pairs])
    launches_used: int = 0
    kernels_used: int = 0
    holes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Ranges of launches that no capture seems to hold."""


class Pairing:
    """One step of pairing the two sides of a thread from their fronts."""

    def __init__(self, sides: PairingInput, state: PairingState) -> None:
        self._input = sides
        self._state = state
        self._items, self._runs = sides.items.copy(), sides.runs.copy()
        self._left = sides.launch_symbols[sides.items[:-1]]
        self._right = sides.kernel_symbols[sides.runs[:-1]]
        self._at = (0, 0)
        """The next item of each side."""
        self._opened: tuple[int, int] | None = None
        """Where the window began that is not closed yet."""
        self._skipped = self._reach = 0
        """Launches left out in the open window, and how far from its straight line."""
        self._closed: list[ClosedWindow] = []
        self._straight: list[tuple[int, int, int, Doubts | None]] = []
        """Stretches that agree: where on both sides, how long, and the confidence by their runs."""
        self._runs_ahead = state.runs.ahead(self._left)
        self._next_change, self._last_change = changes(self._left)
        self._agrees = (0, 0, 0)
        """The last comparison: by how much the kernels were shifted, from where on, and up to where items agree."""
        self.decided = Decided()

    @property
    def launches_used(self) -> int:
        """Launches decided so far."""
        return int(self._items[(self._opened or self._at)[0]])

    @property
    def kernels_used(self) -> int:
        """Kernels decided so far."""
        return int(self._runs[(self._opened or self._at)[1]])

    def waiting(self, amount: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the next items of both sides begin, at most `amount` of each."""
        at, to = self._opened or self._at
        items = self._items[at : min(at + amount, len(self._items) - 1)]
        return items, self._runs[to : min(to + amount, len(self._runs) - 1)]

    def run(self, compatible: Compatible, *, final: bool, is_closed: bool = False, limit: int | None = None) -> None:
        """Pairs as much as is certain by now; all of it with `final`.

        With `limit` it stops at that launch and looks beyond only for confirmation. With `is_closed` the kernels are
        all there are before a hole in what was recorded, though there are more launches.
        """
        stop = len(self._left) if limit is None else int(np.searchsorted(self._items, limit))
        while (self._at[0] < stop or self._opened is not None) and self._is_pending():
            if not self._step(compatible, stop, final=final, is_closed=is_closed):
                break
        self._give_straight()
        self._decide_closed(compatible)
        self._state.runs.go_on(self._runs_ahead, (self._opened or self._at)[0])
        self.decided.launches_used, self.decided.kernels_used = self.launches_used, self.kernels_used

    def _is_pending(self) -> bool:
        return self._at[0] < len(self._left) and self._at[1] < len(self._right)

    def _step(self, compatible: Compatible, stop: int, *, final: bool, is_closed: bool) -> bool:
        """Takes one stretch; False if more data must come first."""
        left, right = self._left[self._at[0] :], self._right[self._at[1] :]
        shorter = min(len(left), len(right))
        are_few = self._are_losses_few(left, right, compatible, final=final)
        if are_few is None:
            return False
        if are_few:
            agreeing = self._agreeing(compatible)
            if self._take_agreeing(agreeing, stop, is_over=final and agreeing == shorter):
                return True
            if agreeing == shorter or (not final and shorter < AHEAD + agreeing):
                return False
            if self._skip_gap(left, right, compatible, agreeing):
                return True
        return self._take_open_window(compatible, final=final, is_closed=is_closed)

    def _are_losses_few(self, left: Symbols, right: Symbols, compatible: Compatible, *, final: bool) -> bool | None:
        """Whether it is worth while to look for gaps; None if more data must come first."""
        losses = self._state.loss_model.losses
        if losses.weight:
            return losses.are_few
        if agreeing_items(left[:FIRST_STRAIGHT], right[:FIRST_STRAIGHT], compatible) >= FIRST_STRAIGHT:
            losses.learn(FIRST_STRAIGHT, FIRST_STRAIGHT, FIRST_STRAIGHT)
            are_few: bool | None = True
        else:
            looked = look_ahead(left, right, compatible, final=final)
            are_few = None if looked is None else looked.are_few
            if looked is not None and looked.are_few:
                losses.learn(looked.launches, looked.kernels, looked.pairs)
        self._state.has_begun |= are_few is True
        return are_few

    # where both agree

    def _agreeing(self, compatible: Compatible) -> int:
        """How many of the next items agree one by one."""
        at, to = self._at
        shift, begin, end = self._agrees
        if to - at != shift or not begin <= at < end:
            end = at + agreeing_items(self._left[at:], self._right[to:], compatible)
            self._agrees = to - at, at, end
        return end - at

    def _take_agreeing(self, agreeing: int, stop: int, *, is_over: bool) -> bool:
        """Closes the window, or takes what agrees; False if neither can be done yet."""
        if self._opened is not None:
            behind = self._closing(agreeing, is_over=is_over)
            if behind:
                self._close(behind)
            return behind > 0
        settled = min(agreeing if is_over else self._settled(agreeing), stop - self._at[0])
        if settled > 0:
            self._take_straight(settled)
        return settled > 0

    def _settled(self, agreeing: int) -> int:
        """How many of the agreeing items are final: with enough behind them, up to the end of a run of one symbol."""
        known = agreeing - LOOKAHEAD
        if known <= 0:
            return 0
        return max(0, known - LONGEST_WAIT, int(self._last_change[self._at[0] + known]) - self._at[0])

    def _closing(self, agreeing: int, *, is_over: bool) -> int:
        """Items after which the window is closed: enough agree on both sides of a change; 0: not yet."""
        if agreeing >= 2 * _MARGIN:
            change = int(self._next_change[self._at[0] + _MARGIN]) - self._at[0]
            if change <= min(agreeing - _MARGIN, LONGEST_WAIT):
                return change
        if agreeing >= LONGEST_WAIT + LOOKAHEAD:
            return LONGEST_WAIT
        return agreeing if is_over else 0

    def _take_straight(self, count: int) -> None:
        at, to = self._at
        state = self._state
        doubts = self._runs_ahead.doubts(state.loss_model.losses.both)
        if doubts is not None:
            state.runs.hide(int(doubts.hidden_before[at + count] - doubts.hidden_before[at]))
        self._straight.append((at, to, count, doubts))
        self._at = at + count, to + count
        state.straight += count

    def _give_straight(self) -> None:
        """Gives out the stretches that agree."""
        if not self._straight:
            return
        at, to, counts = np.array([stretch[:3] for stretch in self._straight]).T
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        launches, kernels = np.repeat(at, counts) + within, np.repeat(to, counts) + within
        confidence = np.full(len(launches), CERTAIN)
        end = 0
        for begin, _, count, doubts in self._straight:
            if doubts is not None:
                confidence[end : end + count] *= doubts.sure[begin : begin + count]
            end += count
        self.decided.pairs.append(self._found(launches, kernels, confidence))
        self._straight = []

    def _found(self, items: NDArray[np.int64], runs: NDArray[np.int64], confidence: Floats) -> Pairs:
        """Pairs of items as pairs of stretches of launches and of kernels."""
        first, to = self._items[items], self._runs[runs]
        return Pairs(first, self._items[items + 1] - first, to, self._runs[runs + 1] - to, confidence)

    def _skip_gap(self, left: Symbols, right: Symbols, compatible: Compatible, agreeing: int) -> bool:
        """Leaves a few items of one or both sides out if that, and nothing as cheap, makes the rest agree."""
        begun = self._opened or self._at
        if self._at[0] + agreeing - begun[0] > _LONGEST_SMALL:
            return False
        left, right = left[agreeing:], right[agreeing:]
        skipped = resync(left, right, compatible) or far_resync(left, right, compatible)
        if skipped is None:
            return False
        self._opened = begun
        shift = self._at[0] - begun[0] - self._at[1] + begun[1]
        self._reach = max(self._reach, abs(shift + skipped[0]), abs(shift - skipped[1]))
        self._skipped += max(skipped[0] - skipped[1], 0)
        self._at = self._at[0] + agreeing + skipped[0], self._at[1] + agreeing + skipped[1]
        return True

    def _close(self, behind: int) -> None:
        """Ends the window this many items further on."""
        assert self._opened is not None, "only an open window can be closed"
        (first, to), (at, until) = self._opened, self._at
        end = at + behind, until + behind
        launches, straight = end[0] - first, self._state.straight
        losses, runs = self._state.loss_model.losses, self._state.runs
        doubts = self._runs_ahead.doubts(losses.both)
        if doubts is not None:
            runs.hide(int(doubts.hidden_before[end[0]] - doubts.hidden_before[first]))
        pairs = straight + max(min(launches - self._skipped, end[1] - to) - runs.hidden(), 0)
        losses.learn(straight + launches, straight + end[1] - to, pairs)
        self._closed.append(ClosedWindow(range(first, end[0]), range(to, end[1]), self._reach, losses.rates()))
        self._state.straight = self._skipped = self._reach = 0
        self._opened, self._at = None, end

    def _decide_closed(self, compatible: Compatible) -> None:
        for found in decide_closed(self._closed, Items(self._left, self._right, compatible)):
            self.decided.pairs.append(self._found(found.launches, found.kernels, found.confidence))
        self._closed = []

    # where losses are many

    def _take_open_window(self, compatible: Compatible, *, final: bool, is_closed: bool) -> bool:
        begin = self._opened or self._at
        first, to = int(self._items[begin[0]]), int(self._runs[begin[1]])
        last, until = int(self._items[-1]), int(self._runs[-1])
        losses = self._state.loss_model.losses
        size = SHORT_WINDOW if losses.weight >= LONG and losses.are_few else WINDOW
        if not final and min(last - first, until - to) < size:
            return False
        given = self._input
        launches, kernels = slice(first, min(last, first + size)), slice(to, min(until, to + size))
        fits = compatible[given.launch_symbols[launches, None], given.kernel_symbols[None, kernels]]
        window = OpenWindow(
            given.launches[launches],
            given.kernels[kernels],
            fits,
            given.joinable[launches],
            given.kernel_lanes[given.launches["lane"][launches]],
            launches_end=final and last - first <= size and not is_closed,
            kernels_end=final and until - to <= size,
        )
        is_first = not self._state.has_begun
        repetition = repetition_of(given.launches[first:]) if is_first else None
        result = decide_open(window, self._state.loss_model, is_first=is_first, repetition=repetition)
        if not result.belongs_together:
            resumed = self._skip_hole(begin, compatible, final=final)
            if resumed is not None:
                return resumed
        if not self._state.has_begun:
            self._state.starts, self._state.has_begun = result.starts, True
        result.learn()
        self._state.straight = 0
        self._state.runs.hidden()
        self._give_straight()
        self._decide_closed(compatible)
        self.decided.pairs.append(result.found.moved(first, to))
        self._begin_at(begin, first + result.launches_used, to + result.kernels_used)
        return True

    def _begin_at(self, begin: tuple[int, int], launch: int, kernel: int) -> None:
        """Goes on at a launch and a kernel, which may be in the middle of a run: its rest is an item."""
        self._opened, self._skipped, self._reach = None, 0, 0
        at = int(np.searchsorted(self._items, launch, side="right")) - 1
        to = int(np.searchsorted(self._runs, kernel, side="right")) - 1
        self._items[at], self._runs[to] = launch, kernel
        self._at = max(at, begin[0]), max(to, begin[1])

    # holes

    def _skip_hole(self, begin: tuple[int, int], compatible: Compatible, *, final: bool) -> bool | None:
        """Looks further on for the stretch that comes next on the other side.

        True if it was found and the hole was skipped; False if more data must come first; None if there is none.
        """
        left, right = self._left[begin[0] :], self._right[begin[1] :]
        names = compatible.argmax(axis=1).astype(np.int32)
        found = find_stretch(names[left[:STRETCH_REACH]], right[:STRETCH])
        if found == (0, 0):
            return None  # they begin together
        if found is not None:
            skipped = found
            self.decided.holes.append((int(self._items[begin[0]]), int(self._items[begin[0] + found[0]])))
        else:
            found = find_stretch(right, names[left[:STRETCH]])
            if found is None:
                return None if final or len(left) >= STRETCH_REACH else False
            skipped = found[1], found[0]
        self._opened, self._skipped, self._reach = None, 0, 0
        self._at = begin[0] + skipped[0], begin[1] + skipped[1]
        return True
