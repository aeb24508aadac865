"""Releasing what was applied of live logs: real files, real writers, and the refusals of a real system.

Where the file system of the temporary directory cannot punch holes, the tests of holes say so and check the refusal.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
from agent.log_samples import SOURCE, operation_line, put_together
from agent.test_session import said, streaming, welcome
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from service.loopback import Service
from structlog.testing import capture_logs
from wire.sample_batches import HELLO, log_batch

from ncclscope.agent import agent as agent_command
from ncclscope_agent.app import Agent, Followed
from ncclscope_agent.config import load
from ncclscope_agent.files import LogFollower
from ncclscope_agent.following import FollowedLogs, followers
from ncclscope_agent.link import LinkSettings
from ncclscope_agent.release import LogReleaser, data_after, punch_hole, refusal_of
from ncclscope_agent.release_plan import ByteRange, ReleaseLimits, block_bytes, pieces, releasable
from ncclscope_agent.session import Session
from ncclscope_agent.sources.nccl_log import MAX_LINE_BYTES, NcclLogReader
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import ConfigError
from ncclscope_wire.messages import Acknowledge, Position

SMALL = ReleaseLimits(keep_bytes=64 << 10, step_bytes=128 << 10, piece_bytes=96 << 10)
"""Below the defaults, so that files of some MB do for a test."""
SECOND = 1_000_000_000

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


def numbered(number: int) -> str:
    return operation_line(op_count=f"{number:x}")


def lines(first: int, count: int) -> bytes:
    return "".join(numbered(number) + "\n" for number in range(first, first + count)).encode()


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


def op_counts(batches: Sequence[Batch]) -> list[int]:
    return [int(value) for batch in batches for value in batch.operations["op_count"]]


def applied(batches: Sequence[Batch]) -> dict[str, int]:
    return {batch.source.key: batch.end for batch in batches}


def gaps(batches: Sequence[Batch]) -> list[tuple[str, int]]:
    return [(gap.reason, gap.amount) for batch in batches for gap in batch.gaps]


def disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def read_all(follower: LogFollower) -> list[Batch]:
    batches = follower.poll(SECOND)
    while follower.has_more:
        batches += follower.poll(SECOND)
    return batches


def punch_or_skip(path: Path, begin: int, end: int) -> None:
    """Punches a hole; where this file system cannot, checks that it says so, and skips."""
    refused: OSError | None = None
    handle = os.open(path, os.O_WRONLY)
    try:
        punch_hole(handle, ByteRange(begin=begin, end=end))
    except OSError as error:
        refused = error
    finally:
        os.close(handle)
    if refused is not None:
        assert refusal_of(refused).reason == "not_supported"
        pytest.skip(f"the file system of {path} cannot punch holes: {refused}; its refusal was checked")


@pytest.fixture
def punchable(tmp_path: Path) -> Path:
    """A directory whose file system can punch holes."""
    probe = tmp_path / "probe"
    probe.write_bytes(b"x" * 65_536)
    punch_or_skip(probe, 4096, 8192)
    return tmp_path


# What may go


@pytest.mark.parametrize(
    ("applied_bytes", "size", "released", "wanted"),
    [
        (0, 10_000_000, 0, None),
        (SMALL.keep_bytes + SMALL.step_bytes, 10_000_000, 0, None),  # the first block stays
        (4096 + SMALL.keep_bytes + SMALL.step_bytes, 10_000_000, 0, (4096, 4096 + SMALL.step_bytes)),
        (1_000_000, 1_000_000, 0, (4096, (1_000_000 - SMALL.keep_bytes) // 4096 * 4096)),
        (1_000_000, 1_000_000, 900_000, None),  # too little since the last time
        (1_000_000, 999_999, 0, None),  # shorter than what was read: another file
    ],
)
def test_whole_blocks_go_from_the_second_one_to_a_margin_before_what_was_applied(
    applied_bytes: int, size: int, released: int, wanted: tuple[int, int] | None
) -> None:
    found = releasable(applied=applied_bytes, size=size, released=released, block=4096, limits=SMALL)
    assert (None if found is None else (found.begin, found.end)) == wanted


@given(
    applied_bytes=st.integers(0, 1 << 40),
    beyond=st.integers(0, 1 << 30),
    released=st.integers(0, 1 << 40),
    block=st.sampled_from([4096, 12_288, 65_536, 1 << 20]),
)
def test_nothing_goes_that_is_in_the_first_block_or_not_applied(
    applied_bytes: int, beyond: int, released: int, block: int
) -> None:
    limits = ReleaseLimits()
    found = releasable(
        applied=applied_bytes, size=applied_bytes + beyond, released=released, block=block, limits=limits
    )
    if found is not None:
        assert found.begin % block == found.end % block == 0
        assert max(block, released) <= found.begin <= found.end - limits.step_bytes
        assert found.end <= applied_bytes - limits.keep_bytes
        parts = pieces(found, limits)
        assert [part.begin for part in parts] == [found.begin, *(part.end for part in parts[:-1])]
        assert parts[-1].end == found.end
        assert max(part.size for part in parts) <= limits.piece_bytes


def test_a_block_is_one_of_the_file_system_and_whole_pages() -> None:
    assert [block_bytes(told) for told in (4096, 512, 131_072, 0, 1 << 40)] == [4096, 4096, 131_072, 4096, 4096]


def test_a_hole_is_always_longer_than_the_longest_line_so_that_it_is_no_piece_of_one() -> None:
    assert ReleaseLimits().step_bytes > MAX_LINE_BYTES


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
    follower, releaser = LogFollower([str(path)]), LogReleaser(limits=SMALL)
    writer.write(0, 100)
    writer.begin(100, total - 100)
    batches: list[Batch] = []
    done: dict[str, int] = {}
    calls = 0
    while follower.statistics().lines_total < total:
        new = follower.poll(SECOND)
        batches += new
        done.update(applied(new))
        calls += follower.release(done, releaser) > 0
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
    hole = releaser.statistics().released_bytes_total
    assert content[:4096] == expected[:4096]
    assert not any(content[4096 : 4096 + hole])
    assert content[4096 + hole :] == expected[4096 + hole :]


def test_an_agent_that_starts_again_reads_on_behind_the_holes(
    punchable: Path, start_writer: Callable[[Path, str], Writer]
) -> None:
    path = punchable / "nccl.log"
    writer = start_writer(path, "w")
    writer.write(0, 10_000)
    first = LogFollower([str(path)])
    batches = read_all(first)
    assert first.release(applied(batches), LogReleaser(limits=SMALL)) > 1_000_000
    writer.write(10_000, 5_000)
    known = {batches[-1].source.key: Position(end=batches[-1].end, end_line=batches[-1].end_line)}
    second, releaser = LogFollower([str(path)], positions=known), LogReleaser(limits=SMALL)
    rest = read_all(second)
    assert op_counts(rest) == list(range(10_000, 15_000))
    assert gaps(rest) == []
    assert rest[0].operations["line"][0] == 10_001
    # It releases from where the other left off.
    assert 0 < second.release(applied(rest), releaser) < 5_000 * 240
    assert disk_bytes(path) < SMALL.keep_bytes + SMALL.step_bytes + 65_536


def test_reading_a_released_log_from_its_beginning_gives_what_is_left_and_one_gap(punchable: Path) -> None:
    path = punchable / "nccl.log"
    data = lines(0, 20_000)
    path.write_bytes(data)
    follower = LogFollower([str(path)])
    released = follower.release(applied(read_all(follower)), LogReleaser(limits=SMALL))
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


@pytest.mark.parametrize("behind", [0, 1, 4095, 50_000])
def test_a_position_that_was_released_meanwhile_leaves_a_gap_and_no_garbage(punchable: Path, behind: int) -> None:
    """The service came back with an older state than it had acknowledged."""
    path = punchable / "nccl.log"
    data = lines(0, 5_000)
    path.write_bytes(data)
    position = len(lines(0, 2_000))
    hole_end = -(-position // 4096) * 4096 + 4096 + behind // 4096 * 4096
    punch_or_skip(path, 4096, hole_end)
    probe = read_all(LogFollower([str(path)]))
    known = {probe[0].source.key: Position(end=position, end_line=2_000)}
    batches = read_all(LogFollower([str(path)], positions=known))
    first_kept = data[:hole_end].count(b"\n") + 1
    assert op_counts(batches) == list(range(first_kept, 5_000))
    assert [reason for reason, _ in gaps(batches)] == ["released"]
    assert batches[0].begin == position
    hosts = {row["host"] for row in put_together(batches).operations}
    assert hosts == {"node17"}


def test_a_log_that_was_written_anew_is_not_released(punchable: Path) -> None:
    path = punchable / "nccl.log"
    path.write_bytes(lines(0, 10_000))
    follower, releaser = LogFollower([str(path)]), LogReleaser(limits=SMALL)
    done = applied(read_all(follower))
    anew = lines(500_000, 10_000)
    path.write_bytes(anew)
    assert follower.release(done, releaser) == 0
    assert path.read_bytes() == anew


def test_only_logs_of_which_enough_was_applied_are_released(punchable: Path) -> None:
    for name in ("a.log", "b.log"):
        (punchable / name).write_bytes(lines(ord(name[0]) * 1000, 10_000))
    follower, releaser = LogFollower(["*.log"], root=punchable), LogReleaser(limits=SMALL)
    batches = read_all(follower)
    of_a = {batch.source.key: batch.end for batch in batches if batch.source.name == "a.log"}
    follower.release(of_a, releaser)
    assert disk_bytes(punchable / "a.log") < 400_000
    assert disk_bytes(punchable / "b.log") > 1_500_000


def test_a_log_that_was_renamed_or_deleted_is_released_through_its_handle(
    punchable: Path, start_writer: Callable[[Path, str], Writer]
) -> None:
    path = punchable / "nccl.log"
    writer = start_writer(path, "w")
    writer.write(0, 10_000)
    follower, releaser = LogFollower([str(path)]), LogReleaser(limits=SMALL)
    batches = read_all(follower)
    path.rename(punchable / "moved")
    path.write_bytes(b"somebody else's" * 100_000)
    assert follower.release(applied(batches), releaser) > 0
    assert disk_bytes(punchable / "moved") < 400_000
    assert path.read_bytes() == b"somebody else's" * 100_000


@pytest.mark.asyncio
async def test_an_agent_releases_what_its_service_has_acknowledged(punchable: Path) -> None:
    path, service = punchable / "nccl.log", Service()
    path.write_bytes(lines(0, 10_000))
    follower, releaser = LogFollower([str(path)]), LogReleaser(limits=SMALL)
    shrunk = anyio.Event()

    def release(done: Mapping[str, int]) -> None:
        if follower.release(done, releaser):
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
    batches = [*whole.feed(holed), *whole.flush()]
    lost = range(data[:begin].count(b"\n"), data[:end].count(b"\n") + 1)
    assert op_counts(batches) == [number for number in range(200) if number not in lost]
    assert {row["host"] for row in put_together(batches).operations} == {"node17"}
    assert [reason for reason, _ in gaps(batches)] == ["released"]

    pieced = NcclLogReader(SOURCE, max_line_bytes=max_line)
    in_pieces: list[Batch] = []
    edges = [0, *sorted(cut for cut in cuts if cut < begin), begin]
    for first, after in pairwise(edges):
        in_pieces += pieced.feed(holed[first:after])
    pieced.feed_zeros(end - begin)
    edges = [end, *sorted(cut for cut in cuts if end < cut < len(data)), len(data)]
    for first, after in pairwise(edges):
        in_pieces += pieced.feed(holed[first:after])
    in_pieces += pieced.flush()
    assert put_together(in_pieces) == put_together(batches)
    assert gaps(in_pieces) == gaps(batches)


# Refusals


def sealed_file(size: int) -> int:
    """A real file that refuses to be punched, whoever asks: *Source:* fcntl(2), file sealing."""
    handle = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.write(handle, b"x" * size)
    fcntl = pytest.importorskip("fcntl")
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    return handle


def test_a_refusal_is_told_once_counted_per_file_and_not_asked_for_again() -> None:
    releaser, asked = LogReleaser(limits=SMALL), 0

    def is_same() -> bool:
        nonlocal asked
        asked += 1
        return True

    handle = sealed_file(1_000_000)
    with capture_logs() as told:
        for key in ("a", "b", "a", "b"):
            assert releaser.release(handle, key=key, name=f"{key}.log", applied=1_000_000, is_same=is_same) == 0
    assert os.fstat(handle).st_blocks * 512 >= 1_000_000
    os.close(handle)
    assert releaser.statistics().refused == {"not_permitted": 2}
    assert releaser.statistics().released_bytes_total == 0
    assert [(entry["event"], entry["file"], entry["reason"]) for entry in told] == [
        ("logs_not_released", "a.log", "not_permitted")
    ]
    assert asked == 2


IN_A_NAMESPACE = """
import os, sys
from ncclscope_agent.files import LogFollower
from ncclscope_agent.release import LogReleaser
path = sys.argv[1]
follower, releaser = LogFollower([path]), LogReleaser()
batches = follower.poll(1)
while follower.has_more:
    batches += follower.poll(1)
