"""What keeps logs from being released: file systems, rights, disks; told once, and nothing is lost by it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from agent.released_logs import SECOND, SMALL, applied, disk_bytes, lines, read_all
from structlog.testing import capture_logs

from ncclscope_agent.files import LogFollower
from ncclscope_agent.following import FollowedLogs
from ncclscope_agent.release import LogReleaser, refusal_of


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
