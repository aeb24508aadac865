"""The process of the simulated agents: real sessions, links and windows over files that are not there.

Started by the benchmark with a file that says what to do; writes a line of JSON a second to standard output.
"""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import orjson
from benchmarks.load.recorded import RecordedHost
from benchmarks.load.streams import HostFollower, Phase, Schedule

from ncclscope_agent.app import Agent
from ncclscope_agent.files.follower import Followed
from ncclscope_agent.link.network import LinkSettings
from ncclscope_agent.link.session import Session
from ncclscope_wire.messages import PROTOCOL_VERSION, Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The work of one process."""

    hosts: tuple[RecordedHost, ...]
    offsets_ns: tuple[int, ...]
    """Of each host's clock."""
    period_ns: int
    phases: tuple[Phase, ...]
    begin_ns: int
    port: int
    job: str
    stretches: int
    """Of these each export has so many, of every `capture_period`."""
    capture_period: int
    flush_seconds: float
    look_seconds: float
    """Between two looks. An agent of 1,000 lines/s in 8 files takes 0.25, of 60 up to 1: `ncclscope_agent.app`."""


@dataclass(slots=True)
class _Running:
    agent: Agent
    session: Session
    follower: HostFollower


def main() -> None:
    """Runs all agents of a task until the last phase is over and everything is acknowledged."""
    task: Task = pickle.loads(Path(sys.argv[1]).read_bytes())
    anyio.run(_run, task)


async def _run(task: Task) -> None:
    schedule = Schedule(task.begin_ns, task.phases)
    end_ns = task.begin_ns + round(1e9 * sum(phase.seconds for phase in task.phases))
    running = [_agent(task, number, schedule, end_ns) for number in range(len(task.hosts))]
    complete: list[bool] = []

    async def run(one: _Running) -> None:
        complete.append(await one.agent.run())

    async with anyio.create_task_group() as tasks:
        for one in running:
            tasks.start_soon(run, one)
        while time.time_ns() < end_ns or any(one.follower.has_more for one in running):
            await anyio.sleep(1.0)
            _report(running, is_complete=None)
            if time.time_ns() > end_ns + round(1e9 * task.flush_seconds):
                break
        for one in running:
            one.agent.stop()
    _report(running, is_complete=all(complete))


def _agent(task: Task, number: int, schedule: Schedule, end_ns: int) -> _Running:
    host, offset_ns = task.hosts[number], task.offsets_ns[number]
    hello = Hello(
        protocol_version=PROTOCOL_VERSION,
        agent_id=f"{task.job}-{host.name}",
        session_id=secrets.token_hex(8),
        name=host.name,
        host=host.name,
        job=task.job,
        software_version="benchmark",
        pid=os.getpid(),
    )
    session = Session(hello)
    follower = HostFollower(
        host, task.period_ns, schedule, offset_ns=offset_ns, stretches=task.stretches, period=task.capture_period,
        end_ns=end_ns,
    )  # fmt: skip
    agent = Agent(
        session,
        LinkSettings(host="127.0.0.1", port=task.port),
        [Followed(follower=follower, tick_min_seconds=task.look_seconds, tick_max_seconds=task.look_seconds)],
        flush_seconds=task.flush_seconds,
        wall_ns=_clock(offset_ns),
    )
    return _Running(agent, session, follower)


def _clock(offset_ns: int) -> Callable[[], int]:
    return lambda: time.time_ns() + offset_ns


def _report(running: Sequence[_Running], *, is_complete: bool | None) -> None:
    now_ns = time.time_ns()
    statistics = [one.session.statistics() for one in running]
    told = {
        "at_ns": now_ns,
        "due": sum(one.follower.due(now_ns) for one in running),
        "operations": [one.follower.operations for one in running],
        "kernels": sum(one.follower.kernels for one in running),
        "window_bytes": [each.window_bytes for each in statistics],
        "connections": sum(each.connections_total for each in statistics),
        "resets": sum(each.resets_total for each in statistics),
        "cpu_seconds": time.process_time(),
        "is_complete": is_complete,
    }
    sys.stdout.buffer.write(orjson.dumps(told) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
