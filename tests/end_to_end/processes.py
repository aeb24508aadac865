"""Real processes for end-to-end tests: started, watched, killed."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path


def run_command(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs `ncclscope ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "ncclscope", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@contextlib.contextmanager
def running(log: Path, *arguments: str, has_children: bool = False) -> Generator[subprocess.Popen[bytes]]:
    """`ncclscope ARGUMENTS` as a process that writes to `log`; killed at the end if it still runs.

    One that `has_children`, as the demo, is first asked to end, since nobody else would end those.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ncclscope", *arguments], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        if has_children and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        if process.poll() is None:
            process.kill()
        process.wait()


def end(process: subprocess.Popen[bytes], *, within: float = 60) -> int:
    """Asks a process to end, and gives its exit status."""
    process.send_signal(signal.SIGTERM)
    return process.wait(within)


def fetch(url: str, *, timeout: float = 30) -> bytes:
    """The body behind a URL."""
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        body: bytes = answer.read()
        return body


def fetch_json(url: str) -> object:
    """The JSON document behind a URL."""
    return json.loads(fetch(url))


def wait_for(condition: Callable[[], bool], what: str, *, within: float = 120) -> None:
    """Waits until a condition holds; fails with what was waited for. A condition that cannot be asked yet is False."""
    until = time.monotonic() + within
    pause = 0.02
    while True:
        with contextlib.suppress(OSError):
            if condition():
                return
        assert time.monotonic() < until, f"waited {within:g} s in vain for {what}"
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
