"""The service's folder on disk: lock, state files, segments of the journal, and finished operations.

DIR/lock                      held while a service runs
DIR/state/NUMBER.state        the state after entry NUMBER of the journal; the last two are kept
DIR/journal/NUMBER.journal    entries from NUMBER on, as far back as the older state needs them
DIR/operations/ERA/           finished operations
DIR/aside/TIME/               state and journal that this program could not go on from; the last two

Finished operations are written as parquet segments when they leave the window. A segment is written to a temporary name
and renamed, so a file that exists is whole, and is named by the ids of its operations: the names say which operations
are on disk, and a service that repeats the last minutes after a restart writes no operation twice. The rows are those
of `operations.parquet`, oldest first.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from ncclscope_service.columns.table import Ids
from ncclscope_service.export.tables.operations_file import operations_table
from ncclscope_service.keep.journal import FORMAT, HEADER_BYTES, SegmentHeader, encode_header, read_segment, sync_folder
from ncclscope_service.store.state import Part
from ncclscope_service.store.tables import Store
from ncclscope_wire.errors import ConfigError, OtherVersionError, StateError

_STATES_KEPT: Final = 2
_ASIDE_KEPT: Final = 2
_PIECE_BYTES: Final = 16 * 1024 * 1024
"""Of a state: written at once, between two checks of the deadline."""


class FolderInUseError(ConfigError):
    """A service runs on the folder; `said` is that without any advice."""

    def __init__(self, said: str) -> None:
        super().__init__(f"{said}; stop it, or give this one a folder of its own with --data DIR")
        self.said = said


class DataFolder:
    """Takes the folder for one service.

    Raises:
        ConfigError: another service has it, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "journal"
        self._state = path / "state"
        self._unfinished = self._state / "unfinished.part"
        try:
            self._make()
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--data {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._lock, 20, 0).decode("ascii", "replace").strip()
            os.close(self._lock)
            raise FolderInUseError(
                f"--data {path}: another service{f' (process {owner})' if owner else ''} uses this folder"
            ) from error
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass  # of a full disk: the number of the process is for people only

    def close(self) -> None:
        """Releases the folder."""
        os.close(self._lock)

    def operations(self, era: str) -> Path:
        """Where the finished operations of an era are."""
        return self.path / "operations" / era

    def states(self) -> list[Path]:
        """The state files, newest first."""
        return sorted(self._state.glob("*.state"), reverse=True)

    def segments(self) -> list[Path]:
        """The segments of the journal, oldest first."""
        return sorted(self.journal.glob("*.journal"))

    def read_state(self, path: Path) -> tuple[SegmentHeader, memoryview]:
        """Number of the last entry in it and its era, and the snapshot.

        Raises:
            StateError: the file is damaged or of another version.
            OSError: it cannot be read.
        """
        data = path.read_bytes()
        header = read_segment(data[:HEADER_BYTES]).header
        if header is None:
            raise StateError("the state file has no whole header")
        if header.format != FORMAT:
            raise OtherVersionError(f"the state file has format {header.format}, this program reads {FORMAT}")
        return header, memoryview(data)[HEADER_BYTES:]

    def create_state(self) -> int:
        """Descriptor of a new file for a state. There is one at a time: an unfinished one of before is removed.

        Raises:
            OSError: it cannot be made.
        """
        self.drop_unfinished()
        return os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def publish_state(self, number: int) -> None:
        """Publishes the state that was created and is written (`write_state`), and deletes those that are too old.

        Raises:
            OSError: it is not published; earlier states stay.
        """
        os.replace(self._unfinished, self._state / f"{number:016d}.state")
        sync_folder(self._state)
        for old in self.states()[_STATES_KEPT:]:
            old.unlink()

    def drop_unfinished(self) -> None:
        """Removes states that were created and not published."""
        for unfinished in self._state.glob("*.part"):
            unfinished.unlink(missing_ok=True)

    def mark_damaged(self, state: Path) -> None:
        """Renames a damaged state file, so that it is not read again."""
        state.rename(state.with_suffix(".damaged"))
        for old in sorted(self._state.glob("*.damaged"))[:-_STATES_KEPT]:
            old.unlink()

    def set_aside(self, name: str) -> Path:
        """Moves state and journal away; returns the new place."""
        aside = self.path / "aside" / name
        aside.mkdir(parents=True, exist_ok=True)
        for folder in (self._state, self.journal):
            if not (aside / folder.name).exists():
                folder.rename(aside / folder.name)
        self._make()
        for old in sorted((self.path / "aside").iterdir())[:-_ASIDE_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return aside

    def _make(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # It may have been there, open to others, and be a mount of somebody else's: what is in it is closed.
        for folder in (self.journal, self._state, self.path / "operations"):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o700)
        sync_folder(self.path)  # else a loss of power may take the folders, with all that was synced in them
        self.drop_unfinished()


def write_state(
    descriptor: int, number: int, era: str, parts: Iterable[Part], on_piece: Callable[[], None] = lambda: None
) -> int:
    """Writes a state to a file that was created, and syncs it; returns its size. Takes no lock (see `child.py`).

    `on_piece` may raise between two pieces: the file is then not to be published.

    Raises:
        OSError: it cannot be written.
    """
    size = 0
    for part in (encode_header(SegmentHeader(format=FORMAT, first=number, era=era)), *parts):
        rest = memoryview(part)
        size += len(rest)
        while rest:
            on_piece()
            rest = rest[os.write(descriptor, rest[:_PIECE_BYTES]) :]
    os.fsync(descriptor)
    return size


_log = structlog.get_logger(__name__)

_NAME: Final = re.compile(r"operations-(\d{12})-(\d{12})\.parquet")


class Archive:
    """Appends operations to a folder of segments."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if need be; segments that are there stay.

        Raises:
            OSError: the folder cannot be made or listed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        for unfinished in folder.glob("*.part"):
            unfinished.unlink()
        self._folder = folder
        self._unsynced: list[Path] = []
        self.trouble = ""
        """Why finished operations cannot be written; empty if they can."""

    def write(self, known: Store, operations: Ids) -> bool:
        """Writes these operations as one segment; False if the disk does not take them now."""
        try:
            self.append(known, operations)
        except OSError as error:
            trouble = f"finished operations cannot be written: {error.strerror or error}"
            if not self.trouble:
                _log.warning("operations_not_archived", why=trouble)
            self.trouble = trouble
            return False
        self.trouble = ""
        return True

    def append(self, known: Store, operations: Ids) -> None:
        """Writes these operations as one segment; nothing is written for none, nor for those that are there.

        Raises:
            OSError: it cannot be written; nothing is there of it.
        """
        if not len(operations):
            return
        begin, end = int(operations[0]), int(operations[-1]) + 1
        path = self._folder / f"operations-{begin:012d}-{end:012d}.parquet"
        if not _is_whole(path, len(operations)):
            self._remove_between(begin, end)
            self._write(path, known, operations)

    def remove_from(self, first: int) -> None:
        """Removes segments with operations from that id on: the state has them still, and they come again."""
        for path, _, end in self._ranges():
            if end > first:
                path.unlink()

    def sync(self) -> None:
        """Returns when all that was written outlives a loss of power.

        Raises:
            OSError: it does not yet.
        """
        paths, self._unsynced = self._unsynced, []
        try:
            for path in (*(path for path in paths if path.exists()), self._folder):
                _sync(path)
        except OSError:
            self._unsynced = [*paths, *self._unsynced]
            raise

    def segments(self) -> list[Path]:
        """The segments, oldest first."""
        return sorted(self._folder.glob("operations-*.parquet"))

    def _write(self, path: Path, known: Store, operations: Ids) -> None:
        unfinished = path.with_suffix(".part")
        try:
            unfinished.touch(mode=0o600)
            pq.write_table(operations_table(known, operations), unfinished, compression="zstd")
            os.replace(unfinished, path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        self._unsynced.append(path)

    def _remove_between(self, begin: int, end: int) -> None:
        for path, other_begin, other_end in self._ranges():
            if other_begin < end and begin < other_end:
                path.unlink()

    def _ranges(self) -> Iterator[tuple[Path, int, int]]:
        for path in self.segments():
            if (match := _NAME.fullmatch(path.name)) is not None:
                yield path, int(match[1]), int(match[2])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_whole(path: Path, rows: int) -> bool:
    try:
        found: int = pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowInvalid):
        return False
    return found == rows