before = os.stat(path).st_blocks
assert follower.release({batch.source.key: batch.end for batch in batches}, releaser) == 0
assert os.stat(path).st_blocks == before
print(releaser.statistics().refused)
"""
"""Run on a disk of its own: what a file system refuses."""


@pytest.mark.parametrize(
    ("mount", "reason"),
    [
        # ramfs has no fallocate at all.
        ("mount -t ramfs none {at} && cp {log} {at}/nccl.log", "not_supported"),
        ("mount --bind {of} {at} && mount -o remount,bind,ro {at}", "read_only"),
    ],
)
def test_a_disk_that_cannot_or_may_not_release_refuses(tmp_path: Path, mount: str, reason: str) -> None:
    disk, at = tmp_path / "disk", tmp_path / "at"
    disk.mkdir()
    at.mkdir()
    log = disk / "nccl.log"
    log.write_bytes(lines(0, 15_000))
    script = mount.format(at=at, log=log, of=disk) + f' && exec {sys.executable} -c "$0" {at}/nccl.log'
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, IN_A_NAMESPACE],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("needs unshare(1) to mount a disk of its own")
    if "Traceback" not in done.stderr and done.returncode != 0:
        pytest.skip(f"this system lets nobody mount a disk of his own: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == str({reason: 1})


def test_a_log_of_another_user_is_left_as_it_is(punchable: Path) -> None:
    path = punchable / "nccl.log"
    path.write_bytes(lines(0, 10_000))
    path.chmod(0o444)
    before = disk_bytes(path)
    follower, releaser = LogFollower([str(path)]), LogReleaser(limits=SMALL)
    batches = read_all(follower)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65_534)
    try:
        with capture_logs() as told:
            assert follower.release(applied(batches), releaser) == 0
    finally:
        if is_root:
            os.seteuid(0)
    assert releaser.statistics().refused == {"not_permitted": 1}
    assert "run it as the user of the job" in told[0]["why"]
    assert disk_bytes(path) >= before


@pytest.mark.parametrize(
    ("number", "reason", "advice"),
    [
        (errno.EOPNOTSUPP, "not_supported", "write logs to ext4"),
        (errno.EROFS, "read_only", "mount it read-write"),
        (errno.EACCES, "not_permitted", "as the user of the job"),
        (errno.EIO, "failed", "nothing more is released"),
    ],
)
def test_a_refusal_says_what_to_do(number: int, reason: str, advice: str) -> None:
    refusal = refusal_of(OSError(number, os.strerror(number)))
    assert refusal.reason == reason
    assert advice in str(refusal)


def test_where_a_hole_ends_is_known_without_reading_it(punchable: Path) -> None:
    path = punchable / "file"
    path.write_bytes(b"x" * 1_000_000)
    punch_or_skip(path, 4096, 40_960)
    handle = os.open(path, os.O_RDONLY)
    assert [data_after(handle, at) for at in (0, 4096, 8192, 40_960)] == [0, 40_960, 40_960, 40_960]
    os.ftruncate(writable := os.open(path, os.O_WRONLY), 2_000_000)
    assert data_after(handle, 1_500_000) == 2_000_000
    os.close(writable)
    os.close(handle)


# The setting


def test_releasing_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    def asked(given: dict[str, object], environment: dict[str, str]) -> bool:
        loaded = load({"logs": (str(tmp_path / "*.log"),), **given}, environment, host="h")
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


def test_the_flag_of_the_command_takes_no_value(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    path.write_bytes(lines(0, 3))
    result = CliRunner().invoke(agent_command, ["--logs", str(path), "--release-logs", "--print", "--once"])
    assert result.exit_code == 0, result.output
    assert result.output.count("AllReduce") >= 3


def test_refusals_are_among_what_the_agent_says_it_skipped(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    path.write_bytes(lines(0, 20_000))
    logs = FollowedLogs([str(path)])
    with logs.watch:
        batches = list(logs.poll(SECOND))
        while logs.has_more:
            batches += logs.poll(SECOND)
    assert "release_not_permitted" not in logs.statistics().skipped
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
