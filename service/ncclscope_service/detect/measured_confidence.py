"""How sure the rules are whose findings do not carry a probability of their own: the share that is right, as measured.

Measured on simulated jobs (`benchmarks.findings modes`, jobs 0 to 5 and 16 to 35 of each fault) as
(right + 1) / (said + 2), which is Laplace's rule of succession, and never above `MOST`: no simulation knows all that
happens on a cluster. Jobs 8 to 15 set nothing and tell how right these numbers are
(docs/internals/findings-benchmark.md).
"""

from __future__ import annotations

from typing import Final

MOST: Final = 0.97
"""More is never stated of a rule."""

HANG_OF_ONE_RANK: Final = MOST
"""One rank is missing and waits for nobody: 123 of 123."""
HANG_OF_NOBODY: Final = MOST
"""Nobody is named: 88 of 88."""
HANG_OF_SEVERAL: Final = 0.3
"""Several ranks are missing at once: 0 of 6, which had been killed. A host that dies looks like it too; none was
played."""
HANG_AMONG_LOSSES: Final = 0.8
"""Lines were lost, of which the last one of a rank may be one: of 110 jobs that hung 54 are found, and another rank is
named in 2; of 110 that were killed at random moments 1 is called a hang (docs/internals/alignment-benchmark.md)."""
HANG_UNSURE: Final = 0.6
"""A missing rank waits itself, or lost lines hide who is missing. Few were played."""
DEAD_BY_TIMES: Final = MOST
"""The last counts of a dead job show a hang, and have times: 26 of 26, and 22 of 5,400 kills (`benchmarks.findings
kills`)."""
DEAD_BY_COUNTS: Final = MOST
"""The same without times, by several communicators: 20 of 20, and 11 of 5,400 kills."""
DEAD_BY_COUNTS_OF_ONE: Final = 0.9
"""The same, by one communicator: 6 of 6; but of the kills of jobs that have only one, and a rank that is late by a
tenth of each step, 8 %."""

MISMATCH_BY_MOST: Final = MOST
"""Most ranks call the same: 116 of 116."""
MISMATCH_BY_PAST: Final = 0.8
"""Of ranks that are as many one side calls what always came here. Few were played."""
MISMATCH_UNDECIDED: Final = 0.5
"""Neither: one of two sides."""
MISMATCH_AMONG_LOSSES: Final = 0.7
"""At most, where lines were lost."""

SLOWER_THAN_SIBLINGS: Final = MOST
"""A group has less bandwidth than others like it: 77 of 77, times the certainty of where the fault lies."""
SLOWER_THAN_AN_HOUR_AGO: Final = 0.95
"""The baseline is an hour. In 50 healthy job-days of each of five modes (`benchmarks.findings days`) one alarm."""
SLOWER_THAN_A_MINUTE_AGO: Final = 0.7
"""The baseline is shorter, and may have been unusual. Not measured: siblings tell the same, if there are any."""
SLOW_DRIFT: Final = 0.8
"""Not measured."""
BELOW_LIMIT: Final = 0.7
"""Not measured: the topology may have been read incompletely."""
