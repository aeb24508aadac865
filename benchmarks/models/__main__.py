"""`python -m benchmarks.models [TABLE...]`: what the models say, held against what was measured or printed.

`thesis`: a thesis's figures explained by the emission rules, one by one. `collective_times`, `step_times`: what was
measured against what is foretold; they need the corpora, by NCCLSCOPE_CORPUS. `papers`: steps, crossovers and orderings
that papers print. `tune_speed`: 100,000 layouts. By name alone, since they take minutes: `residual`, what corrections
that are learned from many runs give for others; `budget`, bubbles of simulated pipelines against the truth; `tune`, 50
simulated scenarios against their truth; `shapes` and `wrong_fields`, 65 simulated jobs held against their descriptions,
right and wrong in one field.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parents[2] / each) for each in ("models", "service", "agents", "simulator", "command")
]

from benchmarks.models import (  # noqa: E402
    budget,
    collective_times,
    papers,
    residual,
    shapes,
    step_times,
    thesis,
    tune_speed,
    tune_truth,
)

_TABLES = {
    "thesis": thesis.main,
    "collective_times": collective_times.main,
    "step_times": step_times.main,
    "papers": papers.main,
    "tune_speed": tune_speed.main,
}
_BY_NAME = {
    "budget": budget.main,
    "residual": residual.main,
    "tune": tune_truth.main,
    "shapes": shapes.main,
    "wrong_fields": shapes.wrong_fields,
}


def main() -> None:
    """Prints the tables that are named; those of `_TABLES`, which take seconds, without a name."""
    tables = {**_TABLES, **_BY_NAME}
    for name in sys.argv[1:] or _TABLES:
        if name not in tables:
            sys.exit(f"no table {name!r}: choose from {', '.join(tables)}")
        tables[name]()


main()
