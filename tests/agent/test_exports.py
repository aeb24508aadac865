from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from nsys_made import EPOCH_NS, copying_nsys, nccl_export
from structlog.testing import capture_logs

from ncclscope_agent.files.exports import ExportFollower, Timing, Waiting
from ncclscope_agent.sources.nsys.export import EXPORT_END, ExportLimits
from ncclscope_wire.batch import Batch

SECOND = 1_000_000_000

WRITER = """
import sqlite3, sys
def wait(done):
    print(done, flush=True)
    sys.stdin.readline()
path = sys.argv[1]
open(path, "w").close()
wait("created")
# As nsys does: no journal, one exclusive transaction, pages written as the cache overflows, page 1 last.
database = sqlite3.connect(path, timeout=0, isolation_level=None)
database.execute("PRAGMA journal_mode = OFF")
database.execute("PRAGMA synchronous = OFF")
database.execute("PRAGMA cache_size = 10")
database.execute("BEGIN EXCLUSIVE")
wait("began")
source = sqlite3.connect(sys.argv[2])
tables = source.execute("SELECT name, sql FROM sqlite_master").fetchall()
for name, sql in sorted(tables, key=lambda table: table[0].startswith("META")):
    database.execute(sql)
    rows = source.execute(f"SELECT * FROM {name}").fetchall()
    for row in rows:
        database.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", row)
    wait(name)
database.execute("COMMIT")
database.close()
wait("committed")
"""


class Clock:
    """Polls a follower, a tenth of a second later each time."""

    def __init__(self, follower: ExportFollower) -> None:
        self.follower = follower
        self.now_ns = EPOCH_NS

    def polls(self, times: int) -> list[Batch]:
        return [batch for _ in range(times) for batch in self._poll()]

    def _poll(self) -> Iterator[Batch]:
        self.now_ns += SECOND // 10
        yield from self.follower.poll(self.now_ns)


def following(
    *directories: Path,
    applied: dict[str, int] | None = None,
    nsys: str = "/nonexistent/nsys",
    work_directory: Path | None = None,
    batch_rows: int = 10_000,
) -> Clock:
    known = applied if applied is not None else {}
    follower = ExportFollower(
        directories,
        host="this-host",
        is_applied=known.get,
        nsys=nsys,
        limits=ExportLimits(batch_rows=batch_rows),
        timing=Timing(give_up_ns=60 * SECOND),
        work_directory=work_directory,
    )
    return Clock(follower)


def below(batch: Batch) -> str:
    """The path below the followed directory, whose own name comes first."""
    return batch.source.name.partition("/")[2]


def names(batches: list[Batch]) -> list[str]:
    return [below(batch) for batch in batches if batch.is_last and not batch.gaps]


def gaps(batches: list[Batch]) -> list[tuple[str, str]]:
    return [(below(batch), gap.reason) for batch in batches for gap in batch.gaps]


def test_exports_are_read_once_each_as_they_appear(tmp_path: Path) -> None:
    clock = following(tmp_path)
    nccl_export().write(tmp_path / "chunk_1.sqlite")
    assert names(clock.polls(50)) == ["chunk_1.sqlite"]
    (tmp_path / "node-1").mkdir()
    nccl_export().write(tmp_path / "node-1" / "chunk_2.sqlite")
    assert names(clock.polls(50)) == ["node-1/chunk_2.sqlite"]
    assert clock.polls(50) == []
    assert clock.follower.statistics().read == 2


def test_an_export_is_named_with_its_directory_since_nodes_name_theirs_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in ("node01", "node02"):
        (tmp_path / node).mkdir()
        nccl_export().write(tmp_path / node / "capture_0000.sqlite")
    monkeypatch.chdir(tmp_path / "node02")
    clock = following(tmp_path / "node01", Path())
    assert {batch.source.name for batch in clock.polls(50)} == {
        "node01/capture_0000.sqlite",
        "node02/capture_0000.sqlite",
    }


