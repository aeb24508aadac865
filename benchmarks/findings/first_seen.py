"""Findings about simulated jobs of which ncclscope once said nothing or something wrong, live and when the job is dead.

Each is simulated once, by arguments of `ncclscope simulate`. *Live* plays it second by second, *dead* reads the same
batches at once, as `analyze` does. Both print who was named, and how often.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.findings.modes import Mode, played_in
from benchmarks.findings.replay import Arrival, arrivals

from ncclscope.simulate import configuration_of

_DEMO: Final = "--nodes 4 --gpus 2 --tp 2 --pp 2 --dp 2 --order tp-pp-dp --chunk-seconds 2"
_LINKS: Final = "--nodes 4 --gpus 4 --tp 2 --pp 2 --dp 4 --microbatches 2 --layers 1 --hidden 4096"
_ALL: Final = (0.0, 1.0, 1.0)
_QUIET: Final[list[list[Arrival]]] = [[]] * 12
"""Seconds after the last line: what came last is judged when no more comes."""


@dataclass(frozen=True, slots=True)
class Case:
    """One job and the part of it that arrives."""

    name: str
    arguments: str
    mode: Mode
    before: str
    """The findings of before."""


def _logs(*, stamps: bool = True) -> Mode:
    return Mode("", stamps=stamps)


_FULL: Final = Mode("", captured=_ALL)
_DUTY: Final = Mode("", captured=(0.0, 10.0, 100.0))
CASES: Final = (
    Case("dead job, logs", "--iterations 40 --fault hang:rank=5,at=20", _logs(), "nothing"),
    Case("the same, no stamps", "--iterations 40 --fault hang:rank=5,at=20", _logs(stamps=False), "nothing"),
    Case("the same, 25 s of empty captures", "--iterations 40 --fault hang:rank=5,at=20 --chunk-seconds 2", _FULL,
         "nothing"),
    Case("mismatched calls, no stamps", "--iterations 40 --pp 1 --fault mismatch:rank=5,at=20", _logs(stamps=False),
         "nothing"),
    Case("20 steps of 0.5 s, rank 3 late by 30 ms",
         "--tp 4 --pp 1 --iterations 20 --step-seconds 0.5 --fault late_rank:rank=3,ms=30", _FULL, "nothing"),
    Case("2 s in which TP waits for rank 3",
         "--tp 4 --pp 1 --layers 4 --iterations 20 --step-seconds 0.1 --fault late_rank:rank=3,ms=5,every=layer", _FULL,
         "nothing"),
    Case("half the bandwidth, 40 of 60 steps of 50 ms",
         f"{_LINKS} --iterations 60 --step-seconds 0.05 --fault slow_link:node=1,factor=0.5,from=20", _FULL, "nothing"),
    Case("10 s of 100 s, link at 50 % for 400 s",
         f"{_LINKS} --iterations 290 --step-seconds 2 --chunk-seconds 10 --fault slow_link:node=1,factor=0.5,from=90",
         _DUTY, "not located"),
    Case("10 s of 100 s, link at 70 %",
         f"{_LINKS} --iterations 290 --step-seconds 2 --chunk-seconds 10 --fault slow_link:node=1,factor=0.7,from=90",
         _DUTY, "nothing"),
    Case("healthy, Inspector only", "--iterations 60 --inspector v4.0", Mode("", logs=False, inspector=True),
         "1 to 8 late_rank"),
    Case("1 % of lines lost", f"{_DEMO} --iterations 120 --fault drop_lines:ratio=0.01", _FULL, "clock_fault"),
    Case("1 % of lines torn", f"{_DEMO} --iterations 120 --fault torn_lines:ratio=0.01", _FULL, "clock_fault"),
    Case("slower steps, logs only", f"{_DEMO} --iterations 160 --fault late_rank:rank=1,ms=30,from=80", _logs(),
         "nothing"),
    Case("5 ms a step, hidden by a bubble", f"{_DEMO} --iterations 200 --fault late_rank:rank=3,ms=5,from=20", _FULL,
         "nothing"),
    Case("killed", f"{_DEMO} --iterations 90 --fault kill:at=60", _logs(), "stuck inside a group, critical"),
    Case("slow link, captures of 30 %",
         f"{_DEMO} --iterations 400 --fault slow_link:node=2,factor=0.5,from=150", Mode("", captured=(0.0, 4.0, 13.0)),
         "five findings"),
    Case("4 ms a step", f"{_DEMO} --iterations 100 --fault late_rank:rank=1,ms=4,from=10", _FULL,
         "up to 2.0 ms late in 52 %"),
    Case("40 ms a step, its pipeline partner innocent",
         f"{_DEMO} --iterations 80 --seed 1 --fault late_rank:rank=3,ms=40,from=10", _FULL, "ranks 1 and 3"),
    Case("slow network card", f"{_DEMO} --iterations 200 --fault slow_nic:node=1,gpu=0,factor=0.5,from=30", _FULL,
         "late_rank, then four others"),
    Case("64 ranks, slow link of node07",
         "--nodes 8 --gpus 8 --tp 8 --pp 2 --dp 4 --layers 1 --microbatches 2 --iterations 60 --step-seconds 2 "
         "--chunk-seconds 4 --fault slow_link:node=6,factor=0.5,from=15", _FULL, "node03 and node07"),
)  # fmt: skip

HEADER: Final = """\
| job | before | live | dead |
|---|---|---|---|"""


def print_cases(only: str) -> None:
    """The table, a row per case."""
    print(HEADER)
    for case in CASES:
        if only in case.name:
            print("| " + " | ".join([case.name, case.before, *_said(case)]) + " |", flush=True)


def _said(case: Case) -> Iterator[str]:
    config = replace(configuration_of(["--out", "", *case.arguments.split()]), hang_seconds=25.0)
    with tempfile.TemporaryDirectory() as folder:
        arrived = list(arrivals(config, Path(folder) / "job"))
    for is_live in (True, False):
        yield _findings(replace(case.mode, is_live=is_live), arrived, config.start_ns)


def _findings(mode: Mode, arrived: list[list[Arrival]], start_ns: int) -> str:
    pipeline, known = played_in(mode, [*arrived, *_QUIET], start_ns)
    verdict = pipeline.store.verdicts.get("job")
    said = [f"{seen.last.kind} ({seen.last.confidence:g}): {seen.last.summary}" for seen in known.values()]
    return "; ".join([*([f"verdict {verdict.ending}: {verdict.summary}"] if verdict else []), *said]) or "nothing"
