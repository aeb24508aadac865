"""When a job is over: its last word was heard, so the files of its run can be written.

A job ends when, for `SETTLE_NS`, nothing new came of it and either every communicator that was initialised has been
destroyed or aborted, or every one of its agents has said goodbye; and when it has said nothing at all for `silence_ns`,
whatever the reason. A job that speaks again is alive again, and ends once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from ncclscope_service.receive import AgentRecord
from ncclscope_service.store import Store

SETTLE_NS: Final = 30_000_000_000
"""Agents send what they read within a second; exports of the last capture come later."""
SILENCE_NS: Final = 1_800_000_000_000


@dataclass(slots=True)
class _Job:
    batches: int
    heard_at_ns: int
    is_over: bool = False


@dataclass(slots=True)
class JobEnds:
    """Watches what agents send of each job, and names those that have ended."""

    _jobs: dict[str, _Job] = field(default_factory=dict[str, _Job])

    def take_ended(
        self,
        agents: Iterable[AgentRecord],
        has_destroyed: Callable[[str], bool],
        now_ns: int,
        *,
        silence_ns: int = SILENCE_NS,
    ) -> list[str]:
        """Jobs that ended since the last call, by name; `has_destroyed`: whether all communicators of a job are gone.

        `now_ns` is the service's wall clock, which must not run back by more than is worth waiting for.
        """
        of_job: defaultdict[str, list[AgentRecord]] = defaultdict(list)
        for agent in agents:
            of_job[agent.job].append(agent)
        ended: list[str] = []
        for name, mine in of_job.items():
            job = self._heard(name, sum(agent.batches_total for agent in mine), now_ns)
            if job.is_over or not job.batches:
                continue
            quiet_ns = now_ns - job.heard_at_ns
            is_settled = quiet_ns >= SETTLE_NS
            if quiet_ns >= silence_ns or (is_settled and (_have_left(mine) or has_destroyed(name))):
                job.is_over = True
                ended.append(name)
        return ended

    def _heard(self, name: str, batches: int, now_ns: int) -> _Job:
        job = self._jobs.get(name)
        if job is None or job.batches != batches:
            job = self._jobs[name] = _Job(batches, now_ns)
        return job


def has_destroyed_all(store: Store, job: str) -> bool:
    """Whether the job had communicators and each of their known members was destroyed or aborted."""
    members = [
        store.members[member]
        for communicator in store.communicators
        if communicator.job == job
        for member in (communicator.members or {}).values()
    ]
    return bool(members) and not any(member.is_alive for member in members)


def _have_left(agents: Iterable[AgentRecord]) -> bool:
    return all(agent.said_goodbye and not agent.connected for agent in agents)
