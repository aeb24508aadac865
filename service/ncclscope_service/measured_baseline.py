"""What nccl-tests measured on the machine, over message size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.nccl_tests import MeasuredSize

Shape = tuple[int, int, int]
"""(operation, ranks, nodes)."""


class MeasuredBaseline:
    """Bus bandwidth over message size, for each (operation, ranks, nodes) that was tested."""

    def __init__(self, tested: Iterable[MeasuredSize]) -> None:
        """Of several measurements of one size the best counts."""
        best: dict[Shape, dict[int, float]] = defaultdict(dict)
        for each in tested:
            if each.message_bytes > 0 and each.busbw > 0:
                sizes = best[each.op, each.ranks, each.nodes]
                sizes[each.message_bytes] = max(each.busbw, sizes.get(each.message_bytes, 0.0))
        self._curves: dict[Shape, tuple[NDArray[np.float64], NDArray[np.float64]]] = {
            shape: (np.log(np.array(sorted(sizes))), np.log([sizes[size] for size in sorted(sizes)]))
            for shape, sizes in best.items()
        }

    @property
    def shapes(self) -> list[Shape]:
        """(operation, ranks, nodes) that were tested, sorted."""
        return sorted(self._curves)

    def busbw(self, shape: Shape, message_bytes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Bytes per second at these sizes: straight lines between the tested ones, both axes logarithmic.

        Above the largest size its bandwidth holds; below the smallest, and for a shape that was not tested, NaN.
        """
        curve = self._curves.get(shape)
        if curve is None:
            return np.full(len(message_bytes), np.nan)
        sizes, rates = curve
        asked = np.log(np.maximum(message_bytes, 1))
        found: NDArray[np.float64] = np.exp(np.interp(asked, sizes, rates))
        return np.where(asked < sizes[0] - 1e-9, np.nan, found)

    def largest_busbw(self, shape: Shape) -> float | None:
        """The best at any size, bytes per second; None for a shape that was not tested."""
        curve = self._curves.get(shape)
        return None if curve is None else float(np.exp(curve[1].max()))