def test_a_directory_that_is_not_there_is_told_once_and_once_when_it_has_come(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    clock = following(tmp_path, missing)
    with capture_logs() as logs:
        clock.polls(50)
        clock.follower.look_again()
        clock.polls(50)
        missing.mkdir()
        clock.polls(50)
    assert [line["said"] for line in logs] == [
        f"directory {missing} does not exist yet",
        f"directory {missing} is there now",
    ]


def test_of_several_exports_the_oldest_is_read_first(tmp_path: Path) -> None:
    for number, age in ((10, 2), (9, 1), (2, 3)):
        path = nccl_export().write(tmp_path / f"chunk_{number}.sqlite")
        os.utime(path, ns=(EPOCH_NS, EPOCH_NS - age * SECOND))
    assert names(following(tmp_path).polls(4)) == ["chunk_2.sqlite", "chunk_10.sqlite", "chunk_9.sqlite"]


def test_a_nudge_finds_an_export_without_waiting_for_the_next_scan(tmp_path: Path) -> None:
    clock = following(tmp_path)
    clock.polls(1)
    nccl_export().write(tmp_path / "chunk.sqlite")
    clock.follower.nudge()
    assert names(clock.polls(4)) == ["chunk.sqlite"]


def test_batches_bear_the_time_at_which_they_were_read(tmp_path: Path) -> None:
    nccl_export().write(tmp_path / "chunk.sqlite")
    clock = following(tmp_path)
    batches = clock.polls(4)
    assert {batch.observed_at_ns for batch in batches} == {EPOCH_NS + 3 * SECOND // 10}


def test_a_writer_that_is_polled_all_the_way_finishes_and_then_is_read(tmp_path: Path) -> None:
    made = nccl_export()
    for at in range(300):
        made.range("a range with a rather long text " * 8, 1000 + at, 2000 + at)
    whole = made.write(tmp_path / "whole.db")
    (tmp_path / "exports").mkdir()
    target = tmp_path / "exports" / "chunk.sqlite"
    clock = following(tmp_path / "exports")
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target), str(whole)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    seen: list[str] = []
    sizes: set[int] = set()
    with writer:
        while (step := writer.stdout.readline().strip()) and step != "committed":
            assert clock.polls(30) == []
            seen.append(step)
            sizes.add(target.stat().st_size)
            writer.stdin.write("\n")
            writer.stdin.flush()
        writer.stdin.close()
    assert writer.returncode == 0
    assert seen[:2] == ["created", "began"]
    assert len(sizes) > 2, "the writer must have been seen with parts of the file written"
    assert names(clock.polls(60)) == ["chunk.sqlite"]
    with closing(sqlite3.connect(target)) as database:
        assert database.execute("SELECT count(*) FROM NVTX_EVENTS").fetchone() == (300,)


def test_the_probe_files_of_nsys_are_counted_and_never_told(tmp_path: Path) -> None:
    clock = following(tmp_path)
    (tmp_path / "chunk.sqlite").touch()
    assert clock.polls(30) == []
    (tmp_path / "chunk.sqlite").unlink()
    assert clock.polls(30) == []
    assert clock.follower.statistics().vanished == 1


def test_a_file_that_stays_broken_is_told_once_and_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "chunk.sqlite"
    content = nccl_export().write(tmp_path / "whole.db").read_bytes()
    path.write_bytes(bytes(4096) + content[4096:])
    clock = following(tmp_path)
    assert clock.polls(500) == []
    assert gaps(clock.polls(1500)) == [("chunk.sqlite", "incomplete")]
    path.write_bytes(content)
    assert names(clock.polls(10)) == ["chunk.sqlite"]


def test_a_file_that_is_no_export_is_told_at_once_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"something else entirely" * 100)
    nccl_export().write(tmp_path / "b.sqlite")
    batches = following(tmp_path).polls(100)
    assert gaps(batches) == [("a.sqlite", "not_sqlite")]
    assert names(batches) == ["b.sqlite"]


def test_what_the_service_has_is_not_read_again(tmp_path: Path) -> None:
    nccl_export().write(tmp_path / "chunk.sqlite")
    first = following(tmp_path).polls(4)
    applied = {batch.source.key: batch.end for batch in first}
    assert set(applied.values()) == {EXPORT_END}
    again = following(tmp_path, applied=applied)
    assert again.polls(50) == []
    assert again.follower.statistics().skipped == 1


def test_a_restarted_agent_goes_on_where_the_service_is(tmp_path: Path) -> None:
    nccl_export().write(tmp_path / "chunk.sqlite")
    first = following(tmp_path, batch_rows=1).polls(4)
    assert len(first) > 3
    rest = following(tmp_path, batch_rows=1, applied={first[1].source.key: first[1].end}).polls(4)
    assert [(batch.begin, batch.end) for batch in rest] == [(batch.begin, batch.end) for batch in first[2:]]


def test_a_service_that_lost_everything_gets_everything_again(tmp_path: Path) -> None:
    nccl_export().write(tmp_path / "chunk.sqlite")
    clock = following(tmp_path)
    assert names(clock.polls(50)) == ["chunk.sqlite"]
    clock.follower.look_again()
    assert names(clock.polls(50)) == ["chunk.sqlite"]


