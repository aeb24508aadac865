"""Runs of equal launches: how sure their pairs are, how many losses they hide, and how they are divided into groups.

*Runs that are as long on both sides.* If both sides lose some, a run may have lost as many of each and look whole; what
lies between the two places is then paired one off. Of n launches and n kernels that show, with k more of each gone,
there are (n + k)! / ((n - k)! k! k!) ways to lie, worth x^k each, where x is what a lost line and a lost kernel are
worth beside a pair. Their sum is the Legendre polynomial D(n) = P_n(1 + 2x), and the pair behind b others and before e
more is right with a chance of D(b) D(e) / D(b + 1 + e).

*Source:* NIST Digital Library of Mathematical Functions, 18.5 (Legendre polynomials as sums) and 18.9 (their recurrence
(n + 1) P_(n+1)(y) = (2n + 1) y P_n(y) - n P_(n-1)(y)).

*Runs of operations that may have been launched together*, if the log does not say so. Launches and kernels are compared
as items: one of them, or a run of several. A run is taken as a whole, and divided only when it was paired: Sends and
Receives of one lane, and collectives of one lane, kind and type if the thread launches such in groups.

Adjacent point-to-point operations of one communicator are launched one by one, or fused when they are in a group.
Between two other launches of the thread only their number and that of the kernels is known; the rest is
guessed from how frameworks group (a Send with a Receive, each peer once) and marked as a guess (`Divider`).

A framework that reduces the gradients of many layers in one group logs a line for each and launches one kernel. If no
line shows groups, the kernels then look like those of a capture with holes. What gives such a program away is that its
runs of equal launches (one lane, kind and type) follow each other as the runs of equal kernels do, and that runs of one
length always have as many kernels: losses are not as regular.

*Source:* NCCL src/enqueue.cc (ncclPrepareTasks, scheduleCollTasksToPlan): one plan takes the collectives of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.pair_hmm import Floats
from ncclscope_service.nccl.launch_rules import KernelClass
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import OPERATION_CODES

LONGEST: Final = 128
"""Of a longer run nothing is concluded from where it ends."""

_FARTHEST: Final = 1024
"""Items of a run after which one is as unsure as the next."""

_MOST_HIDDEN: Final = 48
_STEPS: Final = 8
"""Values of x that are distinguished per factor of two."""

_NEGLIGIBLE: Final = 1e-8
"""Smaller x make no run of a length that is looked at doubtful."""

_PARTS: Final = 1 << 20
"""Expected losses are summed up in such parts of one, so that sums do not depend on how the data were cut."""

_DOUBTFUL: Final = 0.002
"""A run is looked at if x times its length squared, which is about what it is expected to hide, is more."""


@dataclass(slots=True)
class EqualRuns:
    """The run that the last items of one thread were in, and what those since it was last asked may hide."""

    _symbol: int = -1
    _length: int = 0
    _hidden: int = 0
    """In units of 1 / _PARTS."""

    def ahead(self, symbols: NDArray[np.int32]) -> RunsAhead:
        """The runs of what comes next."""
        count = len(symbols)
        starts = np.concatenate([[0], np.flatnonzero(symbols[1:] != symbols[:-1]) + 1]) if count else np.empty(0, int)
        lengths = np.diff(np.append(starts, count))
        place = np.arange(count) - np.repeat(starts, lengths)
        if count and int(symbols[0]) == self._symbol:
            place[: lengths[0]] += self._length
            lengths[0] += self._length
        return RunsAhead(symbols, place, np.repeat(lengths, np.diff(np.append(starts, count))))

    def hide(self, hidden: int) -> None:
        """Items were taken that are expected to hide so much."""
        self._hidden += hidden

    def hidden(self) -> float:
        """Launches and kernels of each side that are expected to be lost unseen since this was asked."""
        hidden, self._hidden = self._hidden, 0
        return hidden / _PARTS

    def go_on(self, ahead: RunsAhead, used: int) -> None:
        """Goes on behind the first `used` items of those ahead, which are decided."""
        if used:
            self._symbol, self._length = int(ahead.symbols[used - 1]), int(ahead.place[used - 1]) + 1


@dataclass(slots=True)
class RunsAhead:
    """Runs in a sequence of symbols whose items are paired one by one."""

    symbols: NDArray[np.int32]
    place: NDArray[np.int64]
    """How many items of its run are before each."""
    length: NDArray[np.int64]
    """Of the run that each is in, as far as it is seen."""
    _doubts_by_step: dict[int, Doubts | None] = field(default_factory=dict[int, "Doubts | None"])

    def doubts(self, both_lost: float) -> Doubts | None:
        """Confidence of pairs in runs; None if no run is doubtful.

        `both_lost`: what a lost line and a lost kernel are worth beside a pair.
        """
        if both_lost < _NEGLIGIBLE:
            return None
        step = round(_STEPS * float(np.log2(both_lost)))
        if step not in self._doubts_by_step:
            self._doubts_by_step[step] = self._doubts(step)
        return self._doubts_by_step[step]

    def _doubts(self, step: int) -> Doubts | None:
        lengths = np.minimum(self.length, LONGEST + 1)
        doubtful = np.flatnonzero(lengths * lengths * 2.0 ** (step / _STEPS) > _DOUBTFUL)
        if len(doubtful) == 0:
            return None
        known = _known(step)
        place, lengths = self.place[doubtful], lengths[doubtful]
        sure, hidden = np.ones(len(self.symbols)), np.zeros(len(self.symbols) + 1, dtype=np.int64)
        sure[doubtful] = known.sure(place, lengths)
        hidden[doubtful + 1] = np.rint(known.hidden[np.minimum(place, LONGEST - 1)] * _PARTS)
        return Doubts(sure, np.cumsum(hidden))


@dataclass(frozen=True, slots=True)
class Doubts:
    """Confidence of pairs in runs of equal items, for one loss rate."""

    sure: Floats
    """How sure the pair of each item is, all else aside."""
    hidden_before: NDArray[np.int64]
    """Losses of each side that all items before each are expected to hide, in units of 1 / _PARTS."""


@dataclass(frozen=True, slots=True)
class _Known:
    """Results for one x."""

    ways: Floats
    """Logarithm of D(n)."""
    growth: float
    """By how much it grows with each n in the end."""
    hidden: Floats
    """Further hidden losses of each side that are expected for one more item in a run of this length."""

    def sure(self, place: NDArray[np.int64], length: NDArray[np.int64]) -> Floats:
        """How sure the pairs at these places of runs of these lengths are."""
        behind = np.where(length > LONGEST, 0, length - 1 - place)
        place = np.minimum(place, _FARTHEST)
        all_ways = np.where(length > LONGEST, self.growth * (place + 1), self.ways[np.minimum(length, LONGEST)])
        sure: Floats = np.exp(self.ways[place] + self.ways[behind] - all_ways)
        return sure


@lru_cache(maxsize=64)
def _known(step: int) -> _Known:
    x = 2.0 ** (step / _STEPS)
    y = 1 + 2 * x
    ratios = [y]
    for n in range(1, _FARTHEST):
        ratios.append(((2 * n + 1) * y - n / ratios[-1]) / (n + 1))
    ways = np.concatenate([[0.0], np.cumsum(np.log(ratios))])
    growth = float(np.log(y + np.sqrt(y * y - 1)))
    lengths, hidden = np.arange(LONGEST + 1), np.arange(_MOST_HIDDEN)
    steps = (lengths[:, None] + hidden + 1) * np.maximum(lengths[:, None] - hidden, 0) / (hidden + 1) ** 2 * x
    shares = np.concatenate([np.ones((len(lengths), 1)), np.cumprod(steps[:, :-1], axis=1)], axis=1)
    expected = shares @ hidden / shares.sum(axis=1)
    return _Known(ways, growth, np.diff(expected))


Kind = tuple[int, int, bool]
"""(operation, peer, whether its group is open)."""

_SEND: Final = OPERATION_CODES["Send"]
_LARGEST: Final = 40_000
"""Runs with more operations x kernels are not divided exactly."""

_SAME_PEER, _SEND_FIRST, _OTHER, _REPEATED, _CLOSED = 1.0, 0.8, 0.5, -1.0, -50.0

Ends = NDArray[np.int64]
"""Where each item begins, with the end appended."""

KERNELS_SEEN: Final = 64
"""Kernels that are looked at to see whether a program is such."""

LAUNCHES_SEEN: Final = 2048
"""Launches beside them; larger groups are not seen."""

_FEWEST: Final = 3
"""Least number of runs that must have fewer kernels than launches."""


def items_of(
    launches: Columns, kernels: Columns, *, collapse: bool, final: bool, coalesce: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each item begins, on both sides, with the end appended: one launch, or a run of several.

    Runs are of Send and Receive with `collapse`, of equal collectives with `coalesce`.
    """
    if not collapse and not coalesce:
        return np.arange(len(launches) + 1), np.arange(len(kernels) + 1)
    is_p2p, is_kernel_p2p = are_p2p(launches), kernels["kernel_class"] == KernelClass.SEND_RECV
    left, right = is_p2p & collapse, is_kernel_p2p & collapse
    goes_on, kernel_goes_on = _goes_on(launches, left), _goes_on(kernels, right)
    if coalesce:
        may_join, may_be_joined = ~is_p2p & (launches["plan"] == 0), ~is_kernel_p2p
        goes_on = goes_on | _repeats(launches, ("classes", "data_type"), may_join)
        kernel_goes_on = kernel_goes_on | _repeats(kernels, ("kernel_class", "data_type"), may_be_joined)
        left, right = left | may_join, right | may_be_joined
    return _runs(goes_on, left, final=final), _runs(kernel_goes_on, right, final=final)


