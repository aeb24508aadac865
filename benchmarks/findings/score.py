"""What a job's findings are worth against what was wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.findings.replay import Played, Seen
from benchmarks.findings.scenarios import Expected, Scenario

from ncclscope_service.rows import FindingKind

_UNNAMED = frozenset({FindingKind.BANDWIDTH_DROP, FindingKind.BELOW_LIMIT, FindingKind.SLOW_DRIFT})


@dataclass(slots=True)
class Verdict:
    """One job: whether its fault was found, when, who was named wrongly, and what else was said."""

    found: bool = False
    delay: float | None = None
    """Seconds from the beginning of the fault; None where it was not found."""
    wrong: list[str] = field(default_factory=list[str])
    """Sentences that name others than those who are to blame."""
    false_alarms: list[str] = field(default_factory=list[str])


def judge(scenario: Scenario, played: Played) -> Verdict:
    """Compares. A finding that names others as well is wrong, not half right."""
    verdict, expected = Verdict(), scenario.expected
    onset = played.steps.get(scenario.fault_step, 0.0) if scenario.fault_step is not None else 0.0
    for seen in sorted(played.seen, key=lambda one: one.opened):
        if _is_it(seen, expected) and (scenario.fault_step is None or seen.opened >= onset):
            if not verdict.found:
                verdict.found, verdict.delay = True, seen.opened - onset
        elif seen.last.kind not in expected.allowed:
            text = f"{seen.opened:.0f} s: {seen.last.kind}: {seen.last.summary}"
            is_fault_itself = seen.last.kind in expected.kinds | _UNNAMED and expected.kinds and seen.opened >= onset
            if seen.last.ranks or seen.last.hosts:
                verdict.wrong.append(text)
            if not is_fault_itself:
                verdict.false_alarms.append(text)
    return verdict


def _is_it(seen: Seen, expected: Expected) -> bool:
    if seen.last.kind not in expected.kinds:
        return False
    if expected.state is not None and seen.last.evidence.get("state") != expected.state:
        return False
    return all(
        (expected.ranks is None or ranks == expected.ranks) and (expected.hosts is None or hosts == expected.hosts)
        for ranks, hosts in seen.culprits
    )
