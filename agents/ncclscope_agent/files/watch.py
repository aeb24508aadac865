"""Tells at once that files came, went or were closed in directories, without slowing down who writes them.

Every write to a watched file costs its writer if modifications are watched: NCCL's log grows thousands
of times a second. So only creation, moving, deletion and closing are asked for; growing files are read on a
timer. If the kernel gives no watches (its limit is reached, a file system without them), directories are
compared every few seconds instead; on network file systems, changes made by other hosts are never reported, so
callers look by themselves now and then as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch
from watchdog.observers.polling import PollingObserver

WATCHED: Final[tuple[type[FileSystemEvent], ...]] = (
    FileCreatedEvent,
    FileMovedEvent,
    FileDeletedEvent,
    FileClosedEvent,
    DirCreatedEvent,
    DirMovedEvent,
    DirDeletedEvent,
)
"""Never a Modified event; see above."""
_CLOSED: Final = frozenset({FileClosedEvent})

_COMPARE_EVERY_S: Final = 2.0


class DirectoryWatch:
    """Calls back whenever something appears, moves, goes or, with `closing`, is closed in one of the directories.

    The callback comes on a thread of the watch, often several times for one file, with no argument: look for
    yourself. Directories that are not there yet are taken on by `refresh`. Used with `with`, or started and stopped.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        on_change: Callable[[], None],
        *,
        recursive: bool = False,
        closing: bool = True,
    ) -> None:
        self._directories = tuple(directories)
        self._recursive = recursive
        self._events: list[type[FileSystemEvent]] = [event for event in WATCHED if closing or event not in _CLOSED]
        self._nudger = _Nudger(on_change)
        self._watched: dict[Path, _Watched] = {}
        self._observer: BaseObserver | None = None
        self.is_polling = False
        """Whether the kernel gave no watches and directories are compared instead."""

    def start(self) -> None:
        """Begins to watch."""
        self._begin(Observer())

    def refresh(self) -> None:
        """Takes on directories that have appeared since, and lets go of those that have gone or were made again."""
        for directory, watched in list(self._watched.items()):
            if _inode_of(directory) != watched.inode:
                self._let_go(directory)
        for directory in self._directories:
            inode = _inode_of(directory)
            if inode is not None and directory not in self._watched:
                self._add(directory, inode)

    def stop(self) -> None:
        """Ends the watch and its threads."""
        if self._observer is not None:
            self._observer.stop()
            self._observer.join()
            self._observer = None
        self._watched.clear()

    def __enter__(self) -> DirectoryWatch:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _begin(self, observer: BaseObserver) -> None:
        self._observer = observer
        observer.start()
        self.refresh()

    def _add(self, directory: Path, inode: int) -> None:
        assert self._observer is not None, "a watch must be started before it can watch"
        try:
            watch = self._observer.schedule(
                self._nudger, str(directory), recursive=self._recursive, event_filter=self._events
            )
        except FileNotFoundError:  # gone since it was looked for
            return
        except OSError:  # no watches left, or none on this file system
            if not self.is_polling:
                self._compare_instead()
            return
        self._watched[directory] = _Watched(inode, watch)

    def _let_go(self, directory: Path) -> None:
        watched = self._watched.pop(directory)
        if self._observer is not None:
            self._observer.unschedule(watched.watch)

    def _compare_instead(self) -> None:
        """Leaves the kernel's watches for comparing listings, for all directories."""
        self.stop()
        self.is_polling = True
        self._begin(PollingObserver(timeout=_COMPARE_EVERY_S))


@dataclass(frozen=True, slots=True)
class _Watched:
    inode: int
    watch: ObservedWatch


def _inode_of(directory: Path) -> int | None:
    """The inode of a directory; None if there is none."""
    try:
        return directory.stat().st_ino if directory.is_dir() else None
    except OSError:
        return None


class _Nudger(FileSystemEventHandler):
    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    def on_any_event(self, event: FileSystemEvent) -> None:
        self._on_change()
