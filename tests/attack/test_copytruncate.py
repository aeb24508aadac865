"""Logs are emptied under their writers, as logrotate's copytruncate does: a writer that appends (PyTorch's launcher, a
shell's `>>`) begins at 0 again, NCCL, which opens its log with mode "w", goes on where it was, behind a hole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, cast

import pytest
from agent.log_samples import SOURCE, operation_line
from agent.released_logs import gaps, op_counts

from ncclscope_agent.files.logs import LogFollower
from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import Position

SECOND: Final = 1_000_000_000
MANY: Final = 1_000
"""Operations that fill many blocks of a disk."""


class Job:
    """A log, its writer, and an agent that looks four times a second."""

    def __init__(self, path: Path, mode: str) -> None:
        self.path = path
        self.file = cast(BinaryIO, path.open(mode, buffering=0))
        self.written = 0
        self.now_ns = SECOND
        self.batches: list[Batch] = []
        self.follower = LogFollower([str(path)])

    def write(self, count: int) -> None:
        numbers = range(self.written, self.written + count)
        self.written += count
        self.file.write("".join(operation_line(op_count=f"{number:x}") + "\n" for number in numbers).encode())

    def empty(self) -> None:
        os.truncate(self.path, 0)

    def look(self, seconds: float = 0.25) -> None:
        for _ in range(round(4 * seconds)):
            self.now_ns += SECOND // 4
            self.batches += self.follower.poll(self.now_ns)

    def restart_agent(self) -> None:
        self.follower = LogFollower([str(self.path)], positions={
            each.source.key: Position(
                end=each.end, end_line=each.end_line, is_complete=each.is_last, content_check=each.content_check
            )
            for each in self.batches
        })  # fmt: skip


@pytest.fixture(params=["ab", "wb"], ids=["appends", "goes on where it was"])
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(tmp_path / "nccl.log", request.param)
    yield made
    made.file.close()


@pytest.mark.parametrize("first", [3, MANY])
def test_what_is_emptied_while_its_writer_rests_loses_nothing_and_leaves_no_gap(job: Job, first: int) -> None:
    job.write(first)
    for _ in range(4):
        job.look(2.5)
        job.empty()
        job.look()
        job.write(MANY)
    job.look(40)
    assert op_counts(job.batches) == list(range(first + 4 * MANY))
    assert gaps(job.batches) == []


def test_what_a_busy_writer_wrote_since_the_last_look_is_a_gap(job: Job) -> None:
    job.write(MANY)
    job.look(0.5)
    job.write(10)
    job.empty()
    job.look()
    job.write(MANY)
    job.look(1)
    assert ("truncated", 0) in gaps(job.batches)
    read = op_counts(job.batches)
    assert read[:MANY] == list(range(MANY))
    # Behind a hole whose end nobody expected, a line may be a piece of one.
    assert read[MANY:] in (list(range(MANY + 10, 2 * MANY + 10)), list(range(MANY + 11, 2 * MANY + 10)))


def test_it_is_emptied_and_written_to_between_two_looks(job: Job) -> None:
    job.write(MANY)
    job.look(2.5)
    job.empty()
    job.write(5)
    job.look(1)
    assert op_counts(job.batches) == list(range(MANY + 5))
    assert gaps(job.batches) == []


def test_an_agent_that_begins_again_reads_on_behind_the_hole(job: Job) -> None:
    job.write(MANY)
    job.look(2.5)
    job.empty()
    job.look()
    job.write(20)
    job.look()
    job.restart_agent()
    job.write(30)
    job.look(40)
    assert op_counts(job.batches) == list(range(MANY + 50))
    assert gaps(job.batches) == []


def test_an_agent_that_comes_later_than_all_that_tells_of_what_is_gone(job: Job) -> None:
    job.write(MANY)
    job.empty()
    job.write(20)
    job.look(1)
    read = op_counts(job.batches)
    if gaps(job.batches):
        assert read == list(range(MANY + 1, MANY + 20))
        assert [reason for reason, _ in gaps(job.batches)] == ["released"]
    else:
        assert (read, job.path.read_bytes()[:1]) == (list(range(MANY, MANY + 20)), b"n")


@pytest.mark.parametrize("piece", [1, 7, 4096, 1 << 20])
def test_zeros_in_front_of_the_first_line_belong_to_none_however_they_come(piece: int) -> None:
    data = bytes(9_000) + f"{operation_line(op_count='1')}\n{operation_line(op_count='2')}\n".encode()
    reader = NcclLogReader(SOURCE)
    reader.pass_front_zeros()
    batches: list[Batch] = []
    for at in range(0, len(data), piece):
        batches += reader.ingest_bytes(data[at : at + piece])
    batches += reader.finish()
    assert op_counts(batches) == [1, 2]
    assert [line for batch in batches for line in batch.operations["line"].tolist()] == [1, 2]
    assert (batches[0].begin, batches[-1].end, reader.position) == (0, len(data), len(data))
    assert gaps(batches) == []


def test_a_file_of_zeros_alone_is_no_line() -> None:
    reader = NcclLogReader(SOURCE)
    reader.pass_front_zeros()
    batches = [*reader.ingest_bytes(bytes(9_000)), *reader.finish()]
    assert (op_counts(batches), gaps(batches), batches[-1].end, reader.line) == ([], [], 9_000, 0)
