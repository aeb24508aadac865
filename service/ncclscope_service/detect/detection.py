"""All detectors over a store, job by job; their findings become `Store.findings`.

What a detector needs is said in its own module; here it is gathered from the store: progress and calls from the logs as
they arrive, joined collectives as they are measured, the clocks' check, and what was seen of each host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_models.description import Completed
from ncclscope_models.expected_step import ExpectedStep
from ncclscope_service.clock.causality import ClockCheck
from ncclscope_service.clock.host_clocks import Clocks
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct, distinct_values, group_by
from ncclscope_service.columns.table import Ids
from ncclscope_service.detect.bandwidth import BandwidthDrop, BelowLimit
from ncclscope_service.detect.blind import Blind, HostCounters, HostVisibility, internal_error_finding
from ncclscope_service.detect.clock_fault import ClockFault
from ncclscope_service.detect.context import (
    Context,
    GroupsOfStore,
    by_urgency,
    group_from_communicator,
    without_explained,
)
from ncclscope_service.detect.flight_recorder import FlightRecords
from ncclscope_service.detect.hang import Hang, hang_at_end
from ncclscope_service.detect.kernel_counts import ShownByKernels, shown_by_kernels
from ncclscope_service.detect.late_rank import LateRank
from ncclscope_service.detect.lossy_calls import NumberedCalls
from ncclscope_service.detect.lost_time_history import LostTimeHistory
from ncclscope_service.detect.machines import GpuSeats, Machines
from ncclscope_service.detect.misconfiguration import Misconfiguration, WorldOfProcess
from ncclscope_service.detect.mismatch import Mismatch, calls_of_operations, numbered_calls
from ncclscope_service.detect.moments import earlier_counts
from ncclscope_service.detect.off_plan import OffPlan
from ncclscope_service.detect.pauses import RestingRanks
from ncclscope_service.detect.progress import ProgressTable, progress_of_operations
from ncclscope_service.detect.reported import LoggedFact, ProcessKey, Reported
from ncclscope_service.detect.settings import settings_of
from ncclscope_service.detect.slow_steps import SlowSteps
from ncclscope_service.detect.slower_than_plan import SlowerThanPlan
from ncclscope_service.detect.stopped_logging import StoppedLogging
from ncclscope_service.detect.verdict import EndOfRanks, end_of_ranks, judge_end
from ncclscope_service.job.iteration_numbering import Periods
from ncclscope_service.job.iterations import mean_step_beyond
from ncclscope_service.job.step_budget import MeanStep
from ncclscope_service.job.step_lines import StepLines, newest_step_lines, sample_of_ranks
from ncclscope_service.job.step_times import STEP
from ncclscope_service.join.ranks import NewestCollectives
from ncclscope_service.store import rows
from ncclscope_service.store.errors import InternalErrors
from ncclscope_service.store.plan_records import PlanRecord
from ncclscope_service.store.records import Finding, FindingKind, HostClock, Verdict
from ncclscope_service.store.retention import Evicted, Retention
from ncclscope_service.store.settings import JUDGED_WITHIN_NS, SECOND_NS
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.facts import Fact, FlightRecord, ProgramFailure
from ncclscope_wire.records import SourceKind
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS


@dataclass(slots=True, eq=False)
class Detectors:
    """Takes each kind of input when there is some; a detector without input reports nothing."""

    # Fields with defaults: a state of a build that had one of them not yet is read on.
    _late_rank: LateRank = field(default_factory=LateRank)
    _bandwidth_drop: BandwidthDrop = field(default_factory=BandwidthDrop)
    _below_limit: BelowLimit = field(default_factory=BelowLimit)
    _hang: Hang = field(default_factory=Hang)
    _mismatch: Mismatch = field(default_factory=Mismatch)
    _stopped_logging: StoppedLogging = field(default_factory=StoppedLogging)
    _reported: Reported = field(default_factory=Reported)
    _misconfiguration: Misconfiguration = field(default_factory=Misconfiguration)
    _slow_steps: SlowSteps = field(default_factory=SlowSteps)
    _clock_fault: ClockFault = field(default_factory=ClockFault)
    _blind: Blind = field(default_factory=Blind)
    _flight_records: FlightRecords = field(default_factory=FlightRecords)
    _machines: Machines = field(default_factory=Machines)
    _off_plan: OffPlan = field(default_factory=OffPlan)
    _slower_than_plan: SlowerThanPlan = field(default_factory=SlowerThanPlan)

    def ingest_collectives(self, collectives: Columns, context: Context) -> None:
        """Joined collectives (`rows.COLLECTIVE`) of this job, as they finish."""
        self._late_rank.ingest_collectives(collectives, context)
        self._bandwidth_drop.ingest_collectives(collectives, context)

    def ingest_progress(self, progress: Columns, context: Context) -> None:
        """How far each rank has come (`progress.PROGRESS`), about once a second."""
        self._hang.ingest_progress(progress, context)
        self._stopped_logging.ingest_progress(progress, context)

    def update_context(self, context: Context) -> None:
        """The job as it stands, for calls of which no time is known: until it is over without what has ended."""
        self._mismatch.update_context(context)

    def ingest_calls(self, calls: Columns, context: Context) -> None:
        """Collectives as the logs name them (`mismatch.CALL`), as they are read."""
        self._mismatch.ingest_calls(calls, context)

    def ingest_facts(self, logged: Sequence[LoggedFact], context: Context) -> None:
        """Log lines other than operations, as they are read."""
        self._reported.ingest_facts(logged, context)
        self._misconfiguration.ingest_facts(logged)
        self._flight_records.ingest_records([one.fact for one in logged if isinstance(one.fact, FlightRecord)], context)
        self._machines.ingest_facts(logged)

    def update_seats(self, seats: Callable[[], GpuSeats], context: Context) -> None:
        """Which rank has which GPU, if agents read the counters of machines."""
        if self._machines.is_used:
            self._machines.update_context(context, seats())

    def ingest_steps(self, steps: Columns, context: Context) -> None:
        """Steps of the job (`step_times.STEP`), as they end."""
        self._slow_steps.ingest_steps(steps, context)
        self._slower_than_plan.ingest_steps(steps)

    def ingest_newest_lines(self, lines: Mapping[ProcessKey, int]) -> None:
        """By process: the line of its newest operation, if it has logged any."""
        self._reported.ingest_newest_lines(lines)

    def ingest_versions(self, versions: Mapping[ProcessKey, str], at_ns: int) -> None:
        """NCCL version of each process that printed its own."""
        self._misconfiguration.ingest_versions(versions, at_ns)

    def compare_settings(
        self, worlds: Callable[[], Mapping[ProcessKey, WorldOfProcess]], members: int, context: Context, at_ns: int
    ) -> None:
        """Compares the settings of processes, if something was said since; `members`: how many are known."""
        if self._misconfiguration.is_due(members, context):
            self._misconfiguration.compare(worlds(), context, at_ns)

    def compare_plan(
        self,
        described: Completed | None,
        expected: ExpectedStep | None,
        lines: Callable[[], StepLines],
        slow_step: Callable[[float], MeanStep | None],
        context: Context,
        at_ns: int,
    ) -> PlanRecord | None:
        """Holds the job against its description, if it is time to; `lines`: those of a sample of ranks.

        Its steps against what is `expected` of them; `slow_step`: where those go that take longer than so many ns.
        Gives what the last look showed; None if the description is not of this job.
        """
        if described is not None and self._off_plan.is_due(described, context, at_ns):
            self._off_plan.compare(described, lines, context, at_ns)
        self._slower_than_plan.compare(expected, self._off_plan.record, slow_step, context, at_ns)
        return self._off_plan.record if described is not None else None

    def ingest_clock_check(self, check: ClockCheck, hosts: Sequence[str], context: Context, at_ns: int) -> None:
        """The check of the last clock estimate."""
        self._clock_fault.ingest_check(check, hosts, context, at_ns)

    def ingest_clock_steps(self, clocks: Mapping[str, HostClock], context: Context) -> None:
        """The clocks of this job's hosts, with the steps that were found in them."""
        self._clock_fault.report_steps(clocks, context)

    def ingest_moved_stamps(self, moved: Mapping[str, int], context: Context, at_ns: int) -> None:
        """By host whose stamps have another offset to their arrival than before: by how many ns they are later."""
        self._clock_fault.report_moved_stamps(moved, context, at_ns)

    def ingest_visibility(self, seen: Sequence[HostVisibility], context: Context, now_ns: int) -> None:
        """Counters of all hosts of the job."""
        self._blind.ingest_visibility(seen, context, now_ns)

    def evict_communicators(self, communicators: Set[int]) -> None:
        """Forgets these communicators, which nobody will use again; findings stay."""
        self._late_rank.evict_communicators(communicators)
        self._bandwidth_drop.evict_communicators(communicators)
        self._mismatch.evict_communicators(communicators)

    @property
    def has_open_hang(self) -> bool:
        """Whether a hang is found, and open."""
        return self._hang.is_open

    @property
    def has_unclear_hang(self) -> bool:
        """Whether one is, and lost lines hide who is missing."""
        return self._hang.is_unclear

    def hang_at_end(
        self,
        counts: Columns,
        context: Context,
        moments: Callable[[], Sequence[Columns]],
        shown: Callable[[], ShownByKernels],
    ) -> Finding | None:
        """The hang that the counts (`progress.PROGRESS`) at the end of the job show, if none is found already.

        `context`: its groups that have not ended; `moments`: counts at earlier moments, none without times; `shown`:
        what kernels show where lines were lost.
        """
        enqueued = self._mismatch.enqueued()
        if (self._mismatch.with_losses and not enqueued) or (self._hang.is_open and not self._hang.is_unclear):
            return None
        return hang_at_end(counts, context, moments, enqueued, shown)

    def verdict(
        self, findings: Sequence[Finding], end: EndOfRanks, newest_lines: Mapping[ProcessKey, int], context: Context
    ) -> Verdict:
        """How the job ended, or would have if nothing more came; `findings`: its own, by now."""
        return judge_end(findings, self._reported, self._reported.lines.failures(newest_lines), end, context)

    def findings(
        self,
        now_ns: int,
        *,
        silence_at_ns: int | None = None,
        numbered: Callable[[int], NumberedCalls | None] = lambda _: None,
    ) -> list[Finding]:
        """All findings of this job, open ones first. `now_ns` is the clock of the logs' newest times.

        `silence_at_ns`: the same less the outages of the service (`SilenceClock`), if there were any. `numbered`: last
        calls of a communicator of which none waits any more to be numbered.
        """
        mismatches = self._mismatch.findings(now_ns, numbered)
        open_ones = {finding.comm_id: finding for finding in mismatches if finding.until_ns is None}
        bandwidth = self._bandwidth_drop
        slow = bandwidth.findings()
        below = self._below_limit.findings(
            bandwidth.recent, bandwidth.shapes, bandwidth.context, bandwidth.slow_communicators
        )
        hangs = self._hang.findings(
            now_ns if silence_at_ns is None else silence_at_ns,
            open_ones,
            self._mismatch.with_losses,
            self._mismatch.enqueued(),
        )
        late, groups = self._late_rank.findings(), bandwidth.context.groups.values() if bandwidth.context else ()
        causes = [*late, *slow, *hangs, *mismatches]
        slow_steps = self._slow_steps.findings(causes)
        found = by_urgency(
            [
                *hangs,
                *mismatches,
                *without_explained([*slow, *below, *late], {group.comm_id: group for group in groups}),
                *slow_steps,
                *self._slower_than_plan.findings([*causes, *below, *slow_steps]),
                *self._stopped_logging.findings(now_ns, is_stuck=self._hang.is_open),
                *self._reported.findings(now_ns, is_stuck=self._hang.is_open or bool(open_ones)),
                *self._flight_records.findings(),
                *self._machines.findings(),
                *self._misconfiguration.findings(),
                *self._off_plan.findings(),
                *self._clock_fault.findings(),
                *self._blind.findings(),
            ]
        )
        return self._machines.quoted_in(found)


