"""The spool's database: SQLite in one file, written by one thread.

The write-ahead log makes a transaction one sequential write; only those that say so wait for the disk. SQLite checks
its log, but not the pages of its file, so each row carries a CRC-32 and a row that fails it is dropped. A database that
SQLite itself finds damaged is rebuilt from the rows that can be read. Locking is exclusive: no memory is shared by a
mapped file, which a full disk would turn into a bus error.

*Source:* sqlite.org/wal.html, sqlite.org/pragma.html#pragma_locking_mode, sqlite.org/rescode.html.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final, TypeVar
from zlib import crc32

import structlog

from ncclscope_agent.spool.records import Chapter, DiskState, Entries, Expired, Frame, Owner, Recovered, Transaction
from ncclscope_wire.messages import Position

_log = structlog.get_logger(__name__)
_Answer = TypeVar("_Answer")

DATABASE_NAME: Final = "spool-2.sqlite"
"""Its number grows with every change that an older agent would misread; files of other versions are left alone."""
_CHAPTER_SHIFT: Final = 40
"""Rows are numbered by chapter and sequence number, so their order is the order of delivery."""
_CHECKPOINT_PAGES: Final = 1024
"""4 MiB of log are moved to the file at once."""
_VACUUM_PAGES: Final = 1024
_VACUUM_SHARE: Final = 2
"""Free pages are reused; the file shrinks while more than one page in `_VACUUM_SHARE` is free."""
_DAMAGED: Final = {11, 26}
"""SQLITE_CORRUPT and SQLITE_NOTADB."""

_TABLES: Final = {
    "agent": "agent_id TEXT, name TEXT, host TEXT, job TEXT",
    "chapter": "session_id TEXT, protocol_version INTEGER",
    "frame": "key TEXT, begin INTEGER, end INTEGER, end_line INTEGER, is_last INTEGER, observed_at_ns INTEGER, "
    "entries INTEGER, written_ns INTEGER, crc INTEGER, payload BLOB",
    "entries": "crc INTEGER, payload BLOB",
    "position": "key TEXT UNIQUE, end INTEGER, end_line INTEGER, is_complete INTEGER, crc INTEGER",
    "content": "key TEXT UNIQUE, end INTEGER, content_check INTEGER, crc INTEGER",
}
"""Columns beside `id`. `content` has what agents before protocol version 3 do not know of a position."""
_FRAME_COLUMNS: Final = "id, key, begin, end, end_line, is_last, observed_at_ns, entries, written_ns, crc"
_Row = tuple[Any, ...]


def left_bytes(folder: Path) -> int:
    """Bytes of batches in a database that nobody has open; it is left as it is."""
    path = folder / DATABASE_NAME
    log = path.with_name(path.name + "-wal")
    waiting = log.stat().st_size if log.exists() else 0
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            (written,) = database.execute("SELECT total(length(payload)) FROM frame").fetchone()
    except sqlite3.Error:  # there is none, or it is new and all of it is in the log
        return waiting
    return waiting + int(written)


class SpoolDatabase:
    """One file with what an agent spooled; made by the first transaction. To be used by one thread at a time.

    Raises, in all methods:
        OSError: the disk is full or broken; nothing of the transaction counts.
    """

    def __init__(self, folder: Path, *, transaction_bytes: int = 4 << 20) -> None:
        self.path = folder / DATABASE_NAME
        self._transaction_bytes = transaction_bytes
        self._connection: sqlite3.Connection | None = None

    def recover(self) -> Recovered:
        """The spool that an earlier start left; an empty one if there is no file."""
        nothing = Recovered(owner=None, chapters=(), frames=(), positions={})
        return self._guarded(self._recovered) if self.path.exists() else nothing

    def commit(self, wanted: Transaction) -> DiskState:
        """Carries out a transaction."""
        return self._guarded(lambda: self._committed(wanted))

    def frames(self, chapter: int, sequence: int, last: int) -> tuple[list[Frame], int]:
        """Batches of a chapter from this number on, as many as fit a transaction, and up to where that was looked.

        `last`: the last one that the chapter has on disk. If fewer are found, the others are lost.
        """
        return self._guarded(lambda: self._read_frames(chapter, sequence, last))

    def entries(self, chapter: int) -> list[Entries]:
        """All dictionary entries of a chapter."""
        return self._guarded(lambda: list(self._read_entries(chapter)))

    def close(self) -> None:
        """Moves the log to the file and closes it."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _guarded(self, work: Callable[[], _Answer]) -> _Answer:
        try:
            return work()
        except sqlite3.Error as error:
            self._roll_back()
            if (getattr(error, "sqlite_errorcode", 0) & 0xFF) not in _DAMAGED:
                raise OSError(str(error)) from error
            _log.warning("spool_damaged", file=str(self.path), why=str(error))
        try:
            self._rebuild()
            return work()
        except sqlite3.Error as error:
            self._roll_back()
            raise OSError(str(error)) from error

    def _roll_back(self) -> None:
        if self._connection is not None and self._connection.in_transaction:
            with suppress(sqlite3.Error):
                self._connection.rollback()

    @property
    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            # No link is followed, and nobody else may read what a job logs.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(self.path, flags, 0o600))
            self._connection = _connect(self.path)
        return self._connection

    def _recovered(self) -> Recovered:
        read = self._open.execute
        owners = [Owner(*row) for row in read("SELECT agent_id, name, host, job FROM agent")]
        chapters = [Chapter(*row) for row in read("SELECT id, session_id, protocol_version FROM chapter ORDER BY id")]
        content = {
            (key, end): check
            for key, end, check, crc in read("SELECT key, end, content_check, crc FROM content")
            if crc == _checksum((key, end, check))
        }
        positions: dict[str, Position] = {}
        for key, end, line, is_complete, crc in read("SELECT key, end, end_line, is_complete, crc FROM position"):
            if crc == _checksum((key, end, line, is_complete)):
                check = content.get((key, end))
                positions[key] = Position(end=end, end_line=line, is_complete=bool(is_complete), content_check=check)
        self._drop_damaged_frames()
        return Recovered(
            owner=owners[0] if owners else None,
            chapters=chapters,
            frames=(_frame((*row, b"")) for row in read(f"SELECT {_FRAME_COLUMNS} FROM frame ORDER BY id")),
            positions=positions,
            disk=self._state(()),
        )

    def _drop_damaged_frames(self) -> None:
        rows = self._open.execute(f"SELECT {_FRAME_COLUMNS}, payload FROM frame")
        damaged = [row[0] for row in rows if not _is_whole(row)]
        if damaged:
            _log.warning("spool_damaged", file=str(self.path), batches=len(damaged))
            self._open.executemany("DELETE FROM frame WHERE id = ?", ((number,) for number in damaged))

    def _read_frames(self, chapter: int, sequence: int, last: int) -> tuple[list[Frame], int]:
        found: list[Frame] = []
        size = 0
        ids = _id(chapter, sequence), _id(chapter, last)
        query = f"SELECT {_FRAME_COLUMNS}, payload FROM frame WHERE id BETWEEN ? AND ? ORDER BY id"
        for row in self._open.execute(query, ids):
            if not _is_whole(row):
                continue
            found.append(_frame(row))
            size += len(row[-1])
            if size >= self._transaction_bytes:
                return found, found[-1].sequence
        return found, last

    def _read_entries(self, chapter: int) -> Iterator[Entries]:
        ids = _id(chapter, 0), _id(chapter + 1, 0)
        for number, crc, payload in self._open.execute(
            "SELECT id, crc, payload FROM entries WHERE id BETWEEN ? AND ? ORDER BY id", ids
        ):
            if crc == _checksum((number,), payload):
                yield Entries(*_split(number), payload)

    def _committed(self, wanted: Transaction) -> DiskState:
        database = self._open
        database.execute(f"PRAGMA synchronous = {'FULL' if wanted.is_synced else 'NORMAL'}")
        database.execute("BEGIN IMMEDIATE")
        if wanted.owner is not None:
            _put(database, "agent", [(1, *astuple(wanted.owner))])
        _put(database, "chapter", [(one.number, one.session_id, one.protocol_version) for one in wanted.chapters])
        _put(database, "entries", (_entries_row(one) for one in wanted.entries))
        _put(database, "frame", (_frame_row(one, wanted.now_ns) for one in wanted.frames))
        if wanted.replaces_positions:
            database.execute("DELETE FROM position")
            database.execute("DELETE FROM content")
        _put(database, "position", (_position_row(key, known) for key, known in wanted.positions.items()))
        _put(database, "content", (_content_row(key, known) for key, known in wanted.positions.items()))
        for chapter, sequence in wanted.acknowledged.items():
            database.execute("DELETE FROM frame WHERE id BETWEEN ? AND ?", (_id(chapter, 0), _id(chapter, sequence)))
        for chapter in wanted.finished:
            for table in ("frame", "entries"):
                ids = _id(chapter, 0), _id(chapter + 1, 0) - 1
                database.execute(f"DELETE FROM {table} WHERE id BETWEEN ? AND ?", ids)
            database.execute("DELETE FROM chapter WHERE id = ?", (chapter,))
        expired = [] if wanted.expires_before_ns is None else list(_expire(database, wanted.expires_before_ns))
        database.execute("COMMIT")
        return self._state(expired)

    def _state(self, expired: Sequence[Expired]) -> DiskState:
        page, pages, free = (self._pragma(name) for name in ("page_size", "page_count", "freelist_count"))
        if free > _VACUUM_PAGES and free * _VACUUM_SHARE > pages:
            # Each step frees one page, and `execute` makes one step.
            self._open.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
            pages, free = self._pragma("page_count"), self._pragma("freelist_count")
        oldest = self._open.execute("SELECT written_ns FROM frame ORDER BY id LIMIT 1").fetchone()
        return DiskState(
            file_bytes=pages * page,
            used_bytes=(pages - free) * page,
            oldest_ns=None if oldest is None else oldest[0],
            expired=expired,
        )

    def _pragma(self, name: str) -> int:
        return int(self._open.execute(f"PRAGMA {name}").fetchone()[0])

    def _rebuild(self) -> None:
        """Copies all rows that can be read to another file, and puts that in the place of this one."""
        self.close()
        other = self.path.with_suffix(".rebuilt")
        other.unlink(missing_ok=True)
        with closing(_connect(other)) as made, closing(sqlite3.connect(self.path, isolation_level=None)) as damaged:
            for table, columns in _TABLES.items():
                names = ", ".join(["id", *(column.split()[0] for column in columns.split(", "))])
                rows = _readable_rows(damaged, f"SELECT {names} FROM {table} WHERE id > ? ORDER BY id")
                made.execute("BEGIN IMMEDIATE")
                _put(made, table, rows)
                made.execute("COMMIT")
        # The old log first: SQLite would apply it to the new file.
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        os.replace(other, self.path)


