"""Folders of ended jobs below one folder: a new one for each, the oldest removed beyond a number."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Final

_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME: Final = 80
_STAMPED: Final = re.compile(r".+_\d{4}-\d{2}-\d{2}T\d{6}Z(-\d+)?$")


class SnapshotShelf:
    """Names folders and removes old ones; writes nothing into them."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def place(self, job: str, now_ns: int) -> Path:
        """A folder that is not there yet: `JOB_2026-01-31T235959Z`, with what no file name should hold left out.

        The job's name comes from an agent: no separator and no leading dot of it gets into a path.
        """
        stamp = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime(now_ns // 1_000_000_000))
        name = f"{_NOT_IN_A_NAME.sub('-', job)[:_LONGEST_NAME].strip('.-') or 'job'}_{stamp}"
        candidate, again = self._folder / name, 2
        while candidate.exists():
            candidate, again = self._folder / f"{name}-{again}", again + 1
        return candidate

    def tidy(self) -> list[Path]:
        """Removes the oldest folders of ended jobs beyond those that are kept, and gives them. Others are not touched.

        Raises:
            OSError: a folder could not be listed or removed.
        """
        stamped = [path for path in self._folder.iterdir() if path.is_dir() and _STAMPED.match(path.name)]
        oldest_first = sorted(stamped, key=lambda path: (path.stat().st_mtime_ns, path.name))
        removed = oldest_first[: max(0, len(oldest_first) - self._keep)]
        for path in removed:
            shutil.rmtree(path)
        return removed
