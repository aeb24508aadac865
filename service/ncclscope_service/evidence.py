"""What one thread's alignment has taught so far, and what that makes each pair worth: losses, groups, sizes.

Everything is learnt from probabilities of pairs (expectation maximisation), at places that depend on the data alone, so
that the result does not depend on how the data were cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.kernel_gaps import MissingKernels
from ncclscope_service.line_gaps import MissingLines
from ncclscope_service.pair_hmm import Floats, Weights
from ncclscope_service.repeats import Repeats
from ncclscope_service.signatures import Signatures
from ncclscope_wire.batch import Columns

_PRIOR: Final = 20.0
"""Launches that the first guess of the loss rates weighs."""

_MEMORY: Final = 2000.0
"""Launches after which older ones count less."""

_LEAST_RATE, _MOST_RATE = 1e-4, 0.6

_STRONGEST: Final = 20.0
"""A kernel's duration makes a pair so much more or less likely at most."""

_TAIL: Final = 4.0
"""Degrees of freedom of Student's t: a kernel that waits for its peers takes far longer than its size asks for."""


@dataclass(slots=True)
class Losses:
    """How often kernels and lines are missing, and how often a call that may be of a group is."""

    kernels: float = 0.01
    """Share of launches whose kernel is missing."""
    lines: float = 0.01
    """Share of kernels whose line is missing."""
    joins: float = 0.3
    """Share of Sends and Receives of open groups that run in the kernel of the one before."""
    weight: float = 0.0
    """Launches seen."""
    lost_kernels: float = 0.0
    """Those of them of which no kernel was found."""
    lost_lines: float = 0.0
    """Kernels of which no launch was found."""

    @property
    def are_few(self) -> bool:
        """Whether a gap that makes the rest agree is the right one."""
        return self.kernels + self.lines < _FEW

    def learn(self, launches: float, kernels: float, pairs: float) -> None:
        """Takes in an aligned stretch; older ones fade."""
        if launches <= 0 or kernels <= 0:
            return
        total = min(self.weight, _MEMORY) + _PRIOR
        self.kernels = (self.kernels * total + launches - pairs) / (total + launches)
        self.lines = (self.lines * total + kernels - pairs) / (total + kernels)
        self.weight += launches
        self.lost_kernels += launches - pairs
        self.lost_lines += kernels - pairs

    @property
    def both(self) -> float:
        """What a lost line and a lost kernel are worth beside a pair; 0 while one side was not seen to lose any."""
        if min(self.lost_kernels, self.lost_lines) < 1:
            return 0.0
        kernels, lines = self.rates()
        return kernels / (1 - kernels) * lines / (1 - lines)

    def rates(self) -> tuple[float, float]:
        """Shares of kernels and of lines that are missing, within what can be told."""
        return (
            min(max(self.kernels, _LEAST_RATE), _MOST_RATE),
            min(max(self.lines, _LEAST_RATE), _MOST_RATE),
        )


_FEW: Final = 0.1


@dataclass(frozen=True, slots=True)
class Missing:
    """What both sides of a window say of their own gaps, under several answers to how much is lost."""

    kernels: MissingKernels
    lines: MissingLines


def weights_of(
    odds: Floats,
    joinable: NDArray[np.bool_],
    answers: Sequence[Losses],
    missing: Missing | None = None,
    repeats: Repeats | None = None,
) -> Weights:
    """What the steps of one window are worth under several answers to how much is lost.

    odds[i, j]: how much likelier kernel j is for launch i than anywhere.
    """
    turns = repeats.turns if repeats is not None else None
    odds = odds / repeats.kernels if repeats is not None else odds
    rates = np.array([losses.rates() for losses in answers])
    kernels_lost, lines_lost = rates[:, 0], rates[:, 1]
    joins = np.where(joinable[:, None], [losses.joins for losses in answers], 0.0)
    # Of what was called, nothing is seen where line and kernel are both lost.
    seen = 1 - kernels_lost * lines_lost
    pair = odds[:, :, None] * ((1 - kernels_lost) * (1 - lines_lost) / seen * (1 - joins))[:, None]
    lost_kernel = np.broadcast_to(kernels_lost * (1 - lines_lost) / seen, (len(odds), len(answers)))
    lost_line = np.empty((len(odds) + 1, odds.shape[1], len(answers)))
    lost_line[:] = lines_lost * (1 - kernels_lost) / seen
    if missing is None:
        return Weights(pair, lost_kernel, lost_line, joins, None, turns)
    # Before each launch and each kernel a geometric number of lines and of kernels is lost.
    lost_here = missing.kernels.amount / (1 + missing.kernels.amount)
    lines_here = _scaled(missing.lines.amount, lines_lost)
    takes_kernel = ((1 - lost_here) / (1 - kernels_lost))[:-1]
    takes_launch = ((1 - lines_here) / (1 - lines_lost))[:-1]
    pair *= takes_kernel
    pair *= takes_launch[:, None]
    lost_line *= takes_kernel
    lost_line *= (lines_here / lines_lost)[:, None] * missing.lines.lanes[:, :, None]
    return Weights(pair, lost_kernel * takes_launch, lost_line, joins, lost_here / kernels_lost, turns)


