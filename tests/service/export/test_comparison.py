"""Two runs side by side: what is a change and what is noise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from service.export.small_run import logs_only_run, small_run

from ncclscope_service.export.comparison import (
    MAX_SAMPLES,
    Figure,
    Key,
    RunFigures,
    Sample,
    compare,
    compare_document,
    figures_of_folder,
    figures_of_selection,
    is_output_folder,
    median_with_noise,
)
from ncclscope_service.export.directory import content_of, write_content, write_run
from ncclscope_service.export.selection import select
from ncclscope_wire.errors import FormatError

KEY = Key("DP", "AllReduce", "16MiB")


def run(busbw: float, *, seed: int, scatter: float = 0.05, per_iteration: int = 4, wait: float = 0.1) -> RunFigures:
    rng = np.random.default_rng(seed)
    times = np.arange(200) * 1e6
    rates = busbw * (1 + scatter * rng.standard_normal(200))
    sample = Sample(operations=200, bytes=200 << 20, duration_ns=200_000_000)
    sample.add(np.stack([times, rates, np.full(200, wait * 1e6), np.full(200, 1e6)]))
    sample.by_iteration = {k: [per_iteration, per_iteration << 20] for k in range(50)}
    starts = np.cumsum(100e6 * (1 + 0.01 * rng.standard_normal(50))).astype(int)
    return RunFigures("run", {KEY: sample}, dict(enumerate(starts.tolist())))


def changes(this: RunFigures, other: RunFigures) -> list[str]:
    return [each.measure for each in compare(this, other) if each.is_change]


def test_a_run_beside_itself_or_its_like_with_other_noise_has_no_change() -> None:
    assert changes(run(50e9, seed=1), run(50e9, seed=1)) == []
    assert sum(len(changes(run(50e9, seed=a), run(50e9, seed=a + 100))) for a in range(30)) == 0


def test_a_slower_group_is_one_change_and_comes_first() -> None:
    found = compare(run(40e9, seed=1), run(50e9, seed=2))
    assert [each.measure for each in found if each.is_change] == ["busbw_bytes_per_second"]
    assert found[0].ratio == pytest.approx(0.8, rel=0.02)
    assert found[0].key == KEY


def test_the_same_difference_is_no_change_where_the_runs_scatter_more_than_it() -> None:
    slow, fast = (run(rate, seed=seed, scatter=0.8) for rate, seed in ((45e9, 1), (50e9, 2)))
    assert changes(slow, fast) == []


def test_counts_are_exact_so_that_one_more_operation_per_iteration_is_a_change() -> None:
    expected = ["bytes_per_iteration", "operations_per_iteration"]
    assert sorted(changes(run(50e9, seed=1, per_iteration=5), run(50e9, seed=1))) == expected


def test_more_waiting_is_a_change_by_its_difference() -> None:
    assert changes(run(50e9, seed=1, wait=0.3), run(50e9, seed=1)) == ["wait_ratio"]
    assert changes(run(50e9, seed=1, wait=0.105), run(50e9, seed=1)) == []


def test_what_only_one_run_does_is_a_change() -> None:
    this = run(50e9, seed=1)
    found = compare(this, RunFigures("other", {}, {}))
    assert {(each.measure, each.is_change) for each in found if each.key} >= {("operations", True), ("bytes", True)}


def test_without_iterations_runs_of_other_lengths_do_not_differ_in_counts() -> None:
    short, long = run(50e9, seed=1), run(50e9, seed=1)
    for each in (short, long):
        each.samples[KEY].by_iteration = {}
        each.iteration_starts = {}
    long.samples[KEY].operations *= 3
    assert changes(long, short) == []


def test_too_little_data_has_no_noise_and_is_never_a_change() -> None:
    assert median_with_noise(np.array([1.0, 2.0, 3.0])) == Figure(2.0, None)
    assert median_with_noise(np.array([np.nan])) is None


def test_an_iteration_that_was_not_seen_makes_no_long_one() -> None:
    assert RunFigures("run", {}, {0: 0, 1: 10, 5: 100, 6: 112}).iteration_ns().tolist() == [10, 12]


def test_samples_are_bounded_and_sums_are_not() -> None:
    sample = Sample()
    for _ in range(5):
        sample.add(np.ones((4, MAX_SAMPLES // 2)))
    assert sample.measured().shape[1] <= MAX_SAMPLES


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
