"""The command: which tables to print, over how much, with which aligner."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import benchmarks.alignment as _package
from benchmarks.alignment import captures, tables
from benchmarks.alignment.methods import NEEDLEMAN_WUNSCH, OURS, SLIDING_WINDOW, Method, method, named_aligner

_DRAWN: dict[str, tuple[str, Callable[[int, Method], None]]] = {
    "scenarios": ("Drawn operations, 4 ranks x 200: F1 of exact pairs", tables.print_scenarios),
    "runs": ("Runs of equal operations", tables.print_runs),
    "reliability": ("Stated confidence and the share that is right", tables.print_reliability),
}


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.alignment", description=_package.__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="any of: " + ", ".join(_tables(1, OURS, short=True)))
    parser.add_argument("--seeds", type=int, default=3, help="jobs per row of drawn scenarios (default 3)")
    parser.add_argument("--short", action="store_true", help="a few rows of each table")
    parser.add_argument("--aligner", default=None, help="module:function to put in the place of ncclscope's aligner")
    asked = parser.parse_args(arguments)
    try:
        ours = OURS if asked.aligner is None else method(asked.aligner.split(":")[-1], named_aligner(asked.aligner))
    except ValueError as error:
        parser.error(str(error))
    known = _tables(1 if asked.short else asked.seeds, ours, short=asked.short)
    unknown = [name for name in asked.tables if name not in known]
    if unknown:
        parser.error(f"no table {unknown[0]!r}; there are: {', '.join(known)}")
    for name in asked.tables or known:
        title, show = known[name]
        print(f"\n### {title}\n", flush=True)
        show()
    return 0


def _tables(seeds: int, ours: Method, *, short: bool) -> dict[str, tuple[str, Callable[[], None]]]:
    compared = (SLIDING_WINDOW, NEEDLEMAN_WUNSCH, ours)
    return {
        "tests": ("The thesis's five tests", partial(tables.print_tests, compared)),
        **{name: (title, partial(show, seeds, ours)) for name, (title, show) in _DRAWN.items()},
        "clean": ("Simulated jobs, clean captures: F1 of exact pairs", partial(captures.print_clean, short=short)),
        "duty": ("Captures of 40 % of the time", captures.print_duty),
    }


if __name__ == "__main__":
    sys.exit(main())
