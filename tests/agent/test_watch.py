from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclscope_agent.files import watch
from ncclscope_agent.files.watch import DirectoryWatch

PATIENCE_S = 60.0


def heard_of(directory: Path, act: Callable[[], object], **options: bool) -> bool:
    """Whether the watch calls back after this was done."""
    heard = threading.Event()
    with DirectoryWatch([directory], heard.set, **options):
        act()
        return heard.wait(PATIENCE_S)


def test_a_new_file_is_told(tmp_path: Path) -> None:
    assert heard_of(tmp_path, (tmp_path / "a.log").touch)


def test_a_file_that_is_moved_into_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "a.tmp").touch()
    assert heard_of(tmp_path / "d", lambda: (tmp_path / "a.tmp").rename(tmp_path / "d" / "a.sqlite"))


def test_a_deleted_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.log").touch()
    assert heard_of(tmp_path, (tmp_path / "a.log").unlink)


def test_a_file_in_a_new_folder_is_told(tmp_path: Path) -> None:
    def act() -> None:
        (tmp_path / "node-1").mkdir()
        (tmp_path / "node-1" / "a.log").touch()

    assert heard_of(tmp_path, act, recursive=True)


def test_closing_is_not_told_to_who_does_not_ask_for_it(tmp_path: Path) -> None:
    calls: list[None] = []
    with DirectoryWatch([tmp_path], lambda: calls.append(None), closing=False) as watched:
        other = tmp_path / "a.log"
        other.touch()
        heard = threading.Event()
        with DirectoryWatch([tmp_path], heard.set):
            with other.open("ab") as file:
                file.write(b"line\n")
            assert heard.wait(PATIENCE_S)
        del watched
    assert len(calls) <= 2  # of the file's creation, on itself and on its directory


def test_closing_is_told_and_writing_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.touch()
    calls: list[None] = []
    closed = threading.Event()

    def on_change() -> None:
        calls.append(None)
        closed.set()

    with DirectoryWatch([tmp_path], on_change):
        with path.open("ab", buffering=0) as file:
            for _ in range(1000):
                file.write(b"line\n")
        assert closed.wait(PATIENCE_S)
    assert len(calls) < 10


def test_a_directory_that_appears_later_is_taken_on(tmp_path: Path) -> None:
    later = tmp_path / "later"
    heard = threading.Event()
    with DirectoryWatch([later], heard.set) as watching:
        later.mkdir()
        watching.refresh()
        (later / "a.sqlite").touch()
        assert heard.wait(PATIENCE_S)


def test_a_directory_that_was_made_anew_is_taken_on_again(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    heard = threading.Event()
    with DirectoryWatch([folder], heard.set) as watching:
        folder.rename(tmp_path / "old")
        folder.mkdir()
        watching.refresh()
        heard.clear()
        (folder / "a.sqlite").touch()
        assert heard.wait(PATIENCE_S)


def test_without_watches_of_the_kernel_directories_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr("watchdog.observers.inotify.InotifyEmitter.on_thread_start", refused)
    monkeypatch.setattr(watch, "_COMPARE_EVERY_S", 0.05)
    heard = threading.Event()
    with DirectoryWatch([tmp_path], heard.set) as watching:
        assert watching.is_polling
        (tmp_path / "a.log").touch()
        assert heard.wait(PATIENCE_S)
