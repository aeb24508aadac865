"""Files in, a pipeline that has decided everything out: whose export it is, and which zone a log was written in."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from agent.log_samples import operation_line
from nsys_made import EPOCH_NS, MadeExport

from ncclscope import file_readers
from ncclscope.file_readers import FileEnd, FileTask, Part
from ncclscope.offline import OfflineRun, run_offline
from ncclscope_service.export.directory import content_of, write_content
from ncclscope_service.export.selection import select
from ncclscope_service.export.summary import capture_notes
from ncclscope_service.store.rows import Match
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_wire.errors import ConfigError, SourceError

_AMOUNT = 40
_PERIOD_NS = 1_000_000
_KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def _stamp(at_ns: int, zone: tzinfo) -> str:
    seconds, rest = divmod(at_ns, 1_000_000_000)
    return f"[{datetime.fromtimestamp(seconds, zone):%Y-%m-%d %H:%M:%S}.{rest:09d}] "


def _log(path: Path, *, host: str = "node1", pid: int = 100, zone: tzinfo | None = None) -> Path:
    """Forty AllReduces, a millisecond apart; stamped where a zone is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        operation_line(
            op_count=f"{k:x}",
            prefix=("" if zone is None else _stamp(EPOCH_NS + k * _PERIOD_NS + 123, zone))
            + f"{host}:{pid}:{pid + 1} [0] NCCL INFO ",
        )
        for k in range(_AMOUNT)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def _export(path: Path, *, host: str | None = None, pid: int = 100) -> Path:
    """The kernels of such a log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = MadeExport()
    made.session(host=host)
    for k in range(_AMOUNT):
        at = k * _PERIOD_NS
        made.launch(1 + k, at + 10_000, at + 12_000, pid=pid, tid=pid + 1)
        made.kernel(_KERNEL, at + 20_000, at + 200_000, pid=pid, correlationId=1 + k)
    return made.write(path)


def _run(*paths: Path, zone: str | None = None) -> OfflineRun:
    return run_offline(list(paths), job="j", settings=PipelineSettings(), log_timezone=zone)


def _hosts_of_kernels(run: OfflineRun) -> set[str]:
    store = run.pipeline.store
    return {store.processes[process].host for process in store.kernels.rows["process"].tolist()}


def _matched(run: OfflineRun) -> int:
    return int((run.pipeline.store.operations.rows["match"] == Match.MATCHED).sum())


def test_logs_and_exports_of_a_folder_meet(tmp_path: Path) -> None:
    _log(tmp_path / "nccl.log")
    _export(tmp_path / "report.sqlite", host="node1.cluster")
    run = _run(tmp_path)
    assert run.files_read == 2
    assert _hosts_of_kernels(run) == {"node1"}
    assert _matched(run) == _AMOUNT
    assert run.pipeline.store.operations.rows["finished"].all()


def test_the_host_that_an_export_records_counts_before_its_folder(tmp_path: Path) -> None:
    _log(tmp_path / "node1" / "nccl.log")
    _export(tmp_path / "node1" / "report.sqlite", host="node7")
    assert _hosts_of_kernels(_run(tmp_path)) == {"node7"}


def test_a_folder_named_like_the_host_of_a_log_names_the_host_of_its_exports(tmp_path: Path) -> None:
    for host in ("node1", "node2"):
        _log(tmp_path / "logs" / f"{host}.log", host=host)
        _export(tmp_path / host / "nsys" / "report.sqlite", pid=100 if host == "node1" else 999)
    run = _run(tmp_path)
    assert _hosts_of_kernels(run) == {"node1", "node2"}


def test_the_innermost_of_two_such_folders_counts(tmp_path: Path) -> None:
    for host in ("node1", "node2"):
        _log(tmp_path / "logs" / f"{host}.log", host=host)
    _export(tmp_path / "node1" / "node2" / "report.sqlite")
    assert _hosts_of_kernels(_run(tmp_path)) == {"node2"}


def test_the_only_log_that_knows_its_pid_names_the_host_of_an_export(tmp_path: Path) -> None:
    _log(tmp_path / "a.log", host="node1", pid=100)
    _log(tmp_path / "b.log", host="node2", pid=200)
    _export(tmp_path / "report.sqlite", pid=200)
    run = _run(tmp_path)
    assert _hosts_of_kernels(run) == {"node2"}
    assert _matched(run) == _AMOUNT


def test_a_pid_of_two_hosts_names_neither_and_the_export_stands_for_itself(tmp_path: Path) -> None:
    for host in ("node1", "node2"):
        _log(tmp_path / f"{host}.log", host=host, pid=100)
    _export(tmp_path / "report.sqlite", pid=100)
    run = _run(tmp_path)
    assert _hosts_of_kernels(run) == {"report"}
    assert _matched(run) == 0
    ((_, capture),) = run.pipeline.store.captures
    assert not capture.host_is_recorded


def test_the_zone_of_a_log_is_the_one_that_fits_the_launches(tmp_path: Path) -> None:
    _log(tmp_path / "nccl.log", zone=timezone(timedelta(hours=5, minutes=30)))
    _export(tmp_path / "report.sqlite")
    run = _run(tmp_path)
    times = run.pipeline.store.operations.rows["logged_at_ns"].tolist()
    assert times == [EPOCH_NS + k * _PERIOD_NS + 123 for k in range(_AMOUNT)]
    assert _matched(run) == _AMOUNT


def test_a_zone_that_is_given_is_believed(tmp_path: Path) -> None:
    _log(tmp_path / "nccl.log", zone=timezone(timedelta(hours=2)))
    for zone, ahead_hours in (("+02:00", 0), ("UTC", 2)):
        first = int(_run(tmp_path, zone=zone).pipeline.store.operations.rows["logged_at_ns"][0])
        assert first == EPOCH_NS + 123 + ahead_hours * 3600 * 1_000_000_000


def test_without_an_export_stamps_are_read_as_utc(tmp_path: Path) -> None:
    log = _log(tmp_path / "nccl.log", zone=UTC)
    assert int(_run(log).pipeline.store.operations.rows["logged_at_ns"][0]) == EPOCH_NS + 123


def test_a_zone_that_does_not_exist_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--log-timezone.*Mars/Olympus"):
        _run(_log(tmp_path / "nccl.log"), zone="Mars/Olympus")


def test_an_export_that_cannot_be_read_is_counted_with_its_reason_and_the_rest_is_read(tmp_path: Path) -> None:
    _log(tmp_path / "nccl.log")
    (tmp_path / "cut.sqlite").write_bytes(b"SQLite format 3\0" + bytes(4000))
    (tmp_path / "notes.txt").write_text("nothing")
    run = _run(tmp_path)
    assert run.files_read == 1
    assert len(run.pipeline.store.operations) == _AMOUNT
    broken = {reason for reason in run.skipped if reason != "not_read_unknown"}
    assert len(broken) == 1
    assert run.pipeline.store.skipped[f"file_{broken.pop()}"] == 1
    assert run.pipeline.store.skipped["file_not_read_unknown"] == 1
    assert [gap.unit for gaps in run.pipeline.store.gaps.values() for gap in gaps] == ["files"]


def _outputs(paths: Path, out: Path, *, jobs: int) -> dict[str, object]:
    """Every output: its bytes, but the table of a parquet file, whose pages arrow pads with whatever was in memory."""
    run = run_offline([paths], job="j", settings=PipelineSettings(), jobs=jobs)
    content = content_of(select(run.pipeline.store))
    written = write_content(content, out, trace_beside=jobs > 1)
    return {
        name: pq.read_table(path) if path.suffix == ".parquet" else path.read_bytes() for name, path in written.items()
    }


def test_outputs_do_not_depend_on_the_number_of_processes_that_read(tmp_path: Path) -> None:
    files = tmp_path / "files"
    for pid in (100, 200, 300):
        _log(files / f"nccl.{pid}.log", pid=pid)
        _export(files / f"{pid}.sqlite", host="node1" if pid == 100 else None, pid=pid)
    (files / "cut.sqlite").write_bytes(b"SQLite format 3\0" + bytes(4000))
    alone, together = (_outputs(files, tmp_path / f"out{jobs}", jobs=jobs) for jobs in (1, 3))
    assert alone == together
    assert isinstance(summary := alone["summary.json"], bytes)
    assert b'"matched": 120' in summary
    assert b'"file_' in summary


def test_a_process_that_dies_while_it_reads_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(task: FileTask) -> Iterator[Part]:
        if task.found.name == "b.log":
            os.kill(os.getpid(), signal.SIGKILL)
        yield FileEnd()

    for number, name in enumerate(("a.log", "b.log", "c.log")):
        _log(tmp_path / name, pid=number + 1)
    monkeypatch.setattr(file_readers, "read_file", killed)
    with pytest.raises(SourceError, match=r"b\.log.*--jobs 1"):
        run_offline([tmp_path], job="j", settings=PipelineSettings(), jobs=2)


def test_a_database_of_another_program_is_a_file_of_another_kind_and_no_loss(tmp_path: Path) -> None:
    _log(tmp_path / "nccl.log")
    with closing(sqlite3.connect(tmp_path / "tracker.sqlite")) as database:
        database.execute("CREATE TABLE experiments (name)")
        database.commit()
    run = _run(tmp_path)
    assert run.pipeline.store.skipped["file_not_nsys"] == 1
    assert run.files_read == len(run.pipeline.store.sources) == 1
    assert not any(run.pipeline.store.gaps.values())
    assert run.pipeline.store.findings == []


def test_an_export_without_kernels_says_which_option_records_them(tmp_path: Path) -> None:
    _log(tmp_path / "nccl.log")
    made = MadeExport()
    made.session(host="node1")
    made.write(tmp_path / "empty.sqlite", without=("CUPTI_ACTIVITY_KIND_KERNEL",))
    [note, *_] = capture_notes(select(_run(tmp_path).pipeline.store))
    assert note == "1 export without CUDA kernels: record with --trace=cuda,nvtx"


def test_nothing_to_read_is_a_run_without_files(tmp_path: Path) -> None:
    run = _run(tmp_path)
    assert (run.files_read, len(run.pipeline.store.operations)) == (0, 0)


def test_progress_tells_bytes_done_up_to_all(tmp_path: Path) -> None:
    _log(tmp_path / "nccl.log")
    _export(tmp_path / "report.sqlite")
    told: list[tuple[int, int, str]] = []

    def tell(done: int, total: int, name: str) -> None:
        told.append((done, total, name))

    run_offline([tmp_path], job="j", settings=PipelineSettings(), progress=tell)
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert [name for _, _, name in told] == ["nccl.log", "report.sqlite"]
    assert told[-1][:2] == (total, total)
    assert told[0][0] < total
