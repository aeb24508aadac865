"""Finished operations on disk: parquet segments, written as they leave the window.

A segment is written to a temporary name and renamed, so a file that exists is whole. The rows are those of
`operations.parquet`; their order over the segments is the order in which they were finished with.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet as pq

from ncclscope_service.export.operations_file import operations_table
from ncclscope_service.store import Ids, Store


class Archive:
    """Appends operations to a folder of segments."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if need be; segments that are there stay, and numbering goes on after them.

        Raises:
            OSError: the folder cannot be made or listed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._next = 1 + max((_number(path) for path in folder.glob("operations-*.parquet")), default=0)
        self.rows_total = 0

    def append(self, known: Store, operations: Ids) -> None:
        """Writes these operations as one segment; nothing is written for none."""
        if not len(operations):
            return
        path = self._folder / f"operations-{self._next:08d}.parquet"
        unfinished = path.with_suffix(".part")
        pq.write_table(operations_table(known, operations), unfinished, compression="zstd")
        os.replace(unfinished, path)
        self._next += 1
        self.rows_total += len(operations)

    def segments(self) -> list[Path]:
        """The segments, oldest first."""
        return sorted(self._folder.glob("operations-*.parquet"))


def _number(segment: Path) -> int:
    number = segment.stem.removeprefix("operations-")
    return int(number) if number.isdigit() else 0
