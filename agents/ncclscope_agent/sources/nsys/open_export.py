"""Opens an export only when it is complete, without ever standing in the way of the exporter.

`nsys export` creates the file under its final name, empty, and fills it in one transaction under an
exclusive lock, page 1 last. A reader that holds a lock while the exporter wants to begin makes it give up
after five seconds, with exit code 0 and an empty database. So: first look at the size and the first bytes
with plain reads; then look for the metadata table, which is made last; then ask whether somebody holds a lock for
writing. No lock is ever taken, not for a moment: SQLite reads with `immutable=1`, and the file is compared with what it
was when all is read.
*Source:* measured on nsys 2022.4 and 2023.4, see `docs/nsys.md`; sqlite.org/uri.html for `immutable`,
sqlite.org/src/file/src/os.h for the bytes that are locked, fcntl(2) for F_OFD_GETLK.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import stat
import struct
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from ncclscope_agent.sources.nsys import schema
from ncclscope_agent.sources.nsys.schema import Layout
from ncclscope_wire.errors import SourceError

_META_ROWS: Final = ("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION", "EXPORT_CONFIG_TIME_SHIFT")

_LOCKED_BYTES: Final = (0x40000000, 512)
"""Bytes that SQLite locks (pending, reserved, shared): begin and number."""
_FLOCK: Final = "hhqqi"
"""struct flock: type, whence, start, length, pid."""

_SENTENCES: Final[Mapping[str, str]] = {
    "empty": "has 0 bytes: an exporter has just created it, or failed; wait, or export the report again",
    "incomplete": "is not a finished export: it is still being written, or its writer was killed; wait, or export "
    "again with --force-overwrite=true (with --tables, name META_DATA too)",
    "locked": "is locked by another program, most likely the exporter; it is read when the lock is gone",
    "changed": "changed while it was opened; it is read when it stays the same",
    "vanished": "is gone; nothing to do if it was moved or removed on purpose",
    "unreadable": "cannot be read; check owner and mode",
    "not_a_file": "is not a plain file; name a file, or a directory as a directory",
    "not_sqlite": "is not a SQLite file; export the report with `nsys export --type sqlite`",
    "not_nsys": "is a SQLite file, but holds none of the tables that nsys writes",
    "malformed": "is damaged; export the report again",
}


@dataclass(frozen=True, slots=True)
class Sight:
    """Identity and state of a file, to see whether it has changed."""

    device: int
    inode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class OpenExport:
    """A complete export, open for reading without a lock. The caller closes the connection."""

    connection: sqlite3.Connection
    layout: Layout
    meta: Mapping[str, str]
    """The metadata rows that were asked for and are there."""
    sight: Sight
    """The file as it was when it was opened."""


_PROBE_STEPS: Final = 20_000_000
"""Of SQLite's machine, for tables and metadata: a bad file has no end. Half a second; a good one takes 2,000."""
_STEPS_BETWEEN_RESTS: Final = 500_000
_LONGEST_CELL: Final = 16 << 20
"""Bytes of a cell or row. *Source:* sqlite.org/limits.html, SQLITE_LIMIT_LENGTH."""


def check_ready(path: Path) -> Sight:
    """The file as it is now, if its first bytes say that it may be a complete export and nobody writes it.

    Nothing else of it is read, so no file does harm by this. Raises SourceError as `check_complete` does.
    """
    sight = look_at(path)
    reason = schema.header_fault(_first_bytes(path), sight.size)
    if reason is not None:
        raise fault(reason, path)
    return sight


def check_complete(path: Path) -> None:
    """Returns if the export can be read now; else raises SourceError, whose reason says why not.

    Reasons that pass by themselves: "empty", "incomplete", "locked", "changed". Others stay: "vanished",
    "unreadable", "not_a_file", "not_sqlite", "not_nsys", "malformed", "unknown_schema".
    """
    open_complete(path).connection.close()


def open_complete(path: Path, on_progress: Callable[[], None] | None = None) -> OpenExport:
    """Opens the export. Raises SourceError as `check_complete` says.

    `on_progress` is called after each half a million steps of SQLite's machine (some 20 ms).
    """
    sight = check_ready(path)
    layout, meta = _probe(path)
    _check_writers(path)
    connection = _connect(path)
    if on_progress is not None:
        connection.set_progress_handler(on_progress, _STEPS_BETWEEN_RESTS)  # None: it goes on
    try:
        if look_at(path) != sight:
            raise fault("changed", path)
    except SourceError:
        connection.close()
        raise
    return OpenExport(connection, layout, meta, sight)


