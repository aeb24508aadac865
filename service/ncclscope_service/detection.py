"""All detectors over a store, job by job; their findings become `Store.findings`.

What a detector needs is said in its own module; here it is gathered from the store: progress and calls from the
logs as they arrive, joined collectives as they are measured, the clocks' check, and how well each host is seen.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.clocks import Clocks
from ncclscope_service.departed import Departed, Gone
from ncclscope_service.detect.blind import HostSight, service_is_blind
from ncclscope_service.detect.board import PROGRESS
from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.detectors import Detectors
from ncclscope_service.detect.findings import ordered
from ncclscope_service.detect.mismatch import CALL
from ncclscope_service.detect.reported import Said
from ncclscope_service.detect.rests import Rests
from ncclscope_service.detect.watched import Watched
from ncclscope_service.distinct import distinct, distinct_together, groups, values_of
from ncclscope_service.mistakes import Mistakes
from ncclscope_service.periods import Periods
from ncclscope_service.progress import Progress
from ncclscope_service.rows import Communicator, Finding, Match
from ncclscope_service.source_places import hosts_of
from ncclscope_service.store import Ids, Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.facts import Fact
from ncclscope_wire.records import SourceKind
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

_SEND: Final = OPERATION_CODES["Send"]
_RECV: Final = OPERATION_CODES["Recv"]
_STRIDE_NS: Final = 1_000_000_000


@dataclass(slots=True)
class _Job:
    """The detectors of one job, and what they are fed that must be remembered."""

    detectors: Detectors
    progress: Progress = field(default_factory=Progress)
    """Operations enqueued so far, and when the newest was."""
    knows_calls: bool = False
    """Whether the detectors were told of calls, and with the first ones of their groups."""
    findings: list[Finding] = field(default_factory=list[Finding])
    """Theirs, when they were last asked."""
    fails_since_ns: int | None = None
    """Since when each look has failed by a mistake of ours."""


@dataclass(slots=True)
class _Sight:
    """Counters of one host."""

    operations: int = 0
    covered: int = 0
    matched: int = 0


class Detection:
    """Runs every detector of every job."""

    def __init__(
        self,
        known: Store,
        periods: Periods | None = None,
        make_detectors: Callable[[], Detectors] = Detectors,
        mistakes: Mistakes | None = None,
        departed: Departed | None = None,
    ) -> None:
        """`periods` tells where steps end; without it no pause is held for one between steps. Where `mistakes` are
        borne, a job whose detectors fail has the findings that it had. Jobs that are `departed` are not judged.
        """
        self._store = known
        self._mistakes = mistakes or Mistakes()
        self._periods = periods
        self._rests = Rests()
        self._process_of_lane: dict[int, int] = {}
        """Of each rank that `_rests` knows by its number."""
        self._jobs: defaultdict[str, _Job] = defaultdict(lambda: _Job(make_detectors()))
        self._sights: defaultdict[str, _Sight] = defaultdict(_Sight)
        self._groups: dict[int, tuple[int, Group]] = {}
        """By communicator: how many of its ranks were known, and what was known of it."""
        self._departed = Departed() if departed is None else departed
        self._newest_log_ns = NO_TIME_NS
        self._watched = Watched()
        self._facts: defaultdict[str, list[tuple[Fact, str, int]]] = defaultdict(list[tuple[Fact, str, int]])
        """By job: (fact, name of its log, when) since the last `advance`."""

    def regroup(self, communicators: Iterable[int]) -> None:
        """Names, ranks, limits or the use of these communicators changed."""
        for index in communicators:
            self._groups.pop(index, None)

    def leave(self, gone: Gone) -> None:
        """Lets go of what was learnt of jobs and communicators, and of the findings of those jobs."""
        for job in gone.jobs:
            self._jobs.pop(job, None)
        self.regroup(gone.communicators)
        for job in {self._store.communicators[index].job for index in gone.communicators} & self._jobs.keys():
            self._jobs[job].detectors.leave(gone.communicators)

    def count_logged(self, rows: Columns) -> None:
        """New operations (rows.PLACED)."""
        processes, inverse = distinct(rows["process"])
        for process, amount in zip(processes.tolist(), np.bincount(inverse).tolist(), strict=True):
            self._sights[self._store.processes[process].host].operations += amount
        times = np.where(rows["logged_at_ns"] == NO_TIME_NS, rows["observed_at_ns"], rows["logged_at_ns"])
        timed = times != NO_TIME_NS
        self._newest_log_ns = max(self._newest_log_ns, int(times.max(initial=NO_TIME_NS)))
        self._note_progress(whole_rows.kept(rows, timed), times[timed])
        self._note_rests(rows, times)
        self._feed_calls(rows, times)

    def count_facts(self, facts: Iterable[Fact], *, job: str, source: str, observed_at_ns: int | None) -> None:
        """What a log says beside operations."""
        self._facts[job] += [(fact, source, fact.logged_at_ns or observed_at_ns or NO_TIME_NS) for fact in facts]

    def count_decided(self, operations: Ids) -> None:
        """Operations whose match was decided."""
        rows = self._store.operations.take(operations, "process", "match")
        processes, inverse = distinct(rows["process"])
        is_matched = rows["match"] == Match.MATCHED
        is_covered = is_matched | (rows["match"] == Match.UNMATCHED)
        matched, covered = (np.bincount(inverse, which, len(processes)) for which in (is_matched, is_covered))
        for process, *amounts in zip(processes.tolist(), matched.tolist(), covered.tolist(), strict=True):
            sight = self._sights[self._store.processes[process].host]
            sight.matched += int(amounts[0])
            sight.covered += int(amounts[1])

    def advance(
        self,
        measured: Columns,
        now_ns: int,
        clocks: Clocks,
        *,
        step_ns: int | None,
        silent_hosts: frozenset[str],
        final: bool,
    ) -> None:
        """Feeds what was measured since, by time, and renews `Store.findings`.

        Offline (`final`) hours may come at once: they are fed a second at a time, as they would have come live, and
        silence after the newest line means nothing.
        """
        at_ns = self._newest_time(measured) if final else now_ns
        watched_ns = at_ns if final else self._watched.at(now_ns, self._newest_log_ns)
        fed = {*self._store.process_job, *self._facts} - self._departed.jobs
        for name in sorted({*fed, *self._jobs}):
            job = self._jobs[name]
            try:
                if name in fed:
                    context = replace(self._context(name, clocks, step_ns, silent_hosts), is_over=final)
                    mine = whole_rows.kept(measured, np.isin(measured["communicator"], list(context.groups)))
                    self._feed_job(job, context, mine, at_ns, clocks, final=final)
                job.findings, job.fails_since_ns = job.detectors.findings(at_ns, watched_ns=watched_ns), None
            except Exception as error:
                self._mistakes.bear(error, "detect", f"job {name}")
                job.fails_since_ns = job.fails_since_ns or at_ns
        self._store.findings = ordered(
            finding
            for name, job in self._jobs.items()
            for finding in (*job.findings, *_blind(name, job.fails_since_ns))
        )

    def _feed_job(
        self, job: _Job, context: Context, measured: Columns, now_ns: int, clocks: Clocks, *, final: bool
    ) -> None:
        for part in _by_second(measured):
            job.detectors.feed_collectives(part, context)
            if final:
                job.detectors.findings(int(part["end_true_ns"].max()))
        if len(job.progress):
            job.detectors.feed_progress(job.progress.rows, self._of_the_living(context))
        said = self._facts.pop(context.job, [])
        if said:
            job.detectors.feed_facts(self._said(said, now_ns), context)
        check = clocks.check()
        if check is not None:
            job.detectors.feed_clock(check, clocks.host_names(), context, now_ns)
        hosts = sorted(self._hosts_of(context.job))
        known = {host: self._store.clocks[host] for host in hosts if host in self._store.clocks}
        job.detectors.feed_clock_steps(known, context)
        gaps, torn = self._gaps_by_host(), self._torn_by_host()
        for host in hosts:
            job.detectors.feed_sight(self._sight(host, gaps, torn), context, now_ns)

    def _said(self, facts: list[tuple[Fact, str, int]], now_ns: int) -> Iterator[Said]:
        ranks: dict[tuple[str, int], set[int | None]] = defaultdict(set[int | None])
        for of in self._store.members:
            process = self._store.processes[of.process]
            ranks[process.host, process.pid].add(of.global_rank)
        for fact, source, at_ns in facts:
            own = ranks.get((fact.host, fact.pid), set()) if fact.host and fact.pid else set[int | None]()
            rank = next(iter(own)) if len(own) == 1 else None
            yield Said(fact, source, rank, now_ns if at_ns == NO_TIME_NS else at_ns)

    def _context(self, job: str, clocks: Clocks, step_ns: int | None, silent_hosts: frozenset[str]) -> Context:
        known = self._store
        processes = {process for process, its in enumerate(known.process_job) if its == job}
        resting, knows_steps = self._resting_ranks(processes)
        return Context(
            job=job,
            groups={
                communicator.index: self._known_group(communicator)
                for communicator in known.listed_communicators()
                if communicator.job == job and communicator.size > 1
                if communicator.index not in self._departed.communicators
            },
            clock_sigma_ns=clocks.worst_sigma_ns(),
            clock_is_trusted=clocks.is_trusted(),
            step_ns=step_ns,
            silent_hosts=silent_hosts,
            lossy_hosts=self._lossy_hosts(),
            resting_ranks=resting,
            knows_steps=knows_steps,
        )

    def _known_group(self, communicator: Communicator) -> Group:
        amount, known = len(communicator.members or {}), self._groups.get(communicator.index)
        if known is None or known[0] != amount:
            known = self._groups[communicator.index] = (amount, self._group(communicator))
        return known[1]

    def _group(self, communicator: Communicator) -> Group:
        ranks = [NO_NUMBER] * communicator.size
        hosts = [""] * communicator.size
        for rank, member in (communicator.members or {}).items():
            if 0 <= rank < communicator.size:
                of = self._store.members[member]
                ranks[rank] = NO_NUMBER if of.global_rank is None else of.global_rank
                hosts[rank] = self._store.processes[of.process].host
        return Group(
            comm_id=communicator.comm_id,
            parallelism=communicator.parallelism,
            global_ranks=tuple(ranks),
            hosts=tuple(hosts),
            limit=None if communicator.bottleneck is None else communicator.bottleneck.bytes_per_second,
            limit_name="" if communicator.bottleneck is None else communicator.bottleneck.told,
        )

    def _of_the_living(self, context: Context) -> Context:
        """The same, without communicators that ended: nothing more is expected of them."""
        ended = {of.index for of in self._store.members if not of.is_alive}
        if not ended:
            return context
        communicators = self._store.communicators
        living = {
            index: group
            for index, group in context.groups.items()
            if ended.isdisjoint((communicators[index].members or {}).values())
        }
        return replace(context, groups=living)

    def _hosts_of(self, job: str) -> set[str]:
        known = self._store
        return {of.host for of, its in zip(known.processes, known.process_job, strict=True) if its == job}

    def _lossy_hosts(self) -> frozenset[str]:
        """Hosts of whose operations some may be unknown."""
        return frozenset(self._gaps_by_host(SourceKind.NCCL_LOG))

    def _gaps_by_host(self, *kinds: SourceKind) -> Counter[str]:
        """Gaps in what came of each host, of sources of these kinds or of all."""
        known = self._store
        gaps: Counter[str] = Counter()
        for (kind, host), amount in known.left.gaps_of_hosts.items():
            if not kinds or kind in kinds:
                gaps[host] += amount
        for source, found in known.gaps.items():
            if found and (not kinds or known.sources[source].source.kind in kinds):
                for host in hosts_of(known, source):
                    gaps[host] += len(found)
        return gaps

    def _sight(self, host: str, gaps: Counter[str], torn: Counter[str]) -> HostSight:
        seen = self._sights[host]
        return HostSight(
            host=host,
            operations=seen.operations,
            torn_lines=torn[host],
            gaps=gaps[host],
            covered=seen.covered,
            matched=seen.matched,
        )

    def _torn_by_host(self) -> Counter[str]:
        """Torn lines in the logs of each host; a log of several processes counts once."""
        torn = self._store.left.torn_lines.copy()
        for source, lines in self._store.torn_lines.items():
            for host in self._store.source_hosts.get(source, ()) if lines else ():
                torn[host] += lines
        return torn

    def _note_rests(self, rows: Columns, times: NDArray[np.int64]) -> None:
        if self._periods is None:
            return
        steps = self._periods.steps(rows["template"])
        self._rests.feed(steps.lanes, steps.phases, steps.marks, times[steps.operations])
        begins = np.flatnonzero(np.diff(steps.lanes, prepend=NO_NUMBER))
        processes = rows["process"][steps.operations[begins]]
        self._process_of_lane.update(zip(steps.lanes[begins].tolist(), processes.tolist(), strict=True))

    def _resting_ranks(self, processes: set[int]) -> tuple[frozenset[int], bool]:
        """Global ranks that stand between two steps, and whether that is known of all of these processes."""
        lanes, is_known, is_resting = self._rests.lanes()
        of_lane = [self._process_of_lane[lane] for lane in lanes.tolist()]
        unknown = {process for process, known in zip(of_lane, is_known.tolist(), strict=True) if not known}
        moving = {process for process, rests in zip(of_lane, is_resting.tolist(), strict=True) if not rests}
        resting = (processes & set(of_lane)) - moving
        known = processes <= set(of_lane) - unknown
        ranks = {of.global_rank for of in self._store.members if of.process in resting and of.global_rank is not None}
        return frozenset(ranks), known and bool(processes)

    def _note_progress(self, rows: Columns, times: NDArray[np.int64]) -> None:
        templates = self._store.templates_of(rows, "op", "root")
        collective = rows["coll_seq"] != NO_NUMBER
        (members, ops, peers), inverse = distinct_together(
            rows["member"],
            np.where(collective, 0, templates["op"]),
            np.where(collective, NO_NUMBER, templates["root"]),
        )
        of = [self._store.members[member] for member in members.tolist()]
        own = np.asarray([NO_NUMBER if each.rank is None else each.rank for each in of], np.int32)
        counts = np.zeros(len(members), PROGRESS)
        counts["communicator"] = [each.communicator for each in of]
        counts["rank"] = own
        counts["sender"] = np.where(peers == NO_NUMBER, NO_NUMBER, np.where(ops == _SEND, own, peers))
        counts["receiver"] = np.where(peers == NO_NUMBER, NO_NUMBER, np.where(ops == _SEND, peers, own))
        operations = np.zeros(len(members), np.int64)
        np.maximum.at(operations, inverse, np.where(collective, rows["coll_seq"], rows["pair_seq"]) + 1)
        newest = np.full(len(members), NO_TIME_NS, np.int64)
        np.maximum.at(newest, inverse, times)
        counts["operations"], counts["last_ns"] = operations, newest
        is_pair = (ops == _SEND) | (ops == _RECV)
        usable = np.flatnonzero((own != NO_NUMBER) & ((peers == NO_NUMBER) | is_pair) & (peers != own))
        processes = np.asarray([each.process for each in of], np.int32)
        for job, mine in self._by_job(processes[usable]):
            self._jobs[job].progress.put(whole_rows.taken(counts, usable[mine]))

    def _feed_calls(self, rows: Columns, times: NDArray[np.int64]) -> None:
        collective = rows["coll_seq"] != NO_NUMBER
        rows, times = whole_rows.kept(rows, collective), times[collective]
        calls = np.zeros(len(rows), CALL)
        found, inverse = distinct(rows["member"])
        members = [self._store.members[member] for member in found.tolist()]
        calls["communicator"] = np.asarray([of.communicator for of in members], np.int32)[inverse]
        calls["rank"] = np.asarray([NO_NUMBER if of.rank is None else of.rank for of in members], np.int32)[inverse]
        calls["coll_seq"] = rows["coll_seq"]
        calls["op"] = self._store.templates_of(rows, "op")["op"]
        calls["message_bytes"] = rows["message_bytes"]
        calls["logged_ns"] = times
        for job, mine in self._by_job(rows["process"]):
            ranked = whole_rows.taken(calls, mine[calls["rank"][mine] >= 0])
            known = self._jobs[job]
            context = Context(job=job) if known.knows_calls else self._minimal_context(job, ranked)
            known.detectors.feed_calls(ranked, context)
            known.knows_calls = True

    def _by_job(self, processes: NDArray[np.int32]) -> list[tuple[str, NDArray[np.intp]]]:
        """The rows of each job, jobs by name."""
        found, inverse = distinct(processes)
        names = [self._store.process_job[process] for process in found.tolist()]
        jobs, of_process = np.unique(names, return_inverse=True)
        return [(str(jobs[job]), mine) for job, mine in groups(of_process[inverse])] if len(found) else []

    def _minimal_context(self, job: str, calls: Columns) -> Context:
        """Groups of just these calls: enough to compare them with those of other ranks."""
        return Context(
            job=job,
            groups={index: self._group(self._store.communicators[index]) for index in values_of(calls["communicator"])},
            lossy_hosts=self._lossy_hosts(),
        )

    def _newest_time(self, measured: Columns) -> int:
        newest = int(measured["end_true_ns"].max(initial=NO_TIME_NS))
        return max(newest, self._newest_log_ns, self._store.captures.newest_ns, 0)


def _blind(job: str, since_ns: int | None) -> tuple[Finding, ...]:
    """That nobody judges a job since then."""
    if since_ns is None:
        return ()
    summary = (
        "The service fails to judge this job, by a mistake of its own: findings may be missing or out of date. "
        "Please report it, with the service's log."
    )
    return (service_is_blind(job, since_ns, reason="internal_error", summary=summary),)


def _by_second(measured: Columns) -> list[Columns]:
    """Collectives in order of their end, a second at a time; those without a time are left out."""
    timed = whole_rows.kept(measured, measured["end_true_ns"] != NO_TIME_NS)
    timed = whole_rows.taken(timed, np.argsort(timed["end_true_ns"], kind="stable"))
    cuts = np.flatnonzero(np.diff(timed["end_true_ns"] // _STRIDE_NS)) + 1
    return [part for part in np.split(timed, cuts) if len(part)]
