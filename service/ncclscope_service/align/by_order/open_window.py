"""Open windows: pairs, and how likely each is, if many launches or kernels are lost.

Such a window is open to what follows: it is decided up to the place where all alignments pass, by their probability.
`closed_windows` decides small ones, which lie between two places where nothing is in doubt.

A capture that begins in the middle of a program that repeats fits as many places of the log as there are steps. Order
cannot tell which step, and the probability of each pair is spread over them. Its confidence is that of the place in the
step: the sum over all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.loss_model import (
    Losses,
    LossModel,
    Missing,
    Repeats,
    odds_of,
    repeats_of,
    weights_of,
)
from ncclscope_service.align.by_order.pair_hmm import Ends, Floats, Indices, Posterior, most_accurate, posterior
from ncclscope_service.columns.group_by import distinct_together
from ncclscope_wire.batch import Columns

WINDOW: Final = 512
"""Launches and kernels of a window while losses are many."""

SHORT_WINDOW: Final = 256
"""The same once losses are known to be few: one strange place is soon over."""

LONG: Final = 8192
"""Launches after which that is known."""

_FIRST_GUESS: Final = 0.1
"""Loss rate before the first window."""

_ROUNDS: Final = 8
"""Rounds of estimating losses from pairs and pairs from losses, while nothing is known yet."""

_MORE_LOST: Final = (0.0, 0.06, 0.14, 0.24)
"""More losses on both sides than fit best, that are thought possible as well."""

_MORE_LOST_IN_RUNS: Final = (0.0, 0.01, 0.03, 0.07, 0.14, 0.22)
"""The same if one symbol is repeated again and again: nearly any number fits nearly as well."""

_USUAL: Final = 0.07
"""Share of losses beyond those that show that is thought usual there: twice as many are e times less likely."""

_SETTLED: Final = 0.002
"""Losses that change by less are known."""

_KNOWN: Final = 512
"""Launches after which one round is enough."""

_LATE: Final = 1e-3
"""Chance that a capture begins after a given launch instead of with the log, or ends before one."""

_SURE: Final = 0.999
"""A window may end where alignments of this share pass."""

_WORD: Final = 16
"""Launches that must recur where a step does."""

_REPEATED: Final = 0.75
"""Share of the launches that a step must explain."""

_WORTHWHILE: Final = 0.6
_MOST_LOST: Final = 0.8

_FIRST_PRICE: Final = 0.3
_PRICE_STEP: Final = 0.02
_PRICES: Final = 16
"""Prices that are tried; two to five are enough if they settle."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs: a stretch of launches with a stretch of kernels each, mostly one with one."""

    launches: NDArray[np.int64]
    launch_counts: NDArray[np.int64]
    kernels: NDArray[np.int64]
    kernel_counts: NDArray[np.int64]
    confidence: Floats

    @classmethod
    def one_by_one(cls, launches: NDArray[np.int64], kernels: NDArray[np.int64], confidence: Floats) -> Pairs:
        """One launch with one kernel each."""
        ones = np.ones(len(launches), dtype=np.int64)
        return cls(launches, ones, kernels, ones, confidence)

    def moved(self, launches: int, kernels: int) -> Pairs:
        """The same pairs counted from elsewhere."""
        return Pairs(
            self.launches + launches, self.launch_counts, self.kernels + kernels, self.kernel_counts, self.confidence
        )


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """Launches and kernels from the front of what is pending."""

    launches: Columns
    kernels: Columns
    fits: NDArray[np.bool_]
    """(n, m): the launch may be the kernel."""
    joinable: NDArray[np.bool_]
    launch_lanes: NDArray[np.int32]
    """On which lane of the kernels each launch runs; negative if that is not known."""
    launches_end: bool
    """No launches follow."""
    kernels_end: bool


@dataclass(frozen=True, slots=True)
class Repetition:
    """Launches that a program repeats."""

    launches: range
    period: int
    """Launches of a step."""

    def in_any_step(self, pairs: Floats, rows: Indices, columns: Indices) -> Floats:
        """How likely each of these pairs is, or that of the same kernel and this launch in another step."""
        begin, end = self.launches.start, min(self.launches.stop, len(pairs))
        found: Floats = pairs[rows, columns]
        if begin >= end:
            return found
        of_place = np.zeros((self.period, pairs.shape[1]))
        np.add.at(of_place, np.arange(end - begin) % self.period, pairs[begin:end])
        repeated = (rows >= begin) & (rows < end)
        found[repeated] = of_place[(rows[repeated] - begin) % self.period, columns[repeated]]
        return np.minimum(found, 1.0)


