"""False alarms of healthy jobs over many days by mode, and how soon a loss of bandwidth is found.

A job-day is a job of 16 ranks on four nodes that starts and runs for 24 hours, step by step: what a step computes and
sends is drawn as columns, ranks meet in their groups as NCCL's kernels do, and the joined collectives, steps and counts
that follow go to the detectors' own objects as the service would give them, with what each mode shows. Computation and
bandwidth are autoregressive noise, 0.6 from one step to the next, with the tails of Student's t with four degrees of
freedom. Once in 600 steps the job stands still for half a minute, once in 600 rank 0 comes late by 5 s: evaluations
and checkpoints. Not drawn: pipelines, lost lines, wrong pairs and clocks. Another table has days with a fault from the
second hour on, which has to be one finding until the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from benchmarks.findings.least_delay import Series, least_delays, noise
from benchmarks.findings.replay import Seen, note
from numpy.typing import NDArray

from ncclscope_service.detect import comparable_groups
from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.detection import Detectors
from ncclscope_service.detect.progress import PROGRESS
from ncclscope_service.detect.statistics import QUICK, STEADY, DropWatch
from ncclscope_service.job.step_times import STEP
from ncclscope_service.nccl import bandwidth
from ncclscope_service.store import rows
from ncclscope_service.store.records import Finding, FindingKind
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

_SERIES: Final = 4
_DAY: Final = 86_400
_WINDOW: Final = 10
_PHI: Final = 0.6
_BAR: Final = 0.1
"""False alarms per job-day."""
_RANKS: Final = 16
_SECOND: Final = 1_000_000_000
_START_NS: Final = 1_772_449_200 * _SECOND
_STOPS_EVERY: Final = 200
"""Steps."""

ALARMS_HEADER: Final = """\
| mode | job-days | hours seen | alarms | per job-day | at most (95 %) | which |
|---|---:|---:|---:|---:|---:|---|"""
LASTING_HEADER: Final = """\
| mode | fault | days | found | open since, of the time | opened | others |
|---|---|---:|---:|---:|---:|---|"""
LATE, NIC, SLOWER = "rank 5 computes a tenth longer", "the card of rank 5 at two thirds", "all compute a tenth longer"
LASTING: Final = {
    LATE: {FindingKind.LATE_RANK},
    NIC: {FindingKind.SLOW_LINK, FindingKind.BANDWIDTH_DROP},
    SLOWER: {FindingKind.SLOW_STEPS},
}
"""Faults from the second hour on, and the kinds of findings that they are."""
_GUILTY: Final = 5
_ONSET_SECONDS: Final = 3600
DELAYS_HEADER: Final = """\
| baseline | noise | loss | found | delay p50 | p90 |
|---|---|---:|---:|---:|---:|"""


@dataclass(frozen=True, slots=True)
class DayMode:
    """The part of a day that detectors see."""

    captured: float
    """Seconds of every hundred."""
    looks: float
    """Seconds from look to look."""
    logs: bool = True
    dumps: bool = False
    """Durations are whole us and come with Inspector's dumps, ten a second."""


DAY_MODES: Final[dict[str, DayMode]] = {
    "full: stamped logs and nsys, live": DayMode(100, 60.0),
    "40 s of every 100 s": DayMode(40, 60.0),
    "10 s of every 100 s": DayMode(10, 60.0),
    "Inspector only": DayMode(100, 60.0, logs=False, dumps=True),
    "logs only, live": DayMode(0, 30.0),
}


@dataclass(frozen=True, slots=True)
class _Collectives:
    """One kind of collective of each step, on all groups of a kind at once."""

    op: str
    parallelism: str
    members: tuple[tuple[int, ...], ...]
    """Global ranks, by group."""
    message_bytes: int
    bandwidth: float
    """Bus bandwidth in bytes per second."""
    compute: float
    """Share of the step that ranks compute before it."""


