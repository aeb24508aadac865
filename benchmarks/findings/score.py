"""What a job's findings are worth against what was wrong with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from benchmarks.findings.replay import Played, Seen
from benchmarks.findings.scenarios import Expected, Scenario

from ncclscope_service.rows import FindingKind

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
        meant = [place for place in current if _is_it(seen, faults[place])]
        for place in meant:
            delays.setdefault(place, seen.opened - onsets[place])
        if not meant and seen.last.kind not in expected.allowed:
            text = f"{seen.opened:.0f} s: {seen.last.kind}: {seen.last.summary}"
            is_fault_itself = any(
                seen.last.kind in faults[place].kinds | _UNNAMED and faults[place].kinds for place in current
            )
            if seen.last.ranks or seen.last.hosts:
                verdict.wrong.append(text)
            if not is_fault_itself:
                verdict.false_alarms.append(text)
    verdict.found = len(delays) == len(faults) > 0 and bool(expected.kinds)
    verdict.delay = delays[0] if verdict.found else None
    return verdict


def _onset(scenario: Scenario, played: Played, expected: Expected) -> float:
    step = scenario.fault_step if expected.from_step is None else expected.from_step
    return 0.0 if step is None else played.steps.get(step, 0.0)


def _is_it(seen: Seen, expected: Expected) -> bool:
    if seen.last.kind not in expected.kinds:
        return False
    if any(seen.last.evidence.get(name) != value for name, value in expected.evidence.items()):
        return False
    return all(_is_right(expected, ranks, hosts) for ranks, hosts in seen.culprits)


def _is_right(expected: Expected, ranks: tuple[int, ...], hosts: tuple[str, ...]) -> bool:
    if expected.ranks is not None and ranks != expected.ranks and not (expected.may_name_nobody and not ranks):
        return False
    return expected.hosts is None or hosts == expected.hosts
