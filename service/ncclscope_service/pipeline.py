"""The way of the data: batches in, and out of them operations with kernels, ranks, clocks, measures and findings.

    feed      batch ─ intake ─ communicators ─ tuning ─▶ store
    advance   align ─ iterations ─ join ─ clocks ─ measure ─ series ─ detect ─▶ store

`feed` only notes what came; `advance` numbers and counts all that came since, and aligns, joins and measures a bounded
amount of it: processes that have waited longest first (`arrivals`). What is left (`has_backlog`) is for the next call.
Live, it is called on a timer, and at once while something is left; offline, `flush` is called once at the end and
decides everything. Both run this very code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import bandwidth, baseline_limits, parallelism, ranks, state, whole_rows
from ncclscope_service.ages import Ages, Ends
from ncclscope_service.alignment import Alignment
from ncclscope_service.arrivals import Arrivals
from ncclscope_service.channels_join import ChannelsJoin
from ncclscope_service.clock import ClockEstimator
from ncclscope_service.clock_prior import ClockPrior
from ncclscope_service.clocks import Clocks
from ncclscope_service.communicators import Communicators
from ncclscope_service.contents import Contents
from ncclscope_service.departed import Departed
from ncclscope_service.detect.detectors import Detectors
from ncclscope_service.detection import Detection
from ncclscope_service.distinct import distinct, distinct_together, groups, values_of
from ncclscope_service.exchanges import ExchangeBook
from ncclscope_service.hosts import Hosts
from ncclscope_service.identification import Identification
from ncclscope_service.inspection import Inspection
from ncclscope_service.intake import Intake, append_placed, logged_operations
from ncclscope_service.iterations import Iterations
from ncclscope_service.join import PAIR_SIDE, CollectiveJoin, PairJoin
from ncclscope_service.limits import Limits
from ncclscope_service.lives import Lives
from ncclscope_service.measured_baseline import MeasuredBaseline
from ncclscope_service.measuring import Measuring
from ncclscope_service.mistakes import Mistakes
from ncclscope_service.numbered import Numbered
from ncclscope_service.parallelism import Sizes
from ncclscope_service.patterns import Patterns
from ncclscope_service.periods import Periods
from ncclscope_service.recent_sums import RecentSums
from ncclscope_service.replaying import Replaying
from ncclscope_service.rows import LimitReference, Match
from ncclscope_service.series import SeriesBook
from ncclscope_service.store import Ids, Store
from ncclscope_service.tables_join import TablesJoin
from ncclscope_service.timing import has_kernel
from ncclscope_service.tuning import TuningJoin
from ncclscope_service.unclocked import Unclocked
from ncclscope_service.unjudged import Unjudged
from ncclscope_service.unsettled import Unsettled
from ncclscope_service.version_of import version_of
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

_SEND: Final = OPERATION_CODES["Send"]
_RECV: Final = OPERATION_CODES["Recv"]
_IS_PAIRWISE: Final = np.isin(np.arange(256), (_SEND, _RECV))
"""By code."""
_OF_TEMPLATE: Final = ("process", "op", "count", "data_type", "nranks", "root")
_COUNTED: Final = np.dtype([("member", "<i4"), ("template", "<i4"), ("message_bytes", "<i8")])
"""What tells the series of an operation."""
_REPORTED: Final = ("member", "template", "coll_seq", "pair_seq", "match", "confidence", "launch", "kernel")
_LIMITED: Final = (
    "member", "template", "message_bytes", "algorithm", "protocol", "launch", "limit", "limit_reference", "bottleneck"
)  # fmt: skip
"""Columns that limits are told from, and in which they are written."""
_SECOND_NS: Final = 1_000_000_000
_MIXED_REMEMBERED: Final = 100_000
_MORE: Final = 1.2
"""Parallelism is told anew when there are so many times the operations."""
_MARKS_COME_WITHIN_NS: Final = 60 * _SECOND_NS
_GIVEN_UP_EVERY_NS: Final = 30 * _SECOND_NS
_GIVEN_UP_AT_ONCE: Final = 0.25
"""How often operations stop waiting for a capture, and when besides: when so large a share more than may wait has come.
All aligners have to be asked for that, who have nothing to do otherwise."""
_WAITED_WINDOWS: Final = 2
"""Ranks are waited for while so many windows of operations come, at most."""
_PAUSE_FOR_EACH_MEMBER_NS: Final = 100_000
"""Telling ranks and parallelism anew takes some 10 us for each member of a communicator: a tenth of the time."""
_LONGEST_PAUSE_NS: Final = 2 * _SECOND_NS
"""So long names may be missing or old while communicators keep coming."""
_SETTLED_AT_ONCE: Final = 65_536
"""Operations that are numbered and counted in one go at most: 20 MB of rows."""
_LOOKED_AT_ONCE: Final = 4096
_JOINED_AT_ONCE: Final = 65_536
"""Operations of joined collectives that are measured in one `advance`."""
_LOOKS_EVERY_NS: Final = 500_000_000
"""Detectors look that often while something is left to do."""
_EXPIRED_AT_ONCE: Final = 131_072
"""Operations that leave memory after one `advance`: of those that come in a busy second twice as many, or memory would
fill."""
_WHOLE_GRAPH: Final = "graph_launch_without_kernels"
"""A CUDA graph that was launched while nsys recorded graphs as a whole."""
_HELD_TOO_MANY: Final = "held_too_many"
"""Operations that would have waited for a capture for longer, where there were not so many."""
_SESSION_START: Final = "TARGET_INFO_SESSION_START_TIME"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """What a user may set, and the bounds on what is remembered."""

    sizes: Sizes = field(default_factory=Sizes)
    gpus_per_node: int | None = None
    baseline: MeasuredBaseline | None = None
    """What nccl-tests showed on this machine: the baseline of what it tested, before what the job itself has shown."""
    settle_ns: int = 10 * _SECOND_NS
    """How long ranks that never spoke are waited for before a collective counts as complete without them."""
    patience_ns: int = 120 * _SECOND_NS
    """How long a collective waits for a rank that did speak, and a Send for its Recv; less long where twice
    `window_operations` came in less time, but never less than `settle_ns`."""
    hold_ns: int = 600 * _SECOND_NS
    """How long an operation waits for a capture of its process: nsys's maker supports captures of five minutes."""
    window_ns: int = 900 * _SECOND_NS
    """How long what is finished stays in memory."""
    held_operations: int = 4_000_000
    """How many operations wait for a capture at most, or a quarter more: then the oldest count as not covered."""
    window_operations: int = 1_000_000
    """How many operations stay in memory at most behind those that wait for a capture; about half a kilobyte each with
    kernels and ranges."""
    aligned_at_once: int = 24_576
    """Kernels that are aligned, with all that follows from it, in one `advance`, or work that takes as long: about a
    quarter of a second."""
    idle_ns: int = 30 * _SECOND_NS
    """How long after its communicators ended a process may still be heard of."""
    gone_ns: int = 24 * 3600 * _SECOND_NS
    """How long after its last word what was learnt of a process is kept, and of a job with its findings."""
    groups_every_ns: int = 5 * _SECOND_NS
    """How often parallelism is told anew from the traffic."""


