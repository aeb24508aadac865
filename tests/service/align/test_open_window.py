"""Which pairs are given out of an open window: the best that were found, also where prices come to no rest."""

from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.align.by_order import open_window
from ncclscope_service.align.by_order.pair_hmm import Indices, Posterior


def _posterior(pairs: list[list[float]]) -> Posterior:
    fresh = np.array(pairs)[:, :, None]
    nothing = np.zeros(1)
    return Posterior(fresh, np.zeros_like(fresh), np.zeros_like(fresh), nothing, nothing, nothing, nothing)


def test_prices_that_alternate_for_ever_end_with_the_better_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    probable = _posterior([[0.9, 0.1], [0.1, 0.15]])
    asked: list[float] = []

    def alternating(_probable: Posterior, price: float) -> tuple[Indices, Indices, Indices]:
        """A guess that is worth little as long as a pair costs much, the probable one as long as it costs little."""
        asked.append(price)
        row = np.array([0 if price < 0.4 else 1])
        return np.zeros(1, np.intp), row, row

    monkeypatch.setattr(open_window, "most_accurate", alternating)
    rows, columns = open_window._best(probable)  # pyright: ignore[reportPrivateUsage]  (its callers show nothing of the rounds)
    assert (rows.tolist(), columns.tolist()) == ([0], [0])
    assert len(set(asked[1:])) == 2, "it would alternate for ever"
    assert len(asked) < 100


def test_nothing_probable_gives_no_pairs() -> None:
    rows, columns = open_window._best(_posterior([[0.0]]))  # pyright: ignore[reportPrivateUsage]
    assert (len(rows), len(columns)) == (0, 0)
