"""Tuning tables to their communicators.

A table names no communicator. Rank 0's thread prints it while it initialises one, so it belongs to the next
communicator of which that thread says Init COMPLETE. *Source:* NCCL `src/init.cc:initTransportsRank`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from ncclscope_service.store import Store
from ncclscope_wire.records import CommunicatorEvent
from ncclscope_wire.topology import TuningTableSeen

_REMEMBERED: Final = 64
"""Communicators and tables of one thread; both come in one batch or in the next."""


@dataclass(slots=True)
class _Thread:
    """What one thread said."""

    completed: deque[tuple[int, int]] = field(default_factory=lambda: deque[tuple[int, int]](maxlen=_REMEMBERED))
    """(line, member) of each Init COMPLETE, in order."""
    waiting: deque[TuningTableSeen] = field(default_factory=lambda: deque[TuningTableSeen](maxlen=_REMEMBERED))


class TablesJoin:
    """Ties tables to communicators in one store."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._threads: dict[tuple[int, str, int, int], _Thread] = {}

    def feed(
        self,
        source: int,
        completed: Sequence[tuple[CommunicatorEvent, int]],
        tables: Sequence[TuningTableSeen],
    ) -> None:
        """Takes the Init COMPLETE events of a batch with their members, and its tables."""
        touched: list[_Thread] = []
        for event, member in completed:
            if event.rank == 0:
                thread = self._thread(source, event.host, event.pid, event.tid)
                thread.completed.append((event.line, member))
                touched.append(thread)
        for table in tables:
            thread = self._thread(source, table.host, table.pid, table.tid)
            thread.waiting.append(table)
            touched.append(thread)
        for thread in touched:
            self._tie(thread)

    def leave(self, sources: Collection[int]) -> None:
        """Nothing more comes of these sources."""
        for key in [key for key in self._threads if key[0] in sources] if sources else ():
            del self._threads[key]

    def _thread(self, source: int, host: str, pid: int, tid: int) -> _Thread:
        return self._threads.setdefault((source, host, pid, tid), _Thread())

    def _tie(self, thread: _Thread) -> None:
        for table in list(thread.waiting):
            member = next((member for line, member in thread.completed if line > table.line), None)
            if member is None:
                continue
            thread.waiting.remove(table)
            of = self._store.members[member]
            if of.rank == 0:
                self._store.tuning_tables.setdefault(of.communicator, table)
