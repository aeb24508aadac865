"""Which pairs are given out: those of the alignment with the highest expected gain, given how likely each pair is.

*Source:* Durbin, Eddy, Krogh, Mitchison, "Biological Sequence Analysis", chapter 4 (maximum-accuracy alignment).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ncclscope_service.pair_hmm import Floats, Indices, Posterior

SURELY: Final = 0.85
POSSIBLE: Final = 1e-6
GUESSED: Final = 0.1
"""What a guess is worth beside what is probable: less than any pair that pays its price."""
EQUAL: Final = 1e-4
"""Gains that differ by less are equal: of equal launches the first is paired."""


def most_accurate(probable: Posterior, price: float) -> tuple[Indices, Indices, Indices]:
    """Window, launch and kernel of the pairs of the alignment with the highest expected gain.

    A right pair gains one; any pair costs `price`, so that what is improbable stays out. A kernel of which it is sure
    that its line is there gets one all the same, the likeliest: in a run of equal operations communicator, kind and
    size are right then, and the probability says that the pair is a guess. Ascending in each window.
    """
    launches, kernels, batch = probable.fresh.shape
    together = probable.fresh + probable.joined
    has_line = (together.sum(axis=0) >= SURELY) & (together > POSSIBLE)
    gain = np.where(has_line, np.maximum(together - price, GUESSED * together), together - price)
    joining = np.maximum(probable.joined - price, 0.0)
    value = np.zeros((launches + 1, kernels + 1, batch))
    for row in range(launches):
        best = value[row + 1]
        np.add(value[row, :-1], gain[row], out=best[1:])
        np.maximum(best[1:], value[row, 1:] + joining[row], out=best[1:])
        np.maximum.accumulate(best, axis=0, out=best)
    return _traced(value, joining)


def _traced(value: Floats, joining: Floats) -> tuple[Indices, Indices, Indices]:
    launches, kernels, batch = joining.shape
    at = np.full(batch, kernels, dtype=np.intp)
    windows = np.arange(batch)
    found: list[tuple[Indices, int, Indices]] = []
    for row in range(launches - 1, -1, -1):
        # The leftmost column that is worth as much: kernels behind it are no pair of this row.
        wanted = value[row + 1][at, windows]
        at = (value[row + 1] >= wanted - EQUAL).argmax(axis=0)
        column = np.maximum(at - 1, 0)
        above = value[row][at, windows]
        pairs = (at > 0) & (wanted > above + EQUAL)
        gained = joining[row][column, windows]
        joins = pairs & (gained > 0) & (wanted <= above + gained + EQUAL)
        if pairs.any():
            found.append((windows[pairs], row, column[pairs]))
        at = np.where(pairs & ~joins, at - 1, at)
    if not found:
        nothing = np.empty(0, dtype=np.intp)
        return nothing, nothing, nothing
    found.reverse()
    window = np.concatenate([each[0] for each in found])
    launch = np.concatenate([np.full(len(each[0]), each[1], dtype=np.intp) for each in found])
    kernel = np.concatenate([each[2] for each in found])
    order = np.argsort(window, kind="stable")
    return window[order], launch[order], kernel[order]
