"""Every way in which people come in: the same jobs and faults, of which each mode shows the service another part.

A job is simulated at three speeds: a *fast* one (steps of 0.1 s) of which somebody profiled two seconds, a *usual* one
(0.9 s), and a *long* one (2 s) for captures of some seconds in every hundred; and a usual one again whose profilers say
the operations themselves. What arrives of it is kept as batches by
the second, and each mode is a choice among these. Where a fault leaves no trace in what a mode sees (`is_due`), only
wrong names and false alarms count.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from benchmarks.findings import reliability
from benchmarks.findings.replay import SECOND_NS, Arrival, Played, Seen, arrivals, note, steps_of
from benchmarks.findings.scenarios import NOISE, SHAPES, Expected, Scenario
from benchmarks.findings.tables import Verdict, is_right, judge, shows_fault

from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.records import FindingKind
from ncclscope_simulator import parse_faults
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import SourceKind
from ncclscope_wire.terms import NO_TIME_NS


@dataclass(frozen=True, slots=True)
class Mode:
    """The part of a job's data that arrives."""

    job: str
    """One of `JOBS`."""
    logs: bool = True
    stamps: bool = True
    inspector: bool = False
    traces: bool = False
    """Those of PyTorch's profiler."""
    captured: tuple[float, float, float] | None = None
    """Seconds: first captured one, how long, and how often; None: no exports."""
    is_live: bool = True
    """Else all of it is read at once, as `analyze` does."""

    def batches(self, arrived: Iterable[Arrival], start_ns: int) -> Iterator[tuple[str, Batch]]:
        """Host and batch of what this mode sees of a job that began then."""
        for each in arrived:
            kind = each.batch.source.kind
            if kind is SourceKind.NSYS:
                if self._captures((each.begins_ns - start_ns) / SECOND_NS):
                    yield each.host, each.batch
            elif {SourceKind.INSPECTOR: self.inspector, SourceKind.KINETO: self.traces}.get(kind, self.logs):
                batch = each.batch if self.is_live else replace(each.batch, observed_at_ns=None)
                yield each.host, batch if self.stamps else _without_stamps(batch)

    def _captures(self, second: float) -> bool:
        if self.captured is None:
            return False
        first, length, period = self.captured
        return second >= first - 0.5 and (second - first + 0.5) % period < length


def _without_stamps(batch: Batch) -> Batch:
    operations = batch.operations.copy()
    operations["logged_at_ns"] = NO_TIME_NS
    return replace(batch, operations=operations, facts=tuple(replace(each, logged_at_ns=None) for each in batch.facts))


class _Job(NamedTuple):
    step_seconds: float
    steps: int
    fault_step: int
    stops_at: int
    """The step at which it hangs, differs or is killed, if it does."""
    chunk_seconds: float
    """Length of an export."""
    profiled: tuple[int, int] | None = None
    """Steps of which PyTorch's profiler writes traces. NCCL's ranges have payloads there, dumps of Inspector say when
    channels began and ended, and no group is split off another: exports say ranks of such a group when it ends."""


JOBS: Final = {
    "fast": _Job(0.1, 50, 0, 40, 2.0),
    "usual": _Job(0.9, 45, 12, 30, 2.0),
    "long": _Job(2.0, 240, 28, 50, 10.0),
    "profiled": _Job(0.9, 45, 12, 30, 2.0, profiled=(20, 39)),
}
_ALWAYS: Final = (0.0, 1.0, 1.0)
MODES: Final[dict[str, Mode]] = {
    "full: stamped logs and nsys, live": Mode("usual", captured=_ALWAYS),
    "logs only, live": Mode("usual"),
    "logs only, live, no stamps": Mode("usual", stamps=False),
    "logs only, the job is dead": Mode("usual", is_live=False),
    "logs only, the job is dead, no stamps": Mode("usual", stamps=False, is_live=False),
    "profile of 2 s": Mode("fast", captured=(4.0, 2.0, 1e9), is_live=False),
    "profile of 2 s, no stamps": Mode("fast", stamps=False, captured=(4.0, 2.0, 1e9), is_live=False),
    "profile of 20 steps, no stamps": Mode("usual", stamps=False, captured=(16.0, 18.0, 1e9), is_live=False),
    "10 s of every 100 s": Mode("long", captured=(0.0, 10.0, 100.0)),
    "40 s of every 100 s": Mode("long", captured=(0.0, 40.0, 100.0)),
    "Inspector only": Mode("usual", logs=False, inspector=True),
    "Inspector only, at its end": Mode("usual", logs=False, inspector=True, is_live=False),
    "Inspector only, verbose": Mode("profiled", logs=False, inspector=True),
    "nsys only": Mode("usual", logs=False, captured=_ALWAYS),
    "nsys only, payloads of ranges": Mode("profiled", logs=False, captured=_ALWAYS),
    "PyTorch traces of 20 steps only": Mode("profiled", logs=False, traces=True, is_live=False),
}
_K: Final = FindingKind
_SMALL: Final = ("8: tp2 pp2 dp2", "8: fsdp", "16: tp4 dp4", "16: ep4 dp16", "32: tp4 pp2 dp4")
_LINKS: Final = ("16: tp2 pp2 dp4", "32: tp4 pp2 dp4")
_EQUAL: Final = ("8: fsdp", "16: tp4 dp4", "16: ep4 dp16")