def repetition_of(launches: Columns) -> Repetition | None:
    """The shortest step that three quarters of these launches (LAUNCH) or more repeat, twice at least; else None.

    Layers and microbatches repeat as well, but not over the end of a step: so give all launches that are known.
    """
    _, calls = distinct_together(launches["signature"], launches["message_bytes"])
    amount = len(calls)
    middle = amount * 3 // 4 - _WORD
    if middle < _WORD:
        return None
    words = np.lib.stride_tricks.sliding_window_view(calls, _WORD)
    for before in np.flatnonzero((words[:middle] == words[middle]).all(axis=1))[::-1].tolist():
        lag = middle - before
        changes = np.flatnonzero(calls[lag:] != calls[:-lag])
        nearest = int(np.searchsorted(changes, before))
        begin = int(changes[nearest - 1]) + 1 if nearest else 0
        end = int(changes[nearest]) + lag if nearest < len(changes) else amount
        if end - begin >= max(2 * lag, _REPEATED * amount):
            return Repetition(range(begin, end), lag)
    return None


@dataclass(frozen=True, slots=True)
class WindowResult:
    """Result of an open window, up to where it ends."""

    found: Pairs
    launches_used: int
    kernels_used: int
    expected: float
    """Pairs that are expected up to there, as a share of the shorter side."""
    starts: float
    """How sure it is that launches and kernels began together; 1 where the program repeats: pairs say it by place."""
    _given: tuple[Columns, Columns]
    _loss_model: LossModel
    _local: Losses
    _pairs: Floats

    @property
    def belongs_together(self) -> bool:
        """Whether enough pairs are expected, at losses that may be: any two stretches can be bent to match somewhat."""
        return self.expected >= _WORTHWHILE and self._local.kernels + self._local.lines <= _MOST_LOST

    def learn(self) -> None:
        """Updates the loss model by this window."""
        launches, kernels = self.launches_used, self.kernels_used
        pairs = self._pairs[:launches, :kernels]
        losses = self._loss_model.losses
        losses.joins = self._local.joins
        if not losses.weight:
            losses.kernels, losses.lines = self._local.kernels, self._local.lines
        losses.learn(launches, kernels, float(pairs.sum()))
        given = self._given[0][:launches], self._given[1][:kernels]
        self._loss_model.durations.learn(*given, pairs)
        self._loss_model.grids.learn(*given, pairs)
        self._loss_model.kernel_gaps.learn(*given, pairs, losses.rates()[0])
        self._loss_model.line_gaps.learn(given[0])


def decide_open(
    window: OpenWindow, loss_model: LossModel, *, is_first: bool, repetition: Repetition | None = None
) -> WindowResult:
    """Pairs of a window from its front. `is_first`: the capture may begin within it.

    `repetition`: of its launches. Then the confidence of a pair is that of its place in the step.
    """
    launches, kernels, losses = window.launches, window.kernels, loss_model.losses
    is_all = window.launches_end and window.kernels_end
    ends = Ends(not is_all, _LATE if is_first else 0.0, _LATE)
    local = Losses(losses.kernels, losses.lines, losses.joins, losses.weight)
    odds = (
        odds_of(window.fits) * loss_model.durations.odds(launches, kernels) * loss_model.grids.odds(launches, kernels)
    )
    model = _WindowModel(window, loss_model, odds, ends, repeats_of(window.fits, launches, kernels))
    if (not losses.weight or losses.are_few) and model.repeats is None:
        local.kernels = local.lines = _FIRST_GUESS
    probable = model.posterior([local], None)
    for _ in range(_ROUNDS if losses.weight < _KNOWN or losses.are_few else 1):
        is_settled = not _estimate(local, probable, window.joinable)
        probable = model.posterior([local], _together(probable))
        if is_settled:
            break
    if losses.weight < _KNOWN or losses.are_few:
        probable = _averaged(model, local, _together(probable))
    rows, columns = _best(probable)
    launches_used, kernels_used = len(launches), len(kernels)
    if not is_all:
        launches_used, kernels_used = _end_of(probable, rows, columns, (window.launches_end, window.kernels_end))
    pairs = _together(probable)
    kept = (rows < launches_used) & (columns < kernels_used)
    rows, columns = rows[kept], columns[kept]
    shorter = max(1, min(launches_used, kernels_used))
    confidence = pairs[rows, columns] if repetition is None else repetition.in_any_step(pairs, rows, columns)
    return WindowResult(
        Pairs.one_by_one(rows.astype(np.int64), columns.astype(np.int64), confidence),
        launches_used,
        kernels_used,
        float(probable.fresh[:launches_used, :kernels_used].sum()) / shorter,
        float(probable.starts[0]) if repetition is None else 1.0,
        (launches, kernels),
        loss_model,
        local,
        pairs,
    )


