"""The numbers behind the report's figures and tables on iterations, signatures and waiting."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs
from service.export.small_run import logs_only_run, small_run

from ncclscope_service.columns.intervals import Spans, union
from ncclscope_service.export.directory import write_run
from ncclscope_service.export.report.iterations import MAX_ITERATIONS, activity, iteration_figures, size_counts
from ncclscope_service.export.report.tables import standing_table
from ncclscope_service.export.report.timeline import kind_waits, waits
from ncclscope_service.export.selection import Selection, select
from ncclscope_service.export.tables.iterations_file import selected_iterations
from ncclscope_service.export.totals import Calls, totals
from ncclscope_service.job.iterations import ITERATION
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

MS = 1_000_000


def _iterations(store: Store, *parts: tuple[int, int, int], iterations: int = 4) -> Columns:
    """Of the first processes, each with the same (length, communication, exposed) in each iteration."""
    found: Columns = np.zeros(len(parts) * iterations, ITERATION)
    for process, (length, communication, exposed) in enumerate(parts):
        mine = found[process * iterations : (process + 1) * iterations]
        mine["process"], mine["rank"], mine["iteration"] = process, process, np.arange(iterations)
        mine["duration_ns"], mine["communication_ns"], mine["exposed_ns"] = length, communication, exposed
        mine["operations"] = 10 + process
    return found


def _figures(store: Store, iterations: Columns) -> dict[str, Any]:
    figures = iteration_figures(select(store), iterations)
    assert figures is not None
    return figures


def test_an_iteration_is_split_into_what_fills_it() -> None:
    store = small_run()
    figures = _figures(store, _iterations(store, (100 * MS, 40 * MS, 30 * MS), (100 * MS, 20 * MS, 10 * MS)))
    assert figures["lengths"] == {"exposed": [20.0] * 4, "hidden": [10.0] * 4, "other": [70.0] * 4}
    assert figures["shares"] == {"exposed": [0.3, 0.1], "hidden": [0.1, 0.1], "other": [0.6, 0.8]}
    assert figures["operations"] == [[10.0] * 4, [11.0] * 4]
    assert figures["ranks"] == ["0", "1"]


def test_what_is_not_recorded_of_an_iteration_is_not_called_idle() -> None:
    store = small_run()
    stamps = _figures(store, _iterations(store, (100 * MS, NO_TIME_NS, NO_TIME_NS)))
    assert (stamps["lengths"], stamps["shares"]) == ({"unknown": [100.0] * 4}, {"unknown": [1.0]})
    kernels = _figures(store, _iterations(store, (100 * MS, 40 * MS, NO_TIME_NS)))
    assert kernels["lengths"] == {"communication": [40.0] * 4, "other": [60.0] * 4}
    last = _iterations(store, (100 * MS, 40 * MS, 30 * MS))
    last["duration_ns"][-1] = NO_TIME_NS
    assert _figures(store, last)["lengths"]["exposed"] == [30.0] * 3 + [None]


def test_many_iterations_are_put_together_and_a_gap_stays_one() -> None:
    store = small_run()
    found = _iterations(store, (100 * MS, 40 * MS, 30 * MS), iterations=3 * MAX_ITERATIONS)
    figures = _figures(store, found[(found["iteration"] < 300) | (found["iteration"] >= 400)])
    assert figures["per_bin"] == 3
    assert len(figures["lengths"]["exposed"]) == MAX_ITERATIONS
    assert set(figures["operations"][0]) == {10.0, None}


def test_without_iterations_there_is_no_figure_of_them() -> None:
    store = small_run()
    assert iteration_figures(select(store), _iterations(store)) is None
    assert activity(select(store), _iterations(store)) is None


def test_calls_are_counted_by_rank_and_iteration() -> None:
    calls = totals(select(small_run())).calls
    assert calls["AllReduce", "TP"] == Calls(2.0, 2, 2, 2.0 * (1 << 21))
    assert {key[1] for key in calls} >= {"TP", "DP"}


def test_the_activity_of_a_kind_holds_all_of_its_kernel_time() -> None:
    selection = select(small_run())
    found = activity(selection, selected_iterations(selection))
    assert found is not None
    kinds, width = found["kinds"], found["ms_per_bin"]
    assert isinstance(kinds, dict)
    assert isinstance(width, float)
    for kind in ("TP", "DP"):
        assert sum(kinds[kind]) * width == pytest.approx(_running_ms(selection, kind), rel=0.02)


def _running_ms(selection: Selection, kind: str) -> float:
    """Time in kernels of this kind by a rank in an iteration that has a length."""
    store, rows = selection.store, selection.operations.rows
    lengths = selected_iterations(selection)
    timed = {(int(row["process"]), int(row["iteration"])) for row in lengths[lengths["duration_ns"] > 0]}
    mine = [
        (index, (int(row["process"]), int(row["iteration"])))
        for index, row in enumerate(rows)
        if row["member"] >= 0
        and store.communicators[store.members[row["member"]].communicator].parallelism == kind
        and row["start_ns"] != NO_TIME_NS
        and (int(row["process"]), int(row["iteration"])) in timed
    ]
    keys = sorted({key for _, key in mine})
    chosen = [index for index, _ in mine]
    spans = union(
        Spans(
            np.asarray([keys.index(key) for _, key in mine]),
            rows["start_ns"][chosen].astype(np.int64),
            rows["end_ns"][chosen].astype(np.int64),
        )
    )
    return float((spans.end - spans.start).sum()) / len(keys) / 1e6


def test_sizes_are_counted_by_operation_and_by_kind() -> None:
    found = size_counts(select(small_run()))
    assert found is not None
    ops, groups = found["ops"], found["groups"]
    assert isinstance(ops, dict)
    assert isinstance(groups, dict)
    for op, counts in ops.items():
        parts = [values for name, values in groups.items() if name.split()[-1] == op]
        assert np.sum(parts, axis=0).tolist() == counts


def test_waiting_is_told_by_kind_and_over_the_run() -> None:
    selection = select(small_run())
    by_kind, over_time = kind_waits(selection), waits(selection)
    assert by_kind is not None
    assert over_time is not None
    kinds, share = by_kind["kinds"], by_kind["share"]
    assert isinstance(kinds, list)
    assert isinstance(share, list)
    means = {kind: np.nanmean([np.nan if row[k] is None else row[k] for row in share]) for k, kind in enumerate(kinds)}
    assert means["TP"] > 0
    logs = select(logs_only_run(with_stamps=True))
    assert kind_waits(logs) is waits(logs) is None


def test_the_page_has_findings_first_and_numbers_tables_and_figures_in_order(tmp_path: Path) -> None:
    page = write_run(small_run(), tmp_path)["report.html"].read_text(encoding="utf-8").replace(get_plotlyjs(), "")
    titles = re.findall(r"<h2>.*?</span>(.*?)</h2>", page)
    assert titles[0] == "Findings"
    assert {"Iterations", "Who waited", "How each group communicates"} < set(titles)
    for kind in ("Table", "Figure"):
        numbers = [int(number) for number in re.findall(rf"{kind} (\d+)\.", page)]
        assert numbers == list(range(1, len(numbers) + 1))


def test_the_page_shows_groups_whose_ranks_stand_apart_and_says_so_where_all_are_even(tmp_path: Path) -> None:
    uneven, even = (
        write_run(store, tmp_path)["report.html"].read_text(encoding="utf-8").split("Where every rank stood</h2>")[1]
        for store in (small_run(), logs_only_run(with_stamps=False))
    )
    table = uneven.split("</table>")[0]
    assert table.count("<tr>") == 1 + 2
    assert table.count("0xa1") == 2
    assert even.startswith('<p class="lead">In every group, all ranks enqueued the same number')


def test_at_most_32_rows_of_standing_are_shown() -> None:
    same = {
        "job": "j",
        "parallelism": "TP",
        "sender": None,
        "receiver": None,
        "host": "h",
        "operations": 9,
        "op": "AllReduce",
        "waits_for": None,
        "blamed": [3, 4],
        "last_words": None,
    }
    rows = [
        same | {"comm_id": f"{group}", "comm_rank": rank, "rank": rank, "behind": rank * group}
        for group in reversed(range(1, 20))
        for rank in reversed(range(2))
    ]
    text = standing_table(rows, 1)
    assert text.count("<tr>") == 1 + 32
    assert re.findall(r"<code>(\d+)</code>", text)[:4] == ["19", "19", "18", "18"]
    assert "6 more rows are in last_operations.parquet" in text


def test_signatures_and_iterations_stand_in_the_page_and_logs_alone_do_not_invent_them(tmp_path: Path) -> None:
    page = write_run(small_run(), tmp_path)["report.html"].read_text(encoding="utf-8")
    table = page.split("Communication signatures")[1].split("</table>")[0]
    assert 'data-op="AllReduce"' in table
    logs = write_run(logs_only_run(with_stamps=False), tmp_path)["report.html"].read_text(encoding="utf-8")
    iterations = logs.split("</span>Iterations</h2>")[1].split("</table>")[0]
    assert "not recorded" in iterations
