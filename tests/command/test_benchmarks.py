"""Output of nccl-tests, alone or between lines of NCCL, is a benchmark in every output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from agent.log_samples import operation_line
from click.testing import CliRunner

from ncclscope import file_readers
from ncclscope.cli import main

OUTPUT = """\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 1048576 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
#  Rank  0 Group  0 Pid  41822 on     node17 device  0 [0x07] NVIDIA H100
#  Rank  1 Group  0 Pid  41822 on     node17 device  1 [0x46] NVIDIA H100
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
     1048576        262144     float     sum      -1    200.0    5.24    5.24      0    190.0    5.52    5.52      0
  1073741824     268435456     float     sum      -1   100000   10.74   10.74      0   100500   10.68   10.68      0
# Avg bus bandwidth    : 8.045
"""
TORN = "     2097152        524288     float     sum      -1"


def _analyzed(path: Path, out: Path) -> tuple[str, dict[str, Any], str]:
    done = CliRunner().invoke(main, ["analyze", str(path), "--out", str(out), "--jobs", "1"])
    assert done.exit_code == 0, done.output
    return done.output, json.loads((out / "summary.json").read_bytes()), (out / "report.html").read_text()


def test_a_file_of_nccl_tests_alone_is_read_and_shown_with_its_curve(tmp_path: Path) -> None:
    (tmp_path / "run.txt").write_text(OUTPUT)
    said, summary, report = _analyzed(tmp_path, tmp_path / "out")
    assert "Read 1 file (output of nccl-tests only)" in said
    assert "AllReduce float sum, 2 ranks on 1 host: 2 rows, run.txt" in said
    assert re.search(r"1,073,741,824 +100 ms +10\.74 GB/s +10\.74 GB/s +100\.5 ms +10\.68 GB/s", said)
    assert summary["level"] == "output of nccl-tests only"
    (table,) = summary["benchmarks"]
    assert {name: table[name] for name in ("file", "op", "dtype", "red_op", "root", "ranks", "hosts", "torn_rows")} == {
        "file": "run.txt",
        "op": "AllReduce",
        "dtype": "float",
        "red_op": "sum",
        "root": -1,
        "ranks": 2,
        "hosts": ["node17"],
        "torn_rows": 0,
    }
    assert table["rows"][0] == {
        "message_bytes": 1048576,
        "count": 262144,
        "out_of_place": {"time_ns": 200_000, "algbw": 5_240_000_000, "busbw": 5_240_000_000, "wrong": "0"},
        "in_place": {"time_ns": 190_000, "algbw": 5_520_000_000, "busbw": 5_520_000_000, "wrong": "0"},
    }
    assert 'id="benchmarks"' in report
    assert '"y":[5.24,10.74]' in report


def test_a_log_with_a_table_is_a_log_and_a_benchmark_without_parallelism(tmp_path: Path) -> None:
    lines = [operation_line(op_count=f"{k:x}") for k in range(40)]
    (tmp_path / "job.log").write_text("\n".join([*lines[:20], OUTPUT + TORN + lines[20], *lines[21:]]) + "\n")
    said, summary, _ = _analyzed(tmp_path / "job.log", tmp_path / "out")
    assert "1 benchmark of nccl-tests" in said
    assert "2 rows (1 torn), job.log" in said
    assert summary["level"] == "logs only"
    (operations,) = summary["operations"]
    assert (operations["operations"], operations["parallelism"]) == (40, None)


def test_the_header_is_seen_where_two_blocks_of_a_log_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = operation_line() + "\n"
    monkeypatch.setattr(file_readers, "_BLOCK", len(first) + OUTPUT.index(" nGpus ") + 3)
    (tmp_path / "job.log").write_text(first + OUTPUT)
    _, summary, _ = _analyzed(tmp_path / "job.log", tmp_path / "out")
    assert len(summary["benchmarks"]) == 1


def test_without_a_table_no_output_speaks_of_benchmarks(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(operation_line() + "\n")
    said, summary, report = _analyzed(tmp_path / "job.log", tmp_path / "out")
    assert "benchmark" not in said
    assert "benchmarks" not in summary
    assert '"benchmarks"' not in report.partition('id="data">')[2].partition("</script>")[0]


def test_a_file_that_only_speaks_of_nccl_tests_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Avg bus bandwidth is what we compare\n")
    done = CliRunner().invoke(main, ["analyze", str(tmp_path / "notes.md"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 3
    assert "words of nccl-tests without a row of its table: notes.md" in done.output
