"""The five tests of an alignment algorithm that the thesis prints, judged as it prints them.

*Source:* L. Borzyk, Understanding LLM Communication, 2026, section 4.3.1. The fifth is judged by its pairs: its text
counts gap runs under another multiplier (1.3) than the method's equation has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.alignment.case import Case
from benchmarks.alignment.scenarios import case_of_names

Pairs = list[tuple[int, int]]
"""(kernel, line) places, ascending."""

_A, _B, _G, _R = "AllReduce", "Broadcast", "AllGather", "ReduceScatter"


@dataclass(frozen=True, slots=True)
class AlgorithmTest:
    """Two sequences of names and what their alignment must be like."""

    name: str
    kernels: tuple[str, ...]
    lines: tuple[str, ...]
    demand: str
    is_met: Callable[[Pairs], bool]

    def case(self) -> Case:
        """The sequences as one process."""
        return case_of_names(self.name, self.kernels, self.lines)


def _in_segment_2(pairs: Pairs) -> bool:
    return len(pairs) > 0 and sum(4 <= line < 8 for _, line in pairs) >= 0.75 * len(pairs)


TESTS: Final = (
    AlgorithmTest(
        "asymmetric penalty",
        (_A, _A, _B, _A),
        (_A, _A, "Send", _A),
        "3 matches, 2 gaps",
        lambda pairs: pairs == [(0, 0), (1, 1), (3, 3)],
    ),
    AlgorithmTest(
        "false positives",
        (_A, _A, _B, _R),
        (_A, _A, _A, _R, _A, _A, _B, _R, _A, _B, _A, _R),
        "75 % in segment 2",
        _in_segment_2,
    ),
    AlgorithmTest(
        "duplication",
        (_A, _B, _G, _R, _A),
        tuple(name for name in (_A, _B, _G, _R, _A) for _ in range(2)),
        "5 matches, half skipped",
        lambda pairs: [(kernel, line // 2) for kernel, line in pairs] == [(place, place) for place in range(5)],
    ),
    AlgorithmTest(
        "sequence bonus",
        (*[_A] * 5, _B, *[_R] * 3),
        (*[_A] * 5, _B, *[_R] * 3),
        "i = j throughout",
        lambda pairs: pairs == [(place, place) for place in range(9)],
    ),
    AlgorithmTest(
        "adaptive gap",
        (_A,) * 5,
        (_A, _B, "Send", "Recv", _A, _A, _A),
        "the 4 AllReduce lines",
        lambda pairs: [line for _, line in pairs] == [0, 4, 5, 6],
    ),
)
