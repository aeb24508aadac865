"""The command: which job, how many operations per second, for how long."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import benchmarks.load as _package
import numpy as np
from benchmarks.freshness import start_service
from benchmarks.load.agents import Task
from benchmarks.load.recorded import RANKS_PER_HOST, RecordedHost, RecordedJob, exported, kept, large_config
from benchmarks.load.streams import Phase, Schedule
from benchmarks.load.watch import Look, Watch, delays_s
from numpy.typing import NDArray

Report: TypeAlias = dict[str, int | float | bool | list[int] | None]
"""What a process of agents says once a second."""

_OFFSET_MS: Final = 50
"""Clocks of the hosts are off by up to this much."""
_BEGINS_AFTER_S: Final = 3.0
_COUNTED_WITHIN_S: Final = 240.0


@dataclass(slots=True)
class _Agents:
    """One process of simulated agents, and what it said."""

    process: subprocess.Popen[bytes]
    thread: threading.Thread = field(init=False)
    reports: list[Report] = field(default_factory=list[Report])

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None, "agents are started with a pipe"
        with self.process.stdout as lines:
            self.reports.extend(json.loads(line) for line in lines if line.startswith(b"{"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the phases and prints the table; 1 where anything was lost."""
    asked = _parser().parse_args(arguments)
    phases = _phases(asked)
    job = kept(asked.job, large_config(asked.hosts, small_steps=asked.small_steps))
    speed = asked.hosts * asked.rate * job.period_ns / 1e9 / job.operations
    phases = [Phase(name=each.name, seconds=each.seconds, speed=each.speed * speed) for each in phases]
    stretches, period = exported(asked.captured, asked.capture_seconds, stretch_s=job.period_ns / 1e9 / speed)
    print(
        f"{asked.hosts * RANKS_PER_HOST} ranks on {asked.hosts} hosts, {asked.rate:,.0f} operations/s each; "
        f"exports of {stretches} in {period} stretches; {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        return _run(asked, job, phases, stretches, period, Path(folder))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load", description=_package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--hosts", type=int, default=64, help="agents, each of eight ranks; a multiple of 4 (64)")
    parser.add_argument("--rate", type=float, default=1000.0, help="operations per second of each host (1000)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the load (60)")
    parser.add_argument("--overload", type=float, default=0.0, help="then so many times the rate; 0: not")
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--after-seconds", type=float, default=60.0, help="then half of the rate again")
    parser.add_argument("--captured", type=float, default=0.1, help="share of the time that is in exports (0.1)")
    parser.add_argument("--capture-seconds", type=float, default=10.0, help="about how long each export is (10)")
    parser.add_argument("--look-seconds", type=float, default=0.25, help="between two looks of an agent (0.25)")
    parser.add_argument("--processes", type=int, default=1, help="that the agents are spread over (1)")
    parser.add_argument("--small-steps", action="store_true", help="few operations in a step: for thousands of ranks")
    parser.add_argument("--job", type=Path, help="where the recorded job is kept, and found the next time")
    parser.add_argument("--every-seconds", type=float, default=0.5, help="between two scrapes (0.5)")
    parser.add_argument("--flush-seconds", type=float, default=120.0, help="for what waits at the end (120)")
    return parser


def _phases(asked: argparse.Namespace) -> list[Phase]:
    phases = [Phase(name="load", seconds=asked.seconds, speed=1.0)]
    if asked.overload:
        phases.append(Phase(name=f"{asked.overload:g} times", seconds=asked.overload_seconds, speed=asked.overload))
        phases.append(Phase(name="half", seconds=asked.after_seconds, speed=0.5))
    return phases


def _run(
    asked: argparse.Namespace, job: RecordedJob, phases: list[Phase], stretches: int, period: int, folder: Path
) -> int:
    started = start_service(folder / "data")
    service, port, web = started.process, started.agents, started.web
    agents: list[_Agents] = []
    try:
        watch = Watch(web, service.pid, every_seconds=asked.every_seconds)
        schedule = Schedule(time.time_ns() + round(_BEGINS_AFTER_S * 1e9), phases)
        agents = _start_agents(asked, job, phases, schedule, port, stretches, period, folder)
        watch.start()
        for each in agents:
            each.process.wait()
            each.thread.join()
        last = _last_look(watch, _sent(agents))
        watch.stop()
    finally:
        for process in (*(each.process for each in agents), service):
            _end(process)
    _print_phases(phases, schedule, job, agents, watch.looks)
    return _print_end(agents, watch, last)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stops a process; a service that is stopped under load decides what is open first, which is not measured."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _last_look(watch: Watch, sent: int) -> Look | None:
    """A look after the tick that counts what was acknowledged last."""
    until = time.monotonic() + _COUNTED_WITHIN_S
    while True:
        last = watch.look(page=False)
        if time.monotonic() > until or (last is not None and last.operations >= sent):
            return last
        time.sleep(0.5)


def _sent(agents: list[_Agents]) -> int:
    return sum(_total(each.reports[-1], "operations") for each in agents if each.reports)


def _start_agents(
    asked: argparse.Namespace, job: RecordedJob, phases: list[Phase], schedule: Schedule, port: int, stretches: int,
    period: int, folder: Path,
) -> list[_Agents]:  # fmt: skip
    random = np.random.default_rng(1)
    offsets = random.integers(-_OFFSET_MS * 10**6, _OFFSET_MS * 10**6, len(job.hosts)).tolist()
    started: list[_Agents] = []
    for number in range(asked.processes):
        mine: tuple[RecordedHost, ...] = job.hosts[number :: asked.processes]
        task = Task(
            hosts=mine, offsets_ns=tuple(offsets[number :: asked.processes]), period_ns=job.period_ns,
            phases=tuple(phases), begin_ns=schedule.begin_ns, port=port, job="load", stretches=stretches,
            capture_period=period, flush_seconds=asked.flush_seconds, look_seconds=asked.look_seconds,
        )  # fmt: skip
        path = folder / f"agents{number}.pickle"
        path.write_bytes(pickle.dumps(task))
        command = [sys.executable, "-m", "benchmarks.load.agents", str(path)]
        started.append(_Agents(subprocess.Popen(command, stdout=subprocess.PIPE)))
    return started


def _print_phases(
    phases: list[Phase], schedule: Schedule, job: RecordedJob, agents: list[_Agents], looks: list[Look]
) -> None:
    print(
        "| phase | s | offered/s | taken/s | most waits | line to /metrics p50 | p99 | p99 at least | service CPU "
        "| per operation | RSS | series | /metrics p50 | most | page p50 | most | load |\n|---|" + "---:|" * 16
    )
    begin_ns = schedule.begin_ns
    hosts = _by_host(job)
    for phase in phases:
        end_ns = begin_ns + round(phase.seconds * 1e9)
        mine = [look for look in looks if begin_ns <= look.at_ns < end_ns]
        if len(mine) > 1:
            print(_row(phase, mine, looks, schedule, job, hosts, agents, begin_ns, end_ns))
        else:
            print(f"| {phase.name} | {phase.seconds:.0f} |" + " |" * 15)
        begin_ns = end_ns


def _row(
    phase: Phase, mine: list[Look], looks: list[Look], schedule: Schedule, job: RecordedJob,
    hosts: dict[int, NDArray[np.int64]], agents: list[_Agents], begin_ns: int, end_ns: int,
) -> str:  # fmt: skip
    seconds = (mine[-1].at_ns - mine[0].at_ns) / 1e9
    taken = mine[-1].operations - mine[0].operations
    cpu = mine[-1].cpu_seconds - mine[0].cpu_seconds
    offered = job.operations / (job.period_ns / 1e9) * phase.speed
    waits = [_total(report, "due") - _total(report, "operations") for each in agents for report in each.reports
             if begin_ns <= _total(report, "at_ns") < end_ns]  # fmt: skip
    late, least = np.concatenate(
        [
            delays_s(looks, comm_id, _due(times, schedule, job.period_ns), begin_ns, end_ns)
            for comm_id, times in hosts.items()
        ],
        axis=1,
    )
    if not len(late):
        late = least = np.array([np.nan])
    metrics = [look.metrics_seconds for look in mine]
    pages = [look.page_seconds for look in mine if look.page_seconds is not None] or [float("nan")]
    return (
        f"| {phase.name} | {phase.seconds:.0f} | {offered:,.0f} | {taken / seconds:,.0f} | {max(waits, default=0):,} "
        f"| {np.quantile(late, 0.5):.2f} s | {np.quantile(late, 0.99):.2f} s "
        f"| {np.quantile(least, 0.99):.2f} s | {100 * cpu / seconds:.0f} % "
        f"| {1e6 * cpu / max(taken, 1):.1f} us | {max(look.resident_mib for look in mine):.0f} MiB "
        f"| {mine[-1].series:,} | {np.median(metrics):.2f} s | {max(metrics):.2f} s | {np.median(pages):.2f} s "
        f"| {max(pages):.2f} s | {np.mean([look.load_average for look in mine]):.1f} |"
    )


def _by_host(job: RecordedJob) -> dict[int, NDArray[np.int64]]:
    """The tensor-parallel communicator of each host by commId, with the times of its operations in a stretch."""
    found: dict[int, NDArray[np.int64]] = {}
    for host in job.hosts:
        ids, amounts = np.unique(np.concatenate([log.communicators for log in host.logs]), return_counts=True)
        own = int(ids[amounts.argmax()])
        times = [log.rows["logged_at_ns"][log.communicators == own] for log in host.logs]
        found[own] = np.sort(np.concatenate(times))
    return found


def _due(
    times: NDArray[np.int64], schedule: Schedule, period_ns: int
) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    def due(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        stretch, at = np.divmod(numbers, len(times))
        return schedule.wall_ns(times[at] + stretch * period_ns)

    return due


def _total(report: Report, name: str) -> int:
    value = report[name]
    return sum(value) if isinstance(value, list) else int(value or 0)


def _print_end(agents: list[_Agents], watch: Watch, last: Look | None) -> int:
    """Operations that were sent, and those of them that the service counts."""
    ends = [each.reports[-1] for each in agents if each.reports]
    sent = sum(_total(end, "operations") for end in ends)
    due = sum(_total(end, "due") for end in ends)
    counted = 0 if last is None else last.operations
    per_host = [amount for end in ends for amount in (end["operations"] if isinstance(end["operations"], list) else [])]
    print(
        "\n| written | sent | counted by the service | lost | kernels sent | least and most of an agent | connections "
        "| acknowledged | requests unanswered | agents' CPU s |\n|" + "---:|" * 10
    )
    kernels, connections = (sum(_total(end, name) for end in ends) for name in ("kernels", "connections"))
    cpu = sum(float(end["cpu_seconds"] or 0) for end in ends if not isinstance(end["cpu_seconds"], list))
    print(
        f"| {due:,} | {sent:,} | {counted:,} | {sent - counted:,} | {kernels:,} "
        f"| {min(per_host, default=0):,} / {max(per_host, default=0):,} | {connections} "
        f"| {'all' if all(end['is_complete'] for end in ends) else 'not all'} | {watch.failures} | {cpu:.0f} |"
    )
    return 0 if counted == sent else 1


if __name__ == "__main__":
    sys.exit(main())
