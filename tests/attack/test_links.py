"""A user who may write logs puts links among them: to read, or to have destroyed, what is another's."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from agent.released_logs import SECOND, SMALL, applied, lines, op_counts, punch_or_skip, read_all

from ncclscope_agent.config import load
from ncclscope_agent.files.logs import LogFollower
from ncclscope_agent.following import followers
from ncclscope_wire.errors import ConfigError

LEDGER = b"2026-01-01,4711,a row of somebody's ledger\n" * 60_000
"""2.6 MB without a line of NCCL."""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Where victim and attacker have a folder each, on a file system with holes."""
    probe = tmp_path / "probe"
    probe.write_bytes(b"x" * 65_536)
    punch_or_skip(probe, 4096, 8192)
    (tmp_path / "logs").mkdir()
    (tmp_path / "victim").mkdir()
    return tmp_path


def release_all(follower: LogFollower) -> int:
    batches = read_all(follower)
    return follower.release(dict.fromkeys(applied(batches), 1 << 40))


def test_a_link_to_anothers_file_is_not_read_and_nothing_of_it_is_released(shared: Path) -> None:
    victim = shared / "victim" / "ledger.csv"
    victim.write_bytes(LEDGER)
    (shared / "logs" / "x.log").symlink_to(victim)
    follower = LogFollower([str(shared / "logs" / "*.log")], release_limits=SMALL)
    assert release_all(follower) == 0
    assert victim.read_bytes() == LEDGER
    assert follower.statistics().bytes_read_total == 0
    assert follower.statistics().skipped == {"file_is_a_link": 1}


@pytest.mark.parametrize("pattern", ["*.log", "*/*", "**/*.csv", "*.log/*"])
def test_a_link_to_a_folder_leads_nowhere(shared: Path, pattern: str) -> None:
    victim = shared / "victim" / "ledger.csv"
    victim.write_bytes(lines(0, 20_000))
    (shared / "logs" / "x.log").symlink_to(shared / "victim")
    follower = LogFollower([str(shared / "logs" / pattern)], release_limits=SMALL)
    assert release_all(follower) == 0
    assert victim.read_bytes() == lines(0, 20_000)
    assert follower.statistics().bytes_read_total == 0


def test_a_link_that_takes_the_place_of_a_folder_after_the_look_leads_nowhere(shared: Path) -> None:
    """The file is opened by folder after folder, none of which may be a link, and not by its whole path."""
    (shared / "victim" / "a.log").write_bytes(lines(0, 10))
    (shared / "logs" / "job").symlink_to(shared / "victim")
    follower = LogFollower([str(shared / "logs" / "*" / "a.log")])
    assert read_all(follower) == []
    assert follower.statistics().skipped["file_is_a_link"] >= 1


def test_a_file_of_another_owner_a_second_name_and_what_is_no_nccl_log_are_not_released(shared: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make files of two users")
    logs = shared / "logs"
    os.chown(logs, 65_534, 65_534)
    for name, owner in (("own", 65_534), ("foreign", 4711), ("twice", 65_534), ("ledger", 65_534), ("agents", 0)):
        (logs / f"{name}.log").write_bytes(LEDGER if name == "ledger" else lines(0, 20_000))
        os.chown(logs / f"{name}.log", owner, owner)
    os.link(logs / "twice.log", shared / "another name")
    follower = LogFollower([str(logs / "*.log")], release_limits=SMALL)
    released = release_all(follower)
    whole = {path.stem for path in logs.iterdir() if path.stat().st_blocks * 512 >= path.stat().st_size}
    assert whole == {"foreign", "twice", "ledger"}
    assert released > 0
    skipped = follower.statistics().skipped
    assert {reason: skipped[reason] for reason in ("release_not_the_owners", "release_two_names")} == {
        "release_not_the_owners": 1,
        "release_two_names": 1,
    }


def test_of_a_named_owner_nothing_but_his_files_is_released(shared: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make files of two users")
    logs = shared / "logs"
    for name, owner in (("his", 65_534), ("roots", 0)):
        (logs / f"{name}.log").write_bytes(lines(0, 20_000))
        os.chown(logs / f"{name}.log", owner, owner)
    follower = LogFollower([str(logs / "*.log")], release_limits=SMALL, release_owner=65_534)
    release_all(follower)
    whole = {path.stem for path in logs.iterdir() if path.stat().st_blocks * 512 >= path.stat().st_size}
    assert whole == {"roots"}


def test_links_are_followed_if_that_is_asked_for_and_nothing_is_released_through_them(shared: Path) -> None:
    real = shared / "victim" / "0.log"
    real.write_bytes(lines(0, 20_000))
    (shared / "logs" / "pod.log").symlink_to(real)
    follower = LogFollower([str(shared / "logs" / "*.log")], release_limits=SMALL, follow_links=True)
    batches = read_all(follower)
    assert op_counts(batches) == list(range(20_000))
    assert follower.release(dict.fromkeys(applied(batches), 1 << 40)) == 0
    assert real.read_bytes() == lines(0, 20_000)
    assert follower.statistics().skipped == {"release_link": 1}


def test_the_folder_that_the_operator_named_may_be_a_link(shared: Path) -> None:
    (shared / "logs" / "a.log").write_bytes(lines(0, 3))
    (shared / "named").symlink_to(shared / "logs")
    assert op_counts(read_all(LogFollower([str(shared / "named" / "*.log")]))) == [0, 1, 2]
    assert op_counts(read_all(LogFollower([str(shared / "named" / "a.log")]))) == [0, 1, 2]


def test_an_agent_of_root_releases_nothing_without_a_named_owner(tmp_path: Path) -> None:
    def start(**given: str) -> None:
        loaded = load({"logs": (str(tmp_path / "*.log"),), "release_logs": "yes", **given}, {}, host="h")
        with ExitStack() as resources:
            followers(loaded, resources, host="h", now_wall_ns=SECOND)

    if os.geteuid() == 0:
        with pytest.raises(ConfigError, match="--release-owner"):
            start()
    start(release_owner="nobody")
    start(release_owner="65534")
    with pytest.raises(ConfigError, match="no user 'nobody-at-all'"):
        start(release_owner="nobody-at-all")