def look_at(path: Path) -> Sight:
    """The file as it is now. Raises SourceError if there is none."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise _unreachable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise fault("not_a_file", path)
    return Sight(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def fault(reason: str, path: Path, detail: str = "") -> SourceError:
    """The error of that reason, with a sentence for a person."""
    more = f" ({detail})" if detail else ""
    return SourceError(reason, f"{path} {_SENTENCES[reason]}{more}")


def fault_of(path: Path, error: sqlite3.Error | ValueError) -> SourceError:
    """Meaning of an SQLite error for a file whose header was in order."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return fault("locked", path)
    if code == sqlite3.SQLITE_NOTADB:
        return fault("not_sqlite", path)
    return fault("malformed", path, str(error))


def open_plain(path: Path) -> BinaryIO:
    """Opens a plain file for reading. Raises OSError, also for a pipe or device in its place, and waits for nobody."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return open(handle, "rb")


def _first_bytes(path: Path) -> bytes:
    try:
        with open_plain(path) as file:
            return file.read(schema.HEADER_BYTES)
    except OSError as error:
        raise _unreachable(path, error) from error


def _unreachable(path: Path, error: OSError) -> SourceError:
    return fault("vanished" if isinstance(error, FileNotFoundError) else "unreadable", path, error.strerror or "")


def _probe(path: Path) -> tuple[Layout, Mapping[str, str]]:
    """Layout and metadata, read without any lock; the exporter may be in the middle of its commit."""
    try:
        with closing(_connect(path)) as connection:
            connection.set_progress_handler(lambda: 1, _PROBE_STEPS)
            layout = _layout_of(connection)
            meta = _meta_of(connection, layout)
    except (sqlite3.Error, ValueError) as error:  # ValueError: the message itself quotes damaged text
        raise fault("incomplete", path, str(error)) from error
    if not layout.tables:
        raise fault("incomplete", path, "it has no tables")
    if not layout.is_of_nsys:
        raise fault("not_nsys", path)
    if layout.meta_table is None:
        raise fault("incomplete", path, "it has no metadata table")
    _check_schema(path, meta.get("EXPORT_SCHEMA_VERSION"))
    return layout, meta


def _check_schema(path: Path, version: str | None) -> None:
    major = None if version is None else schema.major_of(version)
    if major is not None and major not in schema.KNOWN_MAJORS:
        raise SourceError(
            "unknown_schema",
            f"{path} has schema {version}, and only majors {schema.KNOWN_MAJORS} are understood; "
            "update ncclscope, or export with an older nsys",
        )


def _layout_of(connection: sqlite3.Connection) -> Layout:
    tables = [str(name) for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    known = [name for name in tables if name in schema.READ_TABLES]
    columns = {name: frozenset[str]() for name in tables}
    for name in known:
        columns[name] = frozenset(str(row[1]) for row in connection.execute(f"PRAGMA table_info({name})"))
    return Layout(columns)


def _meta_of(connection: sqlite3.Connection, layout: Layout) -> Mapping[str, str]:
    if layout.meta_table is None:
        return {}
    rows = connection.execute(
        f"SELECT name, value FROM {layout.meta_table} WHERE name IN (?, ?, ?) AND value IS NOT NULL", _META_ROWS
    )
    return {str(name): str(value) for name, value in rows}


def _check_writers(path: Path) -> None:
    """Raises SourceError if somebody is writing, or began to and was killed."""
    for ending in ("-journal", "-wal"):
        try:
            left = os.stat(f"{path}{ending}").st_size
        except OSError:
            continue
        if left:
            raise fault("incomplete", path, f"its {ending[1:]} is not empty")
    try:
        with open_plain(path) as file:
            is_locked = _is_write_locked(file.fileno())
    except OSError as error:
        raise _unreachable(path, error) from error
    if is_locked:
        raise fault("locked", path)


def _is_write_locked(handle: int) -> bool:
    """Whether somebody, this process included, holds one of SQLite's locks for writing. Asks, and takes none."""
    asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, *_LOCKED_BYTES, 0)
    try:
        answer = fcntl.fcntl(handle, fcntl.F_OFD_GETLK, asked)
    except OSError:  # the file system knows no locks
        return False
    found: int = struct.unpack(_FLOCK, answer)[0]
    return found != fcntl.F_UNLCK


def _connect(path: Path) -> sqlite3.Connection:
    """A connection that takes no locks, writes nothing and makes no file; may move between threads, one at a time."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None, check_same_thread=False
    )
    connection.text_factory = _text
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_CELL)
    # The file may come from anywhere. *Source:* sqlite.org/security.html, "Untrusted SQLite Database Files".
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")  # a cell beyond its page is memory of something else
    return connection


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
