"""When operations are aligned: once a capture of their process came, their process ended, or they waited too long.

Kernels and operations wait in `backlog.py`; here is decided which of them the aligners (`stage.py`) are given, when a
process counts as ended, and when operations stop waiting for a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from ncclscope_service.align.backlog import AlignmentBacklog
from ncclscope_service.align.stage import Alignment
from ncclscope_service.columns.group_by import distinct, distinct_values
from ncclscope_service.columns.table import Ids
from ncclscope_service.store.errors import InternalErrors
from ncclscope_service.store.retention import Retention, Watermarks
from ncclscope_service.store.rows import Match
from ncclscope_service.store.settings import COVERED_IDLE_NS, GIVE_UP_EVERY_NS, GIVE_UP_SHARE, PipelineSettings
from ncclscope_service.store.tables import Store, version_of
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import CaptureSeen
from ncclscope_wire.terms import NO_TIME_NS

_HELD_TOO_MANY: Final = "held_too_many"
"""Operations that would have waited longer for a capture if fewer had waited."""


@dataclass(slots=True)
class _LastSeen:
    """The newest signs of one process."""

    at_ns: int = 0
    """Service's wall clock."""
    last_line_ns: int = NO_TIME_NS
    """Of its newest operation, on its host's clock."""
    captured_until_ns: int = NO_TIME_NS
    """End of its newest capture, on its host's clock."""
    has_ended: bool = False

    def is_covered(self) -> bool:
        """Whether captures reach past its last line."""
        return self.captured_until_ns > self.last_line_ns != NO_TIME_NS


@dataclass(slots=True)
class Liveness:
    """Which processes have ended: live, an aligner that waits for a dead one would wait forever.

    A process whose communicators ended has ended after `idle_ns` without a sign of it; soon, if a capture covers its
    last line.
    """

    idle_ns: int
    _last_seen: dict[int, _LastSeen] = field(default_factory=dict[int, _LastSeen])

    def observe_operations(self, rows: Columns, now_ns: int) -> list[int]:
        """Operations (process, logged_at_ns, observed_at_ns of rows.OPERATION) that came by `now_ns`.

        Gives those of their processes whose captures reach past them: no capture that is to come has their kernels.
        """
        times = np.where(rows["logged_at_ns"] == NO_TIME_NS, rows["observed_at_ns"], rows["logged_at_ns"])
        processes, inverse = distinct(rows["process"])
        newest = np.full(len(processes), NO_TIME_NS, np.int64)
        np.maximum.at(newest, inverse, times)
        covered: list[int] = []
        for process, newest_ns in zip(processes.tolist(), newest.tolist(), strict=True):
            seen = self._observe(process, now_ns)
            seen.last_line_ns = max(seen.last_line_ns, newest_ns)
            if seen.is_covered():
                covered.append(process)
        return covered

    def observe_capture(self, process: int, end_ns: int, now_ns: int) -> None:
        """A capture of a process up to `end_ns` of its host's clock."""
        seen = self._observe(process, now_ns)
        seen.captured_until_ns = max(seen.captured_until_ns, end_ns)

    def drain_ended(self, has_ended: Callable[[int], bool], now_ns: int) -> list[int]:
        """Processes that have ended, each once; `has_ended`: whether the communicators of a process have."""
        ended: list[int] = []
        for process, seen in self._last_seen.items():
            if seen.has_ended:
                continue
            silence_ns = now_ns - seen.at_ns
            patience_ns = min(COVERED_IDLE_NS, self.idle_ns) if seen.is_covered() else self.idle_ns
            if silence_ns > patience_ns and has_ended(process):
                seen.has_ended = True
                ended.append(process)
        return ended

    def has_ended(self, process: int) -> bool:
        """Whether it has ended, and nothing came of it since."""
        seen = self._last_seen.get(process)
        return seen is not None and seen.has_ended

    def evict_processes(self, processes: Iterable[int]) -> None:
        """Forgets these processes."""
        for process in processes:
            self._last_seen.pop(process, None)

    def _observe(self, process: int, now_ns: int) -> _LastSeen:
        seen = self._last_seen.setdefault(process, _LastSeen())
        seen.at_ns = now_ns
        seen.has_ended = False
        return seen


@dataclass(frozen=True, slots=True)
class Aligned:
    """Results of one call of `process_backlog`."""

    operations: Ids
    """Their match is decided."""
    lost: list[tuple[int, int]]
    """(process, operations) that an internal error took."""
    replays: Columns
    """rows.REPLAYED."""


