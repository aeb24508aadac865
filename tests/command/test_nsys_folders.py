"""Exports of nsys as folders of tables: analyze finds in them what it finds in the SQLite file of the same report."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nsys_made import nccl_export
from pyarrow import ipc

from ncclscope.discover import discover
from ncclscope.offline import OfflineRun, run_offline
from ncclscope_agent.files.recognise import FileKind
from ncclscope_service.store.settings import PipelineSettings


def as_tables(export: Path, folder: Path, *, is_parquet: bool) -> Path:
    """The folder that nsys would write of the same report."""
    folder.mkdir()
    with closing(sqlite3.connect(export)) as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in names:
            rows = database.execute(f'SELECT * FROM "{name}"')
            columns = [about[0] for about in rows.description]
            values = rows.fetchall()
            table = pa.table({column: [row[at] for row in values] for at, column in enumerate(columns)})
            if is_parquet:
                pq.write_table(table, folder / f"{name}.parquet")
            else:
                with ipc.new_stream(folder / f"{name}.arrow", table.schema) as stream:
                    stream.write_table(table)
    return folder


def analysed(*paths: Path) -> OfflineRun:
    return run_offline(list(paths), job="job", settings=PipelineSettings())


@pytest.mark.parametrize(("ending", "is_parquet"), [("_pqtdir", True), ("_arwdir", False), (".parquetdir", True)])
def test_a_folder_of_tables_gives_the_kernels_of_the_export(tmp_path: Path, ending: str, is_parquet: bool) -> None:
    export = nccl_export().write(tmp_path / "report.sqlite")
    folder = as_tables(export, tmp_path / f"other{ending}", is_parquet=is_parquet)
    whole, tables = analysed(export), analysed(folder)
    kernels = [run.pipeline.store.kernels.rows[["start_ns", "end_ns", "correlation_id"]] for run in (whole, tables)]
    assert len(kernels[0]) > 0
    assert kernels[0].tolist() == kernels[1].tolist()
    assert len(tables.pipeline.store.ranges) == len(whole.pipeline.store.ranges)


def test_a_folder_beside_its_sqlite_export_is_read_once(tmp_path: Path) -> None:
    export = nccl_export().write(tmp_path / "report.sqlite")
    as_tables(export, tmp_path / "report_pqtdir", is_parquet=True)
    found = discover([tmp_path])
    assert [each.kind for each in found.files] == [FileKind.NSYS_SQLITE]
    assert dict(found.skipped) == {"duplicate": ["report_pqtdir"]}


@pytest.mark.parametrize("is_parquet", [True, False])
def test_a_table_that_is_cut_off_is_counted_with_its_reason(tmp_path: Path, is_parquet: bool) -> None:
    export = nccl_export().write(tmp_path / "report.sqlite")
    folder = as_tables(export, tmp_path / "other_pqtdir", is_parquet=is_parquet)
    table = next(folder.glob("CUPTI_ACTIVITY_KIND_KERNEL.*"))
    table.write_bytes(table.read_bytes()[:-200])
    run = analysed(folder)
    assert dict(run.skipped) == {"unreadable_tables": ["other_pqtdir"]}
    assert run.files_read == 0
