"""The files of one simulated host as a follower that an agent asks: logs that grow, exports that are finished."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from benchmarks.load.recorded import RecordedHost, RecordedLog
from numpy.typing import NDArray

from ncclscope_agent.files.follower import FollowerStatistics
from ncclscope_agent.sources.nsys.export import EXPORT_END
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.messages import Position
from ncclscope_wire.records import Counts, Source, SourceKind

_Times = NDArray[np.int64]
_FOR_EVER_NS = 10**17


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of wall time."""

    name: str
    seconds: float
    speed: float
    """Seconds of the job per second."""


class Schedule:
    """Job times to wall times and back; job time 0 is `begin_ns`. After the last phase its speed goes on."""

    def __init__(self, begin_ns: int, phases: Sequence[Phase]) -> None:
        walls, jobs = [0], [0]
        for phase in phases:
            walls.append(walls[-1] + round(phase.seconds * 1e9))
            jobs.append(jobs[-1] + round(phase.seconds * phase.speed * 1e9))
        walls.append(walls[-1] + _FOR_EVER_NS)
        jobs.append(jobs[-1] + round(_FOR_EVER_NS * phases[-1].speed))
        self.begin_ns = begin_ns
        """Wall time of job time 0."""
        self._walls, self._jobs = np.array(walls, np.float64), np.array(jobs, np.float64)
        # Exact from here to the last phase: within 100 days nanoseconds are whole numbers of a float64.

    def wall_ns(self, job_ns: _Times) -> _Times:
        """UTC ns of these times of the job."""
        found: _Times = np.rint(np.interp(job_ns, self._jobs, self._walls)).astype(np.int64) + self.begin_ns
        return found

    def job_ns(self, wall_ns: int) -> int:
        """The time of the job at this moment; below 0 before it begins."""
        past = wall_ns - self.begin_ns
        return past if past < 0 else int(np.interp(past, self._walls, self._jobs))


_AT_MOST: Final = 400
"""Lines of one batch: what 64 KiB of a log hold, in which an agent reads it."""
_ROWS_OF_EXPORT: Final = 10_000
_FINISHED_AFTER_NS: Final = 2_000_000_000
"""nsys writes a report, and exports it, before an agent can read it."""


