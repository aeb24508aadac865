"""A chapter of the spool: one session, and what of it is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ncclscope_agent.spool_records import Frame
from ncclscope_wire.messages import PROTOCOL_VERSION


@dataclass(slots=True)
class Chapter:
    """One session, and what of it the spool has."""

    number: int
    session_id: str
    protocol_version: int = PROTOCOL_VERSION
    acknowledged: int = 0
    """Last sequence number that is not needed any more."""
    last: int = 0
    """Last sequence number that it has."""
    expired: int = 0
    """Last sequence number that was dropped for its age."""
    entries: int = 0
    """Records of dictionaries made so far."""
    entries_bytes: int = 0
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=dict[str, list[tuple[int, int]]])
    """What it has had of each source, in order: more than one stretch where something between was lost."""
    gone: dict[str, int] = field(default_factory=dict[str, int])
    """Up to where that is no longer there, by source: acknowledged, or dropped."""

    @property
    def entries_name(self) -> str:
        """The file of its dictionary entries."""
        return f"chapter-{self.number:06d}"

    @property
    def is_done(self) -> bool:
        """Nothing of it is wanted any more, unless something is added."""
        return self.acknowledged >= self.last

    def has(self, key: str) -> Iterable[tuple[int, int]]:
        """The stretches of a source that are still there."""
        gone = self.gone.get(key, 0)
        for begin, end in self.ranges.get(key, ()):
            if end > gone:
                yield max(begin, gone), end

    def note(self, key: str, begin: int, end: int) -> None:
        """A batch of that source was added."""
        stretches = self.ranges.setdefault(key, [])
        if stretches and stretches[-1][1] == begin:
            stretches[-1] = (stretches[-1][0], end)
        else:
            stretches.append((begin, end))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where batches are: in a file, which is to be scanned, or in memory."""

    name: str | None
    frames: Sequence[Frame]
    last: int
    """Where fewer are found than up to this one, the others are lost."""
