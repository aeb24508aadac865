"""The stages in their order: batches in, and out of them operations with kernels, ranks, clocks, measures and findings.

    ingest    batch ─ intake ─▶ backlogs
    process   count ─ group ─ align ─ iterations ─ identify ─ report ─ join, clocks, measure ─ finish ─ detect ─▶ store
    evict     finished rows, sources that were read, jobs that are gone

`ingest_batch` only takes in what came. `process_backlog` numbers and counts all that came since, and aligns, joins and
measures a bounded amount of it, processes that have waited longest first; what is left (`has_backlog`) is for the next
call. Live, it is called on a timer, and at once while something is left; offline, `finish` is called once at the end
and decides everything. Both run this very code.

Each package has its stage: `ingest_...` takes something in, `process_...` works on what waits, `evict_...` lets go of
processes and communicators that are gone. The order in `_process` is the order of the data and must stay: each stage
reads what those before it have written to the store. How long each of them waits is in `store/settings.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.scheduling import AlignmentStage
from ncclscope_service.clock.estimator import ClockEstimator
from ncclscope_service.clock.host_clocks import ClockPrior
from ncclscope_service.columns.group_by import distinct_values, group_by
from ncclscope_service.columns.table import Ids
from ncclscope_service.detect.detection import Detection, DetectionBacklog, Detectors
from ncclscope_service.intake.stage import Fit, IntakeStage, fit_zone, shift_stamps
from ncclscope_service.job.stage import GroupingStage
from ncclscope_service.measure.stage import MeasurementStage
from ncclscope_service.rollup.recent_sums import RecentSums
from ncclscope_service.store import state
from ncclscope_service.store.errors import InternalErrors
from ncclscope_service.store.retention import Retention, Watermarks
from ncclscope_service.store.settings import (
    DUE_SHARE,
    EVICTED_AT_ONCE,
    GIVE_UP_SHARE,
    LOOKS_EVERY_NS,
    WAITED_WINDOWS,
    PipelineSettings,
)
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Batch, Columns

_LOOKED_AT_ONCE: Final = 4096


class Pipeline:
    """All stages over one store."""

    _now_ns: int | None = None
    """Of the last `process_backlog`; None offline."""
    changed_thresholds: Mapping[str, float] = MappingProxyType({})
    """Thresholds of detectors that were changed while the service ran; they win over those of the settings."""

    def __init__(
        self,
        settings: PipelineSettings | None = None,
        *,
        make_estimator: Callable[[], ClockEstimator] = ClockEstimator,
        make_detectors: Callable[[], Detectors] = Detectors,
    ) -> None:
        """`make_estimator`: that of the clocks of a job; `make_detectors`: those of a job."""
        self.settings = own = settings or PipelineSettings()
        self.store = known = Store(
            measured_baseline=own.baseline,
            calibration=own.calibration,
            description=own.description,
            expected_step=own.expected_step,
            gpu=own.gpu,
        )
        self.errors = InternalErrors()
        self.recent = RecentSums(known)
        """Sums of the last minutes, for those who look."""
        self.unprocessed_rows = 0
        """Operations and records of Inspector since the last `process_backlog`."""
        self._watermarks = Watermarks()
        self._retention = Retention()
        self._intake = IntakeStage(known, self.errors)
        self._alignment = AlignmentStage(known, self.errors, self._watermarks, self._retention, idle_ns=own.idle_ns)
        self._measurement = MeasurementStage(
            known,
            self._intake.communicators,
            self._intake.series,
            self._intake.contents,
            self._intake.patterns,
            self.recent,
            make_estimator,
            self._retention,
            settle_ns=own.settle_ns,
            patience_ns=own.patience_ns,
        )
        self._grouping = GroupingStage(known, self._intake, self._measurement.limits, own)
        self._detection = Detection(known, self._grouping.periods, make_detectors, self.errors, self._retention)
        self._detection_backlog = DetectionBacklog()
        self._looked_at_ns = 0

    # What comes

    def ingest_batch(self, batch: Batch, *, agent: str, session: str, job: str) -> bool:
        """Takes one batch; batches of one source come in order, each once.

        If internal errors are isolated, a batch on which our own code fails is skipped and counted, and is a gap of its
        source. False: so is the rest of its source in this session, and the agent has to begin another one.
        """
        with self.errors.isolated("batch", f"batch of {batch.source.name} of {agent}"):
            self._ingest_batch(batch, agent=agent, session=session, job=job)
            return True
        return not self._intake.lose_batch(batch, agent=agent)

    def _ingest_batch(self, batch: Batch, *, agent: str, session: str, job: str) -> None:
        self.unprocessed_rows += len(batch.operations) + len(batch.inspected)
        arrived = self._intake.ingest_batch(batch, agent=agent, session=session, job=job)
        if self._intake.is_full:
            self._count()
        if batch.facts:
            self._detection.ingest_facts(
                batch.facts, job=job, source=batch.source.name, observed_at_ns=batch.observed_at_ns
            )
        self._retention.observe((*arrived.event_processes, *distinct_values(arrived.inspected["process"])))
        self._measurement.inspection.feed(arrived.inspected)
        self._alignment.ingest_kernels(arrived.kernels)
        self._alignment.ingest_calls(arrived.calls)
        for capture, processes in self._intake.captured_processes(batch, job, arrived.source):
            self._alignment.ingest_capture(capture, processes)

    def limit_names(self) -> None:
        """From now on agents and jobs may bring so many names only (`intake.limits`)."""
        self._intake.names.are_enforced = True

    def set_clock_priors(self, priors: Mapping[str, ClockPrior]) -> None:
        """Estimates of the clocks of hosts, by name, that hold until operations give better ones."""
        self._measurement.set_clock_priors(priors)

    def shift_stamps(self, fit: Fit = fit_zone) -> dict[int, int]:
        """Moves the stamps of logs whose zone no agent knew, before anything was aligned; gives the shifts in ns by
        process. For offline use.
        """
        self._count()
        return shift_stamps(self.store, fit)

    # What is done about it

    def process_backlog(self, now_ns: int, *, silent_hosts: frozenset[str] = frozenset()) -> None:
        """Works on what came since. `now_ns` is the service's wall clock; `silent_hosts` have agents out of reach."""
        self._now_ns = now_ns
        self._process(now_ns, final=False, silent_hosts=silent_hosts)
        self._watermarks.record(self.store, now_ns)

    def finish(self, now_ns: int) -> None:
        """Decides everything that is still open: nothing more will come."""
        self._process(now_ns, final=True, silent_hosts=frozenset())

    def _process(self, now_ns: int, *, final: bool, silent_hosts: frozenset[str]) -> None:
        self._count()
        self.unprocessed_rows = 0
        patience_ns = self._patience_ns(now_ns)
        self._measurement.set_patience(patience_ns)
        decided = np.empty(0, np.int64)
        with self._isolated("group"):
            self._group(now_ns, final=final)
        with self._isolated("align"):
            decided = self._align(now_ns, final=final)
        with self._isolated("iterations"):
            self._grouping.process_iterations(decided, now_ns)
        with self._isolated("number", decided):
            has_ended = _all_have_ended if final else self._intake.communicators.has_ended
            decided = self._measurement.joins.lost_lines.recover(
                decided, has_ended, self._alignment.knows_beginning, now_ns=now_ns
            )
        with self._isolated("report", decided):
            self._detection.count_decided(decided)
            found = self._grouping.process_unidentified(decided, now_ns, self.settings, patience_ns, final=final)
            self._detection.forget_groups(found.changed)
            self._measurement.report_operations(found.operations, now_ns)
        with self._isolated("replays"):
            self._measurement.replaying.report(self._grouping.is_open(), now_ns, final=final)
        with self._isolated("measure"):
            is_aligned = not len(self._alignment)
            measured = self._measurement.process_joined(decided, now_ns, is_aligned=is_aligned, final=final)
            self._detection_backlog.add(measured, now_ns)
        for overdue in self._measurement.drain_overdue(now_ns, final=final):
            with self._isolated("finish", overdue):
                self._measurement.finish(overdue)
        with self._isolated("inspect"):
            self._detection_backlog.add(self._measurement.process_inspected(now_ns, final=final), now_ns)
        with self._isolated("detect"):
            if final:
                self._group(now_ns, final=True)
            self._judge(now_ns, final=final, silent_hosts=silent_hosts)
        with self._isolated("show"):
            self.recent.process_window(now_ns)

    def _count(self) -> None:
        """Numbers, stores and counts what came since the last time: hundreds of small batches in one go."""
        for operations, tunings in self._intake.drain_placed():
            lose = partial(self._intake.lose_rows, operations)
            with self.errors.isolated("settle", f"{len(operations)} operations", lose):
                ids = self._intake.store_operations(operations)
                self._alignment.ingest_operations(ids)  # at once: what nobody aligns would stay in the store forever
                self._alignment.ingest_copied(self._intake.count_operations(ids, operations, tunings))
                if self._now_ns is not None:
                    self.store.stamp_offsets.learn(operations, self._now_ns)
                with self._isolated("detect"):
                    self._detection.ingest_operations(operations)
                self._measurement.inspection.feed_operations(ids)

    def _group(self, now_ns: int, *, final: bool) -> None:
        self._detection.forget_groups(self._grouping.process_groups(now_ns, self.settings, final=final))

    def _align(self, now_ns: int, *, final: bool) -> Ids:
        has_ended = self._intake.communicators.has_ended
        aligned = self._alignment.process_backlog(has_ended, now_ns, self.settings, final=final)
        for process, amount in aligned.lost:
            self._intake.lose_of_process(process, max(1, amount))
        replays = aligned.replays
        self._measurement.ingest_replays(replays, now_ns)
        self.recent.touch(replays["operation"][replays["is_first"]])
        self.recent.touch(aligned.operations)
        return aligned.operations

    def _judge(self, now_ns: int, *, final: bool, silent_hosts: frozenset[str]) -> None:
        """Lets the detectors look; not each time while slices of work follow one another."""
        is_busy = self._is_busy()
        if is_busy and not final and now_ns - self._looked_at_ns < LOOKS_EVERY_NS:
            return
        self._looked_at_ns = now_ns
        measured = self._detection_backlog.drain(now_ns, is_whole=not is_busy, final=final)
        self._detection.ingest_steps(self._grouping.drain_steps())
        self._detection.process_collectives(
            measured,
            now_ns,
            self._measurement.clocks,
            steps_ns=self._grouping.steps_ns(),
            silent_hosts=silent_hosts,
            thresholds={**self.settings.thresholds, **self.changed_thresholds},
            newest=self._measurement.joins.newest,
            seen_hangs=self.settings.seen_hangs,
            final=final,
        )

    def _patience_ns(self, now_ns: int) -> int:
        """How long ranks are waited for now: what waits keeps all that came after it in memory."""
        windows_ago = self.store.operations.next_id - WAITED_WINDOWS * self.settings.window_operations
        arrived_at_ns = self._watermarks.arrived_at(windows_ago)
        if arrived_at_ns is None:
            return self.settings.patience_ns
        return min(self.settings.patience_ns, max(self.settings.settle_ns, now_ns - arrived_at_ns))

    def _isolated(self, where: str, operations: Ids | None = None) -> AbstractContextManager[None]:
        """Goes on behind an internal error. `operations` end with what is known of them by then and count as a gap of
        their logs; whatever else was being worked on is left out.
        """
        if operations is None:
            return self.errors.isolated(where, "what came last")
        return self.errors.isolated(where, f"{len(operations)} operations", partial(self._lose, operations))

    def _lose(self, operations: Ids) -> None:
        table = self.store.operations
        at = table.at(operations[operations >= table.first])
        at = at[~table.rows["finished"][at]]
        for process, mine in group_by(table.rows["process"][at]) if len(at) else ():
            self._intake.lose_of_process(process, len(mine))
        self._measurement.close(at)

    # What is left to do

    def _is_busy(self) -> bool:
        """Whether some of what came is not aligned or not joined yet."""
        return len(self._alignment) > 0 or self._measurement.joins.has_more

    @property
    def has_backlog(self) -> bool:
        """Whether the last `process_backlog` has left something that could be worked on at once."""
        return self._is_busy() or self._detection_backlog.is_released

    @property
    def is_full(self) -> bool:
        """Whether nothing should be ingested now: much waits to be aligned, or memory is full that can be freed."""
        held = self.settings.held_operations
        if self._alignment.due_operations() >= DUE_SHARE * held:
            return True
        most = (1 + GIVE_UP_SHARE) * held + (1 + WAITED_WINDOWS) * self.settings.window_operations
        return len(self.store.operations) >= most and self.has_backlog

    @property
    def unaligned_rows(self) -> int:
        """Kernels and calls that came and were not aligned yet."""
        return self._alignment.unaligned_rows

    @property
    def unattached_tunings(self) -> int:
        """TUNING lines that fitted no operation."""
        return self._intake.unattached_tunings

    def expected_series(self) -> Columns:
        """`Store.series` with what came and is not counted there yet, for a look between two `process_backlog`."""
        return self._intake.expected_series()

    # What leaves memory

    def evictable(self, now_ns: int) -> Ids:
        """The oldest operations that nothing needs any more, finished and out of the window: archive, then `evict`.

        A bounded number; the next call has those behind them.
        """
        table = self.store.operations
        watermark = self._watermarks.at(now_ns - self.settings.window_ns)
        limit = 0 if watermark is None else watermark.operations
        limit = max(limit, table.next_id - self.settings.window_operations)
        length = _length_of_true(table.rows["finished"][: max(0, min(limit - table.first, EVICTED_AT_ONCE))])
        self._grouping.settle_before(table.first + length)
        return np.arange(table.first, table.first + length, dtype=np.int64)

    def evict(self, operations: Ids, now_ns: int) -> None:
        """Drops these operations (from `evictable`), and with them what only they needed."""
        settings = self.settings
        if len(operations):
            first_kept = int(operations[-1]) + 1
            self._alignment.remember_captured(operations)
            with self._isolated("show"):
                self.recent.evict_before(first_kept)
            self.store.operations.drop_before(first_kept)
        before_ns = now_ns - settings.window_ns
        self._watermarks.drop_rows(self.store, before_ns, most_inspected=settings.window_operations)
        self._intake.evict_sources(now_ns)
        with self._isolated("leave"):
            self._evict_silent(now_ns)

    def _evict_silent(self, now_ns: int) -> None:
        """Lets go of what was learned of those who are gone."""
        settings = self.settings
        silence_ns = max(settings.gone_ns, settings.hold_ns + settings.window_ns)  # nothing of theirs waits any more
        gone = self._retention.evict_silent(self.store, now_ns - silence_ns, now_ns)
        if gone is None:
            return
        self._intake.evict_processes(gone.processes)
        self._alignment.evict_processes(gone.processes)
        self._measurement.joins.evict_processes(gone.processes)
        self._measurement.joins.evict_communicators(gone.communicators)
        self._measurement.clocks.evict(gone.jobs)
        self._grouping.evict(gone)
        self._detection.evict(gone)

    # State

    def snapshot(self) -> bytes:
        """The whole state, store included, from which `restore` goes on as if nothing had happened."""
        self._count()
        return state.snapshot(self)

    @classmethod
    def restore(cls, snapshot: bytes) -> Pipeline:
        """The pipeline of a snapshot, with the settings that it had. Raises StateError if it is of no use."""
        return state.restore(snapshot, cls)


def _length_of_true(flags: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not: most often it is among the first."""
    for begin in range(0, len(flags), _LOOKED_AT_ONCE):
        part = flags[begin : begin + _LOOKED_AT_ONCE]
        if not part.all():
            return begin + int(part.argmin())
    return len(flags)


def _all_have_ended(process: int) -> bool:
    """No process logs anything more once all is at its end."""
    del process
    return True