def _connect(path: Path) -> sqlite3.Connection:
    """The database, with its tables. A new one waits for the disk three times: each may take seconds on a slow one."""
    is_new = not path.exists() or not path.stat().st_size
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        # While it is made there is nothing to lose. NORMAL: the log of an earlier start may be moved to the file now.
        connection.execute(f"PRAGMA synchronous = {'OFF' if is_new else 'NORMAL'}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        connection.execute("BEGIN")
        for table, columns in _TABLES.items():
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table} (id INTEGER PRIMARY KEY, {columns})")
        connection.execute("COMMIT")
        if is_new:  # SQLite removes the log of a file that is empty, as an unsynced one is after a loss of power
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _readable_rows(database: sqlite3.Connection, query: str) -> Iterator[_Row]:
    """The rows of a table, but for those on damaged pages and a few beside these."""
    after, step = -1, 1
    while step < 1 << 60:
        try:
            for row in database.execute(query, (after,)):
                after, step = row[0], 1
                yield row
        except sqlite3.DatabaseError:
            after, step = after + step, 2 * step
        else:
            return


def _put(database: sqlite3.Connection, table: str, rows: Iterable[_Row]) -> None:
    marks = ", ".join("?" * (1 + len(_TABLES[table].split(", "))))
    database.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)


