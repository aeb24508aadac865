"""`python -m benchmarks.models [TABLE...]`: what the models say, held against what was measured or printed.

`thesis`: a thesis's figures explained by the emission rules, one by one. `collective_times`, `step_times`: what was
measured against what is foretold; they need the corpora, by NCCLSCOPE_CORPUS. `tune_speed`: 100,000 layouts. By name
alone, since they take minutes: `budget`, bubbles of simulated pipelines against the truth; `shapes` and `wrong_fields`,
65 simulated jobs held against their descriptions, right and wrong in one field.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / each) for each in ("models", "service", "agents")]

from benchmarks.models import budget, collective_times, shapes, step_times, thesis, tune_speed  # noqa: E402

_TABLES = {
    "thesis": thesis.main,
    "collective_times": collective_times.main,
    "step_times": step_times.main,
    "tune_speed": tune_speed.main,
}
_BY_NAME = {"budget": budget.main, "shapes": shapes.main, "wrong_fields": shapes.wrong_fields}


def main() -> None:
    """Prints the tables that are named; those of `_TABLES`, which take seconds, without a name."""
    tables = {**_TABLES, **_BY_NAME}
    for name in sys.argv[1:] or _TABLES:
        if name not in tables:
            sys.exit(f"no table {name!r}: choose from {', '.join(tables)}")
        tables[name]()


main()
