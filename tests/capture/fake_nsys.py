#!/usr/bin/env python3
"""Stands in for nsys where none is installed: sessions, reports and exports as nsys 2022.4 was seen to make them.

Its sessions are folders in FAKE_NSYS_STATE. FAKE_NSYS_FAULT is a list of what goes wrong: no_version, launch_fails,
launch_hangs, launch_late, ends_before_start (the session), start_fails, stop_fails, export_empty (exit status 0 all the
same), export_fails. Every call is appended to `calls` in that folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_STATE = Path(os.environ["FAKE_NSYS_STATE"])
_FAULTS = os.environ.get("FAKE_NSYS_FAULT", "").split(",")


def main(arguments: list[str]) -> int:
    with (_STATE / "calls").open("a") as calls:
        calls.write(" ".join(arguments[:9]).replace("\n", " ") + "\n")
    if arguments == ["--version"]:
        if "no_version" in _FAULTS:
            return 1
        print(f"NVIDIA Nsight Systems version {os.environ.get('FAKE_NSYS_VERSION', '2022.4.2')}.1-df9881f")
        return 0
    return {
        "launch": launch,
        "start": start,
        "stop": stop,
        "export": export,
        "sessions": sessions,
        "shutdown": shutdown,
    }[arguments[0]](arguments[1:])


@contextmanager
def alone() -> Generator[None]:
    """Nobody else begins or ends a recording or a session meanwhile."""
    with (_STATE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def option(arguments: list[str], name: str) -> str:
    return next(each.partition("=")[2] for each in arguments if each.startswith(name + "="))


def launch(arguments: list[str]) -> int:
    if "launch_fails" in _FAULTS:
        print("Dynamic exception type: boost::filesystem::filesystem_error", file=sys.stderr)
        return 1
    if "launch_hangs" in _FAULTS or "launch_late" in _FAULTS:
        time.sleep(600 if "launch_hangs" in _FAULTS else 3)
    folder = _STATE / option(arguments, "--session-new")
    folder.mkdir()
    at = next(place for place, each in enumerate(arguments) if not each.startswith("--"))

    def end(_number: int, _frame: object) -> None:
        target.terminate()
        os._exit(0)

    # Its own handlers: the job ends, and the launcher says 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    # As nsys does: the target writes to a pipe, a program beside it copies that to where it was to go.
    tee = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    target = subprocess.Popen(arguments[at:], stdout=tee.stdin, stderr=tee.stdin, close_fds=False)
    status = target.wait()
    with alone():
        if (folder / "recording").exists():
            finish(folder)
        folder.rmdir()
    return 128 - status if status < 0 else status


def start(arguments: list[str]) -> int:
    if "start_fails" in _FAULTS:
        print("Configuring is not allowed in this state.", file=sys.stderr)
        return 1
    folder = _STATE / option(arguments, "--session")
    with alone():
        if "ends_before_start" in _FAULTS:
            shutil.rmtree(folder)
        if not folder.exists():  # it is made
            folder.mkdir()
            (folder / "made").touch()
        (folder / "recording").write_text(option(arguments, "--output"))
    return 0


def finish(folder: Path) -> None:
    Path((folder / "recording").read_text() + ".nsys-rep").write_bytes(b"a report")
    (folder / "recording").unlink()


def stop(arguments: list[str]) -> int:
    folder = _STATE / option(arguments, "--session")
    if "stop_fails" in _FAULTS:
        return 1
    with alone():
        if not (folder / "recording").exists():
            print("There are no active sessions.", file=sys.stderr)
            return 1
        finish(folder)
    return 0


def export(arguments: list[str]) -> int:
    output = Path(option(arguments, "--output"))
    if "export_fails" in _FAULTS:
        return 1
    output.touch()
    if "export_empty" in _FAULTS:
        print("database is locked", file=sys.stderr)
        return 0
    with sqlite3.connect(output) as database:
        database.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
        database.execute("CREATE TABLE filler AS SELECT zeroblob(200000)")
    database.close()
    return 0


def sessions(_: list[str]) -> int:
    print("              ID         TIME                       STATE LAUNCH NAME")
    for folder in _STATE.iterdir():
        if folder.is_dir():
            number = 1021393 if (folder / "made").exists() else 1021392
            print(f"         {number}        00:00                     Started      0 {folder.name}")
    return 0


def shutdown(arguments: list[str]) -> int:
    folder = _STATE / option(arguments, "--session")
    if not folder.exists():
        return 1
    if (folder / "made").exists():  # of others the launcher still needs the folder
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
