"""`python -m benchmarks.models thesis`: a thesis's figures explained by the emission rules, one by one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "models")]

from benchmarks.models import thesis  # noqa: E402

_TABLES = {"thesis": thesis.main}


def main() -> None:
    """Prints the tables that are named; all without a name."""
    for name in sys.argv[1:] or _TABLES:
        if name not in _TABLES:
            sys.exit(f"no table {name!r}: choose from {', '.join(_TABLES)}")
        _TABLES[name]()


main()
