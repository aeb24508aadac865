"""Patterns of paths, and the files to which they lead now.

Who may write below a pattern may put a link there. So a file is opened folder by folder from the one that the operator
named, and what is a link is refused (open(2), `O_NOFOLLOW`), unless links were asked for.
"""

from __future__ import annotations

import errno
import glob
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ncclscope_agent.files.tail import FileIdentity

_WILDCARDS: Final = frozenset("*?[%")
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class LinkError(OSError):
    """A link stands where a file or a folder was looked for."""


class PathPatterns:
    """Patterns of paths, resolved again at each call, because files appear later.

    Patterns are those of a shell, with `**` for any depth; `%h` and `%p`, which NCCL_DEBUG_FILE replaces
    by host and pid, stand for anything. A directory stands for the files in it. Relative patterns are
    relative to `root`, or to the working directory.
    """

    def __init__(self, patterns: Sequence[str], root: Path | None = None, *, follow_links: bool = False) -> None:
        self._patterns = tuple(_as_glob(pattern, root) for pattern in patterns)
        self._root = root
        self._follow_links = follow_links
        # The longest first: of two patterns, that counts which names more.
        self._named = sorted({named_folder(pattern) for pattern in patterns}, key=lambda path: -len(path.parts))
        if root is not None:
            self._named = [root / path for path in self._named]

    def paths(self) -> list[Path]:
        """The paths that match now, sorted, each once; whether they are readable files is not looked at."""
        found: set[str] = set()
        for pattern in self._patterns:
            for path in glob.iglob(pattern, recursive=True):
                if os.path.isdir(path):
                    found.update(glob.iglob(os.path.join(glob.escape(path), "*")))
                else:
                    found.add(path)
        return [Path(path) for path in sorted(found)]

    def name(self, path: Path) -> str:
        """The path relative to the root, if it lies below it."""
        if self._root is not None and path.is_relative_to(self._root):
            return str(path.relative_to(self._root))
        return str(path)

    def identity_of(self, path: Path) -> FileIdentity | None:
        """The regular file to which a path leads now; None if there is none, or a link that is not followed."""
        try:
            status = os.stat(path, follow_symlinks=self._follow_links)
        except OSError:
            return None
        return FileIdentity(status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None

    def is_refused_link(self, path: Path) -> bool:
        """Whether a path is a link, and links are not followed."""
        return not self._follow_links and path.is_symlink()

    def open(self, path: Path) -> tuple[int, int | None]:
        """A handle to read one of the paths, and who owns its folder; None for the owner: a link may have led there.

        Raises:
            LinkError: a link stands below the folder that the pattern names.
            OSError: it cannot be opened.
        """
        if self._follow_links:
            return os.open(path, _FILE), None
        named = next((folder for folder in self._named if path.is_relative_to(folder)), path.parent)
        *folders, name = path.relative_to(named).parts
        within = os.open(named, _FOLDER)
        try:
            for folder in folders:
                inner = _open_within(within, folder, _FOLDER)
                os.close(within)
                within = inner
            return _open_within(within, name, _FILE), os.fstat(within).st_uid
        finally:
            os.close(within)


def _open_within(folder: int, name: str, how: int) -> int:
    try:
        return os.open(name, how | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        # A link in a folder's place is "not a directory".
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and how == _FOLDER):
            raise LinkError(error.errno, "is a link", name) from error
        raise


def named_folder(pattern: str) -> Path:
    """The folder that a pattern names: its parts up to the first with a wildcard, and never the last part."""
    parts = Path(pattern).parts
    wild = next((at for at, part in enumerate(parts) if _WILDCARDS & set(part)), len(parts))
    return Path(*parts[: min(wild, len(parts) - 1)])


def _as_glob(pattern: str, root: Path | None) -> str:
    for name, meaning in (("%h", "*"), ("%p", "*"), ("%%", "%")):
        pattern = pattern.replace(name, meaning)
    return pattern if root is None else os.path.join(glob.escape(str(root)), pattern)
