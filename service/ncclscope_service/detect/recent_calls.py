"""The latest calls of many sequences side by side: of each place, the call of the first rank that reached it.

A sequence takes memory for the places that it has used, and not for those that it may use: a communicator that is made,
called a few times and destroyed, as elastic jobs do all day, takes some hundred bytes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.terms import NO_NUMBER

WINDOW: Final = 4096
"""Places of a sequence that are remembered: ranks do not run further apart."""
UNSEEN: Final = -1
_FIRST_WIDTH: Final = 16


class RecentCalls:
    """Columns over the places of all sequences. Those of one sequence are neighbours, from its `begins` on, as many as
    its `widths`, which grows with it to `WINDOW`: place n of a sequence is at n modulo its width.
    """

    def __init__(self) -> None:
        self.calls: NDArray[np.int64] = np.empty(0, np.int64)
        self.seqs: NDArray[np.int64] = np.empty(0, np.int64)
        """Number of each place in the whole sequence."""
        self.first_rank: NDArray[np.int32] = np.empty(0, np.int32)
        self.agreeing: NDArray[np.int32] = np.empty(0, np.int32)
        """Number of ranks that made the same call."""
        self.begins: NDArray[np.int64] = np.empty(0, np.int64)
        """By sequence."""
        self.widths: NDArray[np.int64] = np.empty(0, np.int64)
        """By sequence; a power of two."""
        self._sequences = self._places = 0
        self._unused_numbers: list[int] = []
        self._unused_places: defaultdict[int, list[int]] = defaultdict(list[int])
        """By width: begins of places that were given back."""

    def add(self) -> int:
        """The number of a new sequence."""
        if self._unused_numbers:
            number = self._unused_numbers.pop()
        else:
            number = self._sequences
            self._sequences += 1
            if number == len(self.begins):
                more = np.zeros(max(8, number // 2), np.int64)
                self.begins, self.widths = np.concatenate([self.begins, more]), np.concatenate([self.widths, more])
        self.begins[number], self.widths[number] = self._take(_FIRST_WIDTH), _FIRST_WIDTH
        return number

    def give_back(self, number: int) -> None:
        """Frees the number of a sequence that ended."""
        self._give_back_places(int(self.begins[number]), int(self.widths[number]))
        self._unused_numbers.append(number)

    def reserve(self, number: int, seq: int) -> None:
        """Makes room in a sequence for its place `seq`."""
        begin, width = int(self.begins[number]), int(self.widths[number])
        if seq < width or width == WINDOW:
            return
        wider = min(WINDOW, 1 << seq.bit_length())
        to = self._take(wider)
        # No place was used twice so far, so each stays where it is, counted from the beginning.
        for column in (self.calls, self.seqs, self.first_rank, self.agreeing):
            column[to : to + width] = column[begin : begin + width]
        self._give_back_places(begin, width)
        self.begins[number], self.widths[number] = to, wider

    def of(self, number: int) -> slice:
        """Where the places of a sequence are, until the next `reserve` of it."""
        begin = int(self.begins[number])
        return slice(begin, begin + int(self.widths[number]))

    def _take(self, width: int) -> int:
        if self._unused_places[width]:
            return self._unused_places[width].pop()
        begin = self._places
        self._places += width
        if self._places > len(self.calls):
            more = max(width, len(self.calls) // 2)
            self.calls = np.concatenate([self.calls, np.full(more, UNSEEN, np.int64)])
            self.seqs = np.concatenate([self.seqs, np.full(more, UNSEEN, np.int64)])
            self.first_rank = np.concatenate([self.first_rank, np.full(more, NO_NUMBER, np.int32)])
            self.agreeing = np.concatenate([self.agreeing, np.zeros(more, np.int32)])
        return begin

    def _give_back_places(self, begin: int, width: int) -> None:
        places = slice(begin, begin + width)
        self.calls[places] = self.seqs[places] = UNSEEN
        self.first_rank[places], self.agreeing[places] = NO_NUMBER, 0
        self._unused_places[width].append(begin)
