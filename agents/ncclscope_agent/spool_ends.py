"""Where sources were left, by key: the ends of their last batches, of as many as a service knows of an agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from ncclscope_agent.spool_records import Frame
from ncclscope_wire.messages import Position

End: TypeAlias = tuple[int, int, bool]
"""As `Position`: end, end_line, is_complete. Positions are made of these when they are asked for."""

_NOWHERE: Final[End] = (-1, 0, False)
_MAX_SOURCES: Final = 20_000
"""As many sources as a service knows of one agent."""


class Ends:
    """The ends of sources."""

    def __init__(self) -> None:
        self._ends: dict[str, End] = {}

    def __bool__(self) -> bool:
        return bool(self._ends)

    def __contains__(self, key: str) -> bool:
        return key in self._ends

    @property
    def positions(self) -> dict[str, Position]:
        """Where readers go on, by source key."""
        return positions_of(self._ends)

    def note(self, key: str, end: End) -> None:
        """A source was read up to there. One that is complete is forgotten where there are too many."""
        if key not in self._ends and len(self._ends) >= _MAX_SOURCES:
            done = next((known for known, (_, _, is_complete) in self._ends.items() if is_complete), None)
            if done is not None:
                del self._ends[done]
        self._ends[key] = end

    def note_all(self, ends: Mapping[str, End]) -> None:
        """The same of sources that are all known."""
        self._ends.update(ends)

    def take(self, positions: Mapping[str, Position], *, only_further: bool = False) -> None:
        """The same of many; `only_further`: not of those that are known to be further on."""
        for key, position in positions.items():
            end = _end_of(position)
            self.note(key, max(end, self._ends.get(key, _NOWHERE)) if only_further else end)

    def replace(self, positions: Mapping[str, Position]) -> None:
        """Nothing but these counts."""
        self._ends = {key: _end_of(position) for key, position in positions.items()}

    def copy(self) -> Ends:
        """The ends as they are now."""
        made = Ends()
        made._ends = dict(self._ends)
        return made


def end_of_frame(frame: Frame) -> End:
    """Where a batch leaves its source."""
    return frame.end, frame.end_line, frame.is_last


def positions_of(ends: Mapping[str, End]) -> dict[str, Position]:
    """Ends as positions."""
    return {key: Position(end=end, end_line=line, is_complete=done) for key, (end, line, done) in ends.items()}


def _end_of(position: Position) -> End:
    return position.end, position.end_line, position.is_complete
