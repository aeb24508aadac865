from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from agent.log_samples import operation_line

from ncclscope_agent.files.recognise import ENOUGH_BYTES, FileKind, recognise


@pytest.mark.parametrize(
    ("data", "name", "kind"),
    [
        (b"", "a.log", FileKind.EMPTY),
        (operation_line().encode(), "a.log", FileKind.NCCL_LOG),
        (b"import torch\n" * 1000 + operation_line().encode(), "slurm-1.out", FileKind.NCCL_LOG),
        (b"NCCL version 2.18.3+cuda12.1\n", "stdout", FileKind.NCCL_LOG),
        (b"# Notes\n```\nnode17:1:1 NCCL CALL ncclGroupStart()\n```\n", "notes.md", FileKind.NCCL_LOG),
        (b"# nThread 1 nGpus 8 minBytes 8\n  8  2  float  sum\n", "all_reduce.txt", FileKind.NCCL_TESTS),
        (b"# nThread 1 nGpus 8 minBytes 8\nnode17:1:1 [0] NCCL INFO x\n", "all_reduce.txt", FileKind.NCCL_LOG),
        (
            b'{"header":{"id":"0x1"},"metadata":{"inspector_output_format_version":"v4.0"},"coll_perf":{}}\n',
            "node17-pid7.log",
            FileKind.INSPECTOR,
        ),
        (
            b'nccl_bus_bandwidth_gbs{version="v5.1",node="n1",gpu="GPU0",nranks="8",collective="AllReduce"} 41.2\n',
            "nccl_inspector_metrics_GPU-1.prom",
            FileKind.INSPECTOR_METRICS,
        ),
        (b"\0\1\2nsys", "report1.nsys-rep", FileKind.NSYS_REPORT),
        (b"not binary", "report1.nsys-rep", FileKind.UNKNOWN),
        (b"\x89PNG\r\n\x1a\n\0\0", "plot.png", FileKind.UNKNOWN),
        (b"NCCL is slow today\n", "mail.txt", FileKind.UNKNOWN),
        (b"x" * ENOUGH_BYTES + operation_line().encode(), "late.log", FileKind.UNKNOWN),
    ],
)
def test_a_file_is_told_by_its_first_bytes(data: bytes, name: str, kind: FileKind) -> None:
    assert recognise(data, name) is kind


def test_a_database_is_told_by_its_magic(tmp_path: Path) -> None:
    path = tmp_path / "export"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE t (a)")
    database.close()
    assert recognise(path.read_bytes(), "export") is FileKind.NSYS_SQLITE
