"""The spool's directory: one agent at a time, all of a job or nothing of it."""

from __future__ import annotations

import os
import resource
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent.spool_samples import frame

from ncclscope_agent.spool import Spool
from ncclscope_agent.spool_files import SpoolDirectory, SpoolInUseError
from ncclscope_agent.spool_keeper import SpoolKeeper
from ncclscope_agent.spool_limits import SpoolJob
from ncclscope_wire.errors import ConfigError


@pytest.fixture
def directory(tmp_path: Path) -> Generator[SpoolDirectory]:
    opened = SpoolDirectory(tmp_path / "spool")
    yield opened
    opened.close()


@contextmanager
def small_files() -> Generator[None]:
    """Around what is to fail and no more: what pytest itself writes to a file would fail too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_second_agent_is_told_who_has_the_directory(directory: SpoolDirectory) -> None:
    with pytest.raises(ConfigError, match=r"in use by another agent \(process \d+\)"):
        SpoolDirectory(directory.path)


def test_a_directory_that_cannot_be_made_is_a_setting_to_be_corrected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--spool: .*file/below cannot be used"):
        SpoolDirectory(tmp_path / "file" / "below")


def test_what_was_written_of_a_job_that_failed_is_taken_back(directory: SpoolDirectory) -> None:
    directory.perform(SpoolJob(appends=(("frames-0000000001-000001", b"x" * 60),)))
    with small_files(), pytest.raises(OSError, match="File too large"):
        directory.perform(SpoolJob(appends=(("chapter-000001", b"y" * 10), ("frames-0000000001-000001", b"x" * 60))))
    assert [(name, len(data)) for name, data in directory.files()] == [("frames-0000000001-000001", 60)]


def test_a_keeper_writes_in_its_thread_and_the_next_start_finds_it(tmp_path: Path) -> None:
    for number in (1, 2):
        with SpoolKeeper(Spool(agent_id="a"), SpoolDirectory(tmp_path)) as keeper:
            keeper.recover()
            assert [chapter.last for chapter in keeper.spool.chapters] == [number] * (number - 1)
            keeper.spool.begin(f"s{number}")
            for sequence in range(1, 3):
                keeper.spool.append(frame(sequence), None)
            assert keeper.flush(60.0)
            assert keeper.spool.statistics().pending_bytes == 0


def test_foreign_files_in_the_directory_are_not_read(directory: SpoolDirectory) -> None:
    (directory.path / "notes.txt").write_text("mine")
    (directory.path / "frames-0000000001-000001").mkdir()
    assert list(directory.files()) == []


def test_a_directory_that_is_removed_is_free_for_the_next_agent(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    for _ in range(2):
        opened = SpoolDirectory(path)
        opened.perform(SpoolJob(appends=(("frames-0000000001-000001", b"x"), ("chapter-000001", b"y"))))
        assert opened.remove()
        opened.close()
        assert not path.exists()


def test_what_is_left_is_opened_where_it_is_there_and_never_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        SpoolDirectory(tmp_path / "none", is_left=True)
    assert not (tmp_path / "none").exists()


def test_an_agent_that_waits_for_a_sender_gets_the_directory_that_is_there_and_not_the_one_that_was_removed(
    tmp_path: Path,
) -> None:
    """Else two could hold it at once: the one by a lock that nobody else can find."""
    path = tmp_path / "spool"
    SpoolDirectory(path).close()
    sender = SpoolDirectory(path, is_left=True)
    with ThreadPoolExecutor() as threads:
        agents = [threads.submit(_open_or_refuse, path) for _ in range(4)]
        assert not any(agent.done() for agent in agents), "they wait while it is sent"
        sender.remove()
        sender.close()
        got = [agent.result() for agent in agents]
    (held,) = [each for each in got if each is not None]
    assert (path / "lock").read_text() == str(os.getpid())
    with pytest.raises(SpoolInUseError):
        SpoolDirectory(path)
    held.close()


def test_a_directory_that_is_removed_just_as_it_is_found_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "spool"
    path.mkdir()
    make = os.mkdir

    def removed_when_found(name: str | Path, mode: int = 0o777) -> None:
        try:
            make(name, mode)
        except FileExistsError:
            os.rmdir(name)  # by a sender
            raise

    monkeypatch.setattr(os, "mkdir", removed_when_found)
    SpoolDirectory(path).close()
    assert path.is_dir()


def test_a_file_in_the_place_of_the_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "spool").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        SpoolDirectory(tmp_path / "spool")


def _open_or_refuse(path: Path) -> SpoolDirectory | None:
    try:
        return SpoolDirectory(path)
    except SpoolInUseError:
        return None


def test_links_in_a_directory_are_neither_read_nor_written_nor_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path = tmp_path / "spool"
    path.mkdir()
    (path / "frames-0000000001-000001").symlink_to(precious)
    opened = SpoolDirectory(path)
    assert list(opened.files()) == []
    assert opened.read("frames-0000000001-000001") == b""
    with pytest.raises(OSError, match="symbolic link"):
        opened.perform(SpoolJob(appends=(("frames-0000000001-000001", b"x"),)))
    assert not opened.remove()
    opened.close()
    assert precious.read_text() == "precious"
    (path / "lock").unlink(missing_ok=True)
    (path / "lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="cannot be used"):
        SpoolDirectory(path)
    assert precious.read_text() == "precious"