class _Fault(NamedTuple):
    """`{ms}`, `{at}` and `{onset}` are filled in."""

    text: str
    shapes: tuple[str, ...]
    expected: Expected
    due: frozenset[str]
    """What a mode must have, any of: `time` (kernels or Inspector), `logs`."""
    noises: tuple[str, ...] = ("plain", "calm", "correlated")
    """Of `NOISE`, in turn."""


_AFTER: Final = frozenset({_K.SLOW_STEPS})
_NOISES: Final = ("plain", "calm", "correlated", "rough")
FAULTS: Final[dict[str, _Fault]] = {
    "none": _Fault("", (*_SMALL, "64: tp8 pp4 dp2"), Expected(), frozenset(), _NOISES),
    "late rank, 1.5 to 10 % of a step": _Fault(
        "late_rank:rank=1,ms={ms},from={onset}", (*_SMALL, "64: tp8 pp4 dp2"),
        Expected(kinds=frozenset({_K.LATE_RANK}), ranks=(1,), allowed=_AFTER), frozenset({"time"}),
    ),
    "late rank, 3 to 10 % of a step, in jitter of 5 %": _Fault(
        "late_rank:rank=1,ms={ms},from={onset}", _SMALL,
        Expected(kinds=frozenset({_K.LATE_RANK}), ranks=(1,), allowed=_AFTER), frozenset({"time"}), ("rough",),
    ),
    "slow link, 20 %": _Fault(
        "slow_link:node=1,factor=0.8,from={onset}", _LINKS,
        Expected(kinds=frozenset({_K.SLOW_LINK}), hosts=("node01",), allowed=_AFTER), frozenset({"time"}),
    ),
    "slow link, 40 %, in noise of 10 %": _Fault(
        "slow_link:node=1,factor=0.6,from={onset}", _LINKS,
        Expected(kinds=frozenset({_K.SLOW_LINK}), hosts=("node01",), allowed=_AFTER), frozenset({"time"}), ("rough",),
    ),
    "hang": _Fault(
        "hang:rank=5,at={at}", (*_SMALL, "64: tp8 pp4 dp2"),
        Expected(kinds=frozenset({_K.HANG}), ranks=(5,)), frozenset({"logs"}), _NOISES,
    ),
    "mismatch": _Fault(
        "mismatch:rank=5,at={at}", _EQUAL,
        Expected(kinds=frozenset({_K.MISMATCH}), ranks=(5,), allowed=frozenset({_K.HANG})), frozenset({"logs"}),
        _NOISES,
    ),
    "killed": _Fault(
        "kill:at={at}", _SMALL[:3],
        Expected(allowed=frozenset({_K.HANG, _K.STOPPED_LOGGING})), frozenset(), _NOISES,
    ),
}  # fmt: skip
_LATE_SHARES: Final = (0.03, 0.1, 0.015)


def scenarios(jobs: int, *, most_ranks: int, first: int = 0) -> Iterator[tuple[str, list[tuple[str, Scenario]]]]:
    """So many jobs of each fault from the one of number `first` on, as (fault, the job at each speed)."""
    for nth in range(first, first + jobs):
        for name, fault in FAULTS.items():
            shapes = [shape for shape in fault.shapes if SHAPES[shape].world <= most_ranks]
            if shapes:
                shape = shapes[nth % len(shapes)]
                yield name, [(speed, _scenario(name, shape, speed, nth)) for speed in JOBS]


