from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from ncclscope_agent.sources.nsys import schema
from ncclscope_agent.sources.nsys.schema import LOOKED_FOR, Layout, Session


def sqlite_bytes(folder: Path) -> bytes:
    path = folder / "made.sqlite"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE t (a)")
    database.commit()
    database.close()
    return path.read_bytes()


def test_a_whole_sqlite_file_has_no_header_fault(tmp_path: Path) -> None:
    whole = sqlite_bytes(tmp_path)
    assert schema.header_fault(whole[:100], len(whole)) is None


@pytest.mark.parametrize(
    ("header", "size", "reason"),
    [
        (b"", 0, "empty"),
        (bytes(100), 8192, "incomplete"),
        (b"SQLite format 3\x00", 16, "incomplete"),
        (b"not a database, whatever its name says" * 3, 114, "not_sqlite"),
        (b"SQLi", 4, "not_sqlite"),
    ],
)
def test_the_header_says_why_a_file_cannot_be_read(header: bytes, size: int, reason: str) -> None:
    assert schema.header_fault(header, size) == reason


def test_a_file_shorter_than_its_header_says_is_incomplete(tmp_path: Path) -> None:
    whole = sqlite_bytes(tmp_path)
    assert schema.header_fault(whole[:100], len(whole) - 1) == "incomplete"


def test_missing_tables_and_columns_are_named() -> None:
    everything = {table: frozenset(columns) for table, columns in LOOKED_FOR.items()}
    assert Layout(everything).missing() == ()
    del everything["NVTX_EVENTS"]
    everything["CUPTI_ACTIVITY_KIND_KERNEL"] -= {"graphNodeId"}
    assert Layout(everything).missing() == ("CUPTI_ACTIVITY_KIND_KERNEL.graphNodeId", "NVTX_EVENTS")


def test_times_become_utc_by_taking_the_shift_off_and_the_epoch_on() -> None:
    plain = Session(utc_epoch_ns=1_000_000, shift_ns=0, duration_ns=500)
    normalised = Session(utc_epoch_ns=1_000_000, shift_ns=1_000_000, duration_ns=500)
    assert 30 + plain.to_utc_ns == 1_000_030
    assert 1_000_030 + normalised.to_utc_ns == 1_000_030
    assert (plain.cut_ns, normalised.cut_ns) == (500, 1_000_500)


def test_the_pid_is_taken_out_of_the_middle_of_a_global_id() -> None:
    assert schema.pid_of((7 << 56) | (1 << 48) | (4242 << 24) | 99) == 4242
    assert schema.pid_of(-144115188075855872) == 0  # the pseudo process 0xFE00000000000000, as SQLite gives it


@pytest.mark.parametrize(("version", "major"), [("3.7.2", 3), ("2.9.1", 2), ("12", 12), ("", None), ("new", None)])
def test_the_major_of_a_schema_version_is_its_first_number(version: str, major: int | None) -> None:
    assert schema.major_of(version) == major