class LogStream:
    """The log of one rank, its stretch repeated for ever."""

    def __init__(self, log: RecordedLog, period_ns: int, offset_ns: int) -> None:
        self._log = log
        self._period_ns = period_ns
        self._offset_ns = offset_ns
        self._times = np.maximum.accumulate(log.rows["logged_at_ns"])
        self._bytes_each = max(1, log.bytes // len(log.rows))
        self._next = 0
        self._has_spoken = False

    def due(self, job_ns: int) -> int:
        """How many lines there are at this time of the job."""
        if job_ns < 0:
            return 0
        stretch, within = divmod(job_ns, self._period_ns)
        return stretch * len(self._times) + int(np.searchsorted(self._times, within, side="right"))

    def left(self, job_ns: int) -> int:
        """How many of them were not read."""
        return max(0, self.due(job_ns) - self._next)

    def reset(self, positions: Mapping[str, Position]) -> None:
        """Goes on where the service stands."""
        known = positions.get(self._log.head.source.key)
        self._next = 0 if known is None else (known.end - self._log.head.end) // self._bytes_each
        self._has_spoken = False

    def read(self, job_ns: int, schedule: Schedule) -> Batch | None:
        """The next lines; None where there is nothing new."""
        end = min(self.due(job_ns), self._next + _AT_MOST)
        if end <= self._next:
            return None
        begin, self._next = self._next, end
        rows = self._rows(np.arange(begin, end, dtype=np.int64), schedule)
        head = self._log.head
        first = not self._has_spoken
        self._has_spoken = True
        position = head.end + begin * self._bytes_each
        return Batch(
            source=head.source,
            begin=0 if first and begin == 0 else position,
            end=head.end + end * self._bytes_each,
            end_line=int(rows["line"][-1]),
            observed_at_ns=int(rows["logged_at_ns"][-1]),
            strings=head.strings if first else (),
            threads=head.threads[: None if first else 0],
            operation_templates=head.operation_templates[: None if first else 0],
            communicators=head.communicators if first else (),
            versions=head.versions if first else (),
            operations=rows,
            counts=Counts(understood={"operation": len(rows)}),
        )

    def _rows(self, numbers: NDArray[np.int64], schedule: Schedule) -> Columns:
        stretch, at = np.divmod(numbers, len(self._times))
        rows: Columns = self._log.rows[at]
        rows["logged_at_ns"] = schedule.wall_ns(self._times[at] + stretch * self._period_ns) + self._offset_ns
        rows["line"] += (stretch * self._log.lines).astype(np.uint32)
        rows["op_count"] += stretch.astype(np.uint64) * self._log.op_counts[at]
        return rows


class ExportStream:
    """One export of `stretches` stretches out of every `period` of them, each a source of its own."""

    def __init__(self, host: RecordedHost, period_ns: int, offset_ns: int, *, stretches: int, period: int) -> None:
        self._export = host.export
        self._period_ns = period_ns
        self._offset_ns = offset_ns
        self._stretches = stretches
        self._period = period
        self._next = 0
        self.kernels = 0
        """Given so far."""

    def reset(self, positions: Mapping[str, Position]) -> None:
        """Leaves out what the service has."""
        self._next = sum(known.is_complete for key, known in positions.items() if key.startswith("capture"))

    def is_due(self, job_ns: int) -> bool:
        """Whether the next export is finished."""
        if not self._stretches:
            return False
        end = (self._next * self._period + self._stretches) * self._period_ns
        return job_ns >= end + _FINISHED_AFTER_NS

    def read(self, schedule: Schedule) -> Iterator[Batch]:
        """The batches of the next export."""
        number, self._next = self._next, self._next + 1
        first = number * self._period
        key = f"capture_{number:04d}.sqlite"
        known = replace(self._export.dictionaries, source=Source(kind=SourceKind.NSYS, name=key, key=key))
        empty = replace(known, strings=(), threads=known.threads[:0], kernel_templates=known.kernel_templates[:0],
                        range_templates=known.range_templates[:0])  # fmt: skip
        chunk = 0
        for name, table in self._export.tables.items():
            rows = self._rows(table, name, range(first, first + self._stretches), schedule)
            for begin in range(0, len(rows), _ROWS_OF_EXPORT):
                part = rows[begin : begin + _ROWS_OF_EXPORT]
                of = empty if chunk else known
                match name:
                    case "kernels":
                        yield replace(of, begin=chunk, end=chunk + 1, kernels=part)
                    case "ranges":
                        yield replace(of, begin=chunk, end=chunk + 1, ranges=part)
                    case _:
                        yield replace(of, begin=chunk, end=chunk + 1, busy=part)
                chunk += 1
        amount = self._stretches * len(self._export.tables["kernels"])
        self.kernels += amount
        bounds = np.array([first, first + self._stretches], np.int64) * self._period_ns
        start_ns, end_ns = (schedule.wall_ns(bounds) + self._offset_ns).tolist()
        capture = replace(self._export.capture, start_ns=start_ns, end_ns=end_ns, nccl_kernels=amount)
        yield replace(empty, begin=chunk, end=EXPORT_END, is_last=True, captures=(capture,))

    def _rows(self, table: Columns, name: str, stretches: range, schedule: Schedule) -> Columns:
        parts: list[Columns] = []
        for stretch in stretches:
            rows = table.copy()
            for time in _times_of(rows):
                rows[time] = schedule.wall_ns(rows[time] + stretch * self._period_ns) + self._offset_ns
            if name == "kernels":
                rows["correlation_id"] += stretch * self._export.correlations
            parts.append(rows)
        return np.concatenate(parts)


def _times_of(rows: Columns) -> list[str]:
    return [name for name in rows.dtype.names or () if name.endswith("_ns")]


class HostFollower:
    """All files of one host."""

    def __init__(
        self, host: RecordedHost, period_ns: int, schedule: Schedule, *, offset_ns: int, stretches: int, period: int,
        end_ns: int,
    ) -> None:  # fmt: skip
        """`end_ns`: wall time after which nothing more is written."""
        self._logs = [LogStream(log, period_ns, offset_ns) for log in host.logs]
        self._exports = ExportStream(host, period_ns, offset_ns, stretches=stretches, period=period)
        self._schedule = schedule
        self._offset_ns = offset_ns
        self._end_ns = end_ns
        self._left = 0
        self.operations = 0
        """Given so far."""

    def holds(self, key: str, position: Position) -> bool:
        """Nothing of it lies in a file."""
        return False

    @property
    def kernels(self) -> int:
        """Given so far."""
        return self._exports.kernels

    def due(self, wall_ns: int) -> int:
        """Lines that are written at this moment, read or not."""
        job_ns = self._schedule.job_ns(min(wall_ns, self._end_ns))
        return sum(log.due(job_ns) for log in self._logs)

    def poll(self, now_wall_ns: int) -> Iterable[Batch]:
        """New batches; `now_wall_ns` is the host's own clock."""
        job_ns = self._schedule.job_ns(min(now_wall_ns - self._offset_ns, self._end_ns))
        for log in self._logs:
            batch = log.read(job_ns, self._schedule)
            if batch is not None:
                self.operations += len(batch.operations)
                yield batch
        if self._exports.is_due(job_ns):
            yield from self._exports.read(self._schedule)
        self._left = sum(log.left(job_ns) for log in self._logs)

    def reset(self, positions: Mapping[str, Position]) -> None:
        """Goes on where the service stands."""
        for log in self._logs:
            log.reset(positions)
        self._exports.reset(positions)

    def close(self, now_wall_ns: int) -> Iterable[Batch]:
        """Nothing: all lines are whole."""
        del now_wall_ns
        return ()

    def statistics(self) -> FollowerStatistics:
        """Health of an agent as it tells it."""
        return FollowerStatistics(files=len(self._logs), lines_total=self.operations, lag_bytes=200 * self._left)

    @property
    def has_more(self) -> bool:
        """Whether lines wait."""
        return self._left > 0
