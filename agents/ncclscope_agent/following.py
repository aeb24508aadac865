"""The followers of the agent: log files and exports, told of changes by a watch, and asked by `app.Agent`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from ncclscope_agent.app import Followed
from ncclscope_agent.config import AgentSettings, zones_ns
from ncclscope_agent.exports import ExportFollower
from ncclscope_agent.files import LogFollower
from ncclscope_agent.health import FollowerStatistics
from ncclscope_agent.paths import PathPatterns
from ncclscope_agent.release import LogReleaser
from ncclscope_agent.watch import DirectoryWatch
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import Position
from ncclscope_wire.records import SourceKind

_log = structlog.get_logger(__name__)

_REFRESH_NS: Final = 2_000_000_000
"""How often directories that were not there are looked for."""
_WILDCARDS: Final = frozenset("*?[%")


class FollowedLogs:
    """`files.LogFollower` as the agent wants it, over logs or dumps of NCCL Inspector."""

    def __init__(
        self, patterns: Sequence[str], *, zones_ns: Sequence[int] = (0,), kind: SourceKind = SourceKind.NCCL_LOG
    ) -> None:
        self._releaser = LogReleaser()
        self._follower = LogFollower(patterns, kind=kind, zones_ns=zones_ns)
        # That other files are closed beside logs says nothing, and may come many times a second.
        self.watch = DirectoryWatch(watched_directories(patterns), self._follower.nudge, closing=False)
        """To be started by the owner."""
        self._refresh_at_ns = 0
        self._unseen = dict.fromkeys(patterns, False)
        """Patterns that nothing has matched so far, and whether that was said."""

    def tells_for(self, others: Sequence[FollowedLogs]) -> None:
        """Tells of sources that are gone for these too, which are followed beside it by the same agent."""
        self._follower.beside = [other._follower for other in others]
        for other in others:
            other._follower.tells_of_gone = False

    def poll(self, now_wall_ns: int) -> Iterable[Batch]:
        """What the files that match say that is new."""
        if now_wall_ns >= self._refresh_at_ns:
            self._refresh_at_ns = now_wall_ns + _REFRESH_NS
            self.watch.refresh()
            self._tell_what_matches()
        return self._follower.poll(now_wall_ns)

    def look(self, now_wall_ns: int) -> bool:
        """Reads what is new ahead of the next `poll`; whether there is reason to ask for that."""
        return self._follower.look(now_wall_ns)

    def notice(self, now_wall_ns: int) -> None:
        """Looks how much waits in the files, and reads nothing."""
        self._follower.notice(now_wall_ns)

    def reset(self, positions: Mapping[str, Position]) -> None:
        """Opens all files anew, at these positions."""
        self._follower.reset(positions)

    def close(self, now_wall_ns: int) -> Iterable[Batch]:
        """The rest of every file, its last line too where it is whole."""
        return self._follower.close(now_wall_ns)

    def release(self, applied: Mapping[str, int]) -> int:
        """Gives the disk space of what was applied back, by punching holes; returns how many bytes that were."""
        return self._follower.release(applied, self._releaser)

    def holds(self, key: str, position: Position) -> bool:
        """Whether a source can be read from its file from there on."""
        return self._follower.holds(key, position)

    def statistics(self) -> FollowerStatistics:
        """What was read so far; files whose space is not given back are among what was skipped."""
        known = self._follower.statistics()
        refused = {f"release_{reason}": files for reason, files in self._releaser.statistics().refused.items()}
        return replace(known, skipped={**known.skipped, **refused}) if refused else known

    @property
    def has_more(self) -> bool:
        """Whether the last poll left something unread: it is to be asked again at once."""
        return self._follower.has_more

    def _tell_what_matches(self) -> None:
        """Says that nothing matches a pattern, once, and when something does. A typing error shows like this."""
        for pattern, was_said in list(self._unseen.items()):
            if PathPatterns([pattern]).paths():
                del self._unseen[pattern]
                if was_said:
                    _log.info("logs_pattern", said=f"files match {pattern} now")
            elif not was_said:
                self._unseen[pattern] = True
                _log.warning("logs_pattern", said=f"no file matches {pattern} yet")


class FollowedExports:
    """`exports.ExportFollower` as the agent wants it: it is asked in a worker thread."""

    def __init__(self, directories: Sequence[Path], *, host: str, nsys: str | None) -> None:
        self._positions: Mapping[str, Position] = {}
        self._follower = ExportFollower(directories, host=host, is_applied=self._applied, nsys=nsys)
        self.watch = DirectoryWatch(directories, self._follower.nudge, recursive=True)
        """To be started by the owner."""
        self._refresh_at_ns = 0
        self._statistics = FollowerStatistics()

    def poll(self, now_wall_ns: int) -> Iterator[Batch]:
        """What exports that were finished say, as it is read."""
        if now_wall_ns >= self._refresh_at_ns:
            self._refresh_at_ns = now_wall_ns + _REFRESH_NS
            self.watch.refresh()
        try:
            yield from self._follower.poll(now_wall_ns)
        finally:
            self._statistics = self._counted()

    def reset(self, positions: Mapping[str, Position]) -> None:
        """Looks at all exports again, and reads what the service does not have."""
        self._positions = positions
        self._follower.look_again()

    def close(self, now_wall_ns: int) -> Iterable[Batch]:
        """Nothing: an export is read when it is complete, or not at all."""
        del now_wall_ns
        return ()

    def holds(self, key: str, position: Position) -> bool:
        """Whether an export is there to be read; wherever it is read from, it is read whole."""
        del position
        return self._follower.holds(key)

    def statistics(self) -> FollowerStatistics:
        """As of the end of the last poll, since this is asked on another thread than the poll runs on."""
        return self._statistics

    @property
    def has_more(self) -> bool:
        """Never: a poll reads all that is there."""
        return False

    def _applied(self, key: str) -> int | None:
        known = self._positions.get(key)
        return None if known is None else known.end

    def _counted(self) -> FollowerStatistics:
        known = self._follower.statistics()
        skipped = {"export_refused": known.refused, "export_vanished": known.vanished}
        return FollowerStatistics(
            files=known.waiting,
            files_waiting=known.waiting,
            skipped={reason: number for reason, number in skipped.items() if number},
        )


def followers(settings: AgentSettings, resources: ExitStack, *, host: str, now_wall_ns: int) -> list[Followed]:
    """The followers that the settings ask for; their watches run until `resources` are closed."""
    followed: list[Followed] = []
    texts: list[FollowedLogs] = []
    if settings.logs:
        logs = FollowedLogs(settings.logs, zones_ns=zones_ns(settings.log_timezone, now_ns=now_wall_ns))
        texts.append(logs)
        known = _text_follower(logs, settings, resources)
        followed.append(replace(known, release=logs.release) if settings.release_logs else known)
    if settings.inspector:
        dumps = FollowedLogs(settings.inspector, kind=SourceKind.INSPECTOR)
        texts.append(dumps)
        followed.append(_text_follower(dumps, settings, resources))
    if texts:
        texts[0].tells_for(texts[1:])
    if settings.exports:
        directories = [Path(directory) for directory in settings.exports]
        exports = FollowedExports(directories, host=host, nsys=settings.nsys or None)
        resources.enter_context(exports.watch)
        tick = settings.export_tick_seconds
        followed.append(Followed(follower=exports, tick_min_seconds=tick, tick_max_seconds=tick, in_thread=True))
    return followed


def _text_follower(files: FollowedLogs, settings: AgentSettings, resources: ExitStack) -> Followed:
    resources.enter_context(files.watch)
    return Followed(
        follower=files,
        tick_min_seconds=settings.tick_min_seconds,
        tick_max_seconds=settings.tick_max_seconds,
        look=files.look,
        notice=files.notice,
        gather_seconds=settings.gather_seconds,
    )


def watched_directories(patterns: Iterable[str]) -> list[Path]:
    """The directories of patterns up to the first part with a wildcard: where files that match may appear."""
    directories: set[Path] = set()
    for pattern in patterns:
        plain: list[str] = []
        for part in Path(pattern).parts:
            if _WILDCARDS & set(part):
                break
            plain.append(part)
        path = Path(*plain)
        directories.add(path if path.is_dir() else path.parent)
    return sorted(directories)
