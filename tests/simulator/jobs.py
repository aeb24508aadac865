"""Reads what a simulated job wrote."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Simulate = Callable[..., Path]


def truth(folder: Path) -> list[Row]:
    """The rows of `truth/operations.parquet`."""
    parquet: Any = import_module("pyarrow.parquet")
    rows: list[Row] = parquet.read_table(folder / "truth" / "operations.parquet").to_pylist()
    return rows


def log_lines(folder: Path) -> list[str]:
    """The physical lines of all NCCL logs, one log after the other."""
    return [line for path in sorted((folder / "logs").glob("nccl.*.log")) for line in path.read_text().splitlines()]


def exports(folder: Path) -> list[Path]:
    """All exports, by node and then by time."""
    return sorted((folder / "nsys").rglob("*.sqlite"))


def rows_of(path: Path, query: str) -> list[tuple[Any, ...]]:
    """What a query finds in an export."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as database:
        return database.execute(query).fetchall()


def columns_of(path: Path) -> dict[str, list[str]]:
    """Table to its columns."""
    tables = [name for (name,) in rows_of(path, "SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {table: [row[1] for row in rows_of(path, f"PRAGMA table_info({table})")] for table in tables}
