"""Writing parquet so that every reader sees plain columns, a row group at a time."""

# pyright: reportUnknownParameterType=false
# (pyarrow carries no types)
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def write_slices(tables: Iterable[pa.Table], schema: pa.Schema, path: Path) -> None:
    """Writes tables of that schema as row groups of one file; no tables give a file with no rows.

    Dictionary-encoded words are stored as text: arrow's own schema is left out of the file, so readers
    give text and not categories.
    """
    writer: pq.ParquetWriter | None = None
    try:
        for table in tables:
            writer = writer or _writer(table.schema, path)
            writer.write_table(table, row_group_size=max(1, len(table)))
        writer = writer or _writer(schema, path)
    finally:
        if writer is not None:
            writer.close()


def _writer(schema: pa.Schema, path: Path) -> pq.ParquetWriter:
    words = [field.name for field in schema if pa.types.is_dictionary(field.type) or pa.types.is_string(field.type)]
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=words,  # pyright: ignore[reportArgumentType] - takes names too, which its default hides
        store_schema=False,
    )
