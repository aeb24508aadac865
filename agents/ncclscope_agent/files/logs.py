"""Follows logs and dumps of NCCL Inspector: finds them by pattern, opens, stats and reads them, a fair share at a time.

`finding.py` opens the files, `reading.py` reads them, this module says why one ended. Nothing here sleeps or waits: the
caller calls `look` at its tick, and `poll` when batches are wanted: making them costs by file and batch more than by
line.

Known losses: a file that is rotated twice between two looks loses the middle one; one that was deleted is let go after
`grace_ns`, and what its writer writes to it later is not seen; a copy whose name matches a pattern too (logrotate's
copytruncate) is read as a file of its own.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ncclscope_agent.files.finding import FileFinder, FollowLimits, OpenFile
from ncclscope_agent.files.follower import FollowerStatistics
from ncclscope_agent.files.paths import PathPatterns
from ncclscope_agent.files.reading import Begun, FileReading
from ncclscope_agent.files.release import LogReleaser, ReleaseLimits, data_after
from ncclscope_agent.files.tail import Decision, FileIdentity, Verdict, identity_in
from ncclscope_agent.sources.nccl_log.batches import TextBatch, batches_of
from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import Position
from ncclscope_wire.records import Source, SourceGap, SourceKind

GONE: Final = "gone"
"""The reason of the gap that a source leaves if its file is gone."""
_DETAILS: Final = {
    "truncated": "{name} was truncated or rewritten; {lost} bytes that were seen were not read before.",
    "deleted": "{name} was deleted, and let go after 10 minutes without room for it; {lost} bytes were not read.",
    "unreadable": "{name} cannot be read any more; {lost} bytes were not read. Look at the disk and the mount.",
}


def with_reason(last: TextBatch | Batch, decision: Decision) -> TextBatch | Batch:
    """The last batch of a source, with a gap if something of it was not read."""
    if decision.reason is None:
        return last
    detail = _DETAILS[decision.reason].format(name=last.source.name, lost=decision.lost_bytes)
    gap = SourceGap(reason=decision.reason, amount=decision.lost_bytes, unit="bytes", detail=detail)
    return replace(last, gaps=(*last.gaps, gap))


def gone_sources(
    positions: Mapping[str, Position], *, followed: Collection[str], unread: Collection[FileIdentity]
) -> dict[str, Position]:
    """The sources with a position that no reader has found, by key, but for those that were read to their end.

    `followed`: keys of sources that are read. `unread`: files that are there and could not be looked into.
    """
    gone: dict[str, Position] = {}
    for key, position in positions.items():
        identity = identity_in(key)
        if not (identity is None or position.is_complete or key in followed or identity in unread):
            gone[key] = position
    return gone


def last_batch_of(key: str, position: Position, kind: SourceKind, now_ns: int) -> Batch:
    """The end of a source that is gone. Its name is known to the service; here only its key is."""
    detail = (
        f"what followed byte {position.end} (line {position.end_line}) was deleted, renamed or rewritten while no "
        "agent read it: whether anything did is not known. Keep logs until an agent has run again."
    )
    return Batch(
        source=Source(kind=kind, name=key, key=key),
        begin=position.end,
        end=position.end,
        end_line=position.end_line,
        is_last=True,
        observed_at_ns=now_ns,
        gaps=(SourceGap(reason=GONE, amount=0, unit="bytes", detail=detail),),
    )


_GONE_AFTER_NS: Final = 30_000_000_000
"""A file whose source is known may appear so late: its directory is mounted after the agent has begun."""


class LogFollower:
    """Follows all files of a kind that match some patterns, and gives what they say as batches.

    `kind` is NCCL_LOG or INSPECTOR; files that are something else are counted and left alone.
    `zones_ns`: what local time may be ahead of UTC in these logs, the likeliest first; of several, each file's last
    change tells its own (`reading.py`).
    `positions` tells by source key where a source is to be read on; the key is `tail.source_key`.
    Batches of one source are contiguous and in order; a source whose file was rotated away or deleted ends with a batch
    that has `is_last`, one whose file was truncated, or is gone when reading begins again, with a SourceGap besides.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        *,
        root: Path | None = None,
        kind: SourceKind = SourceKind.NCCL_LOG,
        zones_ns: Sequence[int] = (0,),
        positions: Mapping[str, Position] = MappingProxyType({}),
        limits: FollowLimits | None = None,
        release_limits: ReleaseLimits | None = None,
        release_owner: int | None = None,
        follow_links: bool = False,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._kind = kind
        self._monotonic_ns = monotonic_ns
        self._limits = limits or FollowLimits()
        self._skipped: Counter[str] = Counter()
        names = PathPatterns(patterns, root, follow_links=follow_links)
        self._finder = FileFinder(names, self._limits, self._skipped, has_zones=len(zones_ns) > 1)
        self._reading = FileReading(kind, names, zones_ns, self._limits, self._skipped, positions=positions)
        self._releaser = LogReleaser(limits=release_limits, owner=release_owner)
        self._looks_for_gone = True
        """Sources that are gone are still to be reported."""
        self._began_ns: int | None = None
        """When the first poll at these positions was."""
        self._beside: Sequence[LogFollower] = ()
        self._reports_gone = True
        self._turn = 0

    @property
    def has_more(self) -> bool:
        """Whether the last poll took its share and left something unread: poll again at once.

        What was written while it was read does not count: of a log that grows all the time, that can wait.
        """
        return self._reading.was_cut_short and any(
            file.tail.unread_bytes and file.reader is not None for file in self._finder.files.values()
        )

    def nudge(self) -> None:
        """Says, from any thread, that files may have appeared, moved or gone: the next poll looks for them."""
        self._finder.nudge()

    def report_gone_for(self, others: Sequence[LogFollower]) -> None:
        """Reports sources that are gone for these too, which are given the same positions."""
        self._beside = others
        for other in others:
            other._reports_gone = False

    def look(self, now_wall_ns: int) -> bool:
        """Reads ahead what is new in files that are known, for the next `poll`; True: there is reason to ask for it.

        That is when much has gathered, a file has more than its share, a source ends, or files are to be looked for.
        """
        is_asked = self._finder.is_due(now_wall_ns)
        until_ns = self._monotonic_ns() + self._limits.poll_ns
        for file in self._finder.files.values():
            if self._reading.ahead_bytes >= self._limits.gathered_bytes or self._monotonic_ns() >= until_ns:
                return True
            if file.reader is not None and file.last_decision is None:
                decision = self._look_at(file, now_wall_ns, self._limits.bytes_per_turn)
                if decision.ends_source:
                    file.last_decision = decision
                is_asked |= decision.verdict is not Verdict.WAIT
        return is_asked

    def poll(self, now_wall_ns: int) -> list[Batch]:
        """New batches: what was read ahead, and at most `bytes_per_poll` in all and `bytes_per_turn` of each file.

        On a slow disk it ends after `poll_ns`, and the next one goes on with other files.
        Never raises for a file: one that cannot be read is counted, and tried again at the next scan.
        """
        if self._finder.is_due(now_wall_ns):
            self._finder.scan(now_wall_ns)
        until_ns = self._monotonic_ns() + self._limits.poll_ns
        read: list[TextBatch | Batch] = []
        budget = self._limits.bytes_per_poll
        self._reading.was_cut_short = False
        order = list(self._finder.files.values())
        self._turn = (self._turn + 1) % max(1, len(order))
        for file in order[self._turn :] + order[: self._turn]:
            if budget <= 0 or self._monotonic_ns() >= until_ns:
                self._reading.was_cut_short = True
                break
            before = self._reading.bytes_read
            read += self._take_turn(file, now_wall_ns, budget)
            budget -= self._reading.bytes_read - before
        return self._counted(batches_of(read)) + self._gone(now_wall_ns)

    def notice(self, now_wall_ns: int) -> None:
        """Looks at the sizes of the files and reads nothing: what waits is known, and what is lost of it meanwhile.

        To be called while there is no room for more. Files that were deleted are not held for long then.
        """
        for file in self._finder.files.values():
            with suppress(OSError):  # the next look reports it
                if file.last_decision is None:
                    self._notice(file, now_wall_ns)

    def _notice(self, file: OpenFile, now_ns: int) -> None:
        status = os.fstat(file.handle)
        file.tail.on_notice(status.st_size, file.head())
        if status.st_nlink > 0:
            file.nameless_since_ns = None
        elif file.nameless_since_ns is None or now_ns < file.nameless_since_ns:
            file.nameless_since_ns = now_ns
        elif now_ns - file.nameless_since_ns >= self._limits.unread_grace_ns:
            file.last_decision = file.tail.give_up("deleted")
            file.give_back()

    def reset(self, positions: Mapping[str, Position]) -> None:
        """Forgets all files, dictionaries too, and goes on at these positions. Gives nothing."""
        for file in list(self._finder.files.values()):
            self._drop(file)
        self._finder.forget()
        self._reading.ends.clear()
        self._reading.positions = positions
        self._reading.was_cut_short = False
        self._looks_for_gone, self._began_ns = True, None

    def close(self, now_wall_ns: int | None = None) -> list[Batch]:
        """Reads what is left and closes all files, if nothing more will be written.

        A last line without a newline is read if it is whole, and each source gets its last batch. An agent
        that stops while the job goes on does not call this: it leaves unfinished lines to the next one.
        """
        read: list[TextBatch | Batch] = []
        for file in list(self._finder.files.values()):
            read += self._read_to_the_end(file, now_wall_ns)
            if file.tail.identity in self._finder.files:
                self._drop(file)
        return self._counted(batches_of(read))

    def release(self, applied: Mapping[str, int]) -> int:
        """Has the space of what was applied given back; returns how many bytes that were.

        Only of files in which operations of NCCL were read: others match the pattern by chance or malice.
        `applied` tells by source key how far the service has a source. Not to be called while `poll` runs.
        """
        released = 0
        followed_keys: set[str] = set()
        for file in self._finder.files.values():
            if file.reader is not None:
                key = file.reader.source.key
                followed_keys.add(key)
                if not (isinstance(file.reader, NcclLogReader) and file.reader.has_read_operations):
                    continue
                released += self._releaser.release(
                    file.handle,
                    key=key,
                    name=file.reader.source.name,
                    applied=min(applied.get(key, 0), file.reader.position),
                    folder_owner=file.folder_owner,
                    is_same=file.is_same,
                )
        self._releaser.keep_only(followed_keys)
        return released

    def holds(self, key: str, position: Position) -> bool:
        """Whether the file of this source is there, with what lies behind that position and no hole right there."""
        for file in self._finder.files.values():
            if file.reader is not None and file.reader.source.key == key:
                size = file.size()
                return position.end == size or (
                    position.end < size and data_after(file.handle, position.end) == position.end
                )
        return False

    def statistics(self) -> FollowerStatistics:
        """Counts since this follower was made, and what is unread now.

        Files that cannot be followed are among what was skipped, once per look: "file_unreadable", "file_is_a_link",
        "file_not_a_log" ("file_not_inspector"), "file_too_many"; and those whose space is not given back, by reason.
        """
        files = self._finder.files.values()
        refused = {f"release_{reason}": number for reason, number in self._releaser.refused.items()}
        return FollowerStatistics(
            files=len(files),
            lines_total=self._reading.lines,
            bytes_read_total=self._reading.bytes_read,
            lag_bytes=self._reading.ahead_bytes + sum(file.tail.unread_bytes for file in files),
            skipped={**self._skipped, **refused},
        )

    def _counted(self, batches: list[Batch]) -> list[Batch]:
        for batch in batches:
            if batch.counts.skipped:
                self._skipped.update(batch.counts.skipped)
        return batches

    def _gone(self, now_ns: int) -> list[Batch]:
        """The last batches of sources whose files are gone, once, when these have had time to appear."""
        if not self._looks_for_gone:
            return []
        if self._began_ns is None or now_ns < self._began_ns:
            self._began_ns = now_ns
        have_others_begun = all(each._began_ns is not None for each in self._beside)
        if not self._reports_gone or not have_others_begun or now_ns - self._began_ns < _GONE_AFTER_NS:
            return []
        self._looks_for_gone = False
        all_of = (self, *self._beside)
        gone = gone_sources(
            self._reading.positions,
            followed={key for each in all_of for key in each._known_keys()},
            unread={identity for each in all_of for identity in each._finder.unread()},
        )
        return [last_batch_of(key, position, self._kind, now_ns) for key, position in gone.items()]

    def _known_keys(self) -> list[str]:
        """The sources that are read, or were and are at their end."""
        files = self._finder.files.values()
        return [*(file.reader.source.key for file in files if file.reader is not None), *self._reading.ends]

    def _drop(self, file: OpenFile) -> None:
        self._reading.drain_ahead(file)
        self._finder.drop(file)

    def _begin(self, file: OpenFile, *, is_complete: bool = False) -> bool:
        begun = self._reading.begin(file, is_complete=is_complete)
        if begun is Begun.SOMETHING_ELSE:
            self._finder.leave_alone(file)
        elif begun is Begun.NOT_YET and file.tail.is_away:
            self._drop(file)
        return begun is Begun.READING

    def _look_at(self, file: OpenFile, now_ns: int, budget: int) -> Decision:
        return self._reading.look(file, now_ns, budget, is_crowded=self._finder.is_crowded)

    def _take_turn(self, file: OpenFile, now_ns: int, budget: int) -> Sequence[TextBatch | Batch]:
        try:
            if file.reader is None and not self._begin(file):
                return ()
        except OSError:
            self._skipped["file_unreadable"] += 1
            return self._end(file, file.tail.give_up(), now_ns)
        decision = file.last_decision or self._look_at(file, now_ns, budget)
        batches = self._reading.parse(file, now_ns)
        return [*batches, *self._end(file, decision, now_ns)] if decision.ends_source else batches

    def _end(self, file: OpenFile, decision: Decision, now_ns: int) -> list[TextBatch | Batch]:
        """Ends a source; gives its last batch."""
        last = self._reading.parse_end(file, now_ns)
        if decision.verdict is Verdict.BEGIN_ANEW:
            self._finder.restart(file)
        else:
            self._drop(file)
        return [] if last is None else [with_reason(last, decision)]

    def _read_to_the_end(self, file: OpenFile, now_ns: int | None) -> list[TextBatch | Batch]:
        batches: list[TextBatch | Batch] = []
        decision = file.last_decision or Decision(verdict=Verdict.FINISH)
        try:
            if file.reader is None and not self._begin(file, is_complete=True):
                return []
            batches += self._reading.parse(file, now_ns)
            while (size := file.size()) > file.tail.offset and decision.verdict is not Verdict.BEGIN_ANEW:
                decision = self._reading.read(file, size, self._limits.bytes_per_turn)
                batches += self._reading.parse(file, now_ns)
        except OSError:
            self._skipped["file_unreadable"] += 1
            decision = file.tail.give_up()
        last = self._reading.parse_end(file, now_ns)
        return batches if last is None else [*batches, with_reason(last, decision)]
