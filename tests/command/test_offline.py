"""Files in, a pipeline that has decided everything out: whose export it is, and which zone a log was written in."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agent.log_samples import operation_line
from nsys_made import EPOCH_NS, MadeExport, nccl_export
from pyarrow import ipc

from ncclscope import file_readers
from ncclscope.discover import FoundFile, discover
from ncclscope.file_readers import FileEnd, FileTask, Part
from ncclscope.job_split import jobs_of_files
from ncclscope.offline import OfflineRun, run_offline
from ncclscope_agent.files.recognise import FileKind
from ncclscope_service.export.directory import content_of, write_content
from ncclscope_service.export.selection import select
from ncclscope_service.export.summary import capture_notes
from ncclscope_service.export.terminal import terminal_report
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


def _init(rank: int, nranks: int, *, comm_id: str | None = None, host: str = "node1", pid: int = 100) -> str:
    named = "" if comm_id is None else f" commId {comm_id}"
    return (
        f"{host}:{pid + rank}:{pid + rank + 1} [{rank}] NCCL INFO comm 0x55{rank:02x} rank {rank} nranks {nranks} "
        f"cudaDev {rank} busId {0x1000 * (rank + 1):x}{named} - Init COMPLETE\n"
    )


def _jobs(folder: Path) -> list[str]:
    found: list[FoundFile] = discover([folder]).files
    return list(jobs_of_files(found, job="j").values())


def test_two_files_that_hold_a_whole_job_each_are_two_jobs(tmp_path: Path) -> None:
    for name, comm_id, pid in (("a.log", "0xa1", 100), ("b.log", "0xb2", 200)):
        (tmp_path / name).write_text("".join(_init(rank, 2, comm_id=comm_id, pid=pid) for rank in range(2)))
    assert _jobs(tmp_path) == ["j-1", "j-2"]
    store = run_offline([tmp_path], job="j", settings=PipelineSettings()).pipeline.store
    assert store.process_job == ["j-1", "j-1", "j-2", "j-2"]
    assert [member.global_rank for member in store.members] == [0, 1, 0, 1]
    assert "jobs        j-1 (2 processes on 1 host), j-2 (2 processes on 1 host)" in terminal_report(select(store))


def test_logs_of_the_ranks_of_one_communicator_are_one_job_and_stay_so_beside_another(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"a{rank}.log").write_text(_init(rank, 2, comm_id="0xa1"))
    assert _jobs(tmp_path) == ["j", "j"]
    (tmp_path / "b.log").write_text("".join(_init(rank, 4, host="node2") for rank in range(4)))
    assert _jobs(tmp_path) == ["j-1", "j-1", "j-2"]


def test_files_of_one_process_are_of_its_job_whatever_communicators_they_name(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("".join(_init(rank, 2, comm_id="0xa1") for rank in range(2)))
    (tmp_path / "a.log.1").write_text("".join(_init(rank, 2, comm_id="0xb2") for rank in range(2)))
    assert _jobs(tmp_path) == ["j", "j"]


def test_what_is_not_whole_may_be_a_part_of_one_job(tmp_path: Path) -> None:
    for name, first in (("a.log", 0), ("b.log", 2)):  # NCCL before 2.16, a file for each host
        lines = (_init(rank, 4, host=name[0], pid=100 * first + 100) for rank in (first, first + 1))
        (tmp_path / name).write_text("".join(lines))
    assert _jobs(tmp_path) == ["j", "j"]


def test_dumps_of_inspector_are_tied_by_their_communicators(tmp_path: Path) -> None:
    for name, comm_id, rank in (("a0", "0xa1", 0), ("a1", "0xa1", 1), ("b0", "0xb2", 0), ("b1", "0xb2", 1)):
        (tmp_path / f"{name}.log").write_text(
            f'{{"header":{{"id":"{comm_id}","rank":{rank},"n_ranks":2,"nnodes":1}},"metadata":'
            f'{{"inspector_output_format_version":"v4.0","git_rev":"","hostname":"{name}","pid":7}}}}\n'
        )
    assert _jobs(tmp_path) == ["j-1", "j-1", "j-2", "j-2"]


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
