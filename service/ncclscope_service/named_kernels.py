"""Which kernels operations name, as far as it takes to let go of older ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.distinct import distinct
from ncclscope_wire.terms import NO_NUMBER

_BLOCK: Final = 4096
"""Operations that are told as one."""


@dataclass(slots=True)
class NamedKernels:
    """The first kernel that is named in each block of operations."""

    _first: dict[int, int] = field(default_factory=dict[int, int])

    def note(self, operations: NDArray[np.int64], kernels: NDArray[np.int64]) -> None:
        """Operations name these kernels, one each, by row id."""
        blocks, inverse = distinct(operations // _BLOCK)
        first = np.full(len(blocks), np.iinfo(np.int64).max)
        np.minimum.at(first, inverse, kernels)
        for block, kernel in zip(blocks.tolist(), first.tolist(), strict=True):
            self._first[block] = min(kernel, self._first.get(block, kernel))

    def first_of(self, first: int, kernels: NDArray[np.int64]) -> int | None:
        """The first kernel that operations name from `first` on; what older ones name is forgotten.

        `kernels`: what those operations name, NO_NUMBER for none; only those of the first block are looked at.
        """
        self._first = {block: kernel for block, kernel in self._first.items() if block >= first // _BLOCK}
        if (block := first // _BLOCK) in self._first:
            own = kernels[: (block + 1) * _BLOCK - first]
            own = own[own != NO_NUMBER]
            if len(own):
                self._first[block] = int(own.min())
            else:
                del self._first[block]
        return min(self._first.values(), default=None)
