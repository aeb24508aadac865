"""Rings and trees to their communicators.

The lines name no communicator. A rank's thread prints them while it initialises one, so they belong to the next
communicator of which that thread says Init COMPLETE. *Source:* NCCL `src/init.cc:initTransportsRank`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from ncclscope_service.channels import Channels
from ncclscope_service.store import Store
from ncclscope_wire.facts import Fact, RingNeighbours, RingOrder, TreeNeighbours
from ncclscope_wire.records import CommunicatorEvent

_REMEMBERED: Final = 64
_WAITING: Final = 1024
"""Lines of one thread that wait for their communicator: one initialisation prints 129 of them at most."""


@dataclass(slots=True)
class _Thread:
    """What one thread said, in line order."""

    completed: deque[tuple[int, int]] = field(default_factory=lambda: deque[tuple[int, int]](maxlen=_REMEMBERED))
    """(line, member) of each Init COMPLETE."""
    waiting: deque[Fact] = field(default_factory=lambda: deque[Fact](maxlen=_WAITING))


class ChannelsJoin:
    """Ties rings and trees to communicators in one store."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._threads: dict[tuple[int, str | None, int | None, int | None], _Thread] = {}

    def feed(self, source: int, completed: Sequence[tuple[CommunicatorEvent, int]], told: Sequence[Fact]) -> None:
        """Takes the Init COMPLETE events of a batch with their members, and its facts."""
        touched: dict[int, _Thread] = {}
        for event, member in completed:
            thread = self._thread(source, event.host, event.pid, event.tid)
            thread.completed.append((event.line, member))
            touched[id(thread)] = thread
        for fact in told:
            if isinstance(fact, RingNeighbours | RingOrder | TreeNeighbours):
                thread = self._thread(source, fact.host, fact.pid, fact.tid)
                thread.waiting.append(fact)
                touched[id(thread)] = thread
        for thread in touched.values():
            self._tie(thread)

    def leave(self, sources: Collection[int]) -> None:
        """Nothing more comes of these sources."""
        for key in [key for key in self._threads if key[0] in sources] if sources else ():
            del self._threads[key]

    def _thread(self, source: int, host: str | None, pid: int | None, tid: int | None) -> _Thread:
        return self._threads.setdefault((source, host, pid, tid), _Thread())

    def _tie(self, thread: _Thread) -> None:
        lines = [line for line, _ in thread.completed]
        while thread.waiting:
            at = bisect_right(lines, thread.waiting[0].line)
            if at == len(lines):
                return
            fact = thread.waiting.popleft()
            communicator = self._store.communicators[self._store.members[thread.completed[at][1]].communicator]
            if communicator.size > 0:
                self._store.channels.setdefault(communicator.index, Channels(communicator.size)).take(fact)
