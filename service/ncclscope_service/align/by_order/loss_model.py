"""Loss model of one thread, learnt from its pairs, and the weights of alignment steps that follow from it.

Losses, groups, durations, grids and repeats. Everything is learnt from probabilities of pairs (expectation
maximisation), at places that depend on the data alone, so that the result does not depend on how the data were cut.

*Grids.* A kernel has one block for each channel. TUNING lines show the channels of a collective (communicator rank 0,
from 2.24 on), and a lone collective's kernel has that many blocks. Elsewhere what grids each kind of launch had is
learnt from pairs: NCCL gives equal calls equal channels.

*Repeats.* Operations that are drawn one by one, whatever came before, make a long run of equal ones next to impossible:
a model that takes them so would rather conclude that few were lost than that the run was longer. So it is asked how
often a symbol is followed by itself. With a chance of p for a symbol anywhere, and of l that the one before is
repeated, it comes after itself with l + (1 - l) p, after another with (1 - l) p. Launches and kernels are measured
against two sequences of their own kind; a pair is one call, seen on both sides.

*Source:* Durbin, Eddy, Krogh, Mitchison, "Biological Sequence Analysis", chapters 3 and 4 (Markov chains, odds against
a random model); NCCL `src/enqueue.cc` (scheduleCollTasksToPlan: channel{Lo..Hi}; ncclLaunchKernel: gridDim is the
popcount of the plan's channel mask).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.missing_launches import (
    KernelGaps,
    LaunchKinds,
    LineGaps,
    MissingKernels,
    MissingLines,
)
from ncclscope_service.align.by_order.pair_hmm import Floats, Turns, Weights
from ncclscope_service.columns.group_by import CombinationIndex
from ncclscope_wire.batch import Columns

_LEAST_GAIN: Final = 8.0
"""Least gain (logarithm of the likelihood) for which repetition is used."""

_MOST: Final = 0.98

GRIDS_LIMIT: Final = 64
"""Larger grids, in blocks, share one class."""

_UNSEEN: Final = 4.0
"""Pairs that the grids of all kernels weigh in those of each kind."""

_ASTRAY: Final = 0.02
"""Chance that a kernel's grid differs from its TUNING line: lines of a group may be mixed up."""

_GRID_MEMORY: Final = 4000.0
_STRONGEST_GRID: Final = 50.0

_PRIOR: Final = 20.0
"""Launches that the first guess of the loss rates weighs."""

_MEMORY: Final = 2000.0
"""Launches after which older ones count less."""

_LEAST_RATE, _MOST_RATE = 1e-4, 0.6

_STRONGEST: Final = 20.0
"""Largest factor by which a kernel's duration changes the odds of a pair."""

_TAIL: Final = 4.0
"""Degrees of freedom of Student's t: a kernel that waits for its peers takes far longer than its size asks for."""

_FEW: Final = 0.1


@dataclass(frozen=True, slots=True)
class Repeats:
    """Weights of the steps of a window by repetition."""

    kernels: Floats
    """(m,): how likely each kernel is after the one before it, against anywhere."""
    turns: Turns


def repeats_of(fits: NDArray[np.bool_], launches: Columns, kernels: Columns) -> Repeats | None:
    """Repetition in a window; None if symbols follow each other as by chance, or there are too few.

    fits[i, j]: launch i may be kernel j.
    """
    if min(fits.shape) < 2:
        return None
    of_launch, of_kernel = fits.mean(axis=1), fits.mean(axis=0)
    same_launch = _repeated(launches, ("tid", "lane", "classes", "data_type"))
    same_kernel = _repeated(kernels, ("tid", "lane", "kernel_class", "data_type"))
    often = (float(same_launch[1:].mean()) + float(same_kernel[1:].mean())) / 2
    chance = (float(of_launch[1:].mean()) + float(of_kernel[1:].mean())) / 2
    share = min((often - chance) / max(1 - chance, 1e-9), _MOST)
    if share <= 0:
        return None
    after_launch, after_kernel = _after(same_launch, of_launch, share), _after(same_kernel, of_kernel, share)
    if np.log(after_launch).sum() + np.log(after_kernel).sum() < 2 * _LEAST_GAIN:
        return None
    beside = np.pad(fits, ((0, 0), (1, 0)))
    to_launch = _after(beside, of_launch[:, None], share) / after_launch[:, None]
    beside = np.pad(fits, ((1, 0), (0, 0)))
    to_kernel = _after(beside, of_kernel[None, :], share) / after_kernel
    return Repeats(after_kernel, Turns(to_launch[:, :, None], to_kernel[:, :, None]))


def _repeated(rows: Columns, names: tuple[str, ...]) -> NDArray[np.bool_]:
    """Which rows are of the same symbol as those before them."""
    same = np.ones(len(rows), dtype=bool)
    for name in names:
        same[1:] &= rows[name][1:] == rows[name][:-1]
    same[:1] = False
    return same


def _after(is_same: NDArray[np.bool_], often: Floats, share: float) -> Floats:
    """How likely each symbol is after another, or the same, against anywhere."""
    odds: Floats = 1 - share + share * is_same / np.maximum(often, 1e-3)
    return odds


