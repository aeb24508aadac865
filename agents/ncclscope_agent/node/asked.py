"""Followers of what is asked every few seconds instead of read from a file: NCCL's RAS, the machine's counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import structlog

from ncclscope_agent.files.follower import FollowerStatistics
from ncclscope_wire.batch import Batch
from ncclscope_wire.facts import Fact
from ncclscope_wire.messages import Position
from ncclscope_wire.records import Counts, Source, SourceKind

_log = structlog.get_logger(__name__)

ANSWERED = "answered"
"""The state of what gave all that was asked for."""


class AskedFollower(ABC):
    """To be polled as often as its source is to be asked; no answer is a state, which is counted."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._position = 0
        self._state = ""
        self._looks: dict[str, int] = {}

    @abstractmethod
    def look(self, now_wall_ns: int) -> tuple[Sequence[Fact], str]:
        """What is other than at the last look, and the state: ANSWERED, or the reason why something is missing."""

    @abstractmethod
    def forget(self) -> None:
        """Forgets all looks: the next one says again what is wrong."""

    def poll(self, now_wall_ns: int) -> Iterator[Batch]:
        """A batch if something is other than before, or if the state is."""
        kind = self._source.kind.value
        facts, state = self.look(now_wall_ns)
        self._looks[state] = self._looks.get(state, 0) + 1
        is_other = state != self._state
        if not facts and not is_other:
            return
        if is_other:
            said = f"{self._source.name}: {state}"
            if self._source.kind is SourceKind.RAS:
                _log.info("ras", said=said)
            else:
                _log.info("machine", said=said)
        self._state = state
        is_answered = state == ANSWERED
        yield Batch(
            source=self._source,
            begin=self._position,
            end=self._position + 1,
            observed_at_ns=now_wall_ns,
            facts=tuple(facts),
            counts=Counts(
                understood={f"{kind}_answer": 1} if is_answered else {},
                skipped={f"{kind}_{state}": 1} if is_other and not is_answered else {},
            ),
        )
        self._position += 1

    def reset(self, positions: Mapping[str, Position]) -> None:
        """Goes on behind what the service has, and says again what is wrong."""
        known = positions.get(self._source.key)
        self._position = 0 if known is None else known.end
        self._state = ""
        self.forget()

    def close(self, now_wall_ns: int) -> tuple[Batch, ...]:
        """Nothing is held back."""
        del now_wall_ns
        return ()

    def holds(self, key: str, position: Position) -> bool:
        """Never: an answer is not stored anywhere."""
        del key, position
        return False

    def statistics(self) -> FollowerStatistics:
        """Looks without a whole answer, by reason."""
        kind = self._source.kind.value
        skipped = {f"{kind}_{state}": looks for state, looks in self._looks.items() if state != ANSWERED}
        return FollowerStatistics(files=1, skipped=skipped)

    @property
    def has_more(self) -> bool:
        """Never."""
        return False
