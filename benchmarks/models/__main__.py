"""`python -m benchmarks.models [TABLE...]`: what the models say, held against what was measured or printed.

`thesis`: a thesis's figures explained by the emission rules, one by one. `collective_times`, `step_times`: what was
measured against what is foretold; they need the corpora, by NCCLSCOPE_CORPUS.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / each) for each in ("models", "service", "agents")]

from benchmarks.models import collective_times, step_times, thesis  # noqa: E402

_TABLES = {"thesis": thesis.main, "collective_times": collective_times.main, "step_times": step_times.main}


def main() -> None:
    """Prints the tables that are named; all without a name."""
    for name in sys.argv[1:] or _TABLES:
        if name not in _TABLES:
            sys.exit(f"no table {name!r}: choose from {', '.join(_TABLES)}")
        _TABLES[name]()


main()