def are_p2p(launches: Columns) -> NDArray[np.bool_]:
    """Which launches (LAUNCH) are of Sends and Receives."""
    is_p2p: NDArray[np.bool_] = launches["classes"] & (1 << int(KernelClass.SEND_RECV)) != 0
    return is_p2p


def _goes_on(rows: Columns, is_such: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each row but the first is such as the one before it, on the same lane."""
    goes_on: NDArray[np.bool_] = is_such[1:] & is_such[:-1] & (rows["lane"][1:] == rows["lane"][:-1])
    return goes_on


def _repeats(rows: Columns, names: tuple[str, ...], is_such: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The same, with these columns alike."""
    repeats = _goes_on(rows, is_such)
    for name in names:
        repeats &= rows[name][1:] == rows[name][:-1]
    return repeats


def _runs(goes_on: NDArray[np.bool_], may_grow: NDArray[np.bool_], *, final: bool) -> NDArray[np.int64]:
    """Where each item begins, with the end appended; a run at the end is left out while it may still grow."""
    if len(may_grow) == 0:
        return np.zeros(1, dtype=np.int64)
    begins = np.concatenate([[0], np.flatnonzero(~goes_on) + 1])
    if may_grow[-1] and not final:
        return begins.astype(np.int64)
    return np.append(begins, len(may_grow)).astype(np.int64)


@dataclass(slots=True)
class Divider:
    """Divides runs, remembering what recurs."""

    _known: dict[tuple[tuple[Kind, ...], int], tuple[NDArray[np.int64], float]] = field(
        default_factory=dict[tuple[tuple[Kind, ...], int], tuple[NDArray[np.int64], float]]
    )

    def divide(self, kinds: tuple[Kind, ...], kernels: int) -> tuple[NDArray[np.int64], float]:
        """The kernel (0 .. kernels-1, ascending) of each operation, and how sure that is.

        With more kernels than operations the first ones are taken: lines were lost, or launches were split.
        """
        if len(kinds) == kernels:
            return np.arange(kernels, dtype=np.int64), 0.99
        if kernels == 1:
            return np.zeros(len(kinds), dtype=np.int64), 0.95
        if kernels > len(kinds):
            return np.arange(len(kinds), dtype=np.int64), 0.4
        if len(kinds) * kernels > _LARGEST:
            return np.minimum(np.arange(len(kinds)), kernels - 1), 0.1
        key = (kinds, kernels)
        if key not in self._known:
            self._known[key] = _divide(kinds, kernels)
        return self._known[key]


def _divide(kinds: tuple[Kind, ...], kernels: int) -> tuple[NDArray[np.int64], float]:
    """Best division into exactly this many groups: a table of (operations so far, groups so far)."""
    size = len(kinds)
    longest = size - kernels + 1
    table = np.full((size + 1, kernels + 1), -np.inf)
    back = np.zeros((size + 1, kernels + 1), dtype=np.int64)
    table[0, 0] = 0.0
    for end in range(1, size + 1):
        for begin in range(max(0, end - longest), end):
            candidate = table[begin, :-1] + _worth(kinds[begin:end])
            better = candidate > table[end, 1:] + 1e-9
            table[end, 1:][better] = candidate[better]
            back[end, 1:][better] = begin
    groups = np.empty(size, dtype=np.int64)
    end = size
    for group in range(kernels, 0, -1):
        begin = int(back[end, group])
        groups[begin:end] = group - 1
        end = begin
    return groups, 0.6


def _worth(group: tuple[Kind, ...]) -> float:
    """How likely frameworks are to put these operations in one group, as a sum over what is joined."""
    worth = 0.0
    for before, after in pairwise(group):
        if not (before[2] and after[2]):
            return _CLOSED
        if before[0] == after[0]:
            worth += 0.0
        elif before[0] == _SEND:
            worth += _SAME_PEER if before[1] == after[1] else _SEND_FIRST
        else:
            worth += _OTHER
    if len({(kind[0], kind[1]) for kind in group}) < len(group):
        worth += _REPEATED
    return worth


def is_regular(items: Ends, runs: Ends, symbols: NDArray[np.int32], are_collectives: NDArray[np.bool_]) -> bool:
    """Whether runs have fewer kernels than launches throughout, and always as many if they are as long.

    `items` and `runs` are the runs of launches and of kernels, pair by pair; `symbols` and `are_collectives` are of
    each run of launches.
    """
    launches, kernels = np.diff(items)[are_collectives], np.diff(runs)[are_collectives]
    if np.any(kernels > launches) or np.count_nonzero(kernels < launches) < _FEWEST:
        return False
    kinds = set(zip(symbols[are_collectives].tolist(), launches.tolist(), strict=True))
    whole = set(zip(symbols[are_collectives].tolist(), launches.tolist(), kernels.tolist(), strict=True))
    return len(whole) == len(kinds)


def divided(signatures: tuple[int, ...], kernels: int) -> tuple[NDArray[np.int64], float]:
    """The kernel (0 .. kernels-1, ascending) of each launch of a run of equal collectives, and how sure that is.

    `signatures` distinguish calls by size and root. With more kernels than launches the first ones are taken: lines
    were lost.
    """
    size = len(signatures)
    if size <= kernels:
        return np.arange(size, dtype=np.int64), 0.99 if size == kernels else 0.4
    if kernels == 1:
        return np.zeros(size, dtype=np.int64), 0.95
    repeats = np.array([signature == signatures[0] for signature in signatures])
    if np.count_nonzero(repeats) == kernels:
        starts = [*np.flatnonzero(repeats).tolist(), size]
        parts = {signatures[begin:end] for begin, end in pairwise(starts)}
        return np.cumsum(repeats) - 1, 0.9 if len(parts) == 1 else 0.6
    is_even = size % kernels == 0
    return np.arange(size, dtype=np.int64) * kernels // size, 0.6 if is_even else 0.1
