"""How good answers are: on exact pairs, on meaning, and whether stated confidence means what it says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from benchmarks.alignment.case import Case
from numpy.typing import NDArray

from ncclscope_wire.batch import Columns

BINS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.000001)
"""Bounds of the bins of confidence; narrower where it matters whether a match can be trusted."""


@dataclass(slots=True)
class Counts:
    """Right answers, answers, and what there was to answer."""

    right: int = 0
    given: int = 0
    wanted: int = 0

    @property
    def precision(self) -> float:
        """Share of the answers that is right; 1 where there is none."""
        return self.right / self.given if self.given else 1.0

    @property
    def recall(self) -> float:
        """Share of what was wanted that was answered rightly; 1 where nothing was."""
        return self.right / self.wanted if self.wanted else 1.0

    @property
    def f1(self) -> float:
        """Harmonic mean of the two; 1 where nothing was wanted and nothing given."""
        both = self.given + self.wanted
        return 2 * self.right / both if both else 1.0

    def add(self, other: Counts) -> None:
        """Takes another case in."""
        self.right, self.given, self.wanted = (
            self.right + other.right,
            self.given + other.given,
            self.wanted + other.wanted,
        )


@dataclass(slots=True)
class Score:
    """Counts over any number of cases."""

    exact: Counts = field(default_factory=Counts)
    """Pairs (operation, kernel). Wanted are those of which line and kernel are both there."""
    meaning: Counts = field(default_factory=Counts)
    """Kernels' communicator, kind and size. A kernel whose own line is lost may rightly be given the line of an equal
    operation; wanted is what pairing each meaning's lines with its kernels could give at most."""
    _stated: list[NDArray[np.float64]] = field(default_factory=list[NDArray[np.float64]])
    _is_right: list[NDArray[np.bool_]] = field(default_factory=list[NDArray[np.bool_]])

    def add(self, case: Case, pairs: Columns) -> None:
        """Takes the answers to one case in.

        Raises:
            ValueError: an operation has two kernels, or a pair names what is not in the case.
        """
        _check(case, pairs)
        truth = case.truth
        is_right = _contains(truth, pairs)
        present = np.isin(truth["operation"], case.operations["id"]) & np.isin(truth["kernel"], case.kernels["id"])
        self.exact.add(Counts(int(is_right.sum()), len(pairs), int(present.sum())))
        self.meaning.add(_meaning(case, pairs))
        self._stated.append(pairs["confidence"].astype(np.float64))
        self._is_right.append(is_right)

    def reliability(self) -> list[Bin]:
        """For each bin of stated confidence that holds answers: how many, and the share that is right."""
        stated, is_right = np.concatenate([[], *self._stated]), np.concatenate([np.empty(0, bool), *self._is_right])
        bins: list[Bin] = []
        for low, high in pairwise(BINS):
            inside = (stated >= low) & (stated < high)
            if inside.any():
                amount = int(inside.sum())
                bins.append(
                    Bin(low, min(high, 1.0), amount, float(stated[inside].mean()), float(is_right[inside].mean()))
                )
        return bins

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: |stated - right| of the bins, weighted by their answers."""
        bins = self.reliability()
        answers = sum(each.answers for each in bins)
        return sum(abs(each.stated - each.right) * each.answers for each in bins) / answers if answers else 0.0


@dataclass(frozen=True, slots=True)
class Bin:
    """Answers of similar confidence."""

    low: float
    high: float
    answers: int
    stated: float
    """Mean confidence."""
    right: float
    """Share that is right."""


def scored(answers: Iterable[tuple[Case, Columns]]) -> Score:
    """The score over cases and the answers to them."""
    score = Score()
    for case, pairs in answers:
        score.add(case, pairs)
    return score


def _check(case: Case, pairs: Columns) -> None:
    if len(np.unique(pairs["operation"])) < len(pairs):
        raise ValueError(f"{case.name}: an operation has two kernels; answer one kernel, or none, for each")
    for name, rows in (("operation", case.operations), ("kernel", case.kernels)):
        foreign = ~np.isin(pairs[name], rows["id"])
        if foreign.any():
            raise ValueError(f"{case.name}: {name} {pairs[name][foreign][0]} is not among those of the case")


def _contains(truth: Columns, pairs: Columns) -> NDArray[np.bool_]:
    kernel_of = dict(zip(truth["operation"].tolist(), truth["kernel"].tolist(), strict=True))
    asked = zip(pairs["operation"].tolist(), pairs["kernel"].tolist(), strict=True)
    return np.fromiter((kernel_of.get(operation) == kernel for operation, kernel in asked), bool, len(pairs))


def _meaning(case: Case, pairs: Columns) -> Counts:
    """Per kernel the meanings answered and those that are true, each counted as often as it occurs in both."""
    truth = case.truth
    meaning_of = dict(zip(truth["operation"].tolist(), truth["meaning"].tolist(), strict=True))
    answered = np.array([meaning_of.get(operation, -1) for operation in pairs["operation"].tolist()], dtype=np.int64)
    there = truth[np.isin(truth["kernel"], case.kernels["id"])]
    right = _in_both(pairs["kernel"], answered, there["kernel"], there["meaning"])
    logged = truth["meaning"][np.isin(truth["operation"], case.operations["id"])]
    wanted = _in_both(np.zeros(len(logged), np.int64), logged, np.zeros(len(there), np.int64), there["meaning"])
    return Counts(right, len(pairs), wanted)


def _in_both(
    keys: NDArray[np.int64], values: NDArray[np.int64], other_keys: NDArray[np.int64], other_values: NDArray[np.int64]
) -> int:
    """Size of the intersection of two multisets of (key, value)."""
    mine, theirs = np.stack([keys, values], 1), np.stack([other_keys, other_values], 1)
    _, index = np.unique(np.concatenate([mine, theirs]), axis=0, return_inverse=True)
    index = index.reshape(-1)
    size = int(index.max()) + 1 if len(index) else 0
    return int(
        np.minimum(
            np.bincount(index[: len(mine)], minlength=size), np.bincount(index[len(mine) :], minlength=size)
        ).sum()
    )
