"""Whatever the offset of stamps to their arrival: a healthy job is quiet, and a true hang or late rank is found.

Eight ranks on two hosts, followed a second at a time; stamps are changed, or what comes is delayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.records import Finding, FindingKind
from ncclscope_simulator import SimulationConfig, parse_faults, write
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.terms import NO_TIME_NS

_SECOND = 1_000_000_000
_MINUTE, _HOUR = 60 * _SECOND, 3600 * _SECOND
_CONFIG = SimulationConfig(capture="none", iterations=100)
_START = _CONFIG.start_ns
_SLOW = replace(_CONFIG, step_seconds=12.5, iterations=115)
_AWAY_FROM, _AWAY_UNTIL = _START + 120 * _SECOND, _START + 120 * _SECOND + 20 * _MINUTE

Shift: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@cache
def _logs(config: SimulationConfig) -> list[tuple[str, int, Batch]]:
    """Host, time of the last line and batch of twenty lines each, by time."""
    found: list[tuple[str, int, Batch]] = []
    with TemporaryDirectory() as folder:
        write(config, Path(folder))
        for log in sorted((Path(folder) / "logs").iterdir()):
            reader = NcclLogReader(Source(kind=SourceKind.NCCL_LOG, name=log.name, key=log.name), lines_per_batch=20)
            written_ns = _START
            for batch in reader.ingest_bytes(log.read_bytes()):
                written_ns = max(written_ns, int(batch.operations["logged_at_ns"].max(initial=_START)))
                found.append((log.name.split(".")[1], written_ns, batch))
    return sorted(found, key=lambda each: each[1])


def _shifted(batch: Batch, shift: Shift) -> Batch:
    operations = batch.operations.copy()
    stamps = operations["logged_at_ns"]
    operations["logged_at_ns"] = np.where(stamps == NO_TIME_NS, stamps, stamps + shift(stamps))
    return replace(batch, operations=operations)


def _arrival(host: str, written_ns: int, away: str | None) -> int:
    """When a line comes; the agent that was away brings a minute in a second."""
    if host != away or written_ns < _AWAY_FROM:
        return written_ns
    return max(written_ns, _AWAY_UNTIL + (written_ns - _AWAY_FROM) // 60)


def _followed(
    config: SimulationConfig, shift: Shift, *, away: str | None = None, after: int = 0
) -> tuple[Pipeline, list[Finding]]:
    """All findings of a job that is followed until `after` seconds behind its end."""
    pipeline, seen = Pipeline(), dict[tuple[FindingKind, tuple[int, ...], str], Finding]()
    coming = sorted(
        ((_arrival(host, written, away), host, batch) for host, written, batch in _logs(config)),
        key=lambda each: each[0],
    )
    now_ns, end_ns = _START, coming[-1][0] + after * _SECOND
    at = 0
    while now_ns <= end_ns:
        now_ns += _SECOND
        while at < len(coming) and coming[at][0] <= now_ns:
            _, host, batch = coming[at]
            pipeline.ingest_batch(_shifted(batch, shift), agent=host, session="s", job="j")
            at += 1
        silent = frozenset({away} if away and _AWAY_FROM < now_ns < _AWAY_UNTIL else ())
        pipeline.process_backlog(now_ns, silent_hosts=silent)
        for finding in pipeline.store.findings:
            seen.setdefault((finding.kind, finding.ranks, finding.summary[:20]), finding)
    return pipeline, list(seen.values())


def _constant(offset_ns: int) -> Shift:
    return lambda stamps: np.full(len(stamps), offset_ns)


def _from_middle(offset_ns: int, second: int = 20) -> Shift:
    return lambda stamps: np.where(stamps > _START + second * _SECOND, offset_ns, 0)


_SHIFTS = {
    "none": _constant(0),
    "-8 h": _constant(-8 * _HOUR),
    "-20 min": _constant(-20 * _MINUTE),
    "+5 h": _constant(5 * _HOUR),
    "summer begins": _from_middle(_HOUR),
    "summer ends": _from_middle(-_HOUR),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _SHIFTS)
def test_a_healthy_job_is_quiet_whatever_its_stamps_say(name: str) -> None:
    _, findings = _followed(_CONFIG, _SHIFTS[name])
    assert [each for each in findings if each.kind is not FindingKind.CLOCK_FAULT] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", _SHIFTS)
def test_a_true_hang_is_found_whatever_its_stamps_say(name: str) -> None:
    config = replace(_CONFIG, faults=parse_faults(["hang:rank=3,at=80"]))
    _, findings = _followed(config, _SHIFTS[name], after=30)
    (hang,) = [each for each in findings if each.kind is FindingKind.HANG]
    assert hang.ranks == (3,)
    assert 0 <= hang.since_ns - _logs(config)[-1][1] + 2 * _SECOND < 4 * _SECOND


@pytest.mark.slow
def test_an_agent_that_comes_back_after_twenty_minutes_brings_no_finding() -> None:
    hosts = sorted({host for host, _, _ in _logs(_SLOW)})
    _, findings = _followed(_SLOW, _constant(0), away=hosts[1])
    assert [each for each in findings if each.kind is not FindingKind.CLOCK_FAULT] == []


@pytest.mark.slow
def test_a_hang_is_found_as_soon_after_an_agent_was_away_for_twenty_minutes() -> None:
    config = replace(_SLOW, faults=parse_faults(["hang:rank=3,at=113"]))
    hosts = sorted({host for host, _, _ in _logs(config)})
    _, findings = _followed(config, _constant(0), away=hosts[1], after=90)
    assert [each.ranks for each in findings if each.kind is FindingKind.HANG] == [(3,)]


@pytest.mark.slow
def test_summer_time_is_one_event_of_the_hosts_and_is_shown() -> None:
    pipeline, findings = _followed(replace(_CONFIG, step_seconds=2.0, iterations=45), _from_middle(_HOUR, 45))
    (event,) = [each for each in findings if each.kind is FindingKind.CLOCK_FAULT]
    assert event.evidence["moved_ns"] == pytest.approx(_HOUR, abs=2 * _SECOND)
    for offset_ns in pipeline.store.stamp_offsets.of_stamps().values():
        assert offset_ns == pytest.approx(_HOUR, abs=2 * _SECOND)