_OF_STEP: Final = 0.1
"""Captures are placed wrongly by whole steps: what is a smaller part of one is none of that."""
_SILENT_NS: Final = 60_000_000_000
"""A job that has enqueued nothing for so long may be over: its end is judged, provisionally."""
_MOST_AT_ONCE: Final = 16_384
"""Collectives that detectors get in one pass; all that ended in one second stay together."""
_LONGEST_PASS_NS: Final = 5_000_000_000
"""A service that works looks more often, however much it has to do."""
_OUTAGE_REMEMBERED_NS: Final = 60_000_000_000
"""By then agents have caught up, or count as gone."""


@dataclass(slots=True)
class DetectionBacklog:
    """Measured collectives (rows.COLLECTIVE) that no detector has seen yet, in the order in which they were measured.

    A capture of many hosts is aligned process by process. While some of it is left, what is measured shows some groups
    and not yet those that explain them: detectors see it when all is measured, by time, and a bounded amount at once.
    """

    _parts: list[Columns] = field(default_factory=list[Columns])
    _since_ns: int | None = None
    """When the first of them was measured."""
    _is_released: bool = False

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def is_released(self) -> bool:
        """Whether more can be drained at once."""
        return self._is_released

    def add(self, measured: Columns, now_ns: int) -> None:
        """Takes measured collectives."""
        if len(measured):
            self._since_ns = now_ns if self._since_ns is None else self._since_ns
            self._parts.append(measured)

    def drain(self, now_ns: int, *, is_whole: bool, final: bool) -> Columns:
        """Gives detectors all that waits, or nothing while more of the same time is to be measured (not `is_whole`).

        What has waited for `JUDGED_WITHIN_NS` is given anyway, and everything when `final`.
        """
        waited_ns = 0 if self._since_ns is None else now_ns - self._since_ns
        self._is_released = is_whole or final or self._is_released or waited_ns >= JUDGED_WITHIN_NS
        if not self._is_released:
            return np.empty(0, rows.COLLECTIVE)
        drained = row_ops.concat([np.empty(0, rows.COLLECTIVE), *self._parts])
        self._parts = []
        if not final and len(drained) > _MOST_AT_ONCE:
            seconds = drained["end_true_ns"] // SECOND_NS
            is_early = seconds <= np.partition(seconds, _MOST_AT_ONCE)[_MOST_AT_ONCE]
            self._parts = [left] if len(left := row_ops.filter_rows(drained, ~is_early)) else []
            drained = row_ops.filter_rows(drained, is_early)
        if not self._parts:
            self._since_ns, self._is_released = None, False
        return drained


