"""The followers of the agent: log files and exports, woken by a watch on changes and polled by `app.Agent`."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from ncclscope_agent.budget import BudgetLimits
from ncclscope_agent.config import AgentSettings, zones_ns
from ncclscope_agent.files.exports import ExportFollower
from ncclscope_agent.files.flight_dumps import FlightDumpFollower
from ncclscope_agent.files.follower import Followed, FollowerStatistics
from ncclscope_agent.files.logs import LogFollower
from ncclscope_agent.files.paths import PathPatterns, named_folder
from ncclscope_agent.files.watch import DirectoryWatch
from ncclscope_agent.node.machine_port import MachineFollower
from ncclscope_agent.node.ras_port import RasFollower
from ncclscope_agent.sources.nsys.reader_process import ReaderLimits
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import ConfigError
from ncclscope_wire.messages import Position
from ncclscope_wire.records import SourceKind

_log = structlog.get_logger(__name__)

_REFRESH_NS: Final = 2_000_000_000
"""How often directories that were not there are looked for."""


class MissingPlaces:
    """Directories that were not there and patterns that nothing matched: looked for every 2 s."""

    def __init__(self, watch: DirectoryWatch, patterns: Sequence[str] = ()) -> None:
        self._watch = watch
        self._due_ns = 0
        self._unseen = dict.fromkeys(patterns, False)
        """Patterns that nothing has matched so far, and whether that was reported."""

    def refresh(self, now_wall_ns: int) -> None:
        """Watches directories that have come, and reports patterns that nothing matches."""
        if now_wall_ns >= self._due_ns:
            self._due_ns = now_wall_ns + _REFRESH_NS
            self._watch.refresh()
            self._report_patterns()

    def _report_patterns(self) -> None:
        """Reports that nothing matches a pattern, once, and when something does. A typing error shows like this."""
        for pattern, was_reported in list(self._unseen.items()):
            if PathPatterns([pattern]).paths():
                del self._unseen[pattern]
                if was_reported:
                    _log.info("logs_pattern", said=f"files match {pattern} now")
            elif not was_reported:
                self._unseen[pattern] = True
                _log.warning("logs_pattern", said=f"no file matches {pattern} yet")


class FollowedExports:
    """`exports.ExportFollower` as the agent wants it: it is asked in a worker thread."""

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        host: str,
        nsys: str | None,
        reader_limits: ReaderLimits | None = None,
        with_calls: bool = True,
    ) -> None:
        self._positions: Mapping[str, Position] = {}
        self._follower = ExportFollower(
            directories,
            host=host,
            is_applied=self._applied,
            nsys=nsys,
            reader_limits=reader_limits,
            with_calls=with_calls,
        )
        self.watch = DirectoryWatch(directories, self._follower.nudge, recursive=True)
        """Wakes the follower if something changes; its owner starts it."""
        self._statistics = FollowerStatistics()

    def poll(self, now_wall_ns: int) -> Iterator[Batch]:
        """Batches of exports that were finished, as they are read."""
        try:
            yield from self._follower.poll(now_wall_ns)
        finally:
            self._statistics = self._counted()

    def reset(self, positions: Mapping[str, Position]) -> None:
        """Looks at all exports again, and reads what the service does not have."""
        self._positions = positions
        self._follower.look_again()

    def stop(self) -> None:
        """Ends the process that reads an export: a worker thread that waits for it goes on, and the agent may end."""
        self._follower.stop()

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
    texts: list[LogFollower] = []
    if settings.logs:
        logs = LogFollower(
            settings.logs,
            zones_ns=zones_ns(settings.log_timezone, now_ns=now_wall_ns),
            release_owner=_release_owner(settings),
            follow_links=settings.follow_links,
        )
        texts.append(logs)
        known = follow_texts(logs, settings.logs, settings, resources)
        followed.append(replace(known, release=logs.release) if settings.release_logs else known)
    if settings.inspector:
        dumps = LogFollower(settings.inspector, kind=SourceKind.INSPECTOR, follow_links=settings.follow_links)
        texts.append(dumps)
        followed.append(follow_texts(dumps, settings.inspector, settings, resources))
    if texts:
        texts[0].report_gone_for(texts[1:])
    if settings.exports:
        directories = [Path(directory) for directory in settings.exports]
        exports = FollowedExports(
            directories,
            host=host,
            nsys=settings.nsys or None,
            reader_limits=_reader_limits(settings),
            with_calls=not settings.logs,
        )
        resources.callback(exports.stop)
        resources.enter_context(exports.watch)
        tick = settings.export_tick_seconds
        followed.append(
            Followed(
                follower=exports,
                tick_min_seconds=tick,
                tick_max_seconds=tick,
                in_thread=True,
                refresh=MissingPlaces(exports.watch).refresh,
            )
        )
    if settings.flight_recorder:
        tick = settings.export_tick_seconds
        flight = FlightDumpFollower(settings.flight_recorder, follow_links=settings.follow_links)
        followed.append(Followed(follower=flight, tick_min_seconds=tick, tick_max_seconds=tick, in_thread=True))
    if settings.ras_address is not None:
        tick = settings.ras_seconds
        ras = RasFollower(*settings.ras_address)
        followed.append(Followed(follower=ras, tick_min_seconds=tick, tick_max_seconds=tick, in_thread=True))
    if settings.counters:
        tick = settings.counters_seconds
        machine = MachineFollower(host, dcgm=settings.dcgm)
        followed.append(Followed(follower=machine, tick_min_seconds=tick, tick_max_seconds=tick, in_thread=True))
    return followed


def _reader_limits(settings: AgentSettings) -> ReaderLimits:
    """Those who read exports have a processor budget of their own, of the same size: logs are read meanwhile."""
    share = settings.max_cpu_percent / 100
    return ReaderLimits(budget=BudgetLimits(cpu_share=share, seconds=settings.budget_seconds, memory_bytes=0))


def _release_owner(settings: AgentSettings) -> int | None:
    """The user whose logs alone are released; None if the operator named none.

    Raises:
        ConfigError: there is no such user, or the agent is root's and nobody was named.
    """
    owner = settings.release_owner
    if not owner:
        if settings.release_logs and os.geteuid() == 0:
            raise ConfigError(
                "--release-logs: root may write to everybody's files: name the user whose logs are released "
                "(--release-owner USER)"
            )
        return None
    try:
        return int(owner) if owner.isdecimal() else pwd.getpwnam(owner).pw_uid
    except KeyError:
        raise ConfigError(f"--release-owner: there is no user {owner!r}") from None


def follow_texts(
    files: LogFollower, patterns: Sequence[str], settings: AgentSettings, resources: ExitStack
) -> Followed:
    """Follows logs or dumps of NCCL Inspector; their directories are watched until `resources` are closed."""
    # That other files are closed beside logs says nothing, and may come many times a second.
    watch = resources.enter_context(DirectoryWatch(watched_directories(patterns), files.nudge, closing=False))
    return Followed(
        follower=files,
        refresh=MissingPlaces(watch, patterns).refresh,
        tick_min_seconds=settings.tick_min_seconds,
        tick_max_seconds=settings.tick_max_seconds,
        look=files.look,
        notice=files.notice,
        gather_seconds=settings.gather_seconds,
    )


def watched_directories(patterns: Iterable[str]) -> list[Path]:
    """The directories that patterns name: where files that match may appear."""
    return sorted({Path(pattern) if Path(pattern).is_dir() else named_folder(pattern) for pattern in patterns})
