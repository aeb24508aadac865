"""Stage that says what a job is: ranks, parallelism, iterations, and communicators that no line named."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct_values
from ncclscope_service.columns.table import Ids
from ncclscope_service.intake.stage import IntakeStage
from ncclscope_service.job import parallelism, ranks
from ncclscope_service.job.identification import Identification
from ncclscope_service.job.iteration_numbering import Periods
from ncclscope_service.job.iterations import Iterations, Numbered
from ncclscope_service.job.step_times import StepTimes, inspected_steps_ns
from ncclscope_service.measure.limits import Limits
from ncclscope_service.store.retention import Evicted
from ncclscope_service.store.settings import (
    LONGEST_PAUSE_NS,
    MARKS_WITHIN_NS,
    PAUSE_PER_MEMBER_NS,
    PipelineSettings,
)
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns

_MORE: Final = 1.2
"""Parallelism of all jobs is assigned again when operations have grown by this factor."""


@dataclass(frozen=True, slots=True)
class Identified:
    """Result of a look for communicators that no line names."""

    operations: Ids
    """Those that need not wait for that any more."""
    changed: set[int]
    """Communicators whose names, ranks, limits or use changed."""


class GroupingStage:
    """Ranks, groups and iterations of all jobs of one store."""

    def __init__(self, known: Store, intake: IntakeStage, limits: Limits, settings: PipelineSettings) -> None:
        self.periods = Periods(known)
        self._store = known
        self._intake = intake
        self._limits = limits
        self._iterations = Iterations(known)
        self._step_times = StepTimes(known)
        self._numbered = Numbered()
        self._identification = Identification(
            known, intake.series, settle_ns=settings.settle_ns, gpus_per_node=settings.gpus_per_node
        )
        self._unidentified: deque[tuple[int, Ids]] = deque()
        """(when decided, operations) of members whose communicator is not found yet."""
        self._grouped_operations = 0
        self._grouped_at_ns: int | None = None
        self._inspected_steps_ns: dict[str, int] = {}

    def process_groups(self, now_ns: int, settings: PipelineSettings, *, final: bool) -> set[int]:
        """Assigns ranks and parallelism if membership changed or it is time; gives the communicators that changed."""
        if not (final or self._is_time_to_group(now_ns, settings)):
            self.periods.go_on()
            return set()
        self._grouped_at_ns = now_ns
        self.periods.learn(final=final)
        if len(self._store.inspected) and set(self._store.process_job) - self.periods.steps_ns().keys():
            self._inspected_steps_ns = inspected_steps_ns(self._store)
        communicators, contents = self._intake.communicators, self._intake.contents
        jobs = set(self._store.process_job) if final else communicators.changed
        changed = ranks.assign_ranks(self._store, jobs=jobs, gpus_per_node=settings.gpus_per_node)
        communicators.changed = set()
        changed |= self._intake.group_names.assign()
        if contents.operations >= max(1, _MORE * self._grouped_operations):
            self._grouped_operations, jobs = contents.operations, set(self._store.process_job)
        changed |= self._assign_parallelism(jobs, settings)
        changed |= self._limits.refresh()
        self._intake.series.set_limits(self._limits.series_limit, changed)
        return changed

    def process_iterations(self, decided: Ids, now_ns: int) -> None:
        """Numbers what was decided, and again what was decided recently if more marks of its process have come."""
        marked = self._iterations.read_marks()
        self._numbered.forget_before(now_ns - MARKS_WITHIN_NS)
        if marked:
            self._iterations.assign(self._numbered.of(marked, self._store))
        self._iterations.assign(decided)
        self._numbered.add(decided, now_ns)

    def process_unidentified(
        self, decided: Ids, now_ns: int, settings: PipelineSettings, patience_ns: int, *, final: bool
    ) -> Identified:
        """Finds communicators that nothing names."""
        changed = set[int]()
        jobs = self._identification.advance(now_ns, final=final)
        if jobs:
            self._intake.communicators.changed |= jobs
            changed = {each.index for each in self._store.communicators if each.job in jobs}
            self._grouped_at_ns = None
            changed |= self.process_groups(now_ns, settings, final=final)
        return Identified(self._identified(decided, now_ns, patience_ns, final=final), changed)

    def is_open(self) -> NDArray[np.bool_]:
        """By member: whether its communicator may still prove to be another."""
        return self._identification.is_open()

    def drain_steps(self) -> dict[str, Columns]:
        """Steps (`step_times.STEP`) of each job that have ended since the last call, which are in its history then."""
        ended = self._step_times.drain(self.periods.settled_before)
        for job, steps in ended.items():
            self._store.step_histories[job].add(steps)
        return ended

    def evict(self, gone: Evicted) -> None:
        """Forgets jobs that are gone."""
        self._step_times.evict(gone)
        for job in gone.jobs:
            self._store.step_histories.pop(job, None)
            self._store.job_histories.pop(job, None)

    def steps_ns(self) -> dict[str, int]:
        """Duration of a step of each job, by marks or else by periods, of lines or else of NCCL Inspector's records;
        without jobs of which it is not known.
        """
        return self._inspected_steps_ns | self.periods.steps_ns() | self._iterations.steps_ns()

    def settle_before(self, operation: int) -> None:
        """Operations before this one are about to leave memory: their periods are decided first."""
        if operation > self.periods.settled_before:
            self.periods.settle()

    def _is_time_to_group(self, now_ns: int, settings: PipelineSettings) -> bool:
        """Whether it is, or membership has changed: with many ranks not at each change, or work never ends."""
        if self._grouped_at_ns is None:
            return True
        since_ns = now_ns - self._grouped_at_ns
        pause_ns = min(len(self._store.members) * PAUSE_PER_MEMBER_NS, LONGEST_PAUSE_NS)
        is_time = not 0 <= since_ns < settings.groups_every_ns
        return is_time or (bool(self._intake.communicators.changed) and since_ns >= pause_ns)

    def _assign_parallelism(self, jobs: set[str], settings: PipelineSettings) -> set[int]:
        """Assigns what the communicators of these jobs are for; gives those of which that changed."""
        if not jobs:
            return set()
        table = self._intake.contents.table()
        used = set(distinct_values(table["communicator"]))
        asked = [each for each in self._store.listed_communicators() if each.job in jobs and each.index in used]
        patterns = self._intake.patterns.patterns_of(asked)
        return parallelism.assign_parallelism(
            self._store, table, patterns, settings.sizes, self.periods.iterations(), jobs=jobs
        )

    def _identified(self, decided: Ids, now_ns: int, patience_ns: int, *, final: bool) -> Ids:
        """Operations whose communicator is certain or was waited for too long, of these and of those that wait."""
        is_open = self._identification.is_open()
        if not len(self._unidentified) and not is_open.any():
            return decided
        ready = [np.empty(0, np.int64)]
        waiting, self._unidentified = self._unidentified, deque()
        for at_ns, operations in [*waiting, (now_ns, decided)]:
            here = operations[operations >= self._store.operations.first]
            waits = is_open[self._store.operations.take(here, "member")["member"]]
            if final or now_ns - at_ns > patience_ns:
                waits[:] = False
            ready.append(here[~waits])
            if waits.any():
                self._unidentified.append((at_ns, here[waits]))
        return np.concatenate(ready)
