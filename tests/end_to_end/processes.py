"""Real processes for end-to-end tests: started, watched, killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PATIENCE_SECONDS: Final = 240.0
"""What is waited for comes in a moment on a quiet machine; this is for one that is busy with much else."""
PATIENCE_MS: Final = 1000 * PATIENCE_SECONDS
"""The same for a browser."""


_OF_PROTOCOL: Final = """
import ncclscope_wire.messages
ncclscope_wire.messages.PROTOCOL_VERSION = {protocol}
from ncclscope.cli import main
main(prog_name="ncclscope")
"""
"""Set before anything else of ours is imported: all modules take it from there."""


def run_command(*arguments: str, timeout: float = 3 * PATIENCE_SECONDS) -> subprocess.CompletedProcess[str]:
    """Runs `ncclscope ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "ncclscope", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@contextlib.contextmanager
def running(
    log: Path, *arguments: str, has_children: bool = False, protocol: int | None = None
) -> Generator[subprocess.Popen[bytes]]:
    """`ncclscope ARGUMENTS` as a process that writes to `log`; killed at the end if it still runs.

    With `protocol` it is a build whose protocol has this version, and is the same otherwise.
    One that `has_children`, as the demo, is first asked to end, since nobody else would end those.
    """
    with log.open("ab") as output:
        program = ["-m", "ncclscope"] if protocol is None else ["-c", _OF_PROTOCOL.format(protocol=protocol)]
        process = subprocess.Popen([sys.executable, *program, *arguments], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if has_children and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_SECONDS)
        if process.poll() is None:
            process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Serving:
    """A service and the ports that it listens on."""

    process: subprocess.Popen[bytes]
    agents: int
    web: int


@contextlib.contextmanager
def serving(log: Path, *arguments: str) -> Generator[Serving]:
    """`ncclscope serve ARGUMENTS` on ports that the system chose, once it listens on both."""
    with running(log, "serve", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *arguments) as process:
        web = printed_port(log, r"live page +https?://127\.0\.0\.1:(\d+)/", process)
        yield Serving(process, printed_port(log, r"--connect 127\.0\.0\.1:(\d+)", process), web)


def printed_port(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> int:
    """The port that a process printed, once it did."""

    def found() -> re.Match[str] | None:
        assert process.poll() is None, log.read_text()
        return re.search(pattern, log.read_text())

    wait_for(lambda: found() is not None, f"{pattern} in {log.name}")
    match = found()
    assert match is not None
    return int(match[1])


def end(process: subprocess.Popen[bytes], *, within: float = PATIENCE_SECONDS) -> int:
    """Asks a process to end, and gives its exit status."""
    process.send_signal(signal.SIGTERM)
    return process.wait(within)


def fetch(url: str, *, timeout: float = 60) -> bytes:
    """The body behind a URL."""
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        body: bytes = answer.read()
        return body


def fetch_json(url: str) -> object:
    """The JSON document behind a URL."""
    return json.loads(fetch(url))


def wait_for(condition: Callable[[], bool], what: str, *, within: float = PATIENCE_SECONDS) -> None:
    """Waits until a condition holds; fails with what was waited for. A condition that cannot be asked yet is False."""
    until = time.monotonic() + within
    pause = 0.02
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if condition():
                return
        assert time.monotonic() < until, f"waited {within:g} s in vain for {what}"
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
