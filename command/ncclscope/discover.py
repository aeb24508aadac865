"""Finds what `analyze` reads: walks paths, tells each file's kind by its content, and leaves out what is double.

Directories are walked recursively; links are not followed and hidden files are skipped. A `.sqlite` export is
preferred over the `.nsys-rep` report of its stem. Files of equal size and content are read once.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ncclscope.nsys_folders import tables_in
from ncclscope_agent.files.recognise import ENOUGH_BYTES, FileKind, recognise

_BLOCK: Final = 1 << 20
_FOLDER_ENDING: Final = re.compile(r"(?:_pqtdir|_arwdir|\.parquetdir|\.arrowdir)$")
"""How nsys names the folders, and how people do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """One file to read."""

    path: Path
    name: str
    """Path relative to what was asked for; base name if that is the file itself."""
    kind: FileKind
    size_bytes: int


@dataclass(slots=True)
class Discovery:
    """Files that lie under the paths that were asked for."""

    files: list[FoundFile] = field(default_factory=list[FoundFile])
    skipped: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict[str, list[str]](list))
    """Names of files left out, by reason: "duplicate", "report_with_export", "unreadable", or the kind that is not
    read."""

    def of_kind(self, *kinds: FileKind) -> list[FoundFile]:
        """The files of these kinds, in order of name."""
        return [found for found in self.files if found.kind in kinds]


READ_KINDS: Final = frozenset(FileKind) - {FileKind.EMPTY, FileKind.UNKNOWN, FileKind.INSPECTOR_METRICS}


def discover(paths: Sequence[Path]) -> Discovery:
    """Everything readable under these paths, and the names of the rest by reason."""
    discovery = Discovery()
    contents: dict[int, _Contents] = {}
    for path, name in _walk_all(paths):
        if path.is_dir():
            size = sum(table.stat().st_size for table in tables_in(path).values())
            discovery.files.append(FoundFile(path=path, name=name, kind=FileKind.NSYS_TABLES, size_bytes=size))
            continue
        try:
            with path.open("rb") as stream:
                first = stream.read(ENOUGH_BYTES)
            size = path.stat().st_size
        except OSError:
            discovery.skipped["unreadable"].append(name)
            continue
        kind = recognise(first, path.name)
        if kind not in READ_KINDS:
            discovery.skipped[f"not_read_{kind.value}"].append(name)
            continue
        if contents.setdefault(size, _Contents()).has(path):
            discovery.skipped["duplicate"].append(name)
            continue
        discovery.files.append(FoundFile(path=path, name=name, kind=kind, size_bytes=size))
    _leave_to_exports(discovery)
    return discovery


def _leave_to_exports(discovery: Discovery) -> None:
    """Drops the reports whose export is read as well, and exports as tables beside others."""
    exports = {found.path for found in discovery.of_kind(FileKind.NSYS_SQLITE)}
    for found in discovery.of_kind(FileKind.NSYS_TABLES):
        stem = re.sub(_FOLDER_ENDING, "", found.path.name)
        if (one := found.path.with_name(f"{stem}.sqlite")) in exports:
            discovery.skipped["duplicate"].append(found.name)
            discovery.files.remove(found)
        else:
            exports.add(one)
    for found in discovery.of_kind(FileKind.NSYS_REPORT):
        if found.path.with_suffix(".sqlite") in exports:
            discovery.skipped["report_with_export"].append(found.name)
            discovery.files.remove(found)


def _walk_all(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    for asked in paths:
        if asked.is_file() or (asked.is_dir() and tables_in(asked)):
            yield asked, asked.name
        else:
            for path in _walk(asked):
                yield path, str(path.relative_to(asked))


def _walk(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.is_symlink():
            continue
        if entry.is_dir() and tables_in(entry):
            yield entry
        elif entry.is_dir():
            yield from _walk(entry)
        elif entry.is_file():
            yield entry


class _Contents:
    """Different files of one size; they are only read once there are two."""

    def __init__(self) -> None:
        self._first: Path | None = None
        self._digests: set[bytes] = set()

    def has(self, path: Path) -> bool:
        """Whether a file that was asked about before has the content of this one."""
        if self._first is None:
            self._first = path
            return False
        if not self._digests:
            self._digests.add(_digest(self._first))
        before = len(self._digests)
        self._digests.add(_digest(path))
        return len(self._digests) == before


def _digest(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.digest()
