"""What the findings of simulated jobs are worth against what was wrong with them: a row per family of jobs."""

from __future__ import annotations

import functools
import hashlib
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from benchmarks.findings.replay import Played, Seen, play, play_again, read_kept
from benchmarks.findings.scenarios import Expected, Scenario

from ncclscope_service.store.records import FindingKind

_UNNAMED = frozenset({FindingKind.BANDWIDTH_DROP, FindingKind.BELOW_LIMIT, FindingKind.SLOW_DRIFT})
_AFTERMATH_SECONDS = 8.0
"""What still comes in of a fault that has healed: exports of two seconds, then windows that close."""


@dataclass(slots=True)
class Verdict:
    """One job: whether its fault was found, when, who was named wrongly, and what else was said."""

    found: bool = False
    delay: float | None = None
    """Seconds from the beginning of the (first) fault; None where not all were found."""
    wrong: list[str] = field(default_factory=list[str])
    """Sentences that name others than those who are to blame."""
    false_alarms: list[str] = field(default_factory=list[str])


def judge(scenario: Scenario, played: Played) -> Verdict:
    """Compares. A finding that names others as well is wrong, not half right."""
    verdict, expected = Verdict(), scenario.expected
    faults = [each for each in (expected, expected.beside) if each is not None]
    onsets = [_onset(scenario, played, each) for each in faults]
    delays: dict[int, float] = {}
    healed = math.inf if scenario.healed_step is None else played.steps[scenario.healed_step] + _AFTERMATH_SECONDS
    for seen in sorted(played.seen, key=lambda one: one.opened):
        current = [place for place, onset in enumerate(onsets) if onset <= seen.opened < healed]
        meant = [place for place in current if is_right(seen, faults[place])]
        for place in meant:
            delays.setdefault(place, seen.opened - onsets[place])
        if not meant and seen.last.kind not in expected.allowed:
            text = f"{seen.opened:.0f} s: {seen.last.kind}: {seen.last.summary}"
            if seen.last.ranks or seen.last.hosts:
                verdict.wrong.append(text)
            if not any(shows_fault(seen, faults[place]) for place in current):
                verdict.false_alarms.append(text)
    verdict.found = len(delays) == len(faults) > 0 and bool(expected.kinds)
    verdict.delay = delays[0] if verdict.found else None
    return verdict


def _onset(scenario: Scenario, played: Played, expected: Expected) -> float:
    step = scenario.fault_step if expected.from_step is None else expected.from_step
    return 0.0 if step is None else played.steps.get(step, 0.0)


def shows_fault(seen: Seen, expected: Expected) -> bool:
    """Whether a finding is of a kind that says that there is such a fault, whoever it names."""
    return bool(expected.kinds) and seen.last.kind in expected.kinds | _UNNAMED


def is_right(seen: Seen, expected: Expected) -> bool:
    """Whether a finding is of the fault, and never named others."""
    if seen.last.kind not in expected.kinds:
        return False
    if any(seen.last.evidence.get(name) != value for name, value in expected.evidence.items()):
        return False
    return all(_names_right(expected, ranks, hosts) for ranks, hosts in seen.culprits)


def _names_right(expected: Expected, ranks: tuple[int, ...], hosts: tuple[str, ...]) -> bool:
    if expected.ranks is not None and ranks != expected.ranks and not (expected.may_name_nobody and not ranks):
        return False
    return expected.hosts is None or hosts == expected.hosts


HEADER: Final = """\
| jobs | number | found | wrong names | delay p50 | p90 | in time | false alarms | lowest busbw | score |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One job and what was said of it."""

    scenario: Scenario
    verdict: Verdict
    played: Played


def run(scenario: Scenario, keep: Path | None = None) -> Outcome:
    """Plays one job; `keep`: a folder for what its detectors are fed, from where a job that is there is played."""
    played = _play(scenario, keep)
    return Outcome(scenario, judge(scenario, played), played)


def _play(scenario: Scenario, keep: Path | None) -> Played:
    file = None if keep is None else keep / _file_name(scenario)
    if file is not None and file.exists():
        return play_again(read_kept(file))
    with tempfile.TemporaryDirectory() as folder:
        played, kept = play(scenario.config, Path(folder) / "job", scenario.lagging)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept.write(file)
    return played


