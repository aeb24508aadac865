"""Finds dumps of PyTorch's Flight Recorder by pattern, and reads each once it is whole.

A rank writes its dump when a collective takes too long, and again if it is asked to; each state of a file is a source
of its own. A dump that is being written lacks its end and cannot be read: it is tried at each look, and is a gap if it
stays the same for ten.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ncclscope_agent.files.follower import FollowerStatistics
from ncclscope_agent.files.paths import LinkError, PathPatterns
from ncclscope_agent.files.recognise import ENOUGH_BYTES, FileKind, recognise
from ncclscope_agent.sources.flight_recorder.dump import dump_batch, unreadable_dump
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import FormatError
from ncclscope_wire.messages import Position
from ncclscope_wire.records import Source, SourceKind

MOST_LIVE_BYTES: Final = 16 << 20
"""Of a dump: 2,000 entries take 0.3 MB. Larger ones are left to `ncclscope analyze`, which has no job beside it."""
_LOOKS: Final = 10
"""At a file that stays the same and cannot be read, before that is reported."""
_READ_AT_ONCE: Final = 8
_BYTES_AT_ONCE: Final = 4 << 20
"""Until the next poll, and with it the agent's budget: a large dump takes seconds of a core."""


@dataclass(slots=True)
class _Seen:
    """A file as it was at the last look."""

    key: str
    looks: int = 0
    is_done: bool = False


class FlightDumpFollower:
    """Reads the dumps that match some patterns; files that are something else are counted and left alone."""

    def __init__(self, patterns: Sequence[str], *, follow_links: bool = False) -> None:
        self._names = PathPatterns(patterns, follow_links=follow_links)
        self._seen: dict[Path, _Seen] = {}
        self._positions: Mapping[str, Position] = {}
        self._skipped: Counter[str] = Counter()
        self._bytes_read = 0
        self._has_more = False

    def poll(self, now_wall_ns: int) -> Iterator[Batch]:
        """One batch for each dump that is whole since the last look, and for each that cannot be read."""
        self._has_more, tried, begun_at = False, 0, self._bytes_read
        paths = self._names.paths()
        for gone in self._seen.keys() - set(paths):
            del self._seen[gone]
        for path in paths:
            handle = self._open(path)
            if handle is None:
                continue
            try:
                known = self._look(path, os.fstat(handle))
                if known.is_done:
                    continue
                if tried == _READ_AT_ONCE or self._bytes_read - begun_at > _BYTES_AT_ONCE:
                    self._has_more = True
                    return
                tried += 1
                batch = self._read(
                    handle, known, Source(kind=SourceKind.FLIGHT_RECORDER, name=path.name, key=known.key)
                )
            except OSError:
                self._skipped["file_unreadable"] += 1
                continue
            finally:
                os.close(handle)
            if batch is not None:
                yield replace(batch, observed_at_ns=now_wall_ns)

    def reset(self, positions: Mapping[str, Position]) -> None:
        """Looks at all dumps again, and reads those that the service does not have."""
        self._positions = positions
        self._seen.clear()

    def close(self, now_wall_ns: int) -> Iterator[Batch]:
        """What can be read now."""
        yield from self.poll(now_wall_ns)

    def holds(self, key: str, position: Position) -> bool:
        """Whether a dump is there as it was; wherever it is read from, it is read whole."""
        del position
        return any(known.key == key for known in self._seen.values())

    def statistics(self) -> FollowerStatistics:
        """Counts since this follower was made."""
        waiting = sum(not known.is_done for known in self._seen.values())
        return FollowerStatistics(
            files=len(self._seen),
            files_waiting=waiting,
            bytes_read_total=self._bytes_read,
            skipped=dict(self._skipped),
        )

    @property
    def has_more(self) -> bool:
        """Whether the last poll left dumps that can be read."""
        return self._has_more

    def _open(self, path: Path) -> int | None:
        try:
            handle, _ = self._names.open(path)
        except LinkError:
            self._skipped["file_is_a_link"] += 1
            return None
        except OSError:
            self._skipped["file_unreadable"] += 1
            return None
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
        return None

    def _look(self, path: Path, status: os.stat_result) -> _Seen:
        key = f"flight:{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
        known = self._seen.get(path)
        if known is None or known.key != key:
            position = self._positions.get(key)
            known = self._seen[path] = _Seen(key, is_done=position is not None and position.is_complete)
        known.looks += 1
        return known

    def _read(self, handle: int, known: _Seen, source: Source) -> Batch | None:
        """What an open dump says; None if it is something else, or not whole yet."""
        size = os.fstat(handle).st_size
        data = os.pread(handle, min(size, MOST_LIVE_BYTES), 0)
        self._bytes_read += len(data)
        kind = recognise(data[:ENOUGH_BYTES], source.name)
        if kind is not FileKind.FLIGHT_RECORDER:
            known.is_done = kind is not FileKind.EMPTY and known.looks >= _LOOKS
            self._skipped.update({"file_not_a_dump": 1} if known.is_done else {})
            return None
        try:
            if size > MOST_LIVE_BYTES:
                raise FormatError(f"{source.name} has {size} bytes: read it with ncclscope analyze")
            batch = dump_batch(data, source)
        except FormatError as error:
            known.is_done = known.looks >= _LOOKS
            return unreadable_dump(source, str(error)) if known.is_done else None
        known.is_done = True
        return batch