@dataclass(slots=True)
class KernelGrids:
    """Grids of the kernels of each kind of launch of one thread."""

    _kinds: LaunchKinds = field(default_factory=LaunchKinds)
    _counts: Floats = field(default_factory=lambda: np.zeros((0, GRIDS_LIMIT + 1)))

    def odds(self, launches: Columns, kernels: Columns) -> Floats:
        """(n, m): how much likelier each kernel's grid is for each launch than for any kernel."""
        grids = np.minimum(kernels["grid_x"], GRIDS_LIMIT)
        often = np.bincount(grids, minlength=GRIDS_LIMIT + 1) / max(len(grids), 1)
        kinds = self._number(launches)
        counts = self._counts[kinds]
        shares = (counts + _UNSEEN * often) / (counts.sum(axis=1, keepdims=True) + _UNSEEN)
        known = np.flatnonzero(launches["channels"] > 0)
        shares[known] = _ASTRAY * often
        shares[known, np.minimum(launches["channels"][known], GRIDS_LIMIT)] += 1 - _ASTRAY
        odds: Floats = np.clip(
            (shares / np.where(often > 0, often, 1.0))[:, grids], 1 / _STRONGEST_GRID, _STRONGEST_GRID
        )
        odds[:, grids == 0] = 1.0
        return odds

    def learn(self, launches: Columns, kernels: Columns, pairs: Floats) -> None:
        """Learns from pairs by their probability."""
        table = np.zeros((len(kernels), GRIDS_LIMIT + 1))
        table[np.arange(len(kernels)), np.minimum(kernels["grid_x"], GRIDS_LIMIT)] = 1.0
        kinds = self._number(launches)
        np.add.at(self._counts, kinds, pairs @ table)
        self._counts *= np.minimum(1.0, _GRID_MEMORY / np.maximum(self._counts.sum(axis=1, keepdims=True), 1.0))

    def _number(self, launches: Columns) -> NDArray[np.int32]:
        kinds = self._kinds.number(launches)
        missing = len(self._kinds) - len(self._counts)
        if missing > 0:
            self._counts = np.concatenate([self._counts, np.zeros((missing, GRIDS_LIMIT + 1))])
        return kinds


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
    """Launches without a kernel."""
    lost_lines: float = 0.0
    """Kernels without a launch."""

    @property
    def are_few(self) -> bool:
        """Whether a gap that makes the rest agree is the right one."""
        return self.kernels + self.lines < _FEW

    def learn(self, launches: float, kernels: float, pairs: float) -> None:
        """Learns from an aligned stretch; older ones fade."""
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
        """Weight of a lost line and a lost kernel relative to a pair; 0 while one side has lost none."""
        if min(self.lost_kernels, self.lost_lines) < 1:
            return 0.0
        kernels, lines = self.rates()
        return kernels / (1 - kernels) * lines / (1 - lines)

    def rates(self) -> tuple[float, float]:
        """Shares of kernels and of lines that are missing, within bounds."""
        return (
            min(max(self.kernels, _LEAST_RATE), _MOST_RATE),
            min(max(self.lines, _LEAST_RATE), _MOST_RATE),
        )


@dataclass(frozen=True, slots=True)
class Missing:
    """Missing launches and lines in a window by its own gaps, for several loss rates."""

    kernels: MissingKernels
    lines: MissingLines


def weights_of(
    odds: Floats,
    joinable: NDArray[np.bool_],
    answers: Sequence[Losses],
    missing: Missing | None = None,
    repeats: Repeats | None = None,
) -> Weights:
    """Weights of the steps of one window for several loss rates.

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
    """Durations of kernels of each kind and size, by earlier pairs; a launch's size then hints at its kernel.

    Logarithms of durations around a mean for every kind and power of two of bytes. If the size does not matter, or
    waiting hides it, the means are those of the kind, and nothing is learnt.
    """

    _kinds: CombinationIndex = field(default_factory=lambda: CombinationIndex(("lane", "classes", "octave")))
    _groups: CombinationIndex = field(default_factory=lambda: CombinationIndex(("lane", "classes")))
    _group_of: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    _sums: Floats = field(default_factory=lambda: np.zeros((0, 3)))
    """Weight, sum and sum of squares of each kind."""

    def odds(self, launches: Columns, kernels: Columns) -> Floats | float:
        """How much likelier each kernel's duration is for each launch than for any of its group; 1.0 if unknown."""
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

    def learn(self, launches: Columns, kernels: Columns, probable: Floats) -> None:
        """Learns from pairs by their probability."""
        kind = self._number(launches)
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


@dataclass(slots=True)
class LossModel:
    """Losses, durations, grids and gaps of one thread, learnt from its pairs."""

    losses: Losses = field(default_factory=Losses)
    durations: Durations = field(default_factory=Durations)
    grids: KernelGrids = field(default_factory=KernelGrids)
    kernel_gaps: KernelGaps = field(default_factory=KernelGaps)
    line_gaps: LineGaps = field(default_factory=LineGaps)
