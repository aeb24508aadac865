"""Pairs two sequences of symbols: the expected launches of one thread with its kernels, where only order tells.

Where both agree they are paired by comparing arrays; where they do not, a small gap is looked for that makes them
agree again, then a window is aligned by Needleman-Wunsch, then a recurring stretch is searched further on (a hole
in the capture). Every decision needs a fixed amount of what follows, never "what happens to be there", so the
result does not depend on how the data were cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ncclscope_service.needleman_wunsch import FORBIDDEN, align

Symbols = NDArray[np.int32]
Positions = NDArray[np.intp]
Compatible = NDArray[np.bool_]
"""Compatible[launch symbol, kernel symbol]"""

LOOKAHEAD: Final = 16
"""So many pairs after one must agree before it is final."""

LONGEST_WAIT: Final = 128
"""Items of one symbol after which a run is paired although its end, which would tell of a loss, is not seen."""

_BLOCK: Final = 8192
_GAP: Final = 8
_RESUME: Final = 12
_NEAR: Final = 96
_SEED: Final = 12
_REACH: Final = 65536
_WORTHWHILE: Final = 0.6
"""An alignment that pairs less than this is of stretches that do not belong together."""

_WINDOW: Final = 512
_FEW_LOSSES: Final = 0.1
"""Up to this share of losses a gap that makes the rest agree is the right one."""

_PRIOR: Final = 20.0
"""Launches that the first guess of the loss rates weighs."""

_FIRST_GUESSES: Final = ((0.01, 0.01), (0.2, 0.01), (0.01, 0.2), (0.2, 0.2))


@dataclass(slots=True)
class Losses:
    """How often kernels and lines are missing on one thread, learnt as it is aligned.

    The score of an alignment is its log likelihood under these rates, so that a stretch is not bent to match
    everything where everything cannot match.
    """

    kernels: float = 0.01
    """Share of launches whose kernel is missing."""
    lines: float = 0.01
    """Share of kernels whose line is missing."""
    weight: float = 0.0

    def learn(self, launches: int, kernels: int, pairs: int) -> None:
        """Takes in an aligned stretch; older ones fade."""
        if launches == 0 or kernels == 0:
            return
        total = min(self.weight, 2000.0) + _PRIOR
        self.kernels = (self.kernels * total + launches - pairs) / (total + launches)
        self.lines = (self.lines * total + kernels - pairs) / (total + kernels)
        self.weight += launches


@dataclass(slots=True)
class Decided:
    """What one step decided, as indices from the front of what was pending."""

    launches: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    kernels: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    confidence: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    launches_used: int = 0
    kernels_used: int = 0
    holes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Ranges of launches that no capture seems to hold."""

    def pair(self, launches: NDArray[np.int64], kernels: NDArray[np.int64], confidence: NDArray[np.float32]) -> None:
        """Adds pairs, given as indices relative to what is used so far."""
        self.launches.append(launches + self.launches_used)
        self.kernels.append(kernels + self.kernels_used)
        self.confidence.append(confidence)

    def use(self, launches: int, kernels: int) -> None:
        """Moves past items that are decided."""
        self.launches_used += launches
        self.kernels_used += kernels


def pair_sequences(
    launches: Symbols,
    kernels: Symbols,
    compatible: Compatible,
    *,
    final: bool,
    limit: int | None = None,
    losses: Losses | None = None,
) -> Decided:
    """Pairs as much of two sequences from their fronts as is certain by now; all of it with `final`.

    With `limit` it stops at that launch, and looks beyond only for confirmation.
    """
    decided = Decided()
    losses = losses or Losses()
    while limit is None or decided.launches_used < limit:
        left = launches[decided.launches_used :]
        right = kernels[decided.kernels_used :]
        shorter = min(len(left), len(right))
        if shorter == 0:
            break
        agreeing = _agreeing(left, right, compatible)
        settled = agreeing if final and agreeing == shorter else _settled(left, agreeing)
        if limit is not None:
            settled = min(settled, limit - decided.launches_used)
        if settled:
            _take(decided, left, settled, certain=True)
        elif agreeing == shorter or not _repair(decided, left, right, (compatible, losses, agreeing), final=final):
            break
    if final and limit is None:
        decided.use(len(launches) - decided.launches_used, len(kernels) - decided.kernels_used)
    return decided


def _agreeing(left: Symbols, right: Symbols, compatible: Compatible) -> int:
    """How many items from the front agree one by one."""
    count = min(len(left), len(right))
    size, begin = 64, 0
    while begin < count:
        end = min(begin + size, count)
        differs = ~compatible[left[begin:end], right[begin:end]]
        if differs.any():
            return begin + int(differs.argmax())
        begin, size = end, _BLOCK
    return count


