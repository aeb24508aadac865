"""`analyze` over real logs and exports that nobody here wrote."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from end_to_end.processes import run_command

pytestmark = pytest.mark.corpus

# Written for this test alone, so that an error of the reader cannot hide in it.
_INTACT = re.compile(
    rb"\b[A-Za-z]+: opCount [0-9a-f]+ sendbuff (?:0x[0-9a-f]+|\(nil\)) recvbuff (?:0x[0-9a-f]+|\(nil\)) count \d+ "
    rb"datatype \d+ op \d+ root \d+ comm 0x[0-9a-f]+ \[nranks=\d+\] stream (?:0x[0-9a-f]+|\(nil\))"
    rb"(?: task -?\d+ globalrank -?\d+)?(?=\s*$)",
    re.MULTILINE,
)
_PREFIX = re.compile(rb"[^\s:]+:\d+:\d+ (?:\[-?\d+\] )?(?:[^\n]{0,160} )?NCCL INFO $")


@pytest.fixture(scope="module")
def analyzed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of `analyze` over the whole corpus."""
    out = tmp_path_factory.mktemp("corpus")
    done = run_command("analyze", str(corpus), "--out", str(out))
    assert done.returncode == 0, done.stderr
    return out


def _intact_lines(path: Path) -> int:
    """Operation lines whose text and prefix are whole, counted without our reader."""
    content = path.read_bytes()
    found = 0
    for match in _INTACT.finditer(content):
        line_start = content.rfind(b"\n", 0, match.start()) + 1
        found += bool(_PREFIX.search(content, line_start, match.start()))
    return found


def test_there_is_one_row_per_intact_operation_line(corpus: Path, analyzed: Path) -> None:
    table = pq.read_table(analyzed / "operations.parquet", columns=["log_file"])
    names = [str(name) for name in table["log_file"].to_pylist()]
    # Traces and the Inspector's dumps have operations and no lines.
    ours = Counter(name for name in names if not name.startswith(("kineto/", "inspector/")))
    theirs = {
        str(path.relative_to(corpus)): count
        for path in sorted(corpus.rglob("*"))
        if path.is_file()
        and path.suffix not in {".sqlite", ".parquet", ".gz", ".png"}
        and (count := _intact_lines(path))
    }
    assert sum(theirs.values()) > 22_000
    assert ours == Counter(theirs)


def test_what_was_not_understood_is_counted(analyzed: Path) -> None:
    summary = json.loads((analyzed / "summary.json").read_text())
    text = json.dumps(summary)
    assert '"torn"' in text
    assert '"other_nccl"' in text


def _sql_durations(export: Path) -> Counter[tuple[str, int]]:
    with sqlite3.connect(f"file:{export}?mode=ro", uri=True) as connection:
        rows = connection.execute(
            "SELECT s.value, k.end - k.start FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.shortName "
            "WHERE s.value LIKE 'ncclKernel%' OR s.value LIKE 'ncclDevKernel%' OR s.value LIKE 'ncclSym%DevKernel%' "
            "OR s.value LIKE 'mscclKernel%'"  # of MSCCL's fork of NCCL: communication, of a library of its own
        ).fetchall()
    connection.close()
    return Counter((name, duration) for name, duration in rows)


@pytest.mark.parametrize("folder", ["zy-uestc-yccl", "gindachen-nsys-ai"])
def test_kernels_of_real_exports_have_the_durations_that_sql_gives(corpus: Path, tmp_path: Path, folder: str) -> None:
    exports = sorted((corpus / "nsys" / folder).glob("*.sqlite"))
    compared = 0
    for export in exports:
        try:
            expected = _sql_durations(export)
        except sqlite3.Error:
            continue
        if not expected:
            continue
        out = tmp_path / export.stem
        done = run_command("analyze", str(export), "--out", str(out))
        assert done.returncode == 0, done.stderr
        kernels = pq.read_table(out / "kernels.parquet", columns=["name", "library", "start_ns", "end_ns"]).to_pylist()
        assert Counter((row["name"], row["end_ns"] - row["start_ns"]) for row in kernels) == expected
        assert all(row["library"] == ("MSCCL++" if row["name"].startswith("msccl") else "NCCL") for row in kernels)
        compared += sum(expected.values())
    assert compared > 0
