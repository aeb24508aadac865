"""Exports: tables and columns of real ones, times that lead back to the truth, cut and missing kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulator.jobs import Row, Simulate, columns_of, exports, rows_of, truth

from ncclscope_simulator import NSYS_VERSIONS, parse_faults

_REAL = {
    "2022.4": "zy-uestc-yccl/ring4.nsys2022.sqlite",
    "2023.4": "zy-uestc-yccl/ring4.nsys2023.sqlite",
    "2024.5": "pipit/perlmutter-cloverleaf-cuda.sqlite",
    "2025.3": "nvidia-fuser/report1_ee4fcf3.sqlite",
    "2026.2": "gindachen-nsys-ai/h100_2gpu_1s.sqlite",
}
_ELSEWHERE = {"NVTX_EVENTS", "TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE"}
"""Tables that the real export of a version lacks because it is lazy; checked against another version's."""

_KERNELS = (
    "SELECT (k.globalPid >> 24) & 0xFFFFFF, k.correlationId, k.start + s.utcEpochNs, k.end + s.utcEpochNs, k.streamId,"
    " n.value, k.gridX, k.end = a.duration FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds n ON n.id = k.shortName"
    " JOIN TARGET_INFO_SESSION_START_TIME s JOIN ANALYSIS_DETAILS a WHERE n.value LIKE 'nccl%'"
)


def _kernel_rows(folder: Path) -> dict[tuple[int, int], tuple[object, ...]]:
    # A lazy export lacks the table where nothing ran.
    filled = [path for path in exports(folder) if "CUPTI_ACTIVITY_KIND_KERNEL" in columns_of(path)]
    found = [row for path in filled for row in rows_of(path, _KERNELS)]
    kernels = {(row[0], row[1]): row[2:] for row in found}
    assert len(kernels) == len(found)
    return kernels


def _expected(rows: list[Row]) -> dict[tuple[int, int], Row]:
    return {(row["pid"], row["kernel_correlation_id"]): row for row in rows if row["kernel_correlation_id"] is not None}


@pytest.mark.corpus
@pytest.mark.parametrize("version", NSYS_VERSIONS)
def test_tables_and_columns_are_those_of_a_real_export(version: str, simulate: Simulate, corpus: Path) -> None:
    real = columns_of(corpus / "nsys" / _REAL[version])
    other = columns_of(corpus / "nsys" / _REAL["2025.3"])
    for table, columns in columns_of(exports(simulate(nsys=version))[0]).items():
        known = real.get(table) or (other[table] if table in _ELSEWHERE else [])
        assert [column for column in known if column in columns] == columns, table
        if table.startswith("CUPTI"):
            assert columns == known


@pytest.mark.parametrize("version", NSYS_VERSIONS)
def test_the_metadata_table_is_the_last_and_named_by_the_version(version: str, simulate: Simulate) -> None:
    tables = list(columns_of(exports(simulate(nsys=version))[0]))
    assert tables[-1] == ("EXPORT_META_DATA" if version == "2022.4" else "META_DATA_EXPORT")


def test_correlation_ids_repeat_between_processes(simulate: Simulate) -> None:
    keys = list(_kernel_rows(simulate()))
    assert len({number for _, number in keys}) < len(keys)


def test_steps_are_marked_in_the_default_domain(simulate: Simulate) -> None:
    path = exports(simulate())[0]
    marks = rows_of(path, "SELECT text, count(*) FROM NVTX_EVENTS WHERE domainId = 0 AND eventType = 59 GROUP BY 1")
    assert marks == [("iteration 0", 4), ("iteration 1", 4)]
    assert "NVTX_EVENTS" not in columns_of(exports(simulate(nvtx=False))[0])


def test_kernels_are_cut_at_the_end_of_a_chunk_and_missing_from_the_next(simulate: Simulate) -> None:
    folder = simulate(iterations=12, chunk_seconds=0.3)
    kernels, expected = _kernel_rows(folder), _expected(truth(folder))
    assert len(exports(folder)) > 4
    assert kernels.keys() == expected.keys()
    cut = {key for key, row in expected.items() if row["kernel_cut"]}
    assert cut
    assert {key for key, found in kernels.items() if found[5]} == cut
    for key, row in expected.items():
        start, end = kernels[key][:2]
        assert start == row["start_ns"]
        assert end < row["end_ns"] if key in cut else end == row["end_ns"]


def test_a_duty_cycle_records_its_share(simulate: Simulate) -> None:
    folder = simulate(iterations=30, capture="duty:0.4", chunk_seconds=0.5)
    rows = [row for row in truth(folder) if row["launch_id"] is not None]
    assert 0.25 < sum(row["covered"] for row in rows) / len(rows) < 0.55
    assert _kernel_rows(folder).keys() == _expected(rows).keys()


def test_no_capture_writes_no_export(simulate: Simulate) -> None:
    folder = simulate(capture="none")
    assert exports(folder) == []
    assert not any(row["covered"] for row in truth(folder))


def test_lost_kernels_are_known_to_the_truth(simulate: Simulate) -> None:
    folder = simulate(faults=parse_faults(["drop_kernels:ratio=0.2"]), iterations=4)
    rows = truth(folder)
    lost = {row["launch_id"] for row in rows if row["kernel_lost"]}
    launches = {row["launch_id"] for row in rows if row["launch_id"] is not None}
    assert 0.1 < len(lost) / len(launches) < 0.3
    assert len(_kernel_rows(folder)) == len(launches) - len(lost)


def test_a_clock_step_moves_all_later_times_of_its_host(simulate: Simulate) -> None:
    folder = simulate(faults=parse_faults(["clock_step:node=1,ms=5,at=1"]), clock_drift_ppm=0.0)
    offsets = {
        iteration: {
            row["start_ns"] - row["start_true_ns"]
            for row in truth(folder)
            if row["host"] == "node01" and row["iteration"] == iteration and row["start_ns"] is not None
        }
        for iteration in (0, 1)
    }
    (before,), (after,) = offsets[0], offsets[1]
    assert after - before == 5_000_000


def test_other_kernels_lie_between_nccls(simulate: Simulate) -> None:
    path = exports(simulate())[0]
    names = {name for (name,) in rows_of(path, "SELECT value FROM StringIds WHERE value LIKE 'ampere%'")}
    streams = rows_of(
        path,
        "SELECT DISTINCT k.streamId FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds n ON n.id = k.shortName"
        " WHERE n.value LIKE 'ampere%'",
    )
    assert names
    assert streams == [(7,)]


def test_one_process_per_node_numbers_its_launches_together(simulate: Simulate) -> None:
    folder = simulate(process_per_node=True)
    rows = truth(folder)
    assert len({row["pid"] for row in rows}) == 2
    assert len({row["tid"] for row in rows}) == 16
    assert _kernel_rows(folder).keys() == _expected(rows).keys()
