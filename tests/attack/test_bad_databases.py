"""Exports whose pages or definitions were made by hand: the reader ends within its limits, and the agent reads on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from attack.bad_exports import (
    by_sql,
    cells_outside_of_their_page,
    endless_kernels,
    free_pages_in_a_circle,
    tables_on_one_page,
    text_in_a_circle,
)
from attack.test_exports import SHORT, follow, told
from nsys_made import nccl_export

from ncclscope_agent.files.exports import Timing
from ncclscope_agent.sources.nsys.reader_process import ReaderLimits

pytestmark = pytest.mark.slow

KERNELS, RANGES, META, STRINGS = "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS", "META_DATA_EXPORT", "StringIds"
WITHOUT_END = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
COLUMNS = "i AS start, i + 1 AS end, 59 AS eventType, 1 AS globalTid, 'x' AS text, 1 AS shortName, 0 AS deviceId"


def in_place_of(table: str, *statements: str) -> Callable[[Path], Path]:
    return lambda path: by_sql(path, f"DROP TABLE IF EXISTS {table}", *statements)


def beside(ending: str) -> Callable[[Path], Path]:
    """A file of SQLite's own beside the export: what it holds is to be read instead of pages of the export."""

    def make(path: Path) -> Path:
        nccl_export().write(path)
        path.with_name(path.name + ending).write_bytes(b"\x37\x7f\x06\x82" + os.urandom(100_000))
        return path

    return make


MADE: dict[str, tuple[Callable[[Path], Path], list[str] | None]] = {
    "overflow pages in a circle": (text_in_a_circle, []),
    "free pages in a circle": (free_pages_in_a_circle, []),
    "cells outside of the page of kernels": (lambda path: cells_outside_of_their_page(path, KERNELS), ["malformed"]),
    "cells in the head of the page of kernels": (
        lambda path: cells_outside_of_their_page(path, KERNELS, 0),
        ["malformed"],
    ),
    "cells outside of the page of texts": (lambda path: cells_outside_of_their_page(path, STRINGS), ["malformed"]),
    "cells outside of the page of metadata": (lambda path: cells_outside_of_their_page(path, META), ["incomplete"]),
    "all tables on one page": (tables_on_one_page, None),
    "a view without end for kernels": (
        in_place_of(KERNELS, f"CREATE VIEW {KERNELS} AS {WITHOUT_END} SELECT {COLUMNS} FROM n"),
        [],
    ),
    "a view without end for ranges": (
        in_place_of(RANGES, f"CREATE VIEW {RANGES} AS {WITHOUT_END} SELECT {COLUMNS} FROM n"),
        [],
    ),
    "a view without end for metadata": (
        in_place_of(META, f"CREATE VIEW {META} AS {WITHOUT_END} SELECT 'a' AS name, i AS value FROM n"),
        ["incomplete"],
    ),
    "a column that SQLite computes": (
        in_place_of(
            RANGES,
            f"CREATE TABLE {RANGES} (start INTEGER, eventType INTEGER, globalTid INTEGER, "
            "text TEXT AS (hex(zeroblob(8000000))), end INTEGER AS (start + 1))",
            f"INSERT INTO {RANGES} (start, eventType, globalTid) VALUES (1000, 59, 1), (2000, 59, 1)",
        ),
        [],
    ),
    "triggers": (
        lambda path: by_sql(
            path,
            f"CREATE TRIGGER a AFTER INSERT ON {KERNELS} BEGIN DELETE FROM {STRINGS}; END",
            f"CREATE TRIGGER b AFTER DELETE ON {STRINGS} BEGIN INSERT INTO {STRINGS} VALUES (1, zeroblob(9)); END",
        ),
        [],
    ),
    "a virtual table for ranges": (
        in_place_of(
            RANGES,
            f"CREATE VIRTUAL TABLE {RANGES} USING fts5(start, end, eventType, globalTid, text)",
            f"INSERT INTO {RANGES} VALUES (1000, 2000, 59, 1, 'x')",
        ),
        None,
    ),
    "a virtual table of no module": (
        lambda path: by_sql(
            path,
            f"UPDATE sqlite_master SET rootpage = 0, sql = 'CREATE VIRTUAL TABLE {KERNELS} USING nothing(a)' "
            f"WHERE name = '{KERNELS}'",
            is_schema=True,
        ),
        None,
    ),
    "a table that is defined as a view": (
        lambda path: by_sql(
            path,
            f"UPDATE sqlite_master SET rootpage = 0, sql = 'CREATE VIEW {KERNELS} AS {WITHOUT_END} SELECT * FROM n' "
            f"WHERE name = '{KERNELS}'",
            is_schema=True,
        ),
        None,
    ),
    "a table without rowid": (
        in_place_of(
            RANGES,
            f"CREATE TABLE {RANGES} (start INTEGER PRIMARY KEY, end INTEGER, eventType INTEGER, globalTid INTEGER, "
            "text TEXT) WITHOUT ROWID",
            f"INSERT INTO {RANGES} VALUES (1000, 2000, 59, 1, 'x')",
        ),
        ["malformed"],
    ),
    "an index over everything": (
        lambda path: by_sql(path, f"CREATE INDEX i ON {KERNELS} (start, end, shortName) WHERE start + end > 0"),
        [],
    ),
    "ten thousand tables": (lambda path: by_sql(path, *(f"CREATE TABLE t{n} (a)" for n in range(10_000))), []),
    "two thousand columns": (
        lambda path: by_sql(path, f"CREATE TABLE wide ({', '.join(f'c{n}' for n in range(2_000))})"),
        [],
    ),
    "a definition of 8 MB": (
        lambda path: by_sql(path, f"CREATE TABLE long (a DEFAULT '{'x' * (8 << 20)}')"),
        [],
    ),
    "a write-ahead log": (beside("-wal"), ["incomplete"]),
    "a journal": (beside("-journal"), ["incomplete"]),
}


@pytest.mark.parametrize("name", MADE)
def test_a_database_that_was_made_to_harm_ends_with_a_reason_and_the_next_is_read(tmp_path: Path, name: str) -> None:
    make, reasons = MADE[name]
    nccl_export().write(tmp_path / "good.sqlite")
    bad = make(tmp_path / "bad.sqlite")
    os.utime(bad, ns=(0, 0))  # it comes first
    batches = follow(tmp_path, timing=Timing(give_up_ns=1_000_000_000))
    ends = told(batches)
    assert ends["good.sqlite"] == []
    assert ends["bad.sqlite"] in (
        [reasons] if reasons is not None else [[], ["malformed"], ["incomplete"], ["not_nsys"]]
    )
    if "a view" in name:
        assert not any(len(batch.ranges) for batch in batches), "what is no table is not read"


def test_what_is_sorted_and_joined_fills_no_disk(tmp_path: Path) -> None:
    """The kernels of this export are copied to a temporary file, without end."""
    endless_kernels(tmp_path / "bad.sqlite")
    limits = ReaderLimits(cpu_seconds=60, memory_bytes=SHORT.memory_bytes, temporary_bytes=1 << 20)
    used = os.times().children_user
    assert told(follow(tmp_path, limits=limits)) == {"bad.sqlite": ["killed_reader"]}
    assert os.times().children_user - used < 60
