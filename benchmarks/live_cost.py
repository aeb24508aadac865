"""python -m benchmarks.live_cost [--rate 64000 32000] [--model]: CPU time of the service for an operation, by stage.

What the agents of a large job send (`benchmarks.load`) is given to the service's state in one process, without
sockets, decoding and journal: batch by batch as they would come, and a tick every half second of the job's time. A
tick that leaves something is followed by another one between; operations that leave memory are written to disk. So the
work is the same on every machine and at any speed; the table says what of it each stage has taken. What is called from
within another stage is its own.
"""

from __future__ import annotations

import argparse
import cProfile
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import numpy as np
from benchmarks.load.recorded import RecordedJob, exported, kept, large_config
from benchmarks.load.streams import HostFollower, Phase, Schedule
from benchmarks.models.shapes import ShapeOfJob

from ncclscope_models.description import Completed
from ncclscope_service.columns.table import Ids
from ncclscope_service.intake.journal_entry import Ticked
from ncclscope_service.intake.receive import Received
from ncclscope_service.keep.archive import Archive
from ncclscope_service.keep.service_state import ServiceState
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Batch

_P = ParamSpec("_P")
_T = TypeVar("_T")

_BEGIN_NS: Final = 1_763_726_400_000_000_000
_TICK_NS: Final = 500_000_000
_OFFSET_MS: Final = 50
"""Clocks of the hosts are off by up to this much."""
_AFTER_NS: Final = 3_000_000_000
"""Exports come so long after what they hold, and ticks go on until then."""

_STAGES: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "ingest": (("pipeline", "ingest_batch"),),
    "count": (("pipeline", "_count"),),
    "group": (("pipeline._grouping", "process_groups"),),
    "backlog": (("pipeline._alignment", "_observe_arrivals"), ("pipeline._alignment._backlog", "drain_portions")),
    "align": (("pipeline", "_align"),),
    "iterations": (("pipeline._grouping", "process_iterations"),),
    "report": (("pipeline._measurement", "report_operations"), ("pipeline._grouping", "process_unidentified")),
    "measure": (("pipeline._measurement", "process_joined"), ("pipeline._measurement.replaying", "report")),
    "clocks": (
        ("pipeline._measurement.clocks", "learn"), ("pipeline._measurement.clocks", "learn_messages"),
        ("pipeline._measurement.clocks", "estimate"), ("pipeline._measurement.clocks", "correct"),
    ),
    "finish": (("pipeline._measurement", "finish"),),
    "inspect": (("pipeline._measurement", "process_inspected"),),
    "detect": (
        ("pipeline", "_judge"), ("pipeline._detection", "count_decided"), ("pipeline._detection", "ingest_operations"),
    ),
    "plan": (("pipeline._detection", "_compare_plan"),),
    "tally": (("tally", "count_rows"),),
    "findings": (("", "findings"), ("news", "compare")),
    "let go": (("pipeline", "evictable"), ("", "_archive_and_evict")),
    "rest of the tick": (("", "tick"),),
}  # fmt: skip
"""Each with the calls that it is, as the attribute of the state and the name of the method."""


class Stages:
    """CPU seconds of stages, each without those within it."""

    def __init__(self, state: ServiceState) -> None:
        """Puts a clock around all calls of `_STAGES`, in the classes of this state's parts."""
        self.seconds: dict[str, float] = dict.fromkeys(_STAGES, 0.0)
        self._within: list[float] = []
        for stage, calls in _STAGES.items():
            for path, name in calls:
                owner: object = state
                for part in path.split(".") if path else ():
                    owner = getattr(owner, part)
                setattr(type(owner), name, self._timed(stage, getattr(type(owner), name)))

    def clear(self) -> None:
        """Begins anew."""
        self.seconds = dict.fromkeys(_STAGES, 0.0)

    def _timed(self, stage: str, call: Callable[_P, _T]) -> Callable[_P, _T]:
        def timed(*args: _P.args, **named: _P.kwargs) -> _T:
            began = time.process_time()
            self._within.append(0.0)
            try:
                return call(*args, **named)
            finally:
                taken = time.process_time() - began
                self.seconds[stage] += taken - self._within.pop()
                if self._within:
                    self._within[-1] += taken

        return timed


