"""Every output of the simulated jobs and of the corpus, with its digest."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from click.testing import CliRunner

from golden_outputs import live
from golden_outputs.jobs import JOBS, LIVE, LIVE_SHORT, SHORT
from ncclscope.cli import main
from ncclscope_simulator import write

EXPECTED: Final = Path(__file__).parent / "digests.txt"
_CORPUS_FOLDERS: Final = ("nccl_logs", "nsys", "inspector")


def digests(work: Path, *, corpora: Iterable[Path] = (), short: bool = False, exact: bool = False) -> Iterator[str]:
    """Lines of (digest, output), job by job: what `analyze` writes, and what `/metrics` says while it runs."""
    for name in SHORT if short else JOBS:
        write(JOBS[name], work / name)
        yield from _analyzed(work / name, work / f"{name}.out", f"analyze/{name}", exact=exact)
    for name in LIVE_SHORT if short else LIVE:
        for output, text in live.scrapes(JOBS[name], work / f"{name}.live"):
            yield f"{digest_of_text(text.encode(), exact=exact)}  live/{name}/{output}"
    for corpus in corpora:
        for folder in _CORPUS_FOLDERS:
            for path in sorted((corpus / folder).iterdir()) if (corpus / folder).is_dir() else ():
                out = work / f"{corpus.name}.{folder}.{path.name}.out"
                yield from _analyzed(path, out, f"{corpus.name}/{folder}/{path.name}", exact=exact)


def corpora() -> list[Path]:
    """The folders of real logs and exports that `NCCLSCOPE_CORPUS` names, else those beside the checkout."""
    asked = os.environ.get("NCCLSCOPE_CORPUS")
    beside = Path(__file__).resolve().parents[3] / "shared"
    folders = [Path(asked)] if asked else [beside / "corpus", beside / "corpus2"]
    return [folder for folder in folders if folder.is_dir()]


def _analyzed(path: Path, out: Path, name: str, *, exact: bool) -> Iterator[str]:
    # One zone and one job name, so that the digests do not depend on where the files lie.
    done = CliRunner().invoke(main, ["analyze", str(path), "--out", str(out)])
    yield f"{done.exit_code:<16}  {name}/exit_status"
    for each in sorted(out.glob("*")) if out.is_dir() else ():
        yield f"{digest_of_file(each, inputs=path, exact=exact)}  {name}/{each.name}"


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
