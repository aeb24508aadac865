"""The spool's directory: one agent at a time, and nothing in it that is not the spool's."""

from __future__ import annotations

import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agent.spool_samples import frame

from ncclscope_agent.spool.contents import Spool
from ncclscope_agent.spool.directory import SpoolDirectory, SpoolInUseError
from ncclscope_agent.spool.keeper import SpoolKeeper
from ncclscope_agent.spool.records import Owner
from ncclscope_wire.errors import ConfigError


@pytest.fixture
def directory(tmp_path: Path) -> Generator[SpoolDirectory]:
    opened = SpoolDirectory(tmp_path / "spool")
    yield opened
    opened.close()


def test_a_second_agent_is_told_who_has_the_directory(directory: SpoolDirectory) -> None:
    with pytest.raises(ConfigError, match=r"in use by another agent \(process \d+\)"):
        SpoolDirectory(directory.path)


def test_a_directory_that_cannot_be_made_is_a_setting_to_be_corrected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--spool: .*file/below cannot be used"):
        SpoolDirectory(tmp_path / "file" / "below")


def test_a_keeper_writes_in_its_thread_and_the_next_start_finds_it(tmp_path: Path) -> None:
    for number in (1, 2):
        with SpoolKeeper(Spool(Owner(tmp_path.name)), SpoolDirectory(tmp_path)) as keeper:
            keeper.recover()
            assert [chapter.last for chapter in keeper.spool.chapters] == [2] * (number - 1)
            keeper.spool.begin(f"s{number}")
            for sequence in range(1, 3):
                keeper.spool.append(frame(sequence, chapter=number), None)
            assert keeper.flush(60.0)
            assert keeper.spool.statistics().pending_bytes == 0


def test_the_spool_of_another_agent_is_refused(tmp_path: Path) -> None:
    with SpoolKeeper(Spool(Owner("one")), SpoolDirectory(tmp_path / "one")) as keeper:
        keeper.spool.begin("s")
        keeper.spool.append(frame(1), None)
        assert keeper.flush(60.0)
    (tmp_path / "one").rename(tmp_path / "two")
    with (
        SpoolKeeper(Spool(Owner("two")), SpoolDirectory(tmp_path / "two")) as keeper,
        pytest.raises(ConfigError, match="has the spool of the agent one"),
    ):
        keeper.recover()


def test_files_of_other_versions_are_counted_and_left_alone(tmp_path: Path) -> None:
    old = ["frames-0000000001-000001", "chapter-000001", "spool-9.sqlite"]
    for name in (*old, "notes.txt", "spool-2.sqlite"):
        (tmp_path / name).write_bytes(b"")
    directory = SpoolDirectory(tmp_path)
    assert directory.unusable_files() == {"other_version": 3}
    with SpoolKeeper(Spool(Owner(tmp_path.name)), directory) as keeper:
        keeper.recover()
        assert keeper.spool.statistics().unusable_files == {"other_version": 3}
    assert all((tmp_path / name).exists() for name in old)


def test_a_directory_that_is_removed_is_free_for_the_next_agent(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    for _ in range(2):
        opened = SpoolDirectory(path)
        for name in ("spool-2.sqlite", "spool-2.sqlite-wal", "frames-0000000001-000001", "chapter-000001"):
            (path / name).write_bytes(b"x")
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
    (path / "spool-2.sqlite").symlink_to(precious)
    opened = SpoolDirectory(path)
    assert opened.written_ns() == 0
    keeper = SpoolKeeper(Spool(Owner("spool")), opened)
    with pytest.raises(ConfigError, match="symbolic link"):
        keeper.recover()
    assert not opened.remove()
    opened.close()
    assert precious.read_text() == "precious"
    (path / "lock").unlink(missing_ok=True)
    (path / "lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="cannot be used"):
        SpoolDirectory(path)
    assert precious.read_text() == "precious"
