"""The command: which faults, how often, and the table."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

import benchmarks.faults as _package
from benchmarks.faults.matrix import FAULTS, run
from benchmarks.faults.wire import NotHereError
from benchmarks.faults.world import Result

HEAD = (
    "| fault | times | sent | stored | duplicates | lost | gaps | recovery, s: median (most) | |\n"
    "|---|---:|---:|---:|---:|---:|---|---:|---|"
)


def main() -> int:
    """Prints the table; 1 where anything was stored twice, or lost without a gap."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description=_package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("faults", nargs="*", metavar="NAME", help=f"any of: {', '.join(FAULTS)}; all without")
    parser.add_argument("--times", type=float, default=1.0, help="so many times as often as usual (default 1)")
    parser.add_argument("--list", action="store_true", help="says what there is and how often it is done, and ends")
    parser.add_argument("--keep", type=Path, help="keeps logs, data and outputs in this folder")
    asked = parser.parse_args()
    if unknown := [name for name in asked.faults if name not in FAULTS]:
        parser.error(f"no such fault: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    if asked.list:
        print("\n".join(f"{name:22} x {times:<4} {_title(of.__doc__ or name)}" for name, (of, times) in FAULTS.items()))
        return 0
    print(HEAD, flush=True)
    is_whole = True
    with tempfile.TemporaryDirectory(prefix="ncclscope-faults-") as temporary:
        for name in asked.faults or FAULTS:
            fault, usual = FAULTS[name]
            try:
                result = run(name, (asked.keep or Path(temporary)) / name, max(1, round(usual * asked.times)))
            except NotHereError as error:
                print(f"| {_title(fault.__doc__ or name)} | | | | | | | | not done: {error} |", flush=True)
                continue
            is_whole &= result.has_reported_all and not result.duplicates
            print(row(fault.__doc__ or name, result), flush=True)
    return 0 if is_whole else 1


def row(what: str, result: Result) -> str:
    """One line of the table."""
    waits = sorted(result.recovery)
    recovery = f"{median(waits):.1f} ({waits[-1]:.1f})" if waits else ""
    numbers = f"{result.times} | {result.sent:,} | {result.stored:,} | {result.duplicates} | {result.lost:,}"
    gaps = ", ".join(f"{number} {reason}" for reason, number in result.gaps.items()) or "0"
    silent = "" if result.has_reported_all else " **not all that is lost is a gap**"
    return f"| {_title(what)} | {numbers} | {gaps} | {recovery} | {result.note}{silent} |"


def _title(what: str) -> str:
    return what.strip().rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