def _settled(left: Symbols, agreeing: int) -> int:
    """How many of the agreeing items are final: with enough behind them, and up to the end of a run of one symbol."""
    known = agreeing - LOOKAHEAD
    if known <= 0:
        return 0
    tail = left[max(0, known - LONGEST_WAIT) : known + 1]
    changes = np.flatnonzero(tail[1:] != tail[:-1])
    if len(changes):
        return max(0, known - len(tail) + 1) + int(changes[-1]) + 1
    return max(0, known - LONGEST_WAIT)


def _take(decided: Decided, left: Symbols, count: int, *, certain: bool) -> None:
    indices = np.arange(count, dtype=np.int64)
    confidence = np.full(count, 0.99, dtype=np.float32)
    if not certain:
        run = _trailing_run(left, count)
        confidence[count - run :] = 0.5
    decided.pair(indices, indices, confidence)
    decided.use(count, count)


def _trailing_run(left: Symbols, count: int) -> int:
    """Length of the run of one symbol that ends before `count`, if the next item continues it; else 0."""
    if count >= len(left):
        return 0
    differs = np.flatnonzero(left[:count][::-1] != left[count])
    return int(differs[0]) if len(differs) else count


def _repair(
    decided: Decided, left: Symbols, right: Symbols, known: tuple[Compatible, Losses, int], *, final: bool
) -> bool:
    """Gets past a disagreement after `agreeing` items; False if more data must come first."""
    compatible, losses, agreeing = known
    if losses.kernels + losses.lines < _FEW_LOSSES and _skip_small_gap(decided, left, right, compatible, agreeing):
        return True
    if not final and min(len(left), len(right)) < _WINDOW:
        return False
    if losses.kernels + losses.lines < _FEW_LOSSES and _align_near(decided, left, right, compatible, losses):
        return True
    rows, columns, kept = _align_far(left[:_WINDOW], right[:_WINDOW], compatible, losses)
    is_poor = kept == 0 or kept < _WORTHWHILE * min(rows[kept - 1], columns[kept - 1])
    resumed = _skip_hole(decided, left, right, compatible, final=final) if is_poor else None
    if resumed is not None:
        return resumed
    if kept:
        losses.learn(int(rows[kept - 1]) + 1, int(columns[kept - 1]) + 1, kept)
        _keep(decided, left, rows[:kept], columns[:kept])
    else:
        decided.use(min(len(left), _WINDOW // 2), min(len(right), _WINDOW // 2))
    return True


def _skip_small_gap(decided: Decided, left: Symbols, right: Symbols, compatible: Compatible, agreeing: int) -> bool:
    """Leaves a few items of one or both sides out if that, and nothing as cheap, makes the rest agree."""
    size = _GAP + _RESUME
    if min(len(left), len(right)) < agreeing + size:
        return False
    block = compatible[left[agreeing : agreeing + size, None], right[None, agreeing : agreeing + size]]
    row, column = block.strides
    diagonals = as_strided(block, (_GAP + 1, _GAP + 1, _RESUME), (row, column, row + column), writeable=False)
    works = diagonals.all(axis=2)
    if not works.any():
        return False
    costs = np.where(works, _COSTS, 99)
    best = int(costs.argmin())
    cost = int(costs.flat[best])
    if np.count_nonzero(costs <= cost + 1) > 1:
        return False
    skipped_left, skipped_right = divmod(best, _GAP + 1)
    _take(decided, left, agreeing, certain=False)
    decided.use(skipped_left, skipped_right)
    return True


_COSTS: Final = np.add.outer(np.arange(_GAP + 1), np.arange(_GAP + 1))


def _align_near(decided: Decided, left: Symbols, right: Symbols, compatible: Compatible, losses: Losses) -> bool:
    """Aligns a small window and keeps what lies before the last stretch that agrees without a gap."""
    left, right = left[:_NEAR], right[:_NEAR]
    rows, columns, _ = _aligned(left, right, compatible, (losses.kernels, losses.lines))
    straight = np.diff(rows) + np.diff(columns) == 2
    lengths = _run_lengths(straight)
    ends = np.flatnonzero(lengths >= _RESUME)
    ends = ends[rows[ends] < len(left) - _RESUME]
    if len(ends) == 0:
        return False
    kept = int(ends[-1]) - _RESUME // 2
    losses.learn(int(rows[kept - 1]) + 1, int(columns[kept - 1]) + 1, kept)
    _keep(decided, left, rows[:kept], columns[:kept])
    return True


def _align_far(
    left: Symbols, right: Symbols, compatible: Compatible, losses: Losses
) -> tuple[Positions, Positions, int]:
    """Aligns a large window; gives the pairs and how many of them to keep: the first half, unless it is all."""
    guesses: tuple[tuple[float, float], ...] = ((losses.kernels, losses.lines),)
    if losses.weight < _WINDOW:
        guesses = (*guesses, *_FIRST_GUESSES)
    best = max((_aligned(left, right, compatible, guess) for guess in guesses), key=_worth)
    rows, columns, _ = best
    is_all = len(left) < _WINDOW and len(right) < _WINDOW
    kept = len(rows) if is_all else int(np.searchsorted(np.maximum(rows, columns), _WINDOW // 2))
    return rows, columns, kept


def _worth(alignment: tuple[Positions, Positions, float]) -> float:
    """Log likelihood per item, so that alignments that end in different places can be compared."""
    rows, columns, score = alignment
    return score / (int(rows[-1]) + int(columns[-1]) + 2) if len(rows) else -np.inf


def _aligned(
    left: Symbols, right: Symbols, compatible: Compatible, rates: tuple[float, float]
) -> tuple[Positions, Positions, float]:
    """Best alignment and its log likelihood, given the shares of kernels and of lines that are missing."""
    kernels_lost, lines_lost = (min(max(rate, 1e-3), 0.5) for rate in rates)
    kept = np.log((1 - kernels_lost) * (1 - lines_lost))
    agrees = compatible[left[:, None], right[None, :]]
    scores = np.where(agrees, kept, FORBIDDEN).astype(np.float32)
    gap_above = np.full(len(left), np.log(kernels_lost), dtype=np.float32)
    share = np.bincount(right)[right] / len(right)
    gap_left = (np.log(lines_lost) + np.log(share)).astype(np.float32)
    rows, columns = align(scores, gap_above, gap_left, is_open_ended=True)
    if len(rows) == 0:
        return rows, columns, -np.inf
    used = np.zeros(len(right), dtype=bool)
    used[columns] = True
    score = len(rows) * kept + (int(rows[-1]) + 1 - len(rows)) * np.log(kernels_lost)
    score += float(gap_left[: columns[-1] + 1][~used[: columns[-1] + 1]].sum())
    return rows, columns, float(score)


def _keep(decided: Decided, left: Symbols, rows: Positions, columns: Positions) -> None:
    if len(rows) == 0:
        return
    confidence = _confidence_of_path(left, rows, columns)
    decided.pair(rows.astype(np.int64), columns.astype(np.int64), confidence)
    decided.use(int(rows[-1]) + 1, int(columns[-1]) + 1)


def _confidence_of_path(left: Symbols, rows: Positions, columns: Positions) -> NDArray[np.float32]:
    """High inside straight stretches, low where a neighbour of the same symbol is unpaired: it is as good."""
    skipped = np.concatenate([[0], np.diff(rows) + np.diff(columns) - 2])
    near_gap = np.convolve(skipped, np.ones(5))[2:-2] > 0
    same = np.concatenate([[False], left[rows[1:]] == left[rows[:-1]]])
    same |= np.concatenate([same[1:], [False]])
    confidence = np.where(near_gap, np.where(same, 0.4, 0.7), 0.9)
    return confidence.astype(np.float32)


def _skip_hole(decided: Decided, left: Symbols, right: Symbols, compatible: Compatible, *, final: bool) -> bool | None:
    """Looks further on for the stretch that comes next on the other side.

    True if it was found and the hole was skipped; False if more data must come first; None if there is none.
    """
    names = compatible.argmax(axis=1).astype(np.int32)
    found = _find(names[left], right[: _SEED * 4])
    if found is not None:
        at, begin = found
        decided.holes.append((decided.launches_used, decided.launches_used + at))
        decided.use(at, begin)
        return True
    found = _find(right, names[left[: _SEED * 4]])
    if found is not None:
        at, begin = found
        decided.use(begin, at)
        return True
    if final or len(left) >= _REACH:
        return None
    return False


def _find(text: Symbols, pattern: Symbols) -> tuple[int, int] | None:
    """Where a stretch of the pattern first occurs in the text, both as offsets; None if it does not."""
    if len(pattern) < 2 * _SEED or len(text) < 2 * _SEED:
        return None
    text = text[:_REACH]
    wanted, present = _seeds(pattern), _seeds(text)
    places = np.flatnonzero(np.isin(present, wanted))
    for place in places[:64].tolist():
        begin = int(np.flatnonzero(wanted == present[place])[0])
        length = min(len(pattern) - begin, len(text) - place, 2 * _SEED)
        if length >= 2 * _SEED - 4 and np.array_equal(text[place : place + length], pattern[begin : begin + length]):
            return place, begin
    return None


def _seeds(symbols: Symbols) -> NDArray[np.uint64]:
    hashes = np.zeros(len(symbols) - _SEED + 1, dtype=np.uint64)
    for offset in range(_SEED):
        hashes = hashes * np.uint64(0x100000001B3) + symbols[offset : offset + len(hashes)].astype(np.uint64)
    return hashes


def _run_lengths(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each place, how many True in a row end there."""
    counts = np.cumsum(flags)
    breaks = np.maximum.accumulate(np.where(flags, 0, counts))
    lengths: NDArray[np.int64] = counts - breaks
    return lengths