@dataclass(frozen=True, slots=True)
class _WindowModel:
    """Model by which a window is decided."""

    window: OpenWindow
    loss_model: LossModel
    odds: Floats
    ends: Ends
    repeats: Repeats | None

    def posterior(self, answers: Sequence[Losses], pairs: Floats | None) -> Posterior:
        """Probabilities under several answers to how much is lost; `pairs`: how likely each was so far."""
        given = self.window
        rates = np.array([answer.rates() for answer in answers])
        lines_lost = float(rates[0, 1])
        kernels = self.loss_model.kernel_gaps.missing(given.launches, given.kernels, pairs, rates[:, 0], lines_lost)
        lines = self.loss_model.line_gaps.missing(given.launches, given.launch_lanes, given.kernels["lane"], lines_lost)
        weights = weights_of(self.odds, given.joinable, answers, Missing(kernels, lines), self.repeats)
        found = posterior(weights, self.ends)
        if self.repeats is not None:
            # Scatter of gaps that hide nothing is easily taken for losses, which in runs outweighs all else.
            return found
        return replace(found, log_likelihood=found.log_likelihood + kernels.log_likelihood)


def _together(probable: Posterior) -> Floats:
    """(n, m): how likely each pair is, joined or not."""
    pairs: Floats = probable.fresh[:, :, 0] + probable.joined[:, :, 0]
    return pairs


def _estimate(local: Losses, probable: Posterior, joinable: NDArray[np.bool_]) -> bool:
    """Sets the likeliest losses and joins, with a weak prior; False if they did not change."""
    before = local.kernels, local.lines, local.joins
    pairs = float(probable.fresh.sum())
    joins = float(probable.joined.sum())
    gone, unlogged = float(probable.lost_kernels[0]), float(probable.lost_lines[0])
    local.kernels = (gone + 0.05) / (gone + pairs + 1.0)
    local.lines = (unlogged + 0.05) / (unlogged + pairs + 1.0)
    if joinable.any():
        chances = float(probable.fresh[joinable].sum()) + joins
        local.joins = (joins + 0.3) / (chances + 1.0)
    return max(abs(a - b) for a, b in zip(before, (local.kernels, local.lines, local.joins), strict=True)) > _SETTLED


def _averaged(model: _WindowModel, local: Losses, pairs: Floats) -> Posterior:
    """Probabilities over all that the losses may be, by how likely each is; `local` becomes their mean.

    In runs of equal operations as many losses on both sides as one likes fit, and the fewest fit best.
    """
    answers = [
        Losses(local.kernels + more, local.lines + more, local.joins, local.weight)
        for more in (_MORE_LOST if model.repeats is None else _MORE_LOST_IN_RUNS)
        if more == 0 or max(local.kernels, local.lines) + more < _MOST_LOST / 2
    ]
    probable = model.posterior(answers, pairs)
    likely = probable.log_likelihood
    if model.repeats is not None:
        likely = likely - (np.array([answer.kernels for answer in answers]) - answers[0].kernels) / _USUAL
    shares = np.exp(likely - likely.max())
    shares /= shares.sum()
    local.kernels = float(shares @ [answer.kernels for answer in answers])
    local.lines = float(shares @ [answer.lines for answer in answers])
    return Posterior(
        (probable.fresh @ shares)[..., None],
        (probable.joined @ shares)[..., None],
        (probable.passes @ shares)[..., None],
        (probable.lost_kernels @ shares)[None],
        (probable.lost_lines @ shares)[None],
        probable.log_likelihood[:1],
        (probable.starts @ shares)[None],
    )


def _best(probable: Posterior) -> tuple[Indices, Indices]:
    """The pairs with the highest expected F1: those worth more than half of it (Lipton et al. 2014).

    Guesses are returned below that price too, so it need not settle: then the best of several rounds is taken.
    """
    pairs = probable.fresh + probable.joined
    wanted = float(pairs.sum())
    price, best = _FIRST_PRICE, -1.0
    found = np.empty(0, np.intp), np.empty(0, np.intp)
    for _ in range(_PRICES):
        _, rows, columns = most_accurate(probable, price)
        reached = 2 * float(pairs[rows, columns, 0].sum()) / (len(rows) + wanted) if wanted else 1.0
        if abs(reached / 2 - price) < _PRICE_STEP:
            return rows, columns
        if reached > best:
            best, found = reached, (rows, columns)
        price = reached / 2
    return found


def _end_of(probable: Posterior, rows: Indices, columns: Indices, ended: tuple[bool, bool]) -> tuple[int, int]:
    """Where the window ends: the last place where all alignments pass, or the one where most do."""
    passes = probable.passes[:, :, 0]
    launches, kernels = passes.shape[0] - 1, passes.shape[1] - 1
    if any(ended):
        behind = (int(rows[-1]) + 1, int(columns[-1]) + 1) if len(rows) else (0, 0)
        return (launches if ended[0] else behind[0]), (kernels if ended[1] else behind[1])
    inner = passes[launches // 4 : launches * 3 // 4 + 1, kernels // 4 : kernels * 3 // 4 + 1]
    sure = np.argwhere(inner >= min(_SURE, float(inner.max())))
    row, column = sure[sure.sum(axis=1).argmax()]
    return int(row) + launches // 4, int(column) + kernels // 4
