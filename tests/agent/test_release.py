"""Releasing what was applied of live logs: real files and real writers.

Where the file system of the temporary directory cannot punch holes, the tests of holes say so and check the refusal.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
from agent.log_samples import SOURCE, operation_line, put_together
from agent.released_logs import (
    SECOND,
    SMALL,
    applied,
    disk_bytes,
    gaps,
    lines,
    op_counts,
    read_all,
)
from agent.test_session import said, streaming, welcome
from hypothesis import given, settings
from hypothesis import strategies as st
from service.loopback import Service
from structlog.testing import capture_logs
from wire.sample_batches import HELLO, log_batch

from ncclscope_agent.app import Agent
from ncclscope_agent.config import load
from ncclscope_agent.files.follower import Followed
from ncclscope_agent.files.logs import LogFollower
from ncclscope_agent.files.release import LogReleaser, ReleaseLimits, releasable
from ncclscope_agent.following import followers
from ncclscope_agent.link.network import LinkSettings
from ncclscope_agent.link.session import Session
from ncclscope_agent.sources.nccl_log.reader import MAX_LINE_BYTES, NcclLogReader
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import ConfigError
from ncclscope_wire.messages import Acknowledge, Position

WRITER = """
import sys
path, mode, line = sys.argv[1:]
with open(path, mode, buffering=1) as log:
    for command in sys.stdin:
        first, count = map(int, command.split())
        for number in range(first, first + count):
            log.write(line.format(number) + "\\n")
        print("written", flush=True)
