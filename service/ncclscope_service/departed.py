"""Who has been silent for so long that what was learnt of it is let go: processes, their communicators, their jobs.

A service that runs for weeks sees jobs come and go. What they are called stays: whoever speaks again is known by its
name, and is learnt anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ncclscope_service.store import Store

_APART_NS: Final = 60_000_000_000
"""Between two looks, which go over all processes and communicators."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Whom a look has found to be gone."""

    processes: tuple[int, ...]
    communicators: frozenset[int]
    """Of which no member is left."""
    jobs: frozenset[str]
    """Of which no process is left."""


@dataclass(slots=True)
class Departed:
    """Those who are gone, until something comes of them again."""

    communicators: set[int] = field(default_factory=set[int])
    jobs: set[str] = field(default_factory=set[str])
    _processes: set[int] = field(default_factory=set[int])
    _heard_ns: dict[int, int] = field(default_factory=dict[int, int])
    """The service's wall clock when something last came of each process that is not gone."""
    _spoke: set[int] = field(default_factory=set[int])
    """Processes of which something came since `hear` was last called."""
    _known: int = 0
    """Processes that the last look knew."""
    _looked_at_ns: int = 0

    def note(self, processes: Iterable[int]) -> None:
        """Something came of these processes."""
        self._spoke.update(processes)

    def hear(self, known: Store, now_ns: int) -> None:
        """Those of a store of whom something came since the last time are there now."""
        self._heard_ns.update(dict.fromkeys(self._spoke, now_ns))
        back = self._spoke & self._processes
        self._spoke.clear()
        if back:
            self._processes -= back
            self.jobs -= {known.process_job[process] for process in back}
            self.communicators -= {of.communicator for of in known.members if of.process in back}

    def look(self, known: Store, before_ns: int, now_ns: int) -> Gone | None:
        """Who is gone now: those of whom nothing came since `before_ns`. None where nobody is, or a look was lately."""
        if 0 <= now_ns - self._looked_at_ns < _APART_NS:
            return None
        self._looked_at_ns = now_ns
        self.note(range(self._known, len(known.processes)))
        self.hear(known, now_ns)
        self._known = len(known.processes)
        silent = {process for process, heard_ns in self._heard_ns.items() if heard_ns < before_ns}
        if not silent:
            return None
        self._processes |= silent
        for process in silent:
            del self._heard_ns[process]
        left = {known.process_job[process] for process in self._heard_ns}
        gone = Gone(
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
