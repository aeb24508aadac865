"""The command: which tables to print, over how much, with which aligner; cases out, answers in."""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import benchmarks.alignment as _package
from benchmarks.alignment import captures, counts, document, jobs, lost_lines, speed, tables
from benchmarks.alignment.case import Case
from benchmarks.alignment.methods import NEEDLEMAN_WUNSCH, OURS, SLIDING_WINDOW, Method, method, named_aligner
from benchmarks.alignment.scenarios import KNOWLEDGE, LOSSES, MIXES, drawn_cases, equal_runs
from benchmarks.alignment.score import Score


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables asked for, or writes cases, or scores answers."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    try:
        if asked.write is not None:
            print(f"{document.write_cases(_cases(asked.seeds), asked.write):,} cases written to {asked.write}")
        elif asked.score is not None:
            _print_answers(asked.score, asked.seeds)
        elif asked.score_job is not None:
            _print_job(*asked.score_job)
        else:
            _print_tables(asked)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.alignment",
        description=_package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(_tables(1, OURS, short=True))
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"any of: {names}; all without")
    parser.add_argument("--seeds", type=int, default=3, help="jobs per row of drawn scenarios (default 3)")
    parser.add_argument("--short", action="store_true", help="a few rows of each table")
    parser.add_argument("--aligner", metavar="MODULE:FUNCTION", help="stands in for ncclscope's aligner")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the drawn cases as JSON lines instead")
    parser.add_argument("--score", type=Path, metavar="FILE", help="score answers to these cases instead")
    parser.add_argument(
        "--score-job",
        type=Path,
        nargs=2,
        metavar=("JOB", "PARQUET"),
        help="score what a tool says of a simulated job instead",
    )
    return parser


def _print_tables(asked: argparse.Namespace) -> None:
    ours = OURS if asked.aligner is None else method(asked.aligner.split(":")[-1], named_aligner(asked.aligner))
    known = _tables(1 if asked.short else asked.seeds, ours, short=asked.short)
    unknown = [name for name in asked.tables if name not in known]
    if unknown:
        raise ValueError(f"no table {unknown[0]!r}; there are: {', '.join(known)}")
    for name in asked.tables or known:
        title, show = known[name]
        print(f"\n### {title}\n", flush=True)
        show()


def _tables(seeds: int, ours: Method, *, short: bool) -> dict[str, tuple[str, Callable[[], None]]]:
    compared = (SLIDING_WINDOW, NEEDLEMAN_WUNSCH, ours)
    return {
        "tests": ("The thesis's five tests", partial(tables.print_tests, compared)),
        "scenarios": (
            "Drawn operations, 4 ranks x 200: F1 of exact pairs",
            partial(tables.print_scenarios, seeds, ours, short=short),
        ),
        "runs": ("Runs of equal operations", partial(tables.print_runs, seeds, ours)),
        "reliability": (
            "Stated confidence and the share that is right",
            partial(tables.print_reliability, seeds, ours),
        ),
        "clean": ("Simulated jobs, clean captures: F1 of exact pairs", partial(captures.print_clean, short=short)),
        "lossy": ("Simulated jobs with rows lost", partial(captures.print_lossy, iterations=5 if short else 20)),
        "duty": ("Captures of 40 % of the time", partial(captures.print_duty, iterations=60 if short else 120)),
        "numbers": ("Lost lines: numbers, measures and findings", partial(lost_lines.print_numbers, short=short)),
        "torn": ("Recorded logs: where ranks end", partial(lost_lines.print_torn, _corpora())),
        "counts": ("The thesis's count tables", counts.print_counts),
        "speed": ("Operations aligned per second on one core", partial(speed.print_speed, short=short)),
    }


def _corpora() -> list[Path]:
    """Folders of recorded files, by NCCLSCOPE_CORPUS."""
    return [Path(each) for each in os.environ.get("NCCLSCOPE_CORPUS", "").split(os.pathsep) if each]


def _cases(seeds: int) -> Iterator[Case]:
    for seed in range(seeds):
        for known in KNOWLEDGE:
            for mix in MIXES:
                for loss in LOSSES:
                    yield from drawn_cases(mix, known, loss, seed=seed)
        for loss in LOSSES:
            yield equal_runs(loss, seed=seed)


def _print_answers(path: Path, seeds: int) -> None:
    """Scores by scenario; a case without an answer counts as one without pairs."""
    answers = dict(document.read_answers(path))
    scores: dict[str, Score] = defaultdict(Score)
    for case in _cases(seeds):
        scores[case.name.rpartition(";")[0]].add(case, answers.pop(case.name, document.no_pairs()))
    if answers:
        raise ValueError(f"{path}: no case {next(iter(answers))!r} with {seeds} seeds")
    print("| scenario | F1 | precision | recall | meaning F1 | ECE |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, score in scores.items():
        print(f"| {name} | {score.exact.f1:.3f} | {tables.details(score)} |")


def _print_job(job: Path, operations: Path) -> None:
    found = jobs.score_file(job, operations)
    print("| F1 | precision | recall | meaning F1 | ECE | `not_covered` where true |")
    print("|---:|---:|---:|---:|---:|---:|")
    share = found.said_so / found.not_captured if found.not_captured else 1.0
    print(f"| {found.score.exact.f1:.4f} | {tables.details(found.score)} | {share:.3f} |")


if __name__ == "__main__":
    sys.exit(main())
