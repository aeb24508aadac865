"""Segments of finished operations are whole or not there, and are numbered on."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from service.log_batches import Line, Reading, init, log_batch

from ncclscope_service.columns.table import Ids
from ncclscope_service.keep.archive import Archive
from ncclscope_service.store.tables import Store


def _store(amount: int) -> Store:
    reading = Reading()
    reading.feed(log_batch([Line(line=2 + index) for index in range(amount)], events=[init(line=1, comm_id=1)]))
    return reading.store


def _ids(begin: int, end: int) -> Ids:
    return np.arange(begin, end, dtype=np.int64)


def _lines(segment: Path) -> list[int]:
    return [int(line) for line in pq.read_table(segment, columns=["log_line"])["log_line"].to_pylist()]


def test_operations_come_back_in_the_order_in_which_they_were_appended(tmp_path: Path) -> None:
    archive, store = Archive(tmp_path / "deep" / "data"), _store(6)
    archive.append(store, _ids(0, 4))
    archive.append(store, _ids(4, 6))
    assert [path.name for path in archive.segments()] == [
        "operations-000000000000-000000000004.parquet",
        "operations-000000000004-000000000006.parquet",
    ]
    assert [_lines(path) for path in archive.segments()] == [[2, 3, 4, 5], [6, 7]]


def test_nothing_to_append_makes_no_segment(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.append(_store(1), _ids(0, 0))
    assert archive.segments() == []


def test_after_a_restart_segments_stay_and_are_numbered_on(tmp_path: Path) -> None:
    store = _store(3)
    Archive(tmp_path).append(store, _ids(0, 1))
    restarted = Archive(tmp_path)
    restarted.append(store, _ids(1, 3))
    assert [_lines(path) for path in restarted.segments()] == [[2], [3, 4]]


def test_operations_that_come_again_after_a_restart_are_not_written_twice(tmp_path: Path) -> None:
    archive, store = Archive(tmp_path), _store(6)
    archive.append(store, _ids(0, 2))
    archive.append(store, _ids(2, 5))
    again = Archive(tmp_path)
    again.append(store, _ids(0, 2))
    again.append(store, _ids(2, 4))
    again.append(store, _ids(4, 6))
    assert [_lines(path) for path in again.segments()] == [[2, 3], [4, 5], [6, 7]]


def test_a_segment_that_a_loss_of_power_emptied_is_written_again(tmp_path: Path) -> None:
    archive, store = Archive(tmp_path), _store(2)
    archive.append(store, _ids(0, 2))
    archive.sync()
    archive.segments()[0].write_bytes(b"")
    Archive(tmp_path).append(store, _ids(0, 2))
    assert [_lines(path) for path in archive.segments()] == [[2, 3]]


def test_what_the_state_still_has_is_withdrawn(tmp_path: Path) -> None:
    archive, store = Archive(tmp_path), _store(6)
    archive.append(store, _ids(0, 2))
    archive.append(store, _ids(2, 5))
    archive.remove_from(2)
    assert [_lines(path) for path in archive.segments()] == [[2, 3]]


def test_what_a_crash_left_half_written_is_no_segment_and_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "operations-00000001.part").write_bytes(b"PAR1 half of a fi")
    (tmp_path / "operations-notes.parquet.txt").touch()
    archive, store = Archive(tmp_path), _store(2)
    assert archive.segments() == []
    archive.append(store, _ids(0, 2))
    assert [_lines(path) for path in archive.segments()] == [[2, 3]]
    assert not list(tmp_path.glob("*.part"))


def test_a_write_that_fails_leaves_no_segment_and_can_be_done_again(tmp_path: Path) -> None:
    folder, store = tmp_path / "data", _store(2)
    archive = Archive(folder)
    shutil.rmtree(folder)
    with pytest.raises(OSError, match="operations-000000000000"):
        archive.append(store, _ids(0, 2))
    folder.mkdir()
    archive.append(store, _ids(0, 2))
    assert [path.name for path in archive.segments()] == ["operations-000000000000-000000000002.parquet"]


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Archive(tmp_path / "file" / "data")


def test_what_the_disk_would_not_sync_is_synced_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync, is_bad = list[str](), os.fsync, True

    def watched(descriptor: int) -> None:
        if is_bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    archive, store = Archive(tmp_path / "data"), _store(4)
    archive.append(store, _ids(0, 4))
    monkeypatch.setattr(os, "fsync", watched)
    with pytest.raises(OSError, match="Input/output error"):
        archive.sync()
    is_bad = False
    archive.sync()
    archive.sync()
    assert synced == ["operations-000000000000-000000000004.parquet", "data", "data"]