class SilenceClock:
    """The clock by which silences are measured: it stands still while the service itself did.

    A service that was stopped, or whose machine was (a suspended virtual machine, a node that swaps), has received
    nothing meanwhile. What was written in that time is still on its way when it resumes, and is no silence of the job.
    """

    def __init__(self) -> None:
        self._last_pass_ns: int | None = None
        self._outages: list[tuple[int, int]] = []
        """When each ended, and how long it was."""

    def time_at(self, now_ns: int) -> int:
        """The time of this pass less the outages within a minute."""
        last_ns, self._last_pass_ns = self._last_pass_ns, now_ns
        if last_ns is not None and now_ns - last_ns > _LONGEST_PASS_NS:
            self._outages.append((now_ns, now_ns - last_ns))
        self._outages = [each for each in self._outages if each[0] > now_ns - _OUTAGE_REMEMBERED_NS]
        return now_ns - sum(length_ns for _, length_ns in self._outages)


@dataclass(slots=True)
class _Job:
    """The detectors of one job, and their inputs that must be remembered."""

    detectors: Detectors
    progress: ProgressTable = field(default_factory=ProgressTable)
    has_calls: bool = False
    """Whether the detectors have seen calls, and with the first ones their groups."""
    steps: list[Columns] = field(default_factory=list[Columns])
    """Steps (`step_times.STEP`) since the last pass."""
    findings: list[Finding] = field(default_factory=list[Finding])
    """Those of the last pass."""
    versions_seen: int = 0
    """How many processes had said their NCCL version when the detectors were given them."""
    end: tuple[tuple[int, ...], EndOfRanks] | None = None
    """Where its ranks stand, once it is silent, and what that was computed from."""
    hang: tuple[tuple[int, ...], Finding | None] | None = None
    """The hang that its last counts show while lost lines hide it, and what that was computed from."""
    has_lines_without_stamps: bool = False
    fails_since_ns: int | None = None
    """Since when every pass has failed by an internal error."""
    lost_time: LostTimeHistory = field(default_factory=LostTimeHistory)

    def failure(self, name: str) -> tuple[Finding, ...]:
        """That the detectors fail, if they do."""
        return () if self.fails_since_ns is None else (internal_error_finding(name, self.fails_since_ns),)


