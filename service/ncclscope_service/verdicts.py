"""The aligner's matches beside exact joins: the exact one wins, and how often they differ is counted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.align_rows import MATCH
from ncclscope_service.exact_join import OPINION
from ncclscope_service.rows import Match
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER


@dataclass(slots=True)
class Verdicts:
    """What becomes of the operations of one process of which two parts have something to say.

    Exact pairs are given out at once; everything else when both have spoken.
    """

    checked: int = 0
    """Operations of which both said whether they have a kernel, and which."""
    disagreements: int = 0
    _aligned: Columns = field(default_factory=lambda: np.empty(0, MATCH))
    _opinions: Columns = field(default_factory=lambda: np.empty(0, OPINION))
    _silent: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Operations that launch nothing and of which no opinion came yet."""
    _claimed: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Kernels that are exactly joined, as long as they are in the store."""

    def merge(self, aligned: Columns, opinions: Columns, *, final: bool, first_kernel: int = 0) -> Columns:
        """Takes what either side decided, each operation once; gives what is settled (align_rows.MATCH).

        `first_kernel`: id of the oldest kernel in the store; those before it are nobody's any more.
        """
        if len(self._claimed) and self._claimed.min() < first_kernel:
            self._claimed = self._claimed[self._claimed >= first_kernel]
        out: list[Columns] = []
        is_silent = aligned["match"] == Match.NO_KERNEL
        if is_silent.any():
            out.append(self._hear_silent(whole_rows.kept(aligned, is_silent)))
            aligned = whole_rows.kept(aligned, ~is_silent)
        if len(self._silent):
            answered = np.isin(opinions["operation"], self._silent)
            self._silent = self._silent[~np.isin(self._silent, opinions["operation"])]
            opinions = whole_rows.kept(opinions, ~answered)
        pairs = whole_rows.kept(opinions, opinions["kernel"] != NO_NUMBER)
        out.append(_matches(pairs))
        if len(pairs):
            self._claimed = np.concatenate([self._claimed, np.unique(pairs["kernel"])])
        self._aligned = whole_rows.joined([self._aligned, aligned])
        self._opinions = whole_rows.joined([self._opinions, opinions])
        out.append(self._settle())
        if final:
            left = whole_rows.kept(self._opinions, self._opinions["kernel"] == NO_NUMBER)
            left["match"][left["match"] == Match.PENDING] = Match.UNMATCHED
            out += [self._aligned, _matches(left)]
            self._aligned, self._opinions = self._aligned[:0], self._opinions[:0]
        return _with_launches(whole_rows.joined(out))

    def _hear_silent(self, silent: Columns) -> Columns:
        """Takes operations that launch nothing; gives those of which nothing was given out before."""
        of_silent = np.isin(self._opinions["operation"], silent["operation"])
        held = whole_rows.kept(self._opinions, of_silent)
        self._opinions = whole_rows.kept(self._opinions, ~of_silent)
        given_out = held["operation"][held["kernel"] != NO_NUMBER]
        unheard = silent["operation"][~np.isin(silent["operation"], held["operation"])]
        self._silent = np.concatenate([self._silent, unheard])
        left: Columns = silent[~np.isin(silent["operation"], given_out)]
        return left

    def release(self, aligned: Columns) -> Columns:
        """What was held back with what was decided since, where no exact join comes."""
        released: Columns = whole_rows.joined([self._aligned, aligned])
        self._aligned = self._aligned[:0]
        given_out = self._opinions["operation"][self._opinions["kernel"] != NO_NUMBER]
        left: Columns = released[~np.isin(released["operation"], given_out)] if len(given_out) else released
        return left

    def _settle(self) -> Columns:
        """What both have spoken of and that is not given out yet."""
        _, at_aligned, at_opinion = np.intersect1d(
            self._aligned["operation"], self._opinions["operation"], assume_unique=True, return_indices=True
        )
        aligned, opinions = whole_rows.taken(self._aligned, at_aligned), whole_rows.taken(self._opinions, at_opinion)
        self._aligned, self._opinions = _without(self._aligned, at_aligned), _without(self._opinions, at_opinion)
        is_pair = opinions["kernel"] != NO_NUMBER
        is_known = is_pair | (opinions["match"] != Match.PENDING)
        self.checked += int(np.count_nonzero(is_known))
        self.disagreements += int(np.count_nonzero(is_known & (aligned["kernel"] != opinions["kernel"])))
        settled = whole_rows.kept(aligned, ~is_pair)
        has_kernel = settled["kernel"] != NO_NUMBER
        if not has_kernel.any():
            return settled
        opinions = whole_rows.kept(opinions, ~is_pair)
        denied = has_kernel & (opinions["match"] != Match.PENDING)
        settled["match"][denied] = opinions["match"][denied]
        taken = has_kernel & ~denied & np.isin(settled["kernel"], self._claimed)
        settled["match"][taken] = Match.UNMATCHED
        for name in ("kernel", "launch"):
            settled[name][denied | taken] = NO_NUMBER
        settled["confidence"][denied | taken] = np.where(opinions["match"] == Match.PENDING, 0.5, 0.9)[denied | taken]
        return settled


def _without(rows: Columns, positions: NDArray[np.intp]) -> Columns:
    left = np.ones(len(rows), bool)
    left[positions] = False
    return whole_rows.kept(rows, left)


def _matches(opinions: Columns) -> Columns:
    rows = np.zeros(len(opinions), MATCH)
    for name in MATCH.names or ():
        rows[name] = opinions[name]
    return rows


def _with_launches(rows: Columns) -> Columns:
    """The same, with the launch named by the first operation that shares the kernel."""
    matched = np.flatnonzero(rows["kernel"] != NO_NUMBER)
    if not len(matched):
        return rows
    kernels, inverse = np.unique(rows["kernel"][matched], return_inverse=True)
    first = np.full(len(kernels), np.iinfo(np.int64).max)
    np.minimum.at(first, inverse, rows["operation"][matched])
    rows["launch"][matched] = first[inverse]
    return rows
