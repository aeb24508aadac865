"""compare.json: from a folder and from the store, and in the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from service.export.small_run import logs_only_run, small_run

from ncclscope_service.export.comparison import (
    compare_document,
    figures_of_folder,
    figures_of_selection,
    is_output_folder,
)
from ncclscope_service.export.directory import content_of, write_content, write_run
from ncclscope_service.export.selection import select
from ncclscope_wire.errors import FormatError


def test_a_folder_gives_the_figures_of_the_run_that_wrote_it(tmp_path: Path) -> None:
    write_run(small_run(), tmp_path)
    assert is_output_folder(tmp_path)
    read, direct = figures_of_folder(tmp_path, "x"), figures_of_selection(select(small_run()), "x")
    assert compare_document(read, direct)["this"] == compare_document(read, direct)["other"]
    assert compare_document(read, direct)["changes"] == 0


def test_what_the_run_did_is_counted_by_kind_operation_and_size(tmp_path: Path) -> None:
    document = compare_document(*(figures_of_selection(select(small_run()), name) for name in "ab"))
    rows = document["differences"]
    assert isinstance(rows, list)
    found = {(row["parallelism"], row["op"], row["size_class"], row["measure"]): row for row in rows}
    assert found["TP", "AllReduce", "16MiB", "operations_per_iteration"]["this"] == 8
    assert found["DP", "AllReduce", "16MiB", "busbw_bytes_per_second"]["this"] == pytest.approx((1 << 21) / 0.5e-3)
    assert found["DP", "AllReduce", "16MiB", "wait_ratio"]["this"] == pytest.approx(1.8 / 7.8)
    whole = next(row for row in rows if row["op"] is None)
    assert (whole["measure"], whole["this"]) == ("iteration_ns", 4e6)


def test_the_comparison_is_written_and_shown_and_gone_with_the_next_run_without(tmp_path: Path) -> None:
    other = figures_of_selection(select(logs_only_run(with_stamps=True)), "<other>")
    paths = write_content(content_of(select(small_run()), compare=other, name="this"), tmp_path)
    assert json.loads(paths["compare.json"].read_bytes())["other"]["name"] == "<other>"
    text = paths["report.html"].read_text(encoding="utf-8")
    assert "What changed" in text
    assert "&lt;other&gt;" in text
    paths = write_run(small_run(), tmp_path)
    assert "compare.json" not in paths
    assert not (tmp_path / "compare.json").exists()
    assert "What changed" not in paths["report.html"].read_text(encoding="utf-8")


def test_a_folder_with_a_broken_table_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "operations.parquet").write_bytes(b"not parquet")
    with pytest.raises(FormatError, match="not the operations of an earlier run"):
        figures_of_folder(tmp_path, "x")
