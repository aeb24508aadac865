"""A folder whose writes are recorded, and what a loss of power may leave of it at any moment.

A disk promises no more than this: what was written to a file is there once the file was synced, names once their folder
was. Of everything else any part may be there, in pieces of a sector, and names as a journaled file system keeps them:
up to some moment. *Source:* fsync(2); sqlite.org/atomiccommit.html, "Hardware Assumptions".
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

import pytest

_SECTOR_BYTES: Final = 512


class Left(Enum):
    """How much is there of what was not synced."""

    NOTHING = auto()
    ALL = auto()
    SOME = auto()


@dataclass(frozen=True, slots=True)
class _Written:
    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Cut:
    file: int
    size: int


@dataclass(frozen=True, slots=True)
class _Named:
    """A name leads to a file, to a folder of its own (-1) or to nothing (None); `before`: it was another name."""

    path: str
    file: int | None
    before: str | None = None


@dataclass(frozen=True, slots=True)
class _Synced:
    file: int


@dataclass(frozen=True, slots=True)
class _FolderSynced:
    path: str


@dataclass(frozen=True, slots=True)
class Promised:
    """What whoever wrote promised to others from here on."""

    what: int


_Event = _Written | _Cut | _Named | _Synced | _FolderSynced | Promised
_FOLDER: Final = -1


@dataclass(slots=True)
class RecordedFolder:
    """All that happened to the folder, in order; empty at the beginning."""

    root: Path
    events: list[_Event] = field(default_factory=list[_Event])
    _contents: dict[int, bytearray] = field(default_factory=dict[int, bytearray])
    _names: dict[str, int] = field(default_factory=dict[str, int])
    _open: dict[int, int | str] = field(default_factory=dict[int, int | str])

    def promise(self, what: int) -> None:
        """Something was acknowledged to others."""
        self.events.append(Promised(what))

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on, records what this process does by `os`; what libraries write is seen when it is synced."""
        for name in ("open", "close", "write", "pwrite", "ftruncate", "fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._recorded(name, getattr(os, name)))
        for name in ("replace", "rename", "unlink", "remove", "mkdir"):
            monkeypatch.setattr(os, name, self._renamed(name, getattr(os, name)))

    def note_database(self, path: Path, *, is_synced: bool) -> None:
        """Records what SQLite did in a transaction: its log, a sync of it, pages of its file, and a sync of that.

        SQLite writes by itself, so what changed is compared. *Source:* sqlite.org/wal.html, "Checkpointing" and
        "Performance Considerations"; strace(1) of SQLite 3.40 shows this order.
        """
        log, file = self._local(f"{path}-wal"), self._local(path)
        assert log is not None
        assert file is not None
        is_new = log not in self._names
        for name in (file, log):
            if name not in self._names:
                self._make(name)
        has_logged = self._compare(log)
        begin = len(self.events)
        has_moved = self._compare(file)
        pages, self.events[begin:] = self.events[begin:], []
        if has_logged and (is_synced or has_moved or is_new):
            self.events.append(_Synced(self._names[log]))
        if is_new:
            self.events.append(_FolderSynced(os.path.dirname(log)))
        if has_moved:
            self.events += [*pages, _Synced(self._names[file])]

    # Recording

    def _local(self, path: object) -> str | None:
        """A path as it is below the folder; None elsewhere."""
        known = Path(str(path))
        return str(known.relative_to(self.root)) if known.is_relative_to(self.root) else None

    def _make(self, name: str) -> None:
        file = self._names[name] = len(self._contents)
        self._contents[file] = bytearray()
        self.events.append(_Named(name, file))

    def _recorded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **named: Any) -> Any:
            result = call(*arguments, **named)
            getattr(self, f"_on_{name}")(result, *arguments)
            return result

        return recorded

    def _on_open(self, handle: int, path: object, flags: int, *_: object) -> None:
        name = None if isinstance(path, int) else self._local(path)
        if name is None:
            return
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            self._open[handle] = name
            return
        if name not in self._names:
            self._make(name)
        file = self._open[handle] = self._names[name]
        if flags & os.O_TRUNC and self._contents[file]:
            self._cut(file, 0)

    def _on_close(self, _: None, handle: int) -> None:
        self._open.pop(handle, None)

    def _on_write(self, count: int, handle: int, data: bytes) -> None:
        if isinstance(file := self._open.get(handle), int):
            self._write(file, os.lseek(handle, 0, os.SEEK_CUR) - count, bytes(data[:count]))

    def _on_pwrite(self, count: int, handle: int, data: bytes, offset: int) -> None:
        if isinstance(file := self._open.get(handle), int):
            self._write(file, offset, bytes(data[:count]))

    def _on_ftruncate(self, _: None, handle: int, size: int) -> None:
        if isinstance(file := self._open.get(handle), int):
            self._cut(file, size)

    def _on_fsync(self, _: None, handle: int) -> None:
        found = self._open.get(handle)
        if isinstance(found, str):
            self.events.append(_FolderSynced(found))
        elif found is not None:
            for name in [name for name, file in self._names.items() if file == found]:
                self._compare(name)
            self.events.append(_Synced(found))

    _on_fdatasync = _on_fsync

    def _renamed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def renamed(path: Any, *arguments: Any, **named: Any) -> Any:
            if name in ("replace", "rename") and (before := self._local(path)) is not None:
                if before not in self._names:
                    self._make(before)
                self._compare(before)
            result = call(path, *arguments, **named)
            local = self._local(path)
            if local is None:
                return result
            if name == "mkdir":
                self._names[local] = _FOLDER
                self.events.append(_Named(local, _FOLDER))
            elif name in ("replace", "rename"):
                target = self._local(arguments[0])
                assert target is not None
                file = self._names[target] = self._names.pop(local)
                assert file != _FOLDER, "names of folders are not recorded here"
                self.events.append(_Named(target, file, local))
            else:
                self._names.pop(local, None)
                self.events.append(_Named(local, None))
            return result

        return renamed

    def _write(self, file: int, offset: int, data: bytes) -> None:
        for at in range(0, len(data), _SECTOR_BYTES):
            piece = _Written(file, offset + at, data[at : at + _SECTOR_BYTES])
            _apply(self._contents[file], piece)
            self.events.append(piece)

    def _cut(self, file: int, size: int) -> None:
        _apply(self._contents[file], _Cut(file, size))
        self.events.append(_Cut(file, size))

    def _compare(self, name: str) -> bool:
        """Records what others wrote to a file, in its order."""
        file = self._names[name]
        found, known = (self.root / name).read_bytes(), self._contents[file]
        begin = len(self.events)
        if len(found) < len(known):
            self._cut(file, len(found))
        for at in range(0, len(found), _SECTOR_BYTES):
            piece = found[at : at + _SECTOR_BYTES]
            if bytes(known[at : at + _SECTOR_BYTES]) != piece:
                self._write(file, at, piece)
        return len(self.events) > begin

    # Losing power

    def leave(self, target: Path, moment: int, left: Left, chance: random.Random) -> list[int]:
        """Makes a folder of what there may be if power is lost before this event.

        Gives what was promised until then.
        """
        disk = _Disk()
        for event in self.events[:moment]:
            disk.take(event)
        disk.lose_power(left, chance)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for path, file in sorted(disk.names.items()):
            if not (target / path).parent.is_dir():
                continue  # the folder's own name is lost, and all in it
            if file == _FOLDER:
                (target / path).mkdir()
            else:
                (target / path).write_bytes(disk.contents.get(file, b""))
        return disk.promised