_TP = tuple(tuple(range(node * 4, node * 4 + 4)) for node in range(4))
_DP = tuple(tuple(range(gpu, 16, 4)) for gpu in range(4))
_ALL = (tuple(range(16)),)
_NVLINK, _NETWORK = 180e9, 40e9
PROGRAMS: Final = (
    (
        *(_Collectives("AllReduce", "TP", _TP, 64 << 20, _NVLINK, 0.2) for _ in range(4)),
        _Collectives("ReduceScatter", "DP", _DP, 512 << 20, _NETWORK, 0.1),
        _Collectives("AllGather", "DP", _DP, 512 << 20, _NETWORK, 0.05),
        _Collectives("AllReduce", "WORLD", _ALL, 1 << 10, 1e9, 0.05),
    ),
    (
        *(_Collectives("AllGather", "DP", _ALL, 256 << 20, _NETWORK, 0.2) for _ in range(3)),
        *(_Collectives("ReduceScatter", "DP", _ALL, 256 << 20, _NETWORK, 0.15) for _ in range(2)),
        _Collectives("AllReduce", "DP", _ALL, 1 << 10, 1e9, 0.05),
    ),
)
"""Tensor parallelism within four nodes and data parallelism between them; and FSDP over all."""


@dataclass(frozen=True, slots=True)
class Day:
    """A job, healthy but for a fault (one of `LASTING`)."""

    seed: int
    hours: int = 24
    fault: str = ""

    @property
    def program(self) -> tuple[_Collectives, ...]:
        """The collectives of a step."""
        return PROGRAMS[self.seed % len(PROGRAMS)]

    @property
    def step_seconds(self) -> float:
        """How much ranks compute in a step."""
        return (10.0, 20.0, 30.0)[self.seed % 3]

    @property
    def cv(self) -> float:
        """Spread of computation; bandwidth has twice as much."""
        return (0.01, 0.025, 0.05)[self.seed // 3 % 3]

    def context(self) -> Context:
        """Its groups, which are numbered in the order of the program."""
        groups = {
            place: Group(
                comm_id=f"{use.parallelism.lower()}-{place}",
                parallelism=use.parallelism,
                global_ranks=members,
                hosts=tuple(f"node{rank // 4 + 1:02}" for rank in members),
                limit=1.25 * use.bandwidth if use.bandwidth > 1e9 else None,
                limit_name="wires",
            )
            for (use, members), place in self.places().items()
        }
        return Context(job="job", groups=groups, step_ns=int(self.step_seconds * _SECOND), knows_steps=True)

    def places(self) -> dict[tuple[_Collectives, tuple[int, ...]], int]:
        """The number of the group of each collective of the program."""
        numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        uses = [(use, members) for use in self.program for members in use.members]
        return {(use, of): numbers.setdefault((use.parallelism, of), len(numbers)) for use, of in uses}

    def steps(self) -> tuple[Columns, NDArray[np.int64]]:
        """Collectives (`rows.COLLECTIVE`) by step and place in the program, and when each step began, with its end."""
        random = np.random.default_rng([self.seed, 11])
        count = int(self.hours * 3600 / self.step_seconds)
        slowness = self.cv * noise(random, count, _RANKS, _PHI)
        stops = _STOPS_EVERY * np.arange(1, count // _STOPS_EVERY)
        at = np.zeros((count, _RANKS))
        at[stops[stops // _STOPS_EVERY % 3 == 0]] += 30.0
        at[stops[stops // _STOPS_EVERY % 3 == 1], 0] += 5.0
        parts: list[Columns] = []
        for use in self.program:
            own = self.step_seconds * use.compute * np.maximum(0.2, 1 + slowness)
            own[self.onset :] *= self._longer()
            at += own * np.maximum(0.2, 1 + 0.5 * self.cv * random.normal(size=own.shape))
            congestion = 2 * self.cv * noise(random, count, len(use.members), _PHI)
            for place, members in enumerate(use.members):
                slower = np.maximum(0.4, 1 + congestion[:, place])
                if self.fault == NIC and _GUILTY in members and use.parallelism != "TP":
                    slower[self.onset :] *= 1.5
                parts.append(self._meet(use, members, at, slower))
        begins = np.concatenate([[0], np.cumsum(at.max(axis=1) * _SECOND).astype(np.int64)]) + _START_NS
        found = np.stack(parts, axis=1)
        for name in ("first_start_true_ns", "end_true_ns"):
            found[name] += begins[:-1, None]
        return found, begins

    @property
    def onset(self) -> int:
        """The first step of the fault."""
        return int(_ONSET_SECONDS / self.step_seconds)

    def _longer(self) -> NDArray[np.float64]:
        """By how much longer each rank computes by its fault."""
        longer = np.ones(_RANKS)
        if self.fault == SLOWER:
            longer[:] = 1.1
        elif self.fault == LATE:
            longer[_GUILTY] = 1.1
        return longer

    def _meet(
        self, use: _Collectives, members: tuple[int, ...], at: NDArray[np.float64], slower: NDArray[np.float64]
    ) -> Columns:
        """One collective of one group in all steps; moves the ranks' times, which count from the step's beginning."""
        size, factor = len(members), bandwidth.factor(np.array([OPERATION_CODES[use.op]]), np.array([len(members)]))[0]
        arrived = at[:, members]
        ordered = np.sort(arrived, axis=1)
        transfer = use.message_bytes * factor / use.bandwidth * slower
        found = np.zeros(len(at), rows.COLLECTIVE)
        found["communicator"] = self.places()[use, members]
        found["coll_seq"] = np.arange(len(at)) * len(self.program) + self.program.index(use)
        found["op"], found["message_bytes"] = OPERATION_CODES[use.op], use.message_bytes
        found["size_class"] = bandwidth.classify(np.array([use.message_bytes]))[0]
        found["ranks_seen"], found["last_rank"], found["confidence"] = size, arrived.argmax(axis=1), 1.0
        found["rank"] = found["peer"] = NO_NUMBER
        waits = ordered[:, -1:] - arrived
        for name, seconds in (
            ("first_start_true_ns", ordered[:, 0]), ("end_true_ns", ordered[:, -1] + transfer),
            ("transfer_ns", transfer), ("spread_ns", waits.max(axis=1)), ("wait_ns", waits.sum(axis=1)),
            ("busy_ns", waits.sum(axis=1) + size * transfer), ("blame_ns", ordered[:, -1] - ordered[:, -2]),
        ):  # fmt: skip
            found[name] = (seconds * _SECOND).astype(np.int64)
        found["busbw"] = use.message_bytes * factor / transfer
        at[:, members] = (ordered[:, -1] + transfer)[:, None]
        return found


def alarms_of_day(mode: DayMode, seed: int, hours: int = 24) -> tuple[list[str], float]:
    """Findings of a healthy day in a mode, and the hours of which detectors saw kernels."""
    known: dict[tuple[object, ...], Seen] = {}
    for now_ns, findings in _looks(mode, Day(seed, hours)):
        note(known, findings, (now_ns - _START_NS) / _SECOND)
    said = [f"{seen.opened / 3600:.1f} h: {seen.last.kind}: {seen.last.summary}" for seen in known.values()]
    return said, hours * mode.captured / 100


@dataclass(slots=True)
class Lasted:
    """What was said of a day with a fault."""

    looks: int = 0
    """Since the fault was found first."""
    open_looks: int = 0
    opened: int = 0
    others: list[str] = field(default_factory=list[str])
    """Findings of other kinds, or that name somebody else, that were open for longer than a quarter of an hour."""


def lasting_of_day(mode: DayMode, seed: int, fault: str, hours: int = 24) -> Lasted:
    """What was said of a day with this fault."""
    found, was_open = Lasted(), False
    others: Counter[str] = Counter()
    for _, findings in _looks(mode, Day(seed, hours, fault)):
        own = [each for each in findings if each.until_ns is None]
        right = [each for each in own if each.kind in LASTING[fault] and {*each.ranks} <= {_GUILTY}]
        found.opened += bool(right) and not was_open
        found.looks += bool(found.opened)
        found.open_looks += bool(right)
        was_open = bool(right)
        others.update({f"{each.kind} of ranks {each.ranks}" for each in own if each not in right})
    found.others = [name for name, looks in others.items() if looks * mode.looks > 900]
    return found


def _looks(mode: DayMode, day: Day) -> Iterator[tuple[int, list[Finding]]]:
    """The findings at each look of a day in a mode at which detectors got something."""
    collectives, begins = day.steps()
    context, detectors = day.context(), Detectors()
    ordered = collectives.ravel()[np.argsort(collectives.ravel()["end_true_ns"], kind="stable")]
    seen = ordered[(ordered["end_true_ns"] - _START_NS) // _SECOND % 100 < mode.captured]
    if mode.dumps:
        seen["end_true_ns"] = -(-seen["end_true_ns"] // 100_000_000) * 100_000_000
        for name in ("transfer_ns", "spread_ns", "blame_ns"):
            seen[name] = seen[name] // 1000 * 1000
    steps = np.zeros(len(begins) - 1, STEP)
    steps["iteration"], steps["started_ns"], steps["duration_ns"] = np.arange(len(steps)), begins[:-1], np.diff(begins)
    steps["operations"] = steps["bytes"] = 100.0
    every_ns = int(mode.looks * _SECOND)
    for now_ns in range(_START_NS + every_ns, int(begins[-1]), every_ns):
        first, last = np.searchsorted(seen["end_true_ns"], (now_ns - every_ns, now_ns))
        if last > first:
            detectors.ingest_collectives(seen[first:last], context)
        if mode.logs:
            begun = int(np.searchsorted(begins, now_ns, side="right")) - 1
            before = int(np.searchsorted(begins, now_ns - every_ns, side="right")) - 1
            detectors.ingest_steps(steps[max(0, before) : begun], context)
            detectors.ingest_progress(_counts(day, begun, int(begins[begun])), context)
        if mode.logs or last > first:
            yield now_ns, detectors.findings(now_ns)


def _counts(day: Day, step: int, last_ns: int) -> Columns:
    """How far all ranks are when they have enqueued a step (`PROGRESS`)."""
    found = [
        (place, NO_NUMBER, NO_NUMBER, rank, step, last_ns)
        for (_, members), place in day.places().items()
        for rank in range(len(members))
    ]
    return np.array(sorted(set(found)), PROGRESS)


def print_false_alarms(days: int, *, workers: int, only: str) -> None:
    """The table: false alarms by mode, their rate and its 95 % upper bound (exact for Poisson counts)."""
    chosen = {name: mode for name, mode in DAY_MODES.items() if only in name}
    alarms: dict[str, list[str]] = {name: [] for name in chosen}
    hours = dict.fromkeys(chosen, 0.0)
    played = [(name, seed) for seed in range(days) for name in chosen]
    with ProcessPoolExecutor(workers) as pool:
        found = pool.map(alarms_of_day, *zip(*((chosen[name], seed) for name, seed in played), strict=True))
        for (name, seed), (said, seen) in zip(played, found, strict=True):
            alarms[name] += said
            hours[name] += seen
            print(f"day {seed}, {name}: {len(said)} alarms", *said, sep="\n    ", flush=True)
    print(f"\n{ALARMS_HEADER}")
    for name, told in alarms.items():
        kinds = Counter(text.split(": ")[1] for text in told)
        which = ", ".join(f"{amount} {kind}" for kind, amount in kinds.items()) or "-"
        rate, most = len(told) / days, upper_bound(len(told)) / days
        print(f"| {name} | {days} | {hours[name]:,.0f} | {len(told)} | {rate:.3f} | {most:.3f} | {which} |")


def print_lasting(days: int, *, workers: int, only: str) -> None:
    """The table: a fault that stays is one finding, opened once, in every mode that shows it."""
    print(f"\n{LASTING_HEADER}")
    for name, mode in DAY_MODES.items():
        for fault, kinds in LASTING.items():
            is_due = mode.logs if FindingKind.SLOW_STEPS in kinds else mode.captured > 0
            if only not in name or not is_due:
                continue
            with ProcessPoolExecutor(workers) as pool:
                found = list(pool.map(lasting_of_day, [mode] * days, range(days), [fault] * days))
            told = [each for each in found if each.opened]
            share = sum(each.open_looks for each in told) / max(1, sum(each.looks for each in told))
            opened = "-" if not told else str(max(each.opened for each in told))
            others = ", ".join(sorted({text for each in found for text in each.others})) or "-"
            print(f"| {name} | {fault} | {days} | {len(told)} | {share:.1%} | {opened} | {others} |", flush=True)


def print_delays(trials: int) -> None:
    """The table: how long after a loss of bandwidth the rules with a baseline find it."""
    print(f"\n{DELAYS_HEADER}")
    baselines = (
        ("an hour of 10 s", STEADY.baseline, _steady, _WINDOW, 1),
        ("the same, four groups that share wires", STEADY.baseline, _steady, _WINDOW, _SERIES),
        ("60 s of 1 s", QUICK.baseline, _quick, 1, 1),
        ("the same, four groups that share wires", QUICK.baseline, _quick, 1, _SERIES),
    )
    for name, baseline, watching, seconds, groups in baselines:
        for told, phi, heavy in (("CV 5 %, independent", 0.0, False), ("CV 5 %, correlated, heavy tails", _PHI, True)):
            for loss in (0.2, 0.4):
                delays = _delays(watching, max(baseline + 30, 60), seconds, (trials, groups), phi, loss, heavy=heavy)
                middle, late = np.percentile(delays, (50, 90)) if delays else (np.nan, np.nan)
                print(
                    f"| {name} | {told} | {loss:.0%} | {len(delays)} of {trials} | {middle:.0f} s | {late:.0f} s |",
                    flush=True,
                )
    for loss in (0.2, 0.4):
        best = _WINDOW * least_delays(loss, 0.05, _PHI, _BAR / (_SERIES * _DAY / _WINDOW), trials)
        middle, late = np.percentile(best, (50, 90))
        print(
            f"| known, as is the loss: the least possible | CV 5 %, correlated, heavy tails | {loss:.0%} | "
            f"{len(best)} of {trials} | {middle:.0f} s | {late:.0f} s |",
            flush=True,
        )


def upper_bound(count: int) -> float:
    """The largest mean of which so few events come in 5 % of cases; by bisection of Poisson's distribution."""
    low, high = float(count), 3.0 * count + 10.0
    for _ in range(60):
        mean = (low + high) / 2
        terms = np.cumsum(np.concatenate([[0.0], np.log(mean) - np.log(np.arange(1, count + 1))]))
        at_most = float(np.exp(terms - mean).sum())
        low, high = (mean, high) if at_most > 0.05 else (low, mean)
    return low


def _together(levels: Series, jobs: int) -> Series:
    """The series of each job taken together, as groups that share wires are."""
    by_job = levels.reshape(len(levels), jobs, -1)
    together: Series = np.percentile(by_job, comparable_groups.QUANTILE, axis=2)
    return together


def _quick() -> DropWatch:
    return DropWatch(QUICK)


def _steady() -> DropWatch:
    return DropWatch(STEADY)


def _delays(
    watching: Callable[[], DropWatch],
    before: int,
    seconds: int,
    trials: tuple[int, int],
    phi: float,
    loss: float,
    *,
    heavy: bool,
) -> list[float]:
    """Seconds from the loss, after so many windows, to the alarm, of the (jobs, groups) in which there was one."""
    jobs, groups = trials
    single = 0.05 * noise(np.random.default_rng(7), before + 200, jobs * groups, phi, heavy=heavy)
    values = _together(single, jobs) if groups > 1 else single
    values[before:] += np.log1p(-loss)
    delays: list[float] = []
    for column in range(jobs):
        watch = watching()
        for at, level in enumerate(values[:, column].tolist()):
            watch.ingest_window(at, level)
            if at >= before and watch.drop is not None:
                delays.append(seconds * (at - before + 1))
                break
    return delays
