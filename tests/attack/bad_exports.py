"""nsys exports that were made to harm who reads them."""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing
from pathlib import Path

from nsys_made import nccl_export

_PAGE = 4096
_LEVELS = 15
"""SQLite follows 20 levels of pages at most; each of these has 500 ways down."""
_CELLS = 500


def endless_kernels(path: Path) -> Path:
    """An export whose kernels have no end (10**40 rows): each page of their tree leads to the next 500 times.

    *Source:* SQLite file format, sections 1.3 (the header's page count) and 1.6 (interior pages of tables).
    """
    nccl_export().write(path)
    with closing(sqlite3.connect(path)) as database:
        root = database.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'CUPTI_ACTIVITY_KIND_KERNEL'"
        ).fetchone()[0]
    content = bytearray(path.read_bytes())
    leaf = bytes(content[(root - 1) * _PAGE : root * _PAGE])
    first = len(content) // _PAGE + 1
    content[(root - 1) * _PAGE : root * _PAGE] = _interior(first)
    for level in range(_LEVELS - 1):
        content += _interior(first + level + 1)
    content += leaf
    content[28:32] = struct.pack(">I", len(content) // _PAGE)
    path.write_bytes(content)
    return path


def _interior(child: int) -> bytes:
    begin = _PAGE - 5 * _CELLS
    head = struct.pack(">BHHHBI", 5, 0, _CELLS, begin, 0, child)
    pointers = b"".join(struct.pack(">H", begin + 5 * number) for number in range(_CELLS))
    cells = b"".join(struct.pack(">IB", child, 1) for _ in range(_CELLS))
    return (head + pointers).ljust(begin, b"\0") + cells


def huge_texts(path: Path, megabytes: int = 150) -> Path:
    """An export with a text of an NVTX range and a string of so many MB."""
    made = nccl_export()
    made.range("x" * (megabytes << 20), 1_000, 2_000)
    made.string("ncclDevKernel_" + "y" * (megabytes << 20))
    return made.write(path)


def many_long_texts(path: Path, count: int, length: int) -> Path:
    """An export with so many NVTX ranges, each with a text of its own."""
    made = nccl_export()
    for number in range(count):
        made.range(f"{number} ".ljust(length, "z"), 1_000 + number, 2_000 + number)
    return made.write(path)


def _pages(content: bytearray) -> range:
    return range(1, len(content) // _PAGE + 1)


def _root(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0])


def text_in_a_circle(path: Path) -> Path:
    """An export with a text of 8 MB whose second page of overflow is followed by itself.

    *Source:* SQLite file format, section 1.7 (cell payload overflow pages).
    """
    content = bytearray(huge_texts(path, 8).read_bytes())
    for page in _pages(content):
        begin = (page - 1) * _PAGE
        if content.startswith(b"x" * 1020, begin + 4):
            content[begin : begin + 4] = struct.pack(">I", page)
            break
    path.write_bytes(content)
    return path


def free_pages_in_a_circle(path: Path) -> Path:
    """An export whose list of free pages has no end. *Source:* SQLite file format, section 1.5 (the freelist)."""
    content = bytearray(nccl_export().write(path).read_bytes())
    own = len(content) // _PAGE + 1
    content += struct.pack(">II", own, 0).ljust(_PAGE, b"\0")
    content[28:40] = struct.pack(">III", own, own, 2**31)
    path.write_bytes(content)
    return path


def cells_outside_of_their_page(path: Path, table: str, pointer: int = 0xFFFF) -> Path:
    """An export with a table whose cells begin there. *Source:* SQLite file format, section 1.6."""
    root = _root(nccl_export().write(path), table)
    content = bytearray(path.read_bytes())
    begin = (root - 1) * _PAGE
    (cells,) = struct.unpack(">H", content[begin + 3 : begin + 5])
    content[begin + 8 : begin + 8 + 2 * cells] = struct.pack(">H", pointer) * cells
    path.write_bytes(content)
    return path


def tables_on_one_page(path: Path) -> Path:
    """An export all of whose tables are the first page, where their definitions stand."""
    return by_sql(path, "UPDATE sqlite_master SET rootpage = 1", is_schema=True)


def by_sql(path: Path, *statements: str, is_schema: bool = False) -> Path:
    """An export in which somebody has done this; `is_schema`: to what SQLite says of its tables itself."""
    nccl_export().write(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        if is_schema:
            database.execute("PRAGMA writable_schema = ON")
        database.execute("BEGIN")
        for statement in statements:
            database.execute(statement)
        database.execute("COMMIT")
    return path