def _scenario(name: str, shape: str, speed: str, nth: int) -> Scenario:
    job, fault = JOBS[speed], FAULTS[name]
    noise = NOISE[
        "moe" if "ep" in shape and nth % 2 and "rough" in fault.noises else fault.noises[nth % len(fault.noises)]
    ]
    shares = _LATE_SHARES[:2] if fault.noises == ("rough",) else _LATE_SHARES
    ms = 1000 * job.step_seconds * shares[nth % len(shares)]
    text = fault.text.format(ms=ms, at=job.stops_at, onset=job.fault_step)
    config = replace(
        SHAPES[shape], step_seconds=job.step_seconds, iterations=job.steps, seed=nth + 1, inspector="v4.2",
        inspector_verbose=job.profiled is not None,
        microbatches=min(2, SHAPES[shape].microbatches), chunk_seconds=job.chunk_seconds, hang_seconds=25.0,
        compute_cv=noise.compute_cv, bandwidth_cv=noise.bandwidth_cv, noise_correlation=noise.noise_correlation,
        imbalance=noise.imbalance, faults=parse_faults((text,)), profiled=job.profiled,
        nvtx_payload=job.profiled is not None, split=False if job.profiled is not None else None,
    )  # fmt: skip
    first = min((fault.first for fault in config.faults), default=None)
    return Scenario(family=name, name=f"{name}; {shape}; seed {nth + 1}", config=config, expected=fault.expected,
                    fault_step=first)  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """What was said of one job in one mode."""

    mode: str
    fault: str
    name: str
    verdict: Verdict
    steps: float | None
    """From the fault to the finding, at the job's usual length of steps; None where it was not found, or offline."""
    said: list[tuple[float, bool]] = field(default_factory=list[tuple[float, bool]])
    """(confidence, right) of its findings."""
    pairs: reliability.Told = field(default_factory=lambda: np.empty((0, 3)))
    """With a third column: 1 if right, or right but for whole steps."""


def play_job(job: tuple[str, list[tuple[str, Scenario]]], *, only: str = "") -> list[Outcome]:
    """Simulates one job and plays it in each mode that has `only` in its name."""
    fault, speeds = job
    done: list[Outcome] = []
    for speed, scenario in speeds:
        modes = {name: mode for name, mode in MODES.items() if only in name and _speed(mode, fault) == speed}
        if not modes:
            continue
        with tempfile.TemporaryDirectory() as folder:
            arrived = list(arrivals(scenario.config, Path(folder) / "job"))
            steps = steps_of(scenario.config, Path(folder) / "job")
            truth = reliability.truth_of(Path(folder) / "job")
            done += [_play(name, fault, scenario, mode, arrived, steps, truth) for name, mode in modes.items()]
    return done


def _speed(mode: Mode, fault: str) -> str:
    """Jobs that stop do so soon: logs tell, whatever is captured."""
    return "usual" if mode.job == "long" and "{at}" in FAULTS[fault].text else mode.job


def is_due(mode: Mode, fault: str) -> bool:
    """Whether the mode shows such a fault."""
    has_calls = mode.logs or (mode.captured is not None and JOBS[mode.job].profiled is not None)
    has_kernels = mode.captured is not None and has_calls
    has = {"time": has_kernels or mode.inspector or mode.traces, "logs": has_calls}
    return any(has[each] for each in FAULTS[fault].due)


def played_in(
    mode: Mode, arrived: list[list[Arrival]], start_ns: int
) -> tuple[Pipeline, dict[tuple[object, ...], Seen]]:
    """The pipeline after all that a mode sees of a job, second by second or at once, and the findings on the way."""
    pipeline, known = Pipeline(), dict[tuple[object, ...], Seen]()
    for second, came in enumerate(arrived, 1):
        for host, batch in mode.batches(came, start_ns):
            pipeline.ingest_batch(batch, agent=host, session="s", job="job")
        if mode.is_live:
            pipeline.process_backlog(start_ns + second * SECOND_NS)
            note(known, pipeline.store.findings, second)
    if not mode.is_live:
        pipeline.finish(start_ns + len(arrived) * SECOND_NS)
        note(known, pipeline.store.findings, len(arrived))
    return pipeline, known


