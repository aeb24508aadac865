"""The command: which tables to print, over how many jobs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import benchmarks.findings as _package
from benchmarks.findings import first_seen, job_days, kills, modes, tables
from benchmarks.findings.scenarios import scenarios

TABLES = ("modes", "seen", "jobs", "days", "lasting", "delays", "kills")
RANKS = (8, 16, 32, 64)


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.findings",
        description=_package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"any of: {', '.join(TABLES)}; all without")
    parser.add_argument("--days", type=int, default=100, help="healthy job-days in each mode (default 100)")
    parser.add_argument("--jobs", type=int, default=12, help="jobs of each fault, in every mode (default 12)")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first of them: jobs from 8 on set no confidence (default 0)"
    )
    parser.add_argument("--seeds", type=int, default=2, help="jobs of each kind (default 2)")
    parser.add_argument("--short", action="store_true", help="small jobs only, one of each kind")
    parser.add_argument("--only", default="", metavar="TEXT", help="jobs whose name has this in it")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=RANKS, choices=RANKS, help="jobs of these sizes (default all)"
    )
    parser.add_argument("--workers", type=int, default=1, help="jobs played at a time (default 1)")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keeps there what the detectors of each job are fed, and plays jobs that are there from it",
    )
    asked = parser.parse_args(arguments)
    wanted = asked.tables or TABLES
    if "modes" in wanted:
        print("\n### Every way in which people come in\n", flush=True)
        modes.print_modes(
            asked.jobs, workers=asked.workers, most_ranks=max(asked.ranks), only=asked.only, first=asked.first
        )
    if "seen" in wanted:
        print("\n### Jobs of which nothing or something wrong was said\n", flush=True)
        first_seen.print_cases(asked.only)
    if "days" in wanted:
        print("\n### False alarms of healthy job-days\n", flush=True)
        job_days.print_false_alarms(2 if asked.short else asked.days, workers=asked.workers, only=asked.only)
    if "lasting" in wanted:
        print("\n### A fault that stays for a day\n", flush=True)
        job_days.print_lasting(1 if asked.short else 6, workers=asked.workers, only=asked.only)
    if "delays" in wanted:
        print("\n### Delay of a loss of bandwidth\n", flush=True)
        job_days.print_delays(40 if asked.short else 200)
    if "kills" in wanted:
        print("\n### Jobs that were killed, and jobs that hung\n", flush=True)
        kills.print_kills(30 if asked.short else 300)
    if "jobs" in wanted:
        _print_jobs(asked)
    return 0


def _print_jobs(asked: argparse.Namespace) -> None:
    chosen = [
        scenario
        for scenario in scenarios(seeds=1 if asked.short else asked.seeds, short=asked.short)
        if asked.only in scenario.name and scenario.config.world in asked.ranks
    ]
    print("\n### Simulated jobs\n", flush=True)
    tables.print_suite(chosen, workers=asked.workers, keep=asked.keep, tell=True)


if __name__ == "__main__":
    sys.exit(main())