def _expire(database: sqlite3.Connection, before_ns: int) -> Iterator[Expired]:
    """Drops the oldest batches, and says which."""
    youngest = database.execute("SELECT id FROM frame WHERE written_ns >= ? ORDER BY id LIMIT 1", (before_ns,))
    found = youngest.fetchone()
    bound = _id(1 << 22, 0) if found is None else found[0]
    ends: dict[int, dict[str, int]] = {}
    known: dict[int, tuple[int, int]] = {}
    for number, key, end in database.execute("SELECT id, key, end FROM frame WHERE id < ? ORDER BY id", (bound,)):
        chapter, sequence = _split(number)
        known[chapter] = known.get(chapter, (0, 0))[0] + 1, sequence
        ends.setdefault(chapter, {})[key] = end
    database.execute("DELETE FROM frame WHERE id < ?", (bound,))
    yield from (Expired(chapter, batches, last, ends[chapter]) for chapter, (batches, last) in known.items())


def _frame_row(frame: Frame, now_ns: int) -> _Row:
    head = (
        _id(frame.chapter, frame.sequence),
        frame.key,
        frame.begin,
        frame.end,
        frame.end_line,
        int(frame.is_last),
        frame.observed_at_ns,
        frame.entries,
        now_ns,
    )
    return *head, _checksum(head, frame.payload), frame.payload


def _frame(row: _Row) -> Frame:
    number, key, begin, end, line, is_last, observed_at_ns, entries, _, _, payload = row
    return Frame(*_split(number), key, begin, end, line, bool(is_last), observed_at_ns, entries, payload)


def _is_whole(row: _Row) -> bool:
    return bool(row[-2] == _checksum(row[:-2], row[-1]))


def _entries_row(entries: Entries) -> _Row:
    number = _id(entries.chapter, entries.number)
    return number, _checksum((number,), entries.payload), entries.payload


def _position_row(key: str, known: Position) -> _Row:
    head = key, known.end, known.end_line, int(known.is_complete)
    return None, *head, _checksum(head)


def _content_row(key: str, known: Position) -> _Row:
    head = key, known.end, known.content_check
    return None, *head, _checksum(head)


def _checksum(head: _Row, payload: bytes | memoryview = b"") -> int:
    return crc32(payload, crc32(repr(head).encode()))


def _id(chapter: int, sequence: int) -> int:
    return chapter << _CHAPTER_SHIFT | sequence


def _split(number: int) -> tuple[int, int]:
    return number >> _CHAPTER_SHIFT, number & ((1 << _CHAPTER_SHIFT) - 1)
