"""Which processes have said all that they will: live, an aligner that waits for a dead one would wait forever."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ncclscope_service.distinct import distinct
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

_SECOND_NS: Final = 1_000_000_000


@dataclass(slots=True)
class _Life:
    """What was heard of one process, to know when it has said all."""

    heard_at_ns: int = 0
    """Service's wall clock."""
    last_line_ns: int = NO_TIME_NS
    """Of its newest operation, on its host's clock."""
    captured_until_ns: int = NO_TIME_NS
    """End of its newest capture, on its host's clock."""
    is_ended: bool = False

    def is_covered(self) -> bool:
        """Whether captures reach past its last line."""
        return self.captured_until_ns > self.last_line_ns != NO_TIME_NS


@dataclass(slots=True)
class Lives:
    """What was heard of each process. Where no capture covers its last line, silence for `idle_ns` ends it."""

    idle_ns: int
    _lives: dict[int, _Life] = field(default_factory=dict[int, _Life])

    def hear_operations(self, rows: Columns, now_ns: int) -> None:
        """Operations (process, logged_at_ns, observed_at_ns of rows.OPERATION) that came by `now_ns`."""
        times = np.where(rows["logged_at_ns"] == NO_TIME_NS, rows["observed_at_ns"], rows["logged_at_ns"])
        processes, inverse = distinct(rows["process"])
        newest = np.full(len(processes), NO_TIME_NS, np.int64)
        np.maximum.at(newest, inverse, times)
        for process, newest_ns in zip(processes.tolist(), newest.tolist(), strict=True):
            life = self._hear(process, now_ns)
            life.last_line_ns = max(life.last_line_ns, newest_ns)

    def hear_capture(self, process: int, end_ns: int, now_ns: int) -> None:
        """A capture of a process up to `end_ns` of its host's clock."""
        life = self._hear(process, now_ns)
        life.captured_until_ns = max(life.captured_until_ns, end_ns)

    def take_ended(self, has_ended: Callable[[int], bool], now_ns: int) -> list[int]:
        """Processes of which nothing more will come, each once; `has_ended`: whether its communicators have."""
        ended: list[int] = []
        for process, life in self._lives.items():
            if life.is_ended:
                continue
            silence_ns = now_ns - life.heard_at_ns
            patience_ns = min(_SECOND_NS, self.idle_ns) if life.is_covered() else self.idle_ns
            if silence_ns > patience_ns and has_ended(process):
                life.is_ended = True
                ended.append(process)
        return ended

    def leave(self, processes: Iterable[int]) -> None:
        """Forgets these processes."""
        for process in processes:
            self._lives.pop(process, None)

    def has_ended(self, process: int) -> bool:
        """Whether it was among those, and nothing has come of it since."""
        life = self._lives.get(process)
        return life is not None and life.is_ended

    def _hear(self, process: int, now_ns: int) -> _Life:
        life = self._lives.setdefault(process, _Life())
        life.heard_at_ns = now_ns
        life.is_ended = False
        return life