class Live:
    """A job whose time goes by in steps, and the service's state beside it."""

    def __init__(
        self, job: RecordedJob, asked: argparse.Namespace, rate: float, archive: Archive, described: Completed | None
    ) -> None:
        speed = rate * job.period_ns / 1e9 / job.operations
        schedule = Schedule(_BEGIN_NS, [Phase(name="load", seconds=asked.seconds, speed=speed)])
        stretches, period = exported(asked.captured, asked.capture_seconds, stretch_s=job.period_ns / 1e9 / speed)
        random = np.random.default_rng(1)
        self._archive = archive
        self._end_ns = _BEGIN_NS + round(asked.seconds * 1e9)
        self._offsets = random.integers(-_OFFSET_MS * 10**6, _OFFSET_MS * 10**6, len(job.hosts)).tolist()
        self._names = [host.name for host in job.hosts]
        self._followers = [
            HostFollower(
                host, job.period_ns, schedule, offset_ns=offset, stretches=stretches, period=period,
                end_ns=self._end_ns,
            )
            for host, offset in zip(job.hosts, self._offsets, strict=True)
        ]  # fmt: skip
        self.state = ServiceState(PipelineSettings(window_ns=round(asked.window * 1e9), description=described))
        self.state.pipeline.errors.are_isolated = False
        self.ticks: list[float] = []
        """CPU seconds of each."""
        self.told = f"exports of {stretches} in {period} stretches"

    @property
    def operations(self) -> int:
        """That were fed."""
        return sum(follower.operations for follower in self._followers)

    def run(self, profile: cProfile.Profile | None) -> None:
        """The whole time of the job, and what is left behind it."""
        now_ns = _BEGIN_NS
        while now_ns < self._end_ns + _AFTER_NS or self.state.pipeline.has_backlog:
            batches = self._batches(now_ns, now_ns + _TICK_NS)
            now_ns += _TICK_NS
            if profile is not None:
                profile.enable()
            for name, batch in batches:
                self.state.ingest_batch(Received(agent=name, host=name, session="s", job="load", batch=batch))
            self._tick(now_ns)
            if self.state.pipeline.has_backlog:
                self._tick(now_ns + _TICK_NS // 2)
            if profile is not None:
                profile.disable()

    def _batches(self, begin_ns: int, end_ns: int) -> list[tuple[str, Batch]]:
        """What the agents, which look twice in that time, send."""
        return [
            (name, batch)
            for now_ns in ((begin_ns + end_ns) // 2, end_ns)
            for name, follower, offset_ns in zip(self._names, self._followers, self._offsets, strict=True)
            for batch in follower.poll(now_ns + offset_ns)
        ]

    def _tick(self, now_ns: int) -> None:
        began = time.process_time()
        self.state.tick(Ticked(at_ns=now_ns, priors=(), silent=None, trouble=""), self._archived)
        self.ticks.append(time.process_time() - began)

    def _archived(self, known: Store, operations: Ids) -> bool:
        self._archive.append(known, operations)
        return True


def main() -> None:
    """Prints a table for each rate."""
    asked = _parser().parse_args()
    config = large_config(asked.hosts, small_steps=asked.small_steps, calls_as_megatron=asked.model)
    job = kept(asked.job, config)
    stages = Stages(ServiceState())
    for rate in asked.rate:
        for described in (None, ShapeOfJob("", config).described()) if asked.model else (None,):
            stages.clear()
            with tempfile.TemporaryDirectory() as folder:
                _print(job, asked, rate, stages, Archive(Path(folder)), described)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live_cost", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rate", type=float, nargs="+", default=[64_000.0], help="operations/s of all hosts (64000)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of the job (40)")
    parser.add_argument("--hosts", type=int, default=64, help="each of eight ranks; a multiple of 4 (64)")
    parser.add_argument("--small-steps", action="store_true", help="few operations in a step: for thousands of ranks")
    parser.add_argument("--model", action="store_true", help="also held against its description, as serve --model does")
    parser.add_argument("--captured", type=float, default=0.1, help="share of the time that is in exports (0.1)")
    parser.add_argument("--capture-seconds", type=float, default=10.0, help="about how long each export is (10)")
    parser.add_argument("--window", type=float, default=900.0, help="seconds that what is finished is kept (900)")
    parser.add_argument("--job", type=Path, help="where the recorded job is kept, and found the next time")
    parser.add_argument("--profile", type=Path, help="where a profile of cProfile is written; its times are longer")
    return parser


def _print(
    job: RecordedJob, asked: argparse.Namespace, rate: float, stages: Stages, archive: Archive,
    described: Completed | None,
) -> None:  # fmt: skip
    live = Live(job, asked, rate, archive, described)
    profile = cProfile.Profile(time.process_time) if asked.profile else None
    live.run(profile)
    if profile is not None:
        profile.dump_stats(asked.profile)
    amount, whole = live.operations, sum(stages.seconds.values())
    matches = np.bincount(live.state.pipeline.store.operations.rows["match"], minlength=5).tolist()
    print(f"\n{len(job.hosts)} hosts, {rate:,.0f} operations/s, {asked.seconds:g} s; {live.told}")
    print("\n| stage | CPU s | us per operation | share |\n|---|---:|---:|---:|")
    for stage, seconds in stages.seconds.items():
        print(f"| {stage} | {seconds:.2f} | {1e6 * seconds / amount:.2f} | {100 * seconds / whole:.0f} % |")
    print(f"| all | {whole:.2f} | {1e6 * whole / amount:.2f} | 100 % |")
    print(
        f"\n{amount:,} operations (pending, matched, unmatched, not covered, no kernel: {matches}), "
        f"{live.state.pipeline.store.collectives.next_id:,} collectives; {len(live.ticks)} ticks, median "
        f"{np.median(live.ticks):.3f} s, longest {max(live.ticks):.2f} s; "
        f"peak RSS {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"
    )
    for plan in live.state.pipeline.store.plans.values():
        print(
            f"{sum(len(host.logs) for host in job.hosts)} ranks held against their description: "
            f"{100 * stages.seconds['plan'] / asked.seconds:.2f} % of a core; last look: {plan.rank_iterations} "
            f"iterations of ranks, {plan.unexplained_operations} operations unexplained"
        )


if __name__ == "__main__":
    main()
