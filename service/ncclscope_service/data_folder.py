"""The service's folder on disk: its lock, its state files and the segments of its journal.

DIR/lock                      held while a service runs
DIR/state/NUMBER.state        the state after entry NUMBER of the journal; the last two are kept
DIR/journal/NUMBER.journal    entries from NUMBER on, as far back as the older state needs them
DIR/operations/ERA/           finished operations (`archive.py`)
DIR/aside/TIME/               state and journal that this program could not go on from; the last two
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ncclscope_service.journal_segment import FORMAT, HEADER_BYTES, SegmentHeader, encode_header, read_segment
from ncclscope_service.state import Part
from ncclscope_wire.errors import ConfigError, OtherVersionError, StateError

_STATES_KEPT: Final = 2
_ASIDE_KEPT: Final = 2


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
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
        """Gives the folder back."""
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

    def begin_state(self) -> int:
        """A new file for a state: its descriptor. There is one at a time; what one before left half written is gone.

        Raises:
            OSError: it cannot be made.
        """
        self.drop_unfinished()
        return os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def keep_state(self, number: int) -> None:
        """What was begun and is written (`write_state`) counts from now on; lets go of the ones that are too old.

        Raises:
            OSError: it does not count; the ones before stay.
        """
        os.replace(self._unfinished, self._state / f"{number:016d}.state")
        sync_folder(self._state)
        for old in self.states()[_STATES_KEPT:]:
            old.unlink()

    def drop_unfinished(self) -> None:
        """Removes what was begun and does not count."""
        for unfinished in self._state.glob("*.part"):
            unfinished.unlink(missing_ok=True)

    def spoil(self, state: Path) -> None:
        """Renames a damaged state file, so that it counts no more."""
        state.rename(state.with_suffix(".damaged"))
        for old in sorted(self._state.glob("*.damaged"))[:-_STATES_KEPT]:
            old.unlink()

    def set_aside(self, name: str) -> Path:
        """Moves state and journal away; gives where to."""
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
        for folder in (self.path, self.journal, self._state):
            folder.mkdir(parents=True, exist_ok=True)
        self.drop_unfinished()


def write_state(descriptor: int, number: int, era: str, parts: Iterable[Part]) -> int:
    """Writes a state to a file that was begun, and syncs it; gives its bytes. Takes no lock (see `child.py`).

    Raises:
        OSError: it cannot be written.
    """
    size = 0
    for part in (encode_header(SegmentHeader(format=FORMAT, first=number, era=era)), *parts):
        rest = memoryview(part)
        size += len(rest)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    os.fsync(descriptor)
    return size


def sync_folder(folder: Path) -> None:
    """Returns when names in this folder outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
