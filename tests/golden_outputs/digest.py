"""A digest of an output that is equal where nothing that a reader could see differs.

Floating-point numbers count with six significant digits, since the last bits of a sum depend on the processor; of
parquet the schema and the values count, of a gzip file what is in it. With `exact`, every byte does (of a gzip file
those that it holds).
"""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_FLOAT: Final = re.compile(rb"-?\d+\.\d+(?:[eE][-+]?\d+)?|-?\d+[eE][-+]?\d+")
_LENGTH: Final = 16


def digest_of_file(path: Path, *, inputs: Path, exact: bool = False) -> str:
    """The digest of one output file; where the inputs lie does not count."""
    if path.suffix == ".gz":
        return digest_of_text(gzip.decompress(path.read_bytes()), exact=exact)
    if path.suffix == ".parquet" and not exact:
        return _digest_of_table(path)
    return digest_of_text(path.read_bytes().replace(str(inputs).encode(), b"INPUTS"), exact=exact)


def digest_of_text(text: bytes, *, exact: bool = False) -> str:
    """The digest of a text with numbers in it."""
    return _digest(text if exact else _FLOAT.sub(_rounded, text))


def _digest_of_table(path: Path) -> str:
    table = pq.read_table(path)
    hasher = hashlib.sha256(str(table.schema.remove_metadata()).encode())
    for column in table.columns:
        values = column.combine_chunks()
        if pa.types.is_floating(values.type):
            texts = [None if each is None else f"{each:.6g}" for each in values.to_pylist()]
        else:
            texts = (
                pc.cast(values, pa.string()).to_pylist() if not pa.types.is_nested(values.type) else values.to_pylist()
            )
        hasher.update(repr(texts).encode())
    return hasher.hexdigest()[:_LENGTH]


def _rounded(number: re.Match[bytes]) -> bytes:
    return b"%.6g" % float(number[0])


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_LENGTH]
