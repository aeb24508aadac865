"""Finished operations on disk: parquet segments, written as they leave the window.

A segment is written to a temporary name and renamed, so a file that exists is whole, and is named by the ids of its
operations: which of them are on disk can be told from the names, and a service that does the last minutes again after
a restart writes no operation twice. The rows are those of `operations.parquet`, oldest first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from ncclscope_service.export.operations_file import operations_table
from ncclscope_service.store import Ids, Store

_NAME: Final = re.compile(r"operations-(\d{12})-(\d{12})\.parquet")


class Archive:
    """Appends operations to a folder of segments."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if need be; segments that are there stay.

        Raises:
            OSError: the folder cannot be made or listed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob("*.part"):
            unfinished.unlink()
        self._folder = folder
        self._unsynced: list[Path] = []
        self.rows_total = 0

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
        self.rows_total += len(operations)

    def withdraw(self, first: int) -> None:
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
