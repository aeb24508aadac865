"""Baseline: the global Needleman-Wunsch alignment of operation names that a published thesis uses.

*Source:* L. Borzyk, Understanding LLM Communication, master thesis, Heidelberg University, 2026, section 4.2.2. A match
scores 5 times the operation's weight (equation 4.1: AllReduce 1, other collectives 2, Send and Recv 0.5), a mismatch
-15 times the mean weight (4.3), a gap -5 (1 + 0.3 r) after r gaps on the same side (4.2), and a match after a match of
the same name 1 more (its fourth test). Its fifth test names 1.3 for the 0.3; the equation is used here.

Where the text leaves a choice, the one that passes its five tests as printed is taken: gaps before the
first and behind the last pair cost 5 each (2.16), gaps inside are counted for each side, and each cell keeps one best
predecessor, so that the run-dependent gap is greedy.
Send, Recv and SendRecv count as one name; else it could pair none of them. It pairs one operation with one kernel
and states no confidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from benchmarks.alignment.case import OPERATION_NAMES, pairs_of

from ncclscope_service.nccl.launch_rules import KernelClass
from ncclscope_wire.batch import Columns

MATCH: Final = 5.0
MISMATCH: Final = -15.0
GAP: Final = -5.0
GAP_RUN_MULTIPLIER: Final = 0.3
RUN_BONUS: Final = 1.0
_LIGHT: Final = {"Send", "Recv", "SendRecv"}


class Move(IntEnum):
    """How a cell was reached."""

    PAIR = 0
    KERNEL_ALONE = 1
    LINE_ALONE = 2


@dataclass(frozen=True, slots=True)
class Alignment:
    """The moves from the beginning to the end."""

    moves: tuple[Move, ...]
    pairs: tuple[tuple[int, int], ...]
    """(kernel, line) places of equal names."""
    mismatches: int
    """Pairs of different names, which are dropped."""

    @property
    def gaps(self) -> int:
        """Kernels and lines without partner."""
        return sum(move is not Move.PAIR for move in self.moves)

    @property
    def longest_gap(self) -> int:
        """The most gaps in a row on one side."""
        longest = run = 0
        for nth, move in enumerate(self.moves):
            run = 0 if move is Move.PAIR else run + 1 if nth and move is self.moves[nth - 1] else 1
            longest = max(longest, run)
        return longest


def weight(name: str) -> float:
    """Equation 4.1."""
    return 1.0 if name == "AllReduce" else 0.5 if name in _LIGHT else 2.0


def align_names(kernels: list[str], lines: list[str]) -> Alignment:
    """The thesis's alignment of two sequences of names. Time and memory grow with the product of their lengths."""
    kernels, lines = [merged(name) for name in kernels], [merged(name) for name in lines]
    own, other = [weight(name) for name in kernels], [weight(name) for name in lines]
    width = len(lines)
    moves = [[Move.LINE_ALONE] * (width + 1)]
    above, above_run = _border(width)
    for row, name in enumerate(kernels, 1):
        score = [_border_score(row)]
        runs = [row]
        here = [Move.KERNEL_ALONE]
        before = moves[-1]
        for column in range(1, width + 1):
            if name == lines[column - 1]:
                pair = above[column - 1] + MATCH * own[row - 1]
                continues = row > 1 and column > 1 and before[column - 1] is Move.PAIR
                if continues and kernels[row - 2] == name == lines[column - 2]:
                    pair += RUN_BONUS
            else:
                pair = above[column - 1] + MISMATCH * (own[row - 1] + other[column - 1]) / 2
            run_here = above_run[column] if before[column] is Move.KERNEL_ALONE else 0
            kernel_alone = above[column] + _gap(0 if column == width else run_here)
            run_left = runs[column - 1] if here[column - 1] is Move.LINE_ALONE else 0
            line_alone = score[column - 1] + _gap(0 if row == len(kernels) else run_left)
            if pair >= kernel_alone and pair >= line_alone:
                move, best, run = Move.PAIR, pair, 0
            elif kernel_alone >= line_alone:
                move, best, run = Move.KERNEL_ALONE, kernel_alone, run_here + 1
            else:
                move, best, run = Move.LINE_ALONE, line_alone, run_left + 1
            here.append(move)
            score.append(best)
            runs.append(run)
        moves.append(here)
        above, above_run = score, runs
    return _traced(moves, kernels, lines)


def align(nccl_version: str, operations: Columns, kernels: Columns) -> Columns:
    """One process on names alone, kernels by start as the thesis's query orders them."""
    del nccl_version
    kernels = kernels[np.argsort(kernels["start_ns"], kind="stable")]
    found = align_names(kernel_names(kernels), operation_names(operations))
    rows = np.array([pair[0] for pair in found.pairs], dtype=np.intp)
    columns = np.array([pair[1] for pair in found.pairs], dtype=np.intp)
    return pairs_of(operations["id"][columns], kernels["id"][rows])


def operation_names(operations: Columns) -> list[str]:
    """The names in the log."""
    return [OPERATION_NAMES[code] for code in operations["operation"].tolist()]


def kernel_names(kernels: Columns) -> list[str]:
    """The names that kernels are named after."""
    return [_KERNEL_NAMES[kind] for kind in kernels["kind"].tolist()]


def merged(name: str) -> str:
    """One name for what one kind of kernel runs."""
    return "SendRecv" if name in _POINT_TO_POINT else name


def _border(width: int) -> tuple[list[float], list[int]]:
    return [_border_score(length) for length in range(width + 1)], list(range(width + 1))


def _border_score(length: int) -> float:
    return _gap(0) * length


def _gap(run: int) -> float:
    """Equation 4.2."""
    return GAP * (1 + GAP_RUN_MULTIPLIER * run)


def _traced(moves: list[list[Move]], kernels: list[str], lines: list[str]) -> Alignment:
    path: list[Move] = []
    pairs: list[tuple[int, int]] = []
    mismatches = 0
    row, column = len(kernels), len(lines)
    while row or column:
        move = moves[row][column] if row and column else Move.KERNEL_ALONE if row else Move.LINE_ALONE
        path.append(move)
        row -= move is not Move.LINE_ALONE
        column -= move is not Move.KERNEL_ALONE
        if move is Move.PAIR and kernels[row] == lines[column]:
            pairs.append((row, column))
        mismatches += move is Move.PAIR and kernels[row] != lines[column]
    return Alignment(tuple(reversed(path)), tuple(reversed(pairs)), mismatches)


_POINT_TO_POINT: Final = frozenset(
    name for name in OPERATION_NAMES if name in {"Send", "Recv", "AlltoAll", "Gather", "Scatter"}
)
_KERNEL_NAMES: Final = {int(kind): kind.name.title().replace("_", "") for kind in KernelClass}
