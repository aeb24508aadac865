"""Exports of nsys as folders of tables that are made to harm who analyzes them; what else is there is read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command.test_offline import analysed, as_tables
from nsys_made import nccl_export
from pyarrow import ipc


def _rows_without_end(folder: Path) -> None:
    """Fifty million rows of a text of 4,000 letters in some kilobytes."""
    words = pa.DictionaryArray.from_arrays(pa.array([0] * (1 << 20), pa.int8()), pa.array(["x" * 4000]))
    with pq.ParquetWriter(folder / "NVTX_EVENTS.parquet", pa.schema([("text", words.type)])) as writer:
        for _ in range(50):
            writer.write_table(pa.table({"text": words}))


def _columns_without_end(folder: Path) -> None:
    one = pa.array([1])
    pq.write_table(pa.table({f"c{number}": one for number in range(50_000)}), folder / "NVTX_EVENTS.parquet")


def _stream_that_says_more_than_it_has(folder: Path) -> None:
    path = folder / "NVTX_EVENTS.arrow"
    with ipc.new_stream(path, pa.schema([("text", pa.string())])) as stream:
        stream.write_batch(pa.record_batch({"text": ["x"] * 100_000}))
    data = bytearray(path.read_bytes())
    data[-200_000:-100_000] = b"\xff" * 100_000  # lengths of texts
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    [_rows_without_end, _columns_without_end, _stream_that_says_more_than_it_has],
    ids=lambda each: each.__name__,
)
def test_a_folder_of_tables_that_unfolds_without_end_is_left_out_and_the_next_is_read(
    tmp_path: Path, harm: object
) -> None:
    assert callable(harm)
    export = nccl_export().write(tmp_path / "report.sqlite")
    bad = as_tables(export, tmp_path / "bad_pqtdir", is_parquet=True)
    harm(bad)
    assert sum(path.stat().st_size for path in bad.iterdir()) < 30_000_000
    run = analysed(bad, export)
    assert run.skipped["unreadable_tables"] == ["bad_pqtdir"]
    assert len(run.pipeline.store.kernels) > 0