def _play(
    name: str,
    fault: str,
    scenario: Scenario,
    mode: Mode,
    arrived: list[list[Arrival]],
    steps: dict[int, float],
    truth: reliability.Truth,
) -> Outcome:
    pipeline, known = played_in(mode, arrived, scenario.config.start_ns)
    if mode.captured is not None and not mode.stamps:  # pairs are a guess there, and it is right to say so
        known = {key: seen for key, seen in known.items() if seen.last.kind is not _K.BLIND}
    played = Played(seen=tuple(known.values()), seconds=len(arrived), steps=steps)
    verdict = judge(scenario, played)
    begun = sorted(steps.values())
    step = float(np.median(np.diff(begun))) if len(begun) > 1 else 1.0
    return Outcome(
        mode=name,
        fault=fault,
        name=scenario.name,
        verdict=verdict,
        steps=verdict.delay / step if verdict.delay is not None and mode.is_live else None,
        said=[(seen.last.confidence, _is_true(seen, scenario.expected)) for seen in known.values()],
        pairs=reliability.pairs_of(pipeline, truth),
    )


def _is_true(seen: Seen, expected: Expected) -> bool:
    """Whether a finding is of the fault or of what follows from it, and names nobody else."""
    follows = seen.last.kind in expected.allowed and {*seen.last.ranks} <= {*(expected.ranks or ())}
    names_nobody = not any(ranks or hosts for ranks, hosts in seen.culprits)
    return is_right(seen, expected) or follows or (shows_fault(seen, expected) and names_nobody)


def outcomes(jobs: int, *, workers: int, most_ranks: int, only: str, first: int = 0) -> Iterator[Outcome]:
    """Plays them, so many jobs at a time."""
    play = functools.partial(play_job, only=only)
    chosen = list(scenarios(jobs, most_ranks=most_ranks, first=first))
    if workers < 2:
        for job in chosen:
            yield from play(job)
        return
    with ProcessPoolExecutor(workers) as pool:
        for done in pool.map(play, chosen):
            yield from done


HEADER: Final = """\
| mode | fault | jobs | found | wrong names | false alarms | steps p50 | p90 | bars |
|---|---|---:|---:|---:|---:|---:|---:|---|"""


def print_modes(jobs: int, *, workers: int, most_ranks: int, only: str, first: int = 0) -> None:
    """The table by mode and fault, what was missed or wrong, and the reliability by mode."""
    done: list[Outcome] = []
    for outcome in outcomes(jobs, workers=workers, most_ranks=most_ranks, only=only, first=first):
        done.append(outcome)
        _tell(outcome)
    print_tables(done)


def print_tables(done: list[Outcome]) -> None:
    """The rows of all modes, and how right findings and pairs are at their confidence."""
    print(f"\n{HEADER}")
    for name, mode in MODES.items():
        mine = [each for each in done if each.mode == name]
        if not mine:
            continue
        for fault in filter(functools.partial(is_due, mode), FAULTS):
            print(_row(name, fault, [each for each in mine if each.fault == fault]))
        print(_row(name, "none, or one that it does not show", [each for each in mine if not is_due(mode, each.fault)]))
    print(f"\n{reliability.HEADER}")
    for name in MODES:
        mine = [each for each in done if each.mode == name]
        if mine:
            said = np.asarray([pair for each in mine for pair in each.said], np.float64).reshape(-1, 2)
            pairs = np.concatenate([each.pairs for each in mine])
            print(reliability.row(name, said, pairs))


def _tell(outcome: Outcome) -> None:
    verdict = outcome.verdict
    due = is_due(MODES[outcome.mode], outcome.fault)
    for text in [*(["not found"] if due and not verdict.found else []), *verdict.wrong, *verdict.false_alarms]:
        print(f"{outcome.mode}; {outcome.name}: {text}", flush=True)


def _row(mode: str, fault: str, mine: list[Outcome]) -> str:
    due = fault in FAULTS
    found, wrong = sum(each.verdict.found for each in mine), sum(bool(each.verdict.wrong) for each in mine)
    alarms = sum(len(each.verdict.false_alarms) for each in mine)
    steps = [each.steps for each in mine if each.steps is not None]
    middle, late = (f"{np.percentile(steps, share):.0f}" if steps and due else "-" for share in (50, 90))
    missed = [
        *(["found"] if due and found < 0.9 * len(mine) else []),
        *(["names"] if wrong > 0.01 * len(mine) else []),
        *(["alarms"] if alarms else []),
    ]
    cells = (
        mode,
        fault,
        len(mine),
        f"{found}" if due else "-",
        wrong,
        alarms,
        middle,
        late,
        ", ".join(missed) or "met",
    )
    return f"| {' | '.join(map(str, cells))} |"