"""
"""Writes numbered lines one by one, as NCCL does from 2.27 on: its file is line-buffered (`src/debug.cc`)."""


class Writer:
    """A process that writes a log and keeps it open."""

    def __init__(self, path: Path, mode: str) -> None:
        form = operation_line(op_count="{0:x}")
        command = [sys.executable, "-S", "-c", WRITER, str(path), mode, form]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self, first: int, count: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{first} {count}\n")
        self.process.stdin.flush()

    def wait(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "written\n"

    def write(self, first: int, count: int) -> None:
        self.begin(first, count)
        self.wait()

    def end(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture
def start_writer() -> Iterator[Callable[[Path, str], Writer]]:
    started: list[Writer] = []

    def start(path: Path, mode: str) -> Writer:
        started.append(Writer(path, mode))
        return started[-1]

    yield start
    for writer in started:
        writer.end()


# The session says what was applied


def test_only_what_the_service_acknowledged_counts_as_applied() -> None:
    session = streaming()
    batch = log_batch(0, 700)
    session.offer(batch)
    session.to_send()
    assert session.applied == {}
    session.on_bytes(said(Acknowledge(sequence=1)))
    assert session.applied == {batch.source.key: batch.end}


def test_what_the_service_has_from_the_agent_before_is_applied_too_and_a_complete_source_is_not_kept() -> None:
    session = Session(HELLO)
    session.on_connected()
    session.on_bytes(welcome(positions={"a": Position(end=5), "b": Position(end=7, is_complete=True)}))
    assert session.applied == {"a": 5}


# Live logs


@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_writer_goes_on_undisturbed_while_what_was_read_is_released(
    punchable: Path, start_writer: Callable[[Path, str], Writer], mode: str
) -> None:
    path, total = punchable / "nccl.log", 40_000
    writer = start_writer(path, mode)
    follower = LogFollower([str(path)], release_limits=SMALL)
    writer.write(0, 100)
    writer.begin(100, total - 100)
    batches: list[Batch] = []
    done: dict[str, int] = {}
    calls = released = 0
    while follower.statistics().lines_total < total:
        new = follower.poll(SECOND)
        batches += new
        done.update(applied(new))
        new_hole = follower.release(done)
        calls, released = calls + (new_hole > 0), released + new_hole
        assert writer.process.poll() is None
    writer.wait()
    writer.write(total, 10)
    batches += read_all(follower)
    expected = lines(0, total + 10)
    assert op_counts(batches) == list(range(total + 10))
    assert gaps(batches) == []
    assert calls > 1  # holes were made while it wrote
    assert path.stat().st_size == len(expected)
    assert disk_bytes(path) < SMALL.keep_bytes + SMALL.step_bytes + 65_536 < len(expected) // 10
    content = path.read_bytes()
    hole = released
    assert content[:4096] == expected[:4096]
    assert not any(content[4096 : 4096 + hole])
    assert content[4096 + hole :] == expected[4096 + hole :]


def test_an_agent_that_starts_again_reads_on_behind_the_holes(
    punchable: Path, start_writer: Callable[[Path, str], Writer]
) -> None:
    path = punchable / "nccl.log"
    writer = start_writer(path, "w")
    writer.write(0, 10_000)
    first = LogFollower([str(path)], release_limits=SMALL)
    batches = read_all(first)
    assert first.release(applied(batches)) > 1_000_000
    writer.write(10_000, 5_000)
    known = {batches[-1].source.key: Position(end=batches[-1].end, end_line=batches[-1].end_line)}
    second = LogFollower([str(path)], positions=known, release_limits=SMALL)
    rest = read_all(second)
    assert op_counts(rest) == list(range(10_000, 15_000))
    assert gaps(rest) == []
    assert rest[0].operations["line"][0] == 10_001
    # It releases from where the other left off.
    assert 0 < second.release(applied(rest)) < 5_000 * 240
    assert disk_bytes(path) < SMALL.keep_bytes + SMALL.step_bytes + 65_536


def test_reading_a_released_log_from_its_beginning_gives_what_is_left_and_one_gap(punchable: Path) -> None:
    path = punchable / "nccl.log"
    data = lines(0, 20_000)
    path.write_bytes(data)
    follower = LogFollower([str(path)], release_limits=SMALL)
    released = follower.release(applied(read_all(follower)))
    assert released > 3_500_000
    batches = read_all(LogFollower([str(path)]))
    numbers = op_counts(batches)
    first_lost = data[:4096].count(b"\n")
    first_kept = data[: 4096 + released].count(b"\n") + 1
    assert numbers == [*range(first_lost), *range(first_kept, 20_000)]
    ((reason, amount),) = gaps(batches)
    kept_bytes = len(lines(0, first_lost)) + len(lines(first_kept, 20_000 - first_kept))
    assert (reason, amount) == ("released", len(data) - kept_bytes - 1)
    assert put_together(batches).skipped == {"released": 1}
    assert batches[-1].end == len(data)
    # Nothing of the hole is read.
    again = LogFollower([str(path)])
    read_all(again)
    assert again.statistics().bytes_read_total < len(data) - released + 600_000


def test_a_log_that_was_written_anew_is_not_released(punchable: Path) -> None:
    path = punchable / "nccl.log"
    path.write_bytes(lines(0, 10_000))
    follower = LogFollower([str(path)], release_limits=SMALL)
    done = applied(read_all(follower))
    anew = lines(500_000, 10_000)
    path.write_bytes(anew)
    assert follower.release(done) == 0
    assert path.read_bytes() == anew


def test_a_log_that_was_renamed_or_deleted_is_released_through_its_handle(
    punchable: Path, start_writer: Callable[[Path, str], Writer]
) -> None:
    path = punchable / "nccl.log"
    writer = start_writer(path, "w")
    writer.write(0, 10_000)
    follower = LogFollower([str(path)], release_limits=SMALL)
    batches = read_all(follower)
    path.rename(punchable / "moved")
    path.write_bytes(b"somebody else's" * 100_000)
    assert follower.release(applied(batches)) > 0
    assert disk_bytes(punchable / "moved") < 400_000
    assert path.read_bytes() == b"somebody else's" * 100_000


@pytest.mark.asyncio
async def test_an_agent_releases_what_its_service_has_acknowledged(punchable: Path) -> None:
    path, service = punchable / "nccl.log", Service()
    path.write_bytes(lines(0, 10_000))
    follower = LogFollower([str(path)], release_limits=SMALL)
    shrunk = anyio.Event()

    def release(done: Mapping[str, int]) -> None:
        if follower.release(done):
            anyio.from_thread.run_sync(shrunk.set)

    with anyio.fail_after(60):
        async with service.listening() as port, anyio.create_task_group() as tasks:
            known = Followed(
                follower=follower,
                tick_min_seconds=0.01,
                tick_max_seconds=0.02,
                release=release,
            )
            agent = Agent(Session(HELLO), LinkSettings(host="127.0.0.1", port=port), [known], flush_seconds=60)
            tasks.start_soon(agent.run)
            await shrunk.wait()
            agent.stop()
    assert len(service.received) > 0
    assert disk_bytes(path) < 400_000


# What is left in a hole's place


@settings(max_examples=150)
@given(
    begin=st.integers(0, 30_000),
    length=st.integers(4096, 40_000),
    cuts=st.lists(st.integers(0, 60_000), max_size=4),
    max_line=st.sampled_from([2048, 8192, 65_536]),
)
def test_a_hole_anywhere_loses_the_lines_it_touches_and_invents_none(
    begin: int, length: int, cuts: list[int], max_line: int
) -> None:
    data = lines(0, 200)
    end = min(begin + length, len(data) - 300)
    holed = data[:begin] + bytes(end - begin) + data[end:]
    whole = NcclLogReader(SOURCE, max_line_bytes=max_line)
    batches = [*whole.ingest_bytes(holed), *whole.finish()]
    lost = range(data[:begin].count(b"\n"), data[:end].count(b"\n") + 1)
    assert op_counts(batches) == [number for number in range(200) if number not in lost]
    assert {row["host"] for row in put_together(batches).operations} == {"node17"}
    assert [reason for reason, _ in gaps(batches)] == ["released"]

    pieced = NcclLogReader(SOURCE, max_line_bytes=max_line)
    in_pieces: list[Batch] = []
    edges = [0, *sorted(cut for cut in cuts if cut < begin), begin]
    for first, after in pairwise(edges):
        in_pieces += pieced.ingest_bytes(holed[first:after])
    pieced.ingest_zeros(end - begin)
    edges = [end, *sorted(cut for cut in cuts if end < cut < len(data)), len(data)]
    for first, after in pairwise(edges):
        in_pieces += pieced.ingest_bytes(holed[first:after])
    in_pieces += pieced.finish()
    assert put_together(in_pieces) == put_together(batches)
    assert gaps(in_pieces) == gaps(batches)


PAGE = 4096


@given(
    applied_bytes=st.integers(0, 1 << 40),
    beyond=st.integers(-(1 << 20), 1 << 30),
    released=st.integers(0, 1 << 40),
    block=st.sampled_from([0, 512, 4096, 12_288, 1 << 20, 1 << 40]),
)
def test_only_whole_blocks_go_that_are_applied_and_neither_first_nor_last(
    applied_bytes: int, beyond: int, released: int, block: int
) -> None:
    limits = ReleaseLimits()
    size = max(0, applied_bytes + beyond)
    status = os.stat_result((0,) * 6 + (size,) + (0,) * 3 + (0.0,) * 3 + (0,) * 3 + (block, 0, 0))
    begin, end = releasable(applied_bytes, status, released, limits)
    if end - begin >= limits.step_bytes:
        assert applied_bytes <= size, "a shorter file is another one"
        assert begin % PAGE == end % PAGE == 0
        assert begin >= max(PAGE, released)
        assert end <= applied_bytes - limits.keep_bytes
    assert limits.step_bytes > MAX_LINE_BYTES, "a hole is never a piece of a line"


# Refusals


def sealed_file(size: int) -> int:
    """A real file that refuses to be punched, whoever asks: *Source:* fcntl(2), file sealing."""
    handle = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.write(handle, b"x" * size)
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    return handle


def test_a_refusal_is_told_once_counted_per_file_and_not_asked_for_again() -> None:
    releaser, handle = LogReleaser(limits=SMALL), sealed_file(1_000_000)
    with capture_logs() as told:
        for key in ("a", "b", "a", "b"):
            given = releaser.release(
                handle, key=key, name=f"{key}.log", applied=1_000_000, folder_owner=os.geteuid(), is_same=lambda: True
            )
            assert given == 0
    assert os.fstat(handle).st_blocks * 512 >= 1_000_000
    os.close(handle)
    assert releaser.refused == {"not_permitted": 2}
    assert [(entry["event"], entry["file"], entry["reason"]) for entry in told] == [
        ("logs_not_released", "a.log", "not_permitted")
    ]


def test_refusals_are_among_what_the_agent_says_it_skipped(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    path.write_bytes(lines(0, 20_000))
    logs = LogFollower([str(path)])
    batches = read_all(logs)
    path.chmod(0o444)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65_534)
    try:
        logs.release(applied(batches))
    finally:
        if is_root:
            os.seteuid(0)
    assert logs.statistics().skipped["release_not_permitted"] == 1


# The setting


def test_releasing_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    def asked(given: dict[str, object], environment: dict[str, str]) -> bool:
        named = {"logs": (str(tmp_path / "*.log"),), "release_owner": str(os.geteuid())}
        loaded = load({**named, **given}, environment, host="h")
        with ExitStack() as resources:
            (known,) = followers(loaded, resources, host="h", now_wall_ns=SECOND)
        assert (known.release is not None) is loaded.release_logs
        return loaded.release_logs

    assert not asked({}, {})
    assert asked({"release_logs": "yes"}, {})
    assert asked({"release_logs": None}, {"NCCLSCOPE_RELEASE_LOGS": "true"})
    assert not asked({}, {"NCCLSCOPE_RELEASE_LOGS": "no"})
    with pytest.raises(ConfigError, match="--release-logs: 'perhaps' is neither yes nor no"):
        asked({}, {"NCCLSCOPE_RELEASE_LOGS": "perhaps"})
