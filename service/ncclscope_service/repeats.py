"""Whether a thread calls one and the same again and again, and what that makes the steps of an alignment worth.

Operations that are drawn one by one, whatever came before, make a long run of equal ones next to impossible: a model
that takes them so would rather believe that few were lost than that the run was longer. So it is asked how often a
symbol is followed by itself. With a chance of p for a symbol anywhere, and of l that the one before is repeated, it
comes after itself with l + (1 - l) p, after another with (1 - l) p. Launches and kernels are measured against two
sequences of their own kind; a pair is one call, of which both tell.

*Source:* Durbin, Eddy, Krogh, Mitchison, "Biological Sequence Analysis", chapters 3 and 4 (Markov chains, odds against
a random model).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.pair_hmm import Floats, Turns
from ncclscope_wire.batch import Columns

_TOLD: Final = 8.0
"""Repetition must make both sequences so much likelier (logarithm) than chance alone does."""

_MOST: Final = 0.98


@dataclass(frozen=True, slots=True)
class Repeats:
    """What repetition makes the steps of a window worth."""

    kernels: Floats
    """(m,): how likely each kernel is after the one before it, against anywhere."""
    turns: Turns


def repeats_of(fits: NDArray[np.bool_], launches: Columns, kernels: Columns) -> Repeats | None:
    """What repetition says in a window; None where symbols follow each other as by chance, or none follows.

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
    if np.log(after_launch).sum() + np.log(after_kernel).sum() < 2 * _TOLD:
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
