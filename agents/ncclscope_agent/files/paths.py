"""Patterns of paths, and the files to which they lead now."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from ncclscope_agent.files.tail import FileIdentity


class PathPatterns:
    """Patterns of paths, resolved again at each call, because files appear later.

    Patterns are those of a shell, with `**` for any depth; `%h` and `%p`, which NCCL_DEBUG_FILE replaces
    by host and pid, stand for anything. A directory stands for the files in it. Relative patterns are
    relative to `root`, or to the working directory.
    """

    def __init__(self, patterns: Sequence[str], root: Path | None = None) -> None:
        self._patterns = tuple(_as_glob(pattern, root) for pattern in patterns)
        self._root = root

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


def _as_glob(pattern: str, root: Path | None) -> str:
    for name, meaning in (("%h", "*"), ("%p", "*"), ("%%", "%")):
        pattern = pattern.replace(name, meaning)
    return pattern if root is None else os.path.join(glob.escape(str(root)), pattern)


def identity_of(path: Path) -> FileIdentity | None:
    """The regular file to which a path leads now; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return FileIdentity(status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None