class AlignmentStage:
    """The aligners of all processes, and what waits for them."""

    def __init__(
        self, known: Store, errors: InternalErrors, watermarks: Watermarks, retention: Retention, *, idle_ns: int
    ) -> None:
        self._store = known
        self._watermarks = watermarks
        self._retention = retention
        self._backlog = AlignmentBacklog()
        self._liveness = Liveness(idle_ns)
        self._alignment = Alignment(known, partial(version_of, known), errors)
        self._given_up = self._gave_up_at_ns = 0
        """Operations before this one wait for no capture any more; and when that was last decided."""

    def __len__(self) -> int:
        """Processes that are to be given something."""
        return len(self._backlog)

    @property
    def unaligned_rows(self) -> int:
        """Kernels and calls that came and were not aligned yet."""
        return self._backlog.rows

    def due_operations(self) -> int:
        """Operations that could be aligned at once, and wait for their turn."""
        return self._backlog.due_operations()

    def ingest_operations(self, operations: Ids) -> None:
        """Operations that were stored, in order of arrival."""
        self._backlog.append_operations(operations)

    def ingest_kernels(self, kernels: Columns) -> None:
        """Kernels (rows.KERNEL), which go to the store."""
        if len(kernels):
            self._backlog.append_kernels(self._store.kernels.append(kernels), kernels["process"])

    def ingest_calls(self, calls: Columns) -> None:
        """Calls of NCCL's API (rows.API_CALL)."""
        if len(calls):
            self._backlog.append_calls(calls)

    def ingest_capture(self, capture: CaptureSeen, processes: Mapping[int, int]) -> None:
        """A finished capture; `processes`: process index by pid."""
        self._backlog.append_capture(capture, processes)

    def ingest_copied(self, operations: Ids) -> None:
        """Operations that the copy engine runs: they have no kernel."""
        self._alignment.ingest_copied(operations)

    def knows_beginning(self, process: int) -> bool:
        """Whether it is known which lines the first kernels of a process are of."""
        return self._alignment.knows_beginning(process)

    def process_backlog(
        self, has_ended: Callable[[int], bool], now_ns: int, settings: PipelineSettings, *, final: bool
    ) -> Aligned:
        """Aligns a bounded amount, processes that have waited longest first; all of it if `final`.

        `has_ended`: whether the communicators of a process have.
        """
        self._observe_arrivals(now_ns)
        self._backlog.end(self._liveness.drain_ended(has_ended, now_ns))
        given_up = self._give_up(now_ns, settings)
        portions = self._backlog.drain_portions(
            now_ns,
            before=self._store.operations.next_id if final else given_up,
            most=None if final else settings.aligned_at_once,
        )
        for portion in portions:
            self._alignment.ingest_portion(portion)
        ended = [each.process for each in portions if each.has_ended and self._liveness.has_ended(each.process)]
        decided = [self._alignment.align_ready(final=final, ended=ended)]
        if not final and any(each.gives_up for each in portions):
            # Only now: those whose kernels are there have them.
            decided += [self._alignment.give_up(each.process, self._given_up) for each in portions if each.gives_up]
            decided.append(self._alignment.align_ready())
        lost = self._alignment.drain_lost()
        decided += [operations for _, operations in lost]
        return Aligned(
            operations=np.concatenate(decided),
            lost=[(process, len(operations)) for process, operations in lost],
            replays=self._alignment.graphs.drain_replays(),
        )

    def remember_captured(self, operations: Ids) -> None:
        """These operations leave memory: CUDA graphs that captured them need some of their columns."""
        self._alignment.graphs.remember(operations)

    def evict_processes(self, processes: Iterable[int]) -> None:
        """Forgets what was learned of these processes."""
        self._liveness.evict_processes(processes)
        self._alignment.evict_processes(processes)

    def _observe_arrivals(self, now_ns: int) -> None:
        for operations in self._backlog.drain_new(self._store, now_ns):
            new = self._store.operations.take(operations, "process", "logged_at_ns", "observed_at_ns")
            self._backlog.queue(self._liveness.observe_operations(new, now_ns))
            self._retention.observe(distinct_values(new["process"]))
        for process, end_ns in self._backlog.drain_captured():
            self._liveness.observe_capture(process, end_ns, now_ns)
            self._retention.observe((process,))
        self._retention.update(self._store, now_ns)

    def _give_up(self, now_ns: int, settings: PipelineSettings) -> int:
        """Gives up, now and then, what waits too long for a capture; gives the operation before which that is."""
        held = self._watermarks.at(now_ns - settings.hold_ns)
        next_id = self._store.operations.next_id
        too_old = 0 if held is None else held.operations
        given_up = max(too_old, next_id - settings.held_operations)
        is_time = now_ns - self._gave_up_at_ns >= min(GIVE_UP_EVERY_NS, settings.hold_ns // 20)
        is_much = given_up - self._given_up >= GIVE_UP_SHARE * settings.held_operations
        if given_up > self._given_up and (is_time or is_much):
            if given_up > too_old:
                self._count_held_too_many(np.arange(max(too_old, self._given_up), given_up))
            self._given_up, self._gave_up_at_ns = given_up, now_ns
            self._backlog.give_up(sorted(self._alignment.processes()))
        return self._given_up

    def _count_held_too_many(self, operations: Ids) -> None:
        """Counts those of these operations that wait for a further capture of their process, and not for their turn."""
        table = self._store.operations
        rows = table.take(operations[operations >= table.first], "process", "match")
        waits_for_capture = np.zeros(len(self._store.processes), np.bool_)
        waits_for_capture[sorted(self._alignment.captured())] = True
        waits_for_capture[self._backlog.queued()] = False
        lost = waits_for_capture[rows["process"]] & (rows["match"] == Match.PENDING)
        self._store.skipped.update({_HELD_TOO_MANY: int(np.count_nonzero(lost))})