def test_a_poll_that_is_given_up_halfway_leaves_nothing_out_after_looking_again(tmp_path: Path) -> None:
    for number in range(2):
        nccl_export().write(tmp_path / f"chunk_{number}.sqlite")
    clock = following(tmp_path)
    assert clock.polls(2) == []
    halfway = clock.follower.poll(clock.now_ns + SECOND)
    first = next(halfway)
    clock.follower.look_again()
    assert {batch.source.name for batch in halfway} == {first.source.name}
    clock.now_ns += SECOND
    assert sorted(names(clock.polls(50))) == ["chunk_0.sqlite", "chunk_1.sqlite"]


def test_an_export_that_is_written_again_is_another_export(tmp_path: Path) -> None:
    path = tmp_path / "chunk.sqlite"
    nccl_export().write(path)
    clock = following(tmp_path)
    first = clock.polls(30)
    path.unlink()
    made = nccl_export()
    made.kernel("ncclDevKernel_SendRecv", 20_000, 21_000)
    made.write(path)
    second = clock.polls(30)
    assert names(second) == ["chunk.sqlite"]
    assert second[0].source.key != first[0].source.key


def test_hidden_files_links_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / ".hidden").mkdir()
    export = nccl_export().write(tmp_path / "export.db")
    for name in (".chunk.sqlite", ".hidden/chunk.sqlite", "chunk.sqlite.tmp", "notes.txt"):
        (tmp_path / name).write_bytes(export.read_bytes())
    (tmp_path / "linked.sqlite").symlink_to(export)
    assert following(tmp_path).polls(50) == []


def test_a_directory_may_appear_later(tmp_path: Path) -> None:
    clock = following(tmp_path / "later")
    assert clock.polls(10) == []
    (tmp_path / "later").mkdir()
    nccl_export().write(tmp_path / "later" / "chunk.sqlite")
    assert names(clock.polls(50)) == ["chunk.sqlite"]


def test_reports_without_nsys_are_all_counted_and_explained_once(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"chunk_{number}.nsys-rep").write_bytes(b"a report")
    batches = following(tmp_path).polls(100)
    assert [reason for _, reason in gaps(batches)] == ["nsys_missing"] * 3
    sentences = [gap.detail for batch in batches for gap in batch.gaps if gap.detail]
    assert len(sentences) == 1
    assert "nsys export --type sqlite" in sentences[0]


def test_a_report_is_exported_after_a_while_and_its_export_read(tmp_path: Path) -> None:
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "chunk.nsys-rep").write_bytes(b"a report")
    clock = following(tmp_path / "exports", nsys=copying_nsys(tmp_path))
    assert clock.polls(40) == []
    assert not (tmp_path / "exports" / "chunk.sqlite").exists()
    assert names(clock.polls(60)) == ["chunk.sqlite"]
    assert clock.polls(60) == []


@pytest.mark.parametrize("suffix", ["", "written"])
def test_a_report_whose_export_is_there_is_not_exported(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "chunk.nsys-rep").write_bytes(b"a report")
    if suffix:
        nccl_export().write(tmp_path / "chunk.sqlite")
    else:
        (tmp_path / "chunk.sqlite").touch()  # nsys has just begun to export by itself
    batches = following(tmp_path).polls(100)
    assert gaps(batches) == []
    assert names(batches) == (["chunk.sqlite"] if suffix else [])


TIMING = Timing(settle_ns=10, longest_pause_ns=40, give_up_ns=100)


def waiting() -> Waiting:
    file = Waiting(TIMING, patience_ns=TIMING.settle_ns)
    file.see("size 1", 0)
    return file


def test_a_file_is_tried_when_it_has_settled() -> None:
    file = waiting()
    assert not file.is_due(9)
    assert file.is_due(10)


def test_a_change_starts_the_wait_anew() -> None:
    file = waiting()
    file.see("size 2", 8)
    assert not file.is_due(17)
    assert file.is_due(18)


def test_pauses_double_up_to_the_longest() -> None:
    file = waiting()
    tried = []
    for now in range(10, 200):
        if file.is_due(now):
            tried.append(now)
            file.failed("locked", now)
    assert tried == [10, 20, 40, 80, 120, 160]


def test_a_passing_reason_is_told_once_when_it_did_not_pass() -> None:
    file = waiting()
    assert [file.failed("locked", now) for now in (10, 60, 110, 150)] == [False, False, True, False]
    assert file.failed("incomplete", 160)
    assert not file.is_done


def test_a_lasting_reason_is_told_at_once_and_ends_the_wait() -> None:
    file = waiting()
    assert file.failed("not_sqlite", 10)
    assert file.is_done
    assert not file.is_due(10_000)


def test_a_file_that_was_done_is_waited_for_again_when_it_changes() -> None:
    file = waiting()
    file.failed("not_sqlite", 10)
    file.see("size 3", 20)
    assert file.is_due(30)
