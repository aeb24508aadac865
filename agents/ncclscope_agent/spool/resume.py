"""Where a service that lost the session goes on: from the spool, or from the files that readers read again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from ncclscope_agent.spool.records import Chapter
from ncclscope_wire.messages import PROTOCOL_VERSION, Position

START: Final = Position(end=0)


@dataclass(frozen=True, slots=True)
class Resume:
    """Sources that are read from their files again, and where readers go on."""

    left_out: frozenset[str]
    positions: Mapping[str, Position]
    moves_readers: bool


def resume(
    chapters: Collection[Chapter],
    service: Mapping[str, Position],
    readers: Mapping[str, Position],
    holds: Callable[[str, Position], bool],
) -> Resume:
    """Decides by the positions that the service has, and those that the readers have."""
    keys = {key for chapter in chapters for key in chapter.ranges if any(True for _ in chapter.ranges_of(key))}
    left_out = frozenset(key for key in keys if _is_read_again(key, chapters, service.get(key, START), holds))
    begin = dict(service)
    for key in keys - left_out:
        reached, known = readers.get(key), service.get(key, START)
        if reached is not None and not known.is_complete and reached.end >= known.end:
            begin[key] = reached
    moves = any(begin.get(key, START).end != readers.get(key, START).end for key in begin.keys() | readers.keys())
    return Resume(left_out, begin, moves_readers=moves)


def _is_read_again(
    key: str, chapters: Collection[Chapter], known: Position, holds: Callable[[str, Position], bool]
) -> bool:
    """Whether the spool lacks something of a source behind that position, and its file does not."""
    if known.is_complete:
        return False
    at = known.end
    for begin, end in (part for chapter in chapters for part in chapter.ranges_of(key)):
        if begin > at:
            return holds(key, known)
        at = max(at, end)
    # What an earlier version of us spooled is read from the file instead, as far as the service does not have it.
    is_foreign_wanted = any(
        end > known.end
        for chapter in chapters
        if chapter.protocol_version != PROTOCOL_VERSION
        for _, end in chapter.ranges.get(key, ())
    )
    return is_foreign_wanted and holds(key, known)


def is_whole(chapter: Chapter, service: Mapping[str, Position], readers: Mapping[str, Position] | None) -> bool:
    """Whether a service at these positions can take a chapter as it is; `readers`: where those of a live one began."""
    if chapter.acknowledged or chapter.protocol_version != PROTOCOL_VERSION:
        return False
    if any(len(known) > 1 for known in chapter.ranges.values()):
        return False
    starts = {key: known[0][0] for key, known in chapter.ranges.items()}
    if readers is not None:
        starts = {key: known.end for key, known in readers.items()} | starts
        if any(starts.get(key, 0) != known.end for key, known in service.items()):
            return False
    return all(service.get(key, START).end == begin for key, begin in starts.items())