def _scaled(amount: Floats, lines_lost: Floats) -> Floats:
    """The chance (n + 1, B) that a line is lost here, with the first answer's expectation scaled to the others'."""
    odds = lines_lost / (1 - lines_lost)
    expected = amount[:, None] * odds / odds[0]
    chances: Floats = expected / (1 + expected)
    return chances


def odds_of(fits: NDArray[np.bool_] | Floats) -> Floats:
    """How much likelier each kernel is after each launch than anywhere, if only those that fit are possible."""
    share = fits.mean(axis=1, keepdims=True)
    odds: Floats = fits / np.maximum(share, 1e-9)
    return odds


@dataclass(slots=True)
class Durations:
    """How long kernels of each kind and size take, by what was paired; a launch's size then tells its kernel.

    Logarithms of durations around a mean for every kind and power of two of bytes. Where the size does not matter, or
    waiting hides it, the means are those of the kind, and nothing is told.
    """

    _kinds: Signatures = field(default_factory=lambda: Signatures(("lane", "classes", "octave")))
    _groups: Signatures = field(default_factory=lambda: Signatures(("lane", "classes")))
    _group_of: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    _sums: Floats = field(default_factory=lambda: np.zeros((0, 3)))
    """Weight, sum and sum of squares of each kind."""

    def odds(self, launches: Columns, kernels: Columns) -> Floats | float:
        """How much likelier each kernel's duration is for each launch than for any of its group; 1.0 without a word."""
        known = (kernels["duration_ns"] > 0)[None, :] & (launches["message_bytes"] > 0)[:, None]
        if not known.any():
            return 1.0
        kind = self._number(launches)
        groups = self._group_of[kind]
        whole = np.zeros((len(self._groups), 3))
        np.add.at(whole, self._group_of, self._sums)
        mean = (whole[:, 1]) / np.maximum(whole[:, 0], 1e-9)
        spread = np.sqrt(np.maximum(whole[:, 2] / np.maximum(whole[:, 0], 1e-9) - mean**2, 0.01))
        own = (self._sums[:, 1] + mean[self._group_of]) / (self._sums[:, 0] + 1.0)
        scatter = self._sums[:, 2] - 2 * own * self._sums[:, 1] + own**2 * self._sums[:, 0]
        inner = np.zeros(len(self._groups))
        np.add.at(inner, self._group_of, np.maximum(scatter, 0.0))
        inner = np.sqrt(np.maximum((inner + 4.0 * spread**2) / (whole[:, 0] + 4.0), 0.01))
        seconds = np.log2(np.maximum(kernels["duration_ns"], 1))[None, :]
        near = _student(seconds, own[kind][:, None], inner[groups][:, None])
        anywhere = _student(seconds, mean[groups][:, None], spread[groups][:, None])
        enough = known & (whole[groups, 0] >= 8)[:, None]
        odds: Floats = np.where(enough, np.clip(near / anywhere, 1 / _STRONGEST, _STRONGEST), 1.0)
        return odds

    def learn(self, launches: Columns, kernels: Columns, probable: Floats, *, fresh: bool = False) -> None:
        """Takes in pairs by their probability; with `fresh` everything before is forgotten."""
        kind = self._number(launches)
        if fresh:
            self._sums[:] = 0.0
        known = kernels["duration_ns"] > 0
        seconds = np.where(known, np.log2(np.maximum(kernels["duration_ns"], 1)), 0.0)
        chances = probable * known
        np.add.at(self._sums, kind, np.stack([chances.sum(axis=1), chances @ seconds, chances @ seconds**2], axis=1))
        self._sums *= np.minimum(1.0, _MEMORY / np.maximum(self._sums[:, :1], 1.0))

    def _number(self, launches: Columns) -> NDArray[np.int32]:
        rows = np.zeros(len(launches), dtype=[("lane", "<i4"), ("classes", "<u4"), ("octave", "<i4")])
        rows["lane"], rows["classes"] = launches["lane"], launches["classes"]
        rows["octave"] = np.log2(np.maximum(launches["message_bytes"], 1)).astype(np.int32)
        kinds = self._kinds.number(rows)
        known = len(self._group_of)
        if len(self._kinds) > known:
            self._group_of = np.append(self._group_of, self._groups.number(self._kinds.rows[known:]))
            self._sums = np.concatenate([self._sums, np.zeros((len(self._kinds) - known, 3))])
        return kinds


def _student(values: Floats, mean: Floats, scale: Floats) -> Floats:
    """Density of Student's t, but for a factor that all share."""
    density: Floats = (1 + ((values - mean) / scale) ** 2 / _TAIL) ** (-(_TAIL + 1) / 2) / scale
    return density