def _file_name(scenario: Scenario) -> str:
    readable = re.sub(r"[^a-z0-9.]+", "_", scenario.name)
    return f"{readable}_{hashlib.sha256(repr(scenario.config).encode()).hexdigest()[:8]}.feeds"


def outcomes(scenarios: Iterable[Scenario], workers: int, keep: Path | None) -> Iterator[Outcome]:
    """Plays them, so many at a time; in their order."""
    play_one = functools.partial(run, keep=keep)
    if workers < 2:
        yield from map(play_one, scenarios)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(play_one, scenarios)


def print_suite(scenarios: Iterable[Scenario], *, workers: int, keep: Path | None, tell: bool) -> None:
    """The table; `tell`: and each job's line as it is done."""
    done: list[Outcome] = []
    for outcome in outcomes(scenarios, workers, keep):
        done.append(outcome)
        if tell:
            _tell(outcome)
    by_family: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in done:
        by_family[outcome.scenario.family].append(outcome)
    print(f"\n{HEADER}")
    for family, mine in by_family.items():
        print(_row(family, mine))
    print(_row("all", done))
    hours = sum(outcome.played.seconds for outcome in done) / 3600
    alarms = sum(len(outcome.verdict.false_alarms) for outcome in done)
    print(f"\n{alarms} false alarms in {hours:.2f} hours of jobs: {24 * alarms / hours:.1f} per job-day.")
    print(
        "The peers' columns: right / wrong, of jobs whose culprit is a rank; of the others, in how many they name any."
    )


def _tell(outcome: Outcome) -> None:
    verdict, expected = outcome.verdict, outcome.scenario.expected
    if expected.kinds:
        mark = "found" if verdict.found else "MISSED"
        late = " LATE" if _is_late(outcome) else ""
        print(
            f"{mark}{late} {'' if verdict.delay is None else f'{verdict.delay:.0f} s'}  {outcome.scenario.name}",
            flush=True,
        )
    else:
        print(f"{'ALARM' if verdict.false_alarms else 'quiet'}  {outcome.scenario.name}", flush=True)
    for text in verdict.wrong:
        print(f"    wrong name: {text}", flush=True)
    for text in verdict.false_alarms:
        print(f"    false alarm: {text}", flush=True)


def _is_late(outcome: Outcome) -> bool:
    within, delay = outcome.scenario.expected.within, outcome.verdict.delay
    if within is None or delay is None:
        return False
    return delay > max(within, 6 * outcome.played.longest_step if within == 20.0 else 0.0)


def _row(family: str, mine: list[Outcome]) -> str:
    wanted = [one for one in mine if one.scenario.expected.kinds]
    delays = [one.verdict.delay for one in wanted if one.verdict.delay is not None]
    found = f"{sum(one.verdict.found for one in wanted)} of {len(wanted)}" if wanted else "-"
    wrong = sum(bool(one.verdict.wrong) for one in mine)
    alarms = sum(len(one.verdict.false_alarms) for one in mine)
    middle, late = (f"{np.percentile(delays, share):.0f} s" if delays else "-" for share in (50, 90))
    barred = [one for one in wanted if one.scenario.expected.within is not None]
    in_time = f"{sum(one.verdict.found and not _is_late(one) for one in barred)} of {len(barred)}" if barred else "-"
    lowest = _peer(mine, [one.played.by_peers.lowest_bandwidth for one in mine])
    score = _peer(mine, [one.played.by_peers.relative_score for one in mine])
    cells = (family, len(mine), found, wrong, middle, late, in_time, alarms, lowest, score)
    return f"| {' | '.join(map(str, cells))} |"


def _peer(mine: list[Outcome], named: list[frozenset[int]]) -> str:
    pairs = [(one.scenario.expected.ranks, who) for one, who in zip(mine, named, strict=True)]
    culprits = [(frozenset(ranks), who) for ranks, who in pairs if ranks]
    if not culprits:
        return f"names {sum(bool(who) for _, who in pairs)}"
    right = sum(who == ranks for ranks, who in culprits)
    wrong = sum(bool(who - ranks) for ranks, who in culprits)
    return f"{right} / {wrong}"
