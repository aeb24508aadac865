"""Rules by which rows, sources, processes and jobs leave memory."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ncclscope_service.store.records import REFERENCED_AT_ONCE
from ncclscope_service.store.settings import RETENTION_EVERY_NS, WATERMARKS_EVERY_NS
from ncclscope_service.store.tables import Store, hosts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """Where the tables ended at some moment: what lies before is at least that old."""

    at_ns: int
    operations: int = 0
    kernels: int = 0
    replays: int = 0
    collectives: int = 0
    outside: int = 0
    ranges: int = 0
    busy: int = 0
    inspected: int = 0
    captures: int = 0


@dataclass(slots=True)
class Watermarks:
    """Watermarks at some moments, a second apart at least, oldest first."""

    _recorded: deque[Watermark] = field(default_factory=deque[Watermark])

    def record(self, known: Store, now_ns: int) -> None:
        """Records where the tables end now."""
        if self._recorded and now_ns - self._recorded[-1].at_ns < WATERMARKS_EVERY_NS:
            return
        self._recorded.append(
            Watermark(
                at_ns=now_ns,
                operations=known.operations.next_id,
                kernels=known.kernels.next_id,
                replays=known.replays.next_id,
                collectives=known.collectives.next_id,
                outside=known.outside.next_id,
                ranges=known.ranges.next_id,
                busy=known.busy.next_id,
                inspected=known.inspected.next_id,
                captures=known.captures.next_id,
            )
        )

    def at(self, at_ns: int) -> Watermark | None:
        """The newest at or before a time; None if that is too long ago."""
        later = bisect_right(self._recorded, at_ns, key=lambda each: each.at_ns)
        return self._recorded[later - 1] if later else None

    def arrived_at(self, operation: int) -> int | None:
        """By when that operation had arrived; None if it came after the last watermark, or too long ago."""
        found = None
        for each in reversed(self._recorded):
            if each.operations <= operation:
                break
            found = each.at_ns
        return found

    def drop_rows(self, known: Store, before_ns: int, *, most_inspected: int) -> None:
        """Drops rows that came before that time from all tables but operations, and older watermarks.

        Kernels stay while an operation points at them; of Inspector's records the newest `most_inspected` stay.
        """
        old = self.at(before_ns) or Watermark(at_ns=before_ns)
        operations = known.operations
        oldest = np.arange(min(len(operations), REFERENCED_AT_ONCE))
        first_kernel = known.kernel_references.first_from(operations.first, operations.rows.values("kernel", oldest))
        known.kernels.drop_before(old.kernels if first_kernel is None else min(old.kernels, first_kernel))
        known.replays.drop_before(old.replays)
        known.collectives.drop_before(old.collectives)
        known.outside.drop_before(old.outside)
        known.ranges.drop_before(old.ranges)
        known.busy.drop_before(old.busy)
        known.captures.drop_before(old.captures)
        known.inspected.drop_before(max(old.inspected, known.inspected.next_id - most_inspected))
        while len(self._recorded) > 1 and self._recorded[1].at_ns <= before_ns:
            self._recorded.popleft()


_Ends: TypeAlias = tuple[int, int, int]
"""Operations, kernels and records of Inspector before these are those of a source, or older."""


@dataclass(slots=True)
class SourceSlots:
    """Places of sources that were read to their end and of which no row is left: new sources take them.

    Captures and rotated logs come for as long as a service runs.
    """

    _known: Store
    _complete: dict[int, _Ends | None] = field(default_factory=dict[int, "_Ends | None"])
    """Sources that were read to their end, and where the tables ended at the first look after that."""
    _free: dict[int, None] = field(default_factory=dict[int, None])
    """The one that is free for longest first."""
    _looked_at_ns: int = 0

    def record_batch(self, source: int, *, is_complete: bool) -> None:
        """A batch of a source came, its last one or another."""
        self._free.pop(source, None)
        self._complete.pop(source, None)
        if is_complete:
            self._complete[source] = None

    def free_slots(self, now_ns: int) -> list[int]:
        """Frees the places of sources of which all rows have left the store, and that are no process's first log.

        Gives those that are free now and were not before; now and then only.
        """
        if 0 <= now_ns - self._looked_at_ns < RETENTION_EVERY_NS:
            return []
        self._looked_at_ns = now_ns
        known = self._known
        tables = known.operations, known.kernels, known.inspected
        firsts = tuple(table.first for table in tables)
        named = set(known.process_source.values())
        freed: list[int] = []
        for source, ends in list(self._complete.items()):
            if ends is None:
                operations, kernels, inspected = (table.next_id for table in tables)
                self._complete[source] = operations, kernels, inspected
            elif source not in named and all(first >= end for first, end in zip(firsts, ends, strict=True)):
                del self._complete[source]
                freed.append(source)
        self._free.update(dict.fromkeys(freed))
        return freed

    def take_slot(self) -> int | None:
        """A place that is free, for another source: what is known of the one before goes over to `Store.retired`."""
        source = next(iter(self._free), None)
        if source is None:
            return None
        del self._free[source]
        known, retired = self._known, self._known.retired
        kind, hosts = known.sources[source].source.kind, hosts_of(known, source)
        retired.kinds[kind] += 1
        if (gaps := known.gaps.pop(source, None)) is not None:
            retired.gaps += gaps.by_reason
            retired.gaps_of_hosts.update(dict.fromkeys(((kind, host) for host in hosts), len(gaps)))
        if torn := known.torn_lines.pop(source, 0):
            retired.torn_lines.update(dict.fromkeys(hosts, torn))
        known.source_hosts.pop(source, None)
        known.source_versions.pop(source, None)
        return source


@dataclass(frozen=True, slots=True)
class Evicted:
    """Processes of which nothing came for so long that what was learned of them is let go."""

    processes: tuple[int, ...]
    communicators: frozenset[int]
    """Those of which no member is left."""
    jobs: frozenset[str]
    """Those of which no process is left."""


@dataclass(slots=True)
class Retention:
    """Silent processes, communicators and jobs, until something comes of them again.

    A service that runs for weeks sees jobs come and go. Their names stay: whoever logs again is known by its name, and
    is learned again.
    """

    communicators: set[int] = field(default_factory=set[int])
    jobs: set[str] = field(default_factory=set[str])
    _processes: set[int] = field(default_factory=set[int])
    _last_seen_ns: dict[int, int] = field(default_factory=dict[int, int])
    """Service's wall clock when something last came of each process that is not evicted."""
    _seen: set[int] = field(default_factory=set[int])
    """Processes of which something came since `update` was last called."""
    _known: int = 0
    """Processes at the last look."""
    _looked_at_ns: int = 0

    def observe(self, processes: Iterable[int]) -> None:
        """Records that something came of these processes."""
        self._seen.update(processes)

    def update(self, known: Store, now_ns: int) -> None:
        """Marks processes of which something came since the last call as present."""
        self._last_seen_ns.update(dict.fromkeys(self._seen, now_ns))
        back = self._seen & self._processes
        self._seen.clear()
        if back:
            self._processes -= back
            self.jobs -= {known.process_job[process] for process in back}
            self.communicators -= {of.communicator for of in known.members if of.process in back}

    def evict_silent(self, known: Store, before_ns: int, now_ns: int) -> Evicted | None:
        """Those of which nothing came since `before_ns`; None if there are none, or the last look was recent."""
        if 0 <= now_ns - self._looked_at_ns < RETENTION_EVERY_NS:
            return None
        self._looked_at_ns = now_ns
        self.observe(range(self._known, len(known.processes)))
        self.update(known, now_ns)
        self._known = len(known.processes)
        silent = {process for process, last_seen_ns in self._last_seen_ns.items() if last_seen_ns < before_ns}
        if not silent:
            return None
        self._processes |= silent
        for process in silent:
            del self._last_seen_ns[process]
        left = {known.process_job[process] for process in self._last_seen_ns}
        gone = Evicted(
            processes=tuple(sorted(silent)),
            communicators=frozenset(self._without_members(known)),
            jobs=frozenset({known.process_job[process] for process in silent} - left),
        )
        self.communicators |= gone.communicators
        self.jobs |= gone.jobs
        return gone

    def _without_members(self, known: Store) -> Iterable[int]:
        for each in known.communicators:
            if each.members and each.index not in self.communicators:
                processes = {known.members[member].process for member in each.members.values()}
                if processes <= self._processes:
                    yield each.index