class Pipeline:
    """All stages over one store."""

    def __init__(
        self,
        settings: PipelineSettings | None = None,
        *,
        clock_estimator: ClockEstimator | None = None,
        make_detectors: Callable[[], Detectors] = Detectors,
    ) -> None:
        """`clock_estimator`: one with other bounds than the usual ones; `make_detectors`: those of a job."""
        self.settings = settings or PipelineSettings()
        self.store = Store(measured_baseline=self.settings.baseline)
        self.mistakes = Mistakes()
        self._intake = Intake(self.store)
        self._communicators = Communicators(self.store)
        self._tuning = TuningJoin(self.store)
        self._alignment = Alignment(self.store, lambda process: version_of(self.store, process), self.mistakes)
        self._iterations = Iterations(self.store)
        self._collective_join = CollectiveJoin(settle_ns=self.settings.settle_ns, patience_ns=self.settings.patience_ns)
        self._exchanges = ExchangeBook()
        self._pair_join = PairJoin(patience_ns=self.settings.patience_ns)
        hosts = Hosts(self.store)
        self._measuring = Measuring(self.store, hosts)
        self._clocks = Clocks(self.store, hosts, clock_estimator)
        self._unclocked = Unclocked(self._clocks, hosts, self.store.operations)
        self._tables, self._channels = TablesJoin(self.store), ChannelsJoin(self.store)
        self._limits = Limits(self.store)
        self._series = SeriesBook(self.store)
        self._identification = Identification(
            self.store, self._series, settle_ns=self.settings.settle_ns, gpus_per_node=self.settings.gpus_per_node
        )
        waits = {"settle_ns": self.settings.settle_ns, "patience_ns": self.settings.patience_ns}
        self._patience_ns = self.settings.patience_ns
        self._replaying = Replaying(self.store, hosts, self._clocks, self._series, **waits)
        self._inspection = Inspection(self.store, self._communicators, self._series, **waits)
        self._arrivals = Arrivals()
        self._given_up = self._gave_up_at_ns = 0
        """Operations before this one wait for no capture any more; and when that was last told."""
        self._unplaced, self._uncounted = Unsettled(), Unsettled()
        """Operations without a place in a communicator; and those that have one, and are not in the store."""
        self._unjudged = Unjudged()
        self._looked_at_ns = 0
        self.fed_rows = 0
        """Operations and records of Inspector since the last `advance`."""
        self._lives = Lives(self.settings.idle_ns)
        self._contents = Contents(self.store)
        self._patterns = Patterns(self.store)
        self._periods = Periods(self.store)
        self._departed = Departed()
        self._detection = Detection(self.store, self._periods, make_detectors, self.mistakes, self._departed)
        self._judged_operations = 0
        self._grouped_at_ns: int | None = None
        self._unjoined: deque[tuple[int, Ids]] = deque()
        """(when decided, operations) that have a kernel and wait for the other ranks."""
        self._unidentified: deque[tuple[int, Ids]] = deque()
        """(when decided, operations) of members whose communicator is not found yet."""
        self._ages = Ages()
        self.recent = RecentSums(self.store)
        """What the last minutes come to, for those who look."""
        self._numbered = Numbered()
        self._mixed: set[int] = set()

    def feed(self, batch: Batch, *, agent: str, session: str, job: str) -> bool:
        """Takes one batch; batches of one source come in order, each once.

        Where mistakes are borne, a batch that our own code fails on is skipped, counted, and a gap of its source.
        False: so is the rest of its source in this session, which has to begin another one.
        """
        try:
            self._feed(batch, agent=agent, session=session, job=job)
        except Exception as error:
            self.mistakes.bear(error, "batch", f"batch of {batch.source.name} of {agent}")
            self._communicators.completed.clear()
            return not self._intake.lose(batch, agent=agent)
        return True

    def _feed(self, batch: Batch, *, agent: str, session: str, job: str) -> None:
        is_plain = _is_plain(batch)
        self.fed_rows += len(batch.operations) + len(batch.inspected)
        if not is_plain:
            self._place()
        arrived = self._intake.feed(batch, agent=agent, session=session, job=job)
        if is_plain:
            self._unplaced.append(arrived.operations, arrived.tunings)
        else:
            operations = logged_operations(arrived.operations)
            self._communicators.place(operations, arrived.events, arrived.event_processes)
            self._tables.feed(arrived.source, self._communicators.completed, batch.tuning_tables)
            self._channels.feed(arrived.source, self._communicators.completed, batch.facts)
            self._communicators.completed.clear()
            self._uncounted.append(operations, arrived.tunings)
        if self._unplaced.rows + self._uncounted.rows > _SETTLED_AT_ONCE:
            self._settle()
        if batch.facts:
            self._detection.count_facts(
                batch.facts, job=job, source=batch.source.name, observed_at_ns=batch.observed_at_ns
            )
        self._departed.note((*arrived.event_processes, *values_of(arrived.inspected["process"])))
        self._inspection.feed(arrived.inspected)
        if len(arrived.kernels):
            self._arrivals.append_kernels(self.store.kernels.append(arrived.kernels), arrived.kernels["process"])
        if len(arrived.calls):
            self._arrivals.append_calls(arrived.calls)
        for capture in batch.captures:
            if capture.graph_launches:
                self.store.skipped[_WHOLE_GRAPH] += capture.graph_launches
            if _SESSION_START in capture.missing:
                continue  # its times count from 0: it covers nothing that could be named
            processes = {pid: self._intake.process(job, capture.host, pid) for pid in capture.pids}
            self._arrivals.append_capture(capture, processes)

    def snapshot(self) -> bytes:
        """The whole state, store included, from which `restore` goes on as if nothing had happened."""
        self._settle()
        return state.snapshot(self)

    @classmethod
    def restore(cls, snapshot: bytes) -> Pipeline:
        """The pipeline of a snapshot, with the settings that it had. Raises StateError where it is of no use."""
        return state.restore(snapshot, cls())

    def believe_clocks(self, priors: Mapping[str, ClockPrior]) -> None:
        """What hosts say of their clocks, by name, until operations tell."""
        self._clocks.believe(priors)

    def advance(self, now_ns: int, *, silent_hosts: frozenset[str] = frozenset()) -> None:
        """Works on what came since. `now_ns` is the service's wall clock; `silent_hosts` have agents out of reach."""
        self._advance(now_ns, final=False, silent_hosts=silent_hosts)
        self._ages.note(self.store, now_ns)

    def flush(self, now_ns: int) -> None:
        """Decides everything that is still open: nothing more will come."""
        self._advance(now_ns, final=True, silent_hosts=frozenset())

    @property
    def has_backlog(self) -> bool:
        """Whether the last `advance` has left something that could be worked on at once."""
        return self._is_busy() or self._unjudged.is_released

    @property
    def is_full(self) -> bool:
        """Whether memory holds as much as it may, and `advance` can let some of it go: nothing should be fed now."""
        held = (1 + _GIVEN_UP_AT_ONCE) * self.settings.held_operations
        most = held + (1 + _WAITED_WINDOWS) * self.settings.window_operations
        return len(self.store.operations) >= most and self.has_backlog

    def expected_series(self) -> Columns:
        """`Store.series` with what came and is not counted there yet, for who looks between two calls of `advance`: at
        some 5 ms, and nothing here changes by it. What is of a series that is new is left out.
        """
        unplaced = self._unplaced.column("template")
        (templates, members), inverse = distinct_together(
            np.concatenate([unplaced, self._uncounted.column("template")]),
            np.concatenate([self._communicators.members_of(unplaced), self._uncounted.column("member")]),
        )
        known = members != NO_NUMBER
        of = self.store.operation_templates.take(templates.astype(np.int64), *_OF_TEMPLATE)
        operations = np.empty(len(templates), _COUNTED)
        operations["template"], operations["member"] = templates, members
        operations["message_bytes"] = bandwidth.message_bytes(of["op"], of["count"], of["data_type"], of["nranks"])
        amounts = np.bincount(inverse, minlength=len(templates)).astype(np.int64)
        return self._series.expected(operations[known], amounts[known])

    @property
    def waiting_rows(self) -> int:
        """Kernels and calls that came and were not aligned yet."""
        return self._arrivals.rows

    def shift_stamps(self, fit: Callable[[NDArray[np.int64], NDArray[np.int64]], int | None]) -> dict[int, int]:
        """Moves the stamps of each process by what `fit(stamps, launches)` gives, before anything was aligned.

        Gives the shift in ns by process. For offline use, where no agent knew the zone of the log.
        """
        self._settle()
        shifts: dict[int, int] = {}
        rows, kernels = self.store.operations.rows, self.store.kernels.rows
        processes = self.store.templates_of(rows)["process"]
        for process in np.unique(kernels["process"]).tolist():
            mine = (processes == process) & (rows["logged_at_ns"] > 0)
            launches = kernels["launch_start_ns"][kernels["process"] == process]
            shift = fit(rows["logged_at_ns"][mine], launches[launches > 0])
            if shift:
                rows["logged_at_ns"][mine] -= shift
                shifts[process] = shift
        return shifts

    def expired(self, now_ns: int) -> Ids:
        """The oldest operations that nothing needs any more, finished and out of the window: archive, then `forget`.

        A bounded number; the next call has those behind them.
        """
        table = self.store.operations
        limit = self._out_of_window(now_ns).operations
        limit = max(limit, table.next_id - self.settings.window_operations)
        length = _length_of_true(table.rows["finished"][: max(0, min(limit - table.first, _EXPIRED_AT_ONCE))])
        if table.first + length > self._periods.settled_before:
            self._periods.settle()
        return np.arange(table.first, table.first + length, dtype=np.int64)

    def forget(self, operations: Ids, now_ns: int) -> None:
        """Drops these operations (from `expired`), and with them what only they needed."""
        known = self.store
        if len(operations):
            self._alignment.graphs.remember(operations)
            with self._borne("show"):
                self.recent.forget_before(int(operations[-1]) + 1)
            known.operations.drop_before(int(operations[-1]) + 1)
        old = self._out_of_window(now_ns)
        named = known.named_kernels.first_of(known.operations.first, known.operations.rows["kernel"])
        known.kernels.drop_before(old.kernels if named is None else min(old.kernels, named))
        known.replays.drop_before(old.replays)
        known.collectives.drop_before(old.collectives)
        known.ranges.drop_before(old.ranges)
        known.busy.drop_before(old.busy)
        known.captures.drop_before(old.captures)
        known.inspected.drop_before(max(old.inspected, known.inspected.next_id - self.settings.window_operations))
        self._ages.forget_before(now_ns - self.settings.window_ns)
        left = self._intake.forget(now_ns)
        self._tables.leave(left)
        self._channels.leave(left)
        with self._borne("leave"):
            self._leave(now_ns)

    def _leave(self, now_ns: int) -> None:
        """Lets go of what was learnt of those who are gone."""
        settings = self.settings
        silence_ns = max(settings.gone_ns, settings.hold_ns + settings.window_ns)  # nothing of theirs waits any more
        gone = self._departed.look(self.store, now_ns - silence_ns, now_ns)
        if gone is None:
            return
        for process in gone.processes:
            self.store.process_source.pop(process, None)
        self._lives.leave(gone.processes)
        self._alignment.leave(gone.processes)
        self._tuning.leave(gone.processes)
        self._collective_join.leave(gone.communicators)
        self._detection.leave(gone)

    def _out_of_window(self, now_ns: int) -> Ends:
        """Where the tables ended a window ago."""
        return self._ages.at(now_ns - self.settings.window_ns) or Ends(at_ns=now_ns)

    @property
    def unattached_tunings(self) -> int:
        """TUNING lines that fitted no operation."""
        return self._tuning.unattached

    def _settle(self) -> None:
        """Numbers and counts what came since the last time: hundreds of small batches in one go."""
        self._place()
        if not self._uncounted.rows:
            return
        operations, tunings = self._uncounted.take()
        try:
            self._take_placed(operations, tunings)
        except Exception as error:
            self._bear_lost(error, operations)

    def _place(self) -> None:
        """Numbers what plain batches brought: no communicator has come or gone meanwhile."""
        if not self._unplaced.rows:
            return
        logged, tunings = self._unplaced.take()
        try:
            operations = logged_operations(logged)
            self._communicators.place(operations, (), ())
        except Exception as error:
            self._bear_lost(error, logged)
        else:
            self._uncounted.append(operations, tunings)

    def _bear_lost(self, error: Exception, operations: Columns) -> None:
        self.mistakes.bear(error, "settle", f"{len(operations)} operations")
        for source, rows in groups(operations["source"]):
            self._intake.note_lost(source, len(rows))

    def _take_placed(self, operations: Columns, tunings: Columns) -> None:
        ids = self._add_operations(operations)
        self._tuning.feed(ids, tunings)
        self._alignment.feed_copied(self._tuning.take_copied())
        with self._borne("detect"):
            self._detection.count_logged(operations)
        self._inspection.feed_operations(ids)

    def _add_operations(self, operations: Columns) -> Ids:
        templates = self.store.templates_of(operations, *_OF_TEMPLATE)
        operations["process"] = templates["process"]
        operations["message_bytes"] = bandwidth.message_bytes(
            templates["op"], templates["count"], templates["data_type"], templates["nranks"]
        )
        ids = append_placed(self.store.operations, operations)
        self._arrivals.append_operations(ids)  # at once: one in the store that nobody decides would stay for ever
        self._series.count_run(operations)
        self._contents.count_logged(operations)
        self._patterns.count_logged(operations["member"], templates["op"], templates["root"])
        return ids

    def _advance(self, now_ns: int, *, final: bool, silent_hosts: frozenset[str]) -> None:
        self._settle()
        self.fed_rows = 0
        self._wait(now_ns)
        decided = np.empty(0, np.int64)
        with self._borne("group"):
            self._group(now_ns, final=final)
        with self._borne("align"):
            decided = self._align(now_ns, final=final)
        with self._borne("iterations"):
            self._assign_iterations(decided, now_ns)
        with self._borne("report", decided):
            self._detection.count_decided(decided)
            self._report(self._identified(decided, now_ns, final=final), now_ns)
        with self._borne("replays"):
            self._replaying.report(self._identification.is_open(), now_ns, final=final)
        with self._borne("measure"):
            self._unjudged.add(self._measure(now_ns, final=final, decided=decided), now_ns)
        self._finish_unjoined(now_ns, final=final)
        with self._borne("inspect"):
            self._unjudged.add(self._inspect(now_ns, final=final), now_ns)
        with self._borne("detect"):
            if final:
                self._group(now_ns, final=True)
            self._judge(now_ns, final=final, silent_hosts=silent_hosts)
        with self._borne("show"):
            self.recent.advance(now_ns)

    def _wait(self, now_ns: int) -> None:
        """Tells how long ranks are waited for now: what waits keeps all that came after it in memory."""
        came = self.store.operations.next_id - _WAITED_WINDOWS * self.settings.window_operations
        came_at_ns = self._ages.came_at(came)
        patience_ns = self.settings.patience_ns
        if came_at_ns is not None:
            patience_ns = min(patience_ns, max(self.settings.settle_ns, now_ns - came_at_ns))
        self._patience_ns = self._collective_join.patience_ns = self._pair_join.patience_ns = patience_ns
        self._replaying.wait(patience_ns)

    @contextmanager
    def _borne(self, where: str, operations: Ids | None = None) -> Generator[None]:
        """Goes on behind a mistake of ours, where they are borne. `operations` end with what is known of them by then,
        and are a gap of their logs; what else was being worked on is left out.
        """
        try:
            yield
        except Exception as error:
            self.mistakes.bear(
                error, where, "what came last" if operations is None else f"{len(operations)} operations"
            )
            if operations is not None:
                self._lose(operations)

    def _lose(self, operations: Ids) -> None:
        table = self.store.operations
        at = table.at(operations[operations >= table.first])
        at = at[~table.rows["finished"][at]]
        for process, mine in groups(table.rows["process"][at]) if len(at) else ():
            self._note_lost(process, len(mine))
        self._close(at)

    def _is_busy(self) -> bool:
        """Whether some of what came is not aligned or not joined yet."""
        return len(self._arrivals) > 0 or self._collective_join.has_more

    def _judge(self, now_ns: int, *, final: bool, silent_hosts: frozenset[str]) -> None:
        """Lets the detectors look; not each time while slices of work follow one another."""
        is_busy = self._is_busy()
        if is_busy and not final and now_ns - self._looked_at_ns < _LOOKS_EVERY_NS:
            return
        self._looked_at_ns = now_ns
        measured = self._unjudged.take(now_ns, is_whole=not is_busy, final=final)
        step_ns = self._iterations.step_ns() or self._periods.step_ns()
        self._detection.advance(measured, now_ns, self._clocks, step_ns=step_ns, silent_hosts=silent_hosts, final=final)

    def _group(self, now_ns: int, *, final: bool) -> None:
        """Ranks and parallelism, where membership changed or it is time."""
        if not (final or self._is_time_to_group(now_ns)):
            self._periods.go_on()
            return
        self._grouped_at_ns = now_ns
        self._periods.learn(final=final)
        changed = set(self.store.process_job) if final else self._communicators.changed
        touched = ranks.assign_ranks(self.store, jobs=changed, gpus_per_node=self.settings.gpus_per_node)
        self._communicators.changed = set()
        if self._contents.operations >= max(1, _MORE * self._judged_operations):
            self._judged_operations, changed = self._contents.operations, set(self.store.process_job)
        touched |= self._tell_uses(changed)
        touched |= self._limits.refresh()
        self._series.set_limits(self._limits.series_limit, touched)
        self._detection.regroup(touched)

    def _is_time_to_group(self, now_ns: int) -> bool:
        """Whether it is, or membership has changed: of many ranks not at each change, or none would come to its end."""
        if self._grouped_at_ns is None:
            return True
        since_ns = now_ns - self._grouped_at_ns
        pause_ns = min(len(self.store.members) * _PAUSE_FOR_EACH_MEMBER_NS, _LONGEST_PAUSE_NS)
        is_time = not 0 <= since_ns < self.settings.groups_every_ns
        return is_time or (bool(self._communicators.changed) and since_ns >= pause_ns)

    def _tell_uses(self, jobs: set[str]) -> set[int]:
        """What the communicators of these jobs are for; gives those of which that changed."""
        if not jobs:
            return set()
        table = self._contents.table()
        used = set(values_of(table["communicator"]))
        asked = [each for each in self.store.listed_communicators() if each.job in jobs and each.index in used]
        return parallelism.assign_parallelism(
            self.store, table, self._patterns.of(asked), self.settings.sizes, self._periods.iterations(), jobs=jobs
        )

    def _align(self, now_ns: int, *, final: bool) -> Ids:
        self._hear_all(now_ns)
        self._arrivals.end(self._lives.take_ended(self._communicators.has_ended, now_ns))
        given_up = self._give_up(now_ns)
        portions = self._arrivals.take(
            now_ns,
            before=self.store.operations.next_id if final else given_up,
            most=None if final else self.settings.aligned_at_once,
        )
        for portion in portions:
            self._alignment.feed(portion)
        ended = [each.process for each in portions if each.has_ended and self._lives.has_ended(each.process)]
        decided = [
            self._alignment.give_up(each.process, self._given_up) for each in portions if each.gives_up and not final
        ]
        decided.append(self._alignment.advance(final=final, ended=ended))
        for process, operations in self._alignment.take_lost():
            self._note_lost(process, max(1, len(operations)))
            decided.append(operations)
        replays = self._alignment.graphs.take_replays()
        self._inspection.mark_counted(replays)
        self._replaying.feed(replays, now_ns)
        self.recent.touch(replays["operation"][replays["is_first"]])
        found = np.concatenate(decided)
        self.recent.touch(found)
        return found

    def _give_up(self, now_ns: int) -> int:
        """Has processes give up what waits for a capture for too long, now and then; before which operation that is."""
        held = self._ages.at(now_ns - self.settings.hold_ns)
        next_id = self.store.operations.next_id
        too_old = 0 if held is None else held.operations
        given_up = max(too_old, next_id - self.settings.held_operations)
        is_time = now_ns - self._gave_up_at_ns >= min(_GIVEN_UP_EVERY_NS, self.settings.hold_ns // 20)
        is_much = given_up - self._given_up >= _GIVEN_UP_AT_ONCE * self.settings.held_operations
        if given_up > self._given_up and (is_time or is_much):
            if given_up > too_old:
                self._count_held_too_many(np.arange(max(too_old, self._given_up), given_up))
            self._given_up, self._gave_up_at_ns = given_up, now_ns
            self._arrivals.give_up(sorted(self._alignment.processes()))
        return self._given_up

    def _count_held_too_many(self, operations: Ids) -> None:
        """Counts those of these operations that wait for a further capture of their process."""
        table = self.store.operations
        rows = table.take(operations[operations >= table.first], "process", "match")
        was_captured = np.zeros(len(self.store.processes), np.bool_)
        was_captured[sorted(self._alignment.captured())] = True
        lost = was_captured[rows["process"]] & (rows["match"] == Match.PENDING)
        self.store.skipped.update({_HELD_TOO_MANY: int(np.count_nonzero(lost))})

    def _note_lost(self, process: int, amount: int) -> None:
        """Notes what a mistake of ours has taken from a process as a gap of its log."""
        source = self.store.process_source.get(process)
        if source is not None:
            self._intake.note_lost(source, amount)

    def _identified(self, decided: Ids, now_ns: int, *, final: bool) -> Ids:
        """Finds communicators that nothing names; gives the operations that need not wait for that any more."""
        found = self._identification.advance(now_ns, final=final)
        if found:
            self._communicators.changed |= found
            self._detection.regroup(each.index for each in self.store.communicators if each.job in found)
            self._grouped_at_ns = None
            self._group(now_ns, final=final)
        is_open = self._identification.is_open()
        if not len(self._unidentified) and not is_open.any():
            return decided
        ready = [np.empty(0, np.int64)]
        waiting, self._unidentified = self._unidentified, deque()
        for at_ns, operations in [*waiting, (now_ns, decided)]:
            here = operations[operations >= self.store.operations.first]
            waits = is_open[self.store.operations.take(here, "member")["member"]]
            if final or now_ns - at_ns > self._patience_ns:
                waits[:] = False
            ready.append(here[~waits])
            if waits.any():
                self._unidentified.append((at_ns, here[waits]))
        return np.concatenate(ready)

    def _hear_all(self, now_ns: int) -> None:
        for operations in self._arrivals.take_new(self.store, now_ns):
            heard = self.store.operations.take(operations, "process", "logged_at_ns", "observed_at_ns")
            self._lives.hear_operations(heard, now_ns)
            self._departed.note(values_of(heard["process"]))
        for process, end_ns in self._arrivals.take_captured():
            self._lives.hear_capture(process, end_ns, now_ns)
            self._departed.note((process,))
        self._departed.hear(self.store, now_ns)

    def _assign_iterations(self, decided: Ids, now_ns: int) -> None:
        """Numbers what was decided, and again what was decided lately of processes of which more marks have come."""
        marked = self._iterations.read_marks()
        self._numbered.forget_before(now_ns - _MARKS_COME_WITHIN_NS)
        if marked:
            self._iterations.assign(self._numbered.of(marked, self.store))
        self._iterations.assign(decided)
        self._numbered.add(decided, now_ns)

    def _report(self, decided: Ids, now_ns: int) -> None:
        """Tells the joins what was decided, and finishes what they need not wait for."""
        rows = self.store.operations.take(decided, *_REPORTED)
        # A guess is worth showing, but nothing may be measured, and no clock be set, by it.
        captured = self._is_captured(rows)
        matched = has_kernel(rows) & ~captured
        collective = rows["coll_seq"] != NO_NUMBER
        self._inspection.withdraw(decided[matched])
        self._note_mixed(rows["launch"][matched], collective[matched])
        waiting = np.zeros(len(decided), bool)
        for member, placed in groups(rows["member"]):
            mine = placed[collective[placed]]
            waiting[mine] = self._report_member(member, decided[mine], rows["coll_seq"][mine], matched[mine], now_ns)
        pairs = np.flatnonzero(matched & ~collective)
        waiting[pairs] = self._report_pairs(decided[pairs], whole_rows.taken(rows, pairs), now_ns)
        self._exchanges.expect(rows["launch"][pairs[waiting[pairs]]])
        waiting = (waiting & matched) | captured
        self._finish(decided[~waiting])
        if waiting.any():
            self._unjoined.append((now_ns, decided[waiting]))

    def _is_captured(self, rows: Columns) -> NDArray[np.bool_]:
        """Which of these operations were captured: their replays are joined, not they."""
        captured = np.zeros(len(rows), bool)
        found = np.flatnonzero(rows["kernel"] >= self.store.kernels.first)
        nodes = self.store.kernels.take(rows["kernel"][found], "graph_node_id")
        captured[found] = nodes["graph_node_id"] != NO_NUMBER
        return captured

    def _note_mixed(self, launches: NDArray[np.int64], collective: NDArray[np.bool_]) -> None:
        """Remembers launches that hold collectives as well as sends: nothing defines their bandwidth."""
        found, inverse = distinct(launches)
        collectives = np.bincount(inverse[collective], minlength=len(found))
        others = np.bincount(inverse[~collective], minlength=len(found))
        self._mixed.update(found[(collectives > 0) & (others > 0)].tolist())
        if len(self._mixed) > _MIXED_REMEMBERED:
            oldest = np.sort(np.asarray(list(self._mixed)))[: len(self._mixed) - _MIXED_REMEMBERED // 2]
            self._mixed.difference_update(oldest.tolist())

    def _report_member(
        self, member: int, operations: Ids, coll_seq: NDArray[np.int64], matched: NDArray[np.bool_], now_ns: int
    ) -> bool:
        """Reports one member's collectives; False where no other rank can be waited for."""
        of = self.store.members[member]
        communicator = self.store.communicators[of.communicator]
        if communicator.size < 2 or of.rank is None or not 0 <= of.rank < communicator.size:
            return False
        if len(operations):
            self._collective_join.report(
                communicator.index,
                communicator.size,
                of.rank,
                coll_seq=coll_seq,
                operations=operations,
                has_kernel=matched,
                now_ns=now_ns,
            )
        return True

    def _report_pairs(self, operations: Ids, rows: Columns, now_ns: int) -> NDArray[np.bool_]:
        """Reports sends and receives; tells which of them wait for their other side."""
        templates = self.store.templates_of(rows, "op", "root")
        found, inverse = distinct(rows["member"])
        members = [self.store.members[member] for member in found.tolist()]
        own = np.asarray([NO_NUMBER if of.rank is None else of.rank for of in members], np.int32)[inverse]
        peers = templates["root"]
        receives = templates["op"] == _RECV
        usable: NDArray[np.bool_] = _IS_PAIRWISE[templates["op"]] & (own >= 0) & (peers >= 0) & (own != peers)
        sides = np.zeros(len(rows), PAIR_SIDE)
        sides["communicator"] = np.asarray([of.communicator for of in members], np.int32)[inverse]
        sides["sender"] = np.where(receives, peers, own)
        sides["receiver"] = np.where(receives, own, peers)
        sides["pair_seq"] = rows["pair_seq"]
        sides["is_receiver"] = receives
        sides["operation"] = operations
        sides["reported_at_ns"] = now_ns
        self._pair_join.report(whole_rows.kept(sides, usable))
        return usable

    def _measure(self, now_ns: int, *, final: bool, decided: Ids) -> Columns:
        """Joins and measures what is complete; gives the rows.COLLECTIVE that were added."""
        members_seen = {of.index: len(of.members or {}) for of in self.store.communicators}
        joined = self._collective_join.take_ready(
            members_seen=members_seen, now_ns=now_ns, final=final, most=None if final else _JOINED_AT_ONCE
        )
        kernels = [self._measuring.gather(each) for each in joined]
        for each in kernels:
            self._clocks.learn(each)
        sends, receives = self._pair_join.take_ready(now_ns=now_ns, final=final)
        self._clocks.learn_messages(sends, receives)
        self._clocks.estimate(now_ns, final=final)
        self._clocks.correct(self._all_operations() if final else decided)
        is_whole = not self._is_busy()
        clocked = self._unclocked.admit(kernels, sends, receives, now_ns, is_whole=is_whole, final=final)
        added, joined_ids = self._measuring.measure_joined(clocked, self._exchanges, self._clocks, self._mixed)
        replayed = self._replaying.measure(members_seen, self._mixed, now_ns, is_whole=is_whole, final=final)
        joined_ids.append(replayed.operations)
        measured = whole_rows.joined([*added, replayed.collectives])
        measured = whole_rows.taken(measured, np.argsort(measured["end_true_ns"], kind="stable"))
        self.store.collectives.append(measured)
        self._series.count_joined(measured)
        self._finish(np.concatenate(joined_ids))
        return measured

    def _inspect(self, now_ns: int, *, final: bool) -> Columns:
        """Measures by NCCL Inspector's records what no kernels measured; gives the rows.COLLECTIVE that were added."""
        measured, operations = self._inspection.advance(now_ns, final=final)
        self.store.collectives.append(measured)
        self._series.count_joined(measured)
        self._set_limits(self.store.operations.at(operations))
        return measured

    def _all_operations(self) -> Ids:
        table = self.store.operations
        return np.arange(table.first, table.next_id, dtype=np.int64)

    def _finish_unjoined(self, now_ns: int, *, final: bool) -> None:
        """Finishes what has waited for other ranks for too long."""
        while self._unjoined and (final or now_ns - self._unjoined[0][0] > self._patience_ns):
            _, operations = self._unjoined.popleft()
            operations = operations[operations >= self.store.operations.first]
            rows = self.store.operations.take(operations, "finished", "launch", "coll_seq")
            left = ~rows["finished"]
            with self._borne("finish", operations[left]):
                self._finish(operations[left])
            self._exchanges.forget(rows["launch"][left & (rows["coll_seq"] == NO_NUMBER)])

    def _finish(self, operations: Ids) -> None:
        """Nothing more will be learnt about these operations: the limit is set, and they are counted."""
        table = self.store.operations
        at = table.at(operations)
        at = at[~table.rows["finished"][at]]
        matched_at = at[table.rows["match"][at] == Match.MATCHED]
        if len(matched_at):
            self._set_limits(matched_at)
            self._series.count_measured(table.first + matched_at)
            self._series.count_compared(table.first + matched_at)
        self._close(at)

    def _close(self, at: NDArray[np.intp]) -> None:
        """Nothing changes any more in the operations at these places, each of which is closed once."""
        self.store.finish(at)
        self.recent.finish(self.store.operations.first + at)

    def _set_limits(self, at: NDArray[np.intp]) -> None:
        """Sets what the operations at these places can be held against."""
        if not len(at):
            return
        rows = self.store.operations.rows
        limited = whole_rows.columns(rows, at, _LIMITED)
        measured = baseline_limits.expected_busbw(self.store, limited)
        limited["limit"] = np.where(np.isnan(measured), self._series.baseline_of(limited), measured)
        limited["limit_reference"] = np.where(np.isnan(limited["limit"]), NO_NUMBER, LimitReference.BASELINE)
        self._limits.fill(limited)
        for name in ("limit", "limit_reference", "bottleneck"):
            rows[name][at] = limited[name]


def _length_of_true(flags: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not: most often it is among the first."""
    for begin in range(0, len(flags), _LOOKED_AT_ONCE):
        part = flags[begin : begin + _LOOKED_AT_ONCE]
        if not part.all():
            return begin + int(part.argmin())
    return len(flags)


def _is_plain(batch: Batch) -> bool:
    """Whether a batch brings operations and kernels only: nothing that what was said before must not know yet."""
    return not (
        batch.communicators
        or batch.facts
        or batch.tuning_tables
        or batch.gaps
        or batch.versions
        or len(batch.inspected)
    )