def _new_job(make_detectors: Callable[[], Detectors]) -> _Job:
    return _Job(make_detectors())


@dataclass(frozen=True, slots=True)
class _UnplacedFact:
    """A fact of which it is not known yet which rank logged it."""

    fact: Fact
    source: str
    at_ns: int
    """When an agent saw it; NO_TIME_NS if not known."""


class Detection:
    """Runs every detector of every job."""

    def __init__(
        self,
        known: Store,
        periods: Periods | None = None,
        make_detectors: Callable[[], Detectors] = Detectors,
        errors: InternalErrors | None = None,
        retention: Retention | None = None,
    ) -> None:
        """`periods` says where steps end; without it no pause counts as one between steps. If the detectors of a job
        fail and `errors` are isolated, the job keeps its last findings. Jobs of `retention` are not judged.
        """
        self._store = known
        self._errors = errors or InternalErrors()
        self._retention = Retention() if retention is None else retention
        self._jobs: defaultdict[str, _Job] = defaultdict(partial(_new_job, make_detectors))
        self._groups = GroupsOfStore(known)
        self._resting = RestingRanks(known, periods)
        self._hosts = HostCounters(known)
        self._facts: defaultdict[str, list[_UnplacedFact]] = defaultdict(list[_UnplacedFact])
        """By job: those since the last pass."""
        self._newest_log_ns = NO_TIME_NS
        self._newest_lines: dict[ProcessKey, int] = {}
        """By process: the line of its newest operation."""
        self._silence_clock = SilenceClock()

    def forget_groups(self, communicators: Iterable[int]) -> None:
        """Names, ranks, limits or the use of these communicators changed."""
        self._groups.forget(communicators)

    def evict(self, gone: Evicted) -> None:
        """Forgets jobs and communicators that are gone, and the findings of those jobs."""
        for job in gone.jobs:
            self._jobs.pop(job, None)
            self._store.verdicts.pop(job, None)
            self._store.plans.pop(job, None)
        self._groups.forget(gone.communicators)
        for job in {self._store.communicators[index].job for index in gone.communicators} & self._jobs.keys():
            self._jobs[job].detectors.evict_communicators(gone.communicators)

    def ingest_operations(self, operations: Columns) -> None:
        """Takes new operations (rows.PLACED).

        Where ranks stand, and whether they call alike, is judged by logs: a profile begins and ends in midstream.
        """
        self._hosts.count_operations(operations["process"])
        operations = row_ops.filter_rows(operations, ~self._are_profiled(operations["source"]))
        columns = (operations[name] for name in ("process", "logged_at_ns", "observed_at_ns"))
        times = self._store.stamp_offsets.times(*columns)
        self._newest_log_ns = max(self._newest_log_ns, int(times.max(initial=NO_TIME_NS)))
        for process in distinct_values(operations["process"][operations["logged_at_ns"] == NO_TIME_NS]):
            self._jobs[self._store.process_job[process]].has_lines_without_stamps = True
        self._update_progress(operations, times)
        self._resting.ingest_operations(operations, times)
        self._update_newest_lines(operations)
        self._ingest_calls(operations, times)

    def ingest_steps(self, steps: Mapping[str, Columns]) -> None:
        """Takes steps (`step_times.STEP`) of each job, as they end."""
        for name, ended in steps.items():
            self._jobs[name].steps.append(ended)

    def ingest_facts(self, facts: Iterable[Fact], *, job: str, source: str, observed_at_ns: int | None) -> None:
        """Takes what a log says beside operations."""
        self._facts[job] += [_UnplacedFact(fact, source, observed_at_ns or NO_TIME_NS) for fact in facts]

    def count_decided(self, operations: Ids) -> None:
        """Counts operations whose match was decided."""
        self._hosts.count_decided(operations)

    def process_collectives(
        self,
        measured: Columns,
        now_ns: int,
        clocks: Clocks,
        *,
        steps_ns: Mapping[str, int],
        silent_hosts: frozenset[str],
        thresholds: Mapping[str, float],
        newest: Callable[[int], NewestCollectives | None] = lambda _: None,
        seen_hangs: Sequence[Finding] = (),
        final: bool,
    ) -> None:
        """Hands the detectors what was measured, by time, and renews `Store.findings`.

        Offline (`final`) hours may come at once: detectors get them a second at a time, as they would have live, and
        silence after the newest line means nothing. `steps_ns`: how long a step of each job takes, where that is known.
        `thresholds`: what is not as by default (`settings.settings_of`). `newest`: the last collectives of a
        communicator, once they are numbered. `seen_hangs`: what a service saw of a job that is over
        (`PipelineSettings`).
        """
        at_ns = self._newest_time(measured) if final else now_ns
        silence_at_ns = at_ns if final else self._silence_clock.time_at(now_ns)
        moved: defaultdict[str, dict[str, int]] = defaultdict(dict[str, int])
        for process, change in self._store.stamp_offsets.drain_changes().items():
            moved[self._store.process_job[process]][self._store.processes[process].host] = change

        def numbered(communicator: int) -> NumberedCalls | None:
            found = newest(communicator)
            return None if found is None else numbered_calls(self._store, found)

        active = {*self._store.process_job, *self._facts} - self._retention.jobs
        lossy = {name for (name, _), amount in self._store.numbers_healed.items() if amount}
        have_ended = cache(self._have_ended)
        measured_of = self._measured_by_job(measured)
        for name in sorted({*active, *self._jobs}):
            job = self._jobs[name]
            with self._errors.isolated("detect", f"job {name}"):
                context = None
                if name in active:
                    context = self._context(name, clocks, steps_ns.get(name), silent_hosts, is_over=final)
                    context = replace(
                        context,
                        settings=settings_of(thresholds, name),
                        has_lines_without_stamps=job.has_lines_without_stamps,
                        has_lost_lines=name in lossy,
                    )
                    mine = row_ops.filter_rows(measured, np.isin(measured["communicator"], list(context.groups)))
                    self._ingest(job, context, mine, at_ns, clocks, final=final)
                    job.detectors.ingest_moved_stamps(moved[name], context, at_ns)
                    if name in measured_of:
                        job.lost_time.ingest(measured_of[name], at_ns)
                    job.lost_time.process(self._store, name, at_ns, steps_ns.get(name), final=final)
                job.findings = job.detectors.findings(at_ns, silence_at_ns=silence_at_ns, numbered=numbered)
                if context is not None:
                    self._judge_end(job, context, silence_at_ns, have_ended, seen_hangs)
                job.fails_since_ns = None
                continue
            job.fails_since_ns = job.fails_since_ns or at_ns
        self._store.findings = by_urgency(
            finding for name, job in self._jobs.items() for finding in (*job.findings, *job.failure(name))
        )

    def _measured_by_job(self, measured: Columns) -> dict[str, Columns]:
        """Measured collectives of each job."""
        if not len(measured):
            return {}
        jobs = {job: place for place, job in enumerate(dict.fromkeys(self._store.process_job))}
        job_of = np.array([jobs.get(each.job, NO_NUMBER) for each in self._store.communicators], np.int64)
        names = list(jobs)
        found = group_by(job_of[measured["communicator"]])
        return {names[job]: row_ops.take(measured, mine) for job, mine in found if job >= 0}

    def _judge_end(
        self,
        job: _Job,
        context: Context,
        silence_at_ns: int,
        have_ended: Callable[[], Mapping[str, Mapping[int, bool]]],
        seen_hangs: Sequence[Finding],
    ) -> None:
        """Says how a job ended that is over, or would have if nothing more came of one that is silent."""
        counts = job.progress.rows
        hang = self._hang_by_counts(job, context)
        if context.is_over:
            seen = next((each for each in seen_hangs if each.job == context.job), None)
            hang = hang or (None if job.detectors.has_open_hang else seen)
        if hang is not None:
            others = (each for each in job.findings if each.kind is not FindingKind.HANG or each.until_ns is not None)
            job.findings = by_urgency([*others, hang])
        is_stuck = any(each.kind is FindingKind.HANG and each.until_ns is None for each in job.findings)
        newest_ns = int(counts["last_ns"].max(initial=NO_TIME_NS))
        is_silent = newest_ns != NO_TIME_NS and silence_at_ns - newest_ns > _SILENT_NS
        if not (context.is_over or is_stuck or is_silent) or not self._store.has_logs:
            self._store.verdicts.pop(context.job, None)
            return
        ended = have_ended().get(context.job, {})
        was_silent = context.job in self._store.verdicts or (ended and all(ended.values()))
        if self._store.stamp_offsets.is_live and not (is_stuck or is_silent or was_silent):
            return  # the service stops, and the job goes on
        key = newest_ns, len(counts), sum(ended.values()), len(context.groups), context.is_over
        if job.end is None or job.end[0] != key:
            job.end = key, end_of_ranks(counts, context, ended)
        self._store.verdicts[context.job] = job.detectors.verdict(job.findings, job.end[1], self._newest_lines, context)

    def _hang_by_counts(self, job: _Job, context: Context) -> Finding | None:
        """The hang that the last counts show of a job that is over, or stands still while lines were lost."""
        if not context.is_over and not job.detectors.has_unclear_hang:
            job.hang = None
            return None
        counts, operations = job.progress.rows, self._store.operations
        undecided = int(np.count_nonzero(operations.rows["match"] == rows.Match.PENDING))
        key = (int(counts["last_ns"].max(initial=NO_TIME_NS)), operations.next_id, undecided)
        if job.hang is None or job.hang[0] != key or context.is_over:
            living = self._groups.without_ended(context)
            shown = cache(partial(shown_by_kernels, self._store, context.job))

            def moments() -> list[Columns]:
                return earlier_counts(self._store, context.job, are_ends_known=shown().are_ends_known)

            job.hang = key, job.detectors.hang_at_end(counts, living, moments, shown)
        return job.hang[1]

    def _have_ended(self) -> dict[str, dict[int, bool]]:
        """By job and global rank: whether it ended a communicator."""
        ended: defaultdict[str, dict[int, bool]] = defaultdict(dict[int, bool])
        for member in self._store.members:
            if member.global_rank is not None:
                ranks = ended[self._store.process_job[member.process]]
                ranks[member.global_rank] = ranks.get(member.global_rank, False) or not member.is_alive
        return ended

    def _ingest(
        self, job: _Job, context: Context, measured: Columns, now_ns: int, clocks: Clocks, *, final: bool
    ) -> None:
        """Hands a job's detectors all that is new."""
        detectors = job.detectors
        for part in _by_second(measured):
            detectors.ingest_collectives(part, context)
            if final:
                detectors.findings(int(part["end_true_ns"].max()))
        living = self._groups.without_ended(context)
        counts = job.progress.rows
        timed = row_ops.filter_rows(counts, counts["last_ns"] != NO_TIME_NS)
        if len(timed):
            detectors.ingest_progress(timed, living)
        detectors.update_context(context if context.is_over else living)
        for steps in (*job.steps, np.empty(0, STEP)):
            detectors.ingest_steps(steps, context)
        job.steps = []
        facts = self._facts.pop(context.job, [])
        if facts:
            detectors.ingest_facts(list(self._with_ranks(context.job, facts, now_ns)), context)
        detectors.update_seats(lambda: self._seats(context.job), context)
        detectors.ingest_newest_lines(self._newest_lines)
        if len(self._store.process_version) != job.versions_seen:
            job.versions_seen = len(self._store.process_version)
            detectors.ingest_versions(self._versions(context.job), now_ns)
        detectors.compare_settings(lambda: self._worlds(context), len(self._store.members), context, now_ns)
        self._compare_plan(detectors, context, now_ns)
        check = clocks.check(context.job)
        if check is not None:
            detectors.ingest_clock_check(check, clocks.host_names(), context, now_ns)
        told = self._store.clocks.get(context.job)
        own_clocks = {} if told is None else dict(sorted(told.hosts.items()))
        if context.has_lines_without_stamps:
            least_ns = round(_OF_STEP * context.step_ns) if context.step_ns is not None else 0
            own_clocks = {host: self._told_by_captures(host, clock, least_ns) for host, clock in own_clocks.items()}
        detectors.ingest_clock_steps(own_clocks, context)
        known = zip(self._store.processes, self._store.process_job, strict=True)
        hosts = sorted({process.host for process, name in known if name == context.job})
        detectors.ingest_visibility(self._hosts.visibility(hosts), context, now_ns)

    def _told_by_captures(self, host: str, clock: HostClock, least_ns: int) -> HostClock:
        """A clock with those of its steps that no capture explains that was placed elsewhere: of less than `least_ns`,
        or of which one capture has the second before and the one after.
        """
        spans = [
            (seen.start_ns + SECOND_NS, seen.end_ns - SECOND_NS)
            for _, seen in (self._store.captures if clock.steps else ())
            if seen.host == host
        ]
        chosen = [
            (at_ns, by_ns)
            for at_ns, by_ns in zip(clock.steps, clock.step_sizes_ns, strict=True)
            if 0 < abs(by_ns) < least_ns or any(begin < at_ns < end for begin, end in spans)
        ]
        steps, sizes_ns = tuple(at_ns for at_ns, _ in chosen), tuple(by_ns for _, by_ns in chosen)
        return replace(clock, steps=steps, step_sizes_ns=sizes_ns)

    def _compare_plan(self, detectors: Detectors, context: Context, now_ns: int) -> None:
        """Holds a job against its description, now and then."""
        known = self._store

        def lines() -> StepLines:
            groups = context.groups.values()
            seated = [(group.global_ranks, group.hosts) for group in groups]
            lossy = {rank for ranks, hosts in seated for rank, host in zip(ranks, hosts, strict=True)
                     if not context.is_fully_observed(host)}  # fmt: skip
            found = newest_step_lines(known, context.job, sample_of_ranks([ranks for ranks, _ in seated]))
            found.gaps |= {(rank, iteration) for rank, iteration in found.seen if rank in lossy}
            return found

        slow_step = partial(mean_step_beyond, known, context.job)
        record = detectors.compare_plan(known.description, known.expected_step, lines, slow_step, context, now_ns)
        if record is not None:
            known.plans[context.job] = record
        else:
            known.plans.pop(context.job, None)

    def _with_ranks(self, job: str, facts: list[_UnplacedFact], now_ns: int) -> Iterator[LoggedFact]:
        ranks: dict[ProcessKey, set[int | None]] = defaultdict(set[int | None])
        processes: dict[ProcessKey, int] = {}
        keys: dict[int, set[ProcessKey]] = defaultdict(set[ProcessKey])
        """By pid, and (negative) by global rank less one."""
        for member in self._store.members:
            process = self._store.processes[member.process]
            key = process.host, process.pid
            ranks[key].add(member.global_rank)
            processes[key] = member.process
            if self._store.process_job[member.process] == job:
                keys[process.pid].add(key)
                keys[-1 - (member.global_rank or 0)] |= set() if member.global_rank is None else {key}
        for each in facts:
            fact = each.fact
            key = (fact.host or "", fact.pid or 0)
            said = fact.global_rank if isinstance(fact, ProgramFailure) else None
            if not fact.host and (said is not None or fact.pid):
                alike = keys.get(fact.pid or -1 - (said or 0), set())
                key = next(iter(alike)) if len(alike) == 1 else key
            own = ranks.get(key, set()) if key[0] and key[1] else set[int | None]()
            rank = said if said is not None else next(iter(own)) if len(own) == 1 else None
            at_ns = self._store.stamp_offsets.time_of(processes.get(key), fact.logged_at_ns or NO_TIME_NS, each.at_ns)
            log = self._store.process_source.get(processes.get(key, NO_NUMBER))
            yield LoggedFact(
                fact=fact,
                source=each.source,
                rank=rank,
                at_ns=now_ns if at_ns == NO_TIME_NS else at_ns,
                is_behind_operations=self._newest_lines.get(key, 0) > 0,
                has_time=at_ns != NO_TIME_NS,
                process=key if log is not None and self._store.sources[log].source.name == each.source else None,
            )

    def _seats(self, job: str) -> dict[tuple[str, int], int]:
        """Global rank by host and PCI address of the GPU."""
        known = self._store
        return {
            (known.processes[member.process].host, member.bus_id): member.global_rank
            for member in known.members
            if member.bus_id is not None and member.global_rank is not None and known.process_job[member.process] == job
        }

    def _versions(self, job: str) -> dict[ProcessKey, str]:
        """NCCL version of each process of a job that printed its own."""
        known = self._store
        own = {index: version for index, version in known.process_version.items() if known.process_job[index] == job}
        return {
            (process.host, process.pid): version
            for index, version in own.items()
            for process in (known.processes[index],)
        }

    def _worlds(self, context: Context) -> dict[ProcessKey, WorldOfProcess]:
        """Largest communicator of each process of a job, and its global rank."""
        known, worlds, sizes = self._store, dict[ProcessKey, WorldOfProcess](), dict[ProcessKey, int]()
        for member in known.members:
            size = known.communicators[member.communicator].size
            process = known.processes[member.process]
            key = process.host, process.pid
            if member.communicator in context.groups and size > sizes.get(key, 0):
                sizes[key] = size
                worlds[key] = WorldOfProcess(member.communicator, member.global_rank)
        return worlds

    def _context(
        self, job: str, clocks: Clocks, step_ns: int | None, silent_hosts: frozenset[str], *, is_over: bool
    ) -> Context:
        processes = {process for process, name in enumerate(self._store.process_job) if name == job}
        resting, knows_steps = self._resting.of_processes(processes)
        return Context(
            job=job,
            groups={
                communicator.index: self._groups.group_of(communicator)
                for communicator in self._store.listed_communicators()
                if communicator.job == job and communicator.size > 1
                if communicator.index not in self._retention.communicators
            },
            clock_is_trusted=clocks.is_trusted(job),
            step_ns=step_ns,
            silent_hosts=silent_hosts,
            lossy_hosts=self._hosts.lossy_hosts(),
            resting_ranks=resting,
            knows_steps=knows_steps,
            is_over=is_over,
        )

    def _are_profiled(self, sources: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether each of these sources is a trace of the PyTorch profiler."""
        asked, inverse = distinct(sources)
        kinds = [self._store.sources[source].source.kind for source in asked.tolist()]
        return np.array([kind is SourceKind.KINETO for kind in kinds], np.bool_)[inverse]

    def _update_progress(self, operations: Columns, times: NDArray[np.int64]) -> None:
        counts, processes = progress_of_operations(self._store, operations, times)
        for job, mine in self._by_job(processes):
            self._jobs[job].progress.update(row_ops.take(counts, mine))

    def _update_newest_lines(self, operations: Columns) -> None:
        found, inverse = distinct(operations["process"])
        newest = np.zeros(len(found), np.int64)
        np.maximum.at(newest, inverse, operations["line"])
        for process, line in zip(found.tolist(), newest.tolist(), strict=True):
            known = self._store.processes[process]
            key = (known.host, known.pid)
            self._newest_lines[key] = max(line, self._newest_lines.get(key, 0))

    def _ingest_calls(self, operations: Columns, times: NDArray[np.int64]) -> None:
        collective = operations["coll_seq"] != NO_NUMBER
        operations, times = row_ops.filter_rows(operations, collective), times[collective]
        calls = calls_of_operations(self._store, operations, times)
        for name, mine in self._by_job(operations["process"]):
            ranked = row_ops.take(calls, mine[calls["rank"][mine] >= 0])
            job = self._jobs[name]
            job.detectors.ingest_calls(ranked, Context(job=name) if job.has_calls else self._minimal(name, ranked))
            job.has_calls = True

    def _by_job(self, processes: NDArray[np.int32]) -> list[tuple[str, NDArray[np.intp]]]:
        """The rows of each job, jobs by name."""
        found, inverse = distinct(processes)
        names = [self._store.process_job[process] for process in found.tolist()]
        jobs, of_process = np.unique(names, return_inverse=True)
        return [(str(jobs[job]), mine) for job, mine in group_by(of_process[inverse])] if len(found) else []

    def _minimal(self, job: str, calls: Columns) -> Context:
        """Groups of just these calls: enough to compare them with those of other ranks."""
        known = self._store
        return Context(
            job=job,
            groups={
                index: group_from_communicator(known, known.communicators[index])
                for index in distinct_values(calls["communicator"])
            },
            lossy_hosts=self._hosts.lossy_hosts(),
        )

    def _newest_time(self, measured: Columns) -> int:
        if self._store.stamp_offsets.is_live:
            return max(self._newest_log_ns, 0)
        newest = int(measured["end_true_ns"].max(initial=NO_TIME_NS))
        return max(newest, self._newest_log_ns, self._store.captures.newest_ns, 0)


def _by_second(measured: Columns) -> list[Columns]:
    """Collectives in order of their end, a second at a time; those without a time are left out."""
    timed = np.flatnonzero(measured["end_true_ns"] != NO_TIME_NS)
    timed = timed[np.argsort(measured["end_true_ns"][timed], kind="stable")]
    cuts = np.flatnonzero(np.diff(measured["end_true_ns"][timed] // SECOND_NS)) + 1
    return [row_ops.take(measured, part) for part in np.split(timed, cuts) if len(part)]
