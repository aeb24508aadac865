"""A follower of lists of words instead of files, for tests of what carries its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from wire.sample_batches import log_source

from ncclscope_agent.files.follower import FollowerStatistics
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import Position


class FakeFollower:
    """One source whose rows are numbered lines; every poll reads up to `per_poll` batches of `per_batch` rows."""

    def __init__(self, rows: int, *, number: int = 1, per_batch: int = 10, per_poll: int = 3) -> None:
        self.rows = rows
        self.source = log_source(number)
        self.per_batch = per_batch
        self.per_poll = per_poll
        self.at = 0
        self.resets: list[int] = []
        self.has_template = False
        self.closed = False
        self.has_more = False

    def poll(self, now_wall_ns: int) -> Iterator[Batch]:
        for _ in range(self.per_poll):
            if self.at >= self.rows:
                return
            yield self._batch(now_wall_ns)

    def reset(self, positions: Mapping[str, Position]) -> None:
        self.at = positions.get(self.source.key, Position(end=0)).end
        self.resets.append(self.at)
        self.has_template = False

    def close(self, now_wall_ns: int) -> list[Batch]:
        self.closed = True
        return []

    def holds(self, key: str, position: Position) -> bool:
        return key == self.source.key and position.end <= self.rows

    def statistics(self) -> FollowerStatistics:
        return FollowerStatistics(files=1, lines_total=self.at)

    def _batch(self, now_wall_ns: int) -> Batch:
        begin, self.at = self.at, min(self.rows, self.at + self.per_batch)
        operations = np.zeros(self.at - begin, tables.OPERATION_ROW)
        operations["line"] = np.arange(begin, self.at)
        is_first, self.has_template = not self.has_template, True
        return Batch(
            source=self.source,
            begin=begin,
            end=self.at,
            end_line=self.at,
            observed_at_ns=now_wall_ns,
            strings=("AllReduce",) if is_first else (),
            threads=np.zeros(int(is_first), tables.THREAD),
            operation_templates=np.zeros(int(is_first), tables.OPERATION_TEMPLATE),
            operations=operations,
        )
