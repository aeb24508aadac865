"""Exports of nsys that are a folder with a file for each table, put into one SQLite file, which is what is read.

`nsys export --type=parquetdir` writes NAME_pqtdir/TABLE.parquet, `--type=arrowdir` NAME_arwdir/TABLE.arrow (Arrow's
stream format), with the tables and columns of the SQLite export. An agent has no pyarrow: `analyze` alone reads them.
*Source:* Nsight Systems User Guide, "Export"; exports of 2023.4.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (pyarrow carries no types)
from __future__ import annotations

import re
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from ncclscope_agent.sources.nsys.reader_process import set_limits
from ncclscope_agent.sources.nsys.schema import META_TABLES
from ncclscope_wire.errors import SourceError

_ENDINGS: Final = (".parquet", ".arrow")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
_LEFT_OUT: Final = "ENUM_"
_ROWS: Final = 1 << 16
_MOST_BYTES: Final = 1 << 30
_UNFOLDS: Final = 64
"""Times the size of the tables, and `_MOST_BYTES`: so large may the SQLite file be."""
_MOST_MEMORY: Final = 2 << 30
_SHOWN: Final = 300


def tables_in(folder: Path) -> dict[str, Path]:
    """The files of a folder by table; empty unless the table is among them that every export has."""
    tables = {path.stem: path for path in sorted(folder.iterdir()) if path.suffix in _ENDINGS and path.is_file()}
    return tables if any(name in tables for name in META_TABLES) else {}


def as_sqlite(folder: Path, work_directory: Path) -> Path:
    """The same export as a SQLite file, which is in `work_directory`.

    A process of its own makes it (this module, `python -m`), within limits of memory and of the file's size: a few
    kilobytes of such tables may unfold without end.

    Raises:
        SourceError: "unreadable_tables": a file is cut off, damaged, no table, or unfolds to too much.
    """
    made = work_directory / f"{folder.name}.{abs(hash(folder)):x}.sqlite"
    made.unlink(missing_ok=True)
    most = _MOST_BYTES + _UNFOLDS * sum(path.stat().st_size for path in tables_in(folder).values())
    command = [sys.executable, "-P", "-m", __name__, str(folder), str(made), str(most)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == 0:
        return made
    made.unlink(missing_ok=True)
    said = done.stderr.decode(errors="replace").strip()[-_SHOWN:] if done.returncode == 1 else "it unfolds to too much"
    raise SourceError("unreadable_tables", f"{folder} is no whole export of nsys ({said}); export the report again")


def main(folder: Path, made: Path, most_bytes: int) -> None:
    """Copies all tables; ends with 1 and says why if one cannot be read."""
    import_module("pyarrow.parquet")  # not in the base install; before the limits, which count from here
    set_limits(_MOST_MEMORY, {resource.RLIMIT_FSIZE: most_bytes})
    tables = tables_in(folder)
    in_order = sorted(tables, key=lambda name: name in META_TABLES)  # its last table says that an export is whole
    try:
        with closing(sqlite3.connect(made, isolation_level=None)) as database:
            database.execute("PRAGMA synchronous = OFF")
            database.execute("BEGIN")
            for name in in_order:
                if _NAME.fullmatch(name) and not name.startswith(_LEFT_OUT):
                    _copy(database, name, tables[name])
            database.execute("COMMIT")
    except (OSError, ValueError, sqlite3.Error, OverflowError, MemoryError) as error:
        sys.exit(f"{type(error).__name__}: {str(error)[:200]}")


def _copy(database: sqlite3.Connection, name: str, path: Path) -> None:
    insert = ""
    for columns, rows in _rows_of(path):
        kept = [at for at, column in enumerate(columns) if _NAME.fullmatch(column)]
        if not insert:
            database.execute(f'CREATE TABLE "{name}" ({", ".join(columns[at] for at in kept)})')
            insert = f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(kept))})'
        database.executemany(insert, ([row[at] for at in kept] for row in rows))


def _rows_of(path: Path) -> Iterator[tuple[list[str], Iterator[tuple[Any, ...]]]]:
    """Names of columns and rows, a number at a time; once with no rows, so that an empty table is one too."""
    import pyarrow as pa  # noqa: PLC0415  (not in the base install)
    import pyarrow.parquet as pq  # noqa: PLC0415
    from pyarrow import ipc  # noqa: PLC0415

    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as parquet:
            yield parquet.schema_arrow.names, iter(())
            for batch in parquet.iter_batches(_ROWS):
                yield batch.schema.names, _values(batch, pa)
    else:
        with path.open("rb") as data, ipc.open_stream(data) as stream:
            yield stream.schema.names, iter(())
            for batch in stream:
                yield batch.schema.names, _values(batch, pa)


def _values(batch: Any, pa: Any) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401  (pyarrow carries no types)
    columns: list[list[Any]] = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "binaryData":  # nsys 2026 marks it as text
            columns.append(column.cast(pa.binary()).to_pylist())
        elif pa.types.is_uint64(column.type):  # SQLite has signed ones
            columns.append(column.cast(pa.int64(), safe=False).to_pylist())
        else:
            columns.append(column.to_pylist())
    return zip(*columns, strict=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