@dataclass(slots=True)
class _Disk:
    """What is certainly on it, and what may be."""

    contents: dict[int, bytearray] = field(default_factory=dict[int, bytearray])
    names: dict[str, int] = field(default_factory=dict[str, int])
    promised: list[int] = field(default_factory=list[int])
    _written: list[_Written | _Cut] = field(default_factory=list["_Written | _Cut"])
    _named: list[_Named] = field(default_factory=list[_Named])

    def take(self, event: _Event) -> None:
        if isinstance(event, _Written | _Cut):
            self._written.append(event)
        elif isinstance(event, _Named):
            self._named.append(event)
        elif isinstance(event, _Synced):
            self._keep([each for each in self._written if each.file == event.file])
            self._written = [each for each in self._written if each.file != event.file]
        elif isinstance(event, _FolderSynced):
            folder = "" if event.path == "." else event.path
            self._keep_names([each for each in self._named if os.path.dirname(each.path) == folder])
            self._named = [each for each in self._named if os.path.dirname(each.path) != folder]
        else:
            self.promised.append(event.what)

    def lose_power(self, left: Left, chance: random.Random) -> None:
        share = {Left.NOTHING: 0.0, Left.ALL: 1.0, Left.SOME: 0.5}[left]
        self._keep([each for each in self._written if chance.random() < share])
        names = chance.randint(0, len(self._named)) if left is Left.SOME else round(share * len(self._named))
        self._keep_names(self._named[:names])

    def _keep(self, written: Sequence[_Written | _Cut]) -> None:
        for each in written:
            _apply(self.contents.setdefault(each.file, bytearray()), each)

    def _keep_names(self, named: Sequence[_Named]) -> None:
        for each in named:
            if each.before is not None:
                self.names.pop(each.before, None)
            if each.file is None:
                self.names.pop(each.path, None)
            else:
                self.names[each.path] = each.file


def _apply(content: bytearray, event: _Written | _Cut) -> None:
    if isinstance(event, _Cut):
        del content[event.size :]
        content.extend(bytes(event.size - len(content)))
    else:
        content.extend(bytes(max(0, event.offset - len(content))))
        content[event.offset : event.offset + len(event.data)] = event.data
